"""cuTile's kernels with two-sided masks, interpreted: which blocks of a band are walked, and which tiles done again."""

from dataclasses import fields, replace

import pytest
import torch

from multiattn import Problem
from multiattn.cutile.backward import OnePassConfig, TwoPassConfig
from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import PIPELINES, CutileConfig, keeps_maxima
from multiattn.mask import Band
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan

pytest.importorskip("cuda.tile")

import gradient_checks
from cutile_checks import check, make_inputs

from multiattn.cutile.bind import bind
from multiattn.cutile.kernels import backward, forward
from multiattn.cutile.kernels.tiles import Order

BACKEND = get("cutile")
ONLINE = CutileConfig(tile_m=32, tile_n=32)
LAZY = replace(ONLINE, lazy_max=True)
BACKWARDS = (
    TwoPassConfig(tile_m=16, tile_n=32, dq_tile_m=32, dq_tile_n=16),
    TwoPassConfig(tile_m=32, tile_n=16, dq_tile_m=16, dq_tile_n=64),
    OnePassConfig(tile_m=16, tile_n=32),
    OnePassConfig(tile_m=64, tile_n=16),
)


def plan_of(problem, config, arch="cpu"):
    variant = "two_pass" if isinstance(config, TwoPassConfig) else "atomic"
    return make_plan(
        BACKEND, problem, ARCHS[arch], direction="backward", variant=variant, config=config, probe=arch == "cpu"
    )


# ---------------------------------------------------------------- blocks


def watch(monkeypatch, module, name, what):
    """`what` of the arguments of each call of one of a kernel's functions."""
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


@pytest.mark.parametrize(("left", "right", "seq_q", "seq_kv"), [
    (40, 0, 96, 160), (70, 20, 96, 160), (20, 3, 128, 128), (None, 5, 72, 136), (5, None, 72, 136), (90, 31, 150, 60),
])  # fmt: skip
def test_every_block_of_the_band_once_and_no_other(left, right, seq_q, seq_kv, monkeypatch):
    band = Band(left, right)
    visible = band.visible(seq_q, seq_kv, torch.device("cpu"))
    q, k, v, dout = gradient_checks.make_tensors(heads_q=1, seq_q=seq_q, seq_kv=seq_kv, head_dim=16)

    scores = watch(
        monkeypatch, forward, "score_found", lambda const, at, block, _, masked: (at.place.tile, int(block), masked)
    )
    check(replace(ONLINE, tile_n=16), q, k, v, window=band.window)
    assert sorted(scores) == walk(visible, 32, 16)

    keys = watch(monkeypatch, backward, "add_keys", lambda const, place, *rest: (place.tile, int(rest[-2]), rest[-1]))
    queries = watch(
        monkeypatch, backward, "add_queries", lambda const, place, tile, *rest: (tile, int(place.tile), rest[-1])
    )
    config = TwoPassConfig(tile_m=16, tile_n=32, dq_tile_m=32, dq_tile_n=16)
    gradient_checks.run(plan_of(Problem.of(q, k, v, window=band.window), config), q, k, v, dout)
    assert sorted(keys) == walk(visible, 32, 16)
    assert sorted(queries) == walk(visible.T, 32, 16)


# ---------------------------------------------------------------- lazy_max


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_only_tiles_without_a_full_block_are_done_again(pipeline, monkeypatch):
    """The first tile of a sequence, and all where windows are too narrow, for which the plan would not be lazy."""
    redone = watch(monkeypatch, forward, "redone_rows", lambda const, at: at.place.tile)
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


# ---------------------------------------------------------------- launches


ORDER_NUMBERS = len(fields(Order)) + 3
"""Arguments behind the bounds: the order of tiles, in which three divisors take two more numbers each, not one."""


def test_bounds_are_numbers_at_the_end_and_share_code():
    bindings = [bind(make(window)) for window in ((1023, 0), (700, 30), None)]
    for binding, bounds in zip(bindings, ([1023, 0], [700, 30], []), strict=True):
        behind_scale = binding.arguments[[getattr(it, "kind", "") for it in binding.arguments].index("f32") + 1 :]
        assert [(it.kind, it.value) for it in behind_scale[: len(bounds)]] == [("i32", bound) for bound in bounds]
        assert len(behind_scale) == len(bounds) + ORDER_NUMBERS
    assert bindings[0].constants == bindings[1].constants
    assert bindings[2].constants["mask"] == "full"


def test_code_for_a_window_serves_every_other():
    wide, narrow = bind(make((1023, 0))), make((7, 0))
    assert bind(narrow).constants != wide.constants
    assert bind(narrow, emitted=wide.constants).constants == wide.constants
    numbers = [it.value for it in bind(narrow, emitted=wide.constants).arguments if isinstance(it, abi.Number)]
    assert numbers[-ORDER_NUMBERS - 2 : -ORDER_NUMBERS] == [7, 0]


def make(window):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=4096, head_dim=64, window=window)
    return make_plan(BACKEND, problem, ARCHS["sm90"], probe=False)


needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)


@needs_compiler
def test_what_is_compiled_takes_what_is_bound():
    """`export` holds the Tile IR against the Binding; in 64 bits, and a backward."""
    problem = Problem.contiguous(batch=64, heads_q=64, seq_q=65536, head_dim=64, window=(300, 20))
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], config=ONLINE, probe=False)
    assert BACKEND.forward.export(plan, ())[0].binding.arguments[-ORDER_NUMBERS - 1].value == 20
    assert len(BACKEND.backward.export(plan_of(problem, BACKWARDS[0], arch="sm90"), ())) == 2
