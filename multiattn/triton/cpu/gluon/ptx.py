"""Inline PTX: the instructions that kernels have there, each a row of `INSTRUCTIONS`.

A register has one number for each thread and group of `pack` elements. It has no type: an instruction says how it reads
the bits. What writes to memory is done by every thread, those included that have copies of an element.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from multiattn.plan.support import OutOfBoundsError
from multiattn.triton.cpu.gluon import layouts
from multiattn.triton.cpu.gluon.errors import GluonError, LayoutError
from multiattn.triton.cpu.gluon.machine import running
from multiattn.triton.cpu.gluon.tensors import Memory
from multiattn.triton.cpu.gluon.values import STORAGE, Shape, Value, broadcast_shape, cast, common_layout, lift, plain


class Statement(NamedTuple):
    """One of a text."""

    opcode: str
    operands: tuple[str, ...]


@functools.cache
def _parsed(text: str) -> tuple[Statement, ...]:
    text = " ".join(re.sub(r"//[^\n]*", "", text).split())
    if text.startswith("{"):
        text = text[1:].rpartition("}")[0]
    found = []
    for statement in text.split(";"):
        opcode, _, rest = statement.strip().partition(" ")
        if opcode and opcode != ".reg":
            operands = tuple(it.strip() for it in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if it.strip())
            found.append(Statement(opcode, operands))
    return tuple(found)


_TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f16x2": torch.float16,
    "bf16x2": torch.bfloat16, "b16": torch.int16, "s32": torch.int32, "u32": torch.int32, "b32": torch.int32,
}  # fmt: skip


Registers = dict[str, Any]
"""The registers of all threads, by name."""


def _read(registers: Registers, name: str, kind: str) -> torch.Tensor:
    """A register's or a literal's bits as numbers of a type; of a packed type ``[..., 2]``."""
    value, dtype = registers.get(name), _TYPES[kind]
    if value is None:
        value = _literal(name, dtype)
    if kind.endswith("x2"):
        return torch.as_tensor(value).contiguous().view(torch.int32).unsqueeze(-1).view(dtype)
    return torch.as_tensor(value if value.dtype == dtype else value.contiguous().view(dtype))


def _literal(name: str, dtype: torch.dtype) -> torch.Tensor:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", name):
        return torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:]))[0], dtype=torch.float32)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", name):
        return torch.tensor(ctypes.c_int32(int(name, 0)).value, dtype=dtype)
    raise GluonError(f"PTX: {name} was never written")


# ---------------------------------------------------------------- arithmetic

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "ne": operator.ne,
}  # fmt: skip


def _setp(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
    x, y = (_read(registers, it, parts[-1]) for it in operands[1:3])
    if parts[-1] == "u32":
        x, y = (it.to(torch.int64) & 0xFFFFFFFF for it in (x, y))
    registers[operands[0]] = _COMPARE[parts[0]](x, y)


def _selp(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
    x, y = (_read(registers, it, parts[-1]) for it in operands[1:3])
    registers[operands[0]] = torch.where(registers[operands[3]], x, y)


def _mov(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
    target, source = operands
    if target.startswith("{"):  # the first one is the lower half
        halves = _read(registers, source, "b32").contiguous().unsqueeze(-1).view(torch.int16).unbind(-1)
        for name, half in zip(_names(target), halves, strict=True):
            registers[name] = half
    else:
        found = registers.get(source)
        registers[target] = found if found is not None else _read(registers, source, parts[-1])


def _names(text: str) -> list[str]:
    """The registers of a vector."""
    return [it.strip() for it in text.strip("{} ").split(",")]


def _pack(pairs: torch.Tensor) -> torch.Tensor:
    """``[..., 2]`` numbers of 16 bits as 32 bits."""
    return pairs.contiguous().view(torch.int32).squeeze(-1)


def _cvt(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
    to, kind = parts[-2:]
    if to.endswith("x2"):  # the first operand is the upper half
        upper, lower = torch.broadcast_tensors(*(_read(registers, it, kind) for it in operands[1:3]))
        registers[operands[0]] = _pack(torch.stack((lower, upper), -1).to(_TYPES[to]))
    else:
        registers[operands[0]] = _read(registers, operands[1], kind).to(_TYPES[to])


def _of(function: Callable[..., torch.Tensor]) -> Callable[[Registers, Sequence[str], Sequence[str]], None]:
    """A function of numbers of the type that an instruction ends with."""

    def run(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
        kind = parts[-1]
        values = torch.broadcast_tensors(*(_read(registers, it, kind) for it in operands[1:]))
        result = function(*values)
        registers[operands[0]] = _pack(result) if kind.endswith("x2") else result

    return run


def _shl(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
    registers[operands[0]] = _read(registers, operands[1], parts[-1]) << _read(registers, operands[2], "u32")


# ---------------------------------------------------------------- memory


def _pointed_to(addresses: torch.Tensor) -> tuple[Memory, torch.Tensor]:
    """The tensor that addresses are in, all of them, and the elements."""
    for memory in running().memories:
        size = memory.flat.element_size()
        places = addresses - memory.address
        if bool(((places >= 0) & (places < memory.flat.numel() * size) & (places % size == 0)).all()):
            return memory, places // size
    raise OutOfBoundsError(f"PTX: addresses in program {running().program} that are not all in one tensor")


def _red(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
    memory, places = _pointed_to(registers[operands[0].strip("[] ")])
    data = torch.stack(torch.broadcast_tensors(*(_read(registers, it, parts[-1]) for it in _names(operands[1]))), -1)
    if ".".join(parts) != "relaxed.gpu.global.add.v4.f32" or data.shape[-1] != 4:
        raise NotImplementedError(f"PTX: the interpreter of Gluon has no red.{'.'.join(parts)} of {operands[1]}")
    size = memory.flat.element_size()
    if bool(((memory.address + places * size) % (size * data.shape[-1])).any()):
        raise OutOfBoundsError(f"PTX: red.{'.'.join(parts)} to addresses that are no multiple of its size")
    places = places[:, None] + torch.arange(data.shape[-1])
    memory.check(places, "red")
    memory.flat.index_put_((places,), data, accumulate=True)


def _nothing(registers: Registers, parts: Sequence[str], operands: Sequence[str]) -> None:
    """Nothing to do here: the threads of a warp are one, and programs run one after another."""


INSTRUCTIONS: dict[str, Callable[[Registers, Sequence[str], Sequence[str]], None]] = {
    "setp": _setp, "selp": _selp, "mov": _mov, "cvt": _cvt, "shl": _shl,
    "add": _of(operator.add), "sub": _of(operator.sub), "mul": _of(operator.mul), "and": _of(operator.and_),
    "tanh": _of(torch.tanh), "red": _red, "bar": _nothing, "griddepcontrol": _nothing,
}  # fmt: skip
_EFFECTS = ("red",)
"""Instructions that every thread does, whoever has the same elements."""


# ---------------------------------------------------------------- operands


@functools.cache
def _in_rows(layout: Any, shape: Shape, pack: int) -> bool:
    """True if a thread's groups of elements are neighbours in rows, and no other thread has them."""
    places = layouts.elements_of_threads(layout, shape)
    if shape[-1] % pack or places.numel() != functools.reduce(operator.mul, shape):
        return False
    groups = places.reshape(-1, pack)
    return bool(((groups - groups[:, :1]) == torch.arange(pack)).all() and (groups[:, 0] % pack == 0).all())


class _Lanes:
    """How elements of blocks are spread over registers: ``[..., pack]``."""

    def __init__(self, layout: Any, shape: Shape, pack: int, *, by_thread: bool) -> None:
        self.shape, self.pack = shape, pack
        self.places: torch.Tensor | None = None
        if layout is None:
            self.lanes: Shape = (1,)
            return
        self.lanes = (*shape, 1) if pack == 1 else (functools.reduce(operator.mul, shape) // pack, pack)
        if by_thread or (pack > 1 and not _in_rows(layout, shape, pack)):
            places = layouts.elements_of_threads(layout, shape)
            if places.shape[1] % pack:
                raise LayoutError(f"pack: got {pack}; allowed what divides {places.shape[1]} registers of {layout}")
            self.places = places.reshape(-1, pack)

    def spread(self, data: torch.Tensor) -> torch.Tensor:
        """Elements of a block by registers."""
        data = data.expand(self.shape)
        return data.reshape(-1)[self.places] if self.places is not None else data.reshape(self.lanes)

    def gather(self, data: torch.Tensor) -> torch.Tensor:
        """The other way."""
        if self.places is None:
            return data.expand(self.lanes).reshape(self.shape)
        result = torch.empty(self.shape, dtype=data.dtype).reshape(-1)
        result[self.places] = data.expand(self.places.shape)
        return result.reshape(self.shape)


def _per_register(bits: int, pack: int) -> int:
    """Elements that share a register."""
    return min(pack, max(1, 32 // bits))


def inline_asm_elementwise(asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any, **_: Any) -> Any:
    """Text of PTX over the elements of `args`, `pack` of them at a time."""
    text, constraints, pack, dtype = (plain(it) for it in (asm, constraints, pack, dtype))
    instructions = _parsed(text)
    values = [lift(it) for it in args]
    layout = common_layout(*values)
    shape = broadcast_shape(*(it.shape for it in values)) if layout is not None else ()
    pack = pack if layout is not None else 1
    has_effect = any(it.opcode.startswith(_EFFECTS) for it in instructions)
    lanes = _Lanes(layout, shape, pack, by_thread=has_effect and layout is not None)
    outputs = pack // _per_register(dtype.primitive_bitwidth, pack)
    inputs = [it for value in values for it in _registers(value, lanes)]
    registers = {f"${number}": it for number, it in enumerate(inputs, outputs)}
    allowed = [it.strip() for it in constraints.split(",") if it.strip() and not it.strip().startswith("~")]
    if (sum(it.startswith("=") for it in allowed), len(allowed)) != (outputs, outputs + len(inputs)):
        raise GluonError(f"PTX: got constraints {constraints}; allowed {outputs} outputs, {len(inputs)} inputs")
    for opcode, operands in instructions:
        base, *parts = opcode.split(".")
        if base not in INSTRUCTIONS:
            raise NotImplementedError(f"PTX: the interpreter of Gluon has no {opcode}")
        INSTRUCTIONS[base](registers, parts, operands)
    return _result(registers, [f"${number}" for number in range(outputs)], dtype, lanes, layout)


def _registers(value: Value, lanes: _Lanes) -> list[Any]:
    """The registers of an operand."""
    value = cast(value, gl.int64) if value.memory is not None else value
    data = torch.as_tensor(value.data, dtype=STORAGE[value.dtype])
    if value.layout is None:
        return [data] * lanes.pack
    spread = lanes.spread(data)
    together = _per_register(value.dtype.primitive_bitwidth, lanes.pack)
    if together > 1:
        spread = spread.contiguous().view(torch.int32)
    return list(spread.unbind(-1))


def _result(registers: Registers, names: Sequence[str], dtype: Any, lanes: _Lanes, layout: Any) -> Value:
    storage = STORAGE[dtype]
    zero = torch.zeros((), dtype=torch.int32)
    found = [torch.as_tensor(registers.get(name, zero)) for name in names]
    if layout is None:
        return Value(found[0].reshape(-1)[0].view(storage).item(), dtype)
    shape = lanes.lanes[:-1] if lanes.places is None else tuple(lanes.places.shape[:1])
    stacked = torch.stack([it.expand(shape) for it in found], -1)
    if stacked.dtype != storage:
        stacked = stacked.contiguous().view(storage)
    return Value(lanes.gather(stacked), dtype, layout)
