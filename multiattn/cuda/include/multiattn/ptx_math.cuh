// Verbs of arithmetic that scores are modified with, as in ptx.cuh: each one instruction of the GPU.
// cpu/include/multiattn/ptx_math.cuh has the same verbs on the CPU.
#pragma once
#include "multiattn/ptx.cuh"
#include "multiattn/wrapping.cuh"

namespace multiattn {

// 1 / x within an ulp where both are normal. What is smaller than normal counts as 0: of it inf, beyond 2^126 it.
DEVICE float reciprocal_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// Within 2^-22 of log2(x) from 0.5 to 2, within that share of it elsewhere.
DEVICE float log2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// Within 2^-11 of tanh(x), as a share of it.
DEVICE float tanh_approx(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
DEVICE float sqrt_approx(float x) {
  float result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// Rounded to nearest, denormals included, and a product never fused into a sum.
DEVICE float div_rn(float x, float y) {
  float result;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
DEVICE float mul_rn(float x, float y) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
DEVICE float sqrt_rn(float x) {
  float result;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// A quotient of integers, rounded to zero; by zero anything.
template <class T, class U>
DEVICE T quotient(T x, U y) {
  return x / y;
}
template <class T, class U>
DEVICE T remainder(T x, U y) {
  return x % y;
}
// NaN where either is.
DEVICE float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
DEVICE float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
// An element that no kernel writes meanwhile: the compiler may load it once for many uses.
template <class T>
DEVICE T load_constant(const T* source) {
  return __ldg(source);
}

}  // namespace multiattn
