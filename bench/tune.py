"""Sweeping configs: every candidate of a backend compiled and checked in a process of its own, then timed in turns.

The processes warm the disk caches of the compilers, so that the timing process compiles next to nothing; one that
hangs, dies or takes the device down is a line of the ranking, and so is one that spills in its hot loops, which is not
timed. cuDNN runs in the same turns, as a yardstick.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from bench import options as shared
from bench.contenders import Contender, RefusedError, Tensors, config_data, contender_of
from bench.environment import NO_GPU, ROOT, device_works, environment
from bench.errors import InputError
from bench.flops import cell_flops, rate_text, tflops
from bench.matrix import Cell
from bench.peers import find_peers
from bench.results import Environment, dump
from bench.run import Machine
from bench.timing import Budget, Contestant, Timing, measure
from bench.truth import Truths, check, truth_of
from multiattn.inspect import store
from multiattn.inspect.facts import read_kernel
from multiattn.inspect.options import count
from multiattn.inspect.pool import run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Direction, Plan, make_plan, plan_variant
from multiattn.plan.config import Config
from multiattn.plan.toolchain import find_cuobjdump

YARDSTICK = "sdpa-cudnn"
TUNE_SEQ = 4096
"""The length that is swept unless others are asked for: a rule for long sequences is what most users run."""

GIVEN = "given by the caller"
"""The `why` of a Plan whose config no rule chose."""

RAGGED = ((200, 16), (777, 7))
"""Lengths, and batches of six heads, that candidates are checked at as well.

No tile divides them, at one of them the last tile has warps with nothing to do, and there are more tiles than any GPU
has SMs: a block of a persistent kernel has several.
"""

OUT_OF_MEMORY = ("torch.OutOfMemoryError", "CUDA_ERROR_OUT_OF_MEMORY")
TUNE_BUDGET = Budget(rounds=5, sample_ms=3.0, warmup_ms=8.0)
FINAL_BUDGET = Budget(rounds=21, sample_ms=16.0, warmup_ms=30.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One candidate in one cell: TFLOPS, or why there are none. Without a config it is the yardstick."""

    cell: Cell
    name: str
    config: Config | None = None
    plan: Plan | None = None
    """None also where the config does not fit."""
    tflops: float | None = None
    spread: float = 0.0
    failure: str = ""

    @property
    def is_rule(self) -> bool:
        """True for the choice of the rules."""
        return self.plan is not None and self.plan.why != GIVEN


def trial_of(cell: Cell, plan: Plan, failure: str = "") -> Trial:
    """The Trial of a Plan that is yet to be timed, or never will be."""
    ruled = "" if plan.why == GIVEN else "  (rule)"
    name = f"{plan.backend}/{plan.variant} {plan.config or ''}{ruled}".strip()
    return Trial(cell=cell, name=name, config=plan.config, plan=plan, failure=failure)


def direction_of(cell: Cell) -> Direction:
    """The direction whose configs are swept: where a backward is timed with its forward, the backward's."""
    return "forward" if cell.direction == "fwd" else "backward"


def candidates(backend_name: str, cell: Cell, arch: Arch, variants: Sequence[str] = ()) -> list[Trial]:
    """A Trial per candidate config of each variant (of `variants`, or all offered), the rules' own choice among them.

    A candidate that does not fit has the reasons for its failure.
    """
    backend, direction = registry.get(backend_name), direction_of(cell)
    op = backend.op(direction)
    found = []
    for variant in op.variants:
        if variant.name not in (variants or [offered.name for offered in op.offered]):
            continue
        plan = functools.partial(plan_variant, backend, variant, cell.problem, arch, direction=direction)
        chosen = plan()
        own = chosen.config if isinstance(chosen, Plan) else None
        others = (it for it in dict.fromkeys(op.candidates(variant, cell.problem, arch)) if it != own)
        for config, made in ((own, chosen), *((config, plan(config)) for config in others)):
            if isinstance(made, Plan):
                found.append(trial_of(cell, made))
            else:
                name, why = f"{backend_name}/{variant.name} {config or ''}".strip(), "; ".join(map(str, made))
                found.append(Trial(cell=cell, name=name, config=config, failure=why))
    return found


# ---------------------------------------------------------------- checked


@functools.lru_cache(maxsize=1 + len(RAGGED))
def _cell_truth(cell: Cell, device: str) -> tuple[Tensors, Truths]:
    """Tensors of a cell and the truth of its last batch entry."""
    tensors = cell.tensors(device)
    truth = truth_of(cell, tensors, last_entry=True)
    torch.cuda.empty_cache()  # a dozen processes do this at once
    return tensors, truth


class SpillsError(RuntimeError):
    """A candidate loads and stores registers in the loops that every block runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A Trial to check on a device; `spills` allows it to spill."""

    trial: Trial
    device: str
    spills: bool


def check_candidate(task: Task) -> bool:
    """Compile and launch one Plan, in its cell and in `RAGGED` ones, and check the last batch entry of each.

    Raises SpillsError, or Mismatch where it is wrong.
    """
    plan, its = task.trial.plan, task.trial.cell
    assert plan is not None
    if not task.spills:
        refuse_spills(plan)
    backend, variant = registry.get(plan.backend), registry.variant_of(plan)
    ragged = (replace(its, seq=seq, batch=batch, heads=6, heads_kv=None) for seq, batch in RAGGED)
    for cell in (its, *ragged):
        there = plan_variant(backend, variant, cell.problem, plan.arch, plan.config, direction=plan.direction)
        if not isinstance(there, Plan):
            continue  # its own cell is what it is a candidate for
        tensors, truth = _cell_truth(cell, task.device)
        results = _contender(there, tensors, cell).output()
        check({name: result[-1:] for name, result in results.items()}, truth, there)
    return True


def refuse_spills(plan: Plan) -> None:
    """SpillsError where a kernel of a Plan for a GPU spills in its hot loops; nothing where no cuobjdump can tell."""
    if not plan.arch.is_gpu or find_cuobjdump() is None:
        return
    found = [read_kernel(kernel, plan) for kernel in store.compiled(plan)]
    if spilling := [kernel for kernel in found if kernel.hot_spills]:
        told = ", ".join(f"{it.name} {it.hot_spills} times with {it.registers} registers" for it in spilling)
        raise SpillsError(f"spills in its hot loops: {told}")


def _contender(plan: Plan, tensors: Tensors, cell: Cell) -> Contender:
    """A candidate ready to launch; a backward is fed by its backend's own best forward."""
    is_forward = plan.direction == "forward"
    forward = None if is_forward else make_plan(registry.get(plan.backend), plan.problem, plan.arch)
    return contender_of(plan, tensors, cell, forward)


def prepare(trials: Sequence[Trial], machine: Machine, *, jobs: int, timeout_s: float, spills: bool) -> Iterator[Trial]:
    """Compile and check Plans in processes of their own; each Trial as it ends, with its failure if any.

    What finds too little memory beside the others is checked once more, alone.
    """
    waiting = [Task(trial=trial, device=str(machine.device), spills=spills) for trial in trials]
    for processes in (jobs, 1):
        crowded = []
        for it in run_isolated(check_candidate, waiting, jobs=processes, timeout_s=timeout_s, keep=device_works):
            if processes > 1 and any(word in it.error for word in OUT_OF_MEMORY):
                crowded.append(it.item)
            else:
                yield replace(it.item.trial, failure=it.error)
        waiting = crowded


# ---------------------------------------------------------------- timed


def time_trials(cell: Cell, ready: Sequence[Trial], machine: Machine, budget: Budget) -> list[Trial]:
    """Time checked candidates and the yardstick in turns: the same Trials with TFLOPS or failures, fastest first."""
    tensors = cell.tensors(machine.device)
    trials = {trial.name: trial for trial in ready}
    contestants: dict[str, Contestant] = {}
    for trial in ready:
        assert trial.plan is not None
        try:
            contestants[trial.name] = _contender(trial.plan, tensors, cell).launch
        except Exception as error:  # broad: one candidate's failure is its line of the ranking
            trials[trial.name] = replace(trial, failure=f"{type(error).__name__}: {error}")
    trials[YARDSTICK] = Trial(cell=cell, name=YARDSTICK)
    try:
        contestants[YARDSTICK] = find_peers((YARDSTICK,))[0].prepare(cell, tensors, machine.arch).launch
    except RefusedError as refusal:
        trials[YARDSTICK] = replace(trials[YARDSTICK], failure=str(refusal))
    for name, it in measure(contestants, machine.clock, budget=budget).items():
        if isinstance(it, Timing):
            rate = tflops(cell_flops(cell), it.time_ms)
            trials[name] = replace(trials[name], tflops=rate, spread=(it.high_ms - it.low_ms) / it.time_ms)
        else:
            trials[name] = replace(trials[name], failure=f"{type(it).__name__}: {it}")
    return sorted(trials.values(), key=lambda trial: -(trial.tflops or 0.0))


def time_finalists(cell: Cell, ranking: Sequence[Trial], machine: Machine, finals: int) -> list[Trial]:
    """The `finals` fastest and the rules' own choice timed once more, in long readings, ahead of the others.

    A sweep has dozens of candidates in the same turns. On a power-limited GPU the slow ones cool it for whoever comes
    next: the same config lost 2.5 % in one sweep and nothing in another (H200, 2026-11-22, D=256 N=16k).
    """
    timed = [trial for trial in ranking if trial.plan is not None and trial.tflops]
    chosen = [trial for place, trial in enumerate(timed) if place < finals or trial.is_rule]
    if not finals or not chosen:
        return list(ranking)
    again = time_trials(cell, chosen, machine, FINAL_BUDGET)
    return [*again, *(trial for trial in ranking if trial.name not in {it.name for it in again})]


def table(trials: Sequence[Trial], *, top: int) -> str:
    """The ranking: the best `top`, the rule's own choice and the yardstick wherever they stand, and the failures."""
    rows: list[tuple[str, ...]] = []
    for place, trial in enumerate(trials, start=1):
        if trial.tflops is not None and (place <= top or trial.is_rule or trial.plan is None):
            rows.append((str(place), trial.name, rate_text(trial.tflops), f"{100 * trial.spread:.1f} %"))
        elif trial.failure:
            rows.append(("-", trial.name, "-", trial.failure.splitlines()[0][:100]))
    return tabulate(rows, headers=("", "candidate", "TFLOPS", "spread"), disable_numparse=True)


def save(path: Path, trials: Iterable[Trial], setup: Environment) -> None:
    """Write trials as JSON, one a line, fastest first."""
    lines = [
        {"cell": it.cell.as_dict(), "name": it.name, "config": config_data(it.config), "tflops": it.tflops,
         "spread": it.spread, "failure": it.failure.partition("\n")[0]}
        for it in trials
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump({"environment": asdict(setup), "trials": lines}))


# ---------------------------------------------------------------- the command


def run(options: argparse.Namespace) -> int:
    """Sweep the candidates of each backend, print the ranking of each cell and keep it as JSON."""
    options.seq = options.seq or [TUNE_SEQ]
    cells = shared.cells_of(options, "standard")
    machine = Machine.current()
    if machine is None:
        print(f"Nothing to time on: {NO_GPU}")
        return 1
    for backend in shared.backends_of(options):
        found = [trial for cell in cells for trial in candidates(backend, cell, machine.arch, options.variant or ())]
        if not found:
            raise InputError(f"--variant: got {', '.join(options.variant)}; {backend} has none of them")
        waiting = [trial for trial in found if not trial.failure]
        limits = {"jobs": options.jobs, "timeout_s": options.timeout, "spills": options.spills}
        checked = tqdm(prepare(waiting, machine, **limits), total=len(waiting), desc=backend, unit="candidate")
        done = [*checked, *(trial for trial in found if trial.failure)]
        kept: list[Trial] = []
        path = (options.out or ROOT / "out" / "tune") / f"{backend}.json"
        for cell in cells:
            mine = [trial for trial in done if trial.cell == cell]
            ready = [trial for trial in mine if not trial.failure]
            ranking = time_trials(cell, ready, machine, shared.budget_of(options, TUNE_BUDGET))
            ranking = time_finalists(cell, [*ranking, *(it for it in mine if it.failure)], machine, options.finals)
            kept += ranking
            save(path, kept, environment())
            print(f"\n{backend}: {cell.key}\n{table(ranking, top=options.top)}\n\nWritten: {path}", flush=True)
    return 0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add_cells(command, "standard")
    shared.add_backends(command)
    command.add_argument("--variant", action="append", help="may be given again; default all")
    command.add_argument("--timeout", type=shared.positive, default=60.0, metavar="S", help="for one (%(default)s)")
    command.add_argument("--top", type=count, default=12, help="places to print (%(default)s)")
    command.add_argument("--spills", action="store_true", help="time also what spills in its hot loops")
    command.add_argument("--finals", type=int, default=0, metavar="N", help="time the N fastest again, long")
    shared.add_run(command, TUNE_BUDGET, "out/tune")
