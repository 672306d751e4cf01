"""One warp that loads for the gradients: it decides which tiles of keys the block does, and keeps the rings full."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.backward_parts import send_queries
from multiattn.triton.kernels.gluon.backward_tiles import FIRST_KEY, FIRST_TILE, TILE_WORDS, block_of, query_blocks
from multiattn.triton.kernels.gluon.listed import count_tiles, find_listed, load_block, read_lists, steps_of
from multiattn.triton.kernels.gluon.schedule import LaunchSizes, find_tile, listed_tile, tile_after
from multiattn.triton.kernels.gluon.scores import SeenBlocks
from multiattn.triton.kernels.gluon.tiles import load_tile, send_tile


@gluon.jit
def _load_keys(maps, at, head_kv, first_key, full, buffers, slot, BYTES: gl.constexpr, C: gl.constexpr):
    """A tile of K or V, in halves of so many bytes: one of each warpgroup."""
    mbarrier.expect(full, 2 * BYTES)
    load_tile(maps, at, head_kv, first_key, full, buffers, 2 * slot, C)
    load_tile(maps, at, head_kv, first_key + 64, full, buffers, 2 * slot + 1, C)


class ListedKeys(NamedTuple):
    """A tile of keys whose queries are listed."""

    lists: Any
    row: Any
    """Its row of the lists."""
    seen: Any
    """`SeenBlocks` by what is not the block mask."""
    batch: Any
    head_kv: Any
    first_key: Any
    place: Any
    """In the ring of tiles of keys."""


@gluon.jit
def _load_values(maps, at_kv, head_kv, first_key, tile_place, shared, C: gl.constexpr):
    """V of a tile, when the gradients of the one before have left through its buffer."""
    ring.await_empty(shared.ring_v, tile_place)
    full = shared.ring_v.full.index(0)
    _load_keys(maps, at_kv, head_kv, first_key, full, shared.v, 0, C.tile_bytes_v, C)


@gluon.jit
def _count_steps(tile, sizes, C: gl.constexpr):
    """Listed tiles of queries, of all heads of a group."""
    steps = 0
    for member in range(sizes.group):
        listed = read_lists(tile.lists, tile.batch, tile.head_kv * sizes.group + member, tile.row, C)
        tiles, _free = count_tiles(listed, tile.seen, C)
        steps += tiles
    return steps


@gluon.jit
def _send_listed(tile, step, maps, statistics, sizes, shared, C: gl.constexpr):
    """Q of each listed tile of queries, then dO of the one before it; and V behind the first Q, or by itself."""
    lists, row, seen, batch, head_kv, first_key, tile_place = tile
    q_maps, _k_maps, v_maps, dout_maps = maps
    before = 0  # the tile whose dO is yet to come, if it has a head
    head_before = -1
    for member in range(sizes.group):
        head = head_kv * sizes.group + member
        listed = read_lists(lists, batch, head, row, C)
        found = load_block(0, listed, C)
        for place in range(steps_of(listed, C)):
            block, word, is_there = find_listed(place, found, listed, seen, C)
            found = load_block(place + 1, listed, C)
            if is_there:
                if head_before >= 0:
                    send_tile(dout_maps, batch, head_before, before, shared.ring_dout, step, shared.dout, C)
                    step += 1
                ring.await_empty(shared.ring_q, step)
                ring.write_words(shared.listed, 2 * (step % C.q_stages), (word, head))
                send_queries(q_maps, statistics, batch, (batch, 0), head, block, step, shared, C)
                if head_before < 0:
                    _load_values(v_maps, batch, head_kv, first_key, tile_place, shared, C)
                before = block
                head_before = head
    if head_before >= 0:
        send_tile(dout_maps, batch, head_before, before, shared.ring_dout, step, shared.dout, C)
        step += 1
    else:
        _load_values(v_maps, batch, head_kv, first_key, tile_place, shared, C)
    return step


@gluon.jit
def produce(maps, statistics, lists, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile of keys; of each K, then for each step Q a step ahead of dO."""
    q_maps, k_maps, v_maps, dout_maps = maps
    words = shared.words
    ring.begin_loading()
    total = sizes.tiles * sizes.heads
    group = sizes.group
    tile = listed_tile(gl.program_id(0), entries, counter, sizes, C)
    tile_place = 0
    step = 0
    while tile < total:
        number, batch, _head, head_kv, first_key, at_q, at_kv = find_tile(tile, entries, sizes, True, C)
        lines_at, own = (batch, 0), sizes
        if C.packed:
            # A sequence without queries has the one tile that is of none.
            lines_at = (0, gl.where(at_q[1] > 0, at_q[0] // 64 + batch, sizes.tiles_q - 1))
            own = LaunchSizes(at_q[1], at_kv[1], *sizes[2:])
            batch = gl.where(at_q[1] > 0, batch, 0)  # no tensor has an entry for the rows behind all sequences
        else:
            first_key = number * 128
        blocks = query_blocks(first_key, own, C)
        if C.blocks is not None:  # steps are counted from 0 through the tiles of all heads
            keys = ListedKeys(lists, first_key // C.blocks.keys, blocks, batch, head_kv, first_key, tile_place)
            blocks = SeenBlocks(0, 0, 0, _count_steps(keys, sizes, C))

        ring.await_empty(shared.ring_k, tile_place)
        slot = tile_place % C.k_stages
        ring.write_words(words, slot * TILE_WORDS, (first_key, head_kv, batch) + blocks)
        if C.packed:
            ring.write_words(words, slot * TILE_WORDS + FIRST_TILE, (lines_at[1], at_q[1], at_kv[1], at_kv[0]))
        full = shared.ring_k.full.index(slot)
        _load_keys(k_maps, at_kv, head_kv, first_key, full, shared.k, slot, C.tile_bytes, C)
        if C.blocks is None:
            head = head_kv * group
            block = block_of(blocks.begin, own, C)
            send_queries(q_maps, statistics, at_q, lines_at, head, block, step, shared, C)
            _load_values(v_maps, at_kv, head_kv, first_key, tile_place, shared, C)
            steps = (blocks.end - blocks.begin) * group
            walked = blocks.begin
            for i in range(steps):
                block = block_of(walked, own, C)
                send_tile(dout_maps, at_q, head, block, shared.ring_dout, step, shared.dout, C)
                walked += 1
                step += 1
                if walked == blocks.end:
                    walked = blocks.begin
                    head += 1
                if i + 1 < steps:
                    block = block_of(walked, own, C)
                    send_queries(q_maps, statistics, at_q, lines_at, head, block, step, shared, C)
        else:
            step = _send_listed(keys, step, maps, statistics, sizes, shared, C)
        tile_place += 1
        tile = tile_after(tile, counter, total, C)
        tile = listed_tile(tile, entries, counter, sizes, C)
    ring.await_empty(shared.ring_k, tile_place)
    slot = tile_place % C.k_stages
    ring.write_word(words, slot * TILE_WORDS + FIRST_KEY, ring.NO_TILE)
    mbarrier.arrive(shared.ring_k.full.index(slot))
