"""``torch.ops.multiattn.fmha_forward`` and ``fmha_backward``: attention as PyTorch's tracers and transforms see it.

`torch.compile`, `torch.export`, `torch.func` and dispatch modes take these; plain eager calls go around them, to the
same launchers (`run.autograd`). Each op has a fake (its results' exact sizes and strides), a gradient, a rule for
`torch.vmap` and a FLOP count. They plan when they run, on real tensors: a graph compiled for dynamic shapes asks for
the tiles of each length that it meets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from multiattn.block_mask import BlockSpec
from multiattn.layout import strides_like
from multiattn.mask import Band
from multiattn.operands import INPUTS, READ, Indices, Operands, Options
from multiattn.packed import Packing, check_lengths, packed_strides
from multiattn.run.calls import get_backward, get_forward
from multiattn.run.execute import check_results, run_backward, run_forward
from multiattn.run.flops import register_when_counted
from multiattn.run.values import are_read
from multiattn.validate import check_inputs

# A gradient may come in any layout, but q, k and v keep theirs: Inductor must not choose another for an op's inputs.
# Before torch 2.8 there is no such tag, and keeping their order of strides is the default.
_SLOTS, _PACKING = 5, 7
"""The places of `slots` and `packing` behind `sinks` among the arguments of an op."""
KEEP_STRIDES: dict[str, Any] = (
    {"tags": (torch.Tag.needs_exact_strides,)} if hasattr(torch.Tag, "needs_exact_strides") else {}
)

_Pair = tuple[torch.Tensor, torch.Tensor]
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_WithCaptured = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


@torch.library.custom_op(
    "multiattn::fmha_forward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor[] captured, Tensor[] indices, Tensor? sinks=None, "
        "SymInt? left=None, SymInt? right=None, float? scale=None, str? score=None, float[]? scalars=None, "
        'int[]? slots=None, int[]? blocks=None, SymInt[]? packing=None, str backend="auto", str? variant=None, '
        "bool deterministic=False, bool needs_grad=False) "
        "-> (Tensor out, Tensor lse)"
    ),
    **KEEP_STRIDES,
)
def forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    sinks: torch.Tensor | None = None,
    left: int | None = None,
    right: int | None = None,
    scale: float | None = None,
    score: str | None = None,
    scalars: Sequence[float] | None = None,
    slots: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    packing: Sequence[int] | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool = False,
    needs_grad: bool = False,
) -> _Pair:
    """Out and lse of `multiattn.fmha`. With `needs_grad` a problem whose backward cannot run is refused here."""
    operands = Operands(q, k, v, sinks=sinks, captured=tuple(captured))
    of_score = (score, scalars, slots, blocks, packing)
    options = _options(operands, left, right, scale, *of_score, backend, variant, deterministic)
    operands = with_indices(operands, options, indices)
    ready = get_forward(operands, options, needs_grad)
    _check_values(operands, options)
    return run_forward(ready, operands)


@torch.library.custom_op(
    "multiattn::fmha_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse=None, "
        "Tensor? sinks=None, SymInt? left=None, SymInt? right=None, float? scale=None, "
        "str? score=None, float[]? scalars=None, int[]? slots=None, int[]? blocks=None, SymInt[]? packing=None, "
        'str backend="auto", str? variant=None, bool deterministic=False) '
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
    ),
    **KEEP_STRIDES,
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
    left: int | None = None,
    right: int | None = None,
    scale: float | None = None,
    score: str | None = None,
    scalars: Sequence[float] | None = None,
    slots: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    packing: Sequence[int] | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool = False,
) -> _Gradients:
    """Gradients of `multiattn.fmha_backward`; dsinks without sinks has no element, as an op's result cannot be None."""
    operands = Operands(q, k, v, out, lse, dout, dlse, sinks=sinks)
    of_score = (score, scalars, slots, blocks, packing)
    return _gradients(operands, (), left, right, scale, *of_score, backend, variant, deterministic)[0]


# An op of its own: `is_grads_batched` maps none that takes a list, and a plain call must not lack it.
@torch.library.custom_op(
    "multiattn::fmha_backward_captured",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor[] captured, "
        "Tensor[] indices, Tensor? dlse, Tensor? sinks, SymInt? left, SymInt? right, float? scale, str? score, "
        "float[]? scalars, int[]? slots, int[]? blocks, SymInt[]? packing, str backend, str? variant, "
        "bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor[] dcaptured)"
    ),
    **KEEP_STRIDES,
)
def captured_backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    captured: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    dlse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *options: Any,
) -> _WithCaptured:
    """The same of a call with `captured` tensors or `indices`: dcaptured are gradients of those in `slots`."""
    operands = Operands(q, k, v, out, lse, dout, dlse, sinks=sinks, captured=tuple(captured))
    gradients, of_captured = _gradients(operands, indices, *options)
    return *gradients, of_captured


def _gradients(
    operands: Operands, indices: Sequence[torch.Tensor], *arguments: Any
) -> tuple[_Gradients, list[torch.Tensor]]:
    options = _options(operands, *arguments)
    operands = with_indices(operands, options, indices)
    ready = get_backward(operands, options)
    _check_values(operands, options)
    found = run_backward(ready, operands)
    dq, dk, dv = found[:INPUTS]
    assert dq is not None
    assert dk is not None
    assert dv is not None
    dsinks = found[INPUTS] if operands.sinks is not None else None
    of_captured = [it for it in found[len(options.inputs) :] if it is not None]
    return (dq, dk, dv, operands.q.new_empty(0) if dsinks is None else dsinks), of_captured


def _check_values(operands: Operands, options: Options) -> None:
    """ValueError for cu_seqlens of a packed batch that are no starts of sequences, where values are read."""
    if options.packing is not None and are_read(operands.q.device):
        starts, (longest_q, longest_kv) = operands.indices, (it or None for it in options.packing)
        assert starts.cu_seqlens_q is not None
        assert starts.cu_seqlens_kv is not None
        rows = operands.q.shape[2], operands.k.shape[2]
        check_lengths(*rows, starts.cu_seqlens_q, starts.cu_seqlens_kv, longest_q, longest_kv)


def _options(
    operands: Operands,
    left: int | None,
    right: int | None,
    scale: float | None,
    score: str | None,
    scalars: Sequence[float] | None,
    slots: Sequence[int] | None,
    blocks: Sequence[int] | None,
    packing: Sequence[int] | None,
    *options: Any,
) -> Options:
    """The Options of an op's arguments."""
    spec = None if blocks is None else BlockSpec(blocks[0], blocks[1], bool(blocks[2]))
    of_score = (score, tuple(scalars or ()), tuple(slots or ()))
    packed = None if packing is None else Packing(*packing)
    return Options(left, right, scale, operands.sinks is not None, *of_score, spec, packed, None, *options)


def with_indices(operands: Operands, options: Options, indices: Sequence[torch.Tensor]) -> Operands:
    """The operands of an op with the `indices` that its options tell of."""
    if not indices and not options.indices:
        return operands
    if len(indices) != len(options.indices):
        raise ValueError(f"indices: got {len(indices)} tensors; allowed {', '.join(options.indices) or 'none'}")
    return operands._replace(indices=Indices(**dict(zip(options.indices, indices, strict=True))))


def _arguments(operands: Operands, options: Options) -> tuple[Any, ...]:
    """The arguments of an op behind the tensors of every call."""
    numbers = (options.left, options.right, options.scale)
    of_score = (options.score, options.scalars or None, options.gradient_slots or None)
    blocks = None if options.blocks is None else [int(it) for it in options.blocks]
    packing = None if options.packing is None else [*options.packing]
    how = (options.backend, options.variant, options.deterministic)
    return (operands.sinks, *numbers, *of_score, blocks, packing, *how)


def call_forward_op(operands: Operands, options: Options, wants_grad: bool) -> _Pair:
    """`forward_op` of the inputs among `operands`."""
    lists = operands.captured, operands.indices.given
    out, lse = forward_op(*operands.qkv, *lists, *_arguments(operands, options), wants_grad)
    return out, lse


def call_backward_op(operands: Operands, options: Options) -> tuple[torch.Tensor | None, ...]:
    """`backward_op` of operands: the gradients of their inputs."""
    (*tensors, dlse), rest = operands[:READ], _arguments(operands, options)
    of_captured: list[torch.Tensor | None] = [None for _ in operands.captured]
    if operands.captured or options.indices:
        lists = operands.captured, operands.indices.given
        *gradients, dsinks, found = captured_backward_op(*tensors, *lists, dlse, *rest)
        for slot, gradient in zip(options.gradient_slots, found, strict=True):
            of_captured[slot] = gradient
    else:
        *gradients, dsinks = backward_op(*tensors, dlse, *rest)
    of_sinks = () if operands.sinks is None else (dsinks,)
    return (*gradients, *of_sinks, *(None for _ in options.indices), *of_captured)


# ---------------------------------------------------------------- fakes


def _like(tensor: torch.Tensor, options: Sequence[object]) -> torch.Tensor:
    """A result made after q, k or v, without its values; `options` are those from `packing` on, if any is given."""
    if not options or options[0] is None:
        return tensor.new_empty_strided(tensor.shape, strides_like(tensor))
    return tensor.new_empty_strided(tensor.shape, (*packed_strides(tensor.shape[1], tensor.shape[3]), 1))


@forward_op.register_fake
def _fake_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    sinks: torch.Tensor | None = None,
    *rest: object,
) -> _Pair:
    check_inputs(q, k, v, sinks)
    return _like(q, rest[_PACKING:]), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    dq, dk, dv = (_like(tensor, rest[_PACKING:]) for tensor in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


@captured_backward_op.register_fake
def _fake_captured_backward(*arguments: Any) -> _WithCaptured:
    *tensors, captured, _, dlse, sinks = arguments[: READ + 3]
    slots = arguments[READ + 3 + _SLOTS]
    gradients: _Gradients = _fake_backward(*tensors, dlse, sinks, *arguments[READ + 3 :])
    return *gradients, [captured[slot].new_empty(captured[slot].shape) for slot in slots or ()]


# ---------------------------------------------------------------- gradients


def with_dout(operands: Operands) -> Operands:
    """The operands of a backward op, which takes no None for a dout of zeros."""
    return operands if operands.dout is not None else operands._replace(dout=operands.q.new_zeros(operands.q.shape))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    """Keep what the gradient of `forward_op` needs, from its arguments and its results."""
    q, k, v, captured, indices, sinks, *arguments, _ = inputs
    operands = Operands(q, k, v, sinks=sinks, captured=tuple(captured))
    options = _options(operands, *arguments).of_gradient
    operands = with_indices(operands, options, indices)
    ctx.save_for_backward(*operands.inputs, *output)
    ctx.set_materialize_grads(False)
    ctx.options = options
    ctx.rest = (None,) * len(arguments)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    names = ctx.options.inputs
    operands = Operands.of_read((*ctx.saved_tensors, dout, dlse), names)
    gradients: tuple[torch.Tensor | None, ...] = (None,) * len(operands.inputs)
    if dout is not None or dlse is not None:
        gradients = call_backward_op(with_dout(operands), ctx.options)
    dsinks = gradients[INPUTS] if operands.sinks is not None else None
    of_indices = [None for _ in ctx.options.indices]
    return (*gradients[:INPUTS], list(gradients[len(names) :]), of_indices, dsinks, *ctx.rest, None)


def refuse_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    """NotImplementedError for the gradient of a gradient, with what has one."""
    raise NotImplementedError(
        "multiattn.fmha can be differentiated once: its backward kernels have no gradient of their own; "
        "multiattn.reference is plain PyTorch and can be differentiated any number of times"
    )


forward_op.register_autograd(_differentiate, setup_context=_save_for_backward)
backward_op.register_autograd(refuse_double_backward)
captured_backward_op.register_autograd(refuse_double_backward)


# ---------------------------------------------------------------- vmap


def _fold(size: int, tensor: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
    """``[B, ...]`` for each of `size` entries of a mapped dimension, as one ``[size * B, ...]``; None is not mapped."""
    if tensor is None:
        return None
    entries = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    folded = entries.flatten(0, 1)
    return folded if folded.ndim < 4 or folded.stride(-1) == 1 else folded.contiguous()


def _unfold(size: int, like: torch.Tensor, dim: int | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Undo `_fold` on results; the batch of each entry is that of the argument `like`, mapped by `dim`."""
    batch = like.shape[0] if dim is None else like.movedim(dim, 0).shape[1]  # of 0 entries no result has it any more
    return tuple(tensor.view(size, batch, *tensor.shape[1:]) for tensor in tensors)


def _map(op: Any, names: str, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """The rule for `torch.vmap` of an op whose first arguments have these names.

    Entries become batch entries of one call. Sinks are the same for all batch entries of a call, and a score may depend
    on which one it is: where entries differ in these, or want a gradient of their own, each is a call by itself.
    """
    size, given = info.batch_size, dict(zip(names.split(), zip(arguments, in_dims, strict=True), strict=False))
    sinks, of_sinks = given.get("sinks", (None, None))
    is_apart = sinks is not None and (of_sinks is not None or op is not forward_op)
    if is_apart or _has_places(given):
        results: Any = map_each(op, info, in_dims, arguments)
    else:
        folded = [_fold(size, *given[name]) if name in _BATCHED else given[name][0] for name in given]
        results = op(*folded, *arguments[len(given) :])
        batched_results = [it for it in results if it.ndim > 1]
        results = [*_unfold(size, *given["q"], *batched_results), *(it for it in results if it.ndim == 1)]
    return results


_BATCHED = frozenset(("q", "k", "v", "out", "lse", "dout", "dlse"))
"""Arguments ``[B, ...]``."""


def _has_places(given: Mapping[str, tuple[Any, Any]]) -> bool:
    """True if attention of an entry depends on which batch entry it is."""
    return any(given.get(name, (None,))[0] is not None for name in ("score", "blocks", "packing"))


def map_each(op: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
    """Results of an op for each entry of what is mapped, one call after the other.

    Of no entries they have the sizes that one of zeros gives.
    """
    size = info.batch_size
    each = [op(*(_entry(at, *pair) for pair in zip(arguments, in_dims, strict=True))) for at in range(max(size, 1))]
    return [
        torch.stack(of_entries)[:size]
        if isinstance(of_entries[0], torch.Tensor)
        else [torch.stack(gradients)[:size] for gradients in zip(*of_entries, strict=True)]
        for of_entries in zip(*each, strict=True)
    ]


def _entry(at: int, argument: Any, dim: Any) -> Any:
    """One entry of a mapped argument, or of a list of them, laid out as every op takes it."""
    if isinstance(argument, (list, tuple)) and dim is not None:
        return [_entry(at, *pair) for pair in zip(argument, dim, strict=True)]
    if dim is None:
        return argument
    if not argument.shape[dim]:
        return argument.new_zeros(argument.movedim(dim, 0).shape[1:])
    entry = argument.select(dim, at)
    return entry if not entry.ndim or entry.stride(-1) == 1 else entry.contiguous()


@forward_op.register_vmap
def _map_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[_Pair, tuple[int, int]]:
    names = "q k v captured indices sinks left right scale score scalars slots blocks packing"
    out, lse = _map(forward_op, names, info, in_dims, arguments)
    return (out, lse), (0, 0)


@backward_op.register_vmap
def _map_backward(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[_Gradients, tuple[int | None, ...]]:
    names = "q k v out lse dout dlse sinks left right scale score scalars slots blocks packing"
    dq, dk, dv, of_sinks = _map(backward_op, names, info, in_dims, arguments)
    return (dq, dk, dv, of_sinks), (0, 0, 0, 0 if of_sinks.ndim > 1 else None)


@captured_backward_op.register_vmap
def _map_captured_backward(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[_WithCaptured, tuple[Any, ...]]:
    names = "q k v out lse dout captured indices dlse sinks left right scale score scalars slots blocks packing"
    *gradients, of_captured = _map(captured_backward_op, names, info, in_dims, arguments)
    return (*gradients, of_captured), (0, 0, 0, 0, [0 for _ in of_captured])


# ---------------------------------------------------------------- FLOP


def _forward_flops(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    captured: Sequence[tuple[int, ...]],
    indices: Sequence[tuple[int, ...]],
    sinks: tuple[int, ...] | None = None,
    left: int | None = None,
    right: int | None = None,
    *options: object,
    **kwargs: object,
) -> int:
    """Two products of ``2 * D`` FLOP for each pair of a query and a key that it sees.

    The sequences of a packed batch count as if all had the same length: no value of a tensor is read.
    """
    batch, heads, seq_q, head_dim = q
    seq_kv = k[2]
    packing = kwargs.get("packing", options[_PACKING - 3] if len(options) > _PACKING - 3 else None)
    if packing is not None:
        batch = max(indices[0][0] - 1, 1)
        seq_q, seq_kv = seq_q // batch, seq_kv // batch
    return 4 * batch * heads * head_dim * Band(left, right).count_pairs(seq_q, seq_kv)


def _backward_flops(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    out: tuple[int, ...],
    lse: tuple[int, ...],
    dout: tuple[int, ...],
    dlse: tuple[int, ...] | None = None,
    *options: Any,
    indices: Sequence[tuple[int, ...]] = (),
    **kwargs: Any,
) -> int:
    """Five products where forward has two; a variant that recomputes some gets no credit for it."""
    return _forward_flops(q, k, v, (), indices, *options, **kwargs) * 5 // 2


register_when_counted(torch.ops.multiattn.fmha_forward, _forward_flops)
register_when_counted(torch.ops.multiattn.fmha_backward, _backward_flops)
register_when_counted(
    torch.ops.multiattn.fmha_backward_captured,
    lambda *given, **kwargs: _backward_flops(*given[: READ - 1], *given[READ + 1 :], indices=given[READ], **kwargs),
)
