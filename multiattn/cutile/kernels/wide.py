"""Rows of the backward, as wide as `Widths` say: one tile ``[rows, tile_d]``, or with `tail_d` the `Parts` of two.

At D=80 parts of 64 and 16 columns take five eighths of the products of one tile of 128, and of its memory.
"""

from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.parts import Parts
from multiattn.cutile.kernels.tiles import ConstInt, load_part


@ct.function
def load(const: Any, wide: Any, array: Any, index: Any, rows: Any, latency: Any) -> Any:
    """Rows of one head, with zeros beyond the ends."""
    first = load_part(const, array, (*index, 0), rows, wide.tile_d, latency)
    if wide.tail_d > 0:
        tail = load_part(const, array, (*index, wide.tile_d // wide.tail_d), rows, wide.tail_d, latency)
        return Parts(first=first, tail=tail)
    return first


@ct.function
def load_keys(const: Any, wide: Any, array: Any, index: Any, length: Any) -> Any:
    """A block's own rows of keys, or of values."""
    rows = load(const, wide, array, index, const.tile_n, 2)
    if const.keys_in_registers:
        # What was computed is in registers, and tileiras leaves it there. That this is 1 it cannot know.
        rows = rounded(wide, rows, min(length, 1), array)
    return rows


@ct.function
def rounded(wide: Any, rows: Any, factor: Any, array: Any) -> Any:
    """Rows times a factor, if there is one, in the dtype of an array."""
    if wide.tail_d > 0:
        return Parts(first=rounded_part(rows.first, factor, array), tail=rounded_part(rows.tail, factor, array))
    return rounded_part(rows, factor, array)


@ct.function
def rounded_part(tile: Any, factor: Any, array: Any) -> Any:
    """One part of them."""
    if factor is not None:
        tile = tile * factor
    return tile.astype(array.dtype)


@ct.function
def row_products(wide: Any, rows: Any, others: Any) -> Any:
    """The product of each row with the other's, fp32 ``[rows]``."""
    if wide.tail_d > 0:
        sums = row_products_part(rows.first, others.first) + row_products_part(rows.tail, others.tail)
    else:
        sums = row_products_part(rows, others)
    return sums


@ct.function
def row_products_part(tile: Any, other: Any) -> Any:
    """One part of them."""
    return ct.sum(tile.astype(ct.float32) * other.astype(ct.float32), axis=-1)


@ct.function
def zeros(wide: Any, rows: Any) -> Any:
    """Sums of rows, fp32."""
    first = ct.full((rows, wide.tile_d), 0.0, dtype=ct.float32)
    if wide.tail_d > 0:
        return Parts(first=first, tail=ct.full((rows, wide.tail_d), 0.0, dtype=ct.float32))
    return first


@ct.function
def multiply(wide: Any, rows: Any, others: Any, acc: Any) -> Any:
    """acc and ``rows @ others^T``."""
    if wide.tail_d > 0:
        acc = ct.mma(rows.first, others.first.transpose(), acc)
        return ct.mma(rows.tail, others.tail.transpose(), acc)
    return ct.mma(rows, others.transpose(), acc)


@ct.function
def add(wide: Any, weights: Any, rows: Any, acc: Any) -> Any:
    """acc and ``weights @ rows``."""
    if wide.tail_d > 0:
        return Parts(first=ct.mma(weights, rows.first, acc.first), tail=ct.mma(weights, rows.tail, acc.tail))
    return ct.mma(weights, rows, acc)


@ct.function
def add_turned(const: Any, wide: Any, weights: Any, rows: Any) -> Any:
    """``weights^T @ rows``; with `dq_transposed` made as ``rows^T @ weights`` and turned around."""
    if wide.tail_d > 0:
        return Parts(first=turned(const, weights, rows.first), tail=turned(const, weights, rows.tail))
    return turned(const, weights, rows)


@ct.function
def turned(const: Any, weights: Any, rows: Any) -> Any:
    """One part of it."""
    if const.dq_transposed:
        nothing = ct.full((rows.shape[1], const.tile_m), 0.0, dtype=ct.float32)
        return ct.mma(rows.transpose(), weights, nothing).transpose()
    return ct.mma(weights.transpose(), rows, ct.full((const.tile_m, rows.shape[1]), 0.0, dtype=ct.float32))


@ct.function
def add_to(const: Any, wide: Any, array: Any, index: Any, rows: Any) -> None:
    """Add rows to the view of an array, or the `Parts` of one, in any order with other blocks."""
    if wide.tail_d > 0:
        array.first.atomic_store_add((*index, 0), rows.first.reshape((1, 1, const.tile_m, wide.tile_d)))
        tail = rows.tail.reshape((1, 1, const.tile_m, wide.tail_d))
        array.tail.atomic_store_add((*index, wide.tile_d // wide.tail_d), tail)
    else:
        array.atomic_store_add((*index, 0), rows.reshape((1, 1, const.tile_m, wide.tile_d)))


@ct.function
def store(const: Any, wide: Any, array: Any, index: Any, rows: Any, count: ConstInt) -> None:
    """Store `count` rows of the array's dtype."""
    if wide.tail_d > 0:
        ct.store(array, (*index, 0), rows.first.reshape((1, 1, count, wide.tile_d)), allow_tma=const.tma)
        tail = rows.tail.reshape((1, 1, count, wide.tail_d))
        ct.store(array, (*index, wide.tile_d // wide.tail_d), tail, allow_tma=const.tma)
    else:
        ct.store(array, (*index, 0), rows.reshape((1, 1, count, wide.tile_d)), allow_tma=const.tma)
