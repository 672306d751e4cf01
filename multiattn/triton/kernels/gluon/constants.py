"""What is fixed when the Gluon kernel is compiled, and the layouts that follow from it."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon import language as gl

from multiattn.plan.exp2_fma import COEFFICIENTS, KERNEL_DEGREE, LOWEST, ROUND, is_polynomial

WARPGROUP_ROWS = 64
"""Queries of a warpgroup: the rows of a wgmma."""
NO_TILE = gl.constexpr(-1)
"""In place of a number of blocks: there are no more tiles."""

# Words of shared memory for each slot of Q: what its tile is, and from SPOILED on one for each warpgroup.
FIRST_QUERY, HEAD, BATCH, BLOCKS, EXACT, TILE, SPOILED = (gl.constexpr(i) for i in range(7))


def exp2_polynomial(i: int, *, clamp: bool) -> str:
    """PTX of ``$i = 2^$(16+i)`` without ex2, as `exp2_fma` of cuda/include/multiattn/exp2.cuh.

    clamp: a weight that is too large stays large, and does not become anything.
    """
    *inner, first = (_bits(it) for it in COEFFICIENTS[KERNEL_DEGREE][::-1])
    lines = [
        "{.reg .f32 x, s, f, p;",
        f"max.NaN.f32 x, ${16 + i}, {_bits(LOWEST)};",
        *([f"min.NaN.f32 x, x, {_bits(127.0)};"] if clamp else []),
        f"add.rn.f32 s, x, {_bits(ROUND)};",
        f"sub.rn.f32 f, s, {_bits(ROUND)};",
        "sub.rn.f32 f, x, f;",
        f"fma.rn.f32 p, {inner[0]}, f, {inner[1]};",
        *(f"fma.rn.f32 p, p, f, {it};" for it in (*inner[2:], first, _bits(1.0))),
        "shl.b32 s, s, 23;",
        f"mul.rn.f32 ${i}, p, s;}}",
    ]
    return " ".join(lines)


def _bits(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Constants of a kernel; it gets them whole, as one constexpr."""

    causal: bool
    ragged: bool
    """Whether the last block of keys is not full."""
    scale_sign: int
    """Of the scale: 1, -1 or 0."""
    head_dim: int
    wide: int
    """Columns of head_dim in the first of its pieces, a power of two."""
    narrow: int
    """In the second, which may reach beyond head_dim; 0 where there is none."""
    tile_n: int
    warpgroups: int
    stages: int
    q_slots: int
    is_persistent: bool
    is_dynamic: bool
    pingpong: bool
    lazy_max: bool
    exp2_fma_sixteenths: int

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def words(self) -> int:
        """Of a slot of Q: what its tile is, and whether each warpgroup found it spoiled."""
        return int(SPOILED.value) + self.warpgroups

    @property
    def exponential(self) -> str:
        """PTX of 16 weights ``$0`` to ``$15`` from 16 scores, `exp2_fma_sixteenths` of them on the FMA units."""
        return "\n".join(
            exp2_polynomial(i, clamp=self.lazy_max)
            if is_polynomial(i // 2, self.exp2_fma_sixteenths)
            else f"ex2.approx.ftz.f32 ${i}, ${16 + i};"
            for i in range(16)
        )

    @property
    def scores(self) -> Any:
        """Layout of scores and weights, ``[64, tile_n]``."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.tile_n, 16])

    @property
    def out(self) -> Any:
        """Layout of the wide piece of the output, ``[64, wide]``."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.wide, 16])

    @property
    def out_narrow(self) -> Any:
        """Layout of the narrow one."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.narrow, 16])

    @property
    def row(self) -> Any:
        """Layout of a number for each row."""
        return gl.SliceLayout(1, self.scores)
