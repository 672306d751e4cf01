"""The values a kernel computes with: `Tile`, and how Python numbers and dtypes meet it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import promote_dtypes

_NAMES = (
    "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"
)
_TORCH: dict[Any, torch.dtype] = {getattr(ct, name): getattr(torch, name.rstrip("_")) for name in _NAMES.split()}
_TILE: dict[torch.dtype, Any] = {dtype: name for name, dtype in _TORCH.items()}


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a cuTile dtype, or of any other name for one that a kernel may use."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in _TORCH:
        return _TORCH[dtype]
    raise NotImplementedError(f"dtype {dtype} has no counterpart in torch")


def tile_dtype(dtype: Any) -> Any:
    """The cuTile dtype of a torch or cuTile dtype."""
    return _TILE[dtype] if isinstance(dtype, torch.dtype) else dtype


def require(condition: bool, message: str) -> None:
    """Raise what cuTile's own type checker raises."""
    if not condition:
        raise ct.TileTypeError(message)


def tile_shape(shape: Any) -> tuple[int, ...]:
    """A tile's shape as a tuple; TileTypeError unless every extent is a power of two."""
    extents = tuple(int(extent) for extent in (shape if isinstance(shape, tuple | list) else (shape,)))
    for extent in extents:
        require(extent > 0 and extent & (extent - 1) == 0, f"tile shape {extents} is not a power of two")
    return extents


class Tile:
    """An immutable tile: a torch tensor of power-of-two extents, and its cuTile dtype."""

    __slots__ = ("data", "dtype")
    __hash__ = None  # type: ignore[assignment] # `==` makes a tile
    __iter__ = None  # else Python would iterate through __getitem__, for ever

    def __init__(self, data: torch.Tensor, dtype: Any = None) -> None:
        self.data = data
        self.dtype = _TILE[data.dtype] if dtype is None else dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """Rank."""
        return self.data.ndim

    def __getitem__(self, index: Any) -> Tile:
        parts = index if isinstance(index, tuple) else (index,)
        allowed = all(part is None or part is Ellipsis or part == slice(None) for part in parts)
        require(allowed, "a tile can only be indexed by None, ... and :")
        return Tile(self.data[parts], self.dtype)

    def __bool__(self) -> bool:
        require(self.ndim == 0, f"a tile of shape {self.shape} has no truth value; reduce it to 0-d first")
        return bool(self.data)

    def __index__(self) -> int:
        is_integer = not self.data.is_floating_point() and self.data.dtype != torch.bool
        require(self.ndim == 0 and is_integer, f"a tile {self.shape} of {self.dtype} is no integer")
        return int(self.data)

    def __repr__(self) -> str:
        return f"Tile{self.shape}:{self.dtype}\n{self.data}"


# Methods and operators go through the public function, so that they have its rule.


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(ct, name)(self, *args, **options)


def _reflected(name: str) -> Callable[[Tile, Any], Any]:
    return lambda self, other: getattr(ct, name)(other, self)


_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv", "neg": "negative",
    "floordiv": "floordiv", "mod": "mod", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "rshift": "bitwise_rshift", "invert": "bitwise_not",
    "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip
for _operator, _name in _OPERATORS.items():
    setattr(Tile, f"__{_operator}__", _method(_name))
for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "rshift"):
    setattr(Tile, f"__r{_operator}__", _reflected(_OPERATORS[_operator]))
for _name in ("astype", "reshape", "transpose"):
    setattr(Tile, _name, _method(_name))


def as_tile(value: Any, like: Any = None) -> Tile:
    """A tile of a Python number. Numbers are loosely typed: they take the dtype of the other side if it can hold them.

    RuntimeError if an integer does not fit that dtype.
    """
    if isinstance(value, Tile):
        return value
    if like is None:
        default = torch.bool if isinstance(value, bool) else torch.int32 if isinstance(value, int) else torch.float32
        return Tile(torch.tensor(value, dtype=default))
    target = torch_dtype(like)
    if isinstance(value, float) and not target.is_floating_point:
        return Tile(torch.tensor(value, dtype=torch.float32))
    if target == torch.bool and not isinstance(value, bool):
        return as_tile(value)
    return Tile(torch.tensor(value, dtype=target), tile_dtype(like))


def promote(x: Any, y: Any, *, force_float: bool = False) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Both operands in their common dtype, and that dtype, by cuTile's own table."""
    if isinstance(x, Tile):
        y = as_tile(y, x.dtype)
    else:
        y = as_tile(y)
        x = as_tile(x, y.dtype)
    dtype = promote_dtypes(x.dtype, y.dtype, force_float)
    target = torch_dtype(dtype)
    return x.data.to(target), y.data.to(target), dtype


def widen(data: torch.Tensor) -> torch.Tensor:
    """16-bit floats as fp32, in which they are computed with; the rest as it is."""
    return data.float() if data.dtype in (torch.float16, torch.bfloat16) else data
