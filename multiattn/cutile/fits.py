"""The configs that may be asked for: every reason why one cannot be compiled or launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from multiattn.cutile.configs import PIPELINES, ROW_TILE, SCHEDULERS, CutileConfig, OnePassConfig, TwoPassConfig
from multiattn.cutile.grid import GRID_ALLOWED, count_key_tiles, count_query_tiles, factor_grid
from multiattn.cutile.kernels.constants import SMALLEST_TILE
from multiattn.cutile.steps import CutileStep
from multiattn.plan.arch import Arch
from multiattn.plan.columns import NARROWEST, two_widths
from multiattn.plan.config import Config
from multiattn.plan.support import Reason
from multiattn.problem import Problem

_TCGEN05 = ("sm100", "sm103")
"""Arches whose products take nothing from registers."""

_Check = tuple[bool, str, str]
"""True if it holds; what came; what is allowed."""


def why_not_forward(
    problem: Problem, arch: Arch, config: Config, *, step: CutileStep | None = None
) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`; with a step also what it does not do."""
    if not isinstance(config, CutileConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="CutileConfig"),)
    checks: list[_Check] = [
        *_fields(config, "", "k_latency", "v_latency"),
        (config.pipeline in PIPELINES, f"pipeline={config.pipeline}", ", ".join(PIPELINES)),
        (config.lazy_max or config.pipeline == "plain", f"pipeline={config.pipeline} without lazy_max", "plain"),
        (config.scheduler in SCHEDULERS, f"scheduler={config.scheduler}", ", ".join(SCHEDULERS)),
        (
            not config.split_head_dim or two_widths(problem.head_dim) is not None,
            f"split_head_dim=True at head_dim={problem.head_dim}",
            f"more than {NARROWEST}",
        ),
        (not (config.q_in_registers and arch.name in _TCGEN05), f"q_in_registers=True on {arch.name}", "False"),
        _grid(f"tile_m={config.tile_m}", count_query_tiles(problem, config.tile_m), problem),
    ]
    return (*_refusals(checks), *(_beyond(step, config) if step is not None else ()))


def _beyond(step: CutileStep, config: CutileConfig) -> list[Reason]:
    """A reason for every field of a config that asks for what a step does not do: what is planned is what runs."""
    limited = step.limit(config)
    return [
        Reason(code="config", got=f"{name}={asked}", allowed=f"{name}={done} in this variant")
        for name in (field.name for field in fields(config))
        if (asked := getattr(config, name)) != (done := getattr(limited, name))
    ]


def why_not_one_pass(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem` in one pass."""
    if not isinstance(config, OnePassConfig) or isinstance(config, TwoPassConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="OnePassConfig"),)
    return _refusals([*_fields(config), *_grids(problem, config)])


def why_not_two_pass(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem` in two passes."""
    if not isinstance(config, TwoPassConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="TwoPassConfig"),)
    queries = _grid(f"dq_tile_m={config.dq_tile_m}", count_query_tiles(problem, config.dq_tile_m), problem)
    return _refusals([*_fields(config), *_fields(config, "dq_"), *_grids(problem, config), queries])


def _refusals(checks: Sequence[_Check]) -> tuple[Reason, ...]:
    return tuple(Reason(code="config", got=got, allowed=allowed) for holds, got, allowed in checks if not holds)


def _fields(config: Config, prefix: str = "", *latencies: str) -> list[_Check]:
    """Checks of one kernel's fields."""

    def told(name: str, holds: Callable[[Any], bool], allowed: str) -> _Check:
        value = getattr(config, prefix + name)
        return holds(value), f"{prefix}{name}={value}", allowed

    return [
        *(told(name, _is_tile, f"powers of two from {SMALLEST_TILE}") for name in ("tile_m", "tile_n")),
        told("occupancy", lambda it: it is None or 1 <= it <= 32, "1 to 32"),
        told("num_worker_warps", lambda it: it in (None, 4, 8), "None, 4 or 8 (others need tileiras 13.5)"),
        *(told(name, lambda it: it is None or 1 <= it <= 10, "1 to 10") for name in latencies or ("latency",)),
        told("heads_together", lambda it: it >= 1, "1 or more"),
    ]


def _grids(problem: Problem, config: OnePassConfig) -> list[_Check]:
    return [
        _grid(f"tile_n={config.tile_n}", count_key_tiles(problem, config.tile_n), problem),
        _grid(f"rows in tiles of {ROW_TILE}", count_query_tiles(problem, ROW_TILE), problem),
    ]


def _grid(what: str, blocks: int, problem: Problem) -> _Check:
    return factor_grid(blocks) is not None, f"{what} for {problem}", GRID_ALLOWED


def _is_tile(extent: int) -> bool:
    return extent >= SMALLEST_TILE and extent & (extent - 1) == 0
