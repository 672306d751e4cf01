"""The arrays that kernels take, each with what its kernel assumes of it. Pure Python: no cuTile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from multiattn.layout import Layout
from multiattn.operands import has_any_shape
from multiattn.packed import TILE_LISTS
from multiattn.plan import abi
from multiattn.problem import Problem
from multiattn.sequences import SCALES

ALIGNMENT = 16
"""A compiler is told of strides and addresses that are multiples of 16 bytes."""
SINKS_ALIGNMENT = 4
"""Bytes, as of any fp32 tensor."""
_GIVEN = ("q", "k", "v")
"""Arrays of the caller's, which may be less aligned than our own."""

EXTENTS = ("batch", "heads", "seq")
STRIDES = ("batch_stride", "head_stride", "row_stride")
"""Names of what a compiler may know multiples of, behind the array's."""
VECTORS = ("lse", "dlse", "delta", "row_max", "partial_lse", "partial_max", "lse_columns", "delta_columns")
"""Arrays ``[B, H, S]``; sinks are ``[H]``, captured tensors of any rank, and all others ``[B, H, S, D]``."""


@dataclass(frozen=True, kw_only=True)
class ArrayKind:
    """All that code knows of an array."""

    dtype: torch.dtype
    head_dim: int | None = None
    """None of an array without one."""
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


@dataclass(frozen=True, kw_only=True)
class ArrayArgument:
    """An array, and what its kernel assumes of it."""

    tensor: str
    """Operand or area of workspace."""
    layout: Layout
    kind: ArrayKind


def extents_of(tensor: str) -> tuple[str, ...]:
    """Names of an array's extents, but for D; none of tensors of which nothing is known, as of a captured one."""
    if has_any_shape(tensor) or tensor in TILE_LISTS:
        return ()
    return EXTENTS[1:2] if tensor == "sinks" else EXTENTS


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The assumptions of code for a problem, entered by name while arrays are described: `abi.Binding.constants`."""

    problem: Problem
    emitted: Mapping[str, str] = field(default_factory=dict)
    """The assumptions of code that is there; nothing where code is made for the problem."""
    constants: dict[str, str] = field(default_factory=dict)

    def exactly(self, **values: object) -> None:
        """Enter what code has one value of."""
        abi.exactly(self.constants, **values)

    def flag(self, name: str, needed: bool) -> bool:
        """Enter what code may have although these tensors do not need it; returns what was entered."""
        return abi.flag(self.constants, self.emitted, name, needed)

    def multiple(self, name: str, own: int, value: int) -> int:
        """Enter what `value` must be a multiple of, `own` where the tensors may decide; returns what was entered."""
        return abi.multiple(self.constants, self.emitted, name, own, value)

    def array(self, tensor: str, *, vector_unit: int = 1) -> ArrayArgument:
        """An operand or an area, as `sized`; of a packed batch what is true of any number of rows."""
        layout = known = self.problem.layouts[tensor]
        if self.problem.packing is not None:
            known = replace(self.problem, seq_q=1, seq_kv=1).layouts[tensor]
        return replace(self.sized(tensor, known, vector_unit=vector_unit), layout=layout)

    def sized(self, tensor: str, layout: Layout, *, vector_unit: int = 1) -> ArrayArgument:
        """An array of which no extent is assumed anything, so that code is for any batch, length and number of heads.

        `vector_unit`: what its strides are multiples of, where rows are one number, as their length is a stride.
        """
        known = {name: self.multiple(f"{tensor}_{name}", 1, 1) for name in extents_of(tensor)}
        unit = vector_unit if len(layout.shape) == len(known) else ALIGNMENT // layout.dtype.itemsize

        def divisor(name: str, value: int, wanted: int) -> int:
            return self.multiple(f"{tensor}_{name}", wanted if value % wanted == 0 else 1, value)

        alignment = self.problem.alignment if tensor in _GIVEN else SINKS_ALIGNMENT if tensor == "sinks" else ALIGNMENT
        strides = zip(STRIDES, layout.strides[:-1], strict=False)
        kind = ArrayKind(
            dtype=layout.dtype,
            head_dim=layout.shape[-1] if len(layout.shape) > len(known) else None,
            alignment=divisor("alignment", alignment, alignment),
            extents=tuple(known.values()),
            strides=tuple(divisor(name, it, unit) for name, it in strides),
            overlaps=self.flag(f"{tensor}_overlaps", 0 in layout.strides),
        )
        return ArrayArgument(tensor=tensor, layout=layout, kind=kind)

    def captured(self, tensor: str, layout: Layout | None = None) -> ArrayArgument:
        """A captured tensor; one without a dimension is an array of one element."""
        layout = layout or self.problem.layouts[tensor]
        shape, strides = layout.shape or (1,), layout.strides or (1,)
        itemsize = layout.dtype.itemsize
        self.exactly(**{f"{tensor}_dtype": str(layout.dtype).removeprefix("torch.")})
        may_be_broadcast = tensor in SCALES and len(shape) == 2  # one of each head: code for all that callers give
        any_stride = self.flag(f"{tensor}_any_stride", strides[-1] != 1 or may_be_broadcast)
        kind = ArrayKind(
            dtype=layout.dtype,
            alignment=self.multiple(f"{tensor}_alignment", itemsize, itemsize),
            extents=(1,) * len(shape),
            strides=(1,) * (len(shape) - 1),
            overlaps=True,
            last_stride=None if any_stride else 1,
        )
        return ArrayArgument(tensor=tensor, layout=Layout(shape, strides, layout.dtype), kind=kind)

    def all_captured(self, tensors: Iterable[object]) -> tuple[ArrayArgument, ...]:
        """The arrays of a program's arguments, or of a launch's, that are tensors by name."""
        return tuple(self.captured(it) for it in tensors if isinstance(it, str))

    def sinks(self) -> tuple[ArrayArgument, ...]:
        """The sinks, if there are any."""
        if not self.problem.has_sinks:
            return ()
        self.exactly(sinks="one a head")
        return (self.array("sinks"),)

    def tops(self) -> tuple[ArrayArgument, ...]:
        """The largest score of each row, if a forward writes it."""
        if not self.problem.row_max:
            return ()
        self.exactly(row_max="one a row")
        return (self.array("row_max"),)

    def lists(self, names: Sequence[str], tiles: str) -> tuple[ArrayArgument, ...]:
        """The list `tiles` of a packed batch, then the lists `names` of a block mask, as far as there are any.

        A block mask has counts ``[B, Hq, rows]`` and indices ``[B, Hq, rows, columns]``. Where it is the same for all
        batch entries or heads, these have a stride of 0.
        """
        problem = self.problem
        own = (self.captured(tiles),) if problem.packing is not None else ()
        if problem.blocks is None:
            return own
        listed = problem.lists_of(names)
        *_, rows, columns = problem.layouts[listed.indices].shape
        strides = (listed.stride_batch, listed.stride_head, 1)
        dtype = problem.layouts[listed.counts].dtype
        shape = (problem.batch, problem.heads_q, rows)
        counts = Layout(shape, strides, dtype)
        indices = Layout((*shape, columns), (*(it * columns for it in strides), 1), dtype)
        self.exactly(blocks=f"{problem.blocks.queries}x{problem.blocks.keys}", full_lists=problem.blocks.has_full)
        names_of = (listed.counts, listed.indices, listed.full_counts, listed.full_indices)
        pairs = zip(names_of, (counts, indices) * 2, strict=True)
        return (*own, *(self.captured(name, layout) for name, layout in pairs if name is not None))
