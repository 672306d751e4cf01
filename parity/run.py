"""Runs cases: one Plan at a time through `multiattn.launch`, judged by the truth and against the other backends."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from multiattn import api
from multiattn import backend as registry
from multiattn.arch import detect
from multiattn.backend import Plan, make_plan
from multiattn.problem import Problem
from multiattn.support import Reason, Unsupported
from parity.cases import Case
from parity.tensors import Inputs, Outputs
from parity.tolerance import Expected, Mismatch, Truth, deviate

Status = Literal["passed", "failed", "refused", "error"]
"""`refused`: by why_not, with reasons. `failed`: wrong numbers. `error`: something was raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A backend, with one of its variants or (None) the best that can run a case."""

    backend: str
    variant: str | None = None

    def __str__(self) -> str:
        return self.backend if self.variant is None else f"{self.backend}-{self.variant}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One result of one run, out or lse, against its budget: of max and RMS the one that uses more of it."""

    of: str
    """``max`` or ``rms``."""
    error: float
    budget: float
    ratio: float
    """Share of the budget used; inf where NaN or inf stand in wrong places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of one case on one contender."""

    case: str
    contender: Contender
    status: Status
    variant: str = ""
    config: str = ""
    seconds: float = 0.0
    out: Score | None = None
    lse: Score | None = None
    reasons: tuple[str, ...] = ()
    message: str = ""

    @property
    def ran(self) -> bool:
        """Whether there was a Plan to run."""
        return self.status != "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two backends' results of one case against each other: allowed is the sum of what each is allowed."""

    case: str
    left: str
    right: str
    out: Score
    lse: Score

    @property
    def passed(self) -> bool:
        """Whether both out and lse agree."""
        return max(self.out.ratio, self.lse.ratio) <= 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseReport:
    """Everything about one case."""

    case: Case
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]


def contenders_of(backends: Sequence[str], variants: Literal["best", "all"]) -> tuple[Contender, ...]:
    """Each backend once, or each of its variants."""
    if variants == "best":
        return tuple(Contender(backend=name) for name in backends)
    return tuple(
        Contender(backend=name, variant=variant.name)
        for name in backends
        for variant in registry.get(name).forward.variants
    )


@functools.lru_cache(maxsize=1)
def prepare_case(case: Case, device: torch.device) -> tuple[Inputs, Truth]:
    """Inputs and truth of a case, kept while the backends take turns on it; one case only, as some are huge."""
    inputs = Inputs.of(case, device)
    return inputs, Truth.of(inputs.q, inputs.k, inputs.v, causal=case.causal, scale=case.scale)


def plan_case(case: Case, contender: Contender, inputs: Inputs) -> Plan | tuple[Reason, ...]:
    """The Plan of a contender for a case, or every reason why not."""
    problem = Problem.of(inputs.q, inputs.k, inputs.v, causal=case.causal, scale=case.scale)
    backend = registry.get(contender.backend)
    try:
        return make_plan(backend, problem, detect(inputs.q.device), variant=contender.variant)
    except Unsupported as error:
        return error.reasons


def launch_plan(plan: Plan, inputs: Inputs) -> Outputs:
    """Run one Plan on a case's inputs; Mismatch if it wrote where it must not."""
    outputs = Outputs.of(plan.problem, inputs.q.device)
    api.launch(plan, inputs.q, inputs.k, inputs.v, outputs.out, outputs.lse)
    if inputs.q.is_cuda:
        torch.cuda.synchronize(inputs.q.device)
    if outputs.guards_were_written:
        raise Mismatch(f"memory around out or lse was written\n  {plan}")
    if inputs.were_written:
        inputs.restore()
        raise Mismatch(f"memory of q, k or v was written\n  {plan}")
    return outputs


def score_outputs(outputs: Outputs, truth: Truth) -> tuple[Score, Score, str]:
    """Scores of out and of lse, and what is wrong with them: empty when both are within their budgets."""
    scores, complaints = [], []
    for got, expected in ((outputs.out, truth.out), (outputs.lse, truth.lse)):
        deviation = deviate(got, expected.truth)
        of, error, budget = expected.tighter(deviation)
        scores.append(Score(of=of, error=error, budget=budget, ratio=expected.ratio(deviation)))
        complaints.append(expected.complaint(got, deviation))
    return scores[0], scores[1], "\n".join(filter(None, complaints))


def run_case(case: Case, contenders: Sequence[Contender], device: torch.device) -> CaseReport:
    """Run a case on every contender that can, and compare the best variants of different backends."""
    inputs, truth = prepare_case(case, device)
    results: list[Result] = []
    first_outputs: dict[str, Outputs] = {}
    for contender in contenders:
        result, outputs = _attempt(case, contender, inputs, truth)
        results.append(result)
        if outputs is not None:
            first_outputs.setdefault(contender.backend, outputs)
    pairs = tuple(
        Pair(
            case=case.name,
            left=left,
            right=right,
            out=_score_pair(a.out, b.out, truth.out),
            lse=_score_pair(a.lse, b.lse, truth.lse),
        )
        for (left, a), (right, b) in itertools.combinations(first_outputs.items(), 2)
    )
    return CaseReport(case=case, results=tuple(results), pairs=pairs)


def _attempt(case: Case, contender: Contender, inputs: Inputs, truth: Truth) -> tuple[Result, Outputs | None]:
    started = time.perf_counter()
    result = Result(case=case.name, contender=contender, status="passed")
    outputs = None
    try:
        plan = plan_case(case, contender, inputs)
        if not isinstance(plan, Plan):
            return replace(result, status="refused", reasons=tuple(str(reason) for reason in plan)), None
        result = replace(result, variant=plan.variant, config=str(plan.config or ""))
        outputs = launch_plan(plan, inputs)
        out, lse, complaint = score_outputs(outputs, truth)
        result = replace(result, out=out, lse=lse)
        if complaint:
            result = replace(result, status="failed", message=f"{complaint}\n  {plan}")
    except Mismatch as mismatch:
        result = replace(result, status="failed", message=str(mismatch))
    except Exception:  # a report must say what broke, of whatever kind, and go on to the other backends
        result = replace(result, status="error", message=_last_lines())
    return replace(result, seconds=time.perf_counter() - started), outputs


def _last_lines() -> str:
    """The innermost frames of the exception in flight: enough to find it, and a report stays small.

    Paths are cut to what lies below the folder on sys.path, as a report is for other machines too.
    """
    text = traceback.format_exc(limit=-6)[-2000:]
    for folder in sorted({str(Path(folder).resolve()) for folder in sys.path}, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return text


def _score_pair(left: torch.Tensor, right: torch.Tensor, expected: Expected) -> Score:
    """|left - right| against the sum of both allowances, which are those of one truth."""
    deviation = deviate(left, right)
    of, error, budget = expected.tighter(deviation)
    return Score(of=of, error=error, budget=2 * budget, ratio=expected.ratio(deviation) / 2)


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
        prepare_case.cache_clear()  # before the next one's tensors are made, not after
        yield _settle(case, contenders, functools.partial(run_case, case, contenders, device))
    prepare_case.cache_clear()


def spread(cases: Iterable[Case]) -> list[Case]:
    """Cases in an order in which those that share a kernel are far apart.

    The first of each kind compiles while others compile theirs; the rest find it in the disk cache.
    """
    kinds: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        kinds.setdefault((case.head_dim, case.dtype, case.causal, case.layout, case.size), []).append(case)
    rounds = itertools.zip_longest(*kinds.values())
    return [case for turn in rounds for case in turn if case is not None]


def _run_in_processes(
    cases: Sequence[Case], contenders: tuple[Contender, ...], device: torch.device, jobs: int
) -> Iterator[CaseReport]:
    context = multiprocessing.get_context("spawn")  # a CUDA context and torch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(run_case, case, contenders, device): case for case in cases}
        for future in as_completed(futures):
            yield _settle(futures[future], contenders, future.result)


def _settle(case: Case, contenders: Sequence[Contender], report: Callable[[], CaseReport]) -> CaseReport:
    """The report of a case, whatever becomes of it: a killed worker or a dead CUDA context is an error of each."""
    try:
        return report()
    except Exception:  # of whatever kind: without a row the case would look as if it had not been asked for
        message = "the case could not be run to its end\n" + _last_lines()
    results = (Result(case=case.name, contender=who, status="error", message=message) for who in contenders)
    return CaseReport(case=case, results=tuple(results), pairs=())
