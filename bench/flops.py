"""What a cell computes, counted: FLOP, TFLOPS and the share of a GPU's stated peak."""

from __future__ import annotations

from bench.matrix import Cell
from multiattn.plan.arch import Gpu
from multiattn.problem import Problem


def forward_flops(problem: Problem) -> int:
    """FLOP of one forward: two products of ``2*D`` FLOP per visible (query, key) pair, of every query head.

    Masked pairs do not count, so a causal kernel gains nothing by computing them. Exponentials do not count.
    """
    return 4 * problem.batch * problem.heads_q * problem.visible_pairs * problem.head_dim


BACKWARD_FACTOR = 2.5
"""A backward's products over a forward's: scores again, dv, dp, dk and dq, so five for two. By convention also of one
that computes scores and dp twice, so that rates compare times (Dao, "FlashAttention-2", section 4.1)."""


def cell_flops(cell: Cell) -> int:
    """FLOP of a cell in its direction."""
    factor = {"fwd": 1.0, "bwd": BACKWARD_FACTOR, "fwdbwd": 1.0 + BACKWARD_FACTOR}[cell.direction]
    return round(factor * forward_flops(cell.problem))


def tflops(flops: int, time_ms: float) -> float:
    """10^12 FLOP per second. ValueError for a time that no launch can take."""
    if time_ms <= 0:
        raise ValueError(f"time_ms: got {time_ms}; a measured time is positive")
    return flops / time_ms / 1e9


def peak_share(rate: float, gpu: Gpu | None) -> float | None:
    """`rate` (TFLOPS) over the stated dense 16-bit peak; None for a GPU without a stated peak."""
    return None if gpu is None else rate / gpu.tflops


def rate_text(rate: float) -> str:
    """TFLOPS for a table: whole numbers, but two digits of a rate below ten, so that none reads as 0."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
