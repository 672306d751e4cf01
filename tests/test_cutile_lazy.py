"""The cuTile forward with `lazy_max`: the walk of each pipeline and scheduler, and what its one check has to catch."""

import math
from dataclasses import replace

import pytest
import torch

from multiattn import Problem
from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import FAMILY, PIPELINES, STEPS, begins_at_diagonal, grid_of, is_linear, keeps_maxima
from multiattn.cutile.launches import Together
from multiattn.cutile.rules import shorthand
from multiattn.mask import CAUSAL, Band
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.schedule import most_multiprocessors

pytest.importorskip("cuda.tile")

import gradient_checks
from cutile_checks import check, grow, launch, make_inputs

from multiattn.cutile.kernels import backward, forward

BACKEND = get("cutile")
LAZY = FAMILY.config(tile_m=32, tile_n=32, lazy_max=True)
PILOTS = ("pilot", "pilot_pairs")
each_pipeline = pytest.mark.parametrize("pipeline", PIPELINES)
each_mask = pytest.mark.parametrize("causal", [False, True])


def tile_of(const, given, *rest):
    """The tile of a call's place, or of what has one."""
    place = getattr(given, "place", given)
    return place.batch, place.head, place.tile


def watch(monkeypatch, name, what=tile_of, module=forward):
    """The tiles of each call of one of a kernel's functions, as they come; or `what` else of its arguments."""
    found, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *of: (found.append(what(*of)), function(*of))[1])
    return found


def walk(visible, size_of_tile, size):
    """(tile, block, masked) of all blocks of which a tile sees something; without a mask those of which it sees all."""
    expected = []
    for tile, rows in enumerate(visible.split(size_of_tile)):
        for block, part in enumerate(rows.split(size, dim=1)):
            if part.any():
                is_whole = part.shape[1] == size  # a ragged block needs a mask
                expected.append((tile, block, not (is_whole and bool(part.all()))))
    return expected


@pytest.fixture
def redone(monkeypatch):
    """The tiles that were done again."""
    return watch(monkeypatch, "redone_rows")


@pytest.mark.parametrize(
    ("begins", "change"),
    [
        (True, {}), (True, {"seq_q": 128, "seq_kv": 64}), (True, {"seq_q": 40, "seq_kv": 104}), (False, {"seq_q": 200}),
        (False, {"seq_kv": 96}), (False, {"causal": False}), (False, {"dtype": "fp16"}), (False, {"lazy_max": False}),
        (True, {"tile_n": 32}), (False, {"tile_n": 128}),
    ],
)  # fmt: skip
def test_what_begins_at_the_diagonal(begins, change):
    sizes = {"seq_q": 64, "seq_kv": 128, "causal": True, "dtype": "bf16"}
    sizes |= {name: change[name] for name in sizes if name in change}
    config = replace(LAZY, **{"tile_m": 64, "tile_n": 64} | {it: change[it] for it in change if it not in sizes})
    assert begins_at_diagonal(Problem.contiguous(batch=1, heads_q=1, head_dim=64, **sizes), config) == begins


@pytest.mark.parametrize("pipeline", [it for it in PIPELINES if it not in PILOTS])
@pytest.mark.parametrize(("scheduler", "tile_n"), [("one_tile", 16), ("static", 32)])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(32, 32), (96, 160), (160, 96), (72, 136)])
def test_from_the_diagonal_down_every_block_once(seq_q, seq_kv, tile_n, scheduler, pipeline, monkeypatch):
    """A tile has ``tile_m / tile_n`` blocks with the mask, and all before them without."""
    found = watch(monkeypatch, "score_found", lambda const, at, block, _, masked: (at.place.tile, block, masked))
    config = replace(LAZY, tile_n=tile_n, pipeline=pipeline, scheduler=scheduler, heads_together=2)
    check(config, *make_inputs(heads_q=2, heads_kv=1, seq_q=seq_q, seq_kv=seq_kv, head_dim=16), causal=True)
    visible = CAUSAL.visible(seq_q, seq_kv, torch.device("cpu"))
    blind = [(tile, 0, True) for tile, rows in enumerate(visible.split(32)) if not rows.any()]
    expected = blind + walk(visible, 32, tile_n)
    assert sorted(found) == sorted(2 * expected)


@each_mask
@pytest.mark.parametrize("pipeline", PILOTS)
@pytest.mark.parametrize("tile_n", [16, 32])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(32, 32), (96, 160), (160, 96), (72, 136)])
def test_a_pilot_and_then_every_block_once(seq_q, seq_kv, tile_n, pipeline, causal, monkeypatch):
    """The pilot is of 16 keys of the first block, or of the one on the diagonal; a mask is where one is needed."""

    def part_of(const, at, block, found, masked):
        return at.place.tile, (block * const.tile_n, const.tile_n, masked)

    found = watch(monkeypatch, "score_found", part_of)
    q, k, v = make_inputs(heads_q=1, batch=1, seq_q=seq_q, seq_kv=seq_kv, head_dim=16)
    check(replace(LAZY, tile_n=tile_n, pipeline=pipeline), q, k, v, causal=causal)
    for tile in {tile for tile, _ in found}:
        pilot, *walked = [part for of, part in found if of == tile]
        seen_by_first = seq_kv if not causal else max(0, min(tile * 32 + seq_kv - seq_q + 1, seq_kv))
        seen_by_last = seq_kv if not causal else max(0, min(tile * 32 + seq_kv - seq_q + 32, seq_kv))
        first_masked = seen_by_first // tile_n * tile_n
        aligned = causal and (seq_kv - seq_q) % 32 == 0
        assert pilot == (first_masked if aligned else 0, 16, causal or seq_kv % tile_n > 0)
        assert [(first, keys) for first, keys, _ in walked] == [(it, tile_n) for it in range(0, seen_by_last, tile_n)]
        assert all(masked for first, _, masked in walked if first >= first_masked)
        needless = sum(masked for first, _, masked in walked if first < first_masked)
        whole_pairs = first_masked // tile_n % 2 == 0
        masks = causal or seq_kv % tile_n > 0
        assert needless == (pipeline == "pilot_pairs" and masks and not whole_pairs)


# ---------------------------------------------------------------- done again


@each_mask
@each_pipeline
def test_only_tiles_whose_scores_grow_are_done_again(pipeline, causal, redone):
    q, k, v = make_inputs(heads_q=1, seq_q=128, seq_kv=128)
    q[:, :, 70] = 12.0
    k[:, :, 40] = 12.0  # neither of the first block nor of the diagonal
    check(replace(LAZY, pipeline=pipeline), q, k, v, causal=causal)
    assert redone == [(0, 0, 2)]


def test_a_first_row_that_sees_one_key_of_little_weight(redone):
    """By 2^100 less than the others, which bf16's weights hold."""
    q, k, v = make_inputs(heads_q=1, seq_q=128, seq_kv=128, spread=0.01)
    q[..., 0] = 8.0
    k[..., :96, 0], k[..., 96, 0] = 50 / math.log2(math.e), -50 / math.log2(math.e)  # at a scale of 1/8
    check(LAZY, q, k, v, causal=True)
    assert not redone


@pytest.mark.parametrize("growth", [14, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_growth_that_the_weights_hold_is_not_done_again(dtype, growth, redone):
    """fp16 holds 2^16, bf16 much more; v = 0 in most columns, as infinity times zero must not get lost either."""
    q, k, v = make_inputs(dtype=dtype, heads_q=1, seq_q=64, seq_kv=64, spread=0.01)
    q[..., 0], k[..., 40, 0] = 8.0, growth / math.log2(math.e)  # at a scale of 1/8
    v[..., 1:] = 0.0
    check(LAZY, q, k, v)
    assert bool(redone) == (dtype is torch.float16 and growth > 16)


def test_small_weights_of_many_keys_count(redone):
    """One key has 2^14 times the weight of each other: in fp16 with any headroom theirs would be lost."""
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = make_inputs(dtype=dtype, heads_q=1, seq_q=16, seq_kv=4096, head_dim=16, spread=0.0)
        q[..., 0], k[..., 0, 0], v[..., 0, :] = 8.0, 14 / math.log2(math.e) / 2, 0.0  # at a scale of 1/4
        v[..., 1:, :] = 1.0
        check(LAZY, q, k, v)
    assert not redone


@each_pipeline
@pytest.mark.parametrize(("causal", "lengths"), [(False, {}), (True, {"seq_q": 96, "seq_kv": 192})])
def test_huge_values(lengths, pipeline, causal, redone):
    q, k, v = make_inputs(spread=2.0, heads_q=1, head_dim=40, **lengths)
    check(replace(LAZY, pipeline=pipeline), q, k, v * 1e30, causal=causal)
    check(replace(LAZY, pipeline=pipeline), q, grow(k, start=100, factor=5.0), v * 1e30, causal=causal)
    assert redone  # the sums were fine, the output overflowed


@pytest.mark.parametrize("exponent", [-128, -112, -100])
@each_pipeline
def test_an_infinite_value_of_little_weight_is_infinite(exponent, pipeline):
    """By as many powers of two less than the others: what fp32 holds must not be lost to the headroom."""
    q, k, v = make_inputs(heads_q=1, seq_q=32, seq_kv=96, head_dim=64, spread=0.0)
    q[..., 0], k[..., 70, 0] = 8.0, exponent / math.log2(math.e)  # at a scale of 1/8
    v[:, :, 70] = math.inf
    online = launch(FAMILY.config(tile_m=32, tile_n=32), q, k, v)
    for ours, theirs in zip(launch(replace(LAZY, pipeline=pipeline), q, k, v), online, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("change", ["never", "sums only"])
def test_a_check_that_misses_something_is_noticed(change, monkeypatch):
    """Without the check at all, and without its look at the output."""
    name, broken = {
        "never": ("any_too_large", lambda l: False),  # noqa: E741
        "sums only": ("row_sum_or_nan", lambda const, rows: forward.row_sum(rows.l)),
    }[change]
    q, k, v = make_inputs(seq_q=64, seq_kv=96, spread=2.0)
    if change == "sums only":
        v *= 1e30
        k = grow(k, start=50, factor=4.0)
    else:
        k = grow(k, start=50, factor=60.0)
    check(LAZY, q, k, v)
    monkeypatch.setattr(forward, name, broken)
    with pytest.raises(AssertionError):
        check(LAZY, q, k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_that_are_done_again_have_a_sink_once(dtype, redone):
    q, k, v = make_inputs(dtype=dtype, heads_q=4, spread=4.0, head_dim=16)
    check(LAZY, q, grow(k, start=100, factor=20.0), v, sinks=torch.tensor((300.0, 0.0, -math.inf, 900.0)))
    assert redone


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(("left", "right", "seq_q", "seq_kv"), [
    (40, 0, 96, 160), (70, 20, 96, 160), (20, 3, 128, 128), (None, 5, 72, 136), (5, None, 72, 136), (90, 31, 150, 60),
])  # fmt: skip
def test_every_block_of_the_band_once_and_no_other(left, right, seq_q, seq_kv, monkeypatch):
    band = Band(left, right)
    visible = band.visible(seq_q, seq_kv, torch.device("cpu"))
    q, k, v, dout = gradient_checks.make_tensors(heads_q=1, seq_q=seq_q, seq_kv=seq_kv, head_dim=16)

    scores = watch(monkeypatch, "score_found", lambda const, at, block, _, masked: (at.place.tile, int(block), masked))
    check(FAMILY.config(tile_m=32, tile_n=16), q, k, v, window=band.window)
    assert sorted(scores) == walk(visible, 32, 16)

    keys = watch(monkeypatch, "add_keys", lambda const, place, *rest: (place.tile, int(rest[-2]), rest[-1]), backward)
    queries = watch(
        monkeypatch, "add_queries", lambda const, place, tile, *rest: (tile, int(place.tile), rest[-1]), backward
    )
    config = shorthand.two_passes(shorthand.one_pass(16, 32), shorthand.queries(32, 16))
    problem = Problem.of(q, k, v, window=band.window)
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], direction="backward", variant="two_pass", config=config)
    gradient_checks.run(plan, q, k, v, dout)
    assert sorted(keys) == walk(visible, 32, 16)
    assert sorted(queries) == walk(visible.T, 32, 16)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_only_tiles_without_a_full_block_are_done_again(pipeline, monkeypatch):
    """The first tile of a sequence, and all where windows are too narrow, for which the plan would not be lazy."""
    redone = watch(monkeypatch, "redone_rows", lambda const, at: at.place.tile)
    q, k, v = make_inputs(heads_q=1, seq_q=160, seq_kv=160, head_dim=16)
    config = replace(LAZY, pipeline=pipeline)
    check(config, q, k, v, window=(63, 0))
    assert redone == [0]
    redone.clear()
    check(config, q, k, v, window=(40, 0))
    assert redone == []
    monkeypatch.setattr("multiattn.cutile.forward.keeps_maxima", lambda problem, config: config.lazy_max)
    check(config, q, k, v, window=(40, 0))
    assert sorted(redone) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("window", "change", "keeps"),
    [
        ((1023, 0), {}, True), ((127, 0), {}, True), ((126, 0), {}, False), ((64, 0), {}, False),
        ((127, 0), {"seq_kv": 4100}, False), ((190, 0), {"seq_kv": 4100}, True), ((64, 63), {}, True),
        ((127, 0), {"tile_n": 128}, False), ((254, 0), {"tile_n": 128}, False), ((255, 0), {"tile_n": 128}, True),
        ((64, 0), {"seq_q": 1}, True),
        ((1023, 0), {"lazy_max": False}, False), (None, {}, True),
    ],
)  # fmt: skip
def test_a_window_of_full_blocks_keeps_lazy_maxima(window, change, keeps):
    """With every tile but the first ones and the last."""
    config = replace(LAZY, **{"tile_m": 64, "tile_n": 64} | {it: change[it] for it in change if "seq" not in it})
    sizes = {"seq_q": 4096, "seq_kv": 4096} | {it: change[it] for it in change if "seq" in it}
    problem = Problem.contiguous(batch=1, heads_q=1, head_dim=64, **sizes, window=window)
    assert keeps_maxima(problem, config) == keeps
    (launched,) = launches_of(make_plan(BACKEND, problem, ARCHS["sm90"], config=config, probe=False))
    assert launched.constants.lazy_max == keeps


# ---------------------------------------------------------------- static grids


@pytest.mark.parametrize(("heads_together", "causal"), [(2, False), (2, True), (12, True)])
@pytest.mark.parametrize("blocks", [1, 7, 31])
def test_a_static_grid_takes_every_tile_once(blocks, heads_together, causal, monkeypatch):
    """Every n-th of 48 tiles: 2 of each of 6 heads of 4 batch entries, in sections of 2 heads, or of 2 entries."""
    found = watch(monkeypatch, "forward_tile")
    config = replace(LAZY, scheduler="static", blocks_per_sm=blocks, heads_together=heads_together)
    check(config, *make_inputs(batch=4, heads_q=6, heads_kv=3, seq_q=49, head_dim=16), causal=causal)
    assert sorted(found) == [(batch, head, tile) for batch in range(4) for head in range(6) for tile in range(2)]


def test_a_static_grid_fills_the_device():
    problem = Problem.contiguous(batch=8, heads_q=8, seq_q=1000, head_dim=64)
    static, one = replace(LAZY, tile_m=64, blocks_per_sm=2, scheduler="static"), Together(heads=1)
    assert grid_of(problem, static, one, 132, linear=True) == (264, 1, 1)
    assert grid_of(problem, replace(static, blocks_per_sm=None), one, 132, linear=True) == (132, 1, 1)
    assert grid_of(replace(problem, batch=1, heads_q=1), static, one, 132, linear=True) == (16, 1, 1)
    assert grid_of(problem, LAZY, one, 132, linear=True) == (32 * 64, 1, 1)
    assert grid_of(problem, LAZY, Together(heads=4), 132, linear=False) == (32 * 4, 2, 8)
    assert grid_of(problem, LAZY, Together(heads=16, entries=2), 132, linear=False) == (32 * 16, 1, 4)
    assert not is_linear(problem, static, one)
    assert not is_linear(problem, LAZY, one)
    assert [most_multiprocessors(ARCHS[name]) for name in ("sm90", "cpu")] == [132, 1]
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], config=static, probe=False)
    (launch,) = launches_of(plan)
    assert launch.grid == (264, 1, 1)  # of the largest product, as there is no device here
    assert (launch.constants.static_grid, launch.constants.linear_grid, launch.constants.headroom) == (
        True,
        False,
        16.0,
    )


def test_rungs_below_full_have_neither():
    config = replace(LAZY, pipeline="pairs", scheduler="static")
    for name, rung in STEPS.items():
        limited = rung.step.limit(config)
        if name != "full":
            assert (limited.lazy_max, limited.pipeline, limited.scheduler) == (False, "plain", "one_tile")
        else:
            assert limited == config
