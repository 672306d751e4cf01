"""The backward of wide heads: P and dS are stored, and gradients are plain products of them.

A gradient of 64 rows and 512 columns has no room beside scores. So `stored_scores` makes tiles of P and dS, a few
columns of q, k, dout and v at a time, and stores them rounded, as operands are. `product_of_queries` makes dq = dS k,
`product_of_keys` dk = dS^T q and dv = P^T dout. They take turns: each has some heads, or some queries of one head of
keys and its query heads.

An image is P or dS of a turn: ``[rows, columns]``, the queries of its heads one after another, each head in whole tiles
of scores, and keys in whole tiles, too. Tiles that the mask hides are neither written nor read.

`numbers` are seq_q, seq_kv, heads_q, group; left and right of a two-sided mask; first_head, the first head of keys of a
turn, through the batch; first_tile and tiles, of scores, of each query head; turn, its number among those of its heads,
of which there are turns; and a factor. Strides are as in backward.py, None where a descriptor has them. `C` is a
`StoredConstants`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.backward import lse_of_rows
from multiattn.triton.kernels.tiles import (
    key_blocks,
    modified_and_slope,
    query_blocks,
    seek,
    tile_offsets,
    visible_keys,
)


@triton.jit
def stored_scores(
    q,  # [B, Hq, Sq, D]; a pointer, or a tensor descriptor with block [1, 1, tile_m, part]
    k,  # like q, of Skv rows and tile_n of them
    v,  # like k, of Dv columns
    dout,  # like q, of Dv columns
    statistics,  # lse and delta: pointers, fp32 [B, Hq, Sq], contiguous
    weights,  # the image of P; a pointer, or a descriptor with block [1, 1, tile_m, tile_n]
    ds,  # like weights, of dS
    numbers,  # factor: scale * log2(e), with its sign, 1 with an expression
    strides,  # of q, k, v and dout
    aux,  # what the program of scores reads, as its functions have it; None without one
    C: tl.constexpr,  # multiattn.triton.kernels.constants.StoredConstants
):
    """P and dS ``[tile_m, tile_n]`` of one tile of scores, where any query sees a key."""
    seq_q, seq_kv = numbers.seq_q, numbers.seq_kv
    key_tiles = (seq_kv + C.tile_n - 1) // C.tile_n
    head, row_tile, key_tile = _my_scores(key_tiles, numbers.tiles, C)
    first_row, first_key = (numbers.first_tile + row_tile) * C.tile_m, key_tile * C.tile_n
    band = (seq_q, seq_kv, numbers.left, numbers.right)
    begin, full_begin, full_end, end = key_blocks(first_row, band, C)
    if (first_key < begin) | (first_key >= end):
        return
    query_head, at, at_kv = _head_of_queries(head, numbers)
    place = (first_row, first_key, seq_q, seq_kv)
    scores = _product(q, k, strides.q, strides.k, at, at_kv, place, C.width, C.vector, C)  # [tile_m, tile_n] fp32
    rows, keys = first_row + tl.arange(0, C.tile_m), first_key + tl.arange(0, C.tile_n)
    of_rows = query_head.to(tl.int64) * seq_q
    row_lse = lse_of_rows(statistics.lse + of_rows, first_row, seq_q, C)  # [tile_m]
    of_score = (at[0], at[1], aux)
    scores, slope = modified_and_slope(scores, rows[:, None], keys[None, :], of_score, band, C)
    if C.has_score:  # of a row that does not exist it may be anything
        scores = tl.where((rows < seq_q)[:, None], scores, float("-inf"))
    tile = tl.math.exp2(scores * numbers.factor - row_lse[:, None])
    is_full = (first_key >= full_begin) & (first_key < full_end)
    if not is_full:  # selected, not multiplied: a masked weight may be inf
        tile = tl.where(visible_keys(rows[:, None], keys[None, :], of_score, band, False, C), tile, 0.0)
    image_row = (head * numbers.tiles + row_tile) * C.tile_m
    columns = key_tiles * C.tile_n
    rounded = _rounded(tile, weights, C)  # what waits for dP takes half the registers
    _store_image(weights, image_row, first_key, columns, rounded, C)
    if C.has_slope:  # selected, as a slope may be inf where nothing is seen
        rounded = _rounded(tl.where(tile == 0.0, 0.0, tile * slope), weights, C)
    dweights = _product(dout, v, strides.dout, strides.v, at, at_kv, place, C.width_v, C.out_vector, C)
    row_delta = tl.load(statistics.delta + of_rows + rows, mask=rows < seq_q, other=0.0)  # [tile_m]
    tile = rounded.to(tl.float32) * (dweights - row_delta[:, None])
    if not is_full:  # again, as what v has behind the mask may be inf
        tile = tl.where(visible_keys(rows[:, None], keys[None, :], of_score, band, False, C), tile, 0.0)
    _store_image(ds, image_row, first_key, columns, _rounded(tile, ds, C), C)


@triton.jit
def _head_of_queries(head, numbers):
    """The number through the batch of a query head of a turn, its (batch, head), and that of its keys."""
    query_head = numbers.first_head * numbers.group + head
    batch, head = query_head // numbers.heads_q, query_head % numbers.heads_q
    return query_head, (batch, head), (batch, head // numbers.group)


@triton.jit
def _my_scores(key_tiles, row_tiles, C: tl.constexpr):
    """The program's query head among those of the turn, its tile of queries among those, and its tile of keys.

    Neighbouring tiles of queries come before the next tile of keys: what programs read at a time stays in L2.
    """
    program = tl.program_id(0)
    of_head = row_tiles * key_tiles
    head = program // of_head
    within = program % of_head
    first = within // (C.tiles_together * key_tiles) * C.tiles_together
    rows = tl.minimum(C.tiles_together, row_tiles - first)
    left = within - first * key_tiles
    return head, first + left % rows, left // rows


@triton.jit
def _product(
    queries, keys, of_queries, of_keys, at, at_kv, place, WIDTH: tl.constexpr, VECTOR: tl.constexpr, C: tl.constexpr
):
    """``[tile_m, tile_n]`` in fp32 of rows of q and k, or of dout and v, `part` columns at a time."""
    first_row, first_key, seq_q, seq_kv = place
    queries = seek(queries, of_queries, at, C.descriptor, VECTOR, C)
    keys = seek(keys, of_keys, at_kv, C.descriptor, C.vector, C)
    acc = tl.full([C.tile_m, C.tile_n], 0.0, tl.float32)
    for column in tl.range(0, WIDTH, C.part, num_stages=C.stages):
        a = _load_part(queries, of_queries, at, first_row, column, seq_q, C.tile_m, WIDTH, VECTOR, C)
        b = _load_part(keys, of_keys, at_kv, first_key, column, seq_kv, C.tile_n, WIDTH, C.vector, C)
        acc = tl.dot(a, tl.trans(b), acc)
    return acc


# ---------------------------------------------------------------- gradients


@triton.jit
def product_of_queries(
    k,  # [B, Hkv, Skv, D]; a pointer, or a tensor descriptor with block [1, 1, tile_n, part]
    ds,  # the image; a pointer, or a descriptor with block [1, 1, tile_m, tile_n]
    dq,  # pointer, [B, Hq, Sq, D]
    numbers,  # factor: scale, with its sign
    strides,  # of k and dq
    C: tl.constexpr,  # multiattn.triton.kernels.constants.StoredConstants
):
    """dq of tile_m queries and `part` columns, by a walk over the keys that any of them sees."""
    seq_q, seq_kv = numbers.seq_q, numbers.seq_kv
    program = tl.program_id(0)
    part, place = program % C.parts, program // C.parts
    of_head = numbers.tiles * (C.score_m // C.tile_m)
    head, tile = place // of_head, of_head - 1 - place % of_head  # under a mask the last queries see the most
    first_row = numbers.first_tile * C.score_m + tile * C.tile_m
    image_row = (head * of_head + tile) * C.tile_m
    _query_head, at, at_kv = _head_of_queries(head, numbers)
    columns = (seq_kv + C.score_n - 1) // C.score_n * C.score_n
    k = seek(k, strides.k, at_kv, C.descriptor, C.vector, C)
    begin, _full_begin, _full_end, end = key_blocks(first_row, (seq_q, seq_kv, numbers.left, numbers.right), C)
    acc = tl.full([C.tile_m, C.part.pad], 0.0, tl.float32)
    for first_key in tl.range(begin, end, C.tile_n, num_stages=C.stages):
        image = _load_image(ds, image_row, first_key, columns, C)  # [tile_m, tile_n]
        keys = _load_part(k, strides.k, at_kv, first_key, part * C.part, seq_kv, C.tile_n, C.width, C.vector, C)
        acc = tl.dot(image, keys, acc)
    dq = seek(dq, strides.dq, at, False, C.out_vector, C)
    _store_part(dq, strides.dq[2] * C.out_vector, acc * numbers.factor, first_row, part, seq_q, C.tile_m, C)


@triton.jit
def product_of_keys(
    source,  # q or dout, [B, Hq, Sq, width]; a pointer, or a tensor descriptor with block [1, 1, tile_m, part]
    image,  # dS or P; a pointer, or a descriptor with block [1, 1, tile_m, tile_n]
    gradient,  # pointer, dk or dv, [B, Hkv, Skv, width]
    sums,  # pointer, fp32 [Skv, width], contiguous: what turns leave to the next; None where all have one
    numbers,  # factor: of the gradient
    strides,  # of the source and the gradient
    C: tl.constexpr,  # multiattn.triton.kernels.constants.StoredConstants
):
    """dk or dv of tile_n keys and `part` columns, by walks over the queries of the turn that see any of them."""
    seq_q, seq_kv = numbers.seq_q, numbers.seq_kv
    program = tl.program_id(0)
    part, place = program % C.parts, program // C.parts
    tiles = (seq_kv + C.tile_n - 1) // C.tile_n
    head, first_key = place // tiles, place % tiles * C.tile_n
    head_kv = numbers.first_head + head
    heads_kv = numbers.heads_q // numbers.group
    at_kv = (head_kv // heads_kv, head_kv % heads_kv)
    columns = (seq_kv + C.score_n - 1) // C.score_n * C.score_n
    begin, end = _written_queries(first_key, numbers, C)
    acc = tl.full([C.tile_n, C.part.pad], 0.0, tl.float32)
    for member in range(numbers.group):
        at = (at_kv[0], at_kv[1] * numbers.group + member)
        rows_of = seek(source, strides.source, at, C.descriptor, C.vector, C)
        image_row = ((head * numbers.group + member) * numbers.tiles - numbers.first_tile) * C.score_m
        for first_row in tl.range(begin, end, C.tile_m, num_stages=C.stages):
            scores = _load_image(image, image_row + first_row, first_key, columns, C)  # [tile_m, tile_n]
            rows = _load_part(
                rows_of, strides.source, at, first_row, part * C.part, seq_q, C.tile_m, C.width, C.vector, C
            )
            acc = tl.dot(tl.trans(scores), rows, acc)
    is_last = True
    if C.has_turns:
        if numbers.turn > 0:
            acc += _load_sums(sums, first_key, part, seq_kv, C)
        is_last = numbers.turn + 1 == numbers.turns
        if not is_last:
            _store_part(sums, C.width, acc, first_key, part, seq_kv, C.tile_n, C)
    if is_last:
        gradient = seek(gradient, strides.gradient, at_kv, False, C.out_vector, C)
        stride = strides.gradient[2] * C.out_vector
        _store_part(gradient, stride, acc * numbers.factor, first_key, part, seq_kv, C.tile_n, C)


@triton.jit
def _written_queries(first_key, numbers, C: tl.constexpr):
    """Queries of the turn of which any sees one of tile_n keys, in whole steps: (begin, end).

    `query_blocks` has at least one block, which nobody may have written.
    """
    seq_q, seq_kv = numbers.seq_q, numbers.seq_kv
    begin, _full_begin, _full_end, end = query_blocks(first_key, (seq_q, seq_kv, numbers.left, numbers.right), C)
    if C.is_two_sided:
        seen_to = tl.minimum(first_key + C.tile_n, seq_kv) + numbers.left + seq_q - seq_kv
        end = tl.minimum(end, tl.minimum(tl.maximum(seen_to, 0), seq_q))
    begin = tl.maximum(begin, numbers.first_tile * C.score_m)
    return begin, tl.minimum(end, (numbers.first_tile + numbers.tiles) * C.score_m)


# ---------------------------------------------------------------- memory


@triton.jit
def _load_part(
    source, strides, at, first_row, first_column, seq, ROWS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """``[ROWS, part]`` of a sequence from a row and a column on; zero beyond its ends."""
    if C.descriptor:
        tile = tl.reshape(source.load([at[0], at[1], first_row, first_column]), [ROWS, C.part.pad])
    else:
        pointers = source + tl.cast(first_row, tl.int64) * strides[2] * VECTOR + first_column
        pointers += tile_offsets(strides[2], ROWS, C.part, VECTOR, C.far_rows)
        is_column = (first_column + tl.arange(0, C.part.pad) < WIDTH)[None, :]
        tile = tl.load(pointers, mask=(first_row + tl.arange(0, ROWS) < seq)[:, None] & is_column, other=0.0)
    return tile


@triton.jit
def _load_image(image, row, column, columns, C: tl.constexpr):
    """``[tile_m, tile_n]`` of an image, which has all of it."""
    if C.descriptor:
        tile = tl.reshape(image.load([0, 0, row, column]), [C.tile_m, C.tile_n])
    else:
        tile = tl.load(image + _image_offsets(row, column, columns, C))
    return tile


@triton.jit
def _store_image(image, row, column, columns, tile, C: tl.constexpr):
    """Write ``[tile_m, tile_n]`` to an image."""
    if C.descriptor:
        image.store([0, 0, row, column], tl.reshape(tile, [1, 1, C.tile_m, C.tile_n]))
    else:
        tl.store(image + _image_offsets(row, column, columns, C), tile)


@triton.jit
def _rounded(tile, image, C: tl.constexpr):
    """A tile in the dtype of an image."""
    if C.descriptor:
        rounded = tile.to(image.dtype)
    else:
        rounded = tile.to(image.dtype.element_ty)
    return rounded


@triton.jit
def _image_offsets(row, column, columns, C: tl.constexpr):
    """Element offsets ``[tile_m, tile_n]`` from the first of an image, in 64 bits."""
    within = tl.arange(0, C.tile_m)[:, None] * columns + tl.arange(0, C.tile_n)[None, :]
    return tl.cast(row, tl.int64) * columns + column + within


@triton.jit
def _load_sums(sums, first_key, part, seq, C: tl.constexpr):
    """The sums ``[tile_n, part]`` that the turn before has left."""
    rows, columns = first_key + tl.arange(0, C.tile_n), part * C.part + tl.arange(0, C.part.pad)
    offsets = rows.to(tl.int64)[:, None] * C.width + columns[None, :]
    return tl.load(sums + offsets, mask=(rows < seq)[:, None] & (columns < C.width)[None, :], other=0.0)


@triton.jit
def _store_part(target, stride, tile, first_row, part, seq, ROWS: tl.constexpr, C: tl.constexpr):
    """Write fp32 ``[ROWS, part]`` to rows of one head, `stride` elements apart, in the dtype of the target."""
    rows, columns = tl.arange(0, ROWS), part * C.part + tl.arange(0, C.part.pad)
    if C.far_rows:
        rows = rows.to(tl.int64)
    target += tl.cast(first_row, tl.int64) * stride
    is_there = (first_row + rows < seq)[:, None] & (columns < C.width)[None, :]
    tl.store(target + rows[:, None] * stride + columns[None, :], tile.to(target.dtype.element_ty), mask=is_there)
