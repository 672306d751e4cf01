"""Options that several commands of ``python -m bench`` share, and what they are read as."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from dataclasses import replace
from pathlib import Path

from bench.features import FEATURES
from bench.matrix import DIRECTIONS, SUITES, Cell, in_directions, narrowed
from bench.run import Job
from multiattn.inspect.options import count, counts, head_dims, some_of
from multiattn.layout import DTYPES
from multiattn.plan.backend import BACKENDS
from multiattn.tune.timing import Budget

AGAIN = "out/bench/again"
"""Where a stored command writes: repeating it overwrites no recorded result."""


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; allowed numbers above 0")
    return value


def add_cells(command: argparse.ArgumentParser, default: str | None, told: str = "%(default)s") -> None:
    """A suite, and what narrows it."""
    command.add_argument("--suite", choices=tuple(SUITES), default=default, help=f"cells to time ({told})")
    for option, read, metavar, what in (
        ("--direction", some_of(DIRECTIONS), "A,B", f"of {','.join(DIRECTIONS)}; default the suite's"),
        ("--head-dim", head_dims, "D[/Dv],...", "some of the suite's"),
        ("--seq", counts, "N,...", "some of the suite's"),
        ("--dtype", some_of(tuple(DTYPES)), "A,B", "some of the suite's"),
        ("--feature", some_of(FEATURES), "A,B", "some of the suite's"),
    ):
        command.add_argument(option, action="extend", type=read, metavar=metavar, default=[], help=what)
    mask = command.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_const", const=(True,), default=(), help="causal cells only")
    mask.add_argument("--full", action="store_const", const=(False,), dest="causal", help="full cells only")


def cells_of(options: argparse.Namespace, suite: str) -> tuple[Cell, ...]:
    """The cells that were asked for, of `suite` where none was named."""
    narrow = {name: getattr(options, name) for name in ("seq", "dtype", "feature", "causal")}
    narrow["widths"] = options.head_dim
    return narrowed(in_directions(SUITES[options.suite or suite], options.direction), **narrow)


def add_backends(command: argparse.ArgumentParser) -> None:
    """Some of our backends."""
    allowed = ("none", *BACKENDS)
    told = f"{', '.join(allowed)}; may be given again; default all"
    command.add_argument("--backend", action="append", choices=allowed, metavar="NAME", help=told)


def backends_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The backends that were asked for, all by default."""
    return tuple(name for name in BACKENDS if name in (options.backend or BACKENDS))


def add_run(command: argparse.ArgumentParser, budget: Budget, out: str) -> None:
    """How to run: processes that compile, the time for each reading, the folder of results."""
    add_jobs(command)
    command.add_argument("--rounds", type=count, default=budget.rounds, help="readings of each (%(default)s)")
    command.add_argument("--sample-ms", type=positive, default=budget.sample_ms, help="ms a reading (%(default)s)")
    command.add_argument("--seed", type=int, default=budget.seed, help="of the order of turns (%(default)s)")
    command.add_argument("--fresh", action="store_true", help="measure also what this very setup has measured before")
    command.add_argument("--out", type=Path, help=f"folder of the results; default {out}")


def as_asked(job: Job, options: argparse.Namespace) -> Job:
    """A job with what `add_run` reads, and the command that was given, for a folder where it overwrites no result."""
    command = shlex.join(["python", "-m", "bench", *options.given, "--fresh", "--out", AGAIN])
    budget = replace(job.budget, rounds=options.rounds, sample_ms=options.sample_ms, seed=options.seed)
    return replace(job, budget=budget, fresh=options.fresh, jobs=options.jobs, command=command)


def add_jobs(command: argparse.ArgumentParser) -> None:
    """How many processes compile."""
    jobs = min(12, os.cpu_count() or 1)
    command.add_argument("--jobs", type=count, default=jobs, help="compiling processes (default here: %(default)s)")
