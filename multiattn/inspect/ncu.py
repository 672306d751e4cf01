"""``python -m multiattn ncu``: profile one launch of a Plan with Nsight Compute, to see what its kernels wait for.

It prints ncu's command line, runs it, or shows the CSV of a run elsewhere. The metrics' names are those of Nsight
Compute for sm80 and sm90; ncu says which of them a GPU does not have.
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from multiattn.inspect.options import (
    add_problem,
    arch_name,
    arguments_of,
    check_features,
    check_work,
    default_arch,
    problem_of,
    table,
)
from multiattn.layout import Layout
from multiattn.operands import Operands
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS, detect
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Plan, make_plan

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "duration": "gpu__time_duration.sum",
        "achieved occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
        "tensor pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "exponentials (XU pipe)": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
        "FMA pipe": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
        "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "DRAM": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "local loads (spills)": "smsp__inst_executed_op_local_ld.sum",
        "local stores (spills)": "smsp__inst_executed_op_local_st.sum",
        "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
        "ldmatrix bank conflicts": "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
    }
)
"""The metrics, by what they are called here."""

STALLS = "WarpStateStats"
"""The section of Nsight Compute that says what warps wait for."""
STALLS_SHOWN = 5

WARM_UPS = 3
"""Launches before the one that counts: the first may compile."""
TOOLKIT = Path("/usr/local/cuda/bin/ncu")

_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_KERNEL = "Kernel Name"
_ERRORS_SHOWN = 3


class ProfilerError(RuntimeError):
    """ncu is not there, or says why it did not count."""


Measured = Mapping[str, tuple[float, str]]
"""Metrics of one kernel by Nsight Compute's names: value and base unit."""


# ---------------------------------------------------------------- the command line


def command(plan: Plan, *, ncu: str = "ncu", metrics: Sequence[str] = ()) -> list[str]:
    """The command line that measures one launch of `plan`.

    Its child is this command with ``--launch``. It launches once between start and stop of the profiler, after others
    that warm up. Clocks are left as they are, so that the duration is what a benchmark sees.

    Args:
        plan: for the arch of the GPU that it will run on, with the config of its rules.
        ncu: the tool.
        metrics: more of them, by Nsight Compute's names.
    """
    child = ["-m", "multiattn", "ncu", "--launch", "--backend", plan.backend, "--variant", plan.variant]
    child += ["--direction", plan.direction, "--arch", plan.arch.name, *arguments_of(plan.problem)]
    shown = ["--csv", "--page", "raw", "--print-units", "base", "--section", STALLS]
    when = ["--profile-from-start", "off", "--clock-control", "none"]
    return [ncu, *shown, *when, "--metrics", ",".join([*METRICS.values(), *metrics]), sys.executable, *child]


def launch_once(plan: Plan, device: torch.device) -> None:
    """Launch `plan` a few times on random tensors, the last time between start and stop of the profiler."""
    launch = launcher(plan, device)
    for _ in range(WARM_UPS):
        launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def launcher(plan: Plan, device: torch.device) -> Callable[[], None]:
    """A launch of `plan` on random tensors of its problem."""
    problem, backend = plan.problem, registry.get(plan.backend)

    def random(layout: Layout) -> torch.Tensor:
        tensor = torch.empty_strided(*layout[:2], dtype=layout.dtype, device=device)
        return tensor.normal_() if layout.dtype.is_floating_point else tensor.zero_()

    operands = Operands.like(problem.layouts, random)._replace(dlse=None)
    launch = backend.op(plan.direction).prepare(plan)
    if plan.direction == "backward":  # it needs the results of a forward
        backend.forward.prepare(make_plan(backend, problem, plan.arch, probe=False))(operands)
    return lambda: launch(operands)


# ---------------------------------------------------------------- what it prints


def read_csv(text: str) -> dict[str, Measured]:
    """Read the output of ``ncu --csv --page raw``: the metrics of each kernel, by its name without parameters.

    Lines of ncu itself start with ``==``, and the child may print anything. Of a kernel that was launched again, the
    latest numbers count; what ncu has no number for is left out. ProfilerError, with ncu's words, for any other text.
    """
    lines = text.splitlines()
    heads = (place for place, line in enumerate(lines) if line.startswith('"') and f'"{_KERNEL}"' in line)
    head = next(heads, len(lines))
    units, *launches = [*csv.DictReader(line for line in lines[head:] if line.startswith('"'))] or [{_KERNEL: "none"}]
    if units[_KERNEL]:  # the first row has the units, and no kernel
        raise ProfilerError(_complaints(text) or "got no table with a row of units; allowed ncu --csv --page raw")
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for row in launches:
        numbers = {name: (float(it), units[name]) for name, text in row.items() if (it := _number(name, text))}
        found.setdefault(row[_KERNEL].partition("(")[0].strip(), {}).update(numbers)
    if not any(found.values()):
        raise ProfilerError(_complaints(text) or "ncu printed no value")
    return dict(found)


def _number(name: str, text: str | None) -> str:
    """The number in a column of metrics, all of which have two underscores in their names; empty for anything else."""
    number = (text or "").replace(",", "")
    return number if "__" in name and re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", number) else ""


def _complaints(text: str) -> str:
    """The first of ncu's own errors and warnings; empty where it has none."""
    said = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    return " ".join(said[:_ERRORS_SHOWN])


def report(measured: Mapping[str, Measured], metrics: Iterable[str] = ()) -> str:
    """A table for each kernel: METRICS, `metrics`, and what its warps wait for most."""
    names = {**METRICS, **{name: name for name in metrics}}
    return "\n\n".join(f"{kernel}\n{table(_rows(found, names), ())}" for kernel, found in measured.items())


def _rows(found: Measured, names: Mapping[str, str]) -> list[tuple[str, str]]:
    numbers = [(name, *found[metric]) for name, metric in names.items() if metric in found]
    named = [(value, what[1]) for name, (value, _) in found.items() if (what := _STALL.fullmatch(name))]
    stalls = sorted(((value, what) for value, what in named if what != "selected"), reverse=True)  # that one is at work
    waits = [(f"waits: {what}", f"{value:.2f} warps") for value, what in stalls[:STALLS_SHOWN]]
    return [*((name, f"{value:,g} {unit}") for name, value, unit in numbers), *waits]


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--backend", choices=BACKENDS, help="whose plan; not needed with --read")
    add_problem(parser, required=False)
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward", help="default: %(default)s")
    parser.add_argument("--variant", help="of the backend; default: its best")
    told = f"of {', '.join(GPU_ARCHS)}, or a GPU's name; default: %(default)s"
    parser.add_argument("--arch", type=arch_name, default=default_arch(), help=told)
    parser.add_argument("--metric", action="append", default=[], help="one more, by Nsight Compute's name")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--read", type=Path, metavar="FILE", help="print what a CSV of ncu says")
    what.add_argument("--run", dest="here", action="store_true", help="run it here, and print what it says")
    what.add_argument("--launch", action="store_true", help="only launch the plan, for ncu to watch")


def run(options: argparse.Namespace) -> int:
    """Print the command line, or with --run or --read what it measured; 1 where that failed."""
    try:
        print(_answer(options))
        return 0
    except (ProfilerError, OSError, UnicodeDecodeError, csv.Error) as error:
        print(f"python -m multiattn ncu: {error}", file=sys.stderr)
        return 1


def _answer(options: argparse.Namespace) -> str:
    if options.read is not None:
        try:
            return report(read_csv(options.read.read_text(encoding="utf-8")), options.metric)
        except ProfilerError as error:
            raise ProfilerError(f"{options.read}: {error}") from None
    if options.backend is None or options.shape is None:
        raise ValueError("--backend and --shape: got no plan; allowed without them: --read")
    check_features(options, why="profile a script that calls with features by ncu itself")
    problem, backend, target = problem_of(options), registry.get(options.backend), ARCHS[options.arch]
    check_work(problem)
    plan = make_plan(backend, problem, target, direction=options.direction, variant=options.variant, probe=False)
    if (options.here or options.launch) and not torch.cuda.is_available():
        raise ProfilerError("there is no GPU here that torch can use")
    if (options.here or options.launch) and target != (here := detect(torch.device("cuda"))):
        raise ValueError(f"--arch: got {target.name}; allowed here: {here.name}")  # kernels of both may have one name
    if options.launch:
        launch_once(plan, torch.device("cuda", torch.cuda.current_device()))
        return "launched"
    tool = shutil.which("ncu") or (str(TOOLKIT) if TOOLKIT.is_file() else None)
    if options.here and tool is None:
        raise ProfilerError(f"there is no ncu: not on PATH, not {TOOLKIT}")
    line = command(plan, ncu=tool or "ncu", metrics=options.metric)
    if not options.here:
        return shlex.join(line)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return report(read_csv(f"{done.stdout}\n{done.stderr}"), options.metric)
