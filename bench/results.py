"""Results as data: a `Row` is measured, or carries reasons, or carries an error; a `Store` keeps them in one JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bench.errors import InputError
from bench.flops import rate_text
from bench.matrix import Cell
from multiattn.support import Reason

SCHEMA = 1
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
    launches: int
    host_bound: bool
    tflops: float
    peak_share: float | None
    error_ratio: float

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
    """Reproduces the row."""
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

    def finished(self, cell: Cell, contenders: Iterable[str], regime: str, environment: Environment) -> bool:
        """Whether every contender has its row of this cell from this very setup."""
        rows = [self.rows.get((cell.key, contender, regime)) for contender in contenders]
        return all(row is not None and row.environment.same_setup(environment) for row in rows)

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
    """The JSON of a results file: one line a row, the environments once each."""
    environments: list[Environment] = []
    lines = []
    for row in rows:
        if row.environment not in environments:
            environments.append(row.environment)
        data: dict[str, Any] = {
            "cell": row.cell.as_dict(),
            "contender": row.contender,
            "regime": row.regime,
            "environment": environments.index(row.environment),
            "command": row.command,
        }
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
    head = json.dumps({"schema": SCHEMA, "suite": suite, "environments": [asdict(it) for it in environments]}, indent=1)
    return head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def load(path: Path) -> list[Row]:
    """The rows of a results file. ValueError for a file of another schema or none of ours."""
    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f"{path}: not a results file of schema {SCHEMA} that python -m bench wrote")
    environments = [Environment(**item) for item in data["environments"]]
    return [_row(item, environments) for item in data["rows"]]


def _row(data: Mapping[str, Any], environments: list[Environment]) -> Row:
    return Row(
        cell=Cell(**data["cell"]),
        contender=data["contender"],
        regime=data["regime"],
        environment=environments[data["environment"]],
        command=data["command"],
        plan=data.get("plan"),
        detail=data.get("detail", ""),
        measured=Measured(**data["measured"]) if "measured" in data else None,
        reasons=tuple(Reason(**reason) for reason in data.get("reasons", ())),
        error=data.get("error", ""),
    )
