"""The warp that loads for twins: tiles of queries in their order, and pieces of K and V as they are needed."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.producer import find_queries
from multiattn.triton.kernels.gluon.schedule import LaunchSizes, listed_tile, tile_after
from multiattn.triton.kernels.gluon.scores import range_of_blocks
from multiattn.triton.kernels.gluon.tiles import load_piece

# Words of shared memory that say what the tile is. Behind them, in a packed batch, where its sequence is: first query,
# queries, keys.
FIRST_QUERY, HEAD, BATCH, END = (gl.constexpr(i) for i in range(4))


class TwinShared(NamedTuple):
    """All of a block's shared memory. Q has one slot; K and V have rings, of slots of all pieces of a tile."""

    ring_q: Any
    ring_k: Any
    ring_v: Any
    began: Any
    """Barriers of the warpgroups: products of all pieces of K of a turn are under way."""
    handed: Any
    """Weights of a turn are there."""
    summed: Any
    """Sums of a tile are there."""
    words: Any
    q: Any
    k: Any
    v: Any
    weights: Any
    maxima: Any
    sums: Any


@gluon.jit
def _send_piece(
    map, piece: gl.constexpr, PIECES: gl.constexpr, at, head, block, ring_of, place, buffers, C: gl.constexpr
):
    """A piece of a block of rows, as soon as nobody needs what is in its slot."""
    slot = ring.slot_of_piece(ring_of, place, piece, PIECES)
    ring.await_empty_piece(ring_of, place, piece, PIECES)
    full = ring_of.full.index(slot)
    mbarrier.expect(full, 2 * C.tile_n * C.wide)
    load_piece(map, at, head, block * C.tile_n, piece * C.wide, full, buffers.index(slot), C)


@gluon.jit
def _send_keys(map, at, head, block, place, shared, C: gl.constexpr):
    """All pieces of a block of K."""
    pieces: gl.constexpr = C.pieces
    for piece in gl.static_range(pieces):
        _send_piece(map, piece, pieces, at, head, block, shared.ring_k, place, shared.k, C)


@gluon.jit
def _send_values(map, at, head, block, place, shared, C: gl.constexpr):
    """All pieces of a block of V as they are needed: the first of each warpgroup, then the second."""
    pieces: gl.constexpr = C.pieces_v
    for i in gl.static_range(pieces):
        _send_piece(map, i // 2 + i % 2 * C.begins[1], pieces, at, head, block, shared.ring_v, place, shared.v, C)


@gluon.jit
def _send(tile, q_place, place, q_map, k_map, v_map, entries, sizes, shared, C: gl.constexpr):
    """All of a tile: Q, and blocks of keys from the last to the first. Returns the place of the turn after it."""
    batch, head, first_query, at_q, at_kv = find_queries(tile, entries, sizes, C)
    if C.packed:
        sizes = LaunchSizes(at_q[1], at_kv[1], *sizes[2:])
    head_kv = head // sizes.group
    begin, end = range_of_blocks(first_query, C.tile_m, sizes, C)
    if end > begin:
        _send_keys(k_map, at_kv, head_kv, end - 1, place, shared, C)

    ring.await_empty(shared.ring_q, q_place)
    ring.write_words(shared.words, 0, (first_query, head, batch, end))
    if C.packed:
        ring.write_words(shared.words, C.sequence_words, (at_q[0], at_q[1], sizes.seq_kv))
    full = shared.ring_q.full.index(0)
    mbarrier.expect(full, 2 * C.tile_m * C.columns)
    pieces: gl.constexpr = C.pieces
    for piece in gl.static_range(pieces):
        load_piece(q_map, at_q, head, first_query, piece * C.wide, full, shared.q.index(piece), C)

    for i in range(end - begin - 1):
        _send_keys(k_map, at_kv, head_kv, end - 2 - i, place + 1, shared, C)
        _send_values(v_map, at_kv, head_kv, end - 1 - i, place, shared, C)
        place += 1
    if end > begin:
        _send_values(v_map, at_kv, head_kv, begin, place, shared, C)
        place += 1
    return place


@gluon.jit
def produce(q_map, k_map, v_map, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile. The next one is asked for when all of a tile is under way, not before."""
    ring.begin_loading()
    total = sizes.tiles * sizes.heads
    tile = listed_tile(gl.program_id(0), entries, counter, sizes, C)
    q_place = 0
    place = 0
    while tile < total:
        place = _send(tile, q_place, place, q_map, k_map, v_map, entries, sizes, shared, C)
        q_place += 1
        tile = tile_after(tile, counter, total, C)
        tile = listed_tile(tile, entries, counter, sizes, C)
    ring.await_empty(shared.ring_q, q_place)
    ring.write_word(shared.words, END, ring.NO_TILE)
    mbarrier.arrive(shared.ring_q.full.index(0))
