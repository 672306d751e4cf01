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

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from multiattn.triton.kernels.gluon import producer, ring
from multiattn.triton.kernels.gluon.listed import first_of_listed
from multiattn.triton.kernels.gluon.producer import ForwardShared, produce
from multiattn.triton.kernels.gluon.schedule import LaunchSizes
from multiattn.triton.kernels.gluon.scores import (
    LARGEST_SUM,
    LN_2,
    LOG2_E,
    LOWEST,
    SeenBlocks,
    add_sink,
    blocks_to_see,
    exponentiate,
    finish_listed,
    finish_scores,
    found_max,
    keep_packed,
    pack_weights,
    raise_max,
    range_of_blocks,
    score_block,
    score_tile,
    sum_of_thread,
    top_of_thread,
)
from multiattn.triton.kernels.gluon.tiles import (
    add_piece,
    await_sums,
    make_tiles,
    multiply_piece,
    multiply_sums,
    piece_of,
    store_tile,
    tile_of,
    write_sums,
    zero_sums,
    zipped,
)


class ForwardTile(NamedTuple):
    """The state of a warpgroup's 64 queries."""

    queries: Any
    """Q in shared memory."""
    first_query: Any
    scale: Any
    of_score: Any
    sizes: Any
    free: Any
    """So many listed tiles come first that need no mask."""


class ForwardWalk(NamedTuple):
    """How far a warpgroup has come: its places in the ring of keys and among turns, and what it has of its rows."""

    place: Any
    turn: Any
    row_max: Any
    """``[64]``."""
    row_sum: Any
    """``[64, 4]``."""
    out: Any
    weights: Any
    """Weights of the last block, in 16 bit: V is yet to be multiplied by them."""
    tops: Any
    """``[64, 4]``: the largest scores of blocks that raise no maximum, as each thread has them, alone in a tuple. It is
    empty where nobody asks."""


# ---------------------------------------------------------------- products, left under way

# A piece is looked up as its product begins: with both looked up before the first, registers are others.


@gluon.jit
def _make_scores(queries, place, shared, C: gl.constexpr):
    """scores[64, tile_n] = Q K^T of the tile at `place`."""
    ring.await_full(shared.ring_kv, place)
    scores = gl.full([64, C.tile_n], 0.0, gl.float32, C.scores)
    pieces: gl.constexpr = C.pieces
    for piece in gl.static_range(pieces):
        keys = piece_of(shared.kv_buffers[piece], place % C.stages)
        scores = multiply_piece(queries[piece], keys, scores, piece == 0)
    return scores


@gluon.jit
def _add_values(weights, out, place, shared, C: gl.constexpr):
    """out[64, head_dim_v] += weights V, of the tile at `place`."""
    ring.await_full(shared.ring_kv, place)
    slot = place % C.stages
    return [add_piece(weights, piece_of(pair[0], slot), pair[1]) for pair in zipped(shared.kv_buffers, out)]


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
def _skip_blocks(number, place, turn, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """K of so many blocks, each with V of the one before it: a turn each, as for those who see them."""
    for _ in range(number):
        _await_turn(warpgroup, turn, shared.turns, C)
        _pass_turn(warpgroup, shared.turns, C)
        turn += 1
        ring.skip(shared.ring_kv, place)
        ring.skip(shared.ring_kv, place + 1)
        place += 2
    return place, turn


# ---------------------------------------------------------------- one block of keys


@gluon.jit
def _read_listed(place, shared, HIDES: gl.constexpr, C: gl.constexpr):
    """The word of the tile of keys at a place, where anything depends on which one it is."""
    word = 0
    if C.blocks is not None and (HIDES or C.has_score):
        word = ring.read_word(shared.listed, place % C.stages)
    return word


@gluon.jit
def _load_early(block, listed, of_score, tile, C: gl.constexpr):
    """`of_score` with what an expression has of a block, or of the tile of a word of a list."""
    first_key = block * C.tile_n
    if C.blocks is not None:
        first_key = first_of_listed(listed, C)
    return score_block(tile.first_query, first_key, of_score, tile.sizes, C)


@gluon.jit
def _next_block(
    block, walk, tile, shared, warpgroup: gl.constexpr,
    EXACT_MAX: gl.constexpr, AT_BEGIN: gl.constexpr, AT_END: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """A block of keys, K at the walk's place; meanwhile weights of the one before are multiplied by V at the next.

    EXACT_MAX: its scores may raise the maxima; else its weights are relative to those of earlier blocks.
    AT_BEGIN, AT_END: it may have keys before the first that a query sees, or behind the last. Of a listed one AT_END:
    it may need a mask.
    """
    place, row_max, row_sum = walk.place, walk.row_max, walk.row_sum
    _await_turn(warpgroup, walk.turn, shared.turns, C)
    scores = _make_scores(tile.queries, place, shared, C)  # [64, tile_n]
    out = _add_values(walk.weights, walk.out, place + 1, shared, C)
    _pass_turn(warpgroup, shared.turns, C)
    listed = _read_listed(place, shared, AT_END, C)
    of_score = tile.of_score
    if C.loads_early:
        of_score = _load_early(block, listed, of_score, tile, C)
    scores = warpgroup_mma_wait(C.pieces_v, [scores])
    ring.release(shared.ring_kv, place)
    if C.blocks is None:
        scores = finish_scores(scores, block, of_score, tile, AT_BEGIN, AT_END, C)
    else:
        scores = finish_listed(scores, listed, of_score, tile, AT_END, C)
    tops = walk.tops
    if EXACT_MAX:
        row_max, decay = raise_max(scores, row_max, tile.scale)
    elif C.row_max:
        tops = (gl.maximum(tops[0], top_of_thread(scores, C)),)
    new_weights = exponentiate(scores, row_max, tile.scale)
    if EXACT_MAX:
        row_sum = row_sum * gl.convert_layout(decay, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    row_sum += sum_of_thread(new_weights, C)
    out = await_sums(0, out)
    ring.release(shared.ring_kv, place + 1)
    if EXACT_MAX:
        out = multiply_sums(out, decay)
    weights = pack_weights(new_weights, walk.weights)
    return ForwardWalk(place + 2, walk.turn + 1, row_max, row_sum, out, weights, tops)


@gluon.jit
def _next_blocks(
    number, last, walk, tile, shared, warpgroup: gl.constexpr,
    EXACT_MAX: gl.constexpr, AT_BEGIN: gl.constexpr, AT_END: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """So many, from block `last` down."""
    for i in range(number):
        walk = _next_block(last - i, walk, tile, shared, warpgroup, EXACT_MAX, AT_BEGIN, AT_END, C)
    return walk


@gluon.jit
def _keep_weights(walk):
    """Between two loops."""
    weights = keep_packed(walk.weights)
    return ForwardWalk(walk.place, walk.turn, walk.row_max, walk.row_sum, walk.out, weights, walk.tops)


# ---------------------------------------------------------------- one tile of queries


@gluon.jit
def _outgrew(out, sums, C: gl.constexpr):
    """True where a row's sum of weights [64] is too large, or anything that a tile came to is not finite.

    Of whole rows: what each of a row's four threads has may be finite, and its sum not.
    """
    spoiled = gl.where(sums < LARGEST_SUM, 0.0, float("nan"))
    product = gl.sum(gl.sum(out[0] * 0.0, 1), 0) + gl.sum(spoiled, 0)  # 0, or nan
    if C.pieces_v > 1:
        product += gl.sum(gl.sum(out[1] * 0.0, 1), 0)
    return product != 0.0


@gluon.jit
def _await_stored(q_place, shared, C: gl.constexpr):
    """Gives the slot of Q of the tile before back, once its output has left it. By now it has."""
    if C.q_slots > 1:
        if q_place > 0:
            tma.store_wait(0)
            ring.release(shared.ring_q, q_place - 1)


@gluon.jit
def _attend(
    tile, q_place, place, turn, tile_begin, tile_end, exact_tile, shared, warpgroup: gl.constexpr, C: gl.constexpr
):
    """The paper's loop: a walk over all blocks that the rows see, and past those that only others of the tile do."""
    if C.blocks is None:
        blocks = blocks_to_see(tile.first_query, tile_begin, tile_end, exact_tile, tile.sizes, C)
    else:  # all warpgroups see the same
        blocks = SeenBlocks(0, 0, 0, tile_end)
    begin, end = blocks.begin, blocks.end
    at_begin: gl.constexpr = C.is_two_sided
    at_end: gl.constexpr = C.is_banded or C.ragged
    skips: gl.constexpr = C.is_two_sided and C.blocks is None
    row_max = gl.full([64], LOWEST, gl.float32, C.row)
    row_sum = sum_of_thread(gl.full([64, C.tile_n], 0.0, gl.float32, C.scores), C)  # [64, 4]
    out = zero_sums(C.pieces_v, C)
    tops = ()
    if C.row_max:
        tops = (top_of_thread(gl.full([64, C.tile_n], float("-inf"), gl.float32, C.scores), C),)  # type: ignore[assignment]

    # Blocks that only others of the tile see: here those above its own, at the end those below. The ring has K of the
    # first, then V of each and K of the next: two tiles are skipped for one turn.
    above = tile_end - end
    if above > 0:
        ring.skip(shared.ring_kv, place)
        place += 1
    place, turn = _skip_blocks(above - 1, place, turn, shared, warpgroup, C)

    if end > begin:
        if above > 0:
            _await_turn(warpgroup, turn, shared.turns, C)
        scores = _make_scores(tile.queries, place, shared, C)
        if above > 0:
            _pass_turn(warpgroup, shared.turns, C)
            turn += 1
        listed = _read_listed(place, shared, True, C)
        of_score = tile.of_score
        if C.loads_early:
            of_score = _load_early(end - 1, listed, of_score, tile, C)
        scores = warpgroup_mma_wait(0, [scores])
        ring.release(shared.ring_kv, place)
        place += 1
        if above > 0:
            ring.skip(shared.ring_kv, place)
            place += 1
        if C.blocks is None:
            scores = finish_scores(scores, end - 1, of_score, tile, at_begin, at_end, C)
        else:
            scores = finish_listed(scores, listed, of_score, tile, True, C)
        row_max, _decay = raise_max(scores, row_max, tile.scale)
        scores = exponentiate(scores, row_max, tile.scale)
        row_sum = sum_of_thread(scores, C)
        weights = pack_weights(scores, tile.queries[0])
        _await_stored(q_place, shared, C)

        walk = ForwardWalk(place, turn, row_max, row_sum, out, weights, tops)
        lazy: gl.constexpr = C.lazy_max
        if C.blocks is not None:
            free = gl.maximum(tile.free, 1) - 1
            walk = _next_blocks(free, 0, walk, tile, shared, warpgroup, not lazy, False, False, C)
            walk = _keep_weights(walk)
            walk = _next_blocks(end - 1 - free, 0, walk, tile, shared, warpgroup, True, False, True, C)
        else:
            exact = gl.maximum(end - 1 - blocks.full_end, 0)
            walk = _next_blocks(exact, end - 2, walk, tile, shared, warpgroup, True, at_begin, at_end, C)
            walk = _keep_weights(walk)
            full = end - 1 - exact
            if C.is_two_sided:
                full = gl.maximum(full - blocks.full_begin, 0)
            walk = _next_blocks(full, end - 2 - exact, walk, tile, shared, warpgroup, not lazy, False, False, C)
            if C.is_two_sided:
                below = begin - tile_begin
                walk = _keep_weights(walk)
                last = end - 2 - exact - full
                walk = _next_blocks(last - begin + 1, last, walk, tile, shared, warpgroup, not lazy, True, False, C)
        place, turn, row_max, row_sum, out, weights, tops = walk
        if skips:
            if below > 0:
                _await_turn(warpgroup, turn, shared.turns, C)
                ring.skip(shared.ring_kv, place)
                place += 1
        out = _add_values(weights, out, place, shared, C)
        if skips:
            if below > 0:
                _pass_turn(warpgroup, shared.turns, C)
                turn += 1
        out = await_sums(0, out)
        ring.release(shared.ring_kv, place)
        place += 1
        if skips:
            place, turn = _skip_blocks(below - 1, place, turn, shared, warpgroup, C)
            if below > 0:
                ring.skip(shared.ring_kv, place)
                place += 1
    else:
        _await_stored(q_place, shared, C)
        if above > 0:
            ring.skip(shared.ring_kv, place)
            place += 1
    return row_max, row_sum, out, tops, place, turn


@gluon.jit
def _store(
    out, row_max, tops, sums, sink, queries, buffer, first_query, head, at, out_maps, of_rows, scale, sizes, shared,
    C: gl.constexpr,
):  # fmt: skip
    """out = outputs / sum, through the warpgroup's own rows of Q, which it is done with; lse = log(sum of exp).

    Both with the sink, in the log2 domain, where heads have one.
    """
    rows = first_query + gl.arange(0, 64, C.row)
    lse, row_tops = of_rows
    if C.packed:
        offset_q, end = at
        first_row = head.to(gl.int64) * sizes.seq_q + offset_q
    else:
        end = sizes.seq_q
        first_row = (at * sizes.heads_q + head).to(gl.int64) * sizes.seq_q
    if C.row_max:
        largest = gl.maximum(row_max, gl.convert_layout(gl.max(tops[0], 1), C.row) * scale)
        exists = (rows >= 0) & (rows < end)
        gl.store(row_tops + first_row + rows, found_max(largest), mask=exists)
    if C.has_sinks:
        row_max, sums, decay = add_sink(row_max, sums, sink)
    lse_head = lse + first_row
    lse_row = (row_max + gl.log2(sums)) * LN_2  # of no key: LOWEST + log(0) = -inf
    gl.store(lse_head + rows, lse_row, mask=(rows >= 0) & (rows < end))
    factor = 1.0 / gl.where(sums == 0.0, 1.0, sums)
    if C.has_sinks:
        factor *= decay
    write_sums(multiply_sums(out, factor), queries)
    fence_async_shared()
    if first_query >= 0:  # a store that begins before its tensor is an illegal instruction; a load is not
        store_tile(out_maps, at, head, first_query, shared.q_buffers, buffer, C)


@gluon.jit
def consume(warpgroup: gl.constexpr, out_maps, of_rows, sinks, aux, scale, sizes, shared, C: gl.constexpr):
    """A warpgroup: its 64 queries of tile after tile."""
    ring_q, words = shared.ring_q, shared.words
    q_place = 0
    place = 0  # in the ring of keys
    turn = 0
    if C.has_sinks or C.score is not None:  # which it reads itself, where the producer reads all else
        ring.await_launch_before()
    if warpgroup == C.warpgroups - 1:
        _pass_turn(warpgroup, shared.turns, C)
    ring.await_full(ring_q, q_place)
    tile_end = ring.read_word(words, producer.END)
    while tile_end != ring.NO_TILE:
        slot = q_place % C.q_slots
        at = slot * C.words
        first_query = ring.read_word(words, at + producer.FIRST_QUERY) + 64 * warpgroup
        head = ring.read_word(words, at + producer.HEAD)
        batch = ring.read_word(words, at + producer.BATCH)
        exact_tile = ring.read_word(words, at + producer.EXACT)
        buffer = slot * C.warpgroups + warpgroup
        queries = tile_of(shared.q_buffers, buffer)
        own = sizes
        if C.packed:
            len_q = ring.read_word(words, at + C.sequence_words + 1)
            own = LaunchSizes(len_q, ring.read_word(words, at + C.sequence_words + 2), *sizes[2:])
        tile_begin = 0
        if C.is_two_sided:
            tile_begin, _end = range_of_blocks(first_query - 64 * warpgroup, C.tile_m, own, C)
        of_score = (batch, head, aux)
        if C.score is not None:
            of_score = score_tile(first_query, of_score, own, C)
        free = 0
        if C.blocks is not None:
            free = ring.read_word(words, at + C.free_word)
        tile = ForwardTile(queries, first_query, scale, of_score, own, free)
        row_max, row_sum, out, tops, place, turn = _attend(
            tile, q_place, place, turn, tile_begin, tile_end, exact_tile, shared, warpgroup, C
        )

        at_q = batch
        if C.packed:  # read again what else would be in registers all along
            offset_q = ring.read_word(words, at + C.sequence_words)
            at_q = (offset_q, ring.read_word(words, at + C.sequence_words + 1))
            first_query = ring.read_word(words, at + producer.FIRST_QUERY)
            if C.packed_blocks:
                at_q = producer.own_rows(first_query, at_q, C)
            first_query += 64 * warpgroup
            head = ring.read_word(words, at + producer.HEAD)
        sink = 0.0
        if C.has_sinks:
            sink = gl.load(sinks + head) * LOG2_E
        sums = gl.convert_layout(gl.sum(row_sum, 1), C.row)  # [64]
        is_good = 1
        if C.lazy_max:
            # The weights outgrew what they are relative to; or inputs or results are not finite, which takes a tile's
            # time to find out, once.
            if exact_tile == 0:
                if _outgrew(out, sums, C):
                    ring.write_word(words, at + producer.SPOILED + warpgroup, 1)
                    is_good = 0
            mbarrier.arrive(shared.verdicts.index(slot))
        if is_good > 0:
            _store(
                out, row_max, tops, sums, sink, queries, buffer, first_query, head, at_q, out_maps, of_rows, scale,
                sizes, shared, C,
            )  # fmt: skip
        if C.q_slots == 1:
            tma.store_wait(0)
            ring.release(ring_q, q_place)
        q_place += 1
        ring.await_full(ring_q, q_place)
        tile_end = ring.read_word(words, q_place % C.q_slots * C.words + producer.END)
    tma.store_wait(0)  # shared memory goes with the block


@gluon.jit
def attention_forward(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64 or tile_n, wide]
    k_map,
    v_map,
    out_map,
    q_narrow,  # the same with blocks of the narrow piece; None where a tensor has none
    k_narrow,
    v_narrow,
    out_narrow,
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    tops,  # pointer, like lse: the largest score of each row; None where nobody asks
    sinks,  # pointer, fp32 [Hq], contiguous, at a multiple of 4 bytes; None where there are none
    lists,  # the lists of a block mask by the names of `plain.list_rows`; None without one
    query_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of queries; None in others
    counter,  # pointer, int32: 0, and so it is left; None where the scheduler is not dynamic
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    scale,  # |scale| * log2(e), positive; 1 with an expression
    sizes,  # `LaunchSizes`
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.constants.GluonConstants
):
    """One block: a producer, and `C.warpgroups` consumers."""
    q_maps, k_maps = (q_map, q_narrow)[: C.pieces], (k_map, k_narrow)[: C.pieces]
    v_maps, out_maps = (v_map, v_narrow)[: C.pieces_v], (out_map, out_narrow)[: C.pieces_v]
    maps = (q_maps, k_maps, v_maps)
    q_buffers = make_tiles(C.q_slots * C.warpgroups, q_maps if C.pieces >= C.pieces_v else out_maps)
    kv_buffers = make_tiles(C.stages, k_maps if C.pieces >= C.pieces_v else v_maps)
    words = ring.make_words(C.q_slots * C.words)
    ring_q = ring.make(C.q_slots, C.warpgroups)
    ring_kv = ring.make(C.stages, C.warpgroups)
    verdicts, turns = ring_q.full, ring_q.full  # not asked for where there are none
    if C.lazy_max:
        verdicts = ring.make_barriers(C.q_slots, C.warpgroups)
    if C.pingpong:
        turns = ring.make_barriers(C.warpgroups, 1)
    listed = words
    if C.blocks is not None:
        listed = ring.make_words(C.stages)
    shared = ForwardShared(ring_q, ring_kv, verdicts, turns, words, listed, q_buffers, kv_buffers)
    fence_async_shared()
    of_rows = (lse, tops)

    # warp_specialize takes its functions and arguments only where they are written out.
    if C.warpgroups == 1:
        gl.warp_specialize(
            [
                (consume, (0, out_maps, of_rows, sinks, aux, scale, sizes, shared, C)),
                (produce, (maps, query_list, counter, lists, sizes, shared, C)),
            ],
            [1], [24],
        )  # fmt: skip
    elif C.warpgroups == 2:
        gl.warp_specialize(
            [
                (consume, (0, out_maps, of_rows, sinks, aux, scale, sizes, shared, C)),
                (consume, (1, out_maps, of_rows, sinks, aux, scale, sizes, shared, C)),
                (produce, (maps, query_list, counter, lists, sizes, shared, C)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, out_maps, of_rows, sinks, aux, scale, sizes, shared, C)),
                (consume, (1, out_maps, of_rows, sinks, aux, scale, sizes, shared, C)),
                (consume, (2, out_maps, of_rows, sinks, aux, scale, sizes, shared, C)),
                (produce, (maps, query_list, counter, lists, sizes, shared, C)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
