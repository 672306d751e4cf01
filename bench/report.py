"""Reports made of stored rows: tables for the terminal and Markdown. bench.page makes the page of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.matrix import Cell
from bench.results import Environment, Row, is_ours, load, newest, one_run
from parity.report import Table

NOTHING = "-"
NOT_MEASURED = "Not measured yet: `python -m bench` on a GPU writes bench/results."
TITLES = {"fwd": "", "bwd": "backward, ", "fwdbwd": "forward and backward, "}


def write(table: Table, form: str) -> str:
    """The header and rows as tabulate writes them: ``simple``, ``github`` or ``html``."""
    return tabulate(table.rows, headers=table.header, tablefmt=form, disable_numparse=True)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of a page, whose cells may be anything."""
    return tabulate([[str(it) for it in row] for row in rows], header, tablefmt="github", disable_numparse=True)


def by_cell(rows: Iterable[Row]) -> dict[Cell, dict[str, Row]]:
    """The rows of each cell by contender."""
    found: dict[Cell, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.cell, {})[row.contender] = row
    return found


def fastest(rows: Iterable[Row], *, ours: bool) -> Row | None:
    """The fastest row of ours, or of peers; None where none of them has a time."""
    timed = (row for row in rows if row.measured is not None and is_ours(row.contender) == ours)
    return max(timed, key=lambda row: row.tflops, default=None)


def times_as_fast(row: Row | None, other: Row | None) -> float | None:
    """How many times as fast one row is as another; None where one of them has no time."""
    return row.tflops / other.tflops if row is not None and other is not None and row.tflops and other.tflops else None


def over(row: Row | None, other: Row | None, unit: str = "") -> str:
    """`times_as_fast` for a table."""
    ratio = times_as_fast(row, other)
    return NOTHING if ratio is None else f"{ratio:.2f}{unit}"


def mean_text(ratios: Sequence[float], digits: int) -> str:
    """The geometric mean for a table."""
    return f"{statistics.geometric_mean(ratios):.{digits}f}" if ratios else NOTHING


def timed_names(rows: Iterable[Row]) -> list[str]:
    """The contenders that have a time in some row."""
    return list(dict.fromkeys(row.contender for row in rows if row.measured is not None))


def timed(path: Path, regime: str = "device") -> list[Row]:
    """The rows of a results file that have a time in a regime, of one run for each cell."""
    return [row for row in newest(path) if row.regime == regime and row.tflops]


Column = Callable[[Any, Mapping[str, Row]], object]
"""Makes a cell of a table from a cell of the matrix and its rows by contender."""


def cells_table(rows: Iterable[Row], columns: Mapping[str, Column]) -> str:
    """A line for each cell, with `columns` by their titles."""
    return markdown([*columns], [[make(*it) for make in columns.values()] for it in by_cell(rows).items()])


def rates(names: Iterable[str], show: Callable[[Row | None], str]) -> dict[str, Column]:
    """A column for each contender."""
    return {name: lambda _, its, name=name: show(its.get(name)) for name in names}  # type: ignore[misc]


def figure(row: Row | None) -> str:
    """TFLOPS for a table, or a word."""
    return row.figure if row is not None else "not in this run"


def speed_tables(rows: Iterable[Row]) -> list[Table]:
    """TFLOPS by length, with one run of each cell, of rows that share all but length and batch size.

    A table has a column for each contender that could run at all; there is none of rows without a time.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in one_run(rows):
        cell = row.cell
        sizes = (cell.direction, cell.widths, cell.attention, cell.dtype, cell.layout, cell.heads_text)
        found.setdefault((*sizes, row.regime, row.environment.gpu), []).append(row)
    return [_speed_table(members) for members in found.values() if timed_names(members)]


def _speed_table(members: Sequence[Row]) -> Table:
    cell, by_name = members[0].cell, {(row.cell, row.contender): row for row in members}
    cells = sorted({row.cell for row in members}, key=lambda it: (it.seq, it.batch))
    names = dict.fromkeys(row.contender for row in members if row.measured is not None or row.error)
    tokens = {it.batch * it.seq for it in cells}
    batch = f"{tokens.pop()} tokens" if len(tokens) == 1 else f"B={cell.batch}"
    title = f"TFLOPS, {TITLES[cell.direction]}D={cell.widths} {cell.attention}, H={cell.heads_text}, {batch}, "
    title += f"{cell.dtype} {cell.layout}, {members[0].regime} regime, {members[0].environment.gpu}"
    lines = tuple((str(it.seq), *(figure(by_name.get((it, name))) for name in names)) for it in cells)
    return Table(title=title, note="", header=("N", *names), rows=lines)


def memory_summary(rows: Iterable[Row]) -> str:
    """One line: for each of ours the largest share of SDPA flash's extra memory in any cell; empty if uncounted."""
    found = [row for row in one_run(rows) if row.regime == "device" and row.cell.direction == "bwd"]
    taken = {(row.cell, row.contender): row.measured.peak_extra_bytes for row in found if row.measured is not None}
    worst: dict[str, float] = {}
    for (cell, name), size in taken.items():
        bar = taken.get((cell, "sdpa-flash"))
        if is_ours(name) and size is not None and bar:
            worst[name] = max(size / bar, worst.get(name, 0.0))
    shares = ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items())
    told = "Device memory of a backward beside inputs and outputs, over SDPA flash's, in the worst cell"
    return f"{told}: {shares}." if worst else ""


def notes(rows: Iterable[Row]) -> list[str]:
    """Each distinct reason or error once, with how many rows carry it."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.measured is None:
            note = f"{row.contender}: {'error: ' if row.error else ''}{row.text}"
            counts[note] = counts.get(note, 0) + 1
    return [f"{note} [{count} row{'s' if count > 1 else ''}]" for note, count in counts.items()]


def provenance(rows: Iterable[Row]) -> list[str]:
    """One line for each environment that rows were measured in."""
    return list(dict.fromkeys(describe(row.environment) for row in rows if row.measured is not None))


def describe(setup: Environment) -> str:
    """GPU, driver, commit, date and versions in one line."""
    peak = f"stated peak {setup.peak_tflops:g} TFLOPS" if setup.peak_tflops else "no stated peak"
    tools = ", ".join(f"{name} {version}" for name, version in setup.versions.items())
    return (
        f"{setup.gpu} ({setup.arch}, {peak}), driver {setup.driver}, commit {setup.commit}, source {setup.source}, "
        f"{setup.date}: {tools}"
    )


def footnotes(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Lists to stand below tables: rows without a time, where the others were measured, and the commands."""
    measured = [row for row in one_run(rows) if row.measured is not None]
    commands = list(dict.fromkeys(row.command for row in measured))
    found = {"Without a time": notes(rows), "Measured on": provenance(measured), "Again with": commands}
    return {title: lines for title, lines in found.items() if lines}


# ---------------------------------------------------------------- reports


def load_all(paths: Iterable[Path]) -> list[Row]:
    """The rows of several results files."""
    return [row for path in paths for row in load(path)]


def text_report(rows: Sequence[Row], *, form: str = "simple", made: Sequence[Table] | None = None) -> str:
    """The tables that rows fill, or those `made` of them, with lists below; `form` ``github`` makes it Markdown."""
    heading = "### " if form == "github" else ""
    if made is None:
        made = speed_tables(rows)
    parts: list[str] = []
    for table in made:
        parts += filter(None, (f"{heading}{table.title}", table.note, write(table, form)))
    for title, lines in footnotes(rows).items():
        parts += [f"{heading}{title}", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(parts)
