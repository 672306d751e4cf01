"""Tensors of a launch as its Problem describes them, and its workspace: what the tables of every language draw on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from multiattn.problem import Problem

_ALIGNMENT = 16
"""Bytes that an area of workspace starts at a multiple of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One tensor; strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense tensor of this shape."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def layouts(problem: Problem) -> Mapping[str, Layout]:
    """Every tensor of a launch by its name in `Operands`, and the areas of a backward's workspace.

    Those are fp32 and contiguous: ``delta`` ``[B, Hq, Sq]``, and ``dq_sum`` ``[B, Hq, Sq, D]``.
    """
    rows = (problem.batch, problem.heads_q, problem.seq_q)
    queries, keys = (*rows, problem.head_dim), (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim)
    row_strides = (problem.heads_q * problem.seq_q, problem.seq_q, 1)
    row = Layout(dtype=torch.float32, shape=rows, strides=row_strides)
    sums = tuple(stride * problem.head_dim for stride in row_strides)
    own = {
        "q": (queries, problem.strides_q),
        "k": (keys, problem.strides_k),
        "v": (keys, problem.strides_v),
        "out": (queries, problem.strides_out),
        "dout": (queries, problem.strides_out),
        "dq": (queries, problem.strides_dq),
        "dk": (keys, problem.strides_dk),
        "dv": (keys, problem.strides_dv),
    }
    return {
        **{
            name: Layout(dtype=problem.torch_dtype, shape=shape, strides=(*strides, 1))
            for name, (shape, strides) in own.items()
        },
        **dict.fromkeys(("lse", "dlse", "delta"), row),
        "dq_sum": Layout(dtype=torch.float32, shape=queries, strides=(*sums, 1)),
    }


def pack_areas(sizes: Mapping[str, int]) -> tuple[Mapping[str, int], int]:
    """Where each area of a workspace starts, by the bytes of each, and the bytes of all.

    The largest come first, so that they are as aligned as the allocator makes them.
    """
    areas: dict[str, int] = {}
    end = 0
    for name, size in sorted(sizes.items(), key=lambda area: -area[1]):
        areas[name] = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = areas[name] + size
    return areas, end
