"""Hopper's backward in two passes: choice, launches, refusals. Parity has the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from multiattn.cuda import BACKEND
from multiattn.cuda.backward_wgmma_two_pass import WgmmaTwoPassConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of
from multiattn.operands import Operands, Options, with_score
from multiattn.packed import RAGGED_ROWS
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, find_variant, make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
VARIANT = find_variant(BACKEND, "wgmma_two_pass", "backward")
PLAIN = WgmmaTwoPassConfig(tile_m=64, tile_n=64)
DEEP = replace(PLAIN, q_stages=3, dout_stages=3, k_stages=3, v_stages=2)
KEPT = replace(DEEP, kv_in_registers=True)
AHEAD = replace(DEEP, ahead=True, dq_ahead=True)


def plan_of(problem: Problem, config: WgmmaTwoPassConfig | None = None, *, arch=SM90) -> Plan:
    """A Plan of the variant."""
    return make_plan(BACKEND, problem, arch, direction="backward", variant=VARIANT.name, config=config, probe=False)


# ---------------------------------------------------------------- expressions


def modified(head_dim: int, *, wants_gradient: bool = False) -> Problem:
    """Scores with a bias."""
    q, k, v = (torch.zeros(1, 2, 48, head_dim, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.zeros(1, 2, 48, 48, requires_grad=wants_gradient)
    return Problem.of_operands(*with_score(Operands(q, k, v), Options(), 5.0, None, bias, None))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_is_the_one_for_expressions_without_gradients(head_dim, deterministic):
    options = {"direction": "backward", "deterministic": deterministic, "probe": False}
    assert make_plan(BACKEND, modified(head_dim), SM90, **options).variant == VARIANT.name


def test_gradients_of_captured_tensors_are_refused():
    problem = modified(64, wants_gradient=True)
    assert make_plan(BACKEND, problem, SM90, direction="backward", probe=False).variant == "atomic"
    assert [it.code for it in VARIANT.capability.why_not(problem, SM90)] == ["score_gradient"]


def test_a_bias_has_configs_of_its_own_where_registers_are_few():
    configs = [plan_of(modified(head_dim)).config for head_dim in (160, 192, 224, 256)]
    assert [(it.kv_in_registers, it.dp_late) for it in configs] == [
        *((True, False), (False, False), (False, False), (False, True)),
    ]
    assert any(it.dp_late for it in BACKEND.backward.candidates(VARIANT, modified(256), SM90))


# ---------------------------------------------------------------- launches


def problem_of(head_dim: int = 256, **sizes) -> Problem:
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, **sizes}
    return Problem.contiguous(head_dim=head_dim, **given)


def test_two_persistent_kernels_follow_that_of_statistics():
    launches = launches_of(plan_of(problem_of()))
    entries = ["prepare_statistics", "backward_wgmma_queries", "backward_wgmma_keys"]
    assert [it.kernel.entry for it in launches] == entries
    assert all(it.kernel.overlaps for it in launches)
    assert [it.is_persistent for it in launches] == [False, True, True]
    assert [it.blocks for it in launches] == [2 * 4 * 3, 2 * 4 * 3, 2 * 2 * 8]


def test_blocks_add_nothing_up_in_memory():
    """That is why the same bits come each time."""
    plan = plan_of(problem_of())
    assert set(areas_of(plan)) == {"statistics", "workspace"}
    assert not any("dq_sum" in argument_of(it.kernel, plan).pointers.values() for it in launches_of(plan))


def test_a_config_and_a_problem_have_kernels_of_their_own():
    """Two kernels of one name would be one in a profile, and in a library."""
    plans = [
        plan_of(problem_of(head_dim, causal=causal, dtype=dtype), config)
        for head_dim, configs in ((192, (DEEP, KEPT, AHEAD, PLAIN)), (256, (PLAIN,)))
        for config in configs
        for causal in (False, True)
        for dtype in ("bf16", "fp16")
    ]
    kernels = {it.kernel for plan in plans for it in launches_of(plan)}
    assert len({it.name for it in kernels}) == len({(it.entry, it.traits) for it in kernels}) == len(kernels)


def test_workspace_is_eight_bytes_a_query():
    """Beside what tiles that are not full round up to, and counters."""
    problem = problem_of(seq_q=512, seq_kv=512)
    areas = areas_of(plan_of(problem))
    assert sum(areas.values()) - areas["workspace"] == problem.batch * problem.heads_q * problem.seq_q * 8


def test_each_kernel_is_told_where_its_tensors_are():
    plan = plan_of(problem_of())
    prepare, queries, keys = (argument_of(it.kernel, plan) for it in launches_of(plan))
    for kernel in (queries, keys):
        assert {it.tensor for it in kernel.maps.values()} == {"q", "k", "v", "dout"}
    pointers = set(prepare.pointers.values())
    assert {"statistics", "workspace"} <= pointers
    assert not {"dq_sum", "delta"} & pointers


def test_it_is_the_deterministic_one_and_the_one_for_wide_heads():
    assert VARIANT.deterministic
    for deterministic in (False, True):
        plan = make_plan(BACKEND, problem_of(192), SM90, direction="backward", deterministic=deterministic, probe=False)
        assert plan.variant == VARIANT.name
    long = problem_of(128, seq_q=2000, seq_kv=2000)
    for deterministic, name in ((False, "wgmma"), (True, VARIANT.name)):
        plan = make_plan(BACKEND, long, SM90, direction="backward", deterministic=deterministic, probe=False)
        assert plan.variant == name


# ---------------------------------------------------------------- refusals


def test_tensors_that_a_tensor_map_cannot_walk_are_refused():
    problem = Problem.contiguous(
        batch=1, heads_q=1, seq_q=RAGGED_ROWS + 1, head_dim=192, batching=Batching.packed(1), dtype="bf16"
    )
    assert any("packed batch" in reason.got for reason in PLAIN.why_not(problem, SM90))


def test_the_rules_fit():
    for rule in VARIANT.rules:
        for head_dim in range(8, rule.head_dim_max + 8, 8):
            if head_dim >= rule.head_dim_min:
                assert not rule.config.why_not(problem_of(head_dim), SM90)


def test_there_are_candidates_for_every_head_dim():
    for head_dim in (136, 192, 200, 256):
        found = BACKEND.backward.candidates(VARIANT, problem_of(head_dim), SM90)
        assert found
        assert len(set(found)) == len(found)
