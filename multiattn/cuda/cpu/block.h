// One thread block as fibers, or a cluster of them: who waits for what, who runs next, what went wrong.
//
// Threads run one at a time until they wait, in order, so that a run is deterministic. Collectives of a warp (mma, ldmatrix,
// shuffle, votes) and of a warpgroup (wgmma) are a rendezvous of all threads; the last one to arrive does the work for all.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "records.h"
#include "shared_memory.h"

namespace multiattn::emulation {

constexpr int WARP_SIZE = 32, WARPGROUP_SIZE = 128;

// A thread may wait until the generation of one moves on.
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
  bool done = false;
  const Condition* waits_for = nullptr;
  std::int64_t generation = 0;      // of that, when it began to wait
  const char* verb = "its start";   // what it waits in
  void* arguments = nullptr;        // of that verb, for the lane that does the work
  std::vector<PendingCopy> copies;
  std::int64_t groups = 0;          // of copies committed
};

// Threads that run collectives together: a warp, or a warpgroup.
struct Team : Condition {
  const int first_thread, size;  // in the cluster
  int live, arrived = 0;         // that have not returned; that are there
  const char* verb = nullptr;    // what those wait in

  Team(int first_thread, int size) : first_thread(first_thread), size(size), live(size) {}
  const char* name() const { return size == WARP_SIZE ? "warp" : "warpgroup"; }
  const char* member() const { return size == WARP_SIZE ? "lane" : "thread"; }
};

// A rendezvous of a whole block, or of a cluster.
struct Barrier : Condition {
  int live, arrived = 0;  // threads that have not returned; that are there

  explicit Barrier(int threads) : live(threads) {}
};

class Hopper;

using Kernel = void (*)(const void* parameters);

// Memory for the stacks of so many threads.
class Stacks {
 public:
  explicit Stacks(std::size_t threads);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  void prepare(Fiber& fiber, int thread, void (*entry)()) const;

 private:
  std::size_t bytes_;
  char* memory_;
};

class Block {
 public:
  // The cluster whose first block has this index; `threads_of_block` and `smem_bytes` for each of its blocks.
  Block(int threads_of_block, std::size_t smem_bytes, int cluster, std::int64_t index, LaunchCounts& counters);
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Its first thread has the stack `first_stack`.
  void prepare(Kernel kernel, const void* parameters, const Stacks& stacks, int first_stack);
  // Goes on until it is over or gives way; false when it failed, with `error` set.
  bool run();
  bool is_over() const { return !cluster_.live; }
  // False while it waits for what another block adds.
  bool can_go() const { return stuck_since_ != ordered_additions.generation; }
  // The report of a deadlock: in what its threads wait.
  std::string deadlock() const;

  // ---- for the verbs, called on a fiber
  Thread& current() { return *current_; }
  int threads() const { return static_cast<int>(threads_.size()); }  // of all blocks
  int blocks() const { return static_cast<int>(barriers_.size()); }
  int threads_of_block() const { return threads() / blocks(); }
  bool ended(int block) const { return !barriers_[block].live; }
  Moment now() const {
    const int thread = current_->index;
    return {{thread, clocks.now(thread)}, clocks.of(thread), threads()};
  }
  // Ends the run. Never returns.
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail(const char* verb, const std::string& what) { fail(std::string(verb) + ": " + what); }
  void require(const char* verb, const std::string& problem) {
    if (!problem.empty()) fail(verb, problem);
  }
  // All threads of the team meet; the last one calls work(members), where *members[i] is what the team's i-th came with.
  template <class Arguments, class Work>
  void meet(Team& team, const char* verb, Arguments& mine, Work work);
  template <class Arguments, class Work>
  void meet_warp(const char* verb, Arguments& mine, Work work) {
    meet(warps_[current_->warp], verb, mine, work);
  }
  // The current thread, which is of the team, returns.
  void leave(Team& team);
  // All live threads of the block meet.
  void meet_block(const char* verb) {
    check_warp(verb);
    join(barriers_[current_->block], verb);
  }
  // All live threads of the cluster meet; of one another they know mbarriers only.
  void meet_cluster(const char* verb) { join(cluster_, verb); }
  // All lanes of the current thread's warp know what each of them has done.
  void order_warp() { clocks.meet(warps_[current_->warp].first_thread, WARP_SIZE); }
  // Until the condition's generation moves on; others run meanwhile.
  void wait_for(const char* verb, const Condition& condition);
  // Lets blocks that are there at the same time go on.
  void give_way() { switch_fiber(current_->fiber, host_); }
  // That no other lane waits in a collective of the warp; for what lets nobody pass before this lane is there.
  void check_warp(const char* verb);
  Hopper& hopper() { return *hopper_; }

  Clocks clocks;
  SharedMemory smem;
  LaunchCounts& counters;
  std::string error;
  inline static Condition ordered_additions;  // to global memory, of any block

 private:
  static void enter();
  void finish_current();
  // The current thread comes to a barrier of its block, or the cluster's; it may be the last.
  void join(Barrier& barrier, const char* verb);
  void release(Barrier& barrier);
  int first_of_block() const { return current_->block * threads_of_block(); }
  void run_as(Thread& thread);
  Thread& next_thread();
  std::string where() const;
  std::string who_waits() const;
  void arrive(Team& team, const char* verb);
  [[noreturn]] void fail_diverged(const Team& team, const char* verb);

  std::vector<Thread> threads_;
  std::vector<Team> warps_;
  std::vector<Barrier> barriers_;  // of each block
  Barrier cluster_;
  std::unique_ptr<Hopper> hopper_;  // what sm90 adds
  Fiber host_;
  Thread* current_ = nullptr;
  Kernel kernel_ = nullptr;
  const void* parameters_ = nullptr;
  const std::int64_t index_;
  std::int64_t stuck_since_ = -1;  // so many ordered additions none of its threads can go on
};

// The block that runs; the host lets one launch in at a time.
extern Block* running_block;

template <class Arguments, class Work>
void Block::meet(Team& team, const char* verb, Arguments& mine, Work work) {
  current_->arguments = &mine;
  arrive(team, verb);
  if (team.arrived < team.size) return wait_for(verb, team);
  Arguments* members[WARPGROUP_SIZE];
  for (int i = 0; i < team.size; ++i) members[i] = static_cast<Arguments*>(threads_[team.first_thread + i].arguments);
  work(members);
  team.arrived = 0;
  ++team.generation;
}

}  // namespace multiattn::emulation
