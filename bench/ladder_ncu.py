"""Bank conflicts of ldmatrix as Nsight Compute reads them: one run of ncu on a child that launches every rung once."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.environment import ROOT
from bench.ladder_rungs import Rung
from bench.matrix import Cell

METRIC = "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum"
"""Extra wavefronts of LDSM, which is what ldmatrix is called in SASS."""

TIMEOUT_S = 1200.0
_TOOLKIT = Path("/usr/local/cuda/bin/ncu")
_PRODUCTS = Path("/opt/nvidia/nsight-compute")
_NAME, _METRIC, _VALUE = "Kernel Name", "Metric Name", "Metric Value"
_ERRORS_SHOWN = 3


class ProfilerError(RuntimeError):
    """ncu is not there, or says why it did not count."""


def find_ncu() -> str | None:
    """ncu on the PATH, else the toolkit's, else the newest that is installed for itself; None where there is none."""
    found = shutil.which("ncu")
    if found is not None:
        return found
    installed = sorted(_PRODUCTS.glob("*/ncu"), key=lambda path: _version(path.parent.name))
    return next((str(path) for path in (_TOOLKIT, *reversed(installed)) if path.is_file()), None)


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def command(ncu: str, request: Path) -> list[str]:
    """What is run. Only what the child launches between start and stop of the profiler is counted."""
    child = [sys.executable, "-m", "bench.ladder_child", str(request)]
    return [ncu, "--csv", "--profile-from-start", "off", "--metrics", METRIC, *child]


def request_of(rungs: Sequence[Rung], cell: Cell) -> str:
    """What the child reads: JSON of the cell and the contenders."""
    return json.dumps({"cell": cell.as_dict(), "contenders": [str(rung) for rung in rungs]})


def parse_csv(text: str) -> dict[str, int]:
    """METRIC by kernel, of what ``ncu --csv`` prints: its own lines begin with ``==``, the child's may be anything.

    ProfilerError, with ncu's words, where there is no table or no value in it.
    """
    lines = text.splitlines()
    head = next((place for place, line in enumerate(lines) if f'"{_NAME}"' in line), None)
    said = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))]
    if head is None:
        raise ProfilerError(" ".join(said[:_ERRORS_SHOWN]) or "ncu printed no table")
    table = csv.DictReader(io.StringIO("\n".join(line for line in lines[head:] if line.startswith('"'))))
    counts: dict[str, int] = {}
    for row in table:
        if row[_METRIC] == METRIC and (value := row[_VALUE].replace(",", "")).isdecimal():
            counts[row[_NAME].partition("(")[0].strip()] = int(value)  # of a kernel that is launched again, the latest
    if not counts:
        raise ProfilerError(" ".join(said[:_ERRORS_SHOWN]) or f"ncu printed no value of {METRIC}")
    return counts


def profile(rungs: Sequence[Rung], cell: Cell, *, timeout_s: float = TIMEOUT_S) -> Mapping[str, int]:
    """METRIC by kernel, of one launch of every rung in `cell` on the current GPU. ProfilerError where ncu has none."""
    ncu = find_ncu()
    if ncu is None:
        raise ProfilerError(f"there is no ncu: not on PATH, not {_TOOLKIT}, not {_PRODUCTS}/*/ncu")
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        request.write_text(request_of(rungs, cell))
        try:
            done = subprocess.run(
                command(ncu, request), capture_output=True, text=True, check=False, timeout=timeout_s, cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            raise ProfilerError(f"ncu was not done within {timeout_s:g} s") from None
    return parse_csv(f"{done.stdout}\n{done.stderr}")
