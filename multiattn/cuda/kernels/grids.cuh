// Grids that follow one another on a stream: where these overlap, one begins while the one before it ends.
#pragma once
#include "multiattn/ptx_sm90.cuh"

namespace multiattn {

// Before a kernel touches memory that an earlier grid writes, or writes what an earlier one reads.
template <bool OVERLAPS>
DEVICE void follow_earlier_grids() {
  if constexpr (OVERLAPS) {
    admit_next_grid();
    if (thread_index() == 0) await_earlier_grids();
    sync_block();
  }
}

}  // namespace multiattn
