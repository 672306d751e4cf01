"""Who differentiates and how: the way of a call, from its tensors and from what is active when it is made.

A plain eager call (`is_plain`) goes straight to a launcher, with an `autograd.Function` around it where a tensor needs
grad. Everything else takes the ops of `multiattn.ops`, to the same launchers: under `torch.func`, for which an op's
gradient is out of reach, with a Function around them again.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from multiattn.launching import check_results, run_backward, run_forward
from multiattn.ops import backward_op, forward_op, refuse_double_backward, save_for_backward
from multiattn.planning import Ready, check_names, get_backward
from multiattn.problem import check_causal, check_inputs, check_scale

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_storage = torch._C._has_storage
_is_tracing = torch._C._is_tracing


def is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether this is an ordinary eager call: nobody traces, transforms, fakes or watches it.

    `torch.compiler.is_compiling` must have been asked before: these are not for Dynamo to trace.
    """
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not _dispatch_modes()
        and not _transforms_active()
        and forward_ad._current_level < 0
        and not _is_tracing()
    )


def needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether autograd will want a gradient of this call."""
    return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of a call that is not plain; `options` are those of `ops.forward_op`, up to `deterministic`."""
    _check_call(q, k, v, *options)
    is_function = not torch.compiler.is_compiling() and _needs_function()
    run: Any = TransformedAttention.apply if is_function else forward_op
    out, lse = run(q, k, v, *options, needs_grad(q, k, v))
    return out, lse


def _check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    backend: str,
    variant: str | None,
    deterministic: bool,
) -> None:
    """What an op would not tell, or not in our words: its schema converts ``causal=1`` and ``scale=True``."""
    check_causal(causal)
    check_names(backend, variant)
    if not torch.compiler.is_compiling():  # else the op's fake checks the inputs: Dynamo could not trace that here
        check_inputs(q, k, v, strides=not _transforms_active())
        if scale is not None and not _is_tracing() and not isinstance(scale, (torch.SymFloat, torch.SymInt)):
            check_scale(scale, q.shape[3])


def _is_ordinary(given: torch.Tensor | None) -> bool:
    """Whether a result or a gradient is what a launcher reads. One of `is_grads_batched` has no memory of its own."""
    return given is None or (type(given) in _PLAIN and _has_storage(given))


def _needs_function() -> bool:
    """Whether something differentiates that an op's own gradient is out of reach of."""
    return _transforms_active() or forward_ad._current_level >= 0


class Attention(torch.autograd.Function):
    """`fmha` of plain tensors that need grad: (q, k, v) -> (out, lse), both differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ready: Ready,
        causal: bool,
        scale: float | None,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch, and keep what the backward reads."""
        out, lse = run_forward(ready, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = (causal, scale, ready.plan.backend, None, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Launch the backward of the forward's backend; hooks on saved tensors may have changed their layout."""
        if dout is None and dlse is None:
            return (None,) * 7
        q, k, v, out, lse = ctx.saved_tensors
        return (*differentiate(q, k, v, out, lse, dout, dlse, *ctx.options), None, None, None, None)


class AttentionBackward(torch.autograd.Function):
    """The backward where somebody may want to differentiate it (`create_graph`): the error comes when they do."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Launch."""
        return _launch(*arguments)

    backward = staticmethod(refuse_double_backward)


def _refuse_forward_mode(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
    raise NotImplementedError(
        "multiattn.fmha has no forward-mode derivative (jvp): only its backward has kernels; multiattn.reference is "
        "plain PyTorch and has one"
    )


class TransformedAttention(torch.autograd.Function):
    """`fmha` under `torch.func` and forward-mode AD: `ops.forward_op`, and a gradient that these can reach."""

    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the op; `options` are its."""
        out, lse = forward_op(q, k, v, *options)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep what the backward reads, as the op does."""
        save_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the backward op."""
        q, k, v, out, lse = ctx.saved_tensors
        run: Any = TransformedBackward.apply
        return (*run(q, k, v, out, lse, dout, dlse, *ctx.options), *(None,) * 6)


class TransformedBackward(torch.autograd.Function):
    """The gradient of `TransformedAttention`, which has none of its own."""

    generate_vmap_rule = True
    backward = staticmethod(refuse_double_backward)
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the op."""
        dq, dk, dv = backward_op(*arguments)
        return dq, dk, dv

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing to keep: there is no gradient."""


def differentiate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    backend: str,
    variant: str | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, by whichever way the tensors and the moment ask for; `dout` None is zero."""
    options = (causal, scale, backend, variant, deterministic)
    rest = (out, lse, dout, dlse)
    is_compiling = torch.compiler.is_compiling()
    run: Any = _launch
    if is_compiling or not (is_plain(q, k, v) and all(map(_is_ordinary, rest))):
        _check_call(q, k, v, *options)
        dout = torch.zeros_like(out) if dout is None else dout
        if not is_compiling:
            check_results(q, out, lse, dout, dlse)
        rest = (out, lse, dout, dlse)
        run = TransformedBackward.apply if not is_compiling and _needs_function() else backward_op
    elif torch.is_grad_enabled() and any(given is not None and given.requires_grad for given in (q, k, v, *rest)):
        run = AttentionBackward.apply
    dq, dk, dv = run(q, k, v, *rest, *options)
    return dq, dk, dv


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return run_backward(get_backward(q, k, v, *options), q, k, v, out, lse, dout, dlse)
