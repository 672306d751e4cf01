"""Scores and weights of the Gluon kernel: which blocks and scores count, and the softmax in the log2 domain.

With ``level = i + seq_kv - seq_q`` query i sees the keys from ``level - left`` to ``level + right``; under a causal
mask those up to its level. `C` is the kernel's `GluonConstants`, `sizes` the tile's `LaunchSizes`. Scores are on the
accumulators of wgmma, ``[64, tile_n]``. Inline PTX stands where Gluon's lowering takes more instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multiattn.triton.kernels.gluon.listed import first_of_listed

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
"""Where a row's maximum starts: the lowest finite fp32. With -inf a row that sees nothing would need guards."""
LARGEST_SUM = gl.constexpr(1e30)
"""The largest sum of a row's weights: with more they outgrew what they are relative to. It is far from overflow, and
so is its reciprocal."""


# ---------------------------------------------------------------- the mask


class SeenBlocks(NamedTuple):
    """Blocks [begin, end) that a tile sees some of, those of [full_begin, full_end) whole."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@gluon.jit
def begin_of_keys(queries, sizes, C: gl.constexpr):
    """The first key that a query sees under a two-sided mask; negative where that is beyond the first of all."""
    return queries + (sizes.seq_kv - sizes.seq_q) - sizes.left


@gluon.jit
def end_of_keys(queries, sizes, C: gl.constexpr):
    """The first key that a query does not see, nor any after it."""
    seq_q, seq_kv = sizes.seq_q, sizes.seq_kv
    end = 0 * queries + seq_kv
    if C.is_banded:
        end = queries + 1 + (seq_kv - seq_q)
        if C.is_two_sided:
            end += sizes.right
        end = gl.minimum(end, seq_kv)
    return end


@gluon.jit
def end_before(query, sizes, C: gl.constexpr):
    """The end of the keys of the query before `query`, within 0 and seq_kv."""
    seq_q, seq_kv = sizes.seq_q, sizes.seq_kv
    end = seq_kv
    if C.is_banded:
        end = query + seq_kv - seq_q
        if C.is_two_sided:
            end += sizes.right
        end = gl.minimum(gl.maximum(end, 0), seq_kv)
    return end


@gluon.jit
def range_of_blocks(first_query, queries, sizes, C: gl.constexpr):
    """Blocks of keys, begin and end, that any of `queries` queries from `first_query` on sees."""
    begin = 0
    if C.is_two_sided:
        begin = gl.maximum(begin_of_keys(gl.maximum(first_query, 0), sizes, C), 0) // C.tile_n
    end = end_before(gl.minimum(first_query + queries, sizes.seq_q), sizes, C)
    return begin, (end + C.tile_n - 1) // C.tile_n


@gluon.jit
def blocks_to_see(first_query, tile_begin, tile_end, exact_tile, sizes, C: gl.constexpr):
    """`SeenBlocks` of a warpgroup, of those that its tile has.

    Blocks from `full_end` on are masked and their maxima exact. They are those that some query does not see to the
    end, and of a lazy maximum also the one with the last key of the first query, so that every row's maximum is that of
    a real score; all, where a tile is done again. Of the rest those before `full_begin` have keys before some query's
    first one.
    """
    begin = tile_begin
    full_begin = tile_begin
    end = tile_end
    if C.is_banded:
        begin, end = range_of_blocks(first_query, 64, sizes, C)
        end = gl.minimum(end, tile_end)
    all_see = end_before(first_query + 1, sizes, C)
    if first_query < 0:
        begin = tile_begin
        end = tile_begin
    full_end = all_see // C.tile_n
    if C.lazy_max:
        full_end = gl.maximum(all_see - 1, 0) // C.tile_n
        if exact_tile > 0:
            full_end = 0
    if C.is_two_sided:
        last_begin = begin_of_keys(gl.minimum(first_query + 64, sizes.seq_q) - 1, sizes, C)
        full_begin = (gl.maximum(last_begin, 0) + C.tile_n - 1) // C.tile_n
        full_end = gl.maximum(full_end, begin)
    return SeenBlocks(begin, full_begin, full_end, end)


@gluon.jit
def seen_by_tile(first_query, sizes, C: gl.constexpr):
    """`SeenBlocks` of all queries of a tile, by what is not the block mask."""
    begin, end = range_of_blocks(first_query, C.tile_m, sizes, C)
    full_begin = 0
    full_end = end_before(first_query + 1, sizes, C) // C.tile_n
    if C.is_two_sided:
        last_begin = begin_of_keys(gl.minimum(first_query + C.tile_m, sizes.seq_q) - 1, sizes, C)
        full_begin = (gl.maximum(last_begin, 0) + C.tile_n - 1) // C.tile_n
    return SeenBlocks(begin, full_begin, full_end, end)


@gluon.jit
def seen_on_axis(first_query, offset, sizes, C: gl.constexpr):
    """`seen_by_tile` in tiles of the packed axis, of a sequence whose keys begin at `offset` there."""
    begin, full_begin = 0, 0
    if C.is_two_sided:
        begin = gl.maximum(begin_of_keys(first_query, sizes, C), 0)
        last_begin = begin_of_keys(gl.minimum(first_query + C.tile_m, sizes.seq_q) - 1, sizes, C)
        full_begin = gl.maximum(last_begin, 0)
    full_end = end_before(first_query + 1, sizes, C)
    end = end_before(gl.minimum(first_query + C.tile_m, sizes.seq_q), sizes, C)
    end = gl.where(end > 0, (offset + end + C.tile_n - 1) // C.tile_n, 0)
    full_begin = (offset + full_begin + C.tile_n - 1) // C.tile_n
    return SeenBlocks((offset + begin) // C.tile_n, full_begin, (offset + full_end) // C.tile_n, end)


MINUS_INF, ZERO = gl.constexpr("0fFF800000"), gl.constexpr("0f00000000")
"""Numbers in PTX."""


@gluon.jit
def keep_within(values, passed, reach, HIDDEN: gl.constexpr):
    """Values where ``0 <= passed < reach``, else HIDDEN: one unsigned comparison."""
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, " + HIDDEN + ", p;}", "=f,f,r,r",
        [values, passed, reach], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def keep_where(values, TEST: gl.constexpr, number, HIDDEN: gl.constexpr):
    """Values where a number stands to 0 as TEST says, else HIDDEN."""
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp." + TEST + ".s32 p, $2, 0; selp.f32 $0, $1, " + HIDDEN + ", p;}", "=f,f,r",
        [values, number], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mask_scores(
    scores, first_query, first_key, end_key, sizes, AT_BEGIN: gl.constexpr, AT_END: gl.constexpr, C: gl.constexpr
):
    """Scores, -inf where a query does not see a key: before its first key, behind its last, or both. Nor does it see
    one from `end_key` on, which another tile of the packed axis has.

    One comparison each: of both, how far a key is from the first one, unsigned, with the number that the query sees,
    which has at least one key before ``min(end, seq_kv)``. With gl.where, whose conditions are packed, twice as slow.
    """
    queries = first_query + gl.arange(0, 64, C.row)
    if C.is_two_sided:  # a row after the last query sees what that does: lazy weights without a maximum would overflow
        queries = gl.minimum(queries, sizes.seq_q - 1)
    begin = queries
    if AT_BEGIN:
        begin = begin_of_keys(queries, sizes, C)  # [64]
    end = end_of_keys(queries, sizes, C)
    keys = first_key + gl.arange(0, C.tile_n, C.column)  # [tile_n]
    if C.packed_blocks:
        keys = gl.where(keys < end_key, keys, sizes.seq_kv)
    passed = keys[None, :] - begin[:, None]  # [64, tile_n]
    if AT_BEGIN and AT_END:
        scores = keep_within(scores, passed, (end - begin)[:, None], MINUS_INF)
    elif AT_BEGIN:
        scores = keep_where(scores, "ge", passed, MINUS_INF)
    elif AT_END:
        scores = keep_where(scores, "gt", end[:, None] - keys[None, :], MINUS_INF)
    return scores


# ---------------------------------------------------------------- the modification of scores

# `of_score` is (batch, query head, aux), and aux what the expression reads: see `multiattn.triton.staged`.


@gluon.jit
def _queries_from(first_query, C: gl.constexpr):
    return (first_query + gl.arange(0, 64, C.row))[:, None]


@gluon.jit
def _keys_from(first_key, C: gl.constexpr):
    return (first_key + gl.arange(0, C.tile_n, C.column))[None, :]


@gluon.jit
def score_tile(first_query, of_score, sizes, C: gl.constexpr):
    """`of_score` with what the expression has of a tile's queries."""
    batch, head, aux = of_score
    if C.score.once is not None:
        # Rows before the first of all are those of whole warpgroups, and are not used: any others are read for them.
        queries = _queries_from(gl.maximum(first_query, 0), C)  # [64, 1]
        if C.packed:  # rows behind all sequences are no positions that a tensor has room for
            queries = gl.where(sizes.seq_kv > 0, queries, 0)
        aux = aux + C.score.once(batch, head, queries, 0, sizes.seq_q, sizes.seq_kv, aux)
    return batch, head, aux


@gluon.jit
def score_block(first_query, first_key, of_score, sizes, C: gl.constexpr):
    """`of_score` with what the expression has of a block of keys and needs no product for."""
    batch, head, aux = of_score
    if C.score.ahead is not None:
        queries, keys = _queries_from(first_query, C), _keys_from(first_key, C)  # [64, 1], [1, tile_n]
        aux = aux + C.score.ahead(batch, head, queries, keys, sizes.seq_q, sizes.seq_kv, aux)
    return batch, head, aux


@gluon.jit
def modify(scores, first_query, first_key, of_score, sizes, C: gl.constexpr):
    """Products as they are; if there is an expression, its scores in the log2 domain, which have the scale."""
    if C.has_score:
        if not C.loads_early:
            of_score = score_block(first_query, first_key, of_score, sizes, C)
        batch, head, aux = of_score
        queries, keys = _queries_from(first_query, C), _keys_from(first_key, C)  # [64, 1], [1, tile_n]
        (scores,) = C.score.rest(scores, batch, head, queries, keys, sizes.seq_q, sizes.seq_kv, aux)
    return scores


@gluon.jit
def hide_in_partial(scores, first_query, first_key, of_score, sizes, C: gl.constexpr):
    """Scores of a partial block, -inf where its mask hides a key."""
    batch, head, aux = of_score
    queries, keys = _queries_from(first_query, C), _keys_from(first_key, C)  # [64, 1], [1, tile_n]
    seen = C.score.mask(batch, head, queries, keys, sizes.seq_q, sizes.seq_kv, aux)
    return keep_where(scores, "ne", gl.where(seen, 1, 0), MINUS_INF)


@gluon.jit
def _near_and_on(rows, keys):
    """fp32 numbers whose difference is ``rows - keys``: a thread has two of the first for a row, and constants.

    For it has two of every eight keys, and keys begin at a multiple of their number. Written with a mask, not as
    ``keys - on``, as LLVM finds these two only so.
    """
    on = keys & (keys.shape[1] - 8)
    return (rows - (keys & (7 - keys.shape[1]))).to(gl.float32), on.to(gl.float32)


@gluon.jit
def distance(rows, keys):
    """``f32(rows - keys)``, for generated functions: an addition for each score. Keys are consecutive, ``[1, N]``."""
    near, on = _near_and_on(rows, keys)
    return near - on


@gluon.jit
def scaled_distance(rows, keys, factor):
    """Distances of rows and keys times a factor that depends on no key."""
    near, on = _near_and_on(rows, keys)
    return near * factor - on * factor


# ---------------------------------------------------------------- the softmax


@gluon.jit
def take_sign(scores, C: gl.constexpr):
    """Scores with the sign of the scale. A minus costs nothing: it becomes a modifier of what reads them."""
    if C.scale_sign < 0:
        scores = -scores
    if C.scale_sign == 0:
        scores = scores * 0.0  # not zeros: inf * 0 must stay nan
    return scores


@gluon.jit
def finish_scores(scores, block, of_score, tile, AT_BEGIN: gl.constexpr, AT_END: gl.constexpr, C: gl.constexpr):
    """Products as scores, which have their sign, what modifies them, and the mask."""
    scores = take_sign(scores, C)
    scores = modify(scores, tile.first_query, block * C.tile_n, of_score, tile.sizes, C)
    return mask_scores(scores, tile.first_query, block * C.tile_n, 0, tile.sizes, AT_BEGIN, AT_END, C)


@gluon.jit
def finish_listed(scores, listed, of_score, tile, HIDES: gl.constexpr, C: gl.constexpr):
    """`finish_scores` of a listed tile, by its word; unless HIDES all queries see all of it."""
    first_key = first_of_listed(listed, C)
    scores = take_sign(scores, C)
    scores = modify(scores, tile.first_query, first_key, of_score, tile.sizes, C)
    if HIDES:
        if C.has_mask:
            if listed % 2 == 1:
                scores = hide_in_partial(scores, tile.first_query, first_key, of_score, tile.sizes, C)
        at_end: gl.constexpr = C.is_banded or C.ragged
        first_query, sizes = tile.first_query, tile.sizes
        scores = mask_scores(scores, first_query, first_key, listed // 4, sizes, C.is_two_sided, at_end, C)
    return scores


@gluon.jit
def raise_max(scores, row_max, scale):
    """The maximum so far, and what older sums and outputs must be multiplied by."""
    higher = gl.maximum(row_max, gl.max(scores, 1) * scale)
    return higher, gl.exp2(row_max - higher)


@gluon.jit
def exponentiate(scores, base, scale):
    """Weights ``2^(scores * scale - base)``."""
    return gl.exp2(scores * scale - base[:, None])


@gluon.jit
def sum_of_thread(weights, C: gl.constexpr):
    """``[64, 4]``: a row's sum of what each of its four threads has. Nothing is exchanged until the tile ends."""
    return gl.sum(gl.sum(weights.reshape([64, C.tile_n // 8, 4, 2]), 3), 1)


@gluon.jit
def top_of_thread(scores, C: gl.constexpr):
    """``[64, 4]``: a row's largest score of those that each of its four threads has, as `sum_of_thread`."""
    return gl.max(gl.max(scores.reshape([64, C.tile_n // 8, 4, 2]), 3), 1)


@gluon.jit
def found_max(row_max):
    """The largest score of each row ``[64]`` in natural units, of a maximum that starts as `LOWEST`; -inf of none."""
    return gl.where(row_max == LOWEST, float("-inf"), row_max) * LN_2


@gluon.jit
def add_sink(row_max, sums, sink):
    """Maxima and sums of weights ``[64]`` with one more logit, in the log2 domain; and what older weights are worth.

    Of a row that saw no key the maximum is `LOWEST`: with a sink of -inf it stays, and so do the rest of all rows.
    """
    higher = gl.maximum(row_max, sink)
    decay = gl.exp2(row_max - higher)
    return higher, sums * decay + gl.exp2(sink - higher), decay


@gluon.jit
def pack_weights(weights, like):
    """Weights in 16 bit, in the dtype of `like`.

    Volatile, or they are packed before the end of the product that still reads the registers they go to, and copied.
    """
    if like.dtype == gl.bfloat16:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [weights], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [weights], gl.float16, is_pure=False, pack=2
        )
    return packed


@gluon.jit
def keep_packed(weights):
    """Weights kept packed between two loops. Else their halves become variables, and are packed and unpacked."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weights], weights.dtype, is_pure=False, pack=2)
