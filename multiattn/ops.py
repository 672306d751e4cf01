"""``torch.ops.multiattn.fmha_forward`` and ``fmha_backward``: attention as PyTorch's tracers and transforms see it.

`torch.compile`, `torch.export`, `torch.func` and dispatch modes take these; plain eager calls go around them, to the
same launchers (`multiattn.autograd`). Each op has a fake (its results' exact sizes and strides), a gradient, a rule for
`torch.vmap` and a FLOP count. They plan when they run, on real tensors: a graph compiled for dynamic shapes asks for
the tiles of each length that it meets.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from multiattn.flops import register_when_counted
from multiattn.launching import check_results, run_backward, run_forward
from multiattn.planning import get_backward, get_forward
from multiattn.problem import check_inputs, count_visible_pairs, strides_like

# A gradient may come in any layout, but q, k and v keep theirs: Inductor must not choose another for an op's inputs.
# Before torch 2.8 there is no such tag, and keeping their order of strides is the default.
_KEEP_STRIDES: dict[str, Any] = (
    {"tags": (torch.Tag.needs_exact_strides,)} if hasattr(torch.Tag, "needs_exact_strides") else {}
)

_Pair = tuple[torch.Tensor, torch.Tensor]
_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op(
    "multiattn::fmha_forward",
    mutates_args=(),
    schema=(
        '(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None, str backend="auto", str? variant=None, '
        "bool deterministic=False, bool needs_grad=False) -> (Tensor out, Tensor lse)"
    ),
    **_KEEP_STRIDES,
)
def forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool = False,
    needs_grad: bool = False,
) -> _Pair:
    """Out and lse of `multiattn.fmha`. With `needs_grad` a problem whose backward cannot run is refused here."""
    ready = get_forward(q, k, v, causal, scale, backend, variant, deterministic, needs_grad)
    return run_forward(ready, q, k, v)


@torch.library.custom_op(
    "multiattn::fmha_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse=None, bool causal=False, "
        'float? scale=None, str backend="auto", str? variant=None, bool deterministic=False, '
        "bool after_forward=False) -> (Tensor dq, Tensor dk, Tensor dv)"
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
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool = False,
    after_forward: bool = False,
) -> _Triple:
    """Gradients of `multiattn.fmha_backward`; with `after_forward`, ``"auto"`` is the backend that the forward took."""
    ready = get_backward(q, k, v, causal, scale, backend, variant, deterministic, after_forward)
    return run_backward(ready, q, k, v, out, lse, dout, dlse)


# ---------------------------------------------------------------- fakes


@forward_op.register_fake
def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> _Pair:
    check_inputs(q, k, v)
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
    *options: object,
) -> _Triple:
    check_inputs(q, k, v)
    check_results(q, out, lse, dout, dlse)
    dq, dk, dv = (tensor.new_empty_strided(tensor.shape, strides_like(tensor)) for tensor in (q, k, v))
    return dq, dk, dv


# ---------------------------------------------------------------- gradients


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    """What the gradient of `forward_op` needs, from the arguments of it and its results."""
    q, k, v, causal, scale, backend, _, deterministic, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)
    ctx.options = (causal, scale, backend, None, deterministic, True)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 9
    q, k, v, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    return (*backward_op(q, k, v, out, lse, dout, dlse, *ctx.options), *(None,) * 6)


def refuse_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    """The gradient of a gradient: an error that says who has one."""
    raise NotImplementedError(
        "multiattn.fmha can be differentiated once: its backward kernels have no gradient of their own; "
        "multiattn.reference is plain PyTorch and can be differentiated any number of times"
    )


forward_op.register_autograd(_differentiate, setup_context=save_for_backward)
backward_op.register_autograd(refuse_double_backward)


# ---------------------------------------------------------------- vmap


def _fold(size: int, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """``[B, ...]`` for each of `size` entries of a mapped dimension, as one ``[size * B, ...]``; None is not mapped."""
    entries = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    folded = entries.flatten(0, 1)
    return folded if folded.ndim < 4 or folded.stride(-1) == 1 else folded.contiguous()


def _unfold(size: int, like: torch.Tensor, dim: int | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `_fold` undone makes of results; the batch of each entry is that of the argument `like`, mapped by `dim`."""
    batch = like.shape[0] if dim is None else like.movedim(dim, 0).shape[1]  # of 0 entries no result has it any more
    return tuple(tensor.view(size, batch, *tensor.shape[1:]) for tensor in tensors)


@forward_op.register_vmap
def _map_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[_Pair, tuple[int, int]]:
    size = info.batch_size
    tensors = (_fold(size, *pair) for pair in zip(arguments[:3], in_dims, strict=False))
    out, lse = _unfold(size, arguments[0], in_dims[0], *forward_op(*tensors, *arguments[3:]))
    return (out, lse), (0, 0)


@backward_op.register_vmap
def _map_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[_Triple, tuple[int, int, int]]:
    size = info.batch_size
    pairs = zip(arguments[:7], in_dims, strict=False)  # q, k, v, out, lse, dout and, unless it is not given, dlse
    tensors = (None if tensor is None else _fold(size, tensor, dim) for tensor, dim in pairs)
    dq, dk, dv = _unfold(size, arguments[0], in_dims[0], *backward_op(*tensors, *arguments[7:]))
    return (dq, dk, dv), (0, 0, 0)


# ---------------------------------------------------------------- FLOP


def _forward_flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], causal: bool = False, *options: object, **kwargs: object
) -> int:
    """Two products of ``2 * D`` FLOP for each pair of a query and a key that it sees."""
    batch, heads, seq_q, head_dim = q
    return 4 * batch * heads * head_dim * count_visible_pairs(seq_q, k[2], causal=causal)


def _backward_flops(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    out: tuple[int, ...],
    lse: tuple[int, ...],
    dout: tuple[int, ...],
    dlse: tuple[int, ...] | None = None,
    causal: bool = False,
    *options: object,
    **kwargs: object,
) -> int:
    """Five products where forward has two; a variant that recomputes some has no more to its credit."""
    return _forward_flops(q, k, v, causal) * 5 // 2


register_when_counted(torch.ops.multiattn.fmha_forward, _forward_flops)
register_when_counted(torch.ops.multiattn.fmha_backward, _backward_flops)
