"""NVIDIA's driver, by its own library: contexts, code, tensor maps, streams, and its failures as exceptions.

The one way to it for every language, both directions and kernels made ahead of time. Its functions take numbers that
are wider than an int as ctypes' own types.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiattn.plan import abi

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: what a thread without a context is told."""


@functools.cache
def load_driver() -> ctypes.CDLL | None:
    """The driver's library; None where there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def need_driver() -> ctypes.CDLL:
    """The driver's library; OSError where there is none."""
    driver = load_driver()
    if driver is None:
        raise OSError(f"{_LIBRARY}: no NVIDIA driver")
    return driver


def ask(function: str, *arguments: Any) -> None:
    """Call a function of the driver by its name; RuntimeError for a failure, OSError without a driver."""
    if status := getattr(need_driver(), function)(*arguments):
        raise error_of(status, function)


def error_of(status: int, function: str) -> RuntimeError:
    """A failure of a function, with the driver's name for it and its words."""
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    if (driver := load_driver()) is not None:
        driver.cuGetErrorName(status, ctypes.byref(name))
        driver.cuGetErrorString(status, ctypes.byref(text))
    words = (name.value or b"error %d" % status, text.value or b"no description")
    return RuntimeError(f"CUDA driver: {function}: {': '.join(word.decode() for word in words)}")


# ---------------------------------------------------------------- contexts

_thread = threading.local()


def ensure_context(device: int) -> None:
    """Make the context that PyTorch uses on `device`, the current one, current in this thread if it has none.

    A fresh thread, such as the one in which autograd runs a backward, has none while PyTorch only hands out cached
    memory there. May be called while a graph is captured; costs next to nothing from a thread's second call on.
    """
    if getattr(_thread, "has_context", False):
        return
    if load_driver() is None:
        return  # not CUDA: whoever cannot do without says so
    context = ctypes.c_void_p()
    ask("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        make_context_current(device)
    _thread.has_context = True


def make_context_current(device: int) -> None:
    """Make the context that PyTorch uses on `device` current in this thread, whatever is; OSError without a driver."""
    context = ctypes.c_void_p()
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(device))
    ask("cuCtxSetCurrent", context)


def _device(ordinal: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    ask("cuDeviceGet", ctypes.byref(handle), ordinal)
    return handle


# ---------------------------------------------------------------- code

_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_libraries: dict[bytes, ctypes.c_void_p] = {}
"""By the digest of the cubin."""
_loading = threading.Lock()


def load_kernel(
    cubin: bytes,
    symbol: str,
    device: int,
    *,
    dynamic_smem_bytes: int = 0,
    is_resident: bool = False,
    prefers_smem: bool = False,
) -> int:
    """A kernel of a cubin as a CUkernel, loaded for the life of the process, allowed its shared memory on a device.

    The driver takes a CUkernel for a CUfunction wherever it launches one. A launch or a graph may have it for as long
    as the process runs, so it is never unloaded, and loaded once. With `is_resident` it is put on the device of the
    current context now, where the driver's lazy loading would wait for the first launch. With `prefers_smem` an SM's
    memory is rather shared memory than L1 cache while it runs.
    """
    with _loading:
        digest = hashlib.sha256(cubin).digest()
        if (library := _libraries.get(digest)) is None:
            library = _libraries[digest] = _load_library(cubin)
    kernel = _kernel_of(library, symbol)
    if dynamic_smem_bytes:
        ask("cuKernelSetAttribute", _DYNAMIC_SMEM, dynamic_smem_bytes, kernel, _device(device))
    if prefers_smem:
        ask("cuKernelSetCacheConfig", kernel, _PREFER_SHARED, _device(device))
    if is_resident:
        _function_of(kernel)
    assert kernel.value is not None
    return kernel.value


def _load_library(cubin: bytes) -> ctypes.c_void_p:
    library = ctypes.c_void_p()
    ask("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
    return library


def _kernel_of(library: ctypes.c_void_p, symbol: str) -> ctypes.c_void_p:
    kernel = ctypes.c_void_p()
    ask("cuLibraryGetKernel", ctypes.byref(kernel), library, symbol.encode())
    return kernel


def _function_of(kernel: ctypes.c_void_p) -> ctypes.c_void_p:
    function = ctypes.c_void_p()
    ask("cuKernelGetFunction", ctypes.byref(function), kernel)
    return function


# ---------------------------------------------------------------- launches

_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


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


def launch_config(grid: tuple[int, int, int], image: abi.Image, stream: int, *, overlaps: bool) -> Any:
    """A reference to the CUlaunchConfig of a launch, which keeps it alive.

    Args:
        grid: of blocks.
        image: of the kernel.
        stream: the driver's handle.
        overlaps: whether the kernel may begin while the one before it on the stream still runs: the CUDA Programming
            Guide's "Programmatic Dependent Launch", for which the kernel must be made.
    """
    config = CUlaunchConfig(grid=grid, block=(image.threads, 1, 1), stream=stream)
    config.smem_bytes = image.dynamic_smem_bytes
    if overlaps:
        config.attributes = ctypes.pointer(CUlaunchAttribute(id=_OVERLAP, value=1))
        config.count = 1
    return ctypes.byref(config)


def clear(address: int, size: int, stream: int) -> None:
    """Zero bytes of device memory on a stream."""
    ask("cuMemsetD8Async", ctypes.c_uint64(address), 0, ctypes.c_size_t(size), ctypes.c_void_p(stream))


# ---------------------------------------------------------------- tensor maps

_NOT_INTERLEAVED, _ZEROS_BEYOND_THE_ENDS = 0, 0  # of cuTensorMapEncodeTiled
_MAPS_KEPT = 64


class Encoder:
    """Makes CUtensorMaps of one tensor map for the memory at any address; those of some addresses stay at hand.

    Threads may share it. They need a CUDA context.
    """

    def __init__(self, tensor_map: abi.TensorMap) -> None:
        self._tensor_map = tensor_map
        box, rank = tensor_map.box, len(tensor_map.shape)
        self._kind = (box.dtype, rank)
        self._layout = (
            (ctypes.c_uint64 * rank)(*reversed(tensor_map.shape)),
            (ctypes.c_uint64 * (rank - 1))(*reversed(tensor_map.strides)),
            (ctypes.c_uint32 * rank)(*reversed(box.extents)),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            _NOT_INTERLEAVED,
            box.swizzle,
            tensor_map.l2_promotion,
            _ZEROS_BEYOND_THE_ENDS,
        )
        self._known: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        """The CUtensorMap of the memory at `address`; RuntimeError where the driver refuses it, OSError without one."""
        if (known := self._known.get(address)) is not None:
            return known
        encoded = self._encode(address)
        if len(self._known) >= _MAPS_KEPT:
            self._known.clear()
        self._known[address] = encoded
        return encoded

    def _encode(self, address: int) -> bytes:
        """By the driver, which wants the map at a multiple of 64 bytes."""
        from multiattn.plan import abi  # here: importing the package needs none of it

        memory = ctypes.create_string_buffer(abi.TENSOR_MAP_BYTES + abi.TENSOR_MAP_ALIGNMENT)
        start = ctypes.addressof(memory)
        start += -start % abi.TENSOR_MAP_ALIGNMENT
        places = ctypes.c_void_p(start), ctypes.c_void_p(address)
        status = need_driver().cuTensorMapEncodeTiled(places[0], *self._kind, places[1], *self._layout)
        if status:
            raise RuntimeError(f"cuTensorMapEncodeTiled: CUresult {status} for {self._tensor_map} at {address:#x}")
        return ctypes.string_at(start, abi.TENSOR_MAP_BYTES)
