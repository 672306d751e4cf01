"""A launch with tensors at hand: into fresh results (`run_forward`, `run_backward`) or the caller's own (`launch`)."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from multiattn.operands import FORWARD_RESULTS, GRADIENTS, INPUTS, READ, Operands, ScoreSpec
from multiattn.plan.arch import detect
from multiattn.plan.backend import Direction, Plan
from multiattn.problem import Problem, options_of
from multiattn.run import compat
from multiattn.run.calls import Ready, prepare
from multiattn.run.driver import ensure_context
from multiattn.sequences import NO_INDICES, Indices
from multiattn.validate.results import check_laid_out, check_results, is_laid_out

_operands: Callable[[tuple[Any, ...]], Operands] = functools.partial(tuple.__new__, Operands)
"""Operands of a tuple of all of them, in half of the time that their own constructor takes."""
_RESULTS = slice(INPUTS, INPUTS + len(FORWARD_RESULTS))
_NO_OPTIONS = Operands(*(None,) * READ)[READ + len(GRADIENTS) :]  # type: ignore[arg-type]


def run_forward(ready: Ready, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse, fresh, on the current stream of the tensors' device."""
    if not _is_here(ready.device):
        with torch.cuda.device(ready.device):
            return run_forward(ready, operands)
    out, lse = ready.allocate()
    ready.launch(_writing(operands, out, lse))
    return out, lse


def run_forward_into(ready: Ready, operands: Operands, out: torch.Tensor) -> torch.Tensor:
    """Lse, fresh, as `run_forward`; out goes where the caller wants it, which `Problem.strides_out` describes."""
    if not _is_here(ready.device):
        with torch.cuda.device(ready.device):
            return run_forward_into(ready, operands, out)
    lse = compat.empty_strided(*ready.plan.problem.layouts["lse"], ready.device)
    ready.launch(_writing(operands, out, lse))
    return lse


def run_forward_with_max(
    ready: Ready, operands: Operands, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Out, lse and the largest score of each row; out goes where the caller wants it, if that is given."""
    if not _is_here(ready.device):
        with torch.cuda.device(ready.device):
            return run_forward_with_max(ready, operands, out)
    fresh, lse, row_max = ready.allocate()
    out = fresh if out is None else out
    ready.launch(_writing(operands, out, lse)._replace(row_max=row_max))
    return out, lse, row_max


def _writing(operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> Operands:
    """The operands of a forward that writes these, with sinks as kernels read them."""
    if operands.sinks is not None:
        return operands._replace(out=out, lse=lse, sinks=as_fp32(operands.sinks))
    return _operands((*operands[: _RESULTS.start], out, lse, *operands[_RESULTS.stop :]))


def run_backward(ready: Ready, operands: Operands) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs, fresh, as `run_forward`, None for one that nobody wants. `dout` None is zero.

    out, lse, dout and dlse are taken in any layout: one that is not the launch contract's is copied.
    """
    with on_device(ready.device):
        conforming = _conform(ready.plan, operands)
    read = conforming.read
    if conforming is operands and not torch.is_grad_enabled():  # as where autograd runs this, which asks `Ready.fits`
        ready.remember(read)
    return run_conforming(ready, read)


def run_conforming(ready: Ready, read: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """`run_backward` of tensors that are laid out as the launch contract says: those that `Ready.fits` passes."""
    if not _is_here(ready.device):
        with torch.cuda.device(ready.device):
            return run_conforming(ready, read)
    gradients = ready.allocate()
    if len(read) == READ:
        ready.launch(_operands((*read, *gradients, *_NO_OPTIONS)))
        return tuple(gradients)
    known = Operands.of_read(read, ready.options.inputs)
    dq, dk, dv, *delta = gradients
    of_sums = known.sinks, *(delta or (None,)), known.captured, ready.allocate_zeros()
    operands = _operands((*known[:READ], dq, dk, dv, *of_sums, known.indices, None))
    ready.launch(operands)
    of_sinks = () if known.sinks is None else (gradient_of_sinks(operands),)
    of_indices = (None,) * len(known.indices.given)
    return (dq, dk, dv, *of_sinks, *of_indices, *gradients_of_captured(ready.plan.problem.score, operands))


def gradient_of_sinks(operands: Operands) -> torch.Tensor:
    """dsinks ``[Hq]``, in the dtype of sinks: ``-sum(exp(sink - lse) * delta)`` over batch entries and queries.

    The sink has the weight ``exp(sink - lse)`` of a row, and no value: so what a score's gradient has of its value is
    zero. `delta` is ``rowsum(dout * out) - dlse``. Rows behind the last sequence of a packed batch do not count.
    """
    sinks, lse, delta, starts = operands.sinks, operands.lse, operands.delta, operands.indices.cu_seqlens_q
    assert sinks is not None
    assert lse is not None
    assert delta is not None
    weights = torch.exp(sinks.float()[:, None] - lse.masked_fill(lse == -math.inf, math.inf))  # [B, Hq, Sq]
    if starts is not None:
        delta = delta.masked_fill(torch.arange(delta.shape[2], device=delta.device) >= starts[-1], 0.0)
    return -(weights * delta).sum(dim=(0, 2)).to(sinks.dtype)


def gradients_of_captured(score: ScoreSpec | None, operands: Operands) -> tuple[torch.Tensor | None, ...]:
    """The gradients of captured tensors, in their dtypes, from the sums of a backward; None where none is wanted."""
    found: list[torch.Tensor | None] = [None for _ in operands.captured]
    if score is not None:
        for slot, total in zip(score.gradients, operands.dcaptured, strict=True):
            like = operands.captured[slot]
            whole = total if score.scores is None else score.program.sum_of(slot, total, like.shape)
            found[slot] = whole.to(like.dtype)
    return tuple(found)


def as_fp32(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks as a kernel reads them."""
    return None if sinks is None else sinks.to(torch.float32).contiguous()


def launch(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    captured: tuple[torch.Tensor, ...] = (),
    indices: Indices = NO_INDICES,
    row_max: torch.Tensor | None = None,
) -> None:
    """Launch exactly `plan` on tensors that its Problem describes, into out and lse given by the caller.

    For tests, benchmarks and tuning: the plan may carry a config of their choice. out has the shape, dtype and device
    of q and the strides `plan.problem.strides_out`, lse is fp32 ``[B, Hq, Sq]`` and contiguous, as is row_max, for a
    plan of a call with `return_max`; all start at a multiple of 16 bytes. TypeError or ValueError for anything else,
    with what came and what is accepted.
    """
    operands = Operands(q, k, v, out, lse, sinks=as_fp32(sinks), captured=captured, indices=indices, row_max=row_max)
    _launch(plan, "forward", operands, plan.problem.forward_results if isinstance(plan, Plan) else ())


def launch_backward(plan: Plan, *tensors: torch.Tensor | None, **named: Any) -> None:
    """Launch exactly the backward `plan`, as `launch` does a forward one; it writes dq, dk and dv.

    The tensors are q, k, v, out, lse, dout, dlse, dq, dk and dv, in this order or by name, then by name sinks, delta,
    captured, dcaptured and indices: those of `multiattn.operands.Operands`. out and lse are as `launch` writes them,
    dout is like out, dlse None or like lse. dq, dk and dv have the shapes, dtype and
    device of q, k and v and the strides `plan.problem.strides_dq`, `strides_dk`, `strides_dv`; all of these start at a
    multiple of 16 bytes. With sinks it also writes delta, laid out like lse: ``rowsum(dout * out) - dlse``, of which
    `multiattn.fmha_backward` makes their gradient. Where captured tensors want a gradient it adds to dcaptured, which
    are zero before, as `plan.problem.score.gradient_layouts` says. TypeError or ValueError for anything else, with what
    came and what is accepted.
    """
    operands = Operands(*tensors, **named)  # type: ignore[arg-type]  # q, k and v are there
    optional = [name for name in ("dlse", "delta") if getattr(operands, name) is not None]
    _launch(plan, "backward", operands, ("out", "dout", "dq", "dk", "dv", "lse", *optional))


def _launch(plan: Plan, direction: Direction, operands: Operands, checked: tuple[str, ...]) -> None:
    """Launch a plan on the tensors that it is for, those called `checked` laid out as the contract says."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan; got {type(plan).__name__}")
    if plan.direction != direction:
        raise ValueError(f"plan.direction: got {plan.direction}; allowed {direction}")
    problem = Problem.of_operands(operands, options_of(plan.problem)).as_read_by(plan.problem)
    if problem != plan.problem:
        raise ValueError(f"the tensors are not those of the plan: got {problem}; the plan is for {plan.problem}")
    device = operands.q.device
    if (arch := detect(device)) != plan.arch:
        raise ValueError(f"the plan is for {plan.arch.name}; got tensors on {device}, which is {arch.name}")
    for name in checked:
        check_laid_out(name, getattr(operands, name), problem.layouts[name], device)
    sums = {} if problem.score is None or direction == "forward" else problem.score.gradient_layouts
    if len(operands.dcaptured) != len(sums):
        raise ValueError(f"dcaptured: got {len(operands.dcaptured)} tensors; allowed {len(sums)}")
    for tensor, (name, layout) in zip(operands.dcaptured, sums.items(), strict=True):
        check_laid_out(name, tensor, layout, device)
    with on_device(device):
        prepare(plan, device)(operands)


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make the tensors' device the current one, and its CUDA context that of this thread."""
    if _is_here(device):
        yield
        return
    with torch.cuda.device(device):
        ensure_context(device.index)
        yield


def _is_here(device: torch.device) -> bool:
    """True if the tensors' device is the current one; its CUDA context is then current in this thread, too."""
    if (index := device.index) is None:  # a CPU
        return True
    if index != compat.current_device():
        return False
    ensure_context(index)
    return True


def _conform(plan: Plan, operands: Operands) -> Operands:
    """The operands of a backward as the launch contract wants them: a copy of each that is laid out otherwise."""
    layouts = plan.problem.layouts
    if operands.dout is None:
        operands = operands._replace(dout=compat.empty_strided(*layouts["dout"], operands.q.device).zero_())
    check_results(operands.q, operands.v, *operands.results)
    copies: dict[str, Any] = {
        name: tensor.new_empty_strided(*layouts[name][:2]).copy_(tensor)
        for name in ("out", "lse", "dout", "dlse")
        if (tensor := getattr(operands, name)) is not None and not is_laid_out(tensor, layouts[name].strides)
    }
    operands = operands._replace(**copies) if copies else operands
    if operands.lse is not None and operands.dlse is not None and plan.problem.has_empty_rows:
        # Whatever came of the -inf of an empty row, often a NaN, nothing depends on it.
        operands = operands._replace(dlse=operands.dlse.masked_fill(operands.lse == -math.inf, 0.0))
    return operands
