"""The tensor maps of the Hopper kernel: q, k, v and out as TMA sees them. Pure Python: nothing is encoded here."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn.plan.abi import L2_256_BYTES, Box, TensorMap
from multiattn.plan.support import Reason
from multiattn.problem import Problem

BOX_COLUMNS = 64
"""Elements of head_dim of a box: 128 bytes, as wide as the swizzle."""

_SWIZZLE_128B = 3  # of CUtensorMapSwizzle
_DTYPES = {"fp16": 6, "bf16": 9}  # of CUtensorMapDataType
_EXTENT_MAX = 2**32 - 1
_STRIDE_UNIT, _STRIDE_MAX = 16, 2**40 - 1  # bytes; of cuTensorMapEncodeTiled, as are the extents


def tensor_maps(problem: Problem, box_rows: Mapping[str, int]) -> dict[str, TensorMap]:
    """The map of each tensor that has boxes of so many rows. A broadcast dimension keeps its extent, with stride 0."""
    layouts = problem.layouts
    return {
        name: TensorMap(
            tensor=name,
            shape=layouts[name].shape,
            strides=tuple(stride * problem.torch_dtype.itemsize for stride in layouts[name].strides[:-1]),
            box=Box(extents=(1, 1, rows, BOX_COLUMNS), swizzle=_SWIZZLE_128B, dtype=_DTYPES[problem.dtype]),
            l2_promotion=L2_256_BYTES,
        )
        for name, rows in box_rows.items()
    }


def why_not_mapped(tensor_map: TensorMap) -> tuple[Reason, ...]:
    """Every reason why TMA cannot walk a tensor."""
    name = tensor_map.tensor
    reasons = [
        Reason(code="seq", got=f"{name} with an extent of {extent}", allowed=f"extents up to {_EXTENT_MAX}")
        for extent in tensor_map.shape
        if extent > _EXTENT_MAX
    ]
    reasons += [
        Reason(
            code="strides",
            got=f"{name} with a stride of {stride} bytes",
            allowed=f"multiples of {_STRIDE_UNIT} bytes up to {_STRIDE_MAX}",
        )
        for stride in tensor_map.strides
        if stride > _STRIDE_MAX or stride % _STRIDE_UNIT
    ]
    return tuple(reasons)
