"""Few queries over many keys, in parts: the kernel of the parts, and the one that merges them.

Flash-Decoding (https://pytorch.org/blog/flash-decoding/) over FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 1) in
the log2 domain. All query heads that share keys are rows of one tile, so keys and values come from memory once: row r
of a sequence is query ``r // group`` of the ``r % group``-th of these heads. A program owns one tile of rows and one
part of the keys that they see. Keys may be in a cache, with pages or without, whose lengths only the device knows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.elements import load_in_place
from multiattn.triton.kernels.forward import LOWEST, add_sink, found_max
from multiattn.triton.kernels.scaling import (
    SCALE_MIN,
    UNIT_MIN,
    halved,
    in_dtype_of,
    load_scales,
    scaled,
    scales_of_keys,
    scales_of_values,
)
from multiattn.triton.kernels.tiles import key_blocks, modified, needs_mask, tile_offsets, visible_keys, with_sign

LN_2 = tl.constexpr(0.6931471805599453)


# No code depends on a length, on how many sequences, pages or parts there are, or on where a cache has them.
@triton.jit
def attention_of_parts(
    q,  # pointer, [B, Hq, Sq, D]; with packed queries [1, Hq, T, D]
    k,  # pointer, [B, Hkv, Skv, D]; with pages [pages, Hkv, page_keys, D]
    v,  # like k, of Dv columns; None where it is in k
    out,  # pointer, like q, of Dv columns; None where there are parts
    lse,  # pointer, fp32 [B, Hq, Sq] or [1, Hq, T], contiguous; None where there are parts
    partial_out,  # pointer, fp32 [splits, lines, Dv], a line for each element of lse; None where there is one part
    partial_lse,  # pointer, fp32 [splits, lines], to the base of 2; None where there is one part
    tops,  # pointer, like lse, or where there are parts like partial_lse: the largest scores; None where nobody asks
    scale,  # |scale| times log2(e), positive; with an expression 1
    sizes,  # seq_q (with packed queries T), seq_kv, sequences, heads_q, group (query heads that share one key/value
    #         head), tiles (of rows, in one sequence), splits (parts of the keys)
    strides,  # of q, k and v by (batch or page, head, row), in units of C.vector elements; of out in C.out_vector
    paging,  # page_keys (keys of a page), table_stride (elements from one row of page_table to the next), or None
    reach,  # left and right of a two-sided mask; None for other kinds
    sinks,  # pointer, fp32 [Hq], at a multiple of 4 bytes; None where there are none, or parts
    aux,  # what the program of scores reads, as its functions have it; None without one
    seqlens_kv,  # pointer, int32 [sequences]; None where all have seq_kv keys
    page_table,  # pointer, int32 [sequences, pages]; None without pages
    cu_seqlens_q,  # pointer, int32 [sequences + 1]; None where all have seq_q queries
    scales,  # of keys and values of 8 bits: pointers k and v, fp32 [B, Hkv] or one for each row of k and v, of_k and
    #          of_v, their strides in elements; None for keys of the dtype of q
    C: tl.constexpr,  # multiattn.triton.kernels.constants.SplitConstants
):
    """Attention of tile_m rows over one part of their keys: out and lse, or a part of both."""
    if C.overlaps:
        admit_next_launch()
    tile, head_kv, split, sequence = _my_part(sizes, C)
    start_q, len_q, len_kv = _my_sequence(sequence, sizes, seqlens_kv, cu_seqlens_q, C)
    group = sizes.group
    first_row = tile * C.tile_m
    if first_row >= len_q * group:
        return
    rows = first_row + tl.arange(0, C.tile_m)
    query = rows // group  # [tile_m], in its sequence
    head = head_kv * group + rows % group  # [tile_m]
    exists = query < len_q
    batch = sequence
    if C.packed_queries:
        batch = 0
    row = start_q + query
    line = (batch * sizes.heads_q + head).to(tl.int64) * sizes.seq_q + row  # [tile_m], its place in lse

    band = (len_q, len_kv, reach.left, reach.right)
    blocks = key_blocks(first_row // group, band, C)  # as if the tile had more queries: it never has fewer
    begin, end = _my_keys(blocks, split, sizes.splits, C)
    seen_from = _first_seen(first_row // group, band, C)
    own = q + _offsets(batch, head, row, strides.q, C.vector)[:, None]
    q_tile = _load_queries(own, exists, C.width, C)  # [tile_m, width.pad]
    q_rest = q_tile
    if C.rest > 0:
        q_rest = _load_queries(own + C.width, exists, C.rest, C)  # [tile_m, rest.pad]

    entry = sequence  # of k and v
    if C.paged:
        entry = 0
        page_table += sequence.to(tl.int64) * paging.table_stride
    k += (tl.cast(entry, tl.int64) * strides.k[0] + head_kv.to(tl.int64) * strides.k[1]) * C.key_vector
    if not C.v_in_k:
        v += (tl.cast(entry, tl.int64) * strides.v[0] + head_kv.to(tl.int64) * strides.v[1]) * C.key_vector

    v_factor, scaling = 1.0, None
    if C.stored is not None:
        k_scales, k_factor, sign = scales_of_keys(scales, sequence, entry, head_kv, C)
        v_scales, v_factor = scales_of_values(scales, sequence, entry, head_kv, begin < end, C)
        q_tile, q_rest, factor = halved(q_tile, q_rest, sign, C)
        factor = factor * k_factor  # [tile_m]
        scaling = (scales, k_scales, v_scales, factor)
        if C.has_score:  # the program wants scaled products
            scale = tl.full([C.tile_m], 1.0, tl.float32)
        else:
            scale = scale * factor
            scale = tl.where(scale < SCALE_MIN, SCALE_MIN, scale)  # 0 times the -inf of a hidden key is NaN; NaN stays

    acc = tl.full([C.tile_m, C.width_v.pad], 0.0, tl.float32)
    row_max = tl.full([C.tile_m], LOWEST, tl.float32)
    row_sum = tl.full([C.tile_m, C.sum_columns], 0.0, tl.float32)
    unit = row_max
    if C.scales_values:
        unit = tl.full([C.tile_m], UNIT_MIN, tl.float32)
    sums = (acc, row_max, row_sum, unit)
    queries = (q_tile, q_rest, query, scale)
    cached = (k, v, strides, page_table, (seen_from, end, paging), scaling)
    of_score = (sequence, head[:, None], aux)
    if C.has_mask:  # two loops: where a branch loads a mask, Triton makes the walk over all keys a slow one
        tail = _tail(begin, end, len_kv, aux, C)
        sums = _attend(sums, queries, cached, begin, tail, blocks, of_score, band, False, C)
        sums = _attend(sums, queries, cached, tail, end, blocks, of_score, band, True, C)
    else:
        sums = _attend(sums, queries, cached, begin, end, blocks, of_score, band, False, C)
    acc, row_max, row_sum, unit = sums
    if C.scales_values:
        v_factor = unit[:, None]

    total = tl.sum(row_sum, 1)  # [tile_m]
    columns = tl.arange(0, C.width_v.pad)[None, :]
    inside = exists[:, None] & (columns < C.width_v)
    if C.whole:
        if tops is not None:
            tl.store(tops + line, found_max(row_max) * LN_2, mask=exists)
        if sinks is not None:
            acc, total, row_max = add_sink(acc, total, row_max, tl.load(sinks + head), C)
        # A row that saw no key and no sink has the total 0: out is 0 / 1, lse is LOWEST + log(0) = -inf.
        tl.store(lse + line, (row_max + tl.math.log2(total)) * LN_2, mask=exists)
        result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]  # [tile_m, width_v.pad]
        if C.stored is not None:
            result = result * v_factor
        out += _offsets(batch, head, row, strides.out, C.out_vector)[:, None] + columns
        tl.store(out, result.to(out.dtype.element_ty), mask=inside)
    else:
        lines = _lines(sizes, C)
        part = split.to(tl.int64) * lines + line
        tl.store(partial_lse + part, row_max + tl.math.log2(total), mask=exists)
        if tops is not None:
            tl.store(tops + part, found_max(row_max), mask=exists)
        result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        if C.stored is not None:
            result = result * v_factor
        tl.store(
            partial_out + part[:, None] * C.width_v + columns, result, mask=inside & (total != 0.0)[:, None]
        )  # what nobody reads is not written


@triton.jit
def _attend(sums, queries, cached, begin, end, blocks, of_score, band, TAIL: tl.constexpr, C: tl.constexpr):
    """The sums with the keys from `begin` to `end`. TAIL: the program's mask may hide some of these."""
    acc, row_max, row_sum, unit = sums
    q_tile, q_rest, query, scale = queries
    score_scale = scale
    if C.stored is not None:
        score_scale = scale[:, None]
    k, v, strides, page_table, limits, scaling = cached
    ahead = _pages(page_table, begin, limits, False, C)
    for first_key in tl.range(begin, end, C.tile_n, num_stages=1 if TAIL else C.stages):
        pages = ahead
        if C.paged:
            ahead = _pages(page_table, first_key + C.tile_n, limits, True, C)
        k_tile = _load_keys(k, strides.k, pages, first_key, limits, C.width, C)  # [tile_n, width.pad]
        k_tile = in_dtype_of(q_tile, k_tile, C)
        scores = tl.dot(q_tile, tl.trans(k_tile))  # [tile_m, tile_n] fp32
        if C.rest > 0:
            rest_tile = _load_keys(k + C.width, strides.k, pages, first_key, limits, C.rest, C)  # [tile_n, rest.pad]
            rest_tile = in_dtype_of(q_rest, rest_tile, C)
            scores = tl.dot(q_rest, tl.trans(rest_tile), scores)
        if C.scales_keys:
            is_key = _is_key(first_key, limits, C)
            scales = load_scales(scaling[1], scaling[0].of_k, pages, first_key, limits[2], is_key, C)
            scores = scores * scales[None, :]
        if C.stored is not None and C.has_score:
            scores = scores * scaling[3][:, None]
        keys = first_key + tl.arange(0, C.tile_n)
        scores = modified(scores, query[:, None], keys[None, :], of_score, band, C)
        if TAIL or C.masks_all or needs_mask(first_key, band[1], blocks, C):
            visible = visible_keys(query[:, None], keys[None, :], of_score, band, TAIL, C)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * score_scale - new_max[:, None])
        decay = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * decay[:, None] + _summed(weights, C)
        acc = acc * decay[:, None]
        row_max = new_max

        v_tile = k_tile  # [tile_n, width_v.pad]
        if not C.v_in_k:
            v_tile = in_dtype_of(q_tile, _load_keys(v, strides.v, pages, first_key, limits, C.width_v, C), C)
            if C.scales_values:
                is_key = _is_key(first_key, limits, C)
                v_scale = load_scales(scaling[2], scaling[0].of_v, pages, first_key, limits[2], is_key, C)  # [tile_n]
                weights, acc, unit = scaled(weights, acc, v_scale, unit)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc)
    return acc, row_max, row_sum, unit


@triton.jit
def _my_part(sizes, C: tl.constexpr):
    """The tile of rows, head of keys, part of the keys and sequence that this program owns.

    Tiles that read the same keys run side by side, and so do heads, which pages may have side by side. Under a mask the
    last rows, which see the most keys, go first.
    """
    heads_kv = sizes.heads_q // sizes.group
    program = tl.program_id(0)
    tile = program % sizes.tiles
    program = program // sizes.tiles
    head_kv = program % heads_kv
    program = program // heads_kv
    if C.is_banded:
        tile = sizes.tiles - 1 - tile
    return tile, head_kv, program % sizes.splits, program // sizes.splits


@triton.jit
def _my_sequence(sequence, sizes, seqlens_kv, cu_seqlens_q, C: tl.constexpr):
    """The first row of a sequence in q, and how many queries and keys it has: of those that there are, whatever the
    device says.
    """
    start_q, len_q, len_kv = 0, sizes.seq_q, sizes.seq_kv
    if C.cached:
        len_kv = _clamped(tl.load(seqlens_kv + sequence), 0, sizes.seq_kv)
    if C.packed_queries:
        start_q = _clamped(tl.load(cu_seqlens_q + sequence), 0, sizes.seq_q)
        len_q = _clamped(tl.load(cu_seqlens_q + sequence + 1), start_q, sizes.seq_q) - start_q
    return start_q, len_q, len_kv


@triton.jit
def _clamped(number, least, most):
    """A number, or the nearest that is from `least` to `most`."""
    return tl.minimum(tl.maximum(number, least), most)


@triton.jit
def _my_keys(blocks, split, splits, C: tl.constexpr):
    """The part of the keys that a tile of rows sees: [begin, end), whole tiles of keys but for the last one."""
    begin, _full_begin, _full_end, end = blocks
    if not C.whole:
        tiles = (tl.maximum(end - begin, 0) + C.tile_n - 1) // C.tile_n
        each, more = tiles // splits, tiles % splits  # the first parts have one tile more
        first = split * each + tl.minimum(split, more)
        last = first + each + (split < more).to(tl.int32)
        end = tl.minimum(begin + last * C.tile_n, end)
        begin += first * C.tile_n
    return begin, end


@triton.jit
def _tail(begin, end, len_kv, aux, C: tl.constexpr):
    """The first tile, of those from `begin` to `end`, with keys that the program's mask may hide."""
    hidden = tl.cast(C.score.tail(0, 0, 0, 0, 0, 0, aux), tl.int32)
    first = tl.maximum(len_kv - hidden, 0) // C.tile_n * C.tile_n
    return tl.minimum(tl.maximum(first, begin), tl.maximum(begin, end))


@triton.jit
def _first_seen(first_query, band, C: tl.constexpr):
    """The first key of a cache that any query from one on sees: pages before it may be freed."""
    seq_q, seq_kv, left, _right = band
    first = 0
    if C.frees_keys:
        first = tl.maximum(first_query + seq_kv - seq_q - left, 0)
    return first


@triton.jit
def _lines(sizes, C: tl.constexpr):
    """Elements of lse."""
    lines = tl.cast(sizes.heads_q, tl.int64) * sizes.seq_q
    if not C.packed_queries:
        lines = lines * sizes.sequences
    return lines


@triton.jit
def _summed(weights, C: tl.constexpr):
    """The weights ``[tile_m, tile_n]`` of each row, or their sum ``[tile_m, 1]``.

    A tile of few rows has its keys in different warps, which would wait for each other for each sum.
    """
    if C.sum_columns == 1:
        weights = tl.sum(weights, 1, keep_dims=True)
    return weights


# ---------------------------------------------------------------- memory


@triton.jit
def _offsets(batch, head, row, strides, VECTOR: tl.constexpr):
    """Elements from the start of q or out to rows of heads, in 64 bits."""
    far = tl.cast(batch, tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    return far * VECTOR


@triton.jit
def _load_queries(rows, exists, WIDTH: tl.constexpr, C: tl.constexpr):
    """Columns of q from where `rows` point, ``[tile_m, WIDTH.pad]``, with the sign of the scale."""
    columns = tl.arange(0, WIDTH.pad)[None, :]
    return with_sign(tl.load(rows + columns, mask=exists[:, None] & (columns < WIDTH), other=0.0), C)


@triton.jit
def _pages(page_table, first_key, limits, AHEAD: tl.constexpr, C: tl.constexpr):
    """The page of a tile of keys, or if it is in several the page of each key ``[tile_n]``; 0 without pages.

    `limits` is (seen_from, end, the kernel's `paging`). Keys before `seen_from` or from `end` on are in the page of the
    nearest one between: their own entries may have any number. A page that has all of a tile has a key that is seen.

    AHEAD: for the next tile of the walk, if there is one. That is not loaded by tl.load: Triton would take it for one
    more load to be pipelined, and would then have fewer tiles in flight.
    """
    seen_from, end, paging = limits
    pages = 0
    if C.paged:
        keys = first_key
        if C.page > 0:
            keys = first_key + tl.arange(0, C.tile_n)
            if C.frees_keys:
                keys = tl.maximum(keys, seen_from)
            places = tl.minimum(keys, end - 1) // C.page
        else:
            places = tl.minimum(keys, end - 1) // paging.page_keys
        if not AHEAD:
            pages = tl.load(page_table + places, mask=keys < end, other=0)
        elif C.compiled:
            pages = load_in_place(page_table + places)
        else:
            pages = tl.load(page_table + places)
    return pages


@triton.jit
def _load_keys(source, strides, pages, first_key, limits, WIDTH: tl.constexpr, C: tl.constexpr):
    """A tile ``[tile_n, WIDTH.pad]`` of keys or values of one head; zero before `seen_from`, from `end` on, and beyond
    the columns that there are.

    So nothing that is beyond a sequence or freed reaches a product: a weight of 0 would not hide NaN.
    """
    _seen_from, _end, paging = limits
    if C.page > 0:
        keys = (first_key + tl.arange(0, C.tile_n)) % C.page
        places = pages.to(tl.int64) * strides[0] + keys.to(tl.int64) * strides[2]  # [tile_n]
        pointers = source + (places * C.key_vector)[:, None] + tl.arange(0, WIDTH.pad)[None, :]
    else:
        row = first_key
        if C.paged:
            source += pages.to(tl.int64) * strides[0] * C.key_vector
            row = first_key % paging.page_keys
        source += tl.cast(row, tl.int64) * strides[2] * C.key_vector
        pointers = source + tile_offsets(strides[2], C.tile_n, WIDTH, C.key_vector, C.far_rows)
    inside = _is_key(first_key, limits, C)[:, None] & (tl.arange(0, WIDTH.pad) < WIDTH)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _is_key(first_key, limits, C: tl.constexpr):
    """The keys of a tile from `seen_from` to `end`: bool ``[tile_n]``."""
    seen_from, end, _paging = limits
    is_key = first_key + tl.arange(0, C.tile_n) < end
    if C.frees_keys:
        is_key = is_key & (first_key + tl.arange(0, C.tile_n) >= seen_from)
    return is_key


# ---------------------------------------------------------------- the merge


@triton.jit
def merge_splits(
    partial_out,  # pointer, fp32 [splits, lines, Dv], as `attention_of_parts` writes it
    partial_lse,  # pointer, fp32 [splits, lines]
    out,  # pointer, [B, Hq, Sq, Dv] or [1, Hq, T, Dv]
    lse,  # pointer, fp32 [lines]
    partial_max,  # pointer, like partial_lse; None where nobody asks for the largest scores
    tops,  # pointer, like lse; None with partial_max
    sizes,  # seq_q (with packed queries T), sequences, heads_q, splits
    out_strides,  # of (batch, head, row), in units of C.out_vector elements
    sinks,  # pointer, fp32 [Hq], at a multiple of 4 bytes; None where there are none
    cu_seqlens_q,  # pointer, int32 [sequences + 1]; None where queries are not packed
    C: tl.constexpr,  # multiattn.triton.kernels.constants.MergeConstants
):
    """Some columns of some lines: each the sum of its parts, weighted by their sums of weights. All parts at once."""
    if C.overlaps:
        await_launch_before()
    blocks = (C.head_dim_v + C.columns - 1) // C.columns
    program = tl.program_id(0)
    lines = _lines(sizes, C)
    line = (program // blocks).to(tl.int64) * C.lines + tl.arange(0, C.lines)  # [lines]
    row = line % sizes.seq_q
    head = line // sizes.seq_q % sizes.heads_q
    batch = line // sizes.seq_q // sizes.heads_q
    exists = line < lines
    if C.packed_queries:  # rows before the first sequence and behind the last are left as they are
        exists = exists & (row >= tl.load(cu_seqlens_q)) & (row < tl.load(cu_seqlens_q + sizes.sequences))

    part = tl.arange(0, C.parts)
    parts = part.to(tl.int64)[None, :] * lines + line[:, None]  # [lines, parts]
    in_parts = exists[:, None] & (part < sizes.splits)[None, :]
    its_lse = tl.load(partial_lse + parts, mask=in_parts, other=float("-inf"))  # [lines, parts]
    row_max = tl.maximum(tl.max(its_lse, 1), LOWEST)  # [lines]
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exists, other=0.0) * (1.0 / LN_2)
        row_max = tl.maximum(row_max, sink)
    weights = tl.math.exp2(its_lse - row_max[:, None])  # [lines, parts]
    total = tl.sum(weights, 1)  # [lines]
    if sinks is not None:
        total += tl.math.exp2(sink - row_max)

    columns = program % blocks * C.columns + tl.arange(0, C.columns)
    has_keys = its_lse != float("-inf")  # the memory of the others is not written
    its_out = tl.load(
        partial_out + (parts * C.head_dim_v)[:, :, None] + columns[None, None, :],
        mask=has_keys[:, :, None] & (columns < C.head_dim_v)[None, None, :],
        other=0.0,
    )  # [lines, parts, columns]
    acc = tl.sum(its_out * weights[:, :, None], 1)  # [lines, columns]
    result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    out += _offsets(batch, head, row, out_strides, C.out_vector)[:, None] + columns[None, :]
    tl.store(out, result.to(out.dtype.element_ty), mask=exists[:, None] & (columns < C.head_dim_v)[None, :])
    if program % blocks == 0:
        tl.store(lse + line, (row_max + tl.math.log2(total)) * LN_2, mask=exists)
        if tops is not None:
            its_max = tl.load(partial_max + parts, mask=in_parts, other=float("-inf"))  # [lines, parts]
            tl.store(tops + line, tl.max(its_max, 1) * LN_2, mask=exists)


@triton.jit
def admit_next_launch():
    """Let the next kernel begin as soon as every program of this one has: it waits for the end of all by itself."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def await_launch_before():
    """Wait for the end of the kernel before, and see what it wrote."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], tl.int32, is_pure=False, pack=1)
