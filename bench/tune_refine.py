"""The second step of a sweep: from the fastest candidate on to neighbours that differ in one field, while they gain."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.arguments import positive
from bench.matrix import Cell
from bench.run import Machine
from bench.timing import Budget
from bench.tune import Trial, prepare, ranked, time_cell, tune
from multiattn import backend as registry
from multiattn.arguments import count
from multiattn.backend import Plan, plan_variant
from multiattn.config import Config

GAIN = 1.005
"""A step is taken where it gains more than readings scatter."""
_STEPS = (64, 16, 1)
"""Of whole numbers: the two largest that are no larger than the number."""
_SHARES = (1 / 16, 1 / 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """How to search: the limits of `bench.tune.tune`, and a clock."""

    machine: Machine
    jobs: int
    timeout_s: float
    budget: Budget
    spills: bool = False
    say: Callable[[str], None] = print
    now: Callable[[], float] = time.monotonic


def sweep(
    backend: str, cells: Sequence[Cell], variants: Sequence[str], search: Search, seconds: float
) -> Iterator[tuple[Cell, list[Trial]]]:
    """Yield the trials of each cell as it is done, refined in `seconds` of all cells together where that is not 0."""
    swept = tune(
        backend,
        cells,
        search.machine,
        variants=variants,
        jobs=search.jobs,
        timeout_s=search.timeout_s,
        budget=search.budget,
        spills=search.spills,
        say=search.say,
    )
    for done, (cell, trials) in enumerate(swept):
        began = search.now()
        refined = refine(cell, trials, search, seconds / (len(cells) - done)) if seconds > 0 else trials
        seconds -= min(search.now() - began, seconds)
        yield cell, refined


def refine(cell: Cell, trials: Sequence[Trial], search: Search, seconds: float) -> list[Trial]:
    """`trials` of one cell, with what descent by coordinates adds within `seconds`; fastest first.

    The steps end where no neighbour of the fastest gains, or when the time is up.
    """
    until = search.now() + seconds
    known = {(trial.variant, trial.config): trial for trial in trials}
    best = next((trial for trial in ranked(trials) if trial.plan is not None and trial.tflops), None)
    steps = 0
    while best is not None and search.now() < until:
        assert best.plan is not None
        plans = [plan for plan in neighbours(best.plan) if (plan.variant, plan.config) not in known]
        ready = []
        for trial in _prepared(cell, plans, search, until):
            known[trial.variant, trial.config] = trial
            ready += [] if trial.failure else [trial]
        if not ready:
            break
        timed = [it for it in time_cell(cell, [best.untimed(), *ready], search.machine, search.budget) if it.variant]
        known |= {(trial.variant, trial.config): trial for trial in timed}
        now_best, fastest = timed[0], ranked(timed)[0]
        if not now_best.tflops or not fastest.tflops or fastest.tflops < GAIN * now_best.tflops:
            break
        best, steps = fastest, steps + 1
        search.say(f"{cell.key}: step {steps}: {best.name} {fastest.tflops / now_best.tflops:.3f}x")
    return _final(cell, list(known.values()), search)


def _prepared(cell: Cell, plans: Sequence[Plan], search: Search, until: float) -> Iterator[Trial]:
    """Those that are ready in time."""
    timeout_s = max(min(search.timeout_s, until - search.now()), 1.0)
    wanted = [(cell, plan) for plan in plans]
    for trial in prepare(wanted, search.machine, jobs=search.jobs, timeout_s=timeout_s, spills=search.spills):
        yield trial
        if search.now() > until:
            return


def _final(cell: Cell, trials: Sequence[Trial], search: Search) -> list[Trial]:
    """Everything timed once more, all in the same turns: rates of different steps do not compare."""
    timed = [trial.untimed() for trial in trials if trial.tflops and trial.variant]
    failed = [trial for trial in trials if not trial.tflops and trial.variant]
    return ranked([*time_cell(cell, timed, search.machine, search.budget), *failed])


# ---------------------------------------------------------------- neighbours


def neighbours(plan: Plan) -> Iterator[Plan]:
    """The Plans whose config differs from that of `plan` in one field, and fits."""
    config, variant = plan.config, registry.variant_of(plan)
    if config is None:
        return
    backend = registry.get(plan.backend)
    for field in fields(config):
        for value in _near(plan, config, field.name):
            other = replace(config, **{field.name: value})
            made = plan_variant(backend, variant, plan.problem, plan.arch, other, direction=plan.direction)
            if isinstance(made, Plan):
                yield made


def _near(plan: Plan, config: Config, name: str) -> Sequence[Any]:
    """Values beside that of a field: the other truth, the other words, a step, a halving, a doubling."""
    value = getattr(config, name)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        steps = [step for step in _STEPS if step <= value][:2]
        near = [value + sign * step for step in steps for sign in (-1, 1)]
        return [it for it in dict.fromkeys((*near, value // 2, 2 * value)) if it > 0]
    if isinstance(value, float):
        return [value + sign * share for share in _SHARES for sign in (-1, 1) if value + sign * share >= 0]
    return [word for word in _words(plan, config, name) if word != value] if isinstance(value, str) else ()


def _words(plan: Plan, config: Config, name: str) -> list[str]:
    """What a field of text may say: what its variant answers to a word that it cannot know."""
    unknown: dict[str, Any] = {name: "?"}
    reasons = registry.variant_of(plan).fits(plan.problem, plan.arch, replace(config, **unknown))
    return [word for it in reasons if it.got == f"{name}=?" for word in it.allowed.split(", ")]


# ---------------------------------------------------------------- arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Of ``tune``: its limits, the second step, and the rules."""
    command.add_argument("--timeout", type=positive, default=60.0, metavar="S", help="seconds for one (%(default)s)")
    command.add_argument("--top", type=count, default=12, help="places to print (%(default)s)")
    command.add_argument("--spills", action="store_true", help="time also what spills in its hot loops")
    command.add_argument("--refine", action="store_true", help="go on from the fastest, one field at a time")
    command.add_argument(
        "--budget-s", type=positive, default=600.0, metavar="S", help="seconds of --refine in total (%(default)s)"
    )
    command.add_argument(
        "--finals", type=count, default=0, metavar="N", help="time the N fastest of like cells again, alone and long"
    )
    command.add_argument("--rules", action="store_true", help="keep the sweeps in bench/results, and write their rules")
    command.add_argument(
        "--rules-from", type=Path, nargs="*", metavar="FILE", help="no sweep: the rules of these; default all kept"
    )
    command.add_argument("--check", action="store_true", help="write nothing; exit 1 where the rules kept are stale")
