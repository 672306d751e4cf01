"""The backward for Hopper: what it launches, and what it refuses. Parity has the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiattn.cuda import BACKEND
from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of, numbers_of
from multiattn.cuda.variants import BACKWARD_VARIANTS
from multiattn.packed import RAGGED_ROWS
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
WGMMA = BACKWARD_VARIANTS[0]
PLAIN = WgmmaBackwardConfig(tile_m=64, tile_n=128)
KEPT = replace(PLAIN, k_in_registers=True, v_in_registers=True, k_stages=2)
HALVES = replace(PLAIN, half_dq=True, dout_stages=3)
EARLY = replace(PLAIN, k_in_registers=True, early_scores=True, k_stages=2)
HALVES_BY_TMA = replace(PLAIN, half_dq=True, dq_by_tma=True)


def plan_of(problem: Problem, config: WgmmaBackwardConfig | None = None, *, arch=SM90) -> Plan:
    """A Plan of the variant."""
    return make_plan(BACKEND, problem, arch, direction="backward", variant=WGMMA.name, config=config, probe=False)


# ---------------------------------------------------------------- launches


def problem_of(head_dim: int = 128, **sizes) -> Problem:
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, **sizes}
    return Problem.contiguous(head_dim=head_dim, **given)


def test_three_kernels_follow_one_another_and_the_middle_one_is_persistent():
    launches = launches_of(plan_of(problem_of()))
    assert [it.kernel.entry for it in launches] == ["prepare_statistics", "backward_wgmma", "convert_sums"]
    assert all(it.kernel.overlaps for it in launches)
    assert [it.is_persistent for it in launches] == [False, True, False]
    assert launches[1].blocks == 2 * 2 * 4


def test_a_config_and_a_problem_have_a_kernel_of_their_own():
    """Two kernels of one name would be one in a profile, and in a library."""
    plans = [
        plan_of(problem_of(head_dim, causal=causal, dtype=dtype), config)
        for head_dim, configs in ((64, (KEPT, PLAIN, HALVES, EARLY)), (128, (HALVES, HALVES_BY_TMA)))
        for config in configs
        for causal in (False, True)
        for dtype in ("bf16", "fp16")
    ]
    kernels = [launches_of(plan)[1].kernel for plan in plans]
    assert len({it.name for it in kernels}) == len({it.traits for it in kernels}) == len(plans)


def test_workspace_is_four_bytes_an_element_of_q_and_eight_a_query():
    """Beside what tiles that are not full round up to, and a counter."""
    problem = problem_of(seq_q=512, seq_kv=512)
    queries = problem.batch * problem.heads_q * problem.seq_q
    areas = areas_of(plan_of(problem))
    assert sum(areas.values()) - areas["workspace"] == queries * (4 * problem.head_dim + 8)


def test_each_kernel_is_told_where_its_tensors_are():
    plan = plan_of(problem_of())
    prepare, keys, convert = (argument_of(it.kernel, plan) for it in launches_of(plan))
    assert {it.tensor for it in keys.maps.values()} == {"q", "k", "v", "dout"}
    assert {"statistics", "workspace", "dq_sum"} <= set(prepare.pointers.values())
    assert not convert.maps
    assert "delta" not in keys.pointers.values()  # it is among the statistics


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "batch", "seq", "heads"),
    [
        pytest.param(16, 16, 4, 4096, 4, id="one_query_head_a_key_head"),
        pytest.param(16, 2, 4, 4096, 8, id="all_heads_in_one_section"),
        pytest.param(16, 4, 5, 4096, 10, id="two_sections_of_one_size"),
        pytest.param(16, 1, 1, 4096, 1, id="no_more_than_there_are"),
        pytest.param(16, 8, 4, 128, 32, id="short_sequences"),
    ],
)
def test_a_section_of_large_groups_has_tiles_for_all_blocks(heads_q, heads_kv, batch, seq, heads):
    given = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq, "seq_kv": seq}
    assert numbers_of(plan_of(problem_of(**given, causal=True), HALVES))["sections_kv"] == heads
    by_cache = max(1, (16 << 20) // (seq * 128 * 8 * heads_q // heads_kv))  # L2 alone decides where tiles are alike
    assert numbers_of(plan_of(problem_of(**given), HALVES))["sections_kv"] == min(by_cache, batch * heads_kv)


# ---------------------------------------------------------------- refusals


def test_tensors_that_a_tensor_map_cannot_walk_are_refused():
    problem = Problem.contiguous(
        batch=1, heads_q=1, seq_q=RAGGED_ROWS + 1, head_dim=64, batching=Batching.packed(1), dtype="bf16"
    )
    assert any("packed batch" in reason.got for reason in KEPT.why_not(problem, SM90))


def test_what_it_does_not_take_runs_in_two_passes():
    wide = make_plan(BACKEND, problem_of(192), SM90, direction="backward", probe=False)
    assert wide.variant == "wgmma_two_pass"
    assert any("wgmma" in reason for reason in wide.rejected)
    for length, variant in ((500, "wgmma_two_pass"), (2000, "wgmma")):
        problem = problem_of(128, seq_q=length, seq_kv=length)
        assert make_plan(BACKEND, problem, SM90, direction="backward", probe=False).variant == variant


def test_the_rules_fit():
    for rule in WGMMA.rules:
        for head_dim in range(8, min(rule.head_dim_max, 128) + 8, 8):
            if head_dim >= rule.head_dim_min:
                assert not rule.config.why_not(problem_of(head_dim), SM90)
