"""Timing what passed, in turns, and what follows of it: the best of each variant beside the package's own choice."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone

import torch

from multiattn.inspect.pool import Outcome
from multiattn.layout import flops_per_pair
from multiattn.operands import Operands
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, Direction, Launcher, Plan
from multiattn.plan.toolchain import driver_version
from multiattn.plan.tuning import Sizes, TimedWay, TunedBackend, TunedCell
from multiattn.problem import Problem
from multiattn.tune.candidates import Candidate, bundled_choice
from multiattn.tune.check import check_all, check_candidate, device_works, tensors_of
from multiattn.tune.timing import Budget, Contestant, CudaClock, Timing, measure

SWEEP = Budget(rounds=5, sample_ms=3.0, warmup_ms=8.0)
FINALS = Budget(rounds=15, sample_ms=10.0, warmup_ms=20.0)
FINALISTS = 3
"""The fastest of each backend that are timed again, in longer readings, beside its bundled choice."""
MARGIN = 0.01
"""The least share by which a config must be faster than its rule's own, and a variant than the bundled one."""
TIMEOUT_S = 90.0
"""For one candidate, compilation included; the slowest compile for most of a minute on a busy host."""

Report = Callable[[Outcome[Candidate, bool]], None]
"""Told of each candidate as it has been checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The GPU, and how to work on it."""

    gpu: str
    arch: Arch
    device: str
    jobs: int
    clock: CudaClock = field(default_factory=CudaClock)

    @property
    def check(self) -> Callable[[Candidate], bool]:
        """The work of a process."""
        return functools.partial(check_candidate, device=self.device)


class LostError(RuntimeError):
    """A candidate left the device unusable for this process."""


def tune(problem: Problem, direction: Direction, wanted: Sequence[Candidate], bench: Bench, *, budget_s: float | None,
         report: Report) -> TunedCell:  # fmt: skip
    """Check and time the candidates of one problem.

    What has not been checked after `budget_s` seconds is left out.
    """
    began = time.monotonic()
    passed, failed = [], {}
    outcomes = check_all(bench.check, wanted, jobs=bench.jobs, timeout_s=TIMEOUT_S)
    for outcome in _in_time(outcomes, budget_s):
        report(outcome)
        if outcome.error:
            failed[outcome.item] = outcome.error
        else:
            passed.append(outcome.item)
    seconds = (time.monotonic() - began) * bench.jobs / max(1, len(passed) + len(failed))
    passed.sort(key=wanted.index)
    times, broken = time_candidates(passed, bench)
    return TunedCell(
        direction=direction,
        sizes=Sizes.of(problem),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        driver=driver_version(),
        versions=versions([it.backend for it in wanted]),
        seconds=round(seconds, 2),
        backends=_by_backend(problem, direction, passed, times, failed | broken, bench.arch),
    )


def _in_time(
    outcomes: Generator[Outcome[Candidate, bool], None, None], budget_s: float | None
) -> Iterator[Outcome[Candidate, bool]]:
    """The outcomes until the time is over. Nothing is compiled or launched afterwards: timing follows."""
    began = time.monotonic()
    with contextlib.closing(outcomes):
        for outcome in outcomes:
            yield outcome
            if budget_s is not None and time.monotonic() - began > budget_s:
                return


# ---------------------------------------------------------------- timed


def time_candidates(passed: Sequence[Candidate], bench: Bench) -> tuple[dict[Candidate, Timing], dict[Candidate, str]]:
    """The times of the finalists of one problem, and the errors of candidates that could not be timed.

    All take turns, in short readings; then the finalists in longer ones. Short ones, at other clocks, are no
    comparison: they only choose the finalists.
    """
    if not passed:
        return {}, {}
    first = passed[0]
    operands = tensors_of(first.problem, first.arch, first.direction, first.backend, bench.device)
    errors: dict[Candidate, str] = {}
    launchers: dict[Candidate, Launcher] = {}
    for it in passed:
        launch = _prepare(it)
        if isinstance(launch, str):
            errors[it] = launch
        else:
            launchers[it] = launch
    times = _measure(launchers, operands, bench, SWEEP, errors)
    finalists = {it: launchers[it] for it in _finalists(times)}
    return _measure(finalists, operands, bench, FINALS, errors), errors


def _prepare(it: Candidate) -> Launcher | str:
    """Its launcher, or the error of a compiler that failed here although it did not in the process that checked it."""
    plan = it.plan()
    assert isinstance(plan, Plan)  # else it had not passed
    try:
        return registry.get(it.backend).op(it.direction).prepare(plan)
    except Exception as error:  # broad: three languages' compilers; the others are timed
        return f"{type(error).__name__}: {error}"


def _measure(
    launchers: Mapping[Candidate, Launcher],
    operands: Operands,
    bench: Bench,
    budget: Budget,
    errors: dict[Candidate, str],
) -> dict[Candidate, Timing]:
    contestants = {it.name: Contestant(call=functools.partial(launch, operands)) for it, launch in launchers.items()}
    found = measure(contestants, bench.clock, budget=budget)
    if not device_works():
        raise LostError("a candidate left the GPU unusable for this process; `--backend` and `--variant` leave it out")
    times = {}
    for it in launchers:
        its = found[it.name]
        if isinstance(its, Timing):
            times[it] = its
        else:
            errors[it] = f"{type(its).__name__}: {its}"
    return times


def _finalists(times: Mapping[Candidate, Timing]) -> list[Candidate]:
    """The `FINALISTS` fastest of each backend, and of each variant the fastest and its rule's own."""
    found: dict[Candidate, None] = {}
    fastest_first = sorted(times, key=lambda it: times[it].time_ms)
    for name in dict.fromkeys(it.backend for it in times):
        found |= dict.fromkeys([it for it in fastest_first if it.backend == name][:FINALISTS])
    for way in dict.fromkeys((it.backend, it.variant) for it in times):
        mine = [it for it in fastest_first if (it.backend, it.variant) == way]
        found |= dict.fromkeys([mine[0], *(it for it in mine if it.config is None)])
    return list(found)


# ---------------------------------------------------------------- chosen


def _by_backend(
    problem: Problem,
    direction: Direction,
    passed: Sequence[Candidate],
    times: Mapping[Candidate, Timing],
    failed: Mapping[Candidate, str],
    arch: Arch,
) -> dict[str, TunedBackend]:
    return {
        name: chosen(
            bundled_choice(registry.get(name), problem, arch, direction),
            {it: its for it, its in times.items() if it.backend == name},
            {it: error for it, error in failed.items() if it.backend == name},
            timed=sum(it.backend == name and it not in failed for it in passed),
        )
        for name in BACKENDS
        if any(it.backend == name for it in (*times, *failed))
    }


def chosen(
    bundled: str | None, times: Mapping[Candidate, Timing], failed: Mapping[Candidate, str], *, timed: int
) -> TunedBackend:
    """The best of each variant, fastest first, given the variant that the package's rules choose.

    `timed` candidates were timed; `times` are those of the finalists. A rule's own config stays where no other is
    faster by `MARGIN`, and so does the bundled variant.
    """
    best = []
    own_of_bundled = None
    for variant in dict.fromkeys(it.variant for it in times):
        mine = sorted((it for it in times if it.variant == variant), key=lambda it: times[it].time_ms)
        own = next((it for it in mine if it.config is None), None)
        is_faster = own is None or times[mine[0]].time_ms < times[own].time_ms * (1 - MARGIN)
        best.append(mine[0] if is_faster or own is None else own)
        own_of_bundled = own if variant == bundled else own_of_bundled

    def rank(it: Candidate) -> float:
        return times[it].time_ms * ((1 - MARGIN) if it.variant == bundled else 1.0)

    best.sort(key=rank)
    return TunedBackend(
        ways=tuple(_way(it, times[it]) for it in best),
        bundled=() if own_of_bundled is None else (_way(own_of_bundled, times[own_of_bundled]),),
        candidates=timed,
        failed={it.name: error.splitlines()[0][:200] for it, error in failed.items()},
    )


def _way(it: Candidate, timing: Timing) -> TimedWay:
    plan = it.plan()
    assert isinstance(plan, Plan)
    return TimedWay(
        variant=it.variant,
        config=None if it.config is None else asdict(it.config),
        shown=str(plan.config or ""),
        time_ms=round(timing.time_ms, 5),
        tflops=float(f"{flops_of(it.problem, it.direction) / timing.time_ms / 1e9:.4g}"),
        spread=round((timing.high_ms - timing.low_ms) / timing.time_ms, 4),
    )


def flops_of(problem: Problem, direction: Direction) -> int:
    """FLOP of a problem, as every table counts them: visible pairs only."""
    per_pair = flops_per_pair(problem.head_dim, problem.head_dim_v, backward=direction == "backward")
    return problem.batch * problem.heads_q * problem.visible_pairs * per_pair


# ---------------------------------------------------------------- the machine


def versions(backends: Sequence[str]) -> dict[str, str]:
    """Versions of Python, torch and what the backends stand on; tools, which have paths, are left out."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    for name in dict.fromkeys(backends):
        found |= {key: it for key, it in registry.get(name).versions().items() if it is not None and "/" not in it}
    return dict(sorted(found.items()))
