"""One warp that loads: it decides which tiles of queries the block does, in which order, and keeps the rings full."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.constants import TILE_WORDS
from multiattn.triton.kernels.gluon.listed import (
    count_tiles,
    end_of_listed,
    find_listed,
    load_block,
    read_lists,
    steps_of,
)
from multiattn.triton.kernels.gluon.schedule import LaunchSizes, in_turn, listed_tile, read_entry, tile_after
from multiattn.triton.kernels.gluon.scores import range_of_blocks, seen_by_tile, seen_on_axis
from multiattn.triton.kernels.gluon.tiles import await_slot, load_tile, send_tile

# Words of shared memory for each slot of Q: what its tile is, and from SPOILED on one for each warpgroup. Behind them,
# in a packed batch, where its sequence is: first query, queries, keys; and, of a block mask, how many tiles are free.
FIRST_QUERY, HEAD, BATCH, END, EXACT, TILE, SPOILED = (gl.constexpr(i) for i in range(TILE_WORDS + 1))


class ForwardShared(NamedTuple):
    """All of a block's shared memory. Q has a ring and a tile for each warpgroup, K and V have a ring together."""

    ring_q: Any
    ring_kv: Any
    verdicts: Any
    """Barriers of the slots of Q: whether its tile must be done again is known. Only lazy maxima need them."""
    turns: Any
    """Barriers of the warpgroups, where they take turns."""
    words: Any
    listed: Any
    """A word for each slot of the ring of keys, where blocks are listed: see `listed`."""
    q_buffers: Any
    kv_buffers: Any


@gluon.jit
def find_queries(tile, entries, sizes, C: gl.constexpr):
    """The tile that is begun as number `tile`: batch entry or sequence, head, first query, `at` of queries and keys.

    The last tile of a head ends where its queries do, rounded up to those of a warpgroup: the one that is not whole is
    the first, which begins before query 0 and under a mask sees the fewest keys. With a block mask tiles begin as the
    list says, and their last rows may be those of another. A sequence without keys is told as 0: no tensor has an entry
    for the number of the rows behind all sequences.
    """
    first_head, within, side_by_side = in_turn(tile, sizes, C)
    number = within // side_by_side
    if C.packed:
        sequence, first_row, at_q, at_kv = read_entry(entries, number)
        len_q = at_q[1]
        first_query = first_row + (len_q + 63) // 64 * 64 - (len_q + C.tile_m - 1) // C.tile_m * C.tile_m
        if C.blocks is not None:
            first_query = first_row
        batch = gl.where(at_kv[1] > 0, sequence, 0)
        head = first_head + within % side_by_side
    else:
        first_query = (sizes.seq_q + 63) // 64 * 64 - (1 + number) * C.tile_m
        if C.blocks is not None:  # in one block
            first_query = (sizes.tiles - 1 - number) * C.tile_m
        any_head = first_head + within % side_by_side
        batch = any_head // sizes.heads_q
        head = any_head % sizes.heads_q
        at_q, at_kv = batch, batch
    return batch, head, first_query, at_q, at_kv


@gluon.jit
def own_rows(first_query, at, C: gl.constexpr):
    """`at` of a sequence, with the end of the rows that a tile of the packed axis has of it."""
    offset, length = at
    return offset, gl.minimum(first_query + C.tile_m - (offset + first_query) % C.tile_m, length)


@gluon.jit
def _spoiled_tile(place, verdicts, words, C: gl.constexpr):
    """The tile that was at `place` if it must be done again, else NO_TILE. Waits for its end."""
    slot = place % C.q_slots
    mbarrier.wait(verdicts.index(slot), (place // C.q_slots) & 1)
    spoiled = 0
    warpgroups: gl.constexpr = C.warpgroups
    for warpgroup in gl.static_range(warpgroups):
        spoiled += ring.read_word(words, slot * C.words + SPOILED + warpgroup)
    again = ring.NO_TILE
    if spoiled > 0:
        again = ring.read_word(words, slot * C.words + TILE)
    return again


@gluon.jit
def _send_queries(q_place, fields, more, at_q, maps, sizes, shared, C: gl.constexpr):
    """Q of a tile and its words: `fields`, and behind those of spoiled tiles `more`."""
    ring_q, words = shared.ring_q, shared.words
    first_query, head = fields[0], fields[1]
    ring.await_empty(ring_q, q_place)
    slot = q_place % C.q_slots
    ring.write_words(words, slot * C.words, fields)
    if C.words > C.sequence_words:
        ring.write_words(words, slot * C.words + C.sequence_words, more)
    warpgroups: gl.constexpr = C.warpgroups
    for warpgroup in gl.static_range(warpgroups):
        ring.write_word(words, slot * C.words + SPOILED + warpgroup, 0)
    full = ring_q.full.index(slot)
    mbarrier.expect(full, 2 * C.tile_m * C.columns)
    for warpgroup in gl.static_range(warpgroups):
        row = first_query + 64 * warpgroup
        if C.packed:
            row = gl.where(row < 0, sizes.seq_q, row)  # all beyond the end: before its first row are another sequence's
        load_tile(maps, at_q, head, row, full, shared.q_buffers, slot * C.warpgroups + warpgroup, C)


@gluon.jit
def _send(tile, exact, q_place, place, maps, entries, sizes, shared, C: gl.constexpr):
    """All of a tile: Q, and blocks of keys from the last to the first. Returns the next place in the ring of these."""
    q_maps, k_maps, v_maps = maps
    ring_kv, buffers = shared.ring_kv, shared.kv_buffers
    batch, head, first_query, at_q, at_kv = find_queries(tile, entries, sizes, C)
    if C.packed:
        sizes = LaunchSizes(at_q[1], at_kv[1], *sizes[2:])
    head_kv = head // sizes.group
    begin, end = range_of_blocks(first_query, C.tile_m, sizes, C)
    if end > begin:
        send_tile(k_maps, at_kv, head_kv, end - 1, ring_kv, place, buffers, C)
        place += 1

    fields = (first_query, head, batch, end, exact, tile)
    if C.packed:
        _send_queries(q_place, fields, (at_q[0], at_q[1], sizes.seq_kv), at_q, q_maps, sizes, shared, C)
    else:
        _send_queries(q_place, fields, (), at_q, q_maps, sizes, shared, C)

    for i in range(end - begin - 1):
        send_tile(k_maps, at_kv, head_kv, end - 2 - i, ring_kv, place, buffers, C)
        send_tile(v_maps, at_kv, head_kv, end - 1 - i, ring_kv, place + 1, buffers, C)
        place += 2
    if end > begin:
        send_tile(v_maps, at_kv, head_kv, begin, ring_kv, place, buffers, C)
        place += 1
    return place


@gluon.jit
def _send_keys(maps, at, head, tile, ring_kv, place, buffers, C: gl.constexpr):
    """A listed tile of keys; of the packed axis as far as its sequence has it, and zeros behind that."""
    if C.packed:
        end = end_of_listed(tile, at[0], C)
        slot, full = await_slot(maps, ring_kv, place, buffers, C)
        within = (at[0], gl.minimum(end, at[1]))
        load_tile(maps, within, head, gl.maximum(end - C.tile_n, 0), full, buffers, slot, C)
    else:
        send_tile(maps, at, head, tile, ring_kv, place, buffers, C)


@gluon.jit
def _send_listed(tile, exact, q_place, place, maps, entries, lists, sizes, shared, C: gl.constexpr):
    """All of a tile that walks over listed blocks: Q, then K of each tile of keys with V of the one before it."""
    q_maps, k_maps, v_maps = maps
    ring_kv, buffers = shared.ring_kv, shared.kv_buffers
    batch, head, first_query, at_q, at_kv = find_queries(tile, entries, sizes, C)
    head_kv = head // sizes.group
    if C.packed:  # a sequence has rows of its own, for its part of the blocks of the packed axis
        sizes = LaunchSizes(at_q[1], at_kv[1], *sizes[2:])
        listed = read_lists(lists, batch, head, (at_q[0] + first_query) // C.blocks.queries + batch, C)
        seen = seen_on_axis(first_query, at_kv[0], sizes, C)
    else:
        listed = read_lists(lists, batch, head, first_query // C.blocks.queries, C)
        seen = seen_by_tile(first_query, sizes, C)
    block = load_block(0, listed, C)
    total, free = count_tiles(listed, seen, C)
    fields, free = (first_query, head, batch, total, exact, tile), gl.where(exact > 0, 0, free)
    if C.packed:
        at_own, more = own_rows(first_query, at_q, C), (at_q[0], at_q[1], at_kv[1], free)
        _send_queries(q_place, fields, more, at_own, q_maps, sizes, shared, C)
    else:
        _send_queries(q_place, fields, (free,), at_q, q_maps, sizes, shared, C)
    before = -1
    for step in range(steps_of(listed, C)):
        keys, word, is_there = find_listed(step, block, listed, seen, C)
        block = load_block(step + 1, listed, C)
        if is_there:
            if C.packed:
                word += 4 * (end_of_listed(keys, at_kv[0], C) - keys)
            ring.await_empty(ring_kv, place)
            ring.write_word(shared.listed, place % C.stages, word)
            _send_keys(k_maps, at_kv, head_kv, keys, ring_kv, place, buffers, C)
            place += 1
            if before >= 0:
                _send_keys(v_maps, at_kv, head_kv, before, ring_kv, place, buffers, C)
                place += 1
            before = keys
    if before >= 0:
        _send_keys(v_maps, at_kv, head_kv, before, ring_kv, place, buffers, C)
        place += 1
    return place


@gluon.jit
def produce(maps, entries, counter, lists, sizes, shared, C: gl.constexpr):
    """Tile after tile, until there are none and nothing that was sent must be done again.

    The next one is asked for when all of a tile is under way, not before: a tile that waits for its block is one that
    another block could have begun.
    """
    ring.begin_loading()
    total = sizes.tiles * sizes.heads
    tile = listed_tile(gl.program_id(0), entries, counter, sizes, C)
    q_place = 0
    place = 0
    judged = 0  # tiles whose end was waited for; only lazy maxima need that
    is_open = 1
    while is_open > 0:
        again = ring.NO_TILE
        if C.lazy_max:
            if (judged < q_place) & ((q_place - judged >= C.q_slots) | (tile >= total)):
                again = _spoiled_tile(judged, shared.verdicts, shared.words, C)
                judged += 1
        exact = gl.where(again != ring.NO_TILE, 1, 0)
        if (exact > 0) | (tile < total):
            sent = gl.where(exact > 0, again, tile)
            if C.blocks is None:
                place = _send(sent, exact, q_place, place, maps, entries, sizes, shared, C)
            else:
                place = _send_listed(sent, exact, q_place, place, maps, entries, lists, sizes, shared, C)
            q_place += 1
            if exact == 0:
                tile = tile_after(tile, counter, total, C)
                tile = listed_tile(tile, entries, counter, sizes, C)
        elif C.lazy_max:
            is_open = gl.where(judged < q_place, 1, 0)
        else:
            is_open = 0
    ring.await_empty(shared.ring_q, q_place)
    slot = q_place % C.q_slots
    ring.write_word(shared.words, slot * C.words + END, ring.NO_TILE)
    mbarrier.arrive(shared.ring_q.full.index(slot))
