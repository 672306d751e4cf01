"""Who competes in a cell. `Ours` is a backend's Plan; the peers are in bench.peers.

A `Provider` makes a `Contender` of a cell and its tensors, or says with reasons why it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.contenders import Contender, Tensors, contender_of
from bench.environment import NO_GPU
from bench.errors import InputError
from bench.matrix import Cell, Direction
from multiattn import backend as registry
from multiattn.arch import Arch
from multiattn.backend import BACKENDS, Plan, Variant, make_plan
from multiattn.problem import Problem
from multiattn.support import Reason, Unsupported


class Provider(Protocol):
    """Makes contenders. `name` names its rows."""

    @property
    def name(self) -> str:
        """Unique among the providers of a run."""

    @property
    def is_ours(self) -> bool:
        """Whether it is one of BACKENDS: then it must be right, and its failure is the run's."""

    def why_not(self, cell: Cell, arch: Arch | None) -> tuple[Reason, ...]:
        """Every reason known before there is a tensor; `arch` None is a machine without a GPU."""

    def prepare(self, cell: Cell, tensors: Tensors, arch: Arch) -> Contender | tuple[Reason, ...]:
        """The contender, or the reasons. What its code raises passes through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """One backend; `variant` None is its best that can run the cell."""

    backend: str
    variant: str | None = None
    is_ours: bool = True

    @property
    def name(self) -> str:
        """``cuda``, or ``cuda/basic``."""
        return self.backend if self.variant is None else f"{self.backend}/{self.variant}"

    def why_not(self, cell: Cell, arch: Arch | None) -> tuple[Reason, ...]:
        """See `Provider`."""
        if arch is None:
            return (NO_GPU,)
        plans = self.plans(cell, cell.problem, arch)
        return () if isinstance(plans, Plans) else plans

    def prepare(self, cell: Cell, tensors: Tensors, arch: Arch) -> Contender | tuple[Reason, ...]:
        """See `Provider`. The Plan is that of these very tensors, as `multiattn.fmha` would make it."""
        plans = self.plans(cell, Problem.of(*tensors, causal=cell.causal), arch)
        if not isinstance(plans, Plans):
            return plans
        return contender_of(plans.timed, tensors, cell, plans.forward)

    def plans(self, cell: Cell, problem: Problem, arch: Arch) -> Plans | tuple[Reason, ...]:
        """What it would launch in a cell, or every reason why it cannot; `variant` is of the direction that counts."""
        backend = registry.get(self.backend)
        try:
            if cell.direction == "fwd":
                return Plans(timed=make_plan(backend, problem, arch, variant=self.variant))
            forward = make_plan(backend, problem, arch)
            backward = make_plan(backend, problem, arch, direction="backward", variant=self.variant)
        except Unsupported as error:
            return error.reasons
        return Plans(timed=backward, forward=forward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plans:
    """The Plan that a row is of, and where that is a backward the Plan of the forward before it."""

    timed: Plan
    forward: Plan | None = None


def our_providers(
    backends: tuple[str, ...] = BACKENDS, variant: str | None = None, direction: Direction = "fwd"
) -> tuple[Ours, ...]:
    """One provider per backend; `variant` is None for the best, ``all`` for every one, or a name, of that direction.

    In a backward the best of each backend stands beside one that is deterministic where the best is not, or is not
    where the best is: so every run says what determinism costs. ValueError for a variant that none of the backends has.
    """
    rungs = {name: _variants(name, direction) for name in backends}
    if variant is None:
        others = [(name, _counterpart(rungs[name])) for name in backends]
        beside = (Ours(backend=name, variant=rung) for name, rung in others if rung is not None)
        return (*(Ours(backend=name) for name in backends), *beside)
    names = [(name, rung.name) for name in backends for rung in rungs[name]]
    chosen = [pair for pair in names if variant in ("all", pair[1])]
    if not chosen:
        have = ", ".join(f"{name}/{rung}" for name, rung in names)
        raise InputError(f"--variant: got {variant!r}; allowed all, or of {direction} one of {have}")
    return tuple(Ours(backend=name, variant=rung) for name, rung in chosen)


def _variants(backend: str, direction: Direction) -> tuple[Variant, ...]:
    return registry.get(backend).op("forward" if direction == "fwd" else "backward").variants


def _counterpart(variants: tuple[Variant, ...]) -> str | None:
    """The first variant that is deterministic where the first of all, the best, is not, or the other way round."""
    is_steady = variants[0].deterministic if variants else True
    return next((variant.name for variant in variants if variant.deterministic != is_steady), None)
