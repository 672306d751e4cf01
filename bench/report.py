"""Reports made of stored rows: tables for the terminal and Markdown, plots, and one self-contained HTML page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.matrix import Cell
from bench.results import Environment, Row, is_ours, load, one_run
from parity.report import Table

PLOT_STYLE = {"svg.hashsalt": "multiattn", "svg.fonttype": "path", "font.size": 9}
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>multiattn</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; } svg { max-width: 100%; height: auto; }
</style></head><body>
<h1>multiattn: one attention, three kernels</h1>
"""
TITLES = {"fwd": "", "bwd": "backward, ", "fwdbwd": "forward and backward, "}


def write(table: Table, form: str) -> str:
    """The header and rows as tabulate writes them: ``simple``, ``github`` or ``html``."""
    return tabulate(table.rows, headers=table.header, tablefmt=form, disable_numparse=True)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of a page, whose cells may be anything."""
    return tabulate([[str(it) for it in row] for row in rows], header, tablefmt="github", disable_numparse=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows of one table or plot: they share all but length and batch size, and the regime and the GPU."""

    title: str
    cells: tuple[Cell, ...]
    contenders: tuple[str, ...]
    rows: Mapping[tuple[str, str], Row]


def groups(rows: Iterable[Row]) -> list[Group]:
    """Rows by all that they share but for the length, with one run of each cell; groups without a time are left out."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in one_run(rows):
        cell = row.cell
        sizes = (cell.direction, cell.head_dim, cell.attention, cell.dtype, cell.layout, cell.heads_text)
        found.setdefault((*sizes, row.regime, row.environment.gpu), []).append(row)
    return [_group(members) for members in found.values() if any(row.measured is not None for row in members)]


def _group(members: Sequence[Row]) -> Group:
    cell = members[0].cell
    cells = sorted({row.cell for row in members}, key=lambda it: (it.seq, it.batch))
    tokens = {it.batch * it.seq for it in cells}
    batch = f"{tokens.pop()} tokens" if len(tokens) == 1 else f"B={cell.batch}"
    return Group(
        title=f"{TITLES[cell.direction]}D={cell.head_dim} {cell.attention}, H={cell.heads_text}, {batch}, "
        f"{cell.dtype} {cell.layout}, {members[0].regime} regime, {members[0].environment.gpu}",
        cells=tuple(cells),
        contenders=tuple(dict.fromkeys(row.contender for row in members if row.measured is not None or row.error)),
        rows={(row.cell.key, row.contender): row for row in members},
    )


def figure(row: Row | None) -> str:
    """TFLOPS for a table, or a word."""
    return row.figure if row is not None else "not in this run"


def speed_table(group: Group) -> Table:
    """TFLOPS by length, a column for each contender that could run at all."""
    rows = tuple(
        (str(cell.seq), *(figure(group.rows.get((cell.key, name))) for name in group.contenders))
        for cell in group.cells
    )
    return Table(title=f"TFLOPS, {group.title}", note="", header=("N", *group.contenders), rows=rows)


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
        made = list(map(speed_table, groups(rows)))
    parts: list[str] = []
    for table in made:
        parts += filter(None, (f"{heading}{table.title}", table.note, write(table, form)))
    for title, lines in footnotes(rows).items():
        parts += [f"{heading}{title}", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(parts)


def plot(group: Group) -> str:
    """TFLOPS by length as an SVG element, whiskers from quartile to quartile; it refers to nothing outside."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(PLOT_STYLE):
        drawing, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        for name in group.contenders:
            found = [(cell.seq, group.rows.get((cell.key, name))) for cell in group.cells]
            points = [(seq, row.measured) for seq, row in found if row is not None and row.measured is not None]
            if points:
                low = [it.tflops * (1 - it.time_ms / it.high_ms) for _, it in points]  # never below 0 by a rounding
                high = [it.tflops * (it.time_ms / it.low_ms - 1) for _, it in points]
                lengths, rates = [seq for seq, _ in points], [it.tflops for _, it in points]
                axes.errorbar(lengths, rates, yerr=[low, high], label=name, marker="o", ms=3, capsize=2)
        axes.set_xscale("log", base=2)
        axes.set_xticks([cell.seq for cell in group.cells], [f"{cell.seq}" for cell in group.cells])
        axes.set(title=group.title, xlabel="N", ylabel="TFLOPS", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=3)
        target = io.StringIO()
        drawing.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(drawing)
    document = target.getvalue()
    element = re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", element).replace("xlink:href", "href")


def section(title: str, text: str, link: str = "") -> str:
    """A part of the page: a title, perhaps a link to another page, and text as it stands on a terminal."""
    more = f' <a href="{html.escape(link)}">More</a>' if link else ""
    return f"<h2>{html.escape(title)}{more}</h2>\n<pre>{html.escape(text)}</pre>\n"


def speed_section(title: str, rows: Sequence[Row]) -> str:
    """A part of the page: plots and tables of rows, or why there are none."""
    return section(title, text_report(rows)) + "\n".join(map(plot, groups(rows)))


def write_page(path: Path, sections: Sequence[str]) -> None:
    """Write one HTML page that needs nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE + "\n".join(sections) + "\n</body></html>\n")
