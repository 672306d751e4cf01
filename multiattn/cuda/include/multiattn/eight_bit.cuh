// Keys and values of a cache that are 8-bit numbers. They become fp16, in which all of them are exact, on their way to the tensor
// cores; scales come to scores, weights and outputs.
#pragma once
#include "multiattn/ptx_bytes.cuh"
#include "multiattn/types.h"

namespace multiattn {

enum class Numbers { OF_QUERIES, E4M3, INT8 };

// A cache holds numbers of the format of queries, or of 8 bits with scales, each of a head or of every token.
struct StoredCache {
  Numbers numbers = Numbers::OF_QUERIES;
  bool k_per_token = false, v_per_token = false;
};

// The four numbers of a word as two pairs of fp16: those of its first two bytes and of the others; ALTERNATE: those of the first
// and the third byte, then of the others.
template <Numbers NUMBERS, bool ALTERNATE>
DEVICE void halve(uint32 (&pairs)[2], uint32 word) {
  if constexpr (NUMBERS == Numbers::INT8) {  // with 0x64 before it an unsigned byte is 1024 more than it says
    constexpr uint32 OFFSET = 0x64806480;     // 1024 + 128
    const uint32 bytes = word ^ 0x80808080u;
    pairs[0] = subtract_halves(permute_bytes(bytes, 0x64646464u, ALTERNATE ? 0x4240 : 0x4140), OFFSET);
    pairs[1] = subtract_halves(permute_bytes(bytes, 0x64646464u, ALTERNATE ? 0x4341 : 0x4342), OFFSET);
  } else {
    const uint32 bytes = ALTERNATE ? permute_bytes(word, 0, 0x3120) : word;
    pairs[0] = halves_of_e4m3<false>(bytes);
    pairs[1] = halves_of_e4m3<true>(bytes);
  }
}

}  // namespace multiattn
