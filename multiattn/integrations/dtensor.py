"""Importing this module gives `multiattn.fmha` and its gradients rules for `torch.distributed.tensor.DTensor`.

Tensors are sharded over the batch or over heads, on each dimension of a mesh, without communication: q, k and v alike,
and sinks with their heads. Tensors with another placement are redistributed. Heads are sharded where the key/value
heads divide evenly.

Captured tensors are replicated. So are the cu_seqlens of a packed batch, whose sequences stay together. If scores
depend on the batch entry or the head, that dimension is not sharded. Where there is no other way, as with a block mask,
every rank computes all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.experimental import register_sharding

from multiattn.integrations.overrides import by_name
from multiattn.operands import INPUTS
from multiattn.score.expression import walk
from multiattn.score.serial import loads

_BATCH, _HEADS = 0, 1
_Way = int | None
"""The dimension of q, k and v that a dimension of the mesh shards; None: none."""
_Placements = list[Any]
_Call = dict[str, Any]
"""The arguments of a call of an op, by name."""

_OP = torch.ops.multiattn
_make: Any = DTensor  # its constructor is annotated for others


def _ways(call: _Call) -> list[_Way]:
    """All that leave the results of a call as they are. Its q and k have global shapes."""
    ways: list[_Way] = [None]
    if call["blocks"] is not None:
        return ways
    q, k, score = call["q"], call["k"], call["score"]
    read = set() if score is None else {it.value for it in walk(*loads(score).roots) if it.op == "input"}
    if call["batching"] is None and "b" not in read:
        ways.append(_BATCH)
    if "h" not in read and (q.shape[1] == k.shape[1] or _is_even(k.shape[1], q)):
        ways.append(_HEADS)
    return ways


def _is_even(heads: int, tensor: Any) -> bool:
    """True if any part of the mesh that can shard so many heads gives each rank as many."""
    sizes = (tensor.device_mesh if isinstance(tensor, DTensor) else tensor.mesh).shape
    parts = (math.prod(it) for size in range(1, len(sizes) + 1) for it in itertools.combinations(sizes, size))
    return all(heads % part == 0 for part in parts if part <= heads)


def _of_tensor(way: _Way) -> Placement:
    return Replicate() if way is None else Shard(way)


def _of_sinks(way: _Way) -> Placement:
    return Shard(0) if way == _HEADS else Replicate()


def _of_sum(way: _Way) -> Placement:
    """The placement of the gradient of what is replicated."""
    return Replicate() if way is None else Partial()


def _of_dsinks(way: _Way, sinks: object) -> Placement:
    return Replicate() if sinks is None else Shard(0) if way == _HEADS else _of_sum(way)


_TENSORS: Mapping[str, Callable[[_Way], Placement]] = MappingProxyType(
    {**dict.fromkeys(("q", "k", "v", "out", "lse", "dout", "dlse"), _of_tensor), "sinks": _of_sinks}
)
_LISTS = ("captured", "indices")
"""Arguments that are tensors, and those that are lists of them, which every rank has whole."""


def _inputs(call: _Call, way: _Way) -> _Placements:
    """Placements of the tensors among the arguments."""
    found: _Placements = []
    for name, given in call.items():
        if name in _LISTS:
            found += [Replicate()] * len(given)
        elif name in _TENSORS:
            found.append(None if given is None else _TENSORS[name](way))
    return found


def shard_forward(*args: Any, **kwargs: Any) -> list[tuple[_Placements, _Placements]]:
    """Placements of results and of tensors among the arguments of ``fmha_forward``, for each way."""
    call = by_name(_OP.fmha_forward.default, args, kwargs)
    return [([_of_tensor(way)] * 2, _inputs(call, way)) for way in _ways(call)]


def shard_forward_max(*args: Any, **kwargs: Any) -> list[tuple[_Placements, _Placements]]:
    """As `shard_forward`, of ``fmha_forward_max``, which has one more result like lse."""
    return [([*results, results[-1]], inputs) for results, inputs in shard_forward(*args, **kwargs)]


def shard_backward(*args: Any, **kwargs: Any) -> list[tuple[_Placements, _Placements]]:
    """Placements of results and of tensors among the arguments of ``fmha_backward``, for each way."""
    call = by_name(_OP.fmha_backward.default, args, kwargs)
    given = [(way, _of_dsinks(way, call["sinks"])) for way in _ways(call)]
    return [([*[_of_tensor(way)] * INPUTS, of_dsinks], _inputs(call, way)) for way, of_dsinks in given]


def captured_backward(op: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """``fmha_backward_captured`` of DTensors: a list among an op's results is more than `register_sharding` can say.

    Each dimension of the mesh shards as it does q, if that is a way.
    """
    call = by_name(op, arguments, kwargs)
    q, k, v, sinks, captured = (call[name] for name in ("q", "k", "v", "sinks", "captured"))
    mesh = q.device_mesh
    possible = _ways(call)
    ways = [way if (way := getattr(it, "dim", None)) in possible else None for it in q.placements]

    # Below autograd, so without the methods of a DTensor for these: they record how to go back.
    def local(tensor: Any, of_way: Callable[[_Way], Placement]) -> Any:
        if tensor is None:
            return None
        wanted = DTensorSpec(mesh, tuple(map(of_way, ways)), tensor_meta=tensor._spec.tensor_meta)
        return redistribute_local_tensor(tensor._local_tensor, tensor._spec, wanted)

    def whole(result: torch.Tensor, of_way: Callable[[_Way], Placement], like: Any) -> Any:
        meta = TensorMeta(like.shape, like.stride(), result.dtype)
        return _make(result, DTensorSpec(mesh, tuple(map(of_way, ways)), tensor_meta=meta), requires_grad=False)

    for name, of_way in _TENSORS.items():
        call[name] = local(call[name], of_way)
    for name in _LISTS:
        call[name] = [local(it, lambda _: Replicate()) for it in call[name]]
    dq, dk, dv, dsinks, dcaptured = op(*call.values())
    return (
        *(whole(it, _of_tensor, like) for it, like in zip((dq, dk, dv), (q, k, v), strict=True)),
        whole(dsinks, lambda way: _of_dsinks(way, sinks), dsinks if sinks is None else sinks),
        [whole(it, _of_sum, captured[slot]) for it, slot in zip(dcaptured, call["slots"] or (), strict=True)],
    )


register_sharding(_OP.fmha_forward.default)(shard_forward)
register_sharding(_OP.fmha_forward_max.default)(shard_forward_max)
register_sharding(_OP.fmha_backward.default)(shard_backward)
_dispatcher: Any = DTensor._op_dispatcher  # as PyTorch's own context_parallel registers its ring
_dispatcher._custom_op_handlers[_OP.fmha_backward_captured.default] = captured_backward
