"""What is not finite in V, and keys that not every query sees: 0 * NaN of a masked key must not reach a row.

Rare, so it is found out at the end of a tile and done again by the warpgroup that it struck: with mma.sync, from global
memory, 16 keys and 64 columns of V at a time. Slow, but of few registers: with more, those of the hot loop would spill.
"""

# ruff: noqa: ANN001, ANN202, ANN201, N803 - Triton's own annotations and its upper-case constexprs
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from multiattn.triton.gluon.ring import read_word
from multiattn.triton.gluon.softmax import LN_2, LOWEST, end_of_keys, take_sign

KEYS = gl.constexpr(16)
"""Of a step. Fewer than 32, as `_seen_specials` counts to that."""
COLUMNS = gl.constexpr(16)
"""Of V and out, of a walk over the keys."""

# Of the four words of each tensor in shared memory, the first.
Q, K, V, OUT = (gl.constexpr(4 * i) for i in range(4))

_ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _ACCUMULATOR.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _ACCUMULATOR.value, 2))


@gluon.jit
def _load(source, row_stride, rows, columns, row_end, column_end):
    """``[rows, columns]`` of a row-major tensor, zero beyond its ends; either may be an outer dimension."""
    inside = (rows < row_end) & (rows >= 0) & (columns < column_end)
    return gl.load(source + rows.to(gl.int64) * row_stride + columns, mask=inside, other=0.0)


@gluon.jit
def _seen_specials(visible, values):
    """The sum of the inf, -inf and nan of `values` ``[KEYS, COLUMNS]`` that each row sees: ``[64, COLUMNS]``, else 0.

    One product counts all three: their numbers are the digits of its elements, to base 32.
    """
    wide = values.to(gl.float32)
    kinds = gl.where(
        wide == float("inf"), 1.0, gl.where(wide == float("-inf"), 32.0, gl.where(wide != wide, 1024.0, 0.0))
    )
    none = gl.full([64, COLUMNS], 0.0, gl.float32, _ACCUMULATOR)
    seen = gl.convert_layout(visible.to(gl.float16), _LEFT, assert_trivial=True)
    count = mma_v2(seen, kinds.to(gl.float16), none).to(gl.int32)
    positive = gl.where(count % 32 > 0, float("inf"), 0.0)
    negative = gl.where(count // 32 % 32 > 0, float("-inf"), 0.0)
    return positive + negative + gl.where(count // 1024 > 0, float("nan"), 0.0)


@gluon.jit
def write_address(addresses, at, pointer, batch_stride, head_stride, row_stride):
    """Where a tensor begins, and its strides in elements: four words of shared memory from `at` on."""
    _write(addresses, at, pointer.to(gl.int64))
    _write(addresses, at + 1, batch_stride)
    _write(addresses, at + 2, head_stride)
    _write(addresses, at + 3, row_stride)


@gluon.jit
def _write(words, at, value):
    words.index(at).store(gl.full([1], value, gl.int64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def _read_address(addresses, at, batch, head, like):
    """Pointer to the first row of one head, and the stride of its rows."""
    begin = read_word(addresses, at)
    pointer = begin.to(gl.pointer_type(like.dtype))
    pointer += batch * read_word(addresses, at + 1) + head * read_word(addresses, at + 2)
    return pointer, read_word(addresses, at + 3)


@gluon.jit
def repair(first_query, batch, head, addresses, lse, scale, sizes, like, C: gl.constexpr):
    """Out and lse of 64 queries of one head, from scratch."""
    seq_q, seq_kv, heads_q, group, _tiles, _heads, _together = sizes
    q, q_row = _read_address(addresses, Q, batch, head, like)
    k, k_row = _read_address(addresses, K, batch, head // group, like)
    v, v_row = _read_address(addresses, V, batch, head // group, like)
    out, out_row = _read_address(addresses, OUT, batch, head, like)
    lse += (batch * heads_q + head).to(gl.int64) * seq_q
    rows = first_query + gl.arange(0, 64, gl.SliceLayout(1, _ACCUMULATOR))
    rows_left = first_query + gl.arange(0, 64, gl.SliceLayout(1, _LEFT))
    depth_left = gl.arange(0, 16, gl.SliceLayout(0, _LEFT))
    depth_right = gl.arange(0, 16, gl.SliceLayout(1, _RIGHT))
    keys = gl.arange(0, KEYS, gl.SliceLayout(0, _ACCUMULATOR))
    keys_below = gl.arange(0, KEYS, gl.SliceLayout(0, _RIGHT))  # of K^T, whose columns they are
    keys_down = gl.arange(0, KEYS, gl.SliceLayout(1, _RIGHT))  # of V
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, _RIGHT))
    end = end_of_keys(rows, seq_q, seq_kv, C)
    last = gl.minimum(gl.maximum(gl.minimum(first_query + 64, seq_q) + seq_kv - seq_q, 0), seq_kv)
    for first_column in range(0, C.head_dim, COLUMNS):
        acc = gl.full([64, COLUMNS], 0.0, gl.float32, _ACCUMULATOR)
        special = gl.full([64, COLUMNS], 0.0, gl.float32, _ACCUMULATOR)
        row_max = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, _ACCUMULATOR))
        row_sum = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, _ACCUMULATOR))
        for first_key in range(0, last, KEYS):
            scores = gl.full([64, KEYS], 0.0, gl.float32, _ACCUMULATOR)
            for depth in range(0, C.head_dim, 16):
                left = _load(q, q_row, rows_left[:, None], depth + depth_left[None, :], seq_q, C.head_dim)
                right = gl.load(
                    k + (first_key + keys_below).to(gl.int64)[None, :] * k_row + (depth + depth_right)[:, None],
                    mask=((first_key + keys_below) < seq_kv)[None, :] & ((depth + depth_right) < C.head_dim)[:, None],
                    other=0.0,
                )
                scores = mma_v2(left, right, scores)
            visible = (first_key + keys)[None, :] < end[:, None]
            scores = gl.where(visible, take_sign(scores, C), float("-inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
            weights = gl.exp2(scores * scale - new_max[:, None])
            decay = gl.exp2(row_max - new_max)
            row_max = new_max
            row_sum = row_sum * decay + gl.sum(weights, 1)
            values = _load(
                v, v_row, (first_key + keys_down)[:, None], (first_column + columns)[None, :], seq_kv, C.head_dim
            )
            is_finite = values.to(gl.float32) * 0.0 == 0.0
            finite = gl.where(is_finite, values.to(gl.float32), 0.0).to(values.dtype)
            packed = gl.convert_layout(weights.to(values.dtype), _LEFT, assert_trivial=True)
            acc = mma_v2(packed, finite, acc * decay[:, None])
            special += _seen_specials(visible, values)
        in_range = (rows >= 0) & (rows < seq_q)
        gl.store(lse + rows, (row_max + gl.log2(row_sum)) * LN_2, mask=in_range)
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        tile = (acc + special) * (1.0 / row_sum)[:, None]
        stored = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, _ACCUMULATOR))
        gl.store(
            out + rows.to(gl.int64)[:, None] * out_row + stored[None, :],
            tile.to(out.dtype.element_ty),
            mask=in_range[:, None] & (stored < C.head_dim)[None, :],
        )
