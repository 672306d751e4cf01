"""Benchmarks: the matrix of backends and peers, and what is made of its results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from bench import decode, docs, host, ladder, models, record, report, scaling, tune, verdicts
from bench import options as shared
from bench.contenders import our_providers
from bench.matrix import SUITES, InputError
from bench.page import differences, page, sources
from bench.page import verdict as verdict_of
from bench.peers import PEERS, find_peers
from bench.results import NO_GPU, RESULTS, ROOT, Row, Store, environment, is_ours, load, results_dir
from bench.run import DeviceLostError, Job, Machine, NothingToTimeOnError, run
from multiattn.__main__ import main as run_multiattn
from multiattn.inspect.build import Compilation, requests
from multiattn.inspect.cli import compile_all, verdict
from multiattn.inspect.options import Command, layer
from multiattn.inspect.tables import text_table
from multiattn.tune.timing import REGIMES, Budget
from parity.__main__ import main as run_parity

BACKWARD_ARCH = "sm90"
"""One arch stands for all in a demo: a backward compiles several times as long as a forward."""

MEASURED = ROOT / "multiattn" / "plan" / "measured.json"

EPILOG = "Without a command: run, as in python -m bench --suite floors. Its options: python -m bench run --help"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 when all went well, 3 where a contender lost the device."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in COMMANDS and given[0] not in ("-h", "--help")):
        given.insert(0, "run")
    parser = _parser()
    options = parser.parse_args(given, argparse.Namespace(given=given))
    try:
        if getattr(options, "out", None) is not None:
            options.out.mkdir(parents=True, exist_ok=True)
        status: int = COMMANDS[options.command](options)
    except (InputError, OSError) as error:
        parser.exit(2, f"python -m bench {options.command}: {error}\n")
    except DeviceLostError as lost:
        print(f"The device was lost: {lost}\nWhat is finished is stored; run again to go on without it.")
        return 3
    except NothingToTimeOnError as error:
        print(error)
        return 1
    return status


# ---------------------------------------------------------------- measuring


def run_matrix(options: argparse.Namespace) -> int:
    """Run the chosen cells; 1 where one of ours has an error. Without a GPU, compile for every target instead."""
    machine = Machine.current()
    asked = shared.backends_of(options)
    jobs = _jobs(options)
    folder = options.out or results_dir(torch.cuda.get_device_name() if machine is not None else "none")
    store = Store(folder / f"{options.suite}.json", options.suite)
    rows = [row for job in jobs for row in run(job, machine, store, quiet=machine is None)]
    if machine is None:
        print(f"No timing: {NO_GPU}. Written: {store.path}")
        if options.no_compile or not asked:
            return 0
        print("\nCompiled for every target instead:\n", flush=True)
        which = ["--backend", ",".join(asked), "--direction", "forward", "--head-dim", "128", "--mask", "causal"]
        return run_multiattn(["compile", *which, "--jobs", str(options.jobs)])
    print(f"\n{report.text_report(rows)}\n\nWritten: {store.path}")
    ours = [row for row in rows if is_ours(row.contender)]
    idle = idle_backends(ours, asked if options.backend else {row.contender.partition("/")[0] for row in ours})
    print("".join(f"\n{line}" for line in idle))
    return int(bool(idle) or any(row.error for row in ours))


def _jobs(options: argparse.Namespace) -> list[Job]:
    """A job for each direction, as each has variants of its own."""
    cells = shared.cells_of(options, "standard")
    others = sorted({cell.direction for cell in cells} - {"fwd"})
    if options.regime == "graph" and others:
        raise InputError(f"--regime graph: got direction {others[0]}; allowed fwd: autograd has its own streams")
    peers = find_peers(tuple(options.peer or (peer.name for peer in PEERS)))
    jobs = []
    for direction in dict.fromkeys(cell.direction for cell in cells):
        names = shared.backends_of(options)
        ours = our_providers(names, options.variant, direction) if names else ()
        if not ours and not peers:
            raise InputError("--backend none --peer none leaves nothing to time")
        mine = tuple(cell for cell in cells if cell.direction == direction)
        job = Job(suite=options.suite, cells=mine, providers=(*ours, *peers), regime=options.regime)
        jobs.append(shared.as_asked(job, options))
    return jobs


def idle_backends(rows: Sequence[Row], asked: Iterable[str]) -> list[str]:
    """One line for each backend that was asked for and has no measured row."""
    lines = []
    for name in sorted(asked):
        mine = [row for row in rows if row.contender.partition("/")[0] == name]
        if not any(row.measured is not None for row in mine):
            why = "; ".join(dict.fromkeys(row.text for row in mine)) or "no row"
            lines.append(f"{name} was asked for and nothing of it was measured: {why}")
    return lines


def measure_host(options: argparse.Namespace) -> int:
    """Measure the cost of a call on the host, per backend and of SDPA."""
    machine = Machine.needed()
    costs = host.host_costs(machine.device, machine.clock, machine.synchronize)
    found = host.HostTable(cell=host.CELL, environment=environment(), costs=costs)
    path = (options.out or results_dir(found.environment.gpu)) / "host.json"
    found.save(path)
    print(f"{found.table()}\n\n{found.cell.key}. Written: {path}")
    return int(any(cost.error for cost in costs))


def measure_models(options: argparse.Namespace) -> int:
    """Measure training and prefill of transformers' models, by ours and by its other kinds of attention.

    Models that are not asked for keep the rows that the file has of them.
    """
    Machine.needed()
    chosen = [it for it in models.MODELS if not options.model or it.name in options.model]
    path = (options.out or results_dir(environment().gpu)) / "models.json"
    earlier = models.load(path) if path.exists() else ()

    def keep(run: models.ModelRun) -> None:
        models.save(models.merged(earlier, run), path)
        print(f"{run.rows[-1].model} is timed", flush=True)

    found = models.run(chosen, tell=keep)
    print(f"{models.table_text([found])}\n\nThousands of tokens a second. Written: {path}")
    return 0


# ---------------------------------------------------------------- stored results


def compare_files(options: argparse.Namespace) -> int:
    """Compare two result files cell by cell; 1 where a contender of ours got slower than the spread explains.

    With --html write one page of the differences, too.
    """
    changes = verdicts.compare(load(options.before), load(options.after))
    print(verdicts.change_table(it for it in changes if options.all or it.verdict != "same"))
    worse = sum(it.verdict in ("slower", "gone") for it in changes if is_ours(it.before.contender))
    print(f"\n{len(changes)} compared; of ours {worse} slower or gone. Not shown: what is the same (--all).")
    if options.html is not None:
        names = [path.name for path in (options.before, options.after)]
        names = names if len({*names}) == 2 else list(map(str, (options.before, options.after)))
        _write_page(options.html, differences.changes_page(changes, *names))
    return int(worse > 0)


def write_preferences(options: argparse.Namespace) -> int:
    """Write multiattn/plan/measured.json, which `auto` goes by, from every recorded suite."""
    of_decode = report.load_all(sorted(RESULTS.glob("*/decode.json")))
    count = verdicts.write_preferences([*_rows(options), *of_decode], MEASURED)
    print(f"Written: {MEASURED}, {count} cells")
    return 0


def write_report(options: argparse.Namespace) -> int:
    """Write one self-contained page of all results and print its verdict; or print tables with --text or --markdown."""
    if options.text or options.markdown:
        print(report.text_report(_rows(options), form="github" if options.markdown else "simple"))
        if options.html is None:
            return 0
    evidence = sources.of_files(options.files) if options.files else sources.recorded()
    _write_page(options.html or Path("out") / "report.html", page.report_page(evidence))
    if not (options.text or options.markdown):
        print(verdict_of.text(evidence))
    return 0


def _write_page(path: Path, text: str) -> None:
    page.write(path, text)
    print(f"Written: {path}")


def recorded_files() -> list[Path]:
    """Every suite on every GPU, as recorded in bench/results."""
    return sorted(path for path in RESULTS.glob("*/*.json") if path.stem in SUITES)


def _rows(options: argparse.Namespace) -> list[Row]:
    return report.load_all(options.files or recorded_files())


def update_docs(options: argparse.Namespace) -> int:
    """Make the tables of README.md and docs/ again; with --check only say which are stale."""
    stale = docs.update_all(check=options.check)
    state = "stale; run python -m bench docs" if options.check else "written"
    print("\n".join(f"{path}: {state}" for path in stale) or "every table is current")
    return int(options.check and bool(stale))


def run_demo(options: argparse.Namespace) -> int:
    """Run parity, compile for every target, time the floors where there is a GPU, and write one page of it all."""
    page.require_packages()
    out, jobs = options.out, ["--jobs", str(options.jobs)]
    problems = [layer(128, 4096, "causal")]
    in_turn = [] if torch.cuda.is_available() else ["--variants", "turns"]  # a CPU takes an hour for all
    wanted = requests(problems, directions=("forward",))
    wanted += requests(problems, directions=("backward",), arches=(BACKWARD_ARCH,))
    compiled: list[Compilation] = []

    def compile_kernels(_: list[str]) -> int:
        compiled.extend(compile_all(wanted, jobs=options.jobs))
        print(text_table(compiled))
        return verdict(compiled)

    steps: list[tuple[str, Callable[[list[str]], int], list[str]]] = [
        ("Parity", run_parity, [*jobs, *in_turn, "--out", str(out / "parity")]),
        (f"Compiled for every target, the backward for {BACKWARD_ARCH}", compile_kernels, []),
        ("Speed", main, ["run", "--suite", "floors", "--no-compile", *jobs, "--out", str(out / "bench")]),
    ]
    failed = []
    for title, command, arguments in steps:
        print(f"\n=== {title}\n", flush=True)
        if command(arguments):
            failed.append(title)
    evidence = sources.with_this_machine(sources.recorded(), out / "bench" / "floors.json", out / "parity", compiled)
    print()
    _write_page(out / "report.html", page.report_page(evidence))
    print(verdict_of.text(evidence))
    if failed:
        print(f"Failed: {', '.join(failed)}; see above")
    return int(bool(failed))


# ---------------------------------------------------------------- arguments


COMMANDS = {
    "run": run_matrix,
    "record": record.run,
    "ladder": ladder.climb,
    "tune": tune.sweep,
    "compare": compare_files,
    "prefer": write_preferences,
    "decode": decode.measure_decode,
    "host": measure_host,
    "models": measure_models,
    "scaling": scaling.predict,
    "report": write_report,
    "demo": run_demo,
    "docs": update_docs,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=EPILOG)
    metavar = "{" + ",".join(COMMANDS) + "}"
    commands = parser.add_subparsers(dest="command", metavar=metavar, parser_class=Command)

    def add(name: str) -> argparse.ArgumentParser:
        summary = (COMMANDS[name].__doc__ or "").splitlines()[0]
        return commands.add_parser(name, help=summary, description=summary)

    command = add("run")
    shared.add_cells(command, "standard")
    shared.add_backends(command)
    names = ("none", *(peer.name for peer in PEERS))
    told = f"{', '.join(names)}; may be given again; default all"
    command.add_argument("--peer", action="append", choices=names, metavar="NAME", help=told)
    command.add_argument("--variant", help="of our backends: all, or one's name; default the best for each cell")
    told = "graph: forward only; default: %(default)s"
    command.add_argument("--regime", choices=REGIMES, default="device", help=told)
    command.add_argument("--no-compile", action="store_true", help="without a GPU: leave out the compile table")
    shared.add_run(command, Budget(), "bench/results/<gpu>")

    record.add_arguments(add("record"))
    ladder.add_arguments(add("ladder"))
    tune.add_arguments(add("tune"))

    command = add("compare")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.add_argument("--all", action="store_true", help="show also what is the same")
    command.add_argument("--html", type=Path, metavar="OUT", help="also write one page of every difference")

    for name in ("prefer", "report"):
        command = add(name)
        command.add_argument("files", type=Path, nargs="*", help="result files; default all under bench/results")
    told = "print tables, and write a page only where --html asks for it"
    command.add_argument("--text", action="store_true", help=told)
    command.add_argument("--markdown", action="store_true", help="the same tables as Markdown")
    told = "the page; default out/report.html"
    command.add_argument("--html", type=Path, metavar="OUT", help=told)

    decode.add_arguments(add("decode"))
    scaling.add_arguments(add("scaling"))

    add("host").add_argument("--out", type=Path, help="folder of the results; default bench/results/<gpu>")

    command = add("models")
    command.add_argument("--out", type=Path, help="folder of the results; default bench/results/<gpu>")
    chosen = [it.name for it in models.MODELS]
    command.add_argument("--model", action="append", choices=chosen, help="may be given again; default all")

    command = add("demo")
    shared.add_jobs(command)
    command.add_argument("--out", type=Path, default=Path("out"), help="folder of everything (%(default)s)")

    add("docs").add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is stale")
    return parser
