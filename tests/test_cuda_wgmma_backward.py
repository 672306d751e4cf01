"""The backward for Hopper on the CPU: configs and masks, walks of few steps, what it launches, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_runs import on_cpu
from gradient_checks import check, make_tensors

from multiattn.cuda import BACKEND
from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of, numbers_of
from multiattn.cuda.variants import BACKWARD_VARIANTS
from multiattn.packed import RAGGED_ROWS, PackingSpec
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import Plan, make_plan
from multiattn.problem import Problem

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


def check_on_cpu(tensors, *, config=None, dlse=None, **options):
    """The gradients of q, k, v and dout, emulated, are as right as parity asks."""
    q, k, v, dout = tensors
    check(plan_of(Problem.of(q, k, v, **options), config, arch=CPU), q, k, v, dout, dlse)


# ---------------------------------------------------------------- emulated


@on_cpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 5)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        pytest.param(8, EARLY, id="d8"),
        pytest.param(40, EARLY, id="d40"),
        pytest.param(40, replace(PLAIN, half_dq=True, dq_by_tma=True), id="d40_by_tma"),
        pytest.param(64, EARLY, id="d64"),
        pytest.param(64, KEPT, id="d64_kept"),
        pytest.param(64, replace(EARLY, k_in_registers=False, dq_by_tma=True), id="d64_early_by_tma"),
        pytest.param(64, replace(HALVES, q_stages=2, dout_stages=1), id="d64_few_buffers"),
        pytest.param(72, replace(PLAIN, k_stages=2), id="d72"),
        pytest.param(72, replace(PLAIN, dq_by_tma=True), id="d72_by_tma"),
        pytest.param(96, replace(PLAIN, dq_by_tma=True), id="d96"),
        pytest.param(104, HALVES_BY_TMA, id="d104"),
        pytest.param(128, HALVES_BY_TMA, id="d128"),
        pytest.param(128, HALVES, id="d128_from_registers"),
    ],
)
def test_it_computes_what_the_formulas_do(head_dim, config, options):
    check_on_cpu(
        make_tensors(heads_q=4, heads_kv=2, seq_q=150, seq_kv=200, head_dim=head_dim), config=config, **options
    )


@on_cpu
@pytest.mark.parametrize(
    ("seq_q", "seq_kv"), [(1, 1), (64, 256), (320, 64), (70, 20), (300, 40)], ids=lambda length: str(length)
)
@pytest.mark.parametrize("config", [KEPT, HALVES, EARLY], ids=["kept", "halves", "early"])
def test_walks_of_few_steps_follow_one_another(seq_q, seq_kv, config):
    """A block has several tiles of keys, whose loads overlap: some are seen by one tile of queries, some by none."""
    tensors = make_tensors(batch=2, heads_q=6, heads_kv=2, seq_q=seq_q, seq_kv=seq_kv, head_dim=64)
    check_on_cpu(tensors, config=config, causal=True)


@on_cpu
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (30, 5)}, {"window": (0, 0)}, {"window": (100, 70)}, {"window": (3, 90)}],
    ids=str,
)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(320, 320), (290, 250), (70, 330), (330, 70)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        pytest.param(64, EARLY, id="early"),
        pytest.param(64, HALVES_BY_TMA, id="halves"),
        pytest.param(72, replace(PLAIN, dq_by_tma=True), id="from_the_last_queries_on"),
    ],
)
def test_a_warpgroup_leaves_out_queries_that_see_none_of_its_keys(seq_q, seq_kv, head_dim, config, options):
    """A query head has keys of its own: half of a tile may be hidden from its first queries, or its last."""
    tensors = make_tensors(heads_q=2, heads_kv=2, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim)
    check_on_cpu(tensors, config=config, **options)


@on_cpu
def test_the_gradient_of_lse_is_part_of_delta():
    tensors = make_tensors(seq_q=100, seq_kv=130, head_dim=64)
    dlse = torch.randn(1, 2, 100, generator=torch.Generator().manual_seed(0))
    check_on_cpu(tensors, dlse=dlse, causal=True)


@on_cpu
@pytest.mark.parametrize("scale", [0.0, -0.2], ids=str)
def test_a_scale_may_be_zero_or_negative(scale):
    check_on_cpu(make_tensors(seq_q=70, seq_kv=90, head_dim=64), scale=scale)


@on_cpu
def test_fp16():
    check_on_cpu([it.half() for it in make_tensors(seq_q=70, seq_kv=90, head_dim=64)], causal=True)


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


@pytest.mark.parametrize(
    ("head_dim", "config", "allowed"),
    [
        (128, PLAIN, "half_dq"),
        (128, replace(HALVES, v_in_registers=True), "up to 176"),
        (96, KEPT, "up to 152"),
        (96, EARLY, "up to 176"),
        (72, replace(PLAIN, early_scores=True), "half_dq"),
        (128, replace(HALVES_BY_TMA, k_stages=2), "232448 bytes a block on sm90"),
        (64, replace(KEPT, tile_m=32), "64"),
        (64, replace(KEPT, tile_n=64), "128"),
        (64, replace(KEPT, k_stages=3), "1, 2"),
        (64, replace(KEPT, q_stages=1), "2 to 8"),
        (128, replace(HALVES, q_stages=6), "232448 bytes a block on sm90"),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_what_can(head_dim, config, allowed):
    reasons = config.why_not(problem_of(head_dim), SM90)
    assert any(allowed in reason.allowed for reason in reasons), reasons


def test_tensors_that_a_tensor_map_cannot_walk_are_refused():
    problem = Problem.contiguous(
        batch=1, heads_q=1, seq_q=RAGGED_ROWS + 1, head_dim=64, packing=PackingSpec(1), dtype="bf16"
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
