"""Triton's hash of itself, of 100 MB and more, which the keys of its cache on disk begin with.

A first compilation waits for it. So it is begun in a thread before the kernels are imported, which takes as long.
"""

from __future__ import annotations

import contextlib
import functools
import threading


@functools.cache
def hashing() -> threading.Thread:
    """The thread that has Triton compute it, once for the process; Triton keeps it."""
    thread = threading.Thread(target=_hash, name="multiattn hashes Triton")
    try:
        thread.start()
    except RuntimeError:  # an interpreter that ends starts no thread: then the first compilation does it
        thread = threading.Thread(target=int)
        thread.run()
    return thread


def _hash() -> None:
    with contextlib.suppress(Exception):  # private to Triton; what fails here fails in a compilation
        from triton.runtime.cache import triton_key

        triton_key()
