"""The blocks that a tile walks over: of a band, those between its edges; of a block mask, those that its lists name.

`Place.lists` has counts and indices of partial blocks, then of full ones, `const.blocks` how tiles lie in blocks. The
tiles of one block come one after another, each list's are numbered from 0. A number beyond the count gives any tile.
"""

from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.tiles import ConstBool, carry_of, has_tail, span


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks that a tile walks over, from `begin` to `end`; those from `full_begin` to `full_end` need no mask.

    With a block mask these are numbers in its lists, those of full blocks first: `full_block` and `masked_block` say
    which blocks they are.
    """

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@ct.function
def first_query(const: Any, place: Any) -> Any:
    """The query of a tile's first row."""
    row = place.tile * const.tile_m
    if place.query is not None:
        row = row // place.group
    return row


@ct.function
def behind_queries(const: Any, place: Any, first: Any) -> Any:
    """The query behind that of a tile's last row, or one further on."""
    if place.query is None:
        behind = first + const.tile_m
    else:
        behind = (place.tile * const.tile_m + (const.tile_m - 1)) // place.group + 1
    return behind


@ct.function
def key_blocks(const: Any, place: Any) -> Any:
    """The blocks of keys that a tile of queries walks over.

    Causal, they need a mask from the diagonal on, and full the last one where it is ragged.
    """
    if const.blocks is not None:
        return listed_blocks(const, place)
    offset = place.seq_kv - place.seq_q
    first_row = first_query(const, place)
    if const.two_sided:
        before, after = place.reach
        first, last = first_row + offset, min(behind_queries(const, place, first_row), place.seq_q) - 1 + offset
        return blocks_of_band(first, last, before, after, place.seq_kv, const.tile_n)
    seen_by_first_row = seen_by_last_row = place.seq_kv
    if const.banded:
        if place.query is None:
            seen_by_first_row = max(0, min(first_row + offset + 1, place.seq_kv))
            seen_by_last_row = max(0, min(first_row + offset + const.tile_m, place.seq_kv))
        else:  # queries that there are see no key behind the end
            seen_by_first_row = max(0, first_row + offset + 1)
            last_row = min(behind_queries(const, place, first_row) - 1, place.seq_q - 1)
            seen_by_last_row = max(0, last_row + offset + 1)
    return Blocks(
        begin=0,
        full_begin=0,
        full_end=seen_by_first_row // const.tile_n,
        end=ct.cdiv(seen_by_last_row, const.tile_n),
    )


@ct.function
def with_tail(const: Any, place: Any, blocks: Any) -> Any:
    """The blocks of a tile, of which those with keys that the program's mask may hide need it."""
    if has_tail(const):
        tail = const.score.tail(0, 0, 0, 0, 0, 0, place.aux).astype(ct.int32)
        full_end = min(blocks.full_end, max(0, place.seq_kv - tail) // const.tile_n)
        blocks = replace(blocks, full_end=max(blocks.full_begin, full_end))
    return blocks


@ct.function
def own_blocks(const: Any, blocks: Any) -> Any:
    """The blocks of a split: the first ones have a block more where they cannot all have as many."""
    if const.divided:
        split, splits = ct.bid(2), ct.num_blocks(2)
        count = blocks.end - blocks.begin
        share = count // splits
        more = count - share * splits
        begin = blocks.begin + split * share + min(split, more)
        end = begin + share + max(0, min(1, more - split))
        full_begin = max(begin, min(blocks.full_begin, end))
        full_end = max(full_begin, min(blocks.full_end, end))
        blocks = Blocks(begin=begin, full_begin=full_begin, full_end=full_end, end=end)
    return blocks


@ct.function
def query_blocks(const: Any, place: Any) -> Any:
    """The blocks of queries that a tile of keys walks over; causal, those on the diagonal come first.

    A key beyond the end needs no mask: what it gets is not stored. Nor does a query there: its q and dout are zeros.
    With `ragged_queries` the last block needs a mask all the same.
    """
    if const.blocks is not None:
        return listed_blocks(const, place)
    end = ct.cdiv(place.seq_q, const.tile_m)
    if const.two_sided:
        after, before = place.reach
        first = place.tile * const.tile_n
        last = min(first + const.tile_n, place.seq_kv) - 1
        offset = place.seq_kv - place.seq_q
        return blocks_of_band(first - offset, last - offset, before, after, place.seq_q, const.tile_m)
    begin, full_begin, full_end = 0, 0, end
    if const.banded:
        first_row = max(0, place.tile * const.tile_n - (place.seq_kv - place.seq_q))
        first_full_row = max(0, place.tile * const.tile_n + (const.tile_n - 1) - (place.seq_kv - place.seq_q))
        begin, full_begin = first_row // const.tile_m, min(ct.cdiv(first_full_row, const.tile_m), end)
    if const.ragged_queries:
        full_end = max(full_begin, place.seq_q // const.tile_m)
    return Blocks(begin=begin, full_begin=full_begin, full_end=full_end, end=end)


@ct.function
def blocks_of_band(first: Any, last: Any, before: Any, after: Any, length: Any, size: Any) -> Any:
    """The blocks of `size`, of a sequence of `length`, that are seen from the places from `first` to `last` of it.

    Each sees from `before` places before its own to `after` behind it. `full_begin` is a block of the sequence even
    where no block is full.
    """
    begin = max(0, first - before) // size
    end = ct.cdiv(max(0, min(last + after + 1, length)), size)
    full_begin = ct.cdiv(max(0, last - before), size)
    full = max(0, max(0, min(first + after + 1, length)) // size - full_begin)
    full_begin = min(full_begin, max(0, end - 1))
    return Blocks(begin=begin, full_begin=full_begin, full_end=full_begin + full, end=end)


@ct.function
def listed_blocks(const: Any, place: Any) -> Any:
    """The blocks that a block mask lists: full ones, then partial ones."""
    full = count_full(const, place)
    return Blocks(begin=0, full_begin=0, full_end=full, end=full + count_partial(const, place))


@ct.function
def full_block(const: Any, place: Any, number: Any) -> Any:
    """The block of a number from `full_begin` to `full_end`."""
    if const.blocks is not None:
        return full_tile(const, place, number)
    return number


@ct.function
def has_two_edges(const: Any) -> Any:
    """True if blocks that need a mask may lie on both sides of the full ones."""
    return const.blocks is None and (const.two_sided or const.ragged_queries)


@ct.function
def masked_numbers(const: Any, blocks: Any) -> Any:
    """(first, end) of the numbers of blocks that need a mask: one loop for both edges of a band."""
    first, end = blocks.full_end, blocks.end
    if has_two_edges(const):
        first, end = blocks.begin, blocks.end - (blocks.full_end - blocks.full_begin)
    return first, end


@ct.function
def masked_block(const: Any, place: Any, blocks: Any, number: Any) -> Any:
    """The block of a number: with two edges, the full blocks between them are passed over."""
    if const.blocks is not None:
        number = partial_tile(const, place, number - blocks.full_end)
    elif has_two_edges(const):
        number = number + carry_of(number, blocks.full_begin) * (blocks.full_end - blocks.full_begin)
    return number


# ---------------------------------------------------------------- lists


@ct.function
def list_row(const: Any, place: Any) -> Any:
    """The row of lists that a place's tile has. Of a packed batch each sequence has its own, behind one another's."""
    row = place.tile // const.blocks.own
    if const.cut:
        row = row + place.sequence.number
    return row


@ct.function
def count_tiles(const: Any, place: Any, counts: Any) -> Any:
    """Tiles that the row of blocks of a place's tile lists; none where a sequence has no queries or no keys.

    So has one that is not the caller's but the rows around all: it has no lists.
    """
    mask = None
    if const.cut:
        mask = min(place.seq_q, place.seq_kv) > 0
    index = (place.batch, place.head, list_row(const, place))
    return ct.gather(counts, index, mask=mask, check_bounds=False) * const.blocks.walked


@ct.function
def listed_tile(const: Any, place: Any, indices: Any, number: Any) -> Any:
    """The tile of a number, of those that the row lists."""
    row, entry = list_row(const, place), number // const.blocks.walked
    block = ct.gather(indices, (place.batch, place.head, row, entry), check_bounds=False)
    return block * const.blocks.walked + number % const.blocks.walked


@ct.function
def count_full(const: Any, place: Any) -> Any:
    """Tiles of full blocks."""
    if const.blocks.has_full:
        return count_tiles(const, place, place.lists[2])
    return 0


@ct.function
def count_partial(const: Any, place: Any) -> Any:
    """Tiles of partial blocks."""
    return count_tiles(const, place, place.lists[0])


@ct.function
def full_tile(const: Any, place: Any, number: Any) -> Any:
    """A tile of a full block; without such blocks never asked for."""
    if const.blocks.has_full:
        return listed_tile(const, place, place.lists[3], number)
    return number


@ct.function
def partial_tile(const: Any, place: Any, number: Any) -> Any:
    """A tile of a partial block."""
    return listed_tile(const, place, place.lists[1], number)


@ct.function
def any_tile(const: Any, place: Any, number: Any, full: Any) -> Any:
    """The tile of a number that counts `full` tiles of full blocks, then those of partial ones."""
    tile = partial_tile(const, place, max(number - full, 0))
    if const.blocks.has_full:
        is_full = min(max(full - number, 0), 1)
        tile = is_full * full_tile(const, place, number) + (1 - is_full) * tile
    return tile


@ct.function
def inside(const: Any, place: Any, tile: Any, of_keys: ConstBool) -> Any:
    """The tile to load in place of one that a list may have: where the last block is ragged some have nothing.

    With `cut` it is the row that the tile begins at.
    """
    length, size = (place.seq_kv, const.tile_n) if of_keys else (place.seq_q, const.tile_m)
    if const.cut:
        tile, size = span(const, place, tile, of_keys)[0], 1
    if const.blocks is not None:
        tile = max(0, min(tile, ct.cdiv(length, size) - 1))
    return tile
