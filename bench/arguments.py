"""What ``python -m bench`` is given: argparse's types, and the options that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.errors import InputError
from bench.matrix import DIRECTIONS, SUITES, Direction
from bench.timing import Budget
from multiattn.inspect.options import count
from multiattn.plan.backend import BACKENDS


def positive(text: str) -> float:
    """What takes time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; allowed numbers above 0")
    return value


def directions(text: str) -> tuple[Direction, ...]:
    """Some of bench.matrix.DIRECTIONS, with commas between them; in their order."""
    given = text.split(",")
    wrong = [name for name in given if name not in DIRECTIONS]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(wrong)}; allowed {', '.join(DIRECTIONS)}, commas between them"
        )
    return tuple(direction for direction in DIRECTIONS if direction in given)


# ---------------------------------------------------------------- checked before anything runs


def our_names(given: Sequence[str] | None) -> tuple[str, ...]:
    """The backends of ``--backend``, each once; all where it was not given, ``none`` alone is no backend at all."""
    return some_of("--backend", tuple(given or BACKENDS), BACKENDS)


def some_of(option: str, given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """What was given, each once, of what is known; of ``none`` alone nothing. InputError for another."""
    names = tuple(dict.fromkeys(given))
    if names == ("none",):
        return ()
    if wrong := [name for name in names if name not in (*known, "none")]:
        raise InputError(f"{option}: got {', '.join(wrong)}; allowed none, or some of {', '.join(known)}")
    if "none" in names:
        raise InputError(f"{option}: got {', '.join(names)}; allowed none alone, or some of {', '.join(known)}")
    return names


def try_folder(option: str, folder: Path) -> None:
    """InputError where no file can be written in a folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{option}: cannot write to {folder}: {error.strerror}") from None


def try_file(option: str, path: Path) -> None:
    """InputError where a file cannot be written; its folder is made, and what is there already stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
            path.resolve().unlink()  # of a link to nowhere, what it names
        elif path.is_file():
            path.open("a").close()
        else:
            raise InputError(f"{option}: cannot write to {path}: it is no regular file")
    except OSError as error:
        raise InputError(f"{option}: cannot write to {path}: {error.strerror}") from None


# ---------------------------------------------------------------- options of several commands


def add_cells(command: argparse.ArgumentParser, *, default: str) -> None:
    """Which cells: a suite, and what narrows it."""
    command.add_argument("--suite", default=default, help=f"{', '.join(SUITES)} or host (%(default)s)")
    add_direction(command, (), "as the suite's cells have it, which is fwd in most")
    command.add_argument("--head-dim", action="append", type=count, metavar="D", help="may be given again")
    command.add_argument("--seq", action="append", type=count, metavar="N", help="may be given again")
    command.add_argument("--dtype", action="append", metavar="DTYPE", help="may be given again")
    mask = command.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=None, help="causal cells only")
    mask.add_argument("--full", action="store_false", dest="causal", help="full cells only")


def add_who(command: argparse.ArgumentParser) -> None:
    """Which of our backends."""
    command.add_argument(
        "--backend", action="append", metavar="NAME", help=f"none, or {', '.join(BACKENDS)}; default all"
    )


def add_direction(command: argparse.ArgumentParser, default: tuple[Direction, ...], told: str) -> None:
    """Which part of a training step; `told` says what the default means."""
    what = f"of {','.join(DIRECTIONS)}; default {told}"
    command.add_argument("--direction", type=directions, default=default, metavar="DIRECTION,...", help=what)


def add_jobs(command: argparse.ArgumentParser) -> None:
    """How many processes compile."""
    jobs = min(12, os.cpu_count() or 1)
    command.add_argument("--jobs", type=count, default=jobs, help="compiling processes (default here: %(default)s)")


def add_budget(command: argparse.ArgumentParser, budget: Budget) -> None:
    """How much is spent on each timing."""
    command.add_argument("--rounds", type=count, default=budget.rounds, help="readings of each (%(default)s)")
    command.add_argument(
        "--sample-ms", type=positive, default=budget.sample_ms, help="device ms a reading (%(default)s)"
    )
    command.add_argument("--seed", type=int, default=budget.seed, help="of the order of turns (%(default)s)")
