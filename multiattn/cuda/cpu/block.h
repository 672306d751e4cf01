// One thread block as fibers, or a cluster of them: who waits for what, who runs next, what went wrong.
//
// Threads run one at a time until they wait, in order, so that a run is deterministic. Warp collectives (mma, ldmatrix,
// shuffle, votes) are a rendezvous of all lanes; the last one to arrive does the work for all.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "records.h"
#include "shared_memory.h"

namespace multiattn::emulation {

constexpr int WARP_SIZE = 32;

// What a thread may wait for: that the generation moves on.
struct Condition {
  std::int64_t generation = 0;
  virtual ~Condition() = default;
  // For the report of a deadlock, after the verb: what is missing.
  virtual std::string state() const { return {}; }
};

// A copy that the thread has issued and not waited for.
struct PendingCopy {
  std::uint32_t target;
  const void* source;  // null: zeros
  int bytes;
  std::int64_t group;
};

struct Thread {
  Fiber fiber;
  int index = 0, warp = 0, block = 0;  // in the cluster
  int lane = 0;
  bool done = false;
  const Condition* waits_for = nullptr;
  std::int64_t generation = 0;      // of that, when it began to wait
  const char* verb = "its start";   // what it waits in
  void* arguments = nullptr;        // of that verb, for the lane that does the work
  std::vector<PendingCopy> copies;
  std::int64_t groups = 0;          // of copies committed
};

struct Warp : Condition {
  int first_thread = 0, live = 0, arrived = 0;
  std::int32_t barriers = 0;
  const char* verb = nullptr;
};

// A rendezvous of a whole block, or of a cluster.
struct Barrier : Condition {
  int live = 0, arrived = 0;  // threads that have not returned; that are there
};

class Hopper;

using Kernel = void (*)(const void* parameters);

class Block {
 public:
  // `threads` and `smem_bytes` for each block of a cluster.
  Block(int threads, std::size_t smem_bytes, int cluster);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Runs the cluster whose first block has this index to its end; false when it failed, with `error` set.
  bool run(Kernel kernel, const void* parameters, std::int64_t block);

  // ---- for the verbs, called on a fiber
  Thread& current() { return *current_; }
  int threads() const { return static_cast<int>(threads_.size()); }  // of all blocks
  int blocks() const { return static_cast<int>(barriers_.size()); }
  int threads_of_block() const { return threads() / blocks(); }
  bool ended(int block) const { return !barriers_[block].live; }
  bool done(int thread) const { return threads_[thread].done; }
  Moment now() const {
    const Time* clock = clocks_ ? clocks_->of(current_->index) : nullptr;
    return {{current_->index, current_->warp, current_->block,
             static_cast<std::int32_t>(barriers_[current_->block].generation), warps_[current_->warp].barriers,
             clock ? clock[current_->index] : Clocks::BEFORE},
            clock,
            threads()};
  }
  // Ends the run. Never returns.
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail(const char* verb, const std::string& what) { fail(std::string(verb) + ": " + what); }
  void require(const char* verb, const std::string& problem) {
    if (!problem.empty()) fail(verb, problem);
  }
  // All live lanes of the warp meet; the last one calls work(lanes), where lanes[i] is lane i's `arguments`.
  template <class Work>
  void meet_warp(const char* verb, void* arguments, Work work);
  // All live threads of the block meet.
  void meet_block(const char* verb);
  // All live threads of the cluster meet; of one another they know mbarriers only.
  void meet_cluster(const char* verb);
  void count_warp_barrier();
  // Until the condition's generation moves on; others run meanwhile.
  void wait_for(const char* verb, const Condition& condition);
  // That no other lane waits in a collective of the warp; for what lets nobody pass before this lane is there.
  void check_warp(const char* verb);
  // What sm90 adds. Made by the first of its verbs, it stays for the blocks that follow.
  Hopper& hopper() { return hopper_ ? *hopper_ : start_hopper(); }

  SharedMemory smem;
  LaunchCounts counters{};
  std::string error;

 private:
  static void enter();
  void finish_current();
  // The current thread comes to a barrier of its block, or the cluster's; it may be the last.
  void join(Barrier& barrier, const char* verb);
  void release(Barrier& barrier);
  int first_of_block() const { return current_->block * threads_of_block(); }
  void run_as(Thread& thread);
  Hopper& start_hopper();
  Thread& next_thread();
  Thread* next_runnable();
  std::string who_waits() const;
  void arrive(Warp& warp, const char* verb);

  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<Barrier> barriers_;  // of each block
  Barrier cluster_;
  std::unique_ptr<Hopper> hopper_;
  const Clocks* clocks_ = nullptr;
  Fiber host_;
  Thread* current_ = nullptr;
  Kernel kernel_ = nullptr;
  const void* parameters_ = nullptr;
  std::int64_t index_ = 0;
  char* stacks_ = nullptr;
};

template <class Work>
void Block::meet_warp(const char* verb, void* arguments, Work work) {
  Thread& me = *current_;
  Warp& warp = warps_[me.warp];
  me.arguments = arguments;
  arrive(warp, verb);
  if (warp.arrived < WARP_SIZE) {
    wait_for(verb, warp);
    return;
  }
  void* lanes[WARP_SIZE];
  for (int lane = 0; lane < WARP_SIZE; ++lane) lanes[lane] = threads_[warp.first_thread + lane].arguments;
  work(lanes);
  warp.arrived = 0;
  ++warp.generation;
}

}  // namespace multiattn::emulation
