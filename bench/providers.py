"""Our backends as contenders: a backend's Plan for a cell, of its best variant, a named one, or a pinned rung."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

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

Plans = tuple[Plan, Plan | None]
"""The Plan that a row is of, and where that is a backward the Plan of the forward before it."""


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
        """Every reason known before there is a tensor; `arch` None is a machine without a GPU."""
        if arch is None:
            return (NO_GPU,)
        try:
            self.plans(cell, cell.problem, arch)
        except Unsupported as error:
            return error.reasons
        return ()

    def prepare(self, cell: Cell, tensors: Tensors, arch: Arch) -> Contender:
        """The contender, with the Plan of these very tensors, as `multiattn.fmha` would make it."""
        plan, forward = self.plans(cell, Problem.of(*tensors, causal=cell.causal), arch)
        return contender_of(plan, tensors, cell, forward)

    def plans(self, cell: Cell, problem: Problem, arch: Arch) -> Plans:
        """The Plans to launch in a cell; Unsupported with every reason. `variant` is of the direction that counts."""
        backend = registry.get(self.backend)
        if cell.direction != "fwd":
            forward = make_plan(backend, problem, arch)
            return make_plan(backend, problem, arch, direction="backward", variant=self.variant), forward
        if self.pinned_to is None or self.variant is None:
            return make_plan(backend, problem, arch, variant=self.variant), None
        top = make_plan(backend, problem, arch, variant=self.pinned_to)
        pinned = pin_plan(backend, registry.find_variant(backend, self.variant), top)
        if not isinstance(pinned, Plan):
            raise Unsupported(backend=self.backend, arch=arch, problem=problem, reasons=pinned)
        return pinned, None


def pin_plan(backend: Backend, variant: Variant, top: Plan) -> Plan | tuple[Reason, ...]:
    """The Plan of `variant` with the config of `top`, or every reason why there is none.

    Fields for what the variant does not do (stages, where it has no pipeline) are those of its own rule, as few as
    will do; never the tiles.
    """
    pinned = plan_variant(backend, variant, top.problem, top.arch, top.config)
    told = f"the config of {top.variant}"
    if isinstance(pinned, Plan):
        return replace(pinned, why=told)
    own = plan_variant(backend, variant, top.problem, top.arch)
    if isinstance(own, Plan) and top.config is not None and own.config is not None:
        values = ((field.name, getattr(own.config, field.name)) for field in fields(own.config))
        mine = [(name, it) for name, it in values if name not in _TILES and it != getattr(top.config, name)]
        for chosen in (its for size in range(1, len(mine) + 1) for its in itertools.combinations(mine, size)):
            plan = plan_variant(backend, variant, top.problem, top.arch, replace(top.config, **dict(chosen)))
            if isinstance(plan, Plan):
                names = ", ".join(name for name, _ in chosen)
                return replace(plan, why=f"{told}, but for {names}, which this variant cannot have")
    return pinned


def our_providers(
    backends: tuple[str, ...] = BACKENDS, variant: str | None = None, direction: Direction = "fwd"
) -> tuple[Ours, ...]:
    """One provider per backend; `variant` is None for the best, ``all`` for every one offered, or a name.

    In a backward the best of each backend stands beside one that is deterministic where the best is not, or is not
    where the best is: so every run says what determinism costs. InputError for a variant that no backend has.
    """
    ops = {name: registry.get(name).op("forward" if direction == "fwd" else "backward") for name in backends}
    found = [
        Ours(backend=name, variant=rung.name)
        for name, op in ops.items()
        for rung in op.variants
        if rung.name == variant or (variant == "all" and not rung.only_named)
    ]
    if variant is None:
        others = {name: [it for it in op.offered if it.deterministic != op.offered[0].deterministic] for name, op in
                  ops.items() if op.offered}  # fmt: skip
        found = [Ours(backend=name) for name in backends]
        found += [Ours(backend=name, variant=its[0].name) for name, its in others.items() if its]
    if not found:
        have = ", ".join(f"{name}/{rung.name}" for name, op in ops.items() for rung in op.offered)
        more = sum(rung.only_named for op in ops.values() for rung in op.variants)
        rungs = f", or one of {more} rungs (python -m bench ladder)" if more else ""
        raise InputError(f"--variant: got {variant!r}; allowed all, or of {direction} one of {have}{rungs}")
    return tuple(found)
