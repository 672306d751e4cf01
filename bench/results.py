"""Results as data: a `Row` is measured, or carries reasons, or carries an error; a `Store` keeps them in one JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.errors import InputError
from bench.flops import rate_text
from bench.matrix import Cell
from bench.timing import Budget
from multiattn.plan.backend import BACKENDS
from multiattn.plan.support import Reason

T = TypeVar("T")

SCHEMA = 3
OLDER = (2,)
"""Schemas that are read as well: 2 had no directions, all of it is forward, and no memory."""
LOST_DEVICE = "the device was lost: "
"""Starts the error of a contender after which no other could run in its process; a resumed run leaves it out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A timing: median and quartiles of one launch in ms, TFLOPS of the median, share of the stated peak.

    `error_ratio` is the worst error over its budget, of the same launch that was timed; at most 1 for ours.
    """

    time_ms: float
    low_ms: float
    high_ms: float
    rounds: int
    sample_ms: float
    """Device milliseconds that one reading was given."""
    launches: int
    host_bound: bool
    tflops: float
    peak_share: float | None
    error_ratio: float
    peak_extra_bytes: int | None = None
    """Device memory that one launch took at its peak, beside inputs and outputs; None where nobody counted."""

    def __post_init__(self) -> None:
        """Keep six significant digits: more than a timing has, and what a results file holds."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float):
                object.__setattr__(self, item.name, float(f"{value:.6g}"))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.high_ms - self.low_ms) / self.time_ms

    def serves(self, budget: Budget) -> bool:
        """Whether at least as much was spent on it as `budget` asks for."""
        return self.rounds >= budget.rounds and self.sample_ms >= budget.sample_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What a row was measured on and with."""

    gpu: str
    arch: str
    peak_tflops: float | None
    driver: str
    commit: str
    source: str
    """Digest of the multiattn and bench sources: what resuming goes by, also where git cannot tell the commit."""
    versions: Mapping[str, str]
    date: str

    def same_setup(self, other: Environment) -> bool:
        """Whether rows of both may be compared: all is equal but the date and the commit, whose part `source` takes."""
        return replace(self, date=other.date, commit=other.commit) == other


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of one contender in one cell: exactly one of `measured`, `reasons` and `error`."""

    cell: Cell
    contender: str
    regime: str
    environment: Environment
    command: str
    """Makes the run that this row is of again."""
    run: str = ""
    """Shared by the rows of one cell that took turns: when they began, and a random end. Those of two runs met other
    clocks and temperatures, so they are never set against each other. Empty where nobody was timed."""
    plan: Mapping[str, Any] | None = None
    """Variant, config and why of the Plan that ran; None for a peer."""
    detail: str = ""
    """What a reader must know of a peer's call."""
    measured: Measured | None = None
    reasons: tuple[Reason, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        outcomes = (self.measured is not None) + bool(self.reasons) + bool(self.error)
        if outcomes != 1:
            raise ValueError(
                f"a row is measured, or carries reasons, or carries an error; got {outcomes} of the three for "
                f"{self.contender} in {self.cell}"
            )
        if self.measured is not None and not self.run:
            raise ValueError(f"a measured row names its run; got none for {self.contender} in {self.cell}")

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later row of the same cell, contender and regime replaces."""
        return self.cell.key, self.contender, self.regime

    @property
    def text(self) -> str:
        """One line: TFLOPS, or why there are none."""
        if self.measured is not None:
            return f"{rate_text(self.measured.tflops)} TFLOPS"
        return "; ".join(map(str, self.reasons)) or self.error.strip().splitlines()[0]


@dataclass(slots=True)
class Store:
    """The rows of one suite on one GPU, written after every cell: a run that dies loses one cell at most."""

    path: Path
    suite: str
    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, suite: str) -> Store:
        """The store at `path`, empty where there is no file."""
        store = cls(path, suite)
        if path.exists():
            store.rows = {row.key: row for row in load(path)}
        return store

    def finished(
        self, cell: Cell, contenders: Iterable[str], regime: str, environment: Environment, budget: Budget
    ) -> bool:
        """Whether every contender has its row of this cell from this very setup, all of one run.

        Each measured with `budget` or more. An error is tried again, unless it took the device down.
        """
        found = [self.rows.get((cell.key, contender, regime)) for contender in contenders]
        rows = [row for row in found if row is not None and row.environment.same_setup(environment)]
        measured = [row for row in rows if row.measured is not None]
        return (
            len(rows) == len(found)
            and len({row.run for row in measured}) <= 1
            and all(row.measured.serves(budget) for row in measured if row.measured is not None)
            and all(not row.error or row.error.startswith(LOST_DEVICE) for row in rows)
        )

    def lost_device(self, cell: Cell, contender: str, regime: str, environment: Environment) -> bool:
        """Whether this contender took the device down in this cell, in this very setup."""
        row = self.rows.get((cell.key, contender, regime))
        return row is not None and row.environment.same_setup(environment) and row.error.startswith(LOST_DEVICE)

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows in place of older ones, and write the file."""
        for row in rows:
            self.rows[row.key] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.part")
        partial.write_text(dumps(self.suite, self.rows.values()))
        partial.replace(self.path)


def dumps(suite: str, rows: Iterable[Row]) -> str:
    """The JSON of a results file: one line per row, each environment and each command once."""
    environments: list[Environment] = []
    commands: list[str] = []
    lines = []
    for row in rows:
        if row.environment not in environments:
            environments.append(row.environment)
        if row.command not in commands:
            commands.append(row.command)
        data: dict[str, Any] = {
            "cell": row.cell.as_dict(),
            "contender": row.contender,
            "regime": row.regime,
            "environment": environments.index(row.environment),
            "command": commands.index(row.command),
        }
        if row.run:
            data["run"] = row.run
        if row.plan is not None:
            data["plan"] = dict(row.plan)
        if row.detail:
            data["detail"] = row.detail
        if row.measured is not None:
            data["measured"] = asdict(row.measured)
        elif row.reasons:
            data["reasons"] = [asdict(reason) for reason in row.reasons]
        else:
            data["error"] = row.error
        lines.append(json.dumps(data))

    def listed(items: Iterable[str]) -> str:
        return "[\n  " + ",\n  ".join(items) + "\n ]"

    parts = {
        "schema": str(SCHEMA),
        "suite": json.dumps(suite),
        "environments": listed(json.dumps(asdict(it)) for it in environments),
        "commands": listed(map(json.dumps, commands)),
        "rows": listed(lines),
    }
    return "{\n" + ",\n".join(f' "{name}": {text}' for name, text in parts.items()) + "\n}\n"


def load(path: Path) -> list[Row]:
    """The rows of a results file. InputError, naming the file, for one that is not ours."""

    def rows(data: dict[str, Any]) -> list[Row]:
        environments = [Environment(**item) for item in data["environments"]]
        return [_row(item, environments, data["commands"]) for item in data["rows"]]

    return read(path, f"a results file of schema {SCHEMA} that python -m bench wrote", SCHEMA, rows, older=OLDER)


def read(path: Path, what: str, schema: int, parse: Callable[[dict[str, Any]], T], *, older: Sequence[int] = ()) -> T:
    """What `parse` makes of a JSON file of ours, of `schema` or one of `older`.

    InputError, naming the file, for another one or none.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not {what}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") not in (schema, *older):
        other = isinstance(data, dict) and "schema" in data
        hint = f": its schema is {data['schema']}; move it away and measure again" if other else ""
        raise InputError(f"{path}: not {what}{hint}")
    try:
        return parse(data)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not {what}: {type(error).__name__}: {error}") from None


def _row(data: Mapping[str, Any], environments: Sequence[Environment], commands: Sequence[str]) -> Row:
    return Row(
        cell=Cell(**data["cell"]),
        contender=data["contender"],
        regime=data["regime"],
        environment=environments[data["environment"]],
        command=commands[data["command"]],
        run=data.get("run", ""),
        plan=data.get("plan"),
        detail=data.get("detail", ""),
        measured=Measured(**data["measured"]) if "measured" in data else None,
        reasons=tuple(Reason(**reason) for reason in data.get("reasons", ())),
        error=data.get("error", ""),
    )


def is_ours(contender: str) -> bool:
    """Whether it is a backend, or a variant of one."""
    return contender.partition("/")[0] in BACKENDS


def one_run(rows: Iterable[Row]) -> list[Row]:
    """Of each GPU, cell and regime only the rows of one run: the newest complete one. What a table may put in a line.

    Complete is a run that set contenders against each other; one of a single contender counts where there is no
    other. Rows without a run (refused before anybody was timed) stay, unless they are of another setup than the run.
    """
    places: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        places.setdefault((row.environment.gpu, row.cell.key, row.regime), []).append(row)
    return [row for members in places.values() for row in _newest(members)]


def _newest(rows: Sequence[Row]) -> list[Row]:
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row.measured is not None:
            runs.setdefault(row.run, []).append(row)
    if not runs:
        return list(rows)
    complete = [run for run, timed in runs.items() if len(timed) > 1]
    newest = max(complete or runs)  # a run's name begins with its time
    setup = runs[newest][0].environment
    return [row for row in rows if row.run == newest or (not row.run and row.environment.same_setup(setup))]
