"""Rows of a tile that are queries of several heads, those that share keys: row r is query ``r // group`` of one.

Such a tile lies in registers, as no tile of memory is it: it is gathered and scattered element by element.
"""

from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.tiles import ConstInt


@ct.function
def columns_of(first: ConstInt, width: ConstInt) -> Any:
    """The columns of a part ``[1, width]``, which begins `first` parts as wide as it behind the row's first column."""
    column = ct.arange(width, dtype=ct.int32)[None, :]
    if first > 0:
        column = column + first * width
    return column


@ct.function
def elements(place: Any, entry: Any, first: ConstInt, width: ConstInt, head_dim: ConstInt) -> Any:
    """The indices of a part of the tile's rows in an array like q or out, ``[tile_m, width]``, and those there are."""
    column = columns_of(first, width)
    inside = place.query < place.seq_q
    if head_dim < (first + 1) * width:
        inside = inside & (column < head_dim)
    return (entry, place.head, place.query + place.sequence.offset_q, column), inside


@ct.function
def load(place: Any, q: Any, first: ConstInt, width: ConstInt, head_dim: ConstInt) -> Any:
    """A part of the tile's queries ``[tile_m, width]``."""
    indices, inside = elements(place, place.entry, first, width, head_dim)
    return ct.gather(q, indices, mask=inside, check_bounds=False)


@ct.function
def load_sinks(const: Any, place: Any, sinks: Any) -> Any:
    """The sink of each row's head, ``[tile_m, 1]``."""
    return ct.gather(sinks, (place.head,), check_bounds=False)


@ct.function
def store(place: Any, out: Any, first: ConstInt, width: ConstInt, head_dim: ConstInt, tile: Any) -> None:
    """Store a part of results ``[tile_m, width]``."""
    indices, inside = elements(place, place.result, first, width, head_dim)
    ct.scatter(out, indices, tile.astype(out.dtype), mask=inside, check_bounds=False)


@ct.function
def store_lse(const: Any, place: Any, lse: Any, log_sum: Any) -> None:
    """Store the sums of rows ``[tile_m, 1]``: natural logarithms, or of a part those to the base 2."""
    indices = (place.result, place.head, place.query + place.sequence.offset_q)
    ct.scatter(lse, indices, log_sum, mask=place.query < place.seq_q, check_bounds=False)
