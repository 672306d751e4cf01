"""Tiles of rows: in shared memory, by TMA, and in products that are left under way.

A row is one power of two or two: tiles, their buffers, tensor maps and sums of products are tuples of its pieces.
Those of v are as wide as those of q and k, but may be one where these are two, or two where these are one. Buffers that
both share have two. `C` are the constants of any Gluon kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from multiattn.packed import RAGGED_ROWS
from multiattn.triton.kernels.gluon import ring

# Triton 3.6 has the long names, 3.9 the short ones; between them both.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

ROWS = gl.constexpr(RAGGED_ROWS)

# ---------------------------------------------------------------- in shared memory


@gluon.jit
def make_tiles(number: gl.constexpr, maps):
    """Buffers of `number` tiles, each of the rows that the maps have."""
    return [gl.allocate_shared_memory(map.dtype, [number] + map.block_shape, map.layout) for map in maps]


@gluon.jit
def piece_of(buffer, slot):
    """A piece of a tile, ``[rows, columns]``."""
    return buffer.index(slot).reshape([buffer.shape[-2], buffer.shape[-1]])


@gluon.jit
def tile_of(buffers, slot):
    """A tile of rows."""
    return [piece_of(buffer, slot) for buffer in buffers]


@gluon.jit
def zipped(first, second):
    """Pairs of the pieces of two, as many as the second has."""
    pairs = [(first[0], second[0])]
    if len(second) > 1:
        pairs = [pairs[0], (first[1], second[1])]
    return pairs


# ---------------------------------------------------------------- by TMA

# A tile's place is `at`: the batch entry, or in a packed batch the first row and the number of rows of its sequence.
# There a tensor map has five dimensions (`multiattn.packed.ragged`), and rows end where the coordinates say: beyond the
# last one of the sequence loads give zeros, and stores write nothing.


@gluon.jit
def load_piece(map, at, head, row, column, full, buffer, C: gl.constexpr):
    """Some columns of rows of one head from `row` of its sequence on; `full` expects them."""
    if C.packed:
        offset, rows = at
        tma_load(map, [ROWS, offset + rows, head, ROWS - rows + row, column], full, buffer)
    else:
        tma_load(map, [at, head, row, column], full, buffer)


@gluon.jit
def store_piece(map, at, head, row, column, buffer, C: gl.constexpr):
    """The other way."""
    if C.packed:
        offset, rows = at
        tma_store(map, [ROWS, offset + rows, head, ROWS - rows + row, column], buffer)
    else:
        tma_store(map, [at, head, row, column], buffer)


@gluon.jit
def load_tile(maps, at, head, row, full, buffers, slot, C: gl.constexpr):
    """Rows of one head from `row` of its sequence on, not before the first in a packed batch; `full` expects them."""
    for piece in gl.static_range(len(maps)):
        load_piece(maps[piece], at, head, row, piece * C.wide, full, buffers[piece].index(slot), C)


@gluon.jit
def store_tile(maps, at, head, row, buffers, slot, C: gl.constexpr):
    """The other way."""
    for piece in gl.static_range(len(maps)):
        store_piece(maps[piece], at, head, row, piece * C.wide, buffers[piece].index(slot), C)


@gluon.jit
def send_tile(maps, at, head, block, ring_of, place, buffers, C: gl.constexpr):
    """A block of rows into the slot of a place of its ring, as soon as nobody needs what is there."""
    rows: gl.constexpr = buffers[0].shape[-2]
    slot, full = await_slot(maps, ring_of, place, buffers, C)
    load_tile(maps, at, head, block * rows, full, buffers, slot, C)


@gluon.jit
def await_slot(maps, ring_of, place, buffers, C: gl.constexpr):
    """The slot of a place, once nobody needs what is there, and its barrier, which expects a tile."""
    slot = place % ring_of.full.shape[0]
    rows: gl.constexpr = buffers[0].shape[-2]
    ring.await_empty(ring_of, place)
    full = ring_of.full.index(slot)
    columns: gl.constexpr = C.wide + C.narrow if len(maps) > 1 else C.wide
    mbarrier.expect(full, 2 * rows * columns)
    return slot, full


# ---------------------------------------------------------------- products, left under way


@gluon.jit
def multiply_piece(own, other, sums, IS_FIRST: gl.constexpr):
    """A product of `multiply_rows`."""
    return warpgroup_mma(own, other.permute((1, 0)), sums, use_acc=not IS_FIRST, is_async=True)


@gluon.jit
def multiply_rows(own, other, C: gl.constexpr):
    """``[64, tile_n]``: rows of one tile times those of another, in the pieces that this has."""
    none = gl.full([64, C.tile_n], 0.0, gl.float32, C.scores)
    sums = multiply_piece(own[0], other[0], none, True)
    if len(other) > 1:
        sums = multiply_piece(own[1], other[1], sums, False)
    return sums


@gluon.jit
def load_rows(tile, C: gl.constexpr):
    """A tile of 64 rows in registers, as left operand of `multiply_rows`."""
    return [piece.load(gl.DotOperandLayout(0, C.scores, 2)) for piece in tile]


@gluon.jit
def zero_sums(PIECES: gl.constexpr, C: gl.constexpr):
    """An output or a gradient of 64 rows."""
    sums = [gl.full([64, C.wide], 0.0, gl.float32, C.sums[0])]
    if PIECES > 1:
        sums = [sums[0], gl.full([64, C.narrow], 0.0, gl.float32, C.sums[1])]
    return sums


@gluon.jit
def add_piece(weights, tile, sums):
    """A product of `add_product`. Weights are converted to the accumulator's own registers, which is free."""
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, sums.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(operand, tile, sums, is_async=True)


@gluon.jit
def add_product(weights, tile, sums):
    """sums += weights[64, rows of the tile] times the tile; weights are in registers, in 16 bit."""
    return [add_piece(weights, pair[0], pair[1]) for pair in zipped(tile, sums)]


@gluon.jit
def await_sums(under_way: gl.constexpr, sums):
    """Until no more than so many products of pieces are under way, and these sums are there."""
    if len(sums) > 1:
        sums = warpgroup_mma_wait(under_way, [sums[0], sums[1]])
    else:
        sums = [warpgroup_mma_wait(under_way, [sums[0]])]
    return sums


@gluon.jit
def _multiply(sums, factor):
    return sums * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def multiply_sums(sums, factor):
    """Each row times its number."""
    return [_multiply(piece, factor) for piece in sums]


@gluon.jit
def write_sums(sums, tile):
    """Sums in the 16 bits of a tile in shared memory, for TMA to see after a fence."""
    for piece in gl.static_range(len(sums)):
        tile[piece].store(sums[piece].to(tile[piece].dtype))
