"""Launching a compiled kernel on torch's current stream, with as little as possible between the call and the driver."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from multiattn.backend import Plan
from multiattn.cuda.configs import CudaConfig, grid_blocks
from multiattn.cuda.nvrtc import cubin_path
from multiattn.cuda.params import ForwardParams, make_params, set_pointers
from multiattn.cuda.source import kernel_of


class GpuLauncher:
    """A kernel loaded on the device that is current when this is made; see `multiattn.backend.Launcher`.

    Safe to call from several threads and while a CUDA graph is captured: the kernel is compiled and loaded when this is
    made, and a call only launches it; in a thread new to CUDA it first makes the device's context current there.
    """

    def __init__(self, plan: Plan) -> None:
        assert isinstance(plan.config, CudaConfig)
        kernel = kernel_of(plan)
        self._device = torch.cuda.current_device()
        _make_context_current(self._device)
        self._function = _load(cubin_path(kernel, plan.arch), kernel.name, kernel.smem_bytes, self._device)
        self._template = bytes(make_params(plan.problem, plan.config))
        self._blocks = grid_blocks(plan.config, plan.problem)
        self._threads = plan.config.threads
        self._smem_bytes = kernel.smem_bytes

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Launch on the current stream of the device."""
        params = ForwardParams.from_buffer_copy(self._template)  # of this call alone: threads may share a launcher
        set_pointers(params, q, k, v, out, lse)
        pointers = ctypes.c_void_p(ctypes.addressof(params))
        # What torch.cuda.current_stream(device).cuda_stream is, without a Stream object for each launch.
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        launch = (
            self._function, self._blocks, 1, 1, self._threads, 1, 1, self._smem_bytes,
            stream, ctypes.addressof(pointers), 0,
        )  # fmt: skip
        (result,) = driver.cuLaunchKernel(*launch)
        if result == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # the first use of CUDA in a fresh thread
            _make_context_current(self._device)
            (result,) = driver.cuLaunchKernel(*launch)
        _check(result)


@functools.cache
def _load(cubin: Path, name: str, smem_bytes: int, device: int) -> Any:
    """The kernel of a cubin as a function of the current context, allowed its shared memory."""
    kernel = _check(*driver.cuLibraryGetKernel(_load_library(cubin), name.encode()))
    function = _check(*driver.cuKernelGetFunction(kernel))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(*driver.cuFuncSetAttribute(function, attribute, smem_bytes))
    return function


@functools.cache
def _load_library(cubin: Path) -> Any:
    return _check(*driver.cuLibraryLoadData(cubin.read_bytes(), [], [], 0, [], [], 0))


def _make_context_current(device: int) -> None:
    """Make the context that torch uses current in this thread; torch itself does so only when it first needs it."""
    ordinal = _check(*driver.cuDeviceGet(device))
    _check(*driver.cuCtxSetCurrent(_check(*driver.cuDevicePrimaryCtxRetain(ordinal))))


def _check(result: Any, value: Any = None) -> Any:
    """The value of a driver call; RuntimeError with the driver's name and words for a failure."""
    if result == driver.CUresult.CUDA_SUCCESS:
        return value
    _, text = driver.cuGetErrorString(result)
    raise RuntimeError(f"CUDA driver: {result.name}: {text.decode() if text else 'no description'}")
