"""A program in eager PyTorch: on whole tensors of scores, in any compute dtype, differentiable. Truth for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from multiattn.score.arithmetic import BINARY, UNARY
from multiattn.score.discrete import decides, decisive, depends_on_score
from multiattn.score.expression import Node, derivative, read, walk
from multiattn.score.program import BoundScore


def _of_integers(divide: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A remainder of integers. PyTorch's own stops the process at the least one by -1; by 1 as much is left."""
    return lambda x, y: divide(x, torch.where(y == -1, 1, y))


def _quotient(rounding_mode: str) -> Callable[..., torch.Tensor]:
    def divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        by_one = torch.where(y == -1, 1, y)
        return torch.where(y == -1, -x, torch.div(x, by_one, rounding_mode=rounding_mode))

    return divide


_OPS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        **{op: getattr(torch, op) for op in (*UNARY, *BINARY, "where") if hasattr(torch, op)},
        "min": torch.minimum,
        "max": torch.maximum,
        "floordiv": _quotient("floor"),
        "mod": _of_integers(torch.remainder),
        "quotient": _quotient("trunc"),
        "remainder": _of_integers(torch.fmod),
        "shr": torch.bitwise_right_shift,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "not": torch.logical_not,
        "mul_rn": torch.mul,
        "div_rn": torch.div,
        "sqrt_rn": torch.sqrt,
    }
)


class Part(NamedTuple):
    """Some queries and keys of longer sequences, or batch entries: scores depend on where in these they are."""

    first_query: int
    first_key: int
    seq_q: int
    seq_kv: int
    first_entry: int = 0


def modified(bound: BoundScore, scores: torch.Tensor, part: Part | None = None) -> torch.Tensor:
    """The scores ``[B, Hq, Sq, Skv]``, which are ``scale * q @ k^T``, as the program changes them, the mask aside.

    Everything is computed in the dtype of `scores`. `part` says where they are from, if they are not all.
    """
    root = bound.program.score
    if root is None:
        return scores
    places = places_of(scores.shape, scores.device, part)
    return evaluate(root, bound, {**places, "score": scores}, scores.dtype).expand_as(scores)


def slope(bound: BoundScore, scores: torch.Tensor, part: Part | None = None) -> torch.Tensor:
    """How each of the scores moves with ``scale * q @ k^T``: the program's derivative, as kernels have it."""
    root = bound.program.score
    if root is None:
        return torch.ones_like(scores)
    places = places_of(scores.shape, scores.device, part)
    steepness = derivative(root, read("score"))
    return evaluate(steepness, bound, {**places, "score": scores}, scores.dtype).expand_as(scores)


def gradients(
    bound: BoundScore,
    slots: Sequence[int],
    scores: torch.Tensor,
    dscores: torch.Tensor,
    part: Part | None = None,
    *,
    apart: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the captured tensors in `slots`, from those of the modified scores.

    With `apart` each score has an element of its own, ``[B, Hq, Sq, Skv]``; a tensor is then loaded but once.
    """
    root = bound.program.score
    if root is None or not slots:
        return ()
    inputs = {**places_of(scores.shape, scores.device, part), "score": scores}
    totals = {it: scores.new_zeros(scores.shape if apart else bound.tensors[it].shape) for it in slots}
    for load in (it for it in walk(root) if it.op == "load" and it.value in totals):
        slope = evaluate(derivative(root, load), bound, inputs, scores.dtype)
        each = torch.where(dscores == 0.0, 0.0, dscores * slope)  # where a key is hidden, a slope may be infinite
        if apart or not load.args:
            totals[load.value] += each if apart else each.sum()
        else:
            indices = [evaluate(it, bound, inputs, scores.dtype) for it in load.args]
            each, *inside = torch.broadcast_tensors(each, *_inside(bound.tensors[load.value], indices))
            totals[load.value].index_put_(tuple(inside), each, accumulate=True)
    return tuple(totals.values())


def visible(
    bound: BoundScore, shape: tuple[int, ...], device: torch.device, part: Part | None = None
) -> torch.Tensor | None:
    """The keys that `mask_mod` lets each query see: bool, broadcastable to ``[B, Hq, Sq, Skv]``; None for all."""
    root = bound.program.mask
    return None if root is None else evaluate(root, bound, places_of(shape, device, part), torch.float32)


def places_of(shape: tuple[int, ...], device: torch.device, part: Part | None = None) -> dict[str, torch.Tensor]:
    """The inputs of each score, int32, shaped to be broadcast to ``[B, Hq, Sq, Skv]``."""
    part = part or Part(0, 0, shape[2], shape[3])
    places = {}
    for axis, (name, first) in enumerate(zip(("b", "h", "q", "kv"), (part.first_entry, 0, *part[:2]), strict=True)):
        index = first + torch.arange(shape[axis], dtype=torch.int32, device=device)
        places[name] = index.view([-1 if it == axis else 1 for it in range(4)])
    for name, length in (("seq_q", part.seq_q), ("seq_kv", part.seq_kv)):
        places[name] = torch.full((), length, dtype=torch.int32, device=device)
    return places


def evaluate(
    root: Node, bound: BoundScore, inputs: Mapping[str, torch.Tensor], compute_dtype: torch.dtype
) -> torch.Tensor:
    """An expression of a program, or of its form for kernels, broadcast from `inputs`.

    Floating-point numbers are of `compute_dtype`; but those of positions and captured numbers alone are fp32, as in
    PyTorch, wherever their last bit decides. `inputs` has the numbers that a kernel takes, too, where they occur.
    """
    device = next(iter(inputs.values())).device
    types: Mapping[str, torch.dtype] = {
        "f32": compute_dtype, "i32": torch.int32, "i64": torch.int64, "bool": torch.bool
    }  # fmt: skip
    short = {it for it in decisive(root) if not depends_on_score(it)}
    widest = torch.promote_types(compute_dtype, torch.float32)

    def dtype_of(node: Node) -> torch.dtype:
        is_short_leaf = node in short and node.op in ("const", "scalar", "cast", "load")
        return widest if is_short_leaf else types[node.dtype]

    def leaf(value: Any, node: Node) -> torch.Tensor:
        return torch.full((), value, dtype=dtype_of(node), device=device)  # torch.tensor() waits for a GPU

    def arguments(node: Node) -> list[torch.Tensor]:
        if compute_dtype == torch.float32:
            return [values[it] for it in node.args]
        floats = [it for it in node.args if it.dtype == "f32"]
        is_short = node in short or (decides(node) and short.issuperset(floats))
        dtype = torch.float32 if is_short else compute_dtype
        return [values[it].to(dtype) if it.dtype == "f32" else values[it] for it in node.args]

    values: dict[Node, torch.Tensor] = {}
    for node in walk(root):
        args = arguments(node)
        if node.op == "const":
            values[node] = leaf(node.value, node)
        elif node.op == "scalar":
            values[node] = leaf(bound.scalars[node.value], node)
        elif node.op in ("input", "derived"):
            values[node] = inputs[node.value]
        elif node.op == "cast":
            values[node] = args[0].to(dtype_of(node))
        elif node.op == "load":
            values[node] = _element(bound.tensors[node.value], args).to(dtype_of(node))
        else:
            values[node] = _OPS[node.op](*args)
    return values[root].to(types[root.dtype])


def _element(tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    """``tensor[indices]``; an index below 0 counts from the end, one outside is clamped."""
    return tensor[tuple(_inside(tensor, indices))]


def _inside(tensor: torch.Tensor, indices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Indices as an element is taken by them."""
    inside = []
    for index, size in zip(indices, tensor.shape, strict=True):
        wrapped = torch.where(index < 0, index + size, index)
        inside.append(wrapped.clamp(0, size - 1).long())
    return inside
