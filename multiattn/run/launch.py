"""Compiled kernels launched by the driver itself, one after another, with little between a call and the driver.

All that a launch hands over is laid out once, in a slot: the values of all parameters of all kernels, and arrays of
their addresses. A launch takes a slot from a list, writes what is new since that slot was used last, and puts it back
behind the driver's calls, which have copied the parameters by then. Taking and putting back are atomic: threads never
share a slot, and there are as many as there were launches at a time.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from multiattn.layout import Layout
from multiattn.operands import CAPTURED, DCAPTURED, Operands, captured_name, dcaptured_name
from multiattn.plan import abi
from multiattn.plan.backend import Launcher
from multiattn.problem import Problem
from multiattn.run import compat, driver
from multiattn.sequences import Indices

Lender = Callable[[int], tuple[int, object]]
"""Given the handle of a launch's stream: the address of memory that this launch may use, and what must outlive it."""

_AREA_ALIGNMENT = 16
"""Bytes that an area of workspace starts at a multiple of."""
_STREAMS_KEPT = 64
"""Handles of streams that a slot knows at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedKernel:
    """A kernel that is loaded."""

    function: int
    """CUfunction or CUkernel, allowed the shared memory of its image."""
    binding: abi.Binding
    """Its arguments, by the names of `Operands` and of the workspace's areas."""
    overlaps: bool = False
    """It may begin while the kernel before it on the stream still runs (`driver.launch_config`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Device memory that a launch takes beside its operands, shared by all of its kernels."""

    lend: Lender
    areas: Mapping[str, int] = field(default_factory=lambda: {abi.WORKSPACE: 0})
    """Where each area starts, in bytes, by the name that bindings have for it."""


def pack_areas(sizes: Mapping[str, int]) -> tuple[Mapping[str, int], int]:
    """Where each area of a workspace starts, by the bytes of each, and the bytes of all.

    The largest come first, so that they are as aligned as the allocator makes them.
    """
    areas: dict[str, int] = {}
    end = 0
    for name, size in sorted(sizes.items(), key=lambda area: -area[1]):
        areas[name] = -(-end // _AREA_ALIGNMENT) * _AREA_ALIGNMENT
        end = areas[name] + size
    return areas, end


def fresh_memory(device: int, size: int) -> Lender:
    """Lends each launch `size` bytes from PyTorch's allocator, which has them back for what comes after on the stream.

    In the capture of a CUDA graph they are of the graph's own pool. `device` is the current one in every launch.
    """
    allocate = compat.allocator([((size,), (1,), torch.uint8)], torch.device("cuda", device))

    def lend(stream: int) -> tuple[int, object]:
        (memory,) = allocate()
        return memory.data_ptr(), memory

    return lend


def fresh_areas(problem: Problem, areas: Mapping[str, Layout], device: int) -> Workspace | None:
    """A workspace of areas, by their names, from PyTorch's allocator; None for no areas."""
    starts, size = pack_areas({name: layout.size_bytes for name, layout in own_areas(problem, areas).items()})
    return Workspace(lend=fresh_memory(device, size), areas=starts) if starts else None


def own_areas(problem: Problem, areas: Mapping[str, Layout]) -> dict[str, Layout]:
    """The areas, of those that kernels write, that are the launcher's own: with sinks delta is the caller's."""
    return {name: layout for name, layout in areas.items() if not (name == "delta" and problem.has_sinks)}


def by_tensors(problem: Problem, areas: Mapping[str, Layout], run: Callable[[dict[str, Any]], None]) -> Launcher:
    """A launcher that runs kernels with tensors by name: operands and areas of workspace, of PyTorch's allocator."""
    own = own_areas(problem, areas)

    def launch(operands: Operands) -> None:
        tensors: dict[str, Any] = operands.named
        for name, layout in own.items():
            tensors[name] = torch.empty(layout.shape, dtype=layout.dtype, device=operands.q.device)
        run(tensors)

    return launch


_warned: set[str] = set()


def warn_of_release(release: str, error: Exception, instead: str) -> None:
    """Tell, once for a release, that it compiles to what is not known here, and is launched in another way."""
    if release not in _warned:
        _warned.add(release)
        warnings.warn(
            f"{release} compiles kernels to code that multiattn does not know ({type(error).__name__}: {error}); "
            f"{instead} is used, which costs the host more",
            RuntimeWarning,
            stacklevel=4,
        )


class DriverLauncher:
    """The kernels of one Plan, launched in order; see `multiattn.plan.backend.Launcher`.

    Safe to use from several threads and while a CUDA graph is captured. In a thread new to CUDA the first launch makes
    the device's context current.
    """

    def __init__(self, kernels: Sequence[LoadedKernel], device: int, workspace: Workspace | None = None) -> None:
        """Lay out a launch on `device`; ValueError for arguments that are neither operands nor of the workspace."""
        self.kernels = tuple(kernels)
        self._device = device
        self._launch: Callable[..., int] = driver.need_driver().cuLaunchKernelEx
        self._stream_of = compat.current_stream
        self._layout = layout = _Layout([kernel.binding for kernel in kernels], workspace)
        pick = _picker(layout.operands)
        slots, sums = layout.captured, layout.dcaptured
        self._operands: Callable[[Operands], tuple[torch.Tensor, ...]] = (
            (lambda it: pick((*it, *it.indices, *it.captured[:slots], *it.dcaptured[:sums])))
            if slots or sums or layout.has_indices
            else pick
        )
        self._lend = None if workspace is None else workspace.lend
        self._areas = layout.areas
        self._maps = layout.maps
        self._runs = layout.runs
        self._free: list[_Slot] = []

    def __call__(self, operands: Operands) -> None:
        """Launch on the current stream of the device."""
        stream = self._stream_of(self._device)
        addresses = tuple(map(compat.data_ptr, self._operands(operands)))
        if self._lend is not None:
            lent = self._lend(stream)  # held until the launch: from then on others may be given it
            addresses = (*addresses, *[lent[0] + area for area in self._areas])
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot(self._layout)
        if slot.addresses != addresses:
            self._point(slot, addresses)
        for launch in slot.launches.get(stream) or self._configure(slot, stream):
            if (status := launch()) and (status := self._retry(launch, status)):
                self._free.append(slot)
                raise driver.error_of(status, "cuLaunchKernelEx")
        self._free.append(slot)

    def _retry(self, launch: Callable[[], int], status: int) -> int:
        """A status of the driver's, or the next one after the first use of CUDA in a fresh thread."""
        if status != driver.INVALID_CONTEXT:
            return status
        driver.make_context_current(self._device)
        return launch()

    def _point(self, slot: _Slot, addresses: tuple[int, ...]) -> None:
        """Point a slot at other tensors. One whose tensor map the driver refuses is used no more."""
        before = slot.addresses
        if self._maps:
            driver.ensure_context(self._device)
        for place, tensor, encode in self._maps:
            if before is None or before[tensor] != addresses[tensor]:
                slot.view[place] = encode(addresses[tensor])
        for pack, at, pick in self._runs:
            pack(slot.view, at, *pick(addresses))
        slot.addresses = addresses

    def _configure(self, slot: _Slot, stream: int) -> list[Callable[[], int]]:
        """The launches of a slot on a stream, made once for each handle."""
        if len(slot.launches) >= _STREAMS_KEPT:
            slot.launches.clear()
        slot.launches[stream] = [
            functools.partial(
                self._launch,
                driver.launch_config(kernel.binding.grid, kernel.binding.image, stream, overlaps=kernel.overlaps),
                ctypes.c_void_p(kernel.function),
                parameters,
                None,
            )
            for kernel, parameters in zip(self.kernels, slot.parameters, strict=True)
        ]
        return slot.launches[stream]


class ByPresence:
    """A launcher for each set of optional operands, which may ask for other arguments or other code: dlse, for now.

    The usual one, without, is made with this; the other, which may compile, when it is first asked for.
    """

    def __init__(self, make: Callable[[bool], Launcher]) -> None:
        """`make` gives the launcher with dlse, or the one without."""
        self._make = make
        self._without = make(False)
        self._with: Launcher | None = None

    def __call__(self, operands: Operands) -> None:
        """Launch. Two threads may both make a launcher the first time; either will do."""
        if operands.dlse is None:
            self._without(operands)
            return
        if self._with is None:
            self._with = self._make(True)
        self._with(operands)


# ---------------------------------------------------------------- where a slot has what

_Pick = Callable[[Any], tuple[Any, ...]]


def _picker(places: Sequence[int]) -> _Pick:
    """Gives a tuple's items at these places, as a tuple."""
    if len(places) == 1:
        (only,) = places
        return lambda items: (items[only],)
    return itemgetter(*places) if places else lambda items: ()


class _Layout:
    """Byte offsets into a slot's memory, which starts at a multiple of `abi.TENSOR_MAP_ALIGNMENT`."""

    def __init__(self, bindings: Sequence[abi.Binding], workspace: Workspace | None) -> None:
        used = dict.fromkeys(name for binding in bindings for name in abi.names_of(binding))
        areas = {} if workspace is None else workspace.areas
        self.captured, self.dcaptured = (
            max((int(name[len(kind) :]) + 1 for name in used if name.startswith(kind)), default=0)
            for kind in (CAPTURED, DCAPTURED)
        )
        """How many captured tensors there are up to the last that is used, and how many sums of their gradients."""
        of_slots = (*map(captured_name, range(self.captured)), *map(dcaptured_name, range(self.dcaptured)))
        known = (*Operands._fields, *Indices._fields, *of_slots)
        self.has_indices = any(name in used for name in Indices._fields)
        unknown = [name for name in used if name not in known and name not in areas]
        unused = [name for name in areas if name not in used]
        if unknown or unused:
            raise ValueError(f"memory: got {sorted(areas)}; allowed {unknown or sorted(set(areas) - set(unused))}")
        operands = [name for name in known if name in used and name not in areas]
        self.operands = [known.index(name) for name in operands]
        """Places of the tensors whose addresses a launch has, in the order of the addresses; behind all others those of
        `indices`, of captured tensors, and then of `dcaptured`."""
        self.areas = tuple(areas.values())
        """Added to the workspace's address: further addresses, behind those."""
        self._order = {name: index for index, name in enumerate((*operands, *areas))}
        self.initial = bytearray()
        """Bytes of a new slot: numbers and null pointers stay as they are."""
        self.maps: list[tuple[slice, int, driver.Encoder]] = []
        """Where a tensor map is, the place of its tensor among the addresses, and its encoder."""
        self.runs: list[tuple[Callable[..., None], int, _Pick]] = []
        """Addresses that are one after another: how to write them, where, and which."""
        self._structs: list[tuple[abi.Struct, int]] = []
        bare = [
            it.tensor for binding in bindings for it in binding.arguments if isinstance(it, abi.Pointer) and it.tensor
        ]
        self._words = self._run({abi.POINTER_BYTES * i: name for i, name in enumerate(dict.fromkeys(bare))})
        self.parameters = tuple(tuple(self._argument(it) for it in binding.arguments) for binding in bindings)
        """Byte offset of each argument of each kernel."""

    def _place(self, data: bytes, alignment: int) -> int:
        start = -(-len(self.initial) // alignment) * alignment
        self.initial += bytes(start - len(self.initial)) + data
        return start

    def _run(self, pointers: Mapping[int, str]) -> dict[str, int]:
        """Room for addresses that are arguments by themselves; where each is."""
        start = self._place(bytes(abi.POINTER_BYTES * len(pointers)), abi.POINTER_BYTES)
        self._write({start + at: name for at, name in pointers.items()})
        return {name: start + at for at, name in pointers.items()}

    def _write(self, pointers: Mapping[int, str]) -> None:
        """Have the addresses of these names written at these places, as few runs as there are gaps."""
        runs: list[list[int]] = []
        for at in sorted(pointers):
            if runs and runs[-1][-1] + abi.POINTER_BYTES == at:
                runs[-1].append(at)
            else:
                runs.append([at])
        for run in runs:
            pack = struct.Struct(f"<{len(run)}Q").pack_into
            self.runs.append((pack, run[0], _picker([self._order[pointers[at]] for at in run])))

    def _argument(self, argument: abi.Argument) -> int:
        """Where an argument is, for which there is room from now on."""
        if isinstance(argument, abi.Struct):
            return self._struct(argument)
        if isinstance(argument, abi.TensorMap):
            start = self._place(bytes(abi.TENSOR_MAP_BYTES), abi.TENSOR_MAP_ALIGNMENT)
            self._map(start, argument)
            return start
        if isinstance(argument, abi.Pointer) and argument.tensor is not None:
            return self._words[argument.tensor]
        return self._place(abi.pack(argument, {}, _refuse), abi.POINTER_BYTES)

    def _struct(self, argument: abi.Struct) -> int:
        """One for all kernels that take the same."""
        if (known := next((start for it, start in self._structs if it == argument), None)) is not None:
            return known
        start = self._place(argument.data, abi.TENSOR_MAP_ALIGNMENT)
        self._structs.append((argument, start))
        self._write({start + at: name for at, name in argument.pointers.items()})
        for at, tensor_map in argument.maps.items():
            self._map(start + at, tensor_map)
        return start

    def _map(self, start: int, tensor_map: abi.TensorMap) -> None:
        place = slice(start, start + abi.TENSOR_MAP_BYTES)
        self.maps.append((place, self._order[tensor_map.tensor], driver.Encoder(tensor_map)))


def _refuse(tensor_map: abi.TensorMap, address: int) -> bytes:
    raise AssertionError(f"{tensor_map} is encoded by a launch")


class _Slot:
    """The parameters of a launch."""

    __slots__ = ("addresses", "launches", "parameters", "view")

    def __init__(self, layout: _Layout) -> None:
        size = len(layout.initial)
        memory = (ctypes.c_ubyte * (size + abi.TENSOR_MAP_ALIGNMENT))()
        skip = -ctypes.addressof(memory) % abi.TENSOR_MAP_ALIGNMENT
        start = ctypes.addressof(memory) + skip
        self.view = memoryview(memory).cast("B")[skip : skip + size]
        self.view[:] = bytes(layout.initial)
        self.parameters = tuple(
            (ctypes.c_void_p * len(places))(*(start + at for at in places)) for places in layout.parameters
        )
        self.addresses: tuple[int, ...] | None = None
        self.launches: dict[int, list[Callable[[], int]]] = {}
        """A call for each kernel, by the handle of a stream."""
