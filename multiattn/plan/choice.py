"""The backend and variant of a call, in each direction: by name, or by recorded measurements (`choose`).

``backend="auto"`` on a GPU takes the backend that `multiattn.plan.measured` predicts the highest rate. Near what the
user measured on this very GPU (`multiattn.plan.tuning`) that comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from multiattn.operands import Options
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, REFERENCE, Direction, Plan, make_plan
from multiattn.plan.measured import preferred_order, scored_cells
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem

if TYPE_CHECKING:
    from multiattn.plan.tuning import Tuning


def choose(
    problem: Problem,
    arch: Arch,
    options: Options,
    *directions: Direction,
    probe: bool = True,
    tuning: Tuning | None = None,
) -> tuple[Plan, ...]:
    """A Plan for each direction, or `Unsupported` with every reason of all that have none.

    `options.variant` is one of the first direction. ``"auto"`` chooses each direction by its own measurements: any
    backend's forward feeds any backend's backward. `tuning` is what was measured on the GPU that this is for: only a
    caller who knows that has it.
    """
    plans, refusals = [], []
    for direction in directions:
        asked = options if direction == directions[0] else options.of_gradient
        try:
            plans.append(_choose(problem, arch, asked, direction, probe, tuning))
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


def _choose(
    problem: Problem, arch: Arch, options: Options, direction: Direction, probe: bool, tuning: Tuning | None = None
) -> Plan:
    def plan(name: str) -> Plan:
        return make_plan(
            registry.get(name),
            problem,
            arch,
            direction=direction,
            variant=options.variant,
            deterministic=options.deterministic,
            probe=probe,
            tuned=() if tuning is None else tuning.choices(problem, direction, name),
        )

    if options.backend != "auto":
        return plan(options.backend)
    if options.variant is not None:
        names = " or ".join(f"backend={name!r}" for name in BACKENDS)
        raise ValueError(f"variant={options.variant!r} needs a named backend; got backend='auto'; give {names}")
    if not arch.is_gpu:
        return plan(REFERENCE)
    reasons: list[Reason] = []
    others: list[Plan] = []
    order = preferred_order(problem, arch, direction)
    for name, why in order if tuning is None else tuning.order(problem, direction, order):
        try:
            found = plan(name)
        except Unsupported as refusal:
            reasons += refusal.reasons
            continue
        found = replace(found, why=f"{why}; {found.why}")
        if is_measured(found):
            return found
        others.append(found)
    if others:
        return min(others, key=lambda plan: _WITHOUT_THE_BEST.index(plan.backend))
    raise Unsupported(backend="auto", arch=arch, problem=problem, reasons=dict.fromkeys(reasons), direction=direction)


def _alternatives(
    problem: Problem, arch: Arch, options: Options, directions: Sequence[Direction], probe: bool
) -> list[str]:
    """Backends that can run all directions, with their variants."""
    if options.backend == "auto":
        return [REFERENCE]
    able = []
    for name in (*BACKENDS, REFERENCE):
        if name == options.backend and options.variant is None:
            continue
        asked = options._replace(backend=name, variant=None)
        try:
            plans = [_choose(problem, arch, asked, direction, probe) for direction in directions]
        except Unsupported:
            continue
        able.append(f"{name} (variant {', '.join(dict.fromkeys(plan.variant for plan in plans))})")
    return able


# ---------------------------------------------------------------- measurements


_WITHOUT_THE_BEST = ("cutile", "triton", "cuda")
"""The order of backends for what the best variants of none have code. H200, 2026-11-26, backward at D=128, N=4096: the
variants that take block masks have 424 TFLOPS in cuTile, 356 in Triton and 254 in CUDA, two passes each."""


def is_measured(plan: Plan) -> bool:
    """False where a backend's better variants, which measurements are of, have no code for its scores or blocks.

    H200, 2026-11-25, causal with softcap 30 at D=128, N=16k, when Hopper's own kernels had none: CUDA without wgmma 351
    TFLOPS, Triton without Gluon 494, cuTile, whose variant is the same, 504.
    """
    problem, arch = plan.problem, plan.arch
    if not problem.has_score and problem.blocks is None and problem.packing is None:
        return True
    if scored_cells(problem, arch, plan.direction):
        return True
    offered = registry.get(plan.backend).op(plan.direction).offered
    better = itertools.takewhile(lambda variant: variant.name != plan.variant, offered)
    usual = (variant.capability for variant in better if not variant.capability.caches)
    refused = {it.code for capability in usual for it in capability.why_not(problem, arch)}
    return not refused & {"score", "block_mask", "packing"}
