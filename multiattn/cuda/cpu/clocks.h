// What each thread knows to be over: vector clocks (Mattern, "Virtual Time and Global States of Distributed Systems", 1989).
//
// An actor is a thread, the TMA loads that one mbarrier counts, or the wgmmas of one warp; each has a time of its own. A
// thread's clock holds, of each actor, until when all that the actor did is over and visible to the thread. A thread that
// lets others know what it did (it arrives somewhere) adds its clock to theirs, and its own time moves on.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace multiattn::emulation {

using Time = std::int32_t;
using Clock = std::vector<Time>;

constexpr int MBARRIERS_MAX = 64;

class Clocks {
 public:
  static constexpr Time BEFORE = 1;  // the time of all threads until clocks start

  explicit Clocks(int threads)
      : threads_(threads), actors_((threads + MBARRIERS_MAX + threads / 32 + 7) / 8 * 8), times_(threads * actors_) {}

  int tma(int mbarrier) const { return threads_ + mbarrier; }
  int wgmma(int warp) const { return threads_ + MBARRIERS_MAX + warp; }

  // What happened before counts as known to all.
  void start() {
    std::fill(times_.begin(), times_.end(), BEFORE);
    for (int thread = 0; thread < threads_; ++thread) of(thread)[thread] = BEFORE + 1;
  }

  Time* of(int thread) { return &times_[static_cast<std::size_t>(thread) * actors_]; }
  const Time* of(int thread) const { return &times_[static_cast<std::size_t>(thread) * actors_]; }
  Time now(int thread) const { return of(thread)[thread]; }
  Clock nothing() const { return Clock(actors_, BEFORE); }

  // The thread lets know, by `clock`, what it has done and what it knows.
  void release(int thread, Clock& clock) {
    join(clock.data(), of(thread), actors_);
    tick(thread);
  }
  void tick(int thread) { ++of(thread)[thread]; }
  void acquire(int thread, const Clock& clock) { join(of(thread), clock.data(), actors_); }
  // `count` threads from `first` on release to one another.
  void meet(int first, int count);

 private:
  static void join(Time* into, const Time* from, int actors);

  int threads_, actors_;
  std::vector<Time> times_;
};

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
