"""Ops on tiles, elementwise, reductions, shapes and matrix products: name -> rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import _mma_supported_dtypes as accumulators_of

from multiattn.cutile.cpu.tile import Tile, as_tile, promote, require, tile_dtype, tile_shape, torch_dtype, widen

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_Rule = Callable[..., Any]


def _flush(data: torch.Tensor, flush_to_zero: bool) -> torch.Tensor:
    if not flush_to_zero or data.dtype != torch.float32:
        return data
    return torch.where(data.abs() < _SMALLEST_NORMAL, torch.zeros_like(data), data)


def _binary(function: _Rule, *, force_float: bool = False) -> _Rule:
    def rule(
        x: Any, y: Any, *, rounding_mode: Any = None, flush_to_zero: bool = False, propagate_nan: bool = False
    ) -> Tile:
        a, b, dtype = promote(x, y, force_float=force_float)
        result = function(widen(_flush(a, flush_to_zero)), widen(_flush(b, flush_to_zero))).to(a.dtype)
        if propagate_nan and result.is_floating_point():
            result = torch.where(a.isnan() | b.isnan(), torch.full_like(result, math.nan), result)
        return Tile(_flush(result, flush_to_zero), dtype)

    return rule


def _integers(function: _Rule) -> _Rule:
    """Integers or bools, in their common dtype."""

    def rule(x: Any, y: Any) -> Tile:
        a, b, dtype = promote(x, y)
        require(not a.is_floating_point(), f"{function.__name__} of {dtype}")
        return Tile(function(a, b), dtype)

    return rule


def _divided(function: _Rule) -> _Rule:
    """A quotient or a remainder, rounded down; of an integer by zero it is anything, as on a GPU.

    By -1 it is taken of the negative number, as a CPU stops at the least integer by -1.
    """

    def rule(x: Any, y: Any) -> Tile:
        a, b, dtype = promote(x, y)
        require(a.dtype != torch.bool, f"{function.__name__} of {dtype}")
        if not b.is_floating_point():
            a = torch.where(b == -1, -a, a)
            b = torch.where((b == 0) | (b == -1), 1, b)
        return Tile(function(widen(a), widen(b)).to(a.dtype), dtype)

    return rule


def _bitcast(x: Any, dtype: Any) -> Tile:
    return Tile(as_tile(x).data.contiguous().view(torch_dtype(dtype)), tile_dtype(dtype))


def _compare(function: _Rule) -> _Rule:
    def rule(x: Any, y: Any) -> Tile:
        a, b, _ = promote(x, y)
        return Tile(function(a, b))

    return rule


def _unary(function: _Rule) -> _Rule:
    """Floating point in and out; an integer becomes fp32."""

    def rule(x: Any, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Tile:
        tile = as_tile(x)
        data = tile.data if tile.data.is_floating_point() else tile.data.float()
        result = function(widen(_flush(data, flush_to_zero))).to(data.dtype)
        return Tile(_flush(result, flush_to_zero), tile.dtype if data is tile.data else None)

    return rule


def _same(function: _Rule) -> _Rule:
    def rule(x: Any) -> Tile:
        tile = as_tile(x)
        return Tile(function(tile.data), tile.dtype)

    return rule


def _axes(x: Tile, axis: Any) -> list[int]:
    if axis is None:
        return list(range(x.ndim))
    return [axis] if isinstance(axis, int) else list(axis)


def _reduce(function: _Rule, *, instead_of_nan: float | None = None) -> _Rule:
    """`instead_of_nan`: what a NaN counts as where it is not propagated (a maximum ignores it)."""

    def rule(
        x: Tile, axis: Any = None, *, keepdims: bool = False, flush_to_zero: bool = False, propagate_nan: bool = False
    ) -> Tile:
        data = widen(_flush(x.data, flush_to_zero))
        if instead_of_nan is not None and not propagate_nan and data.is_floating_point():
            data = torch.where(data.isnan(), torch.full_like(data, instead_of_nan), data)
        result = function(data, _axes(x, axis), keepdims)
        return Tile(_flush(result.to(x.data.dtype), flush_to_zero), x.dtype)

    return rule


def _where(condition: Any, x: Any, y: Any) -> Tile:
    a, b, dtype = promote(x, y)
    return Tile(torch.where(as_tile(condition).data, a, b), dtype)


def _astype(x: Any, dtype: Any, *, rounding_mode: Any = None) -> Tile | int:
    if rounding_mode not in (None, ct.RoundingMode.RN):
        raise NotImplementedError(f"astype with {rounding_mode} has no rule in the interpreter")
    if isinstance(x, int) and not torch_dtype(dtype).is_floating_point:
        return x  # a number of a launch, or of a block: an integer of any width
    tile = as_tile(x)
    return Tile(tile.data.to(torch_dtype(dtype)), tile_dtype(dtype))


# ---------------------------------------------------------------- shapes and matrix products


def _full(shape: Any, value: Any, dtype: Any) -> Tile:
    target = torch_dtype(dtype)
    number = value.data.item() if isinstance(value, Tile) else value
    number = float(number) if target.is_floating_point else number
    return Tile(torch.full(tile_shape(shape), number, dtype=target), tile_dtype(dtype))


def _arange(size: int, *, dtype: Any) -> Tile:
    (extent,) = tile_shape(size)
    return Tile(torch.arange(extent, dtype=torch_dtype(dtype)), tile_dtype(dtype))


def _reshape(x: Any, shape: Any) -> Tile:
    tile = as_tile(x)
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    return Tile(tile.data.reshape(extents if -1 in extents else tile_shape(extents)), tile.dtype)


def _transpose(x: Tile) -> Tile:
    require(x.ndim == 2, "transpose without axes needs a 2-d tile")
    return Tile(x.data.transpose(0, 1), x.dtype)


def _mma(x: Tile, y: Tile, acc: Tile, *, use_fast_acc: bool = False) -> Tile:
    require(x.dtype == y.dtype, f"mma of {x.dtype} and {y.dtype}")
    require(acc.dtype in accumulators_of.get(x.dtype, ()), f"mma of {x.dtype} into {acc.dtype}")
    dtype = torch.float32 if acc.dtype == ct.float16 else acc.data.dtype
    a, b = x.data.to(dtype), y.data.to(dtype)
    return Tile((a @ b + acc.data.to(dtype)).to(acc.data.dtype), acc.dtype)


RULES: dict[str, _Rule] = {
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "truediv": _binary(torch.div, force_float=True),
    "floordiv": _divided(torch.floor_divide),
    "mod": _divided(torch.remainder),
    "bitwise_and": _integers(torch.bitwise_and),
    "bitwise_or": _integers(torch.bitwise_or),
    "bitwise_xor": _integers(torch.bitwise_xor),
    "bitwise_rshift": _integers(torch.bitwise_right_shift),
    "bitwise_not": _same(torch.bitwise_not),
    "maximum": _binary(torch.fmax),
    "minimum": _binary(torch.fmin),
    "negative": _same(torch.neg),
    "abs": _same(torch.abs),
    "greater": _compare(torch.gt),
    "greater_equal": _compare(torch.ge),
    "less": _compare(torch.lt),
    "less_equal": _compare(torch.le),
    "equal": _compare(torch.eq),
    "not_equal": _compare(torch.ne),
    **{
        name: _unary(getattr(torch, name))
        for name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "tanh", "floor")
    },
    "sum": _reduce(torch.sum),
    "max": _reduce(torch.amax, instead_of_nan=-math.inf),
    "where": _where,
    "astype": _astype,
    "bitcast": _bitcast,
    "full": _full,
    "zeros": lambda shape, dtype: _full(shape, 0, dtype),
    "ones": lambda shape, dtype: _full(shape, 1, dtype),
    "arange": _arange,
    "reshape": _reshape,
    "transpose": _transpose,
    "mma": _mma,
}
"""Rules by the op's name in `cuda.tile`."""
