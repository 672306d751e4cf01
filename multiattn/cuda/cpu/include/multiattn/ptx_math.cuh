// The verbs of include/multiattn/ptx_math.cuh on the CPU.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float log2_approx(float x) { return log2f(x); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float sqrt_approx(float x) { return sqrtf(x); }
inline float min_or_nan(float a, float b) { return a < b || a != a ? a : b; }
inline float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }
template <class T>
T load_constant(const T* source) {
  return *source;
}

}  // namespace multiattn
