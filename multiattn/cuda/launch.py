"""Launching compiled kernels on torch's current stream, with as little as possible between the call and the driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from multiattn.abi import WORKSPACE
from multiattn.backend import Plan
from multiattn.context import make_context_current
from multiattn.counters import counter_lender
from multiattn.cuda.backward_configs import delta_bytes
from multiattn.cuda.bind import bind, image_of
from multiattn.cuda.driver import check
from multiattn.cuda.launches import Launch, launches_of, params_of
from multiattn.cuda.nvrtc import cubin_path
from multiattn.cuda.params import BackwardParams, set_backward_pointers
from multiattn.driver_launch import DriverLauncher


class GpuLauncher(DriverLauncher):
    """The forward of a Plan on a GPU; see `multiattn.backend.Launcher`. Compiled and loaded when this is made."""

    def __init__(self, plan: Plan) -> None:
        device = torch.cuda.current_device()
        make_context_current(device)
        (launch,) = launches_of(plan)
        binding = replace(bind(plan, image_of(plan)), grid=(launch.grid(_multiprocessors(device)), 1, 1))
        super().__init__(
            int(_load(cubin_path(launch.kernel, plan.arch), launch.kernel.name, launch.kernel.smem_bytes, device)),
            binding,
            device,
            overlaps=launch.kernel.overlaps,
            lenders={WORKSPACE: counter_lender(device, plan.workspace_bytes)} if plan.workspace_bytes else {},
        )


GpuWgmmaLauncher = GpuLauncher
"""The same: what the kernel for Hopper takes besides is in its Binding."""


class _Sequence:
    """The kernels of a backward, loaded on the device that is current when this is made, launched one after another.

    Safe to use from several threads and while a CUDA graph is captured: the kernels are compiled and loaded when this
    is made, and a launch only launches them; in a thread new to CUDA it first makes the device's context current there.
    """

    def __init__(self, plan: Plan) -> None:
        self.device = torch.cuda.current_device()
        make_context_current(self.device)
        self._launches = tuple(self._load(launch, plan) for launch in launches_of(plan))

    def _load(self, launch: Launch, plan: Plan) -> Callable[[int, int, int], tuple[Any]]:
        """Launches a kernel, given the stream's handle, the address of its parameters' pointers, and 0."""
        kernel = launch.kernel
        function = _load(cubin_path(kernel, plan.arch), kernel.name, kernel.smem_bytes, self.device)
        blocks = launch.grid(_multiprocessors(self.device))
        return partial(driver.cuLaunchKernel, function, blocks, 1, 1, kernel.threads, 1, 1, kernel.smem_bytes)

    def launch(self, params: ctypes.Structure) -> None:
        """Launch all on the current stream of the device, each with `params`, which are copied."""
        pointers = ctypes.c_void_p(ctypes.addressof(params))
        address = ctypes.addressof(pointers)
        # What torch.cuda.current_stream(device).cuda_stream is, without a Stream object for each launch.
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for launch in self._launches:
            (result,) = launch(stream, address, 0)
            if result == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # the first use of CUDA in a fresh thread
                make_context_current(self.device)
                (result,) = launch(stream, address, 0)
            check(result)


class GpuBackwardLauncher:
    """The backward of a Plan on a GPU; see `multiattn.backend.BackwardLauncher` and `_Sequence`."""

    def __init__(self, plan: Plan) -> None:
        self._sequence = _Sequence(plan)
        self._template = bytes(params_of(plan))
        self._workspace_bytes = plan.workspace_bytes
        self._dq_sum_at = delta_bytes(plan.problem)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Launch on the current stream of the device."""
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=q.device)
        params = BackwardParams.from_buffer_copy(self._template)
        set_backward_pointers(params, q, k, v, out, lse, dout, dlse, dq, dk, dv, workspace, self._dq_sum_at)
        self._sequence.launch(params)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _load(cubin: Path, name: str, smem_bytes: int, device: int) -> Any:
    """The kernel of a cubin as a function of the current context, allowed its shared memory."""
    kernel = check(*driver.cuLibraryGetKernel(_load_library(cubin), name.encode()))
    function = check(*driver.cuKernelGetFunction(kernel))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(*driver.cuFuncSetAttribute(function, attribute, smem_bytes))
    return function


@functools.cache
def _load_library(cubin: Path) -> Any:
    return check(*driver.cuLibraryLoadData(cubin.read_bytes(), [], [], 0, [], [], 0))
