"""Keys that lie elsewhere than in rows of their own batch entry: in the pages of a cache, or before the end of one.

Pages of whole tiles are loaded as they are. Of smaller pages several make a tile, and of any others each row has its
own address. Memory behind the last key holds anything, and so does what lies before a window: scores there are masked
and values replaced by zeros.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import tiles
from multiattn.cutile.kernels.rows import columns_of
from multiattn.cutile.kernels.tiles import ZERO, ConstBool, ConstInt


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Where a block of keys is in pages, in k as in v."""

    entry: Any
    """A page; of several pages a tile of them."""
    row: Any
    """The first row of the block, in tiles of `tile_n`; where each row has its own page, the rows ``[tile_n]``."""


@ct.function
def number_at(array: Any, index: Any) -> Any:
    """One of the numbers of a vector."""
    return ct.gather(array, (index,), check_bounds=False)


@ct.function
def last_of(array: Any) -> Any:
    """The last number of a vector."""
    return number_at(array, array.shape[0] - 1)


@ct.function
def find(const: Any, place: Any, k: Any, block: Any) -> Any:
    """Where a block of keys is: without pages its number."""
    if const.paged:
        block = find_in_pages(const, place, k, block)
    return block


@ct.function
def find_in_pages(const: Any, place: Any, k: Any, block: Any) -> Any:
    """Where a block of keys is in pages.

    Of pages behind the last key the table says nothing: it is not read there. Nor is it of pages before a window, in
    whose place those of the nearest keys between are loaded. Of a block in one page some key is seen.
    """
    table = place.cache[1]
    if const.page_rows == const.tile_n:  # one page has all of the block
        page, row = block, 0
        if not const.page_is_tile:
            tiles_of_page = k.shape[2] // const.tile_n
            page = block // tiles_of_page
            row = block - page * tiles_of_page
        return Keys(entry=ct.gather(table, (place.batch, page), check_bounds=False), row=row)
    if const.page_rows > 0:
        rows, row = const.page_rows, 0
        pages = const.tile_n // rows
        page = block * pages + ct.arange(pages, dtype=ct.int32)  # [pages]
        inside = page * rows < place.seq_kv
    else:
        rows = k.shape[2]
        key = block * const.tile_n + ct.arange(const.tile_n, dtype=ct.int32)  # [tile_n]
        page = key // rows
        row, inside = key - page * rows, key < place.seq_kv
    if place.first_key is None:
        return Keys(entry=ct.gather(table, (place.batch, page), mask=inside, check_bounds=False), row=row)
    seen = ct.minimum(ct.maximum(page, place.first_key // rows), (place.seq_kv - 1) // rows)
    return Keys(entry=ct.gather(table, (place.batch, seen), check_bounds=False), row=row)


@ct.function
def load_rows(
    const: Any, place: Any, array: Any, first: ConstInt, width: ConstInt, head_dim: ConstInt, keys: Any, block: Any,
    masked: ConstBool, latency: Any,
) -> Any:  # fmt: skip
    """A part of the rows of a block of keys or values in pages, ``[tile_n, width]``, as in `rows.columns_of`.

    With `masked` zeros of other rows, where the block is gathered: as in `without_others`.
    """
    if const.page_rows == const.tile_n:
        index = (keys.entry, place.head_kv, keys.row, first)
        return tiles.load_part(const, array, index, const.tile_n, width, latency)
    if const.page_rows > 0:
        columns = ct.Slice(first * width, width)
        index = (keys.entry, ct.Slice(place.head_kv, 1), ct.Slice(0, const.page_rows), columns)
        tile = ct.load_advanced_indexing(array, index, padding_mode=ZERO, latency=latency, allow_tma=const.tma)
    else:
        column = columns_of(first, width)
        inside = column < head_dim
        if masked:
            inside = inside & tiles.is_key(const, place, block)
        index = (keys.entry[:, None], place.head_kv, keys.row[:, None], column)
        tile = ct.gather(array, index, mask=inside, check_bounds=False, latency=latency)
    return tile.reshape((const.tile_n, width))


@ct.function
def without_others(const: Any, place: Any, values: Any, block: Any, masked: ConstBool) -> Any:
    """A block of values of a cache, zeros where no row sees any key: 0 times what is there may be NaN."""
    is_gathered = const.paged and const.page_rows == 0  # then they are zeros already
    if const.cached and masked and not is_gathered:
        values = ct.where(tiles.is_key(const, place, block), values, 0.0).astype(values.dtype)
    return values
