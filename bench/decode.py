"""``python -m bench decode``: attention over caches of keys and values, in TB/s and as a share of a copy's rate.

A launch moves keys, values, q and out once: those bytes over its time are its rate. A copy within the device's memory
takes turns with the contenders, so that each rate has a share of what the same memory did in the same seconds. Cells
with many queries are bound by products, and have TFLOPS instead.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.contenders import Truths
from bench.decode_cells import DecodeCell, matching, too_large
from bench.matrix import Cell, InputError
from bench.options import AGAIN, positive
from bench.peers_decode import PEERS, providers
from bench.results import Row, Store, grouped, is_ours, newest, results_dir
from bench.run import Copy, Job, Machine, run, tensors_and_truth
from multiattn.inspect.options import count, some_of
from multiattn.packed import of_batch_of_one
from multiattn.plan.backend import BACKENDS
from multiattn.problem import problem_of
from multiattn.truth.tolerance import expected_forward
from multiattn.tune.timing import Budget
from parity.tolerance import Truth

BUDGET = Budget(rounds=7, sample_ms=15.0, warmup_ms=15.0)
"""A third of a second for each contender."""
SECONDS = 540.0
REGIMES = ("graph", "device")
COPY_BYTES = 1 << 30
"""The bytes that a copy reads; it writes as many."""
SUITE = "decode"


# ---------------------------------------------------------------- the truth


def truth_of(cell: Cell, tensors: Any) -> Truths:
    """The results that contenders must compute, from `multiattn.reference` in fp64, a sequence at a time.

    As `parity.tolerance.Truth` has it: with budgets by what naive attention in the cell's own dtype rounds.
    """
    assert isinstance(cell, DecodeCell)
    shape = tensors.q.shape
    if cell.queries == 1 and cell.feature == "none":  # a group's heads are as many queries, so no key is repeated
        tensors = tensors._replace(q=tensors.q.reshape(cell.batch, -1, cell.group, cell.head_dim))
    operands, options = cell.asked(tensors)
    out, lse = expected_forward(operands, problem_of(operands, options))
    true = of_batch_of_one(out.truth) if cell.mixed else out.truth.view(*shape[:-1], cell.width_v)
    truth = Truth(out=replace(out, truth=true), lse=lse, lse_in_halves=lambda: lse, lse_of_rough_tanh=lambda: lse)
    return Truths(forward=truth, backward=None)


# ---------------------------------------------------------------- running


def measure_decode(options: argparse.Namespace) -> int:
    """Measure decode over caches, cell by cell, until the time is over; the same again goes on with what is left."""
    cells = matching(options.cells)
    if options.list:
        print("\n".join(cell.key for cell in cells))
        return 0
    machine = Machine.needed()
    command = shlex.join(["python", "-m", "bench", *options.given, "--output", f"{AGAIN}/decode.json", "--fresh"])
    path = options.output or results_dir(torch.cuda.get_device_name()) / "decode.json"
    budget = replace(BUDGET, rounds=options.rounds, sample_ms=options.sample_ms)
    job = Job(
        suite=SUITE,
        cells=cells,
        providers=providers(options.backends, options.peers),
        regime=options.regime,
        budget=budget,
        fresh=options.fresh,
        command=command,
        truth_of=truth_of,
        copy=make_copy(machine.device),
    )
    if not job.providers:
        raise InputError("--backends none --peers none leaves nothing to time")
    memory = torch.cuda.get_device_properties(machine.device).total_memory
    machine = replace(machine, extra_bytes=None)
    rows, unrun = run_cells(job, machine, Store(path, SUITE), seconds=options.budget, memory_bytes=memory)
    for why, left in unrun.items():
        print(f"\nNot run, {why}: {len(left)} cells\n" + "\n".join(f"  {it.key}" for it in left))
    print(f"\nWritten: {path}")
    return int(any(row.error for row in rows if is_ours(row.contender)))


def make_copy(device: torch.device, size: int = COPY_BYTES) -> Copy:
    """A copy of so many bytes on a device, by a kernel: a graph's own node for copies is a third slower.

    H200, 2026-11-26, 1 GiB in a graph: 4.28 TB/s, ``copy_`` 2.77.
    """
    source = torch.zeros(size // 2, dtype=torch.int16, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        torch.add(source, 0, out=target)

    return Copy(call=copy, moved_bytes=2 * size)


def run_cells(
    job: Job,
    machine: Machine,
    store: Store,
    *,
    seconds: float,
    memory_bytes: int | None = None,
    now: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = print,
) -> tuple[list[Row], dict[str, list[DecodeCell]]]:
    """Run cells until `seconds` are over; the rows, and the cells that were not run by the reason.

    A cell is begun only while there is time, and is stored when it is done. One with rows of this very setup takes
    none.
    """
    began = now()
    unrun: dict[str, list[DecodeCell]] = {}

    def skips(cell: Cell) -> bool:
        assert isinstance(cell, DecodeCell)
        tensors_and_truth.cache_clear()  # of the cell before
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
        why = too_large(cell, memory_bytes) or ("the time is over" if now() - began > seconds else "")
        if why:
            unrun.setdefault(why, []).append(cell)
        return bool(why)

    return run(job, machine, store, quiet=True, skips=skips, tell=lambda rows: tell(line(rows))), unrun


# ---------------------------------------------------------------- tables

NOT_MEASURED = "Not measured yet: `python -m bench decode` on a GPU writes bench/results."
LARGE_BYTES = 256_000_000
"""Keys and values from which a cell's share of a copy's rate counts: smaller ones end before memory is at its rate."""


def cell_of(row: Row) -> DecodeCell:
    """The cell of a row of decode; InputError for a row of another suite."""
    if not isinstance(row.cell, DecodeCell):
        raise InputError(f"{row.cell.key}: not a cell of python -m bench decode")
    return row.cell


def copy_share(row: Row | None) -> float | None:
    """The rate over that of a copy in the same turns; None where either is missing, or products bound the cell."""
    found = row.measured if row is not None and cell_of(row).has_rate_of_memory else None
    if found is None or found.tb_per_s is None or not found.copy_tb_per_s:
        return None
    return found.tb_per_s / found.copy_tb_per_s


def share_text(row: Row | None) -> str:
    """`copy_share` for a table."""
    share = copy_share(row)
    return report.NOTHING if share is None else f"{100 * share:.0f} %"


def figure(row: Row | None) -> str:
    """TB/s for a table, or TFLOPS where products bound the cell; ``refused`` or ``error``."""
    if row is None:
        return report.NOTHING
    if row.measured is None or row.measured.tb_per_s is None or not cell_of(row).has_rate_of_memory:
        return row.figure
    return f"{row.measured.tb_per_s:.2f}" + (" (host-bound)" if row.measured.host_bound else "")


def _best(its: Mapping[str, Row]) -> Row | None:
    return report.fastest(its.values(), ours=True)


def _us(row: Row | None) -> str:
    return report.NOTHING if row is None or row.measured is None else f"{1e3 * row.measured.time_ms:.1f}"


def over_plain(row: Row | None) -> str:
    """The time over that without the cell's scores in the same turns, for a table."""
    if row is None or row.measured is None or row.measured.plain_ms is None:
        return report.NOTHING
    return f"{row.measured.time_ms / row.measured.plain_ms:.2f}"


def line(rows: Sequence[Row]) -> str:
    """The rows of one cell, on one line."""
    cell, peer = cell_of(rows[0]), report.fastest(rows, ours=False)
    unit = "TB/s" if cell.has_rate_of_memory else "TFLOPS"
    copied = next((it.measured.copy_tb_per_s for it in rows if it.measured is not None), None)
    parts = [cell.key, f"{cell.moved_bytes / 1e9:.3g} GB", f"copy {copied:.2f} TB/s" if copied else "no copy"]
    for row in rows:
        words = [row.contender, figure(row), f"({row.text[:100]})" if row.error else ""]
        if row.measured is not None:
            ratio = f"x{report.over(row, peer)}" if is_ours(row.contender) else ""
            share = share_text(row).replace(report.NOTHING, "")
            slower = f"plain x{over_plain(row)}" if row.measured.plain_ms else ""
            words = [row.contender, f"{_us(row)} us", figure(row), unit, share, ratio, slower]
            words += [f"({row.detail})"] if row.detail else []
        parts.append(" ".join(filter(None, words)))
    return " | ".join(parts)


def table(rows: Sequence[Row]) -> str:
    """A line for each cell, a column for each contender that has a time anywhere."""
    names = dict.fromkeys(row.contender for row in rows if row.measured is not None or row.error)
    with_plain = dict.fromkeys(row.contender for row in rows if row.measured and row.measured.plain_ms)
    columns: dict[str, report.Column] = {
        **({"scores": lambda cell, _: cell.feature} if with_plain else {}),
        "cache": lambda cell, _: cell.cache,
        "heads": lambda cell, _: cell.heads_text,
        "Q": lambda cell, _: cell.queries,
        "B": lambda cell, _: cell.batch,
        "N": lambda cell, _: cell.seq,
        "GB": lambda cell, _: f"{cell.moved_bytes / 1e9:.3g}",
        **report.rates(names, figure),
        "best of ours, us": lambda _, its: _us(_best(its)),
        "of a copy": lambda _, its: share_text(_best(its)),
        "over the best peer": lambda _, its: report.over(_best(its), report.fastest(its.values(), ours=False)),
        **{f"{name}, time over plain": it for name, it in report.rates(with_plain, over_plain).items()},
    }
    return report.cells_table(sorted(rows, key=_place), columns)


def _place(row: Row) -> tuple[Any, ...]:
    cell = cell_of(row)
    sizes = cell.heads, cell.heads_kv or cell.heads, cell.queries, cell.seq, cell.batch
    return cell.feature, cell.page or 0, cell.cache, *sizes


def summary(rows: Sequence[Row]) -> str:
    """Cells of one query by head_dim and kind of cache: geometric means over them, and the least of each."""
    timed = [row for row in rows if row.measured and cell_of(row).queries == 1 and cell_of(row).is_plain]
    timed.sort(key=lambda it: (it.cell.head_dim, it.cell.width_v, cell_of(it).page or 0))
    groups = grouped(timed, lambda row: (str(cell_of(row).widths), cell_of(row).cache))
    if not groups:
        return ""
    groups["all", "all"] = timed
    others = [name for name in BACKENDS if name != "cuda"]
    lines = []
    for place, members in groups.items():
        cells = report.by_cell(members)
        best = {cell: _best(its) for cell, its in cells.items()}
        peers = {cell: report.fastest(its.values(), ours=False) for cell, its in cells.items()}
        over_peers = [report.times_as_fast(best[cell], peers[cell]) for cell in cells]
        shares = [copy_share(row) for row in best.values() if row and cell_of(row).cache_bytes >= LARGE_BYTES]
        found = cells.values()
        over_cuda = ([report.times_as_fast(its.get(name), its.get("cuda")) for its in found] for name in others)
        lines.append((*place, len(cells), *map(_mean_and_least, (over_peers, shares, *over_cuda))))
    header = ("D", "cache", "cells", "best of ours over the best peer", "of a copy, past 256 MB")
    return report.markdown((*header, *(f"{name} over cuda" for name in others)), lines)


def _mean_and_least(ratios: Iterable[float | None]) -> str:
    """``1.108, least 0.952 (410)``."""
    found = [ratio for ratio in ratios if ratio is not None]
    return f"{report.mean_text(found, 3)}, least {min(found):.3f} ({len(found)})" if found else report.NOTHING


def block(path: Path) -> str:
    """The tables of a results file, by head_dim and work, and where they were measured."""
    rows = [row for row in newest(path) if row.regime == REGIMES[0]]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        cell = cell_of(row)
        kind = {"mixed batch": "mixed batches", "prefill chunk": "chunks of prefill"}.get(cell.work, cell.work)
        unit = "TB/s" if cell.has_rate_of_memory else "TFLOPS"
        kind += " of a latent" * cell.latent + " of 8-bit numbers" * (cell.stored is not None)
        kind += " with scores" * (cell.feature != "none")
        groups.setdefault(f"{kind}, D = {cell.widths}, {cell.dtype}, {unit}", []).append(row)
    made = [f"**{title}**\n\n{table(members)}" for title, members in groups.items() if report.timed_names(members)]
    if not made:
        return NOT_MEASURED
    notes = (f"{title}:\n\n" + "\n".join(f"- {it}" for it in lines) for title, lines in report.footnotes(rows).items())
    if means := summary(rows):
        made.insert(0, f"**One query: the geometric mean, the least, and in brackets the number of cells**\n\n{means}")
    return "\n\n".join((*made, *notes))


# ---------------------------------------------------------------- arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of ``python -m bench decode``."""
    told = "words of cells' names with wildcards, as 'H64/8 Q1 page*'; may be given again; default all"
    command.add_argument("--cells", action="append", default=[], metavar="WORDS", help=told)
    command.add_argument("--list", action="store_true", help="only name the cells")
    for option, names in (("--backends", BACKENDS), ("--peers", tuple(peer.name for peer in PEERS))):
        allowed = ("none", *names)
        told = f"of {','.join(allowed)}; default all"
        command.add_argument(option, type=some_of(allowed), default=names, metavar="A,B", help=told)
    command.add_argument("--regime", choices=REGIMES, default=REGIMES[0], help="default: %(default)s, replayed")
    command.add_argument("--rounds", type=count, default=BUDGET.rounds, help="readings of each (%(default)s)")
    command.add_argument("--sample-ms", type=positive, default=BUDGET.sample_ms, help="ms a reading (%(default)s)")
    command.add_argument("--budget", type=positive, default=SECONDS, help="seconds to begin cells in (%(default)g)")
    command.add_argument("--fresh", action="store_true", help="measure also what this very setup has measured before")
    told = "results file; default bench/results/<gpu>/decode.json"
    command.add_argument("--output", type=Path, metavar="FILE", help=told)
