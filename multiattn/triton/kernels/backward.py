"""The backward kernels: gradients of q, k and v from what a forward saved.

FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 2) in the log2 domain. Weights are made again from the scores and
the saved lse. In one pass over the keys (`prepare_rows`, `gradients_of_keys`, `finish_dq`) every block of keys adds its
share to an fp32 sum of dq, in any order; in two passes (`gradient_of_queries`, `gradients_of_keys`) dq comes from a
walk over the keys, as out did, and the bits are the same each time. Plain `triton.language` only, as forward.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803 - Triton's own annotations and its upper-case constexprs
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.tiles import (
    OUT_VECTOR,
    key_range,
    load_rows,
    my_tile,
    seeing_rows,
    seek,
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
    out_batch,  # strides of (batch, head, row) of out and dout, in units of OUT_VECTOR elements
    out_head,
    out_row,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Before the pass: delta of TILE_M rows, and zero in their part of dq_sum."""
    tile, batch_head = my_tile(seq_q, batch_heads, False, TILE_M, 1)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    out = seek(out, batch, head, out_batch, out_head, False, OUT_VECTOR)
    dout = seek(dout, batch, head, out_batch, out_head, False, OUT_VECTOR)
    first_row = tile * TILE_M
    dout_tile = load_rows(  # [TILE_M, HEAD_PAD]
        dout, batch, head, first_row, seq_q, out_row, TILE_M, True, False, HEAD_DIM, HEAD_PAD, OUT_VECTOR, WIDE
    )
    _delta_of_rows(
        out, dout_tile, dlse, delta, dlse_rows, batch_head, first_row, seq_q, out_row, HEAD_DIM, HEAD_PAD, TILE_M, WIDE
    )
    dq_sum += (batch_head.to(tl.int64) * seq_q + first_row) * HEAD_DIM
    tl.store(
        dq_sum + tile_offsets(HEAD_DIM, TILE_M, HEAD_PAD, 1, False),
        tl.full([TILE_M, HEAD_PAD], 0.0, tl.float32),
        mask=_inside(first_row, seq_q, TILE_M, HEAD_DIM, HEAD_PAD),
    )


@triton.jit(do_not_specialize=["seq_q"])
def finish_dq(
    dq_sum,  # pointer, fp32 [B, Hq, Sq, D], contiguous
    dq,  # pointer, [B, Hq, Sq, D]
    grad_factor,  # scale, with its sign
    seq_q,
    heads_q,
    batch_heads,  # B * Hq
    dq_batch,  # strides of (batch, head, row), in units of OUT_VECTOR elements
    dq_head,
    dq_row,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    WIDE: tl.constexpr,
):
    """After the pass: dq of TILE_M rows from their sum."""
    tile, batch_head = my_tile(seq_q, batch_heads, False, TILE_M, 1)
    first_row = tile * TILE_M
    dq = seek(dq, batch_head // heads_q, batch_head % heads_q, dq_batch, dq_head, False, OUT_VECTOR)
    dq_sum += (batch_head.to(tl.int64) * seq_q + first_row) * HEAD_DIM
    total = tl.load(  # [TILE_M, HEAD_PAD]
        dq_sum + tile_offsets(HEAD_DIM, TILE_M, HEAD_PAD, 1, False),
        mask=_inside(first_row, seq_q, TILE_M, HEAD_DIM, HEAD_PAD),
    )
    _store_rows(dq, total * grad_factor, first_row, seq_q, dq_row, TILE_M, HEAD_DIM, HEAD_PAD, WIDE)


@triton.jit(do_not_specialize=["dlse_rows", "seq_q", "seq_kv"])
def gradient_of_queries(
    q,  # pointer, [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]; a pointer, or a tensor descriptor with block [1, 1, TILE_N, HEAD_PAD]
    v,  # like k
    out,  # pointer, like q
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    dout,  # pointer, like out
    dlse,  # pointer, like lse; any pointer where dlse_rows is 0
    dq,  # pointer, like out
    delta,  # pointer, like lse: written, for the pass over the queries
    score_factor,  # scale * log2(e), with its sign
    grad_factor,  # scale, with its sign
    dlse_rows,  # seq_q, or 0 where there is no dlse
    seq_q,
    seq_kv,
    heads_q,
    group,  # query heads that share one key/value head
    batch_heads,  # B * Hq
    q_batch,  # strides of (batch, head, row): in units of VECTOR elements; None where a descriptor has them
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    out_batch,  # strides of out, dout and dq, in units of OUT_VECTOR elements
    out_head,
    out_row,
    CAUSAL: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # HEAD_DIM rounded up to a power of two that tl.dot accepts; the padding is zero
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,  # blocks of keys in flight
    HEADS_TOGETHER: tl.constexpr,  # heads whose tiles alternate in launch order
    VECTOR: tl.constexpr,  # elements that divide every address and stride of q, k and v
    WIDE: tl.constexpr,  # whether offsets inside one tile can pass 2^31 elements
):
    """First of two passes: dq ``[TILE_M, HEAD_DIM]`` and delta ``[TILE_M]`` of one tile of queries."""
    tile, batch_head = my_tile(seq_q, batch_heads, CAUSAL, TILE_M, HEADS_TOGETHER)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    head_kv = head // group
    first_row = tile * TILE_M
    q = seek(q, batch, head, q_batch, q_head, False, VECTOR)
    k = seek(k, batch, head_kv, k_batch, k_head, DESCRIPTOR, VECTOR)
    v = seek(v, batch, head_kv, v_batch, v_head, DESCRIPTOR, VECTOR)
    out = seek(out, batch, head, out_batch, out_head, False, OUT_VECTOR)
    dout = seek(dout, batch, head, out_batch, out_head, False, OUT_VECTOR)
    dq = seek(dq, batch, head, out_batch, out_head, False, OUT_VECTOR)

    q_tile = load_rows(  # [TILE_M, HEAD_PAD]
        q, batch, head, first_row, seq_q, q_row, TILE_M, True, False, HEAD_DIM, HEAD_PAD, VECTOR, WIDE
    )
    dout_tile = load_rows(  # [TILE_M, HEAD_PAD]
        dout, batch, head, first_row, seq_q, out_row, TILE_M, True, False, HEAD_DIM, HEAD_PAD, OUT_VECTOR, WIDE
    )
    row_delta = _delta_of_rows(  # [TILE_M]
        out, dout_tile, dlse, delta, dlse_rows, batch_head, first_row, seq_q, out_row, HEAD_DIM, HEAD_PAD, TILE_M, WIDE
    )
    row_lse = _lse_of_rows(lse + batch_head.to(tl.int64) * seq_q, first_row, seq_q, TILE_M)  # [TILE_M]

    acc = tl.full([TILE_M, HEAD_PAD], 0.0, tl.float32)
    begin, masked_begin, end = key_range(first_row, seq_q, seq_kv, CAUSAL, TILE_M, TILE_N)
    acc = _walk_keys(
        acc, q_tile, dout_tile, row_lse, row_delta, k, v, begin, masked_begin, first_row, batch, head_kv, seq_q, seq_kv,
        k_row, v_row, score_factor,
        CAUSAL, False, DESCRIPTOR, HEAD_DIM, HEAD_PAD, TILE_M, TILE_N, STAGES, VECTOR, WIDE,
    )  # fmt: skip
    acc = _walk_keys(
        acc, q_tile, dout_tile, row_lse, row_delta, k, v, masked_begin, end, first_row, batch, head_kv, seq_q, seq_kv,
        k_row, v_row, score_factor,
        CAUSAL, True, DESCRIPTOR, HEAD_DIM, HEAD_PAD, TILE_M, TILE_N, STAGES, VECTOR, WIDE,
    )  # fmt: skip
    _store_rows(dq, acc * grad_factor, first_row, seq_q, out_row, TILE_M, HEAD_DIM, HEAD_PAD, WIDE)


@triton.jit
def _walk_keys(
    acc,  # [TILE_M, HEAD_PAD] fp32, dq but for its factor
    q_tile,  # [TILE_M, HEAD_PAD]
    dout_tile,  # [TILE_M, HEAD_PAD]
    row_lse,  # [TILE_M]
    row_delta,  # [TILE_M]
    k,
    v,
    begin,
    end,
    first_row,
    batch,
    head_kv,
    seq_q,
    seq_kv,
    k_row,
    v_row,
    score_factor,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What the keys [begin, end) add to dq of TILE_M queries, in blocks of TILE_N."""
    for first_key in tl.range(begin, end, TILE_N, num_stages=STAGES):
        k_tile = load_rows(  # [TILE_N, HEAD_PAD]
            k, batch, head_kv, first_key, seq_kv, k_row, TILE_N, MASKED, DESCRIPTOR, HEAD_DIM, HEAD_PAD, VECTOR, WIDE
        )
        v_tile = load_rows(  # [TILE_N, HEAD_PAD]
            v, batch, head_kv, first_key, seq_kv, v_row, TILE_N, MASKED, DESCRIPTOR, HEAD_DIM, HEAD_PAD, VECTOR, WIDE
        )
        scores = tl.dot(q_tile, tl.trans(k_tile))  # [TILE_M, TILE_N] fp32
        dweights = tl.dot(dout_tile, tl.trans(v_tile))  # [TILE_M, TILE_N] fp32
        weights = tl.math.exp2(scores * score_factor - row_lse[:, None])
        dscores = weights * (dweights - row_delta[:, None])
        if MASKED:  # selected, not multiplied: a masked weight may be inf
            rows = first_row + tl.arange(0, TILE_M)
            keys = first_key + tl.arange(0, TILE_N)
            visible = visible_keys(rows[:, None], keys[None, :], seq_q, seq_kv, CAUSAL)
            dscores = tl.where(visible, dscores, 0.0)
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc)
    return acc


@triton.jit(do_not_specialize=["seq_q", "seq_kv"])
def gradients_of_keys(
    q,  # [B, Hq, Sq, D]; a pointer, or a tensor descriptor with block [1, 1, TILE_M, HEAD_PAD]
    k,  # pointer, [B, Hkv, Skv, D]
    v,  # pointer, like k
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    dout,  # like q
    delta,  # pointer, like lse
    dq_sum,  # fp32 [B, Hq, Sq, D], contiguous; like q. None without ONE_PASS
    dk,  # pointer, [B, Hkv, Skv, D]
    dv,  # pointer, [B, Hkv, Skv, D]
    score_factor,  # scale * log2(e), with its sign
    grad_factor,  # scale, with its sign
    seq_q,
    seq_kv,
    heads_q,
    group,  # query heads that share one key/value head
    batch_heads,  # B * Hkv
    q_batch,  # strides of (batch, head, row): in units of VECTOR elements; None where a descriptor has them
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    dout_batch,  # strides of dout, dk and dv, in units of OUT_VECTOR elements; None where a descriptor has them
    dout_head,
    dout_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    ONE_PASS: tl.constexpr,  # whether dq is summed up here
    CAUSAL: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # HEAD_DIM rounded up to a power of two that tl.dot accepts; the padding is zero
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,  # blocks of queries in flight
    HEADS_TOGETHER: tl.constexpr,  # heads whose tiles alternate in launch order
    VECTOR: tl.constexpr,  # elements that divide every address and stride of q, k and v
    WIDE: tl.constexpr,  # whether offsets inside one tile can pass 2^31 elements
):
    """dk and dv ``[TILE_N, HEAD_DIM]`` of one tile of keys, and with ONE_PASS what these keys add to dq."""
    tile, batch_head = my_tile(seq_kv, batch_heads, False, TILE_N, HEADS_TOGETHER)
    heads_kv = heads_q // group
    batch = batch_head // heads_kv
    head_kv = batch_head % heads_kv
    first_key = tile * TILE_N
    k = seek(k, batch, head_kv, k_batch, k_head, False, VECTOR)
    v = seek(v, batch, head_kv, v_batch, v_head, False, VECTOR)

    k_tile = load_rows(  # [TILE_N, HEAD_PAD]
        k, batch, head_kv, first_key, seq_kv, k_row, TILE_N, True, False, HEAD_DIM, HEAD_PAD, VECTOR, WIDE
    )
    v_tile = load_rows(  # [TILE_N, HEAD_PAD]
        v, batch, head_kv, first_key, seq_kv, v_row, TILE_N, True, False, HEAD_DIM, HEAD_PAD, VECTOR, WIDE
    )
    dk_acc = tl.full([TILE_N, HEAD_PAD], 0.0, tl.float32)
    dv_acc = tl.full([TILE_N, HEAD_PAD], 0.0, tl.float32)
    begin, masked_end = _query_range(first_key, seq_q, seq_kv, CAUSAL, TILE_M, TILE_N)
    for member in range(group):
        head = head_kv * group + member
        dk_acc, dv_acc = _walk_queries(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, dq_sum, begin, masked_end, first_key, batch, head,
            heads_q, seq_q, seq_kv, q_batch, q_head, q_row, dout_batch, dout_head, dout_row, score_factor,
            ONE_PASS, CAUSAL, True, DESCRIPTOR, HEAD_DIM, HEAD_PAD, TILE_M, TILE_N, STAGES, VECTOR, WIDE,
        )  # fmt: skip
        dk_acc, dv_acc = _walk_queries(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, dq_sum, masked_end, seq_q, first_key, batch, head,
            heads_q, seq_q, seq_kv, q_batch, q_head, q_row, dout_batch, dout_head, dout_row, score_factor,
            ONE_PASS, CAUSAL, False, DESCRIPTOR, HEAD_DIM, HEAD_PAD, TILE_M, TILE_N, STAGES, VECTOR, WIDE,
        )  # fmt: skip
    # Only now, as their addresses would take registers from the loops.
    dk = seek(dk, batch, head_kv, dk_batch, dk_head, False, OUT_VECTOR)
    dv = seek(dv, batch, head_kv, dv_batch, dv_head, False, OUT_VECTOR)
    _store_rows(dv, dv_acc, first_key, seq_kv, dv_row, TILE_N, HEAD_DIM, HEAD_PAD, WIDE)
    _store_rows(dk, dk_acc * grad_factor, first_key, seq_kv, dk_row, TILE_N, HEAD_DIM, HEAD_PAD, WIDE)


@triton.jit
def _query_range(first_key, seq_q, seq_kv, CAUSAL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(begin, masked_end): no query before begin sees a key of the tile; from masked_end on all see all of them.

    Both are multiples of TILE_M, or seq_q. Keys beyond the end need the mask with every query.
    """
    begin = 0
    masked_end = 0
    if CAUSAL:
        first_seeing = tl.minimum(tl.maximum(first_key + seq_q - seq_kv, 0), seq_q)
        all_seeing = tl.minimum(tl.maximum(first_key + TILE_N - 1 + seq_q - seq_kv, 0), seq_q)
        begin = first_seeing // TILE_M * TILE_M
        masked_end = (all_seeing + TILE_M - 1) // TILE_M * TILE_M
    if first_key + TILE_N > seq_kv:
        masked_end = seq_q
    return begin, masked_end


@triton.jit
def _walk_queries(
    dk_acc,  # [TILE_N, HEAD_PAD] fp32, dk but for its factor
    dv_acc,  # [TILE_N, HEAD_PAD] fp32
    k_tile,  # [TILE_N, HEAD_PAD]
    v_tile,  # [TILE_N, HEAD_PAD]
    q,
    dout,
    lse,
    delta,
    dq_sum,
    begin,
    end,
    first_key,
    batch,
    head,
    heads_q,
    seq_q,
    seq_kv,
    q_batch,
    q_head,
    q_row,
    dout_batch,
    dout_head,
    dout_row,
    score_factor,
    ONE_PASS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What the queries [begin, end) of one head add to dk and dv of TILE_N keys, in blocks of TILE_M.

    Scores are made transposed, so that weights and dscores are left operands as they come from the tensor core.
    """
    sequence = (batch * heads_q + head).to(tl.int64) * seq_q
    q = seek(q, batch, head, q_batch, q_head, DESCRIPTOR, VECTOR)
    dout = seek(dout, batch, head, dout_batch, dout_head, DESCRIPTOR, OUT_VECTOR)
    if ONE_PASS and not DESCRIPTOR:
        dq_sum += sequence * HEAD_DIM
    for first_row in tl.range(begin, end, TILE_M, num_stages=STAGES):
        q_tile = load_rows(  # [TILE_M, HEAD_PAD]
            q, batch, head, first_row, seq_q, q_row, TILE_M, True, DESCRIPTOR, HEAD_DIM, HEAD_PAD, VECTOR, WIDE
        )
        dout_tile = load_rows(  # [TILE_M, HEAD_PAD]
            dout, batch, head, first_row, seq_q, dout_row, TILE_M, True, DESCRIPTOR,
            HEAD_DIM, HEAD_PAD, OUT_VECTOR, WIDE,
        )  # fmt: skip
        rows = first_row + tl.arange(0, TILE_M)
        row_lse = _lse_of_rows(lse + sequence, first_row, seq_q, TILE_M)  # [TILE_M]

        scores = tl.dot(k_tile, tl.trans(q_tile))  # [TILE_N, TILE_M] fp32
        weights = tl.math.exp2(scores * score_factor - row_lse[None, :])
        if MASKED:  # selected, not multiplied: a masked weight may be inf
            keys = first_key + tl.arange(0, TILE_N)
            visible = seeing_rows(rows[None, :], keys[:, None], seq_q, seq_kv, CAUSAL)
            weights = tl.where(visible, weights, 0.0)
        dv_acc = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_acc)

        dweights = tl.dot(v_tile, tl.trans(dout_tile))  # [TILE_N, TILE_M] fp32
        row_delta = tl.load(delta + sequence + rows, mask=rows < seq_q, other=0.0)  # [TILE_M]
        dscores = weights * (dweights - row_delta[None, :])  # 0 where a weight is: the rest is finite
        dscores = dscores.to(q_tile.dtype)
        dk_acc = tl.dot(dscores, q_tile, dk_acc)
        if ONE_PASS:
            dq_tile = tl.dot(tl.trans(dscores), k_tile)  # [TILE_M, HEAD_PAD] fp32
            _add_to_dq(dq_sum, dq_tile, batch, head, first_row, seq_q, DESCRIPTOR, TILE_M, HEAD_DIM, HEAD_PAD)
    return dk_acc, dv_acc


@triton.jit
def _add_to_dq(
    dq_sum,
    dq_tile,
    batch,
    head,
    first_row,
    seq_q,
    DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Add dq_tile ``[TILE_M, HEAD_PAD]`` to rows of dq_sum. No order: the sums are read by a later kernel only."""
    if DESCRIPTOR:
        dq_sum.atomic_add([batch, head, first_row, 0], tl.reshape(dq_tile, [1, 1, TILE_M, HEAD_PAD]))
    else:
        tl.atomic_add(
            dq_sum + tl.cast(first_row, tl.int64) * HEAD_DIM + tile_offsets(HEAD_DIM, TILE_M, HEAD_PAD, 1, False),
            dq_tile,
            mask=_inside(first_row, seq_q, TILE_M, HEAD_DIM, HEAD_PAD),
            sem="relaxed",
        )


@triton.jit
def _delta_of_rows(
    out,
    dout_tile,  # [TILE_M, HEAD_PAD]
    dlse,
    delta,
    dlse_rows,
    batch_head,
    first_row,
    seq_q,
    out_row,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``rowsum(dout * out) - dlse``: written, and returned as ``[TILE_M]``."""
    out_tile = load_rows(  # [TILE_M, HEAD_PAD]
        out, 0, 0, first_row, seq_q, out_row, TILE_M, True, False, HEAD_DIM, HEAD_PAD, OUT_VECTOR, WIDE
    )
    rows = first_row + tl.arange(0, TILE_M)
    at = batch_head.to(tl.int64) * seq_q + rows
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row_delta -= tl.load(dlse + at, mask=rows < dlse_rows, other=0.0)
    tl.store(delta + at, row_delta, mask=rows < seq_q)
    return row_delta


@triton.jit
def _lse_of_rows(lse, first_row, seq_q, TILE_M: tl.constexpr):
    """lse ``[TILE_M]`` in log2 units; +inf, which leaves no weight, for a row that sees no key or does not exist."""
    rows = first_row + tl.arange(0, TILE_M)
    row_lse = tl.load(lse + rows, mask=rows < seq_q, other=float("inf"))
    return tl.where(row_lse == float("-inf"), float("inf"), row_lse) * LOG2_E


@triton.jit
def _inside(first_row, seq, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Which elements of a tile exist: bool ``[TILE, HEAD_PAD]``."""
    return (first_row + tl.arange(0, TILE) < seq)[:, None] & (tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :]


@triton.jit
def _store_rows(
    target,
    tile,  # [TILE, HEAD_PAD] fp32
    first_row,
    seq,
    stride_row,  # in units of OUT_VECTOR elements
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WIDE: tl.constexpr,
):
    target += tl.cast(first_row, tl.int64) * stride_row * OUT_VECTOR
    tl.store(
        target + tile_offsets(stride_row, TILE, HEAD_PAD, OUT_VECTOR, WIDE),
        tile.to(target.dtype.element_ty),
        mask=_inside(first_row, seq, TILE, HEAD_DIM, HEAD_PAD),
    )
