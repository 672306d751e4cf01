"""Reports made of stored results: text for the terminal, Markdown, and one self-contained HTML page with plots."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import tables
from bench.results import Row, load
from bench.tables import Group, groups
from parity.report import Table

PLOT_STYLE = {"svg.hashsalt": "multiattn", "svg.fonttype": "path", "font.size": 9}
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>multiattn</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; } svg { max-width: 100%; height: auto; }
</style></head><body>
<h1>multiattn: one attention, three kernels</h1>
"""


def load_all(paths: Iterable[Path]) -> list[Row]:
    """The rows of several results files."""
    return [row for path in paths for row in load(path)]


def text_report(rows: Sequence[Row], *, form: str = "simple", made: Sequence[Table] | None = None) -> str:
    """The tables that rows fill, or those `made` of them, with lists below; `form` ``github`` makes it Markdown."""
    heading = "### " if form == "github" else ""
    if made is None:
        made = [*map(tables.speed_table, groups(rows)), *tables.memory_tables(rows)]
    parts: list[str] = []
    for table in made:
        parts += filter(None, (f"{heading}{table.title}", table.note, tables.write(table, form)))
    for title, lines in tables.footnotes(rows).items():
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
