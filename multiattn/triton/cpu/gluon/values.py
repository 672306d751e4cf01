"""Blocks in registers, scalars and pointers, and arithmetic by Triton's rules of types.

A block is a torch tensor with a layout, a scalar a Python number; both have a type of Gluon's. Arithmetic is what a GPU
does: integers wrap around and are divided towards zero, 16-bit results are rounded to nearest even.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from multiattn.triton.cpu.gluon import layouts
from multiattn.triton.cpu.gluon.errors import GluonError, LayoutError

Shape = tuple[int, ...]
Number = bool | int | float

STORAGE: dict[Any, torch.dtype] = {
    gl.int1: torch.bool, gl.int8: torch.int8, gl.int16: torch.int16, gl.int32: torch.int32, gl.int64: torch.int64,
    gl.float16: torch.float16, gl.bfloat16: torch.bfloat16, gl.float32: torch.float32, gl.float64: torch.float64,
    gl.uint8: torch.int64,
}  # fmt: skip
"""The torch dtype that has a block's elements; unsigned bytes are in wider integers."""
DTYPES: dict[torch.dtype, Any] = {dtype: own for own, dtype in reversed(STORAGE.items())} | {torch.uint8: gl.uint8}
"""The type of a caller's tensor's elements."""


class Value:
    """A block, a scalar, or a block or scalar of pointers: then `data` counts elements in `memory`."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any, dtype: Any, layout: Any = None, memory: Any = None) -> None:
        self.data, self.dtype, self.layout, self.memory = data, dtype, layout, memory

    # ------------------------------------------------------------ what kernels ask

    @property
    def is_block(self) -> bool:
        """False for a scalar."""
        return self.layout is not None

    @property
    def shape(self) -> Shape:
        """Sizes; none of a scalar."""
        return tuple(self.data.shape) if self.layout is not None else ()

    @property
    def type(self) -> Any:
        """As Gluon has it, with the layout."""
        return gl.distributed_type(self.dtype, list(self.shape), self.layout) if self.is_block else self.dtype

    def __bool__(self) -> bool:
        if self.is_block:
            raise GluonError("a block is no condition: its elements may differ")
        return bool(self.data)

    def __index__(self) -> int:
        return operator.index(self.data)

    def __repr__(self) -> str:
        return f"{self.type}: {self.data}"

    def __getitem__(self, key: tuple[slice | None, ...]) -> Value:
        result = self
        for axis, item in enumerate(key):
            result = expand_dims(result, axis) if item is None else result
        return result

    def to(self, dtype: Any) -> Value:
        """This value in another type."""
        return cast(self, dtype)

    def reshape(self, *shape: Any) -> Value:
        """Its elements in another shape, in the layout that follows."""
        to = sizes(*shape)
        return Value(self.data.reshape(to), self.dtype, layouts.reshaped(self.layout, self.shape, to), self.memory)

    def permute(self, *order: Any) -> Value:
        """The dimensions in another order."""
        by = sizes(*order)
        return Value(self.data.permute(by), self.dtype, layouts.permuted(self.layout, self.shape, by), self.memory)

    def __neg__(self) -> Value:
        return made(binary("mul", self, -1) if self.dtype.is_floating() else binary("sub", 0, self))

    def __invert__(self) -> Value:
        return made(binary("xor", self, True if self.dtype == gl.int1 else -1))


def _define(name: str, swapped: bool) -> Callable[[Value, Any], Any]:
    if swapped:
        return lambda self, other: binary(name, other, self)
    return lambda self, other: binary(name, self, other)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Value, f"__{_name}__", _define(_name, False))
    setattr(Value, f"__r{_name}__", _define(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _define(_name, False))


def made(value: Any) -> Value:
    """The result of an operation, which is a Value."""
    assert isinstance(value, Value)
    return value


# ---------------------------------------------------------------- types


def plain(value: Any) -> Any:
    """A value without constexpr around it."""
    return value.value if isinstance(value, gl.constexpr) else value


def dtype_of(value: Any) -> Any:
    """The type of a value; of a Python number the one that it has where nothing else says."""
    if isinstance(value, Value):
        return value.dtype
    if isinstance(value, bool):
        return gl.int1
    if isinstance(value, int):
        return gl.int32 if -(1 << 31) <= value < 1 << 31 else gl.int64
    if isinstance(value, float):
        return gl.float32
    raise GluonError(f"got {value!r}; allowed a block, a scalar or a number")


def lift(value: Any, dtype: Any = None) -> Value:
    """A Value; of a number a scalar."""
    value = plain(value)
    if isinstance(value, Value):
        return value if dtype is None else cast(value, dtype)
    return Value(_wrapped(value, dtype or dtype_of(value)), dtype or dtype_of(value))


def _common(x: Any, y: Any, name: str) -> Any:
    """The type in which two operands meet, as Triton has it."""
    return _promoted(dtype_of(x), not isinstance(x, Value), dtype_of(y), not isinstance(y, Value), name)


@functools.cache
def _promoted(a: Any, a_is_number: bool, b: Any, b_is_number: bool, name: str) -> Any:
    if name == "truediv" and not (a.is_floating() or b.is_floating()):
        return gl.float32
    divides = name in ("truediv", "mod")
    dtype = layouts.semantics().computation_type_impl(a, a_is_number, b, b_is_number, divides)
    has_bits = name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift")
    return gl.int32 if dtype == gl.int1 and has_bits else dtype


def _wrapped(number: Any, dtype: Any) -> Any:
    """A Python number as a scalar of that type has it."""
    if dtype.name == "int1":
        return bool(number)
    if dtype.name == "fp32":
        return ctypes.c_float(number).value
    if dtype.is_floating():
        return torch.tensor(float(number), dtype=STORAGE[dtype]).item()
    bits = dtype.primitive_bitwidth
    number = int(number) & ((1 << bits) - 1)
    return number - (1 << bits) if number >> (bits - 1) else number


# ---------------------------------------------------------------- arithmetic


def _divided(x: int, y: int) -> int:
    if y == 0:
        raise GluonError("division of an integer by zero")
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _possible(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers to divide, without what stops a CPU: by zero the result is anything, as on a GPU, by -1 it is of -x."""
    return torch.where(y == -1, -x, x), torch.where((y == 0) | (y == -1), 1, y)


def _larger(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmax(x, y) if x.dtype.is_floating_point else torch.maximum(x, y)


def _smaller(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmin(x, y) if x.dtype.is_floating_point else torch.minimum(x, y)


_OF_INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": _divided, "mod": lambda x, y: x - _divided(x, y) * y, "maximum": max, "minimum": min,
    "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_OF_TENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": lambda x, y: torch.div(*_possible(x, y), rounding_mode="trunc"),
    "mod": lambda x, y: torch.fmod(*((x, y) if y.is_floating_point() else _possible(x, y))),
    "maximum": _larger, "minimum": _smaller, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_NEEDS_TENSORS = ("floordiv", "mod", "maximum", "minimum")


def binary(name: str, x: Any, y: Any) -> Any:
    """An operation on two operands, each a Value or a number."""
    x, y = plain(x), plain(y)
    for pointer, other in ((x, y), (y, x)):
        if isinstance(pointer, Value) and pointer.memory is not None:
            return _moved(name, pointer, other, pointer is y)
    dtype = _common(x, y, name)
    layout = common_layout(x, y)
    result = gl.int1 if name in _COMPARISONS else dtype
    if layout is not None:
        function = _OF_TENSORS.get(name) or getattr(operator, name)
        a, b = _operand(x, dtype), _operand(y, dtype)
        if name in _NEEDS_TENSORS:
            a, b = (torch.as_tensor(it, dtype=STORAGE[dtype]) for it in (a, b))
        return Value(function(a, b), result, layout)
    a, b = lift(x, dtype).data, lift(y, dtype).data
    if dtype.is_floating():
        function = _OF_TENSORS.get(name) or getattr(operator, name)
        a, b = (torch.tensor(it, dtype=STORAGE[dtype]) for it in (a, b))
        return Value(function(a, b).item(), result)
    function = _OF_INTEGERS.get(name) or getattr(operator, name)
    return Value(_wrapped(function(a, b), result), result)


def _operand(x: Any, dtype: Any) -> Any:
    """An operand as torch takes it: a tensor of the type's dtype, or a number."""
    if not isinstance(x, Value):
        return x
    return x.data if x.dtype.name == dtype.name else cast(x, dtype).data


def common_layout(*values: Any) -> Any:
    """The layout that all blocks among the values have, None where there is none; their shapes may be broadcast."""
    found = None
    for value in values:
        if not isinstance(value, Value) or value.layout is None:
            continue
        if found is None:
            found = value
        elif value.layout is not found.layout and value.layout != found.layout:
            raise LayoutError(f"operands have different layouts: {found.layout} and {value.layout}")
        elif len(value.shape) != len(found.shape):
            raise LayoutError(f"operands have different ranks: {list(found.shape)} and {list(value.shape)}")
        elif any(a != b and 1 not in (a, b) for a, b in zip(found.shape, value.shape, strict=True)):
            raise LayoutError(f"operands have shapes {list(found.shape)} and {list(value.shape)}")
    return None if found is None else found.layout


def _moved(name: str, pointer: Value, by: Any, is_second: bool) -> Value:
    """A pointer some elements on."""
    if name not in ("add", "sub") or (name == "sub" and is_second):
        raise GluonError(f"{name} of a pointer and {by}")
    layout = common_layout(pointer, by)
    steps = _operand(by, gl.int64)
    return Value(getattr(operator, name)(pointer.data, steps), pointer.dtype, layout, pointer.memory)


def unary(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Value:
    """A function of each element, computed in fp32 or wider; of an integer none."""
    x = lift(x)
    if not x.dtype.is_floating():
        raise GluonError(f"got {x.type}; allowed floating point")
    if x.is_block:
        return Value(function(x.data), x.dtype, x.layout)
    return Value(function(torch.tensor(x.data, dtype=STORAGE[x.dtype])).item(), x.dtype)


def cast(x: Any, dtype: Any) -> Value:
    """The value in another type, rounded to nearest even, integers towards zero."""
    x, dtype = lift(x), plain(dtype)
    if x.dtype.name == dtype.name:
        return made(x)
    if x.memory is not None:  # an address
        return Value(x.memory.address + x.data * x.memory.flat.element_size(), dtype, x.layout)
    if not x.is_block:
        number = x.data
        is_number = not isinstance(number, float) or math.isfinite(number)
        return Value(_wrapped(number, dtype) if is_number or dtype.is_floating() else 0, dtype)
    return Value(x.data != 0 if dtype == gl.int1 else x.data.to(STORAGE[dtype]), dtype, x.layout)


def select(condition: Any, x: Any, y: Any) -> Value:
    """x where the condition is true, else y."""
    condition, x, y = plain(condition), plain(x), plain(y)
    layout = common_layout(condition, x, y)
    dtype = _common(x, y, "where")
    a, b = _operand(x, dtype), _operand(y, dtype)
    if layout is None:
        return Value(_wrapped(a if condition else b, dtype), dtype)
    a, b = (torch.as_tensor(it, dtype=STORAGE[dtype]) for it in (a, b))
    if not isinstance(condition, Value) or not condition.is_block:
        a, b = torch.broadcast_tensors(a, b)
        return Value(a if condition else b, dtype, layout)
    return Value(torch.where(condition.data != 0, a, b), dtype, layout)


# ---------------------------------------------------------------- shapes


def sizes(*shape: Any) -> Shape:
    """A shape that is given as numbers or as one sequence."""
    if len(shape) == 1 and isinstance(plain(shape[0]), Sequence):
        shape = tuple(plain(shape[0]))
    return tuple(int(plain(it)) for it in shape)


def needs_block(x: Any) -> Value:
    """The value; GluonError for a scalar."""
    if not isinstance(x, Value) or not x.is_block:
        raise GluonError(f"got {x!r}; allowed a block")
    return x


def expand_dims(x: Any, axis: int) -> Value:
    """One more dimension of size 1: the one that the layout is a slice of."""
    if not isinstance(needs_block(x).layout, gl.SliceLayout):
        raise LayoutError(f"a dimension more: got {x.layout}; allowed a SliceLayout")
    if x.layout.dim != axis:
        raise LayoutError(f"a dimension more: got axis {axis} of a slice along {x.layout.dim}")
    return Value(x.data.unsqueeze(axis), x.dtype, x.layout.parent, x.memory)


def broadcast_shape(*shapes: Shape) -> Shape:
    """The shape that blocks of one rank have together."""
    return tuple(max(them) if min(them) else 0 for them in zip(*(it for it in shapes if it), strict=True))
