// The verbs of include/multiattn/ptx_bytes.cuh on the CPU.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

inline uint32 permute_bytes(uint32 low, uint32 high, uint32 places) {
  const uint64 bytes = static_cast<uint64>(high) << 32 | low;
  uint32 result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32>(bytes >> 8 * (places >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

inline uint32 subtract_halves(uint32 pair, uint32 other) {
  return pack<fp16>(unpack_low<fp16>(pair) - unpack_low<fp16>(other), unpack_high<fp16>(pair) - unpack_high<fp16>(other));
}

inline float float_of_e4m3(uint32 byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  if (exponent == 15 && fraction == 7) return NAN;
  const float magnitude = exponent == 0 ? ldexpf(float(fraction), -9) : ldexpf(float(8 + fraction), exponent - 10);
  return byte & 0x80 ? -magnitude : magnitude;
}
template <bool HIGH>
uint32 halves_of_e4m3(uint32 word) {
  const uint32 pair = word >> (HIGH ? 16 : 0);
  return pack<fp16>(float_of_e4m3(pair & 0xff), float_of_e4m3(pair >> 8 & 0xff));
}

}  // namespace multiattn
