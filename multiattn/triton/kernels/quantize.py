"""New keys and values as 8-bit numbers with scales, written where a cache has them.

A program has one token of one head. Without slots tokens are the rows of the caches themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(12582912.0)
"""1.5 * 2^23: a number up to 2^22 added to it is rounded to the nearest integer, ties to even."""


@triton.jit(do_not_specialize=["n"])  # tokens of a step: any number takes the same code
def quantize_rows(
    k,  # pointer, [B, Hkv, n, D], of any strides
    v,  # pointer, [B, Hkv, n, Dv]
    k_cache,  # pointer, [entries, Hkv, rows, D], e4m3 or int8
    v_cache,  # pointer, [entries, Hkv, rows, Dv]
    k_scale,  # pointer, fp32 [entries, Hkv, rows], to write; or [entries, Hkv], to read
    v_scale,  # like k_scale
    slots,  # pointer, int32 or int64 [B * n]: entry * rows + row, negative for none; None: a token's own place
    n,
    sizes,  # heads_kv, rows
    strides,  # of k, v, k_cache and v_cache by (entry, head, row), and of k_scale and v_scale, the last 0 for a head's
    C: tl.constexpr,  # (D, Dv, per_token, largest)
):
    """One token of one head: its numbers, and with `per_token` its scales."""
    heads_kv, rows = sizes
    program = tl.program_id(0)
    head = (program % heads_kv).to(tl.int64)
    token = program // heads_kv
    batch, place = (token // n).to(tl.int64), (token % n).to(tl.int64)
    entry, row = batch, place
    if slots is not None:
        slot = tl.load(slots + token).to(tl.int64)
        if slot < 0:
            return
        entry, row = slot // rows, slot % rows
    source, target = (batch, head, place), (entry, head, row)
    _quantize(k, k_cache, k_scale, source, target, strides[0], strides[2], strides[4], C[0], C)
    _quantize(v, v_cache, v_scale, source, target, strides[1], strides[3], strides[5], C[1], C)


@triton.jit
def _quantize(x, cache, scales, source, target, of_x, of_cache, of_scale, WIDTH: tl.constexpr, C: tl.constexpr):
    """A row of k or of v."""
    per_token: tl.constexpr = C[2]
    largest: tl.constexpr = C[3]
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = columns < WIDTH
    numbers = tl.load(x + _place(source, of_x) + columns, mask=inside, other=0.0).to(tl.float32)
    scales += _place(target, of_scale)
    if per_token:
        is_number = tl.sum((numbers == numbers).to(tl.int32), 0) == columns.shape[0]
        scale = tl.div_rn(tl.max(tl.abs(numbers), 0), tl.full([], largest, tl.float32))
        scale = tl.where(is_number, scale, float("nan"))
        tl.store(scales, scale)
        numbers = tl.where(scale < float("inf"), numbers, 0.0)  # 0 times a scale of NaN or inf is NaN
        divisor = tl.where((scale < float("inf")) & (scale != 0.0), scale, 1.0)
    else:
        scale = tl.load(scales)
        divisor = tl.where(scale == 0.0, 1.0, scale)
    numbers = tl.div_rn(numbers, tl.zeros_like(numbers) + divisor)
    clamped = tl.minimum(tl.maximum(numbers, -largest), largest)
    if cache.dtype.element_ty == tl.int8:
        clamped = (clamped + ROUNDS) - ROUNDS
        clamped = tl.where(numbers == numbers, clamped, 0.0)  # int8 has no NaN
    else:
        clamped = tl.where(numbers == numbers, clamped, float("nan"))
    tl.store(cache + _place(target, of_cache) + columns, clamped.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def _place(at, strides):
    """The elements before a row, in 64 bits."""
    return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2]
