"""The consumer of the Gluon kernel as Python, with NumPy in place of Gluon's language: mask, running sums, out and lse.

Quicker than its interpreter, so that there can be many masks. What a warpgroup does to scores is plain arithmetic; the
ring, its barriers and the tensor cores are played here: every warpgroup must release each tile of the ring once, in
order, and take a turn for each block but the first. Layouts, PTX and what runs at the same time are the interpreter's.
"""

import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from gluon_fakes import Array, Pointer, as_python, language, scores_in_python

from multiattn import reference
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.problem import Problem, problem_of
from multiattn.score import bind_score
from multiattn.triton.gluon_configs import GluonConfig
from multiattn.triton.kernels.gluon import forward, ring, scores
from multiattn.triton.kernels.gluon.constants import GluonConstants
from multiattn.triton.score import functions_of, lowered_score

TILE_N, HEAD_DIM, MARGIN = 16, 32, 192


def rows_of(tensor, first, count):
    """As TMA loads them: zeros where there are no rows."""
    return np.pad(tensor, ((MARGIN, MARGIN), (0, 0)))[MARGIN + first : MARGIN + first + count].view(Array)


def order_of(begin, end):
    """The ring in the order of the producer: K of the last block, then K of the next and V of the one before it."""
    pairs = [("k", block - 1, "v", block) for block in range(end - 1, begin, -1)]
    inner = [tile for pair in pairs for tile in (pair[:2], pair[2:])]
    return [("k", end - 1), *inner, ("v", begin)] if end > begin else []


def run_warpgroup(warpgroup, first_query, blocks, exact, sink, aux, tensors, problem, C, out, lse):  # noqa: N803
    """One of the consumers, with one tile of queries: writes its rows of out and lse."""
    begin, end = blocks
    first, order = first_query + 64 * warpgroup, order_of(begin, end)
    released, turns = [], {"awaited": 0, "passed": 0}
    idle = types.SimpleNamespace(index=lambda at: None, arrive=lambda barrier: None, store_wait=lambda number: None)
    words = {ring.END.value: end, ring.FIRST_QUERY.value: first_query, C.words + ring.END.value: -1}
    words[ring.EXACT.value] = exact

    def release(of, place, slots):
        if of == "keys":
            released.append(place)

    def count(what):
        def counted(*arguments):
            turns[what] += 1

        return counted

    def tile_at(place, name):
        assert order[place][0] == name
        return rows_of(tensors[name], order[place][1] * TILE_N, TILE_N)

    def keep(values):
        begin, end = max(first, 0), max(min(first + 64, problem.seq_q), 0)
        out[begin:end] = values[begin - first : end - first]

    queries = types.SimpleNamespace(dtype=None, store=keep)
    fakes = {
        "gl": language(lse, sink),
        "_queries": lambda buffers, at, C: (queries, queries),  # noqa: N803
        "_make_scores": lambda queries, place, *rest: rows_of(tensors["q"], first, 64) @ tile_at(place, "k").T,
        "_add_values": lambda weights, out, narrow, place, *rest: (out + weights @ tile_at(place, "v"), narrow),
        "_await_turn": count("awaited"),
        "_pass_turn": count("passed"),
        "release": release,
        "skip": release,
        "read_word": lambda words, at: np.asarray(words.get(at, 0)).view(Array),
        "pack_weights": lambda weights, like: weights,
        "keep_packed": lambda weights: weights,
        "warpgroup_mma_wait": lambda number, values: values[0],
        "tma": idle,
        "mbarrier": idle,
    }
    nothing = ("await_full", "write_word", "fence_async_shared", "tma_store", "await_launch_before")
    fakes |= dict.fromkeys(nothing, lambda *arguments: None)
    sizes = (problem.seq_q, problem.seq_kv, 1, 1, None, None, None, *problem.reach)
    shared = ("queries", "keys", idle, None, words, (idle, idle), (idle, idle))
    pointer = np.asarray(0).view(Array)
    consume = as_python(forward.consume, fakes)
    consume(warpgroup, (None, None), pointer, pointer, aux, problem.scale_log2, sizes, shared, C)
    assert released == list(range(len(order)))
    expected = max(end - begin - 1, 0)
    assert turns == {"awaited": expected, "passed": expected + (warpgroup == C.warpgroups - 1)}  # one begins


def check_tiles(
    seq_q, seq_kv, *, causal=False, window=None, scale=None, sink=None, score=None, exact=False, tile_m=128,
    lazy_max=False,
):  # fmt: skip
    """All tiles of one head, against the reference; `exact`: as if each were done again."""
    config = GluonConfig(tile_m=tile_m, tile_n=TILE_N, q_slots=2, lazy_max=lazy_max)
    mask = {"causal": causal, "window": window}
    problem = Problem.contiguous(
        batch=1,
        heads_q=1,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=HEAD_DIM,
        scale=scale,
        has_sinks=sink is not None,
        **mask,
    )
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 1, rows, HEAD_DIM, generator=generator).double() for rows in (seq_q, seq_kv, seq_kv)]
    score, aux = score or {}, None
    lowered = None
    if score:
        given = [score.get(name) for name in ("softcap", "alibi_slopes", "bias", "score_mod")]
        like = Operands(*(it.half() for it in tensors))
        of_score = problem_of(*with_score(like, Options(scale=problem.scale), *given)).score
        problem = replace(problem, score=of_score)
        lowered = lowered_score(problem, by_name("sm90"))
        values = lowered.values(bind_score(device=tensors[0].device, **score), problem.scale)
        aux = tuple(Pointer(it.numpy().ravel()) if isinstance(it, torch.Tensor) else it for it in values)
    C = GluonConstants.of(problem, config, ragged=seq_kv % TILE_N != 0, score=lowered)  # noqa: N806
    if score:
        C = replace(C, score=scores_in_python(functions_of(C.score, gluon=True)))  # noqa: N806
    sinks = None if sink is None else torch.tensor([sink])
    truth, truth_lse = reference(*tensors, scale=scale, sinks=sinks, compute_dtype=torch.float64, **mask, **score)
    arrays = {name: tensor[0, 0].numpy() for name, tensor in zip("qkv", tensors, strict=True)}
    out, lse = np.full((seq_q, HEAD_DIM), np.nan), np.full(seq_q, np.nan)
    range_of_blocks = as_python(scores.range_of_blocks, {"gl": language(None)})
    sizes = (seq_q, seq_kv, None, None, None, None, None, *problem.reach)
    with np.errstate(all="ignore"):
        for first_query in range(-(-seq_q // 64) * 64 - tile_m, -tile_m, -tile_m):
            blocks = [int(it) for it in range_of_blocks(first_query, tile_m, sizes, C)]
            for warpgroup in range(C.warpgroups):
                run_warpgroup(warpgroup, first_query, blocks, int(exact), sink, aux, arrays, problem, C, out, lse)
    np.testing.assert_allclose(out, truth[0, 0], atol=1e-6)
    np.testing.assert_allclose(lse, truth_lse[0, 0], atol=1e-5)


WAYS = ({}, {"lazy_max": True}, {"lazy_max": True, "exact": True}, {"lazy_max": True, "tile_m": 192})


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(
    ("causal", "seq_q", "seq_kv", "scale"),
    [(False, 70, 48, None), (False, 64, 50, -0.2), (True, 130, 130, None), (True, 64, 177, 0.3), (True, 150, 61, None)],
)
def test_a_consumer_makes_attention_of_its_tiles(causal, seq_q, seq_kv, scale, options):
    check_tiles(seq_q, seq_kv, causal=causal, scale=scale, **options)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(
    "window",
    [(0, 0), (1, 0), (0, 1), (7, 3), (15, 0), (16, 0), (64, 0), (100, 30), (0, 90), (None, 5), (5, None), (999, 999)],
)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(257, 257), (113, 203), (203, 113), (1, 300), (300, 3), (192, 384)])
def test_a_consumer_keeps_to_a_window(window, seq_q, seq_kv, options):
    check_tiles(seq_q, seq_kv, window=window, **options)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("sink", [0.7, -3.0, 90.0, -200.0, -math.inf])
def test_a_consumer_adds_a_sink(sink, options):
    check_tiles(150, 61, causal=True, sink=sink, **options)  # with rows that see no key
    check_tiles(70, 110, window=(40, 3), scale=-0.3, sink=sink, **options)


SLOPES, GENERATOR = torch.tensor([0.4]), torch.Generator().manual_seed(3)
BIAS = torch.randn(1, 1, 150, 200, generator=GENERATOR)
HIDING = torch.where(torch.rand(1, 1, 150, 200, generator=GENERATOR) < 0.3, -math.inf, BIAS)
HIDING[..., 20:60, :] = -math.inf  # rows that see nothing
HIDING[..., 100:] = -math.inf  # no block that comes first has a key
SCORES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "bias": {"bias": BIAS},
    "bias of keys that hides": {"bias": HIDING[..., :1, :]},
    "bias that hides": {"bias": HIDING},
    "all": {"softcap": 2.0, "alibi_slopes": SLOPES[None], "bias": HIDING},
    "score_mod": {"score_mod": lambda score, b, h, q, kv: score + 0.1 * (kv - q) + SLOPES[h] * torch.abs(q - kv)},
    "scores of no product": {"score_mod": lambda score, b, h, q, kv: BIAS[0, h, 0, kv]},
}


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_a_consumer_modifies_scores(name, options):
    """A bias that hides all of the blocks that come first, too, with maxima that a tile would keep from these."""
    score = SCORES[name]
    if "bias" in score:
        score = {**score, "bias": score["bias"][..., :130, :113].contiguous()}
    check_tiles(130, 113, score=score, **options)
    check_tiles(130, 113, causal=True, scale=-0.3, sink=0.7, score=score, **options)  # with rows that see no key
    check_tiles(130, 113, window=(40, 3), score=score, **options)


def test_a_window_costs_what_it_shows():
    """Blocks of a tile, and of those the ones of a warpgroup and the ones that it masks: none more than it must."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=4096, head_dim=HEAD_DIM, window=(1023, 0))
    C = GluonConstants.of(problem, GluonConfig(tile_m=128, tile_n=64, lazy_max=True), ragged=False)  # noqa: N806
    range_of_blocks, blocks_to_see = (
        as_python(it, {"gl": language(None)}) for it in (scores.range_of_blocks, scores.blocks_to_see)
    )
    sizes = (4096, 4096, None, None, None, None, None, *problem.reach)
    assert tuple(range_of_blocks(2048, 128, sizes, C)) == (16, 34)
    assert tuple(blocks_to_see(2048, 16, 34, 0, sizes, C)) == (16, 17, 32, 33)
    assert tuple(blocks_to_see(2112, 16, 34, 0, sizes, C)) == (17, 18, 33, 34)
    assert tuple(blocks_to_see(2112, 16, 34, 1, sizes, C)) == (17, 18, 17, 34)  # done again
