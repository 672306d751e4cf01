"""The choice of ``backend="auto"`` on a GPU: the order of the nearest measured cell of the benchmark matrix.

The cells are `measured.json` beside this file, written from bench/results by ``python -m bench prefer``.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources

from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, Direction
from multiattn.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measured problem: TFLOPS of each backend on one GPU."""

    arch: str
    gpu: str
    date: str
    head_dim: int
    seq_kv: int
    causal: bool
    heads: int
    """Query heads over the whole batch."""
    tflops: tuple[tuple[str, float], ...]
    group: int = 1
    """Heads of q that share one of k and v."""
    direction: Direction = "forward"

    def distance(self, problem: Problem) -> float:
        """How far a problem is from this cell, in doublings of head_dim, length and heads, each of which matters less.

        Heads decide how full the last wave of blocks is. Heads that share keys and values need fewer loads, which helps
        the backend that waits most for loads.
        """
        head_dim = abs(math.log2(problem.head_dim / self.head_dim))
        seq_kv = abs(math.log2(max(problem.seq_kv, 1) / self.seq_kv))
        heads = abs(math.log2(problem.batch * problem.heads_q / self.heads))
        group = abs(math.log2(problem.group / self.group))
        return head_dim + seq_kv / 4 + (heads + group) / 16


@functools.cache
def measured_cells() -> tuple[Cell, ...]:
    """Every recorded cell."""
    rows = json.loads(resources.files(__package__).joinpath("measured.json").read_text())
    return tuple(Cell(**{**row, "tflops": tuple(sorted(row["tflops"].items()))}) for row in rows)


def preferred_order(problem: Problem, arch: Arch, direction: Direction = "forward") -> tuple[tuple[str, str], ...]:
    """Backends from the most to the least preferred, each with the reason for its place.

    Backward follows its own cells; where an arch has none yet, those of forward, and the reason says so.
    """
    cells = [cell for cell in measured_cells() if cell.arch == arch.name and cell.causal == problem.causal]
    if not cells:
        why = f"no measurement on {arch.name} yet: the order of BACKENDS, a guess"
        return tuple((name, why) for name in BACKENDS)
    own = [cell for cell in cells if cell.direction == direction]
    cell = min(own or cells, key=lambda cell: cell.distance(problem))
    mask = "causal" if cell.causal else "full"
    heads = f"B*H={cell.heads}" + (f" Hq/Hkv={cell.group}" if cell.group != 1 else "")
    where = f"{cell.gpu}, {cell.date}, D={cell.head_dim} N={cell.seq_kv} {heads} {mask} {cell.direction}"
    if not own:
        where += f" (no {direction} measured on {arch.name} yet)"
    measured = sorted(cell.tflops, key=lambda pair: -pair[1])
    order = [(name, f"{tflops:.0f} TFLOPS on {where}") for name, tflops in measured if name in BACKENDS]
    known = {name for name, _ in order}
    return (*order, *((name, f"not measured on {where}") for name in BACKENDS if name not in known))
