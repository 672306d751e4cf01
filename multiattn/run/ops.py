"""``torch.ops.multiattn``: attention as PyTorch's tracers and transforms see it.

`torch.compile`, `torch.export`, `torch.func` and dispatch modes take ``fmha_forward``, ``fmha_backward`` and
``fmha_kvcache``, or where row maxima are asked ``fmha_forward_max``. Plain eager calls go around them, to the same
launchers (`run.autograd`). Each op has a fake (its results' exact sizes and strides), a rule for `torch.vmap` and a
FLOP count, all by the table of its arguments (`run.arguments`). The forward has a gradient, attention over caches has
none. The ops plan when they run, on real tensors: a graph compiled for dynamic shapes asks for the tiles of each length
that it meets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from multiattn.block_mask import BlockSpec
from multiattn.layout import Shape, dense_strides, flops_per_pair, shape_of_out, strides_of
from multiattn.mask import Band
from multiattn.operands import Operands, Options
from multiattn.packed import packed_strides
from multiattn.run.arguments import (
    BACKWARD,
    CAPTURED_BACKWARD,
    FORWARD,
    FORWARD_MAX,
    FORWARDS,
    KVCACHE,
    Signature,
)
from multiattn.run.calls import get_backward, get_forward
from multiattn.run.execute import run_backward, run_forward, run_forward_with_max
from multiattn.run.flops import register_when_counted
from multiattn.run.values import are_read
from multiattn.sequences import NO_INDICES, Batching, Indices
from multiattn.validate import check_inputs
from multiattn.validate.results import check_results
from multiattn.validate.sequences import check_cache, check_lengths, check_values

# A gradient may come in any layout, but q, k and v keep theirs: Inductor must not choose another for an op's inputs.
_KEEP_STRIDES = (torch.Tag.needs_exact_strides,)

_Pair = tuple[torch.Tensor, torch.Tensor]
_Results = tuple[torch.Tensor, ...]
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_WithCaptured = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]


# ---------------------------------------------------------------- arguments


def _call_of(given: Mapping[str, Any]) -> tuple[Operands, Options]:
    """The operands and options of an op's arguments by name."""
    blocks, batching = given["blocks"], given["batching"]
    options = Options(
        left=given["left"],
        right=given["right"],
        scale=given["scale"],
        has_sinks=given["sinks"] is not None,
        score=given["score"],
        scalars=tuple(given["scalars"] or ()),
        gradient_slots=tuple(given["slots"] or ()),
        blocks=None if blocks is None else BlockSpec(blocks[0], blocks[1], bool(blocks[2])),
        batching=None if batching is None else Batching.of_numbers(batching),
        backend=given["backend"],
        variant=given["variant"],
        deterministic=given["deterministic"],
        row_max=given.get("return_max", False),
    )
    own: dict[str, Any] = {name: it for name, it in given.items() if name in Operands._fields}
    own["captured"] = tuple(given.get("captured", ()))
    own["indices"] = _indices_of(options, given.get("indices", ()))
    return Operands(**own), options


def _indices_of(options: Options, tensors: Sequence[torch.Tensor]) -> Indices:
    if not tensors and not options.indices:
        return NO_INDICES
    if len(tensors) != len(options.indices):
        raise ValueError(f"indices: got {len(tensors)} tensors; allowed {', '.join(options.indices) or 'none'}")
    return Indices(**dict(zip(options.indices, tensors, strict=True)))


def _arguments(op: Signature, operands: Operands, options: Options, *, needs_grad: bool = False) -> list[Any]:
    """The arguments of an op, in its order."""
    given: dict[str, Any] = {
        "captured": operands.captured,
        "indices": operands.indices.given,
        "left": options.left,
        "right": options.right,
        "scale": options.scale,
        "score": options.score,
        "scalars": options.scalars or None,
        "slots": options.gradient_slots or None,
        "blocks": None if options.blocks is None else [int(it) for it in options.blocks],
        "batching": None if options.batching is None else options.batching.numbers,
        "backend": options.backend,
        "variant": options.variant,
        "deterministic": options.deterministic,
        "needs_grad": needs_grad,
        "return_max": options.row_max,
    }
    return [given[name] if name in given else getattr(operands, name) for name in op.names]


def call_forward_op(operands: Operands, options: Options, wants_grad: bool) -> _Results:
    """Results of `forward_op` for the inputs among `operands`, or of `forward_max_op`."""
    op = forward_max_op if options.row_max else forward_op
    return tuple(op(*_arguments(FORWARD, operands, options, needs_grad=wants_grad)))


def call_kvcache_op(operands: Operands, options: Options) -> _Results:
    """Results of `kvcache_op` for the inputs among `operands`, without a maximum that has no element."""
    out, lse, *largest = kvcache_op(*_arguments(KVCACHE, operands, options))
    return (out, lse, *largest) if options.row_max else (out, lse)


def call_backward_op(operands: Operands, options: Options) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs among `operands`, by a backward op."""
    of_captured: list[torch.Tensor | None] = [None for _ in operands.captured]
    if operands.captured or options.indices:
        *gradients, dsinks, found = captured_backward_op(*_arguments(CAPTURED_BACKWARD, operands, options))
        for slot, gradient in zip(options.gradient_slots, found, strict=True):
            of_captured[slot] = gradient
    else:
        *gradients, dsinks = backward_op(*_arguments(BACKWARD, operands, options))
    of_sinks = () if operands.sinks is None else (dsinks,)
    return (*gradients, *of_sinks, *(None for _ in options.indices), *of_captured)


# ---------------------------------------------------------------- what the ops do


def _forward(return_max: bool, *arguments: Any) -> _Results:
    """Results of `multiattn.fmha`. With `needs_grad` a problem whose backward cannot run is refused here."""
    given = FORWARD.bind(arguments, {"return_max": return_max})
    operands, options = _call_of(given)
    ready = get_forward(operands, options, given["needs_grad"])
    _check_values(operands, options)
    return run_forward_with_max(ready, operands) if return_max else run_forward(ready, operands)


def _kvcache(*arguments: Any) -> _Results:
    """Results of `multiattn.fmha_kvcache`; packed queries are ``[1, Hq, T, D]`` here.

    An op's result cannot be None: a maximum that nobody asks for has no element.
    """
    operands, options = _call_of(KVCACHE.bind(arguments))
    check_cache(_rows_of_q(operands), operands.k, operands.v, operands.indices, operands.sinks)
    _check_values(operands, options)
    ready = get_forward(operands, options)
    if options.row_max:
        return run_forward_with_max(ready, operands)
    return *run_forward(ready, operands), operands.q.new_empty(0, dtype=torch.float32)


def _backward(*arguments: Any) -> _Gradients:
    """Gradients of `multiattn.fmha_backward`; dsinks without sinks has no element, as an op's result cannot be None."""
    return _gradients(*_call_of(BACKWARD.bind(arguments)))[0]


def _captured_backward(*arguments: Any) -> _WithCaptured:
    """Gradients of a call with `captured` tensors or `indices`: dcaptured are those of the tensors in `slots`."""
    gradients, of_captured = _gradients(*_call_of(CAPTURED_BACKWARD.bind(arguments)))
    return *gradients, of_captured


def _gradients(operands: Operands, options: Options) -> tuple[_Gradients, list[torch.Tensor]]:
    ready = get_backward(operands, options)
    _check_values(operands, options)
    gradients = run_backward(ready, operands)
    found: dict[str, Any] = dict(zip(options.inputs, gradients, strict=False))
    of_captured = [it for it in gradients[len(options.inputs) :] if it is not None]
    of_sinks = found.get("sinks", operands.q.new_empty(0))
    return (found["q"], found["k"], found["v"], of_sinks), of_captured


def _check_values(operands: Operands, options: Options) -> None:
    """ValueError for lengths, starts and pages that the tensors do not have, where values are read."""
    batching, where = options.batching, operands.indices
    if batching is None or not are_read(operands.q.device):
        return
    if batching.kind == "packed":
        assert where.cu_seqlens_q is not None
        assert where.cu_seqlens_kv is not None
        rows = operands.q.shape[2], operands.k.shape[2]
        longest = batching.max_q or None, batching.max_kv or None
        check_lengths(rows, (where.cu_seqlens_q, where.cu_seqlens_kv), longest)
    else:
        check_values(_rows_of_q(operands), operands.k, where, batching.max_q, options.left)


def _rows_of_q(operands: Operands) -> torch.Tensor:
    """Q as a caller of `multiattn.fmha_kvcache` gives it."""
    return operands.q if operands.indices.cu_seqlens_q is None else operands.q[0].transpose(0, 1)


# ---------------------------------------------------------------- fakes


def _like(tensor: torch.Tensor, shape: Shape, *, is_packed: bool) -> torch.Tensor:
    """A result made after q, k or v, without its values: laid out as `Problem.strides_out` and its like say."""
    its, width = tuple(tensor.shape), shape[3]
    strides = packed_strides(shape[1], width) if is_packed else dense_strides(strides_of(tensor), its, width)
    return tensor.new_empty_strided(shape, (*strides, 1))


def _fake_results(operands: Operands, options: Options) -> _Results:
    is_packed, q = options.batching is not None and options.batching.has_packed_queries, operands.q
    out = _like(q, shape_of_out(q.shape, operands.v.shape), is_packed=is_packed)
    return out, *(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(1 + options.row_max))


def _fake_forward(return_max: bool, *arguments: Any) -> _Results:
    operands, options = _call_of(FORWARD.bind(arguments, {"return_max": return_max}))
    check_inputs(*operands.qkv, operands.sinks)
    return _fake_results(operands, options)


def _fake_kvcache(*arguments: Any) -> _Results:
    operands, options = _call_of(KVCACHE.bind(arguments))
    check_cache(_rows_of_q(operands), operands.k, operands.v, operands.indices, operands.sinks)
    found = _fake_results(operands, options)
    return found if options.row_max else (*found, operands.q.new_empty(0, dtype=torch.float32))


def _fake_gradients(operands: Operands, options: Options) -> _Gradients:
    check_inputs(*operands.qkv, operands.sinks)
    check_results(operands.q, operands.v, *operands.results)
    dq, dk, dv = (_like(it, tuple(it.shape), is_packed=options.batching is not None) for it in operands.qkv)
    sinks = operands.sinks
    return dq, dk, dv, operands.q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _fake_backward(*arguments: Any) -> _Gradients:
    return _fake_gradients(*_call_of(BACKWARD.bind(arguments)))


def _fake_captured_backward(*arguments: Any) -> _WithCaptured:
    operands, options = _call_of(CAPTURED_BACKWARD.bind(arguments))
    wanted = [operands.captured[slot] for slot in options.gradient_slots]
    return *_fake_gradients(operands, options), [it.new_empty(it.shape) for it in wanted]


# ---------------------------------------------------------------- vmap


def _fold(size: int, tensor: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
    """``[B, ...]`` for each of `size` entries of a mapped dimension, as one ``[size * B, ...]``; None is not mapped."""
    if tensor is None:
        return None
    entries = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    folded = entries.flatten(0, 1)
    return folded if folded.ndim < 4 or folded.stride(-1) == 1 else folded.contiguous()


def _map(
    op: Any, signature: Signature, info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The rule for `torch.vmap` of an op.

    Entries become batch entries of one call. Sinks are the same for all batch entries of a call, and a score may depend
    on which one it is: where entries differ in these, or want a gradient of their own, each is a call by itself.
    """
    size, given, dims = info.batch_size, signature.bind(arguments), dict(zip(signature.names, in_dims, strict=False))
    is_apart = given["sinks"] is not None and (dims.get("sinks") is not None or signature not in FORWARDS)
    if is_apart or any(given[name] is not None for name in ("score", "blocks", "batching")):
        results = _map_each(op, size, in_dims, arguments)
        return results, tuple([0 for _ in it] if isinstance(it, list) else 0 for it in results)
    folded = {it.name: _fold(size, given[it.name], dims.get(it.name)) for it in signature.arguments if it.is_batched}
    found = op(*(folded.get(name, given[name]) for name in signature.names))
    q, dim = given["q"], dims["q"]
    batch = q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]  # of 0 entries no result has it any more
    # A dsinks without an element, as there are no sinks, is the same for all.
    results = tuple(it.view(size, batch, *it.shape[1:]) if it.ndim > 1 else it for it in found)
    return results, tuple(0 if it.ndim > 1 else None for it in found)


def _map_each(op: Any, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of an op for each entry of what is mapped, one call after the other.

    Of no entries they have the sizes that one of zeros gives.
    """
    each = [op(*(_entry(at, *pair) for pair in zip(arguments, in_dims, strict=True))) for at in range(max(size, 1))]
    return tuple(
        torch.stack(of_entries)[:size]
        if isinstance(of_entries[0], torch.Tensor)
        else [torch.stack(gradients)[:size] for gradients in zip(*of_entries, strict=True)]
        for of_entries in zip(*each, strict=True)
    )


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


# ---------------------------------------------------------------- FLOP


def _flops(signature: Signature, *arguments: Any, **named: Any) -> int:
    """`flops_per_pair` of each pair of a query and a key that it sees.

    The sequences of a packed batch count as if all had the same length, and caches as if all were full: no value of a
    tensor is read. `arguments` have shapes in place of tensors.
    """
    given = signature.bind(arguments, named)
    batch, heads, seq_q, head_dim = given["q"]
    seq_kv = given["k"][2]
    if given["batching"] is not None:
        batching = Batching.of_numbers(given["batching"])
        shapes = dict(zip(Options(batching=batching).indices, given["indices"], strict=True))
        is_packed = batching.kind == "packed"
        batch = max(shapes["cu_seqlens_q"][0] - 1 if "cu_seqlens_q" in shapes else batch, 1)
        seq_q = seq_q // batch if batching.has_packed_queries else seq_q
        seq_kv = seq_kv // batch if is_packed else seq_kv * shapes.get("page_table", (1, 1))[1]
    pairs = Band(given["left"], given["right"]).count_pairs(seq_q, seq_kv)
    per_pair = flops_per_pair(head_dim, given["v"][3], backward=signature not in (*FORWARDS, KVCACHE))
    return int(batch * heads * pairs) * per_pair


# ---------------------------------------------------------------- the ops


def _op(name: str, signature: Signature, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The op of a table, with all that follows from it."""
    schema = signature.schema
    op = torch.library.custom_op(f"multiattn::{name}", run, mutates_args=(), schema=schema, tags=_KEEP_STRIDES)
    op.register_fake(fake)
    op.register_vmap(functools.partial(_map, op, signature))
    register_when_counted(getattr(torch.ops.multiattn, name), functools.partial(_flops, signature))
    return op


forward_op, forward_max_op = (
    _op(name, signature, functools.partial(_forward, asks), functools.partial(_fake_forward, asks))
    for name, signature, asks in (("fmha_forward", FORWARD, False), ("fmha_forward_max", FORWARD_MAX, True))
)
backward_op = _op("fmha_backward", BACKWARD, _backward, _fake_backward)
# An op of its own: `is_grads_batched` maps none that takes a list, and a plain call must not lack it.
captured_backward_op = _op("fmha_backward_captured", CAPTURED_BACKWARD, _captured_backward, _fake_captured_backward)
kvcache_op = _op("fmha_kvcache", KVCACHE, _kvcache, _fake_kvcache)


# ---------------------------------------------------------------- gradients


def with_dout(operands: Operands) -> Operands:
    """The operands of a backward op, which takes no None for a dout of zeros."""
    if operands.dout is not None:
        return operands
    return operands._replace(dout=operands.q.new_zeros(shape_of_out(operands.q.shape, operands.v.shape)))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    """Keep what the gradient of `forward_op` needs, from its arguments and its results."""
    operands, options = _call_of(FORWARD.bind(inputs))
    out, lse, *largest = output
    ctx.mark_non_differentiable(*largest)
    ctx.save_for_backward(*operands.inputs, out, lse)
    ctx.set_materialize_grads(False)
    ctx.options = options.of_gradient


def _differentiate(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *others: torch.Tensor | None
) -> tuple[Any, ...]:
    options: Options = ctx.options
    operands = Operands.of_read((*ctx.saved_tensors, dout, dlse), options.inputs)
    gradients: tuple[torch.Tensor | None, ...] = (None,) * len(operands.inputs)
    if dout is not None or dlse is not None:
        gradients = call_backward_op(with_dout(operands), options)
    found: dict[str, Any] = dict(zip(options.inputs, gradients, strict=False))
    found |= {"captured": list(gradients[len(options.inputs) :]), "indices": [None for _ in options.indices]}
    return tuple(found.get(name) for name in FORWARD.names)


def refuse_double_backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
    """NotImplementedError for the gradient of a gradient, with what has one."""
    raise NotImplementedError(
        "multiattn.fmha can be differentiated once: its backward kernels have no gradient of their own; "
        "multiattn.reference is plain PyTorch and can be differentiated any number of times"
    )


for _its_op in (forward_op, forward_max_op):
    _its_op.register_autograd(_differentiate, setup_context=_save_for_backward)
backward_op.register_autograd(refuse_double_backward)
captured_backward_op.register_autograd(refuse_double_backward)
