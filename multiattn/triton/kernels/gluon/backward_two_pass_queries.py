"""The gradient of q, for Hopper in Gluon: TMA, wgmma, warp specialisation. See `backward_two_pass_keys` for k and v.

A block owns 128 queries of a query head, 64 a warpgroup, and walks over the keys that they see, 64 at a time, as
`multiattn/cuda/kernels/backward_wgmma_two_pass_queries.cuh` does. Rows are queries, so that dS stays in registers as
the left operand of dQ += dS K; no warpgroup has anything that another wants. One warp loads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.backward_two_pass import (
    WORDS,
    hide,
    read_sequence,
    read_tile,
    store_gradient,
    weigh,
    write_tile,
)
from multiattn.triton.kernels.gluon.schedule import LaunchSizes, find_tile, listed_tile, tile_after
from multiattn.triton.kernels.gluon.scores import begin_of_keys, end_before, pack_weights, range_of_blocks
from multiattn.triton.kernels.gluon.tiles import (
    add_product,
    await_sums,
    load_tile,
    make_tiles,
    multiply_rows,
    send_tile,
    tile_of,
    zero_sums,
)


class QueriesShared(NamedTuple):
    """All of a block's shared memory: rings, what the tiles are, and tiles. Q and dO have a slot for each warpgroup."""

    ring_q: Any
    ring_dout: Any
    ring_k: Any
    ring_v: Any
    words: Any
    q: Any
    dout: Any
    k: Any
    v: Any


class QueriesTile(NamedTuple):
    """The state of a warpgroup's 64 queries."""

    first_query: Any
    lse: Any
    delta: Any
    full: Any
    """The blocks [begin, end) that all of them see whole."""
    of_score: Any
    score_factor: Any
    sizes: Any


# ---------------------------------------------------------------- one warp that loads


@gluon.jit
def _send(tile, place, turn, maps, entries, sizes, shared, C: gl.constexpr):
    """Q and dO of both warpgroups, and blocks of keys in order. Returns the next place in the rings of these."""
    q_maps, dout_maps, k_maps, v_maps = maps
    number, batch, head, head_kv, first_query, at_q, at_kv = find_tile(tile, entries, sizes, False, C)
    offset, first_tile = 0, 0
    if C.packed:
        offset, first_tile = at_q[0], at_q[0] // 64 + batch
        sizes = LaunchSizes(at_q[1], at_kv[1], *sizes[2:])
    else:
        first_query = (sizes.tiles - 1 - number) * 128  # under a mask the last ones see the most keys
    begin, end = range_of_blocks(first_query, 128, sizes, C)
    if begin < end:
        send_tile(k_maps, at_kv, head_kv, begin, shared.ring_k, place, shared.k, C)
    for warpgroup in gl.static_range(2):
        row = first_query + 64 * warpgroup
        mbarrier.wait(shared.ring_q.empty.index(warpgroup), turn ^ 1)
        write_tile(shared.words, warpgroup, first_query, head, batch, offset, first_tile, sizes, C)
        full = shared.ring_q.full.index(warpgroup)
        mbarrier.expect(full, C.tile_bytes)
        load_tile(q_maps, at_q, head, row, full, shared.q, warpgroup, C)
        mbarrier.wait(shared.ring_dout.empty.index(warpgroup), turn ^ 1)
        full = shared.ring_dout.full.index(warpgroup)
        mbarrier.expect(full, C.tile_bytes_v)
        load_tile(dout_maps, at_q, head, row, full, shared.dout, warpgroup, C)
    for block in range(begin, end):
        send_tile(v_maps, at_kv, head_kv, block, shared.ring_v, place, shared.v, C)
        place += 1
        if block + 1 < end:
            send_tile(k_maps, at_kv, head_kv, block + 1, shared.ring_k, place, shared.k, C)
    return place


@gluon.jit
def _produce(maps, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile. Those of a list are of 64 queries: of two the first has both."""
    ring.begin_loading()
    total = sizes.tiles * sizes.heads
    tile = listed_tile(gl.program_id(0), entries, counter, sizes, C, 128)
    place = 0
    turn = 0
    while tile < total:
        place = _send(tile, place, turn, maps, entries, sizes, shared, C)
        turn ^= 1
        tile = listed_tile(tile_after(tile, counter, total, C), entries, counter, sizes, C, 128)
    for warpgroup in gl.static_range(2):
        mbarrier.wait(shared.ring_q.empty.index(warpgroup), turn ^ 1)
        ring.write_words(shared.words, warpgroup * WORDS, (ring.NO_TILE, 0, 0))
        mbarrier.arrive(shared.ring_q.full.index(warpgroup))


# ---------------------------------------------------------------- one block of keys


@gluon.jit
def _begin_block(queries, douts, place, shared, C: gl.constexpr):
    """Products of a block of keys, under way: scores, then dP."""
    ring.await_full(shared.ring_k, place)
    scores = multiply_rows(queries, tile_of(shared.k, place % C.k_stages), C)
    ring.await_full(shared.ring_v, place)
    return scores, multiply_rows(douts, tile_of(shared.v, place % C.v_stages), C)


@gluon.jit
def _make_dscores(scores, dweights, place, block, like, tile, shared, C: gl.constexpr):
    """dS = P * (dP - delta) in 16 bit, but for the scale; both products are waited for."""
    scores = warpgroup_mma_wait(C.pieces_v, [scores])
    queries = (tile.first_query + gl.arange(0, 64, C.row))[:, None]
    keys = (block * 64 + gl.arange(0, 64, C.column))[None, :]
    lse, sizes = tile.lse[:, None], tile.sizes
    _weights, moving = weigh(scores, queries, keys, lse, tile.score_factor, tile.of_score, sizes, C)
    dweights = warpgroup_mma_wait(0, [dweights])
    ring.release(shared.ring_v, place)
    dscores = moving * (dweights - tile.delta[:, None])
    if C.is_banded or C.ragged:
        if (block < tile.full[0]) | (block >= tile.full[1]):
            dscores = hide(dscores, queries, keys, sizes, C)
    return pack_weights(dscores, like)


@gluon.jit
def _walk(place, begin, end, tile, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """dq of 64 queries, but for the scale, of blocks [begin, end) of keys; the next block's place."""
    queries, douts = tile_of(shared.q, warpgroup), tile_of(shared.dout, warpgroup)
    scores, dweights = _begin_block(queries, douts, place, shared, C)
    dscores = _make_dscores(scores, dweights, place, begin, queries[0], tile, shared, C)
    sums = zero_sums(C.pieces, C)
    for block in range(begin + 1, end):
        if C.is_crowded:  # no place is negative, which no compiler knows: else registers keep the addresses of Q and dO
            own = warpgroup + (place >> 31)
            queries, douts = tile_of(shared.q, own), tile_of(shared.dout, own)
        sums = add_product(dscores, tile_of(shared.k, place % C.k_stages), sums)
        scores, dweights = _begin_block(queries, douts, place + 1, shared, C)
        sums = await_sums(C.pieces + C.pieces_v, sums)
        ring.release(shared.ring_k, place)
        place += 1
        dscores = _make_dscores(scores, dweights, place, block, queries[0], tile, shared, C)
    sums = add_product(dscores, tile_of(shared.k, place % C.k_stages), sums)
    mbarrier.arrive(shared.ring_q.empty.index(warpgroup))
    mbarrier.arrive(shared.ring_dout.empty.index(warpgroup))
    sums = await_sums(0, sums)
    ring.release(shared.ring_k, place)
    return place + 1, sums


@gluon.jit
def _skip(number, place, shared):
    """Blocks that only the other warpgroup sees."""
    for _ in range(number):
        ring.skip(shared.ring_k, place)
        ring.skip(shared.ring_v, place)
        place += 1
    return place


# ---------------------------------------------------------------- one tile of queries


@gluon.jit
def _full_blocks(first_query, sizes, C: gl.constexpr):
    """Blocks [begin, end) that all of 64 queries see whole."""
    begin = 0
    if C.is_two_sided:
        begin = (gl.maximum(begin_of_keys(gl.minimum(first_query + 64, sizes.seq_q) - 1, sizes, C), 0) + 63) // 64
    return begin, end_before(first_query + 1, sizes, C) // 64


@gluon.jit
def _statistics_of(statistics, first_query, head, batch, first_tile, sizes, C: gl.constexpr):
    """lse in log2 units and delta of 64 queries, ``[64]``; see `backward_rows.prepare_statistics` for their order."""
    if C.packed:  # which is one batch entry
        batch = 0
    tile = (batch * sizes.heads_q + head).to(gl.int64) * sizes.tiles_q + first_tile + first_query // 64
    query = gl.arange(0, 64, C.row)
    place = query // 16 * 16 + query % 8 // 2 * 4 + query // 8 % 2 * 2 + query % 2
    is_there = (first_query + 0 * query) < sizes.seq_q
    row_lse = gl.load(statistics + tile * 128 + place, mask=is_there, other=float("inf"))
    return row_lse, gl.load(statistics + tile * 128 + 64 + place, mask=is_there, other=0.0)


@gluon.jit
def _consume(warpgroup: gl.constexpr, dq, statistics, aux, dq_strides, factors, sizes, shared, C: gl.constexpr):
    """A warpgroup: its 64 queries of tile after tile."""
    ring.await_launch_before()
    place = 0
    turn = 0
    mbarrier.wait(shared.ring_q.full.index(warpgroup), turn)
    tile_query, head, batch = read_tile(shared.words, warpgroup)
    while tile_query != ring.NO_TILE:
        first_query = tile_query + 64 * warpgroup
        offset, first_tile, own = 0, 0, sizes
        if C.packed:
            offset, first_tile, len_q, len_kv = read_sequence(shared.words, warpgroup)
            own = LaunchSizes(len_q, len_kv, *sizes[2:])
        lse, delta = _statistics_of(statistics, first_query, head, batch, first_tile, own, C)
        tile_begin, tile_end = range_of_blocks(tile_query, 128, own, C)
        begin, end = tile_begin, tile_end
        full = _full_blocks(first_query, own, C)
        if C.is_banded:
            begin, end = range_of_blocks(first_query, 64, own, C)
        if (first_query >= own.seq_q) | (begin >= end):
            begin = tile_end
            end = tile_end
        place = _skip(begin - tile_begin, place, shared)
        mbarrier.wait(shared.ring_dout.full.index(warpgroup), turn)
        sums = zero_sums(C.pieces, C)
        if begin < end:
            tile = QueriesTile(first_query, lse, delta, full, (batch, head, aux), factors.score, own)
            place, sums = _walk(place, begin, end, tile, shared, warpgroup, C)
        else:
            mbarrier.arrive(shared.ring_q.empty.index(warpgroup))
            mbarrier.arrive(shared.ring_dout.empty.index(warpgroup))
        place = _skip(tile_end - end, place, shared)
        at = (batch, offset, head, first_query)
        store_gradient(dq, dq_strides, at, sums, factors.grad, own.seq_q, C.head_dim, C)
        turn ^= 1
        mbarrier.wait(shared.ring_q.full.index(warpgroup), turn)
        tile_query, head, batch = read_tile(shared.words, warpgroup)


@gluon.jit
def gradient_of_own_queries(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64, wide]
    dout_map,
    k_map,
    v_map,
    q_narrow,  # the same with blocks of the narrow piece; None where a tensor has none
    dout_narrow,
    k_narrow,
    v_narrow,
    statistics,  # pointer, fp32 [B, Hq, tiles_q, 2, 64], contiguous: lse in log2 units, and delta
    dq,  # pointer, [B, Hq, Sq, D]
    query_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of 64 queries; None in others
    counter,  # pointer, int32: 0, and so it is left
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    dq_strides,  # of (batch, head, row), in units of 8 elements
    factors,  # score: scale * log2(e), with its sign, 1 with an expression; grad: scale, with its sign
    sizes,  # `LaunchSizes`
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.constants.TwoPassConstants
):
    """One block: a producer, and two warpgroups."""
    q_maps, dout_maps = (q_map, q_narrow)[: C.pieces], (dout_map, dout_narrow)[: C.pieces_v]
    k_maps, v_maps = (k_map, k_narrow)[: C.pieces], (v_map, v_narrow)[: C.pieces_v]
    q, dout = make_tiles(2, q_maps), make_tiles(2, dout_maps)
    k, v = make_tiles(C.k_stages, k_maps), make_tiles(C.v_stages, v_maps)
    words = ring.make_words(2 * WORDS)
    ring_q, ring_dout = ring.make(2, 1), ring.make(2, 1)
    ring_k, ring_v = ring.make(C.k_stages, 2), ring.make(C.v_stages, 2)
    shared = QueriesShared(ring_q, ring_dout, ring_k, ring_v, words, q, dout, k, v)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, dq, statistics, aux, dq_strides, factors, sizes, shared, C)),
            (_consume, (1, dq, statistics, aux, dq_strides, factors, sizes, shared, C)),
            (_produce, ((q_maps, dout_maps, k_maps, v_maps), query_list, counter, sizes, shared, C)),
        ],
        [4, 1], [C.consumer_registers, C.producer_registers],
    )  # fmt: skip
