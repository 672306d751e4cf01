"""Keys and values of 8 bits in the kernels of decode, each of which stands for itself times its scale.

Products are of fp16, which holds all 8-bit numbers. No scale touches an element of k or v: one of keys multiplies
scores, one of values weights or results. `scales` is as `attention_of_parts` has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIT_MIN = tl.constexpr(2.0**-100)
"""The unit of no value."""


SCALE_MIN = tl.constexpr(2.0**-126)
"""The least factor of scores: all that it makes are 0 but for their last bits."""


@triton.jit
def in_dtype_of(queries, tile, C: tl.constexpr):
    """A tile of keys or values in the dtype of q."""
    if C.stored is not None:
        tile = tile.to(queries.dtype)
    return tile


@triton.jit
def scales_of_keys(scales, sequence, entry, head_kv, C: tl.constexpr):
    """A pointer to the scales of this head's keys, and where they are one its size and its sign, for scores and q.

    Of zero the size is 1 and the sign 0: -inf stays -inf.
    """
    if C.scales_keys:
        source, size, sign = _of_head(scales.k, scales.of_k, entry, head_kv), 1.0, 1.0
    else:
        source = _of_head(scales.k, scales.of_k, sequence, head_kv)
        scale = tl.load(source)
        size = tl.where(scale == 0.0, 1.0, tl.abs(scale))
        sign = tl.where(scale == 0.0, 0.0, tl.where(scale < 0.0, -1.0, 1.0))
    return source, size, sign


@triton.jit
def scales_of_values(scales, sequence, entry, head_kv, has_keys, C: tl.constexpr):
    """A pointer to the scales of this head's values, and the scale where they are one: 0 of no key."""
    if C.scales_values:
        source, scale = _of_head(scales.v, scales.of_v, entry, head_kv), 1.0
    else:
        source = _of_head(scales.v, scales.of_v, sequence, head_kv)
        scale = tl.load(source, mask=has_keys, other=0.0)
    return source, scale


@triton.jit
def _of_head(source, strides, entry, head_kv):
    """A pointer to the scales of one head of an entry."""
    return source + tl.cast(entry, tl.int64) * strides[0] + head_kv.to(tl.int64) * strides[1]


@triton.jit
def load_scales(source, strides, pages, first_key, paging, is_key, C: tl.constexpr):
    """The scales ``[tile_n]`` of the keys of a tile, which is where their rows are; 0 where `is_key` is False."""
    keys = first_key + tl.arange(0, C.tile_n)
    if C.paged:
        source += pages.to(tl.int64) * strides[0]
        if C.page > 0:
            keys = keys % C.page
        else:
            keys = first_key % paging.page_keys + tl.arange(0, C.tile_n)
    return tl.load(source + keys.to(tl.int64) * strides[2], mask=is_key, other=0.0)


@triton.jit
def halved(q_tile, q_rest, sign, C: tl.constexpr):
    """Queries in fp16, times `sign`, and the factor ``[tile_m]`` of their scores.

    Those of bf16 become smaller or larger by a power of two, a row's own: then all that counts is exact.
    """
    if q_tile.dtype == tl.bfloat16:
        top = _largest(q_tile)
        if C.rest > 0:
            top = tl.maximum(top, _largest(q_rest))
        exponent = tl.minimum(141 - (top.to(tl.int32, bitcast=True) >> 23), 120)  # to 2^14 and more, below 2^15
        inverse = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
        factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        q_tile = _times(q_tile, inverse * sign)
        q_rest = _times(q_rest, inverse * sign)
    else:
        factor = tl.full([C.tile_m], 1.0, tl.float32)
        q_tile = _times(q_tile, factor * sign)
        q_rest = _times(q_rest, factor * sign)
    return q_tile, q_rest, factor


@triton.jit
def _largest(tile):
    """The largest magnitude of each row that is finite."""
    size = tl.abs(tile.to(tl.float32))
    return tl.max(tl.where(size < float("inf"), size, 0.0), 1)


@triton.jit
def _times(tile, factor):
    """Each row of a tile times its factor, in fp16."""
    return (tile.to(tl.float32) * factor[:, None]).to(tl.float16)


@triton.jit
def scaled(weights, acc, scale, unit):
    """Weights with the scale ``[tile_n]`` of each value, in the unit of their row, and acc and units brought up to it.

    A row's unit is a power of two, as large as its scaled weights have been: fp16 then has them, however small scales
    are. A key without weight does not count.
    """
    weights = weights * scale[None, :]
    top = tl.max(tl.abs(weights), 1).to(tl.int32, bitcast=True) & 0x7F800000
    larger = tl.maximum(unit, tl.minimum(top, 0x7E800000).to(tl.float32, bitcast=True))  # [tile_m]
    inverse = (0x7F000000 - larger.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return weights * inverse[:, None], acc * (unit * inverse)[:, None], larger
