"""Shared by families with wgmma and TMA: the sizes of warpgroups and panels, and tensors as TMA sees them.

Pure Python: no tensor map is encoded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multiattn.cuda.family import FamilyConfig, padded
from multiattn.cuda.naming import walking_kernel
from multiattn.cuda.source import Instance
from multiattn.packed import RAGGED_ROWS, ragged
from multiattn.plan import remedies
from multiattn.plan.abi import L2_256_BYTES, Box, TensorMap
from multiattn.plan.backend import Plan
from multiattn.plan.limits import Check
from multiattn.plan.support import Reason
from multiattn.problem import Problem

WARPGROUP_THREADS, WARPGROUP_ROWS = 128, 64
BARRIER_BYTES = 512
BOX_COLUMNS = 64
"""Elements of head_dim of a box, and of a panel: 128 bytes, as wide as the swizzle."""
_PANEL_ROW_BYTES = 128
DEPTH = 16  # columns of Q that a wgmma multiplies: a fragment of 4 registers
TILES_OF_KEYS = (lambda it: it in range(16, 257, 16), "multiples of 16 from 16 to 256")
"""The limit of a forward's tile_n."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaFamilyConfig(FamilyConfig):
    """A config whose blocks have warpgroups that multiply, and one more that loads."""

    @property
    def warpgroups(self) -> int:
        """How many multiply: the consumers."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: its consumers, and the producer's warpgroup."""
        return WARPGROUP_THREADS * (self.warpgroups + 1)

    def why_not_boxes(self, problem: Problem) -> tuple[Reason, ...]:
        """Every reason why TMA cannot walk a tensor that it should."""
        maps = tensor_maps(problem, self.box_rows(problem)).values()
        return tuple(reason for it in maps for reason in why_not_mapped(it))


def panels_of(problem: Problem) -> int:
    """The panels of the wider of a row of q or k and one of v or out: they take turns in their places."""
    return -(-problem.width // BOX_COLUMNS)


def row_bytes(problem: Problem) -> int:
    """A row of a tile in shared memory: whole panels."""
    return panels_of(problem) * _PANEL_ROW_BYTES


def width_bytes(head_dim: int) -> int:
    """A row of a tile of so many columns in shared memory: whole panels."""
    return -(-head_dim // BOX_COLUMNS) * _PANEL_ROW_BYTES


def product_columns(problem: Problem) -> float:
    """Columns of products: as their depth head_dim is padded to 16, as a width head_dim_v to 8."""
    return (padded(problem.head_dim, DEPTH) + padded(problem.head_dim_v, 8)) / 2


def packed_check(problem: Problem) -> Check:
    """The check that a packed batch has no more rows than its tensor maps."""
    rows = max(problem.seq_q, problem.seq_kv)
    return problem.packing is None or rows <= RAGGED_ROWS, f"a packed batch of {rows} rows", f"up to {RAGGED_ROWS}"


def block_check(problem: Problem, config: object, tile_m: int, tile_n: int) -> Check:
    """The check that tiles of so many queries and keys lie in one block of a block mask, if there is one."""
    if (blocks := problem.blocks) is None:
        return True, "", ""
    fits = blocks.queries % tile_m == 0 and blocks.keys % tile_n == 0
    return fits, f"blocks of {blocks.queries} x {blocks.keys} ({config})", f"multiples of {tile_m} x {tile_n}"


def forward_registers(problem: Problem, tile_n: int) -> int:
    """32-bit registers that a forward's thread needs for output, scores and weights."""
    return padded(problem.head_dim_v, 8) // 2 + tile_n // 2 + tile_n // 4


def wgmma_kernel(plan: Plan, traits: str, *config: str, **more: Any) -> Instance:
    """A `walking_kernel` with wgmma."""
    return walking_kernel(plan, traits, *config, overlaps=True, arch_features=True, **more)


def why_not_mapped(tensor_map: TensorMap) -> tuple[Reason, ...]:
    """Every reason why TMA cannot walk a tensor."""
    name = tensor_map.tensor
    reasons = [
        Reason(
            code="seq",
            got=f"{name} with an extent of {extent}",
            allowed=f"extents up to {_EXTENT_MAX}",
            hint=remedies.LENGTH,
        )
        for extent in tensor_map.shape
        if extent > _EXTENT_MAX
    ]
    reasons += [
        Reason(
            code="strides",
            got=f"{name} with a stride of {stride} bytes",
            allowed=f"multiples of {_STRIDE_UNIT} bytes up to {_STRIDE_MAX}",
            hint=remedies.STRIDES,
        )
        for stride in tensor_map.strides
        if not 0 <= stride <= _STRIDE_MAX or stride % _STRIDE_UNIT
    ]
    return tuple(reasons)
