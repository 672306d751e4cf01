"""The backend and variant of a call, in each direction: by name, or by recorded measurements (`choose`)."""

from __future__ import annotations

from collections.abc import Sequence

from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, REFERENCE, Direction, Plan, make_plan
from multiattn.plan.preference import preferred_order
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Options, Problem

BOTH: tuple[Direction, ...] = ("forward", "backward")


def choose(
    problem: Problem, arch: Arch, options: Options, *directions: Direction, probe: bool = True
) -> tuple[Plan, ...]:
    """A Plan for each direction, or `Unsupported` with every reason of all that have none.

    `options.variant` is one of the first direction. ``"auto"`` chooses each direction by its own measurements: any
    backend's forward feeds any backend's backward.
    """
    plans, refusals = [], []
    for direction in directions:
        asked = options if direction == directions[0] else options.of_gradient
        try:
            plans.append(_choose(problem, arch, asked, direction, probe))
        except Unsupported as refusal:
            refusals.append(refusal)
    if refusals:
        raise Unsupported(
            backend=options.backend,
            arch=arch,
            problem=problem,
            reasons=dict.fromkeys(reason for refusal in refusals for reason in refusal.reasons),
            alternatives=_alternatives(problem, arch, options, directions, probe),
            direction=" and ".join(refusal.direction for refusal in refusals),
        )
    return tuple(plans)


def _choose(problem: Problem, arch: Arch, options: Options, direction: Direction, probe: bool) -> Plan:
    def plan(name: str) -> Plan:
        return make_plan(
            registry.get(name),
            problem,
            arch,
            direction=direction,
            variant=options.variant,
            deterministic=options.deterministic,
            probe=probe,
        )

    if options.backend != "auto":
        return plan(options.backend)
    if options.variant is not None:
        raise ValueError(f"variant={options.variant!r} needs a named backend; got backend='auto'")
    if not arch.is_gpu:
        return plan(REFERENCE)
    reasons: list[Reason] = []
    for name, why in preferred_order(problem, arch, direction):
        try:
            return plan(name).because(why)
        except Unsupported as refusal:  # noqa: PERF203  # a refusal is what the loop is for
            reasons += refusal.reasons
    raise Unsupported(backend="auto", arch=arch, problem=problem, reasons=dict.fromkeys(reasons), direction=direction)


def _alternatives(
    problem: Problem, arch: Arch, options: Options, directions: Sequence[Direction], probe: bool
) -> list[str]:
    """Backends that can run all directions, with their variants."""
    if options.backend == "auto":
        return [REFERENCE]
    able = []
    for name in (*BACKENDS, REFERENCE):
        asked = options._replace(backend=name, variant=None)
        if name == options.backend:
            continue
        try:
            plans = [_choose(problem, arch, asked, direction, probe) for direction in directions]
        except Unsupported:
            continue
        able.append(f"{name} (variant {', '.join(dict.fromkeys(plan.variant for plan in plans))})")
    return able
