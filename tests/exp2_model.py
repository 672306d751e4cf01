"""The polynomial of multiattn.plan.exp2_fma: a fit of its coefficients, a model of the kernels' code, and its error."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from multiattn.plan.exp2_fma import COEFFICIENTS, KERNEL_DEGREE, LOWEST, ROUND

Float32: TypeAlias = npt.NDArray[np.float32]
Float64: TypeAlias = npt.NDArray[np.float64]

MAX_ERROR: Mapping[int, float] = MappingProxyType({KERNEL_DEGREE: 2.95e-6})
"""By degree: from x = -126 on no relative error is larger, the rounding of fp32 included."""

_GRID = 100_001
_EXCHANGES = 20
_SAMPLES = 1 << 18


# ---------------------------------------------------------------- coefficients


def fit(degree: int = KERNEL_DEGREE) -> tuple[Float64, Float64]:
    """The coefficients of f, f^2, ... with the least largest relative error on [-0.5, 0.5], and where it is reached.

    Remez: ``1 + f q(f)`` approximates 2^f to a relative error that is |f| 2^-f times that of q against (2^f - 1) / f,
    so q is fitted with that weight; its error alternates between `degree` + 1 points, which are exchanged for the
    largest ones until they stay.
    """
    grid = np.linspace(-0.5, 0.5, _GRID)
    grid = grid[grid != 0]
    points = 0.5 * np.sin(np.linspace(-1, 1, degree + 1) * np.pi / 2)
    points[points == 0] = 0.1
    for _ in range(_EXCHANGES):
        signs = (-1.0) ** np.arange(degree + 1)
        system = np.column_stack([points[:, None] ** np.arange(degree), signs / _weight(points)])
        coefficients = np.linalg.solve(system, _slope(points))[:-1]
        points = _peaks(grid, _weight(grid) * (np.polynomial.polynomial.polyval(grid, coefficients) - _slope(grid)))
    return np.asarray(coefficients, dtype=np.float64), points


def _slope(f: Float64) -> Float64:
    return np.asarray(np.expm1(f * np.log(2)) / f, dtype=np.float64)


def _weight(f: Float64) -> Float64:
    return np.abs(f) * np.exp2(-f)


def _peaks(grid: Float64, error: Float64) -> Float64:
    """Where `error` is largest between two changes of its sign."""
    runs = np.split(np.arange(grid.size), np.flatnonzero(np.diff(np.sign(error))) + 1)
    return np.array([grid[run[np.argmax(np.abs(error[run]))]] for run in runs])


# ---------------------------------------------------------------- model


def exp2_fma(x: Float32) -> Float32:
    """The result of the header's `exp2_fma`, bit for bit."""
    x = np.where(x < np.float32(LOWEST), np.float32(LOWEST), x)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        shifted = x + np.float32(ROUND)
        f = x - (shifted - np.float32(ROUND))
        *inner, last = (*(np.float32(it) for it in COEFFICIENTS[KERNEL_DEGREE][::-1]), np.float32(1))
        power = np.full_like(f, inner[0])
        for coefficient in (*inner[1:], last):
            power = _fma(power, f, coefficient)
        scale = (shifted.view(np.uint32) << np.uint32(23)).view(np.float32)
        return np.asarray(power * scale, dtype=np.float32)


def _fma(a: Float32, b: Float32, c: np.float32) -> Float32:
    """``a * b + c`` rounded once. In fp64 the product is exact; the sum is rounded to odd, which fp32 cannot tell."""
    product, addend = a.astype(np.float64) * b, np.float64(c)
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)  # what rounding the sum has dropped, exactly (Knuth)
    is_even = (total.view(np.int64) & 1) == 0
    towards = np.where(rest > 0, np.inf, -np.inf)
    odd = np.where((rest != 0) & np.isfinite(total) & is_even, np.nextafter(total, towards), total)
    return np.asarray(odd, dtype=np.float32)


def samples(low: float, high: float, count: int = _SAMPLES) -> Float32:
    """Evenly spread, both ends with them."""
    return np.linspace(low, high, count).astype(np.float32)
