"""Inline PTX: the instructions that kernels have there, each a row of `INSTRUCTIONS`.

A register has one number for each thread and group of `pack` elements. It has no type: an instruction says how it reads
the bits. What writes to memory is done by every thread, those included that have copies of an element.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from multiattn.plan.support import OutOfBoundsError
from multiattn.triton.cpu.gluon import layouts
from multiattn.triton.cpu.gluon.errors import GluonError, LayoutError
from multiattn.triton.cpu.gluon.machine import running
from multiattn.triton.cpu.gluon.values import STORAGE, Shape, Value, broadcast_shape, common_layout, lift, plain


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


class _Pointers(NamedTuple):
    """A register with an address."""

    memory: Any
    places: torch.Tensor


_TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f16x2": torch.float16,
    "bf16x2": torch.bfloat16, "s16": torch.int16, "u16": torch.int16, "b16": torch.int16, "s32": torch.int32,
    "u32": torch.int32, "b32": torch.int32, "s64": torch.int64, "u64": torch.int64, "b64": torch.int64,
    "f64": torch.float64,
}  # fmt: skip


class _Threads:
    """The registers of all threads."""

    def __init__(self, registers: dict[str, Any], lanes: Shape) -> None:
        self.registers, self.lanes = registers, lanes

    def read(self, name: str, kind: str) -> torch.Tensor:
        """A register's or a literal's bits as numbers of a type; of a packed type ``[..., 2]``."""
        dtype = _TYPES[kind]
        value = self.registers.get(name)
        if value is None:
            value = _literal(name, dtype)
        if kind.endswith("x2"):
            return torch.as_tensor(value).contiguous().view(torch.int32).unsqueeze(-1).view(dtype)
        if value.dtype == dtype:
            return torch.as_tensor(value)
        if value.dtype.itemsize != dtype.itemsize:
            raise GluonError(f"PTX: {name} has {8 * value.dtype.itemsize} bits; allowed those of {kind}")
        return torch.as_tensor(value.contiguous().view(dtype))

    def predicate(self, name: str) -> torch.Tensor:
        """A predicate."""
        found: torch.Tensor = self.registers[name]
        return found

    def write(self, name: str, value: Any) -> None:
        """A register."""
        self.registers[name] = value

    def run(self, instruction: Statement) -> None:
        """One instruction."""
        base, *parts = instruction.opcode.split(".")
        run = INSTRUCTIONS.get(base)
        if run is None:
            raise NotImplementedError(f"PTX: the interpreter of Gluon has no {instruction.opcode}")
        run(self, parts, instruction.operands)


def _literal(name: str, dtype: torch.dtype) -> torch.Tensor:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", name):
        return torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:]))[0], dtype=torch.float32)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", name):
        number, bits = int(name, 0), 8 * dtype.itemsize
        return torch.tensor(number - (1 << bits) if number >> (bits - 1) > 0 else number, dtype=dtype)
    raise GluonError(f"PTX: {name} was never written")


# ---------------------------------------------------------------- arithmetic

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def _unsigned(value: torch.Tensor, kind: str) -> torch.Tensor:
    return value.to(torch.int64) & ((1 << 8 * value.dtype.itemsize) - 1) if kind in ("u16", "u32") else value


def _setp(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
    kind = parts[-1]
    x, y = (_unsigned(threads.read(it, kind), kind) for it in operands[1:3])
    threads.write(operands[0], _COMPARE[parts[0]](x, y))


def _selp(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
    x, y = (threads.read(it, parts[-1]) for it in operands[1:3])
    threads.write(operands[0], torch.where(threads.predicate(operands[3]), x, y))


def _mov(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
    target, source = operands
    if target.startswith("{"):  # the first one is the lower half
        halves = threads.read(source, "b32").contiguous().unsqueeze(-1).view(torch.int16).unbind(-1)
        for name, half in zip(_names(target), halves, strict=True):
            threads.write(name, half)
    else:
        found = threads.registers.get(source)
        threads.write(target, found if found is not None else threads.read(source, parts[-1]))


def _names(text: str) -> list[str]:
    """The registers of a vector."""
    return [it.strip() for it in text.strip("{} ").split(",")]


def _pack(pairs: torch.Tensor) -> torch.Tensor:
    """``[..., 2]`` numbers of 16 bits as 32 bits."""
    return pairs.contiguous().view(torch.int32).squeeze(-1)


def _cvt(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
    to, kind = parts[-2:]
    if not {"rn", "rzi", "rni", "sat", "ftz", to, kind} >= set(parts):
        raise NotImplementedError(f"PTX: the interpreter of Gluon has no cvt.{'.'.join(parts)}")
    if to.endswith("x2"):  # the first operand is the upper half
        upper, lower = torch.broadcast_tensors(*(threads.read(it, kind) for it in operands[1:3]))
        threads.write(operands[0], _pack(torch.stack((lower, upper), -1).to(_TYPES[to])))
    else:
        value = _unsigned(threads.read(operands[1], kind), kind)
        threads.write(operands[0], (value.round() if "rni" in parts else value).to(_TYPES[to]))


def _of(function: Callable[..., torch.Tensor]) -> Callable[[_Threads, Sequence[str], Sequence[str]], None]:
    """A function of numbers of the type that an instruction ends with."""

    def run(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
        kind = parts[-1]
        values = torch.broadcast_tensors(*(threads.read(it, kind) for it in operands[1:]))
        result = function(*values)
        threads.write(operands[0], _pack(result) if kind.endswith("x2") else result)

    return run


def _shl(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
    threads.write(operands[0], threads.read(operands[1], parts[-1]) << threads.read(operands[2], "u32"))


# ---------------------------------------------------------------- memory


def _address(threads: _Threads, text: str) -> _Pointers:
    found = threads.registers.get(text.strip("[] "))
    if isinstance(found, torch.Tensor) and found.dtype == torch.int64:
        found = _pointed_to(found)
    if not isinstance(found, _Pointers):
        raise GluonError(f"PTX: {text} is no pointer to a tensor")
    return found


def _pointed_to(addresses: torch.Tensor) -> _Pointers:
    """The tensor that addresses are in, all of them."""
    for memory_ in running().memories:
        size = memory_.flat.element_size()
        places = addresses - memory_.address
        if bool(((places >= 0) & (places < memory_.flat.numel() * size) & (places % size == 0)).all()):
            return _Pointers(memory_, places // size)
    raise OutOfBoundsError(f"PTX: addresses in program {running().program} that are not all in one tensor")


def _red(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
    if "global" not in parts or "add" not in parts:
        raise NotImplementedError(f"PTX: the interpreter of Gluon has no red.{'.'.join(parts)}")
    memory_, places = _address(threads, operands[0])
    kind, values = parts[-1], _names(operands[1])
    vector = next((int(it[1:]) for it in parts if re.fullmatch(r"v\d", it)), 1)
    if vector != len(values):
        raise GluonError(f"PTX: red.{'.'.join(parts)} of {len(values)} registers")
    data = torch.stack(torch.broadcast_tensors(*(threads.read(it, kind) for it in values)), -1)
    data = data.flatten(places.dim())  # of a packed type each register has two
    if data.dtype != memory_.flat.dtype:
        raise GluonError(f"PTX: red.{'.'.join(parts)} to a tensor of {memory_.dtype}")
    size = memory_.flat.element_size()
    if bool(((memory_.address + places * size) % (size * data.shape[-1])).any()):
        raise OutOfBoundsError(f"PTX: red.{'.'.join(parts)} to addresses that are no multiple of its size")
    places = places[:, None] + torch.arange(data.shape[-1])
    memory_.check(places, None, "red")
    memory_.flat.index_put_((places,), data, accumulate=True)


def _nothing(threads: _Threads, parts: Sequence[str], operands: Sequence[str]) -> None:
    """Nothing to do here: the threads of a warp are one, and programs run one after another."""


INSTRUCTIONS: dict[str, Callable[[_Threads, Sequence[str], Sequence[str]], None]] = {
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
    threads = _Threads(registers, lanes.lanes[:-1])
    for instruction in instructions:
        threads.run(instruction)
    return _result(threads, [f"${number}" for number in range(outputs)], dtype, lanes, layout)


def _registers(value: Value, lanes: _Lanes) -> list[Any]:
    """The registers of an operand."""
    data = torch.as_tensor(value.data, dtype=torch.int64 if value.memory is not None else STORAGE[value.dtype])
    if value.layout is None:
        return [_Pointers(value.memory, data) if value.memory is not None else data] * lanes.pack
    spread = lanes.spread(data)
    if value.memory is not None:
        return [_Pointers(value.memory, spread[..., lane]) for lane in range(lanes.pack)]
    together = _per_register(value.dtype.primitive_bitwidth, lanes.pack)
    if together > 1:
        spread = spread.contiguous().view(torch.int32)
    return list(spread.unbind(-1))


def _result(threads: _Threads, names: Sequence[str], dtype: Any, lanes: _Lanes, layout: Any) -> Value:
    storage = STORAGE[dtype]
    zero = torch.zeros((), dtype=torch.int32)
    registers = [torch.as_tensor(threads.registers.get(name, zero)) for name in names]
    if layout is None:
        return Value(registers[0].reshape(-1)[0].view(storage).item() if names[0] in threads.registers else 0, dtype)
    shape = lanes.lanes[:-1] if lanes.places is None else tuple(lanes.places.shape[:1])
    stacked = torch.stack([it.expand(shape) for it in registers], -1)
    if stacked.dtype != storage:
        stacked = stacked.contiguous().view(storage)
    return Value(lanes.gather(stacked), dtype, layout)
