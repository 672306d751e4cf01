"""The warning of calls that run on a CPU, and that every GPU would refuse: `tell_cpu_only`."""

from __future__ import annotations

from collections.abc import Sequence

from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU
from multiattn.plan.backend import BACKENDS, Direction
from multiattn.plan.support import Capability, Reason
from multiattn.problem import Problem
from multiattn.told import warn_once

_USUAL = Capability(arches=())
_CODES = ("dtype", "head_dim")
_seen: set[str] = set()


def tell_cpu_only(problem: Problem, directions: Sequence[Direction]) -> None:
    """Warn of a dtype or a head_dim that ``backend="auto"`` runs as the reference on a CPU, and that no GPU runs.

    Once for each dtype, and once for head dims.
    """
    is_whole = not any(it % _USUAL.head_dim_multiple for it in (problem.head_dim, problem.head_dim_v))
    is_usual = problem.dtype in _USUAL.dtypes and is_whole and problem.width <= _USUAL.head_dim_max
    key = f"{problem.dtype} {problem.widths} {directions}"
    if key in _seen or is_usual:  # asks no backend
        return
    _seen.add(key)
    for direction in directions:
        if reasons := _refusals(problem, direction):
            kernel = "every kernel" if direction == "forward" else "every kernel of a gradient"
            why = "; ".join(map(str, reasons))
            kinds = [f"{it.code} {it.got if it.code == 'dtype' else ''}" for it in reasons]
            on_gpu = f"On a GPU {kernel} refuses it: {why}"
            warn_once(f"backend='auto' runs this on the CPU, as the reference. {on_gpu}", kinds)


def _refusals(problem: Problem, direction: Direction) -> tuple[Reason, ...]:
    """The reasons of the kernel that comes nearest against a problem's dtype and head_dim, on any GPU."""
    each = (
        tuple(it for it in capability.why_not(problem, CPU) if it.code in _CODES)
        for capability in _capabilities(direction)
    )
    return min(each, key=len, default=())


def _capabilities(direction: Direction) -> list[Capability]:
    """The capabilities of all kernels, the widest heads first."""
    found = (it.capability for name in BACKENDS for it in registry.get(name).op(direction).variants)
    return sorted(found, key=lambda it: -it.head_dim_max)
