"""The CUDA context of a thread, which driver calls need and PyTorch leaves out until it needs it itself.

A fresh thread, such as the one in which autograd runs a backward, has no context while all that PyTorch does there is
hand out cached memory. Triton's tensor descriptors are made by the driver before anything is launched.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_thread = threading.local()


def ensure_context(device: int) -> None:
    """Make the context that PyTorch uses on `device`, the current one, current in this thread if it has none.

    May be called while a graph is captured; costs next to nothing from a thread's second call on.
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
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    ask("cuDeviceGet", ctypes.byref(handle), device)
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    ask("cuCtxSetCurrent", context)


@functools.cache
def load_driver() -> ctypes.CDLL | None:
    """NVIDIA's driver; None where there is none. Its functions take numbers wider than an int as ctypes' own types."""
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError:
        return None


def ask(function: str, *arguments: Any) -> None:
    """Call a function of the driver by its name; RuntimeError for a failure, OSError without a driver."""
    driver = load_driver()
    if driver is None:
        raise OSError(f"{_DRIVER}: there is no such library")
    if status := getattr(driver, function)(*arguments):
        raise error_of(status)


def error_of(status: int) -> RuntimeError:
    """A failure with the driver's name for it and its words."""
    driver = load_driver()
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    if driver is not None:
        driver.cuGetErrorName(status, ctypes.byref(name))
        driver.cuGetErrorString(status, ctypes.byref(text))
    words = (name.value or b"error %d" % status, text.value or b"no description")
    return RuntimeError(f"CUDA driver: {': '.join(word.decode() for word in words)}")
