"""Parity's JSON (parity.report.to_json) as the report page shows it; case by case is parity's own page, linked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import InputError

TENSORS = ("out", "lse", "dq", "dk", "dv")
"""What a row has scores of, by direction the first two or the other three: error, budget, ratio, of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """What the page says of a parity run: parity's own words, and what the plot is of."""

    verdict: str
    failures: tuple[str, ...]
    tables: tuple[Mapping[str, Any], ...]
    """As parity.report.Table has them: title, note, header, rows."""
    about: Mapping[str, str]
    errors: Mapping[str, Mapping[str, Mapping[str, float]]]
    """Direction, backend, case, worst error over its budget; only directions that ran."""
    link: str = ""
    """Parity's own page, relative to this one."""


def load_parity(path: Path, page: Path) -> Parity:
    """Parity's JSON for the HTML file `page`. InputError, naming the file, for another one."""
    try:
        data = json.loads(path.read_text())
        own = path.with_name("parity.html")
        link = Path(os.path.relpath(own.resolve(), page.parent.resolve())).as_posix() if own.exists() else ""
        return of_json(data, link)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not what python -m parity wrote: {type(error).__name__}: {error}") from None


def of_json(data: Mapping[str, Any], link: str = "") -> Parity:
    """The page's part of parity's JSON. KeyError where it lacks one."""
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["results"]:
        scores = [float(row[tensor][2]) for tensor in TENSORS if row.get(tensor)]  # inf is stored as a text
        if scores:
            of_backend = errors.setdefault(row.get("direction", "forward"), {}).setdefault(row["backend"], {})
            of_backend[row["case"]] = max(*scores, of_backend.get(row["case"], 0.0))  # of several variants the worst
    return Parity(
        verdict=data["verdict"],
        failures=tuple(data["failures"]),
        tables=tuple(data["tables"]),
        about={"command": data["command"], **data["environment"]},
        errors=errors,
        link=link,
    )
