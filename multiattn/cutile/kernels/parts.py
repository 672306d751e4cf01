"""Tiles as wide as head_dim: one, whose width must be a power of two, or two side by side.

At D=96 a tile of 128 columns is a quarter zeros, at D=160 one of 256 three eighths; parts of 64 and 32, and of 128 and
32 columns have none. At D=256 two of 128 save no column, but the first product waits for half as much. With
``shape.tail_d`` what has head_dim columns is `Parts`, else one tile.
"""

# cuda.tile is untyped, and so are its decorators and aliases:
# mypy: disable-error-code="untyped-decorator, valid-type"

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.tiles import ZERO, ConstBool

APPROX = ct.RoundingMode.APPROX

SUMS = 8
"""Partial sums of a row, added up after the loops: each thread sums the columns it has, and no block of keys costs a
reduction across threads. H200, 2026-11-21, N=4096 full: +2 % at D=128 and +1 % at D=256."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The first ``tile_d`` columns, and ``tail_d`` more."""

    first: Any
    tail: Any


@ct.function
def width(shape: Any, tail: ConstBool) -> Any:
    """Columns of a part."""
    if tail:
        return shape.tail_d
    return shape.tile_d


@ct.function
def column(shape: Any, tail: ConstBool) -> Any:
    """Where a part begins, in parts as wide as it."""
    if tail:
        return shape.tile_d // shape.tail_d
    return 0


# ---------------------------------------------------------------- loads


@ct.function
def load_q_part(shape: Any, place: Any, q: Any, tail: ConstBool) -> Any:
    """A part of the tile's queries ``[tile_m, width]``, with the sign of the scale."""
    index = (place.batch, place.head, place.tile, column(shape, tail))
    tile = ct.load(q, index, (1, 1, shape.tile_m, width(shape, tail)), padding_mode=ZERO, allow_tma=shape.tma)
    tile = tile.reshape((shape.tile_m, width(shape, tail)))
    if shape.sign != 1:
        tile = tile * shape.sign
    if shape.q_in_registers:
        # What was computed is in registers, and tileiras leaves it there. That this is 1 it cannot know.
        tile = (tile * min(place.seq_q, 1)).astype(q.dtype)
    return tile


@ct.function
def load_q(shape: Any, place: Any, q: Any) -> Any:
    """The tile's queries ``[tile_m, head_dim]``, with the sign of the scale."""
    first = load_q_part(shape, place, q, False)
    if shape.tail_d > 0:
        return Parts(first=first, tail=load_q_part(shape, place, q, True))
    return first


@ct.function
def load_rows(shape: Any, place: Any, array: Any, block: Any, latency: Any, tail: ConstBool) -> Any:
    """A part of a block of keys or values ``[tile_n, width]``."""
    tile = ct.load(
        array,
        (place.batch, place.head_kv, block, column(shape, tail)),
        (1, 1, shape.tile_n, width(shape, tail)),
        padding_mode=ZERO,
        latency=latency,
        allow_tma=shape.tma,
    )
    return tile.reshape((shape.tile_n, width(shape, tail)))


@ct.function
def load_k(shape: Any, place: Any, k: Any, block: Any, tail: ConstBool) -> Any:
    """A part of a block of keys, transposed: ``[width, tile_n]``."""
    if not shape.k_transposed:
        return ct.transpose(load_rows(shape, place, k, block, shape.k_latency, tail))
    tile = ct.load(
        k,
        (place.batch, place.head_kv, column(shape, tail), block),
        (1, 1, width(shape, tail), shape.tile_n),
        order=(0, 1, 3, 2),
        padding_mode=ZERO,
        latency=shape.k_latency,
        allow_tma=shape.tma,
    )
    return tile.reshape((width(shape, tail), shape.tile_n))


# ---------------------------------------------------------------- products


@ct.function
def multiply_keys(shape: Any, place: Any, q: Any, k: Any, block: Any) -> Any:
    """Q K^T of one block of keys, ``[tile_m, tile_n]`` in fp32."""
    none = ct.full((shape.tile_m, shape.tile_n), 0.0, dtype=ct.float32)
    if shape.tail_d > 0:
        s = ct.mma(q.first, load_k(shape, place, k, block, False), none)
        return ct.mma(q.tail, load_k(shape, place, k, block, True), s)
    return ct.mma(q, load_k(shape, place, k, block, False), none)


@ct.function
def add_values(shape: Any, place: Any, v: Any, p: Any, acc: Any, block: Any) -> Any:
    """acc and P V of one block of keys."""
    if shape.tail_d > 0:
        return Parts(
            first=ct.mma(p, load_rows(shape, place, v, block, shape.v_latency, False), acc.first),
            tail=ct.mma(p, load_rows(shape, place, v, block, shape.v_latency, True), acc.tail),
        )
    return ct.mma(p, load_rows(shape, place, v, block, shape.v_latency, False), acc)


# ---------------------------------------------------------------- output


@ct.function
def zeros(shape: Any) -> Any:
    """An output of zeros ``[tile_m, head_dim]``, fp32."""
    first = ct.full((shape.tile_m, shape.tile_d), 0.0, dtype=ct.float32)
    if shape.tail_d > 0:
        return Parts(first=first, tail=ct.full((shape.tile_m, shape.tail_d), 0.0, dtype=ct.float32))
    return first


@ct.function
def scaled(shape: Any, acc: Any, alpha: Any) -> Any:
    """acc times alpha ``[tile_m, 1]``."""
    if shape.tail_d > 0:
        return Parts(first=acc.first * alpha, tail=acc.tail * alpha)
    return acc * alpha


@ct.function
def partial_sums(shape: Any, tile: Any) -> Any:
    """Of the rows of a tile, ``[tile_m, SUMS]``."""
    return ct.sum(tile.reshape((shape.tile_m, tile.shape[1] // SUMS, SUMS)), axis=1)


@ct.function
def added_up(shape: Any, acc: Any) -> Any:
    """Partial sums of the output's rows, ``[tile_m, SUMS]``."""
    if shape.tail_d > 0:
        return partial_sums(shape, acc.first) + partial_sums(shape, acc.tail)
    return partial_sums(shape, acc)


@ct.function
def store_part(shape: Any, place: Any, out: Any, acc: Any, l: Any, tail: ConstBool) -> None:  # noqa: E741
    """Normalise a part by l ``[tile_m, 1]``, and store it."""
    if shape.approximate_division:
        o = ct.truediv(acc, l, flush_to_zero=True, rounding_mode=APPROX)
    else:
        o = ct.truediv(acc, l)
    o = o.astype(out.dtype).reshape((1, 1, shape.tile_m, width(shape, tail)))
    ct.store(out, (place.batch, place.head, place.tile, column(shape, tail)), o, allow_tma=shape.tma)


@ct.function
def store_out(shape: Any, place: Any, out: Any, acc: Any, l: Any) -> None:  # noqa: E741
    """Normalise and store; a row that saw no key has ``l = 0`` and ``acc = 0``."""
    l = ct.where(l == 0.0, 1.0, l)  # noqa: E741
    if shape.tail_d > 0:
        store_part(shape, place, out, acc.first, l, False)
        store_part(shape, place, out, acc.tail, l, True)
    else:
        store_part(shape, place, out, acc, l, False)
