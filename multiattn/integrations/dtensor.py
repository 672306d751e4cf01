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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.experimental import register_sharding

from multiattn.operands import INPUTS, READ
from multiattn.score.expression import walk
from multiattn.score.serial import loads

_BATCH, _HEADS = 0, 1
_Way = int | None
"""The dimension of q, k and v that a dimension of the mesh shards; None: none."""
_Placements = list[Any]

_OP = torch.ops.multiattn
_make: Any = DTensor  # its constructor is annotated for others


def _ways(q: Any, k: Any, score: str | None = None, blocks: object = None, packing: object = None) -> list[_Way]:
    """All that leave the results of a call as they are. q and k have global shapes."""
    ways: list[_Way] = [None]
    if blocks is not None:
        return ways
    read = set() if score is None else {it.value for it in walk(*loads(score).roots) if it.op == "input"}
    if packing is None and "b" not in read:
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


def shard_forward(
    q: Any,
    k: Any,
    v: Any,
    captured: Sequence[Any],
    indices: Sequence[Any],
    sinks: Any = None,
    left: object = None,
    right: object = None,
    scale: object = None,
    score: str | None = None,
    scalars: object = None,
    slots: object = None,
    blocks: object = None,
    packing: object = None,
    *how: object,
) -> list[tuple[_Placements, _Placements]]:
    """Placements of results and of tensors among the arguments, for each way."""
    given: list[tuple[_Placements, _Placements]] = []
    for way in _ways(q, k, score, blocks, packing):
        inputs: _Placements = [_of_tensor(way)] * INPUTS + [Replicate()] * (len(captured) + len(indices))
        given.append(([_of_tensor(way)] * 2, [*inputs, None if sinks is None else _of_sinks(way)]))
    return given


def shard_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any = None,
    sinks: Any = None,
    left: object = None,
    right: object = None,
    scale: object = None,
    score: str | None = None,
    scalars: object = None,
    slots: object = None,
    blocks: object = None,
    packing: object = None,
    *how: object,
) -> list[tuple[_Placements, _Placements]]:
    """The same of the backward."""
    given: list[tuple[_Placements, _Placements]] = []
    for way in _ways(q, k, score, blocks, packing):
        read: _Placements = [_of_tensor(way)] * (READ - 1) + [None if dlse is None else _of_tensor(way)]
        gradients = [_of_tensor(way)] * INPUTS + [_of_dsinks(way, sinks)]
        given.append((gradients, [*read, None if sinks is None else _of_sinks(way)]))
    return given


def captured_backward(op: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """``fmha_backward_captured`` of DTensors: a list among an op's results is more than `register_sharding` can say.

    Each dimension of the mesh shards as it does q, if that is a way.
    """
    *tensors, captured, indices, dlse, sinks = arguments[: READ + 3]
    rest = arguments[READ + 3 :]
    score, slots, blocks, packing = (rest[place] for place in (3, 5, 6, 7))
    q, k, v = tensors[:INPUTS]
    mesh = q.device_mesh
    possible = _ways(q, k, score, blocks, packing)
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

    dq, dk, dv, dsinks, dcaptured = op(
        *(local(it, _of_tensor) for it in tensors),
        *([local(it, lambda _: Replicate()) for it in its] for its in (captured, indices)),
        local(dlse, _of_tensor),
        local(sinks, _of_sinks),
        *rest,
    )
    return (
        *(whole(it, _of_tensor, like) for it, like in zip((dq, dk, dv), (q, k, v), strict=True)),
        whole(dsinks, lambda way: _of_dsinks(way, sinks), dsinks if sinks is None else sinks),
        [whole(it, _of_sum, captured[slot]) for it, slot in zip(dcaptured, slots or (), strict=True)],
    )


register_sharding(_OP.fmha_forward.default)(shard_forward)
register_sharding(_OP.fmha_backward.default)(shard_backward)
_dispatcher: Any = DTensor._op_dispatcher  # as PyTorch's own context_parallel registers its ring
_dispatcher._custom_op_handlers[_OP.fmha_backward_captured.default] = captured_backward
