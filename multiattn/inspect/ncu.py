"""``python -m multiattn ncu``: the Nsight Compute command line for the kernels of a Plan, and what it measured.

The metrics' names are those of Nsight Compute for sm80 and sm90. That every one of them exists on later targets, too,
is a guess: ncu says of one that it does not know, and `--metric` asks for others.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from multiattn.inspect.ncu_child import check_work
from multiattn.inspect.options import add_problem, problem_of
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS, Arch, detect, occupancy
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Compiled, Plan, make_plan
from multiattn.plan.support import Unsupported

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "duration": "gpu__time_duration.sum",
        "registers": "launch__registers_per_thread",
        "static smem": "launch__shared_mem_per_block_static",
        "dynamic smem": "launch__shared_mem_per_block_dynamic",
        "occupancy": "sm__maximum_warps_per_active_cycle_pct",
        "achieved occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
        "tensor pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "XU pipe": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
        "FMA pipe": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
        "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "DRAM": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "local loads": "smsp__inst_executed_op_local_ld.sum",
        "local stores": "smsp__inst_executed_op_local_st.sum",
        "ldmatrix conflicts": "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
    }
)
"""What is measured, by what it is called here.

XU is the pipe of MUFU, that is of the exponentials; occupancy is the theoretical one; local memory is what kernels
without arrays spill to; conflicts are extra wavefronts of LDSM, which is what ldmatrix is called in SASS.
"""

TIMEOUT_S = 1200.0
TOOLKIT = Path("/usr/local/cuda/bin/ncu")
PRODUCTS = Path("/opt/nvidia/nsight-compute")
CHILD = "multiattn.inspect.ncu_child"

_KERNEL, _METRIC, _UNIT, _VALUE = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
_ID, _CC, _GRID, _BLOCK = "ID", "CC", "Grid Size", "Block Size"
_ERRORS_SHOWN = 3
_BASE = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "byte": 1.0}
_LONG = {"second": "s", "msecond": "ms", "usecond": "us", "nsecond": "ns"}


class ProfilerError(RuntimeError):
    """ncu is not there, or says why it did not count."""


# ---------------------------------------------------------------- the tool


def find_ncu() -> str | None:
    """ncu on the PATH, else the toolkit's, else the newest that is installed for itself; None where there is none."""
    found = shutil.which("ncu")
    if found is not None:
        return found
    installed = sorted(PRODUCTS.glob("*/ncu"), key=lambda path: _version(path.parent.name))
    return next((str(path) for path in (TOOLKIT, *reversed(installed)) if path.is_file()), None)


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def missing() -> ProfilerError:
    """What to say where `find_ncu` finds none."""
    return ProfilerError(f"there is no ncu: not on PATH, not {TOOLKIT}, not {PRODUCTS}/*/ncu")


def execute(arguments: Sequence[str], *, timeout_s: float = TIMEOUT_S, folder: Path | None = None) -> str:
    """What a command prints, errors last; ProfilerError where it takes too long."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=timeout_s, cwd=folder)
    except subprocess.TimeoutExpired:
        raise ProfilerError(f"ncu was not done within {timeout_s:g} s") from None
    return f"{done.stdout}\n{done.stderr}"


def command(
    plan: Plan, *, ncu: str = "ncu", kernels: Sequence[str] = (), metrics: Iterable[str] = tuple(METRICS.values())
) -> list[str]:
    """What measures one launch of `plan`, for `shlex.join` or `execute`.

    The child launches it once between start and stop of the profiler, after others that warm up. Clocks are left as
    they are, so that the duration is what a benchmark sees.

    Args:
        plan: for the arch of the GPU that it shall run on.
        ncu: the tool.
        kernels: beginnings of symbols; whatever else a launch may start is left out. All if empty.
        metrics: by Nsight Compute's names.
    """
    names = ["--kernel-name", f"regex:^({'|'.join(map(re.escape, kernels))}).*"] if kernels else []
    shown = ["--csv", "--page", "raw", "--print-units", "base"]
    when = ["--profile-from-start", "off", "--clock-control", "none"]
    child = [sys.executable, "-m", CHILD, request_of(plan)]
    return [ncu, *shown, *when, *names, "--metrics", ",".join(metrics), *child]


def request_of(plan: Plan) -> str:
    """JSON of what the child shall launch; of a config, only one that the backend would not choose itself."""
    problem = plan.problem
    request = {
        "backend": plan.backend,
        "direction": plan.direction,
        "variant": plan.variant,
        "arch": plan.arch.name,
        "shape": [problem.batch, problem.heads_q, problem.seq_q, problem.head_dim],
        "kv_heads": problem.heads_kv,
        "kv_len": problem.seq_kv,
        "dtype": problem.dtype,
        "causal": problem.causal,
        "scale": problem.scale,
    }
    if plan.config is not None and plan.config != _chosen(plan).config:
        request["config"] = asdict(plan.config)
    return json.dumps(request, separators=(",", ":"))


def _chosen(plan: Plan) -> Plan:
    """The Plan of the same variant with the config that its rules give."""
    backend = registry.get(plan.backend)
    return make_plan(backend, plan.problem, plan.arch, direction=plan.direction, variant=plan.variant, probe=False)


# ---------------------------------------------------------------- what it prints


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One metric of one kernel."""

    value: float
    unit: str

    @property
    def base(self) -> float:
        """In ns or bytes where it is a time or a size; the value itself for anything else."""
        return self.value * self._factor

    @property
    def slack(self) -> float:
        """How far, in the unit of `base`, two equal numbers may be apart: ncu prints two decimals."""
        return 0.011 * self._factor  # both may be rounded: 0.005 each, and what a float adds

    @property
    def _factor(self) -> float:
        unit = self.unit.partition("/")[0]
        return _BASE.get(_LONG.get(unit, unit), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch that ncu measured."""

    kernel: str
    """Its symbol, without parameters."""
    arch: str
    """Of the GPU that it ran on, as ``sm90``; empty where the table does not say."""
    grid: str
    """As ncu writes it, ``(512, 1, 1)``; so is `block`. Empty where the table does not say."""
    block: str
    metrics: Mapping[str, Measured]


Table = Mapping[str, Mapping[str, Measured]]
"""By kernel, without its parameters, and by metric."""


def read_csv(text: str) -> dict[str, dict[str, Measured]]:
    """What `read_launches` finds, by kernel: of one that is launched again, the latest counts."""
    return by_kernel(read_launches(text))


def by_kernel(launches: Iterable[Launch]) -> dict[str, dict[str, Measured]]:
    """The latest number of each metric of each kernel."""
    found: dict[str, dict[str, Measured]] = {}
    for launch in launches:
        found.setdefault(launch.kernel, {}).update(launch.metrics)
    return found


def read_file(path: Path) -> list[Launch]:
    """The launches of a CSV that ncu wrote; ProfilerError, which names the file, where it is not one."""
    try:
        return read_launches(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfilerError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise ProfilerError(f"{path}: got a file that is no text; allowed what ncu --csv prints") from None
    except ProfilerError as error:
        raise ProfilerError(f"{path}: {error}") from None


def read_launches(text: str) -> list[Launch]:
    """What ``ncu --csv`` printed, with ``--page raw`` (a column for each metric) or without (a line for each).

    ncu's own lines begin with ``==``, the child's may be anything; what ncu has no number for is left out.
    ProfilerError, with ncu's words, where there is no table or no number in it.
    """
    lines = text.splitlines()
    head = next((place for place, line in enumerate(lines) if line.startswith('"') and f'"{_KERNEL}"' in line), None)
    if head is None:
        raise ProfilerError(complaints(text) or "ncu printed no table")
    names, *rows = csv.reader(io.StringIO("\n".join(line for line in lines[head:] if line.startswith('"'))))
    rows = [row for row in rows if len(row) == len(names)]
    found: dict[tuple[str, ...], dict[str, Measured]] = {}
    for row, metric, unit, value in _long(names, rows) if _METRIC in names else _wide(names, rows):
        number = _number(value)
        if number is not None:
            said = dict(zip(names, row, strict=True))
            which = tuple(said.get(name, "") for name in (_ID, _KERNEL, _CC, _GRID, _BLOCK))
            found.setdefault(which, {})[metric] = Measured(value=number, unit=unit)
    if not found:
        raise ProfilerError(complaints(text) or "ncu printed no value")
    return [
        Launch(
            kernel=kernel.partition("(")[0].strip(),
            arch=f"sm{cc.replace('.', '')}" if cc else "",
            grid=grid,
            block=block,
            metrics=metrics,
        )
        for (_, kernel, cc, grid, block), metrics in found.items()
    ]


def complaints(text: str) -> str:
    """The first of ncu's own errors and warnings; empty where it has none."""
    said = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    return " ".join(said[:_ERRORS_SHOWN])


_Number = tuple[Sequence[str], str, str, str]
"""The row that it is in, metric, unit and value."""


def _long(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[_Number]:
    if not {_UNIT, _VALUE} <= set(names):
        raise ProfilerError(f"ncu printed a table without {_UNIT} or {_VALUE}; it has {', '.join(names)}")
    metric, unit, value = (names.index(name) for name in (_METRIC, _UNIT, _VALUE))
    return [(row, row[metric], row[unit], row[value]) for row in rows]


def _wide(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[_Number]:
    """The first row has the units; metrics are the columns whose name has two underscores, as all of ncu's have."""
    kernel = names.index(_KERNEL)
    if not rows or rows[0][kernel]:
        raise ProfilerError("ncu printed a table without a row of units; allowed what --csv --page raw prints")
    units, *launches = rows
    columns = [place for place, name in enumerate(names) if "__" in name]
    return [(row, names[place], units[place], row[place]) for row in launches for place in columns]


def _number(text: str) -> float | None:
    try:
        number = float(text.replace(",", ""))
    except ValueError:  # n/a, or nothing
        return None
    return number if math.isfinite(number) else None


# ---------------------------------------------------------------- beside what was predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """What a cubin says of one kernel before it has run; None for what it does not say."""

    kernel: str
    """Its symbol, or how that begins."""
    registers: int | None = None
    smem_bytes: int | None = None
    occupancy: float | None = None
    """Percent of the warps that an SM can hold."""


def predict(plan: Plan, kernels: Iterable[Compiled]) -> tuple[Predicted, ...]:
    """What to expect of a Plan's kernels."""
    return tuple(
        Predicted(
            kernel=it.kernel,
            registers=it.registers,
            smem_bytes=it.smem_bytes,
            occupancy=_occupancy(plan.arch, it),
        )
        for it in kernels
    )


def _occupancy(arch: Arch, kernel: Compiled) -> float | None:
    if kernel.threads is None or kernel.registers is None or kernel.smem_bytes is None:
        return None
    return 100 * occupancy(arch, kernel.threads, kernel.registers, kernel.smem_bytes).share


def report(rows: Table, facts: Sequence[Predicted] = (), metrics: Iterable[str] = ()) -> str:
    """A table per kernel: what the cubin said beside what ncu measured, then what only a run can tell.

    Of what ncu prints, which is also all that it knows of the device, only METRICS and `metrics` are shown.
    """
    shown = {*METRICS.values(), *metrics}
    kept = {kernel: {name: it for name, it in found.items() if name in shown} for kernel, found in rows.items()}
    return "\n\n".join(_of_kernel(kernel, measured, facts) for kernel, measured in kept.items())


def _of_kernel(kernel: str, measured: Mapping[str, Measured], facts: Sequence[Predicted]) -> str:
    mine = [fact for fact in facts if kernel.startswith(fact.kernel)]
    fact = max(mine, key=lambda fact: len(fact.kernel)) if mine else Predicted(kernel=kernel)
    called = {metric: name for name, metric in METRICS.items()}
    values = {called.get(metric, metric): it for metric, it in measured.items()}
    smem = [values.pop(name) for name in ("static smem", "dynamic smem") if name in values]
    if smem:
        values["smem"] = Measured(value=sum(it.base for it in smem), unit="byte/block")
    expected = {"registers": fact.registers, "smem": fact.smem_bytes, "occupancy": fact.occupancy}
    order = [*expected, *METRICS, *values]
    names = [name for name in dict.fromkeys(order) if name in values or expected.get(name) is not None]
    body = [(name, _shown(expected.get(name)), _with_unit(values.get(name))) for name in names]
    table = [("", "predicted", "measured"), *body]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines = [f"  {name:<{widths[0]}}  {left:>{widths[1]}}  {right:>{widths[2]}}" for name, left, right in table]
    return "\n".join([kernel, *lines])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")


def _with_unit(it: Measured | None) -> str:
    return "-" if it is None else f"{_shown(it.value)} {it.unit}".strip()


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--backend", choices=BACKENDS, help="whose Plan; --read does without, and predicts nothing")
    add_problem(parser, required=False)
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward", help="default: %(default)s")
    parser.add_argument("--variant", help="of the backend; default its best")
    parser.add_argument("--arch", choices=GPU_ARCHS, help="default: this machine's, else sm90")
    parser.add_argument("--metric", action="append", help="by Nsight Compute's name; may be given again; default: ours")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--read", type=Path, metavar="FILE", help="print what a CSV of ncu says, beside what was expected"
    )
    what.add_argument("--run", dest="here", action="store_true", help="run it here, and print that table")


def run(options: argparse.Namespace) -> int:
    """Print the command, or with --run or --read what it measured; 1 where that failed, 2 for what cannot be."""
    try:
        plan = _plan(options)
        if options.read is not None:
            rows = by_kernel(read_file(options.read))
            print(report(rows, _expected(plan)[1] if plan is not None else (), options.metric or ()))
            return 0
        if plan is None:
            raise ValueError("--backend and --shape: got none; allowed without them: --read alone")
        tool = find_ncu()
        if options.here:
            _check_here(plan, tool)
        names, facts = _expected(plan)
        line = command(plan, ncu=tool or "ncu", kernels=names, metrics=options.metric or METRICS.values())
        print(report(read_csv(execute(line)), facts, options.metric or ()) if options.here else shlex.join(line))
        return 0
    except (ProfilerError, OSError) as error:
        print(f"python -m multiattn ncu: {error}", file=sys.stderr)
        return 1
    except (ValueError, Unsupported) as error:
        print(f"python -m multiattn ncu: {error}", file=sys.stderr)
        return 2


def _check_here(plan: Plan, tool: str | None) -> None:
    """ProfilerError or ValueError where ncu cannot run `plan` on this machine."""
    if tool is None:
        raise missing()
    if not torch.cuda.is_available():
        raise ProfilerError("there is no GPU here that torch can use")
    if plan.arch != (here := detect(torch.device("cuda"))):
        raise ValueError(f"--arch: got {plan.arch.name}; allowed with --run: {here.name}, which is here")


def _plan(options: argparse.Namespace) -> Plan | None:
    """The Plan that was asked for; None where none was."""
    if options.backend is None or options.shape is None:
        if options.backend is not None or options.shape is not None:
            raise ValueError("--backend and --shape: got one of them; allowed both, as they make a Plan")
        return None
    problem = problem_of(options)
    check_work(problem)
    here = detect(torch.device("cuda")).name if torch.cuda.is_available() else "sm90"
    arch = ARCHS[options.arch or (here if here in ARCHS else "sm90")]
    backend = registry.get(options.backend)
    return make_plan(backend, problem, arch, direction=options.direction, variant=options.variant, probe=False)


def _expected(plan: Plan) -> tuple[tuple[str, ...], tuple[Predicted, ...]]:
    """Symbols and predictions of a Plan's kernels; none where its compiler is not here."""
    backend = registry.get(plan.backend)
    if backend.probe_compiler():
        return (), ()
    kernels = backend.op(plan.direction).compile(plan)
    return tuple(it.kernel for it in kernels), predict(plan, kernels)
