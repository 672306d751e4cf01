"""The tiles that a block mask lists: of the blocks that a tile's rows see in part, and of those that they see whole.

`Place.lists` has counts and indices of partial blocks, then of full ones, `const.blocks` how tiles lie in blocks. The
tiles of one block come one after another, each list's are numbered from 0. A number beyond the count gives any tile.
"""

from typing import Any

import cuda.tile as ct


@ct.function
def count_tiles(const: Any, place: Any, counts: Any) -> Any:
    """Tiles that the row of blocks of a place's tile lists."""
    row = place.tile // const.blocks.own
    return ct.gather(counts, (place.batch, place.head, row), check_bounds=False) * const.blocks.walked


@ct.function
def listed_tile(const: Any, place: Any, indices: Any, number: Any) -> Any:
    """The tile of a number, of those that the row lists."""
    row, entry = place.tile // const.blocks.own, number // const.blocks.walked
    block = ct.gather(indices, (place.batch, place.head, row, entry), check_bounds=False)
    return block * const.blocks.walked + number % const.blocks.walked


@ct.function
def count_full(const: Any, place: Any) -> Any:
    """Tiles of full blocks."""
    if const.blocks.has_full:
        return count_tiles(const, place, place.lists[2])
    return 0


@ct.function
def count_partial(const: Any, place: Any) -> Any:
    """Tiles of partial blocks."""
    return count_tiles(const, place, place.lists[0])


@ct.function
def full_tile(const: Any, place: Any, number: Any) -> Any:
    """A tile of a full block; without such blocks never asked for."""
    if const.blocks.has_full:
        return listed_tile(const, place, place.lists[3], number)
    return number


@ct.function
def partial_tile(const: Any, place: Any, number: Any) -> Any:
    """A tile of a partial block."""
    return listed_tile(const, place, place.lists[1], number)


@ct.function
def any_tile(const: Any, place: Any, number: Any, full: Any) -> Any:
    """The tile of a number that counts `full` tiles of full blocks, then those of partial ones."""
    tile = partial_tile(const, place, max(number - full, 0))
    if const.blocks.has_full:
        is_full = min(max(full - number, 0), 1)
        tile = is_full * full_tile(const, place, number) + (1 - is_full) * tile
    return tile


@ct.function
def inside(const: Any, tile: Any, length: Any, size: Any) -> Any:
    """The tile to load in place of one that a list may have: where the last block is ragged some have nothing."""
    if const.blocks is not None:
        tile = max(0, min(tile, ct.cdiv(length, size) - 1))
    return tile
