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
    end_of_tile,
    listed_rows,
    listed_tile,
    load_own,
    load_streamed,
    modified,
    my_queries,
    needs_mask,
    own_positions,
    seek,
    store_rows,
    visible_keys,
    walk_keys,
    with_sign,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where a row's maximum starts: the lowest finite fp32. With -inf a row that sees nothing would need guards."""


# Lengths of 1 as constants crash the assembler of Triton 3.6.0 (with a descriptor and a register cap), and buy nothing.
@triton.jit(do_not_specialize=["tiles"])
def attention_forward(
    q,  # pointer, [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]; a pointer, or a tensor descriptor with block [1, 1, tile_n, width.pad]
    v,  # like k, of Dv columns
    out,  # pointer, [B, Hq, Sq, Dv]
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    scale,  # |scale| in the domain of the step (times log2(e) for exp2), positive; with an expression 1 in log2
    sizes,  # seq_q, seq_kv, heads_q, group (query heads that share one key/value head), batch_heads (B * Hq)
    strides,  # of q, k and v by (batch, head, row), in units of C.vector elements, None where a descriptor has them;
    #           of out in units of C.out_vector
    reach,  # left and right of a two-sided mask; None for other kinds
    sinks,  # pointer, fp32 [Hq], contiguous, at a multiple of 4 bytes; None where there are none
    tops,  # pointer, like lse: the largest score of each row; None where nobody asks
    aux,  # what the program of scores reads, as its functions have it; None without one
    lists,  # the lists of a block mask, as `listed_blocks` has them; None without one
    entries,  # pointer, the list of tiles of queries of a packed batch; None for others
    tiles,  # how many there are
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """Attention of one tile of tile_m queries: writes out ``[tile_m, width_v]`` and lse ``[tile_m]``."""
    first_row, batch_head, batch, at, at_kv, len_q, len_kv = my_queries(entries, tiles, sizes, C)
    if C.packed:
        if batch < 0:
            return
    of_score, band = (batch, at[1], aux), (len_q, len_kv, reach.left, reach.right)
    q = seek(q, strides.q, at, False, C.vector, C)
    kv = (seek(k, strides.k, at_kv, C.descriptor, C.vector, C), seek(v, strides.v, at_kv, C.descriptor, C.vector, C))
    out = seek(out, strides.out, at, False, C.out_vector, C)
    lse += batch_head.to(tl.int64) * sizes.seq_q
    if C.packed:
        lse += at[0]

    end_row = end_of_tile(first_row, at[0], len_q, C.tile_m, C)
    q_tile = load_own(q, strides.q, first_row, end_row, C.tile_m, C.width, C.vector, C)  # [tile_m, width.pad]
    q_tile = with_sign(q_tile, C)
    acc = tl.full([C.tile_m, C.width_v.pad], 0.0, tl.float32)
    row_sum = tl.full([C.tile_m], 0.0, tl.float32)
    row_max = tl.full([C.tile_m], LOWEST, tl.float32)
    tile = (q_tile, kv, strides, first_row + tl.arange(0, C.tile_m), at_kv, band, scale, of_score)
    sums = (acc, row_sum, row_max)
    acc, row_sum, row_max = walk_keys(_walk, sums, tile, first_row, at[0], band, of_score, lists, True, C)
    if tops is not None:
        tops += batch_head.to(tl.int64) * sizes.seq_q
        if C.packed:
            tops += at[0]
        own = first_row + tl.arange(0, C.tile_m)
        tl.store(tops + own, found_max(row_max) * C.step.ln_base, mask=own < end_row)
    if sinks is not None:
        acc, row_sum, row_max = add_sink(acc, row_sum, row_max, tl.load(sinks + at[1]), C)
    _store(out, strides.out, lse, acc, row_sum, row_max, first_row, end_row, C)


@triton.jit
def _walk(sums, tile, begin, end, blocks, MASKED: tl.constexpr, PARTIAL: tl.constexpr, C: tl.constexpr):
    """Online softmax over the keys [begin, end), in blocks of tile_n, or over so many tiles of listed blocks.

    `sums` is acc ``[tile_m, width_v.pad]``, not yet divided by row_sum ``[tile_m]``; row_max and rows are ``[tile_m]``.
    """
    acc, row_sum, row_max = sums
    q_tile, kv, strides, rows, at_kv, band, scale, of_score = tile
    seq_kv = band[1]
    ahead = listed_tile(begin, end, blocks, C.key_tiles, C.tile_n, C)
    for place in tl.range(begin, end, C.key_step, num_stages=C.stages):
        first_key, end_key = place, seq_kv
        if C.blocks is not None:
            first_key, end_key = listed_rows(ahead, at_kv[0], seq_kv, C.tile_n, C)
            ahead = listed_tile(place + 1, end, blocks, C.key_tiles, C.tile_n, C)
        k_tile = load_streamed(kv[0], strides.k, at_kv, first_key, end_key, C.tile_n, C.width, MASKED, C.vector, C)
        scores = tl.dot(q_tile, tl.trans(k_tile))  # [tile_m, tile_n] fp32
        scores = modified(scores, rows[:, None], (first_key + tl.arange(0, C.tile_n))[None, :], of_score, band, C)
        if MASKED:
            if PARTIAL or not C.asks_keys or needs_mask(first_key, end_key, blocks, C):
                keys = first_key + tl.arange(0, C.tile_n)
                if C.packed_blocks:
                    keys = own_positions(keys, end_key, seq_kv)
                visible = visible_keys(rows[:, None], keys[None, :], of_score, band, PARTIAL, C)
                scores = tl.where(visible, scores, float("-inf"))

        new_max, shifted = _shift(scores, row_max, scale, C)
        weights = _power(shifted, False, C)
        decay = _power(row_max - new_max, False, C)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        row_max = new_max

        v_tile = load_streamed(kv[1], strides.v, at_kv, first_key, end_key, C.tile_n, C.width_v, MASKED, C.vector, C)
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
def found_max(row_max):
    """The largest score of each row, -inf where it saw no key."""
    return tl.where(row_max == LOWEST, float("-inf"), row_max)


@triton.jit
def add_sink(acc, row_sum, row_max, sink, C: tl.constexpr):
    """One more column of all rows, a logit that is not scaled and has no value. -inf changes nothing."""
    sink = sink * (1.0 / C.step.ln_base)
    new_max = tl.maximum(row_max, sink)
    decay = _power(row_max - new_max, False, C)
    return acc * decay[:, None], row_sum * decay + _power(sink - new_max, False, C), new_max


@triton.jit
def _store(out, out_strides, lse, acc, row_sum, row_max, first_row, end, C: tl.constexpr):
    """The epilogue. A row that saw no key and no sink has row_sum 0: out is 0 / 1, lse is LOWEST + log(0) = -inf."""
    in_range = first_row + tl.arange(0, C.tile_m) < end
    lse_row = (row_max + _power(row_sum, True, C)) * C.step.ln_base  # [tile_m]
    tl.store(lse + first_row + tl.arange(0, C.tile_m), lse_row, mask=in_range)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    if C.step.reciprocal:
        out_tile = acc * (1.0 / row_sum)[:, None]  # [tile_m, width_v.pad]
    else:
        out_tile = tl.math.div_rn(acc, row_sum[:, None])
    store_rows(out, out_strides, out_tile, first_row, end, C.tile_m, C.width_v, C)
