"""What an attention problem costs at least on a GPU, and ``python -m multiattn roofline``, which prints it.

Three units work on a score: tensor cores multiply, special-function units exponentiate, memory brings the operands.
None is done before its own work is, so the slowest bounds the time from below (Williams, Waterman and Patterson,
"Roofline", CACM 2009, with one more roof; Shah et al., "FlashAttention-3", 2024, section 3.1 for the exponentials).

Every rate is at the clock of the stated tensor peak, `Gpu.clock_ghz`: a chip that runs faster beats the bound by as
much. So may a kernel that takes part of its exponentials from the FMA units (Zadouri et al., "FlashAttention-4"), and
launches back to back whose operands stay in L2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from multiattn.plan.arch import ARCHS, GPUS, Gpu, find_gpu, gpu_by_name
from multiattn.problem import Problem

Direction = Literal["forward", "backward"]
Unit = Literal["tensor", "exp", "memory"]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
UNITS: tuple[Unit, ...] = get_args(Unit)
DTYPES = ("bf16", "fp16")
"""What the tensor rates are stated for."""

GEMMS: Mapping[Direction, int] = MappingProxyType({"forward": 2, "backward": 5})
"""Products of ``2*D`` FLOP per visible pair: q k^T and p v; backward q k^T again, dout v^T, then dv, dk and dq."""

FP32_SLOTS: Mapping[Direction, float] = MappingProxyType({"forward": 3.5, "backward": 4.0})
"""FP32 instructions per score: an estimate of the least, from what a lean softmax needs.

Forward: multiply-add of scale and maximum, maximum, sum of the row, half of a packed conversion of p. Backward:
multiply-add of scale and lse, ``dp - delta``, times p, half a conversion each of p and ds. They are spread over several
pipes, whose split differs between archs and compilers: so their time is told, and is no part of the bound.
"""

SMEM_RATE = 128
"""Bytes per clock that an SM reads of its shared memory: 32 banks of 4 bytes."""


# ---------------------------------------------------------------- what it takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a problem takes in one direction, whoever computes it. Masked pairs take nothing."""

    flops: int
    """Of the tensor cores, as multiattn counts them everywhere: ``2*D`` per visible pair and product."""
    exponentials: int
    """One per visible pair: in the forward, and again where the backward recomputes p."""
    bytes: int
    """Moved from or to device memory, each element once: as if caches held everything in between."""
    fp32_slots: float
    """FP32 instructions of single threads: see `FP32_SLOTS`."""


def work(problem: Problem, direction: Direction = "forward") -> Work:
    """The work of `problem`; ValueError for a direction that there is not."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: got {direction!r}; allowed {', '.join(DIRECTIONS)}")
    scores = problem.batch * problem.heads_q * problem.visible_pairs
    return Work(
        flops=2 * GEMMS[direction] * problem.head_dim * scores,
        exponentials=scores,
        bytes=_bytes(problem, direction),
        fp32_slots=FP32_SLOTS[direction] * scores,
    )


def _bytes(problem: Problem, direction: Direction) -> int:
    """Forward: q, k and v read, out and lse written. Backward: those five and dout read, dq, dk and dv written.

    A query that sees no key is written for, but not read, and k and v are not read where nobody sees them.
    """
    seeing = min(problem.seq_q, problem.seq_kv) if problem.causal else problem.seq_q
    if problem.seq_kv == 0:
        seeing = 0
    element, lse = problem.torch_dtype.itemsize * problem.head_dim, 4
    rows_q, rows_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    read_kv = 2 * rows_kv * problem.seq_kv * element if seeing else 0
    if direction == "forward":
        return rows_q * (seeing * element + problem.seq_q * (element + lse)) + read_kv
    written_kv = 2 * rows_kv * problem.seq_kv * element
    return rows_q * (seeing * (3 * element + lse) + problem.seq_q * element) + read_kv + written_kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A block of queries against one block of keys, of 16-bit elements: what every kernel's inner loop does."""

    tile_m: int
    tile_n: int

    def __post_init__(self) -> None:
        if self.tile_m < 1 or self.tile_n < 1:
            raise ValueError(f"tile: got {self}; allowed queries x keys, both positive")

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}"

    @classmethod
    def parse(cls, text: str) -> Tile:
        """``128x64``: queries times keys. ValueError for anything else."""
        rows, _, columns = text.partition("x")
        if not (rows.isdecimal() and columns.isdecimal()):
            raise ValueError(f"tile: got {text!r}; allowed queries x keys, as in 128x64")
        return cls(tile_m=int(rows), tile_n=int(columns))

    def memory_intensity(self, direction: Direction) -> float:
        """FLOP per byte loaded for one pair of blocks, whatever D.

        Forward: k and v pass by a block of queries, so it is ``tile_m``. Backward: q and dout pass by a block of keys,
        so it is ``5/2 * tile_n``; what dq's sums move is not in it.
        """
        resident = self.tile_m if direction == "forward" else self.tile_n
        return 2 * GEMMS[direction] * resident / (2 * 2)

    @property
    def smem_intensity(self) -> float:
        """FLOP of the forward per byte read of shared memory at best: q, k and v once for the pair, p in registers."""
        return 4 * self.tile_m * self.tile_n / (2 * (self.tile_m + 2 * self.tile_n))


# ---------------------------------------------------------------- what it takes at least


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The least time of a problem on a GPU, in ms, unit by unit as if each worked alone and at its peak."""

    gpu: str
    direction: Direction
    flops: int
    exponentials: int
    bytes: int
    tensor_ms: float
    exp_ms: float
    memory_ms: float
    fp32_ms: float
    """Told, and no part of the bound: see `FP32_SLOTS`."""
    peak_tflops: float

    @property
    def time_ms(self) -> float:
        """The bound, which the busiest unit sets. What the module says of clocks, caches and FMA units goes with it."""
        return max(self.tensor_ms, self.exp_ms, self.memory_ms)

    @property
    def busiest(self) -> tuple[Unit, ...]:
        """The units that are busy all the time: mostly one, but at D=64 sm90 has two."""
        times = zip(UNITS, (self.tensor_ms, self.exp_ms, self.memory_ms), strict=True)
        return tuple(unit for unit, time in times if math.isclose(time, self.time_ms))

    @property
    def bound_by(self) -> Unit:
        """The first of `busiest`."""
        return self.busiest[0]

    @property
    def tflops(self) -> float:
        """The ceiling: FLOP over that time, in 10^12 per second; 0 where nothing is computed."""
        return self.flops / self.time_ms / 1e9 if self.flops else 0.0

    @property
    def peak_share(self) -> float:
        """The ceiling over the tensor peak: 1 where tensor cores bound the time."""
        return self.tflops / self.peak_tflops

    @property
    def intensity(self) -> float:
        """FLOP per byte of the whole problem; 0 where nothing is computed."""
        return self.flops / self.bytes if self.flops else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Fields and what follows from them, by name, for JSON."""
        derived = ("time_ms", "bound_by", "busiest", "tflops", "peak_share", "intensity")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def bounds(problem: Problem, gpu: Gpu, direction: Direction = "forward") -> Bounds:
    """The roofs over `problem` on `gpu`.

    The peak is that of SMs, clock and FLOP per clock, within 1 % of the stated one. ValueError for a direction that
    there is not, and for a dtype that the tensor rates are not stated for.
    """
    if problem.dtype not in DTYPES:
        raise ValueError(f"dtype: got {problem.dtype}; allowed {', '.join(DTYPES)}")
    needed, arch = work(problem, direction), ARCHS[gpu.arch]
    per_ms = gpu.sms * gpu.clock_ghz * 1e6  # clocks of all SMs in a millisecond
    return Bounds(
        gpu=gpu.name,
        direction=direction,
        flops=needed.flops,
        exponentials=needed.exponentials,
        bytes=needed.bytes,
        tensor_ms=needed.flops / (gpu.tensor_rate * per_ms),
        exp_ms=needed.exponentials / (arch.ex2_rate * per_ms),
        memory_ms=needed.bytes / (gpu.gbps * 1e6),
        fp32_ms=needed.fp32_slots / (arch.fp32_rate / 2 * per_ms),
        peak_tflops=gpu.computed_tflops,
    )


def score_cycles(gpu: Gpu, head_dim: int, direction: Direction = "forward") -> tuple[float, float]:
    """Clocks that one score keeps an SM's tensor cores and its special-function units busy."""
    return 2 * GEMMS[direction] * head_dim / gpu.tensor_rate, 1 / ARCHS[gpu.arch].ex2_rate


def balance(gpu: Gpu) -> tuple[float, float]:
    """FLOP per byte at which tensor cores wait neither for device memory nor for shared memory."""
    return gpu.computed_tflops * 1e3 / gpu.gbps, gpu.tensor_rate / SMEM_RATE


# ---------------------------------------------------------------- what was measured

SCHEMAS = (2, 3)
"""Of the results files that `python -m bench` writes; 2 knew only forward."""

_DIRECTION_OF: Mapping[str, Direction] = MappingProxyType({"fwd": "forward", "bwd": "backward"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What one of our kernels reached on one GPU: self-attention, as many heads of k and v as of q."""

    gpu: str
    """Of `arch.GPUS`."""
    direction: Direction
    batch: int
    heads: int
    seq: int
    head_dim: int
    dtype: str
    causal: bool
    contender: str
    tflops: float

    def is_of(self, problem: Problem, gpu: Gpu, direction: Direction) -> bool:
        """Whether it is this problem that was measured, on such a GPU; strides do not matter."""
        ours = (self.batch, self.heads, self.heads, self.seq, self.seq, self.head_dim, self.dtype, self.causal)
        theirs = (problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_kv, problem.head_dim)
        same = ours == (*theirs, problem.dtype, problem.causal)
        return same and self.gpu == gpu.name and self.direction == direction


def read_results(paths: Iterable[Path]) -> tuple[Measurement, ...]:
    """Every timing of ours back to back in results files of `python -m bench`, on GPUs with a row, of one direction.

    Ours are the rows with a plan; peers have none. ValueError, naming the file, for one that is no such file.
    """
    return tuple(found for path in paths for found in _read(path))


def _read(path: Path) -> list[Measurement]:
    try:
        data = json.loads(path.read_text())
        if data["schema"] not in SCHEMAS:
            allowed = ", ".join(map(str, SCHEMAS))
            raise ValueError(f"its schema is {data['schema']}; allowed {allowed}")
        gpus = [find_gpu(environment["gpu"]) for environment in data["environments"]]
        ours = [(row, gpus[row["environment"]]) for row in data["rows"] if _is_ours(row)]
        return [_measurement(row, gpu) for row, gpu in ours if gpu is not None]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not a results file of python -m bench: {what}") from None


def _is_ours(row: Mapping[str, Any]) -> bool:
    timed = "plan" in row and "measured" in row and row["regime"] == "device"
    return timed and row["cell"].get("direction", "fwd") in _DIRECTION_OF


def _measurement(row: Mapping[str, Any], gpu: Gpu) -> Measurement:
    cell = row["cell"]
    return Measurement(
        gpu=gpu.name,
        direction=_DIRECTION_OF[cell.get("direction", "fwd")],
        **{name: cell[name] for name in ("batch", "heads", "seq", "head_dim", "dtype", "causal")},
        contender=row["contender"],
        tflops=row["measured"]["tflops"],
    )


def best_measured(
    measurements: Iterable[Measurement], problem: Problem, gpu: Gpu, direction: Direction
) -> Measurement | None:
    """The fastest of ours in this very problem on such a GPU, or None where nobody timed it."""
    fitting = (found for found in measurements if found.is_of(problem, gpu, direction))
    return max(fitting, key=lambda found: found.tflops, default=None)


# ---------------------------------------------------------------- the command

TOKENS, HIDDEN = 16384, 2048
"""Batch times length, and heads times head_dim, where nobody says otherwise: those of `python -m bench`."""

_HEADERS = ("B", "H", "D", "N", "mask", "FLOP/B", "tensor ms", "exp ms", "memory ms", "fp32 ms*", "bound by")
_RATES = ("TFLOPS", "of peak", "ours", "of ceiling")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A problem, its roofs, and what of ours came nearest."""

    problem: Problem
    bounds: Bounds
    measured: Measurement | None = None

    @property
    def ceiling_share(self) -> float | None:
        """What was measured over the ceiling; None where nobody timed it."""
        return None if self.measured is None else self.measured.tflops / self.bounds.tflops

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sizes, bounds, and the measurement or null."""
        names = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "dtype", "causal")
        best = {"contender": self.measured.contender, "tflops": self.measured.tflops} if self.measured else None
        sizes = {name: getattr(self.problem, name) for name in names}
        return {**sizes, **self.bounds.as_dict(), "measured": best, "ceiling_share": self.ceiling_share}


def compare(
    problems: Iterable[Problem], gpu: Gpu, direction: Direction, measurements: Sequence[Measurement] = ()
) -> list[Row]:
    """A row of each problem, with the best of `measurements` that is of it."""
    return [
        Row(
            problem=problem,
            bounds=bounds(problem, gpu, direction),
            measured=best_measured(measurements, problem, gpu, direction),
        )
        for problem in problems
    ]


def as_table(rows: Sequence[Row], form: str = "simple") -> str:
    """The rows as tabulate writes them (``simple``, ``github``); ModuleNotFoundError, with a hint, without tabulate."""
    try:
        from tabulate import tabulate
    except ModuleNotFoundError:
        raise ModuleNotFoundError("tabulate is missing; pip install 'multiattn[report]', or ask for --json") from None
    return tabulate([_cells(row) for row in rows], headers=(*_HEADERS, *_RATES), tablefmt=form, disable_numparse=True)


def _cells(row: Row) -> list[str]:
    problem, roofs = row.problem, row.bounds
    heads = f"{problem.heads_q}" if problem.group == 1 else f"{problem.heads_q}/{problem.heads_kv}"
    length = f"{problem.seq_q}" if problem.seq_q == problem.seq_kv else f"{problem.seq_q}/{problem.seq_kv}"
    sizes = [f"{problem.batch}", heads, f"{problem.head_dim}", length, "causal" if problem.causal else "full"]
    times = [f"{time:.3g}" for time in (roofs.tensor_ms, roofs.exp_ms, roofs.memory_ms, roofs.fp32_ms)]
    ours = "" if row.measured is None else f"{_short(row.measured.tflops)} {row.measured.contender}"
    share = "" if row.ceiling_share is None else f"{row.ceiling_share:.0%}"
    rates = [_short(roofs.tflops), f"{roofs.peak_share:.0%}", ours, share]
    return [*sizes, _short(roofs.intensity), *times, " = ".join(roofs.busiest), *rates]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def describe(gpu: Gpu, tile: Tile, direction: Direction, head_dims: Iterable[int]) -> str:
    """What holds for every problem on `gpu`: its peaks, what a tile needs of them, what a score costs."""
    memory, smem = balance(gpu)
    lines = [
        f"{gpu.name} {direction}: {gpu.arch}, {gpu.sms} SMs at {gpu.clock_ghz:.3f} GHz, {gpu.computed_tflops:.4g} "
        f"TFLOPS, {gpu.gbps:.0f} GB/s ({gpu.source})",
        f"  tile {tile}: {tile.memory_intensity(direction):.0f} FLOP per byte loaded; tensor cores wait for device "
        f"memory below {memory:.0f}, less what L2 serves",
    ]
    if direction == "forward":
        lines.append(f"  and {tile.smem_intensity:.0f} per byte of shared memory; they wait for it below {smem:.0f}")
    for head_dim in head_dims:
        tensor, exp = score_cycles(gpu, head_dim, direction)
        lines.append(f"  a score at D={head_dim}: {tensor:.4f} clocks of tensor cores, {exp:.4f} of exponentials")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m multiattn roofline``."""
    names = ", ".join(gpu.name for gpu in GPUS)
    parser.add_argument("--device", action="append", required=True, help=f"may be given again; all, or of {names}")
    parser.add_argument("--head-dim", default="64,128,256", help="default: %(default)s")
    parser.add_argument("--seq", default="512,1024,2048,4096,8192,16384", help="of q; default: %(default)s")
    parser.add_argument("--kv-len", type=int, help="of k and v (default: that of q)")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=None, help="bottom-right aligned; default: both masks")
    mask.add_argument("--full", action="store_false", dest="causal", help="no mask")
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="forward", help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="default: as many as --tokens hold")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="batch times length; default: %(default)s")
    parser.add_argument("--heads", type=int, help=f"of q (default: {HIDDEN} over D)")
    parser.add_argument("--kv-heads", type=int, help="of k and v (default: those of q)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default: %(default)s")
    parser.add_argument("--tile", default="128x128", help="queries x keys; default: %(default)s")
    parser.add_argument(
        "--results", type=Path, nargs="+", default=(), metavar="PATH", help="results of python -m bench"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the roofs of every problem that the options name; 2 for options that make no sense."""
    try:
        gpus = [gpu for name in options.device for gpu in (GPUS if name == "all" else (gpu_by_name(name),))]
        tile, head_dims = Tile.parse(options.tile), _counts("--head-dim", options.head_dim)
        problems = list(_problems(options, head_dims, _counts("--seq", options.seq)))
        measurements = read_results(options.results)
        directions = DIRECTIONS if options.direction == "both" else (options.direction,)
        told: list[Any] = []
        for gpu in dict.fromkeys(gpus):
            for direction in directions:
                rows = compare(problems, gpu, direction, measurements)
                if options.json:
                    told += [row.as_dict() for row in rows]
                else:
                    told += [f"{describe(gpu, tile, direction, head_dims)}\n\n{as_table(rows)}\n"]
    except (ValueError, ModuleNotFoundError) as error:
        print(f"python -m multiattn roofline: {error}", file=sys.stderr)
        return 2
    print(json.dumps(told, indent=1) if options.json else "\n".join([*told, _FOOTNOTE]))
    return 0


_FOOTNOTE = "* an estimate of the softmax's FP32 instructions, no part of the bound\nH q/kv, N q/kv where they differ"


def _problems(options: argparse.Namespace, head_dims: Sequence[int], seqs: Sequence[int]) -> Iterable[Problem]:
    masks = (False, True) if options.causal is None else (options.causal,)
    for head_dim in head_dims:
        for causal in masks:
            for seq in seqs:
                yield Problem.contiguous(
                    batch=_batch(options, seq),
                    heads_q=options.heads if options.heads is not None else max(1, HIDDEN // head_dim),
                    heads_kv=options.kv_heads,
                    seq_q=seq,
                    seq_kv=options.kv_len,
                    head_dim=head_dim,
                    dtype=options.dtype,
                    causal=causal,
                )


def _batch(options: argparse.Namespace, seq: int) -> int:
    batch: int = options.batch if options.batch is not None else options.tokens // seq
    if batch < 1:
        got = (
            f"--batch: got {batch}" if options.batch is not None else f"--tokens: got {options.tokens} for --seq {seq}"
        )
        raise ValueError(f"{got}; allowed at least one sequence")
    return batch


def _counts(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option}: got {text!r}; allowed positive counts, as in 64,128")
    return tuple(dict.fromkeys(map(int, parts)))
