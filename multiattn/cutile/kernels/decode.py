"""The forward of few queries in cuTile: Dao et al., "Flash-Decoding" (https://pytorch.org/blog/flash-decoding/).

With one query a head every key is read for next to no work, so all that counts is how fast the chip reads. Query heads
that share keys are rows of one tile, so keys are read once: row r is query ``r // group`` of head ``r % group``. The
keys that a tile sees are divided among `splits` blocks, enough to fill the chip. Each leaves a softmax of its own part,
divided by its sum of weights, and the log2 of that sum; a second kernel merges the parts: few all at once, in blocks of
several rows, and many several at a time. With one split the first kernel writes results itself.

Keys may be in a cache (`multiattn.sequences`): their lengths, and the pages that have them, are read here alone.
Pages of whole tiles are loaded as they are. Of smaller pages several make a tile, and of any others each row has its
own address. Memory behind the last key holds anything, and so does what lies before a window: scores there are masked
and values replaced by zeros.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import scores, tiles
from multiattn.cutile.kernels.constants import MergeSplitsConstants, SplitKeysConstants
from multiattn.cutile.kernels.forward import LOWEST, RunningSoftmax, no_rows, power, row_sum, shift, with_sink
from multiattn.cutile.kernels.packed import Sequence
from multiattn.cutile.kernels.parts import APPROX, partial_sums
from multiattn.cutile.kernels.tiles import ZERO, Array32, Blocks, ConstBool, Derived, Place, Reach, Tuple32, Vectors32


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Where a block of keys is, in k as in v."""

    entry: Any
    """The first index of an array: a batch entry or a page; of several pages a tile of them."""
    head: Any
    row: Any
    """The first row of the block, in tiles of `tile_n`; where each row has its own page, the rows ``[tile_n]``."""


# ---------------------------------------------------------------- who am I


@ct.function
def number_at(array: Any, index: Any) -> Any:
    """One of the numbers of a vector."""
    return ct.gather(array, (index,), check_bounds=False)


@ct.function
def last_of(array: Any) -> Any:
    """The last number of a vector."""
    return number_at(array, array.shape[0] - 1)


@ct.function
def find_place(const: Any, q: Any, k: Any, cache: Any, reach: Any, aux: Any) -> Any:
    """The rows that a block owns. Tiles of rows of all sequences are x of the grid, heads of keys y, splits z.

    `cache` has the lengths of keys, then the page table and then where queries start, as far as there are any.
    """
    group = q.shape[1] // k.shape[1]
    batch, tile = ct.bid(0), 0
    if not const.one_tile:
        tiles_of_rows = ct.cdiv(q.shape[2] * group, const.tile_m)
        if const.packed_queries:
            tiles_of_rows = ct.num_blocks(0) // cache[0].shape[0]
        batch = ct.bid(0) // tiles_of_rows
        tile = ct.bid(0) - batch * tiles_of_rows
    offset_q, seq_q, seq_kv = 0, q.shape[2], k.shape[2]
    if const.cached:  # whatever the device says, rows are those that there are
        room = k.shape[2]
        if const.paged:
            room = room * cache[1].shape[1]
        seq_kv = max(0, min(number_at(cache[0], batch), room))
    if const.packed_queries:
        starts = cache[1 + const.paged]
        offset_q = max(0, min(number_at(starts, batch), q.shape[2]))
        seq_q = max(0, min(number_at(starts, batch + 1), q.shape[2]) - offset_q)
    row = tile * const.tile_m + ct.arange(const.tile_m, dtype=ct.int32)[:, None]  # [tile_m, 1]
    query = row // group
    first_key = None
    if const.cached and const.two_sided:
        first_key = max(0, tile * const.tile_m // group + (seq_kv - seq_q) - reach[0])
    return Place(
        batch=batch,
        head=ct.bid(1) * group + (row - query * group),  # [tile_m, 1]
        head_kv=ct.bid(1),
        tile=tile,
        seq_q=seq_q,
        seq_kv=seq_kv,
        reach=reach,
        aux=aux,
        sequence=Sequence(number=batch, offset_q=offset_q, offset_kv=0),
        query=query,
        first_key=first_key,
    )


@ct.function
def seen_blocks(const: Any, q: Any, k: Any, place: Any) -> Any:
    """The blocks of keys that the rows of a tile see, by the first and the last of their queries."""
    group = q.shape[1] // k.shape[1]
    offset = place.seq_kv - place.seq_q
    first = place.tile * const.tile_m // group + offset
    last = min((place.tile * const.tile_m + (const.tile_m - 1)) // group, place.seq_q - 1) + offset
    if const.two_sided:
        before, after = place.reach
        return tiles.blocks_of_band(first, last, before, after, place.seq_kv, const.tile_n)
    seen_by_first = seen_by_last = place.seq_kv
    if const.banded:
        seen_by_first = max(0, first + 1)
        seen_by_last = max(0, last + 1)
    full_end = seen_by_first // const.tile_n
    return Blocks(begin=0, full_begin=0, full_end=full_end, end=ct.cdiv(seen_by_last, const.tile_n))


@ct.function
def own_blocks(const: Any, blocks: Any) -> Any:
    """Those of a split: the first ones have a block more where they cannot all have as many."""
    if not const.divided:
        return blocks
    split, splits = ct.bid(2), ct.num_blocks(2)
    count = blocks.end - blocks.begin
    share = count // splits
    more = count - share * splits
    begin = blocks.begin + split * share + min(split, more)
    end = begin + share + max(0, min(1, more - split))
    full_begin = max(begin, min(blocks.full_begin, end))
    return Blocks(begin=begin, full_begin=full_begin, full_end=max(full_begin, min(blocks.full_end, end)), end=end)


# ---------------------------------------------------------------- loads


@ct.function
def columns(const: Any) -> Any:
    """Those of head_dim, ``[1, tile_d]``."""
    return ct.arange(const.tile_d, dtype=ct.int32)[None, :]


@ct.function
def entry_of(const: Any, place: Any) -> Any:
    """The first index of the tile's rows in q."""
    if const.packed_queries:
        return 0
    return place.batch


@ct.function
def elements(const: Any, place: Any, entry: Any) -> Any:
    """The indices of the tile's rows in an array like q, ``[tile_m, tile_d]``, and those that there are."""
    indices = (entry, place.head, place.query + place.sequence.offset_q, columns(const))
    inside = place.query < place.seq_q
    if const.head_dim < const.tile_d:
        inside = inside & (columns(const) < const.head_dim)
    return indices, inside


@ct.function
def load_q(const: Any, place: Any, q: Any) -> Any:
    """The tile's queries ``[tile_m, tile_d]``, with the sign of the scale; in registers, as no tile of memory is."""
    indices, inside = elements(const, place, entry_of(const, place))
    tile = ct.gather(q, indices, mask=inside, check_bounds=False)
    if const.sign != 1:
        tile = tile * const.sign
    return tile.astype(q.dtype)


@ct.function
def find_keys(const: Any, place: Any, k: Any, cache: Any, block: Any) -> Any:
    """Where a block of keys is. Of pages behind the last key the table says nothing: it is not read there.

    Nor is it of pages before a window, in whose place those of the nearest keys between are loaded. Of a block in one
    page some key is seen.
    """
    if not const.paged:
        return Keys(entry=place.batch, head=place.head_kv, row=block)
    if const.page_rows == const.tile_n:  # one page has all of the block
        if const.page_is_tile:
            page, row = block, 0
        else:
            tiles_of_page = k.shape[2] // const.tile_n
            page = block // tiles_of_page
            row = block - page * tiles_of_page
        entry = ct.gather(cache[1], (place.batch, page), check_bounds=False)
        return Keys(entry=entry, head=place.head_kv, row=row)
    if const.page_rows > 0:
        pages = const.tile_n // const.page_rows
        page = block * pages + ct.arange(pages, dtype=ct.int32)  # [pages]
        if place.first_key is None:
            inside = page * const.page_rows < place.seq_kv
            entry = ct.gather(cache[1], (place.batch, page), mask=inside, check_bounds=False)
        else:
            page = ct.maximum(page, place.first_key // const.page_rows)
            page = ct.minimum(page, (place.seq_kv - 1) // const.page_rows)
            entry = ct.gather(cache[1], (place.batch, page), check_bounds=False)
        return Keys(entry=entry, head=place.head_kv, row=0)
    key = block * const.tile_n + ct.arange(const.tile_n, dtype=ct.int32)  # [tile_n]
    page = key // k.shape[2]
    if place.first_key is None:
        entry = ct.gather(cache[1], (place.batch, page), mask=key < place.seq_kv, check_bounds=False)
    else:
        seen = ct.minimum(ct.maximum(page, place.first_key // k.shape[2]), (place.seq_kv - 1) // k.shape[2])
        entry = ct.gather(cache[1], (place.batch, seen), check_bounds=False)
    return Keys(entry=entry, head=place.head_kv, row=key - page * k.shape[2])


@ct.function
def load_rows(const: Any, place: Any, array: Any, keys: Any, block: Any, masked: ConstBool) -> Any:
    """The rows of a block of keys or values ``[tile_n, tile_d]``."""
    if not const.paged or const.page_rows == const.tile_n:
        index, shape = (keys.entry, keys.head, keys.row, 0), (1, 1, const.tile_n, const.tile_d)
        tile = ct.load(array, index, shape, padding_mode=ZERO, latency=const.latency, allow_tma=const.tma)
    elif const.page_rows > 0:
        index = (keys.entry, ct.Slice(keys.head, 1), ct.Slice(0, const.page_rows), ct.Slice(0, const.tile_d))
        tile = ct.load_advanced_indexing(array, index, padding_mode=ZERO, latency=const.latency, allow_tma=const.tma)
    else:
        inside = columns(const) < const.head_dim
        if masked:
            inside = inside & tiles.is_key(const, place, block)
        index = (keys.entry[:, None], keys.head, keys.row[:, None], columns(const))
        tile = ct.gather(array, index, mask=inside, check_bounds=False, latency=const.latency)
    return tile.reshape((const.tile_n, const.tile_d))


@ct.function
def load_k(const: Any, place: Any, k: Any, keys: Any, block: Any) -> Any:
    """A block of keys, transposed: ``[tile_d, tile_n]``. Scores of what is behind the last key are masked."""
    if const.paged and const.page_rows != const.tile_n:
        return ct.transpose(load_rows(const, place, k, keys, block, False))
    index, shape = (keys.entry, keys.head, 0, keys.row), (1, 1, const.tile_d, const.tile_n)
    tile = ct.load(k, index, shape, order=(0, 1, 3, 2), padding_mode=ZERO, latency=const.latency, allow_tma=const.tma)
    return tile.reshape((const.tile_d, const.tile_n))


@ct.function
def load_v(const: Any, place: Any, v: Any, keys: Any, block: Any, masked: ConstBool) -> Any:
    """A block of values ``[tile_n, tile_d]``, zeros where no row sees any key: 0 times what is there may be NaN."""
    tile = load_rows(const, place, v, keys, block, masked)
    is_gathered = const.paged and const.page_rows == 0  # then they are zeros already
    if const.cached and masked and not is_gathered:
        tile = ct.where(tiles.is_key(const, place, block), tile, 0.0).astype(v.dtype)
    return tile


# ---------------------------------------------------------------- the softmax of a part


@ct.function
def attend(
    const: Any, place: Any, q: Any, k: Any, v: Any, cache: Any, scale: Any, rows: Any, block: Any, masked: ConstBool
) -> Any:
    """Take one block of keys into the running softmax."""
    keys = find_keys(const, place, k, cache, block)
    none = ct.full((const.tile_m, const.tile_n), 0.0, dtype=ct.float32)
    s = ct.mma(q, load_k(const, place, k, keys, block), none)  # [tile_m, tile_n]
    s = scores.modify(const, place, s, block)
    if masked:
        s = ct.where(tiles.is_visible(const, place, block), s, -math.inf)
    m, shifted = shift(const, s, rows.m, scale)
    p = power(const, shifted, False)  # [tile_m, tile_n]
    alpha = power(const, rows.m - m, False)  # [tile_m, 1]
    l = rows.l * alpha + partial_sums(const, p)
    acc = ct.mma(p.astype(v.dtype), load_v(const, place, v, keys, block, masked), rows.acc * alpha)
    return RunningSoftmax(acc=acc, m=m, l=l)


@ct.function
def attend_blocks(const: Any, place: Any, q: Any, k: Any, v: Any, cache: Any, scale: Any, blocks: Any) -> Any:
    """The softmax of the tile's rows over some blocks of keys: the full ones, then those that need a mask."""
    rows = no_rows(const)
    for block in range(blocks.full_begin, blocks.full_end):
        rows = attend(const, place, q, k, v, cache, scale, rows, block, False)
    first, end = tiles.masked_numbers(const, blocks)
    for number in range(first, end):
        block = tiles.masked_block(const, place, blocks, number)
        rows = attend(const, place, q, k, v, cache, scale, rows, block, True)
    return rows


@ct.function
def store_lse(const: Any, place: Any, lse: Any, entry: Any, log_sum: Any) -> None:
    """Store the sums of rows ``[tile_m, 1]``: natural logarithms, or of a part those to the base 2."""
    indices = (entry, place.head, place.query + place.sequence.offset_q)
    ct.scatter(lse, indices, log_sum, mask=place.query < place.seq_q, check_bounds=False)


@ct.function
def split_part(
    const: Any, place: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, cache: Any, scale: Any, blocks: Any,
    entry: Any,
) -> None:  # fmt: skip
    """Attention of the tile's rows over some blocks of keys."""
    rows = attend_blocks(const, place, load_q(const, place, q), k, v, cache, scale, blocks)
    l = row_sum(rows.l)
    if const.has_sinks and not const.divided:
        sink = ct.gather(sinks[0], (place.head,), check_bounds=False) * (1.0 / const.ln_base)  # [tile_m, 1]
        rows, l = with_sink(const, rows, l, sink)
    o = ct.truediv(rows.acc, ct.where(l == 0.0, 1.0, l), flush_to_zero=True, rounding_mode=APPROX)
    indices, inside = elements(const, place, entry)
    ct.scatter(out, indices, o.astype(out.dtype), mask=inside, check_bounds=False)
    log_sum = rows.m + power(const, l, True)
    if not const.divided:
        log_sum = log_sum * const.ln_base
    store_lse(const, place, lse, entry, ct.where(l == 0.0, -math.inf, log_sum))


@ct.function
def attend_tile(
    const: Any, place: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, cache: Any, scale: Any
) -> None:
    """One tile of out and lse; or of one split's part of them, of which there are as many behind each other."""
    blocks = own_blocks(const, seen_blocks(const, q, k, place))
    entry = entry_of(const, place)
    if const.divided:
        entry = ct.bid(2) * q.shape[0] + entry
        if blocks.begin < blocks.end:
            split_part(const, place, q, k, v, out, lse, sinks, cache, scale, blocks, entry)
        else:
            store_lse(const, place, lse, entry, ct.full((const.tile_m, 1), -math.inf, dtype=ct.float32))
    else:
        split_part(const, place, q, k, v, out, lse, sinks, cache, scale, blocks, entry)


def split_keys_kernel(const: SplitKeysConstants) -> Callable[..., None]:
    """out and lse of attention, or with `divided` a part of each for every split, one after another.

    q ``[B, Hq, Sq, D]`` or packed ``[1, Hq, T, D]``, k and v ``[B or pages, Hkv, rows, D]``; sinks: one ``[Hq]``, or
    none; cache: seqlens_kv, page_table and cu_seqlens_q, as far as there are any.
    """

    def split_keys(
        q: Array32, k: Array32, v: Array32, out: Array32, lse: Vectors32, sinks: Tuple32, captured: Tuple32,
        cache: Tuple32, scale: float, reach: Reach, derived: Derived,
    ) -> None:  # fmt: skip
        if const.overlapped:
            ct.grid_dependency_control_launch_dependents()
        place = find_place(const, q, k, cache, reach, derived + captured)
        if const.packed_queries:
            if place.tile * const.tile_m < place.seq_q * (q.shape[1] // k.shape[1]):
                attend_tile(const, place, q, k, v, out, lse, sinks, cache, scale)
        else:
            attend_tile(const, place, q, k, v, out, lse, sinks, cache, scale)

    return split_keys


# ---------------------------------------------------------------- parts made one


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
    are left as they are, and a tile is stored whole, tiles have one query there.
    """

    def merge_splits(
        out: Array32, lse: Vectors32, parts: Array32, sums: Vectors32, sinks: Tuple32, starts: Tuple32
    ) -> None:
        if const.overlapping:
            ct.grid_dependency_control_wait()
        query = ct.bid(0) // const.parts
        column = ct.bid(0) - query * const.parts
        if const.packed_queries:
            if query >= number_at(starts[0], 0) and query < last_of(starts[0]):
                merge_rows(const, out, lse, parts, sums, sinks, ct.bid(2), ct.bid(1), query, column)
        else:
            merge_rows(const, out, lse, parts, sums, sinks, ct.bid(2), ct.bid(1), query, column)

    return merge_splits
