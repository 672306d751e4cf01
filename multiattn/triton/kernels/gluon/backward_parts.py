"""Parts of all Gluon kernels of a backward: tiles in shared memory, products left under way, statistics of queries.

`C` are the constants of any of them (`gradient_constants.GradientConstants`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from multiattn.triton.kernels.gluon import sequences

# ---------------------------------------------------------------- tiles in shared memory


@gluon.jit
def make_tiles(number: gl.constexpr, maps, C: gl.constexpr):
    """`number` tiles of 64 rows of head_dim, in a piece or two."""
    wide = _make_tiles(number, C.wide, maps[0], C)
    both = (wide, wide)  # the second is not asked for where there is one piece
    if C.narrow > 0:
        both = (wide, _make_tiles(number, C.narrow, maps[1], C))
    return both


@gluon.jit
def _make_tiles(number: gl.constexpr, columns: gl.constexpr, map, C: gl.constexpr):
    if C.packed:
        tiles = gl.allocate_shared_memory(map.dtype, [number, 1, 1, 1, 64, columns], map.layout)
    else:
        tiles = gl.allocate_shared_memory(map.dtype, [number, 1, 1, 64, columns], map.layout)
    return tiles


@gluon.jit
def load_tile(maps, at, head, row, full, buffers, slot, C: gl.constexpr):
    """Rows of one head by TMA; `full` expects them."""
    sequences.load_rows(maps[0], at, head, row, 0, full, buffers[0].index(slot), C)
    if C.narrow > 0:
        sequences.load_rows(maps[1], at, head, row, C.wide, full, buffers[1].index(slot), C)


@gluon.jit
def read_entry(entries, number):
    """The tile of an entry: sequence, first row, and `at` of its queries and of its keys."""
    entry = entries + number * sequences.ENTRY_WORDS
    at_q = (gl.load(entry + 2), gl.load(entry + 3))
    return gl.load(entry), gl.load(entry + 1), at_q, (gl.load(entry + 4), gl.load(entry + 5))


# ---------------------------------------------------------------- products, left under way


@gluon.jit
def multiply_rows(own, other, C: gl.constexpr):
    """``[64, 64]``: rows of one tile times those of another."""
    none = gl.full([64, 64], 0.0, gl.float32, C.scores)
    sums = warpgroup_mma(own[0], other[0].permute((1, 0)), none, use_acc=False, is_async=True)
    if C.narrow > 0:
        sums = warpgroup_mma(own[1], other[1].permute((1, 0)), sums, is_async=True)
    return sums


@gluon.jit
def add_product(weights, tile, wide, narrow, C: gl.constexpr):
    """wide[64, wide] and narrow[64, narrow] += weights[64, 64] times a tile, which registers hold in 16 bit."""
    operand: gl.constexpr = gl.DotOperandLayout(0, C.sums, 2)  # the accumulator's own registers: converting is free
    wide = warpgroup_mma(gl.convert_layout(weights, operand, assert_trivial=True), tile[0], wide, is_async=True)
    if C.narrow > 0:
        operand_narrow: gl.constexpr = gl.DotOperandLayout(0, C.sums_narrow, 2)
        weights = gl.convert_layout(weights, operand_narrow, assert_trivial=True)
        narrow = warpgroup_mma(weights, tile[1], narrow, is_async=True)
    return wide, narrow


@gluon.jit
def await_sums(under_way: gl.constexpr, wide, narrow, C: gl.constexpr):
    """Until no more than so many products of tiles are under way, and these sums are there."""
    number: gl.constexpr = under_way * C.groups
    if C.narrow > 0:
        wide, narrow = warpgroup_mma_wait(number, [wide, narrow])
    else:
        wide = warpgroup_mma_wait(number, [wide])
    return wide, narrow


# ---------------------------------------------------------------- statistics of queries


@gluon.jit
def statistics_of(buffers, slot, C: gl.constexpr):
    """lse or delta of a step's queries, ``[64]``."""
    flat = buffers.index(slot).reshape([1, 64]).load(C.statistics)
    in_order = flat.reshape([4, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([64])
    return gl.convert_layout(in_order, C.column, assert_trivial=True)
