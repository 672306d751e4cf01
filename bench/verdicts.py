"""What results say: two files compared, the floors that the kernels must hold, what `auto` shall prefer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import InputError
from bench.matrix import SUITES, Cell, Direction
from bench.results import Row, is_ours, one_run
from multiattn import backend as registry
from multiattn.arch import by_name
from multiattn.backend import BACKENDS, make_plan
from multiattn.support import Unsupported

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """`contender` must reach `ratio` of the TFLOPS of `peer` in every cell of the suite `floors`."""

    contender: str
    peer: str
    ratio: float
    direction: Direction = "fwd"


FLOORS: tuple[Floor, ...] = (
    Floor(contender="cutile", peer="sdpa-cudnn", ratio=0.90),
    Floor(contender="triton", peer="sdpa-cudnn", ratio=0.80),
    Floor(contender="cuda", peer="sdpa-flash", ratio=0.80),
    Floor(contender="cutile", peer="sdpa-cudnn", ratio=0.60, direction="bwd"),
    Floor(contender="triton", peer="sdpa-cudnn", ratio=0.60, direction="bwd"),
    Floor(contender="cuda", peer="sdpa-flash", ratio=0.80, direction="bwd"),
)
"""At D=128, N=4096, bf16, full and causal, on the GPU at hand, device regime."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A floor in one cell: the ratio reached, or why there is none."""

    floor: Floor
    cell: Cell
    ratio: float | None
    why: str = ""
    """Of a ratio, which run it is of."""

    @property
    def holds(self) -> bool:
        """False also where nothing was measured: a floor that nobody measured is not held."""
        return self.ratio is not None and self.ratio >= self.floor.ratio

    @property
    def text(self) -> str:
        """One line."""
        if self.ratio is None:
            return f"no figure: {self.why}"
        held = "pass" if self.holds else "miss"
        return f"{self.ratio:.2f} of {self.floor.peer}, floor {self.floor.ratio:.2f}: {held} ({self.why})"


def judge_floors(rows: Iterable[Row], floors: Sequence[Floor] = FLOORS) -> list[Verdict]:
    """Every floor in every cell of the suite `floors`, from rows of the device regime.

    Each by the newest run in which its two contenders took turns, which others may have replaced since; but no run
    speaks for a contender of ours that failed since. Only floors of directions that there are rows of: a run of forward
    cells says nothing of backward.
    """
    given = [row for row in rows if row.regime == "device"]
    directions = {row.cell.direction for row in given}
    return [
        _judge(floor, cell, [row for row in given if row.cell.key == cell.key])
        for floor in floors
        for cell in SUITES["floors"]
        if cell.direction == floor.direction and floor.direction in directions
    ]


def _judge(floor: Floor, cell: Cell, rows: Sequence[Row]) -> Verdict:
    ours, peers = ([row for row in rows if row.contender == name] for name in (floor.contender, floor.peer))
    pairs = [
        (mine, peer) for mine in ours for peer in peers if mine.run == peer.run and mine.measured and peer.measured
    ]
    pair = max(pairs, key=lambda pair: pair[0].run, default=())  # a run's name begins with its time
    why = _no_figure(floor, ours, peers, pair)
    if why or not pair:
        return Verdict(floor=floor, cell=cell, ratio=None, why=why)
    mine, peer = (row.measured.time_ms for row in pair if row.measured is not None)
    setup = pair[0].environment
    return Verdict(floor=floor, cell=cell, ratio=peer / mine, why=f"{setup.date}, commit {setup.commit}")


def _no_figure(floor: Floor, ours: Sequence[Row], peers: Sequence[Row], pair: Sequence[Row]) -> str:
    """Why the rows of a cell do not tell of a floor, `pair` being of the newest run of both; empty where they do."""
    if failed := [row for row in ours if row.measured is None and (not pair or _is_since(row, pair[0]))]:
        return f"{floor.contender}: {failed[-1].text}"
    for row in pair:
        if row.measured is not None and row.measured.host_bound:
            return f"host-bound ({row.contender})"
    if pair:
        return ""
    for name, rows in ((floor.contender, ours), (floor.peer, peers)):
        if not any(row.measured for row in rows):
            return f"{name}: {rows[-1].text}" if rows else f"no row of {name}"
    return (
        f"not one run: there is none of this cell in which {floor.contender} and {floor.peer} took turns; "
        "run python -m bench --suite floors"
    )


def _is_since(row: Row, other: Row) -> bool:
    """Whether a row is later than one of a run; in doubt, as it has no run, it is."""
    return row.run > other.run if row.run else row.environment.date >= other.environment.date


MEMORY_BAR = "sdpa-flash"
"""Whose backward sets how much device memory one of ours may take beside inputs and outputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryVerdict:
    """What a backward of ours took beside inputs and outputs, and what MEMORY_BAR did, in bytes."""

    row: Row
    taken: int | None
    bar: int | None

    @property
    def holds(self) -> bool:
        """False also where one of the two was not counted."""
        return self.taken is not None and self.bar is not None and self.taken <= self.bar

    @property
    def text(self) -> str:
        """One line."""
        if self.taken is None or self.bar is None:
            return f"no figure: {self.row.contender if self.taken is None else MEMORY_BAR} was not counted"
        return f"{mebibytes(self.taken)} MiB, {MEMORY_BAR} {mebibytes(self.bar)}: {'pass' if self.holds else 'miss'}"


def mebibytes(size: int) -> str:
    """For a table, to a tenth."""
    return f"{size / 2**20:.1f}"


def judge_memory(rows: Iterable[Row]) -> list[MemoryVerdict]:
    """Every measured backward of ours against MEMORY_BAR in its cell, from rows of the device regime."""
    found = [row for row in one_run(rows) if row.regime == "device" and row.cell.direction == "bwd"]
    bars = {(row.environment.gpu, row.cell): _taken(row) for row in found if row.contender == MEMORY_BAR}
    return [
        MemoryVerdict(row=row, taken=_taken(row), bar=bars.get((row.environment.gpu, row.cell)))
        for row in found
        if is_ours(row.contender) and row.measured is not None
    ]


def _taken(row: Row) -> int | None:
    return row.measured.peak_extra_bytes if row.measured is not None else None


def preferences(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The cells of multiattn/measured.json (see multiattn.preference.Cell), from device rows of the best variants.

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
