"""Scores and weights of the Gluon kernel: which blocks and scores count, and the softmax in the log2 domain.

A causal query i sees the keys up to ``i + seq_kv - seq_q``. `C` is the kernel's `GluonConstants`. Scores are on the
accumulators of wgmma, ``[64, tile_n]``. Inline PTX stands where Gluon's own lowering takes more instructions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
"""Where a row's maximum starts: the lowest finite fp32. With -inf a row that sees nothing would need guards."""
LARGEST_SUM = gl.constexpr(1e30)
"""The largest sum of a row's weights: with more they outgrew what they are relative to. It is far from overflow, and
so is its reciprocal."""


# ---------------------------------------------------------------- the mask


@gluon.jit
def end_of_blocks(first_query, queries, seq_q, seq_kv, C: gl.constexpr):
    """Blocks of keys from the first on that any of `queries` queries from `first_query` on sees."""
    end = seq_kv
    if C.banded:
        end = gl.minimum(gl.maximum(gl.minimum(first_query + queries, seq_q) + seq_kv - seq_q, 0), seq_kv)
    return (end + C.tile_n - 1) // C.tile_n


@gluon.jit
def blocks_to_see(first_query, blocks, exact_tile, seq_q, seq_kv, C: gl.constexpr):
    """The number of a tile's blocks that the warpgroup sees, and the first of these from which on maxima are exact.

    Exact are those that are seen in part, and of a lazy maximum also the one with the last key of the first query, so
    that every row's maximum is that of a real score; all, where a tile is done again.
    """
    seen = blocks
    all_see = seq_kv
    if C.banded:
        seen = gl.minimum(end_of_blocks(first_query, 64, seq_q, seq_kv, C), blocks)
        all_see = gl.minimum(gl.maximum(first_query + 1 + seq_kv - seq_q, 0), seq_kv)
    if first_query < 0:
        seen = 0
    first_exact = all_see // C.tile_n
    if C.lazy_max:
        first_exact = gl.maximum(all_see - 1, 0) // C.tile_n
        if exact_tile > 0:
            first_exact = 0
    return seen, first_exact


@gluon.jit
def end_of_keys(queries, seq_q, seq_kv, C: gl.constexpr):
    """The first key that a query does not see, nor any after it."""
    end = 0 * queries + seq_kv
    if C.banded:
        end = gl.minimum(queries + 1 + (seq_kv - seq_q), seq_kv)
    return end


@gluon.jit
def mask_scores(scores, first_query, first_key, seq_q, seq_kv, C: gl.constexpr):
    """Scores, -inf where a query does not see a key. With gl.where, whose conditions are packed, twice as slow."""
    end = end_of_keys(first_query + gl.arange(0, 64, C.row), seq_q, seq_kv, C)  # [64]
    keys = first_key + gl.arange(0, C.tile_n, gl.SliceLayout(0, C.scores))  # [tile_n]
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; selp.f32 $0, $1, 0fFF800000, p;}", "=f,f,r",
        [scores, end[:, None] - keys[None, :]], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


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
def exponentiate(scores, base, scale):
    """Weights ``2^(scores * scale - base)``."""
    return gl.exp2(scores * scale - base[:, None])


@gluon.jit
def sum_of_thread(weights, C: gl.constexpr):
    """``[64, 4]``: a row's sum of what each of its four threads has. Nothing is exchanged until the tile ends."""
    return gl.sum(gl.sum(weights.reshape([64, C.tile_n // 8, 4, 2]), 3), 1)


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
    """The same between two loops. Else their halves become variables of their own, and are packed and unpacked."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weights], weights.dtype, is_pure=False, pack=2)
