// Plain structs that Python fills and reads: host.py has them from here.
#pragma once
#include <cstdint>

namespace multiattn::emulation {

// Counts of one launch. bank_conflicts: how many more wavefronts the ldmatrix of its warps took than one per 8x8 matrix.
// tma_loads: boxes. grid_waits: for earlier grids, of which each block of a kernel that overlaps them has one.
struct LaunchCounts {
  std::int64_t blocks, ldmatrix, bank_conflicts, tma_loads, grid_waits;
};

// The content of TensorMap::opaque under emulation.
struct EncodedMap {
  std::uint8_t* base;       // first byte of the tensor; first in the struct, where its address is written
  std::int64_t strides[4];  // bytes, of every dimension but the innermost
  std::int32_t sizes[5];    // elements, innermost first: D, S, H and B, or what stands for B in a packed batch
  std::int32_t box[5];      // elements of each
  std::int32_t rank;        // dimensions
};
static_assert(sizeof(EncodedMap) <= 128);

}  // namespace multiattn::emulation
