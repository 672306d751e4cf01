"""Dtypes, shapes and strides of tensors, and how results are laid out.

Layout everywhere is ``[B, H, S, D]`` (batch, heads, sequence, head_dim), any strides with unit stride on D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
)
"""Short names of the dtypes a Problem can carry; which of them a backend takes is its capability."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

STORED: Mapping[str, torch.dtype] = MappingProxyType({"e4m3": torch.float8_e4m3fn, "int8": torch.int8})
"""Short names of the dtypes that a cache may have beside that of q, with scales."""

STORED_NAMES = {dtype: name for name, dtype in STORED.items()}

Strides = tuple[int, int, int]
"""Element strides of (batch, head, sequence); the stride of D is 1 by contract."""

Shape = tuple[int, ...]

VECTOR_BYTES = 16
"""Widest access any kernel makes to global memory: cp.async, TMA and 128-bit loads all want this."""


class Layout(NamedTuple):
    """A tensor as the launch contract has it; strides in elements."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return self.dtype.itemsize * math.prod(self.shape)


def shape_of_out(q: Sequence[int], v: Sequence[int]) -> Shape:
    """The shape of out, and of its gradient, of q and v with these: the rows of q, as wide as those of v."""
    return (*q[:-1], v[-1])


def widths(head_dim: int, head_dim_v: int) -> str:
    """``D=128``, or ``D=192 Dv=128`` where v has a width of its own."""
    return f"D={head_dim}" if head_dim_v == head_dim else f"D={head_dim} Dv={head_dim_v}"


def flops_per_pair(head_dim: int, head_dim_v: int, *, backward: bool = False) -> int:
    """FLOP of tensor cores for a query and a key that it sees, as they are counted everywhere.

    Forward ``q k^T`` and ``p v``; backward ``q k^T`` again, ``dout v^T``, then dv, dk and dq. A variant that recomputes
    some gets no credit for it.
    """
    return 2 * (3 * head_dim + 2 * head_dim_v) if backward else 2 * (head_dim + head_dim_v)


def strides_of(tensor: torch.Tensor) -> Strides:
    """Strides of (B, H, S), with those of one-element or empty dimensions made canonical.

    PyTorch leaves the stride of a size-1 dimension arbitrary; nobody walks it, so it must not spoil alignment.
    """
    canonical = contiguous_strides(tuple(tensor.shape))
    if tensor.numel() == 0:
        return canonical
    walked = zip(tensor.shape, tensor.stride(), canonical, strict=False)
    batch, head, row = (given if size > 1 else own for size, given, own in walked)
    return batch, head, row


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its last dimension has unit stride, else a copy that has."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def contiguous_strides(shape: Shape) -> Strides:
    """Strides of (B, H, S) of a contiguous tensor ``[B, H, S, D]``."""
    _, heads, seq, head_dim = (max(size, 1) for size in shape)
    return heads * seq * head_dim, seq * head_dim, head_dim


def row_major(shape: Shape) -> Shape:
    """Strides of a contiguous tensor of any shape, as PyTorch gives it."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def dense_strides(strides: Strides, shape: Shape, head_dim: int) -> Strides:
    """Strides of rows of `head_dim` in the order of dense ``[B, S, H, D]`` memory if `strides` are of it.

    Else those of contiguous ``[B, H, S, D]``.
    """
    _, heads, seq, given = shape
    if strides == (seq * heads * given, given, heads * given):
        return seq * heads * head_dim, head_dim, heads * head_dim
    return contiguous_strides((*shape[:3], head_dim))


def fits_broadcast(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """True if every dimension is 1 or has its size; by ==, as `in` has Dynamo take a number for none of its symbols."""
    return all(it == 1 or it == size for it, size in zip(shape, sizes, strict=True))
