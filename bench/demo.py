"""``python -m bench demo``, what ``make demo`` runs: parity, all targets compiled, the floors timed, one page of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.report import combined_report, load_entries
from multiattn.__main__ import main as run_multiattn
from parity.__main__ import main as run_parity

BACKWARD_ARCH = "sm90"
"""One arch stands for all in a demo: a backward compiles several times as long as a forward."""

Command = Callable[[list[str]], int]


def demo(
    options: argparse.Namespace,
    bench: Command,
    recorded: Sequence[Path] = (),
    parity: Command = run_parity,
    compiler: Command = run_multiattn,
) -> int:
    """Run all of it and write <out>/report.html; 1 where a part failed. Without a GPU, times are reasons.

    The page also shows the result files `recorded`, as what they are: another run's.
    """
    out: Path = options.out
    jobs = ["--jobs", str(options.jobs)]
    compiled, gradients = out / "bench" / "compile.json", out / "bench" / "compile_backward.json"
    compile_one = ["compile", *jobs, "--head-dim", "128", "--mask", "causal"]
    steps: list[tuple[str, Command, list[str]]] = [
        ("Parity", parity, [*jobs, "--out", str(out / "parity")]),
        ("Compiled for every target", compiler, [*compile_one, "--direction", "forward", "--json", str(compiled)]),
        (
            f"Backward compiled for {BACKWARD_ARCH}",
            compiler,
            [*compile_one, "--direction", "backward", "--arch", BACKWARD_ARCH, "--json", str(gradients)],
        ),
        ("Speed", bench, ["run", "--suite", "floors", "--no-compile", *jobs, "--out", str(out / "bench")]),
    ]
    failed = []
    for title, command, arguments in steps:
        print(f"\n=== {title}\n", flush=True)
        if command(arguments):
            failed.append(title)
    page = out / "report.html"
    tables = [compiled, gradients]
    combined_report(out / "parity" / "parity.json", out / "bench" / "floors.json", page, tables, recorded)
    entries = [entry for path in tables for entry in load_entries(path)]
    print(f"\nWritten: {page}: {sum(entry.ok for entry in entries)} of {len(entries)} targets compiled")
    if failed:
        print(f"Failed: {', '.join(failed)}; see above")
    return int(bool(failed))
