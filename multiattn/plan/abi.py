"""One launch of a compiled kernel, as data: its arguments in order, its grid, its shared memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from multiattn.plan.cubin import KernelEntry as KernelEntry
from multiattn.plan.cubin import Slot
from multiattn.plan.cubin import host_of as host_of
from multiattn.plan.cubin import read_entry as read_entry
from multiattn.plan.cubin import sections as sections

Kind = Literal["i8", "i32", "i64", "f32"]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

_FORMATS: Mapping[Kind, str] = {"i8": "<b", "i32": "<i", "i64": "<q", "f32": "<f"}

WORKSPACE = "workspace"
"""The name of a workspace of one area, which a forward's Binding asks for by `workspace_bytes`."""

POINTER_BYTES = 8
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
"""Bytes that the address of a CUtensorMap must be a multiple of, on the host to encode it and among the parameters."""
L2_128_BYTES, L2_256_BYTES = 2, 3
"""Values of CUtensorMapL2promotion: the bytes that a smaller access fetches into L2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """The address of a tensor, by its name among `Operands` or areas of workspace; a null pointer for None."""

    tensor: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A scalar."""

    kind: Kind
    value: int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The part of a tensor map that a compiler decides.

    `extents` are in elements, outermost first; `swizzle` is CUtensorMapSwizzle's value, `dtype` CUtensorMapDataType's.
    """

    extents: tuple[int, ...]
    swizzle: int
    dtype: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMap:
    """A CUtensorMap that the host encodes, tiled, zeros beyond its ends; dimensions outermost first."""

    tensor: str
    shape: tuple[int, ...]
    """In elements."""
    strides: tuple[int, ...]
    """In bytes, of every dimension but the last, whose stride is one element."""
    box: Box
    l2_promotion: int = L2_128_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Struct:
    """Bytes passed by value, with what only a launch knows written over them.

    `pointers`: byte offset to the name of the tensor whose address is there. `maps`: byte offset, a multiple of
    `TENSOR_MAP_ALIGNMENT`, to the tensor map that is encoded there.
    """

    data: bytes
    pointers: Mapping[int, str] = field(default_factory=dict)
    maps: Mapping[int, TensorMap] = field(default_factory=dict)


Argument = Pointer | Number | Struct | TensorMap


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """The part of a launch that only the compiler knows: how its code is started, and the boxes of tensor maps."""

    threads: int
    """In a block, as the driver is told: 1 where it finds the number in the cubin (cuTile)."""
    dynamic_smem_bytes: int = 0
    boxes: tuple[Box, ...] = ()
    """For each TensorMap that is an argument of its own, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """Everything that one launch of a kernel hands to the driver beside the code."""

    arguments: tuple[Argument, ...]
    grid: tuple[int, int, int]
    image: Image
    constants: Mapping[str, str]
    """The values that the code is specialised on, by name: a launch whose constants differ needs other code."""
    workspace_bytes: int = 0
    """Device memory that a launch takes, zero when it starts: its address is the tensor `WORKSPACE`."""


def names_of(binding: Binding) -> tuple[str, ...]:
    """The names of all tensors and areas of workspace whose addresses a launch hands over."""
    found: list[str | None] = []
    for argument in binding.arguments:
        if isinstance(argument, Struct):
            found += [*argument.pointers.values(), *(it.tensor for it in argument.maps.values())]
        elif isinstance(argument, Pointer | TensorMap):
            found.append(argument.tensor)
    return tuple(dict.fromkeys(name for name in found if name is not None))


# ---------------------------------------------------------------- what code is specialised on


def settle(
    constants: dict[str, str], emitted: Mapping[str, str], name: str, own: str, accepts: Callable[[str], bool]
) -> str:
    """Enter constant `name`: what the emitted code has, if that accepts these tensors, else the tensors' `own`.

    Code that assumes less than it could of the tensors at hand runs them as well. Returns what was entered.
    """
    there = emitted.get(name)
    constants[name] = there if there is not None and accepts(there) else own
    return constants[name]


def exactly(constants: dict[str, str], **values: object) -> None:
    """Enter constants that code has one value of."""
    constants.update({name: str(value) for name, value in values.items()})


def flag(constants: dict[str, str], emitted: Mapping[str, str], name: str, needed: bool) -> bool:
    """Enter a constant that code may have although these tensors do not need it; returns what was entered."""
    return settle(constants, emitted, name, str(needed), lambda there: there == "True") == "True"


def multiple(constants: dict[str, str], emitted: Mapping[str, str], name: str, own: int, value: int) -> int:
    """Enter what `value` must be a multiple of, `own` where the tensors may decide; returns what was entered."""
    needed = _ANY if own == 1 else f"{_MULTIPLE}{own}"
    return divisor(settle(constants, emitted, name, needed, lambda there: value % divisor(there) == 0))


_MULTIPLE, _ANY = "multiple of ", "any"


def divisor(text: str) -> int:
    """The number of a constant that `multiple` entered; ValueError for another."""
    number = text.removeprefix(_MULTIPLE)
    if text != _ANY and not (number.isascii() and number.isdecimal() and int(number) > 0):
        raise ValueError(f"constant: got {text!r}; allowed {_ANY}, {_MULTIPLE}a positive number")
    return 1 if text == _ANY else int(number)


# ---------------------------------------------------------------- arguments as bytes


def size_of(argument: Argument) -> int:
    """Bytes of an argument."""
    if isinstance(argument, Pointer):
        return POINTER_BYTES
    if isinstance(argument, Number):
        return struct.calcsize(_FORMATS[argument.kind])
    return len(argument.data) if isinstance(argument, Struct) else TENSOR_MAP_BYTES


def alignment_of(argument: Argument) -> int:
    """Bytes that the place of an argument among the parameters is a multiple of."""
    if isinstance(argument, TensorMap) or (isinstance(argument, Struct) and argument.maps):
        return TENSOR_MAP_ALIGNMENT
    return POINTER_BYTES if isinstance(argument, Struct) else size_of(argument)


def _pack_number(number: Number) -> bytes:
    if number.kind == "f32":
        return bytes(ctypes.c_float(number.value))  # what is too large is inf
    try:
        return struct.pack(_FORMATS[number.kind], number.value)
    except struct.error as error:
        raise ValueError(f"argument: got {number.value!r}; allowed {number.kind}") from error


def pack(argument: Argument, addresses: Mapping[str, int], encode: Callable[[TensorMap, int], bytes]) -> bytes:
    """An argument as the kernel reads it. `addresses` are those of the tensors; `encode` makes a CUtensorMap."""
    if isinstance(argument, Pointer):
        return struct.pack("<Q", 0 if argument.tensor is None else addresses[argument.tensor])
    if isinstance(argument, Number):
        return _pack_number(argument)
    if isinstance(argument, TensorMap):
        return encode(argument, addresses[argument.tensor])
    data = bytearray(argument.data)
    for offset, tensor in argument.pointers.items():
        struct.pack_into("<Q", data, offset, addresses[tensor])
    for offset, tensor_map in argument.maps.items():
        data[offset : offset + TENSOR_MAP_BYTES] = encode(tensor_map, addresses[tensor_map.tensor])
    return bytes(data)


# ---------------------------------------------------------------- held against the cubin


def check(binding: Binding, entry: KernelEntry) -> None:
    """ValueError where a Binding is not what a kernel takes: number, sizes and places of parameters, boxes, threads."""
    slots: list[Slot] = []
    end = entry.base
    for argument in binding.arguments:
        alignment = alignment_of(argument)
        start = -(-end // alignment) * alignment
        slots.append(Slot(offset=start - entry.base, size=size_of(argument)))
        end = start + size_of(argument)
    if len(slots) != len(entry.slots):
        counts = f"got {len(slots)} arguments; allowed {len(entry.slots)}"
        raise ValueError(f"{entry.symbol}: {counts}, as the cubin has it")
    for index, (ours, its) in enumerate(zip(slots, entry.slots, strict=True)):
        if ours != its:
            got, allowed = (f"{it.size} bytes at {it.offset}" for it in (ours, its))
            raise ValueError(f"{entry.symbol}: argument {index}: got {got}; allowed {allowed}")
    if end - entry.base > entry.param_bytes:
        raise ValueError(f"{entry.symbol}: got {end - entry.base} bytes of arguments; allowed {entry.param_bytes}")
    maps = [argument for argument in binding.arguments if isinstance(argument, TensorMap)]
    ranks, boxes = [len(it.shape) for it in maps], [len(box.extents) for box in binding.image.boxes]
    if ranks != boxes:
        raise ValueError(f"{entry.symbol}: got boxes of {boxes} dimensions; allowed {ranks}, of each tensor map")
    threads = binding.image.threads
    if threads != 1 and entry.threads is not None and threads > entry.threads:
        raise ValueError(f"{entry.symbol}: got {threads} threads of a block; allowed {entry.threads}")
