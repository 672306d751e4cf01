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
    end_of_tile,
    inside,
    listed_blocks,
    listed_rows,
    listed_tile,
    load_own,
    load_streamed,
    modified_and_slope,
    my_keys,
    my_queries,
    my_tile,
    needs_mask,
    own_positions,
    query_blocks,
    row_of_lists,
    seeing_rows,
    seek,
    store_rows,
    tile_offsets,
    visible_keys,
    walk_keys,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["dlse_rows", "seq_q"])
def prepare_rows(
    out,  # pointer, [B, Hq, Sq, Dv]
    dout,  # pointer, like out
    dlse,  # pointer, fp32 [B, Hq, Sq], contiguous; any pointer where dlse_rows is 0
    delta,  # pointer, fp32 [B, Hq, Sq], contiguous
    dq_sum,  # pointer, fp32 [B, Hq, Sq, D], contiguous; None where dq is not summed up
    dlse_rows,  # seq_q, or 0 where there is no dlse
    seq_q,
    heads_q,
    batch_heads,  # B * Hq
    out_strides,  # of out and dout
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """Before the pass: delta of tile_m rows, and zero in their part of dq_sum if there is one."""
    tile, batch_head = my_tile(seq_q, batch_heads, False, C.tile_m, 1)
    at = (batch_head // heads_q, batch_head % heads_q)
    out = seek(out, out_strides, at, False, C.out_vector, C)
    dout = seek(dout, out_strides, at, False, C.out_vector, C)
    first_row = tile * C.tile_m
    dout_tile = load_own(dout, out_strides, first_row, seq_q, C.tile_m, C.width_v, C.out_vector, C)  # [tile_m, pad]
    place = (batch_head, 0, seq_q)
    _delta_of_rows(out, out_strides, dout_tile, dlse, delta, dlse_rows, place, first_row, seq_q, C)
    if C.one_pass:
        dq_sum += (batch_head.to(tl.int64) * seq_q + first_row) * C.width
        tl.store(
            dq_sum + tile_offsets(C.width, C.tile_m, C.width, 1, False),
            tl.full([C.tile_m, C.width.pad], 0.0, tl.float32),
            mask=inside(first_row, seq_q, C.tile_m, C.width),
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
    dq_sum += (batch_head.to(tl.int64) * seq_q + first_row) * C.width
    total = tl.load(  # [tile_m, width.pad]
        dq_sum + tile_offsets(C.width, C.tile_m, C.width, 1, False),
        mask=inside(first_row, seq_q, C.tile_m, C.width),
    )
    store_rows(dq, dq_strides, total * grad_factor, first_row, seq_q, C.tile_m, C.width, C)


# ---------------------------------------------------------------- the pass over the keys


@triton.jit(do_not_specialize=["tiles"])
def gradient_of_queries(
    q,  # pointer, [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]; a pointer, or a tensor descriptor with block [1, 1, tile_n, width.pad]
    v,  # like k, of Dv columns
    out,  # pointer, [B, Hq, Sq, Dv]
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    dout,  # pointer, like out
    dlse,  # pointer, like lse; any pointer where dlse_rows is 0
    dq,  # pointer, like q
    delta,  # pointer, like lse: written, for the pass over the queries
    factors,  # score: scale * log2(e), with its sign, 1 with an expression; grad: scale, with its sign
    sizes,  # dlse_rows (seq_q, or 0 where there is no dlse), then those of the forward
    strides,  # of q, k and v, None where a descriptor has them; of out and dout; of dq, None where it has those of out
    reach,  # left and right of a two-sided mask; None for other kinds
    aux,  # what the program of scores reads, as its functions have it; None without one
    lists,  # the lists of a block mask, as `listed_blocks` has them; None without one
    entries,  # pointer, the list of tiles of queries of a packed batch; None for others
    tiles,  # how many there are
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """First of two passes: dq ``[tile_m, width]`` and delta ``[tile_m]`` of one tile of queries."""
    first_row, batch_head, batch, at, at_kv, len_q, len_kv = my_queries(entries, tiles, sizes, C)
    if C.packed:
        if batch < 0:
            return
    of_score, band = (batch, at[1], aux), (len_q, len_kv, reach.left, reach.right)
    q = seek(q, strides.q, at, False, C.vector, C)
    kv = (seek(k, strides.k, at_kv, C.descriptor, C.vector, C), seek(v, strides.v, at_kv, C.descriptor, C.vector, C))
    out = seek(out, strides.out, at, False, C.out_vector, C)
    dout = seek(dout, strides.out, at, False, C.out_vector, C)
    of_dq = strides.out
    if C.width != C.width_v:
        of_dq = strides.dq
    dq = seek(dq, of_dq, at, False, C.out_vector, C)

    end_row = end_of_tile(first_row, at[0], len_q, C.tile_m, C)
    q_tile = load_own(q, strides.q, first_row, end_row, C.tile_m, C.width, C.vector, C)  # [tile_m, width.pad]
    dout_tile = load_own(  # [tile_m, width_v.pad]
        dout, strides.out, first_row, end_row, C.tile_m, C.width_v, C.out_vector, C
    )
    place = (batch_head, at[0], sizes.seq_q)
    row_delta = _delta_of_rows(  # [tile_m]
        out, strides.out, dout_tile, dlse, delta, sizes.dlse_rows, place, first_row, end_row, C
    )
    lse += batch_head.to(tl.int64) * sizes.seq_q
    if C.packed:
        lse += at[0]
    own = (q_tile, dout_tile, lse_of_rows(lse, first_row, end_row, C), row_delta)
    acc = tl.full([C.tile_m, C.width.pad], 0.0, tl.float32)
    tile = (own, kv, strides, first_row, at_kv, band, factors.score, of_score)
    acc = walk_keys(_walk_keys, acc, tile, first_row, at[0], band, of_score, lists, False, C)
    store_rows(dq, of_dq, acc * factors.grad, first_row, end_row, C.tile_m, C.width, C)


@triton.jit
def _walk_keys(acc, tile, begin, end, blocks, MASKED: tl.constexpr, PARTIAL: tl.constexpr, C: tl.constexpr):
    """Add to acc, which is dq ``[tile_m, width.pad]`` but for its factor, the keys [begin, end), in blocks of tile_n.

    Or so many tiles of listed blocks.
    """
    own, kv, strides, first_row, at_kv, band, score_factor, of_score = tile
    q_tile, dout_tile, row_lse, row_delta = own
    seq_kv = band[1]
    ahead = listed_tile(begin, end, blocks, C.key_tiles, C.tile_n, C)
    for place in tl.range(begin, end, C.key_step, num_stages=C.stages):
        first_key, end_key = place, seq_kv
        if C.blocks is not None:
            first_key, end_key = listed_rows(ahead, at_kv[0], seq_kv, C.tile_n, C)
            ahead = listed_tile(place + 1, end, blocks, C.key_tiles, C.tile_n, C)
        k_tile = load_streamed(kv[0], strides.k, at_kv, first_key, end_key, C.tile_n, C.width, MASKED, C.vector, C)
        v_tile = load_streamed(kv[1], strides.v, at_kv, first_key, end_key, C.tile_n, C.width_v, MASKED, C.vector, C)
        scores = tl.dot(q_tile, tl.trans(k_tile))  # [tile_m, tile_n] fp32
        scores, slope = modified_and_slope(
            scores, (first_row + tl.arange(0, C.tile_m))[:, None], (first_key + tl.arange(0, C.tile_n))[None, :],
            of_score, band, C,
        )  # fmt: skip
        dweights = tl.dot(dout_tile, tl.trans(v_tile))  # [tile_m, tile_n] fp32
        weights = tl.math.exp2(scores * score_factor - row_lse[:, None])
        dscores = weights * (dweights - row_delta[:, None]) * slope
        if MASKED:  # selected, not multiplied: a masked weight may be inf
            if PARTIAL or not C.asks_keys or needs_mask(first_key, end_key, blocks, C):
                rows = first_row + tl.arange(0, C.tile_m)
                keys = first_key + tl.arange(0, C.tile_n)
                if C.packed_blocks:
                    keys = own_positions(keys, end_key, seq_kv)
                visible = visible_keys(rows[:, None], keys[None, :], of_score, band, PARTIAL, C)
                dscores = tl.where(visible, dscores, 0.0)
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
    return acc


# ---------------------------------------------------------------- the pass over the queries


@triton.jit(do_not_specialize=["tiles"])
def gradients_of_keys(
    q,  # [B, Hq, Sq, D]; a pointer, or a tensor descriptor with block [1, 1, tile_m, width.pad]
    k,  # pointer, [B, Hkv, Skv, D]
    v,  # pointer, [B, Hkv, Skv, Dv]
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    dout,  # like q, of Dv columns
    delta,  # pointer, like lse
    dq_sum,  # fp32 [B, Hq, Sq, D], contiguous; like q. None where dq is not summed up here
    dk,  # pointer, like k
    dv,  # pointer, like v
    factors,  # score: scale * log2(e), with its sign, 1 with an expression; grad: scale, with its sign
    sizes,  # as in the forward; batch_heads is B * Hkv
    strides,  # of q, k, v, dout, dk and dv, None where a descriptor has them
    reach,  # left and right of a two-sided mask; None for other kinds
    aux,  # what the program of scores reads, as its functions have it; None without one
    daux,  # the sums of gradients that it adds to, as `load_gradients` has them; None without any
    lists,  # the lists of a block mask, as `listed_blocks` has them; None without one
    entries,  # pointer, the list of tiles of keys of a packed batch; None for others
    tiles,  # how many there are
    C: tl.constexpr,  # multiattn.triton.kernels.constants.TileConstants
):
    """dk and dv of one tile of tile_n keys, and in one pass what these keys add to dq.

    Also what they add to gradients of captured tensors, as each pair of query and key is met here once.
    """
    first_key, batch, start_q, at_kv, len_q, len_kv = my_keys(entries, tiles, sizes, C)
    if C.packed:
        if batch < 0:
            return
    group, band = sizes.group, (len_q, len_kv, reach.left, reach.right)
    k = seek(k, strides.k, at_kv, False, C.vector, C)
    v = seek(v, strides.v, at_kv, False, C.vector, C)

    end_key = end_of_tile(first_key, at_kv[0], len_kv, C.tile_n, C)
    k_tile = load_own(k, strides.k, first_key, end_key, C.tile_n, C.width, C.vector, C)  # [tile_n, width.pad]
    v_tile = load_own(v, strides.v, first_key, end_key, C.tile_n, C.width_v, C.vector, C)  # [tile_n, width_v.pad]
    sums = (
        tl.full([C.tile_n, C.width.pad], 0.0, tl.float32),
        tl.full([C.tile_n, C.width_v.pad], 0.0, tl.float32),
    )
    if C.packed:
        if len_q == 0:  # at least one block is walked over below, and there is no query to load for
            _store_both(dk, dv, sums, 1.0, strides, at_kv, first_key, end_key, C)
            return
    streamed = (q, dout, strides, lse, delta, dq_sum, sizes)
    tile = (k_tile, v_tile, streamed, (first_key, end_key), band, factors.score, (batch, aux, daux))
    if C.blocks is not None:
        row = first_key // C.blocks.keys
        if C.packed:
            row = row_of_lists(first_key, at_kv[0], batch, len_q, C.blocks.keys)
        for member in range(group):
            at = (start_q, at_kv[1] * group + member)
            # Partial ones first: the other way round ptxas (12.9, D=64) waits after each wgmma of both loops.
            blocks, end = listed_blocks(lists, batch, at[1], row, False, C.query_tiles, C)
            sums = _walk_queries(sums, tile, at, 0, end, blocks, C.hides_in_partial, True, C)
            if C.blocks.has_full:
                blocks, end = listed_blocks(lists, batch, at[1], row, True, C.query_tiles, C)
                sums = _walk_queries(sums, tile, at, 0, end, blocks, C.hides_in_full, False, C)
    else:
        blocks = query_blocks(first_key, band, C)
        begin, full_begin, full_end, end = blocks
        for member in range(group):
            at = (start_q, at_kv[1] * group + member)
            if C.is_two_sided:  # one loop, as before
                sums = _walk_queries(sums, tile, at, begin, end, blocks, True, False, C)
            else:
                sums = _walk_queries(sums, tile, at, begin, full_begin, blocks, True, False, C)
                sums = _walk_queries(sums, tile, at, full_begin, full_end, blocks, False, False, C)
    _store_both(dk, dv, sums, factors.grad, strides, at_kv, first_key, end_key, C)


@triton.jit
def _store_both(dk, dv, sums, grad_factor, strides, at_kv, first_key, end, C: tl.constexpr):
    """Write the sums dk, but for its factor, and dv.

    They are sought here, as their addresses would take registers from the loops.
    """
    dk = seek(dk, strides.dk, at_kv, False, C.out_vector, C)
    dv = seek(dv, strides.dv, at_kv, False, C.out_vector, C)
    store_rows(dv, strides.dv, sums[1], first_key, end, C.tile_n, C.width_v, C)
    store_rows(dk, strides.dk, sums[0] * grad_factor, first_key, end, C.tile_n, C.width, C)


@triton.jit
def _walk_queries(sums, tile, at, begin, end, blocks, MASKED: tl.constexpr, PARTIAL: tl.constexpr, C: tl.constexpr):
    """Add to dk, but for its factor, and dv the queries [begin, end) of one head, in blocks of tile_m.

    Or so many tiles of listed blocks. Scores are made transposed, so that weights and dscores are left operands as they
    come from the tensor core.
    """
    dk_acc, dv_acc = sums
    k_tile, v_tile, streamed, ends, band, score_factor, of_program = tile
    first_key, end_key = ends
    q, dout, strides, lse, delta, dq_sum, sizes = streamed
    batch, aux, daux = of_program
    of_score = (batch, at[1], aux)
    seq_q = band[0]
    if C.packed:
        sequence = at[1].to(tl.int64) * sizes.seq_q + at[0]
    else:
        sequence = (at[0] * sizes.heads_q + at[1]).to(tl.int64) * seq_q
    q = seek(q, strides.q, at, C.descriptor, C.vector, C)
    dout = seek(dout, strides.dout, at, C.descriptor, C.out_vector, C)
    if C.one_pass and not C.descriptor:
        dq_sum += sequence * C.width
    ahead = listed_tile(begin, end, blocks, C.query_tiles, C.tile_m, C)
    for place in tl.range(begin, end, C.query_step, num_stages=C.stages):
        first_row, end_row = place, seq_q
        if C.blocks is not None:
            first_row, end_row = listed_rows(ahead, at[0], seq_q, C.tile_m, C)
            ahead = listed_tile(place + 1, end, blocks, C.query_tiles, C.tile_m, C)
        q_tile = load_streamed(  # [tile_m, width.pad]
            q, strides.q, at, first_row, end_row, C.tile_m, C.width, True, C.vector, C
        )
        dout_tile = load_streamed(  # [tile_m, width_v.pad]
            dout, strides.dout, at, first_row, end_row, C.tile_m, C.width_v, True, C.out_vector, C
        )
        rows = first_row + tl.arange(0, C.tile_m)
        if C.packed_blocks:
            rows = own_positions(rows, end_row, seq_q)
        row_lse = lse_of_rows(lse + sequence, first_row, end_row, C)  # [tile_m]

        raw = tl.dot(k_tile, tl.trans(q_tile))  # [tile_n, tile_m] fp32
        scores, slope = modified_and_slope(
            raw, rows[None, :], (first_key + tl.arange(0, C.tile_n))[:, None], of_score, band, C
        )
        if C.has_score:  # of a row that does not exist it may be anything
            scores = tl.where((rows < seq_q)[None, :], scores, float("-inf"))
        weights = tl.math.exp2(scores * score_factor - row_lse[None, :])
        if MASKED:  # selected, not multiplied: a masked weight may be inf
            # No branch where operands are in registers: those of the products behind it would be held across it.
            if not C.asks_queries or needs_mask(first_row, end_row, blocks, C):
                keys = first_key + tl.arange(0, C.tile_n)
                if C.packed_blocks:
                    keys = own_positions(keys, end_key, band[1])
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
            keys = first_key + tl.arange(0, C.tile_n)
            if C.packed_blocks:
                keys = own_positions(keys, end_key, band[1])
            C.score.load_gradients(
                raw, weights * (dweights - row_delta[None, :]), batch, at[1], rows[None, :], keys[:, None], band[0],
                band[1], aux, daux, 1,
            )  # fmt: skip
        dscores = dscores.to(q_tile.dtype)
        dk_acc = tl.dot(dscores, q_tile, dk_acc)
        if C.one_pass:
            dq_tile = tl.dot(tl.trans(dscores), k_tile)  # [tile_m, width.pad] fp32
            _add_to_dq(dq_sum, dq_tile, at, first_row, end_row, C)
    return dk_acc, dv_acc


@triton.jit
def _add_to_dq(dq_sum, dq_tile, at, first_row, end, C: tl.constexpr):
    """Add dq_tile ``[tile_m, width.pad]`` to rows of dq_sum. No order: the sums are read by a later kernel only."""
    if C.descriptor:
        dq_sum.atomic_add([at[0], at[1], first_row, 0], tl.reshape(dq_tile, [1, 1, C.tile_m, C.width.pad]))
    else:
        tl.atomic_add(
            dq_sum + tl.cast(first_row, tl.int64) * C.width + tile_offsets(C.width, C.tile_m, C.width, 1, False),
            dq_tile,
            mask=inside(first_row, end, C.tile_m, C.width),
            sem="relaxed",
        )


# ---------------------------------------------------------------- a number for each row


@triton.jit
def _delta_of_rows(out, out_strides, dout_tile, dlse, delta, dlse_rows, place, first_row, end, C: tl.constexpr):
    """``rowsum(dout * out) - dlse``: written, and returned as ``[tile_m]``. dout_tile is ``[tile_m, width_v.pad]``.

    `place` is (batch, head) as one number, the first row of the sequence, and the rows of a head.
    """
    out_tile = load_own(  # [tile_m, width_v.pad]
        out, out_strides, first_row, end, C.tile_m, C.width_v, C.out_vector, C
    )
    rows = first_row + tl.arange(0, C.tile_m)
    at = place[0].to(tl.int64) * place[2] + rows
    if C.packed:
        at += place[1]
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if C.packed:
        dlse_rows = tl.minimum(dlse_rows, end)
    row_delta -= tl.load(dlse + at, mask=rows < dlse_rows, other=0.0)
    tl.store(delta + at, row_delta, mask=rows < end)
    return row_delta


@triton.jit
def lse_of_rows(lse, first_row, end, C: tl.constexpr):
    """lse ``[tile_m]`` in log2 units; +inf, which leaves no weight, for a row that sees no key or does not exist."""
    rows = first_row + tl.arange(0, C.tile_m)
    row_lse = tl.load(lse + rows, mask=rows < end, other=float("inf"))
    return tl.where(row_lse == float("-inf"), float("inf"), row_lse) * LOG2_E
