// Verbs of bytes and of pairs of fp16, as in ptx.cuh: each one instruction of the GPU.
// cpu/include/multiattn/ptx_bytes.cuh has the same verbs on the CPU.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

// Four bytes of `low` (0 to 3) and `high` (4 to 7), by the digits of `places` from the last on.
DEVICE uint32 permute_bytes(uint32 low, uint32 high, uint32 places) { return __byte_perm(low, high, places); }

// pair - other, both of fp16.
DEVICE uint32 subtract_halves(uint32 pair, uint32 other) {
  uint32 result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(other));
  return result;
}

// The two e4m3 numbers in the low half of a word as fp16, exactly; or those in its high half.
template <bool HIGH>
DEVICE uint32 halves_of_e4m3(uint32 word) {
#if __CUDA_ARCH__ >= 890
  uint32 result;
  if constexpr (HIGH)
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(result) : "r"(word));
  else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(result) : "r"(word));
  return result;
#else
  // Exponents of fp16 are 8 more: a product puts that right, denormals too. The largest magnitude is NaN.
  const uint32 bytes = __byte_perm(word, 0, HIGH ? 0x3424 : 0x1404), magnitude = bytes & 0x7f007f00u;
  uint32 result = magnitude >> 1;
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(result) : "r"(0x5c005c00u));
  if ((magnitude & 0x7f00u) == 0x7f00u) result |= 0x7e00u;
  if ((magnitude & 0x7f000000u) == 0x7f000000u) result |= 0x7e000000u;
  return result | (bytes & 0x80008000u);
#endif
}

}  // namespace multiattn
