"""Shared memory: buffers and views of them, and for each part that is accessed who wrote it last and who reads it.

An access conflicts with an earlier one of the same elements unless both read. Then the partition must have seen the
earlier one end, by its clock: RaceError, whatever the order was this time. Elements are NaN until they are written.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from multiattn.triton.cpu.gluon import layouts
from multiattn.triton.cpu.gluon.errors import GluonError, LayoutError, RaceError, here, made_here
from multiattn.triton.cpu.gluon.machine import Partition, partition, running
from multiattn.triton.cpu.gluon.values import STORAGE, Shape, Value, needs_block, plain, sizes

NEVER = 1 << 62
"""Later than any step: the time of what is under way."""
POISON = -0x21524111
"""In integers that nobody has written."""


class SharedAccess:
    """A write or a read of a part, which is seen to have ended by those whose clock has `agent` at `time`."""

    __slots__ = ("agent", "fenced", "time", "what", "where")

    def __init__(self, what: str, agent: Any, time: int = NEVER, *, fenced: bool = False) -> None:
        self.what, self.agent, self.time, self.fenced, self.where = what, agent, time, fenced, here()

    def is_seen_by(self, who: Partition) -> bool:
        """True if it ended before what `who` does now."""
        return who.clock.get(self.agent, 0) >= self.time

    def __str__(self) -> str:
        state = "which is under way" if self.time == NEVER else "which nothing orders before it"
        whose = f" of {self.agent.name}" if isinstance(self.agent, Partition) else ""
        return f"{self.what}{whose}, {state} [at {self.where}]"


class Region:
    """Elements of a buffer that are accessed together."""

    def __init__(self, buffer: Buffer, elements: torch.Tensor) -> None:
        self.buffer = buffer
        self.is_of = torch.zeros(buffer.data.numel(), dtype=torch.bool)
        torch.as_strided(self.is_of, elements.shape, elements.stride(), elements.storage_offset()).fill_(True)
        self.write: SharedAccess | None = None
        self.reads: dict[Partition, SharedAccess] = {}
        self.under_way: list[SharedAccess] = []
        self.is_written = False
        self.overlapping = [self]
        for other in buffer.parts.values():
            if bool((other.is_of & self.is_of).any()):
                self.overlapping.append(other)
                other.overlapping.append(self)

    def check_seen(self, who: Partition, what: str, *, by_tensor_core: bool = False) -> None:
        """Before a read."""
        for part in self.overlapping:
            write = part.write
            if write is None:
                continue
            if not write.is_seen_by(who):
                raise RaceError(f"{who.name}: {what} of {self.buffer} conflicts with {write}")
            if by_tensor_core and not write.fenced:
                raise RaceError(f"{who.name}: {what} of {self.buffer} without a fence_async_shared after {write}")
        if not self.is_written:
            self.is_written = bool(self.buffer.is_written[self.is_of].all())
            if not self.is_written:
                raise RaceError(f"{who.name}: {what} of {self.buffer}, of which something was never written")

    def check_free(self, who: Partition, what: str) -> None:
        """Before a write."""
        for part in self.overlapping:
            if part.write is not None and not part.write.is_seen_by(who):
                raise RaceError(f"{who.name}: {what} of {self.buffer} conflicts with {part.write}")
            for read in (*part.reads.values(), *part.under_way):
                if not read.is_seen_by(who):
                    raise RaceError(f"{who.name}: {what} of {self.buffer} conflicts with {read}")

    def set_write(self, write: SharedAccess) -> None:
        """After a write was begun."""
        self.write = write
        self.reads.clear()

    def set_written(self) -> None:
        """After it ended."""
        if not self.is_written:
            self.buffer.is_written |= self.is_of
            self.is_written = True

    def begin_read(self, who: Partition, what: str) -> SharedAccess:
        """A read by TMA or a tensor core that is under way until `end_read`."""
        self.check_seen(who, what, by_tensor_core=True)
        self.under_way.append(SharedAccess(what, who))
        return self.under_way[-1]

    def end_read(self, read: SharedAccess) -> None:
        """Its partition waited for it."""
        self.under_way.remove(read)
        read.time = read.agent.now
        self.reads[read.agent] = read


class Buffer:
    """An allocation of shared memory."""

    def __init__(self, dtype: Any, shape: Shape, layout: Any) -> None:
        self.number, self.where = next(running().numbers), made_here()
        self.dtype = dtype
        storage = STORAGE[dtype]
        fill = float("nan") if storage.is_floating_point else POISON if storage.itemsize >= 4 else 0
        self.data = torch.full(shape, fill, dtype=storage)
        self.is_written = torch.zeros(math.prod(shape), dtype=torch.bool)
        self.parts: dict[Any, Region] = {}
        self.barriers: dict[int, Any] = {}
        """The mbarriers in it, by element."""
        self.view = View(self, self.data, layout)

    def __str__(self) -> str:
        return f"buffer {self.number} ({self.dtype} {list(self.data.shape)}, made at {self.where})"

    def part(self, elements: torch.Tensor) -> Region:
        """The record of some elements."""
        dimensions = zip(elements.stride(), elements.shape, strict=True)
        spans = sorted((stride, size) for stride, size in dimensions if size > 1)
        merged: list[tuple[int, int]] = []
        for stride, size in spans:
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1] = (merged[-1][0], merged[-1][1] * size)
            else:
                merged.append((stride, size))
        key = (elements.storage_offset(), *merged)
        if key not in self.parts:
            self.parts[key] = Region(self, elements)
        return self.parts[key]


class View:
    """A descriptor of shared memory: some elements of a buffer, in a shape and a layout."""

    def __init__(self, buffer: Buffer, data: torch.Tensor, layout: Any) -> None:
        self.buffer, self.data, self.layout = buffer, data, layout
        self.shape = tuple(data.shape)
        self.rank = data.dim()
        self.dtype = buffer.dtype
        self.part = buffer.part(data)
        self._made: dict[Any, View] = {}

    # ------------------------------------------------------------ views

    def index(self, index: Any) -> View:
        """One of the first dimension."""
        at = int(plain(index))
        if not 0 <= at < self.shape[0]:
            raise GluonError(f"index: got {at} of {self.buffer}; allowed 0 up to {self.shape[0]} exclusive")
        if at not in self._made:
            self._made[at] = View(self.buffer, self.data[at], self.layout)
        return self._made[at]

    def slice(self, start: Any, length: Any, dim: Any = 0) -> View:
        """Some of a dimension."""
        start, length, dim = (plain(it) for it in (start, length, dim))
        key = ("slice", start, length, dim)
        if key not in self._made:
            self._made[key] = View(self.buffer, self.data.narrow(dim, start, length), self.layout)
        return self._made[key]

    def permute(self, order: Any) -> View:
        """The dimensions in another order."""
        key = ("permute", sizes(order))
        if key not in self._made:
            layout = layouts.shared_permuted(self.layout, self.dtype, self.shape, key[1])
            self._made[key] = View(self.buffer, self.data.permute(key[1]), layout)
        return self._made[key]

    def reshape(self, shape: Any) -> View:
        """Its elements in another shape."""
        key = ("reshape", sizes(shape))
        if key not in self._made:
            layout = layouts.shared_reshaped(self.layout, self.dtype, self.shape, key[1])
            self._made[key] = View(self.buffer, self.data.view(key[1]), layout)
        return self._made[key]

    # ------------------------------------------------------------ registers

    def load(self, layout: Any) -> Value:
        """Elements to registers."""
        who, layout = partition(), plain(layout)
        layouts.check_registers(layout, self.shape, who.warps)
        self.part.check_seen(who, "a read")
        self.part.reads[who] = SharedAccess("a read", who, who.now)
        return Value(self.data.clone(), self.dtype, layout)

    def store(self, value: Any) -> None:
        """Registers to elements."""
        value, who = needs_block(value), partition()
        if value.shape != self.shape or value.dtype != self.dtype:
            raise LayoutError(f"a store of {value.dtype} {list(value.shape)} to {self.dtype} {list(self.shape)}")
        self.part.check_free(who, "a write")
        write = SharedAccess("a write", who, who.now)
        self.part.set_write(write)
        running().unfenced.append(write)
        self.data.copy_(value.data)
        self.part.set_written()


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> View:
    """A buffer; of registers a copy."""
    view = Buffer(plain(element_ty), sizes(shape), plain(layout)).view
    if value is not None:
        view.store(value)
    return view


def fence_async_shared(cluster: Any = False) -> None:
    """Let TMA and wgmma see all that the partition has written, or has seen others write."""
    machine, who = running(), partition()
    rest = []
    for write in machine.unfenced:
        if write.is_seen_by(who):
            write.fenced = True
        else:
            rest.append(write)
    machine.unfenced = rest
