"""The warpgroup that makes dQ = dS K of each step and adds it to its sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from multiattn.triton.kernels.gluon import backward_tiles, ring
from multiattn.triton.kernels.gluon.backward_tiles import block_of, read_lengths
from multiattn.triton.kernels.gluon.schedule import LaunchSizes
from multiattn.triton.kernels.gluon.tiles import piece_of


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
def _make(low, high, k_low, k_high, none):
    """dq[64, columns of a part] = dS K of both warpgroups' keys; `none` gives its layout."""
    dq = warpgroup_mma(low.permute((1, 0)), k_low, none, use_acc=False, is_async=True)
    return warpgroup_mma(high.permute((1, 0)), k_high, dq, is_async=True)


@gluon.jit
def _release_queries(step, shared, C: gl.constexpr):
    """Releases the queries that warpgroups of keys are done with when both have their dS of a step in shared memory.

    They do not arrive at these rings themselves: each arrival costs them a barrier of four warps, or two.
    """
    if step > 0:
        ring.release(shared.ring_q, step - 1)
        if C.early_scores:  # dV of the step may be under way
            ring.release(shared.ring_dout, step - 1)
    if not C.early_scores:
        ring.release(shared.ring_dout, step)


@gluon.jit
def add_dq(dq_fragments, sizes, shared, C: gl.constexpr):
    """Tile after tile, step after step."""
    words = shared.words
    row_floats: gl.constexpr = 16 * C.wide
    stages: gl.constexpr = shared.ring_sent.full.shape[0]
    tile_place = 0
    step = 0
    ring.await_full(shared.ring_k, tile_place)
    first_key = ring.read_word(words, backward_tiles.FIRST_KEY)
    while first_key != ring.NO_TILE:
        slot = tile_place % C.k_stages
        at = slot * backward_tiles.TILE_WORDS
        begin = ring.read_word(words, at + backward_tiles.BEGIN)
        end = ring.read_word(words, at + backward_tiles.END)
        batch = ring.read_word(words, at + backward_tiles.BATCH)
        first_tile, own = 0, sizes
        if C.packed:  # the list has a sequence for each tile, and tensors have one batch entry
            first_tile = ring.read_word(words, at + backward_tiles.FIRST_TILE)
            batch = 0
            len_q, len_kv = read_lengths(words, at)
            own = LaunchSizes(len_q, len_kv, *sizes[2:])
        head = batch * sizes.heads_q + ring.read_word(words, at + backward_tiles.HEAD_KV) * sizes.group
        k_low, k_high = piece_of(shared.k[0], 2 * slot), piece_of(shared.k[0], 2 * slot + 1)
        walked = begin
        steps = (end - begin) * sizes.group
        if C.blocks is not None:
            steps = end
            head = batch * sizes.heads_q
        for _ in range(steps):
            if C.blocks is None:
                place = (head * sizes.tiles_q + first_tile + block_of(walked, own, C)).to(gl.int64)
            else:
                ring.await_full(shared.ring_q, step)
                words_at = 2 * (step % C.q_stages)
                any_head = head + ring.read_word(shared.listed, words_at + 1)
                place = (any_head * sizes.tiles_q + ring.read_word(shared.listed, words_at) // 4).to(gl.int64)
            sums = dq_fragments + place * (64 * C.columns)
            ring.await_full(shared.ring_sent, step)
            low = shared.sent.index(2 * (step % stages))
            high = shared.sent.index(2 * (step % stages) + 1)
            parts: gl.constexpr = C.wide // C.dq_columns
            for part in gl.static_range(parts):
                some_low, some_high = k_low, k_high
                if parts > 1:
                    some_low = some_low.slice(part * C.dq_columns, C.dq_columns, dim=1)
                    some_high = some_high.slice(part * C.dq_columns, C.dq_columns, dim=1)
                none = gl.full([64, C.dq_columns], 0.0, gl.float32, C.dq)
                dq = _make(low, high, some_low, some_high, none)
                if part == 0:
                    _release_queries(step, shared, C)
                dq = warpgroup_mma_wait(0, [dq])
                if part == parts - 1 and C.pieces == 1:
                    ring.release(shared.ring_sent, step)
                _add(sums, dq, C.dq_columns, part * C.dq_columns, row_floats)
                if part < parts - 1 or C.pieces > 1:
                    ring.await_lanes()  # or the next product is there before all is added, and what is not is copied
            if C.pieces > 1:
                none = gl.full([64, C.narrow], 0.0, gl.float32, C.sums[1])
                narrow_low, narrow_high = piece_of(shared.k[1], 2 * slot), piece_of(shared.k[1], 2 * slot + 1)
                dq = _make(low, high, narrow_low, narrow_high, none)
                dq = warpgroup_mma_wait(0, [dq])
                ring.release(shared.ring_sent, step)
                _add(sums + 64 * C.wide, dq, C.narrow, 0, 16 * C.narrow)
            step += 1
            walked += 1
            if walked == end:
                walked = begin
                head += 1
        ring.release(shared.ring_k, tile_place)
        tile_place += 1
        ring.await_full(shared.ring_k, tile_place)
        first_key = ring.read_word(
            words, tile_place % C.k_stages * backward_tiles.TILE_WORDS + backward_tiles.FIRST_KEY
        )
