// Vector clocks: what each thread knows to be over (Mattern, "Virtual Time and Global States of Distributed Systems", 1989).
//
// An actor is a thread, the TMA loads that one mbarrier counts, or the wgmmas of one warp; each has a time of its own. A
// thread's clock holds, of each actor, until when all that the actor did is over and visible to the thread. A thread that
// lets others know what it did (it arrives somewhere) adds its clock to theirs, and its own time moves on.
#pragma once
#include <cstdint>
#include <vector>

namespace multiattn::emulation {

using Time = std::int32_t;
using Clock = std::vector<Time>;

constexpr int MBARRIERS_MAX = 80;

class Clocks {
 public:
  static constexpr Time BEFORE = 1;  // the time of all actors when a block begins

  explicit Clocks(int threads)
      : threads_(threads), actors_((threads + MBARRIERS_MAX + threads / 32 + 7) / 8 * 8), times_(threads * actors_, BEFORE) {
    for (int thread = 0; thread < threads; ++thread) tick(thread);
  }

  int tma(int mbarrier) const { return threads_ + mbarrier; }
  int wgmma(int warp) const { return threads_ + MBARRIERS_MAX + warp; }

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

// A thread's action: who did it, and at which of its times.
struct Epoch {
  static constexpr int NOBODY = -1, MANY = -2;
  int thread = NOBODY;  // in the cluster
  Time time = 0;
};

// The present of a thread, with what it knows of all others.
struct Moment : Epoch {
  const Time* clock;
  int threads;  // of the block, or of its cluster

  // True if this thread knows that an action of one thread, or of nobody, is over.
  bool follows(const Epoch& then) const { return then.thread == NOBODY || clock[then.thread] >= then.time; }
};

}  // namespace multiattn::emulation
