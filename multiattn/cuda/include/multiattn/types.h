// Names of types that kernels, the GPU's verbs and the emulation's share. NVRTC has no <stdint.h>.
#pragma once

namespace multiattn {

using int32 = int;
using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// 16-bit floating-point formats. A kernel moves their bits, and makes them with `pack`; the bits that it must know:
struct fp16 {
  static constexpr uint32 EXPONENT = 0x7c00, QUIET_NAN = 0x7e00;
};
struct bf16 {
  static constexpr uint32 EXPONENT = 0x7f80, QUIET_NAN = 0x7fc0;
};

// 16 bytes: eight 16-bit elements, the unit of every copy.
struct alignas(16) Chunk {
  uint32 word[4];
};

// A tensor's description for TMA: on the GPU a CUtensorMap that the driver encodes, on the CPU the emulation's.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

// A byte address in shared memory.
using SharedAddress = uint32;

}  // namespace multiattn
