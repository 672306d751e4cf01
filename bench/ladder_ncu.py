"""Bank conflicts of ldmatrix as Nsight Compute reads them: one run of ncu on a child that launches every rung once."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.environment import ROOT
from bench.ladder_rungs import Rung
from bench.matrix import Cell
from multiattn.targets.ncu import METRICS, TIMEOUT_S, ProfilerError, complaints, execute, find_ncu, missing, read_csv

METRIC = METRICS["ldmatrix conflicts"]
"""Extra wavefronts of LDSM, which is what ldmatrix is called in SASS."""


def command(ncu: str, request: Path) -> list[str]:
    """What is run. Only what the child launches between start and stop of the profiler is counted."""
    child = [sys.executable, "-m", "bench.ladder_child", str(request)]
    return [ncu, "--csv", "--profile-from-start", "off", "--metrics", METRIC, *child]


def request_of(rungs: Sequence[Rung], cell: Cell) -> str:
    """What the child reads: JSON of the cell and the contenders."""
    return json.dumps({"cell": cell.as_dict(), "contenders": [str(rung) for rung in rungs]})


def parse_csv(text: str) -> dict[str, int]:
    """METRIC by kernel, of what ``ncu --csv`` prints. ProfilerError, with ncu's words, where there is none."""
    counts = {kernel: int(found[METRIC].value) for kernel, found in read_csv(text).items() if METRIC in found}
    if not counts:
        raise ProfilerError(complaints(text) or f"ncu printed no value of {METRIC}")
    return counts


def profile(rungs: Sequence[Rung], cell: Cell, *, timeout_s: float = TIMEOUT_S) -> Mapping[str, int]:
    """METRIC by kernel, of one launch of every rung in `cell` on the current GPU. ProfilerError where ncu has none."""
    ncu = find_ncu()
    if ncu is None:
        raise missing()
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        request.write_text(request_of(rungs, cell))
        return parse_csv(execute(command(ncu, request), timeout_s=timeout_s, folder=ROOT))
