"""The kernel before those of a packed launch: it lists the tiles of all sequences, by what cu_seqlens say.

An entry is as `multiattn.packed.LIST_FIELDS` has it. Nothing is sorted and no program waits for another: the place of a
sequence's first tile is the sum of the tiles of all sequences before it, so each program compares its sequences with
all. Plain `triton.language` only; no code depends on lengths or on the number of sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = ["sequences", "seq_q", "seq_kv", "longest_q", "longest_kv", "query_entries", "key_entries", "parts"]


@triton.jit(do_not_specialize=_SIZES)
def list_tiles(
    cu_seqlens_q,  # pointer, int32 [sequences + 1], at a multiple of 4 bytes
    cu_seqlens_kv,  # like cu_seqlens_q
    query_list,  # pointer, int32 [query_entries, 8]: written; None where no kernel owns tiles of queries
    key_list,  # the same of keys
    counter,  # pointer, int32 [1]: set to 0; None where no kernel counts
    sequences,
    seq_q,  # rows of q, those around the sequences included
    seq_kv,
    longest_q,  # the most queries of a sequence
    longest_kv,
    query_entries,
    key_entries,
    parts,  # programs that share the tiles of one group of sequences
    C: tl.constexpr,  # multiattn.triton.kernels.constants.ListConstants
):
    """One list's share of one group of C.group sequences; both lists in one launch."""
    share = tl.program_id(0)
    if counter is not None:
        if share == 0:
            tl.store(counter, 0)
    shares = 0  # of the list of queries
    if query_list is not None:
        shares = tl.num_programs(0)
        if key_list is not None:
            shares = shares // 2
        if share < shares:
            own, others = (cu_seqlens_q, seq_q, longest_q), (cu_seqlens_kv, seq_kv, longest_kv)
            _list(share, own, others, query_list, sequences, query_entries, parts, False, C.query_tile, C)
    if key_list is not None:
        if share >= shares:
            own, others = (cu_seqlens_kv, seq_kv, longest_kv), (cu_seqlens_q, seq_q, longest_q)
            _list(share - shares, own, others, key_list, sequences, key_entries, parts, True, C.key_tile, C)


@triton.jit
def _list(
    share, own, others, entries, sequences, capacity, parts,
    BY_KEYS: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Every n-th tile, of `parts`, of each sequence of a group, and a part of the entries without a tile.

    A tile costs what there is on the other side: sequences that have the most there come first. Counts end with the
    capacity, which they are below where no sequences overlap.
    """
    lanes = tl.arange(0, C.group)
    mine = share // parts * C.group + lanes
    part = share % parts
    offset, length, other_offset, other_length = _find(mine, own, others, sequences)  # [group]
    tiles = _count(offset, length, TILE, C)
    first = tl.full([C.group], 0, tl.int32)  # entry of the first tile
    total = 0
    for begin in range(0, sequences + 2, C.group):
        theirs = begin + lanes
        their_offset, their_length, _other_offset, their_cost = _find(theirs, own, others, sequences)
        their_tiles = _count(their_offset, their_length, TILE, C)
        is_level = (their_cost[None, :] == other_length[:, None]) & (theirs[None, :] < mine[:, None])
        is_before = (their_cost[None, :] > other_length[:, None]) | is_level  # [group, group]
        first = tl.minimum(first + tl.sum(tl.where(is_before, their_tiles[None, :], 0), 1), capacity)
        total = tl.minimum(total + tl.sum(their_tiles, 0), capacity)

    field = tl.arange(0, 8)[None, :]
    if BY_KEYS:
        offset_q, len_q, offset_kv, len_kv = other_offset, other_length, offset, length
    else:
        offset_q, len_q, offset_kv, len_kv = offset, length, other_offset, other_length
    entry = tl.where(field == 0, mine[:, None], 0)  # [group, 8]
    entry = tl.where(field == 2, offset_q[:, None], entry)
    entry = tl.where(field == 3, len_q[:, None], entry)
    entry = tl.where(field == 4, offset_kv[:, None], entry)
    entry = tl.where(field == 5, len_kv[:, None], entry)
    for number in range(part, tl.max(tiles, 0), parts):
        if C.last_first and not BY_KEYS:
            tile = tiles - 1 - number
        else:
            tile = tl.full([C.group], 0, tl.int32) + number
        place = first + number
        exists = (number < tiles) & (place < capacity)
        first_row = tile * TILE
        if C.cut:
            first_row = tl.maximum(first_row - offset % TILE, 0)
        row = tl.where(field == 1, first_row[:, None], entry)
        tl.store(entries + place[:, None] * 8 + field, row, mask=exists[:, None])
    without = tl.full([C.group, 8], -1, tl.int32)
    step = (sequences + 1 + C.group) // C.group * parts * C.group  # all shares'
    for begin in range(total + share * C.group, capacity, step):
        place = begin + lanes
        tl.store(entries + place[:, None] * 8 + field, without, mask=(place < capacity)[:, None])


@triton.jit
def _count(offset, length, TILE: tl.constexpr, C: tl.constexpr):
    """The tiles of sequences."""
    if C.cut:
        length = tl.where(length > 0, offset % TILE + length, 0)
    return (length + TILE - 1) // TILE


@triton.jit
def _find(numbers, own, others, sequences):
    """(offset, length) of sequences by their numbers, and the same on the other side, where tiles have their pairs.

    Rows behind the last sequence are one more, and those before the first another, with nothing on the other side. Of
    further numbers all is empty. A side is (cu_seqlens, rows, the most rows of a sequence).
    """
    cu_seqlens, rows, longest = own
    exists = numbers < sequences
    offset = _inside(tl.load(cu_seqlens + numbers, mask=numbers <= sequences, other=0), rows)
    end = tl.load(cu_seqlens + tl.where(exists, numbers + 1, 0), mask=numbers < sequences + 2, other=0)
    end = _inside(tl.where(numbers == sequences, rows, end), rows)
    length = tl.minimum(tl.maximum(end - offset, 0), tl.where(exists, longest, rows))
    cu_others, other_rows, other_longest = others
    other_offset = _inside(tl.load(cu_others + numbers, mask=exists, other=0), other_rows)
    other_end = _inside(tl.load(cu_others + numbers + 1, mask=exists, other=0), other_rows)
    other_length = tl.minimum(tl.maximum(other_end - other_offset, 0), other_longest)
    return offset, length, other_offset, other_length


@triton.jit
def _inside(row, rows):
    """A row that there is, or the end, whatever a tensor says."""
    return tl.minimum(tl.maximum(row, 0), rows)
