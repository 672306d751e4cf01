#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "formats.h"
#include "hopper.h"

namespace multiattn::emulation {

// The running thread's values of thread_index(), block_index(), cluster_rank() and shared_base().
int current_thread, current_rank;
std::uint32_t current_base;
long long current_block, current_blocks;
Block* running_block;

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t STACK_BYTES = 512 << 10;  // red zones take room
#else
constexpr std::size_t STACK_BYTES = 128 << 10;
#endif

VECTOR_CLONES void Clocks::join(Time* into, const Time* from, int actors) {
  for (int i = 0; i < actors; i += VECTOR) {
    const Ints left = *reinterpret_cast<const Ints*>(into + i), right = *reinterpret_cast<const Ints*>(from + i);
    *reinterpret_cast<Ints*>(into + i) = left > right ? left : right;
  }
}

void Clocks::meet(int first, int count) {
  Clock all = nothing();
  for (int thread = first; thread < first + count; ++thread) join(all.data(), of(thread), actors_);
  for (int thread = first; thread < first + count; ++thread) {
    std::copy(all.begin(), all.end(), of(thread));
    tick(thread);
  }
}

Stacks::Stacks(std::size_t threads) : bytes_(threads * STACK_BYTES) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
}

Stacks::~Stacks() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(memory_, bytes_);  // for its next owner
#endif
  munmap(memory_, bytes_);
}

void Stacks::prepare(Fiber& fiber, int thread, void (*entry)()) const {
  fiber.prepare(memory_ + thread * STACK_BYTES, STACK_BYTES, entry);
}

Block::Block(int threads_of_block, std::size_t smem_bytes, int cluster, std::int64_t index, LaunchCounts& counters)
    : clocks(threads_of_block * cluster),
      smem(smem_bytes, cluster, clocks),
      counters(counters),
      threads_(threads_of_block * cluster),
      barriers_(cluster, Barrier(threads_of_block)),
      cluster_(threads()),
      hopper_(std::make_unique<Hopper>(*this)),
      index_(index) {
  for (int first = 0; first < threads(); first += WARP_SIZE) warps_.emplace_back(first, WARP_SIZE);
}

void Block::prepare(Kernel kernel, const void* parameters, const Stacks& stacks, int first_stack) {
  kernel_ = kernel;
  parameters_ = parameters;
  for (int i = 0; i < threads(); ++i) {
    Thread& thread = threads_[i];
    thread.index = i;
    thread.warp = i / WARP_SIZE;
    thread.block = i / threads_of_block();
    stacks.prepare(thread.fiber, first_stack + i, &Block::enter);
  }
  current_ = &threads_[0];
}

bool Block::run() {
  running_block = this;
  run_as(*current_);
  switch_fiber(host_, current_->fiber);
  if (is_over()) counters.blocks += blocks();
  return error.empty();
}

void Block::run_as(Thread& thread) {
  current_ = &thread;
  current_rank = thread.block;
  current_base = thread.block * WINDOW_BYTES;
  current_thread = thread.index - first_of_block();
  current_block = index_ + thread.block;
}

void Block::enter() {
  enter_fiber();
  Block& block = *running_block;
  block.kernel_(block.parameters_);
  block.finish_current();
}

void Block::finish_current() {
  Thread& me = *current_;
  Barrier& barrier = barriers_[me.block];
  me.done = true;
  --barrier.live;
  --cluster_.live;
  leave(warps_[me.warp]);
  hopper_->finish();
  if (barrier.arrived && barrier.arrived == barrier.live) release(barrier);
  if (cluster_.arrived && cluster_.arrived == cluster_.live) release(cluster_);
  if (!cluster_.live) switch_fiber(me.fiber, host_, true);
  Thread& next = next_thread();
  run_as(next);
  switch_fiber(me.fiber, next.fiber, true);
  __builtin_unreachable();
}

void Block::fail(const std::string& what) {
  error = where() + what;
  switch_fiber(current_->fiber, host_, true);  // all fibers are abandoned where they are
  __builtin_unreachable();
}

void Block::leave(Team& team) {
  --team.live;
  if (team.arrived) fail(std::string("returns while its ") + team.name() + " waits in " + team.verb);
}

void Block::arrive(Team& team, const char* verb) {
  if (team.live < team.size)
    fail(verb, "needs all " + std::to_string(team.size) + " " + team.member() + "s of the " + team.name() + "; " +
                   std::to_string(team.size - team.live) + " returned");
  if (!team.arrived) team.verb = verb;
  if (std::strcmp(team.verb, verb) != 0) fail_diverged(team, verb);
  ++team.arrived;
}

void Block::check_warp(const char* verb) {
  if (const Team& warp = warps_[current_->warp]; warp.arrived) fail_diverged(warp, verb);
}

void Block::fail_diverged(const Team& team, const char* verb) {
  fail(std::string("divergent ") + team.name() + ": this " + team.member() + " is in " + verb + ", another one in " +
       team.verb);
}

void Block::join(Barrier& barrier, const char* verb) {
  if (++barrier.arrived < barrier.live)
    wait_for(verb, barrier);
  else
    release(barrier);
}

void Block::release(Barrier& barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
  if (&barrier == &cluster_)
    hopper_->publish_mbarriers();
  else
    clocks.meet(first_of_block(), threads_of_block());
}

void Block::wait_for(const char* verb, const Condition& condition) {
  Thread& me = *current_;
  me.verb = verb;
  me.waits_for = &condition;
  me.generation = condition.generation;
  Thread& next = next_thread();
  if (&next != &me) {
    run_as(next);
    switch_fiber(me.fiber, next.fiber);
  }
  me.waits_for = nullptr;
}

// The next one after the current thread, so that the lanes of a warp run one after the other. What arrives by itself (TMA)
// arrives when nobody can go on without it.
Thread& Block::next_thread() {
  for (;;) {
    for (int step = 0, i = current_->index; step < threads(); ++step) {
      i = i + 1 == threads() ? 0 : i + 1;
      const Thread& thread = threads_[i];
      if (!thread.done && (!thread.waits_for || thread.waits_for->generation != thread.generation)) return threads_[i];
    }
    if (hopper_->land_youngest()) continue;
    if (hopper_->end_earlier_grids()) continue;
    const auto awaits_others = [](const Thread& it) { return !it.done && it.waits_for == &ordered_additions; };
    if (!std::any_of(threads_.begin(), threads_.end(), awaits_others)) fail("deadlock:" + who_waits());
    stuck_since_ = ordered_additions.generation;
    give_way();
  }
}

std::string Block::deadlock() const { return where() + "deadlock:" + who_waits(); }

std::string Block::where() const {
  return "block " + std::to_string(index_ + current_->block) + ", thread " +
         std::to_string(current_->index - first_of_block()) + ": ";
}

// Neighbours that wait for the same together.
std::string Block::who_waits() const {
  std::string list;
  int listed = 0;
  for (int first = 0, last; first < threads() && listed < 12; first = last + 1) {
    const auto same = [&](const Thread& a, const Thread& b) {
      return a.done == b.done && a.waits_for == b.waits_for && a.verb == b.verb;
    };
    for (last = first; last + 1 < threads() && same(threads_[first], threads_[last + 1]);) ++last;
    const Thread& thread = threads_[first];
    if (thread.done) continue;
    list += first == last ? " thread " + std::to_string(first)
                          : " threads " + std::to_string(first) + "-" + std::to_string(last);
    list += std::string(" in ") + thread.verb + (thread.waits_for ? thread.waits_for->state() : "") + ";";
    ++listed;
  }
  return list;
}

}  // namespace multiattn::emulation
