"""Ops that make tiles, change their shape or multiply them as matrices: name -> rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import _mma_supported_dtypes as accumulators_of

from multiattn.cutile.cpu.tile import Tile, as_tile, require, tile_dtype, tile_shape, torch_dtype


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


RULES: dict[str, Callable[..., Any]] = {
    "full": _full,
    "zeros": lambda shape, dtype: _full(shape, 0, dtype),
    "ones": lambda shape, dtype: _full(shape, 1, dtype),
    "arange": _arange,
    "reshape": _reshape,
    "transpose": _transpose,
    "mma": _mma,
}
"""Rules of shaping ops and matrix products, by the op's name in `cuda.tile`."""
