"""Parts of both Gluon kernels of a backward in two passes: weights, masks, how gradients are stored, tiles in words.

`sizes` are the tile's `LaunchSizes`; in a packed batch `batch` is the number of its sequence. `C` is the kernel's
`TwoPassConstants`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multiattn.triton.kernels.gluon import ring
from multiattn.triton.kernels.gluon.backward_parts import modify
from multiattn.triton.kernels.gluon.scores import ZERO, keep_where, keep_within

# Words of shared memory that say what a tile is: its first row, head and batch entry; in a packed batch the first row
# and the first tile of statistics of its sequence, its queries and its keys.
OFFSET = gl.constexpr(3)
WORDS = gl.constexpr(7)


# ---------------------------------------------------------------- weights and masks


@gluon.jit
def weigh(products, queries, keys, lse, score_factor, of_score, sizes, C: gl.constexpr):
    """Weights ``2^(score - lse)``, and the same times how much a score moves with the scaled ``q @ k^T``."""
    scores, slope = modify(products, queries, keys, of_score, sizes, C)
    weights = gl.exp2(scores * score_factor - lse)
    moving = weights
    if C.has_slope:  # selected, as a slope may be inf where a weight is 0
        moving = gl.where(weights == 0.0, 0.0, weights * slope)
    return weights, moving


@gluon.jit
def hide(values, queries, keys, sizes, C: gl.constexpr):
    """0 in place of what the mask hides, and of keys behind the last. Selected, as what is hidden may be inf.

    `queries` and `keys` are numbers along the one and the other axis of values.
    """
    seq_q, seq_kv = sizes.seq_q, sizes.seq_kv
    level = queries + (seq_kv - seq_q)
    if C.is_two_sided:
        begin = level - sizes.left
        end = gl.minimum(level + 1 + sizes.right, seq_kv)
        if C.score is not None:
            end = gl.where(queries < seq_q, end, begin)
        values = keep_within(values, keys - begin, gl.maximum(end - begin, 0), ZERO)
    else:
        end = gl.minimum(level + 1, seq_kv) if C.is_banded else 0 * queries + seq_kv
        if C.score is not None:  # of a query that is not there it may be anything
            end = gl.where(queries < seq_q, end, 0)
        values = keep_where(values, "gt", end - keys, ZERO)
    return values


# ---------------------------------------------------------------- gradients to memory


@gluon.jit
def store_gradient(target, strides, at, sums, factor, rows, WIDTH: gl.constexpr, C: gl.constexpr):
    """Rows of a gradient of so many columns times a factor, those before `rows`.

    `at` is (batch, first row of the sequence, head, first row). Strides of (batch, head, row) are in units of 8
    elements.
    """
    batch, offset, head, first_row = at
    if C.packed:
        first = offset.to(gl.int64) * strides[2]
    else:
        first = batch.to(gl.int64) * strides[0]
    target += (first + head.to(gl.int64) * strides[1]) * 8
    for piece in gl.static_range(len(sums)):
        values = gl.convert_layout((sums[piece] * factor).to(target.dtype.element_ty), C.between[piece])
        values = gl.convert_layout(values, C.stored[piece])
        numbers = first_row + gl.arange(0, 64, gl.SliceLayout(1, C.stored[piece]))
        columns = piece * C.wide + gl.arange(0, C.widths[piece], gl.SliceLayout(0, C.stored[piece]))
        offsets = (numbers.to(gl.int64) * strides[2] * 8)[:, None] + columns[None, :]
        mask = (numbers < rows)[:, None]
        if piece * C.wide + C.widths[piece] > WIDTH:
            mask = mask & (columns < WIDTH)[None, :]
        gl.store(target + offsets, values, mask=mask)


# ---------------------------------------------------------------- tiles and their sequences


@gluon.jit
def write_tile(words, slot, first, head, batch, offset, first_tile, own, C: gl.constexpr):
    """Tell consumers about a tile, with its own `LaunchSizes`."""
    ring.write_words(words, slot * WORDS, (first, head, batch))
    if C.packed:
        ring.write_words(words, slot * WORDS + OFFSET, (offset, first_tile, own.seq_q, own.seq_kv))


@gluon.jit
def read_tile(words, slot):
    """First row, head and batch entry of a tile."""
    return [ring.read_word(words, slot * WORDS + field) for field in (0, 1, 2)]


@gluon.jit
def read_sequence(words, slot):
    """First row, first tile of statistics and lengths of a packed tile's sequence."""
    return [ring.read_word(words, slot * WORDS + OFFSET + field) for field in (0, 1, 2, 3)]
