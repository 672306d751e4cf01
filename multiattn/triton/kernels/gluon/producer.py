"""One warp that loads: it decides which tiles of queries the block does, in which order, and keeps the rings full."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multiattn.triton.kernels.gluon import ring, sequences
from multiattn.triton.kernels.gluon.scores import range_of_blocks

ENOUGH_TILES = gl.constexpr(256)
"""Tiles of one head: twice the SMs of an H200."""


@gluon.jit
def in_turn(tile, sizes, C: gl.constexpr):
    """The place in the order of tiles of what is begun as number `tile`.

    Returns the first head of its section, its number within the section, and the heads of the section, which run side
    by side.

    Heads go in sections that share the L2 cache, and under a mask a section runs its longest tiles first. The last one
    has the heads of two where a head has few tiles: alone, with about as many tiles as there are SMs, its longest ones
    would end last. In a packed batch the tiles of a head are the entries of the list, the longest first.
    """
    tiles, heads, together = sizes[4], sizes[5], sizes[6]
    before = 0
    if C.banded or C.packed:
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
def _find(tile, entries, sizes, C: gl.constexpr):
    """The tile that is begun as number `tile`: its batch entry or sequence, and head; first query; and `at` of its
    queries and of its keys.

    The last tile of a head ends where its queries do, so that the one that is not whole is the first, which begins
    before query 0 and under a mask sees the fewest keys.
    """
    first_head, within, side_by_side = in_turn(tile, sizes, C)
    if C.packed:
        batch, first_query, at_q, at_kv = sequences.read_entry(entries, within // side_by_side, C)
        head = first_head + within % side_by_side
    else:
        first_query = (sizes[0] + 63) // 64 * 64 - (1 + within // side_by_side) * C.tile_m
        any_head = first_head + within % side_by_side
        batch = any_head // sizes[2]
        head = any_head % sizes[2]
        at_q, at_kv = batch, batch
    return batch, head, first_query, at_q, at_kv


@gluon.jit
def _load_pieces(maps, at, head, row, full, buffers, slot, C: gl.constexpr):
    """Rows of one head, in one piece of head_dim or two."""
    sequences.load_rows(maps[0], at, head, row, 0, full, buffers[0].index(slot), C)
    if C.narrow > 0:
        sequences.load_rows(maps[1], at, head, row, C.wide, full, buffers[1].index(slot), C)


@gluon.jit
def _load_keys(maps, at, head_kv, block, place, ring_kv, buffers, C: gl.constexpr):
    """A tile of K or V into the ring."""
    ring.await_empty(ring_kv, place, C.stages)
    full = ring_kv[0].index(place % C.stages)
    mbarrier.expect(full, 2 * C.tile_n * (C.wide + C.narrow))
    _load_pieces(maps, at, head_kv, block * C.tile_n, full, buffers, place % C.stages, C)


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
def listed_tile(tile, entries, counter, total, sizes, C: gl.constexpr):
    """`tile`, or in a packed batch the first one from there on that the block does and whose entry has a tile."""
    if C.packed:
        is_listed = 0
        while is_listed == 0:
            is_listed = 1
            if tile < total:
                _first_head, within, side_by_side = in_turn(tile, sizes, C)
                is_listed = sequences.has_tile(entries, within // side_by_side)
                if is_listed == 0:
                    tile = tile_after(tile, counter, total, C)
    return tile


@gluon.jit
def _spoiled_tile(place, verdicts, words, C: gl.constexpr):
    """The tile that was at `place` if it must be done again, else NO_TILE. Waits for its end."""
    slot = place % C.q_slots
    mbarrier.wait(verdicts.index(slot), (place // C.q_slots) & 1)
    spoiled = 0
    warpgroups: gl.constexpr = C.warpgroups
    for warpgroup in gl.static_range(warpgroups):
        spoiled += ring.read_word(words, slot * C.words + ring.SPOILED + warpgroup)
    again = ring.NO_TILE
    if spoiled > 0:
        again = ring.read_word(words, slot * C.words + ring.TILE)
    return again


@gluon.jit
def _send(tile, exact, q_place, place, q_maps, k_maps, v_maps, entries, sizes, shared, C: gl.constexpr):
    """All of a tile: Q, and blocks of keys from the last to the first. Returns the next place in the ring of these."""
    ring_q, ring_kv, _verdicts, _turns, words, q_buffers, kv_buffers = shared
    batch, head, first_query, at_q, at_kv = _find(tile, entries, sizes, C)
    if C.packed:
        sizes = (at_q[1], at_kv[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8])
    head_kv = head // sizes[3]
    begin, end = range_of_blocks(first_query, C.tile_m, sizes, C)
    if end > begin:
        _load_keys(k_maps, at_kv, head_kv, end - 1, place, ring_kv, kv_buffers, C)
        place += 1

    ring.await_empty(ring_q, q_place, C.q_slots)
    slot = q_place % C.q_slots
    ring.write_word(words, slot * C.words + ring.FIRST_QUERY, first_query)
    ring.write_word(words, slot * C.words + ring.HEAD, head)
    ring.write_word(words, slot * C.words + ring.BATCH, batch)
    ring.write_word(words, slot * C.words + ring.END, end)
    ring.write_word(words, slot * C.words + ring.EXACT, exact)
    ring.write_word(words, slot * C.words + ring.TILE, tile)
    if C.packed:
        sequences.write_sequence(words, slot * C.words, at_q, sizes[1], C)
    warpgroups: gl.constexpr = C.warpgroups
    for warpgroup in gl.static_range(warpgroups):
        ring.write_word(words, slot * C.words + ring.SPOILED + warpgroup, 0)
    full = ring_q[0].index(slot)
    mbarrier.expect(full, 2 * C.tile_m * (C.wide + C.narrow))
    for warpgroup in gl.static_range(warpgroups):
        row = first_query + 64 * warpgroup
        if C.packed:
            row = gl.where(row < 0, sizes[0], row)  # all beyond the end: before its first row are another sequence's
        _load_pieces(q_maps, at_q, head, row, full, q_buffers, slot * C.warpgroups + warpgroup, C)

    for i in range(end - begin - 1):
        _load_keys(k_maps, at_kv, head_kv, end - 2 - i, place, ring_kv, kv_buffers, C)
        _load_keys(v_maps, at_kv, head_kv, end - 1 - i, place + 1, ring_kv, kv_buffers, C)
        place += 2
    if end > begin:
        _load_keys(v_maps, at_kv, head_kv, begin, place, ring_kv, kv_buffers, C)
        place += 1
    return place


@gluon.jit
def produce(q_maps, k_maps, v_maps, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile, until there are none and nothing that was sent must be done again.

    The next one is asked for when all of a tile is under way, not before: a tile that waits for its block is one that
    another block could have begun.
    """
    ring_q, _ring_kv, verdicts, _turns, words, _q_buffers, _kv_buffers = shared
    # The launch after this one may begin, and what the one before it wrote is there: "Programmatic Dependent Launch".
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    ring.await_launch_before()
    total = sizes[4] * sizes[5]
    tile = listed_tile(gl.program_id(0), entries, counter, total, sizes, C)
    q_place = 0
    place = 0
    judged = 0  # tiles whose end was waited for; only lazy maxima need that
    is_open = 1
    while is_open > 0:
        again = ring.NO_TILE
        if C.lazy_max:
            if (judged < q_place) & ((q_place - judged >= C.q_slots) | (tile >= total)):
                again = _spoiled_tile(judged, verdicts, words, C)
                judged += 1
        exact = gl.where(again != ring.NO_TILE, 1, 0)
        if (exact > 0) | (tile < total):
            sent = gl.where(exact > 0, again, tile)
            place = _send(sent, exact, q_place, place, q_maps, k_maps, v_maps, entries, sizes, shared, C)
            q_place += 1
            if exact == 0:
                tile = tile_after(tile, counter, total, C)
                tile = listed_tile(tile, entries, counter, total, sizes, C)
        elif C.lazy_max:
            is_open = gl.where(judged < q_place, 1, 0)
        else:
            is_open = 0
    ring.await_empty(ring_q, q_place, C.q_slots)
    slot = q_place % C.q_slots
    ring.write_word(words, slot * C.words + ring.END, ring.NO_TILE)
    mbarrier.arrive(ring_q[0].index(slot))
