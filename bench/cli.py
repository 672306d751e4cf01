"""``python -m bench``: the matrix, and beside it record, ladder, tune, compare, prefer, docs and more."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from bench import (
    demo,
    docs,
    host,
    ladder,
    record,
    report,
    tune,
    verdicts,
)
from bench.arguments import (
    add_budget,
    add_cells,
    add_jobs,
    add_who,
    our_names,
    positive,
    try_file,
    try_folder,
)
from bench.environment import NO_GPU, ROOT, environment, is_clone, results_dir, results_root, workplace
from bench.errors import InputError
from bench.matrix import SUITES, Cell, Direction, Filter, find_suite, in_directions
from bench.peers import PEERS, find_peers
from bench.providers import Provider, our_providers
from bench.results import Row, Store, is_ours, load
from bench.run import DeviceLostError, Job, Machine, run
from bench.timing import REGIMES, Budget
from multiattn.__main__ import main as run_multiattn
from multiattn.inspect.options import count

AGAIN = "out/bench/again"
"""Where a stored command writes: what is recorded is not overwritten by whoever tries it."""

EPILOG = """Without a command it is run: python -m bench --suite floors.
python -m bench --compare A B is python -m bench compare A B. Options of a command: python -m bench run --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 when all went well."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--compare"]:
        given[0] = "compare"
    if not given or (given[0] not in COMMANDS and given[0] not in ("-h", "--help")):
        given.insert(0, "run")
    parser = _parser()
    options = parser.parse_args(given)
    try:
        _try_writing(options)
        status: int = COMMANDS[options.command](options)
    except InputError as error:
        parser.exit(2, f"python -m bench {options.command}: {error}\n")
    return status


# ---------------------------------------------------------------- measuring


def run_matrix(options: argparse.Namespace) -> int:
    """Run the chosen cells; 1 where one of ours has an error, 3 where a contender lost the device."""
    suite: str = options.suite
    if suite == "host":
        return measure_host(options)
    machine = Machine.current()
    asked = our_names(options.backend)
    folder = options.out or results_dir(torch.cuda.get_device_name() if machine is not None else "none")
    jobs = _jobs(options)
    store = Store.open(folder / f"{suite}.json", suite)
    if machine is None:
        print(f"No timing: {NO_GPU}\n", flush=True)
    try:
        rows = [row for job in jobs for row in run(job, machine, store)]
    except DeviceLostError as lost:
        print(f"The device was lost: {lost}\nWhat is finished is in {store.path}; run again to go on without it.")
        return 3
    print("\n" + report.text_report(rows))
    pages = report.write_pages(rows, options.out or workplace() / "out" / "bench", suite)
    print(f"\nWritten: {', '.join(map(_shown, (store.path, *pages)))}")
    if machine is None:
        if options.no_compile or not asked:
            return 0
        print("\nCompiled for every target instead:\n")
        which = ["--backend", ",".join(asked), "--direction", "forward", "--head-dim", "128", "--mask", "causal"]
        return run_multiattn(["compile", *which, "--jobs", str(options.jobs)])
    ours = [row for row in rows if is_ours(row.contender)]
    idle = idle_backends(ours, asked if options.backend else {row.contender.partition("/")[0] for row in ours})
    print("".join(f"\n{line}" for line in idle))
    return int(bool(idle) or any(row.error for row in ours))


def _jobs(options: argparse.Namespace) -> list[Job]:
    """One for each direction, as each has variants of its own."""
    cells = _cells(options)
    if options.regime == "graph" and (others := sorted({it.direction for it in cells} - {"fwd"})):
        raise InputError(
            f"--regime graph: got direction {', '.join(others)}; allowed fwd: autograd has its own streams"
        )
    return [
        Job(
            suite=options.suite,
            cells=tuple(cell for cell in cells if cell.direction == direction),
            providers=_providers(options, direction),
            regimes=("device", "call") if options.regime == "both" else (options.regime,),
            budget=Budget(rounds=options.rounds, sample_ms=options.sample_ms, seed=options.seed),
            fresh=options.fresh,
            jobs=options.jobs,
            command=command_again(options),
        )
        for direction in dict.fromkeys(cell.direction for cell in cells)
    ]


def idle_backends(rows: Sequence[Row], asked: Iterable[str]) -> list[str]:
    """One line for each backend that was asked for and has no measured row."""
    lines = []
    for name in sorted(asked):
        mine = [row for row in rows if row.contender.partition("/")[0] == name]
        if not any(row.measured is not None for row in mine):
            why = "; ".join(dict.fromkeys(row.text for row in mine)) or "no row"
            lines.append(f"{name} was asked for and nothing of it was measured: {why}")
    return lines


def command_again(options: argparse.Namespace) -> str:
    """The run's own command with every option that mattered, written out, into a folder where it overwrites nothing."""
    words = ["python", "-m", "bench", "run", "--suite", options.suite]
    words += ["--direction", ",".join(options.direction)] if options.direction else []
    for option in ("backend", "peer", "head_dim", "seq", "dtype"):
        for value in dict.fromkeys(getattr(options, option) or ()):
            words += [f"--{option.replace('_', '-')}", str(value)]
    words += [] if options.causal is None else ["--causal" if options.causal else "--full"]
    words += [] if options.variant is None else ["--variant", options.variant]
    words += ["--regime", options.regime, "--rounds", str(options.rounds), "--sample-ms", f"{options.sample_ms:g}"]
    return shlex.join([*words, "--seed", str(options.seed), "--fresh", "--out", AGAIN])


def measure_host(options: argparse.Namespace) -> int:
    """The cost of a call on the host, per backend and of SDPA."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else None
    costs = host.host_costs(device, synchronize=torch.cuda.synchronize)
    setup = environment()
    path = (options.out or results_dir(setup.gpu)) / "host.json"
    host.save(costs, setup, path)
    print(host.table(costs))
    print(f"\n{host.CELL.key}. Written: {_shown(path)}")
    return int(any(cost.error for cost in costs))


def tune_configs(options: argparse.Namespace) -> int:
    """Sweep the candidates of each backend, print the ranking of each cell and keep it as JSON."""
    names = our_names(options.backend)
    options.seq = options.seq or [tune.TUNE_SEQ]
    cells = _cells(options)
    tune.check_variants(names, cells, options.variant or ())
    machine = Machine.current()
    if machine is None:
        print(f"Nothing to time on: {NO_GPU}")
        return 1
    budget = Budget(
        rounds=options.rounds, sample_ms=options.sample_ms, warmup_ms=tune.TUNE_BUDGET.warmup_ms, seed=options.seed
    )
    folder = options.out or workplace() / "out" / "tune"
    for backend in names:
        path, found = folder / f"{backend}.json", []
        swept = tune.tune(
            backend,
            cells,
            machine,
            variants=tuple(options.variant or ()),
            jobs=options.jobs,
            timeout_s=options.timeout,
            budget=budget,
            spills=options.spills,
            finals=options.finals,
        )
        for cell, trials in swept:
            found += trials
            tune.save(path, found, environment())
            print(f"\n{backend}: {cell.key}\n{tune.table(trials, top=options.top)}\n", flush=True)
        print(f"Written: {_shown(path)}", flush=True)
    return 0


# ---------------------------------------------------------------- what results say


def compare_files(options: argparse.Namespace) -> int:
    """Two result files, ratio per cell; 1 where a contender of ours got slower than the spread explains."""
    changes = verdicts.compare(load(options.before), load(options.after))
    print(verdicts.change_table(changes, everything=options.all))
    ours = [change for change in changes if is_ours(change.before.contender)]
    regressions = sum(change.is_regression for change in ours)
    print(f"\n{len(changes)} compared; of ours {regressions} slower or gone. Not shown: what is the same (--all).")
    return int(regressions > 0)


def write_preferences(options: argparse.Namespace) -> int:
    """Write multiattn/measured.json from every recorded suite."""
    path = ROOT / "multiattn" / "measured.json" if is_clone() else Path.cwd() / "measured.json"
    count = verdicts.write_preferences(_rows(options), path)
    print(f"Written: {_shown(path)}, {count} cells")
    return 0


def run_demo(options: argparse.Namespace) -> int:
    """Parity, every target compiled, the floors timed where there is a GPU, and one page of it all."""
    return demo.demo(options, main, [path for path in recorded_files() if path.stem in ("standard", "backward")])


def write_report(options: argparse.Namespace) -> int:
    """Tables of results on the terminal, or as Markdown; with --html one page of everything there is."""
    rows = _rows(options)
    for option, path in (("--parity", options.parity), ("--compile", options.compile)):
        if path is not None and options.html is None:
            raise InputError(f"{option}: got it without --html; allowed with it, whose page shows it")
        if path is not None and not path.exists():
            raise InputError(f"{path}: there is no such file")
    if options.html is not None:  # first, so that what is wrong with a file is not said below long tables
        report.combined_report(options.parity, _result_files(options), options.html, options.compile)
    print(report.text_report(rows, form="github" if options.markdown else "simple"))
    if options.html is not None:
        print(f"\nWritten: {_shown(options.html)}")
    return 0


def update_docs(options: argparse.Namespace) -> int:
    """Make the tables of README.md and docs/ again; with --check only say which are stale."""
    stale = docs.update_all(check=options.check)
    for path in stale:
        print(f"{_shown(path)}: {'stale; run python -m bench docs' if options.check else 'written'}")
    if not stale:
        print("every table is current")
    return int(options.check and bool(stale))


# ---------------------------------------------------------------- arguments


COMMANDS = {
    "run": run_matrix,
    "record": record.run,
    "ladder": ladder.climb_ladder,
    "tune": tune_configs,
    "compare": compare_files,
    "prefer": write_preferences,
    "host": measure_host,
    "report": write_report,
    "demo": run_demo,
    "docs": update_docs,
}


def _cells(options: argparse.Namespace) -> tuple[Cell, ...]:
    chosen = Filter(
        head_dims=tuple(options.head_dim or ()),
        seqs=tuple(options.seq or ()),
        dtypes=tuple(options.dtype or ()),
        causal=options.causal,
    )
    return chosen.apply(in_directions(find_suite(options.suite), options.direction))


def _providers(options: argparse.Namespace, direction: Direction) -> tuple[Provider, ...]:
    peers = find_peers(tuple(dict.fromkeys(options.peer or (peer.name for peer in PEERS))))
    names = our_names(options.backend)
    ours = our_providers(names, options.variant, direction) if names else ()
    if not ours and not peers:
        raise InputError("--backend none --peer none leaves nobody to time")
    return (*ours, *peers)


def _result_files(options: argparse.Namespace) -> list[Path]:
    """The files that were named, or those of every suite on every GPU. ValueError where there are none."""
    files = options.files or recorded_files()
    if not files:
        raise InputError(
            f"no results: name files, or run python -m bench on a GPU first ({_shown(results_root())} is empty)"
        )
    return files


def recorded_files() -> list[Path]:
    """Every suite on every GPU, as recorded in bench/results."""
    return sorted(path for path in results_root().glob("*/*.json") if path.stem in SUITES)


def _try_writing(options: argparse.Namespace) -> None:
    """InputError where --out or --html cannot be written to: said before anything runs, not after."""
    if getattr(options, "out", None) is not None:
        try_folder("--out", options.out)
    if getattr(options, "html", None) is not None:
        try_file("--html", options.html)


def _rows(options: argparse.Namespace) -> list[Row]:
    return [row for path in _result_files(options) for row in load(path)]


def _shown(path: Path) -> str:
    """Relative to the checkout where it lies in it."""
    return str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", metavar="{" + ",".join(COMMANDS) + "}")

    def add(name: str) -> argparse.ArgumentParser:
        summary = (COMMANDS[name].__doc__ or "").splitlines()[0]
        return commands.add_parser(name, help=summary, description=summary)

    command = add("run")
    add_cells(command, default="standard")
    add_who(command)
    command.add_argument("--peer", action="append", metavar="NAME", help=f"none, or {_names(PEERS)}; default all")
    command.add_argument("--variant", help="of our backends: all, or one's name; default the best for each cell")
    command.add_argument(
        "--regime",
        choices=(*REGIMES, "both"),
        default="device",
        help="graph: forward only; both: device and call; default: %(default)s",
    )
    command.add_argument("--fresh", action="store_true", help="measure also what this very setup has measured before")
    command.add_argument("--no-compile", action="store_true", help="without a GPU: leave out the compile table")
    add_jobs(command)
    add_budget(command, Budget())
    command.add_argument("--out", type=Path, help="folder of the results; default bench/results/<gpu>")

    record.add_arguments(add("record"))
    ladder.add_arguments(add("ladder"))

    command = add("tune")
    add_cells(command, default="standard")
    add_who(command)
    command.add_argument("--variant", action="append", help="may be given again; default all")
    command.add_argument("--timeout", type=positive, default=60.0, metavar="S", help="seconds for one (%(default)s)")
    command.add_argument("--top", type=count, default=12, help="places to print (%(default)s)")
    command.add_argument("--spills", action="store_true", help="time also what spills in its hot loops")
    command.add_argument("--finals", type=int, default=0, metavar="N", help="time the N fastest again, long")
    add_jobs(command)
    add_budget(command, tune.TUNE_BUDGET)
    command.add_argument("--out", type=Path, help="folder of the rankings; default out/tune")

    command = add("compare")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.add_argument("--all", action="store_true", help="show also what is the same")

    for name in ("prefer", "report"):
        command = add(name)
        command.add_argument("files", type=Path, nargs="*", help="result files; default all under bench/results")
    command.add_argument("--markdown", action="store_true", help="tables as Markdown")
    command.add_argument("--html", type=Path, metavar="OUT", help="also write one self-contained page")
    command.add_argument("--parity", type=Path, metavar="JSON", help="parity's results, for the page")
    command.add_argument("--compile", type=Path, metavar="JSON", help="the compile table, for the page")

    command = add("host")
    command.add_argument("--out", type=Path, help="folder of the results; default bench/results/<gpu>")

    command = add("demo")
    add_jobs(command)
    command.add_argument("--out", type=Path, default=Path("out"), help="folder of everything (%(default)s)")

    command = add("docs")
    command.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is stale")
    return parser


def _names(named: Sequence[Provider]) -> str:
    return ", ".join(it.name for it in named)
