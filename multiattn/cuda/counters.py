"""Counters in device memory, one for each stream: a kernel finds its counter at zero and leaves it so for the next.

Launches on a stream come one after another, so one counter does for all of them, and none needs a memset before it. The
memory is the driver's own, not of PyTorch's allocator: that may take it from a pool which is freed or written over
while we still hold it (CUDA graph trees, `torch.cuda.use_mem_pool`).
"""

from __future__ import annotations

import functools
import threading

from cuda.bindings import driver

from multiattn.cuda.driver import check

COUNTER_BYTES = 128
"""From one counter to the next: a cache line each."""
STREAMS_MAX = 1024


class Counters:
    """Of one device, whose context is current when this is made and asked."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._lock = threading.Lock()
        result, memory = driver.cuMemAlloc(STREAMS_MAX * COUNTER_BYTES)
        has_memory = result == driver.CUresult.CUDA_SUCCESS
        self._free = [int(memory) + i * COUNTER_BYTES for i in range(STREAMS_MAX)] if has_memory else []

    def of_stream(self, stream: int) -> int | None:
        """The address of a stream's counter, or None: there is none left, and the caller brings one of its own.

        Args:
            stream: the driver's handle of one that is not captured. What counts is its id: another stream may get the
                handle later, while work of this one is still under way.
        """
        identity = check(*driver.cuStreamGetId(stream))
        address = self._known.get(identity)
        return self._take(identity, stream) if address is None else address

    def _take(self, identity: int, stream: int) -> int | None:
        with self._lock:
            if identity not in self._known and self._free:
                address = self._free.pop()
                check(*driver.cuMemsetD8Async(address, 0, COUNTER_BYTES, stream))
                self._known[identity] = address  # whoever finds it launches behind the memset
            return self._known.get(identity)


@functools.cache
def counters_of(device: int) -> Counters:
    """Those of a device, the current one. Made with the first launcher that counts: a capture forbids allocation."""
    return Counters()
