"""Tiles of every kernel: which one a program owns, where it lives, how it is read, what it sees.

Plain `triton.language`, as the kernels. `C` is their `TileConstants`, `band` is (seq_q, seq_kv, left, right), with the
lengths of one sequence; `at` is (batch, head), or in a packed batch (first row of the sequence, head); strides are of
(batch, head, row), in units of VECTOR elements; a WIDTH is `C.width` or `C.width_v`. The mask is in here alone. With
``d = seq_kv - seq_q``, a causal query i sees the keys up to ``i + d``, a two-sided one those from ``i + d - left`` to
``i + d + right``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.elements import load_in_place

LAST = tl.constexpr(2**31 - 1)
"""Beyond every position."""


@triton.jit
def my_tile(seq, batch_heads, LAST_FIRST: tl.constexpr, TILE: tl.constexpr, HEADS_TOGETHER: tl.constexpr):
    """The tile of a sequence, and its (batch, head), that this program owns.

    Heads go in groups that share the L2 cache; within a group a mask runs its longest tiles first, so that the last
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
def my_queries(entries, tiles, sizes, C: tl.constexpr):
    """The tile of queries that this program owns, and its sequence; `sizes` as kernels have them.

    Returns its first row, (batch, head) as one number, batch, `at` of the queries and of their keys, and lengths. In a
    packed batch the tile is one of the `tiles` entries of a list, the first row is counted in its sequence, and batch
    is the sequence's number: -1 where there is no tile.
    """
    len_q, len_kv = sizes.seq_q, sizes.seq_kv
    if C.packed:
        first_row, head, batch, start_q, start_kv, len_q, len_kv = _my_entry(entries, tiles, sizes.batch_heads, C)
        batch_head, at, at_kv = head, (start_q, head), (start_kv, head // sizes.group)
    else:
        tile, batch_head = my_tile(len_q, sizes.batch_heads, C.is_banded, C.tile_m, C.heads_in_turn)
        batch = batch_head // sizes.heads_q
        head = batch_head % sizes.heads_q
        at, at_kv = (batch, head), (batch, head // sizes.group)
        first_row = tile * C.tile_m
    return first_row, batch_head, batch, at, at_kv, len_q, len_kv


@triton.jit
def my_keys(entries, tiles, sizes, C: tl.constexpr):
    """A program's tile of keys: first key, batch, the first item of an `at` of queries, `at` of keys, lengths."""
    len_q, len_kv = sizes.seq_q, sizes.seq_kv
    if C.packed:
        first_key, head_kv, batch, start_q, start_kv, len_q, len_kv = _my_entry(entries, tiles, sizes.batch_heads, C)
        at_kv = (start_kv, head_kv)
    else:
        tile, batch_head = my_tile(len_kv, sizes.batch_heads, False, C.tile_n, C.heads_in_turn)
        heads_kv = sizes.heads_q // sizes.group
        batch = batch_head // heads_kv
        head_kv = batch_head % heads_kv
        start_q, at_kv = batch, (batch, head_kv)
        first_key = tile * C.tile_n
    return first_key, batch, start_q, at_kv, len_q, len_kv


@triton.jit
def _my_entry(entries, tiles, heads, C: tl.constexpr):
    """The entry of a list, and the head of `heads`, that this program owns: see `multiattn.packed.LIST_FIELDS`."""
    entry, head = my_tile(tiles, heads, False, 1, C.heads_in_turn)
    entries += entry * 8
    number = tl.load(entries)
    first = tl.load(entries + 1)
    start_q = tl.load(entries + 2)
    len_q = tl.load(entries + 3)
    start_kv = tl.load(entries + 4)
    len_kv = tl.load(entries + 5)
    return first, head, number, start_q, start_kv, len_q, len_kv


@triton.jit
def end_of_tile(first, start, length, TILE: tl.constexpr, C: tl.constexpr):
    """The end of the rows of an own tile that count, in the sequence that begins at `start`.

    It is the end of the sequence, or of the part that a tile of the packed axis has of it.
    """
    if C.packed_blocks:
        length = tl.minimum(first + TILE - (start + first) % TILE, length)
    return length


@triton.jit
def own_positions(rows, end, length):
    """Rows of a tile in their sequence; those that another tile has, from `end` on, are told as behind the last."""
    return tl.where(rows < end, rows, length)


# ---------------------------------------------------------------- the mask


@triton.jit
def key_blocks(first_row, band, C: tl.constexpr):
    """The blocks of keys of a tile of queries: (begin, full_begin, full_end, end), multiples of tile_n or the last end.

    All rows see every key of [full_begin, full_end), which may be none; no row sees a key before begin or from end on.
    """
    seq_q, seq_kv, left, right = band
    begin = 0
    full_begin = 0
    seen_by_all = seq_kv
    end = seq_kv
    if C.is_banded:
        seen_by_first = first_row + 1 + seq_kv - seq_q  # ends with the last key that the first row sees
        if C.is_two_sided:
            seen_by_first += right
        seen_by_all = tl.minimum(tl.maximum(seen_by_first, 0), seq_kv)
        end = tl.minimum(tl.maximum(seen_by_first + C.tile_m - 1, 0), seq_kv)
    full_end = seen_by_all // C.tile_n * C.tile_n
    if C.is_two_sided:
        first_seen = first_row + seq_kv - seq_q - left  # by the first row; by the last, tile_m - 1 further on
        seen_from = tl.minimum(tl.maximum(first_seen, 0), seq_kv)
        seen_from_by_all = tl.minimum(tl.maximum(first_seen + C.tile_m - 1, 0), seq_kv)
        begin = seen_from // C.tile_n * C.tile_n
        full_begin = (seen_from_by_all + C.tile_n - 1) // C.tile_n * C.tile_n
    return begin, full_begin, full_end, end


@triton.jit
def query_blocks(first_key, band, C: tl.constexpr):
    """The blocks of queries of a tile of keys: (begin, full_begin, full_end, end), multiples of tile_m or the last end.

    Queries of [full_begin, full_end), which may be none, see all keys; none before begin or from end on sees one. Keys
    beyond the end need the mask with every query.
    """
    seq_q, seq_kv, left, right = band
    begin = 0
    full_begin = 0
    full_end = seq_q
    end = seq_q
    if C.is_banded:
        first_seeing = first_key + seq_q - seq_kv
        all_seeing = first_key + C.tile_n - 1 + seq_q - seq_kv
        if C.is_two_sided:
            last_seeing = first_seeing + left  # the first key; the last is seen tile_n - 1 further on
            first_seeing -= right
            all_seeing -= right
            full_end = tl.minimum(tl.maximum(last_seeing + 1, 0), seq_q) // C.tile_m * C.tile_m
            end = tl.minimum(tl.maximum(last_seeing + C.tile_n, 0), seq_q)
        first_seeing = tl.minimum(tl.maximum(first_seeing, 0), seq_q)
        all_seeing = tl.minimum(tl.maximum(all_seeing, 0), seq_q)
        begin = first_seeing // C.tile_m * C.tile_m
        full_begin = (all_seeing + C.tile_m - 1) // C.tile_m * C.tile_m
    if first_key + C.tile_n > seq_kv:
        full_begin = end
    if C.is_two_sided:
        # At least one block, though all of it may be hidden: the sums of a loop that may be empty are also zeros that
        # no wgmma made, for which ptxas waits after each wgmma.
        end = tl.maximum(end, begin + 1)
        tl.assume(begin < end)
    return begin, full_begin, full_end, end


@triton.jit
def row_of_lists(first, start, batch, across, SIZE: tl.constexpr):
    """The row that a tile of a packed batch has in the lists of a block mask, by its first query or key; -1 for none.

    Each sequence has rows of its own, for its part of the blocks of SIZE on the packed axis. `across` is its length on
    the other side: rows around all sequences have nothing there, and no lists.
    """
    return tl.where(across > 0, (start + first) // SIZE + batch, -1)


@triton.jit
def listed_blocks(lists, batch, head, row, FULL: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr):
    """The partial or full blocks that a row of blocks has in the lists of a block mask: (their list, tiles in all).

    A block has TILES tiles. `lists` is (stride of batch entries, of query heads, columns, counts, indices), and perhaps
    (full counts, full indices).
    """
    place = batch.to(tl.int64) * lists[0] + head * lists[1]
    if C.packed_blocks:
        place += tl.maximum(row, 0)
    else:
        place += row
    if FULL:
        counts, indices = lists[5], lists[6]
    else:
        counts, indices = lists[3], lists[4]
    blocks = indices + place * lists[2]
    tiles = tl.load(counts + place) * TILES
    if C.packed_blocks:
        tiles = tl.where(row < 0, 0, tiles)
    return blocks, tiles


@triton.jit
def listed_tile(place, end, blocks, TILES: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr):
    """The first key or query of a tile by its place in a walk over `blocks` of TILES; 0 where nothing is listed.

    It is loaded one tile ahead, and not by tl.load: Triton would take that for one more load to be pipelined, through
    shared memory, and would then have fewer tiles in flight.
    """
    first = 0
    if C.blocks is not None:
        place = tl.maximum(tl.minimum(place, end - 1), 0)
        if C.compiled:
            block = load_in_place(blocks + place // TILES)
        else:
            block = tl.load(blocks + place // TILES)
        first = (block * TILES + place % TILES) * TILE
    return first


@triton.jit
def listed_rows(first, start, length, TILE: tl.constexpr, C: tl.constexpr):
    """The first row of a listed tile that its sequence has, and the end of those, in the sequence.

    There may be none. The tile is one of the packed axis, if anything is packed, and may begin before the sequence.
    """
    end = length
    if C.packed_blocks:
        first -= start
        end = tl.minimum(first + TILE, length)
        first = tl.maximum(first, 0)
    return first, end


@triton.jit
def walk_keys(
    WALK: tl.constexpr, sums, tile, first_row, start, band, of_score, lists, SKIPS: tl.constexpr, C: tl.constexpr
):
    """The sums of all keys that a tile of queries sees, each part of them added by ``WALK(sums, tile, begin, end,
    blocks, MASKED, PARTIAL, C)``. In a packed batch the sequence begins at `start`.

    SKIPS: no loop is set up where nothing needs the mask. Of an empty one Triton still sets up the pipeline, and takes
    it down.
    """
    if C.blocks is not None:
        batch, head, _aux = of_score
        row = first_row // C.blocks.queries
        if C.packed:
            row = row_of_lists(first_row, start, batch, band[1], C.blocks.queries)
        if C.blocks.has_full:
            blocks, end = listed_blocks(lists, batch, head, row, True, C.key_tiles, C)
            sums = WALK(sums, tile, 0, end, blocks, C.hides_in_full, False, C)
        blocks, end = listed_blocks(lists, batch, head, row, False, C.key_tiles, C)
        sums = WALK(sums, tile, 0, end, blocks, C.hides_in_partial, True, C)
    else:
        blocks = key_blocks(first_row, band, C)
        begin, full_begin, full_end, end = blocks
        if C.is_two_sided:  # one loop, as three would fill and drain the pipeline three times
            sums = WALK(sums, tile, begin, end, blocks, True, False, C)
        else:
            sums = WALK(sums, tile, full_begin, full_end, blocks, False, False, C)
            if not SKIPS or C.is_banded or full_end < end:
                sums = WALK(sums, tile, full_end, end, blocks, True, False, C)
    return sums


@triton.jit
def needs_mask(first, end, blocks, C: tl.constexpr):
    """True for a tile, by its first key or query, that needs the mask: the loops of a two-sided mask ask it.

    So do loops over the keys of listed full blocks, where that is the mask at the end of the keys, or of a tile's.
    """
    if C.blocks is not None:
        needed = first + C.tile_n > end
    else:
        _begin, full_begin, full_end, _end = blocks
        needed = (first < full_begin) | (first >= full_end)
    return needed


@triton.jit
def visible_keys(rows, keys, of_score, band, PARTIAL: tl.constexpr, C: tl.constexpr):
    """The keys that each query sees: bool, rows and keys broadcast. One comparison a score.

    It is with the lower of two ends. Between two bounds it is of the distance from the first, unsigned. PARTIAL: in a
    partial block the mask of the program holds, too.
    """
    seq_q, seq_kv, left, right = band
    if C.is_two_sided:
        begin = rows - left + (seq_kv - seq_q)
        end = tl.minimum(rows + right + 1 + (seq_kv - seq_q), seq_kv)
        visible = (keys - begin).to(tl.uint32) < (end - begin).to(tl.uint32)
    else:
        end = tl.full(rows.shape, seq_kv, tl.int32)
        if C.is_banded:
            end = tl.minimum(rows + 1 + (seq_kv - seq_q), seq_kv)
        visible = keys < end
    return _and_mask(visible, rows, keys, of_score, band, PARTIAL, C)


@triton.jit
def seeing_rows(rows, keys, of_score, band, PARTIAL: tl.constexpr, C: tl.constexpr):
    """Visible pairs from the side of the keys, for tiles ``[keys, rows]`` whose threads hold few keys and many rows."""
    seq_q, seq_kv, left, right = band
    begin = tl.full(keys.shape, 0, tl.int32)
    if C.is_banded:
        begin = keys - (seq_kv - seq_q)
    if C.is_two_sided:
        begin = tl.where(keys < seq_kv, begin - right, LAST)
        visible = (rows - begin).to(tl.uint32) < (left + right + 1).to(tl.uint32)
    else:
        visible = rows >= tl.where(keys < seq_kv, begin, LAST)
    return _and_mask(visible, rows, keys, of_score, band, PARTIAL, C)


@triton.jit
def _and_mask(visible, rows, keys, of_score, band, PARTIAL: tl.constexpr, C: tl.constexpr):
    """The visible pairs, less those of a partial block that the program's mask hides."""
    if PARTIAL and C.has_mask:
        batch, head, aux = of_score
        mask = C.score.mask(batch, head, rows, keys, band[0], band[1], aux)
        if C.hides_in_full:
            visible = visible & mask
        else:  # there is nothing else to hide
            visible = mask
    return visible


# ---------------------------------------------------------------- the modification of scores

# `of_score` is (batch, query head, aux), and aux what the expression reads. Positions broadcast to the tile.


@triton.jit
def modified(raw, rows, keys, of_score, band, C: tl.constexpr):
    """``q @ k^T`` as it is; if there is an expression, its scores in the log2 domain, which have the scale."""
    scores = raw
    if C.has_score:
        batch, head, aux = of_score
        scores = C.score.score(raw, batch, head, rows, keys, band[0], band[1], aux)
    return scores


@triton.jit
def modified_and_slope(raw, rows, keys, of_score, band, C: tl.constexpr):
    """Modified scores, and how much a score, in its own units, moves with the scaled ``q @ k^T``."""
    if C.has_score:
        batch, head, aux = of_score
        scores, slope = C.score.score_and_slope(raw, batch, head, rows, keys, band[0], band[1], aux)
    else:
        scores, slope = raw, 1.0
    return scores, slope


# ---------------------------------------------------------------- memory


@triton.jit
def seek(source, strides, at, DESCRIPTOR: tl.constexpr, VECTOR: tl.constexpr, C: tl.constexpr):
    """Where the sequence of one (batch, head) starts. A descriptor stays as it is: it takes `at` with each load."""
    if C.packed:
        source += (at[0].to(tl.int64) * strides[2] + at[1].to(tl.int64) * strides[1]) * VECTOR
    elif not DESCRIPTOR:
        source += (at[0].to(tl.int64) * strides[0] + at[1].to(tl.int64) * strides[1]) * VECTOR
    return source


@triton.jit
def load_own(
    source, strides, first_row, seq, TILE: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, C: tl.constexpr
):
    """A program's own tile ``[TILE, WIDTH.pad]``, through a pointer to the start of its sequence; zero beyond that."""
    return _load(source, strides, first_row, seq, TILE, WIDTH, True, VECTOR, C)


@triton.jit
def with_sign(queries, C: tl.constexpr):
    """A tile of q with the sign of the scale."""
    if C.scale_sign < 0:
        queries = -queries
    if C.scale_sign == 0:
        queries = (queries * 0.0).to(queries.dtype)  # not zeros: inf * 0 must stay nan
    return queries


@triton.jit
def load_streamed(
    source, strides, at, first_row, seq, TILE: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile ``[TILE, WIDTH.pad]`` of those that a program walks over, through a descriptor or as its own.

    RAGGED: rows from seq on are zero. Without it there are none; a descriptor gives zeros for them anyway.
    """
    if C.descriptor:
        tile = tl.reshape(source.load([at[0], at[1], first_row, 0]), [TILE, WIDTH.pad])
    else:
        tile = _load(source, strides, first_row, seq, TILE, WIDTH, RAGGED, VECTOR, C)
    return tile


@triton.jit
def _load(
    source, strides, first_row, seq, TILE: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    VECTOR: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Zero beyond the columns that there are."""
    pointers = source + tl.cast(first_row, tl.int64) * strides[2] * VECTOR
    pointers += tile_offsets(strides[2], TILE, WIDTH, VECTOR, C.far_rows)
    in_range = (tl.arange(0, WIDTH.pad) < WIDTH)[None, :]
    if RAGGED:
        in_range = in_range & (first_row + tl.arange(0, TILE) < seq)[:, None]
    if RAGGED or WIDTH.pad != WIDTH:
        tile = tl.load(pointers, mask=in_range, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(target, strides, tile, first_row, seq, TILE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Write fp32 ``[TILE, WIDTH.pad]`` to rows of one head of out or a gradient, in its dtype."""
    target += tl.cast(first_row, tl.int64) * strides[2] * C.out_vector
    tl.store(
        target + tile_offsets(strides[2], TILE, WIDTH, C.out_vector, C.far_rows),
        tile.to(target.dtype.element_ty),
        mask=inside(first_row, seq, TILE, WIDTH),
    )


@triton.jit
def inside(first_row, seq, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """The elements of a tile that exist: bool ``[TILE, WIDTH.pad]``."""
    return (first_row + tl.arange(0, TILE) < seq)[:, None] & (tl.arange(0, WIDTH.pad) < WIDTH)[None, :]


@triton.jit
def tile_offsets(stride_row, TILE: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, FAR: tl.constexpr):
    """Element offsets ``[TILE, WIDTH.pad]`` of a tile from its first element."""
    rows = tl.arange(0, TILE)
    if FAR:
        rows = rows.to(tl.int64)
    return rows[:, None] * stride_row * VECTOR + tl.arange(0, WIDTH.pad)[None, :]
