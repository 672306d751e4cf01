"""Measured cells, and the rates that they predict: what ``backend="auto"`` goes by.

The cells are `measured.json` beside this file, written from bench/results by ``python -m bench prefer``. A problem that
was measured has the order of its cell. Of another the rate of each backend is predicted: from the rates of near cells,
and from the shares of time that tiles and waves leave to products there and here (`multiattn.plan.waves`).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Literal, NamedTuple

from multiattn.packed import USUAL_LENGTH
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, Direction, make_plan
from multiattn.plan.schedule import most_multiprocessors
from multiattn.plan.support import Unsupported
from multiattn.plan.waves import efficiency
from multiattn.problem import Problem
from multiattn.score.expression import ONE, walk
from multiattn.score.lower import lower

Score = Literal["", "softcap", "alibi"]
"""None, one whose slope differs from 1, and one that only adds: kernels differ by that."""
Lists = Literal["", "whole", "masked", "divided"]
"""No block mask; one whose blocks are seen whole; one with a callable, which hides a part of some; with one that
divides, and costs more than the softmax."""
_TOLD: Mapping[Lists, str] = {
    "whole": "block masks without a callable",
    "masked": "block masks with a callable",
    "divided": "block masks with a callable that divides",
}
_UNPACKED = 0.5
"""How much farther a cell of ``[B, H, S, D]`` is from a packed batch. A guess."""


class MeasuredCell(NamedTuple):
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
    score: Score = ""
    """The kind of expression that modifies scores."""
    lists: Lists = ""
    """The kind of block mask: the geometric mean over several, of any length; `seq_kv` is 0."""
    window: int = 0
    """The keys that a query sees, its own the last of them; 0: all that `causal` leaves."""
    rows: int = 0
    """With keys in a cache `Problem.rows`: the geometric mean over batches, heads, lengths and pages. 0: no cache."""

    def distance(self, problem: Problem) -> float:
        """How far a problem is from this cell, in doublings of head_dim, length and heads, each of which matters less.

        Heads decide how full the last wave of blocks is. Heads that share keys and values need fewer loads, which helps
        the backend that waits most for loads. A packed batch, whose lengths nobody knows here, is nearer to a
        packed cell of 1.4 times its head_dim than to another cell of its own head_dim.
        """
        head_dim = doublings(problem.mean_width, self.head_dim)
        if self.rows:
            return head_dim + doublings(problem.rows, self.rows)
        is_other = self.packed != (problem.packing is not None)
        return head_dim + self.distance_in_lengths(problem) + is_other * _UNPACKED

    def distance_in_lengths(self, problem: Problem) -> float:
        """The distance but for head_dim."""
        keys = problem.seq_kv if problem.packing is None else USUAL_LENGTH
        seq_kv = 0.0 if self.packed or self.lists else doublings(keys, self.seq_kv)
        seen = doublings(sum(problem.reach) + 1, self.window or self.seq_kv) if problem.is_two_sided else 0.0
        heads = doublings(problem.batch * problem.heads_q, self.heads)
        return (seq_kv + seen) / 4 + (heads + doublings(problem.group, self.group)) / 16

    @property
    def names(self) -> frozenset[str]:
        """The backends that were measured."""
        return frozenset(name for name, _ in self.tflops)

    @property
    def place(self) -> MeasuredCell:
        """The cell without what differs between GPUs."""
        return self._replace(gpu="", date="", tflops=())

    def apart(self, problem: Problem) -> str:
        """The sizes in which a problem differs, in words."""
        pairs = {"D": (problem.mean_width, self.head_dim), "N": (problem.seq_kv, self.seq_kv)}
        pairs |= {"B*H": (problem.batch * problem.heads_q, self.heads), "Hq/Hkv": (problem.group, self.group)}
        return ", ".join(f"{name}={its}" for name, (its, measured) in pairs.items() if its != measured)

    def __str__(self) -> str:
        if self.rows:
            what = f"D={self.head_dim}, caches with {self.rows} queries of the heads that share a key,"
        elif self.lists:
            what = f"D={self.head_dim} B*H={self.heads} Hq/Hkv={self.group} {_TOLD[self.lists]},"
        else:
            heads = f"B*H={self.heads}" + (f" Hq/Hkv={self.group}" if self.group != 1 else "")
            mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
            what = f"D={self.head_dim} {'tokens' if self.packed else 'N'}={self.seq_kv} {heads} {mask}"
        kind = f"{self.score} " if self.score else "packed " * self.packed
        return f"{what} {kind}{self.direction}"


def doublings(one: int, other: int) -> float:
    """How far two sizes are apart."""
    return abs(math.log2(max(one, 1) / max(other, 1)))


@functools.cache
def measured_cells() -> tuple[MeasuredCell, ...]:
    """Every recorded cell."""
    return read_cells(resources.files(__package__).joinpath("measured.json").read_text())


def read_cells(text: str) -> tuple[MeasuredCell, ...]:
    """The cells of a file: of each line all that its cells share, beside them."""
    lines = ((line.pop("cells"), line) for line in json.loads(text))
    found = ({**shared, **cell} for cells, shared in lines for cell in cells)
    return tuple(MeasuredCell(**{**it, "tflops": tuple(sorted(it["tflops"].items()))}) for it in found)


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


# ---------------------------------------------------------------- the order of backends


def preferred_order(
    problem: Problem, arch: Arch, direction: Direction = "forward", cells: Sequence[MeasuredCell] | None = None
) -> tuple[tuple[str, str], ...]:
    """Backends from the most to the least preferred, each with the reason for its place.

    By `cells`; None is all that are recorded. Backward follows its own; where an arch has none yet, those of forward,
    and the reason says so.
    """
    found = _cells_of(problem, arch, direction, measured_cells() if cells is None else cells)
    if not found:
        why = f"no measurement on {arch.name} yet: the order of BACKENDS, a guess"
        return tuple((name, why) for name in BACKENDS)
    own = [cell for cell in found if cell.direction == direction]
    near = sorted(own or found, key=lambda cell: (cell.distance(problem), -len(cell.tflops)))
    cell, distance = near[0], near[0].distance(problem)
    as_near = itertools.takewhile(lambda it: it.distance(problem) == distance, near)
    alike = [it for it in as_near if it.place == cell.place and it.names == cell.names]
    where = f"{' and '.join(dict.fromkeys(it.gpu for it in alike))}, {cell.date}, {cell}"
    if not own:
        where += f" (no {direction} measured on {arch.name} yet)"
    rates = {
        name: math.prod(dict(it.tflops)[name] for it in alike) ** (1 / len(alike))
        for name in BACKENDS
        if name in cell.names
    }
    told = {name: f"{tflops:.0f} TFLOPS on {where}" for name, tflops in rates.items()}
    if distance:
        how = next(word for most, word in _WORDS if distance <= most)
        apart = f"which is {how} ({distance:.2f} doublings: {cell.apart(problem)})"
        told = {name: f"{why}, {apart}" for name, why in told.items()}
        if own and not cell.rows and problem.score is None and problem.blocks is None and problem.batching is None:
            near = [it for it in near if it.names == cell.names]
            predicted = {name: predict(name, problem, arch, direction, near) for name in rates}
            if None not in predicted.values():
                rates = {name: rate or 0.0 for name, rate in predicted.items()}
                told = {name: f"{rates[name]:.0f} TFLOPS predicted, from {why}" for name, why in told.items()}
    order = sorted(rates, key=lambda name: -rates[name])
    rest = (name for name in BACKENDS if name not in rates)
    return (*((name, told[name]) for name in order), *((name, f"not measured on {where}") for name in rest))


_WORDS = ((0.25, "near"), (0.75, "some way off"), (math.inf, "far"))
"""How far a cell is, in words, up to so many doublings."""


def _cells_of(
    problem: Problem, arch: Arch, direction: Direction, cells: Sequence[MeasuredCell]
) -> Sequence[MeasuredCell]:
    """The cells that tell of a problem: of caches, of its kind of score, or of its kind of mask."""
    here = [cell for cell in cells if cell.arch == arch.name]
    found = [cell for cell in here if cell.rows and reads_as_cache(problem, direction)]
    if found or problem.cache is not None:
        return found
    if listed := listed_cells(problem, direction, here):
        return listed
    here = [cell for cell in here if not cell.lists]
    if scored := scored_cells(problem, arch, direction, here):
        return scored
    found = [cell for cell in here if not (cell.rows or cell.score) and cell.causal == problem.is_banded]
    found = [cell for cell in found if problem.packing is not None or not cell.packed]
    return [cell for cell in found if problem.is_two_sided or not cell.window]


def listed_cells(problem: Problem, direction: Direction, cells: Sequence[MeasuredCell]) -> Sequence[MeasuredCell]:
    """The `cells` of a problem's kind of block mask in this direction; those of packed batches are for these alone."""
    if problem.blocks is None:
        return ()
    mask, is_packed = problem.score and problem.score.program.mask, problem.packing is not None
    divides = mask is not None and any(it.op in ("floordiv", "mod") for it in walk(mask))
    kind = "whole" if mask is None else "divided" if divides else "masked"
    found = [cell for cell in cells if cell.lists == kind and cell.direction == direction]
    return [cell for cell in found if is_packed or not cell.packed]


def scored_cells(
    problem: Problem, arch: Arch, direction: Direction, cells: Sequence[MeasuredCell] | None = None
) -> Sequence[MeasuredCell]:
    """The cells of a dense problem's kind of score that are as wide, or of the other kind; none where it reads an
    element for each key."""
    score = problem.score
    if score is None or not problem.has_score or problem.reads_keys or problem.blocks or problem.batching:
        return ()
    kind = "alibi" if lower(score.program, approximate=True).slope is ONE else "softcap"
    here = (it for it in (measured_cells() if cells is None else cells) if it.arch == arch.name and it.score)
    wide = [cell for cell in here if cell.direction == direction and cell.head_dim >= problem.mean_width]
    return [cell for cell in wide if cell.score == kind] or wide


# ---------------------------------------------------------------- predictions

CELLS = 6
"""The nearest cells that predict, of all GPUs."""
NEAREST = 0.1
"""The distance within which one cell counts as much as another."""


class _Planned(NamedTuple):
    """A backend's Plan as waves have it; with no efficiency where its config says nothing of its waves."""

    variant: str
    columns: float
    efficiency: float


@functools.lru_cache(maxsize=2048)
def _planned(name: str, problem: Problem, arch: Arch, direction: Direction) -> _Planned | None:
    """None where a backend cannot run a problem."""
    try:
        plan = make_plan(registry.get(name), problem, arch, direction=direction, probe=False)
    except Unsupported:
        return None
    walks = () if plan.config is None else plan.config.walks(problem)
    share = efficiency(problem, walks, most_multiprocessors(arch))
    return _Planned(plan.variant, walks[0].columns if walks else 0.0, share)


@functools.lru_cache(maxsize=1024)
def problem_of(cell: MeasuredCell) -> Problem:
    """The problem of a cell that is neither packed nor of caches, as one batch entry."""
    return Problem.contiguous(
        batch=1,
        heads_q=cell.heads,
        heads_kv=cell.heads // cell.group,
        seq_q=cell.seq_kv,
        head_dim=cell.head_dim,
        causal=cell.causal,
        window=(cell.window - 1, 0) if cell.window else None,
    )


def predict(
    name: str, problem: Problem, arch: Arch, direction: Direction, near: Sequence[MeasuredCell]
) -> float | None:
    """TFLOPS of a backend, from the first of `near` in which it has the same variant: the mean by their distances.

    There head_dim is that of its products: where they are padded to 128 columns, D=104 is as near to D=128 as can be.
    0 where it cannot run the problem; None where nothing is known.
    """
    here = _planned(name, problem, arch, direction)
    if here is None or not here.efficiency:
        return None if here else 0.0
    weights, logs = [], []
    for cell in near:
        there = _planned(name, problem_of(cell), arch, direction)
        if there is None or there.variant != here.variant:
            continue
        distance = abs(math.log2(here.columns / there.columns)) + cell.distance_in_lengths(problem)
        weights.append(1 / (distance**2 + NEAREST**2))
        logs.append(math.log(dict(cell.tflops)[name] / there.efficiency))
        if len(logs) == CELLS:
            break
    if not logs:
        return None
    mean = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)
    return here.efficiency * math.exp(mean)
