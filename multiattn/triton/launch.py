"""From a Plan of either direction to a launcher: compiled on a GPU, interpreted on CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from multiattn.plan import abi
from multiattn.plan.backend import Launcher, Plan
from multiattn.progress import compiling
from multiattn.run import compat, driver
from multiattn.run.counters import counter_lender
from multiattn.run.launch import (
    ByPresence,
    DriverLauncher,
    LoadedKernel,
    Workspace,
    by_tensors,
    fresh_areas,
    own_areas,
    warn_of_release,
)
from multiattn.triton.bind import checked_binding, why_not
from multiattn.triton.calls import Call, calls_of
from multiattn.triton.compile import Source, compile_sources, wants_jit
from multiattn.triton.cpu import interpreter
from multiattn.triton.families import areas_of, family_of


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan: compiled for the current device, or interpreted when the Plan is for the CPU."""
    if not plan.arch.is_gpu:
        return _interpreter_of(plan)
    device = torch.cuda.current_device()
    if plan.direction == "backward":
        return ByPresence(lambda has_dlse: _prepare(plan, device, has_dlse=has_dlse))
    return _prepare(plan, device)


def _interpreter_of(plan: Plan) -> Launcher:
    calls = {
        has_dlse: calls_of(plan, has_dlse=has_dlse, multiprocessors=INTERPRETED_PROGRAMS) for has_dlse in (False, True)
    }

    def interpret(tensors: dict[str, Any]) -> None:
        _zero_counter(tensors)
        for call in calls["dlse" in tensors]:
            arguments = call.given(tensors)
            if call.is_gluon:
                _run_gluon(call, arguments)
            else:
                interpreter.run(call.kernel, call.table.grid, *arguments)

    return by_tensors(plan.problem, areas_of(plan), interpret)


INTERPRETED_PROGRAMS = 2
"""That a persistent kernel has: they run one after another."""


def _run_gluon(call: Call, arguments: Sequence[Any]) -> None:
    from multiattn.triton.cpu.gluon import run  # which takes Gluon

    run(call.kernel, call.table.grid, *arguments, num_warps=call.table.options["num_warps"])


def _zero_counter(tensors: Mapping[str, Any]) -> None:
    if abi.WORKSPACE in tensors:
        tensors[abi.WORKSPACE].zero_()


# ---------------------------------------------------------------- compiled kernels

USUAL_SMEM_BYTES = 228 * 1024
"""Shared memory of a block: for more Triton 3.9 asks the driver for another mode of it."""


def _prepare(plan: Plan, device: int, *, has_dlse: bool = False) -> Launcher:
    """A launcher by the driver itself, or by Triton's own code.

    Both launch the same code with the same arguments; the driver costs the host at most half as much, and no launcher
    is made by a C compiler. Triton's own launches a kernel that needs more than arguments (`bind.why_not`) or more
    shared memory than `USUAL_SMEM_BYTES`, and every kernel while `compile.wants_jit`, as under Triton's profiler. It is
    also used, with one RuntimeWarning, where this release of Triton compiles to an unknown signature.
    """
    multiprocessors = None
    if family_of(plan).is_gluon:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    calls = calls_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors)
    kernels = None if wants_jit() else _for_driver(plan, calls, device)
    if kernels is None:
        return _through_triton(plan, calls, device)
    areas = own_areas(plan.problem, areas_of(plan))
    if [*areas] == [abi.WORKSPACE]:
        return DriverLauncher(kernels, device, Workspace(lend=counter_lender(device, areas[abi.WORKSPACE].size_bytes)))
    # Beside other areas the counter is set to 0 by the kernel that goes first.
    return DriverLauncher(kernels, device, fresh_areas(plan.problem, areas, device))


_OTHER_RELEASE = (AttributeError, KeyError, TypeError, ValueError)
"""Errors of what is private to Triton."""


def _for_driver(plan: Plan, calls: Sequence[Call], device: int) -> list[LoadedKernel] | None:
    """The kernels of a launch past Triton's, or None: what is handed over is what Triton and the cubin say."""
    stubs = [call.stubs() for call in calls]
    try:
        sources = [Source(call, arguments, plan.arch) for call, arguments in zip(calls, stubs, strict=True)]
    except _OTHER_RELEASE as error:
        _warn(error)
        return None
    compiled = compile_sources(sources)
    try:
        if any(why_not(it.metadata) or it.metadata.shared > USUAL_SMEM_BYTES for it in compiled):
            return None
        bindings = [checked_binding(kernel, call.table) for kernel, call in zip(compiled, calls, strict=True)]
        found = [(it.asm["cubin"], it.metadata.name, bool(it.metadata.launch_pdl)) for it in compiled]
    except _OTHER_RELEASE as error:
        _warn(error)
        return None
    return [
        LoadedKernel(function=_load(cubin, name, binding, device), binding=binding, overlaps=overlaps)
        for (cubin, name, overlaps), binding in zip(found, bindings, strict=True)
    ]


def _warn(error: Exception) -> None:
    warn_of_release(f"Triton {triton.__version__}", error, "Triton's own launcher")


def _load(cubin: bytes, name: str, binding: abi.Binding, device: int) -> int:
    """A kernel, loaded and set up as Triton does it."""
    driver.make_context_current(device)  # the one where it is to be resident
    smem_bytes = binding.image.dynamic_smem_bytes
    return driver.load_kernel(
        cubin, name, device, dynamic_smem_bytes=smem_bytes, is_resident=True, prefers_smem=smem_bytes > _PREFERS_L1
    )


_PREFERS_L1 = 48 * 1024
"""Bytes of shared memory up to which Triton leaves an SM's memory to the driver to divide."""


def _by_jit(calls: Sequence[Call], device: int) -> list[Any]:
    """The CompiledKernel of each, all compiled at one time: most of it holds no lock of Python's."""

    def warm_up(call: Call) -> Any:
        return call.kernel.warmup(*call.stubs(), grid=(call.table.grid,), **call.table.options)

    if len(calls) == 1:
        return [warm_up(calls[0])]
    with ThreadPoolExecutor(len(calls), initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        return list(threads.map(warm_up, calls))


def _through_triton(plan: Plan, calls: Sequence[Call], device: int) -> Launcher:
    """Launches kernels of the JIT by Triton, but past the JIT, which looks for arguments that ask for other code.

    All that it looks at is fixed by the Problem, and our own tensors are aligned. The stream is named, not left to
    Triton to ask the driver for.
    """
    with interpreter.exclusive_language.as_it_is(), compiling("triton", plan.arch.name):
        compiled = _by_jit(calls, device)
    runs = [kernel[(call.table.grid, 1, 1)] for kernel, call in zip(compiled, calls, strict=True)]  # this loads them

    def launch(tensors: dict[str, Any]) -> None:
        stream = compat.current_stream(device)
        _zero_counter(tensors)
        for run, call in zip(runs, calls, strict=True):
            run(*call.given(tensors), stream=stream)

    return by_tensors(plan.problem, areas_of(plan), launch)
