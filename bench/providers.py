"""The contenders of a cell. `Ours` is a backend's Plan; the peers are in bench.peers.

A `Provider` makes a `Contender` of a cell and its tensors, or says with reasons why it cannot.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Protocol

from bench.contenders import Contender, Tensors, contender_of
from bench.environment import NO_GPU
from bench.errors import InputError
from bench.matrix import Cell, Direction
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, Backend, Plan, Variant, make_plan, plan_variant
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem

PIN = "@"
"""Between a variant and the one whose config it is pinned to, in a contender's name."""

_TILES = ("tile_m", "tile_n")


class Provider(Protocol):
    """Makes contenders; `name`, unique in a run, names its rows."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def is_ours(self) -> bool:
        """One of BACKENDS: it must be right, and its failure is the run's."""

    @property
    def compiles_each_cell(self) -> bool:
        """It compiles for one batch and length, so compiling ahead must do every cell."""

    def why_not(self, cell: Cell, arch: Arch | None) -> tuple[Reason, ...]:
        """Every reason known before there is a tensor; `arch` None is a machine without a GPU."""

    def prepare(self, cell: Cell, tensors: Tensors, arch: Arch) -> Contender | tuple[Reason, ...]:
        """The contender, or the reasons. What its code raises passes through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """One backend; `variant` None is its best that can run the cell."""

    backend: str
    variant: str | None = None
    pinned_to: str | None = None
    """The variant whose own config `variant` runs in each cell, as `pin_plan` has it; forward only."""
    is_ours: bool = True

    @property
    def compiles_each_cell(self) -> bool:
        """True for cuTile: its rules differ by length, and its code by whether the batch is a multiple of 16."""
        return self.backend == "cutile"

    @property
    def name(self) -> str:
        """``cuda``, or ``cuda/basic``, or ``cuda/basic@full`` where it is pinned to the config of ``full``."""
        rung = self.backend if self.variant is None else f"{self.backend}/{self.variant}"
        return rung if self.pinned_to is None else f"{rung}{PIN}{self.pinned_to}"

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
        """The Plans to launch in a cell, or every reason why not; `variant` is one of the direction that counts."""
        backend = registry.get(self.backend)
        try:
            if cell.direction == "fwd":
                if self.pinned_to is None:
                    return Plans(timed=make_plan(backend, problem, arch, variant=self.variant))
                assert self.variant is not None
                top = make_plan(backend, problem, arch, variant=self.pinned_to)
                pinned = pin_plan(backend, registry.find_variant(backend, self.variant), top)
                return Plans(timed=pinned) if isinstance(pinned, Plan) else pinned
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


def pin_plan(backend: Backend, variant: Variant, top: Plan) -> Plan | tuple[Reason, ...]:
    """The Plan of `variant` with the config of `top`, or every reason why there is none.

    Fields for what the variant does not do (stages, where it has no pipeline) are those of its own rule, as few as
    will do; never the tiles.
    """
    pinned = plan_variant(backend, variant, top.problem, top.arch, top.config)
    own = plan_variant(backend, variant, top.problem, top.arch)
    told = f"the config of {top.variant}"
    if not isinstance(pinned, Plan) and isinstance(own, Plan) and top.config is not None and own.config is not None:
        mine = {
            field.name: getattr(own.config, field.name)
            for field in fields(own.config)
            if field.name not in _TILES and getattr(own.config, field.name) != getattr(top.config, field.name)
        }
        for names in (chosen for size in range(1, len(mine) + 1) for chosen in itertools.combinations(mine, size)):
            config = replace(top.config, **{name: mine[name] for name in names})
            plan = plan_variant(backend, variant, top.problem, top.arch, config)
            if isinstance(plan, Plan):
                return replace(plan, why=f"{told}, but for {', '.join(names)}, which this variant cannot have")
    return replace(pinned, why=told) if isinstance(pinned, Plan) else pinned


def our_providers(
    backends: tuple[str, ...] = BACKENDS, variant: str | None = None, direction: Direction = "fwd"
) -> tuple[Ours, ...]:
    """One provider per backend; `variant` is None for the best, ``all`` for every one offered, or a name.

    In a backward the best of each backend stands beside one that is deterministic where the best is not, or is not
    where the best is: so every run says what determinism costs. ValueError for a variant that none of the backends has.
    """
    ops = {name: registry.get(name).op("forward" if direction == "fwd" else "backward") for name in backends}
    if variant is None:
        others = [(name, _counterpart(op.offered)) for name, op in ops.items()]
        beside = (Ours(backend=name, variant=rung) for name, rung in others if rung is not None)
        return (*(Ours(backend=name) for name in backends), *beside)
    chosen = [
        (name, rung.name)
        for name, op in ops.items()
        for rung in op.variants
        if rung.name == variant or (variant == "all" and not rung.only_named)
    ]
    if not chosen:
        have = ", ".join(f"{name}/{rung.name}" for name, op in ops.items() for rung in op.offered)
        more = sum(rung.only_named for op in ops.values() for rung in op.variants)
        rungs = f", or one of {more} rungs (python -m bench ladder)" if more else ""
        raise InputError(f"--variant: got {variant!r}; allowed all, or of {direction} one of {have}{rungs}")
    return tuple(Ours(backend=name, variant=rung) for name, rung in chosen)


def _counterpart(variants: tuple[Variant, ...]) -> str | None:
    """The first variant that is deterministic where the first of all, the best, is not, or the other way round."""
    is_steady = variants[0].deterministic if variants else True
    return next((variant.name for variant in variants if variant.deterministic != is_steady), None)
