"""From a backward Plan to its launches: which kernels, their grids and arguments, on the GPU or in the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from multiattn.backend import BackwardLauncher, Plan
from multiattn.columns import one_width
from multiattn.cutile import backward, interpreter
from multiattn.cutile.backward_configs import (
    ROW_OCCUPANCY,
    ROW_TILE,
    OnePassConfig,
    TwoPassConfig,
    count_key_tiles,
    count_query_tiles,
)
from multiattn.cutile.configs import divisor_near, factor_grid
from multiattn.cutile.launch import run_on_gpu
from multiattn.cutile.offsets import exceeds_32bit
from multiattn.problem import Problem

Shape = tuple[int, ...]

ATOMIC = "atomic"
TWO_PASS = "two_pass"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch: a kernel, its grid, and its arguments: arrays by name, then numbers and constants."""

    kernel: Any
    symbol: str
    grid: tuple[int, int, int]
    arrays: tuple[str, ...]
    scalars: tuple[float, ...]
    constants: tuple[int | bool, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of one array that a step may ask for; strides in elements."""

    dtype: torch.dtype
    shape: Shape
    strides: Shape


def layouts(problem: Problem) -> Mapping[str, Layout]:
    """Every array that a step may ask for, by name; delta and dq_sum are workspace."""
    rows = problem.batch, problem.heads_q, problem.seq_q
    queries = (*rows, problem.head_dim)
    keys = problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim
    dtype = problem.torch_dtype
    row = Layout(dtype=torch.float32, shape=rows, strides=(problem.heads_q * problem.seq_q, problem.seq_q, 1))
    out = Layout(dtype=dtype, shape=queries, strides=(*problem.strides_out, 1))
    return {
        "q": Layout(dtype=dtype, shape=queries, strides=(*problem.strides_q, 1)),
        "k": Layout(dtype=dtype, shape=keys, strides=(*problem.strides_k, 1)),
        "v": Layout(dtype=dtype, shape=keys, strides=(*problem.strides_v, 1)),
        "out": out,
        "dout": out,
        "dq": out,
        "dk": Layout(dtype=dtype, shape=keys, strides=(*problem.strides_dk, 1)),
        "dv": Layout(dtype=dtype, shape=keys, strides=(*problem.strides_dv, 1)),
        "lse": row,
        "dlse": row,
        "delta": row,
        "dq_sum": Layout(
            dtype=torch.float32, shape=queries, strides=(*(stride * problem.head_dim for stride in row.strides), 1)
        ),
    }


def needs_64bit_backward(problem: Problem) -> bool:
    """Whether some array of a backward `exceeds_32bit`."""
    return any(exceeds_32bit(layout.shape, layout.strides) for layout in layouts(problem).values())


def get_steps(plan: Plan, *, has_dlse: bool) -> tuple[Step, ...]:
    """The launches of a plan, in order."""
    return _one_pass(plan, has_dlse) if plan.variant == ATOMIC else _two_passes(plan, has_dlse)


def _two_passes(plan: Plan, has_dlse: bool) -> tuple[Step, ...]:
    problem, config = plan.problem, plan.config
    assert isinstance(config, TwoPassConfig)
    is_64bit = needs_64bit_backward(problem)
    tiles = config.dq_tile_m, config.dq_tile_n
    together = divisor_near(config.dq_heads_together, problem.heads_q)
    query_grads = Step(
        kernel=_hinted(backward.query_grads, is_64bit, config.dq_occupancy, config.dq_num_worker_warps),
        symbol="query_grads",
        grid=_grid(count_query_tiles(problem, config.dq_tile_m)),
        arrays=("q", "k", "v", "out", "lse", "dout", "dlse" if has_dlse else "lse", "delta", "dq"),
        scalars=(problem.score_factor, problem.grad_factor),
        constants=(*_constants(problem, tiles, together, config.dq_latency), has_dlse),
    )
    return query_grads, _key_step(plan, backward.key_grads, ("q", "k", "v", "lse", "dout", "delta", "dk", "dv"))


def _one_pass(plan: Plan, has_dlse: bool) -> tuple[Step, ...]:
    problem = plan.problem
    is_64bit = needs_64bit_backward(problem)
    grid = _grid(count_query_tiles(problem, ROW_TILE))
    row_deltas = Step(
        kernel=_hinted(backward.row_deltas, is_64bit, ROW_OCCUPANCY, None),
        symbol="row_deltas",
        grid=grid,
        arrays=("out", "dout", "dlse" if has_dlse else "lse", "delta", "dq_sum"),
        scalars=(),
        constants=(ROW_TILE, one_width(problem.head_dim), has_dlse),
    )
    round_query_grads = Step(
        kernel=_hinted(backward.round_query_grads, is_64bit, None, None),
        symbol="round_query_grads",
        grid=grid,
        arrays=("dq_sum", "dq"),
        scalars=(problem.grad_factor,),
        constants=(ROW_TILE, one_width(problem.head_dim)),
    )
    arrays = ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dk", "dv")
    return row_deltas, _key_step(plan, backward.all_grads, arrays), round_query_grads


def _key_step(plan: Plan, function: Callable[..., None], arrays: tuple[str, ...]) -> Step:
    """The launch in which a block owns a tile of keys."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, OnePassConfig)
    together = divisor_near(config.heads_together, problem.heads_kv)
    return Step(
        kernel=_hinted(function, needs_64bit_backward(problem), config.occupancy, config.num_worker_warps),
        symbol=function.__name__,
        grid=_grid(count_key_tiles(problem, config.tile_n)),
        arrays=arrays,
        scalars=(problem.score_factor, problem.grad_factor),
        constants=_constants(problem, (config.tile_m, config.tile_n), together, config.latency),
    )


def _constants(problem: Problem, tiles: tuple[int, int], together: int, latency: int) -> tuple[int | bool, ...]:
    """The fields of `backward.Shape`, in its order."""
    return (
        *tiles,
        one_width(problem.head_dim),
        problem.causal,
        problem.seq_kv % tiles[1] != 0,
        together,
        latency,
        0 not in (*problem.strides_q, *problem.strides_k, *problem.strides_v),  # TMA wants positive strides
        problem.seq_q % 4 == 0,
    )


def _grid(blocks: int) -> tuple[int, int, int]:
    grid = factor_grid(blocks)
    if grid is None:
        raise ValueError(f"no grid of {blocks} blocks")
    return *grid, 1


@functools.cache
def _hinted(function: Callable[..., None], is_64bit: bool, occupancy: int | None, num_worker_warps: int | None) -> Any:
    """The kernel with its hints; plans that share hints share the kernel, and so what it has compiled."""
    kernel = backward.make_kernel(function, is_64bit)
    return kernel.replace_hints(occupancy=occupancy, num_worker_warps=num_worker_warps)


def prepare_backward(plan: Plan) -> BackwardLauncher:
    """The launcher of a backward plan; its first launch with dlse, and that without, compile."""
    arrays = layouts(plan.problem)
    run = run_on_gpu if plan.arch.is_gpu else _interpret
    launches = {
        has_dlse: [(step, (*step.scalars, *step.constants), run()) for step in get_steps(plan, has_dlse=has_dlse)]
        for has_dlse in (False, True)
    }
    workspace = ("delta", "dq_sum") if plan.variant == ATOMIC else ("delta",)

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
        if dlse is not None:
            given["dlse"] = dlse
        tensors = {name: _with_strides(tensor, arrays[name].strides) for name, tensor in given.items()}
        for name in workspace:
            tensors[name] = torch.empty(arrays[name].shape, dtype=torch.float32, device=q.device)
        for step, numbers, run_step in launches[dlse is not None]:
            run_step(step.grid, step.kernel, (*(tensors[name] for name in step.arrays), *numbers))

    return launch


def _with_strides(tensor: torch.Tensor, strides: Shape) -> torch.Tensor:
    """cuTile also reads the strides of one-element dimensions, which PyTorch leaves arbitrary."""
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def _interpret() -> Callable[[tuple[int, int, int], Any, tuple[Any, ...]], None]:
    return interpreter.launch
