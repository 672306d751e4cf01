"""From a Plan of either direction to a launcher: compiled on a GPU, interpreted on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton import knobs

from multiattn.plan import abi
from multiattn.plan.backend import Launcher, Plan
from multiattn.plan.schedule import COUNTER_BYTES
from multiattn.run import compat
from multiattn.run.counters import counter_lender
from multiattn.run.launch import (
    ByPresence,
    DriverLauncher,
    LoadedKernel,
    Workspace,
    by_tensors,
    fresh_areas,
    warn_of_release,
)
from multiattn.triton.areas import areas_of
from multiattn.triton.bind import checked_binding, why_not
from multiattn.triton.calls import Call, calls_of
from multiattn.triton.cpu import interpreter
from multiattn.triton.gluon_backward_configs import GLUON_VARIANTS
from multiattn.triton.parameters import area_names


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan: compiled for the current device, or interpreted when the Plan is for the CPU."""
    if not plan.arch.is_gpu:
        return _interpreter_of(plan)
    device = torch.cuda.current_device()
    if plan.direction == "backward":
        return ByPresence(lambda has_dlse: _prepare(plan, device, has_dlse=has_dlse))
    return _prepare(plan, device)


def _interpreter_of(plan: Plan) -> Launcher:
    programs = INTERPRETED_PROGRAMS if plan.variant in GLUON_VARIANTS else None
    calls = {has_dlse: calls_of(plan, has_dlse=has_dlse, multiprocessors=programs) for has_dlse in (False, True)}
    areas = area_names([call.table for call in calls[False]])

    def interpret(tensors: dict[str, Any]) -> None:
        if abi.WORKSPACE in areas:
            tensors[abi.WORKSPACE] = _counter(tensors["q"].device)
        for call in calls["dlse" in tensors]:
            arguments = call.given(tensors)
            if call.is_gluon:
                _run_gluon(call, arguments)
            else:
                interpreter.run(call.kernel, call.table.grid, *arguments)

    own = [name for name in areas if name != abi.WORKSPACE]
    return by_tensors(plan.problem, own, interpret, areas_of(plan.problem, plan.config))


INTERPRETED_PROGRAMS = 2
"""That a persistent kernel has: they run one after another."""


def _run_gluon(call: Call, arguments: Sequence[Any]) -> None:
    from multiattn.triton.cpu.gluon import run  # which takes Gluon

    run(call.kernel, call.table.grid, *arguments, num_warps=call.table.options["num_warps"])


def _counter(device: torch.device) -> torch.Tensor:
    return torch.zeros(COUNTER_BYTES // 4, dtype=torch.int32, device=device)


# ---------------------------------------------------------------- compiled kernels

USUAL_SMEM_BYTES = 228 * 1024
"""Shared memory of a block: for more Triton 3.9 asks the driver for another mode of it."""


def _prepare(plan: Plan, device: int, *, has_dlse: bool = False) -> Launcher:
    """A launcher by the driver itself, or by Triton's own code.

    Both launch the same code with the same arguments; the driver costs the host at most half as much. Triton's own
    launches a kernel that needs more than arguments (`bind.why_not`) or more shared memory than `USUAL_SMEM_BYTES`, and
    every kernel while somebody listens to Triton's launches (`knobs.runtime.launch_enter_hook`, as its profiler does).
    It is also used, with one RuntimeWarning, where this release of Triton compiles to an unknown signature.
    """
    multiprocessors = (
        torch.cuda.get_device_properties(device).multi_processor_count if plan.variant in GLUON_VARIANTS else None
    )
    calls = calls_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors)
    with interpreter.exclusive_language:
        compiled = _compiled(calls, device)
    runs = [kernel[(call.table.grid, 1, 1)] for kernel, call in zip(compiled, calls, strict=True)]  # this loads them
    areas: Sequence[str] = area_names([call.table for call in calls])
    kernels = _for_driver(compiled, calls)
    if kernels is None:
        return _through_triton(plan, runs, calls, areas, device)
    if abi.WORKSPACE not in areas:
        more = {name: layout.size_bytes for name, layout in areas_of(plan.problem, plan.config).items()}
        return DriverLauncher(kernels, device, fresh_areas(plan.problem, areas, device, more))
    if plan.problem.packing is None and plan.direction == "forward":
        return DriverLauncher(kernels, device, Workspace(lend=counter_lender(device, COUNTER_BYTES)))
    areas = [name for name in areas if name != abi.WORKSPACE]  # the kernel that goes first sets the counter to 0
    more = {name: layout.size_bytes for name, layout in areas_of(plan.problem, plan.config).items()}
    return DriverLauncher(
        kernels, device, fresh_areas(plan.problem, areas, device, more | {abi.WORKSPACE: COUNTER_BYTES})
    )


def _compiled(calls: Sequence[Call], device: int) -> list[Any]:
    """The CompiledKernel of each, all compiled at one time: most of it holds no lock of Python's."""

    def warm_up(call: Call) -> Any:
        return call.kernel.warmup(*call.stubs(), grid=(call.table.grid,), **call.table.options)

    if len(calls) == 1:
        return [warm_up(calls[0])]
    with ThreadPoolExecutor(len(calls), initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        return list(threads.map(warm_up, calls))


def _for_driver(compiled: Sequence[Any], calls: Sequence[Call]) -> list[LoadedKernel] | None:
    """The kernels of a launch past Triton's, or None: what is handed over is what Triton and the cubin say."""
    kernels = []
    try:
        for kernel, call in zip(compiled, calls, strict=True):
            metadata = kernel.metadata
            if why_not(metadata) or metadata.shared > USUAL_SMEM_BYTES or _is_watched():
                return None
            binding, function = checked_binding(kernel, call.table), int(kernel.function)
            kernels.append(
                LoadedKernel(function=function, binding=binding, overlaps=bool(metadata.launch_pdl), keeps=kernel)
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # private to Triton, all of it
        warn_of_release(f"Triton {triton.__version__}", error, "Triton's own launcher")
        return None
    return kernels


def _is_watched() -> bool:
    """True while somebody listens to Triton's launches."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a chain of hooks, or one, or None


def _through_triton(
    plan: Plan, runs: Sequence[Any], calls: Sequence[Call], areas: Sequence[str], device: int
) -> Launcher:
    """Launches compiled kernels by Triton, but past its JIT, which looks for arguments that ask for other code.

    All that it looks at is fixed by the Problem, and our own tensors are aligned. The stream is named, not left to
    Triton to ask the driver for.
    """
    counters = [name for name in areas if name == abi.WORKSPACE]

    def launch(tensors: dict[str, Any]) -> None:
        stream = compat.current_stream(device)
        for name in counters:
            tensors[name] = _counter(tensors["q"].device)
        for run, call in zip(runs, calls, strict=True):
            run(*call.given(tensors), stream=stream)

    own = [name for name in areas if name not in counters]
    return by_tensors(plan.problem, own, launch, areas_of(plan.problem, plan.config))
