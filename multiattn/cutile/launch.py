"""From a Plan to a launch: which kernel, its grid and its arguments, on the GPU or in the interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cuda.tile as ct
import torch

from multiattn.backend import Launcher, Plan
from multiattn.cutile import interpreter
from multiattn.cutile.configs import (
    HEADROOM,
    PIPELINES,
    CutileConfig,
    begins_at_diagonal,
    is_linear,
    own_grid,
    together_of,
    widths_of,
)
from multiattn.cutile.forward import forward, forward_64bit
from multiattn.cutile.offsets import needs_64bit
from multiattn.cutile.steps import STEPS
from multiattn.problem import LOG2_E, Problem
from multiattn.schedule import most_multiprocessors

COMPILE_SECONDS = 120.0
"""Longest compilation: a tile too large for the registers can take tileiras minutes, a good one takes it seconds."""


def prepare(plan: Plan) -> Launcher:
    """The launcher of a plan: compiled for the current device (`gpu_launch.prepare`), or interpreted."""
    if plan.arch.is_gpu:
        from multiattn.cutile import gpu_launch  # which compiles what is here

        return gpu_launch.prepare(plan)
    kernel = get_kernel(plan)
    grid = get_grid(plan)
    constants = get_constants(plan).values()

    def interpret(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        interpreter.launch(grid, kernel, (q, k, v, out, lse, *constants))

    return interpret


def prepare_through_cutile(plan: Plan) -> Launcher:
    """A launcher by `ct.launch`, whose first launch compiles: cuTile specialises on the tensors themselves."""
    kernel = get_kernel(plan)
    grid = get_grid(plan)
    constants = get_constants(plan).values()
    run = run_on_gpu()
    strides = _canonical_strides(plan.problem)

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        run(grid, kernel, (*map(_with_strides, (q, k, v, out, lse), strides), *constants))

    return launch


def _canonical_strides(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Of q, k, v, out and lse; cuTile reads those of one-element dimensions too, which PyTorch leaves arbitrary."""
    in_order = problem.strides_q, problem.strides_k, problem.strides_v, problem.strides_out
    return *((*strides, 1) for strides in in_order), (problem.heads_q * problem.seq_q, problem.seq_q, 1)


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def get_config(plan: Plan) -> CutileConfig:
    """The plan's config, which `plan_variant` always sets for this backend."""
    assert isinstance(plan.config, CutileConfig)
    return plan.config


def get_kernel(plan: Plan) -> Any:
    """The kernel with the config's hints; plans that share hints share the kernel, and so what it has compiled."""
    config = get_config(plan)
    return _hinted(needs_64bit(plan.problem), config.occupancy, config.num_worker_warps)


@functools.cache
def _hinted(is_64bit: bool, occupancy: int | None, num_worker_warps: int | None) -> Any:
    kernel = forward_64bit if is_64bit else forward
    return kernel.replace_hints(occupancy=occupancy, num_worker_warps=num_worker_warps)


def get_grid(plan: Plan) -> tuple[int, int, int]:
    """As `grid_of`; a static grid is made for the current device."""
    problem, config = plan.problem, get_config(plan)
    grid = own_grid(problem, config, count_multiprocessors(plan))
    if grid is None:
        raise ValueError(f"no grid for {plan}")
    return grid


def count_multiprocessors(plan: Plan) -> int:
    """Of the current device; where there is none for the plan, as `most_multiprocessors`."""
    if not (plan.arch.is_gpu and torch.cuda.is_initialized()):
        return most_multiprocessors(plan.arch)
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def get_constants(plan: Plan) -> dict[str, float | int | bool]:
    """The arguments of `forward` after the tensors, by name, in its order."""
    problem, config, step = plan.problem, get_config(plan), STEPS[plan.variant].step
    together = together_of(problem, config)
    tile_d, tail_d = widths_of(problem, config)
    return {
        "scale": problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E,
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
        "tma": 0 not in (*problem.strides_q, *problem.strides_k, *problem.strides_v),  # it wants positive strides
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


def compile_limit() -> AbstractContextManager[None]:
    """Bounds compilation to `COMPILE_SECONDS`, unless the environment has its own limit."""
    if "CUDA_TILE_COMPILER_TIMEOUT_SEC" in os.environ:
        return nullcontext()
    limit: AbstractContextManager[None] = ct.compiler_timeout(COMPILE_SECONDS)
    return limit


def run_on_gpu() -> Callable[[tuple[int, int, int], Any, tuple[Any, ...]], None]:
    """`ct.launch` on the current stream, which compiles the first time: within the limit of compilation.

    What cuTile specialises on is fixed by the plan, so no later launch compiles.
    """
    is_compiled = False

    def run(grid: tuple[int, int, int], kernel: Any, args: tuple[Any, ...]) -> None:
        nonlocal is_compiled
        stream = torch.cuda.current_stream()
        if is_compiled:
            ct.launch(stream, grid, kernel, args)
            return
        with compile_limit():
            ct.launch(stream, grid, kernel, args)
        is_compiled = True

    return run
