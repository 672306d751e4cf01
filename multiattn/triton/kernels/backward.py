"""The backward kernels: gradients of q, k and v from what a forward saved.

FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 2) in the log2 domain. Weights are made again from the scores and
the saved lse. In one pass over the keys (`prepare_rows`, `gradients_of_keys`, `finish_dq`) every block of keys adds its
share to an fp32 sum of dq, in any order; in two passes (`gradient_of_queries`, `gradients_of_keys`) dq comes from a
walk over the keys, as out did, and the bits are the same each time. Plain `triton.language` only, as forward.

Strides are of (batch, head, row): of q, k and v in units of C.vector elements, of the others in units of C.out_vector.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.tiles import (
    inside,
    key_blocks,
    listed_blocks,
    listed_tile,
    load_own,
    load_streamed,
    modified_and_slope,
    my_keys,
    my_queries,
    my_tile,
    needs_mask,
    query_blocks,
    seeing_rows,
    seek,
    store_rows,
    tile_offsets,
    visible_keys,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["dlse_rows", "seq_q"])
def prepare_rows(
    out,  # pointer, [B, Hq, Sq, D]
    dout,  # pointer, like out
    dlse,  # pointer, fp32 [B, Hq, Sq], contiguous; any pointer where dlse_rows is 0
    delta,  # pointer, fp32 [B, Hq, Sq], contiguous
    dq_sum,  # pointer, fp32 [B, Hq, Sq, D], contiguous
    dlse_rows,  # seq_q, or 0 where there is no dlse
    seq_q,
    heads_q,
    batch_heads,  # B * Hq
    out_strides,  # of out and dout
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """Before the pass: delta of tile_m rows, and zero in their part of dq_sum."""
    tile, batch_head = my_tile(seq_q, batch_heads, False, C.tile_m, 1)
    at = (batch_head // heads_q, batch_head % heads_q)
    out = seek(out, out_strides, at, False, C.out_vector, C)
    dout = seek(dout, out_strides, at, False, C.out_vector, C)
    first_row = tile * C.tile_m
    dout_tile = load_own(dout, out_strides, first_row, seq_q, C.tile_m, C.out_vector, C)  # [tile_m, head_pad]
    place = (batch_head, 0, seq_q)
    _delta_of_rows(out, out_strides, dout_tile, dlse, delta, dlse_rows, place, first_row, seq_q, C)
    dq_sum += (batch_head.to(tl.int64) * seq_q + first_row) * C.head_dim
    tl.store(
        dq_sum + tile_offsets(C.head_dim, C.tile_m, 1, False, C),
        tl.full([C.tile_m, C.head_pad], 0.0, tl.float32),
        mask=inside(first_row, seq_q, C.tile_m, C),
    )


@triton.jit(do_not_specialize=["seq_q"])
def finish_dq(
    dq_sum,  # pointer, fp32 [B, Hq, Sq, D], contiguous
    dq,  # pointer, [B, Hq, Sq, D]
    grad_factor,  # scale, with its sign
    seq_q,
    heads_q,
    batch_heads,  # B * Hq
    dq_strides,
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """After the pass: dq of tile_m rows from their sum."""
    tile, batch_head = my_tile(seq_q, batch_heads, False, C.tile_m, 1)
    first_row = tile * C.tile_m
    dq = seek(dq, dq_strides, (batch_head // heads_q, batch_head % heads_q), False, C.out_vector, C)
    dq_sum += (batch_head.to(tl.int64) * seq_q + first_row) * C.head_dim
    total = tl.load(  # [tile_m, head_pad]
        dq_sum + tile_offsets(C.head_dim, C.tile_m, 1, False, C), mask=inside(first_row, seq_q, C.tile_m, C)
    )
    store_rows(dq, dq_strides, total * grad_factor, first_row, seq_q, C.tile_m, C)


# ---------------------------------------------------------------- the pass over the keys


@triton.jit(do_not_specialize=["dlse_rows", "seq_q", "seq_kv", "left", "right", "tiles"])
def gradient_of_queries(
    q,  # pointer, [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]; a pointer, or a tensor descriptor with block [1, 1, tile_n, head_pad]
    v,  # like k
    out,  # pointer, like q
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    dout,  # pointer, like out
    dlse,  # pointer, like lse; any pointer where dlse_rows is 0
    dq,  # pointer, like out
    delta,  # pointer, like lse: written, for the pass over the queries
    score_factor,  # scale * log2(e), with its sign; 1 with an expression
    grad_factor,  # scale, with its sign
    dlse_rows,  # seq_q, or 0 where there is no dlse
    seq_q,
    seq_kv,
    heads,  # (Hq, query heads that share one key/value head, B * Hq)
    q_strides,
    k_strides,  # None where a descriptor has them
    v_strides,
    out_strides,  # of out, dout and dq
    left,  # with right, the reach of a two-sided mask; None for other kinds
    right,
    aux,  # what the program of scores reads, as its functions have it; None without one
    lists,  # the lists of a block mask, as `listed_blocks` has them; None without one
    entries,  # pointer, the list of tiles of queries of a packed batch; None for others
    tiles,  # how many there are
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """First of two passes: dq ``[tile_m, head_dim]`` and delta ``[tile_m]`` of one tile of queries."""
    first_row, batch_head, batch, at, at_kv, len_q, len_kv = my_queries(entries, tiles, seq_q, seq_kv, heads, C)
    if C.packed:
        if batch < 0:
            return
    head, band = at[1], (len_q, len_kv, left, right)
    q = seek(q, q_strides, at, False, C.vector, C)
    k = seek(k, k_strides, at_kv, C.descriptor, C.vector, C)
    v = seek(v, v_strides, at_kv, C.descriptor, C.vector, C)
    out = seek(out, out_strides, at, False, C.out_vector, C)
    dout = seek(dout, out_strides, at, False, C.out_vector, C)
    dq = seek(dq, out_strides, at, False, C.out_vector, C)

    q_tile = load_own(q, q_strides, first_row, len_q, C.tile_m, C.vector, C)  # [tile_m, head_pad]
    dout_tile = load_own(dout, out_strides, first_row, len_q, C.tile_m, C.out_vector, C)  # [tile_m, head_pad]
    place = (batch_head, at[0], seq_q)
    row_delta = _delta_of_rows(  # [tile_m]
        out, out_strides, dout_tile, dlse, delta, dlse_rows, place, first_row, len_q, C
    )
    lse += batch_head.to(tl.int64) * seq_q
    if C.packed:
        lse += at[0]
    row_lse = _lse_of_rows(lse, first_row, len_q, C)  # [tile_m]

    own, kv, of_score = (q_tile, dout_tile, row_lse, row_delta), (k, v, k_strides, v_strides), (batch, head, aux)
    acc = tl.full([C.tile_m, C.head_pad], 0.0, tl.float32)
    if C.blocks is not None:
        if C.blocks.has_full:
            blocks, end = listed_blocks(lists, batch, head, first_row // C.blocks.queries, True, C.key_tiles)
            acc = _walk_keys(
                acc, own, kv, 0, end, blocks, first_row, at_kv, band, score_factor, of_score, C.hides_in_full, False, C
            )
        blocks, end = listed_blocks(lists, batch, head, first_row // C.blocks.queries, False, C.key_tiles)
        acc = _walk_keys(
            acc, own, kv, 0, end, blocks, first_row, at_kv, band, score_factor, of_score, C.hides_in_partial, True, C
        )
    else:
        blocks = key_blocks(first_row, band, C)
        begin, full_begin, full_end, end = blocks
        if C.two_sided:  # one loop, as three would fill and drain the pipeline three times
            acc = _walk_keys(
                acc, own, kv, begin, end, blocks, first_row, at_kv, band, score_factor, of_score, True, False, C
            )
        else:
            acc = _walk_keys(
                acc, own, kv, full_begin, full_end, blocks, first_row, at_kv, band, score_factor, of_score,
                False, False, C,
            )  # fmt: skip
            acc = _walk_keys(
                acc, own, kv, full_end, end, blocks, first_row, at_kv, band, score_factor, of_score, True, False, C
            )
    store_rows(dq, out_strides, acc * grad_factor, first_row, len_q, C.tile_m, C)


@triton.jit
def _walk_keys(
    acc, own, kv, begin, end, blocks, first_row, at_kv, band, score_factor, of_score,
    MASKED: tl.constexpr, PARTIAL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add to acc, which is dq ``[tile_m, head_pad]`` but for its factor, the keys [begin, end), in blocks of tile_n.

    Or so many tiles of listed blocks.
    """
    q_tile, dout_tile, row_lse, row_delta = own
    k, v, k_strides, v_strides = kv
    seq_kv = band[1]
    ahead = listed_tile(begin, end, blocks, C.key_tiles, C.tile_n, C)
    for place in tl.range(begin, end, C.key_step, num_stages=C.stages):
        first_key = place
        if C.blocks is not None:
            first_key = ahead
            ahead = listed_tile(place + 1, end, blocks, C.key_tiles, C.tile_n, C)
        k_tile = load_streamed(k, k_strides, at_kv, first_key, seq_kv, C.tile_n, MASKED, C.vector, C)
        v_tile = load_streamed(v, v_strides, at_kv, first_key, seq_kv, C.tile_n, MASKED, C.vector, C)
        scores = tl.dot(q_tile, tl.trans(k_tile))  # [tile_m, tile_n] fp32
        scores, slope = modified_and_slope(
            scores, (first_row + tl.arange(0, C.tile_m))[:, None], (first_key + tl.arange(0, C.tile_n))[None, :],
            of_score, band, C,
        )  # fmt: skip
        dweights = tl.dot(dout_tile, tl.trans(v_tile))  # [tile_m, tile_n] fp32
        weights = tl.math.exp2(scores * score_factor - row_lse[:, None])
        dscores = weights * (dweights - row_delta[:, None]) * slope
        if MASKED:  # selected, not multiplied: a masked weight may be inf
            if PARTIAL or not C.asks_keys or needs_mask(first_key, blocks, band, C):
                rows = first_row + tl.arange(0, C.tile_m)
                keys = first_key + tl.arange(0, C.tile_n)
                visible = visible_keys(rows[:, None], keys[None, :], of_score, band, PARTIAL, C)
                dscores = tl.where(visible, dscores, 0.0)
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
    return acc


# ---------------------------------------------------------------- the pass over the queries


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "left", "right", "tiles"])
def gradients_of_keys(
    q,  # [B, Hq, Sq, D]; a pointer, or a tensor descriptor with block [1, 1, tile_m, head_pad]
    k,  # pointer, [B, Hkv, Skv, D]
    v,  # pointer, like k
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    dout,  # like q
    delta,  # pointer, like lse
    dq_sum,  # fp32 [B, Hq, Sq, D], contiguous; like q. None where dq is not summed up here
    dk,  # pointer, [B, Hkv, Skv, D]
    dv,  # pointer, [B, Hkv, Skv, D]
    score_factor,  # scale * log2(e), with its sign; 1 with an expression
    grad_factor,  # scale, with its sign
    seq_q,
    seq_kv,
    heads,  # (Hq, query heads that share one key/value head, B * Hkv)
    q_strides,  # None where a descriptor has them
    k_strides,
    v_strides,
    dout_strides,  # None where a descriptor has them
    dk_strides,
    dv_strides,
    left,  # with right, the reach of a two-sided mask; None for other kinds
    right,
    aux,  # what the program of scores reads, as its functions have it; None without one
    daux,  # the sums of gradients that it adds to, as `load_gradients` has them; None without any
    lists,  # the lists of a block mask, as `listed_blocks` has them; None without one
    entries,  # pointer, the list of tiles of keys of a packed batch; None for others
    tiles,  # how many there are
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """dk and dv ``[tile_n, head_dim]`` of one tile of keys, and in one pass what these keys add to dq.

    Also what they add to gradients of captured tensors, as each pair of query and key is met here once.
    """
    heads_q, group, _batch_heads = heads
    first_key, batch, start_q, at_kv, len_q, len_kv = my_keys(entries, tiles, seq_q, seq_kv, heads, C)
    if C.packed:
        if batch < 0:
            return
    head_kv, band = at_kv[1], (len_q, len_kv, left, right)
    k = seek(k, k_strides, at_kv, False, C.vector, C)
    v = seek(v, v_strides, at_kv, False, C.vector, C)

    k_tile = load_own(k, k_strides, first_key, len_kv, C.tile_n, C.vector, C)  # [tile_n, head_pad]
    v_tile = load_own(v, v_strides, first_key, len_kv, C.tile_n, C.vector, C)  # [tile_n, head_pad]
    dk_acc = tl.full([C.tile_n, C.head_pad], 0.0, tl.float32)
    dv_acc = tl.full([C.tile_n, C.head_pad], 0.0, tl.float32)
    if C.packed:
        if len_q == 0:  # at least one block is walked over below, and there is no query to load for
            zeros = tl.full([C.tile_n, C.head_pad], 0.0, tl.float32)
            dk = seek(dk, dk_strides, at_kv, False, C.out_vector, C)
            dv = seek(dv, dv_strides, at_kv, False, C.out_vector, C)
            store_rows(dv, dv_strides, zeros, first_key, len_kv, C.tile_n, C)
            store_rows(dk, dk_strides, zeros, first_key, len_kv, C.tile_n, C)
            return
    streamed = (q, dout, q_strides, dout_strides, lse, delta, dq_sum, seq_q)
    if C.blocks is not None:
        for member in range(group):
            head = head_kv * group + member
            # Partial ones first: the other way round ptxas (12.9, D=64) waits after each wgmma of both loops.
            blocks, end = listed_blocks(lists, batch, head, first_key // C.blocks.keys, False, C.query_tiles)
            dk_acc, dv_acc = _walk_queries(
                dk_acc, dv_acc, k_tile, v_tile, streamed, 0, end, blocks, first_key, (start_q, head), heads_q, band,
                score_factor, (batch, aux, daux), C.hides_in_partial, True, C,
            )  # fmt: skip
            if C.blocks.has_full:
                blocks, end = listed_blocks(lists, batch, head, first_key // C.blocks.keys, True, C.query_tiles)
                dk_acc, dv_acc = _walk_queries(
                    dk_acc, dv_acc, k_tile, v_tile, streamed, 0, end, blocks, first_key, (start_q, head), heads_q, band,
                    score_factor, (batch, aux, daux), C.hides_in_full, False, C,
                )  # fmt: skip
    else:
        blocks = query_blocks(first_key, band, C)
        begin, full_begin, full_end, end = blocks
        for member in range(group):
            at = (start_q, head_kv * group + member)
            if C.two_sided:  # one loop, as before
                dk_acc, dv_acc = _walk_queries(
                    dk_acc, dv_acc, k_tile, v_tile, streamed, begin, end, blocks, first_key, at, heads_q, band,
                    score_factor, (batch, aux, daux), True, False, C,
                )  # fmt: skip
            else:
                dk_acc, dv_acc = _walk_queries(
                    dk_acc, dv_acc, k_tile, v_tile, streamed, begin, full_begin, blocks, first_key, at, heads_q, band,
                    score_factor, (batch, aux, daux), True, False, C,
                )  # fmt: skip
                dk_acc, dv_acc = _walk_queries(
                    dk_acc, dv_acc, k_tile, v_tile, streamed, full_begin, full_end, blocks, first_key, at, heads_q,
                    band, score_factor, (batch, aux, daux), False, False, C,
                )  # fmt: skip
    # Only now, as their addresses would take registers from the loops.
    dk = seek(dk, dk_strides, at_kv, False, C.out_vector, C)
    dv = seek(dv, dv_strides, at_kv, False, C.out_vector, C)
    store_rows(dv, dv_strides, dv_acc, first_key, len_kv, C.tile_n, C)
    store_rows(dk, dk_strides, dk_acc * grad_factor, first_key, len_kv, C.tile_n, C)


@triton.jit
def _walk_queries(
    dk_acc, dv_acc, k_tile, v_tile, streamed, begin, end, blocks, first_key, at, heads_q, band, score_factor,
    of_program, MASKED: tl.constexpr, PARTIAL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add to dk, but for its factor, and dv the queries [begin, end) of one head, in blocks of tile_m.

    Or so many tiles of listed blocks. dk_acc, dv_acc, k_tile and v_tile are ``[tile_n, head_pad]``. Scores are made
    transposed, so that weights and dscores are left operands as they come from the tensor core.
    """
    q, dout, q_strides, dout_strides, lse, delta, dq_sum, rows_q = streamed
    batch, aux, daux = of_program
    of_score = (batch, at[1], aux)
    seq_q = band[0]
    if C.packed:
        sequence = at[1].to(tl.int64) * rows_q + at[0]
    else:
        sequence = (at[0] * heads_q + at[1]).to(tl.int64) * seq_q
    q = seek(q, q_strides, at, C.descriptor, C.vector, C)
    dout = seek(dout, dout_strides, at, C.descriptor, C.out_vector, C)
    if C.one_pass and not C.descriptor:
        dq_sum += sequence * C.head_dim
    ahead = listed_tile(begin, end, blocks, C.query_tiles, C.tile_m, C)
    for place in tl.range(begin, end, C.query_step, num_stages=C.stages):
        first_row = place
        if C.blocks is not None:
            first_row = ahead
            ahead = listed_tile(place + 1, end, blocks, C.query_tiles, C.tile_m, C)
        q_tile = load_streamed(q, q_strides, at, first_row, seq_q, C.tile_m, True, C.vector, C)  # [tile_m, head_pad]
        dout_tile = load_streamed(  # [tile_m, head_pad]
            dout, dout_strides, at, first_row, seq_q, C.tile_m, True, C.out_vector, C
        )
        rows = first_row + tl.arange(0, C.tile_m)
        row_lse = _lse_of_rows(lse + sequence, first_row, seq_q, C)  # [tile_m]

        raw = tl.dot(k_tile, tl.trans(q_tile))  # [tile_n, tile_m] fp32
        scores, slope = modified_and_slope(
            raw, rows[None, :], (first_key + tl.arange(0, C.tile_n))[:, None], of_score, band, C
        )
        if C.has_score:  # of a row that does not exist it may be anything
            scores = tl.where((rows < seq_q)[None, :], scores, float("-inf"))
        weights = tl.math.exp2(scores * score_factor - row_lse[None, :])
        if MASKED:  # selected, not multiplied: a masked weight may be inf
            # No branch where operands are in registers: those of the products behind it would be held across it.
            if not C.asks_queries or needs_mask(first_row, blocks, band, C):
                keys = first_key + tl.arange(0, C.tile_n)
                visible = seeing_rows(rows[None, :], keys[:, None], of_score, band, PARTIAL, C)
                weights = tl.where(visible, weights, 0.0)
        moving = weights
        if C.has_slope:  # selected, as a slope may be inf where nothing is seen
            moving = tl.where(weights == 0.0, 0.0, weights * slope)
        dv_acc = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_acc)

        dweights = tl.dot(v_tile, tl.trans(dout_tile))  # [tile_n, tile_m] fp32
        row_delta = tl.load(delta + sequence + rows, mask=rows < seq_q, other=0.0)  # [tile_m]
        dscores = moving * (dweights - row_delta[None, :])  # 0 where a weight is: the rest is finite
        if C.has_gradients:
            C.score.load_gradients(
                raw, weights * (dweights - row_delta[None, :]), batch, at[1], rows[None, :],
                (first_key + tl.arange(0, C.tile_n))[:, None], band[0], band[1], aux, daux, 1,
            )  # fmt: skip
        dscores = dscores.to(q_tile.dtype)
        dk_acc = tl.dot(dscores, q_tile, dk_acc)
        if C.one_pass:
            dq_tile = tl.dot(tl.trans(dscores), k_tile)  # [tile_m, head_pad] fp32
            _add_to_dq(dq_sum, dq_tile, at, first_row, seq_q, C)
    return dk_acc, dv_acc


@triton.jit
def _add_to_dq(dq_sum, dq_tile, at, first_row, seq_q, C: tl.constexpr):
    """Add dq_tile ``[tile_m, head_pad]`` to rows of dq_sum. No order: the sums are read by a later kernel only."""
    if C.descriptor:
        dq_sum.atomic_add([at[0], at[1], first_row, 0], tl.reshape(dq_tile, [1, 1, C.tile_m, C.head_pad]))
    else:
        tl.atomic_add(
            dq_sum + tl.cast(first_row, tl.int64) * C.head_dim + tile_offsets(C.head_dim, C.tile_m, 1, False, C),
            dq_tile,
            mask=inside(first_row, seq_q, C.tile_m, C),
            sem="relaxed",
        )


# ---------------------------------------------------------------- a number for each row


@triton.jit
def _delta_of_rows(out, out_strides, dout_tile, dlse, delta, dlse_rows, place, first_row, seq_q, C: tl.constexpr):
    """``rowsum(dout * out) - dlse``: written, and returned as ``[tile_m]``. dout_tile is ``[tile_m, head_pad]``.

    `place` is (batch, head) as one number, the first row of the sequence, and the rows of a head.
    """
    out_tile = load_own(out, out_strides, first_row, seq_q, C.tile_m, C.out_vector, C)  # [tile_m, head_pad]
    rows = first_row + tl.arange(0, C.tile_m)
    at = place[0].to(tl.int64) * place[2] + rows
    if C.packed:
        at += place[1]
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if C.packed:
        dlse_rows = tl.minimum(dlse_rows, seq_q)
    row_delta -= tl.load(dlse + at, mask=rows < dlse_rows, other=0.0)
    tl.store(delta + at, row_delta, mask=rows < seq_q)
    return row_delta


@triton.jit
def _lse_of_rows(lse, first_row, seq_q, C: tl.constexpr):
    """lse ``[tile_m]`` in log2 units; +inf, which leaves no weight, for a row that sees no key or does not exist."""
    rows = first_row + tl.arange(0, C.tile_m)
    row_lse = tl.load(lse + rows, mask=rows < seq_q, other=float("inf"))
    return tl.where(row_lse == float("-inf"), float("inf"), row_lse) * LOG2_E
