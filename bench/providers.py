"""Contenders: what competes in a cell. `Ours` is a backend's Plan; the peers are in bench.peers.

A `Provider` makes a `Contender` of a cell and its tensors, or says with reasons why it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

import multiattn
from bench.environment import NO_GPU
from bench.errors import InputError
from bench.matrix import Cell
from bench.timing import Contestant
from multiattn import backend as registry
from multiattn.arch import Arch
from multiattn.backend import BACKENDS, Plan, make_plan
from multiattn.config import Config
from multiattn.problem import Problem
from multiattn.support import Reason, Unsupported

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, each ``[B, H, S, D]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Ready to be checked and timed in one cell."""

    launch: Contestant
    """For the device regime: nothing but the launch."""
    call: Contestant
    """For the call regime: what a user writes."""
    output: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
    """Runs `launch` once; its out ``[B, H, S, D]``, and its lse ``[B, H, S]`` where it writes one."""
    plan: Plan | None = None
    detail: str = ""


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
        plan = self._plan(cell.problem, arch)
        return () if isinstance(plan, Plan) else plan

    def prepare(self, cell: Cell, tensors: Tensors, arch: Arch) -> Contender | tuple[Reason, ...]:
        """See `Provider`. The Plan is that of these very tensors, as `multiattn.fmha` would make it."""
        plan = self._plan(Problem.of(*tensors, causal=cell.causal), arch)
        return contender_of(plan, tensors) if isinstance(plan, Plan) else plan

    def _plan(self, problem: Problem, arch: Arch) -> Plan | tuple[Reason, ...]:
        try:
            return make_plan(registry.get(self.backend), problem, arch, variant=self.variant)
        except Unsupported as error:
            return error.reasons


def contender_of(plan: Plan, tensors: Tensors) -> Contender:
    """A contender that launches exactly `plan`; out and lse are made once, and poisoned with NaN before a check."""
    q, k, v = tensors
    problem = plan.problem
    launcher = registry.get(plan.backend).forward.prepare(plan)
    out = torch.empty_strided(q.shape, (*problem.strides_out, 1), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)

    def launch() -> None:
        launcher(q, k, v, out, lse)

    def call() -> torch.Tensor:
        return multiattn.fmha(q, k, v, causal=problem.causal, backend=plan.backend, variant=plan.variant)

    def output() -> tuple[torch.Tensor, torch.Tensor]:
        out.fill_(math.nan)
        lse.fill_(math.nan)
        launch()
        return out, lse

    return Contender(launch=Contestant(call=launch), call=Contestant(call=call), output=output, plan=plan)


def plan_data(plan: Plan) -> dict[str, Any]:
    """What a row stores of a Plan; problem, arch and backend are in the row already."""
    return {"variant": plan.variant, "config": config_data(plan.config), "why": plan.why}


def config_data(config: Config | None) -> dict[str, Any] | None:
    """A config's fields by name."""
    return None if config is None else asdict(config)


def our_providers(backends: tuple[str, ...] = BACKENDS, variant: str | None = None) -> tuple[Ours, ...]:
    """One provider per backend; `variant` is None for the best, ``all`` for every one, or a name.

    ValueError for a variant that none of the backends has.
    """
    if variant is None:
        return tuple(Ours(backend=name) for name in backends)
    names = [(name, rung.name) for name in backends for rung in registry.get(name).forward.variants]
    chosen = [pair for pair in names if variant in ("all", pair[1])]
    if not chosen:
        have = ", ".join(f"{name}/{rung}" for name, rung in names)
        raise InputError(f"--variant: got {variant!r}; allowed all, or one of {have}")
    return tuple(Ours(backend=name, variant=rung) for name, rung in chosen)
