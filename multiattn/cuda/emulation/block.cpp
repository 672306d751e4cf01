#include "block.h"

#include <sys/mman.h>

#include <new>

namespace multiattn {

namespace emulation {

// Of the thread that runs: what thread_index() and block_index() of the kernel read.
int current_thread;
long long current_block;
// The block that runs; the host lets one launch in at a time.
Block* running_block;

namespace {
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t STACK_BYTES = 512 << 10;  // red zones take room
#else
constexpr std::size_t STACK_BYTES = 128 << 10;
#endif
}  // namespace

Block::Block(int threads, std::size_t smem_bytes) : smem(smem_bytes), threads_(threads), warps_(threads / WARP_SIZE) {
  void* memory = mmap(nullptr, threads * STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  stacks_ = static_cast<char*>(memory);
}

Block::~Block() { munmap(stacks_, threads_.size() * STACK_BYTES); }

bool Block::run(Kernel kernel, const void* parameters, std::int64_t block) {
  kernel_ = kernel;
  parameters_ = parameters;
  index_ = block;
  current_block = block;
  running_block = this;
  smem.reset();
  barrier_ = Barrier{};
  live_ = static_cast<int>(threads_.size());
  for (int i = 0; i < live_; ++i) {
    Thread& thread = threads_[i];
    thread = Thread{};
    thread.index = i;
    thread.lane = i % WARP_SIZE;
    thread.warp = i / WARP_SIZE;
    thread.fiber.prepare(stacks_ + i * STACK_BYTES, STACK_BYTES, &Block::enter);
  }
  for (std::size_t w = 0; w < warps_.size(); ++w) {
    warps_[w] = Warp{};
    warps_[w].first_thread = static_cast<int>(w) * WARP_SIZE;
    warps_[w].live = WARP_SIZE;
  }
  host_.adopt_current();
  current_ = &threads_[0];
  current_thread = 0;
  switch_fiber(host_, current_->fiber);
  ++counters.blocks;
  return error.empty();
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
  me.done = true;
  --live_;
  --warp.live;
  if (warp.arrived) fail(std::string("returns while its warp waits in ") + warp.verb);
  if (barrier_.arrived && barrier_.arrived == live_) release_block();
  Thread* next = live_ ? next_runnable() : nullptr;
  if (live_ && !next) fail("deadlock:" + who_waits());
  if (next) {
    current_ = next;
    current_thread = next->index;
  }
  switch_fiber(me.fiber, next ? next->fiber : host_, true);
  __builtin_unreachable();
}

void Block::fail(const std::string& what) {
  error = "block " + std::to_string(index_) + ", thread " + std::to_string(current_->index) + ": " + what;
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

bool Block::meet_block(const char* verb, bool vote) {
  Thread& me = *current_;
  me.verb = verb;
  if (warps_[me.warp].arrived)
    fail(std::string("divergent warp: this lane is in ") + verb + ", another one in " + warps_[me.warp].verb);
  if (!barrier_.arrived) barrier_.verb = verb;
  if (barrier_.verb != verb)
    fail(std::string("divergent block: this thread is in ") + verb + ", another one in " + barrier_.verb);
  barrier_.vote |= vote;
  if (++barrier_.arrived < live_) {
    me.generation = barrier_.generation;
    me.waits_for_block = true;
    wait();
    me.waits_for_block = false;
  } else {
    release_block();
  }
  return barrier_.result;
}

void Block::release_block() {
  barrier_.result = barrier_.vote;
  barrier_.vote = false;
  barrier_.arrived = 0;
  ++barrier_.generation;
  ++counters.barriers;
}

void Block::wait() {
  Thread& me = *current_;
  Thread* next = next_runnable();
  if (!next) fail("deadlock:" + who_waits());
  ++counters.switches;
  current_ = next;
  current_thread = next->index;
  switch_fiber(me.fiber, next->fiber);
}

bool Block::runnable(const Thread& thread) const {
  if (thread.done) return false;
  if (thread.waits_for_warp) return warps_[thread.warp].generation != thread.generation;
  if (thread.waits_for_block) return barrier_.generation != thread.generation;
  return true;
}

// The next one after the current thread, so that the lanes of a warp run one after the other.
Thread* Block::next_runnable() {
  const int count = static_cast<int>(threads_.size());
  for (int step = 1, i = current_->index; step < count; ++step) {
    i = i + 1 == count ? 0 : i + 1;
    if (runnable(threads_[i])) return &threads_[i];
  }
  return nullptr;
}

std::string Block::who_waits() const {
  std::string list;
  int listed = 0;
  for (const Thread& thread : threads_) {
    if (thread.done || listed == 8) continue;
    list += " thread " + std::to_string(thread.index) + " in " + thread.verb + ";";
    ++listed;
  }
  return list + (live_ > listed ? " and " + std::to_string(live_ - listed) + " more" : "");
}

}  // namespace emulation

}  // namespace multiattn
