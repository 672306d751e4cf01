"""The forward kernel in cuTile: Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 1.

One block owns `tile_m` queries of one head and walks over the keys they see, `tile_n` at a time: first the blocks that
every row of the tile sees entirely, with no mask at all, then the masked ones. From the second rung of the ladder
(`multiattn.cutile.ladder`) scores live in the log2 domain, ``p = exp2(s * scale - m)``: one multiply-add and one exp2 a
score. The sign of the scale is in q, so that m, the running maximum of ``s * scale``, is right for every scale.

With `lazy_max` m is the maximum of the block of keys that comes first, and stays: softmax is the same relative to any
m, as long as nothing overflows. That saves each block its maxima, their exchange between threads and the scaling of the
output, a third of its instructions. One look at the sums tells afterwards whether all went well; else the tile is done
again. Where causal tiles start with blocks of keys the first of the masked ones comes first, so that one mask does. Or
a pilot of 16 keys is scored before all blocks, for no more than the maxima, and blocks come in their order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import packed, parts, scaling, scores, tiles, walk
from multiattn.cutile.kernels.constants import SMALLEST_TILE, ForwardConstants
from multiattn.cutile.kernels.rows import load_sinks, store_lse
from multiattn.cutile.kernels.tiles import Array32, ConstBool, Derived, Numbers, Reach, Tuple32, Vectors32

LOWEST = -3.4028234663852886e38
"""Row maximum before any key: finite, so that a row of -inf scores computes ``exp2(-inf)`` and never ``inf - inf``."""

LARGEST_SUM = 1e30
"""The largest sum of a row's weights, with `lazy_max`: far from overflow, its reciprocal from underflow. Where the
largest weight of the block that comes first is 2^-16, others may be 2^115 times that."""


@dataclass(frozen=True, kw_only=True)
class Attending:
    """A tile of queries, and what it attends to."""

    place: Any
    q: Any  # a tile, or `parts.Parts`
    k: Any
    v: Any
    scale: Any


@dataclass(frozen=True, kw_only=True)
class RunningSoftmax:
    """The tile's rows so far, fp32."""

    acc: Any  # [tile_m, head_dim]
    m: Any  # [tile_m, 1], in the domain of the rung; with lazy_max of one block's keys, or of some
    l: Any  # [tile_m, SUMS]


@ct.function
def row_sum(l: Any) -> Any:
    """The sum of a row's weights, ``[tile_m, 1]``."""
    return ct.sum(l, axis=-1, keepdims=True)


@ct.function
def power(const: Any, x: Any, inverse: ConstBool) -> Any:
    """2 or e, as the step has it, to the power of x; inverse: the logarithm of x to that base."""
    if const.exp2:
        return ct.log2(x) if inverse else ct.exp2(x, flush_to_zero=const.flush_to_zero)
    return ct.log(x) if inverse else ct.exp(x)


@ct.function
def shift(const: Any, s: Any, m: Any, scale: Any) -> Any:
    """The maximum ``[tile_m, 1]`` of m and the scaled scores s, and these less it ``[tile_m, tile_n]``."""
    if const.scale_after_max:
        m = ct.maximum(m, ct.max(s, axis=-1, keepdims=True) * scale)
        return m, s * scale - m
    s = s * scale
    m = ct.maximum(m, ct.max(s, axis=-1, keepdims=True))
    return m, s - m


@ct.function
def score_found(const: Any, at: Any, block: Any, found: Any, masked: ConstBool) -> Any:
    """Scores of one block of keys, without their scale, ``[tile_m, tile_n]``; -inf where a query does not see a key."""
    s = parts.multiply_keys(const, at.place, at.q, at.k, found)
    s = scores.modify(const, at.place, scaling.of_scores(const, at.place, s, found, block, masked), block)
    seen = tiles.seen_keys(const, at.place, block, masked, const.masked)
    if seen is not None:
        s = ct.where(seen, s, -math.inf)
    return s


@ct.function
def score(const: Any, at: Any, block: Any, masked: ConstBool) -> Any:
    """`score_found` of keys that are in rows of their own batch entry."""
    return score_found(const, at, block, block, masked)


@ct.function
def attend(const: Any, at: Any, rows: Any, block: Any, masked: ConstBool) -> Any:
    """Take one block of keys into the running softmax, rescaled to the new maximum."""
    found = parts.find(const, at.place, at.k, block, masked)
    s = score_found(const, at, block, found, masked)
    m, shifted = shift(const, s, rows.m, at.scale)
    p = power(const, shifted, False)  # [tile_m, tile_n]
    alpha = power(const, rows.m - m, False)  # [tile_m, 1]
    l = rows.l * alpha + parts.partial_sums(const, p)
    p = scaling.of_weights(const, at.place, p, found, block, masked).astype(parts.dtype_of(const, at))
    acc = parts.scaled(const, rows.acc, alpha)
    return RunningSoftmax(acc=parts.add_values(const, at.place, at.v, p, acc, found, block, masked), m=m, l=l)


@ct.function
def no_rows(const: Any) -> Any:
    """The running softmax before any key."""
    return RunningSoftmax(
        acc=parts.zeros(const),
        m=ct.full((const.tile_m, 1), LOWEST, dtype=ct.float32),
        l=ct.full((const.tile_m, parts.SUMS), 0.0, dtype=ct.float32),
    )


@ct.function
def has_masked_blocks(const: Any) -> Any:
    """True if there may be blocks of keys that need a mask beside the full ones."""
    return const.masked or const.blocks is not None


@ct.function
def online_rows(const: Any, at: Any) -> Any:
    """The softmax of the tile's rows, each block of keys with a maximum of its own."""
    rows = no_rows(const)
    blocks = at.place.blocks
    if blocks is None:
        blocks = walk.key_blocks(const, at.place)
    for number in range(blocks.full_begin, blocks.full_end):
        block = walk.full_block(const, at.place, number)
        rows = attend(const, at, rows, block, False)
    if has_masked_blocks(const):
        first, end = walk.masked_numbers(const, blocks)
        for number in range(first, end):
            block = walk.masked_block(const, at.place, blocks, number)
            rows = attend(const, at, rows, block, True)
    return rows


# ---------------------------------------------------------------- lazy_max


@ct.function
def take(const: Any, at: Any, s: Any, rows: Any, block: Any) -> Any:
    """Take one block's scores ``[tile_m, tile_n]`` into rows whose maximum stays."""
    p = power(const, s * at.scale - rows.m, False)
    acc = parts.add_values(const, at.place, at.v, p.astype(at.v.dtype), rows.acc, block, block, False)
    return RunningSoftmax(acc=acc, m=rows.m, l=rows.l + parts.partial_sums(const, p))


@ct.function
def take_masked(const: Any, at: Any, rows: Any, blocks: Any) -> Any:
    """Take the blocks that need a mask."""
    first, end = walk.masked_numbers(const, blocks)
    for number in range(first, end):
        block = walk.masked_block(const, at.place, blocks, number)
        rows = take(const, at, score(const, at, block, True), rows, block)
    return rows


@ct.function
def take_pair(const: Any, at: Any, rows: Any, block: Any, step: Any) -> Any:
    """Take a block and the one `step` further, unmasked: the second one's scores come while the first is weighed."""
    first, second = walk.full_block(const, at.place, block), walk.full_block(const, at.place, block + step)
    s = score(const, at, first, False)
    ahead = score(const, at, second, False)
    rows = take(const, at, s, rows, first)
    return take(const, at, ahead, rows, second)


@ct.function
def take_ahead(const: Any, at: Any, s: Any, rows: Any, block: Any, more: Any, step: Any) -> Any:
    """Take a block, whose scores are s, and `more` unmasked ones: the next one's scores come while one is weighed."""
    for number in range(0, more):
        ahead = score(const, at, block + step * (number + 1), False)
        rows = take(const, at, s, rows, block + step * number)
        s = ahead
    return take(const, at, s, rows, block + step * more)


@ct.function
def take_listed_ahead(const: Any, at: Any, s: Any, rows: Any, number: Any, more: Any) -> Any:
    """As `take_ahead`, of full blocks by their numbers in a list, each of which is looked up once.

    Looked up twice, ptxas copies all scores in each round (sm90, 64x128 at D=128: 386 instructions, not 323).
    """
    block = walk.full_tile(const, at.place, number)
    for one_more in range(number + 1, number + 1 + more):
        following = walk.full_tile(const, at.place, one_more)
        ahead = score(const, at, following, False)
        rows = take(const, at, s, rows, block)
        s = ahead
        block = following
    return take(const, at, s, rows, block)


@ct.function
def guess(const: Any, s: Any, scale: Any) -> Any:
    """The maxima ``[tile_m, 1]`` of some scores, and `headroom`: what weights are relative to."""
    return ct.maximum(ct.max(s, axis=-1, keepdims=True) * scale + const.headroom, LOWEST)


@ct.function
def lazy_blocks(const: Any, place: Any) -> Any:
    """The blocks of a tile; none where a block mask lists none that is full, and the tile is done again."""
    blocks = walk.key_blocks(const, place)
    if const.blocks is not None:
        blocks = replace(blocks, end=blocks.end * min(blocks.full_end, 1))
    return blocks


@ct.function
def starts_masked(const: Any) -> Any:
    """True if the block that the maxima are of may need a mask."""
    return const.masked and not const.two_sided and const.blocks is None


@ct.function
def joins_masked(const: Any) -> Any:
    """True if a full block that is left of a pair may go with those that need a mask."""
    return const.masked and const.blocks is None


@ct.function
def lazy_rows(const: Any, at: Any) -> Any:
    """The softmax of the tile's rows relative to the maxima of one block of keys, right unless `must_redo`.

    A query that sees any key sees one of that block. So m is at most the row's maximum and `headroom`, and of the
    weights only those underflow that are next to nothing. Values near 3e38 overflow their weighted sum to inf here, as
    they do in an online kernel. The first block is such a one; with `diagonal_first` so is
    the first that needs a mask, from which the walk goes down: a tile is then masked once, not twice. A tile that sees
    no key has a block all the same: all of it is masked, and its weights are 0. With a two-sided mask or a block mask
    it is the first full block; where there is none, another one stands in for it.
    """
    blocks = lazy_blocks(const, at.place)
    if const.diagonal_first:
        start, step, unmasked = blocks.full_end, -1, blocks.full_end - blocks.full_begin
    else:
        start, step, unmasked = blocks.full_begin, 1, max(blocks.full_end - blocks.full_begin - 1, 0)
    s = score(const, at, walk.full_block(const, at.place, start), starts_masked(const))
    none = no_rows(const)
    rows = RunningSoftmax(acc=none.acc, m=guess(const, s, at.scale), l=none.l)
    taken = 1 + unmasked
    if const.pipeline == "ahead":
        if const.blocks is None:
            rows = take_ahead(const, at, s, rows, start, unmasked, step)
        else:
            rows = take_listed_ahead(const, at, s, rows, start, unmasked)
    else:
        rows = take(const, at, s, rows, walk.full_block(const, at.place, start))
        taken = 1
        if const.pipeline == "pairs":
            pairs = unmasked // 2
            for pair in range(0, pairs):
                rows = take_pair(const, at, rows, start + step * (1 + 2 * pair), step)
            taken = 1 + 2 * pairs
        if const.pipeline == "plain" or const.diagonal_first or not joins_masked(const):
            for number in range(taken, 1 + unmasked):
                block = walk.full_block(const, at.place, start + step * number)
                rows = take(const, at, score(const, at, block, False), rows, block)
            taken = 1 + unmasked
    if has_masked_blocks(const) and (const.tile_m > const.tile_n or not const.diagonal_first):
        taken_end = start + 1 if const.diagonal_first else start + taken
        rows = take_masked(const, at, rows, replace(blocks, full_end=taken_end))
    return rows


@ct.function
def piloted_rows(const: Any, at: Any) -> Any:
    """As `lazy_rows`, relative to the maxima of the first keys of that block, which are scored once more for them.

    The block itself then goes through the loops with all others. Where it is taken before them, tileiras gives it one
    buffer of its own for its keys, then its values, then the output: each is loaded only when the one before is used,
    and the loops have less shared memory for loads ahead.
    """
    blocks = lazy_blocks(const, at.place)
    pilot = replace(const, tile_n=SMALLEST_TILE, masked=True, k_latency=None)  # as few keys as a tile can have
    start = blocks.full_end if const.diagonal_first else walk.full_block(const, at.place, blocks.full_begin)
    s = score(pilot, at, start * (const.tile_n // pilot.tile_n), starts_masked(const))
    m = guess(const, s, at.scale)
    none = no_rows(const)
    # 0 times the maxima, and not zeros: what it knows to be zero tileiras sets in the loop, register by register, for
    # its first round, and so selects between that and the sum in every round.
    rows = RunningSoftmax(acc=parts.scaled(const, none.acc, ct.abs(m)), m=m, l=none.l)
    taken_end = blocks.full_begin
    if const.pipeline == "pilot_pairs":
        pairs = (blocks.full_end - blocks.full_begin) // 2
        for pair in range(0, pairs):
            rows = take_pair(const, at, rows, blocks.full_begin + 2 * pair, 1)
        taken_end = blocks.full_begin + 2 * pairs
    if const.pipeline == "pilot" or not joins_masked(const):
        for number in range(taken_end, blocks.full_end):
            block = walk.full_block(const, at.place, number)
            rows = take(const, at, score(const, at, block, False), rows, block)
        taken_end = blocks.full_end
    if has_masked_blocks(const):
        rows = take_masked(const, at, rows, replace(blocks, full_end=taken_end))
    return rows


@ct.function
def redone_rows(const: Any, at: Any) -> Any:
    """As `online_rows`, in one loop: it is rare, and code for it alone."""
    rows = no_rows(const)
    blocks = walk.key_blocks(const, at.place)
    if const.blocks is not None:
        for number in range(0, blocks.end):
            block = walk.any_tile(const, at.place, number, blocks.full_end)
            listed = replace(at, place=replace(at.place, sees_all=number < blocks.full_end))
            rows = attend(const, listed, rows, block, True)
    else:
        for block in range(blocks.begin, blocks.end):
            rows = attend(const, at, rows, block, const.masked)
    return rows


@ct.function
def row_sum_or_nan(const: Any, rows: Any) -> Any:
    """`row_sum`, but NaN for a row whose outputs do not add up to a number."""
    # 0 times a sum that is not finite is NaN. To add is twice as fast as to compare, and one sum across threads serves
    # both. Of partial ones a thread has four, each a chain of additions; one a row would be two chains, twice as long.
    return row_sum(rows.l + 0.0 * parts.added_up(const, rows.acc))


@ct.function
def any_too_large(l: Any) -> Any:
    """True if any row's sum of weights ``[tile_m, 1]`` is near overflow, or NaN."""
    return not ct.max(l, propagate_nan=True) < LARGEST_SUM


@ct.function
def must_redo(const: Any, place: Any, l: Any) -> Any:
    """True if the maxima were no good: a sum is too large, or a mask leaves the tile no full block."""
    redo = any_too_large(l)
    if const.two_sided or const.blocks is not None:
        blocks = walk.key_blocks(const, place)
        redo = redo or blocks.full_begin == blocks.full_end
    return redo


@ct.function
def load_sink(const: Any, place: Any, sinks: Any) -> Any:
    """The head's sink ``[1, 1]``, or of heads ``[tile_m, 1]``, in the domain of the rung; None without."""
    sink = None
    if const.has_sinks:
        if place.query is None:  # without TMA, which wants an address that is a multiple of 16 bytes
            sink = ct.load(sinks[0], (place.head,), (1,), allow_tma=False).reshape((1, 1))
        else:
            sink = load_sinks(const, place, sinks[0])
        sink = sink * (1.0 / const.ln_base)
    return sink


@ct.function
def with_sink(const: Any, rows: Any, l: Any, sink: Any) -> Any:
    """The rows, and their sums of weights l, with one more column: its score is the sink, and it has no value."""
    m = ct.maximum(rows.m, sink)
    alpha = power(const, rows.m - m, False)  # [tile_m, 1]
    l = l * alpha + power(const, sink - m, False)
    return RunningSoftmax(acc=parts.scaled(const, rows.acc, alpha), m=m, l=rows.l), l


@ct.function
def store_tops(const: Any, place: Any, rows: Any) -> None:
    """Store the largest scores of rows: m, as there is no lazy_max. Of a part to the base 2, else in natural units."""
    largest = ct.where(rows.m == LOWEST, -math.inf, rows.m)
    if not const.divided:
        largest = largest * const.ln_base
    store_of_rows(const, place, place.tops[0], largest)


@ct.function
def store_of_rows(const: Any, place: Any, array: Any, numbers: Any) -> None:
    """Store a number of each row ``[tile_m, 1]``."""
    if place.query is None:
        numbers = numbers.reshape((1, 1, const.tile_m))
        # Without TMA: of a single row (B = Hq = 1) its store clips at 16 bytes, and so writes past the end of lse.
        ct.store(array, (place.batch, place.head, tiles.own_tile(const, place)), numbers, allow_tma=False)
    else:
        store_lse(const, place, array, numbers)


@ct.function
def store_rows(const: Any, place: Any, out: Any, lse: Any, rows: Any, l: Any, sink: Any) -> None:
    """Store what the rows come to, out and lse; l is their sum of weights, ``[tile_m, 1]``."""
    if const.row_max:
        store_tops(const, place, rows)
    if const.has_sinks:
        rows, l = with_sink(const, rows, l, sink)
    parts.store_out(const, place, out, rows.acc, l)
    is_empty, nothing = l == 0.0, -math.inf
    log_sum = rows.m + power(const, l, True)
    if not const.divided:
        log_sum = log_sum * const.ln_base
    store_of_rows(const, place, lse, ct.where(is_empty, nothing, log_sum))


@ct.function
def forward_tile(
    const: Any, place: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, listed: Any, scale: Any
) -> None:
    """q ``[B, Hq, Sq, D]``, k and v ``[B, Hkv, Skv, D]`` -> one tile of out and lse; sinks: one ``[Hq]``, or none."""
    place = replace(place, lists=listed)
    queries = parts.load_q(const, place, q)
    sink = load_sink(const, place, sinks)
    at = Attending(place=place, q=queries, k=k, v=v, scale=scale)
    if const.lazy_max:
        rows = piloted_rows(const, at) if const.pipeline in ("pilot", "pilot_pairs") else lazy_rows(const, at)
        l = row_sum_or_nan(const, rows)
        # Before the store: after it, what the branch reads would keep shared memory from the loops.
        if must_redo(const, place, l):
            rows = redone_rows(const, at)
            l = row_sum(rows.l)
        store_rows(const, place, out, lse, rows, l, sink)
    else:
        rows = online_rows(const, at)
        if const.stored and not const.scales_values:
            acc = parts.scaled(const, rows.acc, scaling.of_head(place, place.scales[1]))
            rows = replace(rows, acc=acc)
        store_rows(const, place, out, lse, rows, row_sum(rows.l), sink)


@ct.function
def forward_sequence(
    const: Any, place: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, listed: Any, scale: Any
) -> None:
    """`forward_tile` of a sequence of a packed batch."""
    own = packed.own_part(const, place, False)
    q, out, lse = packed.queries_of(own, q), packed.queries_of(own, out), packed.queries_of(own, lse)
    if const.row_max:
        place = replace(place, tops=(packed.queries_of(own, place.tops[0]),))
    if const.lazy_max and place.seq_kv == 0:  # there is no block of keys to take maxima of
        sink = load_sink(const, place, sinks)
        rows = no_rows(const)
        store_rows(const, place, out, lse, rows, row_sum(rows.l), sink)
    else:
        k, v = packed.keys_of(place, k), packed.keys_of(place, v)
        forward_tile(const, place, q, k, v, out, lse, sinks, listed, scale)


def forward_kernel(const: ForwardConstants) -> Callable[..., None]:
    """out and lse of attention; arguments as in `forward_tile`, but in a packed batch `listed` begins with tiles."""

    def forward(
        q: Array32, k: Array32, v: Array32, out: Array32, lse: Vectors32, tops: Tuple32, sinks: Tuple32,
        captured: Tuple32, listed: Tuple32, scale: float, reach: Reach, numbers: Numbers, derived: Derived,
    ) -> None:  # fmt: skip
        aux, order = derived + captured, tiles.order_of(numbers)
        if const.packed:
            place = packed.find_place(const, q, k, listed[0], const.tile_m, reach, order, aux, False)
            if place.sequence.number >= 0:
                place = replace(place, tops=tops)
                forward_sequence(const, place, q, k, v, out, lse, sinks, listed[1:], scale)
        elif const.static_grid:
            total = ct.cdiv(q.shape[2], const.tile_m) * q.shape[1] * q.shape[0]
            # Divided once: else each of the three roles that warps take would divide for each tile, and its next load
            # would wait for that.
            number = tiles.digits_of(const, q, ct.bid(0), order)
            step = tiles.digits_of(const, q, ct.num_blocks(0), order)
            for _ in range(ct.bid(0), total, ct.num_blocks(0)):
                place = tiles.place_tile(const, q, k, reach, order, aux, number, True)
                forward_tile(const, replace(place, tops=tops), q, k, v, out, lse, sinks, listed, scale)
                number = tiles.add_digits(const, q, number, step, order)
        elif const.linear_grid:
            place = tiles.find_place(const, q, k, reach, order, aux)
            forward_tile(const, replace(place, tops=tops), q, k, v, out, lse, sinks, listed, scale)
        else:
            place = tiles.place_in_grid(const, q, k, reach, order, aux)
            forward_tile(const, replace(place, tops=tops), q, k, v, out, lse, sinks, listed, scale)

    return forward
