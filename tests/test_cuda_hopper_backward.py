"""Hopper's two backwards: what they launch, which problems they take. Parity has the numbers."""

from __future__ import annotations

import pytest
import torch

from multiattn.cuda import BACKEND
from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.backward_wgmma_two_pass import WgmmaTwoPassConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of, numbers_of
from multiattn.operands import Operands, Options, with_score
from multiattn.packed import RAGGED_ROWS
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, find_variant, make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
ONE, TWO = "wgmma", "wgmma_two_pass"
HALVES = WgmmaBackwardConfig(tile_m=64, tile_n=128, half_dq=True, dout_stages=3)
PLAIN = {ONE: WgmmaBackwardConfig(tile_m=64, tile_n=128), TWO: WgmmaTwoPassConfig(tile_m=64, tile_n=64)}


def plan_of(problem: Problem, variant: str | None = None, config=None, *, deterministic: bool = False) -> Plan:
    options = {"variant": variant, "config": config, "deterministic": deterministic, "probe": False}
    return make_plan(BACKEND, problem, SM90, direction="backward", **options)


def problem_of(head_dim: int = 128, **sizes) -> Problem:
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, **sizes}
    return Problem.contiguous(head_dim=head_dim, **given)


# ---------------------------------------------------------------- launches


@pytest.mark.parametrize(
    ("variant", "entries", "persistent", "blocks"),
    [
        (ONE, ["prepare_statistics", "backward_wgmma", "convert_sums"], [False, True, False], 2 * 2 * 4),
        (TWO, ["prepare_statistics", "backward_wgmma_queries", "backward_wgmma_keys"], [False, True, True], 2 * 4 * 3),
    ],
)
def test_kernels_follow_one_another_and_those_of_products_are_persistent(variant, entries, persistent, blocks):
    launches = launches_of(plan_of(problem_of(), variant))
    assert [it.kernel.entry for it in launches] == entries
    assert all(it.kernel.overlaps for it in launches)
    assert [it.is_persistent for it in launches] == persistent
    assert launches[1].blocks == blocks


@pytest.mark.parametrize(("variant", "bytes_of_q"), [(ONE, 4), (TWO, 0)])
def test_workspace_is_eight_bytes_a_query_and_sums_of_dq_where_blocks_add_them_up(variant, bytes_of_q):
    """Beside what tiles that are not full round up to, and counters. Without sums the same bits come each time."""
    problem = problem_of(seq_q=512, seq_kv=512)
    plan = plan_of(problem, variant)
    areas, queries = areas_of(plan), problem.batch * problem.heads_q * problem.seq_q
    assert sum(areas.values()) - areas["workspace"] == queries * (bytes_of_q * problem.head_dim + 8)
    pointers = {name for it in launches_of(plan) for name in argument_of(it.kernel, plan).pointers.values()}
    assert ("dq_sum" in pointers) == (variant == ONE)
    assert "delta" not in pointers  # it is among the statistics


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
    assert numbers_of(plan_of(problem_of(**given, causal=True), ONE, HALVES))["sections_kv"] == heads
    by_cache = max(1, (16 << 20) // (seq * 128 * 8 * heads_q // heads_kv))  # L2 alone decides where tiles are alike
    assert numbers_of(plan_of(problem_of(**given), ONE, HALVES))["sections_kv"] == min(by_cache, batch * heads_kv)


# ---------------------------------------------------------------- choice


def modified(head_dim: int, *, wants_gradient: bool = False) -> Problem:
    """Scores with a bias."""
    q, k, v = (torch.zeros(1, 2, 48, head_dim, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.zeros(1, 2, 48, 48, requires_grad=wants_gradient)
    return Problem.of_operands(*with_score(Operands(q, k, v), Options(), 5.0, None, bias, None))


@pytest.mark.parametrize(
    ("problem", "deterministic", "variant"),
    [
        *((problem_of(192), it, TWO) for it in (False, True)),
        (problem_of(seq_q=500), False, TWO),
        (problem_of(seq_q=2000, seq_kv=2000), False, ONE),
        (problem_of(seq_q=2000, seq_kv=2000), True, TWO),
        *((modified(head_dim), it, TWO) for head_dim in (64, 128, 256) for it in (False, True)),
        (modified(64, wants_gradient=True), False, "atomic"),
    ],
)
def test_who_takes_what(problem, deterministic, variant):
    """Two passes take wide heads, short sequences, expressions, and callers who want the same bits each time."""
    assert plan_of(problem, deterministic=deterministic).variant == variant


def test_a_bias_has_configs_of_its_own_where_registers_are_few():
    configs = [plan_of(modified(head_dim), TWO).config for head_dim in (160, 192, 224, 256)]
    assert [it.kv_in_registers for it in configs] == [True, False, False, False]
    assert [it.dp_late for it in configs] == [False, False, False, True]
    candidates = BACKEND.backward.candidates(find_variant(BACKEND, TWO, "backward"), modified(256), SM90)
    assert any(it.dp_late for it in candidates)


@pytest.mark.parametrize("variant", [ONE, TWO])
def test_tensors_that_a_tensor_map_cannot_walk_are_refused(variant):
    sizes = {"batch": 1, "heads_q": 1, "seq_q": RAGGED_ROWS + 1, "head_dim": 64}
    problem = Problem.contiguous(**sizes, batching=Batching.packed(1))
    assert any("packed batch" in reason.got for reason in PLAIN[variant].why_not(problem, SM90))
