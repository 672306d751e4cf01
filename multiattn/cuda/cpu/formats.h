// 16-bit floating point on any x86-64: tables to read it, rounding to nearest even to write it. And eight numbers at a time.
#pragma once
#include <cstdint>
#include <vector>

#include "multiattn/ptx.cuh"

// A function with VECTOR_CLONES is compiled for AVX2, too; loading the library picks one of them.
#if defined(__SANITIZE_ADDRESS__)
#define VECTOR_CLONES
#else
#define VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#endif

namespace multiattn::emulation {

constexpr int VECTOR = 8;

// Wherever they lie in memory. Name them: `auto` forgets that.
typedef float Floats __attribute__((vector_size(4 * VECTOR), may_alias, aligned(4)));
typedef int Ints __attribute__((vector_size(4 * VECTOR), may_alias, aligned(4)));

inline float widen_bf16(std::uint16_t half) { return bits_as<float>(std::uint32_t(half) << 16); }

inline float widen_fp16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
  if (exponent == 31) return bits_as<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {  // subnormal: fraction * 2^-24
    const float magnitude = float(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return bits_as<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

inline std::uint16_t narrow_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  if (value != value) return 0x7fff;  // the GPU's canonical NaN
  return std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline std::uint16_t narrow_fp16(float value) {
  if (value != value) return 0x7fff;
  const std::uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
  const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000u);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude < 0x38800000u)  // below 2^-14: the sum's last bit is 2^-24, so the hardware rounds for us
    return sign | std::uint16_t(float_bits(bits_as<float>(magnitude) + 0.5f) - float_bits(0.5f));
  return sign | std::uint16_t((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

// float of every 16-bit pattern.
template <float (*WIDEN)(std::uint16_t)>
inline const float* widening_table() {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (std::uint32_t bits = 0; bits < values.size(); ++bits) values[bits] = WIDEN(std::uint16_t(bits));
    return values;
  }();
  return table.data();
}

}  // namespace multiattn::emulation
