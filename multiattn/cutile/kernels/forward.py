"""The forward kernel in cuTile: Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 1.

One block owns `tile_m` queries of one head and walks over the keys they see, `tile_n` at a time: first the blocks that
every row of the tile sees entirely, with no mask at all, then the masked ones. From the second rung of the ladder
(`multiattn.cutile.steps`) scores live in the log2 domain, ``p = exp2(s * scale - m)``: one multiply-add and one exp2 a
score. The sign of the scale is in q, so that m, the running maximum of ``s * scale``, is right for every scale.

With `lazy_max` m is the maximum of the block of keys that comes first, and stays: softmax is the same relative to any
m, as long as nothing overflows. That saves each block its maxima, their exchange between threads and the scaling of the
output, a third of its instructions. One look at the sums tells afterwards whether all went well; else the tile is done
again. Where causal tiles start with blocks of keys the first of the masked ones comes first, so that one mask does. Or
a pilot of 16 keys is scored before all blocks, for no more than the maxima, and blocks come in their order.
"""

# cuda.tile is untyped, and so are its decorators and aliases:
# mypy: disable-error-code="untyped-decorator, valid-type"

import math
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.constants import (
    AHEAD,
    APART,
    PAIRS,
    PILOT,
    PILOT_PAIRS,
    PLAIN,
    Rows,
    Shape,
    pilot_of,
)
from multiattn.cutile.kernels.exp2 import exp2_shared
from multiattn.cutile.kernels.parts import (
    SUMS,
    add_values,
    added_up,
    load_q,
    multiply_keys,
    partial_sums,
    scaled,
    store_out,
    zeros,
)
from multiattn.cutile.kernels.tiles import (
    Array32,
    Array64,
    ConstBool,
    ConstFloat,
    ConstInt,
    Rows64,
    add_digits,
    digits_of,
    find_place,
    is_visible,
    key_blocks,
    place_in_grid,
    place_tile,
)

LOWEST = -3.4028234663852886e38
"""Row maximum before any key: finite, so that a row of -inf scores computes ``exp2(-inf)`` and never ``inf - inf``."""

LARGEST_SUM = 1e30
"""Of a row's weights, with `lazy_max`: far from overflow, and its reciprocal from underflow. Where the largest weight
of the block that comes first is 2^-16, others may be 2^115 times that."""


@ct.function
def row_sum(l: Any) -> Any:  # noqa: E741
    """The sum of a row's weights, ``[tile_m, 1]``."""
    return ct.sum(l, axis=-1, keepdims=True)


@ct.function
def power(shape: Any, x: Any, inverse: ConstBool) -> Any:
    """2 or e, as the step has it, to the power of x; inverse: the logarithm of x to that base."""
    if shape.exp2:
        return ct.log2(x) if inverse else ct.exp2(x, flush_to_zero=shape.flush_to_zero)
    return ct.log(x) if inverse else ct.exp(x)


@ct.function
def shift(shape: Any, s: Any, m: Any, scale: Any) -> Any:
    """The maximum ``[tile_m, 1]`` of m and the scaled scores s, and these less it ``[tile_m, tile_n]``."""
    if shape.scale_after_max:
        m = ct.maximum(m, ct.max(s, axis=-1, keepdims=True) * scale)
        return m, s * scale - m
    s = s * scale
    m = ct.maximum(m, ct.max(s, axis=-1, keepdims=True))
    return m, s - m


@ct.function
def score(shape: Any, place: Any, q: Any, k: Any, block: Any, masked: ConstBool) -> Any:
    """Scores of one block of keys, without their scale, ``[tile_m, tile_n]``; -inf where a query does not see a key."""
    s = multiply_keys(shape, place, q, k, block)
    if masked:
        s = ct.where(is_visible(shape, place, block), s, -math.inf)
    return s


@ct.function
def weigh(shape: Any, place: Any, q: Any, k: Any, scale: Any, rows: Any, block: Any, masked: ConstBool) -> Any:
    """Weights of one block of keys, 16-bit ``[tile_m, tile_n]``, and the rows rescaled to the new maximum."""
    s = score(shape, place, q, k, block, masked)
    m, shifted = shift(shape, s, rows.m, scale)
    p = power(shape, shifted, False)  # [tile_m, tile_n]
    alpha = power(shape, rows.m - m, False)  # [tile_m, 1]
    l = rows.l * alpha + partial_sums(shape, p)  # noqa: E741
    return p.astype(k.dtype), Rows(acc=scaled(shape, rows.acc, alpha), m=m, l=l)


@ct.function
def attend(shape: Any, place: Any, q: Any, k: Any, v: Any, scale: Any, rows: Any, block: Any, masked: ConstBool) -> Any:
    """Take one block of keys into the running softmax."""
    p, rows = weigh(shape, place, q, k, scale, rows, block, masked)
    return Rows(acc=add_values(shape, place, v, p, rows.acc, block), m=rows.m, l=rows.l)


@ct.function
def no_rows(shape: Any) -> Any:
    """The running softmax before any key."""
    return Rows(
        acc=zeros(shape),
        m=ct.full((shape.tile_m, 1), LOWEST, dtype=ct.float32),
        l=ct.full((shape.tile_m, SUMS), 0.0, dtype=ct.float32),
    )


@ct.function
def online_rows(shape: Any, place: Any, q: Any, k: Any, v: Any, scale: Any) -> Any:
    """The softmax of the tile's rows, each block of keys with a maximum of its own."""
    rows = no_rows(shape)
    first, first_masked, end = key_blocks(shape, place)
    for block in range(first, first_masked):
        rows = attend(shape, place, q, k, v, scale, rows, block, False)
    if shape.masked:
        for block in range(first_masked, end):
            rows = attend(shape, place, q, k, v, scale, rows, block, True)
    return rows


# ---------------------------------------------------------------- lazy_max


@ct.function
def take(shape: Any, place: Any, v: Any, s: Any, scale: Any, rows: Any, block: Any) -> Any:
    """Take one block's scores ``[tile_m, tile_n]`` into rows whose maximum stays."""
    shifted = s * scale - rows.m
    if shape.exp2_fma_sixteenths > 0:
        p = exp2_shared(shifted, shape.exp2_fma_sixteenths, shape.flush_to_zero)
    else:
        p = power(shape, shifted, False)
    acc = add_values(shape, place, v, p.astype(v.dtype), rows.acc, block)
    return Rows(acc=acc, m=rows.m, l=rows.l + partial_sums(shape, p))


@ct.function
def take_pair(shape: Any, place: Any, q: Any, k: Any, v: Any, scale: Any, rows: Any, block: Any, step: Any) -> Any:
    """Take a block and the one `step` further, unmasked: the second one's scores come while the first is weighed."""
    s = score(shape, place, q, k, block, False)
    ahead = score(shape, place, q, k, block + step, False)
    rows = take(shape, place, v, s, scale, rows, block)
    return take(shape, place, v, ahead, scale, rows, block + step)


@ct.function
def take_ahead(
    shape: Any, place: Any, q: Any, k: Any, v: Any, s: Any, scale: Any, rows: Any, block: Any, more: Any, step: Any
) -> Any:
    """Take a block, whose scores are s, and `more` unmasked ones: the next one's scores come while one is weighed."""
    for number in range(0, more):
        ahead = score(shape, place, q, k, block + step * (number + 1), False)
        rows = take(shape, place, v, s, scale, rows, block + step * number)
        s = ahead
    return take(shape, place, v, s, scale, rows, block + step * more)


@ct.function
def guess(shape: Any, s: Any, scale: Any) -> Any:
    """The maxima ``[tile_m, 1]`` of some scores, and `headroom`: what weights are relative to."""
    return ct.maximum(ct.max(s, axis=-1, keepdims=True) * scale + shape.headroom, LOWEST)


@ct.function
def lazy_rows(shape: Any, place: Any, q: Any, k: Any, v: Any, scale: Any) -> Any:
    """The softmax of the tile's rows relative to the maxima of one block of keys, right unless `any_too_large`.

    A query that sees any key sees one of that block. So m is at most the row's maximum and `headroom`, and of the
    weights only those underflow that are next to nothing. The first block is such a one; with `diagonal_first` so is
    the first that needs a mask, from which the walk goes down: a tile is then masked once, not twice. A tile that sees
    no key has a block all the same: all of it is masked, and its weights are 0.
    """
    first, first_masked, end = key_blocks(shape, place)
    if shape.diagonal_first:
        start, step, unmasked = first_masked, -1, first_masked - first
    else:
        start, step, unmasked = first, 1, max(first_masked - first - 1, 0)
    s = score(shape, place, q, k, start, shape.masked)
    none = no_rows(shape)
    rows = Rows(acc=none.acc, m=guess(shape, s, scale), l=none.l)
    taken = 1 + unmasked
    if shape.pipeline == AHEAD:
        rows = take_ahead(shape, place, q, k, v, s, scale, rows, start, unmasked, step)
    elif shape.pipeline == APART:
        rows = take(shape, place, v, s, scale, rows, start)
        if unmasked > 0:
            s = score(shape, place, q, k, start + step, False)
            rows = take_ahead(shape, place, q, k, v, s, scale, rows, start + step, unmasked - 1, step)
    else:
        rows = take(shape, place, v, s, scale, rows, start)
        taken = 1
        if shape.pipeline == PAIRS:
            pairs = unmasked // 2
            for pair in range(0, pairs):
                rows = take_pair(shape, place, q, k, v, scale, rows, start + step * (1 + 2 * pair), step)
            taken = 1 + 2 * pairs
        if shape.pipeline == PLAIN or shape.diagonal_first or not shape.masked:
            for number in range(taken, 1 + unmasked):
                block = start + step * number
                rows = take(shape, place, v, score(shape, place, q, k, block, False), scale, rows, block)
            taken = 1 + unmasked
    if shape.masked and (shape.tile_m > shape.tile_n or not shape.diagonal_first):
        for block in range(start + 1 if shape.diagonal_first else start + taken, end):
            rows = take(shape, place, v, score(shape, place, q, k, block, True), scale, rows, block)
    return rows


@ct.function
def piloted_rows(shape: Any, place: Any, q: Any, k: Any, v: Any, scale: Any) -> Any:
    """As `lazy_rows`, relative to the maxima of the first keys of that block, which are scored once more for them.

    The block itself then goes through the loops with all others. Where it is taken before them, tileiras gives it one
    buffer of its own for its keys, then its values, then the output: each is loaded only when the one before is used,
    and the loops have less shared memory for loads ahead.
    """
    first, first_masked, end = key_blocks(shape, place)
    pilot = pilot_of(shape)
    start = first_masked if shape.diagonal_first else first
    s = score(pilot, place, q, k, start * (shape.tile_n // pilot.tile_n), shape.masked)
    m = guess(shape, s, scale)
    none = no_rows(shape)
    # 0 times the maxima, and not zeros: what it knows to be zero tileiras sets in the loop, register by register, for
    # its first round, and so selects between that and the sum in every round.
    rows = Rows(acc=scaled(shape, none.acc, ct.abs(m)), m=m, l=none.l)
    begin = first
    if shape.pipeline == PILOT_PAIRS:
        pairs = (first_masked - first) // 2
        for pair in range(0, pairs):
            rows = take_pair(shape, place, q, k, v, scale, rows, first + 2 * pair, 1)
        begin = first + 2 * pairs
    if shape.pipeline == PILOT or not shape.masked:
        for block in range(begin, first_masked):
            rows = take(shape, place, v, score(shape, place, q, k, block, False), scale, rows, block)
        begin = first_masked
    if shape.masked:
        for block in range(begin, end):
            rows = take(shape, place, v, score(shape, place, q, k, block, True), scale, rows, block)
    return rows


@ct.function
def redone_rows(shape: Any, place: Any, q: Any, k: Any, v: Any, scale: Any) -> Any:
    """As `online_rows`, in one loop: it is rare, and code for it alone."""
    rows = no_rows(shape)
    first, _, end = key_blocks(shape, place)
    for block in range(first, end):
        rows = attend(shape, place, q, k, v, scale, rows, block, shape.masked)
    return rows


@ct.function
def row_sum_or_nan(shape: Any, rows: Any) -> Any:
    """`row_sum`, but NaN for a row whose outputs do not add up to a number."""
    # 0 times a sum that is not finite is NaN. To add is twice as fast as to compare, and one sum across threads serves
    # both. Of partial ones a thread has four, each a chain of additions; one a row would be two chains, twice as long.
    return row_sum(rows.l + 0.0 * added_up(shape, rows.acc))


@ct.function
def any_too_large(l: Any) -> Any:  # noqa: E741
    """Whether any row's sum of weights ``[tile_m, 1]`` is near overflow, or NaN."""
    return not ct.max(l, propagate_nan=True) < LARGEST_SUM


# ---------------------------------------------------------------- results


@ct.function
def store_rows(shape: Any, place: Any, out: Any, lse: Any, rows: Any, l: Any) -> None:  # noqa: E741
    """Store what the rows come to, out and lse; l is their sum of weights, ``[tile_m, 1]``."""
    store_out(shape, place, out, rows.acc, l)
    log_sum = ct.where(l == 0.0, -math.inf, (rows.m + power(shape, l, True)) * shape.ln_base)
    log_sum = log_sum.reshape((1, 1, shape.tile_m))
    # Without TMA: of a single row (B = Hq = 1) its store clips at 16 bytes, and so writes past the end of lse.
    ct.store(lse, (place.batch, place.head, place.tile), log_sum, allow_tma=False)


@ct.function
def forward_tile(shape: Any, place: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: Any) -> None:
    """q ``[B, Hq, Sq, D]``, k and v ``[B, Hkv, Skv, D]`` -> one tile of out and of lse."""
    queries = load_q(shape, place, q)
    if shape.lazy_max:
        if shape.pipeline == PILOT or shape.pipeline == PILOT_PAIRS:
            rows = piloted_rows(shape, place, queries, k, v, scale)
        else:
            rows = lazy_rows(shape, place, queries, k, v, scale)
        l = row_sum_or_nan(shape, rows)  # noqa: E741
        # Before the store: after it, what the branch reads would keep shared memory from the loops.
        if any_too_large(l):
            rows = redone_rows(shape, place, queries, k, v, scale)
            l = row_sum(rows.l)  # noqa: E741
        store_rows(shape, place, out, lse, rows, l)
    else:
        rows = online_rows(shape, place, queries, k, v, scale)
        store_rows(shape, place, out, lse, rows, row_sum(rows.l))


@ct.function
def forward_tiles(shape: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: Any) -> None:
    """All that one block does."""
    if shape.static_grid:
        tiles = ct.cdiv(q.shape[2], shape.tile_m) * q.shape[1] * q.shape[0]
        # Divided once, not for each tile: each of the three roles that warps take would, and its next load wait for it.
        number = digits_of(shape, q, ct.bid(0))
        step = digits_of(shape, q, ct.num_blocks(0))
        for _ in range(ct.bid(0), tiles, ct.num_blocks(0)):
            forward_tile(shape, place_tile(shape, q, k, number, True, shape.grouped), q, k, v, out, lse, scale)
            number = add_digits(shape, q, number, step)
    elif shape.linear_grid:
        forward_tile(shape, find_place(shape, q, k), q, k, v, out, lse, scale)
    else:
        forward_tile(shape, place_in_grid(shape, q, k), q, k, v, out, lse, scale)


@ct.function
def hint(latency: Any) -> Any:
    """A latency as `ct.load` takes it: None for 0, as a kernel has no constant None."""
    if latency == 0:
        return None
    return latency


@ct.kernel
def forward(
    q: Array32, k: Array32, v: Array32, out: Array32, lse: ct.Array, scale: float,
    tile_m: ConstInt, tile_n: ConstInt, tile_d: ConstInt, tail_d: ConstInt, causal: ConstBool, masked: ConstBool,
    heads_together: ConstInt, spanning: ConstBool, grouped: ConstBool, linear_grid: ConstBool, sign: ConstInt,
    k_latency: ConstInt, v_latency: ConstInt, tma: ConstBool,
    exp2: ConstBool, flush_to_zero: ConstBool, scale_after_max: ConstBool, k_transposed: ConstBool,
    approximate_division: ConstBool, ln_base: ConstFloat,
    lazy_max: ConstBool, headroom: ConstFloat, diagonal_first: ConstBool, pipeline: ConstInt, static_grid: ConstBool,
    exp2_fma_sixteenths: ConstInt, q_in_registers: ConstBool,
) -> None:  # fmt: skip
    """out and lse of attention, for arrays whose offsets fit 31 bits; arguments as in `Shape` and `forward_tile`."""
    shape = Shape(
        tile_m=tile_m, tile_n=tile_n, tile_d=tile_d, tail_d=tail_d, causal=causal, masked=masked,
        heads_together=heads_together, spanning=spanning, grouped=grouped, linear_grid=linear_grid, sign=sign,
        k_latency=hint(k_latency), v_latency=hint(v_latency), tma=tma,
        exp2=exp2, flush_to_zero=flush_to_zero, scale_after_max=scale_after_max, k_transposed=k_transposed,
        approximate_division=approximate_division, ln_base=ln_base,
        lazy_max=lazy_max, headroom=headroom, diagonal_first=diagonal_first, pipeline=pipeline, static_grid=static_grid,
        exp2_fma_sixteenths=exp2_fma_sixteenths, q_in_registers=q_in_registers,
    )  # fmt: skip
    forward_tiles(shape, q, k, v, out, lse, scale)


@ct.kernel
def forward_64bit(
    q: Array64, k: Array64, v: Array64, out: Array64, lse: Rows64, scale: float,
    tile_m: ConstInt, tile_n: ConstInt, tile_d: ConstInt, tail_d: ConstInt, causal: ConstBool, masked: ConstBool,
    heads_together: ConstInt, spanning: ConstBool, grouped: ConstBool, linear_grid: ConstBool, sign: ConstInt,
    k_latency: ConstInt, v_latency: ConstInt, tma: ConstBool,
    exp2: ConstBool, flush_to_zero: ConstBool, scale_after_max: ConstBool, k_transposed: ConstBool,
    approximate_division: ConstBool, ln_base: ConstFloat,
    lazy_max: ConstBool, headroom: ConstFloat, diagonal_first: ConstBool, pipeline: ConstInt, static_grid: ConstBool,
    exp2_fma_sixteenths: ConstInt, q_in_registers: ConstBool,
) -> None:  # fmt: skip
    """`forward` for larger arrays: shapes, strides and offsets in 64 bit."""
    shape = Shape(
        tile_m=tile_m, tile_n=tile_n, tile_d=tile_d, tail_d=tail_d, causal=causal, masked=masked,
        heads_together=heads_together, spanning=spanning, grouped=grouped, linear_grid=linear_grid, sign=sign,
        k_latency=hint(k_latency), v_latency=hint(v_latency), tma=tma,
        exp2=exp2, flush_to_zero=flush_to_zero, scale_after_max=scale_after_max, k_transposed=k_transposed,
        approximate_division=approximate_division, ln_base=ln_base,
        lazy_max=lazy_max, headroom=headroom, diagonal_first=diagonal_first, pipeline=pipeline, static_grid=static_grid,
        exp2_fma_sixteenths=exp2_fma_sixteenths, q_in_registers=q_in_registers,
    )  # fmt: skip
    forward_tiles(shape, q, k, v, out, lse, scale)
