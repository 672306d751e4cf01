"""The warpgroup that makes dQ = dS K of each step and adds it to its sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from multiattn.triton.kernels.gluon import backward_tiles, ring
from multiattn.triton.kernels.gluon.backward_tiles import DS_STAGES, TILES_Q, block_of


@gluon.jit
def _add(sums, dq, COLUMNS: gl.constexpr, FIRST: gl.constexpr, ROW_FLOATS: gl.constexpr):
    """``dq[64, COLUMNS]`` to its sums, each thread's four neighbouring registers at once: 16 bytes.

    16 queries have ROW_FLOATS sums one after another, and 8 columns of these 128, four of each lane.
    """
    layout: gl.constexpr = dq.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    of_rows = rows // 16 * ROW_FLOATS + rows % 8 * 16
    of_columns = FIRST * 16 + columns // 8 * 128 + columns % 8 // 2 * 4
    addresses = (sums + of_rows + of_columns).to(gl.int64)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; // $0 $1 $2 $3 $5 $6 $7",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [addresses, dq], gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _make(low, high, k_low, k_high, IS_NARROW: gl.constexpr, C: gl.constexpr):
    """dq[64, columns of a part] = dS K of both warpgroups' keys."""
    if IS_NARROW:
        none = gl.full([64, C.narrow], 0.0, gl.float32, C.sums_narrow)
    else:
        none = gl.full([64, C.dq_columns], 0.0, gl.float32, C.dq)
    dq = warpgroup_mma(low.permute((1, 0)), k_low, none, use_acc=False, is_async=True)
    return warpgroup_mma(high.permute((1, 0)), k_high, dq, is_async=True)


@gluon.jit
def _release_queries(step, ring_q, ring_dout, C: gl.constexpr):
    """Releases the queries that warpgroups of keys are done with when both have their dS of a step in shared memory.

    They do not arrive at these rings themselves: each arrival costs them a barrier of four warps, or two.
    """
    if step > 0:
        ring.release(ring_q, step - 1, C.q_stages)
        if C.early_scores:  # dV of the step may be under way
            ring.release(ring_dout, step - 1, C.dout_stages)
    if not C.early_scores:
        ring.release(ring_dout, step, C.dout_stages)


@gluon.jit
def add_dq(dq_fragments, sizes, shared, C: gl.constexpr):
    """Tile after tile, step after step."""
    ring_k, _ring_v, ring_q, ring_dout, ring_ds, words, buffers = shared
    k_buffers, ds_buffers = buffers[0], buffers[6]
    row_floats: gl.constexpr = 16 * C.wide
    tile_place = 0
    step = 0
    ring.await_full(ring_k, tile_place, C.k_stages)
    first_key = ring.read_word(words, backward_tiles.FIRST_KEY)
    while first_key != ring.NO_TILE:
        slot = tile_place % C.k_stages
        at = slot * backward_tiles.TILE_WORDS
        begin = ring.read_word(words, at + backward_tiles.BEGIN)
        end = ring.read_word(words, at + backward_tiles.END)
        batch = ring.read_word(words, at + backward_tiles.BATCH)
        first_tile = 0
        own = sizes
        if C.packed:  # the list has a sequence for each tile, and tensors have one batch entry
            first_tile = ring.read_word(words, at + backward_tiles.FIRST_TILE)
            batch = 0
            len_q, len_kv = backward_tiles.read_lengths(words, at)
            own = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
        head = batch * sizes[2] + ring.read_word(words, at + backward_tiles.HEAD_KV) * sizes[3]
        k_low = k_buffers[0].index(2 * slot).reshape([64, C.wide])
        k_high = k_buffers[0].index(2 * slot + 1).reshape([64, C.wide])
        walked = begin
        for _ in range((end - begin) * sizes[3]):
            place = (head * sizes[TILES_Q] + first_tile + block_of(walked, own, C)).to(gl.int64)
            sums = dq_fragments + place * (64 * C.columns)
            ring.await_full(ring_ds, step, DS_STAGES)
            low = ds_buffers.index(2 * (step % DS_STAGES))
            high = ds_buffers.index(2 * (step % DS_STAGES) + 1)
            parts: gl.constexpr = C.wide // C.dq_columns
            for part in gl.static_range(parts):
                if parts > 1:
                    some_low = k_low.slice(part * C.dq_columns, C.dq_columns, dim=1)
                    some_high = k_high.slice(part * C.dq_columns, C.dq_columns, dim=1)
                    dq = _make(low, high, some_low, some_high, False, C)
                else:
                    dq = _make(low, high, k_low, k_high, False, C)
                if part == 0:
                    _release_queries(step, ring_q, ring_dout, C)
                dq = warpgroup_mma_wait(0, [dq])
                if part == parts - 1 and C.narrow == 0:
                    ring.release(ring_ds, step, DS_STAGES)
                _add(sums, dq, C.dq_columns, part * C.dq_columns, row_floats)
                if part < parts - 1 or C.narrow > 0:
                    ring.await_lanes()  # or the next product is there before all is added, and what is not is copied
            if C.narrow > 0:
                narrow_low = k_buffers[1].index(2 * slot).reshape([64, C.narrow])
                narrow_high = k_buffers[1].index(2 * slot + 1).reshape([64, C.narrow])
                dq = _make(low, high, narrow_low, narrow_high, True, C)
                dq = warpgroup_mma_wait(0, [dq])
                ring.release(ring_ds, step, DS_STAGES)
                _add(sums + 64 * C.wide, dq, C.narrow, 0, 16 * C.narrow)
            step += 1
            walked += 1
            if walked == end:
                walked = begin
                head += 1
        ring.release(ring_k, tile_place, C.k_stages)
        tile_place += 1
        ring.await_full(ring_k, tile_place, C.k_stages)
        first_key = ring.read_word(
            words, tile_place % C.k_stages * backward_tiles.TILE_WORDS + backward_tiles.FIRST_KEY
        )
