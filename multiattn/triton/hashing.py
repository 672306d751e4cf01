"""Triton's hash of itself, 400 MB in 3.6, which the keys of its cache on disk begin with.

A first compilation waits for it. So it is begun before the kernels are imported, in a thread.
"""

from __future__ import annotations

import functools

from multiattn.run.ahead import Ahead


@functools.cache
def hashing() -> Ahead:
    """The hash as it is computed, once for the process: Triton keeps it."""
    ahead = Ahead(_hash, takes_turn=False)  # what has its turn may wait for it
    ahead.start()
    return ahead


def _hash() -> None:
    """Private to Triton: where this fails, Triton does it itself when it compiles."""
    from triton.runtime.cache import triton_key

    triton_key()
