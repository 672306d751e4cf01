"""Reports made of results alone: short tables for the terminal, Markdown, and one self-contained HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tabulate import tabulate

from bench import backward
from bench.errors import InputError
from bench.flops import rate_text
from bench.matrix import Cell
from bench.parity_page import Parity, load_parity
from bench.results import Environment, Row, is_ours, load, one_run
from multiattn.inspect.build import Entry, ordered
from multiattn.inspect.cli import load as load_table
from parity.report import Table

STYLE = {"svg.hashsalt": "multiattn", "svg.fonttype": "path", "font.size": 9}
DIRECTION_TITLES = {"fwd": "", "bwd": "backward, ", "fwdbwd": "forward and backward, "}
MOST_SHOWN = 2.0
"""Where the parity plot is cut: an error of a thousand budgets would hide all others, and inf has no place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that one table or plot shows: one direction, head_dim, mask, dtype, layout, heads, regime and GPU."""

    title: str
    regime: str
    cells: tuple[Cell, ...]
    contenders: tuple[str, ...]
    rows: Mapping[tuple[str, str], Row]

    @property
    def is_measured(self) -> bool:
        """Whether any of its rows is."""
        return any(row.measured is not None for row in self.rows.values())


def groups(rows: Sequence[Row]) -> list[Group]:
    """Rows by what they share but for the length, in the order in which they come; of each cell one run only."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in one_run(rows):
        cell = row.cell
        sizes = (cell.direction, cell.head_dim, cell.causal, cell.dtype, cell.layout, cell.heads_text)
        found.setdefault((*sizes, row.regime, row.environment.gpu), []).append(row)
    return [_group(members) for members in found.values()]


def _group(members: Sequence[Row]) -> Group:
    cell = members[0].cell
    cells = sorted({row.cell for row in members}, key=lambda it: (it.seq, it.batch))
    tokens = {it.batch * it.seq for it in cells}
    batch = f"{tokens.pop()} tokens" if len(tokens) == 1 else f"B={cell.batch}"
    return Group(
        title=f"{DIRECTION_TITLES[cell.direction]}D={cell.head_dim} {cell.mask}, H={cell.heads_text}, {batch}, "
        f"{cell.dtype} {cell.layout}, "
        f"{members[0].regime} regime, {members[0].environment.gpu}",
        regime=members[0].regime,
        cells=tuple(cells),
        contenders=tuple(dict.fromkeys(row.contender for row in members)),
        rows={(row.cell.key, row.contender): row for row in members},
    )


def figure(row: Row | None) -> str:
    """What stands in a table's cell: TFLOPS; ``refused`` or ``error``, whose text is listed below the table."""
    if row is None:
        return "not in this run"
    if row.measured is not None:
        late = " (host-bound)" if row.measured.host_bound else ""
        return f"{rate_text(row.measured.tflops)}{late}"
    return "refused" if row.reasons else "error"


def text_table(group: Group, *, form: str = "simple") -> str:
    """TFLOPS over N, one column a contender; contenders that nobody could run at all are left to `notes`."""
    shown = [name for name in group.contenders if _has_result(group, name)] or list(group.contenders)
    table = [(cell.seq, *(figure(group.rows.get((cell.key, name))) for name in shown)) for cell in group.cells]
    return tabulate(table, headers=("N", *shown), tablefmt=form, disable_numparse=True, stralign="right")


def _has_result(group: Group, contender: str) -> bool:
    rows = [group.rows.get((cell.key, contender)) for cell in group.cells]
    return any(row is not None and (row.measured is not None or row.error) for row in rows)


def notes(rows: Iterable[Row]) -> list[str]:
    """Each distinct reason or error once, with how many rows carry it."""
    counts: dict[str, int] = {}
    for row in rows:
        if row.measured is None:
            note = f"{row.contender}: {'error: ' if row.error else ''}{row.text}"
            counts[note] = counts.get(note, 0) + 1
    return [f"{note} [{count} row{'s' if count > 1 else ''}]" for note, count in counts.items()]


def provenance(rows: Sequence[Row]) -> list[str]:
    """One line for each environment that rows were measured in."""
    return list(dict.fromkeys(describe(row.environment) for row in rows))


def describe(setup: Environment) -> str:
    """GPU, driver, commit, date and versions in one line."""
    peak = f"stated peak {setup.peak_tflops:g} TFLOPS" if setup.peak_tflops else "no stated peak"
    tools = ", ".join(f"{name} {version}" for name, version in setup.versions.items())
    return (
        f"{setup.gpu} ({setup.arch}, {peak}), driver {setup.driver}, commit {setup.commit}, source {setup.source}, "
        f"{setup.date}: {tools}"
    )


def text_report(rows: Sequence[Row], *, form: str = "simple") -> str:
    """Every table with its notes; `form` ``github`` makes it Markdown."""
    heading = "### " if form == "github" else ""
    parts = []
    for group in groups(rows):
        if group.is_measured:
            parts += [f"{heading}TFLOPS, {group.title}", text_table(group, form=form)]
    for table in backward.tables(rows):
        parts += [f"{heading}{table.title}", table.note, backward.table_text(table, form)]
    listed = [f"- {note}" for note in notes(rows)]
    if listed:
        parts += [f"{heading}Without a time", "\n".join(listed)]
    measured = [row for row in one_run(rows) if row.measured is not None]
    if measured:
        parts += [f"{heading}Measured on", "\n".join(f"- {line}" for line in provenance(measured))]
        parts += [f"{heading}Again with", "\n".join(f"- `{line}`" for line in commands(measured))]
    return "\n\n".join(parts)


def write_pages(rows: Sequence[Row], folder: Path, name: str) -> tuple[Path, Path]:
    """Write <name>.md and <name>.html into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    markdown, page = folder / f"{name}.md", folder / f"{name}.html"
    markdown.write_text(f"# multiattn: {name}\n\n{text_report(rows, form='github')}\n")
    page.write_text(html_report(rows))
    return markdown, page


def plot(group: Group) -> str:
    """TFLOPS over N as an SVG element, whiskers from quartile to quartile; nothing outside it is referred to."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        drawing, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        for contender in group.contenders:
            points = [
                (cell.seq, row.measured)
                for cell in group.cells
                if (row := group.rows.get((cell.key, contender))) is not None and row.measured is not None
            ]
            if not points:
                continue
            low = [it.tflops - it.tflops * it.time_ms / it.high_ms for _, it in points]
            high = [it.tflops * it.time_ms / it.low_ms - it.tflops for _, it in points]
            rates = [it.tflops for _, it in points]
            axes.errorbar(
                [seq for seq, _ in points], rates, yerr=[low, high], label=contender, marker="o", ms=3, capsize=2
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([cell.seq for cell in group.cells], [f"{cell.seq}" for cell in group.cells])
        axes.set(title=group.title, xlabel="N", ylabel="TFLOPS", ylim=(0, None))
        return _svg(drawing, axes)


def ratio_plot(group: Group) -> str:
    """Our TFLOPS over those of each cell's fastest peer, over N, as an SVG element; empty where there is no peer."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in group.cells:
        found = {name: row for (key, name), row in group.rows.items() if key == cell.key and row.measured is not None}
        peer = backward.best_peer(found)
        for name, row in found.items():
            if peer is not None and is_ours(name):
                lines.setdefault(name, []).append((cell.seq, backward.share(row, peer)))
    if not lines:
        return ""
    with pyplot.rc_context(STYLE):
        drawing, axes = pyplot.subplots(figsize=(6.4, 3.0), layout="constrained")
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), label=name, marker="o", ms=3)
        axes.axhline(1, color="#888888", lw=1, ls="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks([cell.seq for cell in group.cells], [f"{cell.seq}" for cell in group.cells])
        axes.set(title=f"Over the best peer: {group.title}", xlabel="N", ylabel="ratio", ylim=(0, None))
        return _svg(drawing, axes)


def error_plot(direction: str, errors: Mapping[str, Mapping[str, float]]) -> str:
    """Parity's error over its budget per case, a line a backend, as an SVG element; above 1 is a failure."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(case for scores in errors.values() for case in scores))
    with pyplot.rc_context(STYLE):
        drawing, axes = pyplot.subplots(figsize=(max(6.4, 0.17 * len(cases)), 4.2), layout="constrained")
        for backend, scores in errors.items():
            places = [place for place, case in enumerate(cases) if case in scores]
            shares = [min(scores[cases[place]], MOST_SHOWN) for place in places]
            axes.plot(places, shares, label=backend, marker="o", ms=3, lw=0.8)
        axes.axhline(1, color="#c0362c", lw=1, ls="--")
        axes.set_xticks(range(len(cases)), cases, rotation=90, fontsize=6)
        title = f"Parity, {direction}: worst error of a case over its budget"
        axes.set(title=title, ylabel="error / budget", ylim=(0, None))
        return _svg(drawing, axes)


def _svg(drawing: Any, axes: Any) -> str:
    """Finish a drawing and close it; inside pyplot's context of STYLE."""
    from matplotlib import pyplot

    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=3)
    target = io.StringIO()
    drawing.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(drawing)
    return _bare_svg(target.getvalue())


def _bare_svg(document: str) -> str:
    """The svg element alone: no XML head, no metadata, no address of a standard, which an HTML page does not need."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", element)
    return element.replace("xlink:href", "href")


def html_report(
    rows: Sequence[Row],
    entries: Sequence[Entry] = (),
    parity: Parity | None = None,
    recorded: Sequence[Row] = (),
    target_pages: str = "",
) -> str:
    """One page of whatever there is: parity's verdict first, then timings and the compile table.

    `target_pages` is where the pages of every target are, as a link goes there; empty where they are not.
    `recorded` are rows of bench/results: they stand apart from `rows`, under a title that says whose they are.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    here = _section("Speed: TFLOPS over N", rows)
    there = [_section(f"Recorded: TFLOPS over N on {title}", members) for title, members in _by_place(recorded).items()]
    return environment.get_template("report.html").render(
        sections=[section for section in (here, *there) if section.groups],
        figure=figure,
        notes=notes(rows),
        entries=ordered(entries),
        target_pages=target_pages,
        parity=parity,
        error_plots=[error_plot(*item) for item in parity.errors.items()] if parity is not None else [],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The groups of one origin: this machine, or what is recorded of another."""

    title: str
    groups: tuple[Group, ...]
    plots: tuple[tuple[str, ...], ...]
    """SVG elements of each group: TFLOPS, and of a backward ours over the best peer."""
    tables: tuple[Table, ...]
    provenance: tuple[str, ...]
    commands: tuple[str, ...]


def _section(title: str, rows: Sequence[Row]) -> Section:
    shown = tuple(group for group in groups(rows) if group.is_measured)
    measured = [row for row in one_run(rows) if row.measured is not None]
    return Section(
        title=title,
        groups=shown,
        plots=tuple(_plots(group) for group in shown),
        tables=backward.tables(rows),
        provenance=tuple(provenance(measured)),
        commands=commands(measured),
    )


def _plots(group: Group) -> tuple[str, ...]:
    made = [plot(group)]
    if any(cell.direction != "fwd" for cell in group.cells):
        made.append(ratio_plot(group))
    return tuple(filter(None, made))


def commands(rows: Iterable[Row]) -> tuple[str, ...]:
    """Each command that makes one of these rows again, whole."""
    return tuple(dict.fromkeys(row.command for row in rows))


def _by_place(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Measured rows by GPU, date and commit."""
    found: dict[str, list[Row]] = {}
    for row in one_run(rows):
        if row.measured is not None:
            setup = row.environment
            found.setdefault(f"{setup.gpu}, {setup.date}, commit {setup.commit}", []).append(row)
    return found


def combined_report(
    parity_json: Path | None,
    bench_json: Path | Sequence[Path] | None,
    out_html: Path,
    compile_json: Path | Sequence[Path] | None = None,
    recorded: Sequence[Path] = (),
) -> None:
    """Write one HTML page from what parity and bench wrote; a path of None, or one without a file, is left out.

    InputError where none of the files is there: an empty report would say nothing.
    """
    paths = [bench_json] if isinstance(bench_json, Path) else list(bench_json or ())
    rows = [row for path in paths if path.exists() for row in load(path)]
    tables = [compile_json] if isinstance(compile_json, Path) else list(compile_json or ())
    entries = [entry for path in tables if path.exists() for entry in load_entries(path)]
    parity = load_parity(parity_json, out_html) if parity_json is not None and parity_json.exists() else None
    if not rows and not entries and parity is None:
        raise InputError(
            "no parity, bench or compile results to report on: run python -m parity or python -m bench first"
        )
    targets = Path("targets", "index.html")
    link = targets.as_posix() if (out_html.parent / targets).exists() else ""
    page = html_report(rows, entries, parity, [row for path in recorded for row in load(path)], link)
    try:
        out_html.parent.mkdir(parents=True, exist_ok=True)
        out_html.write_text(page)
    except OSError as error:
        raise InputError(f"cannot write to {out_html}: {error.strerror}") from None


def load_entries(path: Path) -> list[Entry]:
    """The entries of a compile table; InputError, naming the file, for another one."""
    try:
        return load_table(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = str(error).removeprefix(f"{path}: ")
        raise InputError(f"{path}: not what python -m multiattn compile --json wrote: {why}") from None
