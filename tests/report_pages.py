"""The pages that tests look at: every recorded result, with what a demo adds on a machine without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bench_fakes as fakes
import targets_fakes

from bench import verdicts
from bench.matrix import SUITES
from bench.page import differences, page, sources
from bench.page.sources import Evidence
from bench.results import NO_GPU, RESULTS, dumps, load

HOSTILE = "Boom: </script><b>what</b> <!-- & \u2028"
COMPARED = "bench/results/oldgpu/peers/standard.json", "bench/results/newergpu/standard.json"
EVEN = {"case": "even", "backend": "cuda"}
PARITY = {
    "verdict": "FAILED: 1 problems in 3 runs of 2 cases, 1 comparisons between backends.",
    "failures": [f"cuda failed on odd: {HOSTILE}"],
    "cases": [{"name": "odd", "problem": "B=1"}, {"name": "even", "problem": "B=2"}],
    "results": [
        {"case": "odd", "backend": "cuda", "variant": "w", "status": "failed", "out": ["inf", 1e-3, "inf", "max"]},
        {**EVEN, "variant": "w", "out": [1e-4, 1e-3, 0.1, "max"], "lse": [0, 1e-3, 0, "rms"]},
        {**EVEN, "direction": "backward", "dq": [2e-4, 1e-3, 0.2, "rms"], "fed_by": "cuda"},
        {**EVEN, "direction": "backward", "dq": [3e-4, 1e-3, 0.3, "rms"], "fed_by": "triton"},
    ],
}


def evidence(folder: Path) -> Evidence:
    """All that is recorded, and a demo of this machine: its parity, a compile table, and floors that nobody timed."""
    cell = SUITES["floors"][0]
    refused = [
        replace(fakes.row(name, 1.0, cell=cell), measured=None, run="", reasons=(NO_GPU,)) for name in ("cuda", "fa2")
    ]
    refused = [replace(it, environment=replace(fakes.SETUP, gpu="none", arch="none")) for it in refused]
    broken = replace(refused[0], contender="flex", reasons=(), error=HOSTILE)
    floors = folder / "floors.json"
    floors.write_text(dumps("floors", [*refused, broken]))
    (folder / "parity.json").write_text(json.dumps(PARITY))
    compiled = [targets_fakes.entry(), targets_fakes.refused()]
    return sources.with_this_machine(sources.recorded(), floors, folder, compiled)


def report(folder: Path) -> Path:
    """The page of `evidence`."""
    path = folder / "report.html"
    page.write(path, page.report_page(evidence(folder)))
    return path


def compared(folder: Path) -> Path:
    """The page of two recorded files, of which one cell of ours got slower and one is gone."""
    before = [row for row in load(RESULTS / "h100" / "standard.json") if row.cell.head_dim == 128]
    slow = before[0].measured
    assert slow is not None
    after = [replace(before[0], measured=replace(slow, time_ms=2 * slow.time_ms, tflops=slow.tflops / 2)), *before[2:]]
    path = folder / "compare.html"
    page.write(path, differences.changes_page(verdicts.compare(before, after), *COMPARED))
    return path
