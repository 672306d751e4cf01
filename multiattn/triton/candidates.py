"""Configs that a tuning sweep times: tiles worth a try, in every combination that fits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config, select
from multiattn.plan.schedule import NARROWEST, SCHEDULERS, one_width
from multiattn.problem import Problem
from multiattn.triton import gluon_backward_configs
from multiattn.triton.configs import TritonConfig, TritonTwoPassConfig, tiles
from multiattn.triton.decode_configs import VARIANT as SPLIT_KEYS
from multiattn.triton.decode_configs import TritonSplitConfig, split_tiles
from multiattn.triton.gluon_backward_configs import GluonBackwardConfig
from multiattn.triton.gluon_configs import STAGES_MAX, VARIANT, GluonConfig, why_not_fit
from multiattn.triton.gluon_two_pass_configs import GluonTwoPassConfig
from multiattn.triton.kernels.constants import FEW_ROWS
from multiattn.triton.ladder import STEPS

_Shapes = tuple[tuple[int, int, int], ...]
_FORWARD_SHAPES: _Shapes = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8))
"""(tile_m, tile_n, num_warps) of a forward, whatever the head_dim."""
_SHAPES: Mapping[int, _Shapes] = {
    64: ((64, 128, 8), (128, 128, 8), (64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 64, 8)),
    128: ((64, 128, 8), (64, 64, 4), (32, 128, 8), (64, 64, 8), (128, 64, 8), (32, 64, 4)),
    256: ((64, 64, 8), (32, 64, 8), (32, 128, 8), (64, 128, 8), (16, 64, 4), (16, 128, 8)),
}
"""The same of a backward's pass over the queries, by the largest padded head_dim to try them at."""
_DQ_SHAPES: Mapping[int, _Shapes] = {
    64: ((128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4)),
    128: ((64, 64, 4), (128, 64, 8), (128, 128, 8), (64, 32, 4)),
    256: ((64, 64, 8), (128, 64, 8), (64, 32, 4), (128, 32, 8)),
}
"""The same of the pass over the keys."""
_GLUON_TILES: Mapping[int, _Shapes] = {
    64: ((192, 128, 2), (192, 64, 2), (192, 64, 3), (128, 128, 2)),
    96: ((192, 64, 2), (128, 128, 2), (128, 64, 2)),
    128: ((192, 64, 2), (128, 128, 2), (128, 64, 2)),
    192: ((128, 64, 2), (128, 64, 1), (128, 128, 1)),
    256: ((128, 64, 1), (128, 32, 2)),
}
"""(tile_m, tile_n, q_slots) by the widest head_dim of a class: one that has as many columns, and registers for as many
keys."""

_Numbers = tuple[int, int, int, int]
_FEW_ROWS: tuple[_Numbers, ...] = (
    (64, 4, 3, 2), (64, 4, 3, 1), (64, 4, 3, 3), (64, 4, 3, 4), (64, 4, 2, 4), (64, 4, 4, 2), (64, 4, 5, 1),
    (128, 4, 3, 1), (128, 4, 3, 2), (128, 4, 2, 2), (128, 8, 3, 1), (128, 8, 3, 2), (128, 8, 2, 2),
    (32, 4, 3, 2), (32, 4, 3, 4), (32, 4, 5, 2), (32, 4, 5, 4), (32, 2, 3, 4), (32, 2, 4, 4), (32, 2, 5, 2),
    (64, 2, 3, 2), (64, 2, 3, 4), (32, 1, 4, 4),
)  # fmt: skip
"""(tile_n, warps, stages, blocks_per_sm) where keys are divided, and all rows of a sequence are one tile."""
_MANY_ROWS: tuple[_Numbers, ...] = (
    (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3),
    (128, 32, 8, 2), (128, 128, 8, 2),
)  # fmt: skip
"""(tile_m, tile_n, warps, stages) for more rows, each with one and with two blocks on an SM."""


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
    """Configs worth timing for a problem on an arch; what cannot fit is left out."""
    if not arch.is_gpu:
        return ()
    if variant.config_type is GluonBackwardConfig:
        return _gluon_backward(problem, arch)
    if variant.config_type is GluonTwoPassConfig:
        return _two_pass(variant, problem, arch)
    if variant.name == VARIANT:
        return _gluon(problem, arch)
    if variant.name == SPLIT_KEYS:
        return tuple(config for config in _split(problem) if not variant.fits(problem, arch, config))
    found = _forward(variant, problem) if variant.name in STEPS else _backward(variant, problem)
    return tuple(config for config in dict.fromkeys(found) if not variant.fits(problem, arch, config))


def _together(problem: Problem) -> int:
    return 8 if problem.is_banded else 1


def _up_to(table: Mapping[int, _Shapes], problem: Problem) -> _Shapes:
    return next(shapes for limit, shapes in table.items() if one_width(problem.head_dim) <= limit)


def _forward(variant: Variant, problem: Problem) -> list[TritonConfig]:
    """In turn with one, two and three blocks of keys in flight."""
    shapes: list[tuple[tuple[int, int, int], int | None]] = [(shape, None) for shape in _FORWARD_SHAPES]
    if one_width(problem.head_dim) <= 128:
        shapes.append(((128, 64, 4), None))
    if one_width(problem.head_dim) <= 64:
        shapes.append(((64, 64, 4), 128))  # 128 registers: four blocks of four warps share an SM
    together, step = _together(problem), STEPS[variant.name].step
    return [
        step.limit(tiles(*shape, stages, registers=registers, heads_together=together))
        for (shape, registers), stages in itertools.product(shapes, (1, 2, 3))
    ]


def _backward(variant: Variant, problem: Problem) -> list[TritonConfig]:
    """With two passes each with a middling config of the other, as their times add up."""

    def ways(table: Mapping[int, _Shapes], *stages: int) -> list[TritonConfig]:
        tried = itertools.product(_up_to(table, problem), stages)
        return [tiles(*shape, number, heads_together=_together(problem)) for shape, number in tried]

    if dict(variant.flags)["one_pass"]:
        return ways(_SHAPES, 1, 2, 3)
    of_keys, of_dq = ways(_SHAPES, 2, 1), ways(_DQ_SHAPES, 2, 1, 3)
    both = [(keys, of_dq[0]) for keys in of_keys] + [(of_keys[0], dq) for dq in of_dq]
    return [TritonTwoPassConfig.of(keys, dq) for keys, dq in both]


def _split(problem: Problem) -> list[TritonSplitConfig]:
    """They leave the number of parts to the plan, as rules do."""
    if problem.rows > FEW_ROWS:
        return [split_tiles(*shape, blocks) for shape, blocks in itertools.product(_MANY_ROWS, (1, 2))]
    return [split_tiles(max(NARROWEST, one_width(problem.rows)), *rest) for rest in _FEW_ROWS]


# ---------------------------------------------------------------- Gluon


def _two_pass(variant: Variant, problem: Problem, arch: Arch) -> Sequence[GluonTwoPassConfig]:
    """The rule's, then with K and V elsewhere, and with a buffer more or less of each kind."""
    rule, _ = select(variant.rules, problem, arch)
    if rule is None:
        return ()
    first = rule.config
    found = [first, replace(first, kv_in_registers=not first.kv_in_registers)]
    for name, more in itertools.product(("q_stages", "dout_stages", "k_stages", "v_stages"), (1, -1)):
        found.append(replace(first, **{name: getattr(first, name) + more}))
    return tuple(it for it in dict.fromkeys(found) if not variant.fits(problem, arch, it))


def class_of(head_dim: int) -> int | None:
    """The widest head_dim of those that are tuned together with this one; None beyond all."""
    return next((widest for widest in _GLUON_TILES if head_dim <= widest), None)


def _gluon(problem: Problem, arch: Arch) -> Sequence[GluonConfig]:
    """Tiles with and without turns, then single changes of the first.

    They have as many stages as the widest head_dim of the class has room for: a rule is for all of it.
    """
    widest = class_of(problem.head_dim)
    if widest is None:
        return ()
    problem = replace(problem, head_dim=widest)
    found: list[GluonConfig | None] = []
    for (tile_m, tile_n, q_slots), pingpong in itertools.product(_GLUON_TILES[widest], (False, True)):
        config = GluonConfig(tile_m=tile_m, tile_n=tile_n, q_slots=q_slots, pingpong=pingpong, lazy_max=True)
        found.append(_deepest(config, problem, arch))
    if (first := found[0]) is not None:
        found += (replace(first, scheduler=scheduler) for scheduler in SCHEDULERS if scheduler != first.scheduler)
        found.append(replace(first, lazy_max=False))
    return tuple(dict.fromkeys(it for it in found if it is not None and not why_not_fit(problem, arch, it)))


def _gluon_backward(problem: Problem, arch: Arch) -> Sequence[GluonBackwardConfig]:
    """Buffers of dO, then of Q and K, each with what takes registers, and with walks from either end."""
    base = GluonBackwardConfig(tile_m=64, tile_n=128, half_dq=one_width(problem.head_dim) > 64)
    buffers = ((4, 3, 1), (4, 3, 2), (3, 3, 1), (3, 2, 1))
    ways: tuple[dict[str, bool], ...] = ({"early_scores": True, "k_in_registers": True}, {"early_scores": True}, {})
    found = [
        replace(base, q_stages=q, dout_stages=dout, k_stages=k, descends=descends, **way)
        for way, (q, dout, k), descends in itertools.product(ways, buffers, (False, True))
    ]
    return tuple(it for it in found if not gluon_backward_configs.why_not_fit(problem, arch, it))


def _deepest(config: GluonConfig, problem: Problem, arch: Arch) -> GluonConfig | None:
    """`config` with as many stages as fit; None where two are too many."""
    tried = (replace(config, stages=stages) for stages in range(STAGES_MAX, 1, -1))
    return next((it for it in tried if not why_not_fit(problem, arch, it)), None)
