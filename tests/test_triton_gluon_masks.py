"""Masks, sinks and modified scores in the interpreted Gluon kernel. Tiles have so few keys that most have an edge.

Ways to run it take turns.
"""

import itertools
import math

import pytest
import torch
from gluon_on_cpu import VARIANT

import multiattn
from multiattn import reference
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import plan_variant
from multiattn.problem import Problem, problem_of
from multiattn.triton import BACKEND
from multiattn.triton.cpu.gluon.source import as_python
from multiattn.triton.gluon_forward import GluonConfig, constants_of
from multiattn.triton.kernels.gluon import scores

TILE_N, HEAD_DIM = 16, 32
WAYS = ({}, {"lazy_max": True}, {"lazy_max": True, "tile_m": 192}, {"pingpong": True, "q_slots": 2})


def check(seq_q, seq_kv, *, way, causal=False, window=None, scale=None, sink=None, **score):
    """One head against the reference. lse, which has no rounded weights, shows a key too many or too few."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, HEAD_DIM, generator=generator).half() for rows in (seq_q, seq_kv, seq_kv))
    sinks = None if sink is None else torch.tensor([sink])
    config = GluonConfig(**{"tile_m": 128, "tile_n": TILE_N, "stages": 3, **way})
    mask = {"causal": causal, "window": window, "scale": scale}
    given = [score.get(name) for name in ("softcap", "alibi_slopes", "bias", "score_mod")]
    asked = Options.of(has_sinks=sinks is not None, backend="auto", variant=None, deterministic=None, **mask)
    operands, asked = with_score(Operands(q, k, v, sinks=sinks), asked, *given)
    plan = plan_variant(BACKEND, VARIANT, problem_of(operands, asked), by_name("cpu"), config)
    out, lse = torch.full_like(q, torch.nan), torch.full((1, 1, seq_q), torch.nan)
    multiattn.launch(plan, q, k, v, out, lse, sinks=sinks, captured=operands.captured)
    truth, truth_lse = reference(q, k, v, sinks=sinks, compute_dtype=torch.float64, **mask, **score)
    torch.testing.assert_close(lse.double(), truth_lse.double(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), truth.double(), atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("causal", "seq_q", "seq_kv", "scale"),
    [(False, 70, 48, None), (False, 64, 50, -0.2), (True, 130, 130, None), (True, 64, 177, 0.3), (True, 150, 61, None)],
)
def test_lengths_that_are_no_multiples_of_tiles(causal, seq_q, seq_kv, scale, way):
    check(seq_q, seq_kv, causal=causal, scale=scale, way=way)


WINDOWS = (
    (0, 0), (1, 0), (0, 1), (7, 3), (15, 0), (16, 0), (64, 0), (100, 30), (0, 90), (None, 5), (5, None), (999, 999),
)  # fmt: skip
LENGTHS = ((257, 257), (113, 203), (203, 113), (1, 300), (300, 3), (192, 384))


@pytest.mark.parametrize(("window", "lengths"), list(itertools.product(WINDOWS, LENGTHS)), ids=str)
def test_a_window_at_every_place_of_a_tile(window, lengths):
    way = WAYS[(WINDOWS.index(window) + LENGTHS.index(lengths)) % len(WAYS)]
    check(*lengths, window=window, way=way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("sinks", [(0.7, -3.0), (90.0, 0.7), (-200.0, 90.0), (-math.inf, -math.inf)])
def test_a_sink_is_added(sinks, way):
    check(150, 61, causal=True, sink=sinks[0], way=way)  # with rows that see no key
    check(70, 110, window=(40, 3), scale=-0.3, sink=sinks[1], way=way)


SLOPES, GENERATOR = torch.tensor([0.4]), torch.Generator().manual_seed(3)
BIAS = torch.randn(1, 1, 150, 200, generator=GENERATOR)
HIDING = torch.where(torch.rand(1, 1, 150, 200, generator=GENERATOR) < 0.3, -math.inf, BIAS)
HIDING[..., 20:60, :] = -math.inf  # rows that see nothing
HIDING[..., 100:] = -math.inf  # no block that comes first has a key
SCORES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "bias": {"bias": BIAS},
    "bias of rows": {"bias": BIAS[..., :1]},
    "bias of keys that hides": {"bias": HIDING[..., :1, :]},
    "bias that hides": {"bias": HIDING},
    "all": {"softcap": 2.0, "alibi_slopes": SLOPES[None], "bias": HIDING},
    "score_mod": {"score_mod": lambda score, b, h, q, kv: score + 0.1 * (kv - q) + SLOPES[h] * torch.abs(q - kv)},
    "scores of no product": {"score_mod": lambda score, b, h, q, kv: BIAS[0, h, 0, kv]},
}


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_modified(name, turn):
    """A bias that hides all of the blocks that come first, too, with maxima that a tile would keep from these."""
    score = SCORES[name]
    if "bias" in score:
        score = {**score, "bias": score["bias"][..., :130, :113].contiguous()}
    ways = [WAYS[(turn + it) % len(WAYS)] for it in (0, 2, 3)]
    check(130, 113, way=ways[0], **score)
    check(130, 113, causal=True, scale=-0.3, sink=0.7, way=ways[1], **score)  # with rows that see no key
    check(130, 113, window=(40, 3), way=ways[2], **score)


def test_a_window_costs_what_it_shows():
    """Blocks of a tile, and of those the ones of a warpgroup and the ones that it masks: none more than it must."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=4096, head_dim=HEAD_DIM, window=(1023, 0))
    C = constants_of(problem, GluonConfig(tile_m=128, tile_n=64, lazy_max=True), ragged=False)  # noqa: N806
    sizes = (4096, 4096, None, None, None, None, None, *problem.reach)

    def numbers(function, *arguments):
        return tuple(int(it) for it in as_python(function)(*arguments, sizes, C))

    assert numbers(scores.range_of_blocks, 2048, 128) == (16, 34)
    assert numbers(scores.blocks_to_see, 2048, 16, 34, 0) == (16, 17, 32, 33)
    assert numbers(scores.blocks_to_see, 2112, 16, 34, 0) == (17, 18, 33, 34)
    assert numbers(scores.blocks_to_see, 2112, 16, 34, 1) == (17, 18, 17, 34)  # done again
