"""The CUDA backwards: what they launch, which problems they take, how they divide tiles. Parity has the numbers."""

import ctypes
from dataclasses import replace

import pytest
import torch
from cuda_runs import on_cpu
from gradient_checks import check, make_tensors, run

from multiattn.cuda import BACKEND, backward_wgmma, backward_wgmma_stored, stream_k
from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.backward_wgmma_stored import StoredQueriesConfig, WgmmaStoredConfig
from multiattn.cuda.backward_wgmma_two_pass import WgmmaTwoPassConfig
from multiattn.cuda.cpu import host
from multiattn.cuda.cpu.host import CpuLauncher
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import kernels_of, launches_of
from multiattn.cuda.params import argument_of, numbers_of
from multiattn.cuda.source import Division, PlannedLaunch
from multiattn.cuda.stream_k import LEAST_RANGE_STEPS, LEAST_SHARE_STEPS, division_of
from multiattn.operands import Operands, Options, with_score
from multiattn.packed import RAGGED_ROWS
from multiattn.plan import schedule
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import find_variant, make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
ONE, ORDERED, TWO, STORED, WIDE = "wgmma", "wgmma_ordered", "wgmma_two_pass", "wgmma_stored", "wgmma_wide"


def plan_of(problem, variant=None, config=None, *, arch=SM90, deterministic=False):
    options = {"variant": variant, "config": config, "deterministic": deterministic, "probe": False}
    return make_plan(BACKEND, problem, arch, direction="backward", **options)


SIZES = "batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v"
"""The arguments of `make_tensors`: v is as wide as k where a case does not say."""

# ---------------------------------------------------------------- beside parity's cases


@on_cpu
@pytest.mark.parametrize("variant", [it.name for it in BACKEND.backward.variants])
def test_a_masked_product_that_overflows_is_zero(variant):
    """Rows 0 to 4 do not see key 30, with which dout @ v^T is 1e60; who sees it has no dout."""
    q, k, v, dout = make_tensors(heads_q=1, seq_q=40, seq_kv=40, head_dim=16)
    v[0, 0, 30], dout[0, 0, :5], dout[0, 0, 30:] = 1e30, 1e30, 0.0
    assert all(
        grad.isfinite().all()
        for grad in run(plan_of(Problem.of(q, k, v, causal=True), variant, arch=CPU), q, k, v, dout)
    )


OFFSETS = """
#include "backward_common.cuh"
#include "forward_stream.cuh"

using namespace multiattn;

struct Dense {
  using Blocked = NoBlockMask;
  using Params = ForwardParams;
};

// In elements from the start: of the sum of dq, of delta, of the forward's lse.
extern "C" void offsets(int head, int seq_q, int first_query, long long* out) {
  static float start[1];
  BackwardParams backward{};
  backward.dq_sum = backward.delta = start;
  backward.seq_q = seq_q;
  out[0] = DqSum<16, true>::rows(backward, head, first_query) - start;
  out[1] = QuerySequence<NoSequence>{backward, head, {}}.delta() - start;
  ForwardParams forward{};
  forward.lse = start;
  forward.seq_q = seq_q;
  forward.heads_q = 1;
  out[2] = HeadTensors<Dense>{forward, Work<Dense>{head, 0, 0, 0, {}}}.lse() - start;
}
"""


@on_cpu
def test_sums_and_statistics_past_2_to_31_elements():
    """No workspace of that size can be filled here, so that the addresses are asked for themselves."""
    head, seq_q, first_query = 70_000, 65_520, 48
    found = (ctypes.c_longlong * 3)()
    host.load(host.build_source(OFFSETS)).offsets(head, seq_q, first_query, found)
    assert list(found) == [(head * seq_q + first_query) * 256, head * seq_q, head * seq_q]


@on_cpu
@pytest.mark.parametrize("variant", ["atomic", "two_pass"])
def test_no_ldmatrix_has_a_bank_conflict(variant):
    q, k, v, dout = make_tensors(head_dim=128)
    plan = plan_of(Problem.of(q, k, v, causal=True), variant, arch=CPU)
    launcher = CpuLauncher(plan)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    launcher(Operands(q, k, v, out, lse, dout, None, *map(torch.empty_like, (q, k, v))))
    assert set(launcher.counts) == {kernel.name for kernel in kernels_of(plan)}
    assert sum(counts.ldmatrix for counts in launcher.counts.values()) > 0
    assert all(counts.bank_conflicts == 0 for counts in launcher.counts.values())


# ---------------------------------------------------------------- Hopper's


HALVES = WgmmaBackwardConfig(tile_m=64, tile_n=128, half_dq=True, dout_stages=3)
PLAIN = {ONE: WgmmaBackwardConfig(tile_m=64, tile_n=128), TWO: WgmmaTwoPassConfig(tile_m=64, tile_n=64)}


def square(heads_q, heads_kv, seq, batch, *, head_dim=128, **options):
    given = {"heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq, "seq_kv": seq, "batch": batch, **options}
    return Problem.contiguous(head_dim=head_dim, **given)


def problem_of(head_dim=128, **sizes):
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, **sizes}
    return Problem.contiguous(head_dim=head_dim, **given)


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


@pytest.mark.parametrize(("variant", "bytes_of_q", "of_counts"), [(ONE, 4, 2), (TWO, 0, 0)])
def test_workspace_is_eight_bytes_a_query_and_sums_of_dq_where_blocks_add_them_up(variant, bytes_of_q, of_counts):
    """Beside what tiles that are not full round up to, and counters: of empty sums there is a line for 64 queries.

    Without sums the same bits come each time.
    """
    problem = problem_of(seq_q=512, seq_kv=512)
    plan = plan_of(problem, variant)
    areas, queries = areas_of(plan), problem.batch * problem.heads_q * problem.seq_q
    assert sum(areas.values()) - areas["workspace"] == queries * (bytes_of_q * problem.head_dim + 8 + of_counts)
    pointers = {name for it in launches_of(plan) for name in argument_of(it, plan).pointers.values()}
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


def modified(head_dim, *, wants_gradient=False):
    """Scores with a bias."""
    q, k, v = (torch.zeros(1, 2, 48, head_dim, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.zeros(1, 2, 48, 48, requires_grad=wants_gradient)
    return Problem.of_operands(*with_score(Operands(q, k, v), Options(), 5.0, None, bias, None))


@pytest.mark.parametrize(
    ("problem", "deterministic", "variant"),
    [
        *((problem_of(192), it, STORED) for it in (False, True)),
        (square(1, 1, 33_000, 1, head_dim=256), False, TWO),  # of which there is no memory for dS
        (square(8, 8, 17_000, 1, head_dim=256), False, TWO),  # of two heads; one has 2.02 waves of tiles
        (square(32, 1, 4096, 8, head_dim=256), False, TWO),  # of two heads of keys; one has 64 tiles
        (square(64, 8, 8192, 1, head_dim=256), False, STORED),
        *((square(4, 2, 512, 2, causal=it), False, STORED) for it in (False, True)),
        *((square(4, 2, 1024, 2, causal=it), False, STORED if it else ONE) for it in (False, True)),
        *((square(4, 2, 512, 2, head_dim=120, causal=it), False, TWO if it else ONE) for it in (False, True)),
        (square(4, 2, 2000, 2), False, ONE),
        (square(4, 2, 2000, 2), True, STORED),
        (square(4, 2, 2000, 2, head_dim=96), True, TWO),
        (square(32, 32, 2000, 2, head_dim=96), True, ORDERED),
        (square(4, 2, 1000, 1, causal=True, batching=Batching.packed(2, 1000, 1000)), False, ONE),
        *((modified(it), same, TWO if same or it > 64 else ONE) for it in (64, 128, 256) for same in (False, True)),
        (modified(64, wants_gradient=True), False, "atomic"),
    ],
)
def test_who_takes_what(problem, deterministic, variant):
    """Stored dS is for wide heads and, at D=128, for short sequences and calls that want the same bits each time."""
    assert plan_of(problem, deterministic=deterministic).variant == variant


def test_a_bias_has_configs_of_its_own_where_registers_are_few():
    configs = [plan_of(modified(head_dim), TWO).config for head_dim in (160, 192, 224, 256)]
    assert [it.kv_in_registers for it in configs] == [True, False, False, False]
    assert [it.dq.dp_late for it in configs] == [False, False, False, True]
    candidates = BACKEND.backward.candidates(find_variant(BACKEND, TWO, "backward"), modified(256), SM90)
    assert any(it.dq.dp_late for it in candidates)


@pytest.mark.parametrize("variant", [ONE, TWO])
def test_tensors_that_a_tensor_map_cannot_walk_are_refused(variant):
    sizes = {"batch": 1, "heads_q": 1, "seq_q": RAGGED_ROWS + 1, "head_dim": 64}
    problem = Problem.contiguous(**sizes, batching=Batching.packed(1))
    assert any("packed batch" in reason.got for reason in PLAIN[variant].why_not(problem, SM90))


# ---------------------------------------------------------------- tiles of keys that are divided among SMs


SMS = 132
EARLY = WgmmaBackwardConfig(tile_m=64, tile_n=128, k_in_registers=True, early_scores=True, k_stages=2)
BY_TMA = WgmmaBackwardConfig(tile_m=64, tile_n=128, dq_by_tma=True)
TMA_HALVES = replace(BY_TMA, half_dq=True)


def in_shares(count, problem):
    return problem, {"shares": count, "ranges": 0}


DIVIDED = {
    "one key head for all": in_shares(8, square(16, 1, 4096, 4, causal=True)),
    "eight query heads a key head": in_shares(4, square(16, 2, 4096, 4, causal=True)),
    "fewer tiles than SMs": in_shares(4, square(16, 1, 4096, 1)),
    "four heads of one batch entry": in_shares(2, square(4, 4, 4096, 1, causal=True)),
    "one key head of a long sequence": in_shares(8, square(16, 1, 16384, 1, causal=True)),
    "12 of the 128 tiles of a head are seen": in_shares(
        8, Problem.contiguous(batch=1, heads_q=32, heads_kv=2, seq_q=512, seq_kv=16384, head_dim=128, window=(1024, 0))
    ),
    "2048 tiles are 15 for each SM and 68 more, of 64 steps each: 33 steps for each SM": (
        square(16, 16, 4096, 4),
        {"tiles": 2048, "shares": 1, "ranges_from": 1980, "ranges": 132, "range_steps": 33},
    ),
    "seven query heads a key head, a share for each": in_shares(7, square(28, 4, 3333, 1)),
    "305 tiles of five query heads each are 2 for each SM and 41 more": (
        square(25, 5, 7777, 1, head_dim=64),
        {"tiles": 305, "shares": 1, "ranges_from": 264, "ranges": 132, "range_steps": 190},
    ),
    "4096 tiles are 31 for each SM and 4 more, whose ranges would be too short": (
        square(32, 32, 4096, 4, head_dim=64),
        {"tiles": 4096, "shares": 1, "ranges_from": 4092, "ranges": 8, "range_steps": LEAST_RANGE_STEPS},
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_tiles_are_divided_into_shares_or_ranges(name):
    """As measured: see `LONGEST_WEIGHT`."""
    problem, expected = DIVIDED[name]
    found = division_of(problem, 64, 128, SMS)
    assert {it: getattr(found, it) for it in expected} == expected
    assert found.shares == 1 or found.ranges_from == found.tiles * found.shares


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(square(16, 16, 1024, 16), id="short_tiles"),
        pytest.param(square(16, 16, 4096, 4, causal=True), id="many_tiles_under_a_mask"),
        pytest.param(square(8, 8, 2048, 1), id="one_tile_for_nearly_each_sm"),
        pytest.param(square(11, 11, 6144, 4), id="as_many_for_each_sm"),
        pytest.param(square(64, 8, 4096, 1), id="ranges_nearly_as_long_that_share_no_queries"),
        pytest.param(square(6, 2, 4096, 1, window=(0, 0)), id="few_that_see_little"),
        pytest.param(square(4, 4, LEAST_SHARE_STEPS * 64, 1), id="shares_would_be_too_short"),
        pytest.param(
            square(16, 1, 16384, 1, batching=Batching.packed(4, 8192, 8192)), id="only_the_device_knows_the_lengths"
        ),
    ],
)
def test_other_tiles_are_whole(problem):
    assert division_of(problem, 64, 128, SMS) is None
    plan = plan_of(problem, ONE)
    assert not any(it.kernel.lists for it in launches_of(plan))
    assert "key_sums" not in areas_of(plan)


def test_a_launch_knows_of_parts():
    """A block for each part up to one for each SM, sums in fp32, sections that count shares as heads."""
    problem = square(16, 1, 4096, 4, causal=True)
    plan = plan_of(problem, ONE, replace(TMA_HALVES, stream_k=SMS))
    prepare, keys, convert = launches_of(plan)
    assert (prepare.kernel.lists, keys.kernel.lists, convert.kernel.lists) == (Division, Division, None)
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
        pytest.param((4, 1, 200, 300, 64), {"causal": True}, replace(EARLY, stream_k=5), "shares", id="causal"),
        pytest.param((4, 2, 260, 300, 64), {}, replace(EARLY, stream_k=12), "shares", id="full"),
        pytest.param((4, 1, 150, 600, 40), {"window": (130, 5)}, replace(EARLY, stream_k=4), "shares", id="unseen"),
        pytest.param((4, 1, 300, 150, 104), {"causal": True}, replace(TMA_HALVES, stream_k=5), "shares", id="d104"),
        pytest.param((1, 1, 600, 600, 64), {"causal": True}, replace(EARLY, stream_k=20), "shares", id="one_head"),
        pytest.param((3, 1, 400, 400, 64), {"causal": True}, replace(EARLY, stream_k=40), "shares", id="empty_shares"),
        pytest.param((1, 1, 700, 800, 64), {}, replace(EARLY, stream_k=4), "ranges", id="ranges_over_tiles"),
        pytest.param((1, 1, 700, 300, 72), {}, replace(BY_TMA, stream_k=2), "ranges", id="ranges_d72"),
        pytest.param((1, 1, 700, 300, 128), {}, replace(TMA_HALVES, stream_k=2), "ranges", id="ranges_d128"),
        pytest.param((3, 1, 600, 600, 64), {}, replace(EARLY, stream_k=4), "ranges", id="ranges_over_heads"),
        pytest.param((4, 1, 200, 300, 64, 32), {"causal": True}, replace(EARLY, stream_k=5), "shares", id="d64_v32"),
        pytest.param((4, 2, 260, 300, 32, 64), {}, replace(EARLY, stream_k=12), "shares", id="d32_v64"),
        pytest.param((1, 1, 700, 300, 128, 72), {}, replace(TMA_HALVES, stream_k=2), "ranges", id="ranges_d128_v72"),
    ],
)
def test_parts_make_up_the_gradients(sizes, options, config, expected, monkeypatch):
    """Parts of few steps, so that few queries and keys have many."""
    for name in ("PART_STEPS", "LEAST_RANGE_STEPS", "LEAST_SAVED_STEPS"):
        monkeypatch.setattr(stream_k, name, 2)
    monkeypatch.setattr(stream_k, "LEAST_SHARE_STEPS", 2 if expected == "shares" else 16)
    q, k, v, dout = make_tensors(**dict(zip(SIZES[1:], sizes, strict=False)))
    plan = plan_of(Problem.of(q, k, v, **options), ONE, config, arch=CPU)
    found = division_of(plan.problem, config.tile_m, config.tile_n, config.stream_k)
    assert found is not None
    assert (found.shares > 1, found.ranges > 1) == (expected == "shares", expected == "ranges")
    check(plan, q, k, v, dout)


@on_cpu
@pytest.mark.parametrize(
    ("sizes", "options", "config"),
    [
        pytest.param((2, 2, 200, 300, 64), {}, EARLY, id="d64"),
        pytest.param((4, 2, 300, 400, 64), {"causal": True}, EARLY, id="causal_group"),
        pytest.param((1, 1, 700, 500, 64), {"causal": True}, EARLY, id="queries_that_see_no_key"),
        pytest.param((2, 1, 500, 600, 40), {"window": (130, 5)}, EARLY, id="window"),
        pytest.param((1, 1, 700, 300, 72), {"window": (64, 200)}, BY_TMA, id="window_d72"),
        pytest.param((2, 1, 260, 700, 104), {"window": (50, 0)}, TMA_HALVES, id="window_d104"),
        pytest.param((1, 1, 300, 500, 128), {"causal": True}, TMA_HALVES, id="causal_d128"),
        pytest.param((2, 2, 200, 300, 32, 64), {}, EARLY, id="d32_v64"),
        pytest.param((1, 1, 300, 500, 128, 64), {"causal": True}, TMA_HALVES, id="d128_v64"),
    ],
)
def test_tiles_of_keys_add_to_dq_one_after_another(sizes, options, config):
    """A tile that waited for one that does not come, or for a wrong number, ends the emulation."""
    q, k, v, dout = make_tensors(**dict(zip(SIZES[1:], sizes, strict=False)))
    plan = plan_of(Problem.of(q, k, v, **options), ORDERED, replace(config, ordered=True, dq_by_tma=True), arch=CPU)
    check(plan, q, k, v, dout)


@on_cpu
@pytest.mark.parametrize("k_stages", [1, 2])
def test_tiles_that_no_query_sees_follow_those_of_other_heads(k_stages, monkeypatch):
    """Blocks that end a head at a time go on to tiles without a step, while the last additions wait for their turn."""
    monkeypatch.setattr(backward_wgmma, "kv_heads_of_section", lambda *_, **__: 1)
    monkeypatch.setattr(backward_wgmma, "CHAIN_STEPS", 0)
    q, k, v, dout = make_tensors(heads_q=2, seq_q=130, seq_kv=900, head_dim=104)
    config = replace(TMA_HALVES, ordered=True, k_stages=k_stages)
    check(plan_of(Problem.of(q, k, v, window=(50, 0)), ORDERED, config, arch=CPU), q, k, v, dout)


@on_cpu
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize(
    ("section", "sizes", "options", "config"),
    [
        pytest.param(1, (2, 3, 3, 100, 300, 128), {}, TMA_HALVES, id="full"),
        pytest.param(2, (1, 10, 5, 100, 300, 104), {"causal": True}, TMA_HALVES, id="causal_group"),
        pytest.param(1, (1, 3, 3, 300, 70, 104), {"causal": True}, TMA_HALVES, id="queries_that_see_no_key"),
        pytest.param(1, (1, 3, 3, 600, 600, 128), {}, replace(TMA_HALVES, stream_k=9), id="ranges_over_heads"),
        pytest.param(1, (1, 8, 2, 190, 260, 104), {}, replace(TMA_HALVES, stream_k=12), id="shares"),
        pytest.param(1, (3, 2, 1, 20, 900, 128), {"window": (50, 0)}, TMA_HALVES, id="fewer_rows_than_tiles"),
        pytest.param(1, (1, 3, 3, 600, 600, 104, 40), {}, replace(TMA_HALVES, stream_k=9), id="d104_v40"),
    ],
)
def test_sums_of_later_heads_are_emptied_by_tiles_of_earlier_ones(section, sizes, options, config, blocks, monkeypatch):
    """Sections of so many heads, of which the last may be short. Workspaces are full of NaN before.

    A grid has one block more than are there at a time, whose tiles others must not wait for.
    """
    monkeypatch.setattr(backward_wgmma, "kv_heads_of_section", lambda *_, **__: section)
    for name, least in (("LEAST_SHARE_STEPS", 6), ("LEAST_RANGE_STEPS", 2), ("LEAST_SAVED_STEPS", 2)):
        monkeypatch.setattr(stream_k, name, least)
    monkeypatch.setattr(host, "MULTIPROCESSORS", blocks)
    monkeypatch.setattr(PlannedLaunch, "grid", lambda it, sms, of=PlannedLaunch.grid: of(it, sms + 1))
    q, k, v, dout = make_tensors(**dict(zip(SIZES, sizes, strict=False)))
    check(plan_of(Problem.of(q, k, v, **options), ONE, config, arch=CPU), q, k, v, dout)


@pytest.mark.parametrize(
    ("sizes", "heads", "mib"),
    [
        pytest.param((1, 8, 8, 16384), [2] * 4, 1024, id="two_heads_fill_the_memory"),
        pytest.param((4, 8, 8, 4096), [32], 1024, id="all_at_once"),
        pytest.param((1, 12, 4, 8192), [2, 2], 768, id="groups_stay_together"),
        pytest.param((5, 1, 1, 16000), [2, 2, 1], 976, id="nearly_as_many_in_each"),
        pytest.param((1, 8, 8, 17000), [1] * 8, 552, id="few_tiles_for_callers_who_name_it"),
        pytest.param((1, 2, 2, 32768), [1] * 2, 2048, id="one_head_may_have_twice_as_much"),
    ],
)
def test_ds_is_stored_of_as_many_heads_as_there_is_memory_for(sizes, heads, mib):
    batch, heads_q, heads_kv, seq = sizes
    plan = plan_of(square(heads_q, heads_kv, seq, batch, head_dim=256), STORED)
    assert [len(it) for it in plan.config.rounds(plan.problem)] == heads
    assert areas_of(plan)["ds"] >> 20 == mib
    _, *launches = launches_of(plan)
    assert [it.numbers["heads"] for it in launches] == [it for it in heads for _ in range(2)]
    assert sum(it.blocks for it in launches[1::2]) == batch * heads_q * (-(-seq // 256) * 2)
    assert ({it.kernel.cluster for it in launches[1::2]}, plan.config.kept_steps) == ({2}, 4)  # as the rule has it
    refused = plan.config.why_not(square(1, 1, 33_000, 1, head_dim=256), SM90)
    assert any("for dS of one head" in it.got for it in refused)


@on_cpu
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((2, 3, 3, 200, 130, 192), {}, id="full"),
        pytest.param((1, 8, 4, 130, 260, 136), {"causal": True}, id="causal_group"),
        pytest.param((1, 3, 3, 300, 70, 136), {"causal": True}, id="queries_that_see_no_key"),
        pytest.param((1, 3, 3, 330, 400, 136), {"window": (70, 10)}, id="window"),
        pytest.param((3, 2, 1, 20, 700, 136), {"window": (50, 0)}, id="keys_that_no_query_sees"),
        pytest.param((1, 5, 5, 260, 200, 192), {}, id="an_odd_number_of_tiles_in_clusters"),
        pytest.param((1, 6, 3, 100, 200, 192), {}, id="one_tile_in_clusters"),
        pytest.param((1, 3, 3, 300, 260, 192, 128), {"causal": True}, id="d192_v128"),
    ],
)
def test_heads_take_turns_where_ds_is_stored(sizes, options, blocks, monkeypatch):
    """Two heads at a time, or one. Workspaces are full of NaN before: what was not stored is not read."""
    monkeypatch.setattr(host, "MULTIPROCESSORS", blocks)
    q, k, v, dout = make_tensors(**dict(zip(SIZES, sizes, strict=False)))
    config = WgmmaStoredConfig(tile_m=64, tile_n=64, dq=StoredQueriesConfig(cluster=2))
    problem = Problem.of(q, k, v, **options)
    monkeypatch.setattr(backward_wgmma_stored, "STORED_BYTES", 2 * config.head_bytes(problem))
    assert len(config.rounds(problem)) > 1
    check(plan_of(problem, STORED, config, arch=CPU), q, k, v, dout)


@on_cpu
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("sizes", "options", "room", "turns"),
    [
        pytest.param((2, 3, 3, 200, 130, 264), {}, 5, [(2, 2)] * 3, id="heads"),
        pytest.param((1, 4, 2, 260, 300, 264), {"causal": True}, 2, [(1, 2), (1, 1)] * 2, id="queries_of_a_group"),
        pytest.param((1, 2, 1, 300, 300, 264, 320), {"window": (70, 10)}, 1, [(1, 1)] * 3, id="window"),
        pytest.param((3, 2, 1, 20, 700, 264, 8), {"window": (50, 0)}, 1, [(1, 1)] * 3, id="keys_that_no_query_sees"),
        pytest.param((1, 1, 1, 300, 70, 264, 512), {"causal": True}, 8, [(1, 3)], id="queries_that_see_no_key"),
        pytest.param((1, 1, 1, 1100, 300, 8, 8), {}, 9, [(1, 9)], id="more_tiles_than_come_side_by_side"),
    ],
)
def test_heads_and_queries_take_turns_where_p_and_ds_are_stored(sizes, options, room, turns, blocks, monkeypatch):
    """There is room for some tiles of 128 queries; where a head of keys has more, its sums stay in fp32."""
    monkeypatch.setattr(host, "MULTIPROCESSORS", blocks)
    q, k, v, dout = make_tensors(**dict(zip(SIZES, sizes, strict=False)))
    problem = Problem.of(q, k, v, **options)
    config = plan_of(problem, WIDE, arch=CPU).config
    monkeypatch.setattr(schedule, "STORED_BYTES", room * config.tile_bytes(problem))
    plan = plan_of(problem, WIDE, arch=CPU)
    assert [(it.heads, it.tiles) for it in config.turns(problem)] == turns
    assert ("key_sums" in areas_of(plan)) == any(tiles < -(-sizes[3] // 128) for _, tiles in turns)
    check(plan, q, k, v, dout)


def test_the_memory_for_p_and_ds_is_bounded():
    plans = [
        plan_of(square(8, heads, seq, 1, head_dim=512), WIDE) for heads, seq in ((8, 16384), (1, 16384), (1, 65536))
    ]
    assert [areas_of(it)["weights"] + areas_of(it)["ds"] >> 20 for it in plans] == [1024] * 3
    assert [len(it.config.turns(it.problem)) for it in plans] == [8, 8, 128]
    refused = plans[0].config.why_not(square(64, 1, 1 << 20, 1, head_dim=512), SM90)
    assert any("for P and dS of 128 queries" in it.got for it in refused)


@on_cpu
@pytest.mark.parametrize(
    ("head_dim", "kept", "steps"),
    [
        pytest.param(136, {"kept_steps": 4}, 4, id="some_steps"),
        pytest.param(176, {"kv_in_registers": True}, 11, id="all_steps_and_weights_late"),
    ],
)
def test_a_block_keeps_k_and_v_of_some_steps_in_registers(head_dim, kept, steps, monkeypatch):
    """The others are read until the last step: K and V of the block's next tile come after that."""
    monkeypatch.setattr(host, "MULTIPROCESSORS", 1)
    q, k, v, dout = make_tensors(heads_q=2, heads_kv=2, seq_q=200, seq_kv=130, head_dim=head_dim)
    plan = plan_of(Problem.of(q, k, v), STORED, WgmmaStoredConfig(tile_m=64, tile_n=64, **kept), arch=CPU)
    assert f"_kept{steps}_" in kernels_of(plan)[1].name
    check(plan, q, k, v, dout)


@on_cpu
def test_dq_has_the_same_bits_however_many_blocks_add_to_it(monkeypatch):
    q, k, v, dout = make_tensors(heads_q=2, heads_kv=2, seq_q=200, seq_kv=700)
    plan = plan_of(Problem.of(q, k, v), ORDERED, replace(EARLY, ordered=True, dq_by_tma=True), arch=CPU)

    def dq_of(blocks):
        monkeypatch.setattr(host, "MULTIPROCESSORS", blocks)
        return run(plan, q, k, v, dout)[0]

    alone = dq_of(1)
    assert all(torch.equal(dq_of(blocks), alone) for blocks in (2, 3))
