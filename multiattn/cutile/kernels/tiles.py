"""Shared by the forward and the backward kernels: annotations, where a tile lives, and which keys its rows see."""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.tile as ct

ConstBool = ct.Constant[bool]
ConstInt = ct.Constant[int]
# head_dim is static: else a D that is no multiple of 16 is loaded element by element on sm80 to sm89 (seen in the SASS
# at D=40: 288 LDG; static: 24 LDGSTS).
Array32 = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Array64 = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,), index_dtype=ct.int64)]
Vectors32 = ct.Array
Vectors64 = ct.IndexedWithInt64[ct.Array]
Tuple32 = tuple[Vectors32, ...]
Tuple64 = tuple[Vectors64, ...]
"""Any number of arrays. None is no parameter at all, and changes no other's place."""
IN_64_BITS = {Array32: Array64, Vectors32: Vectors64, Tuple32: Tuple64}
"""Each annotation of an array with its counterpart whose shape, strides and offsets take 64 bits."""

Reach = tuple[int, ...]
"""`Place.reach`: two numbers or none."""
Numbers = tuple[int, ...]
"""The numbers of an `Order`."""
Derived = tuple[float, ...]
"""With arrays behind them, `Place.aux`."""

ZERO = ct.PaddingMode.ZERO


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the block's queries and the keys they see live: the one spot that knows about batches and heads."""

    batch: Any
    head: Any
    head_kv: Any
    tile: Any
    seq_q: Any
    seq_kv: Any
    reach: Any
    """The keys before and after its own that a query sees, of a two-sided mask; else an empty tuple."""
    aux: Any
    """The numbers and arrays that a program of scores reads; else an empty tuple."""
    lists: Any = ()
    """The arrays of a block mask (`walk`)."""
    sees_all: Any = None
    """True where the block of keys at hand is full, although it is masked as partial ones are."""
    sequence: Any = None
    """The `packed.Sequence` of a packed batch: `batch` is then 0, and all else but tiles with `cut` is within it."""
    query: Any = None
    """The query of each row ``[tile_m, 1]``, where a tile's rows are of several heads: `head` is such a tile, too."""
    group: Any = None
    """The number of these heads, `entry` the first index of the rows in q, `result` that in results."""
    entry: Any = None
    result: Any = None
    cache: Any = ()
    """Lengths of keys, then the page table, where queries start and `scales`, as far as there are any."""
    first_key: Any = None
    """The first key that any row sees, of a cache with a window: what lies before it may be freed."""
    scales: Any = ()
    """The arrays of scales of a cache of 8-bit numbers (`scaling`): of keys, and of values."""
    key_size: Any = None
    """The scale of a head's keys, where each head has one: its size, which is not 0, and its sign, which may be."""
    key_sign: Any = None
    tops: Any = ()
    """The array of the largest score of each row, which is like lse; of none where nobody asks."""
    blocks: Any = None
    """The `walk.Blocks` of a tile that is told them, of a part of the keys; None for those that it sees."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of tiles, in numbers that only a launch knows. Tiles of a section of heads advance together."""

    together: Any
    """Heads of a section, of all its batch entries."""
    by_together: Any
    entries: Any
    """log2 of the batch entries of a section: a power of two."""
    heads: Any
    """Heads of one of these."""
    sections: Any
    """Sections that have all heads of an entry."""
    by_heads: Any
    by_group: Any
    """Heads of q that share one of k."""


@ct.function
def order_of(numbers: Any) -> Any:
    """The order, of the numbers that a launch gives (`multiattn.cutile.launches.order_of`)."""
    return Order(
        together=numbers[0], by_together=numbers[1:3], entries=numbers[3], heads=numbers[4], sections=numbers[5],
        by_heads=numbers[6:8], by_group=numbers[8:10],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Digits:
    """A tile's number, as one counts tiles: heads of a section, tiles of a head, sections of heads, and of entries."""

    member: Any
    tile: Any
    section: Any
    batch: Any


@ct.function
def quotient(const: Any, number: Any, divisor: Any, by: Any) -> Any:
    """``number // divisor``, of a divisor that only a launch knows; `by` is what stands for it.

    A division takes 40 instructions that wait for each other, and no load begins before the place is known. A product
    and a shift do for numbers below 2^29, of which a grid that numbers all tiles may have more.
    """
    if const.linear_grid:
        return number // divisor
    return ct.astype((ct.astype(number, ct.int64) * by[0]) >> by[1], ct.int32)


@ct.function
def batch_of(const: Any, place: Any) -> Any:
    """The batch entry as callers count them: of a packed batch the sequence."""
    if const.packed:
        return place.sequence.number
    return place.batch


@ct.function
def shared_head(const: Any, q: Any, k: Any, head: Any, order: Any) -> Any:
    """The head of k that a head of q reads."""
    return quotient(const, head, q.shape[1] // k.shape[1], order.by_group)


@ct.function
def heads_of_keys(const: Any, k: Any) -> Any:
    """The heads of k, each counted once for each of its shares."""
    heads = k.shape[1]
    if const.shares > 1:
        heads = heads * const.shares
    return heads


@ct.function
def head_of_share(const: Any, share: Any) -> Any:
    """The head of k of a share."""
    head = share
    if const.shares > 1:
        head = share // const.shares
    return head


@ct.function
def find_place(const: Any, q: Any, k: Any, reach: Any, order: Any, aux: Any) -> Any:
    """The tile of queries that a block owns, in a grid that numbers the tiles of all heads."""
    number = digits_of(const, q, ct.bid(1) * ct.num_blocks(0) + ct.bid(0), order)
    return place_tile(const, q, k, reach, order, aux, number, False)


@ct.function
def digits_of(const: Any, q: Any, number: Any, order: Any) -> Any:
    """The digits of a tile's number; those of all heads count on from 0."""
    tiles = ct.cdiv(q.shape[2], const.tile_m) * order.together
    section = number // tiles
    rest = number - section * tiles
    tile = rest // order.together
    batch = section // order.sections
    return Digits(member=rest - tile * order.together, tile=tile, section=section - batch * order.sections, batch=batch)


@ct.function
def carry_of(digit: Any, base: Any) -> Any:
    """1 for a digit that is not below its base, else 0; no branch, which would part the warps."""
    return 1 - max(0, min(1, base - digit))


@ct.function
def add_digits(const: Any, q: Any, number: Any, step: Any, order: Any) -> Any:
    """The digits of a sum, without dividing: of two numbers that both have theirs."""
    tiles = ct.cdiv(q.shape[2], const.tile_m)
    member = number.member + step.member
    into_tile = carry_of(member, order.together)
    tile = number.tile + step.tile + into_tile
    into_section = carry_of(tile, tiles)
    section = number.section + step.section + into_section
    into_batch = carry_of(section, order.sections)
    return Digits(
        member=member - into_tile * order.together,
        tile=tile - into_section * tiles,
        section=section - into_batch * order.sections,
        batch=number.batch + step.batch + into_batch,
    )


@ct.function
def place_tile(
    const: Any, q: Any, k: Any, reach: Any, order: Any, aux: Any, number: Any, static_grid: ConstBool
) -> Any:
    """Where the tile of queries of a number, in digits, lives.

    Heads of a section advance together, so that blocks that run at one time share keys in L2. Banded: the last
    tiles, which see most keys, go first, and the short ones fill the tail. Of a static grid each section of heads
    begins one tile further than the one before: a block takes every n-th tile, and where n is a multiple of a section's
    tiles all of a block's would else be of one length.
    """
    tile = number.tile
    if const.banded:
        tiles = ct.cdiv(q.shape[2], const.tile_m)
        if static_grid:
            tile = (tile + number.batch * order.sections + number.section) % tiles
        tile = tiles - 1 - tile
    own = number.member >> order.entries
    head = number.section * order.heads + own
    batch = (number.batch << order.entries) + (number.member - (own << order.entries))
    return Place(
        batch=batch, head=head, head_kv=shared_head(const, q, k, head, order), tile=tile, seq_q=q.shape[2],
        seq_kv=k.shape[2], reach=reach, aux=aux,
    )  # fmt: skip


@ct.function
def place_in_grid(const: Any, q: Any, k: Any, reach: Any, order: Any, aux: Any) -> Any:
    """The tile that a block owns, in about the order of `place_tile`: tiles of a section in x, sections in y and z."""
    tile = quotient(const, ct.bid(0), order.together, order.by_together)
    member = ct.bid(0) - tile * order.together
    if const.banded:
        tile = ct.cdiv(q.shape[2], const.tile_m) - 1 - tile
    heads = q.shape[1]
    batch_head = (ct.bid(2) * ct.num_blocks(1) + ct.bid(1)) * order.together + member
    batch = quotient(const, batch_head, heads, order.by_heads)
    head = batch_head - batch * heads
    return Place(
        batch=batch, head=head, head_kv=shared_head(const, q, k, head, order), tile=tile, seq_q=q.shape[2],
        seq_kv=k.shape[2], reach=reach, aux=aux,
    )  # fmt: skip


@ct.function
def load_part(const: Any, array: Any, index: Any, rows: Any, columns: Any, latency: Any) -> Any:
    """A tile of one head's rows, ``[rows, columns]``, with zeros beyond the ends. With `cut` its index has a row."""
    shape = (1, 1, rows, columns)
    if const.cut:
        tile = view_of(const, array, shape, (1, 1, 1, columns)).load(index, latency=latency, allow_tma=const.tma)
    else:
        tile = ct.load(array, index, shape, padding_mode=ZERO, latency=latency, allow_tma=const.tma)
    return tile.reshape((rows, columns))


@ct.function
def view_of(const: Any, array: Any, shape: Any, steps: Any) -> Any:
    """An array in tiles; with `cut` they begin at any row, in `steps` that are the shape but for that."""
    return array.tiled_view(shape, padding_mode=ZERO, traversal_steps=steps) if const.cut else array.tiled_view(shape)


# ---------------------------------------------------------------- rows of tiles


@ct.function
def own_tile(const: Any, place: Any) -> Any:
    """The tile that a block owns, in arrays that it has. With `cut` these are of that tile alone."""
    tile = place.tile
    if const.cut:
        tile = 0
    return tile


@ct.function
def span(const: Any, place: Any, tile: Any, of_keys: ConstBool) -> Any:
    """The first row of a tile of queries or of keys in its sequence, and where rows end; with `cut` the tile's own."""
    size, end = (const.tile_n, place.seq_kv) if of_keys else (const.tile_m, place.seq_q)
    first = tile * size
    if const.cut:
        first = first - (place.sequence.offset_kv if of_keys else place.sequence.offset_q)
        first, end = max(first, 0), min(first + size, end)
    return first, end


# ---------------------------------------------------------------- the mask


@ct.function
def positions(const: Any, place: Any, block: Any) -> Any:
    """Positions of the queries ``[tile_m, 1]``, and of a block's keys ``[1, tile_n]``.

    With `cut` rows of a tile that are another's have positions behind the sequence.
    """
    if place.query is None:
        first_row, end_of_rows = span(const, place, place.tile, False)
        row = first_row + ct.arange(const.tile_m, dtype=ct.int32)[:, None]
    else:
        row = place.query
    first_col, end_of_cols = span(const, place, block, True)
    col = first_col + ct.arange(const.tile_n, dtype=ct.int32)[None, :]
    if const.cut:
        row, col = ct.where(row < end_of_rows, row, place.seq_q), ct.where(col < end_of_cols, col, place.seq_kv)
    return row, col


@ct.function
def is_visible(const: Any, place: Any, block: Any) -> Any:
    """The keys of a block that each query sees, bool ``[tile_m, tile_n]``; the last query is level with the last key.

    Causal needs no look at the end: the last query sees the last key, and of rows beyond it nothing is kept.
    """
    row, col = positions(const, place, block)
    if const.two_sided:
        before, after = place.reach
        level = row + (place.seq_kv - place.seq_q)
        return (col >= level - before) & (col <= ct.minimum(level + after, place.seq_kv - 1))
    if const.banded:
        return col <= row + (place.seq_kv - place.seq_q)
    return col < place.seq_kv


@ct.function
def is_visible_in_part(const: Any, place: Any, block: Any, transposed: ConstBool) -> Any:
    """The keys of a partial block that each query sees by the mask of a program; None for all, where it has none.

    Bool ``[tile_m, tile_n]``, or transposed.
    """
    if const.score is None or const.score.mask is None:
        return None
    row, col = positions(const, place, block)
    if transposed:
        row, col = row.transpose(), col.transpose()
    seen = const.score.mask(batch_of(const, place), place.head, row, col, place.seq_q, place.seq_kv, place.aux)
    if place.sees_all is not None:
        seen = seen | place.sees_all
    return seen


@ct.function
def has_tail(const: Any) -> Any:
    """True if the mask of a program hides some of the last keys."""
    return const.score is not None and const.score.tail is not None


@ct.function
def seen_keys(const: Any, place: Any, block: Any, masked: ConstBool, edges: ConstBool) -> Any:
    """The keys of a block that each query sees, bool ``[tile_m, tile_n]``; None for all.

    `masked`: it is one of those that need a mask. With a block mask these are partial, and with `edges` full ones need
    that of the band and of the end, too.
    """
    seen = None
    if const.blocks is None:
        if masked:
            seen = is_visible(const, place, block)
            if has_tail(const):
                seen = both(seen, is_visible_in_part(const, place, block, False))
    else:
        if masked:
            seen = is_visible_in_part(const, place, block, False)
        if edges:
            seen = both(seen, is_visible(const, place, block))
    return seen


@ct.function
def both(one: Any, other: Any) -> Any:
    """Where both of two tiles are true; None is true everywhere."""
    if one is None:
        return other
    if other is None:
        return one
    return one & other


@ct.function
def is_query(const: Any, place: Any) -> Any:
    """The rows of a tile of queries that there are, bool ``[1, tile_m]``."""
    first, end = span(const, place, place.tile, False)
    return (first + ct.arange(const.tile_m, dtype=ct.int32) < end)[None, :]


@ct.function
def is_key(const: Any, place: Any, block: Any) -> Any:
    """The rows of a block of keys that there are, bool ``[tile_n, 1]``; of a cache with a window, that any row sees."""
    first, end = span(const, place, block, True)
    key = first + ct.arange(const.tile_n, dtype=ct.int32)
    there = key < end
    if place.first_key is not None:
        there = there & (key >= place.first_key)
    return there[:, None]
