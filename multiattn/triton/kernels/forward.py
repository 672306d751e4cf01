"""The forward kernel: one template for every rung of the ladder, whose `Step` it gets as a constant.

FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 1), from the second rung on in the log2 domain. A program owns one
tile of queries of one head. It first walks the key blocks that all its rows see, with no mask, then the few that need
one: the diagonal and the ragged end. Plain `triton.language` only, so that the same source compiles for every arch and
is interpreted.
"""

# ruff: noqa: SIM108 - Triton compiles an if; a conditional expression it takes for a run-time select
# ruff: noqa: ANN001, ANN201, ANN202, N803 - Triton's own annotations and its upper-case constexprs

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.tiles import OUT_VECTOR, key_range, load_rows, my_tile, seek, tile_offsets, visible_keys

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where a row's maximum starts: the lowest finite fp32. With -inf a row that sees nothing would need guards."""


# Lengths of 1 as constants crash the assembler of Triton 3.6.0 (with a descriptor and a register cap), and buy nothing.
@triton.jit(do_not_specialize=["seq_q", "seq_kv"])
def attention_forward(
    q,  # pointer, [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]; a pointer, or a tensor descriptor with block [1, 1, TILE_N, HEAD_PAD]
    v,  # like k
    out,  # pointer, like q
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    scale,  # |scale| in the domain of the step (times log2(e) for exp2), positive
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
    out_batch,  # strides of out, in units of OUT_VECTOR elements
    out_head,
    out_row,
    CAUSAL: tl.constexpr,
    SCALE_SIGN: tl.constexpr,  # -1, 0 or 1: the sign of the scale goes into q
    STEP: tl.constexpr,  # multiattn.triton.ladder.Step
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # HEAD_DIM rounded up to a power of two that tl.dot accepts; the padding is zero
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,  # key blocks in flight
    HEADS_TOGETHER: tl.constexpr,  # heads whose tiles alternate in launch order
    VECTOR: tl.constexpr,  # elements that divide every address and stride of q, k and v
    WIDE: tl.constexpr,  # whether offsets inside one tile can pass 2^31 elements
):
    """Attention of one tile of TILE_M queries: writes out ``[TILE_M, HEAD_DIM]`` and lse ``[TILE_M]``."""
    tile, batch_head = my_tile(seq_q, batch_heads, CAUSAL, TILE_M, HEADS_TOGETHER)
    batch = batch_head // heads_q
    head = batch_head % heads_q
    head_kv = head // group
    first_row = tile * TILE_M
    q = seek(q, batch, head, q_batch, q_head, False, VECTOR)
    k = seek(k, batch, head_kv, k_batch, k_head, STEP.descriptor, VECTOR)
    v = seek(v, batch, head_kv, v_batch, v_head, STEP.descriptor, VECTOR)
    out = seek(out, batch, head, out_batch, out_head, False, OUT_VECTOR)
    lse += batch_head.to(tl.int64) * seq_q

    acc, row_sum, row_max = _attend(
        q, k, v, first_row, batch, head_kv, seq_q, seq_kv, q_row, k_row, v_row, scale,
        CAUSAL, SCALE_SIGN, STEP, HEAD_DIM, HEAD_PAD, TILE_M, TILE_N, STAGES, VECTOR, WIDE,
    )  # fmt: skip
    _store(out, lse, acc, row_sum, row_max, first_row, seq_q, out_row, STEP, HEAD_DIM, HEAD_PAD, TILE_M, WIDE)


@triton.jit
def _attend(
    q,
    k,
    v,
    first_row,
    batch,
    head_kv,
    seq_q,
    seq_kv,
    q_row,
    k_row,
    v_row,
    scale,
    CAUSAL: tl.constexpr,
    SCALE_SIGN: tl.constexpr,
    STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """TILE_M queries over all keys they see: acc ``[TILE_M, HEAD_PAD]``, row_sum and row_max ``[TILE_M]``."""
    q_tile = load_rows(  # [TILE_M, HEAD_PAD]
        q, batch, 0, first_row, seq_q, q_row, TILE_M, True, False, HEAD_DIM, HEAD_PAD, VECTOR, WIDE
    )
    if SCALE_SIGN < 0:
        q_tile = -q_tile
    if SCALE_SIGN == 0:
        q_tile = (q_tile * 0.0).to(q_tile.dtype)  # not zeros: inf * 0 must stay nan

    rows = first_row + tl.arange(0, TILE_M)
    acc = tl.full([TILE_M, HEAD_PAD], 0.0, tl.float32)
    row_sum = tl.full([TILE_M], 0.0, tl.float32)
    row_max = tl.full([TILE_M], LOWEST, tl.float32)
    begin, masked_begin, end = key_range(first_row, seq_q, seq_kv, CAUSAL, TILE_M, TILE_N)
    acc, row_sum, row_max = _walk(
        acc, row_sum, row_max, q_tile, k, v, begin, masked_begin, rows, batch, head_kv, seq_q, seq_kv,
        k_row, v_row, scale,
        CAUSAL, False, STEP, HEAD_DIM, HEAD_PAD, TILE_N, STAGES, VECTOR, WIDE,
    )  # fmt: skip
    # Skipped where there is nothing to mask: of an empty loop Triton still sets up the pipeline, and takes it down.
    if CAUSAL or masked_begin < end:
        acc, row_sum, row_max = _walk(
            acc, row_sum, row_max, q_tile, k, v, masked_begin, end, rows, batch, head_kv, seq_q, seq_kv,
            k_row, v_row, scale,
            CAUSAL, True, STEP, HEAD_DIM, HEAD_PAD, TILE_N, STAGES, VECTOR, WIDE,
        )  # fmt: skip
    return acc, row_sum, row_max


@triton.jit
def _walk(
    acc,  # [TILE_M, HEAD_PAD] fp32, not yet divided by row_sum
    row_sum,  # [TILE_M]
    row_max,  # [TILE_M], of scores in the domain of the step
    q_tile,  # [TILE_M, HEAD_PAD]
    k,
    v,
    begin,
    end,
    rows,  # [TILE_M]
    batch,
    head_kv,
    seq_q,
    seq_kv,
    k_row,
    v_row,
    scale,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Online softmax over the keys [begin, end), in blocks of TILE_N."""
    for first_key in tl.range(begin, end, TILE_N, num_stages=STAGES):
        k_tile = load_rows(  # [TILE_N, HEAD_PAD]
            k, batch, head_kv, first_key, seq_kv, k_row,
            TILE_N, MASKED, STEP.descriptor, HEAD_DIM, HEAD_PAD, VECTOR, WIDE,
        )  # fmt: skip
        scores = tl.dot(q_tile, tl.trans(k_tile))  # [TILE_M, TILE_N] fp32
        if MASKED:
            keys = first_key + tl.arange(0, TILE_N)
            visible = visible_keys(rows[:, None], keys[None, :], seq_q, seq_kv, CAUSAL)
            scores = tl.where(visible, scores, float("-inf"))

        new_max, shifted = _shift(scores, row_max, scale, STEP)
        weights = _power(shifted, False, STEP)
        decay = _power(row_max - new_max, False, STEP)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        row_max = new_max

        v_tile = load_rows(  # [TILE_N, HEAD_PAD]
            v, batch, head_kv, first_key, seq_kv, v_row,
            TILE_N, MASKED, STEP.descriptor, HEAD_DIM, HEAD_PAD, VECTOR, WIDE,
        )  # fmt: skip
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc)
    return acc, row_sum, row_max


@triton.jit
def _shift(scores, row_max, scale, STEP: tl.constexpr):
    """The new maximum of each row ``[TILE_M]``, and the scaled scores less it ``[TILE_M, TILE_N]``."""
    if STEP.scale_after_max:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        shifted = scores * scale - new_max[:, None]
    else:
        scores = scores * scale
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shifted = scores - new_max[:, None]
    return new_max, shifted


@triton.jit
def _power(x, INVERSE: tl.constexpr, STEP: tl.constexpr):
    """2 or e, as the step has it, to the power of x; INVERSE: the logarithm of x to that base."""
    if STEP.exp2:
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
def _store(
    out,
    lse,
    acc,
    row_sum,
    row_max,
    first_row,
    seq_q,
    out_row,
    STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The epilogue. A row that saw no key has row_sum 0: its out is 0 / 1, its lse LOWEST + log(0) = -inf."""
    in_range = first_row + tl.arange(0, TILE_M) < seq_q
    lse_row = (row_max + _power(row_sum, True, STEP)) * STEP.ln_base  # [TILE_M]
    tl.store(lse + first_row + tl.arange(0, TILE_M), lse_row, mask=in_range)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    if STEP.reciprocal:
        out_tile = acc * (1.0 / row_sum)[:, None]  # [TILE_M, HEAD_PAD]
    else:
        out_tile = tl.math.div_rn(acc, row_sum[:, None])
    out += tl.cast(first_row, tl.int64) * out_row * OUT_VECTOR
    tl.store(
        out + tile_offsets(out_row, TILE_M, HEAD_PAD, OUT_VECTOR, WIDE),
        out_tile.to(out.dtype.element_ty),
        mask=in_range[:, None] & (tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :],
    )
