"""Counters in device memory, one for each stream: a kernel finds its counter at zero and leaves it so for the next.

Launches on a stream come one after another, so one counter does for all of them, and none needs a memset before it. The
memory is the driver's own, not of PyTorch's allocator: that may take it from a pool which is freed or written over
while we still hold it (CUDA graph trees, `torch.cuda.use_mem_pool`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable

import torch

from multiattn.run import driver

SPACING_BYTES = 128
"""From one counter to the next: a cache line each."""
STREAMS_MAX = 1024
LEGACY_STREAM = 0
"""The handle of the default stream: never captured, never destroyed."""


class Counters:
    """The counters of one device, whose context is current when this is made and asked."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._lock = threading.Lock()
        memory, library = ctypes.c_uint64(), driver.load_driver()
        has_memory = library is not None and not library.cuMemAlloc_v2(
            ctypes.byref(memory), ctypes.c_size_t(STREAMS_MAX * SPACING_BYTES)
        )
        self._free = [memory.value + i * SPACING_BYTES for i in range(STREAMS_MAX)] if has_memory else []

    def of_stream(self, stream: int) -> int | None:
        """The address of a stream's counter, or None: there is none left, and the caller brings one of its own.

        Args:
            stream: the driver's handle of one that is not captured. What counts is its id: another stream may get the
                handle later, while work of this one is still under way.
        """
        found = ctypes.c_uint64()
        driver.ask("cuStreamGetId", ctypes.c_void_p(stream), ctypes.byref(found))
        address = self._known.get(found.value)
        return self._take(found.value, stream) if address is None else address

    def _take(self, identity: int, stream: int) -> int | None:
        with self._lock:
            if identity not in self._known and self._free:
                address = self._free.pop()
                driver.clear(address, SPACING_BYTES, stream)
                self._known[identity] = address  # whoever finds it launches behind the memset
            return self._known.get(identity)


@functools.cache
def counters_of(device: int) -> Counters:
    """The counters of the current device. Made with the first launcher that counts: a capture forbids allocation."""
    return Counters()


def counter_lender(device: int, size: int) -> Callable[[int], tuple[int, object]]:
    """Gives a launch on a stream its counter: the address, and what must outlive the launch (`run.launch.Lender`).

    Args:
        device: the current one, whose current stream a launch is on.
        size: bytes that the kernel takes, at most `SPACING_BYTES`: of a counter that is one launch's own.

    Streams are told apart by their ids and asked whether they are captured, but for `LEGACY_STREAM`: "stream capture
    can be used on any CUDA stream except cudaStreamLegacy" (CUDA Programming Guide, "CUDA Graphs"), and its handle is
    of one stream for as long as the context lives. The driver's launches without the suffix ``_ptsz`` take it so.
    """
    if size > SPACING_BYTES:
        raise ValueError(f"counter: got {size} bytes; allowed up to {SPACING_BYTES}")
    counters = counters_of(device)
    of_legacy: tuple[int, object] | None = None

    def lend(stream: int) -> tuple[int, object]:
        nonlocal of_legacy
        if stream == LEGACY_STREAM and of_legacy is not None:
            return of_legacy
        driver.ensure_context(device)
        is_captured = stream != LEGACY_STREAM and torch.cuda.is_current_stream_capturing()
        address = None if is_captured else counters.of_stream(stream)
        if address is None:
            return _own_counter(device, size, stream)
        lent = address, None
        if stream == LEGACY_STREAM:
            of_legacy = lent
        return lent

    return lend


def _own_counter(device: int, size: int, stream: int) -> tuple[int, object]:
    """A counter for one launch alone. A captured launch needs it: it may be replayed beside others, on any stream."""
    counter = _allocate(size, device)
    driver.clear(counter.data_ptr(), size, stream)
    return counter.data_ptr(), counter


def _allocate(size: int, device: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
