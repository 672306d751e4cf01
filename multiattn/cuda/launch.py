"""The launcher of a Plan on a GPU: its kernels, compiled by NVRTC and loaded when it is made."""

from __future__ import annotations

import functools

import torch

from multiattn.cuda.compile import cubin_path
from multiattn.cuda.family import areas_of, has_counter
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of
from multiattn.cuda.source import Instance
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Launcher, Plan
from multiattn.run import driver
from multiattn.run.counters import counter_lender
from multiattn.run.launch import ByPresence, DriverLauncher, LoadedKernel, Workspace, fresh_memory, pack_areas


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan of either direction for the current device; see `multiattn.plan.backend.Launcher`."""
    device = torch.cuda.current_device()
    driver.make_context_current(device)
    if plan.direction == "backward":
        return ByPresence(lambda has_dlse: _prepare(plan, device, has_dlse=has_dlse))
    return _prepare(plan, device)


def _prepare(plan: Plan, device: int, *, has_dlse: bool = False) -> DriverLauncher:
    kernels = []
    for launch in launches_of(plan):
        kernel = launch.kernel
        function = _load(kernel, plan.arch, device)
        grid = (launch.grid(_multiprocessors(device)), 1, 1)
        argument = argument_of(launch, plan, has_dlse=has_dlse)
        binding = abi.Binding(arguments=(argument,), grid=grid, image=launch.image(), constants={})
        kernels.append(LoadedKernel(function=function, binding=binding, overlaps=kernel.overlaps))
    areas, size = pack_areas(areas_of(plan))
    lender = counter_lender if has_counter(plan) else fresh_memory
    return DriverLauncher(kernels, device, Workspace(lend=lender(device, size), areas=areas) if areas else None)


@functools.cache
def _load(kernel: Instance, arch: Arch, device: int) -> int:
    """The driver's function, compiled and loaded once: calls of all sizes share it, and a packed batch is often new."""
    cubin, smem_bytes = cubin_path(kernel, arch).read_bytes(), kernel.smem_bytes
    return driver.load_kernel(cubin, kernel.name, device, dynamic_smem_bytes=smem_bytes, is_resident=True)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
