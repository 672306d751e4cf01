"""Which tensor maps the Hopper kernel takes: q, k, v and out as TMA sees them. Pure Python: nothing is encoded here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiattn.plan.abi import L2_256_BYTES, Box, TensorMap
from multiattn.plan.support import Reason
from multiattn.problem import Problem, Strides

if TYPE_CHECKING:
    from multiattn.cuda.wgmma_configs import WgmmaConfig

BOX_COLUMNS = 64
"""Elements of head_dim of a box: 128 bytes, as wide as the swizzle."""
OUT_ROWS = 64
"""Of a box of out: what one warpgroup stores."""

_SWIZZLE_128B = 3  # of CUtensorMapSwizzle
_DTYPES = {"fp16": 6, "bf16": 9}  # of CUtensorMapDataType
_EXTENT_MAX = 2**32 - 1
_STRIDE_UNIT, _STRIDE_MAX = 16, 2**40 - 1  # bytes; of cuTensorMapEncodeTiled, as are the extents


def tensor_maps(problem: Problem, config: WgmmaConfig) -> dict[str, TensorMap]:
    """The map of each tensor, by its name; of out only where TMA stores it."""
    q_shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
    kv_shape = (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim)
    tensors = (
        ("q", q_shape, problem.strides_q, config.tile_m),
        ("k", kv_shape, problem.strides_k, config.tile_n // config.cluster),
        ("v", kv_shape, problem.strides_v, config.tile_n // config.cluster),
        *((("out", q_shape, problem.strides_out, OUT_ROWS),) if config.tma_store else ()),
    )
    return {name: _map(name, problem, shape, strides, rows) for name, shape, strides, rows in tensors}


def _map(name: str, problem: Problem, shape: tuple[int, int, int, int], strides: Strides, rows: int) -> TensorMap:
    return TensorMap(
        tensor=name,
        shape=shape,
        strides=_byte_strides(shape, strides, problem.torch_dtype.itemsize),
        box=Box(extents=(1, 1, rows, BOX_COLUMNS), swizzle=_SWIZZLE_128B, dtype=_DTYPES[problem.dtype]),
        l2_promotion=L2_256_BYTES,
    )


def _byte_strides(shape: tuple[int, ...], strides: Strides, itemsize: int) -> tuple[int, ...]:
    """Strides of B, H and S as TMA is told. A broadcast dimension keeps its extent, with a stride of zero."""
    return tuple(stride * itemsize for stride in strides)


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
