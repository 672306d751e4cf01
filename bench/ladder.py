"""``python -m bench ladder``: what each rung of a backend's ladder gains, timed on a GPU, or compiled without one."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import ladder_facts, ladder_list, ladder_pages, ladder_tables
from bench.arguments import add_budget, add_jobs
from bench.environment import NO_GPU, environment, results_dir, workplace
from bench.errors import InputError
from bench.ladder_facts import Record
from bench.ladder_pages import Log
from bench.ladder_rungs import (
    CUDNN,
    LISTED,
    SHAPES,
    TILEGYM,
    Rung,
    baseline,
    chain_rungs,
    find_backend,
    listed_rungs,
    top_of,
)
from bench.matrix import Cell
from bench.peers import find_peers
from bench.results import Row, Store
from bench.run import DeviceLostError, Job, Machine, run, summary
from bench.timing import Budget
from multiattn.inspect.options import count
from multiattn.plan.arch import GPU_ARCHS, Arch, by_name
from multiattn.plan.backend import BACKENDS, Backend
from parity.report import Table

AGAIN = "out/bench/again"
DEFAULT_ARCH = "sm90"
PATTERNS_HELP = "glob of a listed backend's variants, as 'split_q*'; may be given again; default all"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    sizes = "; default that of the system the ladder answers to"
    command.add_argument("--backend", metavar="NAME", help=", ".join(BACKENDS))
    command.add_argument("--top", metavar="VARIANT", help="end of a chain; default the first offered that can run it")
    command.add_argument("--variant", action="append", metavar="PATTERN", help=PATTERNS_HELP)
    command.add_argument("--head-dim", action="append", type=count, metavar="D", help=f"may be given again{sizes}")
    command.add_argument("--seq", action="append", type=count, metavar="N", help=f"may be given again{sizes}")
    command.add_argument("--batch", type=count, metavar="B", help=sizes.removeprefix("; "))
    command.add_argument("--heads", type=count, metavar="H", help=sizes.removeprefix("; "))
    command.add_argument("--dtype", choices=("fp16", "bf16"), help=sizes.removeprefix("; "))
    mask = command.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=None)
    mask.add_argument("--full", action="store_false", dest="causal")
    command.add_argument("--arch", choices=GPU_ARCHS, help=f"to compile for where there is no GPU ({DEFAULT_ARCH})")
    command.add_argument("--no-emulation", action="store_true", help="leave out bank conflicts counted on the CPU")
    command.add_argument("--record", action="store_true", help="keep what was compiled in bench/results/compiled")
    command.add_argument("--fresh", action="store_true", help="measure also what this very setup has measured before")
    add_jobs(command)
    add_budget(command, Budget())
    command.add_argument("--out", type=Path, help="folder of everything; default bench/results/<gpu> and out/bench")


@dataclass(frozen=True, kw_only=True, slots=True)
class Climb:
    """What was asked for, resolved: rungs, cells, and where they run or for what they compile."""

    backend: Backend
    top: str
    """Of a chain; empty for a list."""
    rungs: tuple[Rung, ...]
    cells: tuple[Cell, ...]
    machine: Machine | None
    arch: Arch
    name: str
    """Of every file."""
    is_narrowed: bool
    """Whether variants were left out: such a run is no record of the whole."""

    @property
    def is_listed(self) -> bool:
        """Whether it is a list of points and no chain."""
        return not self.top

    def tables(self, rows: Sequence[Row], records: Sequence[Record]) -> list[Table]:
        """All tables of these rows and records."""
        mine = [row for row in rows if row.cell in self.cells]
        if self.is_listed:
            found = ladder_list.listings(mine, records, self.backend.name)
            return [table for listing in found for table in ladder_list.listing_tables(listing)]
        boards = ladder_tables.boards(mine, self.backend.name, self.top)
        timed = [table for board in boards for table in ladder_tables.board_tables(board)]
        by_dim = {cell.head_dim: [it for it in records if it.cell.head_dim == cell.head_dim] for cell in self.cells}
        return [*timed, *(ladder_tables.compiled_table(members) for members in by_dim.values() if members)]


def climb_ladder(options: argparse.Namespace) -> int:
    """Climb a backend's ladder: time every rung, or without a GPU compile it; 1 where one has an error."""
    climb = resolve(options, Machine.current())
    pages = options.out or workplace() / "out" / "bench"
    log = Log.start(pages / f"{climb.name}.log", command_again(options))
    records = facts(climb, options, log)
    try:
        rows = measure(climb, options, log)
    except DeviceLostError as lost:
        log.say(f"The device was lost: {lost}\nWhat is finished is stored; run again to go on without it.")
        return 3
    return export(climb, rows, records, pages, log, record=options.record)


def resolve(options: argparse.Namespace, machine: Machine | None) -> Climb:
    """What the options ask for on this machine; InputError, by name, for what there is not."""
    if options.backend is None:
        raise InputError(f"--backend: got none; allowed {', '.join(BACKENDS)}")
    backend = find_backend(options.backend)
    if machine is not None and options.arch not in (None, machine.arch.name):
        raise InputError(
            f"--arch: got {options.arch}, but this GPU is {machine.arch.name}; hide it to compile for others"
        )
    is_listed = backend.name in LISTED
    if is_listed and options.top:
        raise InputError(f"--top: the variants of {backend.name} are a list, not a chain; narrow it with --variant")
    if not is_listed and options.variant:
        raise InputError(f"--variant: {backend.name} has a chain; name its end with --top")
    arch = machine.arch if machine is not None else by_name(options.arch or DEFAULT_ARCH)
    cells = cells_of(options, backend.name)
    default = backend.forward.offered[0].name
    top = "" if is_listed else top_of(backend, cells[0], arch, options.top)
    rungs = listed_rungs(backend, options.variant or ()) if is_listed else chain_rungs(backend, top)
    return Climb(
        backend=backend,
        top=top,
        rungs=rungs,
        cells=cells,
        machine=machine,
        arch=arch,
        name=f"ladder_{backend.name}" if top in ("", default) else f"ladder_{backend.name}_{top}",
        is_narrowed=bool(options.variant),
    )


def cells_of(options: argparse.Namespace, backend: str) -> tuple[Cell, ...]:
    """The ladder's own cells, with what the options say otherwise."""
    shape = SHAPES[backend]
    given = {
        "batch": options.batch,
        "heads": options.heads,
        "head_dims": tuple(options.head_dim or ()),
        "seqs": tuple(options.seq or ()),
        "dtype": options.dtype,
        "causal": options.causal,
    }
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    return replace(shape, **chosen).cells()


# ---------------------------------------------------------------- the two halves


def facts(climb: Climb, options: argparse.Namespace, log: Log) -> list[Record]:
    """What the rungs compile to; of a chain that is timed only where it is to be recorded."""
    if climb.machine is not None and not climb.is_listed and not options.record:
        return []
    wanted = ladder_facts.tasks(climb.rungs, climb.cells, climb.arch, emulate=not options.no_emulation)
    log.say(f"{climb.backend.name}: {len(climb.rungs)} rungs, {len(wanted)} to compile for {climb.arch.name}")
    return ladder_facts.inspect_all(wanted, jobs=options.jobs, say=log.say)


def measure(climb: Climb, options: argparse.Namespace, log: Log) -> list[Row]:
    """A row of every rung and peer in every cell; none without a GPU. DeviceLostError as `bench.run.run` has it."""
    if climb.machine is None:
        return []
    setup = environment()
    folder = options.out or (workplace() / "out" / "bench" if climb.is_narrowed else results_dir(setup.gpu))
    store = Store.open(folder / f"{climb.name}.json", climb.name)
    command = command_again(options)
    rows = []
    for cell in climb.cells:
        peers = (baseline(cell.head_dim),) if climb.is_listed else (baseline(cell.head_dim), CUDNN, TILEGYM)
        job = Job(
            suite=climb.name,
            cells=(cell,),
            providers=(*(rung.provider for rung in climb.rungs), *find_peers(peers)),
            budget=Budget(rounds=options.rounds, sample_ms=options.sample_ms, seed=options.seed),
            fresh=options.fresh,
            command=command,
        )
        found = run(job, climb.machine, store, quiet=True)
        rows += found
        timed = sum(row.measured is not None for row in found)
        log.say(f"{cell}: {timed} timed" if climb.is_listed else summary(cell, "device", found))
    log.say(f"Written: {store.path}")
    return rows


def export(climb: Climb, rows: Sequence[Row], records: Sequence[Record], pages: Path, log: Log, *, record: bool) -> int:
    """Print and write everything; 1 where a rung has an error."""
    tables = climb.tables(rows, records)
    told = [row for row in rows if not climb.is_listed or row.measured is not None or Rung.parse(row.contender) is None]
    lines = ladder_pages.footer(told)  # why a point of a list has no time is in its second table
    if climb.machine is None:
        lines = [f"Nothing was timed: {NO_GPU}. What follows is compiled for {climb.arch.name}.", *lines]
    log.say("\n" + ladder_pages.terminal(tables) + "\n")
    for line in lines:
        log.say(line)
    paths = ladder_pages.write_pages(climb.name, tables, lines, rows, pages)
    if records:
        paths.append(pages / f"{climb.name}_compiled.json")
        ladder_facts.save(records, paths[-1])
    if record:
        paths.append(ladder_facts.record_path(climb.backend.name))
        known = ladder_facts.load(paths[-1]) if paths[-1].exists() else []
        ladder_facts.save(ladder_facts.merge(known, records), paths[-1])
    log.say(f"Written: {', '.join(map(str, [*paths, log.path]))}")
    ours = [row for row in rows if Rung.parse(row.contender) is not None]
    return int(any(it.error for it in records) or any(row.error for row in ours))


def command_again(options: argparse.Namespace) -> str:
    """The command with every option that mattered, into a folder where it overwrites nothing."""
    words = ["python", "-m", "bench", "ladder", "--backend", options.backend]
    for option in ("top", "variant", "head_dim", "seq", "batch", "heads", "dtype", "arch"):
        given = getattr(options, option)
        for value in given if isinstance(given, list) else [given]:
            words += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    words += [] if options.causal is None else ["--causal" if options.causal else "--full"]
    words += ["--no-emulation"] if options.no_emulation else []
    words += ["--rounds", str(options.rounds), "--sample-ms", f"{options.sample_ms:g}", "--seed", str(options.seed)]
    return shlex.join([*words, "--fresh", "--out", AGAIN])
