"""Sweeping configs: every candidate of a backend compiled and checked in a process of its own, then timed in turns.

The processes warm the disk caches of the compilers, so that the timing process compiles next to nothing; one that
hangs, dies or takes the device down is a line of the ranking. cuDNN runs in the same turns, as a yardstick.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate

from bench.contenders import Contender, config_data, contender_of
from bench.environment import device_works
from bench.flops import cell_flops, rate_text, tflops
from bench.matrix import Cell
from bench.peers import find_peers
from bench.run import Machine
from bench.timing import Budget, Contestant, Timing, measure
from bench.truth import Truths, check, truth_of
from multiattn import backend as registry
from multiattn.arch import Arch
from multiattn.backend import Direction, Plan, make_plan, plan_variant
from multiattn.problem import Problem
from multiattn.targets.pool import Outcome, run_isolated

YARDSTICK = "sdpa-cudnn"
_SAVED = ("tflops", "spread", "prepare_s", "failure")
TUNE_SEQ = 4096
"""The length that is swept unless others are asked for: a rule for long sequences is what most users run."""

TUNE_BUDGET = Budget(rounds=5, sample_ms=3.0, warmup_ms=8.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One candidate in one cell: TFLOPS, or why there are none. `plan` None is the yardstick."""

    cell: Cell
    name: str
    plan: Plan | None = None
    tflops: float | None = None
    spread: float = 0.0
    prepare_s: float = 0.0
    """Seconds to compile and check, in its own process."""
    failure: str = ""


def candidate_plans(backend_name: str, cell: Cell, arch: Arch, variants: Sequence[str] = ()) -> list[Plan | Trial]:
    """A Plan per candidate config of each variant (of `variants`, or all offered), the rules' own choice among them.

    A candidate that does not fit is a Trial with the reasons.
    """
    backend = registry.get(backend_name)
    direction = swept(cell)
    op = backend.op(direction)
    found: list[Plan | Trial] = []
    for variant in op.variants:
        if variant.name not in (variants or [offered.name for offered in op.offered]):
            continue
        chosen = plan_variant(backend, variant, cell.problem, arch, direction=direction)
        if not isinstance(chosen, Plan):
            name = f"{backend_name}/{variant.name}"
            found.append(Trial(cell=cell, name=name, failure="; ".join(map(str, chosen))))
        configs = dict.fromkeys(op.candidates(variant, cell.problem, arch))
        if isinstance(chosen, Plan):
            configs.pop(chosen.config, None)  # type: ignore[arg-type]
            found.append(chosen)
        for config in configs:
            plan = plan_variant(backend, variant, cell.problem, arch, config, direction=direction)
            name = f"{backend_name}/{variant.name} {config}"
            found.append(
                plan if isinstance(plan, Plan) else Trial(cell=cell, name=name, failure="; ".join(map(str, plan)))
            )
    return found


def swept(cell: Cell) -> Direction:
    """Whose configs are swept: where a backward is timed with its forward, the backward's."""
    return "forward" if cell.direction == "fwd" else "backward"


@functools.lru_cache(maxsize=1)
def _cell_truth(cell: Cell, device: str) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Truths]:
    """Tensors of a cell and the truth of its last batch entry."""
    tensors = cell.tensors(device)
    truth = truth_of(cell, tensors, last_entry=True)
    torch.cuda.empty_cache()  # a dozen processes do this at once
    return tensors, truth


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    cell: Cell
    plan: Plan
    device: str


def check_candidate(task: _Task) -> bool:
    """Compile and launch one Plan and check its last batch entry; Mismatch where it is wrong."""
    tensors, truth = _cell_truth(task.cell, task.device)
    results = _contender(task.plan, tensors, task.cell).output()
    check({name: result[-1:] for name, result in results.items()}, truth, task.plan)
    return True


def _contender(plan: Plan, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], cell: Cell) -> Contender:
    """A candidate ready to launch; a backward is fed by its backend's own best forward."""
    plan = _fitted(plan, tensors)
    forward = None
    if plan.direction == "backward":
        forward = make_plan(registry.get(plan.backend), plan.problem, plan.arch)
    return contender_of(plan, tensors, cell, forward)


def _fitted(plan: Plan, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Plan:
    """The Plan for these very tensors: their problem, checked to be the cell's."""
    problem = Problem.of(*tensors, causal=plan.problem.causal)
    assert problem == plan.problem, f"the cell's tensors are not its problem: {problem} and {plan.problem}"
    return plan


def tune(
    backend: str,
    cells: Sequence[Cell],
    machine: Machine,
    *,
    variants: Sequence[str] = (),
    jobs: int,
    timeout_s: float,
    budget: Budget = TUNE_BUDGET,
    say: Callable[[str], None] = print,
) -> Iterator[tuple[Cell, list[Trial]]]:
    """Yield the trials of each cell, fastest first, as it is done. All candidates are compiled first, cell by cell."""
    device = str(machine.device)
    failures: dict[Cell, list[Trial]] = {cell: [] for cell in cells}
    tasks = []
    for cell in cells:
        for found in candidate_plans(backend, cell, machine.arch, variants):
            if isinstance(found, Plan):
                tasks.append(_Task(cell=cell, plan=found, device=device))
            else:
                failures[cell].append(found)
    say(f"{backend}: {len(tasks)} candidates in {len(cells)} cells")
    ready: dict[Cell, list[tuple[Plan, float]]] = {cell: [] for cell in cells}
    for done, outcome in enumerate(
        run_isolated(check_candidate, tasks, jobs=jobs, timeout_s=timeout_s, keep=device_works), start=1
    ):
        task = outcome.item
        if outcome.error:
            failures[task.cell].append(_failed(outcome))
        else:
            ready[task.cell].append((task.plan, outcome.seconds))
        if done % 20 == 0 or done == len(tasks):
            say(f"{backend}: {done} of {len(tasks)} compiled and checked")
    for cell in cells:
        trials = _time_cell(cell, ready[cell], machine, budget)
        yield cell, sorted([*trials, *failures[cell]], key=lambda trial: -(trial.tflops or 0.0))


def _failed(outcome: Outcome[_Task, bool]) -> Trial:
    task = outcome.item
    return Trial(
        cell=task.cell, name=_name(task.plan), plan=task.plan, prepare_s=outcome.seconds, failure=outcome.error
    )


def _time_cell(cell: Cell, ready: Sequence[tuple[Plan, float]], machine: Machine, budget: Budget) -> list[Trial]:
    tensors = cell.tensors(machine.device)
    trials: dict[str, Trial] = {}
    contestants: dict[str, Contestant] = {}
    for plan, seconds in ready:
        trial = Trial(cell=cell, name=_name(plan), plan=plan, prepare_s=seconds)
        try:
            contestants[trial.name] = _contender(plan, tensors, cell).launch
            trials[trial.name] = trial
        except Exception as error:  # broad: one candidate's failure is its line of the ranking
            trials[trial.name] = replace(trial, failure=f"{type(error).__name__}: {error}")
    (peer,) = find_peers((YARDSTICK,))
    yardstick = peer.prepare(cell, tensors, machine.arch)
    trials[YARDSTICK] = Trial(cell=cell, name=YARDSTICK)
    if isinstance(yardstick, Contender):
        contestants[YARDSTICK] = yardstick.launch
    else:
        trials[YARDSTICK] = replace(trials[YARDSTICK], failure="; ".join(map(str, yardstick)))
    timings = measure(contestants, machine.clock, budget=budget)
    for name, timing in timings.items():
        trials[name] = _timed(trials[name], timing)
    return list(trials.values())


def _timed(trial: Trial, timing: Timing | Exception) -> Trial:
    if isinstance(timing, Exception):
        return replace(trial, failure=f"{type(timing).__name__}: {timing}")
    rate = tflops(cell_flops(trial.cell), timing.time_ms)
    return replace(trial, tflops=rate, spread=(timing.high_ms - timing.low_ms) / timing.time_ms)


def _name(plan: Plan) -> str:
    ruled = "" if plan.why == "given by the caller" else "  (rule)"
    return f"{plan.backend}/{plan.variant} {plan.config or ''}{ruled}".strip()


def table(trials: Sequence[Trial], *, top: int = 12) -> str:
    """The ranking: the best `top`, the rule's own choice and the yardstick wherever they stand, and the failures."""
    rows: list[tuple[str, ...]] = []
    for place, trial in enumerate(trials, start=1):
        marked = trial.plan is None or trial.name.endswith("(rule)")
        if trial.tflops is not None and (place <= top or marked):
            rows.append((str(place), trial.name, rate_text(trial.tflops), f"{100 * trial.spread:.1f} %"))
        elif trial.failure:
            rows.append(("-", trial.name, "-", trial.failure.splitlines()[0][:100]))
    return tabulate(rows, headers=("", "candidate", "TFLOPS", "spread"), disable_numparse=True)


def save(trials: Sequence[Trial], path: Path) -> None:
    """Write trials as JSON, one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "cell": trial.cell.key,
                "name": trial.name,
                "variant": trial.plan.variant if trial.plan is not None else None,
                "config": config_data(trial.plan.config) if trial.plan is not None else None,
                **{key: value for key, value in asdict(replace(trial, plan=None)).items() if key in _SAVED},
            }
        )
        for trial in trials
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
