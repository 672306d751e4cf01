"""One warp that loads for the gradients: it decides which tiles of keys the block does, and keeps the rings full."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.backward_parts import load_tile, read_entry
from multiattn.triton.kernels.gluon.backward_tiles import (
    FIRST_KEY,
    TILE_WORDS,
    TILES_Q,
    block_of,
    query_blocks,
    write_sequence,
    write_tile,
)
from multiattn.triton.kernels.gluon.producer import in_turn, listed_tile, tile_after


@gluon.jit
def _load_keys(maps, at, head_kv, first_key, full, buffers, slot, C: gl.constexpr):
    """A tile of K or V, in halves: one of each warpgroup."""
    mbarrier.expect(full, 2 * C.tile_bytes)
    load_tile(maps, at, head_kv, first_key, full, buffers, 2 * slot, C)
    load_tile(maps, at, head_kv, first_key + 64, full, buffers, 2 * slot + 1, C)


@gluon.jit
def _load_q(maps, statistics, at, place, head, block, step, ring_q, buffers, C: gl.constexpr):
    """A tile of Q, with lse and delta of its queries; `place` is the batch entry and the first tile of these."""
    q_buffers, lse_buffers, delta_buffers = buffers
    ring.await_empty(ring_q, step, C.q_stages)
    slot = step % C.q_stages
    full = ring_q[0].index(slot)
    mbarrier.expect(full, C.tile_bytes + 2 * 64 * 4)
    load_tile(maps, at, head, block * 64, full, q_buffers, slot, C)
    line = 2 * (place[1] + block)
    ring.tma_load(statistics, [place[0], head, line, 0], full, lse_buffers.index(slot))
    ring.tma_load(statistics, [place[0], head, line + 1, 0], full, delta_buffers.index(slot))


@gluon.jit
def _load_dout(maps, at, head, block, step, ring_dout, buffers, C: gl.constexpr):
    ring.await_empty(ring_dout, step, C.dout_stages)
    slot = step % C.dout_stages
    full = ring_dout[0].index(slot)
    mbarrier.expect(full, C.tile_bytes)
    load_tile(maps, at, head, block * 64, full, buffers, slot, C)


@gluon.jit
def produce(maps, statistics, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile of keys; of each K, then for each step Q a step ahead of dO."""
    q_maps, k_maps, v_maps, dout_maps = maps
    ring_k, ring_v, ring_q, ring_dout, _ring_ds, words, buffers = shared
    k_buffers, v_buffers, q_buffers, dout_buffers, lse_buffers, delta_buffers, _ds_buffers = buffers
    of_q = (q_buffers, lse_buffers, delta_buffers)
    # The launch after this one may begin, and what the one before it wrote is there: "Programmatic Dependent Launch".
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    ring.await_launch_before()
    total = sizes[4] * sizes[5]
    group = sizes[3]
    heads_kv = sizes[2] // group
    tile = listed_tile(gl.program_id(0), entries, counter, total, sizes, C)
    tile_place = 0
    step = 0
    while tile < total:
        first_head, within, side_by_side = in_turn(tile, sizes, C)
        any_head = first_head + within % side_by_side
        batch = any_head // heads_kv
        head_kv = any_head % heads_kv
        first_key = within // side_by_side * 128
        at_q, at_kv, place, own = batch, batch, (batch, 0), sizes
        if C.packed:
            number, first_key, at_q, at_kv = read_entry(entries, within // side_by_side)
            # A sequence without queries has the one tile that is of none.
            batch = gl.where(at_q[1] > 0, number, 0)  # no tensor has an entry for the rows behind all sequences
            place = (0, gl.where(at_q[1] > 0, at_q[0] // 64 + number, sizes[TILES_Q] - 1))
            len_q, len_kv = at_q[1], at_kv[1]
            own = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
        blocks = query_blocks(first_key, own, C)
        begin, _full_begin, _full_end, end = blocks

        ring.await_empty(ring_k, tile_place, C.k_stages)
        slot = tile_place % C.k_stages
        write_tile(words, slot * TILE_WORDS, first_key, head_kv, batch, blocks)
        if C.packed:
            write_sequence(words, slot * TILE_WORDS, place[1], at_q, at_kv)
        _load_keys(k_maps, at_kv, head_kv, first_key, ring_k[0].index(slot), k_buffers, slot, C)
        head = head_kv * group
        block = block_of(begin, own, C)
        _load_q(q_maps, statistics, at_q, place, head, block, step, ring_q, of_q, C)
        ring.await_empty(ring_v, tile_place, 1)
        _load_keys(v_maps, at_kv, head_kv, first_key, ring_v[0].index(0), v_buffers, 0, C)
        steps = (end - begin) * group
        walked = begin
        for i in range(steps):
            _load_dout(dout_maps, at_q, head, block_of(walked, own, C), step, ring_dout, dout_buffers, C)
            walked += 1
            step += 1
            if walked == end:
                walked = begin
                head += 1
            if i + 1 < steps:
                block = block_of(walked, own, C)
                _load_q(q_maps, statistics, at_q, place, head, block, step, ring_q, of_q, C)
        tile_place += 1
        tile = tile_after(tile, counter, total, C)
        tile = listed_tile(tile, entries, counter, total, sizes, C)
    ring.await_empty(ring_k, tile_place, C.k_stages)
    slot = tile_place % C.k_stages
    ring.write_word(words, slot * TILE_WORDS + FIRST_KEY, ring.NO_TILE)
    mbarrier.arrive(ring_k[0].index(slot))
