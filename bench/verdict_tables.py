"""Verdicts as text: two files compared, and the floors of what is recorded of each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tabulate import tabulate

from bench.backward import memory_summary
from bench.matrix import Direction
from bench.results import Row, load
from bench.verdicts import FLOORS, Change, judge_floors, judge_memory

FLOOR_SUITES: Mapping[Direction, tuple[str, ...]] = MappingProxyType(
    {"fwd": ("floors", "standard"), "bwd": ("floors", "backward")}
)
"""The suites that have the cells of the floors, by direction."""


def change_table(changes: Sequence[Change], *, everything: bool) -> str:
    """A row per change; what is the same only if `everything` is asked for."""
    rows = [
        (
            change.before.contender,
            change.before.cell.key,
            change.before.regime,
            change.before.text,
            change.after.text if change.after is not None else "no row",
            f"{change.speedup:.3f}" if change.speedup is not None else "-",
            f"{100 * change.spread:.0f} %",
            change.verdict,
        )
        for change in changes
        if everything or change.verdict != "same"
    ]
    headers = ("contender", "cell", "regime", "before", "after", "speed-up", "spread", "verdict")
    return tabulate(rows, headers=headers, disable_numparse=True)


def floors_of(rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether every floor of these rows holds, the memory of backward with them; and the tables that say so.

    Rows of no cell of the floors hold nothing.
    """
    found, memory = judge_floors(rows), judge_memory(rows)
    table = [(it.floor.contender, it.cell.key, it.text) for it in found]
    parts = [tabulate(table, headers=("kernel", "cell", "verdict"), disable_numparse=True)]
    if not found:
        parts = [f"no row of a cell that has a floor: those of the suites {', '.join(_suites())}"]
    if memory:
        held = sum(it.holds for it in memory)
        missed = [(it.row.contender, it.row.cell.key, it.text) for it in memory if not it.holds]
        parts.append(f"{held} of {len(memory)} within SDPA flash's memory. {memory_summary(rows)}".strip())
        parts += [tabulate(missed, headers=("kernel", "cell", "memory"), disable_numparse=True)] if missed else []
    holds = bool(found) and all(it.holds for it in found) and all(it.holds for it in memory)
    return holds, "\n".join(parts)


def _suites() -> list[str]:
    return list(dict.fromkeys(suite for suites in FLOOR_SUITES.values() for suite in suites))


def recorded_floors(files: Sequence[Path]) -> list[tuple[str, list[Row]]]:
    """Of each folder and direction the device rows of every suite that has floors' cells, under a title.

    A direction that has floors and that nobody measured comes without rows.
    """
    found = []
    for folder in dict.fromkeys(path.parent for path in files):
        for direction in dict.fromkeys(floor.direction for floor in FLOORS):
            suites = [path for path in files if path.parent == folder and path.stem in FLOOR_SUITES[direction]]
            members = {path.name: [row for row in load(path) if _counts(row, direction)] for path in suites}
            names = [name for name, rows in members.items() if rows]
            title = f"{folder.name}: {', '.join(names) or 'nothing recorded'}: {direction}"
            found.append((title, [row for rows in members.values() for row in rows]))
    return found


def _counts(row: Row, direction: Direction) -> bool:
    return row.regime == "device" and row.cell.direction == direction
