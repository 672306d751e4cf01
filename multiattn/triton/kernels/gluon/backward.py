"""The kernel of all gradients for Hopper in Gluon: TMA, wgmma, warp specialisation.

Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 2, as `multiattn/cuda/kernels/backward_wgmma.cuh` has it, in
Triton's own language for one tile of registers at a time. A block owns 128 keys of one key/value head and walks over
the queries of all heads of its group, 64 at a time. All is transposed (rows are keys), so that weights and dS stay in
registers as operand A of dV and dK.

Two warpgroups own 64 keys each; a third makes dQ of the dS that they put into shared memory, and adds it to fp32 sums
in the workspace; one warp loads. They wait for one another only through rings of slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from multiattn.triton.kernels.gluon import backward_tiles, ring
from multiattn.triton.kernels.gluon.backward_dq import add_dq
from multiattn.triton.kernels.gluon.backward_parts import make_ds, make_statistics, modify, pack_both, statistics_of
from multiattn.triton.kernels.gluon.backward_producer import produce
from multiattn.triton.kernels.gluon.backward_tiles import (
    BEGIN,
    DS_STAGES,
    END,
    FULL_BEGIN,
    FULL_END,
    TILE_WORDS,
    BackwardShared,
    block_of,
    mask_weights,
    read_lengths,
    seen_in_partial,
)
from multiattn.triton.kernels.gluon.schedule import LaunchSizes
from multiattn.triton.kernels.gluon.scores import ZERO, SeenBlocks, keep_where
from multiattn.triton.kernels.gluon.tiles import (
    add_product,
    await_sums,
    load_rows,
    make_tiles,
    multiply_rows,
    store_tile,
    tile_of,
    write_sums,
    zero_sums,
)


class BackwardTile(NamedTuple):
    """The state of a warpgroup's 64 keys."""

    first_key: Any
    k_place: Any
    """Where its rows of K are in shared memory, and of V."""
    v_place: Any
    keys: Any
    """Its rows of K in registers, where a warpgroup keeps them there."""
    factor: Any
    """For scores, in log2 units."""
    batch: Any
    aux: Any
    blocks: Any
    sizes: Any


class BackwardWalk(NamedTuple):
    """How far a warpgroup has come: the step, what it has of its rows, and the block and head of queries."""

    step: Any
    sums: Any
    """dk and dv, as `_side_by_side` has them."""
    walked: Any
    head: Any
    """Only expressions know it."""
    weights: Any
    """Weights of the step, in 16 bit; and where an expression has a slope these times it."""


# ---------------------------------------------------------------- weights and dS


@gluon.jit
def _hide_listed(weights, moving, word, step, tile, shared, C: gl.constexpr):
    """Weights of a step, and what moves with scores, 0 where a key is hidden, as the step's word says that some may be.

    All that only this wants is read here: a branch that few steps take has no registers of its own.
    """
    if C.has_mask:
        if word % 2 == 1:
            head = ring.read_word(shared.listed, 2 * (step % C.q_stages) + 1)
            batch = ring.read_word(shared.words, tile.k_place // 2 * TILE_WORDS + backward_tiles.BATCH)
            first_key, of_score = ring.recomputed(tile.first_key), (batch, head, tile.aux)
            seen = seen_in_partial(first_key, word // 4 * 64, of_score, tile.sizes, C)
            weights = keep_where(weights, "ne", seen, ZERO)
            if C.has_slope:
                moving = keep_where(moving, "ne", seen, ZERO)
    if C.hides_in_full:
        if word // 2 % 2 == 1:
            first_key = ring.recomputed(tile.first_key)
            weights = mask_weights(weights, first_key, word // 4 * 64, tile.sizes, C)
            if C.has_slope:
                moving = mask_weights(moving, first_key, word // 4 * 64, tile.sizes, C)
    if not C.has_slope:
        moving = weights
    return weights, moving


@gluon.jit
def _weigh(products, lse, walked, head, tile, C: gl.constexpr):
    """Products to weights, ``2^(score - lse)``, and these times the slope of their scores.

    lse is inf for a query that is not there or sees no key. Of a walk over listed blocks `walked` is the step's word.
    """
    if C.blocks is None:
        first_query = block_of(walked, tile.sizes, C) * 64
    else:
        first_query = walked // 4 * 64
    queries = (first_query + gl.arange(0, 64, C.column))[None, :]
    keys = (tile.first_key + gl.arange(0, 64, C.row))[:, None]
    scores, slope = modify(products, queries, keys, (tile.batch, head, tile.aux), tile.sizes, C)
    weights = gl.exp2(scores * tile.factor - lse[None, :])
    if C.blocks is None and (C.is_banded or C.ragged or C.score is not None):
        if (walked < tile.blocks.full_begin) | (walked >= tile.blocks.full_end):
            weights = mask_weights(weights, tile.first_key, first_query, tile.sizes, C)
    moving = weights
    if C.has_slope:  # selected, as a slope may be inf where nothing is seen
        moving = gl.where(weights == 0.0, 0.0, weights * slope)
    return weights, moving


# ---------------------------------------------------------------- a warpgroup of keys


@gluon.jit
def _side_by_side(dk, dv):
    """All pieces of both, the first ones first: in another order the registers at D=96 are others."""
    sums = [dk[0], dv[0]]
    if len(dk) > 1:
        sums = [dk[0], dv[0], dk[1]]
    if len(dv) > 1:
        sums = [dk[0], dv[0], dk[-1], dv[1]] if len(dk) > 1 else [dk[0], dv[0], dv[1]]
    return sums


@gluon.jit
def _apart(sums, C: gl.constexpr):
    """dk and dv."""
    dk, dv = [sums[0]], [sums[1]]
    if C.pieces > 1:
        dk = [sums[0], sums[2]]
    if C.pieces_v > 1:
        dv = [sums[1], sums[-1]]
    return dk, dv


@gluon.jit
def _make_scores(tile, step, shared, C: gl.constexpr):
    """Scores of a step, with K as it was kept or from shared memory."""
    ring.await_full(shared.ring_q, step)
    keys = tile.keys
    if not C.k_in_registers:
        keys = tile_of(shared.k, ring.recomputed(tile.k_place))
    return multiply_rows(keys, tile_of(shared.q, step % C.q_stages), C)


@gluon.jit
def _read_listed(step, shared, C: gl.constexpr):
    """The word and the head of queries of a step, whose Q is there."""
    at = 2 * (step % C.q_stages)
    head = 0
    if C.has_score:
        head = ring.read_word(shared.listed, at + 1)
    return ring.read_word(shared.listed, at), head


@gluon.jit
def _step(walk, next_step, tile, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """One step of the walk, whose weights are there; those of the next are, afterwards.

    The last step makes its own once more, and nobody reads them: there is one copy of this code.
    """
    step, sums, walked, head, weights = walk
    dk, dv = _apart(sums, C)
    slot = step % C.q_stages
    ring.await_full(shared.ring_dout, step)
    douts = tile_of(shared.dout, step % C.dout_stages)
    dp = multiply_rows(tile_of(shared.v, ring.recomputed(tile.v_place)), douts, C)  # [64, 64]
    if C.early_scores:
        scores = _make_scores(tile, next_step, shared, C)  # [64, 64]
    dv = add_product(weights[0], douts, dv)
    delta = statistics_of(shared.delta, slot, C)
    if C.early_scores:
        dp = warpgroup_mma_wait(C.pieces + C.pieces_v, [dp])
    else:
        dp = warpgroup_mma_wait(C.pieces_v, [dp])
        dv = await_sums(0, dv)
    queries = tile_of(shared.q, slot)
    ds = make_ds(weights[-1], dp, delta)
    if not C.early_scores:
        scores = _make_scores(tile, next_step, shared, C)
    ring.await_empty(shared.ring_sent, step)
    shared.sent.index(2 * (step % DS_STAGES) + warpgroup).store(ds)
    dk = add_product(ds, queries, dk)
    lse = statistics_of(shared.lse, next_step % C.q_stages, C)
    ring.arrive_each(shared.ring_sent.full.index(step % DS_STAGES))  # which also releases Q and dO: see `add_dq`
    if C.blocks is None:
        walked += next_step - step
        if walked == tile.blocks.end:  # of the next head
            walked = tile.blocks.begin
            head += 1
    else:
        walked, head = _read_listed(next_step, shared, C)
    if C.early_scores:
        scores = warpgroup_mma_wait(C.pieces + C.pieces_v, [scores])
        dv = await_sums(C.pieces, dv)
    else:
        scores = warpgroup_mma_wait(C.pieces, [scores])
    new_weights, moving = _weigh(scores, lse, walked, head, tile, C)
    dk = await_sums(0, dk)
    ring.await_lanes()  # or ptxas packs before that into registers of their own, and copies
    if C.blocks is not None:
        new_weights, moving = _hide_listed(new_weights, moving, walked, next_step, tile, shared, C)
    weights = pack_both(new_weights, moving, queries[0], C)
    return BackwardWalk(step + 1, _side_by_side(dk, dv), walked, head, weights)


@gluon.jit
def _walk(step, steps, head, tile_place, tile, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """So many steps, at least one. Returns the step behind them, and the sums of the tile's gradients."""
    scores = _make_scores(tile, step, shared, C)
    lse = statistics_of(shared.lse, step % C.q_stages, C)
    walked = tile.blocks.begin
    if C.blocks is not None:
        walked, head = _read_listed(step, shared, C)
    scores = warpgroup_mma_wait(0, [scores])
    weights, moving = _weigh(scores, lse, walked, head, tile, C)
    if C.blocks is not None:
        weights, moving = _hide_listed(weights, moving, walked, step, tile, shared, C)
    weights = pack_both(weights, moving, shared.k[0], C)
    ring.await_full(shared.ring_v, tile_place)
    sums = _side_by_side(zero_sums(C.pieces, C), zero_sums(C.pieces_v, C))
    walk = BackwardWalk(step, sums, walked, head, weights)
    for i in range(steps):
        next_step = gl.where(i + 1 < steps, walk.step + 1, walk.step)
        walk = _step(walk, next_step, tile, shared, warpgroup, C)
    return walk.step, walk.sums


@gluon.jit
def _store(gradient, maps, at, head_kv, first_key, slot, buffers, C: gl.constexpr):
    """A gradient of 64 keys through shared memory, which nobody reads any more."""
    write_sums(gradient, tile_of(buffers, slot))
    fence_async_shared()
    store_tile(maps, at, head_kv, first_key, buffers, slot, C)
    tma.store_wait(0)


@gluon.jit
def accumulate(warpgroup: gl.constexpr, dk_maps, dv_maps, aux, factors, sizes, shared, C: gl.constexpr):
    """A warpgroup: its 64 keys of tile after tile."""
    words = shared.words
    tile_place = 0
    step = 0  # before this one, of all tiles
    ring.await_full(shared.ring_k, tile_place)
    any_key = ring.read_word(words, backward_tiles.FIRST_KEY)
    while any_key != ring.NO_TILE:
        k_slot = tile_place % C.k_stages
        at = k_slot * TILE_WORDS
        blocks = SeenBlocks(*[ring.read_word(words, at + field) for field in (BEGIN, FULL_BEGIN, FULL_END, END)])
        first_key = any_key + 64 * warpgroup
        own = sizes
        if C.packed:
            len_q, len_kv = read_lengths(words, at)
            own = LaunchSizes(len_q, len_kv, *sizes[2:])
        steps = (blocks.end - blocks.begin) * sizes.group
        if C.blocks is not None:
            steps = blocks.end
        k_place = 2 * k_slot + warpgroup
        keys = ()
        if C.k_in_registers:
            keys = load_rows(tile_of(shared.k, k_place), C)
        batch, head = 0, 0
        if C.score is not None:
            batch = ring.read_word(words, at + backward_tiles.BATCH)
            head = ring.read_word(words, at + backward_tiles.HEAD_KV) * sizes.group
        tile = BackwardTile(first_key, k_place, gl.to_tensor(warpgroup), keys, factors.score, batch, aux, blocks, own)
        if C.blocks is None:
            step, sums = _walk(step, steps, head, tile_place, tile, shared, warpgroup, C)
        else:
            ring.await_full(shared.ring_v, tile_place)
            sums = _side_by_side(zero_sums(C.pieces, C), zero_sums(C.pieces_v, C))
            if steps > 0:
                step, sums = _walk(step, steps, head, tile_place, tile, shared, warpgroup, C)
        dk, dv = _apart(sums, C)
        batch = ring.read_word(words, at + backward_tiles.BATCH)
        head_kv = ring.read_word(words, at + backward_tiles.HEAD_KV)
        at_kv = batch
        if C.packed:
            offset_kv = ring.read_word(words, at + backward_tiles.OFFSET_KV)
            at_kv = (offset_kv, ring.read_word(words, at + backward_tiles.LEN_KV))
            # No query sees a key behind all sequences, which may be anything: its products with zeros are no zeros.
            len_q = ring.read_word(words, at + backward_tiles.LEN_Q)
            dk = [gl.where(len_q > 0, piece, 0.0) for piece in dk]
            dv = [gl.where(len_q > 0, piece, 0.0) for piece in dv]
        ring.release(shared.ring_k, tile_place)
        _store(dv, dv_maps, at_kv, head_kv, first_key, warpgroup, shared.v, C)
        dk = [piece * factors.grad for piece in dk]
        _store(dk, dk_maps, at_kv, head_kv, first_key, warpgroup, shared.v, C)
        ring.release(shared.ring_v, tile_place)
        tile_place += 1
        ring.await_full(shared.ring_k, tile_place)
        any_key = ring.read_word(words, tile_place % C.k_stages * TILE_WORDS + backward_tiles.FIRST_KEY)


@gluon.jit
def gradients(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64, wide]
    k_map,
    v_map,
    dout_map,
    dk_map,
    dv_map,
    q_narrow,  # the same with blocks of the narrow piece; None where a tensor has none
    k_narrow,
    v_narrow,
    dout_narrow,
    dk_narrow,
    dv_narrow,
    statistics,  # tensor descriptor, fp32 [B, Hq, 2 * tiles_q, 64], with blocks of a line: lse, or delta, of a tile
    dq_fragments,  # pointer, fp32 [B, Hq, tiles_q, 64 * columns]: sums of dQ, as the accumulators have them
    lists,  # the lists of a block mask by the names of `plain.list_rows`; None without one
    key_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of keys; None in others
    counter,  # pointer, int32: 0
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    factors,  # score: scale * log2(e), with its sign, 1 with an expression; grad: scale, with its sign
    sizes,  # `LaunchSizes`
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.constants.GluonBackwardConstants
):
    """One block: a producer, two warpgroups of keys, and one of dQ."""
    q_maps, dout_maps = (q_map, q_narrow)[: C.pieces], (dout_map, dout_narrow)[: C.pieces_v]
    k_maps, v_maps = (k_map, k_narrow)[: C.pieces], (v_map, v_narrow)[: C.pieces_v]
    dk_maps, dv_maps = (dk_map, dk_narrow)[: C.pieces], (dv_map, dv_narrow)[: C.pieces_v]
    k = make_tiles(2 * C.k_stages, k_maps)
    v = make_tiles(2, v_maps if C.pieces_v >= C.pieces else k_maps)  # dk goes through it, too
    q, dout = make_tiles(C.q_stages, q_maps), make_tiles(C.dout_stages, dout_maps)
    of_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q_map.dtype)
    ds = gl.allocate_shared_memory(q_map.dtype, [2 * DS_STAGES, 64, 64], of_ds)
    lse, delta = make_statistics(statistics, C), make_statistics(statistics, C)
    words = ring.make_words(C.k_stages * TILE_WORDS)
    ring_k, ring_v = ring.make(C.k_stages, 3), ring.make(1, 2)
    ring_q, ring_dout = ring.make(C.q_stages, 1), ring.make(C.dout_stages, 1)
    ring_ds = ring.make(DS_STAGES, 1, 2 * ring.WARPGROUP_THREADS)
    listed = words
    if C.blocks is not None:
        listed = ring.make_words(2 * C.q_stages)
    shared = BackwardShared(ring_k, ring_v, ring_q, ring_dout, ring_ds, words, k, v, q, dout, lse, delta, listed, ds)
    fence_async_shared()
    gl.warp_specialize(
        [
            (add_dq, (dq_fragments, sizes, shared, C)),
            (accumulate, (0, dk_maps, dv_maps, aux, factors, sizes, shared, C)),
            (accumulate, (1, dk_maps, dv_maps, aux, factors, sizes, shared, C)),
            (produce, ((q_maps, k_maps, v_maps, dout_maps), statistics, lists, key_list, counter, sizes, shared, C)),
        ],
        [4, 4, 1], [C.key_registers, C.key_registers, 24],
    )  # fmt: skip
