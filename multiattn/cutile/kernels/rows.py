"""Rows of a tile that are queries of several heads, those that share keys: row r is query ``r // group`` of one.

Such a tile lies in registers, as no tile of memory is it: it is gathered and scattered element by element.
"""

from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.tiles import ConstInt


@ct.function
def elements(place: Any, entry: Any, tile_d: ConstInt, head_dim: ConstInt) -> Any:
    """The indices of the tile's rows in an array like q or out, ``[tile_m, tile_d]``, and those that there are."""
    column = ct.arange(tile_d, dtype=ct.int32)[None, :]
    inside = place.query < place.seq_q
    if head_dim < tile_d:
        inside = inside & (column < head_dim)
    return (entry, place.head, place.query + place.sequence.offset_q, column), inside


@ct.function
def load(const: Any, place: Any, q: Any) -> Any:
    """The tile's queries ``[tile_m, tile_d]``."""
    indices, inside = elements(place, place.entry, const.tile_d, const.head_dim)
    return ct.gather(q, indices, mask=inside, check_bounds=False)


@ct.function
def load_sinks(const: Any, place: Any, sinks: Any) -> Any:
    """The sink of each row's head, ``[tile_m, 1]``."""
    return ct.gather(sinks, (place.head,), check_bounds=False)


@ct.function
def store(const: Any, place: Any, out: Any, tile: Any) -> None:
    """Store results ``[tile_m, tile_d]``."""
    indices, inside = elements(place, place.result, const.vo.tile_d, const.head_dim_v)
    ct.scatter(out, indices, tile.astype(out.dtype), mask=inside, check_bounds=False)


@ct.function
def store_lse(const: Any, place: Any, lse: Any, log_sum: Any) -> None:
    """Store the sums of rows ``[tile_m, 1]``: natural logarithms, or of a part those to the base 2."""
    indices = (place.result, place.head, place.query + place.sequence.offset_q)
    ct.scatter(lse, indices, log_sum, mask=place.query < place.seq_q, check_bounds=False)
