"""``torch.ops.multiattn.fmha_forward`` and ``fmha_backward``: attention as PyTorch's tracers and transforms see it.

`torch.compile`, `torch.export`, `torch.func` and dispatch modes take these; plain eager calls go around them, to the
same launchers (`run.autograd`). Each op has a fake (its results' exact sizes and strides), a gradient, a rule for
`torch.vmap` and a FLOP count. They plan when they run, on real tensors: a graph compiled for dynamic shapes asks for
the tiles of each length that it meets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from multiattn.mask import Band
from multiattn.problem import INPUTS, READ, Operands, Options, check_inputs, strides_like
from multiattn.run.calls import get_backward, get_forward
from multiattn.run.execute import check_results, run_backward, run_forward
from multiattn.run.flops import register_when_counted
from multiattn.score.serial import dumps, loads

# A gradient may come in any layout, but q, k and v keep theirs: Inductor must not choose another for an op's inputs.
# Before torch 2.8 there is no such tag, and keeping their order of strides is the default.
_KEEP_STRIDES: dict[str, Any] = (
    {"tags": (torch.Tag.needs_exact_strides,)} if hasattr(torch.Tag, "needs_exact_strides") else {}
)

_Pair = tuple[torch.Tensor, torch.Tensor]
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op(
    "multiattn::fmha_forward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, Tensor[]? captured=None, SymInt? left=None, "
        'SymInt? right=None, float? scale=None, str? score=None, float[]? scalars=None, str backend="auto", '
        "str? variant=None, bool deterministic=False, bool needs_grad=False) -> (Tensor out, Tensor lse)"
    ),
    **_KEEP_STRIDES,
)
def forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    captured: Sequence[torch.Tensor] | None = None,
    left: int | None = None,
    right: int | None = None,
    scale: float | None = None,
    score: str | None = None,
    scalars: Sequence[float] | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool = False,
    needs_grad: bool = False,
) -> _Pair:
    """Out and lse of `multiattn.fmha`. With `needs_grad` a problem whose backward cannot run is refused here."""
    operands = Operands(q, k, v, sinks=sinks, captured=tuple(captured or ()))
    options = _options(operands, left, right, scale, score, scalars, backend, variant, deterministic)
    return run_forward(get_forward(operands, options, needs_grad), operands.inputs)


@torch.library.custom_op(
    "multiattn::fmha_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse=None, "
        "Tensor? sinks=None, Tensor[]? captured=None, SymInt? left=None, SymInt? right=None, float? scale=None, "
        'str? score=None, float[]? scalars=None, str backend="auto", str? variant=None, bool deterministic=False) '
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
    ),
    **_KEEP_STRIDES,
)
def backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    captured: Sequence[torch.Tensor] | None = None,
    left: int | None = None,
    right: int | None = None,
    scale: float | None = None,
    score: str | None = None,
    scalars: Sequence[float] | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool = False,
) -> _Gradients:
    """Gradients of `multiattn.fmha_backward`; dsinks without sinks has no element, as an op's result cannot be None."""
    operands = Operands(q, k, v, out, lse, dout, dlse, sinks=sinks, captured=tuple(captured or ()))
    options = _options(operands, left, right, scale, score, scalars, backend, variant, deterministic)
    dq, dk, dv, *rest = run_backward(get_backward(operands, options), operands)
    assert dq is not None
    assert dk is not None
    assert dv is not None
    dsinks = rest[0] if sinks is not None else None
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _options(
    operands: Operands,
    left: int | None,
    right: int | None,
    scale: float | None,
    score: str | None,
    scalars: Sequence[float] | None,
    *options: Any,
) -> Options:
    """The Options of an op's arguments."""
    program = None if score is None else loads(score)
    return Options(left, right, scale, operands.sinks is not None, program, tuple(scalars or ()), (), *options)


def _arguments(operands: Operands, options: Options) -> tuple[Any, ...]:
    """What an op takes behind the tensors of every call."""
    score = None if options.score is None else dumps(options.score)
    numbers = (options.left, options.right, options.scale, score, options.scalars or None)
    how = (options.backend, options.variant, options.deterministic)
    return (operands.sinks, operands.captured or None, *numbers, *how)


def call_forward_op(operands: Operands, options: Options, wants_grad: bool) -> _Pair:
    """`forward_op` of the inputs among `operands`."""
    out, lse = forward_op(*operands.qkv, *_arguments(operands, options), wants_grad)
    return out, lse


def call_backward_op(operands: Operands, options: Options) -> tuple[torch.Tensor | None, ...]:
    """`backward_op` of operands: the gradients of their inputs."""
    *gradients, dsinks = backward_op(*operands[:READ], *_arguments(operands, options))
    return (*gradients, *(() if operands.sinks is None else (dsinks,)), *(None for _ in operands.captured))


# ---------------------------------------------------------------- fakes


@forward_op.register_fake
def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, *rest: object
) -> _Pair:
    check_inputs(q, k, v, sinks)
    return q.new_empty_strided(q.shape, strides_like(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward_op.register_fake
def _fake_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *rest: object,
) -> _Gradients:
    check_inputs(q, k, v, sinks)
    check_results(Operands(q, k, v, out, lse, dout, dlse))
    dq, dk, dv = (tensor.new_empty_strided(tensor.shape, strides_like(tensor)) for tensor in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


# ---------------------------------------------------------------- gradients


def with_dout(operands: Operands) -> Operands:
    """The operands of a backward op, which takes no None for a dout of zeros."""
    return operands if operands.dout is not None else operands._replace(dout=operands.q.new_zeros(operands.q.shape))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    """Keep what the gradient of `forward_op` needs, from its arguments and its results."""
    q, k, v, sinks, captured, *options, _ = inputs
    operands = Operands(q, k, v, sinks=sinks, captured=tuple(captured or ()))
    ctx.save_for_backward(*operands.inputs, *output)
    ctx.set_materialize_grads(False)
    ctx.options = _options(operands, *options).of_gradient
    ctx.rest = tuple([None] * len(it) if isinstance(it, (list, tuple)) else None for it in options)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    operands = Operands.of_read((*ctx.saved_tensors, dout, dlse), ctx.options.has_sinks)
    gradients: tuple[torch.Tensor | None, ...] = (None,) * len(operands.inputs)
    if dout is not None or dlse is not None:
        gradients = call_backward_op(with_dout(operands), ctx.options)
    of_captured = [None for _ in operands.captured] or None
    dsinks = gradients[INPUTS] if operands.sinks is not None else None
    return (*gradients[:INPUTS], dsinks, of_captured, *ctx.rest, None)


def refuse_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    """NotImplementedError for the gradient of a gradient, with what has one."""
    raise NotImplementedError(
        "multiattn.fmha can be differentiated once: its backward kernels have no gradient of their own; "
        "multiattn.reference is plain PyTorch and can be differentiated any number of times"
    )


forward_op.register_autograd(_differentiate, setup_context=_save_for_backward)
backward_op.register_autograd(refuse_double_backward)


# ---------------------------------------------------------------- vmap


def _fold(size: int, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """``[B, ...]`` for each of `size` entries of a mapped dimension, as one ``[size * B, ...]``; None is not mapped."""
    entries = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    folded = entries.flatten(0, 1)
    return folded if folded.ndim < 4 or folded.stride(-1) == 1 else folded.contiguous()


def _unfold(size: int, like: torch.Tensor, dim: int | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Undo `_fold` on results; the batch of each entry is that of the argument `like`, mapped by `dim`."""
    batch = like.shape[0] if dim is None else like.movedim(dim, 0).shape[1]  # of 0 entries no result has it any more
    return tuple(tensor.view(size, batch, *tensor.shape[1:]) for tensor in tensors)


def _map(op: Any, batched: int, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """The rule for `torch.vmap` of an op whose first `batched` arguments are tensors ``[B, ...]``.

    Entries become batch entries of one call. Sinks are the same for all batch entries of a call, and a score may depend
    on which one it is: where entries differ in these, or want a gradient of their own, each is a call by itself.
    """
    size, tensors, rest = info.batch_size, arguments[:batched], arguments[batched:]
    given = dict(zip(("sinks", "captured", "left", "right", "scale", "score"), rest, strict=False))
    of_sinks = in_dims[batched] if len(in_dims) > batched else None
    has_sinks = given.get("sinks") is not None and (of_sinks is not None or op is backward_op)
    if has_sinks or given.get("score") is not None:
        each = [op(*(_entry(at, *pair) for pair in zip(arguments, in_dims, strict=True))) for at in range(size)]
        results: Any = [torch.stack(of_entries) for of_entries in zip(*each, strict=True)]
    else:
        folded = (None if it is None else _fold(size, it, dim) for it, dim in zip(tensors, in_dims, strict=False))
        results = op(*folded, *rest)
        batched_results = [it for it in results if it.ndim > 1]
        results = [*_unfold(size, arguments[0], in_dims[0], *batched_results), *(it for it in results if it.ndim == 1)]
    return results


def _entry(at: int, argument: Any, dim: Any) -> Any:
    """One entry of a mapped argument, or of a list of them."""
    if isinstance(argument, (list, tuple)) and dim is not None:
        return [_entry(at, *pair) for pair in zip(argument, dim, strict=True)]
    return argument if dim is None else argument.select(dim, at)


@forward_op.register_vmap
def _map_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[_Pair, tuple[int, int]]:
    out, lse = _map(forward_op, INPUTS, info, in_dims, arguments)
    return (out, lse), (0, 0)


@backward_op.register_vmap
def _map_backward(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[_Gradients, tuple[int | None, ...]]:
    dq, dk, dv, of_sinks = _map(backward_op, READ, info, in_dims, arguments)
    return (dq, dk, dv, of_sinks), (0, 0, 0, 0 if of_sinks.ndim > 1 else None)


# ---------------------------------------------------------------- FLOP


def _forward_flops(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    sinks: tuple[int, ...] | None = None,
    captured: Sequence[tuple[int, ...]] | None = None,
    left: int | None = None,
    right: int | None = None,
    *options: object,
    **kwargs: object,
) -> int:
    """Two products of ``2 * D`` FLOP for each pair of a query and a key that it sees."""
    batch, heads, seq_q, head_dim = q
    return 4 * batch * heads * head_dim * Band(left, right).count_pairs(seq_q, k[2])


def _backward_flops(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    out: tuple[int, ...],
    lse: tuple[int, ...],
    dout: tuple[int, ...],
    dlse: tuple[int, ...] | None = None,
    sinks: tuple[int, ...] | None = None,
    captured: Sequence[tuple[int, ...]] | None = None,
    left: int | None = None,
    right: int | None = None,
    *options: object,
    **kwargs: object,
) -> int:
    """Five products where forward has two; a variant that recomputes some gets no credit for it."""
    return _forward_flops(q, k, v, sinks, captured, left, right) * 5 // 2


register_when_counted(torch.ops.multiattn.fmha_forward, _forward_flops)
register_when_counted(torch.ops.multiattn.fmha_backward, _backward_flops)
