"""Before and after the Gluon kernels of gradients: what they must know of each query, dq's way out of the workspace.

Plain `triton.language`, a program for 64 queries of one head. `C` is a `StatisticsConstants`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multiattn.triton.kernels.decode import admit_next_launch, await_launch_before

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(tiles, heads_q, seq_q, entries, sequences, C: tl.constexpr):
    """The program's tile: its number among those of its head, -1 for none; (batch, head), also as one number; its first
    row, the rows of its sequence, the first of these, and whether the workspace has a place for the tile.

    In a packed batch an entry of the list has it. A sequence begins with a tile of its own: each of those before it has
    at most one more than its rows fill. Rows before the first sequence, which nobody asks for, have no such place. The
    last tile is of no queries.
    """
    program = tl.program_id(0)
    batch_head = program // tiles
    tile = program - batch_head * tiles
    first_row, length, start, has_place = tile * 64, seq_q, 0, True
    if C.packed:
        is_last = tile == tiles - 1
        entry = entries + tl.where(is_last, 0, tile) * 8
        number = tl.load(entry)
        first_row = tl.load(entry + 1)
        start = tl.load(entry + 2)
        length = tl.where(is_last, 0, tl.load(entry + 3))
        has_place = is_last | (number <= sequences)
        tile = tl.where(is_last, tile, tl.where(number < 0, -1, start // 64 + number + first_row // 64))
    return tile, (batch_head // heads_q, batch_head % heads_q), batch_head, first_row, length, start, has_place


@triton.jit
def _rows(first_row, strides, at, start, C: tl.constexpr):
    """Offsets of the first elements of 64 rows, ``[64, 1]``, in 64 bits; strides are in units of 8 elements."""
    rows = (start + first_row + tl.arange(0, 64)).to(tl.int64)
    return ((at[0].to(tl.int64) * strides[0] + at[1].to(tl.int64) * strides[1] + rows * strides[2]) * 8)[:, None]


@triton.jit(do_not_specialize=["sequences", "dlse_rows", "seq_q", "heads_q", "tiles"])
def prepare_statistics(
    out,  # pointer, [B, Hq, Sq, Dv]
    dout,  # pointer, like out
    lse,  # pointer, fp32 [B, Hq, Sq], contiguous
    dlse,  # pointer, like lse; any pointer where dlse_rows is 0
    delta,  # pointer, like lse: written for others, too; None where nobody else wants it
    statistics,  # pointer, fp32 [B, Hq, tiles, 2, 64], contiguous
    dq_fragments,  # pointer, fp32 [B, Hq, tiles, 64 * columns], contiguous; None where dq is not summed up there
    counter,  # pointer, int32; None where nobody counts
    query_list,  # pointer, int32 [tiles - 1, 8]: a packed batch's tiles of queries; None in others
    sequences,  # of a packed batch; None in others
    dlse_rows,  # seq_q, or 0 where there is no dlse
    seq_q,
    heads_q,
    tiles,  # of 64 queries, of one head
    out_strides,  # of out and dout
    C: tl.constexpr,  # multiattn.triton.kernels.constants.StatisticsConstants
):
    """lse in the log2 domain, and ``delta = rowsum(dout * out) - dlse``; zero in the sums of dq, and in the counter.

    A query that is not there, or sees no key, gets an lse of inf: its weights are 0. Of 16 queries those that a thread
    of the kernel of gradients wants, two in two neighbouring accumulators of 8 columns, are together.
    """
    admit_next_launch()
    await_launch_before()
    tile, at, batch_head, first_row, length, start, has_place = _place(tiles, heads_q, seq_q, query_list, sequences, C)
    if counter is not None:
        if tl.program_id(0) == 0:
            tl.store(counter, 0)
    if C.packed:
        if tile < 0:
            return
    rows = first_row + tl.arange(0, 64)
    is_there = rows < length
    columns = tl.arange(0, C.width_v.pad)[None, :]
    inside = is_there[:, None] & (columns < C.width_v)
    offsets = _rows(first_row, out_strides, at, start, C) + columns
    of_out = tl.load(out + offsets, mask=inside, other=0.0).to(tl.float32)  # [64, width_v.pad]
    of_dout = tl.load(dout + offsets, mask=inside, other=0.0).to(tl.float32)
    place = batch_head.to(tl.int64) * seq_q + start + rows
    row_delta = tl.sum(of_out * of_dout, 1)
    row_delta -= tl.load(dlse + place, mask=rows < tl.minimum(dlse_rows, length), other=0.0)
    if delta is not None:
        tl.store(delta + place, row_delta, mask=is_there)
    if C.packed:
        if not has_place:
            return
    row_lse = tl.load(lse + place, mask=is_there, other=float("-inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E)
    query = tl.arange(0, 64)
    of_query = query // 16 * 16 + query % 8 // 2 * 4 + query // 8 % 2 * 2 + query % 2
    lines = statistics + (batch_head.to(tl.int64) * tiles + tile) * 128
    tl.store(lines + of_query, row_lse)
    tl.store(lines + 64 + of_query, row_delta)
    if dq_fragments is not None:
        sums = dq_fragments + (batch_head.to(tl.int64) * tiles + tile) * (64 * (C.wide + C.narrow))
        tl.store(sums + tl.arange(0, 64 * C.wide), tl.full([64 * C.wide], 0.0, tl.float32))
        if C.narrow > 0:
            tl.store(sums + 64 * C.wide + tl.arange(0, 64 * C.narrow), tl.full([64 * C.narrow], 0.0, tl.float32))


@triton.jit
def _piece(sums, COLUMNS: tl.constexpr):
    """``[64, COLUMNS]`` of dq from the order of the accumulators of wgmma, where four of a thread are together."""
    flat = tl.load(sums + tl.arange(0, 64 * COLUMNS))
    parts = tl.reshape(flat, [4, COLUMNS // 8, 8, 4, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 4, 2, 1, 3, 5)), [64, COLUMNS])


@triton.jit(do_not_specialize=["sequences", "seq_q", "heads_q", "tiles"])
def round_dq(
    dq_fragments,  # pointer, fp32 [B, Hq, tiles, 64 * columns], contiguous
    dq,  # pointer, [B, Hq, Sq, D]
    query_list,  # pointer, as before
    sequences,  # as before
    grad_factor,  # scale, with its sign
    seq_q,
    heads_q,
    tiles,  # of 64 queries, of one head
    dq_strides,
    C: tl.constexpr,  # multiattn.triton.kernels.constants.StatisticsConstants
):
    """dq of 64 queries from their sums."""
    admit_next_launch()
    await_launch_before()
    tile, at, batch_head, first_row, length, start, has_place = _place(tiles, heads_q, seq_q, query_list, sequences, C)
    if C.packed:
        if tile < 0:
            return
    sums = dq_fragments + (batch_head.to(tl.int64) * tiles + tile) * (64 * (C.wide + C.narrow))
    is_there = (first_row + tl.arange(0, 64) < length)[:, None]
    offsets = _rows(first_row, dq_strides, at, start, C)
    columns = tl.arange(0, C.wide)[None, :]
    total = _piece(sums, C.wide) * grad_factor
    if C.packed:
        total = tl.where(has_place, total, 0.0)
    tl.store(dq + offsets + columns, total.to(dq.dtype.element_ty), mask=is_there & (columns < C.width))
    if C.narrow > 0:
        columns = C.wide + tl.arange(0, C.narrow)[None, :]
        total = _piece(sums + 64 * C.wide, C.narrow) * grad_factor
        if C.packed:
            total = tl.where(has_place, total, 0.0)
        tl.store(dq + offsets + columns, total.to(dq.dtype.element_ty), mask=is_there & (columns < C.width))
