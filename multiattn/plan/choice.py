"""The backend and variant of a call, in each direction: by name, or by recorded measurements (`choose`).

``backend="auto"`` on a GPU takes the order of the nearest measured cell of the benchmark matrix. The cells are
`measured.json` beside this file, written from bench/results by ``python -m bench prefer``. Near what the user measured
on this very GPU (`multiattn.plan.tuning`) that comes first.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING

from multiattn.operands import Options
from multiattn.packed import USUAL_LENGTH
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, REFERENCE, Direction, Plan, make_plan
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem

if TYPE_CHECKING:
    from multiattn.plan.tuning import Tuning

BOTH: tuple[Direction, ...] = ("forward", "backward")


def choose(
    problem: Problem,
    arch: Arch,
    options: Options,
    *directions: Direction,
    probe: bool = True,
    tuning: Tuning | None = None,
) -> tuple[Plan, ...]:
    """A Plan for each direction, or `Unsupported` with every reason of all that have none.

    `options.variant` is one of the first direction. ``"auto"`` chooses each direction by its own measurements: any
    backend's forward feeds any backend's backward. `tuning` is what was measured on the GPU that this is for: only a
    caller who knows that has it.
    """
    plans, refusals = [], []
    for direction in directions:
        asked = options if direction == directions[0] else options.of_gradient
        try:
            plans.append(_choose(problem, arch, asked, direction, probe, tuning))
        except Unsupported as refusal:
            refusals.append(refusal)
    if refusals:
        raise Unsupported(
            backend=options.backend,
            arch=arch,
            problem=problem,
            reasons=dict.fromkeys(reason for refusal in refusals for reason in refusal.reasons),
            alternatives=_alternatives(problem, arch, options, directions, probe),
            direction=" and ".join(refusal.direction for refusal in refusals),
        )
    return tuple(plans)


def _choose(
    problem: Problem, arch: Arch, options: Options, direction: Direction, probe: bool, tuning: Tuning | None = None
) -> Plan:
    def plan(name: str) -> Plan:
        return make_plan(
            registry.get(name),
            problem,
            arch,
            direction=direction,
            variant=options.variant,
            deterministic=options.deterministic,
            probe=probe,
            tuned=() if tuning is None else tuning.choices(problem, direction, name),
        )

    if options.backend != "auto":
        return plan(options.backend)
    if options.variant is not None:
        names = " or ".join(f"backend={name!r}" for name in BACKENDS)
        raise ValueError(f"variant={options.variant!r} needs a named backend; got backend='auto'; give {names}")
    if not arch.is_gpu:
        return plan(REFERENCE)
    reasons: list[Reason] = []
    others: list[Plan] = []
    order = preferred_order(problem, arch, direction)
    for name, why in order if tuning is None else tuning.order(problem, direction, order):
        try:
            found = plan(name)
        except Unsupported as refusal:
            reasons += refusal.reasons
            continue
        found = replace(found, why=f"{why}; {found.why}")
        if is_measured(found):
            return found
        others.append(found)
    if others:
        return min(others, key=lambda plan: _WITHOUT_THE_BEST.index(plan.backend))
    raise Unsupported(backend="auto", arch=arch, problem=problem, reasons=dict.fromkeys(reasons), direction=direction)


def _alternatives(
    problem: Problem, arch: Arch, options: Options, directions: Sequence[Direction], probe: bool
) -> list[str]:
    """Backends that can run all directions, with their variants."""
    if options.backend == "auto":
        return [REFERENCE]
    able = []
    for name in (*BACKENDS, REFERENCE):
        if name == options.backend and options.variant is None:
            continue
        asked = options._replace(backend=name, variant=None)
        try:
            plans = [_choose(problem, arch, asked, direction, probe) for direction in directions]
        except Unsupported:
            continue
        able.append(f"{name} (variant {', '.join(dict.fromkeys(plan.variant for plan in plans))})")
    return able


# ---------------------------------------------------------------- measurements


_WITHOUT_THE_BEST = ("cutile", "triton", "cuda")
"""The order of backends for what the best variants of none have code. H200, 2026-11-26, backward at D=128, N=4096: the
variants that take block masks have 424 TFLOPS in cuTile, 356 in Triton and 254 in CUDA, two passes each."""


def is_measured(plan: Plan) -> bool:
    """False where a backend's better variants, which measurements are of, have no code for its scores or blocks.

    H200, 2026-11-25, causal with softcap 30 at D=128, N=16k, when Hopper's own kernels had none: CUDA without wgmma 351
    TFLOPS, Triton without Gluon 494, cuTile, whose variant is the same, 504.
    """
    problem, arch = plan.problem, plan.arch
    if not problem.has_score and problem.blocks is None and problem.packing is None:
        return True
    offered = registry.get(plan.backend).op(plan.direction).offered
    better = itertools.takewhile(lambda variant: variant.name != plan.variant, offered)
    usual = (variant.capability for variant in better if not variant.capability.caches)
    refused = {it.code for capability in usual for it in capability.why_not(problem, arch)}
    return not refused & {"score", "block_mask", "packing"}


_UNPACKED = 0.5
"""How much farther a cell of ``[B, H, S, D]`` is from a packed batch. A guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCell:
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
    packed: bool = False
    """True for a packed batch of `seq_kv` tokens: the geometric mean over several mixes of lengths."""
    rows: int = 0
    """With keys in a cache `Problem.rows`: the geometric mean over batches, heads, lengths and pages. 0: no cache."""

    def distance(self, problem: Problem) -> float:
        """How far a problem is from this cell, in doublings of head_dim, length and heads, each of which matters less.

        Heads decide how full the last wave of blocks is. Heads that share keys and values need fewer loads, which helps
        the backend that waits most for loads. A packed batch, whose lengths nobody knows here, is nearer to a
        packed cell of 1.4 times its head_dim than to another cell of its own head_dim.
        """
        if self.rows:
            return abs(math.log2(problem.head_dim / self.head_dim)) + abs(math.log2(max(problem.rows, 1) / self.rows))
        if self.packed != (problem.packing is not None):
            return self._distance(problem) + _UNPACKED
        return self._distance(problem)

    def _distance(self, problem: Problem) -> float:
        head_dim = abs(math.log2(problem.head_dim / self.head_dim))
        keys = problem.seq_kv if problem.packing is None else USUAL_LENGTH
        seq_kv = 0.0 if self.packed else abs(math.log2(max(keys, 1) / self.seq_kv))
        heads = abs(math.log2(problem.batch * problem.heads_q / self.heads))
        group = abs(math.log2(problem.group / self.group))
        return head_dim + seq_kv / 4 + (heads + group) / 16


@functools.cache
def measured_cells() -> tuple[MeasuredCell, ...]:
    """Every recorded cell."""
    rows = json.loads(resources.files(__package__).joinpath("measured.json").read_text())
    return tuple(MeasuredCell(**{**row, "tflops": tuple(sorted(row["tflops"].items()))}) for row in rows)


def measured_gpus(arch: str) -> tuple[str, ...]:
    """The GPUs of an arch that have recorded cells, by all that the driver calls them."""
    return tuple(dict.fromkeys(cell.gpu for cell in measured_cells() if cell.arch == arch))


FEW_ROWS, MANY_KEYS = 16, 1024
"""The most rows, and the least keys, of calls without a cache that are as fast as those with one: kernels are the
same."""


def reads_as_cache(problem: Problem, direction: Direction) -> bool:
    """True if cells of caches tell how fast backends are: the time is that of reading keys."""
    if problem.cache is not None:
        return True
    is_plain = problem.packing is None and problem.blocks is None and direction == "forward"
    return is_plain and problem.rows <= FEW_ROWS and problem.seq_kv >= MANY_KEYS


def preferred_order(problem: Problem, arch: Arch, direction: Direction = "forward") -> tuple[tuple[str, str], ...]:
    """Backends from the most to the least preferred, each with the reason for its place.

    Backward follows its own cells; where an arch has none yet, those of forward, and the reason says so.
    """
    here = [cell for cell in measured_cells() if cell.arch == arch.name]
    cells = [cell for cell in here if cell.rows and reads_as_cache(problem, direction)]
    if not cells and problem.cache is None:
        cells = [cell for cell in here if not cell.rows and cell.causal == problem.is_banded]
    cells = [cell for cell in cells if problem.packing is not None or not cell.packed]
    if not cells:
        why = f"no measurement on {arch.name} yet: the order of BACKENDS, a guess"
        return tuple((name, why) for name in BACKENDS)
    own = [cell for cell in cells if cell.direction == direction]
    cell = min(own or cells, key=lambda cell: cell.distance(problem))
    mask = "causal" if cell.causal else "full"
    heads = f"B*H={cell.heads}" + (f" Hq/Hkv={cell.group}" if cell.group != 1 else "")
    size = f"D={cell.head_dim} {'tokens' if cell.packed else 'N'}={cell.seq_kv} {heads} {mask}"
    if cell.rows:
        size = f"D={cell.head_dim}, caches with {cell.rows} queries of the heads that share a key,"
    alike = _on_all_gpus(cell, own or cells)
    gpus = " and ".join(dict.fromkeys(it.gpu for it in alike))
    where = f"{gpus}, {cell.date}, {size} {'packed ' * cell.packed}{cell.direction}"
    if not own:
        where += f" (no {direction} measured on {arch.name} yet)"
    measured = _mean_tflops(alike)
    order = [(name, f"{tflops:.0f} TFLOPS on {where}") for name, tflops in measured if name in BACKENDS]
    known = {name for name, _ in order}
    return (*order, *((name, f"not measured on {where}") for name in BACKENDS if name not in known))


def _on_all_gpus(cell: MeasuredCell, cells: Sequence[MeasuredCell]) -> list[MeasuredCell]:
    """The cell, and the same problem on other GPUs of its arch on which the same backends were measured."""
    names = {name for name, _ in cell.tflops}
    same = [it for it in cells if replace(it, gpu=cell.gpu, date=cell.date, tflops=cell.tflops) == cell]
    return [it for it in same if {name for name, _ in it.tflops} == names]


def _mean_tflops(alike: Sequence[MeasuredCell]) -> list[tuple[str, float]]:
    """The geometric mean of each backend over the GPUs, the highest first: no plan knows which of them it is for."""
    found: dict[str, list[float]] = {}
    for name, tflops in itertools.chain.from_iterable(cell.tflops for cell in alike):
        found.setdefault(name, []).append(tflops)
    return sorted(((name, math.prod(it) ** (1 / len(it))) for name, it in found.items()), key=lambda pair: -pair[1])
