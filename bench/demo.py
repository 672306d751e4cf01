"""``python -m bench demo``, what ``make demo`` runs: parity, all targets compiled, the floors timed, one page of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.report import load_all, section, speed_section, write_page
from multiattn.__main__ import main as run_multiattn
from multiattn.inspect.cli import load as load_compiled
from multiattn.inspect.tables import detailed
from parity.__main__ import main as run_parity

BACKWARD_ARCH = "sm90"
"""One arch stands for all in a demo: a backward compiles several times as long as a forward."""

Command = Callable[[list[str]], int]


def demo(options: argparse.Namespace, bench: Command, recorded: Sequence[Path]) -> int:
    """Run all of it and write <out>/report.html; 1 where a part failed. Without a GPU, times are reasons.

    The page also shows the result files `recorded`, marked as another run's.
    """
    out, jobs = options.out, ["--jobs", str(options.jobs)]
    forward, backward = out / "bench" / "compile.json", out / "bench" / "compile_backward.json"
    compiled = ["compile", *jobs, "--head-dim", "128", "--mask", "causal", "--direction"]
    backward_only = [*compiled, "backward", "--arch", BACKWARD_ARCH, "--json", str(backward)]
    steps: list[tuple[str, Command, list[str]]] = [
        ("Parity", run_parity, [*jobs, "--out", str(out / "parity")]),
        ("Compiled for every target", run_multiattn, [*compiled, "forward", "--json", str(forward)]),
        (f"Backward compiled for {BACKWARD_ARCH}", run_multiattn, backward_only),
        ("Speed", bench, ["run", "--suite", "floors", "--no-compile", *jobs, "--out", str(out / "bench")]),
    ]
    failed = []
    for title, command, arguments in steps:
        print(f"\n=== {title}\n", flush=True)
        if command(arguments):
            failed.append(title)
    parity = json.loads((out / "parity" / "parity.json").read_text())
    sections = [
        section("Parity", "\n".join((parity["verdict"], *parity["failures"])), "parity/parity.html"),
        speed_section("Speed", load_all([out / "bench" / "floors.json"])),
        *(
            section(title, detailed(load_compiled(path)))
            for (title, *_), path in zip(steps[1:3], (forward, backward), strict=True)
        ),
        *(speed_section(f"Recorded in {path.parent.name}/{path.name}", load_all([path])) for path in recorded),
    ]
    write_page(out / "report.html", sections)
    print(f"\nWritten: {out / 'report.html'}")
    if failed:
        print(f"Failed: {', '.join(failed)}; see above")
    return int(bool(failed))
