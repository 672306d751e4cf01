"""A program in eager PyTorch: on whole tensors of scores, in any compute dtype, differentiable. Truth for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from multiattn.score.expression import BINARY, UNARY, Node, walk
from multiattn.score.program import BoundScore

_OPS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        **{op: getattr(torch, op) for op in (*UNARY, *BINARY, "where") if hasattr(torch, op)},
        "min": torch.minimum,
        "max": torch.maximum,
        "floordiv": torch.floor_divide,
        "mod": torch.remainder,
        "quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        "remainder": torch.fmod,
        "shr": torch.bitwise_right_shift,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "not": torch.logical_not,
    }
)


def modified(bound: BoundScore, scores: torch.Tensor) -> torch.Tensor:
    """The scores ``[B, Hq, Sq, Skv]``, which are ``scale * q @ k^T``, as the program changes them, the mask aside.

    Everything is computed in the dtype of `scores`.
    """
    root = bound.program.score
    if root is None:
        return scores
    places = _places(scores.shape, scores.device)
    return evaluate(root, bound, {**places, "score": scores}, scores.dtype).expand_as(scores)


def visible(bound: BoundScore, shape: tuple[int, int, int, int], device: torch.device) -> torch.Tensor | None:
    """The keys that `mask_mod` lets each query see: bool, broadcastable to ``[B, Hq, Sq, Skv]``; None for all."""
    root = bound.program.mask
    return None if root is None else evaluate(root, bound, _places(shape, device), torch.float32)


def _places(shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs of each score, int32, shaped to be broadcast to ``[B, Hq, Sq, Skv]``."""
    places = {}
    for axis, name in enumerate(("b", "h", "q", "kv")):
        index = torch.arange(shape[axis], dtype=torch.int32, device=device)
        places[name] = index.view([-1 if it == axis else 1 for it in range(4)])
    for name, length in (("seq_q", shape[2]), ("seq_kv", shape[3])):
        places[name] = torch.tensor(length, dtype=torch.int32, device=device)
    return places


def evaluate(
    root: Node, bound: BoundScore, inputs: Mapping[str, torch.Tensor], compute_dtype: torch.dtype
) -> torch.Tensor:
    """An expression of a program, broadcast from its inputs; floating-point numbers are of `compute_dtype`."""
    device = next(iter(inputs.values())).device
    types: Mapping[str, torch.dtype] = {
        "f32": compute_dtype, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool
    }  # fmt: skip

    def leaf(value: Any, node: Node) -> torch.Tensor:
        return torch.tensor(value, dtype=types[node.dtype], device=device)

    values: dict[Node, torch.Tensor] = {}
    for node in walk(root):
        args = [values[it] for it in node.args]
        if node.op == "const":
            values[node] = leaf(node.value, node)
        elif node.op == "scalar":
            values[node] = leaf(bound.scalars[node.value], node)
        elif node.op == "input":
            values[node] = inputs[node.value]
        elif node.op == "cast":
            values[node] = args[0].to(types[node.dtype])
        elif node.op == "load":
            values[node] = _element(bound.tensors[node.value], args).to(types[node.dtype])
        else:
            values[node] = _OPS[node.op](*args)
    return values[root]


def _element(tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    """``tensor[indices]``; an index below 0 counts from the end, one outside is clamped."""
    inside = []
    for index, size in zip(indices, tensor.shape, strict=True):
        wrapped = torch.where(index < 0, index + size, index)
        inside.append(wrapped.clamp(0, size - 1).long())
    return tensor[tuple(inside)]
