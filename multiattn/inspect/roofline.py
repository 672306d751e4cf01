"""The least time of an attention problem on a GPU, and ``python -m multiattn roofline``, which prints it.

Three units work on a score: tensor cores multiply, special-function units exponentiate, memory brings the operands.
The unit that needs the longest bounds the time from below (Williams, Waterman and Patterson, "Roofline", CACM 2009,
with one more roof; Shah et al., "FlashAttention-3", 2024, section 3.1 for the exponentials).

Every rate is at the clock of the stated tensor peak, `Gpu.clock_ghz`: a chip that runs faster beats the bound by as
much. So may a kernel that computes part of its exponentials in the FMA units (Zadouri et al., "FlashAttention-4"), and
launches back to back whose operands stay in L2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass

from multiattn.inspect.options import (
    HIDDEN,
    TOKENS,
    HeadDims,
    add_problem,
    check_features,
    count,
    counts,
    directions_of,
    head_dims,
    layer,
    masks,
    masks_of,
    sizes_given,
    sizes_of,
    table,
    with_features,
)
from multiattn.layout import flops_per_pair
from multiattn.mask import MASKS
from multiattn.operands import GRADIENTS
from multiattn.plan.arch import ARCHS, GPUS, Gpu, gpu_by_name
from multiattn.plan.backend import DIRECTIONS, Direction
from multiattn.problem import Problem

HEAD_DIMS = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = ("bf16", "fp16")
"""The dtypes that the tensor rates are stated for."""


# ---------------------------------------------------------------- bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The least time of a problem on a GPU, in ms, unit by unit as if each worked alone and at its peak."""

    flops: int
    """FLOP of the tensor cores, as multiattn counts them everywhere: `flops_per_pair` of each visible pair."""
    bytes: int
    """From and to device memory, each element once, as if caches held everything in between."""
    tensor_ms: float
    exp_ms: float
    memory_ms: float
    peak_tflops: float

    @property
    def time_ms(self) -> float:
        """The bound, which the busiest unit sets."""
        return max(self.tensor_ms, self.exp_ms, self.memory_ms)

    @property
    def busiest(self) -> tuple[str, ...]:
        """The units that are busy all the time: mostly one, but two at D=64 on sm90."""
        times = {"tensor": self.tensor_ms, "exp": self.exp_ms, "memory": self.memory_ms}
        return tuple(unit for unit, time in times.items() if math.isclose(time, self.time_ms))

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


def _bytes(problem: Problem, direction: Direction) -> int:
    """Forward: q, k and v read, out and lse written. Backward: those five and dout read, dq, dk and dv written.

    A query that sees no key is not read, but its results are written. A key that no query sees is not read.
    """
    left, right = problem.reach
    seeing = min(problem.seq_q, problem.seq_kv + right) if problem.seq_kv else 0
    seen = min(problem.seq_kv, problem.seq_q + left) if seeing else 0
    size = {name: layout.size_bytes for name, layout in problem.layouts.items()}
    forward = direction == "forward"
    of_queries, written = (("q",), problem.forward_results) if forward else (("q", "out", "dout", "lse"), GRADIENTS)
    read = sum(size[name] for name in of_queries) * seeing // max(problem.seq_q, 1)
    read += (size["k"] + size["v"]) * seen // max(problem.seq_kv, 1)
    return read + sum(size[name] for name in written)


def bounds(problem: Problem, gpu: Gpu, direction: Direction = "forward") -> Bounds:
    """The roofs over `problem` on `gpu`.

    The peak is that of SMs, clock and FLOP per clock, within 1 % of the stated one. ValueError for a direction that
    there is not, and for a dtype that the tensor rates are not stated for.
    """
    if problem.dtype not in DTYPES:
        raise ValueError(f"dtype: got {problem.dtype}; allowed {', '.join(DTYPES)}")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: got {direction!r}; allowed {', '.join(DIRECTIONS)}")
    # One exponential per visible pair: in the forward, and again in the backward, which recomputes p.
    scores, moved = problem.batch * problem.heads_q * problem.visible_pairs, _bytes(problem, direction)
    flops = scores * flops_per_pair(problem.head_dim, problem.head_dim_v, backward=direction == "backward")
    per_ms = gpu.sms * gpu.clock_ghz * 1e6  # clocks of all SMs in a millisecond
    return Bounds(
        flops=flops,
        bytes=moved,
        tensor_ms=flops / (gpu.tensor_rate * per_ms),
        exp_ms=scores / (ARCHS[gpu.arch].ex2_rate * per_ms),
        memory_ms=moved / (gpu.gbps * 1e6),
        peak_tflops=gpu.computed_tflops,
    )


def score_cycles(gpu: Gpu, head_dims: HeadDims, direction: Direction = "forward") -> tuple[float, float]:
    """Clocks that one score keeps an SM's tensor cores and its special-function units busy."""
    flops = flops_per_pair(*head_dims, backward=direction == "backward")
    return flops / gpu.tensor_rate, 1 / ARCHS[gpu.arch].ex2_rate


# ---------------------------------------------------------------- the command

_HEADERS = ("B", "H", "D", "N", "mask", "FLOP/B", "tensor ms", "exp ms", "memory ms", "bound by", "TFLOPS", "of peak")


def _cells(problem: Problem, found: Bounds) -> list[str]:
    """The row of a table."""
    heads, length, head_dims = sizes_of(problem)
    sizes = [f"{problem.batch}", heads, head_dims, length, problem.mask]
    times = [f"{time:.3g}" for time in (found.tensor_ms, found.exp_ms, found.memory_ms)]
    rates = [_short(found.tflops), f"{found.peak_share:.0%}"]
    return [*sizes, _short(found.intensity), *times, " = ".join(found.busiest), *rates]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def describe(gpu: Gpu, direction: Direction, head_dims: Iterable[HeadDims]) -> str:
    """Describe a GPU for every problem: its peaks, and the cost of a score."""
    lines = [
        f"{gpu.name} {direction}: {gpu.arch}, {gpu.sms} SMs at {gpu.clock_ghz:.3f} GHz, {gpu.computed_tflops:.4g} "
        f"TFLOPS, {gpu.gbps:.0f} GB/s ({gpu.source})"
    ]
    for its in head_dims:
        tensor, exp = score_cycles(gpu, its, direction)
        lines.append(f"  a score at D={its}: {tensor:.4f} clocks of tensor cores, {exp:.4f} of exponentials")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m multiattn roofline``."""
    names = ", ".join(gpu.name for gpu in GPUS)
    told = f"may be given again; all, an arch, or of {names}"
    parser.add_argument("--device", "--arch", action="append", required=True, help=told)
    add_problem(parser, required=False)
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="forward", help="default: %(default)s")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--full", action="store_const", dest="mask", const=MASKS[:1], help="no mask; default: both masks")
    mask.add_argument("--mask", type=masks, metavar="A,B,...", help="of full, causal, window:LEFT:RIGHT")
    sweep = parser.add_argument_group("in place of a shape").add_argument
    sweep("--head-dim", type=head_dims, metavar="D[/Dv],...", help="default: 64,128,256")
    sweep("--seq", type=counts, metavar="S,...", help="of q; default: 512 to 16384 in doublings")
    sweep("--batch", type=count, help=f"default: as many as {TOKENS} tokens make")
    sweep("--heads", type=count, help=f"of q (default: {HIDDEN} over D)")


def run(options: argparse.Namespace) -> int:
    """Print the roofs of every problem that the options name."""
    gpus = [gpu for name in options.device for gpu in _gpus(name)]
    problems = _problems(options)
    head_dims = dict.fromkeys(HeadDims(problem.head_dim, problem.head_dim_v) for problem in problems)
    for gpu in dict.fromkeys(gpus):
        for direction in directions_of(options):
            rows = [_cells(problem, bounds(problem, gpu, direction)) for problem in problems]
            print(f"{describe(gpu, direction, head_dims)}\n\n{table(rows, _HEADERS)}\n")
    print("H q/kv, D qk/v, N q/kv where they differ")
    return 0


def _gpus(name: str) -> list[Gpu]:
    """The GPUs of a name: one product, an arch's, or all."""
    if name == "all" or name in ARCHS:
        return [gpu for gpu in GPUS if name in ("all", gpu.arch)]
    return [gpu_by_name(name)]


def _problems(options: argparse.Namespace) -> list[Problem]:
    sweep = {"--head-dim": options.head_dim, "--seq": options.seq, "--batch": options.batch, "--heads": options.heads}
    batch, heads = options.batch, options.heads
    lengths, head_dims = options.seq or LENGTHS, options.head_dim or [(it, it) for it in HEAD_DIMS]
    if (asked := options.shape) is not None:
        if given := [name for name, value in sweep.items() if value is not None]:
            raise ValueError(f"{given[0]}: got it with --shape, which has its own; allowed one or the other")
        batch, heads, lengths, head_dims = asked.batch, asked.heads, (asked.seq,), [(asked.head_dim, asked.head_dim_v)]
    if batch is None and (longest := max(lengths)) > TOKENS:
        raise ValueError(f"--seq: got {longest}; allowed up to {TOKENS} tokens, or a --batch")
    check_features(options, "--packed", "--cache", why="bounds are of plain scores: what changes them costs more")
    sizes = {"batch": batch, "heads": heads, "scale": options.scale, **sizes_given(options)}
    return [
        with_features(layer(head_dim, seq, mask, head_dim_v=head_dim_v, dtype=options.dtype, **sizes), options)
        for head_dim, head_dim_v in head_dims
        for mask in masks_of(options)
        for seq in lengths
    ]
