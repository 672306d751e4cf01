"""The forward in plain Triton: one kernel for every rung of the ladder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.schedule import one_width
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton.family import TritonFamily, TritonLaunch
from multiattn.triton.ladder import STEPS
from multiattn.triton.plain import (
    TritonConfig,
    can_describe,
    checks_by_queries,
    constants_of,
    is_far,
    is_ragged_list,
    options_of,
    table_of,
    tiles,
    why_not_read,
    within_blocks,
)
from multiattn.triton.table import KernelTable


def why_not_fit(problem: Problem, arch: Arch, config: TritonConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`."""
    checks = checks_by_queries(problem, arch, within_blocks(config, problem))
    return (*limits.failed(checks), *why_not_read(problem, arch, config))


def _is_far(plan: Plan) -> bool:
    assert isinstance(plan.config, TritonConfig)
    return is_far(plan.problem, within_blocks(plan.config, plan.problem), is_backward=False)


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    problem, step = launch.problem, STEPS[launch.plan.variant].step
    config = within_blocks(launch.config, problem)
    own = {"scale_sign": problem.scale_sign, "step": replace(step, descriptor=config.descriptors)}
    constants = constants_of(launch, config, ragged=is_ragged_list(problem), **own)
    return (table_of("attention_forward", launch, constants, options_of(config)),)


_SHAPES = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8))
"""(tile_m, tile_n, warps) that are worth a try, whatever the head_dim."""


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[TritonConfig]:
    """In turn with one, two and three blocks of keys in flight."""
    shapes: list[tuple[tuple[int, int, int], int | None]] = [(shape, None) for shape in _SHAPES]
    if one_width(problem.head_dim) <= 128:
        shapes.append(((128, 64, 4), None))
    if one_width(problem.head_dim) <= 64:
        shapes.append(((64, 64, 4), 128))  # 128 registers: four blocks of four warps share an SM
    together, described = 8 if problem.is_banded else 1, can_describe(problem, arch)
    step = STEPS[variant.name].step
    for (shape, registers), stages in itertools.product(shapes, (1, 2, 3)):
        config = tiles(*shape, stages, registers=registers, heads_together=together, descriptors=described)
        yield step.limit(config)


FAMILY = TritonFamily(
    config=TritonConfig,
    kernels={"attention_forward": "forward"},
    tables=_tables,
    tiles=lambda config: (config.tile_m, 0),
    candidates=_candidates,
    flag=_is_far,
    is_emitted=True,
)
