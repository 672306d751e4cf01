"""Parts of both Gluon kernels of a backward in two passes: products, masks, and how gradients are stored.

`sizes` is ``(seq_q, seq_kv, heads_q, group, tiles, heads, together, left, right, tiles_q)``: `tiles` and `heads` are
those that the kernel owns, `tiles_q` tiles of statistics of a head. In a packed batch the lengths are those of a tile's
sequence, and `batch` is its number. `C` is the kernel's `TwoPassConstants`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multiattn.triton.kernels.gluon import ring

# Words of shared memory that say what a tile is.
FIRST, HEAD, BATCH, OFFSET, FIRST_TILE, LEN_Q, LEN_KV = (gl.constexpr(i) for i in range(7))
WORDS = gl.constexpr(7)


# ---------------------------------------------------------------- tiles in shared memory


@gluon.jit
def read_tile_rows(tile, C: gl.constexpr):
    """The tile as left operand of `multiply_rows`, in registers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, C.scores, 2)
    wide = tile[0].load(operand)
    both = (wide, wide)
    if C.narrow > 0:
        both = (wide, tile[1].load(operand))
    return both


@gluon.jit
def expect_tile(full, C: gl.constexpr):
    """Arrives, for a tile that is about to be loaded."""
    mbarrier.expect(full, C.tile_bytes)


# ---------------------------------------------------------------- gradients in registers


@gluon.jit
def zero_sums(C: gl.constexpr):
    """A gradient of 64 rows, in a piece or two."""
    wide = gl.full([64, C.wide], 0.0, gl.float32, C.sums)
    narrow = wide
    if C.narrow > 0:
        narrow = gl.full([64, C.narrow], 0.0, gl.float32, C.sums_narrow)
    return wide, narrow


# ---------------------------------------------------------------- weights


@gluon.jit
def weigh(products, queries, keys, lse, score_factor, of_score, sizes, C: gl.constexpr):
    """Weights ``2^(score - lse)``, and the same times how much a score moves with the scaled ``q @ k^T``.

    `queries`, `keys` and `lse` are along their axes of the products; `of_score` is (batch, query head, aux).
    """
    if C.score is not None:
        batch, head, aux = of_score
        scores, slope = C.score.score_and_slope(products, batch, head, queries, keys, sizes[0], sizes[1], aux)
        weights = gl.exp2(scores - lse)
        moving = weights
        if C.has_slope:  # selected, as a slope may be inf where a weight is 0
            moving = gl.where(weights == 0.0, 0.0, weights * slope)
    else:
        weights = gl.exp2(products * score_factor - lse)
        moving = weights
    return weights, moving


# ---------------------------------------------------------------- masks


@gluon.jit
def hide(values, queries, keys, sizes, C: gl.constexpr):
    """0 in place of what the mask hides, and of keys behind the last. Selected, as what is hidden may be inf.

    `queries` and `keys` are numbers along the one and the other axis of values.
    """
    seq_q, seq_kv = sizes[0], sizes[1]
    level = queries + (seq_kv - seq_q)
    if C.two_sided:
        begin = level - sizes[7]
        end = gl.minimum(level + 1 + sizes[8], seq_kv)
        if C.score is not None:
            end = gl.where(queries < seq_q, end, begin)
        values = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p;}", "=f,f,r,r",
            [values, keys - begin, gl.maximum(end - begin, 0)], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        end = gl.minimum(level + 1, seq_kv) if C.banded else 0 * queries + seq_kv
        if C.score is not None:  # of a query that is not there it may be anything
            end = gl.where(queries < seq_q, end, 0)
        values = gl.inline_asm_elementwise(
            "{.reg .pred p; setp.gt.s32 p, $2, 0; selp.f32 $0, $1, 0f00000000, p;}", "=f,f,r",
            [values, end - keys], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return values


# ---------------------------------------------------------------- gradients to memory


@gluon.jit
def store_gradient(target, stride, wide, narrow, factor, first_row, rows, C: gl.constexpr):
    """Rows of a gradient times a factor, those before `rows`; `stride` is in units of 8 elements."""
    _store_piece(target, stride, wide * factor, first_row, rows, False, C)
    if C.narrow > 0:
        _store_piece(target, stride, narrow * factor, first_row, rows, True, C)


@gluon.jit
def _store_piece(target, stride, values, first_row, rows, IS_NARROW: gl.constexpr, C: gl.constexpr):
    column: gl.constexpr = C.wide if IS_NARROW else 0
    columns: gl.constexpr = C.narrow if IS_NARROW else C.wide
    between: gl.constexpr = C.between_narrow if IS_NARROW else C.between
    layout: gl.constexpr = C.stored_narrow if IS_NARROW else C.stored
    values = gl.convert_layout(gl.convert_layout(values.to(target.dtype.element_ty), between), layout)
    numbers = first_row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    places = column + gl.arange(0, columns, gl.SliceLayout(0, layout))
    offsets = (numbers.to(gl.int64) * stride * 8)[:, None] + places[None, :]
    mask = (numbers < rows)[:, None]
    if column + columns > C.head_dim:
        mask = mask & (places < C.head_dim)[None, :]
    gl.store(target + offsets, values, mask=mask)


@gluon.jit
def seek(target, strides, batch, offset, head, C: gl.constexpr):
    """The first row of a head of one sequence; strides of (batch, head, row) are in units of 8 elements."""
    if C.packed:
        first = offset.to(gl.int64) * strides[2]
    else:
        first = batch.to(gl.int64) * strides[0]
    return target + (first + head.to(gl.int64) * strides[1]) * 8


# ---------------------------------------------------------------- tiles and their sequences


@gluon.jit
def write_tile(words, slot, first, head, batch):
    """Tell consumers about a tile."""
    ring.write_word(words, slot * WORDS + FIRST, first)
    ring.write_word(words, slot * WORDS + HEAD, head)
    ring.write_word(words, slot * WORDS + BATCH, batch)


@gluon.jit
def write_sequence(words, slot, offset, first_tile, at_q, at_kv):
    """The sequence of a packed tile: first of its rows, and first of its tiles of statistics."""
    ring.write_word(words, slot * WORDS + OFFSET, offset)
    ring.write_word(words, slot * WORDS + FIRST_TILE, first_tile)
    ring.write_word(words, slot * WORDS + LEN_Q, at_q[1])
    ring.write_word(words, slot * WORDS + LEN_KV, at_kv[1])


@gluon.jit
def read_tile(words, slot):
    """First row, head and batch entry of a tile."""
    first = ring.read_word(words, slot * WORDS + FIRST)
    head = ring.read_word(words, slot * WORDS + HEAD)
    return first, head, ring.read_word(words, slot * WORDS + BATCH)


@gluon.jit
def read_sequence(words, slot, sizes, C: gl.constexpr):
    """First row and first tile of statistics of a tile's sequence, 0 but for packed batches, and its lengths."""
    offset = 0
    first_tile = 0
    len_q, len_kv = sizes[0], sizes[1]
    if C.packed:
        offset = ring.read_word(words, slot * WORDS + OFFSET)
        first_tile = ring.read_word(words, slot * WORDS + FIRST_TILE)
        len_q = ring.read_word(words, slot * WORDS + LEN_Q)
        len_kv = ring.read_word(words, slot * WORDS + LEN_KV)
    return offset, first_tile, len_q, len_kv
