// When something happened, and whether it is over.
#pragma once
#include <cstdint>
#include <string>

#include "clocks.h"

namespace multiattn::emulation {

// A thread's action: who did it, and the barriers that were behind it.
struct Epoch {
  int thread, warp, block;  // in the cluster
  std::int32_t block_barriers, warp_barriers;
  Time time;  // the thread's, see clocks.h

  // Nobody did it; several warps did.
  static constexpr int NOBODY = -1, MANY = -2;
  bool any() const { return thread != NOBODY; }

  std::string who() const { return thread == MANY ? "several warps" : "thread " + std::to_string(thread); }
};

// The present of a thread, with what it knows of all others where a block has clocks (else null).
struct Moment : Epoch {
  const Time* clock;
  int threads;  // of the block, or of its cluster

  // Whether what happened in `then` is known to be over.
  bool follows(const Epoch& then) const {
    if (then.thread == thread || (then.block == block && then.block_barriers < block_barriers)) return true;
    if (then.warp == warp && then.warp_barriers < warp_barriers) return true;
    return clock && then.thread >= 0 && clock[then.thread] >= then.time;
  }
};

}  // namespace multiattn::emulation
