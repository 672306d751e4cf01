// 2^x on the FMA units, for where the units of ex2 are the bottleneck (FlashAttention-4). tests/exp2_model.py fits the
// coefficients and models the error.
#pragma once
#include "multiattn/ptx_sm90.cuh"

namespace multiattn {

// 2^f for f in [-0.5, 0.5] is 1 + f (EXP2_1 + f (EXP2_2 + f (EXP2_3 + f EXP2_4))), with the least largest relative error of
// all such. Degree 3 is one FMA less; parity's budget for lse does not hold with it.
constexpr float EXP2_1 = 0.6931242f, EXP2_2 = 0.24024099f, EXP2_3 = 0.055906426f, EXP2_4 = 0.009582853f;

// 1.5 * 2^23 + 127: added to x, it leaves round(x) + 127 in the low bits, the exponent field of 2^round(x).
constexpr float EXP2_ROUND = 12583039.0f;

// 2^x for x up to 127, exact at whole x. Its relative error is below 2.95e-6 from x = -126 on; what is below 2^-126 is off
// by less than 2^-126, and from -126.5 down to -inf it is +0. NaN stays NaN; +inf becomes NaN, too.
DEVICE float exp2_fma(float x) {
  x = x < -127.0f ? -127.0f : x;  // one FMNMX.NAN; fmaxf would lose NaN
  const float shifted = x + EXP2_ROUND;
  const float f = x - (shifted - EXP2_ROUND);
  const float power = fmaf(fmaf(fmaf(fmaf(EXP2_4, f, EXP2_3), f, EXP2_2), f, EXP2_1), f, 1.0f);
  return power * float_of_bits(float_bits(shifted) << 23);  // an integer addition would make NaN a number
}

}  // namespace multiattn
