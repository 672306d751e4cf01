"""Tiles of keys and their walks over queries: which blocks of queries count, and what the mask hides of them.

With ``level = j - (seq_kv - seq_q)`` key j is seen by the queries from ``level - right`` to ``level + left``; under a
causal mask by those from its level on. `C` is the kernel's `GluonBackwardConstants`, `sizes` the tile's `LaunchSizes`.
Scores are transposed, on the accumulators of wgmma: ``[64 keys, 64 queries]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multiattn.triton import gluon_backward
from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.scores import ZERO, SeenBlocks, keep_within

DS_STAGES = gl.constexpr(gluon_backward.DS_STAGES)
LAST = gl.constexpr(2**31 - 1)
"""Beyond every position."""

# Words of shared memory for each slot of K: what its tile is. Blocks are of 64 queries, in the order of the walk. In a
# packed batch also where its sequence has its first tile of statistics, its lengths, and its first key.
FIRST_KEY, HEAD_KV, BATCH, BEGIN, FULL_BEGIN, FULL_END, END = (gl.constexpr(i) for i in range(7))
FIRST_TILE, LEN_Q, LEN_KV, OFFSET_KV = (gl.constexpr(i) for i in range(7, 11))
TILE_WORDS = gl.constexpr(11)


class BackwardShared(NamedTuple):
    """All of a block's shared memory: rings, what the tiles of the slots of K are, and tiles."""

    ring_k: Any
    ring_v: Any
    ring_q: Any
    """With lse and delta of its queries."""
    ring_dout: Any
    ring_sent: Any
    words: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    listed: Any
    """Two words for each slot of Q, where blocks are listed: its tile's (see `listed`), and its head."""
    sent: Any
    """By one warpgroup to another: dS or, in two passes, weights."""


@gluon.jit
def query_blocks(first_key, sizes, C: gl.constexpr):
    """`SeenBlocks` of the queries that see some of 128 keys; at least one.

    Those of [full_begin, full_end), which may be none, see all keys. One block is walked over even if all of it is
    hidden, so that gradients of keys that nobody sees need no code of their own.
    """
    seq_q, seq_kv = sizes.seq_q, sizes.seq_kv
    tiles = (seq_q + 63) // 64
    begin = 0
    full_begin = 0
    full_end = tiles
    end = tiles
    if C.is_banded:
        first_seeing = first_key + seq_q - seq_kv
        all_seeing = first_seeing + 127
        if C.is_two_sided:
            last_seeing = first_seeing + sizes.left  # the first key; the last is seen 127 further on
            first_seeing -= sizes.right
            all_seeing -= sizes.right
            full_end = gl.minimum(gl.maximum(last_seeing + 1, 0), seq_q) // 64
            end = (gl.minimum(gl.maximum(last_seeing + 128, 0), seq_q) + 63) // 64
        begin = gl.minimum(gl.maximum(first_seeing, 0), seq_q) // 64
        full_begin = (gl.minimum(gl.maximum(all_seeing, 0), seq_q) + 63) // 64
    if C.ragged:  # keys beyond the end are hidden from all queries
        full_begin = gl.where(first_key + 128 > seq_kv, tiles, full_begin)
    if C.score is not None:  # of queries beyond the end they may be anything
        full_end = gl.minimum(full_end, seq_q // 64)
    begin = gl.maximum(gl.minimum(begin, tiles - 1), 0)
    end = gl.maximum(end, begin + 1)
    if C.descends:
        begin, full_begin, full_end, end = tiles - end, tiles - full_end, tiles - full_begin, tiles - begin
    return SeenBlocks(begin, full_begin, full_end, end)


@gluon.jit
def block_of(walked, sizes, C: gl.constexpr):
    """The block of queries that a walk has at a place."""
    block = walked
    if C.descends:
        block = (sizes.seq_q + 63) // 64 - 1 - walked
    return block


@gluon.jit
def read_lengths(words, at):
    """Queries and keys of the sequence of a packed tile."""
    return ring.read_word(words, at + LEN_Q), ring.read_word(words, at + LEN_KV)


@gluon.jit
def seen_in_partial(first_key, first_query, of_score, sizes, C: gl.constexpr):
    """1 where the mask of a partial block shows a key to a query, else 0."""
    batch, head, aux = of_score
    queries = (first_query + gl.arange(0, 64, C.column))[None, :]
    keys = (first_key + gl.arange(0, 64, C.row))[:, None]
    return gl.where(C.score.mask(batch, head, queries, keys, sizes.seq_q, sizes.seq_kv, aux), 1, 0)


@gluon.jit
def mask_weights(weights, first_key, first_query, sizes, C: gl.constexpr):
    """0 in place of weights that the mask hides, and of keys beyond the end.

    One comparison each, from the side of the keys: a thread has two of them. Between two bounds it is of the distance
    from the first query that sees a key, unsigned. See `scores.mask_scores` for why it is PTX.
    """
    keys = first_key + gl.arange(0, 64, C.row)  # [64]
    begin = 0 * keys
    if C.is_banded:
        begin = keys - (sizes.seq_kv - sizes.seq_q)
    if C.is_two_sided:
        begin -= sizes.right
    begin = gl.where(keys < sizes.seq_kv, begin, LAST)
    queries = first_query + gl.arange(0, 64, C.column)
    columns = gl.arange(0, 64, C.column)[None, :]
    # A thread has two of every eight queries: of a key what they are compared with is one number, and they constants.
    near = begin[:, None] - first_query - (columns & 6)  # [64, 64]
    on = columns & 57
    if C.is_two_sided:
        weights = keep_within(weights, on - near, sizes.left + sizes.right + 1, ZERO)
    else:
        weights = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p;}", "=f,f,r,r",
            [weights, near, on], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    if C.score is not None:
        weights = gl.where(queries[None, :] < sizes.seq_q, weights, 0.0)
    return weights
