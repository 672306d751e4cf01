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

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from multiattn.triton.gluon_two_pass import WEIGHT_STAGES as STAGES_OF_WEIGHTS
from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.backward_parts import (
    make_ds,
    make_statistics,
    pack_both,
    send_queries,
    statistics_of,
)
from multiattn.triton.kernels.gluon.backward_tiles import BackwardShared
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
from multiattn.triton.kernels.gluon.scores import SeenBlocks
from multiattn.triton.kernels.gluon.tiles import (
    add_product,
    await_sums,
    load_rows,
    load_tile,
    make_tiles,
    multiply_rows,
    send_tile,
    tile_of,
    zero_sums,
)

WEIGHT_STAGES = gl.constexpr(STAGES_OF_WEIGHTS)


class KeysTile(NamedTuple):
    """The state of the 64 keys of both warpgroups."""

    first_key: Any
    head_kv: Any
    batch: Any
    blocks: Any
    sizes: Any
    score_factor: Any
    aux: Any


@gluon.jit
def _query_blocks(first_key, sizes, C: gl.constexpr):
    """`SeenBlocks` of queries: those that see any of 64 keys, and those that see all."""
    seq_q, seq_kv = sizes.seq_q, sizes.seq_kv
    end = (seq_q + 63) // 64
    begin = 0
    full_begin = 0
    full_end = end
    if C.is_banded:
        level = first_key - (seq_kv - seq_q)  # the query whose own key is the first
        reach = 0
        if C.is_two_sided:
            reach = sizes.right
            full_end = gl.maximum(level + sizes.left + 1, 0) // 64
            full_end = gl.where(level + sizes.left + 1 >= seq_q, end, full_end)
            end = gl.minimum((gl.maximum(level + 64 + sizes.left, 0) + 63) // 64, end)
        begin = gl.maximum(level - reach, 0) // 64
        full_begin = (gl.maximum(level + 63 - reach, 0) + 63) // 64
    return SeenBlocks(begin, full_begin, full_end, gl.maximum(begin, end))


# ---------------------------------------------------------------- one warp that loads


@gluon.jit
def _send(tile, place, turn, maps, lines, entries, sizes, shared, C: gl.constexpr):
    """K and V of a tile, and Q and dO of all that see its keys. Returns the next place in the rings of these."""
    q_maps, dout_maps, k_maps, v_maps = maps
    group = sizes.group
    number, batch, _head, head_kv, first_key, at_q, at_kv = find_tile(tile, entries, sizes, True, C)
    lines_at, offset = (batch, 0), 0
    if C.packed:
        lines_at, offset = (0, at_q[0] // 64 + batch), at_kv[0]
        sizes = LaunchSizes(at_q[1], at_kv[1], *sizes[2:])
    else:
        first_key = number * 64  # under a causal mask the first ones are seen by the most queries
    blocks = _query_blocks(first_key, sizes, C)
    ring.await_empty(shared.ring_k, turn)
    write_tile(shared.words, 0, first_key, head_kv, batch, offset, lines_at[1], sizes, C)
    mbarrier.expect(shared.ring_k.full.index(0), C.tile_bytes)
    load_tile(k_maps, at_kv, head_kv, first_key, shared.ring_k.full.index(0), shared.k, 0, C)
    is_first = 1
    for member in range(group):
        head = head_kv * group + member
        for block in range(blocks.begin, blocks.end):
            send_queries(q_maps, lines, at_q, lines_at, head, block, place, shared, C)
            if is_first > 0:
                ring.await_empty(shared.ring_v, turn)
                mbarrier.expect(shared.ring_v.full.index(0), C.tile_bytes_v)
                load_tile(v_maps, at_kv, head_kv, first_key, shared.ring_v.full.index(0), shared.v, 0, C)
                is_first = 0
            send_tile(dout_maps, at_q, head, block, shared.ring_dout, place, shared.dout, C)
            place += 1
    if is_first > 0:
        ring.await_empty(shared.ring_v, turn)
        mbarrier.arrive(shared.ring_v.full.index(0))
    return place


@gluon.jit
def _produce(maps, lines, entries, counter, sizes, shared, C: gl.constexpr):
    """Tile after tile."""
    ring.begin_loading()
    total = sizes.tiles * sizes.heads
    tile = listed_tile(gl.program_id(0), entries, counter, sizes, C)
    place = 0
    turn = 0
    while tile < total:
        place = _send(tile, place, turn, maps, lines, entries, sizes, shared, C)
        turn += 1
        tile = listed_tile(tile_after(tile, counter, total, C), entries, counter, sizes, C)
    ring.await_empty(shared.ring_k, turn)
    ring.write_words(shared.words, 0, (ring.NO_TILE, 0, 0))
    mbarrier.arrive(shared.ring_k.full.index(0))


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
def _must_hide(block, tile, C: gl.constexpr):
    """True of a block whose queries do not all see all keys, or may have scores of no query."""
    found = (block < tile.blocks.full_begin) | (block >= tile.blocks.full_end)
    if C.score is not None:
        found = found | (block * 64 + 64 > tile.sizes.seq_q)
    return found


# ---------------------------------------------------------------- a step of either warpgroup


@gluon.jit
def _make_weights(scores, place, block, head, like, tile, shared, C: gl.constexpr):
    """P^T [64 keys, 64 queries] in 16 bit from scores, which are waited for. To the warpgroup of dk goes what moves
    with them: P^T times the slope of an expression."""
    sizes = tile.sizes
    lse = statistics_of(shared.lse, place % C.q_stages, C)
    scores = warpgroup_mma_wait(0, [scores])
    queries, keys = _positions(block, tile.first_key, C)
    of_score = (tile.batch, head, tile.aux)
    weights, moving = weigh(scores, queries, keys, lse[None, :], tile.score_factor, of_score, sizes, C)
    if C.is_banded or C.score is not None:
        if _must_hide(block, tile, C):
            weights = hide(weights, queries, keys, sizes, C)
            if C.has_slope:
                moving = hide(moving, queries, keys, sizes, C)
    packed = pack_both(weights, moving, like, C)
    ring.await_empty(shared.ring_sent, place)
    shared.sent.index(place % WEIGHT_STAGES).store(_to_chunks(packed[-1]))
    mbarrier.arrive(shared.ring_sent.full.index(place % WEIGHT_STAGES))
    return packed[0]


@gluon.jit
def _make_dscores(dweights, place, block, like, tile, shared, C: gl.constexpr):
    """dS^T = P^T * (dP^T - delta) in 16 bit, but for the scale; dP is waited for."""
    ring.await_full(shared.ring_q, place)
    delta = statistics_of(shared.delta, place % C.q_stages, C)
    layout: gl.constexpr = _to_chunks(gl.full([64, 64], 0.0, like.dtype, C.scores)).type.layout
    ring.await_full(shared.ring_sent, place)
    weights = _from_chunks(shared.sent.index(place % WEIGHT_STAGES).load(layout), C)
    dweights = warpgroup_mma_wait(0, [dweights])
    ring.release(shared.ring_sent, place)
    if place > 0:  # weights of a step are there, so dv of the one before it is
        ring.release(shared.ring_dout, place - 1)
    if C.is_banded or C.score is not None:
        if _must_hide(block, tile, C):
            queries, keys = _positions(block, tile.first_key, C)
            dweights = hide(dweights, queries, keys, tile.sizes, C)  # 0 times inf would be nan
    return make_ds(weights, dweights, delta)


@gluon.jit
def _begin_step(rows, place, shared, IS_DV: gl.constexpr, C: gl.constexpr):
    """Scores of a step, or dP."""
    if IS_DV:
        ring.await_full(shared.ring_q, place)
        products = multiply_rows(rows, tile_of(shared.q, place % C.q_stages), C)
    else:
        ring.await_full(shared.ring_dout, place)
        products = multiply_rows(rows, tile_of(shared.dout, place % C.dout_stages), C)
    return products


@gluon.jit
def _make_factors(products, place, block, head, like, tile, shared, IS_DV: gl.constexpr, C: gl.constexpr):
    if IS_DV:
        factors = _make_weights(products, place, block, head, like, tile, shared, C)
    else:
        factors = _make_dscores(products, place, block, like, tile, shared, C)
    return factors


@gluon.jit
def _add_step(factors, sums, place, shared, IS_DV: gl.constexpr, C: gl.constexpr):
    """dv += P^T dO, or dk += dS^T Q."""
    if IS_DV:
        ring.await_full(shared.ring_dout, place)
        sums = add_product(factors, tile_of(shared.dout, place % C.dout_stages), sums)
    else:
        sums = add_product(factors, tile_of(shared.q, place % C.q_stages), sums)
    return sums


@gluon.jit
def _walk(place, steps, tile, shared, IS_DV: gl.constexpr, C: gl.constexpr):
    """dv of 64 keys, or dk but for the scale; the next step's place."""
    own = shared.ring_k if IS_DV else shared.ring_v
    rows = tile_of(shared.k if IS_DV else shared.v, 0)
    if C.kv_in_registers:
        rows = load_rows(rows, C)
        mbarrier.arrive(own.empty.index(0))
    block = tile.blocks.begin
    head = tile.head_kv * tile.sizes.group  # only an expression knows it
    products = _begin_step(rows, place, shared, IS_DV, C)
    factors = _make_factors(products, place, block, head, rows[0], tile, shared, IS_DV, C)
    sums = zero_sums(C.pieces_v if IS_DV else C.pieces, C)
    for _ in range(steps - 1):
        sums = _add_step(factors, sums, place, shared, IS_DV, C)
        products = _begin_step(rows, place + 1, shared, IS_DV, C)
        sums = await_sums(C.pieces if IS_DV else C.pieces_v, sums)
        if not IS_DV:
            ring.release(shared.ring_q, place)
        place += 1
        block += 1
        if C.score is not None:
            head += gl.where(block == tile.blocks.end, 1, 0)
        block = gl.where(block == tile.blocks.end, tile.blocks.begin, block)  # of the next head
        factors = _make_factors(products, place, block, head, rows[0], tile, shared, IS_DV, C)
    sums = _add_step(factors, sums, place, shared, IS_DV, C)
    if not C.kv_in_registers:
        mbarrier.arrive(own.empty.index(0))
    sums = await_sums(0, sums)
    if not IS_DV:
        ring.release(shared.ring_q, place)
    return place + 1, sums


@gluon.jit
def _consume(target, strides, aux, score_factor, grad_factor, sizes, shared, IS_DV: gl.constexpr, C: gl.constexpr):
    """The warpgroup of dv, or of dk: tile after tile."""
    words = shared.words
    place = 0
    turn = 0
    ring.await_full(shared.ring_k, turn)
    first_key, head_kv, batch = read_tile(words, 0)
    while first_key != ring.NO_TILE:
        offset, own = 0, sizes
        if C.packed:
            offset, _first_tile, len_q, len_kv = read_sequence(words, 0)
            own = LaunchSizes(len_q, len_kv, *sizes[2:])
        if not IS_DV:
            ring.release(shared.ring_k, turn)  # only the tile was read
        blocks = _query_blocks(first_key, own, C)
        steps = (blocks.end - blocks.begin) * sizes.group
        if not IS_DV:
            ring.await_full(shared.ring_v, turn)
        sums = zero_sums(C.pieces_v if IS_DV else C.pieces, C)
        if steps > 0:
            tile = KeysTile(first_key, head_kv, batch, blocks, own, score_factor, aux)
            place, sums = _walk(place, steps, tile, shared, IS_DV, C)
        elif IS_DV:
            mbarrier.arrive(shared.ring_k.empty.index(0))
        else:
            mbarrier.arrive(shared.ring_v.empty.index(0))
        at = (batch, offset, head_kv, first_key)
        columns: gl.constexpr = C.head_dim_v if IS_DV else C.head_dim
        store_gradient(target, strides, at, sums, grad_factor, own.seq_kv, columns, C)
        turn += 1
        ring.await_full(shared.ring_k, turn)
        first_key, head_kv, batch = read_tile(words, 0)


@gluon.jit
def gradients_of_own_keys(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64, wide]
    dout_map,
    k_map,
    v_map,
    q_narrow,  # the same with blocks of the narrow piece; None where a tensor has none
    dout_narrow,
    k_narrow,
    v_narrow,
    statistics,  # tensor descriptor, fp32 [B, Hq, 2 * tiles_q, 64], with blocks of a line: lse, or delta, of a tile
    dk,  # pointer, [B, Hkv, Skv, D]
    dv,  # pointer, [B, Hkv, Skv, Dv]
    key_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of keys; None in others
    counter,  # pointer, int32: 0, and so it is left
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    dk_strides,  # of (batch, head, row), in units of 8 elements
    dv_strides,
    factors,  # score: scale * log2(e), with its sign, 1 with an expression; grad: scale, with its sign
    sizes,  # `LaunchSizes`
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.constants.TwoPassConstants
):
    """One block: a producer, and the two warpgroups."""
    q_maps, dout_maps = (q_map, q_narrow)[: C.pieces], (dout_map, dout_narrow)[: C.pieces_v]
    k_maps, v_maps = (k_map, k_narrow)[: C.pieces], (v_map, v_narrow)[: C.pieces_v]
    k, v = make_tiles(1, k_maps), make_tiles(1, v_maps)
    q, dout = make_tiles(C.q_stages, q_maps), make_tiles(C.dout_stages, dout_maps)
    of_weights: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    weights = gl.allocate_shared_memory(q_map.dtype, [WEIGHT_STAGES, 4, 128, 8], of_weights)
    lse, delta = make_statistics(statistics, C), make_statistics(statistics, C)
    words = ring.make_words(WORDS)
    ring_k, ring_v = ring.make(1, 2), ring.make(1, 1)
    ring_q, ring_dout = ring.make(C.q_stages, 1), ring.make(C.dout_stages, 1)
    ring_w = ring.make(WEIGHT_STAGES, 1)
    shared = BackwardShared(ring_k, ring_v, ring_q, ring_dout, ring_w, words, k, v, q, dout, lse, delta, words, weights)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dv, dv_strides, aux, factors.score, 1.0, sizes, shared, True, C)),
            (_consume, (dk, dk_strides, None, None, factors.grad, sizes, shared, False, C)),
            (_produce, ((q_maps, dout_maps, k_maps, v_maps), statistics, key_list, counter, sizes, shared, C)),
        ],
        [4, 1], [C.consumer_registers, C.producer_registers],
    )  # fmt: skip
