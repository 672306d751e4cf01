"""Parity's JSON (parity.report.to_json) as the report page shows it; case by case is parity's own page, linked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import InputError

STATUSES = ("passed", "failed", "error", "refused")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """What the page says of a parity run."""

    verdict: str
    """parity.report.verdict's own words: passed or failed, runs, comparisons."""
    passed: bool
    failures: tuple[str, ...]
    tables: tuple[Table, ...]
    errors: Mapping[str, Mapping[str, float]]
    """Backend, case, worst error over its budget."""
    link: str = ""
    """Parity's own page, relative to this one."""


def load_parity(path: Path, page: Path) -> Parity:
    """Parity's JSON for the HTML file `page`. InputError, naming the file, for another one."""
    try:
        data = json.loads(path.read_text())
        own = path.with_name("parity.html")
        link = Path(os.path.relpath(own.resolve(), page.parent.resolve())).as_posix() if own.exists() else ""
        return of_json(data, link)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not what python -m parity wrote: {type(error).__name__}: {error}") from None


def of_json(data: Mapping[str, Any], link: str = "") -> Parity:
    """The page's part of parity's JSON. KeyError where it lacks one."""
    results, pairs = data["results"], data["pairs"]
    failures = [
        f"{name} was asked for and ran nothing"
        for name, rows in _by(results, "backend").items()
        if all(row["status"] == "refused" for row in rows)
    ]
    failures += [
        f"{row['backend']} {row['status']} on {row['case']}: {row.get('message', '')}"
        for row in results
        if row["status"] in ("failed", "error")
    ]
    failures += [
        f"{pair['left']} and {pair['right']} disagree on {pair['case']}: {_share(pair):.2f} of what both are allowed"
        for pair in pairs
        if _share(pair) > 1
    ]
    return Parity(
        verdict=data["verdict"],
        passed=data["verdict"].startswith("Passed"),
        failures=tuple(failures),
        tables=(_summary(results), _pairs(pairs), _skips(results), _about(data)),
        errors={
            name: {row["case"]: _share(row) for row in rows if row.get("out") and row.get("lse")}
            for name, rows in _by(results, "backend").items()
        },
        link=link,
    )


def _summary(results: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="Parity: each backend against the reference in fp64",
        headers=("backend", *STATUSES, "worst error over budget"),
        rows=tuple((name, *_count_statuses(rows), _worst(rows)) for name, rows in _by(results, "backend").items()),
    )


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="Parity: backends against each other",
        headers=("A", "B", "cases", "worst |A - B| over what both are allowed"),
        rows=tuple(
            (left, right, str(len(rows)), _worst(rows))
            for left, by_left in _by(pairs, "left").items()
            for right, rows in _by(by_left, "right").items()
        ),
    )


def _skips(results: Sequence[Mapping[str, Any]]) -> Table:
    cases: dict[tuple[str, str], list[str]] = {}
    for row in results:
        if row["status"] == "refused":
            cases.setdefault((row["backend"], "; ".join(row["reasons"])), []).append(row["case"])
    return Table(
        title="Parity: not run, and why",
        headers=("backend", "reasons", "cases", "which"),
        rows=tuple((*key, str(len(names)), ", ".join(names)) for key, names in cases.items()),
    )


def _about(data: Mapping[str, Any]) -> Table:
    about = [("command", data.get("command")), *data.get("environment", {}).items()]
    return Table(
        title="Parity: where", headers=("", ""), rows=tuple((key, str(value)) for key, value in about if value)
    )


def _by(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(str(row[key]), []).append(row)
    return found


def _count_statuses(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(str(sum(row["status"] == status for row in rows)) for status in STATUSES)


def _share(row: Mapping[str, Any]) -> float:
    """The larger ratio of out and lse; inf is stored as a text."""
    return max(float(row[what][2]) for what in ("out", "lse"))


def _worst(rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest ratio and its case; ``none ran`` where there is no score."""
    scores = [(_share(row), str(row["case"])) for row in rows if row.get("out") and row.get("lse")]
    if not scores:
        return "none ran"
    ratio, case = max(scores)
    return f"{ratio:.2f} ({case})"
