"""``multiattn tune``: the options, the progress, and what is printed and kept."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from multiattn.bars import Bar
from multiattn.inspect.options import (
    add_backends,
    add_problem,
    called_problem,
    check_features,
    check_work,
    count,
    table,
)
from multiattn.inspect.pool import Outcome
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect, gpu_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction
from multiattn.plan.tuning import SCHEMA, TimedWay, TunedCell, Tuning
from multiattn.problem import Problem
from multiattn.run.tuning import VARIABLE, folder, is_on, locked, path_of, read, version, write
from multiattn.tune.candidates import Candidate, candidates_of, in_turn
from multiattn.tune.measure import Bench, LostError, tune

MOST, MOST_QUICK = 12, 4
"""Configs of one backend, beside the rules' own of every variant."""
BUDGET_S = 180.0
GUESS_S = {"forward": 6.0, "backward": 12.0}
"""Seconds that one candidate takes a process: a guess, until the GPU's own file has a measured one."""
START_S = 10.0
"""Seconds until the processes are ready, and for timing; a guess."""

DESCRIPTION = """\
Measures attention on this machine's GPU, for your shapes, and keeps what it finds for your calls.

Each candidate (a backend, a variant, tiles) is compiled in a process of its own, checked against the eager reference
within the tolerance that `python -m parity` uses, and timed in turns with all others. What is wrong is listed and never
chosen. Tuned rules are kept in the cache's folder, a file for each GPU. From the next process on a call near a measured
shape runs the fastest config, `backend="auto"` the fastest backend, and `explain` cites the measurement."""

EPILOG = """\
near: the same head_dims, dtype, mask and query heads to a key head; lengths within a factor of 1.41 of the measured
ones, batch times heads within 2; no modified scores, sinks, packed batches or caches.
MULTIATTN_TUNED=0 leaves the file unread. MULTIATTN_CACHE_DIR moves it.

examples:
  multiattn tune --shape 2,12,1500,72 --causal
  multiattn tune --shape 1,8,3000,96 --kv-heads 2 --direction both --quick
  multiattn tune --list
  multiattn tune --export my-gpu.json     # then attach it to an issue of the project: other owners of
                                          # such a GPU get these rules with the next release"""


class UsageError(ValueError):
    """Options that do not go together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One problem in one direction, with its candidates."""

    problem: Problem
    direction: Direction
    wanted: tuple[Candidate, ...]


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 where there is no GPU to measure."""
    if not options.shape and not (options.list or options.forget or options.export):
        raise UsageError("--shape: got none; allowed B,H,S,D, as in 2,16,1024,128, or --list, --export, --forget")
    check_features(options, why="calls with features run by the bundled rules, as `multiattn explain` says")
    if options.list:
        if options.shape or options.forget or options.export:
            raise UsageError("--list: got --shape, --export or --forget, too; allowed alone")
        return _print_kept()
    if not torch.cuda.is_available():
        print("Nothing to measure on: torch finds no GPU here. `multiattn doctor` says what is missing; on a machine")
        print("without one `multiattn explain --arch sm90` shows the bundled rules.")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = gpu_name(torch.cuda.current_device())
    path = path_of(gpu)
    if options.forget:
        print(f"Removed: {path}" if path.exists() else f"Nothing was kept in {path}")
        path.unlink(missing_ok=True)
    bench = Bench(gpu=gpu, arch=detect(device), device=str(device), jobs=options.jobs)
    if options.shape:
        with locked(path):  # a folder that is of no use is told before, not after all was measured
            kept = _kept(path, bench)
        status = _tune_all(_works(options, kept, bench), kept, bench, path, options)
        if status:
            return status
    return _export(path, options.export) if options.export else 0


def _tune_all(works: Sequence[Work], kept: Tuning, bench: Bench, path: Path, options: argparse.Namespace) -> int:
    total = sum(len(work.wanted) for work in works)
    names = ", ".join(dict.fromkeys(it.backend for work in works for it in work.wanted))
    seconds = _told(_estimate(works, kept, bench, options))
    print(f"{bench.gpu}: {total} candidates of {names}, about {seconds}", flush=True)
    done = 0
    with Bar(total=total, unit="candidate", disable=None) as bar:  # None: silent where there is no terminal

        def report(outcome: Outcome[Candidate, bool]) -> None:
            bar.set_postfix_str(outcome.item.backend)
            bar.update()

        try:
            for place, work in enumerate(works, start=1):
                cell = tune(work.problem, work.direction, work.wanted, bench, budget_s=_budget(options), report=report)
                if cell.timed:
                    _keep(cell, path, bench)
                    done += 1
                bar.update(sum(len(it.wanted) for it in works[:place]) - bar.n)  # what was left out, too
                bar.clear()
                print(summary(cell, bench.gpu), flush=True)
        except KeyboardInterrupt:
            bar.close()
            print(f"\nInterrupted: {done} of {len(works)} measured and kept", file=sys.stderr)
            return 130
        except (LostError, torch.OutOfMemoryError) as error:
            bar.close()
            print(f"\n{str(error).splitlines()[0]}: {done} of {len(works)} measured and kept", file=sys.stderr)
            return 1
    if not done:
        print("Nothing could be timed: the reasons are above")
        return 1
    print(f"\nKept: {path}\nCalls use it from the next process on; `multiattn explain` cites it.")
    if not is_on():
        print(f"{VARIABLE}=0 is set: calls do not use it as long as it is.")
    return 0


# ---------------------------------------------------------------- wanted


def _works(options: argparse.Namespace, kept: Tuning, bench: Bench) -> list[Work]:
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)
    asked = options.backend or BACKENDS
    reasons = {name: registry.get(name).probe(bench.arch) for name in dict.fromkeys(asked)}
    names = tuple(name for name, its in reasons.items() if not its)
    if not names or (options.backend and len(names) < len(reasons)):
        told = "\n".join(f"  {name}: {reason}" for name, its in reasons.items() for reason in its)
        raise UsageError(f"--backend: got what cannot run here\n{told}")
    _check_variants(options.variant or (), names, directions)
    most = None if options.all else MOST_QUICK if options.quick else MOST
    found = []
    for problem in _problems(options):
        for direction in directions:
            wanted = [
                candidates_of(
                    name,
                    problem,
                    bench.arch,
                    direction,
                    variants=options.variant or (),
                    most=most,
                    known=kept.choices(problem, direction, name),
                )
                for name in names
            ]
            if not any(wanted):
                raise UsageError(f"--shape: no backend has a rule for {problem} on {bench.arch.name}")
            found.append(Work(problem=problem, direction=direction, wanted=tuple(in_turn(wanted))))
    return found


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    """The problem of each shape."""
    for shape in dict.fromkeys(options.shape):
        problem = called_problem(argparse.Namespace(**{**vars(options), "shape": shape}))
        check_work(problem)
        yield problem


def _check_variants(variants: Sequence[str], names: Sequence[str], directions: Sequence[Direction]) -> None:
    have = [it.name for name in names for way in directions for it in registry.get(name).op(way).offered]
    if unknown := set(variants) - set(have):
        raise UsageError(f"--variant: got {', '.join(sorted(unknown))}; allowed {', '.join(dict.fromkeys(have))}")


def _budget(options: argparse.Namespace) -> float | None:
    return options.budget or (None if options.all else BUDGET_S)


def _estimate(works: Sequence[Work], kept: Tuning, bench: Bench, options: argparse.Namespace) -> float:
    """Seconds: by the time that candidates took on this machine before, or by a guess."""
    limit, whole = _budget(options), 0.0
    for work in works:
        took = [cell.seconds for cell in kept.cells if cell.direction == work.direction]
        each = sum(took) / len(took) if took else GUESS_S[work.direction]
        seconds = each * len(work.wanted) / min(bench.jobs, len(work.wanted))
        whole += START_S + (seconds if limit is None else min(seconds, limit))
    return whole


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# ---------------------------------------------------------------- kept


def _keep(cell: TunedCell, path: Path, bench: Bench) -> None:
    """Add a cell to what the file has by now: another process may tune other shapes on such a GPU."""
    with locked(path):
        write(with_cell(_kept(path, bench, tell=False), cell), path)


def _kept(path: Path, bench: Bench, *, tell: bool = True) -> Tuning:
    """The measurements of the file; none, with a word, where it cannot be used."""
    empty = Tuning(schema=SCHEMA, multiattn=version(), gpu=bench.gpu, arch=bench.arch.name, cells=())
    try:
        return read(path, bench.gpu)
    except FileNotFoundError:
        return empty
    except ValueError as error:
        if tell:
            print(f"Replaced by new measurements: {error}", file=sys.stderr)
        return empty


def with_cell(kept: Tuning, cell: TunedCell) -> Tuning:
    """The measurements with a new cell, in place of what older ones of the same problem have of its backends.

    A backend that was left out this time keeps what it had, with the date and the versions of that.
    """

    def without(older: TunedCell) -> TunedCell:
        if (older.direction, older.sizes) != (cell.direction, cell.sizes):
            return older
        return replace(older, backends={name: it for name, it in older.backends.items() if name not in cell.backends})

    return replace(kept, cells=(*(it for it in map(without, kept.cells) if it.backends), cell))


def _print_kept() -> int:
    """Print every file of the folder, a line for each cell; 1 where there is none."""
    paths = sorted(folder().glob("*.json"))
    for path in paths:
        print(path)
        try:
            kept = read(path)
        except (ValueError, OSError) as error:
            print(f"  not used: {error}")
            continue
        for cell in kept.cells:
            fastest = min(cell.timed, key=lambda name: cell.timed[name].time_ms, default=None)
            told = "nothing was timed" if fastest is None else f"{fastest} {_line(cell, fastest)}"
            print(f"  {cell.date} {cell.sizes} {cell.direction}: {told}")
    if not paths:
        print(f"Nothing is tuned yet in {folder()}: `multiattn tune --shape B,H,S,D` measures")
    return 0 if paths else 1


def _export(path: Path, to: Path) -> int:
    """Write the file of this GPU for the project's maintainers."""
    try:
        kept = read(path)
    except FileNotFoundError:
        print("Nothing to export: `multiattn tune --shape B,H,S,D` measures first", file=sys.stderr)
        return 1
    to.write_text(json.dumps(asdict(kept), indent=1) + "\n")
    print(f"Written: {to}\nIt has the GPU's name, versions, shapes, times, and a line of each error, which may name")
    print("folders of yours. Attach it to an issue of the project.")
    return 0


# ---------------------------------------------------------------- printed


def summary(cell: TunedCell, gpu: str) -> str:
    """The ranking of one cell: the best of each variant, what is bundled, and what failed."""
    lines = []
    for name, its in cell.backends.items():
        ways = [*its.ways, *(it for it in its.bundled if not any(_same(it, other) for other in its.ways))]
        for way in ways:
            is_bundled = any(_same(way, bundled) for bundled in its.bundled)
            told = ["chosen"] * (way is its.ways[0]) + ["bundled"] * is_bundled
            lines.append((name, way.variant, way.rate, f"{100 * way.spread:.1f} %", ", ".join(told), way.shown))
    lines.sort(key=lambda line: -float(line[2]))
    failed = [f"  {name}: {error}" for its in cell.backends.values() for name, error in its.failed.items()]
    ranking = table(lines, ("backend", "variant", "TFLOPS", "spread", "", "config"))
    left_out = ["Left out:", *failed] if failed else []
    return "\n".join([f"\n{cell.sizes} {cell.direction} on {gpu}", ranking, *left_out])


def _same(way: TimedWay, other: TimedWay) -> bool:
    return (way.variant, way.config) == (other.variant, other.config)


def _line(cell: TunedCell, name: str) -> str:
    """The chosen way of a backend in words, beside the bundled one."""
    its = cell.backends[name]
    way = its.ways[0]
    bundled = "".join(f", bundled {it.rate}" for it in its.bundled)
    return f"{way.variant} {way.shown}, {way.rate} TFLOPS{bundled}"


# ---------------------------------------------------------------- arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.description, command.epilog = DESCRIPTION, EPILOG
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    add_problem(command, required=False, several=True)
    told = "default: %(default)s"
    command.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="forward", help=told)
    add_backends(command, "all that can run here")
    told = "whose configs are tried; may be given again; default: the one that the bundled rules choose"
    command.add_argument("--variant", action="append", metavar="NAME", help=told)
    amount = command.add_mutually_exclusive_group()
    told = f"try {MOST_QUICK} configs of each backend in place of {MOST}, those nearest to its bundled rule"
    amount.add_argument("--quick", action="store_true", help=told)
    amount.add_argument(
        "--all", action="store_true", help="try every candidate of every variant, however long it takes"
    )
    told = (
        f"leave out what is not checked by then, for each shape and direction (default {BUDGET_S:.0f}; none with --all)"
    )
    command.add_argument("--budget", type=count, metavar="SECONDS", help=told)
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    command.add_argument("--jobs", type=count, default=jobs, help="compiling processes (default here: %(default)s)")
    kept = command.add_argument_group("what is kept")
    kept.add_argument("--list", action="store_true", help="print what is kept, and where")
    kept.add_argument("--export", type=Path, metavar="FILE", help="write what is kept of this GPU, to send upstream")
    kept.add_argument("--forget", action="store_true", help="remove what is kept of this GPU, before all else")
    command.set_defaults(run=run)
