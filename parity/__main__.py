"""Run the parity cases on the backends that are asked for, and write the cross-backend report.

python -m parity train trains a small GPT with each backend instead, and python -m parity flash-attention runs
FlashAttention's own tests.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from multiattn import progress
from multiattn.bars import Bar
from multiattn.inspect.options import count, some_of
from multiattn.plan.backend import BACKENDS, DIRECTIONS, REFERENCE
from parity.cases import matching, suite
from parity.flash_attention import main as run_flash_attention
from parity.report import Report, describe_environment, feeding_table, summary_table, verdict, write
from parity.results import CaseReport
from parity.run import VARIANTS, contenders_of, run_cases
from parity.training import main as train

MOST_JOBS = 12
"""Default limit of worker processes: each has a CUDA context of about half a GiB, and compiles on one core."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, print the summary; 0 when everything asked for ran and passed, else 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["train"]:
        return train(arguments[1:])
    if arguments[:1] == ["flash-attention"]:
        return run_flash_attention(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch finds no GPU here")
    if importlib.util.find_spec("jinja2") is None:  # now, not when the report of all is written
        parser.error("the report needs jinja2: pip install 'multiattn[report]'")
    device = torch.device(options.device)
    try:
        cases = matching(suite(device), options.case or ["*"])
    except ValueError as error:
        parser.error(str(error))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    torch.set_num_threads(1)  # the cases are small; the workers are the parallelism
    backends = tuple(dict.fromkeys(options.backend or BACKENDS))
    directions = [it for it in DIRECTIONS if it in options.direction]
    contenders = contenders_of(backends, options.variants, directions)
    environment = describe_environment(device, contenders)
    order = {case.name: index for index, case in enumerate(cases)}
    reports: list[CaseReport] = []
    seconds = 0.1 if sys.stderr.isatty() else 10  # in a log, a line now and then
    bar = Bar(total=len(cases), unit="case", mininterval=seconds, maxinterval=seconds)
    with _one_bar(), bar:
        for case_report in run_cases(cases, contenders, device, jobs=options.jobs):
            reports.append(case_report)
            bar.update()
            bar.set_postfix_str(case_report.case.name)
            _tell_at_once(case_report)
    reports.sort(key=lambda case_report: order[case_report.case.name])
    report = Report(contenders=contenders, cases=tuple(reports), environment=environment, command=_command(options))
    paths = write(report, options.out)
    _print(report)
    print("Written:", ", ".join(str(path) for path in paths))
    return 1 if report.problems else 0


@contextlib.contextmanager
def _one_bar() -> Iterator[None]:
    """There is one bar, of all cases: work in them is not told, here and in processes that begin here."""
    is_asked = progress.VARIABLE in os.environ
    os.environ.setdefault(progress.VARIABLE, "0")
    try:
        yield
    finally:
        if not is_asked:
            del os.environ[progress.VARIABLE]


def _command(options: argparse.Namespace) -> str:
    """The command that runs the same cases again, anywhere: no folder and no number of processes."""
    backends = [part for name in options.backend or () for part in ("--backend", name)]
    cases = [part for glob in options.case or () for part in ("--case", glob)]
    directions = ",".join(options.direction)
    fixed = ["--device", options.device, "--variants", options.variants, "--direction", directions]
    return shlex.join(["python", "-m", "parity", *fixed, *backends, *cases])


def _tell_at_once(case_report: CaseReport) -> None:
    """Name what broke while the run goes on: should a kernel hang later, this much is known."""
    for result in case_report.results:
        if result.status in ("failed", "error"):
            Bar.write(f"{result.who} {result.status} on {result.case}", file=sys.stderr)


def _print(report: Report) -> None:
    for problem in report.problems:
        print(f"\n{problem}")
    slowest = sorted(report.results, key=lambda result: -result.seconds)[:3]
    print("\nSlowest:", ", ".join(f"{each.case} on {each.who} {each.seconds:.1f} s" for each in slowest))
    for table in (summary_table(report), feeding_table(report)):
        if table.rows:
            print("\n" + tabulate(table.rows, headers=table.header, disable_numparse=True))
    print(verdict(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parity", description=__doc__)
    parser.add_argument(
        "--backend",
        action="append",
        choices=(*BACKENDS, REFERENCE),
        help="may be given again; default all. One that is asked for and runs nothing fails the run",
    )
    parser.add_argument(
        "--variants",
        choices=VARIANTS,
        default="best",
        help="of each backend. best (default): the best for each case; turns: one for each case, in turns; "
        "all: those that together have every value of each flag; every: every one",
    )
    parser.add_argument(
        "--direction",
        type=some_of(DIRECTIONS),
        default=DIRECTIONS,
        metavar="A,B",
        help=f"of {','.join(DIRECTIONS)}; default both",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: %(default)s",
    )
    parser.add_argument("--case", action="append", metavar="GLOB", help="names to run; may be given again; default all")
    parser.add_argument("--out", type=Path, default=Path("out/parity"), help="folder of the report (%(default)s)")
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=count, default=jobs, help="worker processes (default here: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
