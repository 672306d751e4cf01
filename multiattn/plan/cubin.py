"""Read cubins with no tool and no driver: their ELF sections, and a kernel's parameters and resources."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from multiattn.plan.arch import SMEM_RESERVED

_NOBITS = 8  # type of a section that only reserves memory
_HEADER = "<IIQQQQII"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One section of an ELF file."""

    name: str
    content: bytes
    """Empty where the section only reserves memory."""
    size: int
    """In bytes, reserved memory included."""
    info: int
    """``sh_info``: of a kernel's code its top byte is the number of registers."""


def read_sections(cubin: bytes) -> tuple[Section, ...]:
    """The sections of a 64-bit little-endian ELF file, in order; ValueError for another file or a damaged one."""
    if not cubin.startswith(b"\x7fELF\x02\x01"):
        raise ValueError(f"cubin: got {len(cubin)} bytes that are no 64-bit ELF file")
    try:
        (table,) = struct.unpack_from("<Q", cubin, 0x28)
        each, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
        headers = [struct.unpack_from(_HEADER, cubin, table + each * index) for index in range(count)]
        names = _content(cubin, headers[of_names])
        return tuple(
            Section(
                name=names[header[0] : names.index(b"\0", header[0])].decode(),
                content=_content(cubin, header),
                size=header[5],
                info=header[7],
            )
            for header in headers
        )
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"cubin: got an ELF file of {len(cubin)} bytes that is cut off or damaged ({error})") from None


def sections(cubin: bytes) -> dict[str, bytes]:
    """The contents of the sections by name; ValueError as `read_sections`."""
    return {section.name: section.content for section in read_sections(cubin)}


def _content(cubin: bytes, header: tuple[int, ...]) -> bytes:
    kind, offset, size = header[1], header[4], header[5]
    if kind == _NOBITS:
        return b""
    if offset + size > len(cubin):
        raise ValueError(f"a section ends at byte {offset + size}")
    return cubin[offset : offset + size]


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one parameter among all parameters of a kernel, and its size; in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEntry:
    """One kernel of a cubin."""

    symbol: str
    slots: tuple[Slot, ...]
    base: int
    """Where the parameters start in their constant bank, in bytes. Alignment counts from the start of the bank."""
    param_bytes: int
    """Bytes of all parameters, including tensor maps that cuTile's host code makes and no caller hands over."""
    threads: int | None = None
    """In a block, where the kernel was compiled for one number of threads, or for at most so many."""
    registers: int = 0
    stack_bytes: int = 0
    """A thread's. None of our kernels indexes an array at run time, so this is what the compiler spilled."""
    smem_bytes: int = 0
    """Static shared memory of a block, without the KiB that the system keeps in every block."""


# NVIDIA does not document these numbers. cuobjdump prints their names, and a test compares with what it prints.
_FORMAT_SIZED = 4
_MAX_THREADS, _PARAM_CBANK, _REQNTID, _KPARAM_INFO, _KPARAM_INFO_V2 = 0x05, 0x0A, 0x10, 0x17, 0x45
_MIN_STACK_SIZE, _REGCOUNT = 0x12, 0x2F
_SIZE_SHIFT, _SIZE_MASK = 18, 0xFFFF  # where the flags of a parameter have its size: first version, second version
_INFO = ".nv.info."
_RESERVED_SMEM = ".nv.shared.reserved.0"  # in the cubins, sm90 and later, that count what the system keeps


def read_entry(cubin: bytes, symbol: str) -> KernelEntry:
    """The kernel called `symbol`; ValueError where `cubin` is no cubin or has no such kernel."""
    found = {section.name: section for section in read_sections(cubin)}
    if f"{_INFO}{symbol}" not in found:
        names = [name.removeprefix(_INFO) for name in found if name.startswith(_INFO)]
        raise ValueError(f"kernel: got {symbol!r}; allowed what the cubin has: {', '.join(names) or 'none'}")
    try:
        return _read_entry(symbol, found)
    except struct.error as error:
        raise ValueError(f"kernel: {symbol}: what the cubin says of it is damaged ({error})") from None


def _read_entry(symbol: str, found: Mapping[str, Section]) -> KernelEntry:
    """Read what the sections say of a kernel; struct.error for a damaged one."""
    slots: dict[int, Slot] = {}
    sizes: dict[int, int] = {}
    base = param_bytes = 0
    for attribute, value in _attributes(found[f"{_INFO}{symbol}"]):
        if attribute in (_KPARAM_INFO, _KPARAM_INFO_V2):
            _, ordinal, offset, flags = struct.unpack("<IHHI", value)
            width = flags >> _SIZE_SHIFT if attribute == _KPARAM_INFO else flags & _SIZE_MASK
            slots[ordinal] = Slot(offset=offset, size=width)
        elif attribute == _PARAM_CBANK:
            _, base, param_bytes = struct.unpack("<IHH", value)
        elif attribute in (_REQNTID, _MAX_THREADS):
            x, y, z = struct.unpack("<III", value)
            sizes[attribute] = x * y * z
    resources = dict.fromkeys((_REGCOUNT, _MIN_STACK_SIZE), 0)  # of all functions: a cubin has one kernel
    for attribute, value in _attributes(found.get(_INFO.removesuffix("."))):
        if attribute in resources:
            resources[attribute] = max(resources[attribute], struct.unpack("<II", value)[1])
    smem = found.get(f".nv.shared.{symbol}")
    smem_bytes = (smem.size if smem else 0) - (SMEM_RESERVED if _RESERVED_SMEM in found else 0)
    return KernelEntry(
        symbol=symbol,
        slots=tuple(slots[ordinal] for ordinal in sorted(slots)),
        base=base,
        param_bytes=param_bytes,
        threads=sizes.get(_REQNTID, sizes.get(_MAX_THREADS)),
        registers=resources[_REGCOUNT],
        stack_bytes=resources[_MIN_STACK_SIZE],
        smem_bytes=max(0, smem_bytes),
    )


def _attributes(section: Section | None) -> Iterator[tuple[int, bytes]]:
    """The attributes that have a size, of a section of information; none where there is no section."""
    info, at = section.content if section else b"", 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _FORMAT_SIZED:
            yield attribute, info[at : at + size]
            at += size


# ---------------------------------------------------------------- host code

_HOST_SECTION = ".nv.host"
_MACHINE_OFFSET = 18  # of the machine in the header of an ELF file
_MACHINES = {62: "x86_64", 183: "aarch64"}  # by ELF's number, as platform.machine() calls them


def host_of(cubin: bytes) -> str | None:
    """The machine that the host code in a cubin of cuTile is for; None for a cubin without host code."""
    code = sections(cubin).get(_HOST_SECTION)
    if code is None:
        return None
    if len(code) < _MACHINE_OFFSET + 2:
        raise ValueError(f"cubin: got host code of {len(code)} bytes; allowed an ELF file")
    (machine,) = struct.unpack_from("<H", code, _MACHINE_OFFSET)
    return _MACHINES.get(machine, f"ELF machine {machine}")
