// The verbs of include/multiattn/ptx_math.cuh on the CPU.
#pragma once
#include "multiattn/ptx.cuh"
#include "multiattn/wrapping.cuh"

namespace multiattn {

inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float log2_approx(float x) { return log2f(x); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float sqrt_approx(float x) { return sqrtf(x); }
inline float div_rn(float x, float y) { return x / y; }
inline float mul_rn(float x, float y) { return x * y; }
inline float sqrt_rn(float x) { return sqrtf(x); }
// A CPU stops at a division by zero, and at one of the least integer by -1.
template <class T, class U>
T quotient(T x, U y) {
  return y == 0 ? T(-1) : y == U(-1) ? wrapping_sub(T(0), x) : static_cast<T>(x / y);
}
template <class T, class U>
T remainder(T x, U y) {
  return y == 0 ? x : y == U(-1) ? T(0) : static_cast<T>(x % y);
}
inline float min_or_nan(float a, float b) { return a < b || a != a ? a : b; }
inline float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }
template <class T>
T load_constant(const T* source) {
  return *source;
}

}  // namespace multiattn
