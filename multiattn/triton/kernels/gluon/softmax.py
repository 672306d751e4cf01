"""Online softmax on the accumulators of wgmma, ``[64, tile_n]``, in the log2 domain.

What is here runs once a score. Inline PTX stands where Gluon's own lowering takes more instructions.
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
