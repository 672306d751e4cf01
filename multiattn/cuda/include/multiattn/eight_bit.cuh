// Keys and values of a cache that are 8-bit numbers. They become fp16, in which all of them are exact, on their way to the tensor
// cores; scales come to scores, weights and outputs.
#pragma once
#include "multiattn/ptx_bytes.cuh"
#include "multiattn/types.h"

namespace multiattn {

enum class Numbers { OF_QUERIES, E4M3, INT8 };

// What a cache holds: numbers of the format of queries, or of 8 bits with scales, each of a head or of every token.
struct StoredCache {
  Numbers numbers = Numbers::OF_QUERIES;
  bool k_per_token = false, v_per_token = false;
};

// The numbers in two bytes of a word, as a pair of fp16.
template <Numbers NUMBERS, int FIRST, int SECOND>
DEVICE uint32 halves_of(uint32 word) {
  if constexpr (NUMBERS == Numbers::INT8) {  // with 0x64 before it an unsigned byte is 1024 more than it says
    constexpr uint32 OFFSET = 0x64806480;     // 1024 + 128
    return subtract_halves(permute_bytes(word ^ 0x80808080u, 0x64646464u, 0x4040 | FIRST | SECOND << 8), OFFSET);
  } else if constexpr (SECOND == FIRST + 1) {
    return halves_of_e4m3(word >> 8 * FIRST);
  } else {
    return halves_of_e4m3(permute_bytes(word, 0, 0x4400 | FIRST | SECOND << 4));
  }
}

}  // namespace multiattn
