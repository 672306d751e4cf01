"""``python -m bench ladder``: the gain of each rung of a backend's ladder on a GPU, and its tables.

Triton and cuTile have chains, in which each rung adds one thing; CUDA's rungs are points on several axes.
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench import options as shared
from bench.contenders import Ours
from bench.matrix import SUITES, InputError
from bench.peers import find_peers
from bench.report import figure, over, text_report, times_as_fast
from bench.results import ROOT, Row, Store, environment, grouped, is_ours, one_run, results_dir
from bench.run import Job, Machine, run
from multiattn.plan import backend as registry
from multiattn.plan.backend import BACKENDS, Variant, ladder
from multiattn.tune.timing import Budget
from parity.report import Table

LISTED = "cuda"
CUDNN, TILEGYM = "sdpa-cudnn", "tilegym"


def baseline(head_dim: int) -> str:
    """The peer that speed-ups are over: SDPA's flash kernel where it takes the head_dim, else its efficient one."""
    return "sdpa-flash" if head_dim <= 256 else "sdpa-efficient"


def points() -> tuple[Variant, ...]:
    """The variants of CUDA's forward that are points on its axes; a kernel of its own has no flags, and is none."""
    return tuple(variant for variant in registry.get("cuda").forward.variants if variant.flags)


def _settings(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows by GPU and by cell but for its length, with one run of each cell."""
    ordered = sorted(one_run(rows), key=lambda it: (it.cell.head_dim, it.cell.seq))
    return list(grouped(ordered, lambda row: (row.environment.gpu, replace(row.cell, seq=1))).values())


def _setting(row: Row) -> str:
    cell = row.cell
    return f"B={cell.batch} H={cell.heads} D={cell.head_dim} {cell.dtype} {cell.mask}, {row.environment.gpu}"


def length_tables(rows: Iterable[Row], backend: str) -> list[Table]:
    """TFLOPS of each rung and peer by length; a chain ends in a rung that no other one builds on."""
    made = []
    for members in _settings(rows):
        timed = {row.contender for row in members if row.measured is not None}
        chosen = [it for it in registry.get(backend).forward.variants if f"{backend}/{it.name}" in timed]
        tops = [it.name for it in chosen if it.name not in {other.parent for other in chosen}]
        made += [_lengths(members, backend, top) for top in tops]
    return made


def _lengths(rows: Sequence[Row], backend: str, top: str) -> Table:
    steps = [variant.name for variant in ladder(registry.get(backend), top)]
    found = {(row.cell.seq, row.contender): row for row in rows}
    first, timed = baseline(rows[0].cell.head_dim), {row.contender for row in rows if row.measured is not None}
    peers = [name for name in (first, CUDNN, TILEGYM) if name in timed]
    lines = []
    for seq in dict.fromkeys(row.cell.seq for row in rows):
        mine = {name: found.get((seq, name)) for name in (*peers, *(f"{backend}/{step}" for step in steps))}
        last, lowest = (mine[f"{backend}/{step}"] for step in (top, steps[0]))
        gains = (over(last, other, "x") for other in (mine.get(first), lowest))
        lines.append((str(seq), *map(figure, mine.values()), *gains))
    title = f"TFLOPS, {backend} up to {top}, every rung with the config of its own rule, {_setting(rows[0])}"
    header = ("N", *peers, *steps, f"{top} over SDPA", f"{top} over {steps[0]}")
    return Table(title=title, note="", header=header, rows=tuple(lines))


def axes_tables(rows: Iterable[Row]) -> list[Table]:
    """For each value of each axis: how many points have it, and in each setting the fastest of them; one table."""
    values: dict[tuple[str, str], list[str]] = {}
    for variant in points():
        for axis, value in variant.flags:
            values.setdefault((axis, str(value) or "none"), []).append(variant.name)
    lines = {key: [*key, str(len(names))] for key, names in values.items()}
    header, told = ["axis", "value", "points"], []
    for members in _settings(rows):
        found = {row.contender: row.measured.tflops for row in members if row.measured is not None}
        for key, names in values.items():
            rates = {name: found[row] for name in names if (row := f"{LISTED}/{name}") in found}
            best = max(rates, key=lambda name: rates[name], default="-")
            lines[key] += [f"{rates[best]:.0f}" if rates else "-", best]
        told.append(f"N={members[0].cell.seq} {_setting(members[0])}")
        header += [f"D={members[0].cell.head_dim}, TFLOPS", "fastest point with it"]
    title = f"Best of each axis: {LISTED}, {'; '.join(told)}"
    return [Table(title=title, note="", header=tuple(header), rows=tuple(map(tuple, lines.values())))] if told else []


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
                gain = times_as_fast(row, found.get(f"cuda/{variant.parent}"))
                gains = ("-" if gain is None else f"{100 * (gain - 1):+.1f} %", over(row, peer, "x"))
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


# ---------------------------------------------------------------- the command


def rungs_of(backend: str, variant: str | None) -> tuple[Ours, ...]:
    """The points that match a glob pattern, or the chain that ends in `variant`; InputError where there is none."""
    if backend == LISTED:
        names = fnmatch.filter([it.name for it in points()], variant or "*")
    else:
        top = variant or next(it.name for it in registry.get(backend).forward.offered if it.parent)
        try:
            names = [it.name for it in ladder(registry.get(backend), top)]
        except ValueError as error:
            raise InputError(f"--variant: {error}") from None
    if not names:
        raise InputError(f"--variant: {variant!r} matches none of the {len(points())} points of {LISTED}")
    return tuple(Ours(backend=backend, variant=name) for name in names)


def climb(options: argparse.Namespace) -> int:
    """Time every rung of a backend's ladder; 1 where one has an error."""
    backend, is_list = options.backend, options.backend == LISTED
    cells = shared.cells_of(options, "points" if is_list else "seed")
    machine = Machine.needed(f"python -m multiattn compile --backend {backend} --variant all compiles every rung.")
    rungs = rungs_of(backend, options.variant)
    peers = dict.fromkeys(baseline(cell.head_dim) for cell in cells)
    name = f"ladder_{backend}"
    is_whole = cells == SUITES["points" if is_list else "seed"] and not options.variant
    folder = options.out or (results_dir(environment().gpu) if is_whole else ROOT / "out" / "bench")
    others = find_peers((*peers,) if is_list else (*peers, CUDNN, TILEGYM))
    job = shared.as_asked(Job(suite=name, cells=cells, providers=(*rungs, *others)), options)
    store = Store(folder / f"{name}.json", name)
    rows = run(job, machine, store)
    made = [*point_tables(rows), *axes_tables(rows)] if is_list else length_tables(rows, backend)
    told = [row for row in rows if not (is_list and is_ours(row.contender)) or row.measured is not None]
    print(f"\n{text_report(told, made=made)}\n\nWritten: {store.path}")
    return int(any(row.error and is_ours(row.contender) for row in rows))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("--backend", choices=BACKENDS, required=True)
    told = f"the end of a chain, default the best; of {LISTED} a glob pattern, as 'split_q*', default all"
    command.add_argument("--variant", metavar="NAME", help=told)
    shared.add_cells(command, None, f"default seed, and points for {LISTED}")
    shared.add_run(command, Budget(), "bench/results/<gpu>; out/bench where less was asked for")
