"""What a ladder's command leaves behind: its tables as text, Markdown and HTML, and a log of what it said."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from tabulate import tabulate

from bench.backward import table_text
from bench.report import commands, groups, notes, plot, provenance
from bench.results import Row
from parity.report import Table

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top; }
svg { max-width: 100%; height: auto; }"""
_WIDEST = 100
"""Characters of one cell on the terminal; a longer one, as a list of names, goes on in the next line."""


@dataclass(slots=True)
class Log:
    """Says each line on the terminal and keeps it, with the time, in a file that grows while the command runs."""

    path: Path
    lines: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, path: Path, command: str) -> Log:
        """An empty log that begins with the command."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        log = cls(path)
        log._keep(command)
        return log

    def say(self, text: str) -> None:
        """Print and keep."""
        print(text, flush=True)
        self._keep(text)

    def _keep(self, text: str) -> None:
        self.lines.append(text)
        with self.path.open("a") as file:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            file.write("".join(f"{now} {line}".rstrip() + "\n" for line in text.splitlines() or [""]))


def terminal(tables: Sequence[Table]) -> str:
    """Tables as text, long cells folded."""
    parts = []
    for table in tables:
        folded = tabulate(
            table.rows,
            headers=table.header,
            tablefmt="simple",
            disable_numparse=True,
            maxcolwidths=[_WIDEST] * len(table.header),
        )
        parts.append("\n".join(filter(None, (table.title, table.note, "", folded))))
    return "\n\n".join(parts)


def markdown(tables: Sequence[Table], *, titled: bool = True) -> str:
    """Tables one below the other, each under its title and note."""
    parts = []
    for table in tables:
        parts += [f"**{table.title}**"] if titled else []
        parts += [table.note] if table.note else []
        parts.append(table_text(table, "github"))
    return "\n\n".join(parts)


def footer(rows: Sequence[Row]) -> list[str]:
    """Where rows were measured, what makes them again, and who has no time and why."""
    measured = [row for row in rows if row.measured is not None]
    return [
        *(f"Without a time: {note}" for note in notes(rows)),
        *(f"Measured on {line}" for line in provenance(measured)),
        *(f"Again with: {line}" for line in commands(measured)),
    ]


def write_pages(
    name: str, tables: Sequence[Table], lines: Sequence[str], rows: Sequence[Row], folder: Path
) -> list[Path]:
    """Write <name>.md and <name>.html into `folder`: the lines, the tables, on the second also the curves of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = "\n".join(f"- {line}" for line in lines)
    text = f"# {name}\n\n{listed}\n\n{markdown(tables)}\n"
    paths = [folder / f"{name}.md", folder / f"{name}.html"]
    paths[0].write_text(text)
    paths[1].write_text(_page(name, tables, lines, rows))
    return paths


def _page(name: str, tables: Sequence[Table], lines: Sequence[str], rows: Sequence[Row]) -> str:
    curves = [plot(group) for group in groups(rows) if group.is_measured and len(group.cells) > 1]
    parts = [f"<h1>{html.escape(name)}</h1>", "<ul>", *(f"<li>{html.escape(line)}</li>" for line in lines), "</ul>"]
    parts += curves
    for table in tables:
        parts += [
            f"<h2>{html.escape(table.title)}</h2>",
            f"<p>{html.escape(table.note)}</p>",
            table_text(table, "html"),
        ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>'
    return f"{head}<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
