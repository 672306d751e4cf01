"""The way of a call through autograd, from its tensors and from what is active when it is made.

A plain eager call goes straight to a launcher, with an `autograd.Function` around it where a tensor needs grad. Every
other call takes the ops of `multiattn.run.ops`, to the same launchers: under `torch.func`, which an op's gradient
cannot reach, with a Function around them again.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.compiler import is_compiling

from multiattn.operands import Operands, Options
from multiattn.run import compat
from multiattn.run.calls import Ready, get_backward, get_forward
from multiattn.run.execute import run_backward, run_conforming, run_forward, run_forward_into, run_forward_with_max
from multiattn.run.ops import call_backward_op, call_forward_op, call_kvcache_op, refuse_double_backward, with_dout
from multiattn.score.transforms import requires_grad
from multiattn.sequences import rows_of_sequences
from multiattn.validate import check_inputs, check_scale
from multiattn.validate.results import check_results

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _is_unwatched() -> bool:
    """True for an ordinary eager call, if its tensors are of `_PLAIN` types: nobody traces, transforms or watches it.

    `is_compiling` must have been asked before: these are not for Dynamo to trace.
    """
    return not (
        compat.dispatch_modes()
        or compat.transforms_active()
        or compat.in_forward_mode()
        or compat.is_tracing()
        or compat.profiler_active()  # shows ops by name
    )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v in the dtype of an active `torch.autocast` of their device, as scaled_dot_product_attention has them.

    Tensors of fp64, and those of another device, stay as they are. Ask `compat.autocast_active` before.
    """
    if not isinstance(tensors[0], torch.Tensor):
        return tensors
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(it.to(dtype) if _is_autocast(it, kind) else it for it in tensors)


def _is_autocast(tensor: object, kind: str) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != kind:
        return False
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def needs_grad(operands: Operands) -> bool:
    """True if autograd will want a gradient of this call, or a transform around it does."""
    if not torch.is_grad_enabled():
        return False
    if operands.requires_grad:
        return True
    return not is_compiling() and compat.transforms_active() and any(map(requires_grad, operands.inputs))


def attend(operands: Operands, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse, by whichever way the tensors and the moment ask for."""
    compiling, inputs = is_compiling(), operands.inputs
    if compiling or not (_PLAIN.issuperset(map(type, inputs)) and _is_unwatched()):
        _check_call(operands, options)
        if not compiling and is_transformed():
            out, lse = TransformedAttention.apply((options, needs_grad(operands)), *inputs)  # type: ignore[no-untyped-call]
        else:
            out, lse = call_forward_op(operands, options, needs_grad(operands))
    elif torch.is_grad_enabled() and operands.requires_grad:
        out, lse = _attend_with_grad((get_forward(operands, options, True), operands), *inputs)
    else:
        out, lse = run_forward(get_forward(operands, options), operands)
    return out, lse


def attend_with_max(operands: Operands, options: Options) -> tuple[torch.Tensor, ...]:
    """As `attend`, with the largest score of each row, which has no gradient."""
    compiling, inputs, options = is_compiling(), operands.inputs, options._replace(row_max=True)
    if compiling or not (_PLAIN.issuperset(map(type, inputs)) and _is_unwatched()):
        _check_call(operands, options)
        wants_grad = needs_grad(operands)
        if not compiling and is_transformed():
            return TransformedAttention.apply((options, wants_grad), *inputs)  # type: ignore[no-any-return, no-untyped-call]
        return call_forward_op(operands, options, wants_grad)
    if torch.is_grad_enabled() and operands.requires_grad:
        results: tuple[torch.Tensor, ...] = _attend_with_max((get_forward(operands, options, True), operands), *inputs)
        return results
    return run_forward_with_max(get_forward(operands, options), operands)


def attend_cached(operands: Operands, options: Options, out: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Results of a call with a cache; `out` is where the caller wants those of attention, which are then its own.

    NotImplementedError where autograd would want a gradient.
    """
    refuse_gradient(operands)
    compiling, inputs = is_compiling(), operands.inputs
    if compiling or not (_PLAIN.issuperset(map(type, inputs)) and _is_unwatched()):
        if not compiling and is_transformed():
            fresh, *sums = TransformedCache.apply(options, *inputs)  # type: ignore[no-untyped-call]
        else:
            fresh, *sums = call_kvcache_op(operands, options)
        if out is None:
            return fresh, *sums
        if (starts := operands.indices.cu_seqlens_q) is not None:  # the other rows are left as they are
            fresh = torch.where(rows_of_sequences(starts, out.shape[2])[:, None], fresh, out)
        return out.copy_(fresh), *sums
    ready = get_forward(operands, options)
    if options.row_max:
        return run_forward_with_max(ready, operands, out)
    if out is None:
        return run_forward(ready, operands)
    return out, run_forward_into(ready, operands, out)


def refuse_gradient(operands: Operands) -> None:
    """NotImplementedError where autograd would want a gradient of a call with a cache."""
    if needs_grad(operands):
        _refuse_cache_gradient(None)


def differentiate(operands: Operands, options: Options) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs, by whichever way the tensors and the moment ask for; `dout` None is zero.

    A gradient of `is_grads_batched` has no memory of its own, so no launcher reads it.
    """
    compiling = is_compiling()
    read = operands.read
    given = [tensor for tensor in read if tensor is not None]
    is_plain = not compiling and _is_unwatched() and _PLAIN.issuperset(map(type, given))
    if is_plain and all(map(compat.has_storage, given)):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            gradients: tuple[torch.Tensor | None, ...] = AttentionBackward.apply(options, *read)  # type: ignore[no-untyped-call]
            return gradients
        return run_backward(get_backward(operands, options), operands)
    if is_plain and (operands.captured or options.indices):
        raise NotImplementedError(
            "is_grads_batched: got several gradients of a call with captured tensors (alibi_slopes, bias, those of "
            "score_mod, a block mask or a packed batch); allowed one at a time, or torch.vmap over torch.func.vjp"
        )
    _check_call(operands, options)
    operands = with_dout(operands)
    if not compiling:
        check_results(operands.q, operands.v, *operands.results)
    if not compiling and is_transformed():
        return TransformedBackward.apply(options, *operands.read)  # type: ignore[no-any-return, no-untyped-call]
    return call_backward_op(operands, options)


def _check_call(operands: Operands, options: Options) -> None:
    """Refuse in our words what an op would refuse late or in other words; the op's fake checks what is compiled."""
    if is_compiling():  # Dynamo could not trace these checks
        return
    check_inputs(*operands.qkv, operands.sinks, strides=not compat.transforms_active())
    if type(options.scale) is float and not compat.is_tracing():
        check_scale(options.scale, operands.q.shape[3])


def is_transformed() -> bool:
    """True if something transforms this call that cannot reach an op's own gradient. Not for Dynamo to trace."""
    return compat.transforms_active() or compat.in_forward_mode()


@compat.direct_backward
class PlainAttention(torch.autograd.Function):
    """`fmha` of plain tensors that need grad: the inputs give (out, lse), both differentiable."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Ready, Operands], *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch, and keep what the backward reads."""
        ready, operands = call
        out, lse = run_forward(ready, operands)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.set_materialize_grads(False)
        ctx.ready = ready.gradient
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Launch the backward that the forward made ready; if hooks changed saved tensors, another that fits them.

        Autograd runs this in a thread that it has just woken, where nothing is in a cache: a line costs a host more
        than a microsecond. So what `Ready.fits` tells is not asked again.
        """
        ready: Ready = ctx.ready
        read = (*ctx.saved_tensors, dout, dlse)
        if dout is not None and not is_compiling() and not torch.is_grad_enabled() and ready.fits(read):
            return (None, *run_conforming(ready, read))
        operands = Operands.of_read(read, ready.options.inputs)
        if dout is None and dlse is None:
            return (None, *(None for _ in operands.inputs))
        return (None, *differentiate(operands, ready.options))


@compat.direct_backward
class AttentionWithMax(torch.autograd.Function):
    """As `PlainAttention`, of a call that asks for the largest score of each row: a third result without gradient."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Ready, Operands], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Launch, and keep what the backward reads."""
        ready, operands = call
        out, lse, row_max = run_forward_with_max(ready, operands)
        ctx.mark_non_differentiable(row_max)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.set_materialize_grads(False)
        ctx.ready = ready.gradient
        return out, lse, row_max

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: None) -> tuple[Any, ...]:
        """Launch the backward."""
        return PlainAttention.backward(ctx, dout, dlse)


_attend_with_grad, _attend_with_max = compat.applier(PlainAttention), compat.applier(AttentionWithMax)


class AttentionBackward(torch.autograd.Function):
    """The backward where somebody may want to differentiate it (`create_graph`): the error comes when they do."""

    @staticmethod
    def forward(ctx: Any, options: Options, *read: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Launch."""
        operands = Operands.of_read(read, options.inputs)
        return run_backward(get_backward(operands, options), operands)

    backward = staticmethod(refuse_double_backward)


def _refuse_forward_mode(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
    raise NotImplementedError(
        "multiattn.fmha has no forward-mode derivative (jvp): only its backward has kernels; multiattn.reference is "
        "plain PyTorch and has one"
    )


def _refuse_cache_gradient(ctx: Any, *given: torch.Tensor | None) -> NoReturn:
    raise NotImplementedError(
        "multiattn.fmha_kvcache has no gradient: call it under torch.no_grad(); multiattn.fmha_varlen has one"
    )


class TransformedAttention(torch.autograd.Function):
    """`fmha` under `torch.func` and forward-mode AD: `ops.forward_op`, and a gradient that these can reach."""

    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(asked: tuple[Any, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the op; `asked` is the Options, and whether a gradient is wanted."""
        options, wants_grad = asked
        return call_forward_op(Operands.of_inputs(inputs, options.inputs), options, wants_grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep what the backward reads, as the op does."""
        (options, _), *tensors = inputs
        out, lse, *largest = output
        ctx.mark_non_differentiable(*largest)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = options.of_gradient

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward op."""
        return (None, *TransformedBackward.apply(ctx.options, *ctx.saved_tensors, dout, dlse))  # type: ignore[no-untyped-call]


class TransformedBackward(torch.autograd.Function):
    """The gradient of `TransformedAttention`, which has none of its own."""

    generate_vmap_rule = True
    backward = staticmethod(refuse_double_backward)
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(options: Options, *read: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the op."""
        return call_backward_op(Operands.of_read(read, options.inputs), options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing to keep: there is no gradient."""


class TransformedCache(torch.autograd.Function):
    """`fmha_kvcache` under `torch.func` and forward-mode AD, which has no derivative of either kind."""

    generate_vmap_rule = True
    backward = staticmethod(_refuse_cache_gradient)
    jvp = staticmethod(_refuse_cache_gradient)

    @staticmethod
    def forward(options: Options, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the op."""
        return call_kvcache_op(Operands.of_inputs(inputs, options.inputs), options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Nothing to keep: there is no gradient."""
