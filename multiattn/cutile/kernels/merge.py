"""Parts of a forward whose keys are divided among blocks made one: few all at once, many several at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.constants import MergeSplitsConstants
from multiattn.cutile.kernels.forward import LOWEST
from multiattn.cutile.kernels.keys import last_of, number_at
from multiattn.cutile.kernels.parts import APPROX
from multiattn.cutile.kernels.tiles import ZERO, Array32, Tuple32, Vectors32


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The parts of some rows so far, fp32; rows are queries of one head after those of another."""

    acc: Any  # [rows, columns]
    m: Any  # [rows, 1], log2
    l: Any  # [rows, 1]


@ct.function
def of_batch(array: Any, batch: Any, heads: Any) -> Any:
    """The part of an array ``[splits, B * Hq, ...]`` that is a batch entry's: loads end at its last head."""
    return array.slice(1, batch * heads, batch * heads + heads)


@ct.function
def sums_of_part(const: Any, sums: Any, head: Any, query: Any, split: Any) -> Any:
    """The sums of one part of a tile of rows ``[rows, 1]``, -inf behind the last part."""
    index, shape = (min(split, sums.shape[0] - 1), head, query), (1, const.heads, const.queries)
    log_sum = ct.load(sums, index, shape, padding_mode=ZERO, allow_tma=False)
    return ct.where(split < sums.shape[0], log_sum.reshape((const.heads * const.queries, 1)), -math.inf)


@ct.function
def merge_few(const: Any, parts: Any, sums: Any, head: Any, query: Any, column: Any) -> Any:
    """All parts of a tile of rows. Of one without a key nothing counts.

    They are added one by one: that needs no other thread's elements, and gives a row the same bits in tiles of any
    shape. All loads are under way before the first result is needed.
    """
    rows = const.heads * const.queries
    m = ct.full((rows, 1), LOWEST, dtype=ct.float32)
    for split in ct.static_iter(range(const.together)):
        m = ct.maximum(m, sums_of_part(const, sums, head, query, split))
    acc, l = ct.full((rows, const.columns), 0.0, dtype=ct.float32), ct.full((rows, 1), 0.0, dtype=ct.float32)
    for split in ct.static_iter(range(const.together)):
        log_sum = sums_of_part(const, sums, head, query, split)
        index = (min(split, sums.shape[0] - 1), head, query, column)
        shape = (1, const.heads, const.queries, const.columns)
        part = ct.load(parts, index, shape, padding_mode=ZERO, allow_tma=False).reshape((rows, const.columns))
        weight = ct.exp2(log_sum - m)
        acc = acc + ct.where(log_sum > -math.inf, part, 0.0) * weight
        l = l + weight
    return Merged(acc=acc, m=m, l=l)


@ct.function
def merge_some(const: Any, parts: Any, sums: Any, head: Any, query: Any, column: Any, number: Any, merged: Any) -> Any:
    """Take the `number`-th parts of one row, `together` of them. Of one without a key nothing counts."""
    split = number * const.together + ct.arange(const.together, dtype=ct.int32)[:, None]
    log_sum = ct.load(sums, (number, head, query), (const.together, 1, 1), padding_mode=ZERO, allow_tma=False)
    log_sum = ct.where(split < sums.shape[0], log_sum.reshape((const.together, 1)), -math.inf)
    shape = (const.together, 1, 1, const.columns)
    part = ct.load(parts, (number, head, query, column), shape, padding_mode=ZERO, latency=2, allow_tma=False)
    m = ct.maximum(merged.m, ct.max(log_sum, axis=0, keepdims=True))
    alpha, weight = ct.exp2(merged.m - m), ct.exp2(log_sum - m)  # [1, 1], [together, 1]
    part = ct.where(log_sum > -math.inf, part.reshape((const.together, const.columns)), 0.0)
    acc = merged.acc * alpha + ct.sum(part * weight, axis=0, keepdims=True)
    return Merged(acc=acc, m=m, l=merged.l * alpha + ct.sum(weight, axis=0, keepdims=True))


@ct.function
def merge_many(const: Any, parts: Any, sums: Any, head: Any, query: Any, column: Any) -> Any:
    """All parts of one row, several at a time."""
    merged = Merged(
        acc=ct.full((1, const.columns), 0.0, dtype=ct.float32),
        m=ct.full((1, 1), LOWEST, dtype=ct.float32),
        l=ct.full((1, 1), 0.0, dtype=ct.float32),
    )
    for number in range(0, ct.cdiv(sums.shape[0], const.together)):
        merged = merge_some(const, parts, sums, head, query, column, number, merged)
    return merged


@ct.function
def top_of_few(const: Any, maxima: Any, head: Any, query: Any) -> Any:
    """The largest score of each of a tile of rows in all parts ``[rows, 1]``, log2."""
    top = ct.full((const.heads * const.queries, 1), -math.inf, dtype=ct.float32)
    for split in ct.static_iter(range(const.together)):
        top = ct.maximum(top, sums_of_part(const, maxima, head, query, split))
    return top


@ct.function
def top_of_many(const: Any, maxima: Any, head: Any, query: Any) -> Any:
    """As `top_of_few`, of one row."""
    top = ct.full((1, 1), -math.inf, dtype=ct.float32)
    for number in range(0, ct.cdiv(maxima.shape[0], const.together)):
        split = number * const.together + ct.arange(const.together, dtype=ct.int32)[:, None]
        found = ct.load(maxima, (number, head, query), (const.together, 1, 1), padding_mode=ZERO, allow_tma=False)
        found = ct.where(split < maxima.shape[0], found.reshape((const.together, 1)), -math.inf)
        top = ct.maximum(top, ct.max(found, axis=0, keepdims=True))
    return top


@ct.function
def merge_tops(const: Any, tops: Any, maxima: Any, batch: Any, head: Any, query: Any) -> None:
    """The largest score of a tile of rows."""
    maxima = of_batch(maxima, batch, tops.shape[1])
    top = top_of_few(const, maxima, head, query) if const.few else top_of_many(const, maxima, head, query)
    top = (top * const.ln_base).reshape((1, const.heads, const.queries))
    ct.store(tops, (batch, head, query), top, allow_tma=False)


@ct.function
def sinks_of(const: Any, sinks: Any, head: Any) -> Any:
    """The sinks of a tile of rows ``[rows, 1]``, 0 for heads that there are not; log2."""
    row = ct.arange(const.heads * const.queries, dtype=ct.int32)[:, None]
    return ct.gather(sinks, (head * const.heads + row // const.queries,)) * (1.0 / const.ln_base)


@ct.function
def merge_rows(
    const: Any, out: Any, lse: Any, parts: Any, sums: Any, sinks: Any, batch: Any, head: Any, query: Any, column: Any
) -> None:
    """Some columns of a tile of rows of out, and their lse; heads, queries and columns are counted in tiles."""
    parts, sums = of_batch(parts, batch, out.shape[1]), of_batch(sums, batch, out.shape[1])
    if const.few:
        merged = merge_few(const, parts, sums, head, query, column)
    else:
        merged = merge_many(const, parts, sums, head, query, column)
    acc, m, l = merged.acc, merged.m, merged.l
    if const.has_sinks:
        sink = sinks_of(const, sinks[0], head)
        m = ct.maximum(m, sink)
        alpha = ct.exp2(merged.m - m)
        acc, l = acc * alpha, l * alpha + ct.exp2(sink - m)
    o = ct.truediv(acc, ct.where(l == 0.0, 1.0, l), flush_to_zero=True, rounding_mode=APPROX)
    o = o.astype(out.dtype).reshape((1, const.heads, const.queries, const.columns))
    ct.store(out, (batch, head, query, column), o, allow_tma=False)
    if column == 0:
        log_sum = ct.where(l == 0.0, -math.inf, (m + ct.log2(l)) * const.ln_base)
        ct.store(lse, (batch, head, query), log_sum.reshape((1, const.heads, const.queries)), allow_tma=False)


def merge_splits_kernel(const: MergeSplitsConstants) -> Callable[..., None]:
    """out ``[B, Hq, Sq, D]`` and lse of the parts ``[splits, B * Hq, Sq, D]`` that `split_keys` leaves, and their sums.

    Tiles of queries are x of the grid, each with the blocks of its columns, tiles of heads y, batch entries z. starts:
    cu_seqlens_q of packed queries, whose first number is where rows begin, and whose last where they end. As other rows
    are left as they are, and a tile is stored whole, tiles have one query there. tops: the largest score of each
    row, and that in each part; or none.
    """

    def merge_splits(
        out: Array32, lse: Vectors32, parts: Array32, sums: Vectors32, tops: Tuple32, sinks: Tuple32,
        starts: Tuple32,
    ) -> None:  # fmt: skip
        if const.overlapping:
            ct.grid_dependency_control_wait()
        query = ct.bid(0) // const.parts
        column = ct.bid(0) - query * const.parts
        if const.packed_queries:
            if query >= number_at(starts[0], 0) and query < last_of(starts[0]):
                merge_rows(const, out, lse, parts, sums, sinks, ct.bid(2), ct.bid(1), query, column)
                if const.row_max and column == 0:
                    merge_tops(const, tops[0], tops[1], ct.bid(2), ct.bid(1), query)
        else:
            merge_rows(const, out, lse, parts, sums, sinks, ct.bid(2), ct.bid(1), query, column)
            if const.row_max and column == 0:
                merge_tops(const, tops[0], tops[1], ct.bid(2), ct.bid(1), query)

    return merge_splits
