"""TMA: tiles that go between a caller's tensor and shared memory by themselves, and barriers that hear of it."""

from __future__ import annotations

from typing import Any

import torch

from multiattn.triton.cpu.gluon import barriers
from multiattn.triton.cpu.gluon.errors import GluonError
from multiattn.triton.cpu.gluon.machine import partition, running
from multiattn.triton.cpu.gluon.memory import NEVER, View, Write
from multiattn.triton.cpu.gluon.tensors import MappedTensor
from multiattn.triton.cpu.gluon.values import plain


class _Load:
    """A tile on its way to shared memory; until it lands that has NaNs."""

    weight: int | None = None

    def __init__(self, source: MappedTensor, at: list[int], barrier: barriers.Barrier, target: View) -> None:
        self.source, self.at, self.barrier, self.target = source, at, barrier, target
        self.elements, self.inside = source.box(at, "TMA load")
        target.part.check_free(partition(), "a load by TMA")
        self.write = Write(barrier, NEVER, by_tma=True)
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

    def __init__(self, target: MappedTensor, at: list[int], source: View, add: str | None) -> None:
        self.source, self.add = source, add
        what = "store by TMA"
        self.elements, self.inside = target.box(at, f"TMA {what}")
        source.part.check_seen(partition(), f"a {what}", by_tensor_core=True)
        self.read = source.part.begin_read(partition(), what)

    def end(self) -> None:
        """It is done."""
        data = self.source.data[self.inside]
        if self.add is None:
            self.elements.copy_(data)
        elif self.add == "add":
            self.elements.add_(data)
        else:
            self.elements.copy_({"max": torch.maximum, "min": torch.minimum}[self.add](self.elements, data))
        self.source.part.end_read(self.read)


def async_load(
    tensor_desc: MappedTensor,
    coord: Any,
    barrier: View,
    result: View,
    pred: Any = True,
    multicast: Any = False,
    **_: Any,
) -> None:
    """Begin to load a box to shared memory."""
    if plain(multicast):
        raise NotImplementedError("the interpreter of Gluon has no multicast")
    if not pred:
        return
    at = tensor_desc.coordinates(coord)
    tensor_desc.check(result, "TMA load")
    machine = running()
    machine.in_flight.append(_Load(tensor_desc, at, barriers.barrier_at(barrier), result))
    machine.step()


def _begin_store(tensor_desc: MappedTensor, coord: Any, src: View, add: str | None) -> None:
    at = tensor_desc.coordinates(coord)
    tensor_desc.check(src, "TMA store")
    if min(at) < 0:
        raise GluonError(f"TMA store: got coordinates {at}; allowed none before the tensor, an illegal instruction")
    partition().stores.append(_Store(tensor_desc, at, src, add))
    running().step()


def async_store(tensor_desc: MappedTensor, coord: Any, src: View, *_: Any, **__: Any) -> None:
    """Begin to store a box from shared memory."""
    _begin_store(tensor_desc, coord, src, None)


def async_atomic_add(tensor_desc: MappedTensor, coord: Any, src: View) -> None:
    """Begin to add it to what is there."""
    _begin_store(tensor_desc, coord, src, "add")


def async_atomic_max(tensor_desc: MappedTensor, coord: Any, src: View) -> None:
    """Begin to raise what is there."""
    _begin_store(tensor_desc, coord, src, "max")


def async_atomic_min(tensor_desc: MappedTensor, coord: Any, src: View) -> None:
    """Begin to lower what is there."""
    _begin_store(tensor_desc, coord, src, "min")


def async_reduce(kind: Any, tensor_desc: MappedTensor, coord: Any, src: View, **_: Any) -> None:
    """One of these by name."""
    _begin_store(tensor_desc, coord, src, str(plain(kind)))


def store_wait(pendings: Any, read_only: Any = True) -> None:
    """Until at most so many of the partition's stores are under way."""
    stores = partition().stores
    while len(stores) > int(plain(pendings)):
        stores.pop(0).end()


# By their names in Triton 3.6.
async_copy_global_to_shared = async_load
async_copy_shared_to_global = async_store
