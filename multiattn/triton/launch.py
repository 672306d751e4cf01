"""From a Plan of either direction to a launcher: compiled on a GPU, interpreted on CPU tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton import knobs

from multiattn.plan import abi
from multiattn.plan.backend import Launcher, Plan
from multiattn.problem import Operands
from multiattn.run import compat
from multiattn.run.counters import counter_lender
from multiattn.run.launch import ByPresence, DriverLauncher, LoadedKernel, Workspace, fresh_memory, pack_areas
from multiattn.triton.calls import Call, calls_of
from multiattn.triton.compiled import checked_binding, why_not
from multiattn.triton.cpu import interpreter
from multiattn.triton.gluon_configs import VARIANT as GLUON
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
    calls = {has_dlse: calls_of(plan, has_dlse=has_dlse) for has_dlse in (False, True)}
    areas = area_names([call.table for call in calls[False]])
    known = plan.problem.layouts

    def interpret(operands: Operands) -> None:
        tensors = operands._asdict()
        tensors |= {name: torch.empty(known[name].shape, dtype=known[name].dtype) for name in areas}
        for call in calls[operands.dlse is not None]:
            interpreter.run(call.kernel, call.table.grid, *call.given(tensors))

    return interpret


# ---------------------------------------------------------------- compiled kernels

USUAL_SMEM_BYTES = 228 * 1024
"""Shared memory of a block: for more Triton 3.9 asks the driver for another mode of it."""

_warned: set[str] = set()


def _prepare(plan: Plan, device: int, *, has_dlse: bool = False) -> Launcher:
    """By the driver itself, or by Triton's own code.

    Both launch the same code with the same arguments. The first costs the host half as much, or less. Triton's own is
    for a launch with a kernel that needs more than arguments (`compiled.why_not`) or takes more shared memory than
    usual (`USUAL_SMEM_BYTES`), while somebody listens to Triton's launches (`knobs.runtime.launch_enter_hook`, as its
    profiler does), and for a release of Triton that compiles to another signature than is known here, of which a
    RuntimeWarning tells, once.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if plan.variant == GLUON else None
    calls = calls_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors)
    with interpreter.exclusive_language:
        compiled = [call.kernel.warmup(*call.stubs(), grid=(call.table.grid,), **call.table.options) for call in calls]
    runs = [kernel[(call.table.grid, 1, 1)] for kernel, call in zip(compiled, calls, strict=True)]  # this loads them
    workspace = _workspace(plan, area_names([call.table for call in calls]), device)
    kernels = _for_driver(compiled, calls)
    if kernels is None:
        return _ThroughTriton(runs, calls, device, workspace)
    return DriverLauncher(kernels, device, workspace)


def _workspace(plan: Plan, names: Sequence[str], device: int) -> Workspace | None:
    if not names:
        return None
    if abi.WORKSPACE in names:
        return Workspace(lend=counter_lender(device, plan.workspace_bytes))
    known = plan.problem.layouts
    areas, size = pack_areas({name: known[name].size_bytes for name in names})
    return Workspace(lend=fresh_memory(device, size), areas=areas)


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
        if triton.__version__ not in _warned:
            _warned.add(triton.__version__)
            warnings.warn(
                f"Triton {triton.__version__} compiles kernels to a signature that multiattn does not know "
                f"({type(error).__name__}: {error}); Triton's own launcher is used, which costs the host more",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    return kernels


def _is_watched() -> bool:
    """True while somebody listens to Triton's launches."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a chain of hooks, or one, or None


class _ThroughTriton:
    """Launches compiled kernels by Triton, but past its JIT, which looks for arguments that ask for other code.

    All that it looks at is fixed by the Problem, and our own tensors are aligned. The stream is named, not left to
    Triton to ask the driver for.
    """

    def __init__(self, runs: Sequence[Any], calls: Sequence[Call], device: int, workspace: Workspace | None) -> None:
        self._runs = tuple(zip(runs, calls, strict=True))
        self._device, self._workspace = device, workspace

    def __call__(self, operands: Operands) -> None:
        stream = compat.current_stream(self._device)
        tensors: dict[str, Any] = operands._asdict()
        held: tuple[int, object] = (0, None)  # until the launch
        if self._workspace is not None:
            held = self._workspace.lend(stream)
            for name, at in self._workspace.areas.items():
                tensors[name] = self._runs[0][1].stub_of(name, held[0] + at)
        for run, call in self._runs:
            run(*call.given(tensors), stream=stream)
