"""Packed batches: the kernel that lists their tiles, and what a block finds in the list.

`multiattn.packed.LIST_FIELDS` says what an entry has. A block takes its sequence out of every array, `Array.slice`: all
that comes after has the sequence's own rows alone, numbered from 0. A load has zeros for rows beyond its end, although
there the next one begins, and a store leaves them. TMA does both: a block makes tensor maps of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.constants import ListTilesConstants
from multiattn.cutile.kernels.tiles import ConstBool, Place, Reach, Tuple32, head_of_share, quotient, shared_head, span

FIELDS = 8
"""Numbers of an entry."""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """A sequence by its number, -1 for an entry without a tile, and its first rows in q and in k."""

    number: Any
    offset_q: Any
    offset_kv: Any


@ct.function
def field(entries: Any, entry: Any, number: Any) -> Any:
    """One of the numbers of an entry."""
    return ct.gather(entries, (entry, number), check_bounds=False)


@ct.function
def find_place(
    const: Any, q: Any, k: Any, entries: Any, own: Any, reach: Any, order: Any, aux: Any, owns_keys: ConstBool
) -> Any:
    """Where the tile lives that a block takes, `own` rows of its sequence.

    Heads are those of k, or shares of them, where it owns keys.

    Entries times heads that advance together are x of the grid, sections of heads y.
    """
    entry = quotient(const, ct.bid(0), order.together, order.by_together)
    head = ct.bid(1) * order.together + (ct.bid(0) - entry * order.together)
    head_kv = head
    if owns_keys:
        head_kv = head_of_share(const, head)
    if not owns_keys:
        head_kv = shared_head(const, q, k, head, order)
    sequence = Sequence(
        number=field(entries, entry, 0), offset_q=field(entries, entry, 2), offset_kv=field(entries, entry, 4)
    )
    row = field(entries, entry, 1)
    if const.cut:
        row = row + (sequence.offset_kv if owns_keys else sequence.offset_q)
    return Place(
        batch=0,
        head=head,
        head_kv=head_kv,
        tile=row // own,
        seq_q=field(entries, entry, 3),
        seq_kv=field(entries, entry, 5),
        reach=reach,
        aux=aux,
        sequence=sequence,
    )


@ct.function
def own_part(const: Any, place: Any, owns_keys: ConstBool) -> Any:
    """The place, with `cut` of the rows of its tile in place of those of its sequence: so no other is loaded or stored.

    Tiles of these start with the first row.
    """
    if const.cut:
        part = place.sequence
        first, end = span(const, place, place.tile, owns_keys)
        if owns_keys:
            place = replace(place, sequence=replace(part, offset_kv=part.offset_kv + first), seq_kv=end - first)
        else:
            place = replace(place, sequence=replace(part, offset_q=part.offset_q + first), seq_q=end - first)
    return place


@ct.function
def queries_of(place: Any, array: Any) -> Any:
    """The sequence's rows of an array like q, or of one like lse; None of none."""
    if array is not None:
        array = array.slice(2, place.sequence.offset_q, place.sequence.offset_q + place.seq_q)
    return array


@ct.function
def keys_of(place: Any, array: Any) -> Any:
    """The sequence's rows of an array like k; None of none."""
    if array is not None:
        array = array.slice(2, place.sequence.offset_kv, place.sequence.offset_kv + place.seq_kv)
    return array


# ---------------------------------------------------------------- the list


@dataclass(frozen=True, kw_only=True)
class Side:
    """Queries or keys of a batch: where sequences start, all rows, and the most rows of one sequence."""

    starts: Any
    rows: Any
    longest: Any


@ct.function
def inside(side: Any, row: Any) -> Any:
    """A row that there is, or the end, whatever an array says."""
    return ct.minimum(ct.maximum(row, 0), side.rows)


@ct.function
def starts_and_lengths(numbers: Any, own: Any, others: Any) -> Any:
    """First rows and lengths of sequences by their numbers, then both on the other side, where a tile has its pairs.

    Rows behind the last sequence are one more, and those before the first another, with nothing on the other side.
    Further numbers have nothing at all.
    """
    last = own.starts.shape[0] - 1
    first = inside(own, ct.gather(own.starts, numbers))  # 0 beyond the end
    end = ct.gather(own.starts, ct.where(numbers == last + 1, 0, numbers + 1))
    end = inside(own, ct.where(numbers == last, own.rows, end))
    length = ct.minimum(ct.maximum(end - first, 0), ct.where(numbers < last, own.longest, own.rows))
    other_first = inside(others, ct.gather(others.starts, numbers))
    other_length = inside(others, ct.gather(others.starts, numbers + 1)) - other_first
    other_length = ct.minimum(ct.maximum(other_length, 0), others.longest)
    # A part of an array starts before the array's end.
    return first, length, ct.where(other_length > 0, other_first, 0), other_length


@ct.function
def count_tiles(const: Any, first: Any, length: Any, tile: Any) -> Any:
    """How many tiles sequences have; with `cut` parts of those of the packed axis."""
    tiles = (length + (tile - 1)) // tile
    if const.cut:
        tiles = ct.where(length > 0, (first + length + (tile - 1)) // tile - first // tile, 0)
    return tiles


@ct.function
def list_one(const: Any, own: Any, others: Any, entries: Any, tile: Any, room: Any, of_keys: ConstBool) -> None:
    """List a group of sequences: every n-th tile of each, of n blocks of the group, and a part of the entries left.

    Sequences with the most rows on the other side come first, as their tiles cost the most. So the first tile of one
    comes behind those of all that have more, or as many and a lower number: nothing is sorted. Counts end with the
    room, which they are below where no sequences overlap.
    """
    lanes = ct.arange(const.group, dtype=ct.int32)
    part, parts = ct.bid(0), ct.num_blocks(0)
    mine = ct.bid(1) * const.group + lanes
    first, length, other_first, other_length = starts_and_lengths(mine, own, others)
    tiles = count_tiles(const, first, length, tile)
    place = ct.full((const.group,), 0, dtype=ct.int32)
    total = 0
    for begin in range(0, own.starts.shape[0] + 1, const.compared):
        theirs = begin + ct.arange(const.compared, dtype=ct.int32)
        their_first, their_length, _, their_cost = starts_and_lengths(theirs, own, others)
        their_tiles = count_tiles(const, their_first, their_length, tile)
        is_level = (their_cost[None, :] == other_length[:, None]) & (theirs[None, :] < mine[:, None])
        is_before = (their_cost[None, :] > other_length[:, None]) | is_level
        place = ct.minimum(place + ct.sum(ct.where(is_before, their_tiles[None, :], 0), axis=1), room)
        total = ct.minimum(total + ct.sum(their_tiles), room)

    offset_q, len_q, offset_kv, len_kv = first, length, other_first, other_length
    if of_keys:
        offset_q, len_q, offset_kv, len_kv = other_first, other_length, first, length
    column = ct.arange(FIELDS, dtype=ct.int32)[None, :]
    entry = ct.where(column == 0, mine[:, None], 0)  # [group, FIELDS]
    entry = ct.where(column == 2, offset_q[:, None], entry)
    entry = ct.where(column == 3, len_q[:, None], entry)
    entry = ct.where(column == 4, offset_kv[:, None], entry)
    entry = ct.where(column == 5, len_kv[:, None], entry)
    for number in range(part, ct.max(tiles), parts):
        its_tile = tiles * 0 + number
        if const.last_first and not of_keys:
            its_tile = tiles - 1 - number
        first_row = its_tile * tile
        if const.cut:
            first_row = ct.maximum(first_row - first % tile, 0)
        row = ct.where(column == 1, first_row[:, None], entry)
        exists = (number < tiles) & (place + number < room)
        ct.scatter(entries, ((place + number)[:, None], column), row, mask=exists[:, None])
    share = ct.bid(1) * parts + part
    for begin in range(total + share * const.group, room, parts * ct.num_blocks(1) * const.group):
        left = begin + lanes
        ct.scatter(entries, (left, 0), -1, mask=left < room)


def list_tiles_kernel(const: ListTilesConstants) -> Callable[..., None]:
    """Before the kernels of a packed batch: the lists of their tiles.

    `starts` are the cu_seqlens of queries and keys; `lists` as many as `const` has tiles of, and `sizes` the rows of q
    and k, the entries of each list that are read, and the most queries and keys of a sequence.
    """

    def list_tiles(starts: Tuple32, lists: Tuple32, sizes: Reach) -> None:
        q = Side(starts=starts[0], rows=sizes[0], longest=sizes[4])
        kv = Side(starts=starts[1], rows=sizes[1], longest=sizes[5])
        if const.query_tile > 0 and const.key_tile > 0:
            if ct.bid(2) == 0:
                list_one(const, q, kv, lists[0], const.query_tile, sizes[2], False)
            else:
                list_one(const, kv, q, lists[1], const.key_tile, sizes[3], True)
        elif const.query_tile > 0:
            list_one(const, q, kv, lists[0], const.query_tile, sizes[2], False)
        else:
            list_one(const, kv, q, lists[0], const.key_tile, sizes[3], True)

    return list_tiles
