"""``python -m bench profile``: what Nsight Compute counts of a variant's forward kernel in some cells, kept as JSON.

docs/hopper.md shows it. One launch of each cell, on contiguous tensors; the clocks are left as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import tune
from bench.environment import environment, results_dir
from bench.errors import InputError
from bench.matrix import Cell
from bench.results import Environment
from multiattn import backend as registry
from multiattn.arch import Arch
from multiattn.backend import BACKENDS, Plan, make_plan
from multiattn.support import Unsupported
from multiattn.targets.ncu import METRICS, ProfilerError, command, execute, find_ncu, missing, read_launches

PREFIX = "ncu-"
"""Of the files' names, before that of the variant."""
COUNTED = (
    *(METRICS[name] for name in ("duration", "tensor pipe", "XU pipe", "FMA pipe", "L2", "DRAM")),
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
)
SECTION = "WarpStateStats"
"""Nsight Compute's own list of reasons for stalls, which differs by architecture."""
STALLS = "smsp__average_warps_issue_stalled_"
"""How their metrics' names begin. Beside them ncu tells all that it knows of the device."""

Execute = Callable[[Sequence[str]], str]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What beside the cells is asked for."""
    command.add_argument("--backend", default="cuda", metavar="NAME", help="(%(default)s)")
    command.add_argument("--variant", default="wgmma", metavar="NAME", help="(%(default)s)")
    command.add_argument("--out", type=Path, help="folder of the result; default bench/results/<gpu>")


def check(options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """InputError for what can be counted on no machine."""
    if options.backend not in BACKENDS:
        raise InputError(f"--backend: got {options.backend}; allowed {', '.join(BACKENDS)}")
    if wrong := sorted({cell.direction for cell in cells} - {"fwd"}):
        raise InputError(f"--direction: got {', '.join(wrong)}; allowed fwd")
    tune.check_variants([options.backend], cells, [options.variant])


def profiled(cells: Sequence[Cell], backend: str, variant: str, arch: Arch, *, run: Execute = execute) -> list[Any]:
    """Kernel, cell and metrics, as JSON has them, of one launch in each of `cells`; InputError where there is none."""
    tool = find_ncu()
    if tool is None:
        raise InputError(str(missing()))
    return [_launch(replace(cell, layout="bhsd"), backend, variant, arch, tool, run) for cell in cells]


def _launch(cell: Cell, backend: str, variant: str, arch: Arch, tool: str, run: Execute) -> dict[str, Any]:
    try:
        plan = _plan(cell, backend, variant, arch)
        asked = command(plan, ncu=tool, kernels=("forward",), metrics=COUNTED)
        launches = read_launches(run([asked[0], "--section", SECTION, *asked[1:]]))
    except (Unsupported, ProfilerError) as error:
        raise InputError(f"{cell}: {error}") from None
    if len(launches) != 1:
        raise InputError(f"{cell}: ncu counted {len(launches)} launches; allowed one, of the forward")
    (launch,) = launches
    wanted = {name: it for name, it in launch.metrics.items() if name in COUNTED or name.startswith(STALLS)}
    values = {name: round(it.value, 4) for name, it in wanted.items()}
    return {"kernel": launch.kernel, "cell": cell.as_dict(), "metrics": values}


def _plan(cell: Cell, backend: str, variant: str, arch: Arch) -> Plan:
    if cell.direction != "fwd":
        raise InputError(f"{cell}: got direction {cell.direction}; allowed fwd")
    return make_plan(registry.get(backend), cell.problem, arch, variant=variant, probe=False)


def write(launches: Sequence[Any], setup: Environment, path: Path) -> None:
    """A file for `bench.hopper_docs.cycles_block`, a line for each launch."""
    head = {"gpu": setup.gpu, "date": setup.date, "commit": setup.commit}
    lines = ",\n".join(f"  {json.dumps(it)}" for it in launches)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head)[:-1]}, "launches": [\n{lines}\n]}}\n')


def profile(options: argparse.Namespace, cells: Sequence[Cell], arch: Arch) -> int:
    """Count, write, and say where."""
    launches = profiled(cells, options.backend, options.variant, arch)
    setup = environment()
    path = (options.out or results_dir(setup.gpu)) / f"{PREFIX}{options.variant}.json"
    write(launches, setup, path)
    print(f"Written: {path}, {len(launches)} launches")
    return 0
