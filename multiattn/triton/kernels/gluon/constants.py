"""The constants of the Gluon kernel, and the layouts that follow from them. Only the layouts take Triton."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from multiattn.plan.exp2_fma import COEFFICIENTS, KERNEL_DEGREE, LOWEST, ROUND, is_polynomial
from multiattn.problem import Problem
from multiattn.triton.gluon_configs import WARPGROUP_ROWS, GluonConfig, pieces_of

TILE_WORDS = 6
"""Words of shared memory that say what the tile of a slot of Q is."""


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
class GluonConstants:
    """Constants of a kernel; it gets them whole, as one constexpr."""

    banded: bool
    """The mask hides keys."""
    ragged: bool
    """The last block of keys is not full."""
    scale_sign: int
    """1, -1 or 0: the sign of the scale."""
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

    @classmethod
    def of(cls, problem: Problem, config: GluonConfig, *, ragged: bool) -> GluonConstants:
        """The constants of a launch."""
        wide, narrow = pieces_of(problem.head_dim)
        return cls(
            banded=problem.is_banded,
            ragged=ragged,
            scale_sign=problem.scale_sign,
            head_dim=problem.head_dim,
            wide=wide,
            narrow=narrow,
            tile_n=config.tile_n,
            warpgroups=config.warpgroups,
            stages=config.stages,
            q_slots=config.q_slots,
            is_persistent=config.scheduler != "one_tile",
            is_dynamic=config.scheduler == "dynamic",
            pingpong=config.pingpong,
            lazy_max=config.lazy_max,
            exp2_fma_sixteenths=config.exp2_fma_sixteenths,
        )

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def words(self) -> int:
        """Words of a slot of Q: they say which tile it has, and whether each warpgroup found it spoiled."""
        return TILE_WORDS + self.warpgroups

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
        return _accumulator(self.tile_n)

    @property
    def out(self) -> Any:
        """Layout of the wide piece of the output, ``[64, wide]``."""
        return _accumulator(self.wide)

    @property
    def out_narrow(self) -> Any:
        """Layout of the narrow one."""
        return _accumulator(self.narrow)

    @property
    def row(self) -> Any:
        """Layout of a number for each row."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(1, self.scores)


def _accumulator(columns: int) -> Any:
    """Layout of what wgmma adds to."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
