"""Tiles of the blocks that a block mask lists: which ones a tile of queries, or of keys, walks over, in which order.

The lists of a row have full blocks and partial ones, each of some tiles. Full blocks come before partial ones, the last
of the list first, without tiles that nobody sees. *Free* tiles need no mask: those of full blocks that the end of a
sequence and a band leave whole. In the forward they come before all others. Beside each tile in a ring is its *word*:
``4 * tile``, and 2 where an end or a band cuts it, and 1 where it is of a partial block. In a packed batch, where tiles
are those of the packed axis, a word has the end of the tile in its sequence in place of its number: it may begin
before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LANES = gl.constexpr(32)


class ListedTiles(NamedTuple):
    """The lists of a row."""

    full: Any
    """Pointer to its full blocks."""
    full_tiles: Any
    """Tiles of these, all together."""
    partial: Any
    partial_tiles: Any


@gluon.jit
def read_lists(lists, batch, head, row, C: gl.constexpr):
    """`ListedTiles` of a row of blocks: of queries, or of keys."""
    place = batch.to(gl.int64) * lists.list_batch + head * lists.list_head + row
    partial = lists.indices + place * lists.list_columns
    partial_tiles = gl.load(lists.counts + place) * C.tiles_of_block
    full, full_tiles = partial, 0 * partial_tiles
    if C.blocks.has_full:
        full = lists.full_indices + place * lists.list_columns
        full_tiles = gl.load(lists.full_counts + place) * C.tiles_of_block
    return ListedTiles(full, full_tiles, partial, partial_tiles)


@gluon.jit
def _count(blocks, tiles, begin, end, C: gl.constexpr):
    """How many of so many listed tiles are in [begin, end)."""
    parts: gl.constexpr = C.tiles_of_block
    lanes = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    found = gl.full([LANES], 0, gl.int32, lanes.type.layout)
    for first in range(0, tiles // parts, LANES):
        is_listed = first + lanes < tiles // parts
        block = gl.load(blocks + first + lanes, mask=is_listed, other=0)
        for part in gl.static_range(parts):
            tile = block * parts + part
            found += gl.where(is_listed & (tile >= begin) & (tile < end), 1, 0)
    return gl.sum(found, 0)


@gluon.jit
def count_tiles(listed, seen, C: gl.constexpr):
    """How many tiles are walked over, and how many of them are free; `seen` says what there is beside the lists."""
    free, total = listed.full_tiles, listed.full_tiles + listed.partial_tiles
    if C.hides_in_full:
        free = _count(listed.full, listed.full_tiles, seen.full_begin, seen.full_end, C)
        total = _count(listed.full, listed.full_tiles, seen.begin, seen.end, C)
        total += _count(listed.partial, listed.partial_tiles, seen.begin, seen.end, C)
    return total, free


@gluon.jit
def steps_of(listed, C: gl.constexpr):
    """Steps of a search for the tiles of a walk: twice through full blocks where free tiles have to be found first."""
    steps = listed.full_tiles + listed.partial_tiles
    if C.hides_in_full and C.free_first:
        steps += listed.full_tiles
    return steps


@gluon.jit
def _place_of(step, listed, C: gl.constexpr):
    """Where a step looks: in the partial blocks or the full ones, and at which of their tiles, the last one first."""
    searched = steps_of(listed, C) - listed.partial_tiles
    is_partial = step >= searched
    tiles = gl.where(is_partial, listed.partial_tiles, listed.full_tiles)
    passed = gl.where(is_partial, step - searched, step)
    if C.hides_in_full and C.free_first:
        passed = gl.where(is_partial | (step < listed.full_tiles), passed, step - listed.full_tiles)
    return is_partial, gl.maximum(tiles - 1 - passed, 0)


@gluon.jit
def load_block(step, listed, C: gl.constexpr):
    """The block that a step looks at: ask a step ahead, and wait for nothing. 0 beyond the last step."""
    is_partial, place = _place_of(step, listed, C)
    found = 0
    if step < steps_of(listed, C):
        if is_partial:
            found = gl.load(listed.partial + place // C.tiles_of_block)
        else:
            found = gl.load(listed.full + place // C.tiles_of_block)
    return found


@gluon.jit
def find_listed(step, block, listed, seen, C: gl.constexpr):
    """The tile that a step comes to, its word, and whether the walk has it there."""
    is_partial, place = _place_of(step, listed, C)
    tile = block * C.tiles_of_block + place % C.tiles_of_block
    word = 4 * tile + gl.where(is_partial, 1, 0)
    is_there = tile >= 0
    if C.hides_in_full:
        is_cut = (tile < seen.full_begin) | (tile >= seen.full_end)
        word += gl.where(is_cut, 2, 0)
        is_there = (tile >= seen.begin) & (tile < seen.end)
        if C.free_first:
            is_there = is_there & (is_partial | (is_cut == (step >= listed.full_tiles)))
    return tile, word, is_there


@gluon.jit
def end_of_listed(tile, offset, C: gl.constexpr):
    """The end of a tile of the packed axis, in the sequence that begins at `offset`; its keys may end before."""
    return (tile + 1) * C.tile_n - offset


@gluon.jit
def first_of_listed(word, C: gl.constexpr):
    """The first key of the tile of a word."""
    if C.packed:
        first = gl.maximum(word // 4 - C.tile_n, 0)
    else:
        first = word // 4 * C.tile_n
    return first
