"""Verdicts on results: two files compared cell by cell, and the preferences of `auto`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.decode_cells import DecodeCell
from bench.features import LISTS
from bench.matrix import SUITES, Cell, InputError
from bench.results import Row, is_ours, one_run
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import BACKENDS, make_plan
from multiattn.plan.measured import Lists, Score
from multiattn.plan.support import Unsupported

_SCORES: Mapping[str, Score] = {"causal softcap30": "softcap", "causal alibi": "alibi"}
NOISE = 0.03
"""Two runs of one kernel on one board differ by this much however quiet each was (H200, 700 W limit, 2026-11)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One contender in one cell, before and after. `speedup` is old time over new; 0 where it has no time any more."""

    before: Row
    after: Row | None
    speedup: float
    spread: float
    """The larger interquartile range of the two, over the median, and at least NOISE."""

    @property
    def verdict(self) -> str:
        """A word: ``slower`` is slower than the spread explains."""
        if not self.speedup:
            return "gone"
        if self.speedup < 1 / (1 + self.spread):
            return "slower"
        return "faster" if self.speedup > 1 + self.spread else "same"


def compare(before: Iterable[Row], after: Iterable[Row]) -> list[Change]:
    """A Change for each row that is measured in `before`, in its order."""
    new = {row.key: row for row in after}
    changes = []
    for row in before:
        if (old := row.measured) is not None:
            now = new.get(row.key)
            mine = now.measured if now is not None else None
            speedup, spread = (old.time_ms / mine.time_ms, mine.spread) if mine is not None else (0.0, 0.0)
            changes.append(Change(before=row, after=now, speedup=speedup, spread=max(NOISE, old.spread, spread)))
    return changes


def change_table(changes: Iterable[Change]) -> str:
    """A row per change."""
    rows = []
    for it in changes:
        texts = it.before.text, it.after.text if it.after is not None else "no row"
        figures = f"{it.speedup:.3f}", f"{100 * it.spread:.0f} %"
        rows.append((it.before.contender, it.before.cell.key, it.before.regime, *texts, *figures, it.verdict))
    headers = ("contender", "cell", "regime", "before", "after", "speed-up", "spread", "verdict")
    return tabulate(rows, headers=headers, disable_numparse=True)


def preferences(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Each `multiattn.plan.measured.MeasuredCell`, for measured.json beside it, from device rows of the best variants.

    Only the newest run of a cell counts in which two backends or more ran, nothing host-bound, and no run in which a
    backend did not run what is its choice now, by that or by its name. Of cells that share GPU, head_dim, length, mask,
    heads and how many of them share keys, the newest run counts, those of `heldout` last: an older one may be of
    another config. Cells of backward come last.

    Packed batches of one size are one cell, as no plan knows their lengths: the geometric mean over their mixes. So are
    block masks of one kind and of any length, as no plan knows what they list.
    """
    rows = list(rows)
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    owners: dict[tuple[Any, ...], Cell] = {}
    found = [row for row in one_run(_of_several(rows)) if _counts(row)]
    now: dict[tuple[Any, ...], Row] = {}
    for row in sorted(filter(runs_now, found), key=lambda row: "/" in row.contender):  # a backend's own choice first
        now.setdefault(_place(row), row)
    outdated = {_place(row)[:2] for row in found if _place(row) not in now}
    newest = sorted(now.values(), key=lambda row: row.run, reverse=True)
    for row in sorted(newest, key=lambda row: row.cell in SUITES["heldout"]):
        setup, cell, measured = row.environment, row.cell, row.measured
        kinds: dict[str, Any] = {"packed": cell.is_packed, "score": _SCORES.get(cell.attention, "")}
        kinds |= {"window": cell.window or 0, "lists": _lists_of(cell)}
        heads, group, is_backward = cell.batch * cell.heads, cell.group, cell.direction == "bwd"
        head_dim = sum(cell.widths) // 2  # as plans are compared with cells
        place = (0, False) if kinds["lists"] else (cell.seq, cell.causal)
        key = (is_backward, *kinds.values(), setup.gpu, head_dim, *place, heads, group)
        if measured is None or measured.host_bound or (cell, row.run) in outdated:
            continue
        if owners.setdefault(key, cell) != cell and not (cell.is_packed or kinds["lists"]):
            continue
        told = {"arch": setup.arch, "gpu": setup.gpu, "date": setup.date, "head_dim": head_dim}
        told |= {"seq_kv": place[0], "causal": place[1], "heads": heads}
        told |= ({"group": group} if group != 1 else {}) | ({"direction": "backward"} if is_backward else {})
        told |= {name: it for name, it in kinds.items() if it}
        entry = cells.setdefault(key, {**told, "tflops": {}})
        entry["date"] = max(entry["date"], setup.date)
        entry["tflops"].setdefault(_place(row)[2], []).append(measured.tflops)
    for entry in cells.values():
        entry["tflops"] = {name: round(statistics.geometric_mean(it), 1) for name, it in entry["tflops"].items()}
    return [cells[key] for key in sorted(cells)] + list(_cached(rows))


def _lists_of(cell: Cell) -> Lists:
    """The kind of a cell's block mask."""
    if cell.feature not in (*LISTS, "documents16"):
        return ""
    return "whole" if cell.feature.startswith("blocks") else "divided" if cell.feature == "video" else "masked"


def _place(row: Row) -> tuple[Any, str, str]:
    """The cell and the run of a row, and its backend."""
    return row.cell, row.run, row.contender.partition("/")[0]


def _of_several(rows: Iterable[Row]) -> list[Row]:
    """The rows of runs in which two of our backends or more ran a cell: of one alone nothing is better or worse."""
    ours: dict[tuple[Any, str], set[str]] = {}
    for row in (rows := list(rows)):
        ours.setdefault((row.cell, row.run), set()).update({row.contender} & set(BACKENDS))
    return [row for row in rows if len(ours[row.cell, row.run]) > 1]


def _cached(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """A `MeasuredCell` for each head_dim and number of rows: geometric means over the cells that all backends ran.

    Rows count that are of decode, by graph replay.
    """
    groups: dict[tuple[str, int, int], dict[Cell, dict[str, Row]]] = {}
    for row in one_run(rows):
        cell = row.cell
        if row.contender not in BACKENDS or row.measured is None or row.regime != "graph":
            continue
        if isinstance(cell, DecodeCell) and cell.is_plain:
            key = row.environment.gpu, sum(cell.widths) // 2, cell.queries * cell.group
            groups.setdefault(key, {}).setdefault(cell, {})[row.contender] = row
    for (gpu, head_dim, count), by_cell in sorted(groups.items()):
        most = max(map(len, by_cell.values()))
        whole = [its for its in by_cell.values() if len(its) == most]
        first = next(iter(whole[0].values()))
        tflops = {
            name: round(statistics.geometric_mean(its[name].tflops for its in whole if name in its), 2)
            for name in dict.fromkeys(name for its in whole for name in its)
        }
        told = {"arch": first.environment.arch, "gpu": gpu, "date": first.environment.date, "head_dim": head_dim}
        yield {**told, "seq_kv": 0, "causal": False, "heads": 0, "rows": count, "tflops": tflops}


def _counts(row: Row) -> bool:
    """Tell whether it is a backend's choice in a cell of one direction with a mask or score of ours, back to back."""
    cell = row.cell
    known = cell.feature == "none" or cell.attention in _SCORES or cell.is_packed or bool(_lists_of(cell))
    is_usual = row.regime == "device" and not isinstance(row.cell, DecodeCell) and row.cell.direction != "fwdbwd"
    return is_usual and is_ours(row.contender) and known


def runs_now(row: Row) -> bool:
    """Tell whether a backend would run the variant of this row today."""
    if row.plan is None:
        return True
    backend, arch = registry.get(_place(row)[2]), by_name(row.environment.arch)
    try:
        plan = make_plan(backend, row.cell.problem, arch, direction=row.cell.pass_of, probe=False)
    except Unsupported:
        return False
    return plan.variant == str(row.plan["variant"])


def write_preferences(rows: Iterable[Row], path: Path) -> int:
    """Write `preferences` to `path`, a line for those that differ in `own` alone; how many. ValueError for none."""
    cells = preferences(rows)
    if not cells:
        raise InputError("none of these results has a time of one of our backends: there is nothing to prefer by")
    own = ("seq_kv", "heads", "rows", "tflops")
    lines: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        shared = json.dumps({name: it for name, it in cell.items() if name not in own})
        lines.setdefault(shared, []).append({name: cell[name] for name in own if name in cell})
    told = (json.dumps({**json.loads(shared), "cells": its}) for shared, its in lines.items())
    path.write_text("[\n" + ",\n".join(told) + "\n]\n")
    return len(cells)
