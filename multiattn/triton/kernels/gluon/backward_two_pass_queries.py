"""The gradient of q, for Hopper in Gluon: TMA, wgmma, warp specialisation. See `backward_two_pass_keys` for k and v.

A block owns 128 queries of a query head, 64 a warpgroup, and walks over the keys that they see, 64 at a time, as
`multiattn/cuda/kernels/backward_wgmma_two_pass_queries.cuh` does. Rows are queries, so that dS stays in registers as
the left operand of dQ += dS K; no warpgroup has anything that another wants. One warp loads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.backward_parts import (
    add_product,
    await_sums,
    load_tile,
    make_tiles,
    multiply_rows,
    read_entry,
)
from multiattn.triton.kernels.gluon.backward_two_pass import (
    WORDS,
    expect_tile,
    hide,
    read_sequence,
    read_tile,
    seek,
    store_gradient,
    weigh,
    write_sequence,
    write_tile,
    zero_sums,
)
from multiattn.triton.kernels.gluon.producer import in_turn, tile_after
from multiattn.triton.kernels.gluon.ring import tile_of
from multiattn.triton.kernels.gluon.scores import begin_of_keys, end_before, pack_weights, range_of_blocks
from multiattn.triton.kernels.gluon.sequences import ENTRY_WORDS

# ---------------------------------------------------------------- one warp that loads


@gluon.jit
def _load_keys(maps, at, head_kv, block, place, ring_of, buffers, STAGES: gl.constexpr, C: gl.constexpr):
    ring.await_empty(ring_of, place, STAGES)
    full = ring_of[0].index(place % STAGES)
    expect_tile(full, C)
    load_tile(maps, at, head_kv, block * C.tile_n, full, buffers, place % STAGES, C)


@gluon.jit
def _send(tile, place, turn, maps, entries, sizes, shared, C: gl.constexpr):
    """Q and dO of both warpgroups, and blocks of keys in order. Returns the next place in the rings of these."""
    q_maps, dout_maps, k_maps, v_maps = maps
    ring_q, ring_dout, ring_k, ring_v, words, q_buffers, dout_buffers, k_buffers, v_buffers = shared
    first_head, within, side_by_side = in_turn(tile, sizes, C)
    any_head = first_head + within % side_by_side
    batch = any_head // sizes[2]
    head = any_head % sizes[2]
    head_kv = head // sizes[3]
    first_query = (sizes[4] - 1 - within // side_by_side) * 128  # under a mask the last ones see the most keys
    at_q, at_kv = batch, batch
    if C.packed:
        batch, first_query, at_q, at_kv = read_entry(entries, within // side_by_side)
        len_q, len_kv = at_q[1], at_kv[1]
        sizes = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
    begin, end = range_of_blocks(first_query, 128, sizes, C)
    if begin < end:
        _load_keys(k_maps, at_kv, head_kv, begin, place, ring_k, k_buffers, C.k_stages, C)
    for warpgroup in gl.static_range(2):
        row = first_query + 64 * warpgroup
        mbarrier.wait(ring_q[1].index(warpgroup), turn ^ 1)
        write_tile(words, warpgroup, first_query, head, batch)
        if C.packed:
            write_sequence(words, warpgroup, at_q[0], at_q[0] // 64 + batch, at_q, at_kv)
        full = ring_q[0].index(warpgroup)
        expect_tile(full, C)
        load_tile(q_maps, at_q, head, row, full, q_buffers, warpgroup, C)
        mbarrier.wait(ring_dout[1].index(warpgroup), turn ^ 1)
        full = ring_dout[0].index(warpgroup)
        expect_tile(full, C)
        load_tile(dout_maps, at_q, head, row, full, dout_buffers, warpgroup, C)
    for block in range(begin, end):
        _load_keys(v_maps, at_kv, head_kv, block, place, ring_v, v_buffers, C.v_stages, C)
        place += 1
        if block + 1 < end:
            _load_keys(k_maps, at_kv, head_kv, block + 1, place, ring_k, k_buffers, C.k_stages, C)
    return place


@gluon.jit
def _listed(tile, entries, counter, total, sizes, C: gl.constexpr):
    """`tile`, or in a packed batch the first one from there on whose entry, of 64 queries, begins a tile of 128."""
    if C.packed:
        is_listed = 0
        while is_listed == 0:
            is_listed = 1
            if tile < total:
                _first_head, within, side_by_side = in_turn(tile, sizes, C)
                entry = entries + within // side_by_side * ENTRY_WORDS
                is_listed = gl.where((gl.load(entry) >= 0) & (gl.load(entry + 1) % 128 == 0), 1, 0)
                if is_listed == 0:
                    tile = tile_after(tile, counter, total, C)
    return tile


@gluon.jit
def _produce(maps, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile."""
    ring_q, words = shared[0], shared[4]
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    ring.await_launch_before()
    total = sizes[4] * sizes[5]
    tile = _listed(gl.program_id(0), entries, counter, total, sizes, C)
    place = 0
    turn = 0
    while tile < total:
        place = _send(tile, place, turn, maps, entries, sizes, shared, C)
        turn ^= 1
        tile = _listed(tile_after(tile, counter, total, C), entries, counter, total, sizes, C)
    for warpgroup in gl.static_range(2):
        mbarrier.wait(ring_q[1].index(warpgroup), turn ^ 1)
        write_tile(words, warpgroup, ring.NO_TILE, 0, 0)
        mbarrier.arrive(ring_q[0].index(warpgroup))


# ---------------------------------------------------------------- one block of keys


@gluon.jit
def _make_dscores(
    scores, dweights, place, block, of_queries, score_factor, of_score, sizes, ring_v, like,
    C: gl.constexpr,
):  # fmt: skip
    """dS = P * (dP - delta) in 16 bit, but for the scale; scores are there, dP is waited for."""
    first_query, row_lse, row_delta, full_begin, full_end = of_queries
    queries = (first_query + gl.arange(0, 64, C.row))[:, None]
    keys = (block * 64 + gl.arange(0, 64, C.column))[None, :]
    _weights, moving = weigh(scores, queries, keys, row_lse[:, None], score_factor, of_score, sizes, C)
    dweights = warpgroup_mma_wait(0, [dweights])
    ring.release(ring_v, place, C.v_stages)
    dscores = moving * (dweights - row_delta[:, None])
    if C.banded or C.ragged:
        if (block < full_begin) | (block >= full_end):
            dscores = hide(dscores, queries, keys, sizes, C)
    return pack_weights(dscores, like)


@gluon.jit
def _walk(
    place, begin, end, of_queries, score_factor, of_score, sizes, shared, warpgroup: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """dq of 64 queries, but for the scale, of blocks [begin, end) of keys; the next block's place."""
    ring_q, ring_dout, ring_k, ring_v, _words, q_buffers, dout_buffers, k_buffers, v_buffers = shared
    queries, douts = tile_of(q_buffers, warpgroup, C), tile_of(dout_buffers, warpgroup, C)
    ring.await_full(ring_k, place, C.k_stages)
    scores = multiply_rows(queries, tile_of(k_buffers, place % C.k_stages, C), C)
    ring.await_full(ring_v, place, C.v_stages)
    dweights = multiply_rows(douts, tile_of(v_buffers, place % C.v_stages, C), C)
    scores = warpgroup_mma_wait(C.groups, [scores])
    dscores = _make_dscores(
        scores, dweights, place, begin, of_queries, score_factor, of_score, sizes, ring_v, queries[0], C
    )  # fmt: skip
    wide, narrow = zero_sums(C)
    for block in range(begin + 1, end):
        if C.is_crowded:  # no place is negative, which no compiler knows: else registers keep the addresses of Q and dO
            own = warpgroup + (place >> 31)
            queries, douts = tile_of(q_buffers, own, C), tile_of(dout_buffers, own, C)
        wide, narrow = add_product(dscores, tile_of(k_buffers, place % C.k_stages, C), wide, narrow, C)
        after = place + 1
        ring.await_full(ring_k, after, C.k_stages)
        scores = multiply_rows(queries, tile_of(k_buffers, after % C.k_stages, C), C)
        ring.await_full(ring_v, after, C.v_stages)
        dweights = multiply_rows(douts, tile_of(v_buffers, after % C.v_stages, C), C)
        wide, narrow = await_sums(2, wide, narrow, C)
        ring.release(ring_k, place, C.k_stages)
        place = after
        scores = warpgroup_mma_wait(C.groups, [scores])
        dscores = _make_dscores(
        scores, dweights, place, block, of_queries, score_factor, of_score, sizes, ring_v, queries[0], C
    )  # fmt: skip
    wide, narrow = add_product(dscores, tile_of(k_buffers, place % C.k_stages, C), wide, narrow, C)
    mbarrier.arrive(ring_q[1].index(warpgroup))
    mbarrier.arrive(ring_dout[1].index(warpgroup))
    wide, narrow = await_sums(0, wide, narrow, C)
    ring.release(ring_k, place, C.k_stages)
    return place + 1, wide, narrow


@gluon.jit
def _skip(number, place, ring_k, ring_v, C: gl.constexpr):
    """Blocks that only the other warpgroup sees."""
    for _ in range(number):
        ring.skip(ring_k, place, C.k_stages)
        ring.skip(ring_v, place, C.v_stages)
        place += 1
    return place


# ---------------------------------------------------------------- one tile of queries


@gluon.jit
def _full_blocks(first_query, sizes, C: gl.constexpr):
    """Blocks [begin, end) that all of 64 queries see whole."""
    begin = 0
    if C.two_sided:
        begin = (gl.maximum(begin_of_keys(gl.minimum(first_query + 64, sizes[0]) - 1, sizes, C), 0) + 63) // 64
    return begin, end_before(first_query + 1, sizes, C) // 64


@gluon.jit
def _statistics_of(statistics, first_query, head, batch, first_tile, sizes, C: gl.constexpr):
    """lse in log2 units and delta of 64 queries, ``[64]``; see `backward_rows.prepare_statistics` for their order."""
    if C.packed:  # which is one batch entry
        batch = 0
    tile = (batch * sizes[2] + head).to(gl.int64) * sizes[9] + first_tile + first_query // 64
    query = gl.arange(0, 64, C.row)
    place = query // 16 * 16 + query % 8 // 2 * 4 + query // 8 % 2 * 2 + query % 2
    is_there = (first_query + 0 * query) < sizes[0]
    row_lse = gl.load(statistics + tile * 128 + place, mask=is_there, other=float("inf"))
    return row_lse, gl.load(statistics + tile * 128 + 64 + place, mask=is_there, other=0.0)


@gluon.jit
def _consume(
    warpgroup: gl.constexpr, dq, statistics, aux, dq_strides, score_factor, grad_factor, sizes, shared, C: gl.constexpr
):  # fmt: skip
    """A warpgroup: its 64 queries of tile after tile."""
    ring_q, ring_dout, ring_k, ring_v, words, _q, _dout, _k, _v = shared
    ring.await_launch_before()
    place = 0
    turn = 0
    mbarrier.wait(ring_q[0].index(warpgroup), turn)
    tile_query, head, batch = read_tile(words, warpgroup)
    while tile_query != ring.NO_TILE:
        first_query = tile_query + 64 * warpgroup
        offset, first_tile, len_q, len_kv = read_sequence(words, warpgroup, sizes, C)
        own = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
        row_lse, row_delta = _statistics_of(statistics, first_query, head, batch, first_tile, own, C)
        tile_begin, tile_end = range_of_blocks(tile_query, 128, own, C)
        begin, end = tile_begin, tile_end
        full_begin, full_end = _full_blocks(first_query, own, C)
        of_queries = (first_query, row_lse, row_delta, full_begin, full_end)
        if C.banded:
            begin, end = range_of_blocks(first_query, 64, own, C)
        if (first_query >= len_q) | (begin >= end):
            begin = tile_end
            end = tile_end
        place = _skip(begin - tile_begin, place, ring_k, ring_v, C)
        mbarrier.wait(ring_dout[0].index(warpgroup), turn)
        wide, narrow = zero_sums(C)
        if begin < end:
            place, wide, narrow = _walk(
                place, begin, end, of_queries, score_factor, (batch, head, aux), own, shared, warpgroup, C,
            )  # fmt: skip
        else:
            mbarrier.arrive(ring_q[1].index(warpgroup))
            mbarrier.arrive(ring_dout[1].index(warpgroup))
        place = _skip(tile_end - end, place, ring_k, ring_v, C)
        store_gradient(
            seek(dq, dq_strides, batch, offset, head, C),
            dq_strides[2],
            wide,
            narrow,
            grad_factor,
            first_query,
            len_q,
            C,
        )
        turn ^= 1
        mbarrier.wait(ring_q[0].index(warpgroup), turn)
        tile_query, head, batch = read_tile(words, warpgroup)


@gluon.jit(
    do_not_specialize=["seq_q", "seq_kv", "heads_q", "group", "tiles", "heads", "together", "left", "right", "tiles_q"]
)
def gradient_of_own_queries(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64, wide]
    dout_map,
    k_map,
    v_map,
    q_narrow,  # the same with blocks of the narrow piece; None where there is none
    dout_narrow,
    k_narrow,
    v_narrow,
    statistics,  # pointer, fp32 [B, Hq, tiles_q, 2, 64], contiguous: lse in log2 units, and delta
    dq,  # pointer, [B, Hq, Sq, D]
    query_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of 64 queries; None in others
    counter,  # pointer, int32: 0, and so it is left
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    dq_strides,  # of (batch, head, row), in units of 8 elements
    score_factor,  # scale * log2(e), with its sign; 1 with an expression
    grad_factor,  # scale, with its sign
    seq_q,
    seq_kv,
    heads_q,
    group,  # query heads that share one key/value head
    tiles,  # of one head, or entries of the list
    heads,  # B * Hq
    together,  # heads that run side by side
    left,  # keys before and after its own that a query sees; None where the mask is not two-sided
    right,
    tiles_q,  # tiles of 64 queries of a head, of a packed batch with one that is of none
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.two_pass_constants.TwoPassConstants
):
    """One block: a producer, and two warpgroups."""
    q_maps, dout_maps, k_maps, v_maps = (q_map, q_narrow), (dout_map, dout_narrow), (k_map, k_narrow), (v_map, v_narrow)
    sizes = (seq_q, seq_kv, heads_q, group, tiles, heads, together, left, right, tiles_q)
    q_buffers = make_tiles(2, q_maps, C)
    dout_buffers = make_tiles(2, dout_maps, C)
    k_buffers = make_tiles(C.k_stages, k_maps, C)
    v_buffers = make_tiles(C.v_stages, v_maps, C)
    words = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_q = (ring.make_barriers(2, 1), ring.make_barriers(2, 1))  # one slot of each warpgroup
    ring_dout = (ring.make_barriers(2, 1), ring.make_barriers(2, 1))
    ring_k = (ring.make_barriers(C.k_stages, 1), ring.make_barriers(C.k_stages, 2))
    ring_v = (ring.make_barriers(C.v_stages, 1), ring.make_barriers(C.v_stages, 2))
    shared = (ring_q, ring_dout, ring_k, ring_v, words, q_buffers, dout_buffers, k_buffers, v_buffers)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, dq, statistics, aux, dq_strides, score_factor, grad_factor, sizes, shared, C)),
            (_consume, (1, dq, statistics, aux, dq_strides, score_factor, grad_factor, sizes, shared, C)),
            (_produce, ((q_maps, dout_maps, k_maps, v_maps), query_list, counter, sizes, shared, C)),
        ],
        [4, 1], [C.consumer_registers, C.producer_registers],
    )  # fmt: skip
