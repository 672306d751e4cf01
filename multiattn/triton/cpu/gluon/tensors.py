"""The caller's memory: tensors through pointers and through TMA's tensor maps, every access within its tensor."""

from __future__ import annotations

import math
import operator
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

    def check(self, places: torch.Tensor, access: str) -> None:
        """OutOfBoundsError where a place is outside."""
        outside = int(((places < 0) | (places >= self.flat.numel())).sum())
        if outside:
            raise OutOfBoundsError(
                f"{access} in program {running().program}: {outside} of {places.numel()} active lanes are outside of a "
                f"tensor of {self.flat.numel()} elements [at {here()}]"
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


def _reached(access: str, pointer: Any, mask: Any, value: Any) -> tuple[Memory, torch.Tensor, torch.Tensor]:
    """A pointer's memory, which lanes are active, and the places of these, all inside."""
    if not isinstance(pointer, Value) or pointer.memory is None:
        raise GluonError(f"got {pointer!r}; allowed a pointer")
    common_layout(pointer, mask, value)
    mask, places = True if mask is None else plain(mask), torch.as_tensor(pointer.data)
    active = torch.as_tensor(mask.data if isinstance(mask, Value) else mask)
    lanes = (active != 0).expand(places.shape)
    pointer.memory.check(places[lanes], access)
    return pointer.memory, lanes, places[lanes]


def _elements(value: Any, element: Any, lanes: torch.Tensor) -> torch.Tensor:
    """A value's element for each lane."""
    return torch.as_tensor(cast(value, element).data, dtype=STORAGE[element]).expand(lanes.shape)


def _value(data: torch.Tensor, element: Any, pointer: Value) -> Value:
    return Value(data if pointer.is_block else data.item(), element, pointer.layout)


def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    """Elements; what the mask leaves out is undefined, or `other`."""
    memory, lanes, places = _reached("load", pointer, mask, other)
    element = pointer.dtype.element_ty
    if other is None:
        other = math.nan if element.is_floating() else 0
    result = _elements(other, element, lanes).clone()
    result[lanes] = memory.flat[places].to(result.dtype)
    return _value(result, element, pointer)


def store(pointer: Any, value: Any, mask: Any = None, **hints: Any) -> None:
    """Elements where the mask is true."""
    memory, lanes, places = _reached("store", pointer, mask, value)
    memory.flat[places] = _elements(value, pointer.dtype.element_ty, lanes)[lanes].to(memory.flat.dtype)


def atomic_add(pointer: Any, value: Any, mask: Any = None) -> Value:
    """An atomic sum. Returns what was there before."""
    memory, lanes, places = _reached("atomic", pointer, mask, value)
    element = pointer.dtype.element_ty
    before = torch.zeros(lanes.shape, dtype=STORAGE[element])
    before[lanes] = memory.flat[places].to(before.dtype)
    added = _elements(value, element, lanes)[lanes].to(memory.flat.dtype)
    memory.flat.index_put_((places,), added, accumulate=True)
    return _value(before, element, pointer)


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
        got, allowed = (view.dtype, list(view.shape), view.layout), (self.dtype, self.block_shape, self.layout)
        if got != allowed:
            raise LayoutError(f"{access}: got shared memory {got}; allowed {allowed}")

    def coordinates(self, coordinates: Any) -> list[int]:
        """Coordinates of a box's first element, in 32 bits."""
        found = [operator.index(plain(it)) for it in coordinates]
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
