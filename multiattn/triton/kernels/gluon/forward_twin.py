"""The forward kernel for Hopper in Gluon where the outputs of 64 rows are more than one warpgroup has registers for.

FlashMLA (https://github.com/deepseek-ai/FlashMLA, "seesaw" scheduling), as `multiattn/cuda/kernels/forward_twin.cuh`
has it. Two warpgroups, twins, own the same 64 queries, and half of the output's columns each. They take turns at the
blocks of keys, from the last that the queries see down to the first: even turns are warpgroup 0's. One makes scores
and weights of a block and hands the weights over, with the maxima that they are relative to; both multiply them by
their half of V. So one has products for the tensor cores while the other turns scores into weights. A further warp only
loads, in pieces of as many columns for all tensors, each of which is given back when its product is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.producer_twin import BATCH, END, FIRST_QUERY, HEAD, TwinShared, produce
from multiattn.triton.kernels.gluon.schedule import LaunchSizes
from multiattn.triton.kernels.gluon.scores import (
    LN_2,
    LOG2_E,
    LOWEST,
    add_sink,
    blocks_to_see,
    exponentiate,
    finish_scores,
    found_max,
    pack_weights,
    raise_max,
    score_block,
    score_tile,
    sum_of_thread,
)
from multiattn.triton.kernels.gluon.tiles import (
    make_tiles,
    multiply_piece,
    multiply_sums,
    piece_of,
    store_piece,
)


class TwinTile(NamedTuple):
    """The 64 queries of both warpgroups, and their turns."""

    first_query: Any
    scale: Any
    of_score: Any
    sizes: Any
    place: Any
    """The place of the first turn, of all that the block has had."""
    end: Any
    """The block of the first turn is the one before this."""


class TwinWalk(NamedTuple):
    """How far a warpgroup has come, and what it has of its rows."""

    received: Any
    """Turns of its twin whose weights it has got, of all tiles."""
    row_max: Any
    """``[64]``, of both."""
    row_sum: Any
    """``[64, 4]``, of its own turns."""
    out: Any
    """Its pieces."""


# ---------------------------------------------------------------- products, left under way


@gluon.jit
def _make_scores(place, shared, C: gl.constexpr):
    """scores[64, tile_n] = Q K^T of the turn at `place`. All pieces of K but the last are given back."""
    none = ring.recomputed(gl.to_tensor(0))
    scores = gl.full([64, C.tile_n], 0.0, gl.float32, C.scores)
    pieces: gl.constexpr = C.pieces
    for piece in gl.static_range(pieces):
        ring.await_full_piece(shared.ring_k, place, piece, pieces)
        keys = piece_of(shared.k, ring.slot_of_piece(shared.ring_k, place, piece, pieces) + none)
        scores = multiply_piece(piece_of(shared.q, none + piece), keys, scores, piece == 0)
        if piece > 0:
            scores = warpgroup_mma_wait(1, [scores])
            ring.release_piece(shared.ring_k, place, piece - 1, pieces)
    return scores


@gluon.jit
def _add_values(weights, out, place, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """out += weights V of the turn at `place`, of this warpgroup's pieces.

    Weights are a left operand in registers, or in shared memory as the twin put them.
    """
    begin: gl.constexpr = C.begins[warpgroup]
    end: gl.constexpr = C.ends[warpgroup]
    pieces: gl.constexpr = C.pieces_v
    none = ring.recomputed(gl.to_tensor(0))
    found = ()
    for piece in gl.static_range(begin, end):
        ring.await_full_piece(shared.ring_v, place, piece, pieces)
        values = piece_of(shared.v, ring.slot_of_piece(shared.ring_v, place, piece, pieces) + none)
        found = found + (warpgroup_mma(weights, values, out[piece - begin], is_async=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def _await_values(out, place, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """Outputs when nothing of them is under way. Each piece of V is given back when its product is done."""
    begin: gl.constexpr = C.begins[warpgroup]
    end: gl.constexpr = C.ends[warpgroup]
    pieces: gl.constexpr = C.pieces_v
    found = ()
    for piece in gl.static_range(begin, end):
        found = found + (warpgroup_mma_wait(end - 1 - piece, [out[piece - begin]]),)  # type: ignore[assignment]
        ring.release_piece(shared.ring_v, place, piece, pieces)
    return found


# ---------------------------------------------------------------- from twin to twin


@gluon.jit
def _hand_over(weights, row_max, shared, warpgroup: gl.constexpr):
    """Weights of a turn, and the maxima that they are relative to.

    The twin is done with those before: this warpgroup has got weights that were made later.
    """
    shared.weights.index(warpgroup).store(weights)
    shared.maxima.index(warpgroup).store(row_max)
    fence_async_shared()
    mbarrier.arrive(shared.handed.index(warpgroup))


@gluon.jit
def _add_twins(walk, place, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """The twin's turn at `place`: its maxima, which are no lower, and its weights times V, left under way."""
    twin: gl.constexpr = 1 - warpgroup
    mbarrier.wait(shared.handed.index(twin), walk.received & 1)
    row_max = shared.maxima.index(twin).load(C.row)
    decay = gl.exp2(walk.row_max - row_max)
    row_sum = walk.row_sum * gl.convert_layout(decay, gl.SliceLayout(1, walk.row_sum.type.layout))[:, None]
    out = multiply_sums(walk.out, decay)
    out = _add_values(shared.weights.index(twin), out, place, shared, warpgroup, C)
    return TwinWalk(walk.received + 1, row_max, row_sum, out)


# ---------------------------------------------------------------- turns


@gluon.jit
def _take_turn(
    turn, walk, tile, shared, warpgroup: gl.constexpr,
    IS_FIRST: gl.constexpr, AT_BEGIN: gl.constexpr, AT_END: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """A block of keys; before its own weights are there, those of the turn before it are multiplied by V.

    Scores of turns are begun in order: so all of K of the turn before is there, and its slots have their next phase.

    IS_FIRST: it is turn 0, which has no other before it.
    AT_BEGIN, AT_END: the block may have keys before the first that a query sees, or behind the last.
    """
    twin: gl.constexpr = 1 - warpgroup
    place, block = tile.place + turn, tile.end - 1 - turn
    if not IS_FIRST:
        mbarrier.wait(shared.began.index(twin), walk.received & 1)
    scores = _make_scores(place, shared, C)  # [64, tile_n]
    mbarrier.arrive(shared.began.index(warpgroup))
    of_score = tile.of_score
    if C.loads_early:
        of_score = score_block(tile.first_query, block * C.tile_n, of_score, tile.sizes, C)
    if not IS_FIRST:
        walk = _add_twins(walk, place - 1, shared, warpgroup, C)
        scores = warpgroup_mma_wait(C.ends[warpgroup] - C.begins[warpgroup], [scores])
    else:
        scores = warpgroup_mma_wait(0, [scores])
    ring.release_piece(shared.ring_k, place, C.pieces - 1, C.pieces)
    scores = finish_scores(scores, block, of_score, tile, AT_BEGIN, AT_END, C)
    row_max, decay = raise_max(scores, walk.row_max, tile.scale)
    weights = exponentiate(scores, row_max, tile.scale)
    row_sum = walk.row_sum * gl.convert_layout(decay, gl.SliceLayout(1, walk.row_sum.type.layout))[:, None]
    row_sum += sum_of_thread(weights, C)
    out = walk.out
    if not IS_FIRST:
        out = _await_values(out, place - 1, shared, warpgroup, C)
    packed = pack_weights(weights, shared.q)
    _hand_over(packed, row_max, shared, warpgroup)
    if not IS_FIRST:
        out = multiply_sums(out, decay)
    operand = gl.convert_layout(packed, gl.DotOperandLayout(0, C.sums[0], 2), assert_trivial=True)
    out = _add_values(operand, out, place, shared, warpgroup, C)
    out = _await_values(out, place, shared, warpgroup, C)
    return TwinWalk(walk.received, row_max, row_sum, out)


@gluon.jit
def _take_turns(
    begin, end, walk, tile, shared, warpgroup: gl.constexpr,
    AT_BEGIN: gl.constexpr, AT_END: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Every second turn from `begin` to before `end`. Returns the next one, too."""
    number = gl.maximum(end - begin + 1, 0) // 2
    for i in range(number):
        walk = _take_turn(begin + 2 * i, walk, tile, shared, warpgroup, False, AT_BEGIN, AT_END, C)
    return begin + 2 * number, walk


@gluon.jit
def _attend(tile, turns, blocks, received, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """A walk over all blocks that the rows see: `turns` of them."""
    at_begin: gl.constexpr = C.is_two_sided
    at_end: gl.constexpr = C.is_banded or C.ragged
    row_sum = sum_of_thread(gl.full([64, C.tile_n], 0.0, gl.float32, C.scores), C)  # [64, 4]
    out = ()
    begin: gl.constexpr = C.begins[warpgroup]
    end: gl.constexpr = C.ends[warpgroup]
    for _ in gl.static_range(begin, end):
        out = out + (gl.full([64, C.wide], 0.0, gl.float32, C.sums[0]),)  # type: ignore[assignment]
    walk = TwinWalk(received, gl.full([64], LOWEST, gl.float32, C.row), row_sum, out)
    if turns > 0:
        turn = gl.to_tensor(2 - warpgroup)
        if warpgroup == 0:
            walk = _take_turn(0, walk, tile, shared, warpgroup, True, at_begin, at_end, C)
        if at_end:
            masked = gl.minimum(tile.end - blocks.full_end, turns)
            turn, walk = _take_turns(turn, masked, walk, tile, shared, warpgroup, at_begin, True, C)
        full = turns
        if at_begin:
            full = gl.minimum(tile.end - blocks.full_begin, turns)
        turn, walk = _take_turns(turn, full, walk, tile, shared, warpgroup, False, False, C)
        if at_begin:
            turn, walk = _take_turns(turn, turns, walk, tile, shared, warpgroup, True, False, C)
        if turn == turns:  # the last was the twin's
            walk = _add_twins(walk, tile.place + turns - 1, shared, warpgroup, C)
            out = _await_values(walk.out, tile.place + turns - 1, shared, warpgroup, C)
            walk = TwinWalk(walk.received, walk.row_max, walk.row_sum, out)
    return walk


# ---------------------------------------------------------------- one tile of queries


@gluon.jit
def _sum_of_both(row_sum, q_place, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """Sums of the weights of whole rows ``[64]``, of both warpgroups' turns. Behind it neither reads Q any more."""
    twin: gl.constexpr = 1 - warpgroup
    sums = gl.convert_layout(gl.sum(row_sum, 1), C.row)
    shared.sums.index(warpgroup).store(sums)
    mbarrier.arrive(shared.summed.index(warpgroup))
    mbarrier.wait(shared.summed.index(twin), q_place & 1)
    return sums + shared.sums.index(twin).load(C.row)


@gluon.jit
def _store_tops(row_max, tops, tile, head, at, sizes, C: gl.constexpr):
    """The largest score of each row, which both warpgroups have found."""
    rows = tile.first_query + gl.arange(0, 64, C.row)
    if C.packed:
        first_row = head.to(gl.int64) * sizes.seq_q + at[0]
    else:
        first_row = (at * sizes.heads_q + head).to(gl.int64) * sizes.seq_q
    gl.store(tops + first_row + rows, found_max(row_max), mask=rows < tile.sizes.seq_q)


@gluon.jit
def _store(walk, tile, sums, sink, head, at, out_map, lse, shared, warpgroup: gl.constexpr, C: gl.constexpr):
    """out = outputs / sum, through shared memory of Q; lse = log(sum of exp), which warpgroup 0 writes.

    Both with the sink, in the log2 domain, where heads have one. `lse` points to that of the sequence's first query.
    """
    row_max = walk.row_max
    if C.has_sinks:
        row_max, sums, decay = add_sink(row_max, sums, sink)
    if warpgroup == 0:
        rows = tile.first_query + gl.arange(0, 64, C.row)
        lse_row = (row_max + gl.log2(sums)) * LN_2  # of no key: LOWEST + log(0) = -inf
        gl.store(lse + rows, lse_row, mask=rows < tile.sizes.seq_q)
    factor = 1.0 / gl.where(sums == 0.0, 1.0, sums)
    if C.has_sinks:
        factor *= decay
    out = multiply_sums(walk.out, factor)
    begin: gl.constexpr = C.begins[warpgroup]
    end: gl.constexpr = C.ends[warpgroup]
    for piece in gl.static_range(begin, end):
        piece_of(shared.q, piece).store(out[piece - begin].to(shared.q.dtype))
    fence_async_shared()
    for piece in gl.static_range(begin, end):
        store_piece(out_map, at, head, tile.first_query, piece * C.wide, shared.q.index(piece), C)


@gluon.jit
def consume(warpgroup: gl.constexpr, out_map, rows, aux, scale, sizes, shared, C: gl.constexpr):
    """A warpgroup: its columns of tile after tile."""
    ring_q, words = shared.ring_q, shared.words
    q_place = 0
    place = 0  # of turns
    received = 0
    if C.has_sinks or C.score is not None:  # which it reads itself, where the producer reads all else
        ring.await_launch_before()
    ring.await_full(ring_q, q_place)
    tile_end = ring.read_word(words, END)
    while tile_end != ring.NO_TILE:
        first_query = ring.read_word(words, FIRST_QUERY)
        head = ring.read_word(words, HEAD)
        batch = ring.read_word(words, BATCH)
        own, at_q = sizes, batch
        lse_head = rows.lse + (batch * sizes.heads_q + head).to(gl.int64) * sizes.seq_q
        if C.packed:
            offset_q = ring.read_word(words, C.sequence_words)
            len_q = ring.read_word(words, C.sequence_words + 1)
            at_q = (offset_q, len_q)
            own = LaunchSizes(len_q, ring.read_word(words, C.sequence_words + 2), *sizes[2:])
            lse_head = rows.lse + head.to(gl.int64) * sizes.seq_q + offset_q
        of_score = (batch, head, aux)
        if C.score is not None:
            of_score = score_tile(first_query, of_score, own, C)
        blocks = blocks_to_see(first_query, 0, tile_end, 0, own, C)
        turns = gl.maximum(blocks.end - blocks.begin, 0)
        tile = TwinTile(first_query, scale, of_score, own, place, blocks.end)
        walk = _attend(tile, turns, blocks, received, shared, warpgroup, C)
        received = walk.received
        place += turns
        sink = 0.0
        if C.has_sinks:
            sink = gl.load(rows.sinks + head) * LOG2_E
        sums = _sum_of_both(walk.row_sum, q_place, shared, warpgroup, C)
        if C.row_max:
            if warpgroup == 0:
                _store_tops(walk.row_max, rows.tops, tile, head, at_q, sizes, C)
        _store(walk, tile, sums, sink, head, at_q, out_map, lse_head, shared, warpgroup, C)
        tma.store_wait(0)
        ring.release(ring_q, q_place)
        q_place += 1
        ring.await_full(ring_q, q_place)
        tile_end = ring.read_word(words, END)


@gluon.jit
def attention_twins(
    q_map,  # tensor descriptors, [B, H, S, D] or `ragged`, with blocks [1, 1, 64 or tile_n, wide]
    k_map,
    v_map,
    out_map,
    rows,  # lse: pointer, fp32 [B, Hq, Sq]; sinks: pointer, fp32 [Hq], at a multiple of 4 bytes, or None; tops: the
    #        largest scores, like lse, or None; contiguous
    query_list,  # pointer, int32 [tiles, 8]: a packed batch's tiles of queries; None in others
    counter,  # pointer, int32: 0, and so it is left; None where the scheduler is not dynamic
    aux,  # what the expression that modifies scores reads, as its functions have it; None without one
    scale,  # |scale| * log2(e), positive; 1 with an expression
    sizes,  # `LaunchSizes`
    C: gl.constexpr,  # multiattn.triton.kernels.gluon.constants.TwinConstants
):
    """One block: a producer, and two consumers."""
    most: gl.constexpr = max(C.pieces, C.pieces_v)  # outputs leave through Q
    (q,) = make_tiles(most, (q_map,))
    (k,) = make_tiles(C.k_stages * C.pieces, (k_map,))
    (v,) = make_tiles(C.v_stages * C.pieces_v, (v_map,))
    of_weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C.tile_n], q_map.dtype)
    of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = gl.allocate_shared_memory(q_map.dtype, [2, 64, C.tile_n], of_weights)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], of_rows)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], of_rows)
    words = ring.make_words(C.words)
    ring_q = ring.make(1, 2)
    ring_k, ring_v = ring.make(C.k_stages * C.pieces, 1), ring.make(C.v_stages * C.pieces_v, 1)
    began, handed, summed = ring.make_barriers(2, 1), ring.make_barriers(2, 1), ring.make_barriers(2, 1)
    shared = TwinShared(ring_q, ring_k, ring_v, began, handed, summed, words, q, k, v, weights, maxima, sums)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (0, out_map, rows, aux, scale, sizes, shared, C)),
            (consume, (1, out_map, rows, aux, scale, sizes, shared, C)),
            (produce, (q_map, k_map, v_map, query_list, counter, sizes, shared, C)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
