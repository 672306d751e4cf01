"""TMA: tiles that go between a caller's tensor and shared memory by themselves, and barriers that hear of it."""

from __future__ import annotations

from typing import Any

from multiattn.triton.cpu.gluon import barriers
from multiattn.triton.cpu.gluon.errors import GluonError
from multiattn.triton.cpu.gluon.machine import partition, running
from multiattn.triton.cpu.gluon.memory import SharedAccess, View
from multiattn.triton.cpu.gluon.tensors import MappedTensor
from multiattn.triton.cpu.gluon.values import plain


class _Load:
    """A tile on its way to shared memory; until it lands that has NaNs."""

    weight: int | None = None

    def __init__(self, source: MappedTensor, at: list[int], barrier: barriers.Barrier, target: View) -> None:
        self.source, self.at, self.barrier, self.target = source, at, barrier, target
        self.elements, self.inside = source.box(at, "TMA load")
        target.part.check_free(partition(), "a load by TMA")
        self.write = SharedAccess("a write by TMA", barrier, fenced=True)
        target.part.set_write(self.write)
        if target.data.is_floating_point():
            target.data.fill_(float("nan"))

    def land(self) -> None:
        """The tile is there, and the barrier hears of its bytes."""
        self.target.data.zero_()
        self.target.data[self.inside] = self.elements
        self.target.part.set_written()
        self.write.time = self.barrier.land(self.source.nbytes_per_cta)


class _Store:
    """A tile on its way from shared memory, which it reads at some time before the partition has waited."""

    def __init__(self, target: MappedTensor, at: list[int], source: View) -> None:
        self.source = source
        self.elements, self.inside = target.box(at, "TMA store")
        self.read = source.part.begin_read(partition(), "a store by TMA")

    def end(self) -> None:
        """It is done."""
        self.elements.copy_(self.source.data[self.inside])
        self.source.part.end_read(self.read)


def async_load(tensor_desc: MappedTensor, coord: Any, barrier: View, result: View) -> None:
    """Begin to load a box to shared memory."""
    at = tensor_desc.coordinates(coord)
    tensor_desc.check(result, "TMA load")
    machine = running()
    machine.in_flight.append(_Load(tensor_desc, at, barriers.barrier_at(barrier), result))
    machine.step()


def async_store(tensor_desc: MappedTensor, coord: Any, src: View, *_: Any, **__: Any) -> None:
    """Begin to store a box from shared memory."""
    at = tensor_desc.coordinates(coord)
    tensor_desc.check(src, "TMA store")
    if min(at) < 0:
        raise GluonError(f"TMA store: got coordinates {at}; allowed none before the tensor, an illegal instruction")
    partition().stores.append(_Store(tensor_desc, at, src))
    running().step()


def store_wait(pendings: Any, read_only: Any = True) -> None:
    """Until at most so many of the partition's stores are under way."""
    stores = partition().stores
    while len(stores) > int(plain(pendings)):
        stores.pop(0).end()


# By their names in Triton 3.6.
async_copy_global_to_shared = async_load
async_copy_shared_to_global = async_store
