"""2^x in a cuTile kernel, a share of a tile by a polynomial on the FMA units: `plan.exp2_fma` has its numbers."""

# cuda.tile is untyped, and so are its decorators:
# mypy: disable-error-code="untyped-decorator"

from typing import Any

import cuda.tile as ct

from multiattn.plan.exp2_fma import COEFFICIENTS, KERNEL_DEGREE, LOWEST, ROUND

EXP2_1, EXP2_2, EXP2_3, EXP2_4 = COEFFICIENTS[KERNEL_DEGREE]

HIGHEST = 127.0
"""Larger numbers count as this. Else they would leave the exponent's bits, and could come out as any number."""


@ct.function
def exp2_fma(x: Any) -> Any:
    """2^x without ex2, as `exp2_fma` of cuda/include/multiattn/exp2.cuh, but 2^127 for all that is larger."""
    x = ct.minimum(ct.maximum(x, LOWEST, propagate_nan=True), HIGHEST, propagate_nan=True)
    shifted = x + ROUND
    f = x - (shifted - ROUND)
    power = (((EXP2_4 * f + EXP2_3) * f + EXP2_2) * f + EXP2_1) * f + 1.0
    return power * ct.bitcast(ct.bitcast(shifted, ct.int32) << 23, ct.float32)


@ct.function
def is_on_fma(shape: Any, sixteenths: Any) -> Any:
    """Which scores of a tile ``[M, N]`` go to the FMA units: `plan.exp2_fma.is_polynomial` of a thread's pairs.

    In an accumulator of mma.sync or wgmma a thread has, of each 8 columns, two neighbours in a row and two in the row 8
    below: bit 3 of a row and all but the lowest 3 bits of a column belong to the register, whatever the thread. So the
    compiler knows of each register which way it goes, and keeps the code for that one only, with nothing to move.
    """
    row = ct.arange(shape[0], dtype=ct.int32)[:, None]
    column = ct.arange(shape[1], dtype=ct.int32)[None, :]
    pair = (column >> 3) * 2 + (row >> 3 & 1)
    return (pair + 1) * sixteenths >> 4 > pair * sixteenths >> 4


@ct.function
def exp2_shared(x: Any, sixteenths: Any, flush_to_zero: Any) -> Any:
    """2^x of an accumulator ``[M, N]``, `sixteenths` of it on the FMA units, the rest by ex2."""
    return ct.where(is_on_fma(x.shape, sixteenths), exp2_fma(x), ct.exp2(x, flush_to_zero=flush_to_zero))
