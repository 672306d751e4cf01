"""Tables of a list of points: every variant's time, gain over its parent and SDPA, and what it compiles to; refusals.

Made of rows (timed on a GPU) and records (compiled, anywhere); either may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.ladder_facts import Conflicts, Record
from bench.ladder_pages import markdown
from bench.ladder_rungs import LISTED, SHAPES, Rung, baseline, points_of
from bench.ladder_tables import (
    TUNED,
    boards,
    occupancy_text,
    percent,
    rate,
    ratio,
    rungs_table,
    setting_text,
    summary_table,
)
from bench.matrix import Cell
from bench.results import Measured, Row, load
from multiattn.plan import backend as registry
from multiattn.plan.backend import Variant
from parity.report import Table

_NO_COLUMN = "-"
NOTHING_TIMED = "Nothing is timed yet: run `python -m bench ladder` on a GPU."


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The points of one backend in one cell on one arch."""

    backend: str
    cell: Cell
    arch: str
    gpu: str
    """Empty where nothing was timed."""
    rows: dict[str, Row]
    """By contender, peers too."""
    records: dict[str, Record]
    """By variant."""

    @property
    def title(self) -> str:
        """Where it is of."""
        return f"{self.backend}, N={self.cell.seq} {setting_text(self.cell)}, {self.gpu or self.arch}"

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those that the listing has anything of, in their backend's order."""
        known = {*self.records, *(rung.variant for name in self.rows if (rung := Rung.parse(name)) is not None)}
        return tuple(it for it in registry.get(self.backend).forward.variants if it.name in known)

    def row(self, variant: str) -> Row | None:
        """Its row."""
        return self.rows.get(str(Rung(backend=self.backend, variant=variant)))

    def measured(self, contender: str) -> Measured | None:
        """The time of a contender, where it has one."""
        row = self.rows.get(contender)
        return row.measured if row is not None else None

    def refusal(self, variant: str) -> str:
        """Why a variant has neither time nor kernel: reasons or an error; empty for one that has."""
        row, record = self.row(variant), self.records.get(variant)
        if row is not None and row.measured is None:
            return f"error: {row.text}" if row.error else row.text
        if row is None and record is not None and not record.kernels:
            return f"error: {record.text}" if record.error else record.text
        return ""


def listings(rows: Iterable[Row], records: Iterable[Record], backend: str) -> list[Listing]:
    """One for each cell and GPU that there are rows of, and for each cell and arch that there are only records of.

    Of each cell and GPU the newest run counts.
    """
    compiled: dict[tuple[str, str], dict[str, Record]] = {}
    cells: dict[str, Cell] = {}
    for record in records:
        if record.rung.backend == backend and not record.rung.pin:
            for seq in record.seqs:
                cell = replace(record.cell, seq=seq)
                cells[cell.key] = cell
                compiled.setdefault((record.arch, cell.key), {})[record.rung.variant] = record
    given = [row for row in rows if row.regime == "device" and row.cell.direction == "fwd" and row.run]
    newest: dict[tuple[str, Cell], str] = {}
    for row in given:
        if _is_of(backend, row.contender):
            place = row.environment.gpu, row.cell
            newest[place] = max(row.run, newest.get(place, ""))
    mine: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in given:
        setup = row.environment
        if newest.get((setup.gpu, row.cell)) == row.run:
            cells[row.cell.key] = row.cell
            mine.setdefault((setup.arch, row.cell.key, setup.gpu), {})[row.contender] = row
    places = [*mine, *((arch, key, "") for arch, key in compiled if (arch, key) not in {it[:2] for it in mine})]
    return [
        Listing(
            backend=backend,
            cell=cells[key],
            arch=arch,
            gpu=gpu,
            rows=mine.get((arch, key, gpu), {}),
            records=compiled.get((arch, key), {}),
        )
        for arch, key, gpu in places
    ]


def _is_of(backend: str, contender: str) -> bool:
    rung = Rung.parse(contender)
    return rung is not None and rung.backend == backend and not rung.pin


# ---------------------------------------------------------------- tables


def listing_tables(listing: Listing) -> list[Table]:
    """The points that run, then those that do not, by reason."""
    made = [points_table(listing), refused_table(listing)]
    return [table for table in made if table.rows]


def points_table(listing: Listing) -> Table:
    """A line per variant that runs: time and gains where it was timed, what it compiled to where that is known."""
    reference = baseline(listing.cell.head_dim)
    rows: list[tuple[str, ...]] = []
    header = points_header(listing)
    peer = listing.measured(reference)
    if peer is not None:
        times = (reference, f"{peer.time_ms:.3f}", rate(peer), "-", ratio(1.0))
        rows.append((*times, *[_NO_COLUMN] * (len(header) - len(times))))
    rows += [point_line(listing, variant) for variant in listing.variants if not listing.refusal(variant.name)]
    note = (
        f"Each with the config of its own rule; over parent in % of its speed, SDPA is {reference}. "
        if listing.rows
        else "Nothing here was timed. "
    )
    return Table(
        title=f"Points: {listing.title}",
        note=note + _facts_note(listing.records.values()),
        header=header,
        rows=tuple(rows),
    )


def points_header(listing: Listing) -> tuple[str, ...]:
    """What `point_line` tells of a variant."""
    timed = ("ms", "TFLOPS", "over parent", "over SDPA") if listing.rows else ()
    return ("variant", *timed, "smem", "registers", "spills", "warps", "conflicts", "config")


def point_line(listing: Listing, variant: Variant) -> tuple[str, ...]:
    """A variant that runs."""
    times = _times(listing, variant, baseline(listing.cell.head_dim)) if listing.rows else ()
    return (variant.name, *times, *_facts(listing.records.get(variant.name)))


def _times(listing: Listing, variant: Variant, reference: str) -> tuple[str, ...]:
    mine = listing.measured(str(Rung(backend=listing.backend, variant=variant.name)))
    if mine is None:
        return ("-",) * 4
    parent = variant.parent and listing.measured(str(Rung(backend=listing.backend, variant=variant.parent)))
    peer = listing.measured(reference)
    return (
        f"{mine.time_ms:.3f}",
        rate(mine),
        percent(parent.time_ms / mine.time_ms) if parent else "-",
        ratio(peer.time_ms / mine.time_ms) if peer is not None else "-",
    )


def _facts(record: Record | None) -> tuple[str, ...]:
    kernel = record.kernel if record is not None else None
    if record is None or kernel is None:
        return (_NO_COLUMN,) * 6
    return (
        str(kernel.smem_bytes),
        str(kernel.registers),
        str(kernel.spill_bytes),
        occupancy_text(record),
        conflicts_text(record.emulated),
        record.config,
    )


def conflicts_text(conflicts: Conflicts) -> str:
    """``0 of 96``: extra wavefronts of how many ldmatrix; a dash where nobody counted, as the note says why."""
    if conflicts.count is None:
        return _NO_COLUMN
    return f"{conflicts.count}" if conflicts.ldmatrix is None else f"{conflicts.count} of {conflicts.ldmatrix}"


def _facts_note(records: Iterable[Record]) -> str:
    found = [record for record in records if record.kernels]
    if not found:
        return "Nothing is known of what it compiles to: python -m bench ladder --record."
    parts = [
        f"Compiled for {found[0].arch} with {found[0].compiler}: smem in bytes a block, spills in bytes a thread, "
        "warps as a share of those that an SM can hold."
    ]
    if any(record.emulated.count is not None for record in found):
        parts.append(
            "Conflicts: extra wavefronts of ldmatrix, counted in emulation of one tile of queries and two blocks of "
            "keys, of how many ldmatrix."
        )
    why = dict.fromkeys(record.emulated.why for record in found if record.emulated.count is None)
    parts += [f"No conflicts counted: {text}." for text in why if text]
    return " ".join(parts)


def refused_table(listing: Listing) -> Table:
    """The points that do not run in this cell, grouped by what they say."""
    groups: dict[str, list[str]] = {}
    for variant in listing.variants:
        if why := listing.refusal(variant.name):
            groups.setdefault(why, []).append(variant.name)
    rows = sorted(
        ((why, str(len(names)), ", ".join(names)) for why, names in groups.items()), key=lambda it: -int(it[1])
    )
    return Table(
        title=f"Points that do not run: {listing.title}",
        note="Every reason once, with the points that it is of.",
        header=("reason", "points", "which"),
        rows=tuple(rows),
    )


def best_of_axes_table(listing: Listing) -> Table:
    """For each value of each axis: the fastest point that has it, and how many points have it."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    counts: dict[tuple[str, str], int] = {}
    for variant in points_of(registry.get(listing.backend)):
        measured = listing.measured(str(Rung(backend=listing.backend, variant=variant.name)))
        for axis, value in variant.flags:
            key = axis, str(value) or "none"
            counts[key] = counts.get(key, 0) + 1
            if measured is not None:
                best[key] = max(best.get(key, (0.0, "")), (measured.tflops, variant.name))
    rows = (
        (
            axis,
            value,
            str(count),
            *(
                (f"{best[axis, value][0]:.0f}", best[axis, value][1])
                if (axis, value) in best
                else (_NO_COLUMN, _NO_COLUMN)
            ),
        )
        for (axis, value), count in counts.items()
    )
    return Table(
        title=f"Best of each axis: {listing.title}",
        note="",
        header=("axis", "value", "points", "TFLOPS", "fastest point with it"),
        rows=tuple(rows),
    )


# ---------------------------------------------------------------- docs/ladder.md


def blocks(results: Path) -> Mapping[str, Callable[[], str]]:
    """The tables of docs/ladder.md: the rungs of each chain, their speed by length, and the best of each axis."""

    def rows(backend: str) -> list[Row]:
        paths = [it for it in sorted(results.glob(f"*/ladder_{backend}.json")) if it.parent.name != "compiled"]
        return [row for path in paths for row in load(path) if row.run]

    def lengths(backend: str) -> str:
        return markdown([summary_table(board, TUNED) for board in boards(rows(backend), backend)]) or NOTHING_TIMED

    def axes(backend: str) -> str:
        found = [it for it in listings(rows(backend), (), backend) if it.gpu]
        return markdown([best_of_axes_table(it) for it in found]) or NOTHING_TIMED

    made: dict[str, Callable[[], str]] = {}
    for backend in SHAPES:
        if backend in LISTED:
            made[f"{backend}_axes"] = partial(axes, backend)
        else:
            made[f"{backend}_rungs"] = partial(markdown, [rungs_table(backend)], titled=False)
            made[f"{backend}_lengths"] = partial(lengths, backend)
    return made
