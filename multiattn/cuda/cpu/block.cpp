#include "block.h"

#include <sys/mman.h>

#include <new>

#include "hopper.h"

namespace multiattn {

namespace emulation {

// Of the thread that runs: what thread_index(), block_index(), cluster_rank() and shared_base() of the kernel read.
int current_thread, current_rank;
std::uint32_t current_base;
long long current_block, current_blocks;
// The block that runs; the host lets one launch in at a time.
Block* running_block;

namespace {
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t STACK_BYTES = 512 << 10;  // red zones take room
#else
constexpr std::size_t STACK_BYTES = 128 << 10;
#endif
}  // namespace

Block::Block(int threads, std::size_t smem_bytes, int cluster)
    : smem(smem_bytes, cluster), threads_(threads * cluster), warps_(threads_.size() / WARP_SIZE), barriers_(cluster) {
  void* memory = mmap(nullptr, threads_.size() * STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  stacks_ = static_cast<char*>(memory);
}

Block::~Block() {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(stacks_, threads_.size() * STACK_BYTES);  // for who gets the memory next
#endif
  munmap(stacks_, threads_.size() * STACK_BYTES);
}

bool Block::run(Kernel kernel, const void* parameters, std::int64_t block) {
  kernel_ = kernel;
  parameters_ = parameters;
  index_ = block;
  running_block = this;
  smem.reset();
  for (Barrier& barrier : barriers_) {
    barrier = Barrier{};
    barrier.live = threads_of_block();
  }
  cluster_ = Barrier{};
  cluster_.live = threads();
  for (int i = 0; i < threads(); ++i) {
    Thread& thread = threads_[i];
    thread = Thread{};
    thread.index = i;
    thread.lane = i % WARP_SIZE;
    thread.warp = i / WARP_SIZE;
    thread.block = i / threads_of_block();
    thread.fiber.prepare(stacks_ + i * STACK_BYTES, STACK_BYTES, &Block::enter);
  }
  for (std::size_t w = 0; w < warps_.size(); ++w) {
    warps_[w] = Warp{};
    warps_[w].first_thread = static_cast<int>(w) * WARP_SIZE;
    warps_[w].live = WARP_SIZE;
  }
  run_as(threads_[0]);
  if (hopper_) hopper_->start(false);
  if (blocks() > 1) hopper();  // only clocks tell what blocks know of one another
  host_.adopt_current();
  switch_fiber(host_, current_->fiber);
  counters.blocks += blocks();
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
  Warp& warp = warps_[me.warp];
  Barrier& barrier = barriers_[me.block];
  me.done = true;
  --barrier.live;
  --cluster_.live;
  --warp.live;
  if (warp.arrived) fail(std::string("returns while its warp waits in ") + warp.verb);
  if (hopper_) hopper_->finish();
  if (barrier.arrived && barrier.arrived == barrier.live) release(barrier);
  if (cluster_.arrived && cluster_.arrived == cluster_.live) release(cluster_);
  if (!cluster_.live) switch_fiber(me.fiber, host_, true);
  Thread& next = next_thread();
  run_as(next);
  switch_fiber(me.fiber, next.fiber, true);
  __builtin_unreachable();
}

void Block::fail(const std::string& what) {
  error = "block " + std::to_string(current_block) + ", thread " + std::to_string(current_thread) + ": " + what;
  switch_fiber(current_->fiber, host_, true);  // all fibers are abandoned where they are
  __builtin_unreachable();
}

void Block::arrive(Warp& warp, const char* verb) {
  if (warp.live < WARP_SIZE)
    fail(std::string(verb) + " needs all 32 lanes of the warp; " + std::to_string(WARP_SIZE - warp.live) + " returned");
  if (!warp.arrived) warp.verb = verb;
  if (warp.verb != verb)
    fail(std::string("divergent warp: this lane is in ") + verb + ", another one in " + warp.verb);
  current_->verb = verb;
  ++warp.arrived;
}

void Block::check_warp(const char* verb) {
  const Warp& warp = warps_[current_->warp];
  if (warp.arrived) fail(std::string("divergent warp: this lane is in ") + verb + ", another one in " + warp.verb);
}

void Block::meet_block(const char* verb) {
  check_warp(verb);
  join(barriers_[current_->block], verb);
}

void Block::meet_cluster(const char* verb) { join(cluster_, verb); }

void Block::join(Barrier& barrier, const char* verb) {
  if (++barrier.arrived < barrier.live)
    wait_for(verb, barrier);
  else
    release(barrier);
}

void Block::count_warp_barrier() {
  const Warp& warp = warps_[current_->warp];
  ++warps_[current_->warp].barriers;
  if (hopper_) hopper_->clocks.meet(warp.first_thread, WARP_SIZE);
}

void Block::release(Barrier& barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
  if (&barrier == &cluster_)
    hopper_->publish_mbarriers();
  else if (hopper_)
    hopper_->clocks.meet(first_of_block(), threads_of_block());
}

Hopper& Block::start_hopper() {
  hopper_ = std::make_unique<Hopper>(*this);
  clocks_ = &hopper_->clocks;
  hopper_->start(true);
  return *hopper_;
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

// Who runs next. What arrives by itself (TMA) arrives when nobody can go on without it.
Thread& Block::next_thread() {
  for (;;) {
    if (Thread* next = next_runnable()) return *next;
    if (!hopper_ || !hopper_->land_oldest()) fail("deadlock:" + who_waits());
  }
}

// The next one after the current thread, so that the lanes of a warp run one after the other.
Thread* Block::next_runnable() {
  const int count = threads();
  for (int step = 0, i = current_->index; step < count; ++step) {
    i = i + 1 == count ? 0 : i + 1;
    const Thread& thread = threads_[i];
    if (!thread.done && (!thread.waits_for || thread.waits_for->generation != thread.generation)) return &threads_[i];
  }
  return nullptr;
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

}  // namespace emulation

}  // namespace multiattn
