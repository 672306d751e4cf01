"""Tiles of keys that are divided among SMs: which, into what parts, and that the parts make up the gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cuda_runs import on_cpu
from gradient_checks import check, make_tensors

from multiattn.cuda import BACKEND
from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import numbers_of
from multiattn.cuda.stream_k import LEAST_RANGE_STEPS, LEAST_SHARE_STEPS, Divided, division_of
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import Plan, make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching

SMS = 132
EARLY = WgmmaBackwardConfig(tile_m=64, tile_n=128, k_in_registers=True, early_scores=True, k_stages=2)
BY_TMA = WgmmaBackwardConfig(tile_m=64, tile_n=128, dq_by_tma=True)
HALVES = replace(BY_TMA, half_dq=True)


def problem_of(heads_q: int, heads_kv: int, seq: int, batch: int, *, head_dim: int = 128, **options) -> Problem:
    given = {"heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq, "seq_kv": seq, "batch": batch, **options}
    return Problem.contiguous(head_dim=head_dim, **given)


def plan_of(problem: Problem, config: WgmmaBackwardConfig | None = None, *, arch=ARCHS["sm90"]) -> Plan:
    return make_plan(BACKEND, problem, arch, direction="backward", variant="wgmma", config=config, probe=False)


# ---------------------------------------------------------------- what is divided


@pytest.mark.parametrize(
    ("sizes", "causal", "shares"),
    [
        pytest.param((16, 1, 4096, 4), True, 8, id="one_key_head_for_all"),
        pytest.param((16, 2, 4096, 4), True, 4, id="eight_query_heads_a_key_head"),
        pytest.param((16, 1, 4096, 1), False, 4, id="fewer_tiles_than_sms"),
        pytest.param((4, 4, 4096, 1), True, 2, id="four_heads_of_one_batch_entry"),
        pytest.param((16, 1, 16384, 1), True, 8, id="one_key_head_of_a_long_sequence"),
    ],
)
def test_few_tiles_are_divided_into_shares(sizes, causal, shares):
    """As measured: see `LONGEST_WEIGHT`."""
    found = division_of(problem_of(*sizes, causal=causal), 64, 128, SMS)
    assert found is not None
    assert (found.shares, found.ranges) == (shares, 0)
    assert found.ranges_from == found.tiles * shares


def test_tiles_that_no_query_sees_do_not_count_as_many():
    """12 of the 128 tiles of a head are seen."""
    given = {"batch": 1, "heads_q": 32, "heads_kv": 2, "seq_q": 512, "seq_kv": 16384, "head_dim": 128}
    found = division_of(Problem.contiguous(**given, window=(1024, 0)), 64, 128, SMS)
    assert found is not None
    assert found.shares == 8


def test_the_last_tiles_of_many_are_divided_into_ranges():
    """2048 tiles are 15 for each SM and 68 more, of 64 steps each: 33 steps for each SM."""
    found = division_of(problem_of(16, 16, 4096, 4), 64, 128, SMS)
    assert found == Divided(tiles=2048, ranges_from=1980, ranges=132, range_steps=33)


def test_ranges_are_not_too_short():
    """4096 tiles are 31 for each SM, and 4 more."""
    found = division_of(problem_of(32, 32, 4096, 4, head_dim=64), 64, 128, SMS)
    assert found == Divided(tiles=4096, ranges_from=4092, ranges=8, range_steps=LEAST_RANGE_STEPS)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem_of(16, 16, 1024, 16), id="short_tiles"),
        pytest.param(problem_of(16, 16, 4096, 4, causal=True), id="many_tiles_under_a_mask"),
        pytest.param(problem_of(8, 8, 2048, 1), id="one_tile_for_nearly_each_sm"),
        pytest.param(problem_of(11, 11, 6144, 4), id="as_many_for_each_sm"),
        pytest.param(problem_of(4, 4, LEAST_SHARE_STEPS * 64, 1), id="shares_would_be_too_short"),
        pytest.param(
            problem_of(16, 1, 16384, 1, batching=Batching.packed(4, 8192, 8192)), id="only_the_device_knows_the_lengths"
        ),
    ],
)
def test_other_tiles_are_whole(problem):
    assert division_of(problem, 64, 128, SMS) is None
    plan = plan_of(problem)
    assert not any(it.kernel.stream_k for it in launches_of(plan))
    assert "key_sums" not in areas_of(plan)


def test_nothing_is_divided_among_no_sms():
    problem = problem_of(16, 1, 4096, 4, causal=True)
    plan = plan_of(problem, replace(HALVES, stream_k=0))
    assert not any(it.kernel.stream_k for it in launches_of(plan))


def test_a_launch_knows_of_parts():
    """A block for each part up to one for each SM, sums in fp32, sections that count shares as heads."""
    problem = problem_of(16, 1, 4096, 4, causal=True)
    plan = plan_of(problem, replace(HALVES, stream_k=SMS))
    prepare, keys, convert = launches_of(plan)
    assert (prepare.kernel.stream_k, keys.kernel.stream_k, convert.kernel.stream_k) == (True, True, False)
    assert (keys.blocks, keys.grid(SMS)) == (8 * 128, SMS)
    numbers = numbers_of(plan)
    tiles, warps = 128, 8
    assert areas_of(plan)["key_sums"] == numbers["key_sums_bytes"] == tiles * (2 * 128 * 128 + warps) * 4
    assert numbers["sections_kv"] == 11  # of 32: three sections that each have tiles for all SMs twice


# ---------------------------------------------------------------- emulated


@on_cpu
@pytest.mark.parametrize(
    ("sizes", "options", "config", "expected"),
    [
        pytest.param((16, 1, 200, 300, 64), {"causal": True}, replace(EARLY, stream_k=5), "shares", id="causal"),
        pytest.param((16, 2, 260, 300, 64), {}, replace(EARLY, stream_k=12), "shares", id="full"),
        pytest.param((16, 1, 150, 600, 40), {"window": (130, 5)}, replace(EARLY, stream_k=4), "shares", id="unseen"),
        pytest.param((16, 1, 300, 150, 104), {"causal": True}, replace(HALVES, stream_k=5), "shares", id="d104"),
        pytest.param((1, 1, 2200, 2200, 64), {"causal": True}, replace(EARLY, stream_k=20), "shares", id="one_head"),
        pytest.param(
            (3, 1, 1410, 1410, 64), {"causal": True}, replace(EARLY, stream_k=40), "shares", id="empty_shares"
        ),
        pytest.param((1, 1, 3700, 1100, 64), {}, replace(EARLY, stream_k=2), "ranges", id="ranges"),
        pytest.param((1, 1, 3700, 1100, 72), {}, replace(BY_TMA, stream_k=2), "ranges", id="ranges_d72"),
        pytest.param((1, 1, 3700, 1100, 128), {}, replace(HALVES, stream_k=2), "ranges", id="ranges_d128"),
    ],
)
def test_parts_make_up_the_gradients(sizes, options, config, expected):
    heads_q, heads_kv, seq_q, seq_kv, head_dim = sizes
    given = {"heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq_q, "seq_kv": seq_kv, "head_dim": head_dim}
    q, k, v, dout = make_tensors(**given)
    plan = plan_of(Problem.of(q, k, v, **options), config, arch=CPU)
    found = division_of(plan.problem, config.tile_m, config.tile_n, config.stream_k)
    assert found is not None
    assert (found.shares > 1, found.ranges > 1) == (expected == "shares", expected == "ranges")
    check(plan, q, k, v, dout)


# ---------------------------------------------------------------- compiled
