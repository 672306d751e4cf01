"""Shared by the forward and the backward kernels: annotations, where a tile lives, and which keys its rows see."""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.tile as ct

ConstBool = ct.Constant[bool]
# head_dim is static: else a D that is no multiple of 16 is loaded element by element on sm80 to sm89 (seen in the SASS
# at D=40: 288 LDG; static: 24 LDGSTS).
Array32 = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Array64 = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,), index_dtype=ct.int64)]
Vectors32 = ct.Array
Vectors64 = ct.IndexedWithInt64[ct.Array]
IN_64_BITS = {Array32: Array64, Vectors32: Vectors64}
"""Each annotation of an array with its counterpart whose shape, strides and offsets take 64 bits."""

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


@dataclass(frozen=True, kw_only=True)
class Digits:
    """A tile's number, as one counts tiles: those of a section of `heads_together` heads, sections, batch entries.

    Where sections span batch entries, they are counted by themselves, as entries of one section each.
    """

    tile: Any
    section: Any
    batch: Any


@ct.function
def count_sections(const: Any, q: Any) -> Any:
    """Sections of an entry."""
    if const.spanning:
        return 1
    return q.shape[1] // const.heads_together


@ct.function
def batch_and_head(q: Any, number: Any) -> Any:
    """Both, of a number that counts the heads of all batch entries."""
    batch = number // q.shape[1]
    return batch, number - batch * q.shape[1]


@ct.function
def shared_head(q: Any, k: Any, head: Any, grouped: ConstBool) -> Any:
    """The head of k that a head of q reads; not grouped: of as many heads."""
    if grouped:
        return head // (q.shape[1] // k.shape[1])
    return head


@ct.function
def find_place(const: Any, q: Any, k: Any) -> Any:
    """The tile of queries that a block owns, in a grid that numbers the tiles of all heads."""
    return place_tile(const, q, k, digits_of(const, q, ct.bid(1) * ct.num_blocks(0) + ct.bid(0)), False, True)


@ct.function
def digits_of(const: Any, q: Any, number: Any) -> Any:
    """The digits of a tile's number; those of all heads count on from 0."""
    tiles = ct.cdiv(q.shape[2], const.tile_m) * const.heads_together
    sections = count_sections(const, q)
    section = number // tiles
    batch = section // sections
    return Digits(tile=number - section * tiles, section=section - batch * sections, batch=batch)


@ct.function
def carry_of(digit: Any, base: Any) -> Any:
    """1 for a digit that is not below its base, else 0; no branch, which would part the warps."""
    return 1 - max(0, min(1, base - digit))


@ct.function
def add_digits(const: Any, q: Any, number: Any, step: Any) -> Any:
    """The digits of a sum, without dividing: of two numbers that both have theirs."""
    tiles = ct.cdiv(q.shape[2], const.tile_m) * const.heads_together
    sections = count_sections(const, q)
    tile = number.tile + step.tile
    carry = carry_of(tile, tiles)
    section = number.section + step.section + carry
    into_batch = carry_of(section, sections)
    return Digits(
        tile=tile - carry * tiles,
        section=section - into_batch * sections,
        batch=number.batch + step.batch + into_batch,
    )


@ct.function
def place_tile(const: Any, q: Any, k: Any, number: Any, static_grid: ConstBool, grouped: ConstBool) -> Any:
    """Where the tile of queries of a number, in digits, lives.

    `heads_together` heads (a divisor of the heads of q, or a multiple) advance together, so that blocks that run at one
    time share keys in L2. Banded: the last tiles, which see most keys, go first, and the short ones fill the tail. Of a
    static grid each section of heads begins one tile further than the one before: a block takes every n-th tile, and
    where n is a multiple of a section's tiles all of a block's would else be of one length.
    """
    tiles = ct.cdiv(q.shape[2], const.tile_m)
    tile = number.tile // const.heads_together
    if const.banded:
        if static_grid:
            tile = (tile + number.batch * count_sections(const, q) + number.section) % tiles
        tile = tiles - 1 - tile
    number_in_section = number.tile % const.heads_together
    if const.spanning:
        batch, head = batch_and_head(q, number.batch * const.heads_together + number_in_section)
    else:
        batch, head = number.batch, number.section * const.heads_together + number_in_section
    head_kv = shared_head(q, k, head, grouped)
    return Place(batch=batch, head=head, head_kv=head_kv, tile=tile, seq_q=q.shape[2], seq_kv=k.shape[2])


@ct.function
def place_in_grid(const: Any, q: Any, k: Any) -> Any:
    """The tile that a block owns, in the order of `place_tile`: the tiles of a section in x, sections in y, batch in z.

    A division by a number that only a launch knows takes 40 instructions that wait for each other, and no load begins
    before the place is known. Here the only ones are those for heads that share keys, and for sections that span batch
    entries: these are y, and z is 1.
    """
    tile = ct.bid(0) // const.heads_together
    if const.banded:
        tile = ct.cdiv(q.shape[2], const.tile_m) - 1 - tile
    number = ct.bid(1) * const.heads_together + ct.bid(0) % const.heads_together
    if const.spanning:
        batch, head = batch_and_head(q, number)
    else:
        batch, head = ct.bid(2), number
    head_kv = shared_head(q, k, head, const.grouped)
    return Place(batch=batch, head=head, head_kv=head_kv, tile=tile, seq_q=q.shape[2], seq_kv=k.shape[2])


@ct.function
def load_part(const: Any, array: Any, index: Any, rows: Any, columns: Any, latency: Any) -> Any:
    """A tile of one head's rows, ``[rows, columns]``, with zeros beyond the ends."""
    tile = ct.load(array, index, (1, 1, rows, columns), padding_mode=ZERO, latency=latency, allow_tma=const.tma)
    return tile.reshape((rows, columns))


@ct.function
def load_tile(const: Any, array: Any, index: Any, rows: Any, latency: Any) -> Any:
    """A tile as wide as head_dim, ``[rows, tile_d]``."""
    return load_part(const, array, index, rows, const.tile_d, latency)


@ct.function
def key_blocks(const: Any, place: Any) -> Any:
    """(first, first_masked, end): every row sees all of blocks ``first..first_masked``; the rest needs the mask."""
    if const.banded:
        offset = place.seq_kv - place.seq_q
        first_row = place.tile * const.tile_m
        seen_by_first_row = max(0, min(first_row + offset + 1, place.seq_kv))
        seen_by_last_row = max(0, min(first_row + offset + const.tile_m, place.seq_kv))
        return 0, seen_by_first_row // const.tile_n, ct.cdiv(seen_by_last_row, const.tile_n)
    return 0, place.seq_kv // const.tile_n, ct.cdiv(place.seq_kv, const.tile_n)


@ct.function
def query_blocks(const: Any, tile: Any, seq_q: Any, seq_kv: Any) -> Any:
    """(first, first_full, end): blocks before `first_full` need a mask; from there on every row sees every key.

    A key beyond the end needs none: what it gets is not stored.
    """
    end = ct.cdiv(seq_q, const.tile_m)
    if const.banded:
        first_row = max(0, tile * const.tile_n - (seq_kv - seq_q))
        first_full_row = max(0, tile * const.tile_n + (const.tile_n - 1) - (seq_kv - seq_q))
        return first_row // const.tile_m, min(ct.cdiv(first_full_row, const.tile_m), end), end
    return 0, 0, end


@ct.function
def is_visible(const: Any, place: Any, block: Any) -> Any:
    """The keys of a block that each query sees, bool ``[tile_m, tile_n]``; causal is bottom-right aligned.

    Causal needs no look at the end: the last query sees the last key, and of rows beyond it nothing is kept.
    """
    row = place.tile * const.tile_m + ct.arange(const.tile_m, dtype=ct.int32)[:, None]
    col = block * const.tile_n + ct.arange(const.tile_n, dtype=ct.int32)[None, :]
    if const.banded:
        return col <= row + (place.seq_kv - place.seq_q)
    return col < place.seq_kv


@ct.function
def is_key(const: Any, place: Any, block: Any) -> Any:
    """The rows of a block of keys that there are, bool ``[tile_n, 1]``."""
    return (block * const.tile_n + ct.arange(const.tile_n, dtype=ct.int32) < place.seq_kv)[:, None]
