"""The tiles of a launch: in which order blocks do them, and in a packed batch the sequences that they are of."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multiattn.packed import LIST_FIELDS

ENTRY_WORDS = gl.constexpr(len(LIST_FIELDS))
ENOUGH_TILES = gl.constexpr(256)
"""Tiles of one head: twice the SMs of an H200."""


class LaunchSizes(NamedTuple):
    """The integers of a launch. In a packed batch a tile's own have the lengths of its sequence."""

    seq_q: Any
    seq_kv: Any
    heads_q: Any
    group: Any
    """Query heads that share one key/value head."""
    tiles: Any
    """Tiles of a head that blocks own; or entries of the list."""
    heads: Any
    """Heads with these tiles, of all batch entries."""
    together: Any
    """Heads that run side by side."""
    left: Any
    """Keys before and after its own that a query sees; None where the mask is not two-sided."""
    right: Any
    tiles_q: Any
    """Tiles of 64 queries of one head, of a packed batch with one that is of none; None in the forward."""


@gluon.jit
def in_turn(tile, sizes, C: gl.constexpr):
    """The place in the order of tiles of what is begun as number `tile`.

    Returns the first head of its section, its number within the section, and the heads of the section, which run side
    by side: within these tile 0 of each head comes first, then tile 1.

    Heads go in sections that share the L2 cache, and under a mask a section runs its longest tiles first, under a block
    mask those that are often the longest.
    The last one has the heads of two where a head has few tiles: alone, with about as many tiles as there are SMs, its
    longest ones would end last. In a packed batch the tiles of a head are the entries of the list, the longest first.
    """
    tiles, heads, together = sizes.tiles, sizes.heads, sizes.together
    before = 0
    if C.is_banded or C.packed or C.blocks is not None:
        ahead = gl.maximum((heads - 1) // together - 1, 0) * together  # heads in the sections before the last two
        if (tiles < ENOUGH_TILES) & (tile >= ahead * tiles):
            before = ahead
            together = heads - ahead
    rest = tile - before * tiles
    section = rest // (tiles * together)
    within = rest - section * tiles * together
    first_head = before + section * together
    side_by_side = gl.minimum(together, heads - first_head)
    return first_head, within, side_by_side


@gluon.jit
def tile_after(tile, counter, total, C: gl.constexpr):
    """The tile that a block does next, `total` or more where there is none.

    Of a dynamic scheduler each is asked for once, and each block asks once in vain. The last to ask leaves the counter
    as it was found, for the launch that comes next on the stream.
    """
    if C.is_dynamic:
        asked = gl.atomic_add(counter, 1)
        if asked == total - 1:
            gl.atomic_add(counter, -total)
        tile = gl.num_programs(0) + asked
    elif C.is_persistent:
        tile += gl.num_programs(0)
    else:
        tile = total
    return tile


@gluon.jit
def listed_tile(tile, entries, counter, sizes, C: gl.constexpr, ROWS: gl.constexpr = 1):
    """`tile`, or in a packed batch the first one from there on that the block does and whose entry has a tile.

    Only entries whose first row is a multiple of ROWS count.
    """
    total = sizes.tiles * sizes.heads
    if C.packed:
        is_listed = 0
        while is_listed == 0:
            is_listed = 1
            if tile < total:
                _first_head, within, side_by_side = in_turn(tile, sizes, C)
                is_listed = _has_tile(entries + within // side_by_side * ENTRY_WORDS, ROWS)
                if is_listed == 0:
                    tile = tile_after(tile, counter, total, C)
    return tile


@gluon.jit
def _has_tile(entry, ROWS: gl.constexpr):
    """1 where an entry has a tile, else 0. Asking early brings near what `read_entry` reads."""
    found = gl.load(entry) >= 0
    if ROWS > 1:
        found = found & (gl.load(entry + 1) % ROWS == 0)
    return gl.where(found, 1, 0)


@gluon.jit
def find_tile(tile, entries, sizes, BY_KEYS: gl.constexpr, C: gl.constexpr):
    """Whose tile it is that is begun as number `tile`: of keys, or of the queries of one head.

    Returns its number within the head, its batch entry or sequence, its head and that of its keys, in a packed batch
    its first row, and `at` of queries and of keys.
    """
    heads = sizes.heads_q
    if BY_KEYS:
        heads = heads // sizes.group
    first_head, within, side_by_side = in_turn(tile, sizes, C)
    any_head = first_head + within % side_by_side
    batch = any_head // heads
    head = any_head % heads
    head_kv = head
    if not BY_KEYS:
        head_kv = head // sizes.group
    number = within // side_by_side
    first_row, at_q, at_kv = 0, batch, batch
    if C.packed:
        batch, first_row, at_q, at_kv = read_entry(entries, number)
    return number, batch, head, head_kv, first_row, at_q, at_kv


@gluon.jit
def read_entry(entries, number):
    """The tile of an entry: sequence, first row, and `at` of its queries and of its keys."""
    entry = entries + number * ENTRY_WORDS
    sequence = gl.load(entry)
    first_row = gl.load(entry + 1)
    offset_q = gl.load(entry + 2)
    len_q = gl.load(entry + 3)
    offset_kv = gl.load(entry + 4)
    len_kv = gl.load(entry + 5)
    return sequence, first_row, (offset_q, len_q), (offset_kv, len_kv)
