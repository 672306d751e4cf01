// What a TMA instruction is told of a tensor: on the GPU a CUtensorMap that the driver encodes, on the CPU the emulation's.
#pragma once
#include "multiattn/types.h"

namespace multiattn {

using uint64 = unsigned long long;

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

}  // namespace multiattn
