"""Measurements of the user's own GPU, as ``multiattn tune`` keeps them, and the choices that follow near them.

They hold for problems like those that were measured (`TunedCell.is_near`), on a GPU of that very name. Only calls on
that GPU are given them, and what explains these calls: bench, parity and compiling for an arch plan without.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiattn.layout import widths
from multiattn.mask import parse_band
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch, by_name
from multiattn.plan.backend import BACKENDS, Direction, TunedChoice, find_variant, plan_variant
from multiattn.plan.measured import doublings
from multiattn.plan.records import config_of, record_of
from multiattn.problem import Problem

SCHEMA = 2
"""Another number is another format."""

NEAR_LENGTH = math.sqrt(2)
"""The most that a length may differ from the measured one, as a factor: cells an octave apart meet in the middle."""
NEAR_HEADS = 2.0
"""The most that batch times heads may differ, which only decide how full the last wave of blocks is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The problem that was measured, ``[B, H, S, D]``; the mask by its name."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        """The sizes of a problem."""
        return cls(**{name: getattr(problem, name) for name in cls.__slots__})

    @property
    def problem(self) -> Problem:
        """The contiguous problem; ValueError for sizes that do not go together, and for an unknown mask."""
        band = parse_band(self.mask)
        return Problem.contiguous(band=band, **{name: getattr(self, name) for name in self.__slots__ if name != "mask"})

    def __str__(self) -> str:
        heads = f"Hq={self.heads_q} Hkv={self.heads_kv}" if self.heads_q != self.heads_kv else f"H={self.heads_q}"
        length = f"Sq={self.seq_q} Skv={self.seq_kv}" if self.seq_q != self.seq_kv else f"N={self.seq_q}"
        return f"B={self.batch} {heads} {length} {widths(self.head_dim, self.head_dim_v)} {self.dtype} {self.mask}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedWay:
    """A variant with one config, and its time."""

    variant: str
    config: Any
    """The fields of the config; None is the variant's rule's own."""
    shown: str
    """The config in words, the rule's own, too."""
    time_ms: float
    tflops: float
    spread: float
    """The interquartile range over the median."""

    @property
    def rate(self) -> str:
        """TFLOPS as text: with two digits at least."""
        return f"{self.tflops:.0f}" if self.tflops >= 10 else f"{self.tflops:.2g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedBackend:
    """One backend in one cell."""

    ways: tuple[TimedWay, ...]
    """The best of each variant, fastest first."""
    bundled: tuple[TimedWay, ...]
    """The choice that comes with the package; none where it failed or was not reached."""
    candidates: int
    """As many were timed."""
    failed: Mapping[str, str]
    """Candidates that could not be compiled, or were wrong, and how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedCell:
    """All that was measured of one problem in one direction, at one time."""

    direction: Direction
    sizes: Sizes
    date: str
    driver: str
    versions: Mapping[str, str]
    seconds: float
    """Time that a candidate took to be compiled and checked, on average."""
    backends: Mapping[str, TunedBackend]

    @property
    def timed(self) -> Mapping[str, TimedWay]:
        """The fastest way of each backend that was timed."""
        return {name: it.ways[0] for name, it in self.backends.items() if it.ways}

    def is_near(self, problem: Problem) -> bool:
        """True for dense problems with the same head_dims, dtype, mask and heads that share keys.

        Lengths are within a factor of `NEAR_LENGTH`, batch times heads within one of `NEAR_HEADS`. Scores are not
        modified, and there are no sinks, which the measured problem had not either.
        """
        its = self.sizes
        like = ("head_dim", "head_dim_v", "dtype", "mask")
        return (
            is_plain(problem)
            and all(getattr(its, name) == getattr(problem, name) for name in like)
            and its.heads_q // its.heads_kv == problem.group
            and all(doublings(one, other) <= math.log2(NEAR_LENGTH) + 1e-9 for one, other in self._lengths(problem))
            and doublings(its.batch * its.heads_q, problem.batch * problem.heads_q) <= math.log2(NEAR_HEADS) + 1e-9
        )

    def distance(self, problem: Problem) -> float:
        """How far a near problem is, in doublings: lengths count more than heads."""
        heads = doublings(self.sizes.batch * self.sizes.heads_q, problem.batch * problem.heads_q)
        return sum(doublings(one, other) for one, other in self._lengths(problem)) + heads / 4

    def _lengths(self, problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.sizes.seq_q, problem.seq_q), (self.sizes.seq_kv, problem.seq_kv)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """All that was measured on GPUs of one name."""

    schema: int
    multiattn: str
    """The version whose kernels were timed."""
    gpu: str
    arch: str
    cells: tuple[TunedCell, ...]

    def nearest(self, problem: Problem, direction: Direction, *backends: str) -> TunedCell | None:
        """The nearest cell that is near a problem, of a direction and with times of `backends`; None where none is.

        The latest of those that are as near.
        """
        cells = (it for it in reversed(self.cells) if it.direction == direction and set(backends) <= set(it.timed))
        near = [it for it in cells if it.is_near(problem)]
        return min(near, key=lambda it: it.distance(problem)) if near else None

    def choices(self, problem: Problem, direction: Direction, backend: str) -> tuple[TunedChoice, ...]:
        """The variants of a backend as they were measured near a problem, fastest first; none where nothing was."""
        cell = self.nearest(problem, direction, backend)
        if cell is None:
            return ()
        own, found = cell.backends[backend], registry.get(backend)

        def choice(way: TimedWay) -> TunedChoice:
            variant = find_variant(found, way.variant, direction)
            config = None if way.config is None else config_of(way.config, variant)
            return TunedChoice(variant=way.variant, config=config, why=self._why(cell, way, own))

        return tuple(map(choice, own.ways))

    def _why(self, cell: TunedCell, way: TimedWay, own: TunedBackend) -> str:
        where = f"{self.gpu}, {cell.date}, {cell.sizes} {cell.direction}"
        told = f"tuned here: {where}: {way.rate} TFLOPS"
        if not own.bundled:
            return f"{told}; the bundled choice was not timed"
        (bundled,) = own.bundled
        if (way.variant, way.config) == (bundled.variant, None):
            return f"{told}, the bundled rule, the best of {own.candidates} timed"
        with_variant = f"{bundled.variant} {bundled.shown}" if bundled.variant != way.variant else bundled.shown
        return f"{told}; the bundled choice, {with_variant.strip()}, {bundled.rate}"

    def order(
        self, problem: Problem, direction: Direction, known: Sequence[tuple[str, str]]
    ) -> tuple[tuple[str, str], ...]:
        """Backends from the most to the least preferred, with the reasons: `known`, mended by what was measured here.

        Those that took turns here have the places that they have in `known` among themselves by their times here: a
        time of this GPU says nothing about a backend that was not timed on it. The cell with most backends decides.
        """
        near = (self.nearest(problem, direction, *pair) for pair in itertools.combinations(BACKENDS, 2))
        cells = [cell for cell in near if cell is not None]
        if not cells:
            return tuple(known)
        timed = max(cells, key=lambda cell: (len(cell.timed), -cell.distance(problem))).timed
        fastest = sorted(timed, key=lambda name: timed[name].time_ms)
        here = f"timed here: {', '.join(f'{name} {timed[name].rate}' for name in fastest)} TFLOPS"
        places = iter(fastest)
        return tuple((next(places), here) if name in timed else (name, why) for name, why in known)


def is_plain(problem: Problem) -> bool:
    """True for what tuning measures: dense sequences, scores as they are, no sinks."""
    modified = problem.score is not None or problem.blocks is not None or problem.has_sinks
    return not (modified or problem.packing is not None or problem.cache is not None)


def tuning_of(data: object) -> Tuning:
    """The measurements of a file's JSON; ValueError, naming what came, for anything else.

    Every config is made and tried on its own problem, so that no call finds later that one cannot be.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"schema: got {schema!r}; allowed {SCHEMA}")
    found = record_of(Tuning, data, "tuning")
    for cell in found.cells:
        if cell.sizes.heads_kv < 1 or cell.sizes.heads_q < 1:
            raise ValueError(f"sizes: got {cell.sizes}; allowed heads from 1 on")
        if unknown := set(cell.backends) - set(BACKENDS):
            raise ValueError(f"backends: got {', '.join(sorted(unknown))}; allowed {', '.join(BACKENDS)}")
        for name, own in cell.backends.items():
            _check_ways(name, cell, own, by_name(found.arch))
    return found


def _check_ways(name: str, cell: TunedCell, own: TunedBackend, arch: Arch) -> None:
    if len(own.bundled) > 1:
        raise ValueError(f"bundled: got {len(own.bundled)} choices; allowed one")
    problem = cell.sizes.problem
    for way in (*own.ways, *own.bundled):
        if not all(math.isfinite(it) and it > 0 for it in (way.tflops, way.time_ms)):
            raise ValueError(f"tflops: got {way.tflops} in {way.time_ms} ms; allowed numbers above 0")
        variant = find_variant(registry.get(name), way.variant, cell.direction)
        if way.config is None:
            continue
        config = config_of(way.config, variant)
        try:
            plan_variant(registry.get(name), variant, problem, arch, config, direction=cell.direction)
        except ArithmeticError:  # it may not fit, but its sizes must be some
            raise ValueError(f"config: got {config}; allowed sizes above 0") from None
