"""Parts of the Gluon kernels of a backward that own keys: queries with their statistics, and dS."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.scores import pack_weights
from multiattn.triton.kernels.gluon.tiles import load_tile, tma_load


@gluon.jit
def make_statistics(map, C: gl.constexpr):
    """Buffers of lse, or of delta, of the queries of each slot of Q."""
    return gl.allocate_shared_memory(gl.float32, [C.q_stages] + map.block_shape, map.layout)


@gluon.jit
def send_queries(q_maps, lines, at, lines_at, head, block, place, shared, C: gl.constexpr):
    """A tile of Q, with lse in log2 units and delta of its queries: `lines_at` is a batch entry and a first tile."""
    ring.await_empty(shared.ring_q, place)
    slot = place % C.q_stages
    full = shared.ring_q.full.index(slot)
    mbarrier.expect(full, C.tile_bytes + 2 * 64 * 4)
    load_tile(q_maps, at, head, block * 64, full, shared.q, slot, C)
    line = 2 * (lines_at[1] + block)
    tma_load(lines, [lines_at[0], head, line, 0], full, shared.lse.index(slot))
    tma_load(lines, [lines_at[0], head, line + 1, 0], full, shared.delta.index(slot))


@gluon.jit
def statistics_of(buffers, slot, C: gl.constexpr):
    """lse or delta of a step's queries, ``[64]``."""
    flat = buffers.index(slot).reshape([1, 64]).load(C.statistics)
    in_order = flat.reshape([4, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([64])
    return gl.convert_layout(in_order, C.column, assert_trivial=True)


@gluon.jit
def modify(products, queries, keys, of_score, sizes, C: gl.constexpr):
    """Products as they are, and 1; if there is an expression its scores in the log2 domain, and how they move.

    `queries` and `keys` are along their axes of the products; `of_score` is (batch, query head, aux).
    """
    slope = 1.0
    if C.has_score:
        batch, head, aux = of_score
        products, slope = C.score.score_and_slope(products, batch, head, queries, keys, sizes.seq_q, sizes.seq_kv, aux)
    return products, slope


@gluon.jit
def pack_both(weights, moving, like, C: gl.constexpr):
    """Weights in 16 bit; and what moves with scores, where that is something else."""
    packed = [pack_weights(weights, like)]
    if C.has_slope:
        packed = [packed[0], pack_weights(moving, like)]
    return packed


@gluon.jit
def make_ds(weights, dp, delta):
    """``weights * (dp - delta)`` in the 16 bits of weights, two at a time.

    In one piece of PTX, or LLVM unpacks all weights before the loop's end, and each half has a register of its own.
    """
    arguments = [weights, dp, delta[None, :]]
    if weights.dtype == gl.bfloat16:
        ds = gl.inline_asm_elementwise(
            "{.reg .f32 a, b, c, d; sub.f32 a, $2, $4; sub.f32 b, $3, $5; shl.b32 c, $1, 16; and.b32 d, $1, 0xffff0000;"
            " mul.f32 a, a, c; mul.f32 b, b, d; cvt.rn.bf16x2.f32 $0, b, a;}",
            "=r,r,f,f,f,f", arguments, gl.bfloat16, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        ds = gl.inline_asm_elementwise(
            "{.reg .f32 a, b, c, d; .reg .b16 l, h; sub.f32 a, $2, $4; sub.f32 b, $3, $5; mov.b32 {l, h}, $1;"
            " cvt.f32.f16 c, l; cvt.f32.f16 d, h; mul.f32 a, a, c; mul.f32 b, b, d; cvt.rn.f16x2.f32 $0, b, a;}",
            "=r,r,f,f,f,f", arguments, gl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    return ds
