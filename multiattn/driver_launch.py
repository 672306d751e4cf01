"""A compiled forward kernel launched by NVIDIA's driver itself, with next to nothing between a call and the driver.

What a launch hands over is laid out once, in a slot: the values of all parameters, and an array of their addresses. A
launch takes a slot from a list, writes what is new since that slot was used last, and puts it back behind the driver's
call, which has copied the parameters by then. Taking and putting back are atomic: threads never share a slot, and
there are as many as there were launches at a time.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from multiattn import abi, context
from multiattn.tensor_map import Encoder, encode_tensor_map

Lender = Callable[[int], tuple[int, object]]
"""Given the handle of a launch's stream: the address of memory that this launch may use, and what must outlive it."""

Addresses = tuple[int, int, int, int, int]
"""Of q, k, v, out and lse."""

_ADDRESSES_BYTES = abi.POINTER_BYTES * len(abi.TENSORS)
_STREAMS_KEPT = 64
"""Handles of streams that a launcher knows at a time."""
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CUlaunchAttribute(ctypes.Structure):
    """As cuda.h has it; its value is a union, of which an int is at the start."""

    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_ubyte * 60))


class CUlaunchConfig(ctypes.Structure):
    """As cuda.h has it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(CUlaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class DriverLauncher:
    """A forward kernel of one Plan, loaded; see `multiattn.backend.Launcher`.

    Safe to use from several threads and while a CUDA graph is captured. In a thread new to CUDA the first launch makes
    the device's context current.
    """

    def __init__(
        self,
        function: int,
        binding: abi.Binding,
        device: int,
        *,
        overlaps: bool = False,
        lenders: Mapping[str, Lender] | None = None,
        keeps: object = None,
    ) -> None:
        """Lay out a launch.

        Args:
            function: CUfunction or CUkernel, allowed the shared memory of its image.
            binding: what it takes: tensors by the names of `abi.TENSORS`, other memory by those of `lenders`.
                ValueError for what cannot be laid out.
            device: whose function it is.
            overlaps: whether the kernel may begin while the one before it on the stream still runs: the CUDA
                Programming Guide's "Programmatic Dependent Launch", for which the kernel must be made.
            lenders: of memory that every launch brings beside the tensors, by name: `abi.WORKSPACE`.
            keeps: what the function lives in, where something would unload it.
        """
        self.binding = binding
        self._function = ctypes.c_void_p(function)
        self._device = device
        self._overlaps = overlaps
        self._keeps = keeps
        driver = context.load_driver()
        if driver is None:
            raise OSError("launch: no NVIDIA driver")
        self._launch: Callable[..., int] = driver.cuLaunchKernelEx
        # What torch.cuda.current_stream(device).cuda_stream is, without a Stream object for each launch.
        self._stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._layout = _Layout(binding)
        self._maps = self._layout.maps
        self._lenders = _match(lenders or {}, self._layout.lent)
        self._configs: dict[int, Any] = {}
        self._free: list[_Slot] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Launch on the current stream of the device."""
        stream = self._stream_of(self._device)
        config = self._configs.get(stream) or self._configure(stream)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot(self._layout)
        if slot.addresses != addresses:
            self._point(slot, addresses)
        if self._lenders:
            held = []  # until the launch: from then on others may be given it
            for lend, word in zip(self._lenders, slot.lent, strict=True):
                lent = lend(stream)
                word.value = lent[0]
                held.append(lent)
        status = self._launch(config, self._function, slot.parameters, None)
        if status == _INVALID_CONTEXT:  # the first use of CUDA in a fresh thread
            context.make_context_current(self._device)
            status = self._launch(config, self._function, slot.parameters, None)
        self._free.append(slot)
        if status:
            raise context.error_of(status)

    def _point(self, slot: _Slot, addresses: Addresses) -> None:
        """Point a slot at other tensors. One whose tensor map the driver refuses is used no more."""
        before = slot.addresses
        if self._maps:
            context.ensure_context(self._device)
        for place, tensor, encode in self._maps:
            if before is None or before[tensor] != addresses[tensor]:
                slot.view[place] = encode(addresses[tensor])
        slot.words[0 : len(abi.TENSORS)] = addresses
        slot.addresses = addresses

    def _configure(self, stream: int) -> Any:
        """The launch on a stream, made once for each handle."""
        image = self.binding.image
        config = CUlaunchConfig(grid=self.binding.grid, block=(image.threads, 1, 1), stream=stream)
        config.smem_bytes = image.dynamic_smem_bytes
        if self._overlaps:
            config.attributes = ctypes.pointer(CUlaunchAttribute(id=_OVERLAP, value=1))
            config.count = 1
        made = ctypes.byref(config)
        if len(self._configs) >= _STREAMS_KEPT:
            self._configs.clear()
        self._configs[stream] = made
        return made


class _Layout:
    """Where a slot has what, as byte offsets into memory that starts at a multiple of `abi.TENSOR_MAP_ALIGNMENT`."""

    def __init__(self, binding: abi.Binding) -> None:
        self.initial = bytearray()
        """What a slot has at first: numbers and null pointers stay as they are."""
        self.lent: list[tuple[str, int]] = []
        """What lenders give, by name, and where it goes."""
        self.maps: list[tuple[slice, int, Encoder]] = []
        """Where a tensor map is, the tensor's place in `abi.TENSORS`, and what makes the map."""
        self.addresses = 0
        """Of the tensors, one after another; within the struct that has them, where there is one."""
        of_tensors = next((it for it in binding.arguments if isinstance(it, abi.Struct) and _offsets(it)), None)
        start = None if of_tensors is None else self._struct(of_tensors)
        if start is None:
            self.addresses = self._place(bytes(_ADDRESSES_BYTES), abi.POINTER_BYTES)
        self.parameters = tuple(
            start if start is not None and argument is of_tensors else self._argument(argument)
            for argument in binding.arguments
        )
        """Of each argument."""

    def _place(self, data: bytes, alignment: int) -> int:
        start = -(-len(self.initial) // alignment) * alignment
        self.initial += bytes(start - len(self.initial)) + data
        return start

    def _argument(self, argument: abi.Argument) -> int:
        """Where an argument is, for which there is room from now on."""
        if isinstance(argument, abi.Struct):
            if _offsets(argument):
                raise ValueError("pointers: got two structs with tensors; allowed one")
            return self._struct(argument)
        if isinstance(argument, abi.TensorMap):
            start = self._place(bytes(abi.TENSOR_MAP_BYTES), abi.TENSOR_MAP_ALIGNMENT)
            self._map(start, argument)
            return start
        if isinstance(argument, abi.Pointer) and argument.tensor in abi.TENSORS:
            return self.addresses + abi.POINTER_BYTES * abi.TENSORS.index(argument.tensor)
        if isinstance(argument, abi.Pointer) and argument.tensor is not None:
            start = self._place(bytes(abi.POINTER_BYTES), abi.POINTER_BYTES)
            self.lent.append((argument.tensor, start))
            return start
        return self._place(abi.pack(argument, {}, encode_tensor_map), abi.POINTER_BYTES)

    def _struct(self, struct: abi.Struct) -> int:
        start = self._place(struct.data, abi.TENSOR_MAP_ALIGNMENT)
        if offsets := _offsets(struct):
            wanted = [offsets.get("q", 0) + abi.POINTER_BYTES * index for index in range(len(abi.TENSORS))]
            if sorted(offsets) != sorted(abi.TENSORS) or [offsets[name] for name in abi.TENSORS] != wanted:
                raise ValueError(f"pointers: got {offsets}; allowed q, k, v, out and lse, one after another")
            self.addresses = start + offsets["q"]
        self.lent += [(name, start + at) for at, name in struct.pointers.items() if name not in abi.TENSORS]
        for at, tensor_map in struct.maps.items():
            self._map(start + at, tensor_map)
        return start

    def _map(self, start: int, tensor_map: abi.TensorMap) -> None:
        place = slice(start, start + abi.TENSOR_MAP_BYTES)
        self.maps.append((place, abi.TENSORS.index(tensor_map.tensor), Encoder(tensor_map)))


def _offsets(struct: abi.Struct) -> dict[str, int]:
    """Where a struct has the addresses of tensors."""
    return {name: at for at, name in struct.pointers.items() if name in abi.TENSORS}


def _match(lenders: Mapping[str, Lender], lent: list[tuple[str, int]]) -> tuple[Lender, ...]:
    """The lender of each address; ValueError where a name has none, or a lender lends nothing."""
    names = [name for name, _ in lent]
    if sorted(set(names)) != sorted(lenders) or len(set(names)) != len(names):
        raise ValueError(f"memory: got {sorted(lenders)}; allowed {names}, what the kernel takes, once each")
    return tuple(lenders[name] for name in names)


class _Slot:
    """The parameters of a launch."""

    __slots__ = ("addresses", "lent", "parameters", "view", "words")

    def __init__(self, layout: _Layout) -> None:
        size = len(layout.initial)
        memory = (ctypes.c_ubyte * (size + abi.TENSOR_MAP_ALIGNMENT))()
        skip = -ctypes.addressof(memory) % abi.TENSOR_MAP_ALIGNMENT
        start = ctypes.addressof(memory) + skip
        self.view = memoryview(memory).cast("B")[skip : skip + size]
        self.view[:] = bytes(layout.initial)
        self.words: Any = (ctypes.c_uint64 * len(abi.TENSORS)).from_buffer(memory, skip + layout.addresses)
        self.lent = tuple(ctypes.c_uint64.from_buffer(memory, skip + at) for _, at in layout.lent)
        self.parameters = (ctypes.c_void_p * len(layout.parameters))(*(start + at for at in layout.parameters))
        self.addresses: Addresses | None = None


# ---------------------------------------------------------------- loading


def load_kernel(cubin: bytes, symbol: str, device: int, *, dynamic_smem_bytes: int = 0) -> int:
    """A kernel of a cubin as a CUkernel, loaded for the life of the process, allowed its shared memory on a device.

    The driver takes a CUkernel for a CUfunction wherever it launches one. A launch or a graph may have it for as long
    as the process runs, so it is never unloaded, and loaded once.
    """
    kernel = ctypes.c_void_p()
    context.ask("cuLibraryGetKernel", ctypes.byref(kernel), _load_library(cubin), symbol.encode())
    if dynamic_smem_bytes:
        handle = ctypes.c_int()
        context.ask("cuDeviceGet", ctypes.byref(handle), device)
        context.ask("cuKernelSetAttribute", _DYNAMIC_SMEM, dynamic_smem_bytes, kernel, handle)
    assert kernel.value is not None
    return kernel.value


_libraries: dict[bytes, ctypes.c_void_p] = {}
"""By the digest of the cubin."""
_loading = threading.Lock()


def _load_library(cubin: bytes) -> ctypes.c_void_p:
    digest = hashlib.sha256(cubin).digest()
    with _loading:
        if (known := _libraries.get(digest)) is None:
            known = ctypes.c_void_p()
            context.ask("cuLibraryLoadData", ctypes.byref(known), cubin, None, None, 0, None, None, 0)
            _libraries[digest] = known
        return known
