"""The consumer of the Gluon kernel as Python, with NumPy in place of Gluon's language: mask, running sums, out and lse.

Nothing interprets Gluon. What a warpgroup does to scores is plain arithmetic, though; the ring, its barriers and the
tensor cores are played here. Layouts, PTX beside the mask's, and what runs at the same time are left to a GPU.
"""

import re
import types

import numpy as np
import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import KernelInterface

from multiattn import Problem, reference
from multiattn.triton.gluon_configs import GluonConfig
from multiattn.triton.kernels.gluon import forward, ring, scores
from multiattn.triton.kernels.gluon.constants import GluonConstants

TILE_M, TILE_N, HEAD_DIM = 128, 16, 32


class Array(np.ndarray):
    """An array that may be asked what a tensor of Gluon is asked."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype):
        return self


def select(text, constraints, operands, *rest, **options):
    """The PTX of the mask: one of two values, by how a number compares with another."""
    verb, limit, other = re.search(r"setp\.(\w+)\.s32 p, \$2, (\d+); selp\.f32 \$0, \$1, 0f(\w+), p;", text).groups()
    scores, number = operands
    compared = {"gt": number > int(limit), "ge": number >= int(limit)}[verb]
    return np.where(compared, scores, np.uint32(int(other, 16)).view(np.float32))


def language(memory):
    """As much of Gluon's language as a consumer needs."""

    def store(pointers, values, mask):
        memory[pointers[mask]] = values[mask]

    return types.SimpleNamespace(
        arange=lambda begin, end, layout: np.arange(begin, end).view(Array),
        full=lambda shape, value, dtype, layout: np.full(shape, value).view(Array),
        convert_layout=lambda values, layout: values,
        SliceLayout=lambda *axes: None,
        **{name: getattr(np, name) for name in ("sum", "max", "maximum", "minimum", "where", "exp2", "log2")},
        float32=None, int64=None, inline_asm_elementwise=select, store=store,
    )  # fmt: skip


def as_python(jitted, fakes):
    """A jitted function, and all that it calls, with `fakes` in place of what they name."""

    def stands_for(name, value):
        if name in fakes:
            return fakes[name]
        if isinstance(value, types.ModuleType):
            parts = {part: stands_for(part, getattr(value, part)) for part in code.co_names if hasattr(value, part)}
            return types.SimpleNamespace(**parts)
        if isinstance(value, KernelInterface):
            return as_python(value, fakes)
        return value.value if isinstance(value, gl.constexpr) else value

    code, names = jitted.fn.__code__, jitted.fn.__globals__
    mine = {name: stands_for(name, names[name]) for name in code.co_names if name in names}
    return types.FunctionType(code, mine)


def rows_of(tensor, first, count):
    """As TMA loads them: zeros where there are no rows."""
    return np.pad(tensor, ((TILE_M, TILE_M), (0, 0)))[TILE_M + first : TILE_M + first + count].view(Array)


def order_of(blocks):
    """The ring in the order of the producer: K of the last block, then K of the next and V of the one before it."""
    pairs = [("k", block - 1, "v", block) for block in range(blocks - 1, 0, -1)]
    inner = [tile for pair in pairs for tile in (pair[:2], pair[2:])]
    return [("k", blocks - 1), *inner, ("v", 0)] if blocks else []


def run_warpgroup(warpgroup, first_query, blocks, tensors, problem, C, out, lse):  # noqa: N803
    """One of the consumers, with one tile of queries: writes its rows of out and lse."""
    first, order = first_query + 64 * warpgroup, order_of(blocks)
    idle = types.SimpleNamespace(index=lambda at: None, arrive=lambda barrier: None, store_wait=lambda number: None)
    words = {ring.BLOCKS.value: blocks, ring.FIRST_QUERY.value: first_query, C.words + ring.BLOCKS.value: -1}

    def tile_at(place, name):
        assert order[place][0] == name
        return rows_of(tensors[name], order[place][1] * TILE_N, TILE_N)

    def keep(values):
        begin, end = max(first, 0), min(first + 64, problem.seq_q)
        out[begin:end] = values[begin - first : end - first]

    queries = types.SimpleNamespace(dtype=None, store=keep)
    fakes = {
        "gl": language(lse),
        "_queries": lambda buffers, at, C: (queries, queries),  # noqa: N803
        "_make_scores": lambda queries, place, *rest: rows_of(tensors["q"], first, 64) @ tile_at(place, "k").T,
        "_add_values": lambda weights, out, narrow, place, *rest: (out + weights @ tile_at(place, "v"), narrow),
        "_await_turn": lambda *arguments: None,
        "_pass_turn": lambda *arguments: None,
        "read_word": lambda words, at: np.asarray(words.get(at, 0)).view(Array),
        "pack_weights": lambda weights, like: weights,
        "keep_packed": lambda weights: weights,
        "warpgroup_mma_wait": lambda number, values: values[0],
        "tma": idle,
        "mbarrier": idle,
    }
    nothing = ("await_full", "release", "skip", "write_word", "fence_async_shared", "tma_store")
    fakes |= dict.fromkeys(nothing, lambda *arguments: None)
    sizes = (problem.seq_q, problem.seq_kv, 1, 1, None, None, None)
    shared = (None, None, idle, None, words, (idle, idle), (idle, idle))
    as_python(forward.consume, fakes)(
        warpgroup, (None, None), np.asarray(0).view(Array), problem.scale_log2, sizes, shared, C
    )


@pytest.mark.parametrize("options", [{}, {"lazy_max": True}], ids=str)
@pytest.mark.parametrize(
    ("causal", "seq_q", "seq_kv", "scale"),
    [(False, 70, 48, None), (False, 64, 50, -0.2), (True, 130, 130, None), (True, 64, 177, 0.3), (True, 150, 61, None)],
)
def test_a_consumer_makes_attention_of_its_tiles(causal, seq_q, seq_kv, scale, options):
    config = GluonConfig(tile_m=TILE_M, tile_n=TILE_N, q_slots=2, **options)
    problem = Problem.contiguous(
        batch=1, heads_q=1, seq_q=seq_q, seq_kv=seq_kv, head_dim=HEAD_DIM, causal=causal, scale=scale
    )
    C = GluonConstants.of(problem, config, ragged=seq_kv % TILE_N != 0)  # noqa: N806
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 1, rows, HEAD_DIM, generator=generator).double() for rows in (seq_q, seq_kv, seq_kv)]
    truth, truth_lse = reference(*tensors, causal=causal, scale=scale, compute_dtype=torch.float64)
    arrays = {name: tensor[0, 0].numpy() for name, tensor in zip("qkv", tensors, strict=True)}
    out, lse = np.full((seq_q, HEAD_DIM), np.nan), np.full(seq_q, np.nan)
    end_of_blocks = as_python(scores.end_of_blocks, {"gl": language(None)})
    with np.errstate(all="ignore"):
        for first_query in range(-(-seq_q // 64) * 64 - TILE_M, -TILE_M, -TILE_M):
            blocks = int(end_of_blocks(first_query, TILE_M, seq_q, seq_kv, C))
            for warpgroup in range(C.warpgroups):
                run_warpgroup(warpgroup, first_query, blocks, arrays, problem, C, out, lse)
    np.testing.assert_allclose(out, truth[0, 0], atol=1e-6)
    np.testing.assert_allclose(lse, truth_lse[0, 0], atol=1e-5)
