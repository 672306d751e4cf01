"""The forward kernel for Hopper in Gluon: TMA, wgmma, warp specialisation.

Shah and others, "FlashAttention-3" (arXiv 2407.08608), Algorithm 2, as `multiattn/cuda/kernels/forward_wgmma.cuh` has
it, in Triton's own language for one tile of registers at a time. One warp only loads; the two or three others, each a
warpgroup, own 64 queries of a tile and walk over the keys from the last block that they see down to the first. Products
are asynchronous: while a warpgroup turns scores into weights, the tensor cores add what its earlier weights make of V,
and work for the other warpgroups.

With `lazy_max` weights are made relative to the maxima of the first blocks, those where queries stop seeing keys among
them; blocks where they begin to see any, which come last, may be masked all the same. That is exact as long as nothing
overflows, for numerator and denominator have the same factor; where something did, a tile shows it
at its end, and is done again with the maxima of all blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from multiattn.triton.kernels.gluon import ring, sequences
from multiattn.triton.kernels.gluon.producer import produce
from multiattn.triton.kernels.gluon.scores import (
    LARGEST_SUM,
    LN_2,
    LOG2_E,
    LOWEST,
    add_sink,
    blocks_to_see,
    exponentiate,
    keep_packed,
    mask_scores,
    modify,
    pack_weights,
    range_of_blocks,
    score_block,
    score_tile,
    sum_of_thread,
    take_sign,
)

# ---------------------------------------------------------------- products, left under way


@gluon.jit
def _make_scores(queries, place, ring_kv, kv_buffers, C: gl.constexpr):
    """scores[64, tile_n] = Q K^T of the tile at `place`."""
    ring.await_full(ring_kv, place, C.stages)
    keys = kv_buffers[0].index(place % C.stages).reshape([C.tile_n, C.wide])
    none = gl.full([64, C.tile_n], 0.0, gl.float32, C.scores)
    scores = warpgroup_mma(queries[0], keys.permute((1, 0)), none, use_acc=False, is_async=True)
    if C.narrow > 0:
        keys = kv_buffers[1].index(place % C.stages).reshape([C.tile_n, C.narrow])
        scores = warpgroup_mma(queries[1], keys.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _add_values(weights, out, narrow, place, ring_kv, kv_buffers, C: gl.constexpr):
    """out[64, wide] and narrow[64, narrow] += weights V, of the tile at `place`."""
    ring.await_full(ring_kv, place, C.stages)
    values = kv_buffers[0].index(place % C.stages).reshape([C.tile_n, C.wide])
    operand: gl.constexpr = gl.DotOperandLayout(0, C.out, 2)  # the accumulator's own registers: converting is free
    out = warpgroup_mma(gl.convert_layout(weights, operand, assert_trivial=True), values, out, is_async=True)
    if C.narrow > 0:
        values = kv_buffers[1].index(place % C.stages).reshape([C.tile_n, C.narrow])
        operand_narrow: gl.constexpr = gl.DotOperandLayout(0, C.out_narrow, 2)
        weights = gl.convert_layout(weights, operand_narrow, assert_trivial=True)
        narrow = warpgroup_mma(weights, values, narrow, is_async=True)
    return out, narrow


@gluon.jit
def _await_values(out, narrow, C: gl.constexpr):
    if C.narrow > 0:
        out, narrow = warpgroup_mma_wait(0, [out, narrow])
    else:
        out = warpgroup_mma_wait(0, [out])
    return out, narrow


@gluon.jit
def _multiply_rows(out, narrow, factor, C: gl.constexpr):
    out = out * gl.convert_layout(factor, gl.SliceLayout(1, C.out))[:, None]
    if C.narrow > 0:
        narrow = narrow * gl.convert_layout(factor, gl.SliceLayout(1, C.out_narrow))[:, None]
    return out, narrow


# ---------------------------------------------------------------- turns at the tensor cores


@gluon.jit
def _await_turn(warpgroup: gl.constexpr, turn, turns, C: gl.constexpr):
    if C.pingpong:
        mbarrier.wait(turns.index(warpgroup), turn & 1)


@gluon.jit
def _pass_turn(warpgroup: gl.constexpr, turns, C: gl.constexpr):
    if C.pingpong:
        mbarrier.arrive(turns.index((warpgroup + 1) % C.warpgroups))


@gluon.jit
def _skip_blocks(number, place, turn, ring_kv, turns, warpgroup: gl.constexpr, C: gl.constexpr):
    """K of so many blocks, each with V of the one before it: a turn each, as for those who see them."""
    for _ in range(number):
        _await_turn(warpgroup, turn, turns, C)
        _pass_turn(warpgroup, turns, C)
        turn += 1
        ring.skip(ring_kv, place, C.stages)
        ring.skip(ring_kv, place + 1, C.stages)
        place += 2
    return place, turn


# ---------------------------------------------------------------- one block of keys


@gluon.jit
def _raise_max(scores, row_max, scale):
    """The maximum so far, and what older sums and outputs must be multiplied by."""
    higher = gl.maximum(row_max, gl.max(scores, 1) * scale)
    return higher, gl.exp2(row_max - higher)


@gluon.jit
def _next_block(
    block, place, turn, queries, weights, row_max, row_sum, out, narrow, first_query, scale, of_score, sizes, shared,
    warpgroup: gl.constexpr, EXACT_MAX: gl.constexpr, AT_BEGIN: gl.constexpr, AT_END: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """A block of keys, K at `place` of the ring; meanwhile weights of the one before are multiplied by V at the next.

    EXACT_MAX: its scores may raise the maxima; else its weights are relative to those of earlier blocks.
    AT_BEGIN, AT_END: it may have keys before the first that a query sees, or behind the last.
    """
    _ring_q, ring_kv, _verdicts, turns, _words, _q_buffers, kv_buffers = shared
    _await_turn(warpgroup, turn, turns, C)
    scores = _make_scores(queries, place, ring_kv, kv_buffers, C)  # [64, tile_n]
    out, narrow = _add_values(weights, out, narrow, place + 1, ring_kv, kv_buffers, C)
    _pass_turn(warpgroup, turns, C)
    if C.loads_early:
        of_score = score_block(first_query, block * C.tile_n, of_score, sizes, C)
    scores = warpgroup_mma_wait(1 + (C.narrow > 0), [scores])
    ring.release(ring_kv, place, C.stages)
    scores = take_sign(scores, C)
    scores = modify(scores, first_query, block * C.tile_n, of_score, sizes, C)
    scores = mask_scores(scores, first_query, block * C.tile_n, sizes, AT_BEGIN, AT_END, C)
    if EXACT_MAX:
        row_max, decay = _raise_max(scores, row_max, scale)
    new_weights = exponentiate(scores, row_max, scale)
    if EXACT_MAX:
        row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    row_sum += sum_of_thread(new_weights, C)
    out, narrow = _await_values(out, narrow, C)
    ring.release(ring_kv, place + 1, C.stages)
    if EXACT_MAX:
        out, narrow = _multiply_rows(out, narrow, decay, C)
    return pack_weights(new_weights, weights), row_max, row_sum, out, narrow


# ---------------------------------------------------------------- one tile of queries


@gluon.jit
def _outgrew(out, narrow, sums, C: gl.constexpr):
    """True where a row's sum of weights [64] is too large, or anything that a tile came to is not finite.

    Of whole rows: what each of a row's four threads has may be finite, and its sum not.
    """
    spoiled = gl.where(sums < LARGEST_SUM, 0.0, float("nan"))
    product = gl.sum(gl.sum(out * 0.0, 1), 0) + gl.sum(spoiled, 0)  # 0, or nan
    if C.narrow > 0:
        product += gl.sum(gl.sum(narrow * 0.0, 1), 0)
    return product != 0.0


@gluon.jit
def _await_stored(q_place, ring_q, C: gl.constexpr):
    """Gives the slot of Q of the tile before back, once its output has left it. By now it has."""
    if C.q_slots > 1:
        if q_place > 0:
            tma.store_wait(0)
            ring.release(ring_q, q_place - 1, C.q_slots)


@gluon.jit
def _attend(
    queries, q_place, place, turn, tile_begin, tile_end, exact_tile, first_query, scale, of_score, sizes, shared,
    warpgroup: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The paper's loop: maxima ``[64]``, sums ``[64, 4]`` and outputs of the rows; where ring and turns are then."""
    ring_q, ring_kv, _verdicts, turns, _words, _q_buffers, kv_buffers = shared
    begin, full_begin, first_exact, end = blocks_to_see(first_query, tile_begin, tile_end, exact_tile, sizes, C)
    at_begin: gl.constexpr = C.two_sided
    at_end: gl.constexpr = C.banded or C.ragged
    row_max = gl.full([64], LOWEST, gl.float32, C.row)
    row_sum = sum_of_thread(gl.full([64, C.tile_n], 0.0, gl.float32, C.scores), C)  # [64, 4]
    out = gl.full([64, C.wide], 0.0, gl.float32, C.out)
    narrow = out
    if C.narrow > 0:
        narrow = gl.full([64, C.narrow], 0.0, gl.float32, C.out_narrow)

    # Blocks that only others of the tile see: here those above its own, at the end those below. The ring has K of the
    # first, then V of each and K of the next: two tiles are skipped for one turn.
    above = tile_end - end
    if above > 0:
        ring.skip(ring_kv, place, C.stages)
        place += 1
    place, turn = _skip_blocks(above - 1, place, turn, ring_kv, turns, warpgroup, C)

    if end > begin:
        if above > 0:
            _await_turn(warpgroup, turn, turns, C)
        scores = _make_scores(queries, place, ring_kv, kv_buffers, C)
        if above > 0:
            _pass_turn(warpgroup, turns, C)
            turn += 1
        of_block = of_score
        if C.loads_early:
            of_block = score_block(first_query, (end - 1) * C.tile_n, of_score, sizes, C)
        scores = warpgroup_mma_wait(0, [scores])
        ring.release(ring_kv, place, C.stages)
        place += 1
        if above > 0:
            ring.skip(ring_kv, place, C.stages)
            place += 1
        scores = take_sign(scores, C)
        scores = modify(scores, first_query, (end - 1) * C.tile_n, of_block, sizes, C)
        scores = mask_scores(scores, first_query, (end - 1) * C.tile_n, sizes, at_begin, at_end, C)
        row_max, _decay = _raise_max(scores, row_max, scale)
        scores = exponentiate(scores, row_max, scale)
        row_sum = sum_of_thread(scores, C)
        weights = pack_weights(scores, queries[0])
        _await_stored(q_place, ring_q, C)

        exact = gl.maximum(end - 1 - first_exact, 0)
        for i in range(exact):
            weights, row_max, row_sum, out, narrow = _next_block(
                end - 2 - i, place, turn, queries, weights, row_max, row_sum, out, narrow, first_query, scale,
                of_score, sizes, shared, warpgroup, True, at_begin, at_end, C,
            )  # fmt: skip
            place += 2
            turn += 1
        weights = keep_packed(weights)
        full = end - 1 - exact
        if C.two_sided:
            full = gl.maximum(full - full_begin, 0)
        for i in range(full):
            weights, row_max, row_sum, out, narrow = _next_block(
                end - 2 - exact - i, place, turn, queries, weights, row_max, row_sum, out, narrow, first_query, scale,
                of_score, sizes, shared, warpgroup, not C.lazy_max, False, False, C,
            )  # fmt: skip
            place += 2
            turn += 1
        if C.two_sided:
            below = begin - tile_begin
            weights = keep_packed(weights)
            last = end - 2 - exact - full
            for i in range(last - begin + 1):
                weights, row_max, row_sum, out, narrow = _next_block(
                    last - i, place, turn, queries, weights, row_max, row_sum, out, narrow, first_query, scale,
                    of_score, sizes, shared, warpgroup, not C.lazy_max, True, False, C,
                )  # fmt: skip
                place += 2
                turn += 1
            if below > 0:
                _await_turn(warpgroup, turn, turns, C)
                ring.skip(ring_kv, place, C.stages)
                place += 1
        out, narrow = _add_values(weights, out, narrow, place, ring_kv, kv_buffers, C)
        if C.two_sided:
            if below > 0:
                _pass_turn(warpgroup, turns, C)
                turn += 1
        out, narrow = _await_values(out, narrow, C)
        ring.release(ring_kv, place, C.stages)
        place += 1
        if C.two_sided:
            place, turn = _skip_blocks(below - 1, place, turn, ring_kv, turns, warpgroup, C)
            if below > 0:
                ring.skip(ring_kv, place, C.stages)
                place += 1
    else:
        _await_stored(q_place, ring_q, C)
        if above > 0:
            ring.skip(ring_kv, place, C.stages)
            place += 1
    return row_max, row_sum, out, narrow, place, turn


@gluon.jit
def _store(
    queries, out, narrow, row_max, sums, sink, origin, buffer, out_maps, lse, q_buffers, sizes, C: gl.constexpr
):  # fmt: skip
    """out = outputs / sum, through the warpgroup's own rows of Q, which it is done with; lse = log(sum of exp).

    Both with the sink, in the log2 domain, where heads have one.
    """
    first_query, head, at = origin
    seq_q, heads_q = sizes[0], sizes[2]
    rows = first_query + gl.arange(0, 64, C.row)
    if C.has_sinks:
        row_max, sums, decay = add_sink(row_max, sums, sink)
    if C.packed:
        offset_q, end = at
        lse_head = lse + head.to(gl.int64) * seq_q + offset_q
    else:
        end = seq_q
        lse_head = lse + (at * heads_q + head).to(gl.int64) * seq_q
    lse_row = (row_max + gl.log2(sums)) * LN_2  # of no key: LOWEST + log(0) = -inf
    gl.store(lse_head + rows, lse_row, mask=(rows >= 0) & (rows < end))
    factor = 1.0 / gl.where(sums == 0.0, 1.0, sums)
    if C.has_sinks:
        factor *= decay
    out, narrow = _multiply_rows(out, narrow, factor, C)
    queries[0].store(out.to(queries[0].dtype))
    if C.narrow > 0:
        queries[1].store(narrow.to(queries[0].dtype))
    fence_async_shared()
    if first_query >= 0:  # a store that begins before its tensor is an illegal instruction; a load is not
        sequences.store_rows(out_maps[0], at, head, first_query, 0, q_buffers[0].index(buffer), C)
        if C.narrow > 0:
            sequences.store_rows(out_maps[1], at, head, first_query, C.wide, q_buffers[1].index(buffer), C)


@gluon.jit
def consume(warpgroup: gl.constexpr, out_maps, lse, sinks, aux, scale, sizes, shared, C: gl.constexpr):
    """A warpgroup: its 64 queries of tile after tile."""
    ring_q, _ring_kv, verdicts, turns, words, q_buffers, _kv_buffers = shared
    q_place = 0
    place = 0  # in the ring of keys
    turn = 0
    if C.has_sinks or C.score is not None:  # which it reads itself, where the producer reads all else
        ring.await_launch_before()
    if warpgroup == C.warpgroups - 1:
        _pass_turn(warpgroup, turns, C)
    ring.await_full(ring_q, q_place, C.q_slots)
    tile_end = ring.read_word(words, ring.END)
    while tile_end != ring.NO_TILE:
        slot = q_place % C.q_slots
        at = slot * C.words
        first_query = ring.read_word(words, at + ring.FIRST_QUERY) + 64 * warpgroup
        head = ring.read_word(words, at + ring.HEAD)
        batch = ring.read_word(words, at + ring.BATCH)
        exact_tile = ring.read_word(words, at + ring.EXACT)
        buffer = slot * C.warpgroups + warpgroup
        queries = ring.tile_of(q_buffers, buffer, C)
        own = sizes
        if C.packed:
            len_q, len_kv = sequences.read_lengths(words, at, C)
            own = (len_q, len_kv, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8])
        tile_begin = 0
        if C.two_sided:
            tile_begin, _end = range_of_blocks(first_query - 64 * warpgroup, C.tile_m, own, C)
        of_score = (batch, head, aux)
        if C.score is not None:
            of_score = score_tile(first_query, of_score, own, C)
        row_max, row_sum, out, narrow, place, turn = _attend(
            queries, q_place, place, turn, tile_begin, tile_end, exact_tile, first_query, scale, of_score, own,
            shared, warpgroup, C,
        )  # fmt: skip

        if C.packed:  # read again what else would be in registers all along
            rows_q = sequences.read_queries(words, at, C)
            first_query = ring.read_word(words, at + ring.FIRST_QUERY) + 64 * warpgroup
            head = ring.read_word(words, at + ring.HEAD)
        sink = 0.0
        if C.has_sinks:
            sink = gl.load(sinks + head) * LOG2_E
        sums = gl.convert_layout(gl.sum(row_sum, 1), C.row)  # [64]
        is_good = 1
        if C.lazy_max:
            # The weights outgrew what they are relative to; or inputs or results are not finite, which takes a tile's
            # time to find out, once.
            if exact_tile == 0:
                if _outgrew(out, narrow, sums, C):
                    ring.write_word(words, at + ring.SPOILED + warpgroup, 1)
                    is_good = 0
            mbarrier.arrive(verdicts.index(slot))
        if is_good > 0:
            origin = (first_query, head, batch)
            if C.packed:
                origin = (first_query, head, rows_q)
            _store(queries, out, narrow, row_max, sums, sink, origin, buffer, out_maps, lse, q_buffers, sizes, C)
        if C.q_slots == 1:
            tma.store_wait(0)
            ring.release(ring_q, q_place, C.q_slots)
        q_place += 1
        ring.await_full(ring_q, q_place, C.q_slots)
        tile_end = ring.read_word(words, q_place % C.q_slots * C.words + ring.END)
    tma.store_wait(0)  # shared memory goes with the block


@gluon.jit
def _buffers(number: gl.constexpr, rows: gl.constexpr, maps, C: gl.constexpr):
    """`number` tiles of `rows` rows of head_dim, in a piece or two."""
    wide = _tiles(number, rows, C.wide, maps[0], C)
    both = (wide, wide)  # the second is not asked for where there is one piece
    if C.narrow > 0:
        both = (wide, _tiles(number, rows, C.narrow, maps[1], C))
    return both


@gluon.jit
def _tiles(number: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, map, C: gl.constexpr):
    if C.packed:
        tiles = gl.allocate_shared_memory(map.dtype, [number, 1, 1, 1, rows, columns], map.layout)
    else:
        tiles = gl.allocate_shared_memory(map.dtype, [number, 1, 1, rows, columns], map.layout)
    return tiles


# No integer is specialised on: none is in a loop but the lengths, and every head count would be another kernel.
@gluon.jit(do_not_specialize=["seq_q", "seq_kv", "heads_q", "group", "tiles", "heads", "together", "left", "right"])
def attention_forward(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64 or tile_n, wide]
    k_map,
    v_map,
    out_map,
    q_narrow,  # the same with blocks of the narrow piece; None where there is none
    k_narrow,
    v_narrow,
    out_narrow,
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    sinks,  # pointer, fp32 [Hq], contiguous, at a multiple of 4 bytes; None where there are none
    query_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of queries; None in others
    counter,  # pointer, int32: 0, and so it is left; None where the scheduler is not dynamic
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    scale,  # |scale| * log2(e), positive; 1 with an expression
    seq_q,
    seq_kv,
    heads_q,
    group,  # query heads that share one key/value head
    tiles,  # of one head, or entries of the list
    heads,  # B * Hq
    together,  # heads that run side by side
    left,  # keys before and after its own that a query sees; None where the mask is not two-sided
    right,
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.constants.GluonConstants
):
    """One block: a producer, and `C.warpgroups` consumers."""
    q_maps, k_maps, v_maps, out_maps = (q_map, q_narrow), (k_map, k_narrow), (v_map, v_narrow), (out_map, out_narrow)
    sizes = (seq_q, seq_kv, heads_q, group, tiles, heads, together, left, right)
    q_buffers = _buffers(C.q_slots * C.warpgroups, 64, q_maps, C)
    kv_buffers = _buffers(C.stages, C.tile_n, k_maps, C)
    words = gl.allocate_shared_memory(gl.int32, [C.q_slots * C.words, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_q = (ring.make_barriers(C.q_slots, 1), ring.make_barriers(C.q_slots, C.warpgroups))
    ring_kv = (ring.make_barriers(C.stages, 1), ring.make_barriers(C.stages, C.warpgroups))
    verdicts, turns = ring_q[0], ring_q[0]  # not asked for where there are none
    if C.lazy_max:
        verdicts = ring.make_barriers(C.q_slots, C.warpgroups)
    if C.pingpong:
        turns = ring.make_barriers(C.warpgroups, 1)
    shared = (ring_q, ring_kv, verdicts, turns, words, q_buffers, kv_buffers)
    fence_async_shared()

    # warp_specialize takes its functions and arguments only where they are written out.
    if C.warpgroups == 2:
        gl.warp_specialize(
            [
                (consume, (0, out_maps, lse, sinks, aux, scale, sizes, shared, C)),
                (consume, (1, out_maps, lse, sinks, aux, scale, sizes, shared, C)),
                (produce, (q_maps, k_maps, v_maps, query_list, counter, sizes, shared, C)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, out_maps, lse, sinks, aux, scale, sizes, shared, C)),
                (consume, (1, out_maps, lse, sinks, aux, scale, sizes, shared, C)),
                (consume, (2, out_maps, lse, sinks, aux, scale, sizes, shared, C)),
                (produce, (q_maps, k_maps, v_maps, query_list, counter, sizes, shared, C)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
