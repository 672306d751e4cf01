"""Sweeping configs: every candidate of a backend compiled and checked in a process of its own, then timed in turns.

The processes warm the disk caches of the compilers, so that the timing process compiles next to nothing; one that
hangs, dies or takes the device down is a line of the ranking, and so is one that spills in its hot loops, which is not
timed. cuDNN runs in the same turns, as a yardstick.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate

from bench.contenders import Contender, config_data, contender_of
from bench.environment import device_works
from bench.errors import InputError
from bench.flops import cell_flops, rate_text, tflops
from bench.matrix import Cell
from bench.peers import find_peers
from bench.results import Environment
from bench.run import Machine
from bench.timing import Budget, Contestant, Timing, measure
from bench.truth import Truths, check, truth_of
from multiattn.inspect import store
from multiattn.inspect.facts import read_kernel
from multiattn.inspect.pool import Outcome, run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Direction, Plan, make_plan, plan_variant
from multiattn.plan.config import Config
from multiattn.plan.support import Reason
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem

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
"""What PyTorch and the driver say."""

TUNE_BUDGET = Budget(rounds=5, sample_ms=3.0, warmup_ms=8.0)
FINAL_BUDGET = Budget(rounds=21, sample_ms=16.0, warmup_ms=30.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One candidate in one cell: TFLOPS, or why there are none. Without a variant it is the yardstick."""

    cell: Cell
    name: str
    variant: str = ""
    config: Config | None = None
    plan: Plan | None = None
    """None also where the config does not fit."""
    tflops: float | None = None
    spread: float = 0.0
    prepare_s: float = 0.0
    """Seconds to compile and check, in its own process."""
    failure: str = ""

    @classmethod
    def of(cls, cell: Cell, plan: Plan, *, prepare_s: float = 0.0, failure: str = "") -> Trial:
        """Of a Plan that is yet to be timed, or never will be."""
        return cls(
            cell=cell,
            name=_name(plan),
            variant=plan.variant,
            config=plan.config,
            plan=plan,
            prepare_s=prepare_s,
            failure=failure,
        )

    @property
    def is_rule(self) -> bool:
        """Whether it is what the rules choose."""
        return self.plan is not None and self.plan.why != GIVEN


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
            found.append(Trial(cell=cell, name=name, variant=variant.name, failure="; ".join(map(str, chosen))))
        configs = dict.fromkeys(op.candidates(variant, cell.problem, arch))
        if isinstance(chosen, Plan):
            configs.pop(chosen.config, None)  # type: ignore[arg-type]
            found.append(chosen)
        for config in configs:
            plan = plan_variant(backend, variant, cell.problem, arch, config, direction=direction)
            found.append(plan if isinstance(plan, Plan) else _unfit(cell, backend_name, variant.name, config, plan))
    return found


def check_variants(backends: Sequence[str], cells: Sequence[Cell], variants: Sequence[str]) -> None:
    """InputError for a variant that no backend has in the cells' directions: nothing would be swept."""
    directions = {swept(cell) for cell in cells}
    ops = [registry.get(name).op(direction) for name in backends for direction in sorted(directions)]
    known = {variant.name for op in ops for variant in op.variants}
    if wrong := [name for name in variants if name not in known]:
        offered = dict.fromkeys(variant.name for op in ops for variant in op.offered)
        allowed = f"{', '.join(offered)}, and the rungs of {', '.join(backends)}"
        raise InputError(f"--variant: got {', '.join(wrong)}; allowed {allowed}")


def _unfit(cell: Cell, backend: str, variant: str, config: Config, reasons: Sequence[Reason]) -> Trial:
    failure = "; ".join(map(str, reasons))
    return Trial(cell=cell, name=f"{backend}/{variant} {config}", variant=variant, config=config, failure=failure)


def swept(cell: Cell) -> Direction:
    """Whose configs are swept: where a backward is timed with its forward, the backward's."""
    return "forward" if cell.direction == "fwd" else "backward"


def ragged(cell: Cell) -> list[Cell]:
    """Small cells of the same kernels, for what one of round lengths does not show."""
    return [replace(cell, seq=seq, batch=batch, heads=6, heads_kv=None) for seq, batch in RAGGED]


@functools.lru_cache(maxsize=1 + len(RAGGED))
def _cell_truth(cell: Cell, device: str) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Truths]:
    """Tensors of a cell and the truth of its last batch entry."""
    tensors = cell.tensors(device)
    truth = truth_of(cell, tensors, last_entry=True)
    torch.cuda.empty_cache()  # a dozen processes do this at once
    return tensors, truth


class SpillsError(RuntimeError):
    """A candidate loads and stores registers in the loops that every block runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    cell: Cell
    plan: Plan
    device: str
    spills: bool
    """Whether it may spill."""


def check_candidate(task: _Task) -> bool:
    """Compile and launch one Plan, in its cell and `ragged` ones, and check the last batch entry of each.

    Raises SpillsError, or Mismatch where it is wrong.
    """
    plan = task.plan
    if not task.spills:
        refuse_spills(plan)
    for cell in (task.cell, *ragged(task.cell)):
        there = plan if cell == task.cell else _moved(plan, cell)
        if not isinstance(there, Plan):
            continue  # its own cell is what it is a candidate for
        tensors, truth = _cell_truth(cell, task.device)
        results = _contender(there, tensors, cell).output()
        check({name: result[-1:] for name, result in results.items()}, truth, there)
    return True


def _moved(plan: Plan, cell: Cell) -> Plan | tuple[Reason, ...]:
    """The same kernels and config in another cell."""
    backend = registry.get(plan.backend)
    variant = registry.variant_of(plan)
    return plan_variant(backend, variant, cell.problem, plan.arch, plan.config, direction=plan.direction)


def refuse_spills(plan: Plan) -> None:
    """SpillsError where a kernel of a Plan for a GPU spills in its hot loops; nothing where no cuobjdump can tell."""
    if not plan.arch.is_gpu or find_cuobjdump() is None:
        return
    found = [read_kernel(kernel, plan) for kernel in store.compiled(plan)]
    if spilling := [kernel for kernel in found if kernel.hot_spills]:
        told = ", ".join(f"{it.name} {it.hot_spills} times with {it.registers} registers" for it in spilling)
        raise SpillsError(f"spills in its hot loops: {told}")


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
    spills: bool = False,
    finals: int = 0,
    say: Callable[[str], None] = print,
) -> Iterator[tuple[Cell, list[Trial]]]:
    """Yield the trials of each cell, fastest first, as it is done. All candidates are compiled first, cell by cell.

    `timeout_s` bounds the compilation and the check of each; `spills` times also what spills in its hot loops; the
    `finals` fastest are timed once more.
    """
    failures: dict[Cell, list[Trial]] = {cell: [] for cell in cells}
    wanted = []
    for cell in cells:
        for found in candidate_plans(backend, cell, machine.arch, variants):
            if isinstance(found, Plan):
                wanted.append((cell, found))
            else:
                failures[cell].append(found)
    say(f"{backend}: {len(wanted)} candidates in {len(cells)} cells")
    ready: dict[Cell, list[Trial]] = {cell: [] for cell in cells}
    prepared = prepare(wanted, machine, jobs=jobs, timeout_s=timeout_s, spills=spills)
    for done, trial in enumerate(prepared, start=1):
        (failures if trial.failure else ready)[trial.cell].append(trial)
        if done % 20 == 0 or done == len(wanted):
            say(f"{backend}: {done} of {len(wanted)} compiled and checked")
    for cell in cells:
        ranking = ranked([*time_cell(cell, ready[cell], machine, budget), *failures[cell]])
        yield cell, time_finalists(cell, ranking, machine, finals) if finals else ranking


def time_finalists(cell: Cell, ranking: Sequence[Trial], machine: Machine, count: int) -> list[Trial]:
    """The `count` fastest and the rules' own choice timed once more, in long readings, ahead of the others.

    A sweep has dozens of candidates in the same turns. On a power-limited GPU the slow ones cool it for whoever comes
    next: the same config lost 2.5 % in one sweep and nothing in another (H200, 2026-11-22, D=256 N=16k).
    """
    timed = [trial for trial in ranking if trial.plan is not None and trial.tflops]
    chosen = [trial for place, trial in enumerate(timed) if place < count or trial.is_rule]
    if not chosen:
        return list(ranking)
    again = {trial.name: trial for trial in time_cell(cell, chosen, machine, FINAL_BUDGET)}
    return [*ranked(list(again.values())), *(trial for trial in ranking if trial.name not in again)]


def save(path: Path, trials: Iterable[Trial], environment: Environment) -> None:
    """Write trials as JSON, one a line, fastest first."""
    lines = [
        json.dumps(
            {
                "cell": trial.cell.as_dict(),
                "name": trial.name,
                "config": config_data(trial.config),
                "tflops": trial.tflops,
                "spread": trial.spread,
                "failure": trial.failure.partition("\n")[0],
            }
        )
        for trial in trials
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    told = json.dumps(asdict(environment))
    path.write_text(f'{{"environment": {told},\n "trials": [\n  ' + ",\n  ".join(lines) + "\n ]}\n")


def prepare(
    wanted: Sequence[tuple[Cell, Plan]], machine: Machine, *, jobs: int, timeout_s: float, spills: bool
) -> Iterator[Trial]:
    """Compile and check Plans in processes of their own; the Trial of each as it ends, with its failure if any.

    What finds too little memory beside the others is checked once more, alone.
    """
    device = str(machine.device)
    tasks = [_Task(cell=cell, plan=plan, device=device, spills=spills) for cell, plan in wanted]
    crowded = []
    for outcome in run_isolated(check_candidate, tasks, jobs=jobs, timeout_s=timeout_s, keep=device_works):
        if jobs > 1 and any(word in outcome.error for word in OUT_OF_MEMORY):
            crowded.append(outcome.item)
        else:
            yield _prepared(outcome)
    for outcome in run_isolated(check_candidate, crowded, jobs=1, timeout_s=timeout_s, keep=device_works):
        yield _prepared(outcome)


def _prepared(outcome: Outcome[_Task, bool]) -> Trial:
    task = outcome.item
    return Trial.of(task.cell, task.plan, prepare_s=outcome.seconds, failure=outcome.error)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Fastest first; what has no time last."""
    return sorted(trials, key=lambda trial: -(trial.tflops or 0.0))


def time_cell(cell: Cell, ready: Sequence[Trial], machine: Machine, budget: Budget) -> list[Trial]:
    """Time prepared candidates and the yardstick in turns; the same Trials with their TFLOPS or failures."""
    tensors = cell.tensors(machine.device)
    trials = {trial.name: trial for trial in ready}
    contestants: dict[str, Contestant] = {}
    for trial in ready:
        assert trial.plan is not None
        try:
            contestants[trial.name] = _contender(trial.plan, tensors, cell).launch
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
    ruled = "" if plan.why == GIVEN else "  (rule)"
    return f"{plan.backend}/{plan.variant} {plan.config or ''}{ruled}".strip()


def table(trials: Sequence[Trial], *, top: int = 12) -> str:
    """The ranking: the best `top`, the rule's own choice and the yardstick wherever they stand, and the failures."""
    rows: list[tuple[str, ...]] = []
    for place, trial in enumerate(trials, start=1):
        marked = not trial.variant or trial.is_rule
        if trial.tflops is not None and (place <= top or marked):
            rows.append((str(place), trial.name, rate_text(trial.tflops), f"{100 * trial.spread:.1f} %"))
        elif trial.failure:
            rows.append(("-", trial.name, "-", trial.failure.splitlines()[0][:100]))
    return tabulate(rows, headers=("", "candidate", "TFLOPS", "spread"), disable_numparse=True)
