"""Tiles as wide as a row: one, whose width must be a power of two, or two or three side by side.

At D=96 a tile of 128 columns is a quarter zeros, at D=160 one of 256 three eighths; parts of 64 and 32, and of 128 and
32 columns have none, and parts of 64, 32 and 16 none at D=112. At D=256 two of 128 save no column, but the first
product waits for half as much. What is as wide as q and k (``const.qk``), or as v and out (``const.vo``), is `Parts`
where those have a ``tail_d``, else one tile.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import keys, rows, scaling, walk
from multiattn.cutile.kernels.tiles import ZERO, ConstBool, ConstInt, load_part, own_tile

APPROX = ct.RoundingMode.APPROX
FIRST, TAIL, LAST = range(3)

SUMS = 8
"""Partial sums of a row, added up after the loops: each thread sums the columns it has, and no block of keys costs a
reduction across threads. H200, 2026-11-21, N=4096 full: +2 % at D=128 and +1 % at D=256."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A block of keys of which values are the first columns: where it is, and those columns ``[tile_n, width]``."""

    where: Any
    rows: Any


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The first ``tile_d`` columns, ``tail_d`` more, and ``last_d`` more; None for a third part that there is not."""

    first: Any
    tail: Any
    last: Any = None


@ct.function
def width(wide: Any, part: ConstInt) -> Any:
    """Columns of a part."""
    if part == FIRST:
        return wide.tile_d
    if part == TAIL:
        return wide.tail_d
    return wide.last_d


@ct.function
def column(wide: Any, part: ConstInt) -> Any:
    """Where a part begins, in parts as wide as it."""
    if part == FIRST:
        return 0
    if part == TAIL:
        return wide.tile_d // wide.tail_d
    return (wide.tile_d + wide.tail_d) // wide.last_d


# ---------------------------------------------------------------- loads


@ct.function
def load_q_part(const: Any, place: Any, q: Any, part: ConstInt) -> Any:
    """A part of the tile's queries ``[tile_m, width]``, with the sign of the scale."""
    if place.query is None:
        index = (place.batch, place.head, own_tile(const, place), column(const.qk, part))
        tile = load_part(const, q, index, const.tile_m, width(const.qk, part), None)
    else:
        tile = rows.load(place, q, column(const.qk, part), width(const.qk, part), const.qk.head_dim)
    if const.sign != 1:
        tile = tile * const.sign
    if place.key_sign is not None:
        tile = (tile * place.key_sign).astype(q.dtype)
    if const.q_in_registers:
        # What was computed is in registers, and tileiras leaves it there. That this is 1 it cannot know.
        tile = (tile * min(place.seq_q, 1)).astype(q.dtype)
    return tile


@ct.function
def load_q(const: Any, place: Any, q: Any) -> Any:
    """The tile's queries ``[tile_m, head_dim]``, with the sign of the scale."""
    first = load_q_part(const, place, q, FIRST)
    if const.qk.tail_d > 0:
        tail, last = load_q_part(const, place, q, TAIL), None
        if const.qk.last_d > 0:
            last = load_q_part(const, place, q, LAST)
        return Parts(first=first, tail=tail, last=last)
    return first


@ct.function
def dtype_of(const: Any, at: Any) -> Any:
    """The dtype of products, that of q: also that of k, but for a cache of 8-bit numbers."""
    if const.stored:
        return at.q.first.dtype if const.qk.tail_d > 0 else at.q.dtype
    return at.k.dtype


@ct.function
def load_rows(const: Any, place: Any, array: Any, wide: Any, block: Any, latency: Any, part: ConstInt) -> Any:
    """A part of a block of keys or values, ``[tile_n, width]``."""
    index = (place.batch, place.head_kv, walk.inside(const, place, block, True), column(wide, part))
    return load_part(const, array, index, const.tile_n, width(wide, part), latency)


@ct.function
def load_anywhere(
    const: Any, place: Any, array: Any, wide: Any, found: Any, block: Any, masked: ConstBool, latency: Any,
    part: ConstInt,
) -> Any:  # fmt: skip
    """A part of a block of keys or values, which is where `found` says (`keys.find`), ``[tile_n, width]``."""
    if const.paged:
        first, columns = column(wide, part), width(wide, part)
        tile = keys.load_rows(const, place, array, first, columns, wide.head_dim, found, block, masked, latency)
    else:
        tile = load_rows(const, place, array, wide, found, latency, part)
    return tile


@ct.function
def find(const: Any, place: Any, k: Any, block: Any, masked: ConstBool) -> Any:
    """Where a block of keys is; it comes `Shared` where it has the values as well, and is then loaded once."""
    found = keys.find(const, place, k, block)
    if const.v_in_k:
        tile = load_anywhere(const, place, k, const.qk, found, block, masked, const.k_latency, FIRST)
        found = Shared(where=found, rows=tile)
    return found


@ct.function
def load_k(const: Any, place: Any, k: Any, block: Any, part: ConstInt) -> Any:
    """A part of a block of keys, transposed: ``[width, tile_n]``."""
    if const.paged and const.page_rows != const.tile_n:
        # Scores of what is behind the last key are masked.
        return ct.transpose(load_anywhere(const, place, k, const.qk, block, 0, False, const.k_latency, part))
    if const.cut or not const.k_transposed:
        return ct.transpose(load_rows(const, place, k, const.qk, block, const.k_latency, part))
    if const.paged:
        entry, loaded = block.entry, block.row
    else:
        entry, loaded = place.batch, walk.inside(const, place, block, True)
    tile = ct.load(
        k,
        (entry, place.head_kv, column(const.qk, part), loaded),
        (1, 1, width(const.qk, part), const.tile_n),
        order=(0, 1, 3, 2),
        padding_mode=ZERO,
        latency=const.k_latency,
        allow_tma=const.tma,
    )
    return tile.reshape((width(const.qk, part), const.tile_n))


@ct.function
def where(const: Any, found: Any) -> Any:
    """Where a block is that was found."""
    return found.where if const.v_in_k else found


@ct.function
def first_k(const: Any, place: Any, k: Any, found: Any) -> Any:
    """The first part of a block of keys that was found, transposed."""
    return ct.transpose(found.rows) if const.v_in_k else load_k(const, place, k, found, FIRST)


# ---------------------------------------------------------------- products


@ct.function
def multiply_keys(const: Any, place: Any, q: Any, k: Any, found: Any) -> Any:
    """Q K^T of one block of keys, which is where `found` says (`find`), ``[tile_m, tile_n]`` in fp32."""
    none = ct.full((const.tile_m, const.tile_n), 0.0, dtype=ct.float32)
    if const.qk.tail_d > 0:
        s = ct.mma(q.first, scaling.like(const, first_k(const, place, k, found), q.first), none)
        s = ct.mma(q.tail, scaling.like(const, load_k(const, place, k, where(const, found), TAIL), q.tail), s)
        if const.qk.last_d > 0:
            s = ct.mma(q.last, scaling.like(const, load_k(const, place, k, where(const, found), LAST), q.last), s)
        return s
    return ct.mma(q, scaling.like(const, first_k(const, place, k, found), q), none)


@ct.function
def add_values_part(
    const: Any, place: Any, v: Any, p: Any, acc: Any, found: Any, block: Any, masked: ConstBool, part: ConstInt
) -> Any:
    """A part of acc and P V of one block of keys."""
    if const.v_in_k:
        values = found.rows
    else:
        values = load_anywhere(const, place, v, const.vo, found, block, masked, const.v_latency, part)
    values = scaling.like(const, values, p)
    if const.scales_values:
        values = scaling.of_values(const, place, values, found, block, masked)
    return ct.mma(p, keys.without_others(const, place, values, block, masked), acc)


@ct.function
def add_values(const: Any, place: Any, v: Any, p: Any, acc: Any, found: Any, block: Any, masked: ConstBool) -> Any:
    """acc and P V of one block of keys, which is where `found` says (`find`)."""
    if const.vo.tail_d > 0:
        last = None
        first = add_values_part(const, place, v, p, acc.first, found, block, masked, FIRST)
        tail = add_values_part(const, place, v, p, acc.tail, found, block, masked, TAIL)
        if const.vo.last_d > 0:
            last = add_values_part(const, place, v, p, acc.last, found, block, masked, LAST)
        return Parts(first=first, tail=tail, last=last)
    return add_values_part(const, place, v, p, acc, found, block, masked, FIRST)


# ---------------------------------------------------------------- output


@ct.function
def zeros(const: Any) -> Any:
    """An output of zeros ``[tile_m, head_dim_v]``, fp32."""
    first = ct.full((const.tile_m, const.vo.tile_d), 0.0, dtype=ct.float32)
    if const.vo.tail_d > 0:
        tail, last = ct.full((const.tile_m, const.vo.tail_d), 0.0, dtype=ct.float32), None
        if const.vo.last_d > 0:
            last = ct.full((const.tile_m, const.vo.last_d), 0.0, dtype=ct.float32)
        return Parts(first=first, tail=tail, last=last)
    return first


@ct.function
def scaled(const: Any, acc: Any, alpha: Any) -> Any:
    """acc times alpha ``[tile_m, 1]``."""
    if const.vo.tail_d > 0:
        first, tail, last = acc.first * alpha, acc.tail * alpha, None
        if const.vo.last_d > 0:
            last = acc.last * alpha
        return Parts(first=first, tail=tail, last=last)
    return acc * alpha


@ct.function
def partial_sums(const: Any, tile: Any) -> Any:
    """Partial sums of a tile's rows, ``[tile_m, SUMS]``."""
    return ct.sum(tile.reshape((const.tile_m, tile.shape[1] // SUMS, SUMS)), axis=1)


@ct.function
def added_up(const: Any, acc: Any) -> Any:
    """Partial sums of the output's rows, ``[tile_m, SUMS]``."""
    if const.vo.tail_d > 0:
        sums = partial_sums(const, acc.first) + partial_sums(const, acc.tail)
        if const.vo.last_d > 0:
            sums = sums + partial_sums(const, acc.last)
        return sums
    return partial_sums(const, acc)


@ct.function
def store_part(const: Any, place: Any, out: Any, acc: Any, l: Any, part: ConstInt) -> None:
    """Normalise a part by l ``[tile_m, 1]``, and store it."""
    if const.approximate_division:
        o = ct.truediv(acc, l, flush_to_zero=True, rounding_mode=APPROX)
    else:
        o = ct.truediv(acc, l)
    if place.query is None:
        o = o.astype(out.dtype).reshape((1, 1, const.tile_m, width(const.vo, part)))
        index = (place.batch, place.head, own_tile(const, place), column(const.vo, part))
        ct.store(out, index, o, allow_tma=const.tma)
    else:
        rows.store(place, out, column(const.vo, part), width(const.vo, part), const.vo.head_dim, o)


@ct.function
def store_out(const: Any, place: Any, out: Any, acc: Any, l: Any) -> None:
    """Normalise and store; a row that saw no key has ``l = 0`` and ``acc = 0``."""
    l = ct.where(l == 0.0, 1.0, l)
    if const.vo.tail_d > 0:
        store_part(const, place, out, acc.first, l, FIRST)
        store_part(const, place, out, acc.tail, l, TAIL)
        if const.vo.last_d > 0:
            store_part(const, place, out, acc.last, l, LAST)
    else:
        store_part(const, place, out, acc, l, FIRST)
