"""The kernel of all gradients for Hopper in Gluon: TMA, wgmma, warp specialisation.

Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 2, as `multiattn/cuda/kernels/backward_wgmma.cuh` has it, in
Triton's own language for one tile of registers at a time. A block owns 128 keys of one key/value head and walks over
the queries of all heads of its group, 64 at a time. All is transposed (rows are keys), so that weights and dS stay in
registers as operand A of dV and dK.

Two warpgroups own 64 keys each; a third makes dQ of the dS that they put into shared memory, and adds it to fp32 sums
in the workspace; one warp loads. They wait for one another only through rings of slots.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from multiattn.triton.kernels.gluon import backward_tiles, ring, sequences
from multiattn.triton.kernels.gluon.backward_dq import add_dq
from multiattn.triton.kernels.gluon.backward_parts import (
    add_product,
    await_sums,
    make_tiles,
    multiply_rows,
    statistics_of,
)
from multiattn.triton.kernels.gluon.backward_producer import produce
from multiattn.triton.kernels.gluon.backward_tiles import DS_STAGES, block_of, make_ds, mask_weights, modify
from multiattn.triton.kernels.gluon.ring import tile_of
from multiattn.triton.kernels.gluon.scores import pack_weights

# ---------------------------------------------------------------- weights and dS


@gluon.jit
def _weigh(products, factor, lse, walked, first_key, of_score, blocks, sizes, C: gl.constexpr):
    """Products to weights, ``2^(score - lse)``, and these times the slope of their scores.

    lse is inf for a query that is not there or sees no key.
    """
    _begin, full_begin, full_end, _end = blocks
    first_query = block_of(walked, sizes, C) * 64
    scores, slope = modify(products, first_key, first_query, of_score, sizes, C)
    weights = gl.exp2(scores * factor - lse[None, :])
    if C.banded or C.ragged or C.score is not None:
        if (walked < full_begin) | (walked >= full_end):
            weights = mask_weights(weights, first_key, first_query, sizes, C)
    moving = weights
    if C.has_slope:  # selected, as a slope may be inf where nothing is seen
        moving = gl.where(weights == 0.0, 0.0, weights * slope)
    return weights, moving


@gluon.jit
def _pack_both(weights, moving, like, C: gl.constexpr):
    packed = pack_weights(weights, like)
    both = (packed, packed)
    if C.has_slope:
        both = (packed, pack_weights(moving, like))
    return both


# ---------------------------------------------------------------- a warpgroup of keys


@gluon.jit
def _recomputed(number):
    """The same number, made where it stands: what follows from it is not kept in registers across a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _make_scores(k_place, kept, step, ring_q, k_buffers, q_buffers, C: gl.constexpr):
    """Scores of a step, with K as it was kept or from shared memory."""
    ring.await_full(ring_q, step, C.q_stages)
    keys = kept
    if not C.k_in_registers:
        keys = tile_of(k_buffers, _recomputed(k_place), C)
    return multiply_rows(keys, tile_of(q_buffers, step % C.q_stages, C), C)


@gluon.jit
def _keep_keys(k_place, k_buffers, C: gl.constexpr):
    """A warpgroup's rows of K as operand A, if it keeps them in registers."""
    both = (k_place, k_place)  # not asked for
    if C.k_in_registers:
        rows = tile_of(k_buffers, k_place, C)
        operand: gl.constexpr = gl.DotOperandLayout(0, C.scores, 2)
        wide = rows[0].load(operand)
        both = (wide, wide)
        if C.narrow > 0:
            both = (wide, rows[1].load(operand))
    return both


@gluon.jit
def _step(
    weights, moving, walked, head, batch, aux, step, next_step, k_place, kept, v_place, dk, dk_narrow, dv, dv_narrow,
    factor, first_key, blocks, sizes, shared, warpgroup: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One step of the walk, whose weights are there; those of the next are, afterwards.

    The last step makes its own once more, and nobody reads them: there is one copy of this code.
    """
    _ring_k, _ring_v, ring_q, ring_dout, ring_ds, _words, buffers = shared
    k_buffers, v_buffers, q_buffers, dout_buffers, lse_buffers, delta_buffers, ds_buffers = buffers
    slot = step % C.q_stages
    ring.await_full(ring_dout, step, C.dout_stages)
    douts = tile_of(dout_buffers, step % C.dout_stages, C)
    dp = multiply_rows(tile_of(v_buffers, _recomputed(v_place), C), douts, C)  # [64, 64]
    if C.early_scores:
        scores = _make_scores(k_place, kept, next_step, ring_q, k_buffers, q_buffers, C)  # [64, 64]
    dv, dv_narrow = add_product(weights, douts, dv, dv_narrow, C)
    delta = statistics_of(delta_buffers, slot, C)
    if C.early_scores:
        dp = warpgroup_mma_wait(2 * C.groups, [dp])
    else:
        dp = warpgroup_mma_wait(C.groups, [dp])
        dv, dv_narrow = await_sums(0, dv, dv_narrow, C)
    queries = tile_of(q_buffers, slot, C)
    ds = make_ds(moving, dp, delta)
    if not C.early_scores:
        scores = _make_scores(k_place, kept, next_step, ring_q, k_buffers, q_buffers, C)
    ring.await_empty(ring_ds, step, DS_STAGES)
    ds_buffers.index(2 * (step % DS_STAGES) + warpgroup).store(ds)
    dk, dk_narrow = add_product(ds, queries, dk, dk_narrow, C)
    lse = statistics_of(lse_buffers, next_step % C.q_stages, C)
    ring.arrive_each(ring_ds[0].index(step % DS_STAGES))  # which also releases Q and dO: see `add_dq`
    walked += next_step - step
    if walked == blocks[3]:  # of the next head
        walked = blocks[0]
        head += 1
    if C.early_scores:
        scores = warpgroup_mma_wait(2 * C.groups, [scores])
        dv, dv_narrow = await_sums(1, dv, dv_narrow, C)
    else:
        scores = warpgroup_mma_wait(C.groups, [scores])
    of_score = (batch, head, aux)
    new_weights, new_moving = _weigh(scores, factor, lse, walked, first_key, of_score, blocks, sizes, C)
    dk, dk_narrow = await_sums(0, dk, dk_narrow, C)
    ring.await_lanes()  # or ptxas packs before that into registers of their own, and copies
    weights, moving = _pack_both(new_weights, new_moving, queries[0], C)
    return weights, moving, walked, head, dk, dk_narrow, dv, dv_narrow


@gluon.jit
def _store(gradient, narrow, maps, at, head_kv, first_key, slot, buffers, C: gl.constexpr):
    """A gradient of 64 keys through shared memory, which nobody reads any more."""
    rows = tile_of(buffers, slot, C)
    rows[0].store(gradient.to(rows[0].dtype))
    if C.narrow > 0:
        rows[1].store(narrow.to(rows[0].dtype))
    fence_async_shared()
    sequences.store_rows(maps[0], at, head_kv, first_key, 0, buffers[0].index(slot), C)
    if C.narrow > 0:
        sequences.store_rows(maps[1], at, head_kv, first_key, C.wide, buffers[1].index(slot), C)
    tma.store_wait(0)


@gluon.jit
def accumulate(warpgroup: gl.constexpr, dk_maps, dv_maps, aux, factor, grad_factor, sizes, shared, C: gl.constexpr):
    """A warpgroup: its 64 keys of tile after tile."""
    ring_k, ring_v, ring_q, _ring_dout, _ring_ds, words, buffers = shared
    k_buffers, v_buffers, q_buffers, _dout_buffers, lse_buffers, _delta_buffers, _ds_buffers = buffers
    tile_place = 0
    step = 0  # before this one, of all tiles
    ring.await_full(ring_k, tile_place, C.k_stages)
    any_key = ring.read_word(words, backward_tiles.FIRST_KEY)
    while any_key != ring.NO_TILE:
        k_slot = tile_place % C.k_stages
        at = k_slot * backward_tiles.TILE_WORDS
        blocks = (
            ring.read_word(words, at + backward_tiles.BEGIN),
            ring.read_word(words, at + backward_tiles.FULL_BEGIN),
            ring.read_word(words, at + backward_tiles.FULL_END),
            ring.read_word(words, at + backward_tiles.END),
        )
        first_key = any_key + 64 * warpgroup
        own = sizes
        if C.packed:
            len_q, len_kv = backward_tiles.read_lengths(words, at)
            own = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9])
        steps = (blocks[3] - blocks[0]) * sizes[3]
        k_place = 2 * k_slot + warpgroup
        kept = _keep_keys(k_place, k_buffers, C)
        v_place = gl.to_tensor(warpgroup)
        dk = gl.full([64, C.wide], 0.0, gl.float32, C.sums)
        dv = gl.full([64, C.wide], 0.0, gl.float32, C.sums)
        dk_narrow = dk
        dv_narrow = dv
        if C.narrow > 0:
            dk_narrow = gl.full([64, C.narrow], 0.0, gl.float32, C.sums_narrow)
            dv_narrow = gl.full([64, C.narrow], 0.0, gl.float32, C.sums_narrow)
        walked = blocks[0]
        head = 0  # only expressions know it
        batch = 0
        if C.score is not None:
            batch = ring.read_word(words, at + backward_tiles.BATCH)
            head = ring.read_word(words, at + backward_tiles.HEAD_KV) * sizes[3]
        scores = _make_scores(k_place, kept, step, ring_q, k_buffers, q_buffers, C)
        lse = statistics_of(lse_buffers, step % C.q_stages, C)
        scores = warpgroup_mma_wait(0, [scores])
        weights, moving = _weigh(scores, factor, lse, walked, first_key, (batch, head, aux), blocks, own, C)
        weights, moving = _pack_both(weights, moving, k_buffers[0], C)
        ring.await_full(ring_v, tile_place, 1)
        for i in range(steps):
            next_step = gl.where(i + 1 < steps, step + 1, step)
            weights, moving, walked, head, dk, dk_narrow, dv, dv_narrow = _step(
                weights, moving, walked, head, batch, aux, step, next_step, k_place, kept, v_place, dk, dk_narrow,
                dv, dv_narrow, factor, first_key, blocks, own, shared, warpgroup, C,
            )  # fmt: skip
            step += 1
        batch = ring.read_word(words, at + backward_tiles.BATCH)
        head_kv = ring.read_word(words, at + backward_tiles.HEAD_KV)
        at_kv = batch
        if C.packed:
            at_kv = (
                ring.read_word(words, at + backward_tiles.OFFSET_KV),
                ring.read_word(words, at + backward_tiles.LEN_KV),
            )
            # No query sees a key behind all sequences, which may be anything: its products with zeros are no zeros.
            len_q, _len_kv = backward_tiles.read_lengths(words, at)
            dk, dk_narrow = gl.where(len_q > 0, dk, 0.0), gl.where(len_q > 0, dk_narrow, 0.0)
            dv, dv_narrow = gl.where(len_q > 0, dv, 0.0), gl.where(len_q > 0, dv_narrow, 0.0)
        ring.release(ring_k, tile_place, C.k_stages)
        _store(dv, dv_narrow, dv_maps, at_kv, head_kv, first_key, warpgroup, v_buffers, C)
        dk = dk * grad_factor
        dk_narrow = dk_narrow * grad_factor
        _store(dk, dk_narrow, dk_maps, at_kv, head_kv, first_key, warpgroup, v_buffers, C)
        ring.release(ring_v, tile_place, 1)
        tile_place += 1
        ring.await_full(ring_k, tile_place, C.k_stages)
        any_key = ring.read_word(words, tile_place % C.k_stages * backward_tiles.TILE_WORDS + backward_tiles.FIRST_KEY)


# No integer is specialised on, as in the forward.
@gluon.jit(
    do_not_specialize=[
        "seq_q", "seq_kv", "heads_q", "group", "tiles", "heads", "together", "left", "right", "tiles_q",
    ]
)  # fmt: skip
def gradients(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64, wide]
    k_map,
    v_map,
    dout_map,
    dk_map,
    dv_map,
    q_narrow,  # the same with blocks of the narrow piece; None where there is none
    k_narrow,
    v_narrow,
    dout_narrow,
    dk_narrow,
    dv_narrow,
    statistics,  # tensor descriptor, fp32 [B, Hq, 2 * tiles_q, 64], with blocks of a line: lse, or delta, of a tile
    dq_fragments,  # pointer, fp32 [B, Hq, tiles_q, 64 * columns]: sums of dQ, as the accumulators have them
    key_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of keys; None in others
    counter,  # pointer, int32: 0
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    score_factor,  # scale * log2(e), with its sign; 1 with an expression
    grad_factor,  # scale, with its sign
    seq_q,
    seq_kv,
    heads_q,
    group,  # query heads that share one key/value head
    tiles,  # of keys, of one head, or entries of the list
    heads,  # B * Hkv
    together,  # heads of keys that run side by side
    left,  # keys before and after its own that a query sees; None where the mask is not two-sided
    right,
    tiles_q,  # tiles of queries of one head, of a packed batch with one that is of none
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.backward_constants.GluonBackwardConstants
):
    """One block: a producer, two warpgroups of keys, and one of dQ."""
    q_maps, k_maps, v_maps, dout_maps = (q_map, q_narrow), (k_map, k_narrow), (v_map, v_narrow), (dout_map, dout_narrow)
    dk_maps, dv_maps = (dk_map, dk_narrow), (dv_map, dv_narrow)
    maps = (q_maps, k_maps, v_maps, dout_maps)
    sizes = (seq_q, seq_kv, heads_q, group, tiles, heads, together, left, right, tiles_q)
    k_buffers = make_tiles(2 * C.k_stages, k_maps, C)
    v_buffers = make_tiles(2, v_maps, C)
    q_buffers = make_tiles(C.q_stages, q_maps, C)
    dout_buffers = make_tiles(C.dout_stages, dout_maps, C)
    of_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q_map.dtype)
    ds_buffers = gl.allocate_shared_memory(q_map.dtype, [2 * DS_STAGES, 64, 64], of_ds)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [C.q_stages, 1, 1, 1, 64], statistics.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [C.q_stages, 1, 1, 1, 64], statistics.layout)
    words = gl.allocate_shared_memory(
        gl.int32, [C.k_stages * backward_tiles.TILE_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    ring_k = (ring.make_barriers(C.k_stages, 1), ring.make_barriers(C.k_stages, 3))
    ring_v = (ring.make_barriers(1, 1), ring.make_barriers(1, 2))
    ring_q = (ring.make_barriers(C.q_stages, 1), ring.make_barriers(C.q_stages, 1))
    ring_dout = (ring.make_barriers(C.dout_stages, 1), ring.make_barriers(C.dout_stages, 1))
    ring_ds = (ring.make_barriers(DS_STAGES, 2 * ring.WARPGROUP_THREADS), ring.make_barriers(DS_STAGES, 1))
    buffers = (k_buffers, v_buffers, q_buffers, dout_buffers, lse_buffers, delta_buffers, ds_buffers)
    shared = (ring_k, ring_v, ring_q, ring_dout, ring_ds, words, buffers)
    fence_async_shared()
    gl.warp_specialize(
        [
            (add_dq, (dq_fragments, sizes, shared, C)),
            (accumulate, (0, dk_maps, dv_maps, aux, score_factor, grad_factor, sizes, shared, C)),
            (accumulate, (1, dk_maps, dv_maps, aux, score_factor, grad_factor, sizes, shared, C)),
            (produce, (maps, statistics, key_list, counter, sizes, shared, C)),
        ],
        [4, 4, 1], [C.key_registers, C.key_registers, 24],
    )  # fmt: skip
