// What TensorMap::opaque holds under emulation; tensor_map.py has the same.
#pragma once
#include <cstdint>

namespace multiattn::emulation {

struct EncodedMap {
  static constexpr std::uint64_t MAGIC = 0x70614d726f736e54;  // "TnsorMap", little-endian

  unsigned char* base;        // first byte of the tensor; first in the struct: who moves the tensor writes it here
  std::int64_t strides[3];    // bytes, of S, H and B
  std::int32_t sizes[4];      // elements, of D, S, H and B
  std::int32_t box[4];        // elements of each
  std::uint64_t magic;
};
static_assert(sizeof(EncodedMap) == 72);

}  // namespace multiattn::emulation
