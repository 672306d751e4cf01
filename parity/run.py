"""Runs cases: each contender's launch judged by the truth and against the other backends', in many processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from multiattn.plan import backend as registry
from multiattn.plan.backend import DIRECTIONS, REFERENCE, Direction, Plan
from parity.case import Case
from parity.cases import is_cross_fed
from parity.launch import (
    dealt,
    forget,
    has_turn,
    launch_gradients,
    launch_plan,
    plan_case,
    prepare_case,
    prepare_gradients,
    waits_for_night,
)
from parity.memory import synchronize
from parity.results import CaseReport, Contender, Pair, Result, Score
from parity.tensors import Gradients, Inputs, Outputs, Saved
from parity.tolerance import Expected, Mismatch, deviate

T = TypeVar("T", Outputs, Gradients)

Variants = Literal["best", "turns", "all", "every"]
VARIANTS: tuple[Variants, ...] = ("best", "turns", "all", "every")
"""The variants of each backend that run: the best for each case, one whose turn it is, or all that can run the case.

In turns takes no longer than the best alone; on a CPU configs take turns, too (`parity.turns`). Where a backend has a
hundred variants, turns and all go through those that span them (`Op.spanning`), and only `every` through every one:
hours on a CPU.
"""


def contenders_of(
    backends: Sequence[str],
    variants: Variants,
    directions: Sequence[Direction] = DIRECTIONS,
    *,
    all_turns: bool = False,
) -> tuple[Contender, ...]:
    """In each direction each backend once, or each of its variants. In turns once, or with `all_turns` (on a CPU) as
    often as some case is dealt to it."""
    return tuple(
        Contender(backend=name, direction=direction, **which)
        for direction in directions
        for name in backends
        for which in _contenders(name, direction, variants, all_turns)
    )


def _contenders(backend: str, direction: Direction, which: Variants, all_turns: bool) -> list[dict[str, Any]]:
    """The variants or turns of a backend; one without either is the best that can run a case."""
    if which == "best":
        return [{}]
    if which == "turns":
        turns = dealt(backend, direction).turns if all_turns and backend != REFERENCE else 1
        return [{"turn": turn} for turn in range(turns)]
    op = registry.get(backend).op(direction)
    names = tuple(variant.name for variant in op.variants)
    return [{"variant": name} for name in (names if which == "every" else op.spanning or names)]


def feeders_of(case: Case, backend: str, others: Iterable[str], device: torch.device) -> tuple[str, ...]:
    """Whose out and lse a backend's backward is given: its own, and where a case is cross-fed all others', too."""
    return (backend, *(name for name in others if name != backend and is_cross_fed(case, device)))


def run_case(case: Case, contenders: Sequence[Contender], device: torch.device) -> CaseReport:
    """Run a case on every contender that can, and compare the best variants of different backends."""
    able = [it for it in contenders if has_turn(case, it, device) and not waits_for_night(case, it, device)]
    forwards = [contender for contender in able if contender.direction == "forward"]
    backwards = [contender for contender in able if contender.direction == "backward"]
    results, outputs = _run_forwards(case, forwards, device)
    pairs = _pairs(case, "forward", outputs, prepare_case(case, device)[1].all)
    if case.no_backward:
        results += [
            Result(case=case.name, contender=who, status="excluded", reasons=(case.no_backward,)) for who in backwards
        ]
    elif backwards:
        more, gradients = _run_backwards(case, backwards, outputs, device)
        results += more
        pairs += _pairs(case, "backward", gradients, prepare_gradients(case, device)[1].all)
    return CaseReport(case=case, results=tuple(results), pairs=tuple(pairs))


def _run_forwards(
    case: Case, contenders: Sequence[Contender], device: torch.device
) -> tuple[list[Result], dict[str, Outputs]]:
    """Every contender's result, and per backend what its first variant that passed has written."""
    results: list[Result] = []
    outputs: dict[str, Outputs] = {}
    for contender in contenders:
        result, written = _attempt_forward(case, contender, device)
        results.append(result)
        if written is not None and (contender.backend not in outputs):
            outputs[contender.backend] = written
    return results, outputs


def _run_backwards(
    case: Case, contenders: Sequence[Contender], outputs: Mapping[str, Outputs], device: torch.device
) -> tuple[list[Result], dict[str, Gradients]]:
    """Every contender's results, one for each that feeds it, and per backend its first variant's gradients."""
    inputs, _ = prepare_case(case, device)
    upstream, truth = prepare_gradients(case, device)
    results: list[Result] = []
    gradients: dict[str, Gradients] = {}
    saved = {who.backend: _save(case, who.backend, outputs, device) for who in contenders}
    for contender in contenders:
        for feeder in feeders_of(case, contender.backend, saved, device):
            given = saved[feeder]
            if isinstance(given, Result):  # why there is nothing to feed it with
                results.append(replace(given, contender=contender, fed_by=feeder))
                continue
            blank = Result(case=case.name, contender=contender, status="passed", fed_by=feeder)
            launch = functools.partial(launch_gradients, inputs=inputs, saved=given, upstream=upstream)
            result, written = _attempt(case, blank, inputs, launch, lambda plan: truth.all)
            results.append(result)
            if written is not None and feeder == contender.backend:
                gradients.setdefault(contender.backend, written)
    return results, gradients


def _save(case: Case, backend: str, outputs: Mapping[str, Outputs], device: torch.device) -> Saved | Result:
    """out and lse of a backend's forward, which runs if it has not yet; or the Result that says why there is none."""
    if backend in outputs:
        return Saved.of(outputs[backend])
    result, written = _attempt_forward(case, Contender(backend=backend), device)
    if written is not None and result.status == "passed":
        return Saved.of(written)
    return replace(result, scores=(), message=f"its forward, which feeds it: {result.message}")


def _attempt_forward(case: Case, contender: Contender, device: torch.device) -> tuple[Result, Outputs | None]:
    inputs, truth = prepare_case(case, device)
    blank = Result(case=case.name, contender=contender, status="passed")
    return _attempt(case, blank, inputs, functools.partial(launch_plan, inputs=inputs), truth.of_plan)


def _attempt(
    case: Case,
    blank: Result,
    inputs: Inputs,
    launch: Callable[[Plan], T],
    truth_of: Callable[[Plan], Sequence[Expected]],
) -> tuple[Result, T | None]:
    """The outcome of launching `blank`'s contender, and the tensors that it wrote."""
    started = time.perf_counter()
    result, written = blank, None
    try:
        plan = plan_case(case, blank.contender, inputs)
        if not isinstance(plan, Plan):
            return replace(result, status="refused", reasons=tuple(str(reason) for reason in plan)), None
        result = replace(result, variant=plan.variant, config=str(plan.config or ""))
        written = launch(plan)
        scores, complaint = score(written.all, truth_of(plan))
        result = replace(result, scores=scores)
        if complaint:
            result = replace(result, status="failed", message=f"{complaint}\n  {plan}")
    except Mismatch as mismatch:
        result = replace(result, status="failed", message=str(mismatch))
    except Exception:  # a report must say what broke, of whatever kind, and go on to the other backends
        result = replace(result, status="error", message=_last_lines())
    return replace(result, seconds=time.perf_counter() - started), written


def score(tensors: Sequence[torch.Tensor], truth: Sequence[Expected]) -> tuple[tuple[Score, ...], str]:
    """A score of each tensor, and what is wrong with them: empty when all are within their budgets."""
    scores, complaints = [], []
    for got, expected in zip(tensors, truth, strict=True):
        deviation = deviate(expected.judge(got), expected.truth)
        of, error, budget = expected.tighter(deviation)
        ratio = expected.ratio(deviation)
        scores.append(Score(tensor=expected.name, of=of, error=error, budget=budget, ratio=ratio))
        complaints.append(expected.complaint(got, deviation))
    return tuple(scores), "\n".join(filter(None, complaints))


def _pairs(case: Case, direction: Direction, written: Mapping[str, T], truth: Sequence[Expected]) -> list[Pair]:
    """Every two backends against each other."""
    return [
        Pair(
            case=case.name,
            left=left,
            right=right,
            direction=direction,
            scores=tuple(_score_pair(one, other, each) for one, other, each in zip(a.all, b.all, truth, strict=True)),
        )
        for (left, a), (right, b) in itertools.combinations(written.items(), 2)
    ]


def _score_pair(left: torch.Tensor, right: torch.Tensor, expected: Expected) -> Score:
    """|left - right| against the sum of both allowances, which are those of one truth."""
    deviation = deviate(expected.judge(left), expected.judge(right))
    of, error, budget = expected.tighter(deviation)
    ratio = expected.ratio(deviation) / 2
    return Score(tensor=expected.name, of=of, error=error, budget=2 * budget, ratio=ratio)


def _last_lines() -> str:
    """The innermost frames of the exception in flight: enough to find it, and a report stays small.

    Paths are cut to what lies below the folder on sys.path, as a report is for other machines too.
    """
    text = traceback.format_exc(limit=-6)[-2000:]
    for folder in sorted({str(Path(folder).resolve()) for folder in sys.path}, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return text


def run_cases(
    cases: Sequence[Case], contenders: Sequence[Contender], device: torch.device, *, jobs: int
) -> Iterator[CaseReport]:
    """Run every case, `jobs` processes at a time, and yield each report as it comes.

    Huge cases run last and alone: they want a GPU's whole memory. A worker process pays for compilation in parallel
    with the others, which is most of a GPU's run.
    """
    contenders = tuple(contenders)
    shared = spread(case for case in cases if case.size != "huge")
    alone = [case for case in cases if case.size == "huge"]
    if jobs == 1:
        alone = shared + alone
    else:
        yield from _run_in_processes(shared, contenders, device, jobs)
    for case in alone:
        forget()  # before the next one's tensors are made, not after
        yield _settle(case, contenders, functools.partial(run_case, case, contenders, device))
    forget()


def spread(cases: Iterable[Case]) -> list[Case]:
    """Cases in an order in which those that share a kernel are far apart.

    The first of each kind compiles while others compile theirs; the rest find it in the disk cache.
    """
    kinds: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        kinds.setdefault((case.head_dim, case.width_v, case.dtype, case.causal, case.layout, case.size), []).append(
            case
        )
    rounds = itertools.zip_longest(*kinds.values())
    return [case for turn in rounds for case in turn if case is not None]


def _run_in_processes(
    cases: Sequence[Case], contenders: tuple[Contender, ...], device: torch.device, jobs: int
) -> Iterator[CaseReport]:
    context = multiprocessing.get_context("spawn")  # a CUDA context and torch's threads do not survive a fork
    lost: set[int] = set()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {pool.submit(_run_in_worker, case, contenders, device): case for case in cases}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                case, error = waiting.pop(future), future.exception()
                if isinstance(error, DeviceLostError):
                    lost.add(error.process)
                    if len(lost) < jobs:  # another process may still run it
                        with contextlib.suppress(BrokenProcessPool):
                            waiting[pool.submit(_run_in_worker, case, contenders, device)] = case
                            continue
                yield _settle(case, contenders, future.result)


class DeviceLostError(RuntimeError):
    """An earlier case has broken the device for this process, whose id it has; no case can run in it any more."""

    def __init__(self, process: int) -> None:
        super().__init__(process)
        self.process = process


LOST_PAUSE_S = 1.0
"""How long a process that can run nothing waits before it says so, lest it be the first to ask for every next case."""


def _run_in_worker(case: Case, contenders: Sequence[Contender], device: torch.device) -> CaseReport:
    """`run_case`, if an illegal access of an earlier case has left this process a device. Else DeviceLostError."""
    try:
        synchronize(device)
    except RuntimeError:
        time.sleep(LOST_PAUSE_S)
        raise DeviceLostError(os.getpid()) from None
    return run_case(case, contenders, device)


def _settle(case: Case, contenders: Sequence[Contender], report: Callable[[], CaseReport]) -> CaseReport:
    """The report of a case, whatever becomes of it: a killed worker or a dead CUDA context is an error of each."""
    try:
        return report()
    except Exception:  # of whatever kind: without a row the case would look as if it had not been asked for
        message = "the case could not be run to its end\n" + _last_lines()
    results = (Result(case=case.name, contender=who, status="error", message=message) for who in contenders)
    return CaseReport(case=case, results=tuple(results), pairs=())
