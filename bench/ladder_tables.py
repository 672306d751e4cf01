"""Tables of ladders: the rungs of a chain by length; of CUDA's points the best of each axis, each one, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench.matrix import Cell
from bench.providers import PIN, Ours
from bench.results import Measured, Row, one_run
from bench.tables import figure
from multiattn.plan import backend as registry
from multiattn.plan.backend import Variant, ladder
from parity.report import Table

CUDNN, TILEGYM = "sdpa-cudnn", "tilegym"
_FLASH_UP_TO = 256


def baseline(head_dim: int) -> str:
    """The peer that speed-ups are over: SDPA's flash kernel where it takes the head_dim, else its efficient one."""
    return "sdpa-flash" if head_dim <= _FLASH_UP_TO else "sdpa-efficient"


def points() -> tuple[Variant, ...]:
    """The variants of CUDA's forward that are points on its axes; a kernel of its own has no flags, and is none."""
    return tuple(variant for variant in registry.get("cuda").forward.variants if variant.flags)


def _settings(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows by GPU and by cell but for its length, with one run of each cell."""
    found: dict[tuple[str, Cell], list[Row]] = {}
    for row in sorted(one_run(rows), key=lambda it: (it.cell.head_dim, it.cell.seq)):
        found.setdefault((row.environment.gpu, replace(row.cell, seq=1)), []).append(row)
    return list(found.values())


def _setting(row: Row) -> str:
    cell = row.cell
    return f"B={cell.batch} H={cell.heads} D={cell.head_dim} {cell.dtype} {cell.mask}, {row.environment.gpu}"


def _measured(row: Row | None) -> Measured | None:
    return row.measured if row is not None else None


def _gain(mine: Row | None, other: Row | None) -> float | None:
    """How many times as fast one is as another; None where one of the two has no time."""
    ours, theirs = _measured(mine), _measured(other)
    return theirs.time_ms / ours.time_ms if ours is not None and theirs is not None else None


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}x"


# ---------------------------------------------------------------- chains


def length_tables(rows: Iterable[Row], backend: str, top: str = "", *, pinned: bool = False) -> list[Table]:
    """TFLOPS of each rung and peer by length, each rung with its own config or, if `pinned`, with that of the top.

    Without a `top` it is the variant that other rungs are pinned to.
    """
    made = []
    for members in _settings(rows):
        tops = {it.contender.partition(PIN)[2] for it in members if PIN in it.contender}
        made += [_lengths(members, backend, it, pinned=pinned) for it in ([top] if top else sorted(tops))]
    return made


def _lengths(rows: Sequence[Row], backend: str, top: str, *, pinned: bool) -> Table:
    steps = [variant.name for variant in ladder(registry.get(backend), top)]
    names = [Ours(backend=backend, variant=it, pinned_to=top if pinned and it != top else None).name for it in steps]
    found = {(row.cell.seq, row.contender): row for row in rows}
    first = baseline(rows[0].cell.head_dim)
    timed = {row.contender for row in rows if row.measured is not None}
    peers = [name for name in (first, CUDNN, TILEGYM) if name in timed]
    lines = []
    for seq in dict.fromkeys(row.cell.seq for row in rows):
        mine = {name: found.get((seq, name)) for name in (*peers, *names)}
        gains = (_gain(mine[names[-1]], mine.get(other)) for other in (first, names[0]))
        lines.append((str(seq), *map(figure, mine.values()), *map(_times, gains)))
    return Table(
        title=f"TFLOPS, {backend} up to {top}, {'pinned' if pinned else 'tuned'}, {_setting(rows[0])}",
        note=f"Every rung runs the config of {'the top rung' if pinned else 'its own rule'}.",
        header=("N", *peers, *steps, f"{top} over SDPA", f"{top} over {steps[0]}"),
        rows=tuple(lines),
    )


# ---------------------------------------------------------------- points


def axes_tables(rows: Iterable[Row]) -> list[Table]:
    """For each value of each axis: how many points have it, and the fastest of them."""
    made = []
    for members in _settings(rows):
        found = {row.contender: row.measured for row in members if row.measured is not None}
        values: dict[tuple[str, str], list[Variant]] = {}
        for variant in points():
            for axis, value in variant.flags:
                values.setdefault((axis, str(value) or "none"), []).append(variant)
        lines = []
        for (axis, value), its in values.items():
            rates = {it.name: found[name].tflops for it in its if (name := f"cuda/{it.name}") in found}
            best = max(rates, key=lambda name: rates[name], default="-")
            lines.append((axis, value, str(len(its)), f"{rates[best]:.0f}" if rates else "-", best))
        header = ("axis", "value", "points", "TFLOPS", "fastest point with it")
        title = f"Best of each axis: cuda, N={members[0].cell.seq} {_setting(members[0])}"
        made.append(Table(title=title, note="", header=header, rows=tuple(lines)))
    return made


def point_tables(rows: Iterable[Row]) -> list[Table]:
    """Every point that runs, with its time and gains; then the reasons of the others, each with its points."""
    made = []
    for members in _settings(rows):
        found = {row.contender: row for row in members}
        peer = found.get(baseline(members[0].cell.head_dim))
        lines, refused = [], dict[str, list[str]]()
        for variant in points():
            row = found.get(f"cuda/{variant.name}")
            if row is not None and row.measured is not None:
                over = _gain(row, found.get(f"cuda/{variant.parent}"))
                parent = "-" if over is None else f"{100 * (over - 1):+.1f} %"
                gains = (parent, _times(_gain(row, peer)))
                lines.append((variant.name, f"{row.measured.time_ms:.3f}", figure(row), *gains))
            elif row is not None:
                refused.setdefault(row.text, []).append(variant.name)
        title = f"cuda, N={members[0].cell.seq} {_setting(members[0])}"
        header = ("variant", "ms", "TFLOPS", "over parent", "over SDPA")
        made.append(Table(title=f"Points: {title}", note="", header=header, rows=tuple(lines)))
        reasons = tuple((why, str(len(names)), ", ".join(names)) for why, names in refused.items())
        title = f"Points that do not run: {title}"
        made.append(Table(title=title, note="", header=("reason", "points", "which"), rows=reasons))
    return [table for table in made if table.rows]
