"""Sweeping configs: every candidate of a backend compiled and checked in a process of its own, then timed in turns.

The processes warm the disk caches of the compilers, so that the timing process compiles next to nothing; one that
hangs, dies or takes the device down is a line of the ranking, and so is one that spills in its hot loops, which is not
timed. cuDNN runs in the same turns, as a yardstick.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate

from bench import options as shared
from bench.contenders import Ours, RefusedError, Truths, check, truth_of
from bench.matrix import SUITES, Cell, InputError, Tensors, rate_text
from bench.peers import find_peers
from bench.results import ROOT, Row, Store
from bench.run import Job, Machine, run
from bench.tuned_lines import print_lines
from multiattn.bars import Bar
from multiattn.inspect.facts import read_plan
from multiattn.inspect.options import count
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan
from multiattn.plan.support import Unsupported
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.tune import check as checking
from multiattn.tune.candidates import configs_of
from multiattn.tune.timing import Budget

YARDSTICK = "sdpa-cudnn"
TUNE_SEQ = 4096
"""The length that is swept unless others are asked for, where the suite has it: most users run long sequences."""

TUNE_BUDGET = Budget(rounds=5, sample_ms=3.0, warmup_ms=8.0)
FINAL_BUDGET = Budget(rounds=21, sample_ms=16.0, warmup_ms=30.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A config in one cell; without a config it is the rules' own choice."""

    ours: Ours
    cell: Cell
    arch: Arch
    device: str
    may_spill: bool = False


def candidates(backend: str, cell: Cell, arch: Arch, variants: Sequence[str] = ()) -> list[Ours]:
    """Each variant (of `variants`, or all offered) with the config of its rule and with every other candidate."""
    direction: registry.Direction = "forward" if cell.direction == "fwd" else "backward"
    op = registry.get(backend).op(direction)
    found = []
    for variant in op.variants:
        if variant.name in (variants or [offered.name for offered in op.offered]):
            configs = configs_of(registry.get(backend), variant, cell.problem, arch, direction)
            found += [Ours(backend=backend, variant=variant.name, config=config) for config in configs]
    return found


# ---------------------------------------------------------------- checked


@functools.lru_cache(maxsize=1 + len(checking.RAGGED))
def _cell_truth(cell: Cell, device: str) -> tuple[Tensors, Truths]:
    """Tensors of a cell and the truth of its last batch entry."""
    tensors = cell.tensors(device)
    truth = truth_of(cell, tensors, last_entry=True)
    torch.cuda.empty_cache()  # a dozen processes do this at once
    return tensors, truth


def check_candidate(it: Candidate) -> bool:
    """Compile and launch a candidate, in its cell and in ragged ones, and check the last batch entry of each.

    Raises RuntimeError where it spills, Mismatch where it is wrong.
    """
    plan, _ = it.ours.plans(it.cell, it.cell.problem, it.arch)
    if not it.may_spill:
        refuse_spills(plan)
    ours = replace(it.ours, config=plan.config)
    for cell in (it.cell, *_ragged(it.cell)):
        tensors, truth = _cell_truth(cell, it.device)
        try:
            contender = ours.prepare(cell, tensors, it.arch)
        except (Unsupported, RefusedError):
            continue  # its own cell, which was planned above, is what it is a candidate for
        check({name: result[-1:] for name, result in contender.output().items()}, truth, contender.plan)
    return True


def _ragged(cell: Cell) -> Iterator[Cell]:
    """The cell with each of `multiattn.tune.check.RAGGED`; of a packed batch there is one, of shorter sequences yet."""
    for seq, batch in checking.RAGGED:
        yield replace(cell, seq=seq, batch=1 if cell.is_packed else batch, heads=6, heads_kv=None)


def refuse_spills(plan: Plan) -> None:
    """RuntimeError where a kernel of a Plan for a GPU spills in its hot loops; nothing where no cuobjdump can tell."""
    if plan.arch.is_gpu and find_cuobjdump() is not None:
        found = read_plan(plan)
        told = [f"{it.name} {it.hot_spills} times with {it.registers} registers" for it in found if it.hot_spills]
        if told:
            raise RuntimeError(f"spills in its hot loops: {', '.join(told)}")


# ---------------------------------------------------------------- timed


def sweep(options: argparse.Namespace) -> int:
    """Sweep the candidates of each backend, print the ranking of each cell and keep it as results.

    Or print rules from a file of a user's own tuning.
    """
    if options.take is not None:
        return print_lines(options.take)
    if any(cell.seq == TUNE_SEQ for cell in SUITES[options.suite or "standard"]):
        options.seq = options.seq or [TUNE_SEQ]
    cells = shared.cells_of(options, "standard")
    machine = Machine.needed()
    common = {"arch": machine.arch, "device": str(machine.device), "may_spill": options.spills}
    for backend in shared.backends_of(options):
        wanted = [
            Candidate(ours=ours, cell=cell, **common)
            for cell in cells
            for ours in candidates(backend, cell, machine.arch, options.variant or ())
        ]
        if not wanted:
            raise InputError(f"--variant: got {', '.join(options.variant)}; {backend} has none of them")
        checked = checking.check_all(check_candidate, wanted, jobs=options.jobs, timeout_s=options.timeout)
        seen = Bar(checked, total=len(wanted), desc=backend, unit="candidate")
        failures = {outcome.item: outcome.error for outcome in seen}
        name = f"tune_{backend}"
        kept = Store((options.out or ROOT / "out" / "tune") / f"{name}.json", name)
        for cell in cells:
            mine = {it.ours: failure for it, failure in failures.items() if it.cell == cell}
            ready = [ours for ours, failure in mine.items() if not failure]
            everybody = (*ready, *find_peers((YARDSTICK,)))
            job = shared.as_asked(Job(suite=name, cells=(cell,), providers=everybody, budget=TUNE_BUDGET), options)
            rows = run(replace(job, jobs=1, fresh=True), machine, kept, quiet=True)
            ranking = sorted(rows, key=lambda row: -row.tflops)
            if options.finals:
                ranking = time_finalists(job, ranking, machine, kept, options.finals)
            told = {ours.name: failure for ours, failure in mine.items() if failure}
            places = table(ranking, told, top=options.top)
            print(f"\n{backend}: {cell.key}\n{places}\n\nWritten: {kept.path}", flush=True)
    return 0


def is_marked(name: str) -> bool:
    """Tell whether it is the rules' own choice or the yardstick, which have no config in their name."""
    return " " not in name


def time_finalists(job: Job, ranking: Sequence[Row], machine: Machine, kept: Store, finals: int) -> list[Row]:
    """The `finals` fastest, the rules' own choice and the yardstick timed once more, in long readings, ahead of others.

    A sweep has dozens of candidates in the same turns. On a power-limited GPU the slow ones cool it for the
    next one: the same config lost 2.5 % in one sweep and nothing in another (H200, 2026-11-22, D=256 N=16k).
    """
    chosen = {row.contender for place, row in enumerate(ranking) if place < finals or is_marked(row.contender)}
    again = tuple(provider for provider in job.providers if provider.name in chosen)
    job = replace(job, providers=again, budget=FINAL_BUDGET, fresh=True, jobs=1)
    finished = sorted(run(job, machine, kept, quiet=True), key=lambda row: -row.tflops)
    return [*finished, *(row for row in ranking if row.contender not in chosen)]


def table(ranking: Sequence[Row], failures: Mapping[str, str], *, top: int) -> str:
    """The best `top`, the rule's own choice and the yardstick wherever they stand, and the failures."""
    lines: list[tuple[str, ...]] = []
    for place, row in enumerate(ranking, start=1):
        name = f"{row.contender} (rule)" if is_marked(row.contender) and row.plan is not None else row.contender
        if row.measured is None:
            lines.append(("-", name, "-", row.text[:100]))
        elif place <= top or is_marked(row.contender):
            lines.append((str(place), name, rate_text(row.tflops), f"{100 * row.measured.spread:.1f} %"))
    lines += [("-", name, "-", failure.splitlines()[0][:100]) for name, failure in failures.items()]
    return tabulate(lines, headers=("", "candidate", "TFLOPS", "spread"), disable_numparse=True)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add_cells(command, "standard")
    shared.add_backends(command)
    command.add_argument("--variant", action="append", help="may be given again; default all")
    command.add_argument("--timeout", type=shared.positive, default=60.0, metavar="S", help="for one (%(default)s)")
    command.add_argument("--top", type=count, default=12, help="places to print (%(default)s)")
    command.add_argument("--spills", action="store_true", help="time also what spills in its hot loops")
    command.add_argument("--finals", type=int, default=0, metavar="N", help="time the N fastest again, long")
    told = "sweep nothing: check what `multiattn tune --export` wrote, and print its rules as lines for the package"
    command.add_argument("--import", type=Path, metavar="FILE", dest="take", help=told)
    shared.add_run(command, TUNE_BUDGET, "out/tune")
