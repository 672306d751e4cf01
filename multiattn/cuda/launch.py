"""Launching compiled kernels on torch's current stream, with as little as possible between the call and the driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from multiattn.abi import TENSOR_MAP_BYTES
from multiattn.backend import Plan
from multiattn.context import ensure_context, make_context_current
from multiattn.cuda.backward_configs import delta_bytes
from multiattn.cuda.counters import counters_of
from multiattn.cuda.driver import check
from multiattn.cuda.launches import Launch, launches_of, params_of
from multiattn.cuda.nvrtc import cubin_path
from multiattn.cuda.params import BackwardParams, ForwardParams, WgmmaParams, set_backward_pointers, set_pointers
from multiattn.cuda.tensor_maps import tensor_maps
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.tensor_map import Encoder

_STREAMS_KEPT = 64
"""Handles of streams that a launcher knows at a time."""


class _Sequence:
    """The kernels of a Plan, loaded on the device that is current when this is made, to be launched one after another.

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
        if kernel.overlaps:
            return _OverlappingLaunch(function, blocks, kernel.threads, kernel.smem_bytes)
        return partial(driver.cuLaunchKernel, function, blocks, 1, 1, kernel.threads, 1, 1, kernel.smem_bytes)

    def clear(self, memory: torch.Tensor) -> None:
        """Zero bytes on the current stream of the device; the thread has its context."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        check(*driver.cuMemsetD8Async(memory.data_ptr(), 0, memory.numel(), stream))

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


class _OverlappingLaunch:
    """Launches a kernel so that it may begin while the one before it on the stream still runs.

    The CUDA Programming Guide's "Programmatic Dependent Launch". The kernel waits for the other's end before it touches
    what that wrote, or read.
    """

    def __init__(self, function: Any, blocks: int, threads: int, smem_bytes: int) -> None:
        self._function, self._blocks, self._threads, self._smem_bytes = function, blocks, threads, smem_bytes
        self._configs: dict[int, Any] = {}

    def __call__(self, stream: int, parameters: int, extra: int) -> tuple[Any]:
        config = self._configs.get(stream)
        if config is None:
            config = self._config(stream)
        result: tuple[Any] = driver.cuLaunchKernelEx(config, self._function, parameters, extra)
        return result

    def _config(self, stream: int) -> Any:
        """The launch on a stream, made once for each handle: to make one takes longer than to launch."""
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._smem_bytes
        config.hStream = stream
        config.attrs, config.numAttrs = [overlap], 1
        if len(self._configs) >= _STREAMS_KEPT:
            self._configs.clear()
        self._configs[stream] = config
        return config


class GpuLauncher:
    """The forward of a Plan on a GPU; see `multiattn.backend.Launcher` and `_Sequence`."""

    def __init__(self, plan: Plan) -> None:
        self._sequence = _Sequence(plan)
        self._template = bytes(params_of(plan))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Launch on the current stream of the device."""
        params = ForwardParams.from_buffer_copy(self._template)  # of this call alone: threads may share a launcher
        set_pointers(params, q, k, v, out, lse)
        self._sequence.launch(params)


class GpuWgmmaLauncher:
    """The forward of a Plan of the kernel for Hopper on a GPU; see `multiattn.backend.Launcher` and `_Sequence`.

    Tensor maps are encoded for addresses that the launcher has not seen of late, and for no others.
    """

    def __init__(self, plan: Plan) -> None:
        assert isinstance(plan.config, WgmmaConfig)
        self._sequence = _Sequence(plan)
        self._rest = bytes(params_of(plan))[WgmmaParams.forward.offset :]
        maps = tensor_maps(plan.problem, plan.config)
        self._map_q, self._map_k, self._map_v = (Encoder(maps[name]) for name in ("q", "k", "v"))
        self._map_out = Encoder(maps["out"]) if "out" in maps else _no_map
        self._workspace_bytes = plan.workspace_bytes
        self._counters = counters_of(self._sequence.device) if plan.workspace_bytes else None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Launch on the current stream of the device."""
        ensure_context(self._sequence.device)
        maps = (
            self._map_q(q.data_ptr()),
            self._map_k(k.data_ptr()),
            self._map_v(v.data_ptr()),
            self._map_out(out.data_ptr()),
        )
        params = WgmmaParams.from_buffer_copy(b"".join((*maps, self._rest)))
        set_pointers(params.forward, q, k, v, out, lse)
        own: torch.Tensor | None = None
        if self._counters is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._sequence.device)
            is_captured = torch.cuda.is_current_stream_capturing()
            params.next_tile = None if is_captured else self._counters.of_stream(stream)
            if params.next_tile is None:
                own = self._own_counter(q.device)
                params.next_tile = own.data_ptr()
        self._sequence.launch(params)

    def _own_counter(self, on: torch.device) -> torch.Tensor:
        """Of this launch alone. A captured one needs it: it may be replayed on another stream, beside others."""
        counter = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=on)
        self._sequence.clear(counter)
        return counter


def _no_map(address: int) -> bytes:
    """What stands for a tensor map that no kernel asks for."""
    return bytes(TENSOR_MAP_BYTES)


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
