"""The polynomial that stands in for ex2: its coefficients, its error, and that the C++ is what was measured."""

from __future__ import annotations

import ctypes
import math
import re
from fractions import Fraction

import exp2_model as exp2
import numpy as np
from cuda_runs import on_cpu

from multiattn.cuda.cpu import host
from multiattn.cuda.source import ROOT

COEFFICIENTS, MAX_ERROR = exp2.COEFFICIENTS[exp2.KERNEL_DEGREE], exp2.MAX_ERROR[exp2.KERNEL_DEGREE]
HEADER = (ROOT / "include" / "multiattn" / "exp2.cuh").read_text()
SOURCE = """
#include "multiattn/exp2.cuh"
extern "C" void powers(const float* x, float* power, long long count) {
  for (long long i = 0; i < count; ++i) power[i] = multiattn::exp2_fma(x[i]);
}
"""


def floats(*values):
    return np.array(values, dtype=np.float32)


SPECIAL = floats(
    -math.inf, -3.4e38, -1e6, -1000, -128, -127.5, np.nextafter(np.float32(-127), np.float32(-128)), -127, -126.75,
    -126.5, -126.25, -126, -125.5, -24.5, -1.5, -1, -0.5, -1e-3, -1e-30, -1e-45, -0.0, 0.0, 1e-45, 1e-30, 0.5, 1, 1.5,
    2.5, 15.99, 16, 126.5, 127, math.inf, math.nan, -math.nan,
)  # fmt: skip


def test_coefficients_are_the_best_rounded_to_fp32():
    coefficients, points = exp2.fit()
    assert floats(*COEFFICIENTS).tolist() == coefficients.astype(np.float32).tolist()
    assert len(points) == exp2.KERNEL_DEGREE + 1
    errors = (1 + points * np.polynomial.polynomial.polyval(points, coefficients)) / np.exp2(points) - 1
    signs = np.sign(errors * points)  # the error of the slope, which is what alternates
    np.testing.assert_allclose(np.abs(errors), np.abs(errors).max(), rtol=1e-3)
    assert (signs[1:] == -signs[:-1]).all()


def test_relative_error_is_bounded_and_the_bound_is_tight():
    dense = [exp2.samples(-0.5, 0.5, 1 << 20), exp2.samples(-126, 16, 1 << 21)]
    largest = max(np.abs(exp2.exp2_fma(x) / np.exp2(x.astype(np.float64)) - 1).max() for x in dense)
    assert 0.8 * MAX_ERROR < largest < MAX_ERROR


def test_whole_numbers_are_exact():
    x = np.arange(-126, 128, dtype=np.float32)
    assert np.array_equal(exp2.exp2_fma(x), np.ldexp(np.float32(1), x.astype(int)))


def test_what_underflows_and_what_is_no_number():
    x = exp2.samples(-127, -126, 10_001)
    power = exp2.exp2_fma(x)
    assert np.abs(power - np.exp2(x.astype(np.float64))).max() < 2.0**-126
    assert not exp2.exp2_fma(floats(-126.5, -127, -128, -1e6, -math.inf)).any()
    assert np.isnan(exp2.exp2_fma(floats(math.nan, -math.nan, math.inf))).all()
    assert not np.signbit(exp2.exp2_fma(floats(-math.inf, -127, -126.5))).any()


def test_model_of_fma_rounds_once():
    generator = np.random.default_rng(0)
    a, b = (generator.uniform(-2, 2, 2000).astype(np.float32) for _ in range(2))
    c = np.float32(1 + 2**-23)
    a[0], b[0] = 1 + 2**-20, (1 - 2**-20) * 2**-24  # the sum is below halfway by 2^-64, which fp64 drops
    fused = exp2._fma(a, b, c)
    for x, y, result in zip(a, b, fused, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(c))
        off = abs(Fraction(float(result)) - exact)
        for side in (-np.inf, np.inf):
            assert off <= abs(Fraction(float(np.nextafter(result, np.float32(side)))) - exact)


def test_header_has_the_coefficients_and_the_constants():
    found = re.findall(r"EXP2_(\d) = ([\d.]+)f", HEADER)
    assert {int(power): float(value) for power, value in found} == dict(enumerate(COEFFICIENTS, start=1))
    assert re.findall(r"EXP2_ROUND = ([\d.]+)f", HEADER) == [f"{exp2.ROUND:.1f}"]
    (stated,) = re.findall(r"relative error is below ([\d.e-]+)", HEADER)
    assert float(stated) == MAX_ERROR


@on_cpu
def test_the_kernels_function_is_the_model_bit_for_bit():
    library = host.load(host.build_source(SOURCE))
    generator = np.random.default_rng(0)
    halves = np.arange(-260, 256, dtype=np.float32) / 2
    near = [np.nextafter(halves, np.float32(side)) for side in (-np.inf, np.inf)]
    drawn = [generator.uniform(low, high, 1 << 17).astype(np.float32) for low, high in ((-128, 127), (-1, 1), (-20, 0))]
    x = np.concatenate([SPECIAL, halves, *near, exp2.samples(-130, 127), *drawn])
    power = np.empty_like(x)
    pointers = (it.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for it in (x, power))
    library.powers(*pointers, ctypes.c_longlong(x.size))
    expected = exp2.exp2_fma(x)
    is_number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(power), ~is_number)
    assert np.array_equal(power.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])
