"""The caller's memory: tensors through pointers and through TMA's tensor maps, every access within its tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.language.core import block_type

from multiattn.plan.support import OutOfBoundsError
from multiattn.triton.cpu.gluon.errors import GluonError, LayoutError, here
from multiattn.triton.cpu.gluon.machine import running
from multiattn.triton.cpu.gluon.values import (
    DTYPES,
    STORAGE,
    Shape,
    Value,
    cast,
    common_layout,
    dtype_of,
    lift,
    plain,
)


class Memory:
    """A tensor's elements in the order of their addresses."""

    def __init__(self, flat: torch.Tensor, address: int) -> None:
        self.flat, self.address = flat, address
        self.dtype = DTYPES[flat.dtype]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        """From the first to the last element of a tensor on the CPU."""
        if tensor.device.type != "cpu":
            raise ValueError(f"the interpreter takes CPU tensors; got one on {tensor.device}")
        spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        elements = 1 + sum(spans) if tensor.numel() else 0
        flat = torch.as_strided(tensor.detach(), (elements,), (1,), tensor.storage_offset())
        return cls(flat, tensor.data_ptr())

    @property
    def pointer(self) -> Value:
        """To the first element."""
        return Value(0, gl.pointer_type(self.dtype), None, self)

    def address_of(self, pointer: Value) -> Value:
        """A pointer as a number."""
        return Value(self.address + pointer.data * self.flat.element_size(), gl.int64, pointer.layout)

    def check(self, places: torch.Tensor | int, active: torch.Tensor | None, access: str) -> None:
        """OutOfBoundsError where an active lane is outside."""
        if isinstance(places, int):
            outside, lanes = int(not 0 <= places < self.flat.numel()), 1
        else:
            out = (places < 0) | (places >= self.flat.numel())
            out = out if active is None else out & active
            outside, lanes = int(out.sum()), out.numel() if active is None else int(active.sum())
        if outside:
            raise OutOfBoundsError(
                f"{access} in program {running().program}: {outside} of {lanes} active lanes are outside of a tensor "
                f"of {self.flat.numel()} elements [at {here()}]"
            )

    def reach(self, first: int, shape: Sequence[int], strides: Sequence[int], access: str) -> torch.Tensor:
        """Elements as a view, all of them inside."""
        if 0 in shape:
            return self.flat[:0].view(shape) if math.prod(shape) == 0 else self.flat
        strides = [stride if size > 1 else 1 for size, stride in zip(shape, strides, strict=True)]
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if first < 0 or last >= self.flat.numel():
            raise OutOfBoundsError(
                f"{access} in program {running().program}: elements {first} to {last} of a tensor of "
                f"{self.flat.numel()} [at {here()}]"
            )
        return torch.as_strided(self.flat, tuple(shape), tuple(strides), self.flat.storage_offset() + first)


# ---------------------------------------------------------------- pointers


def _pointer(pointer: Any) -> tuple[Value, Memory]:
    if not isinstance(pointer, Value) or pointer.memory is None:
        raise GluonError(f"got {pointer!r}; allowed a pointer")
    return pointer, pointer.memory


def _active(mask: Any, pointer: Value) -> torch.Tensor | bool | None:
    mask = plain(mask)
    if mask is None:
        return None
    if isinstance(mask, Value) and mask.is_block:
        common_layout(pointer, mask)
        active: torch.Tensor = mask.data.expand(pointer.shape) != 0
        return active
    return bool(mask)


def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    """Elements; what the mask leaves out is undefined, or `other`."""
    pointer, memory = _pointer(pointer)
    common_layout(pointer, mask, other)
    element = pointer.dtype.element_ty
    storage = STORAGE[element]
    if not pointer.is_block:
        if _active(mask, pointer) is False:
            return lift(math.nan if element.is_floating() and other is None else other or 0, element)
        memory.check(pointer.data, None, "load")
        return Value(memory.flat[pointer.data].item(), element)
    active = _active(mask, pointer)
    if active is None:
        memory.check(pointer.data, None, "load")
        return Value(memory.flat[pointer.data].to(storage), element, pointer.layout)
    lanes = torch.as_tensor(active).expand(pointer.shape)
    memory.check(pointer.data, lanes, "load")
    result = torch.full(pointer.shape, math.nan if storage.is_floating_point else 0, dtype=storage)
    if other is not None:
        other = cast(other, element).data
        result = torch.as_tensor(other, dtype=storage).expand(pointer.shape).clone()
    result[lanes] = memory.flat[pointer.data[lanes]].to(storage)
    return Value(result, element, pointer.layout)


def _elements(pointer: Value, value: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places, elements and mask as flat tensors."""
    element = pointer.dtype.element_ty
    common_layout(pointer, value, mask)
    data = torch.as_tensor(cast(value, element).data, dtype=STORAGE[element])
    active = _active(mask, pointer)
    lanes = torch.as_tensor(True if active is None else active)
    if isinstance(value, Value) and value.is_block and value.shape != pointer.shape:
        data = data.expand(pointer.shape)  # refuses a value of more elements
    places = torch.as_tensor(pointer.data)
    places, data, lanes = torch.broadcast_tensors(places, data, lanes)
    return places.reshape(-1), data.reshape(-1), lanes.reshape(-1)


def store(pointer: Any, value: Any, mask: Any = None, **hints: Any) -> None:
    """Elements where the mask is true."""
    pointer, memory = _pointer(pointer)
    places, data, lanes = _elements(pointer, value, mask)
    memory.check(places, lanes, "store")
    memory.flat[places[lanes]] = data[lanes].to(memory.flat.dtype)


def atomic_add(pointer: Any, value: Any, mask: Any = None) -> Value:
    """An atomic sum. Returns what was there before."""
    pointer, memory = _pointer(pointer)
    places, data, lanes = _elements(pointer, value, mask)
    memory.check(places, lanes, "atomic")
    element, flat = pointer.dtype.element_ty, memory.flat
    before = torch.zeros(places.shape, dtype=STORAGE[element])
    before[lanes] = flat[places[lanes]].to(before.dtype)
    flat.index_put_((places[lanes],), data[lanes].to(flat.dtype), accumulate=True)
    if not pointer.is_block:
        return Value(before[0].item(), element)
    return Value(before.reshape(pointer.shape), element, pointer.layout)


# ---------------------------------------------------------------- tensor maps

_WRAP = 1 << 64
"""Bytes that an address counts."""


class MappedTensor:
    """A tensor as TMA walks it: boxes of it, whose elements outside of its shape are zeros."""

    def __init__(self, described: Any) -> None:
        self.memory = Memory.of(described.base)
        self.dtype = self.memory.dtype
        self.shape = [int(it) for it in described.shape]
        self.strides = [int(it) for it in described.strides]
        self.block_shape = [int(it) for it in described.block_shape]
        self.layout = described.layout
        self.block_type = block_type(self.dtype, self.block_shape)
        self.nbytes_per_cta = math.prod(self.block_shape) * self.memory.flat.element_size()

    def check(self, view: Any, access: str) -> None:
        """LayoutError where shared memory is not a box of this map."""
        if list(view.shape) != self.block_shape or view.dtype != self.dtype:
            got = f"{view.dtype} {list(view.shape)}"
            raise LayoutError(f"{access}: got shared memory {got}; allowed {self.dtype} {self.block_shape}")
        if view.layout != self.layout:
            raise LayoutError(f"{access}: got shared memory with {view.layout}; allowed {self.layout}")

    def coordinates(self, coordinates: Any) -> list[int]:
        """Coordinates of a box's first element, in 32 bits."""
        found = [int(plain(it)) for it in coordinates]
        if len(found) != len(self.shape) or any(dtype_of(plain(it)).is_floating() for it in coordinates):
            raise GluonError(f"coordinates: got {found}; allowed {len(self.shape)} integers")
        if any(not -(1 << 31) <= it < 1 << 31 for it in found):
            raise GluonError(f"coordinates: got {found}; allowed 32 bits")
        return found

    def box(self, at: Sequence[int], access: str) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The elements of a box that are inside of the shape, and where in the box they are."""
        ranges = []
        for begin, block, size in zip(at, self.block_shape, self.shape, strict=True):
            first = min(max(0, -begin), block)
            ranges.append((first, max(first, min(block, size - begin))))
        size = self.memory.flat.element_size()
        first = sum((low + begin) * stride for (low, _), begin, stride in zip(ranges, at, self.strides, strict=True))
        first = (first * size) % _WRAP
        first = (first - _WRAP if first >= _WRAP // 2 else first) // size
        shape: Shape = tuple(high - low for low, high in ranges)
        return self.memory.reach(first, shape, self.strides, access), tuple(slice(*it) for it in ranges)
