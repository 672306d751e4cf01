"""From a Plan of either direction to a launcher: compiled by cuTile and launched by the driver, or interpreted.

`ct.launch` looks at every tensor, each time, to find the code for such tensors. All of that is fixed by a Plan, so code
and arguments are made once: see `multiattn.cutile.bind`, which is held against what cuTile made of the same call.
"""

from __future__ import annotations

import functools
import os
import platform
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from multiattn.cutile import cpu as interpreter
from multiattn.cutile.kernels import backward
from multiattn.cutile.kernels.forward import forward, forward_64bit
from multiattn.cutile.table import Step, area_names, steps_of
from multiattn.plan import abi
from multiattn.plan.backend import Launcher, Plan
from multiattn.problem import Operands
from multiattn.run import driver
from multiattn.run.arguments import Layout, layouts, pack_areas
from multiattn.run.launch import ByPresence, DriverLauncher, LoadedKernel, Workspace, fresh_memory

COMPILE_SECONDS = 120.0
"""Longest compilation: a tile too large for the registers can take tileiras minutes, a good one takes it seconds."""


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan: compiled for the current device, or interpreted when the Plan is for the CPU.

    By `ct.launch` where a cubin has no host code for this machine, or where cuTile is of a release that compiles to
    something else than is known here, of which a RuntimeWarning tells, once. Both launch the same code with the same
    arguments; the driver takes half of the host's time. The code of a backward with dlse, which is another, is compiled
    by its first launch.

    Raises `ct.TileCompilerTimeoutError` after `COMPILE_SECONDS`, unless the environment variable
    CUDA_TILE_COMPILER_TIMEOUT_SEC says otherwise.
    """
    if not plan.arch.is_gpu:
        return Through(plan, run=lambda step, arguments: interpreter.launch(step.grid, get_kernel(step), arguments))
    device = torch.cuda.current_device()
    driver.ensure_context(device)
    if plan.direction == "backward":
        return ByPresence(lambda has_dlse: _prepare(plan, device, has_dlse=has_dlse))
    return _prepare(plan, device)


def get_kernel(step: Step) -> Any:
    """The kernel with the config's hints; steps that share hints share the kernel, and so what it has compiled."""
    return _hinted(step.kernel, step.is_64bit, step.occupancy, step.num_worker_warps)


@functools.cache
def _hinted(name: str, is_64bit: bool, occupancy: int | None, num_worker_warps: int | None) -> Any:
    if name == "forward":
        kernel = forward_64bit if is_64bit else forward
    else:
        kernel = backward.make_kernel(getattr(backward, name), is_64bit)
    return kernel.replace_hints(occupancy=occupancy, num_worker_warps=num_worker_warps)


def compile_limit() -> AbstractContextManager[None]:
    """Bounds compilation to `COMPILE_SECONDS`, unless the environment has its own limit."""
    if "CUDA_TILE_COMPILER_TIMEOUT_SEC" in os.environ:
        return nullcontext()
    limit: AbstractContextManager[None] = ct.compiler_timeout(COMPILE_SECONDS)
    return limit


# ---------------------------------------------------------------- by the driver


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """A kernel, loaded for every device, and what its cubin says of it."""

    function: int
    entry: abi.Entry
    tile_ir: str
    host: str | None


_known: dict[tuple[object, ...], _Code] = {}
_warned: set[str] = set()


def _prepare(plan: Plan, device: int, *, has_dlse: bool = False) -> Launcher:
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if _is_static(plan) else None
    steps = steps_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors)
    try:
        kernels = [_load_step(plan, step, device) for step in steps]
    except ValueError as error:
        _warn_once(error)
        return through_cutile(plan, multiprocessors)
    if any(kernel is None for kernel in kernels):
        return through_cutile(plan, multiprocessors)
    return DriverLauncher([kernel for kernel in kernels if kernel is not None], device, _workspace(plan, device))


def _is_static(plan: Plan) -> bool:
    """Whether a grid is made for the device."""
    return getattr(plan.config, "scheduler", None) == "static"


def _workspace(plan: Plan, device: int) -> Workspace | None:
    known, names = layouts(plan.problem), area_names(plan)
    areas, size = pack_areas({name: known[name].size_bytes for name in names})
    return Workspace(lend=fresh_memory(device, size), areas=areas) if names else None


def _load_step(plan: Plan, step: Step, device: int) -> LoadedKernel | None:
    """A step, compiled now unless its code is known; None where its host code is another machine's.

    ValueError for a cubin that says less, or something else, than those of the releases that are known.
    """
    from multiattn.cutile.compile import get_signature, make_cubin  # which compile what is here
    from multiattn.cutile.export import bind_proven, tile_ir

    signature = get_signature(plan, step)
    kernel = get_kernel(step)
    key = (kernel, plan.arch.name, repr(signature))  # Plans of many lengths share code
    if key not in _known:
        cubin = make_cubin(kernel, signature, plan.arch)
        _known[key] = _Code(
            entry=abi.read_entry(cubin, signature.symbol),
            tile_ir=tile_ir(cubin),
            host=abi.host_of(cubin),
            function=driver.load_kernel(cubin, signature.symbol, device),
        )
    code = _known[key]
    if code.host not in (None, platform.machine()):
        return None
    return LoadedKernel(function=code.function, binding=bind_proven(plan, step, signature, code.tile_ir, code.entry))


def _warn_once(error: ValueError) -> None:
    release: Any = ct.__version__
    if release not in _warned:
        _warned.add(release)
        warnings.warn(
            f"cuda-tile {release} compiles kernels to what multiattn does not know ({error}); ct.launch is used, which "
            "costs the host more",
            RuntimeWarning,
            stacklevel=3,
        )


# ---------------------------------------------------------------- by cuTile, or its interpreter


class Through:
    """Launches each step with tensors, as cuTile and the interpreter take them."""

    def __init__(self, plan: Plan, *, run: Any, multiprocessors: int | None = None) -> None:
        """`run` launches a step, given all its arguments."""
        both = (False, True) if plan.direction == "backward" else (False,)
        self._steps = {
            has_dlse: steps_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors) for has_dlse in both
        }
        self._layouts: Mapping[str, Layout] = layouts(plan.problem)
        self._areas = area_names(plan)
        self._run = run

    def __call__(self, operands: Operands) -> None:
        """Launch, or run to the end."""
        given = {name: tensor for name, tensor in operands._asdict().items() if tensor is not None}
        tensors = {name: _with_strides(tensor, self._layouts[name].strides) for name, tensor in given.items()}
        for name in self._areas:
            tensors[name] = torch.empty(self._layouts[name].shape, dtype=torch.float32, device=operands.q.device)
        for step in self._steps[operands.dlse is not None]:
            self._run(step, (*(tensors[name] for name in step.arrays.values()), *step.numbers))


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """CuTile also reads the strides of one-element dimensions, which PyTorch leaves arbitrary."""
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def through_cutile(plan: Plan, multiprocessors: int | None = None) -> Launcher:
    """A launcher by `ct.launch`, whose first launch of each step compiles: cuTile specialises on the tensors."""
    compiled: set[tuple[str, bool]] = set()

    def run(step: Step, arguments: tuple[Any, ...]) -> None:
        code = (step.kernel, "dlse" in step.arrays.values())
        with nullcontext() if code in compiled else compile_limit():
            ct.launch(torch.cuda.current_stream(), step.grid, get_kernel(step), arguments)
        compiled.add(code)

    return Through(plan, run=run, multiprocessors=multiprocessors)
