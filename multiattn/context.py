"""The CUDA context of a thread, which driver calls need and PyTorch leaves out until it needs it itself.

A fresh thread, such as the one in which autograd runs a backward, has no context while all that PyTorch does there is
hand out cached memory. Triton's tensor descriptors are made by the driver before anything is launched.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_thread = threading.local()


def ensure_context(device: int) -> None:
    """Make the context that PyTorch uses on `device`, the current one, current in this thread if it has none.

    May be called while a graph is captured; costs next to nothing from a thread's second call on.
    """
    if getattr(_thread, "has_context", False):
        return
    driver = _load_driver()
    if driver is None:
        return  # not CUDA: whoever cannot do without says so
    context = ctypes.c_void_p()
    _check(driver, driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        make_context_current(device)
    _thread.has_context = True


def make_context_current(device: int) -> None:
    """Make the context that PyTorch uses on `device` current in this thread, whatever is; OSError without a driver."""
    driver = _load_driver()
    if driver is None:
        raise OSError(f"{_DRIVER}: there is no such library")
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver, driver.cuDeviceGet(ctypes.byref(handle), device))
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    _check(driver, driver.cuCtxSetCurrent(context))


@functools.cache
def _load_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError:
        return None


def _check(driver: ctypes.CDLL, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: error {status}: {(text.value or b'no description').decode()}")
