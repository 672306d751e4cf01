"""docs/ladder.md is generated in part: ``python -m bench ladder --docs`` rewrites what stands between its markers.

``<!-- ladder:NAME -->`` ... ``<!-- /ladder -->`` holds the block of that name that `ladder_blocks` makes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import ladder_facts
from bench.backward import table_text
from bench.environment import ROOT
from bench.errors import InputError
from bench.ladder_facts import Record
from bench.ladder_list import Listing, axes_table, listings, points_table, refused_table
from bench.ladder_points import climb_tables, neighbour_tables, sram_table
from bench.ladder_rungs import LISTED, SHAPES
from bench.ladder_tables import (
    MODES,
    boards,
    compiled_table,
    config_table,
    impact_table,
    rungs_table,
    setting_text,
    step_tables,
    summary_table,
)
from bench.report import commands, provenance
from bench.results import Row, load
from parity.report import Table

MARKED = re.compile(r"(<!-- ladder:([\w-]+) -->\n).*?(<!-- /ladder -->)", re.DOTALL)
PAGE = ROOT / "docs" / "ladder.md"


def ladder_blocks(rows: Sequence[Row], records: Sequence[Record]) -> dict[str, str]:
    """Every block by its name, as Markdown, from rows that were timed and records that were compiled.

    Of a backend with a chain: NAME_rungs, NAME_summary, NAME_steps, NAME_impact, NAME_configs, NAME_compiled,
    NAME_provenance. Of a list of points: NAME_axes, NAME_sram, NAME_climbs, NAME_neighbours, NAME_points, NAME_refused,
    NAME_provenance.
    """
    blocks: dict[str, str] = {}
    for backend in SHAPES:
        made = _list_blocks(rows, records, backend) if backend in LISTED else _chain_blocks(rows, records, backend)
        blocks |= {f"{backend}_{name}": text for name, text in made.items()}
    return blocks


def _chain_blocks(rows: Sequence[Row], records: Sequence[Record], backend: str) -> dict[str, str]:
    found = boards(rows, backend)
    compiled: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.rung.backend == backend:
            compiled.setdefault((record.arch, setting_text(record.cell)), []).append(record)
    return {
        "rungs": markdown([rungs_table(backend)], titled=False),
        "summary": _timed([summary_table(board, mode) for board in found for mode in MODES], backend),
        "steps": _timed([table for board in found for table in step_tables(board)], backend),
        "impact": _timed([impact_table(board, mode) for board in found for mode in MODES], backend),
        "configs": _timed([config_table(board) for board in found], backend),
        "compiled": markdown([compiled_table(members) for members in compiled.values()]) or _not_compiled(backend),
        "provenance": _origin([row for board in found for row in board.rows.values()], backend),
    }


def _list_blocks(rows: Sequence[Row], records: Sequence[Record], backend: str) -> dict[str, str]:
    found: list[Listing] = listings(rows, records, backend)
    nothing = _not_compiled(backend)
    refused = [table for table in map(refused_table, found) if table.rows]
    return {
        "axes": markdown([axes_table(backend)], titled=False),
        "sram": markdown([sram_table()], titled=False),
        "climbs": _timed([table for it in found for table in climb_tables(it)], backend),
        "neighbours": _timed([table for it in found for table in neighbour_tables(it)], backend),
        "points": markdown([points_table(it) for it in found]) or nothing,
        "refused": markdown(refused) or ("Every point runs." if found else nothing),
        "provenance": _origin([row for it in found for row in it.rows.values()], backend),
    }


def _timed(tables: Sequence[Table], backend: str) -> str:
    return markdown(tables) or f"Nothing is timed yet: `python -m bench ladder --backend {backend}` on a GPU does it."


def _not_compiled(backend: str) -> str:
    return f"Nothing is recorded yet: `python -m bench ladder --backend {backend} --record` does it, with no GPU."


def _origin(rows: Sequence[Row], backend: str) -> str:
    """Where rows were measured and what makes them again."""
    measured = [row for row in rows if row.measured is not None]
    if not measured:
        return _timed((), backend)
    places = (f"- {line}" for line in provenance(measured))
    return "\n".join([*places, *(f"- `{line}`" for line in commands(measured))])


def markdown(tables: Sequence[Table], *, titled: bool = True) -> str:
    """Tables one below the other, each under its title and note."""
    parts = []
    for table in tables:
        parts += [f"**{table.title}**"] if titled else []
        parts += [table.note] if table.note else []
        parts.append(table_text(table, "github"))
    return "\n\n".join(parts)


# ---------------------------------------------------------------- the page


def recorded(results: Path) -> tuple[list[Row], list[Record]]:
    """All rows and records of ladders under a results folder."""
    paths = [path for backend in SHAPES for path in sorted(results.glob(f"*/ladder_{backend}*.json"))]
    compiled = [path for path in paths if path.parent.name == "compiled"]
    rows = [row for path in paths if path not in compiled for row in load(path)]
    return rows, [record for path in compiled for record in ladder_facts.load(path)]


def render(text: str, blocks: Mapping[str, str]) -> str:
    """`text` with every marked block made again; InputError for a marker that names no block."""

    def replacement(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise InputError(f"<!-- ladder:{name} -->: nothing generates it; there are {', '.join(blocks)}")
        return f"{match[1]}\n{blocks[name]}\n\n{match[3]}"

    return MARKED.sub(replacement, text)


def update(path: Path, results: Path, *, check: bool) -> bool:
    """Whether the blocks of `path` were current; unless `check`, they are afterwards.

    InputError where there is no such file, or no marker in it: then nothing would ever be generated.
    """
    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    old = path.read_text()
    if not MARKED.search(old):
        raise InputError(f"{path.name} has no <!-- ladder:NAME --> ... <!-- /ladder --> block")
    new = render(old, ladder_blocks(*recorded(results)))
    if new != old and not check:
        path.write_text(new)
    return new == old
