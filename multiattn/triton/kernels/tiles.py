"""What every kernel needs of a tile: which one a program owns, where it lives, how it is read, what it sees.

Plain `triton.language`, as the kernels.
"""

# ruff: noqa: ANN001, ANN201, N803 - Triton's own annotations and its upper-case constexprs
# ruff: noqa: SIM108 - Triton compiles an if; a conditional expression it takes for a run-time select
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

OUT_VECTOR = tl.constexpr(8)
"""Elements that divide every stride of out and of the gradients: dense, so they are multiples of head_dim."""

LAST = tl.constexpr(2**31 - 1)
"""Beyond every position."""


@triton.jit
def my_tile(seq, batch_heads, LAST_FIRST: tl.constexpr, TILE: tl.constexpr, HEADS_TOGETHER: tl.constexpr):
    """Which tile of a sequence of which (batch, head) this program owns.

    Heads go in groups that share the L2 cache; within a group causal runs its longest tiles first, so that the last
    programs of the grid are short ones: the last queries see the most keys (LAST_FIRST), the first keys the most
    queries. The grid is one-dimensional: only its x extent passes 65535.
    """
    program = tl.program_id(0)
    tiles = (seq + TILE - 1) // TILE
    first_head = program // (tiles * HEADS_TOGETHER) * HEADS_TOGETHER
    tile = program - first_head * tiles
    batch_head = first_head
    if HEADS_TOGETHER > 1:  # else a group is a head, and there is nothing to divide by
        heads = tl.minimum(HEADS_TOGETHER, batch_heads - first_head)
        batch_head += tile % heads
        tile = tile // heads
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, batch_head


@triton.jit
def key_range(first_row, seq_q, seq_kv, CAUSAL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(begin, masked_begin, end): all rows see every key of [begin, masked_begin); none sees a key from end on."""
    begin = 0
    seen_by_all = seq_kv
    end = seq_kv
    if CAUSAL:
        seen_by_first = first_row + 1 + seq_kv - seq_q
        seen_by_all = tl.minimum(tl.maximum(seen_by_first, 0), seq_kv)
        end = tl.minimum(tl.maximum(seen_by_first + TILE_M - 1, 0), seq_kv)
    return begin, seen_by_all // TILE_N * TILE_N, end


@triton.jit
def visible_keys(rows, keys, seq_q, seq_kv, CAUSAL: tl.constexpr):
    """Which keys each query sees: bool, of rows and keys broadcast. One comparison a score: the lower of two ends."""
    end = tl.full(rows.shape, seq_kv, tl.int32)
    if CAUSAL:
        end = tl.minimum(rows + 1 + (seq_kv - seq_q), seq_kv)
    return keys < end


@triton.jit
def seeing_rows(rows, keys, seq_q, seq_kv, CAUSAL: tl.constexpr):
    """The same from the side of the keys, for tiles ``[keys, rows]`` whose threads hold few keys and many rows."""
    begin = tl.full(keys.shape, 0, tl.int32)
    if CAUSAL:
        begin = keys - (seq_kv - seq_q)
    return rows >= tl.where(keys < seq_kv, begin, LAST)


@triton.jit
def seek(source, batch, head, stride_batch, stride_head, DESCRIPTOR: tl.constexpr, VECTOR: tl.constexpr):
    """Where one head's sequence starts. A descriptor stays as it is: it takes (batch, head) with each load."""
    if not DESCRIPTOR:
        source += (batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head) * VECTOR
    return source


@triton.jit
def load_rows(
    source,
    batch,
    head,
    first_row,
    seq,
    stride_row,
    TILE: tl.constexpr,
    RAGGED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows [first_row, first_row + TILE) of one head: ``[TILE, HEAD_PAD]``, zero beyond HEAD_DIM.

    RAGGED: rows from seq on are zero. Without it there are none; a descriptor gives zeros for them anyway.
    """
    if DESCRIPTOR:
        tile = tl.reshape(source.load([batch, head, first_row, 0]), [TILE, HEAD_PAD])
    else:
        pointers = source + tl.cast(first_row, tl.int64) * stride_row * VECTOR
        pointers += tile_offsets(stride_row, TILE, HEAD_PAD, VECTOR, WIDE)
        in_range = (tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :]
        if RAGGED:
            in_range = in_range & (first_row + tl.arange(0, TILE) < seq)[:, None]
        if RAGGED or HEAD_PAD != HEAD_DIM:
            tile = tl.load(pointers, mask=in_range, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def tile_offsets(stride_row, TILE: tl.constexpr, HEAD_PAD: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets ``[TILE, HEAD_PAD]`` of a tile from its first element."""
    rows = tl.arange(0, TILE)
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, None] * stride_row * VECTOR + tl.arange(0, HEAD_PAD)[None, :]
