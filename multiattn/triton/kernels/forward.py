"""The forward kernel: one template for every rung of the ladder, whose `TritonStep` is among its constants.

FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 1), from the second rung on in the log2 domain. A program owns one
tile of queries of one head. It first walks the key blocks that all its rows see, with no mask, then the few that need
one: the diagonal and the ragged end. Under a two-sided mask it walks all in order, and asks of each whether it needs
one. Under a block mask it walks the tiles of the blocks that are listed, full ones first. Plain `triton.language` only,
so that the same source compiles for every arch and is interpreted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.tiles import (
    key_blocks,
    listed_blocks,
    listed_tile,
    load_own,
    load_streamed,
    modified,
    my_queries,
    needs_mask,
    seek,
    store_rows,
    visible_keys,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where a row's maximum starts: the lowest finite fp32. With -inf a row that sees nothing would need guards."""


# Lengths of 1 as constants crash the assembler of Triton 3.6.0 (with a descriptor and a register cap), and buy nothing.
# They are no tuple, as Triton 3.6 and 3.9 specialise on what is in one whatever they are told.
@triton.jit(do_not_specialize=["seq_q", "seq_kv", "left", "right", "tiles"])
def attention_forward(
    q,  # pointer, [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]; a pointer, or a tensor descriptor with block [1, 1, tile_n, head_pad]
    v,  # like k
    out,  # pointer, like q
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    scale,  # |scale| in the domain of the step (times log2(e) for exp2), positive; with an expression 1 in log2
    seq_q,
    seq_kv,
    heads,  # (Hq, query heads that share one key/value head, B * Hq)
    q_strides,  # of (batch, head, row), in units of C.vector elements
    k_strides,  # the same; None where a descriptor has them
    v_strides,
    out_strides,  # in units of C.out_vector elements
    left,  # with right, the reach of a two-sided mask; None for other kinds
    right,
    sinks,  # pointer, fp32 [Hq], contiguous, at a multiple of 4 bytes; None where there are none
    aux,  # what the program of scores reads, as its functions have it; None without one
    lists,  # the lists of a block mask, as `listed_blocks` has them; None without one
    entries,  # pointer, the list of tiles of queries of a packed batch; None for others
    tiles,  # how many there are
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """Attention of one tile of tile_m queries: writes out ``[tile_m, head_dim]`` and lse ``[tile_m]``."""
    first_row, batch_head, batch, at, at_kv, len_q, len_kv = my_queries(entries, tiles, seq_q, seq_kv, heads, C)
    if C.packed:
        if batch < 0:
            return
    head, band = at[1], (len_q, len_kv, left, right)
    q = seek(q, q_strides, at, False, C.vector, C)
    k = seek(k, k_strides, at_kv, C.descriptor, C.vector, C)
    v = seek(v, v_strides, at_kv, C.descriptor, C.vector, C)
    out = seek(out, out_strides, at, False, C.out_vector, C)
    lse += batch_head.to(tl.int64) * seq_q
    if C.packed:
        lse += at[0]

    kv = (k, v, k_strides, v_strides)
    acc, row_sum, row_max = _attend(q, q_strides, kv, first_row, at_kv, band, scale, (batch, head, aux), lists, C)
    if sinks is not None:
        acc, row_sum, row_max = _add_sink(acc, row_sum, row_max, tl.load(sinks + head), C)
    _store(out, out_strides, lse, acc, row_sum, row_max, first_row, len_q, C)


@triton.jit
def _attend(q, q_strides, kv, first_row, at_kv, band, scale, of_score, lists, C: tl.constexpr):
    """tile_m queries over all keys they see: acc ``[tile_m, head_pad]``, row_sum and row_max ``[tile_m]``."""
    q_tile = load_own(q, q_strides, first_row, band[0], C.tile_m, C.vector, C)  # [tile_m, head_pad]
    if C.scale_sign < 0:
        q_tile = -q_tile
    if C.scale_sign == 0:
        q_tile = (q_tile * 0.0).to(q_tile.dtype)  # not zeros: inf * 0 must stay nan

    rows = first_row + tl.arange(0, C.tile_m)
    acc = tl.full([C.tile_m, C.head_pad], 0.0, tl.float32)
    row_sum = tl.full([C.tile_m], 0.0, tl.float32)
    row_max = tl.full([C.tile_m], LOWEST, tl.float32)
    if C.blocks is not None:
        batch, head, _aux = of_score
        if C.blocks.has_full:
            blocks, end = listed_blocks(lists, batch, head, first_row // C.blocks.queries, True, C.key_tiles)
            acc, row_sum, row_max = _walk(
                acc, row_sum, row_max, q_tile, kv, 0, end, blocks, rows, at_kv, band, scale, of_score,
                C.hides_in_full, False, C,
            )  # fmt: skip
        blocks, end = listed_blocks(lists, batch, head, first_row // C.blocks.queries, False, C.key_tiles)
        acc, row_sum, row_max = _walk(
            acc, row_sum, row_max, q_tile, kv, 0, end, blocks, rows, at_kv, band, scale, of_score,
            C.hides_in_partial, True, C,
        )  # fmt: skip
    else:
        blocks = key_blocks(first_row, band, C)
        begin, full_begin, full_end, end = blocks
        if C.two_sided:  # one loop, as three would fill and drain the pipeline three times
            acc, row_sum, row_max = _walk(
                acc, row_sum, row_max, q_tile, kv, begin, end, blocks, rows, at_kv, band, scale, of_score,
                True, False, C,
            )  # fmt: skip
        else:
            acc, row_sum, row_max = _walk(
                acc, row_sum, row_max, q_tile, kv, full_begin, full_end, blocks, rows, at_kv, band, scale, of_score,
                False, False, C,
            )  # fmt: skip
            # Skipped where there is nothing to mask: of an empty loop Triton still sets up the pipeline, and takes it
            # down.
            if C.banded or full_end < end:
                acc, row_sum, row_max = _walk(
                    acc, row_sum, row_max, q_tile, kv, full_end, end, blocks, rows, at_kv, band, scale, of_score,
                    True, False, C,
                )  # fmt: skip
    return acc, row_sum, row_max


@triton.jit
def _walk(
    acc, row_sum, row_max, q_tile, kv, begin, end, blocks, rows, at_kv, band, scale, of_score,
    MASKED: tl.constexpr, PARTIAL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, end), in blocks of tile_n, or over so many tiles of listed blocks.

    acc ``[tile_m, head_pad]`` is not yet divided by row_sum ``[tile_m]``; row_max and rows are ``[tile_m]``.
    """
    k, v, k_strides, v_strides = kv
    seq_kv = band[1]
    ahead = listed_tile(begin, end, blocks, C.key_tiles, C.tile_n, C)
    for place in tl.range(begin, end, C.key_step, num_stages=C.stages):
        first_key = place
        if C.blocks is not None:
            first_key = ahead
            ahead = listed_tile(place + 1, end, blocks, C.key_tiles, C.tile_n, C)
        k_tile = load_streamed(k, k_strides, at_kv, first_key, seq_kv, C.tile_n, MASKED, C.vector, C)
        scores = tl.dot(q_tile, tl.trans(k_tile))  # [tile_m, tile_n] fp32
        scores = modified(scores, rows[:, None], (first_key + tl.arange(0, C.tile_n))[None, :], of_score, band, C)
        if MASKED:
            if PARTIAL or not C.asks_keys or needs_mask(first_key, blocks, band, C):
                keys = first_key + tl.arange(0, C.tile_n)
                visible = visible_keys(rows[:, None], keys[None, :], of_score, band, PARTIAL, C)
                scores = tl.where(visible, scores, float("-inf"))

        new_max, shifted = _shift(scores, row_max, scale, C)
        weights = _power(shifted, False, C)
        decay = _power(row_max - new_max, False, C)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        row_max = new_max

        v_tile = load_streamed(v, v_strides, at_kv, first_key, seq_kv, C.tile_n, MASKED, C.vector, C)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc)
    return acc, row_sum, row_max


@triton.jit
def _shift(scores, row_max, scale, C: tl.constexpr):
    """The new maximum of each row ``[tile_m]``, and the scaled scores less it ``[tile_m, tile_n]``."""
    if C.step.scale_after_max:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        shifted = scores * scale - new_max[:, None]
    else:
        scores = scores * scale
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shifted = scores - new_max[:, None]
    return new_max, shifted


@triton.jit
def _power(x, INVERSE: tl.constexpr, C: tl.constexpr):
    """2 or e, as the step has it, to the power of x; INVERSE: the logarithm of x to that base."""
    if C.step.exp2:
        if INVERSE:
            y = tl.math.log2(x)
        else:
            y = tl.math.exp2(x)
    else:
        if INVERSE:
            y = tl.math.log(x)
        else:
            y = tl.math.exp(x)
    return y


@triton.jit
def _add_sink(acc, row_sum, row_max, sink, C: tl.constexpr):
    """One more column of all rows, a logit that is not scaled and has no value. -inf changes nothing."""
    sink = sink * (1.0 / C.step.ln_base)
    new_max = tl.maximum(row_max, sink)
    decay = _power(row_max - new_max, False, C)
    return acc * decay[:, None], row_sum * decay + _power(sink - new_max, False, C), new_max


@triton.jit
def _store(out, out_strides, lse, acc, row_sum, row_max, first_row, seq_q, C: tl.constexpr):
    """The epilogue. A row that saw no key and no sink has row_sum 0: out is 0 / 1, lse is LOWEST + log(0) = -inf."""
    in_range = first_row + tl.arange(0, C.tile_m) < seq_q
    lse_row = (row_max + _power(row_sum, True, C)) * C.step.ln_base  # [tile_m]
    tl.store(lse + first_row + tl.arange(0, C.tile_m), lse_row, mask=in_range)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    if C.step.reciprocal:
        out_tile = acc * (1.0 / row_sum)[:, None]  # [tile_m, head_pad]
    else:
        out_tile = tl.math.div_rn(acc, row_sum[:, None])
    store_rows(out, out_strides, out_tile, first_row, seq_q, C.tile_m, C)
