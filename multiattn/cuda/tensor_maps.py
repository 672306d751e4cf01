"""The tensor maps of the Hopper kernel: q, k, v and out as TMA sees them. Pure Python: nothing is encoded here."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn.packed import ragged
from multiattn.plan import remedies
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
    """The map of each tensor that has boxes of so many rows. A broadcast dimension keeps its extent, with stride 0.

    Of a packed batch they are `ragged`: a box lies in a sequence, whose end is the tensor's for it.
    """
    made = {}
    for name, rows in box_rows.items():
        layout = problem.layouts[name] if problem.packing is None else ragged(problem.layouts[name])
        extents = (*(1,) * (len(layout.shape) - 2), rows, BOX_COLUMNS)
        made[name] = TensorMap(
            tensor=name,
            shape=layout.shape,
            strides=tuple(stride * problem.torch_dtype.itemsize for stride in layout.strides[:-1]),
            box=Box(extents=extents, swizzle=_SWIZZLE_128B, dtype=_DTYPES[problem.dtype]),
            l2_promotion=L2_256_BYTES,
        )
    return made


def why_not_mapped(tensor_map: TensorMap) -> tuple[Reason, ...]:
    """Every reason why TMA cannot walk a tensor."""
    name = tensor_map.tensor
    reasons = [
        Reason(
            code="seq",
            got=f"{name} with an extent of {extent}",
            allowed=f"extents up to {_EXTENT_MAX}",
            hint=remedies.for_length(),
        )
        for extent in tensor_map.shape
        if extent > _EXTENT_MAX
    ]
    reasons += [
        Reason(
            code="strides",
            got=f"{name} with a stride of {stride} bytes",
            allowed=f"multiples of {_STRIDE_UNIT} bytes up to {_STRIDE_MAX}",
            hint=remedies.for_strides(),
        )
        for stride in tensor_map.strides
        if not 0 <= stride <= _STRIDE_MAX or stride % _STRIDE_UNIT
    ]
    return tuple(reasons)
