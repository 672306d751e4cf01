// Where a 16-byte chunk of a row lives in shared memory, so that 8 rows of one column lie in 8 different bank groups.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

// Rows are CHUNKS chunks long without padding; CHUNKS is even. A wavefront of ldmatrix reads one chunk of each of 8
// consecutive rows; shared memory has 8 groups of 4 banks, a chunk each. Row r starts at group r * CHUNKS % 8, which
// takes 8 / SPAN values; an XOR among SPAN neighbouring chunks tells apart the SPAN rows that share one of them.
template <int CHUNKS, bool ENABLED = true>
struct Swizzle {
  static_assert(CHUNKS % 2 == 0, "pad head_dim to a multiple of 16");
  static constexpr int SPAN = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;

  // XORed into the chunk index of a row; it repeats every 8 rows. Not ENABLED, chunks lie in order, and conflict.
  static DEVICE int key(int row) { return ENABLED ? row / (8 / SPAN) % SPAN : 0; }
};

}  // namespace multiattn
