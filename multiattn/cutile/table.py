"""The launches of every cuTile kernel: one table each, from which all else follows. Pure Python: no cuTile.

A `Step` has the arrays, numbers and constants of a kernel by the names of its parameters, in their order. Its signature
(`multiattn.cutile.compile`), the driver's launch and an emitted kernel's Binding (`.bind`), their proof (`.export`),
cuTile's own launch and the interpreter's (`.launch`) derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from multiattn.cutile.backward_configs import (
    ROW_OCCUPANCY,
    ROW_TILE,
    OnePassConfig,
    TwoPassConfig,
    count_key_tiles,
    count_query_tiles,
)
from multiattn.cutile.configs import (
    HEADROOM,
    PIPELINES,
    CutileConfig,
    begins_at_diagonal,
    divisor_near,
    factor_grid,
    is_linear,
    own_grid,
    together_of,
    widths_of,
)
from multiattn.cutile.steps import STEPS
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.plan.columns import one_width
from multiattn.plan.schedule import most_multiprocessors
from multiattn.problem import LOG2_E, Problem
from multiattn.run.arguments import layouts

ATOMIC = "atomic"
AREAS = ("delta", "dq_sum")
"""Arrays that are workspace."""
_FORWARD = ("q", "k", "v", "out", "lse")

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch."""

    kernel: str
    """Its function's name, and its symbol."""
    is_64bit: bool
    """Whether shapes, strides and offsets take 64 bits."""
    occupancy: int | None
    num_worker_warps: int | None
    grid: Grid
    arrays: Mapping[str, str]
    """Parameter to operand or area of workspace."""
    scalars: Mapping[str, float]
    constants: Mapping[str, float | int | bool]

    @property
    def numbers(self) -> tuple[float | int | bool, ...]:
        """Every argument behind the arrays."""
        return *self.scalars.values(), *self.constants.values()


def steps_of(plan: Plan, *, has_dlse: bool = False, multiprocessors: int | None = None) -> tuple[Step, ...]:
    """The launches of a plan, in order; ValueError where there is no grid of so many blocks.

    Args:
        plan: of either direction.
        has_dlse: whether a backward has a dlse.
        multiprocessors: of the device; None for the largest product of the arch.
    """
    if plan.direction == "forward":
        return (_forward(plan, multiprocessors or most_multiprocessors(plan.arch)),)
    return _one_pass(plan, has_dlse) if plan.variant == ATOMIC else _two_passes(plan, has_dlse)


def area_names(plan: Plan) -> tuple[str, ...]:
    """The areas of workspace that a launch takes."""
    found = {name for step in steps_of(plan) for name in step.arrays.values()}
    return tuple(name for name in AREAS if name in found)


def exceeds_32bit(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the last element, or a step along some dimension, is 2^31 or more elements away from the first.

    A step counts where nobody takes it, too: the stride of a dimension of one element is an argument like any other.
    """
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return max(last, *strides) > abi.INT32_MAX


def needs_64bit(problem: Problem, *, backward: bool = False) -> bool:
    """Whether some tensor of a forward, or of a backward, `exceeds_32bit`."""
    known = layouts(problem)
    names = known if backward else _FORWARD
    return any(exceeds_32bit(known[name].shape, known[name].strides) for name in names)


def get_config(plan: Plan) -> CutileConfig:
    """The plan's config, which `plan_variant` always sets for this backend."""
    assert isinstance(plan.config, CutileConfig)
    return plan.config


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# ---------------------------------------------------------------- forward


def _forward(plan: Plan, multiprocessors: int) -> Step:
    problem, config = plan.problem, get_config(plan)
    grid = own_grid(problem, config, multiprocessors)
    if grid is None:
        raise ValueError(f"no grid for {plan}")
    step = STEPS[plan.variant].step
    return Step(
        kernel="forward",
        is_64bit=needs_64bit(problem),
        occupancy=config.occupancy,
        num_worker_warps=config.num_worker_warps,
        grid=grid,
        arrays=_same(*_FORWARD),
        scalars={"scale": problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E},
        constants=get_constants(plan),
    )


def get_constants(plan: Plan) -> dict[str, float | int | bool]:
    """The constants of `forward`, by name, in its order."""
    problem, config, step = plan.problem, get_config(plan), STEPS[plan.variant].step
    together = together_of(problem, config)
    tile_d, tail_d = widths_of(problem, config)
    return {
        "tile_m": config.tile_m,
        "tile_n": config.tile_n,
        "tile_d": tile_d,
        "tail_d": tail_d,
        "causal": problem.causal,
        "masked": problem.causal or problem.seq_kv % config.tile_n != 0,
        "heads_together": together.heads,
        "spanning": together.spanning,
        "grouped": problem.heads_q != problem.heads_kv,
        "linear_grid": is_linear(problem, config, together),
        "sign": problem.scale_sign,
        "k_latency": config.k_latency or 0,
        "v_latency": config.v_latency or 0,
        "tma": has_positive_strides(problem),
        "exp2": step.exp2,
        "flush_to_zero": step.flush_to_zero,
        "scale_after_max": step.scale_after_max,
        "k_transposed": step.k_transposed,
        "approximate_division": step.approximate_division,
        "ln_base": step.ln_base,
        "lazy_max": config.lazy_max,
        "headroom": HEADROOM[problem.dtype],
        "diagonal_first": begins_at_diagonal(problem, config),
        "pipeline": PIPELINES.index(config.pipeline),
        "static_grid": config.scheduler == "static",
        "exp2_fma_sixteenths": config.exp2_fma_sixteenths,
        "q_in_registers": config.q_in_registers,
    }


def has_positive_strides(problem: Problem) -> bool:
    """Whether TMA can read q, k and v: it wants positive strides."""
    return 0 not in (*problem.strides_q, *problem.strides_k, *problem.strides_v)


# ---------------------------------------------------------------- backward


def _two_passes(plan: Plan, has_dlse: bool) -> tuple[Step, ...]:
    problem, config = plan.problem, plan.config
    assert isinstance(config, TwoPassConfig)
    together = divisor_near(config.dq_heads_together, problem.heads_q)
    query_grads = Step(
        kernel="query_grads",
        is_64bit=needs_64bit(problem, backward=True),
        occupancy=config.dq_occupancy,
        num_worker_warps=config.dq_num_worker_warps,
        grid=_grid(count_query_tiles(problem, config.dq_tile_m)),
        arrays={**_same("q", "k", "v", "out", "lse", "dout"), **_dlse(has_dlse), **_same("delta", "dq")},
        scalars=_factors(problem),
        constants={
            **_constants(problem, (config.dq_tile_m, config.dq_tile_n), together, config.dq_latency),
            "has_dlse": has_dlse,
        },
    )
    return query_grads, _key_step(plan, "key_grads", ("q", "k", "v", "lse", "dout", "delta", "dk", "dv"))


def _one_pass(plan: Plan, has_dlse: bool) -> tuple[Step, ...]:
    problem = plan.problem
    is_64bit = needs_64bit(problem, backward=True)
    grid = _grid(count_query_tiles(problem, ROW_TILE))
    tiles: dict[str, int | bool] = {"tile_m": ROW_TILE, "tile_d": one_width(problem.head_dim)}
    row_deltas = Step(
        kernel="row_deltas",
        is_64bit=is_64bit,
        occupancy=ROW_OCCUPANCY,
        num_worker_warps=None,
        grid=grid,
        arrays={**_same("out", "dout"), **_dlse(has_dlse), **_same("delta", "dq_sum")},
        scalars={},
        constants={**tiles, "has_dlse": has_dlse},
    )
    round_query_grads = Step(
        kernel="round_query_grads",
        is_64bit=is_64bit,
        occupancy=None,
        num_worker_warps=None,
        grid=grid,
        arrays=_same("dq_sum", "dq"),
        scalars={"grad_factor": problem.grad_factor},
        constants=tiles,
    )
    arrays = ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dk", "dv")
    return row_deltas, _key_step(plan, "all_grads", arrays), round_query_grads


def _key_step(plan: Plan, kernel: str, arrays: tuple[str, ...]) -> Step:
    """The launch in which a block owns a tile of keys."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, OnePassConfig)
    together = divisor_near(config.heads_together, problem.heads_kv)
    return Step(
        kernel=kernel,
        is_64bit=needs_64bit(problem, backward=True),
        occupancy=config.occupancy,
        num_worker_warps=config.num_worker_warps,
        grid=_grid(count_key_tiles(problem, config.tile_n)),
        arrays=_same(*arrays),
        scalars=_factors(problem),
        constants=_constants(problem, (config.tile_m, config.tile_n), together, config.latency),
    )


def _dlse(has_dlse: bool) -> dict[str, str]:
    """A dlse, or any array like it, which is not read."""
    return {"dlse": "dlse" if has_dlse else "lse"}


def _factors(problem: Problem) -> dict[str, float]:
    return {"score_factor": problem.score_factor, "grad_factor": problem.grad_factor}


def _constants(problem: Problem, tiles: tuple[int, int], together: int, latency: int) -> dict[str, int | bool]:
    """The fields of `backward.Shape`."""
    return {
        "tile_m": tiles[0],
        "tile_n": tiles[1],
        "tile_d": one_width(problem.head_dim),
        "causal": problem.causal,
        "ragged": problem.seq_kv % tiles[1] != 0,
        "heads_together": together,
        "latency": latency,
        "tma": has_positive_strides(problem),
        "tma_columns": problem.seq_q % 4 == 0,
    }


def _grid(blocks: int) -> Grid:
    grid = factor_grid(blocks)
    if grid is None:
        raise ValueError(f"no grid of {blocks} blocks")
    return *grid, 1
