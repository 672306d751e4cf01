"""One launch: a Plan for a case, run through `multiattn.launch` or `launch_backward` on tensors that are watched.

Whatever the launch writes beside its outputs, or to its inputs, is a Mismatch; whatever it leaves unwritten is NaN.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.utils.deterministic

import multiattn
from multiattn.operands import Operands
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect
from multiattn.plan.backend import BACKENDS, Direction, Plan, make_plan
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem
from multiattn.run.execute import gradient_of_sinks, gradients_of_captured
from parity.case import Case
from parity.cases import CASES, suite
from parity.gradients import GradTruth
from parity.memory import synchronize
from parity.results import Contender
from parity.tensors import Gradients, Inputs, Outputs, Saved, Upstream
from parity.tolerance import Mismatch, Truth, operands_and_problem
from parity.turns import Deal, deal

CPU = torch.device("cpu")


@functools.lru_cache(maxsize=1)
def prepare_case(case: Case, device: torch.device) -> tuple[Inputs, Truth]:
    """Inputs and truth of a case, kept while the backends take turns on it; one case only, as some are huge."""
    inputs = Inputs.of(case, device)
    return inputs, Truth.of(inputs.q, inputs.k, inputs.v, **_options(case, inputs))


@functools.lru_cache(maxsize=1)
def prepare_gradients(case: Case, device: torch.device) -> tuple[Upstream, GradTruth]:
    """The inputs of the backwards of a case and their truth, kept as `prepare_case` keeps."""
    inputs, _ = prepare_case(case, device)
    upstream = Upstream.of(case, problem_of(case, inputs), device)
    tensors = inputs.q, inputs.k, inputs.v, upstream.dout, upstream.dlse
    return upstream, GradTruth.of(*tensors, **_options(case, inputs), slots=inputs.slots)


def forget() -> None:
    """Let go of the tensors that are kept, before the next case's are made."""
    prepare_case.cache_clear()
    prepare_gradients.cache_clear()
    save_forward.cache_clear()


def problem_of(case: Case, inputs: Inputs) -> Problem:
    """The Problem of a case's tensors."""
    asked = {**_options(case, inputs), "slots": inputs.slots, "deterministic": case.deterministic}
    return operands_and_problem(inputs.q, inputs.k, inputs.v, **asked)[1]


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    return {
        "causal": case.causal,
        "window": case.window,
        "scale": case.scale,
        "sinks": inputs.sinks,
        "score": inputs.score,
        "blocks": inputs.blocks,
        "packed": inputs.packed,
        **({} if inputs.cached is None else {"cached": inputs.cached}),  # of forwards alone
    }


def plan_case(case: Case, contender: Contender, inputs: Inputs) -> Plan | tuple[Reason, ...]:
    """The Plan of a contender for a case, or every reason why not."""
    if contender.turn is not None:
        return _plan_in_turn(case, contender, inputs)
    backend, arch = registry.get(contender.backend), detect(inputs.q.device)
    options = {"direction": contender.direction, "variant": contender.variant}
    try:
        return make_plan(backend, problem_of(case, inputs), arch, **options)  # type: ignore[arg-type]
    except Unsupported as error:
        return error.reasons


def has_turn(case: Case, contender: Contender, device: torch.device) -> bool:
    """False where a contender would have the case for one more time than it is dealt to its backend."""
    if not contender.turn or device.type != "cpu":
        return True
    return dealt(contender.backend, contender.direction).plan(case, contender.turn) is not None


def waits_for_night(case: Case, contender: Contender, device: torch.device) -> bool:
    """True for what a CPU runs at night only: it is slow, and shows what another case shows."""
    if contender.turn is None or device.type != "cpu":
        return False
    return case.name in dealt(contender.backend, contender.direction).at_night


def _plan_in_turn(case: Case, contender: Contender, inputs: Inputs) -> Plan | tuple[Reason, ...]:
    """On a CPU the plan that is dealt; on a GPU, or of a case that is none of the suite's, a variant by its rule."""
    if inputs.q.device.type == "cpu" and case in CASES:
        plan = dealt(contender.backend, contender.direction).plan(case, contender.turn or 0)
        return plan or plan_case(case, replace(contender, turn=None), inputs)
    op = registry.get(contender.backend).op(contender.direction)
    names = op.spanning or [variant.name for variant in op.variants]
    one_by_one = [replace(contender, variant=name, turn=None) for name in names]
    plans = [plan_case(case, one, inputs) for one in one_by_one]
    able = [plan for plan in plans if isinstance(plan, Plan)]
    return able[case.turn % len(able)] if able else plans[0]


@functools.cache
def dealt(backend: str, direction: Direction) -> Deal:
    """The turns of a backend on the cases of a CPU."""
    return deal(backend, direction, [it for it in _problems() if direction == "forward" or not it[0].no_backward])


@functools.cache
def _problems() -> tuple[tuple[Case, Problem], ...]:
    return tuple((case, problem_of(case, Inputs.of(case, CPU))) for case in suite(CPU))


def launch_plan(plan: Plan, inputs: Inputs) -> Outputs:
    """Run one forward Plan on a case's inputs; Mismatch if it wrote where it must not."""
    outputs = Outputs.of(plan.problem, inputs.q.device)
    given = inputs.q, inputs.k, inputs.v, outputs.out, outputs.lse
    with poisoned_workspaces() if plan.workspace_bytes else contextlib.nullcontext():
        multiattn.launch(plan, *given, sinks=inputs.sinks, captured=inputs.captured, indices=inputs.indices)
    synchronize(inputs.q.device)
    if outputs.guards_were_written:
        raise Mismatch(f"memory around out or lse was written\n  {plan}")
    if inputs.were_written:
        inputs.restore()
        raise Mismatch(f"memory of q, k, v or sinks was written\n  {plan}")
    return outputs


def launch_gradients(plan: Plan, inputs: Inputs, saved: Saved, upstream: Upstream) -> Gradients:
    """Run one backward Plan on a case's inputs and what a forward saved; Mismatch if it wrote where it must not."""
    gradients = Gradients.of(plan.problem, inputs.q.device)
    given = inputs.q, inputs.k, inputs.v, saved.out, saved.lse, upstream.dout, upstream.dlse
    with poisoned_workspaces():
        multiattn.launch_backward(
            plan, *given, *gradients.of_qkv, sinks=inputs.sinks, delta=gradients.delta, captured=inputs.captured,
            dcaptured=gradients.sums, indices=inputs.indices,
        )  # fmt: skip
    operands = Operands(
        *given, sinks=inputs.sinks, delta=gradients.delta, captured=inputs.captured, dcaptured=gradients.sums,
        indices=inputs.indices,
    )  # fmt: skip
    if gradients.delta is not None:
        gradients = replace(gradients, dsinks=gradient_of_sinks(operands))
    of_captured = gradients_of_captured(plan.problem.score, operands)
    gradients = replace(gradients, dcaptured=tuple(it for it in of_captured if it is not None))
    synchronize(inputs.q.device)
    if gradients.guards_were_written:
        raise Mismatch(f"memory around a gradient was written\n  {plan}")
    for names, watched in (("q, k, v or sinks", inputs), ("out or lse", saved), ("dout or dlse", upstream)):
        if watched.were_written:
            watched.restore()
            raise Mismatch(f"memory of {names} was written\n  {plan}")
    return gradients


@functools.lru_cache(maxsize=len(BACKENDS))
def save_forward(case: Case, backend: str, device: torch.device) -> Saved | tuple[Reason, ...]:
    """out and lse of a backend's best forward, or every reason why it has none; Mismatch if they are wrong."""
    inputs, truth = prepare_case(case, device)
    plan = plan_case(case, Contender(backend=backend), inputs)
    if not isinstance(plan, Plan):
        return plan
    outputs = launch_plan(plan, inputs)
    for got, expected in zip(outputs.all, truth.of_plan(plan), strict=True):
        expected.check(got, plan)
    return Saved.of(outputs)


deterministic: Any = torch.utils.deterministic
"""Its one flag is of a class that PyTorch makes at run time, which no type checker knows."""


@contextlib.contextmanager
def poisoned_workspaces() -> Iterator[None]:
    """Within it PyTorch fills with NaN whatever is allocated and not written: a launcher's ``torch.empty``."""
    mode, was_filling = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(deterministic|CUBLAS_WORKSPACE_CONFIG).*")
            yield
    finally:
        deterministic.fill_uninitialized_memory = was_filling
        torch.set_deterministic_debug_mode(mode)
