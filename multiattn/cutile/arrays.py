"""The arrays that kernels take, each with what its kernel assumes of it. Pure Python: no cuTile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from multiattn.layout import Layout
from multiattn.operands import has_any_shape
from multiattn.packed import TILE_LISTS
from multiattn.plan import abi
from multiattn.problem import Problem
from multiattn.score import LoweredScore

ALIGNMENT = 16
"""A compiler is told of strides and addresses that are multiples of 16 bytes."""
SINKS_ALIGNMENT = 4
"""Bytes, as of any fp32 tensor."""
_GIVEN = ("q", "k", "v")
"""Arrays of the caller's, which may be less aligned than our own."""

EXTENTS = ("batch", "heads", "seq")
STRIDES = ("batch_stride", "head_stride", "row_stride")
"""Names of what a compiler may know multiples of, behind the array's."""
VECTORS = ("lse", "dlse", "delta", "partial_lse")
"""Arrays ``[B, H, S]``; sinks are ``[H]``, captured tensors of any rank, and all others ``[B, H, S, D]``."""


@dataclass(frozen=True, kw_only=True)
class ArrayArgument:
    """An array, and what its kernel assumes of it."""

    tensor: str
    """Operand or area of workspace."""
    layout: Layout
    alignment: int
    """Bytes that its address is a multiple of."""
    extents: tuple[int, ...]
    """A divisor of each of B, H and S; of each extent of a captured tensor."""
    strides: tuple[int, ...]
    """A divisor of each stride in front of the last."""
    overlaps: bool
    """Elements may share memory."""
    last_stride: int | None = 1
    """None where nothing is assumed of it."""


def extents_of(tensor: str) -> tuple[str, ...]:
    """Names of an array's extents, but for D; none of tensors of which nothing is known, as of a captured one."""
    if has_any_shape(tensor) or tensor in TILE_LISTS:
        return ()
    return EXTENTS[1:2] if tensor == "sinks" else EXTENTS


def array_of(
    assumed: dict[str, str], emitted: Mapping[str, str], problem: Problem, tensor: str, *, vector_unit: int = 1
) -> ArrayArgument:
    """An array of a problem, as `any_size_of`; of a packed batch what is true of any number of rows."""
    layout = known = problem.layouts[tensor]
    if problem.packing is not None:
        known = replace(problem, seq_q=1, seq_kv=1).layouts[tensor]
    return replace(any_size_of(assumed, emitted, problem, tensor, known, vector_unit=vector_unit), layout=layout)


def any_size_of(
    assumed: dict[str, str],
    emitted: Mapping[str, str],
    problem: Problem,
    tensor: str,
    layout: Layout,
    *,
    vector_unit: int = 1,
) -> ArrayArgument:
    """An array of which no extent is assumed anything, so that code is for any batch, length and number of heads.

    `vector_unit`: what its strides are multiples of, where rows are one number, as their length is a stride.
    """
    known = {name: abi.multiple(assumed, emitted, f"{tensor}_{name}", 1, 1) for name in extents_of(tensor)}
    unit = vector_unit if len(layout.shape) == len(known) else ALIGNMENT // layout.dtype.itemsize

    def divisor(name: str, value: int, wanted: int) -> int:
        return abi.multiple(assumed, emitted, f"{tensor}_{name}", wanted if value % wanted == 0 else 1, value)

    alignment = problem.alignment if tensor in _GIVEN else SINKS_ALIGNMENT if tensor == "sinks" else ALIGNMENT
    strides = zip(STRIDES, layout.strides[:-1], strict=False)
    return ArrayArgument(
        tensor=tensor,
        layout=layout,
        alignment=divisor("alignment", alignment, alignment),
        extents=tuple(known.values()),
        strides=tuple(divisor(name, it, unit) for name, it in strides),
        overlaps=abi.flag(assumed, emitted, f"{tensor}_overlaps", 0 in layout.strides),
    )


def captured_of(assumed: dict[str, str], emitted: Mapping[str, str], layout: Layout, tensor: str) -> ArrayArgument:
    """A captured tensor; one without a dimension is an array of one element. Enters what is assumed of it."""
    shape, strides = layout.shape or (1,), layout.strides or (1,)
    itemsize = layout.dtype.itemsize
    abi.exactly(assumed, **{f"{tensor}_dtype": str(layout.dtype).removeprefix("torch.")})
    any_stride = abi.flag(assumed, emitted, f"{tensor}_any_stride", strides[-1] != 1)
    return ArrayArgument(
        tensor=tensor,
        layout=Layout(shape, strides, layout.dtype),
        alignment=abi.multiple(assumed, emitted, f"{tensor}_alignment", itemsize, itemsize),
        extents=(1,) * len(shape),
        strides=(1,) * (len(shape) - 1),
        overlaps=True,
        last_stride=None if any_stride else 1,
    )


def lists_of(
    assumed: dict[str, str], emitted: Mapping[str, str], problem: Problem, names: Sequence[str]
) -> tuple[ArrayArgument, ...]:
    """The lists `names` of a block mask, counts ``[B, Hq, rows]`` and indices ``[B, Hq, rows, columns]``, or none.

    Where the mask is the same for all batch entries or heads, these have a stride of 0.
    """
    if problem.blocks is None:
        return ()
    listed = problem.lists_of(names)
    *_, rows, columns = problem.layouts[listed.indices].shape
    strides = (listed.stride_batch, listed.stride_head, 1)
    dtype = problem.layouts[listed.counts].dtype
    shape = (problem.batch, problem.heads_q, rows)
    counts = Layout(shape, strides, dtype)
    indices = Layout((*shape, columns), (*(it * columns for it in strides), 1), dtype)
    abi.exactly(assumed, blocks=f"{problem.blocks.queries}x{problem.blocks.keys}", full_lists=problem.blocks.has_full)
    names_of = (listed.counts, listed.indices, listed.full_counts, listed.full_indices)
    pairs = zip(names_of, (counts, indices) * 2, strict=True)
    return tuple(captured_of(assumed, emitted, layout, name) for name, layout in pairs if name is not None)


def gradients_of(
    assumed: dict[str, str], emitted: Mapping[str, str], problem: Problem, lowered: LoweredScore | None
) -> tuple[ArrayArgument, ...]:
    """The sums of the gradients of captured tensors, in the order of their slots."""
    if lowered is None or problem.score is None:
        return ()
    given = problem.score.gradient_arguments(lowered).values()
    return tuple(captured_of(assumed, emitted, problem.layouts[it], it) for it in given if isinstance(it, str))
