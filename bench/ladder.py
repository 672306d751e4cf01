"""``python -m bench ladder``: what each rung of a backend's ladder gains on a GPU."""

from __future__ import annotations

import argparse
import fnmatch

from bench import options as shared
from bench.environment import NO_GPU, ROOT, environment, results_dir
from bench.errors import InputError
from bench.ladder_tables import CUDNN, TILEGYM, axes_tables, baseline, length_tables, point_tables, points
from bench.matrix import Cell
from bench.peers import find_peers
from bench.providers import Ours
from bench.report import text_report
from bench.results import Store, is_ours
from bench.run import Job, Machine, run
from bench.timing import Budget
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, ladder, make_plan

LISTED = "cuda"
"""The backend whose variants are points on several axes; the others have chains, in which each rung adds one thing."""


def chain(backend: str, top: str) -> tuple[Ours, ...]:
    """Every rung with the config of the top, then every rung with its own; the top itself, the same in both, once."""
    try:
        names = [variant.name for variant in ladder(registry.get(backend), top)]
    except ValueError as error:
        raise InputError(f"--variant: {error}") from None
    pinned = (Ours(backend=backend, variant=name, pinned_to=top) for name in names[:-1])
    return (*pinned, *(Ours(backend=backend, variant=name) for name in names))


def listed(pattern: str = "*") -> tuple[Ours, ...]:
    """The points that match a glob pattern; InputError for one that matches nothing."""
    names = fnmatch.filter([variant.name for variant in points()], pattern)
    if not names:
        raise InputError(f"--variant: {pattern!r} matches none of the {len(points())} points of {LISTED}")
    return tuple(Ours(backend=LISTED, variant=name) for name in names)


def top_of(backend: str, cell: Cell, arch: Arch) -> str:
    """The end of a chain: the first offered variant that can run a cell."""
    return make_plan(registry.get(backend), cell.problem, arch, probe=False).variant


def climb(options: argparse.Namespace) -> int:
    """Time every rung of a backend's ladder; 1 where one has an error."""
    backend, is_list = options.backend, options.backend == LISTED
    cells = shared.cells_of(options, "points" if is_list else "seed")
    machine = Machine.current()
    if machine is None:
        compiles = f"python -m multiattn compile --backend {backend} --variant all"
        print(f"Nothing to time on: {NO_GPU}. {compiles} compiles every rung.")
        return 1
    top = "" if is_list else options.variant or top_of(backend, cells[0], machine.arch)
    rungs = listed(options.variant or "*") if is_list else chain(backend, top)
    peers = dict.fromkeys(baseline(cell.head_dim) for cell in cells)
    name = f"ladder_{backend}"
    is_part = bool(options.variant or options.suite) or shared.is_narrowed(options)
    folder = options.out or (ROOT / "out" / "bench" if is_part else results_dir(environment().gpu))
    job = Job(
        suite=name,
        cells=cells,
        providers=(*rungs, *find_peers((*peers,) if is_list else (*peers, CUDNN, TILEGYM))),
        budget=shared.budget_of(options),
        fresh=options.fresh,
        jobs=options.jobs,
        command=shared.command_again(options),
    )
    store = Store.open(folder / f"{name}.json", name)
    rows = run(job, machine, store)
    if is_list:
        made = [*point_tables(rows), *axes_tables(rows)]
    else:
        made = [table for pinned in (True, False) for table in length_tables(rows, backend, top, pinned=pinned)]
    told = [row for row in rows if not (is_list and is_ours(row.contender)) or row.measured is not None]
    print(f"\n{text_report(told, made=made)}\n\nWritten: {store.path}")
    return int(any(row.error and is_ours(row.contender) for row in rows))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("--backend", choices=BACKENDS, required=True)
    told = f"the end of a chain, default the best; of {LISTED} a glob pattern, as 'split_q*', default all"
    command.add_argument("--variant", metavar="NAME", help=told)
    shared.add_cells(command, None, f"default seed, and points for {LISTED}")
    command.add_argument("--fresh", action="store_true", help="measure also what this very setup has measured before")
    shared.add_run(command, Budget(), "bench/results/<gpu>; out/bench where less was asked for")
