"""Keys and values of 8 bits in a cache, each of which stands for itself times its scale.

Products are those of the numbers in the dtype of q, which holds them all. No scale touches an element of k: one of keys
multiplies scores, one of values weights or results. `Place.scales` has those of keys and of values, fp32: one of each
head, ``[B, Hkv]``, or one for each row of k and v (``const.scales_keys``, ``const.scales_values``).
"""

from dataclasses import replace
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import tiles
from multiattn.cutile.kernels.scores import has_score
from multiattn.cutile.kernels.tiles import ConstBool

SCALE_MIN = 2.0**-126  # the least factor of scores: all that it makes are 0 but for their last bits


@ct.function
def like(const: Any, tile: Any, other: Any) -> Any:
    """A tile of keys or values in the dtype of another one."""
    if const.stored:
        tile = tile.astype(other.dtype)
    return tile


@ct.function
def of_head(place: Any, scales: Any) -> Any:
    """The scale of a head's keys or values; 0 where there are none."""
    return ct.gather(scales, (place.batch, place.head_kv), mask=place.seq_kv > 0, check_bounds=False)


@ct.function
def with_key_scale(const: Any, place: Any, scale: Any) -> Any:
    """A place with the scale of its head's keys, and the factor of scores with the size of it; its sign is for q.

    Of zero the size is 1 and the sign 0: -inf stays -inf.
    """
    if const.stored and not const.scales_keys:
        own = of_head(place, place.scales[0])
        size = ct.where(own == 0.0, 1.0, ct.abs(own))
        sign = ct.where(own == 0.0, 0.0, ct.where(own < 0.0, -1.0, 1.0))
        place = replace(place, key_size=size, key_sign=sign)
        if not has_score(const):
            scale = scale * size  # not 0, which times the -inf of a hidden key is NaN; NaN stays
            scale = ct.where(scale < SCALE_MIN, SCALE_MIN, scale)
    return place, scale


@ct.function
def of_block(const: Any, place: Any, scales: Any, found: Any, block: Any, masked: ConstBool) -> Any:
    """The scales of a block of keys or values, which is where `found` says (`keys.find`), ``[tile_n]``.

    Masked, 0 of those that no row sees: what memory has there may be NaN.
    """
    shape: Any = (const.tile_n,)
    if not const.paged:
        entry, row = place.batch, found * const.tile_n + ct.arange(const.tile_n, dtype=ct.int32)
    elif const.page_rows == const.tile_n:
        entry, row = found.entry, found.row * const.tile_n + ct.arange(const.tile_n, dtype=ct.int32)
    elif const.page_rows > 0:
        shape = (const.tile_n // const.page_rows, const.page_rows)
        entry, row = found.entry[:, None], ct.arange(const.page_rows, dtype=ct.int32)[None, :]
    else:
        entry, row = found.entry, found.row
    inside = None
    if masked:
        inside = tiles.is_key(const, place, block).reshape(shape)
    return ct.gather(scales, (entry, place.head_kv, row), mask=inside, check_bounds=False).reshape((const.tile_n,))


@ct.function
def of_scores(const: Any, place: Any, s: Any, found: Any, block: Any, masked: ConstBool) -> Any:
    """Products of q and a block of keys ``[tile_m, tile_n]``, with the scale of each key.

    One of a head is in them for a program alone, which wants the scores that they make.
    """
    if place.key_size is not None and has_score(const):  # else it is in the factor of scores
        s = s * place.key_size
    if const.scales_keys:
        s = s * of_block(const, place, place.scales[0], found, block, masked)[None, :]
    return s


@ct.function
def of_weights(const: Any, place: Any, p: Any, found: Any, block: Any, masked: ConstBool) -> Any:
    """Weights of a block of values ``[tile_m, tile_n]``, with the scale of each: of bf16, which has its exponents."""
    if const.scales_values and const.in_weights:
        p = p * of_block(const, place, place.scales[1], found, block, masked)[None, :]
    return p


@ct.function
def of_values(const: Any, place: Any, values: Any, found: Any, block: Any, masked: ConstBool) -> Any:
    """A block of values ``[tile_n, width]`` with the scale of each: of fp16, whose weights have not its exponents."""
    if const.scales_values and not const.in_weights:
        scale = of_block(const, place, place.scales[1], found, block, masked)
        values = (values.astype(ct.float32) * scale[:, None]).astype(values.dtype)
    return values
