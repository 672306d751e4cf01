"""What a compiled kernel takes from the driver, as data: its arguments in order, its grid, its shared memory.

Pure Python: what a cubin says of its parameters is read from its ELF sections, with no tool and no driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["i8", "i32", "i64", "f32"]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

_FORMATS: Mapping[Kind, str] = {"i8": "<b", "i32": "<i", "i64": "<q", "f32": "<f"}

TENSORS = ("q", "k", "v", "out", "lse")
"""The names of what a forward launch is given, in its order."""
WORKSPACE = "workspace"
"""The name of a workspace of one area, which a forward's Binding asks for by `workspace_bytes`."""

POINTER_BYTES = 8
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
"""Bytes that the address of a CUtensorMap must be a multiple of, on the host to encode it and among the parameters."""
L2_128_BYTES, L2_256_BYTES = 2, 3
"""Of CUtensorMapL2promotion: what an access of less fetches into L2."""


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
    """What a compiler decided of a tensor map. `swizzle` is CUtensorMapSwizzle's value, `dtype` CUtensorMapDataType's.

    `extents` are in elements, outermost first.
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
    """What only the compiler knows of a launch: how its code is to be started, and what it made of tensor maps."""

    threads: int
    """Of a block, as the driver is told: 1 where it finds the number in the cubin (cuTile)."""
    dynamic_smem_bytes: int = 0
    boxes: tuple[Box, ...] = ()
    """Of each TensorMap that is an argument of its own, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """What one launch of a kernel hands to the driver beside the code."""

    arguments: tuple[Argument, ...]
    grid: tuple[int, int, int]
    image: Image
    constants: Mapping[str, str]
    """What the code is specialised on, by name: a launch whose constants differ needs other code."""
    workspace_bytes: int = 0
    """Of device memory that a launch takes, zero when it starts: its address is the tensor `WORKSPACE`."""


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
    text = settle(constants, emitted, name, _multiple_of(own), lambda there: value % divisor(there) == 0)
    return divisor(text)


_MULTIPLE, _ANY = "multiple of ", "any"


def _multiple_of(number: int) -> str:
    return _ANY if number == 1 else f"{_MULTIPLE}{number}"


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


# ---------------------------------------------------------------- what a cubin says


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter of a kernel: where it is among all of them, and how large it is; in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a cubin says of one of its kernels."""

    symbol: str
    slots: tuple[Slot, ...]
    base: int
    """Where the parameters start in their constant bank: their alignment counts from the bank's start. In bytes."""
    param_bytes: int
    """Of all parameters, with those that no caller hands over: tensor maps that cuTile's host code makes."""
    threads: int | None = None
    """Of a block, where the kernel was compiled for one number of threads, or for at most so many."""


# NVIDIA documents none of these; they are what cuobjdump prints names for, and a test compares with it.
_FORMAT_SIZED = 4
_MAX_THREADS, _PARAM_CBANK, _REQNTID, _KPARAM_INFO, _KPARAM_INFO_V2 = 0x05, 0x0A, 0x10, 0x17, 0x45
_SIZE_SHIFT, _SIZE_MASK = 18, 0xFFFF  # of the size in the flags of a parameter, of the first version and the second
_NOBITS = 8


def read_entry(cubin: bytes, symbol: str) -> Entry:
    """What `cubin` says of the kernel called `symbol`; ValueError where it is no cubin or has no such kernel."""
    found = sections(cubin)
    if (info := found.get(f".nv.info.{symbol}")) is None:
        names = [name.removeprefix(".nv.info.") for name in found if name.startswith(".nv.info.")]
        raise ValueError(f"kernel: got {symbol!r}; allowed what the cubin has: {', '.join(names) or 'none'}")
    try:
        return _read_info(symbol, info)
    except struct.error as error:
        raise ValueError(f"kernel: {symbol}: what the cubin says of it is damaged ({error})") from None


def _read_info(symbol: str, info: bytes) -> Entry:
    """What a section of kernel information says; struct.error for a damaged one."""
    slots: dict[int, Slot] = {}
    sizes: dict[int, int] = {}
    base = param_bytes = 0
    for attribute, value in _attributes(info):
        if attribute in (_KPARAM_INFO, _KPARAM_INFO_V2):
            _, ordinal, offset, flags = struct.unpack("<IHHI", value)
            size = flags >> _SIZE_SHIFT if attribute == _KPARAM_INFO else flags & _SIZE_MASK
            slots[ordinal] = Slot(offset=offset, size=size)
        elif attribute == _PARAM_CBANK:
            _, base, param_bytes = struct.unpack("<IHH", value)
        elif attribute in (_REQNTID, _MAX_THREADS):
            x, y, z = struct.unpack("<III", value)
            sizes[attribute] = x * y * z
    return Entry(
        symbol=symbol,
        slots=tuple(slots[ordinal] for ordinal in sorted(slots)),
        base=base,
        param_bytes=param_bytes,
        threads=sizes.get(_REQNTID, sizes.get(_MAX_THREADS)),
    )


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    """(attribute, value) of a section of kernel information; those without a sized value are left out."""
    found, at = [], 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _FORMAT_SIZED:
            found.append((attribute, info[at : at + size]))
            at += size
    return found


def sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit little-endian ELF file by name, empty where they only reserve memory.

    ValueError for what is no such file.
    """
    if not cubin.startswith(b"\x7fELF\x02\x01"):
        raise ValueError(f"cubin: got {len(cubin)} bytes that are no 64-bit ELF file")
    try:
        (table,) = struct.unpack_from("<Q", cubin, 0x28)
        each, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", cubin, table + each * index) for index in range(count)]
        names = _content(cubin, headers[of_names])
        return {
            names[header[0] : names.index(b"\0", header[0])].decode(): _content(cubin, header) for header in headers
        }
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"cubin: got an ELF file of {len(cubin)} bytes that is cut off or damaged ({error})") from None


def _content(cubin: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size = header
    if kind == _NOBITS:
        return b""
    if offset + size > len(cubin):
        raise ValueError(f"a section ends at byte {offset + size}")
    return cubin[offset : offset + size]


_HOST_SECTION = ".nv.host"
_HOST_BYTES = 20  # up to the machine in the header of its ELF file, that included
_MACHINES = {62: "x86_64", 183: "aarch64"}  # of ELF, as platform.machine() calls them


def host_of(cubin: bytes) -> str | None:
    """The machine whose code a cubin of cuTile has for the driver to run; None for a cubin without."""
    code = sections(cubin).get(_HOST_SECTION)
    if code is None:
        return None
    if len(code) < _HOST_BYTES:
        raise ValueError(f"cubin: got host code of {len(code)} bytes; allowed an ELF file")
    (machine,) = struct.unpack_from("<H", code, 18)
    return _MACHINES.get(machine, f"ELF machine {machine}")


def check(binding: Binding, entry: Entry) -> None:
    """ValueError where a Binding is not what a kernel takes: number, sizes and places of parameters, boxes, threads."""
    slots: list[Slot] = []
    end = entry.base
    for argument in binding.arguments:
        alignment = alignment_of(argument)
        start = -(-end // alignment) * alignment
        slots.append(Slot(offset=start - entry.base, size=size_of(argument)))
        end = start + size_of(argument)
    if tuple(slots) != entry.slots:
        raise ValueError(f"{entry.symbol}: {_first_difference(slots, entry.slots)}")
    if end - entry.base > entry.param_bytes:
        raise ValueError(f"{entry.symbol}: got {end - entry.base} bytes of arguments; allowed {entry.param_bytes}")
    maps = [argument for argument in binding.arguments if isinstance(argument, TensorMap)]
    ranks, boxes = [len(it.shape) for it in maps], [len(box.extents) for box in binding.image.boxes]
    if ranks != boxes:
        raise ValueError(f"{entry.symbol}: got boxes of {boxes} dimensions; allowed {ranks}, of each tensor map")
    threads = binding.image.threads
    if threads != 1 and entry.threads is not None and threads > entry.threads:
        raise ValueError(f"{entry.symbol}: got {threads} threads of a block; allowed {entry.threads}")


def _first_difference(ours: list[Slot], theirs: tuple[Slot, ...]) -> str:
    if len(ours) != len(theirs):
        return f"got {len(ours)} arguments; allowed {len(theirs)}, as the cubin has it"
    index = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    mine, his = ours[index], theirs[index]
    return f"argument {index}: got {mine.size} bytes at {mine.offset}; allowed {his.size} at {his.offset}"
