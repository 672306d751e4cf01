"""From a Plan of either direction to a launcher: compiled by cuTile and launched by the driver, or run on the CPU.

`ct.launch` looks at every tensor, each time, to find the code for such tensors. All of that is fixed by a Plan, so code
and arguments are made once, of the launch's description (`launches`), which is held against what cuTile made (`bind`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from multiattn.cutile import cpu
from multiattn.cutile.bind import bind_proven
from multiattn.cutile.claims import tile_ir
from multiattn.cutile.compile import compiling, get_kernel, get_signature, make_cubins
from multiattn.cutile.families import family_of, launches_of
from multiattn.cutile.launches import KernelLaunch
from multiattn.layout import Layout
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Launcher, Plan
from multiattn.run import driver
from multiattn.run.launch import (
    ByPresence,
    DriverLauncher,
    LoadedKernel,
    by_tensors,
    fresh_areas,
    warn_of_release,
)


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan: compiled for the current device, or interpreted when the Plan is for the CPU.

    The driver launches it in half of the host's time that `ct.launch` takes, with the same code and arguments. It is
    `ct.launch` all the same where a cubin has no host code for this machine, and, with one RuntimeWarning, where this
    release of cuTile compiles to something unknown. A backward with dlse has code of its own, compiled by its first
    launch.

    Raises `ct.TileCompilerTimeoutError` after `compile.COMPILE_SECONDS`, unless the environment variable
    CUDA_TILE_COMPILER_TIMEOUT_SEC says otherwise.
    """
    if not plan.arch.is_gpu:
        return _with_tensors(plan, lambda launch, arguments: cpu.launch(launch.grid, get_kernel(launch), arguments))
    device = torch.cuda.current_device()
    driver.ensure_context(device)
    if plan.direction == "backward":
        return ByPresence(lambda has_dlse: _prepare(plan, device, has_dlse=has_dlse))
    return _prepare(plan, device)


# ---------------------------------------------------------------- by the driver


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """A kernel, loaded for every device, and what its cubin says of it."""

    function: int
    entry: abi.KernelEntry
    tile_ir: str
    host: str | None


_known: dict[tuple[object, ...], _Code] = {}
_ahead: dict[tuple[object, ...], bytes] = {}
"""Cubins that were made ahead of their first launch."""


def code_key(launch: KernelLaunch, arch: Arch) -> tuple[object, ...]:
    """The key of a kernel's code, which plans of many lengths, batches and numbers of heads share."""
    return arch.name, repr(get_signature(launch)), launch.blocks_per_sm, launch.warps


def _prepare(plan: Plan, device: int, *, has_dlse: bool = False) -> Launcher:
    is_static = getattr(plan.config, "scheduler", None) == "static"  # a grid that is made for the device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if is_static else None
    launches = launches_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors)
    try:
        kernels = _load(plan, launches, device)
    except ValueError as error:
        warn_of_release(f"cuda-tile {ct.__version__}", error, "ct.launch")
        return through_cutile(plan, multiprocessors)
    loaded = [kernel for kernel in kernels if kernel is not None]
    if len(loaded) < len(launches):
        return through_cutile(plan, multiprocessors)
    areas = family_of(plan).all_areas(plan.problem, plan.config)
    return DriverLauncher(loaded, device, fresh_areas(plan.problem, areas, device))


def compile_ahead(plan: Plan) -> None:
    """Compile the kernels of the usual launch of a Plan, for `prepare` to load."""
    if plan.arch.is_gpu:
        unknown = {key: it for key, it in _unknown(launches_of(plan), plan.arch).items() if key not in _ahead}
        made = zip(unknown, make_cubins([*unknown.values()], plan.arch), strict=True)
        _ahead.update((key, cubin) for key, cubin in made if key not in _known)  # a call may have loaded it by now


def _unknown(launches: Sequence[KernelLaunch], arch: Arch) -> dict[tuple[object, ...], KernelLaunch]:
    """By their keys, the kernels that are not loaded."""
    by_key = {code_key(launch, arch): launch for launch in launches}
    return {key: launch for key, launch in by_key.items() if key not in _known}


def _load(plan: Plan, launches: Sequence[KernelLaunch], device: int) -> list[LoadedKernel | None]:
    """The kernels, compiled now unless their code is known; None where host code is another machine's.

    ValueError for a cubin that says less, or something else, than those of the releases that are known.
    """
    unknown = _unknown(launches, plan.arch)
    cubins = {key: cubin for key in unknown if (cubin := _ahead.get(key)) is not None}
    missing = {key: launch for key, launch in unknown.items() if key not in cubins}
    cubins |= zip(missing, make_cubins([*missing.values()], plan.arch), strict=True)
    for key, launch in unknown.items():
        cubin = cubins[key]
        symbol = get_signature(launch).symbol
        _known[key] = _Code(
            entry=abi.read_entry(cubin, symbol),
            tile_ir=tile_ir(cubin),
            host=abi.host_of(cubin),
            function=driver.load_kernel(cubin, symbol, device),
        )
        _ahead.pop(key, None)

    def loaded(launch: KernelLaunch) -> LoadedKernel | None:
        code = _known[code_key(launch, plan.arch)]
        if code.host not in (None, platform.machine()):
            return None
        binding = bind_proven(launch, code.tile_ir, code.entry)
        return LoadedKernel(function=code.function, binding=binding, overlaps=launch.overlaps)

    return [loaded(launch) for launch in launches]


# ---------------------------------------------------------------- by cuTile, or on the CPU


_Run = Callable[[KernelLaunch, tuple[Any, ...]], None]
"""Launches a kernel, given all its arguments."""


def _with_tensors(plan: Plan, run: _Run, multiprocessors: int | None = None) -> Launcher:
    """A launcher of each kernel with tensors, as cuTile and the CPU's interpreter take them."""
    launches = {
        has_dlse: launches_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors)
        for has_dlse in {False, plan.direction == "backward"}
    }

    def run_all(tensors: dict[str, torch.Tensor]) -> None:
        for launch in launches["dlse" in tensors]:
            run(launch, launch.arguments(lambda array: _laid_out(tensors[array.tensor], array.layout)))

    return by_tensors(plan.problem, family_of(plan).all_areas(plan.problem, plan.config), run_all)


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """CuTile also reads the strides of one-element dimensions, which PyTorch leaves arbitrary."""
    return tensor if tensor.stride() == layout.strides else tensor.as_strided(layout.shape, layout.strides)


def through_cutile(plan: Plan, multiprocessors: int | None = None) -> Launcher:
    """A launcher by `ct.launch`, whose first launch of each kernel compiles: cuTile specialises on the tensors."""
    compiled: set[Any] = set()

    def run(launch: KernelLaunch, arguments: tuple[Any, ...]) -> None:
        kernel = get_kernel(launch)
        with nullcontext() if kernel in compiled else compiling:
            ct.launch(torch.cuda.current_stream(), launch.grid, kernel, arguments)
        compiled.add(kernel)

    return _with_tensors(plan, run, multiprocessors)
