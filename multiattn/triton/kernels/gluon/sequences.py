"""Packed batches: the sequence that a tile is of, and coordinates at which TMA sees the rows of no other.

A tile's place is `at`: the batch entry, or in a packed batch the first row and the number of rows of its sequence.
There a tensor map has five dimensions (`multiattn.packed.ragged`), and rows end where the coordinates say: beyond the
last one of the sequence loads give zeros, and stores write nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multiattn.packed import LIST_FIELDS, RAGGED_ROWS
from multiattn.triton.kernels.gluon import ring

ENTRY_WORDS = gl.constexpr(len(LIST_FIELDS))
ROWS = gl.constexpr(RAGGED_ROWS)


# ---------------------------------------------------------------- rows by TMA


@gluon.jit
def load_rows(source, at, head, row, column, full, buffer, C: gl.constexpr):
    """Rows of one head from `row` of its sequence on; in a packed batch that is not before the first."""
    if C.packed:
        offset, rows = at
        ring.tma_load(source, [ROWS, offset + rows, head, ROWS - rows + row, column], full, buffer)
    else:
        ring.tma_load(source, [at, head, row, column], full, buffer)


@gluon.jit
def store_rows(target, at, head, row, column, buffer, C: gl.constexpr):
    """The same the other way."""
    if C.packed:
        offset, rows = at
        ring.tma_store(target, [ROWS, offset + rows, head, ROWS - rows + row, column], buffer)
    else:
        ring.tma_store(target, [at, head, row, column], buffer)


# ---------------------------------------------------------------- entries of the list


@gluon.jit
def has_tile(entries, number):
    """1 where an entry has a tile, else 0. Asking early brings near what `read_entry` reads."""
    return gl.where(gl.load(entries + number * ENTRY_WORDS) >= 0, 1, 0)


@gluon.jit
def read_entry(entries, number, C: gl.constexpr):
    """The tile of an entry: sequence, first query, `at` of the queries and of the keys.

    The last tile of a sequence ends where its queries do, rounded up to those of a warpgroup: the one that is not whole
    is the first, which begins before query 0 and under a mask sees the fewest keys. Without keys the sequence is 0: no
    tensor has an entry for the number of the rows behind all sequences.
    """
    entry = entries + number * ENTRY_WORDS
    sequence = gl.load(entry)
    first_row = gl.load(entry + 1)
    offset_q = gl.load(entry + 2)
    len_q = gl.load(entry + 3)
    offset_kv = gl.load(entry + 4)
    len_kv = gl.load(entry + 5)
    first_query = first_row + (len_q + 63) // 64 * 64 - (len_q + C.tile_m - 1) // C.tile_m * C.tile_m
    return gl.where(len_kv > 0, sequence, 0), first_query, (offset_q, len_q), (offset_kv, len_kv)


@gluon.jit
def write_sequence(words, at, rows, len_kv, C: gl.constexpr):
    """A tile's sequence, for consumers; `rows` is `at` of its queries."""
    offset_q, len_q = rows
    ring.write_word(words, at + C.sequence_words, offset_q)
    ring.write_word(words, at + C.sequence_words + 1, len_q)
    ring.write_word(words, at + C.sequence_words + 2, len_kv)


@gluon.jit
def read_queries(words, at, C: gl.constexpr):
    """First row of the sequence's queries, and how many they are."""
    return ring.read_word(words, at + C.sequence_words), ring.read_word(words, at + C.sequence_words + 1)


@gluon.jit
def read_lengths(words, at, C: gl.constexpr):
    """Queries and keys of the sequence."""
    return ring.read_word(words, at + C.sequence_words + 1), ring.read_word(words, at + C.sequence_words + 2)
