"""Reports made of stored results: text for the terminal, Markdown, and one self-contained HTML page."""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import tables
from bench.errors import InputError
from bench.results import Row, load
from bench.tables import Group, groups
from multiattn.inspect import cli as compiled
from multiattn.inspect.tables import detailed
from parity.report import Table

PLOT_STYLE = {"svg.hashsalt": "multiattn", "svg.fonttype": "path", "font.size": 9}
PAGE_STYLE = """:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
pre { overflow-x: auto; } li { overflow-wrap: anywhere; } svg { background: #fff; max-width: 100%; height: auto; }"""
RULES = (
    "Median of rounds in which the contenders took turns in random order; whiskers reach from quartile to quartile. "
    "A masked pair does not count as work. Every kernel that was timed had passed parity in the same process."
)


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that rows fill."""
    return [*map(tables.speed_table, groups(rows)), *tables.memory_tables(rows)]


def text_report(rows: Sequence[Row], *, form: str = "simple", made: Sequence[Table] | None = None) -> str:
    """The tables that rows fill, or those `made` of them, with lists below; `form` ``github`` makes it Markdown."""
    heading, item = ("### ", "- ") if form == "github" else ("", "- ")
    parts: list[str] = []
    for table in speed_tables(rows) if made is None else made:
        parts += filter(None, (f"{heading}{table.title}", table.note, tables.write(table, form)))
    for title, lines in tables.footnotes(rows).items():
        parts += [f"{heading}{title}", "\n".join(f"{item}{line}" for line in lines)]
    return "\n\n".join(parts)


# ---------------------------------------------------------------- plots


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
                low = [it.tflops - it.tflops * it.time_ms / it.high_ms for _, it in points]
                high = [it.tflops * it.time_ms / it.low_ms - it.tflops for _, it in points]
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


# ---------------------------------------------------------------- one page


def write_page(
    page: Path, rows: Sequence[Row] = (), *, recorded: Sequence[Row] = (), parity: Path | None = None,
    compiled_tables: Sequence[Path] = (),
) -> None:  # fmt: skip
    """Write one HTML page: parity's verdict first, then timings, recorded ones of other runs, and compile tables."""
    parts = [] if parity is None else _parity(parity, page)
    parts += _section("Speed: TFLOPS by length", rows)
    for title in dict.fromkeys(map(_place, recorded)):
        members = [row for row in recorded if _place(row) == title]
        parts += _section(f"Recorded: TFLOPS by length on {title}", members)
    for path in compiled_tables:
        parts += ["<h2>Compiled for every target, no GPU needed</h2>", _compiled(path)]
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>multiattn</title>'
    body = "\n".join(["<h1>multiattn: one attention, three kernels</h1>", *parts])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{head}<style>{PAGE_STYLE}</style></head><body>\n{body}\n</body></html>\n")


def _place(row: Row) -> str:
    setup = row.environment
    return f"{setup.gpu}, {setup.date}, commit {setup.commit}"


def _section(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    parts = [f"<h2>{html.escape(title)}</h2><p>{RULES}</p>"]
    for group in groups(rows):
        parts += [_table(tables.speed_table(group)), plot(group)]
    parts += map(_table, tables.memory_tables(rows))
    for name, lines in tables.footnotes(rows).items():
        parts.append(f"<p>{name}:</p><ul>{_items(lines)}</ul>")
    return parts


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _table(table: Table) -> str:
    return f"<h3>{html.escape(table.title)}</h3><p>{html.escape(table.note)}</p>{tables.write(table, 'html')}"


def _compiled(path: Path) -> str:
    try:
        return f"<pre>{html.escape(detailed(compiled.load(path)))}</pre>"
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not what python -m multiattn compile --json wrote: {error}") from None


def _parity(path: Path, page: Path) -> list[str]:
    """The verdict, failures and short tables in parity's JSON, with a link to parity's own page of every case."""
    try:
        data = json.loads(path.read_text())
        short = [Table(**{**it, "rows": tuple(map(tuple, it["rows"]))}) for it in data["tables"]]
        told = {"command": data["command"], **data["environment"]}
        verdict, failures = html.escape(data["verdict"]), _items(data["failures"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: not what python -m parity wrote: {type(error).__name__}: {error}") from None
    link = Path(os.path.relpath(path.with_name("parity.html").resolve(), page.parent.resolve())).as_posix()
    parts = [f'<p><b>Parity: {verdict}</b> <a href="{html.escape(link)}">Case by case</a></p>']
    parts += [f"<ul>{failures}</ul>", *(_table(it) for it in short if it.rows)]
    return [*parts, f"<ul>{_items(f'{name}: {value}' for name, value in told.items())}</ul>"]


def load_all(paths: Iterable[Path]) -> list[Row]:
    """The rows of several results files."""
    return [row for path in paths for row in load(path)]
