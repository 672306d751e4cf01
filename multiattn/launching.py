"""A launch with tensors at hand: into fresh results (`run_forward`, `run_backward`) or the caller's own (`launch`)."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

import torch

from multiattn.arch import detect
from multiattn.backend import Direction, Plan
from multiattn.planning import Ready, ReadyBackward, prepare, prepare_backward
from multiattn.problem import VECTOR_BYTES, Operands, Problem
from multiattn.run import compat
from multiattn.run.driver import ensure_context

_AS_IT_IS: AbstractContextManager[None] = contextlib.nullcontext()


def run_forward(ready: Ready, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse, fresh, on the current stream of the tensors' device."""
    if not _is_here(ready.device):
        with torch.cuda.device(ready.device):
            return _run_forward(ready, q, k, v)
    return _run_forward(ready, q, k, v)


def _run_forward(ready: Ready, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = compat.empty_strided(ready.out_shape, ready.out_strides, ready.dtype, ready.device)
    lse = compat.empty_strided(ready.lse_shape, ready.lse_strides, torch.float32, ready.device)
    ready.launch(Operands(q, k, v, out, lse))
    return out, lse


def run_backward(
    ready: ReadyBackward,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, fresh, as `run_forward`. `dout` None is zero.

    out, lse, dout and dlse are taken in any layout: one that is not the launch contract's is copied.
    """
    with _on(ready.device):
        out = _conform("out", out, q.shape, ready.dq_strides, q.dtype, q.device)
        lse = _conform("lse", lse, q.shape[:3], ready.lse_strides, torch.float32, q.device)
        if dout is None:
            dout = q.new_empty_strided(q.shape, ready.dq_strides).zero_()
        else:
            dout = _conform("dout", dout, q.shape, ready.dq_strides, q.dtype, q.device)
        if dlse is not None:
            dlse = _conform("dlse", dlse, q.shape[:3], ready.lse_strides, torch.float32, q.device)
            if ready.plan.problem.has_empty_rows:  # whatever came of their -inf, often a NaN, nothing depends on them
                dlse = dlse.masked_fill(lse == -math.inf, 0.0)
        dq = compat.empty_strided(tuple(q.shape), ready.dq_strides, q.dtype, q.device)
        dk = compat.empty_strided(tuple(k.shape), ready.dk_strides, k.dtype, k.device)
        dv = compat.empty_strided(tuple(v.shape), ready.dv_strides, v.dtype, v.device)
        ready.launch(Operands(q, k, v, out, lse, dout, dlse, dq, dk, dv))
    return dq, dk, dv


def launch(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch exactly `plan` on tensors that its Problem describes, into out and lse given by the caller.

    For tests, benchmarks and tuning: the plan may carry a config of their choice. out has the shape, dtype and device
    of q and the strides `plan.problem.strides_out`, lse is fp32 ``[B, Hq, Sq]`` and contiguous; both start at a
    multiple of 16 bytes. TypeError or ValueError for anything else, with what came and what is accepted.
    """
    problem = _check_plan(plan, "forward", q, k, v)
    _check_layout("out", out, q.shape, (*problem.strides_out, 1), q.dtype, q.device)
    _check_layout("lse", lse, q.shape[:3], _row_strides(problem), torch.float32, q.device)
    with _on(q.device):
        prepare(plan, q.device)(Operands(q, k, v, out, lse))


def launch_backward(
    plan: Plan,
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
    """Launch exactly the backward `plan`, as `launch` does a forward one; it writes dq, dk and dv.

    out and lse as `launch` writes them, dout like out, dlse None or like lse. dq, dk and dv have the shapes, dtype and
    device of q, k and v and the strides `plan.problem.strides_dq`, `strides_dk`, `strides_dv`; all of these start at a
    multiple of 16 bytes. TypeError or ValueError for anything else, with what came and what is accepted.
    """
    problem = _check_plan(plan, "backward", q, k, v)
    for name, tensor in (("out", out), ("dout", dout), ("dq", dq)):
        _check_layout(name, tensor, q.shape, (*problem.strides_dq, 1), q.dtype, q.device)
    _check_layout("dk", dk, k.shape, (*problem.strides_dk, 1), q.dtype, q.device)
    _check_layout("dv", dv, k.shape, (*problem.strides_dv, 1), q.dtype, q.device)
    for name, row in (("lse", lse), ("dlse", lse if dlse is None else dlse)):
        _check_layout(name, row, q.shape[:3], _row_strides(problem), torch.float32, q.device)
    with _on(q.device):
        prepare_backward(plan, q.device)(Operands(q, k, v, out, lse, dout, dlse, dq, dk, dv))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A context manager in which the tensors' device is the current one, as is its CUDA context."""
    return _AS_IT_IS if _is_here(device) else torch.cuda.device(device)


def _is_here(device: torch.device) -> bool:
    """Whether the tensors' device is the current one; if so, its CUDA context is the thread's from here on."""
    if (index := device.index) is None:  # a CPU
        return True
    if index != compat.current_device():
        return False
    ensure_context(index)
    return True


def _row_strides(problem: Problem) -> tuple[int, int, int]:
    """Strides of lse and dlse."""
    return problem.heads_q * problem.seq_q, problem.seq_q, 1


def _check_plan(plan: Plan, direction: Direction, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
    """The problem of the tensors, which must be that of the plan."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan; got {type(plan).__name__}")
    if plan.direction != direction:
        raise ValueError(f"plan.direction: got {plan.direction}; allowed {direction}")
    problem = Problem.of(q, k, v, causal=plan.problem.causal, scale=plan.problem.scale)
    if problem != plan.problem:
        raise ValueError(f"the tensors are not those of the plan: got {problem}; the plan is for {plan.problem}")
    if (arch := detect(q.device)) != plan.arch:
        raise ValueError(f"the plan is for {plan.arch.name}; got tensors on {q.device}, which is {arch.name}")
    return problem


def _check_layout(
    name: str,
    tensor: torch.Tensor,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    _check_alike(name, tensor, shape, dtype, device)
    if not _is_laid_out(tensor, strides):
        raise ValueError(
            f"{name}: got strides {tuple(tensor.stride())}, address {tensor.data_ptr():#x}; allowed strides {strides}, "
            f"address a multiple of {VECTOR_BYTES}, no negated view"
        )


def check_results(
    q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> None:
    """TypeError or ValueError for results of a forward of q, or gradients of them, that are none; in any layout."""
    for name, tensor in (("out", out), ("dout", dout)):
        _check_alike(name, tensor, q.shape, q.dtype, q.device)
    for name, row in (("lse", lse), ("dlse", lse if dlse is None else dlse)):
        _check_alike(name, row, q.shape[:3], torch.float32, q.device)


def _check_alike(name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """TypeError or ValueError for what is no tensor of this shape, dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense strided tensor; got {got}")
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name}: got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; allowed {tuple(shape)}, {dtype} on "
            f"{device}"
        )


def _is_laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a launch may read or write the tensor as it is; a dimension that nobody walks may have any stride."""
    if tensor.data_ptr() % VECTOR_BYTES or tensor.is_neg():
        return tensor.numel() == 0
    if tensor.stride() == strides:
        return True
    walked = (index for index, size in enumerate(tensor.shape) if size > 1)
    return tensor.numel() == 0 or all(tensor.stride(index) == strides[index] for index in walked)


def _conform(
    name: str,
    tensor: torch.Tensor,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The tensor as the launch contract wants it: itself, or a copy where it is laid out otherwise."""
    _check_alike(name, tensor, shape, dtype, device)
    return tensor if _is_laid_out(tensor, strides) else tensor.new_empty_strided(shape, strides).copy_(tensor)
