"""Results compared: two files cell by cell, and what `auto` prefers by them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.errors import InputError
from bench.matrix import SUITES
from bench.results import Row, one_run
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import BACKENDS, make_plan
from multiattn.plan.support import Unsupported

NOISE = 0.03
"""Two runs of one kernel on one board differ by this much however quiet each was (H200, 700 W limit, 2026-11)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One contender in one cell, before and after. `speedup` is old time over new; None where one has no time."""

    before: Row
    after: Row | None
    speedup: float | None
    spread: float
    """The larger interquartile range of the two, over the median, and at least NOISE."""

    @property
    def is_regression(self) -> bool:
        """Slower than the spread explains, or measured before and not any more."""
        return self.speedup is None or self.speedup < 1 / (1 + self.spread)

    @property
    def verdict(self) -> str:
        """A word on it."""
        if self.speedup is None:
            return f"not measured any more: {self.after.text if self.after is not None else 'no such row'}"
        if self.is_regression:
            return "slower"
        return "faster" if self.speedup > 1 + self.spread else "same"


def compare(before: Iterable[Row], after: Iterable[Row]) -> list[Change]:
    """A Change for each row that is measured in `before`, in its order."""
    new = {row.key: row for row in after}
    return [_change(row, new.get(row.key)) for row in before if row.measured is not None]


def _change(before: Row, after: Row | None) -> Change:
    assert before.measured is not None
    if after is None or after.measured is None:
        return Change(before=before, after=after, speedup=None, spread=NOISE)
    return Change(
        before=before,
        after=after,
        speedup=before.measured.time_ms / after.measured.time_ms,
        spread=max(NOISE, before.measured.spread, after.measured.spread),
    )


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


def preferences(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The cells of multiattn/measured.json (see multiattn.plan.preference.Cell), from device rows of the best variants.

    Of each cell only its newest run counts, nothing host-bound, and no run in which a backend ran a variant that is no
    longer its choice there. Where several measured cells share GPU, head_dim, length, mask, heads and how many
    of them share keys, the newest run counts, those of `heldout` last: an older one may be of another config. Cells of
    backward come last, and say so; forward and backward in one are no choice that `auto` makes.
    """
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    owners: dict[tuple[Any, ...], str] = {}
    newest = one_run(rows)
    outdated = {(row.cell, row.run) for row in newest if row.regime == "device" and not _runs_now(row)}
    newest_first = sorted(newest, key=lambda row: row.run, reverse=True)
    for row in sorted(newest_first, key=lambda row: row.cell in SUITES["heldout"]):
        if row.measured is None or row.measured.host_bound:
            continue
        if row.regime != "device" or row.contender not in BACKENDS or row.cell.direction == "fwdbwd":
            continue
        setup, cell = row.environment, row.cell
        if (cell, row.run) in outdated:
            continue
        is_backward = cell.direction == "bwd"
        heads, group = cell.batch * cell.heads, cell.heads // (cell.heads_kv or cell.heads)
        key = (is_backward, setup.gpu, cell.head_dim, cell.seq, cell.causal, heads, group)
        if owners.setdefault(key, cell.key) != cell.key:
            continue
        entry = cells.setdefault(
            key,
            {
                "arch": setup.arch,
                "gpu": setup.gpu,
                "date": setup.date,
                "head_dim": cell.head_dim,
                "seq_kv": cell.seq,
                "causal": cell.causal,
                "heads": heads,
                **({"group": group} if group != 1 else {}),
                **({"direction": "backward"} if is_backward else {}),
                "tflops": {},
            },
        )
        entry["date"] = max(entry["date"], setup.date)
        entry["tflops"][row.contender] = round(row.measured.tflops, 1)
    return [cells[key] for key in sorted(cells)]


def _runs_now(row: Row) -> bool:
    """Whether a backend that was asked for its best would run the variant of this row today; True for all others."""
    if row.contender not in BACKENDS or row.plan is None or row.cell.direction == "fwdbwd":
        return True
    direction: registry.Direction = "backward" if row.cell.direction == "bwd" else "forward"
    backend, arch = registry.get(row.contender), by_name(row.environment.arch)
    try:
        plan = make_plan(backend, row.cell.problem, arch, direction=direction, probe=False)
    except Unsupported:
        return False
    return plan.variant == str(row.plan["variant"])


def write_preferences(rows: Iterable[Row], path: Path) -> int:
    """Write `preferences` to `path`, one line a cell; how many. ValueError where nothing was measured."""
    cells = preferences(rows)
    if not cells:
        raise InputError("none of these results has a time of one of our backends: there is nothing to prefer by")
    path.write_text("[\n" + ",\n".join(json.dumps(cell) for cell in cells) + "\n]\n")
    return len(cells)
