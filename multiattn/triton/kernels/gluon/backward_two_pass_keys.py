"""Gradients of k and v, for Hopper in Gluon: TMA, wgmma, warp specialisation. See `backward_two_pass_queries` for q.

A block owns 64 keys of one key/value head and walks over the queries of all heads of its group, 64 at a time, as
`multiattn/cuda/kernels/backward_wgmma_two_pass_keys.cuh` does. All is transposed (rows are keys), so that weights and
dS stay in registers as left operands. At D=256 a gradient takes 128 registers a thread: two warpgroups own the same
keys and one gradient each. That of dv makes scores and weights, which it hands to that of dk through shared memory;
that of dk makes dP and dS. One warp loads.

An arrival at a barrier costs a warpgroup a barrier of its own four warps. So that of dv arrives once a step, with
weights; from these the other one knows how far it is, and gives back Q and dO for both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from multiattn.triton.gluon_two_pass import WEIGHT_STAGES as STAGES_OF_WEIGHTS
from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.backward_parts import (
    add_product,
    await_sums,
    load_tile,
    make_tiles,
    multiply_rows,
    read_entry,
    statistics_of,
)
from multiattn.triton.kernels.gluon.backward_tiles import make_ds
from multiattn.triton.kernels.gluon.backward_two_pass import (
    WORDS,
    expect_tile,
    hide,
    read_sequence,
    read_tile,
    read_tile_rows,
    seek,
    store_gradient,
    weigh,
    write_sequence,
    write_tile,
    zero_sums,
)
from multiattn.triton.kernels.gluon.producer import in_turn, listed_tile, tile_after
from multiattn.triton.kernels.gluon.ring import tile_of
from multiattn.triton.kernels.gluon.scores import pack_weights

WEIGHT_STAGES = gl.constexpr(STAGES_OF_WEIGHTS)


@gluon.jit
def _query_blocks(first_key, sizes, C: gl.constexpr):
    """Blocks ``begin, full_begin, full_end, end`` of queries: those that see any of 64 keys, and those that see all."""
    seq_q, seq_kv = sizes[0], sizes[1]
    end = (seq_q + 63) // 64
    begin = 0
    full_begin = 0
    full_end = end
    if C.banded:
        level = first_key - (seq_kv - seq_q)  # the query whose own key is the first
        reach = 0
        if C.two_sided:
            reach = sizes[8]
            full_end = gl.maximum(level + sizes[7] + 1, 0) // 64
            full_end = gl.where(level + sizes[7] + 1 >= seq_q, end, full_end)
            end = gl.minimum((gl.maximum(level + 64 + sizes[7], 0) + 63) // 64, end)
        begin = gl.maximum(level - reach, 0) // 64
        full_begin = (gl.maximum(level + 63 - reach, 0) + 63) // 64
    return begin, full_begin, full_end, gl.maximum(begin, end)


# ---------------------------------------------------------------- one warp that loads


@gluon.jit
def _load_queries(
    q_maps, lines, at, lines_at, head, block, place, ring_q, q_buffers, lse_buffers, delta_buffers, C: gl.constexpr
):
    """A tile of Q, with lse in log2 units and delta of its queries; these are at a batch entry, from a tile on."""
    slot = place % C.q_stages
    ring.await_empty(ring_q, place, C.q_stages)
    full = ring_q[0].index(slot)
    mbarrier.expect(full, C.tile_bytes + 2 * 64 * 4)
    load_tile(q_maps, at, head, block * 64, full, q_buffers, slot, C)
    line = 2 * (lines_at[1] + block)
    ring.tma_load(lines, [lines_at[0], head, line, 0], full, lse_buffers.index(slot))
    ring.tma_load(lines, [lines_at[0], head, line + 1, 0], full, delta_buffers.index(slot))


@gluon.jit
def _send(tile, place, turn, maps, lines, entries, sizes, shared, C: gl.constexpr):
    """K and V of a tile, and Q and dO of all that see its keys. Returns the next place in the rings of these."""
    q_maps, dout_maps, k_maps, v_maps = maps
    ring_k, ring_v, ring_q, ring_dout, words, k_buffers, v_buffers, q_buffers, dout_buffers, lse, delta = shared
    first_head, within, side_by_side = in_turn(tile, sizes, C)
    any_head = first_head + within % side_by_side
    group = sizes[3]
    heads_kv = sizes[2] // group
    batch = any_head // heads_kv
    head_kv = any_head % heads_kv
    first_key = within // side_by_side * 64  # under a causal mask the first ones are seen by the most queries
    at_q, at_kv, lines_at = batch, batch, (batch, 0)
    if C.packed:
        batch, first_key, at_q, at_kv = read_entry(entries, within // side_by_side)
        lines_at = (0, at_q[0] // 64 + batch)
        len_q, len_kv = at_q[1], at_kv[1]
        sizes = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
    begin, _full_begin, _full_end, end = _query_blocks(first_key, sizes, C)
    ring.await_empty(ring_k, turn, 1)
    write_tile(words, 0, first_key, head_kv, batch)
    if C.packed:
        write_sequence(words, 0, at_kv[0], lines_at[1], at_q, at_kv)
    expect_tile(ring_k[0].index(0), C)
    load_tile(k_maps, at_kv, head_kv, first_key, ring_k[0].index(0), k_buffers, 0, C)
    is_first = 1
    for member in range(group):
        head = head_kv * group + member
        for block in range(begin, end):
            _load_queries(q_maps, lines, at_q, lines_at, head, block, place, ring_q, q_buffers, lse, delta, C)
            if is_first > 0:
                ring.await_empty(ring_v, turn, 1)
                expect_tile(ring_v[0].index(0), C)
                load_tile(v_maps, at_kv, head_kv, first_key, ring_v[0].index(0), v_buffers, 0, C)
                is_first = 0
            slot = place % C.dout_stages
            ring.await_empty(ring_dout, place, C.dout_stages)
            full = ring_dout[0].index(slot)
            expect_tile(full, C)
            load_tile(dout_maps, at_q, head, block * 64, full, dout_buffers, slot, C)
            place += 1
    if is_first > 0:
        ring.await_empty(ring_v, turn, 1)
        mbarrier.arrive(ring_v[0].index(0))
    return place


@gluon.jit
def _produce(maps, lines, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile."""
    ring_k, words = shared[0], shared[4]
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    ring.await_launch_before()
    total = sizes[4] * sizes[5]
    tile = listed_tile(gl.program_id(0), entries, counter, total, sizes, C)
    place = 0
    turn = 0
    while tile < total:
        place = _send(tile, place, turn, maps, lines, entries, sizes, shared, C)
        turn += 1
        tile = listed_tile(tile_after(tile, counter, total, C), entries, counter, total, sizes, C)
    ring.await_empty(ring_k, turn, 1)
    write_tile(words, 0, ring.NO_TILE, 0, 0)
    mbarrier.arrive(ring_k[0].index(0))


# ---------------------------------------------------------------- weights from one warpgroup to the other


@gluon.jit
def _to_chunks(weights):
    """``[4, 128, 8]`` of ``[64, 64]``: 16 bytes of each thread, four times. Nothing moves."""
    apart = weights.reshape([4, 2, 8, 4, 2, 4, 2])  # warp, half of its rows, row, i, pair of columns, thread, column
    return apart.permute((3, 0, 2, 5, 4, 1, 6)).reshape([4, 128, 8])


@gluon.jit
def _from_chunks(chunks, C: gl.constexpr):
    apart = chunks.reshape([4, 4, 8, 4, 2, 2, 2]).permute((1, 5, 2, 0, 4, 3, 6))
    return gl.convert_layout(apart.reshape([64, 64]), C.scores, assert_trivial=True)


@gluon.jit
def _positions(block, first_key, C: gl.constexpr):
    """Queries of a block, ``[1, 64]``, and keys of the tile, ``[64, 1]``."""
    queries = (block * 64 + gl.arange(0, 64, C.column))[None, :]
    return queries, (first_key + gl.arange(0, 64, C.row))[:, None]


@gluon.jit
def _must_hide(block, blocks, sizes, C: gl.constexpr):
    """True of a block whose queries do not all see all keys, or may have scores of no query."""
    found = (block < blocks[1]) | (block >= blocks[2])
    if C.score is not None:
        found = found | (block * 64 + 64 > sizes[0])
    return found


# ---------------------------------------------------------------- the warpgroup of dv


@gluon.jit
def _weigh(scores, place, block, first_key, blocks, score_factor, of_score, sizes, shared, like, C: gl.constexpr):
    """P^T [64 keys, 64 queries] in 16 bit from scores, which are waited for. To the warpgroup of dk goes what moves
    with them: P^T times the slope of an expression."""
    _ring_k, _ring_v, _ring_q, _ring_dout, ring_w, _words, _k, _v, _q, _dout, lse_buffers, _delta, sent = shared
    block_lse = statistics_of(lse_buffers, place % C.q_stages, C)
    scores = warpgroup_mma_wait(0, [scores])
    queries, keys = _positions(block, first_key, C)
    weights, moving = weigh(scores, queries, keys, block_lse[None, :], score_factor, of_score, sizes, C)
    if C.banded or C.score is not None:
        if _must_hide(block, blocks, sizes, C):
            weights = hide(weights, queries, keys, sizes, C)
            if C.has_slope:
                moving = hide(moving, queries, keys, sizes, C)
    packed = pack_weights(weights, like)
    packed_moving = packed
    if C.has_slope:
        packed_moving = pack_weights(moving, like)
    ring.await_empty(ring_w, place, WEIGHT_STAGES)
    sent.index(place % WEIGHT_STAGES).store(_to_chunks(packed_moving))
    mbarrier.arrive(ring_w[0].index(place % WEIGHT_STAGES))
    return packed


@gluon.jit
def _walk_dv(place, steps, blocks, tile, score_factor, aux, sizes, shared, C: gl.constexpr):
    """dv of 64 keys; the next step's place."""
    ring_k, _ring_v, ring_q, ring_dout, _ring_w, _words, k_buffers, _v, q_buffers, dout_buffers, _lse, _delta, _w = (
        shared
    )
    first_key, head_kv, batch = tile
    head = head_kv * sizes[3]
    keys = tile_of(k_buffers, 0, C)
    if C.kv_in_registers:
        keys = read_tile_rows(keys, C)
        mbarrier.arrive(ring_k[1].index(0))
    block = blocks[0]
    ring.await_full(ring_q, place, C.q_stages)
    scores = multiply_rows(keys, tile_of(q_buffers, place % C.q_stages, C), C)
    of_score = (batch, head, aux)
    weights = _weigh(scores, place, block, first_key, blocks, score_factor, of_score, sizes, shared, keys[0], C)
    wide, narrow = zero_sums(C)
    for _ in range(steps - 1):
        ring.await_full(ring_dout, place, C.dout_stages)
        wide, narrow = add_product(weights, tile_of(dout_buffers, place % C.dout_stages, C), wide, narrow, C)
        after = place + 1
        ring.await_full(ring_q, after, C.q_stages)
        scores = multiply_rows(keys, tile_of(q_buffers, after % C.q_stages, C), C)
        wide, narrow = await_sums(1, wide, narrow, C)
        place = after
        block += 1
        if C.score is not None:
            head += gl.where(block == blocks[3], 1, 0)
        block = gl.where(block == blocks[3], blocks[0], block)  # of the next head
        of_score = (batch, head, aux)
        weights = _weigh(scores, place, block, first_key, blocks, score_factor, of_score, sizes, shared, keys[0], C)
    ring.await_full(ring_dout, place, C.dout_stages)
    wide, narrow = add_product(weights, tile_of(dout_buffers, place % C.dout_stages, C), wide, narrow, C)
    if not C.kv_in_registers:
        mbarrier.arrive(ring_k[1].index(0))
    wide, narrow = await_sums(0, wide, narrow, C)
    return place + 1, wide, narrow


@gluon.jit
def _make_dv(dv, dv_strides, aux, score_factor, sizes, shared, C: gl.constexpr):
    """Tile after tile."""
    ring_k, words = shared[0], shared[5]
    place = 0
    turn = 0
    ring.await_full(ring_k, turn, 1)
    first_key, head, batch = read_tile(words, 0)
    while first_key != ring.NO_TILE:
        offset, _first_tile, len_q, len_kv = read_sequence(words, 0, sizes, C)
        own = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
        blocks = _query_blocks(first_key, own, C)
        steps = (blocks[3] - blocks[0]) * sizes[3]
        wide, narrow = zero_sums(C)
        if steps > 0:
            place, wide, narrow = _walk_dv(
                place, steps, blocks, (first_key, head, batch), score_factor, aux, own, shared, C
            )
        else:
            mbarrier.arrive(ring_k[1].index(0))
        store_gradient(
            seek(dv, dv_strides, batch, offset, head, C), dv_strides[2], wide, narrow, 1.0, first_key, len_kv, C
        )
        turn += 1
        ring.await_full(ring_k, turn, 1)
        first_key, head, batch = read_tile(words, 0)


# ---------------------------------------------------------------- the warpgroup of dk


@gluon.jit
def _make_dscores(dweights, place, block, first_key, blocks, sizes, shared, like, C: gl.constexpr):
    """dS^T = P^T * (dP^T - delta) in 16 bit, but for the scale; dP is waited for."""
    _ring_k, _ring_v, ring_q, ring_dout, ring_w, _words, _k, _v, _q, _dout, _lse, delta_buffers, sent = shared
    ring.await_full(ring_q, place, C.q_stages)
    block_delta = statistics_of(delta_buffers, place % C.q_stages, C)
    layout: gl.constexpr = _to_chunks(gl.full([64, 64], 0.0, like.dtype, C.scores)).type.layout
    ring.await_full(ring_w, place, WEIGHT_STAGES)
    weights = _from_chunks(sent.index(place % WEIGHT_STAGES).load(layout), C)
    dweights = warpgroup_mma_wait(0, [dweights])
    ring.release(ring_w, place, WEIGHT_STAGES)
    if place > 0:  # weights of a step are there, so dv of the one before it is
        ring.release(ring_dout, place - 1, C.dout_stages)
    if C.banded or C.score is not None:
        if _must_hide(block, blocks, sizes, C):
            queries, keys = _positions(block, first_key, C)
            dweights = hide(dweights, queries, keys, sizes, C)  # 0 times inf would be nan
    return make_ds(weights, dweights, block_delta)


@gluon.jit
def _walk_dk(place, steps, blocks, first_key, sizes, shared, C: gl.constexpr):
    """dk of 64 keys, but for the scale; the next step's place."""
    _ring_k, ring_v, ring_q, ring_dout, _ring_w, _words, _k, v_buffers, q_buffers, dout_buffers, _lse, _delta, _w = (
        shared
    )
    values = tile_of(v_buffers, 0, C)
    if C.kv_in_registers:
        values = read_tile_rows(values, C)
        mbarrier.arrive(ring_v[1].index(0))
    block = blocks[0]
    ring.await_full(ring_dout, place, C.dout_stages)
    dweights = multiply_rows(values, tile_of(dout_buffers, place % C.dout_stages, C), C)
    dscores = _make_dscores(dweights, place, block, first_key, blocks, sizes, shared, values[0], C)
    wide, narrow = zero_sums(C)
    for _ in range(steps - 1):
        wide, narrow = add_product(dscores, tile_of(q_buffers, place % C.q_stages, C), wide, narrow, C)
        after = place + 1
        ring.await_full(ring_dout, after, C.dout_stages)
        dweights = multiply_rows(values, tile_of(dout_buffers, after % C.dout_stages, C), C)
        wide, narrow = await_sums(1, wide, narrow, C)
        ring.release(ring_q, place, C.q_stages)
        place = after
        block += 1
        block = gl.where(block == blocks[3], blocks[0], block)  # of the next head
        dscores = _make_dscores(dweights, place, block, first_key, blocks, sizes, shared, values[0], C)
    wide, narrow = add_product(dscores, tile_of(q_buffers, place % C.q_stages, C), wide, narrow, C)
    if not C.kv_in_registers:
        mbarrier.arrive(ring_v[1].index(0))
    wide, narrow = await_sums(0, wide, narrow, C)
    ring.release(ring_q, place, C.q_stages)
    return place + 1, wide, narrow


@gluon.jit
def _make_dk(dk, dk_strides, grad_factor, sizes, shared, C: gl.constexpr):
    """Tile after tile."""
    ring_k, ring_v, words = shared[0], shared[1], shared[5]
    place = 0
    turn = 0
    ring.await_full(ring_k, turn, 1)
    first_key, head, batch = read_tile(words, 0)
    while first_key != ring.NO_TILE:
        offset, _first_tile, len_q, len_kv = read_sequence(words, 0, sizes, C)
        own = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
        ring.release(ring_k, turn, 1)  # only the tile was read
        blocks = _query_blocks(first_key, own, C)
        steps = (blocks[3] - blocks[0]) * sizes[3]
        ring.await_full(ring_v, turn, 1)
        wide, narrow = zero_sums(C)
        if steps > 0:
            place, wide, narrow = _walk_dk(place, steps, blocks, first_key, own, shared, C)
        else:
            mbarrier.arrive(ring_v[1].index(0))
        store_gradient(
            seek(dk, dk_strides, batch, offset, head, C), dk_strides[2], wide, narrow, grad_factor, first_key, len_kv, C
        )
        turn += 1
        ring.await_full(ring_k, turn, 1)
        first_key, head, batch = read_tile(words, 0)


@gluon.jit(
    do_not_specialize=["seq_q", "seq_kv", "heads_q", "group", "tiles", "heads", "together", "left", "right", "tiles_q"]
)
def gradients_of_own_keys(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64, wide]
    dout_map,
    k_map,
    v_map,
    q_narrow,  # the same with blocks of the narrow piece; None where there is none
    dout_narrow,
    k_narrow,
    v_narrow,
    statistics,  # tensor descriptor, fp32 [B, Hq, 2 * tiles_q, 64], with blocks of a line: lse, or delta, of a tile
    dk,  # pointer, [B, Hkv, Skv, D]
    dv,  # pointer, [B, Hkv, Skv, D]
    key_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of keys; None in others
    counter,  # pointer, int32: 0, and so it is left
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    dk_strides,  # of (batch, head, row), in units of 8 elements
    dv_strides,
    score_factor,  # scale * log2(e), with its sign; 1 with an expression
    grad_factor,  # scale, with its sign
    seq_q,
    seq_kv,
    heads_q,
    group,  # query heads that share one key/value head
    tiles,  # of one head of keys, or entries of the list
    heads,  # B * Hkv
    together,  # heads of keys that run side by side
    left,  # keys before and after its own that a query sees; None where the mask is not two-sided
    right,
    tiles_q,  # tiles of 64 queries of a head, of a packed batch with one that is of none
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.two_pass_constants.TwoPassConstants
):
    """One block: a producer, and the two warpgroups."""
    q_maps, dout_maps, k_maps, v_maps = (q_map, q_narrow), (dout_map, dout_narrow), (k_map, k_narrow), (v_map, v_narrow)
    sizes = (seq_q, seq_kv, heads_q, group, tiles, heads, together, left, right, tiles_q)
    k_buffers = make_tiles(1, k_maps, C)
    v_buffers = make_tiles(1, v_maps, C)
    q_buffers = make_tiles(C.q_stages, q_maps, C)
    dout_buffers = make_tiles(C.dout_stages, dout_maps, C)
    weights = gl.allocate_shared_memory(
        q_map.dtype, [WEIGHT_STAGES, 4, 128, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_buffers = gl.allocate_shared_memory(gl.float32, [C.q_stages, 1, 1, 1, 64], statistics.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [C.q_stages, 1, 1, 1, 64], statistics.layout)
    words = gl.allocate_shared_memory(gl.int32, [WORDS, 1], plain)
    ring_k = (ring.make_barriers(1, 1), ring.make_barriers(1, 2))
    ring_v = (ring.make_barriers(1, 1), ring.make_barriers(1, 1))
    ring_q = (ring.make_barriers(C.q_stages, 1), ring.make_barriers(C.q_stages, 1))
    ring_dout = (ring.make_barriers(C.dout_stages, 1), ring.make_barriers(C.dout_stages, 1))
    ring_w = (ring.make_barriers(WEIGHT_STAGES, 1), ring.make_barriers(WEIGHT_STAGES, 1))
    shared = (
        ring_k, ring_v, ring_q, ring_dout, ring_w, words, k_buffers, v_buffers, q_buffers, dout_buffers, lse_buffers,
        delta_buffers, weights,
    )  # fmt: skip
    to_load = (
        ring_k, ring_v, ring_q, ring_dout, words, k_buffers, v_buffers, q_buffers, dout_buffers, lse_buffers,
        delta_buffers,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_make_dv, (dv, dv_strides, aux, score_factor, sizes, shared, C)),
            (_make_dk, (dk, dk_strides, grad_factor, sizes, shared, C)),
            (_produce, ((q_maps, dout_maps, k_maps, v_maps), statistics, key_list, counter, sizes, to_load, C)),
        ],
        [4, 1], [C.consumer_registers, C.producer_registers],
    )  # fmt: skip
