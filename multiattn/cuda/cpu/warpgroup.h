// The 128 threads of a warpgroup do two things together: wgmma, and trading registers.
//
// They meet in each verb. A wgmma is computed in the wgmma_wait for it; until then accumulators are NaN in the threads'
// memory, and operands in registers must stay as they are.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "block.h"

namespace multiattn::emulation {

class Hopper;

constexpr int WGMMA_ROWS = 64, WGMMA_DEPTH = 16, WGMMA_COLUMNS_MAX = 256;

// The reader of a line must know this time of an actor; `reason` is the error when it does not.
struct Need {
  int actor;
  Time time;
  std::string reason;
};
using Needs = std::vector<Need>;

// One thread's call of a verb: what the verb has no use for is zero. The numbers must be the same in all threads.
struct WarpgroupCall {
  const char* verb;
  int number = 0;            // columns, groups left, registers
  std::uint64_t a = 0, b = 0;  // descriptors
  bool add = false;
  float* d = nullptr;
  const std::uint32_t* a_registers = nullptr;  // where a is no descriptor
  bool is_bf16 = false, a_mn_major = false, b_mn_major = false;

  bool operator==(const WarpgroupCall& other) const {
    return number == other.number && a == other.a && b == other.b && add == other.add;
  }
};

// The registers that no warpgroup of the block has: so many for each of the 128 threads of one.
struct RegisterPool : Condition {
  int free = 0;
  std::string state() const override { return "(" + std::to_string(free) + " a thread are free)"; }
};

class Warpgroup {
 public:
  Warpgroup(Block& block, Hopper& hopper, int index, int registers)
      : block_(block), hopper_(hopper), index_(index), team_(index * WARPGROUP_SIZE, WARPGROUP_SIZE), registers_(registers) {}

  // The current thread returns.
  void finish();

  void issue(const WarpgroupCall& call);
  void fence();
  void commit();
  void wait(int groups_left);
  void set_registers(const char* verb, int count, bool raise, RegisterPool& pool);

 private:
  using Calls = WarpgroupCall* const*;  // of all threads
  // d[64, columns] of all threads while wgmmas on it are under way.
  struct Sum {
    int columns = 0, operations = 0;
    float* d[WARPGROUP_SIZE];
    alignas(32) float value[WGMMA_ROWS][WGMMA_COLUMNS_MAX];
  };
  struct Operation {
    WarpgroupCall call;
    std::int64_t group;
    Sum* sum;
    Needs needs;
    std::vector<std::uint32_t> lines;  // of shared memory that it reads
    const std::uint32_t* a[WARPGROUP_SIZE];
    std::uint32_t a_at_issue[WARPGROUP_SIZE][4];
  };

  int rank() const { return index_ * WARPGROUP_SIZE / block_.threads_of_block(); }
  std::uint32_t base() const { return rank() * WINDOW_BYTES; }
  // All threads meet with the same call, and the last one calls work(calls).
  template <class Work>
  void meet(WarpgroupCall call, Work work);

  void begin(Calls calls);
  void add_operand(Operation& operation, std::uint64_t descriptor, int rows, bool mn_major);
  Sum& sum_of(Calls calls);
  void give_accumulators(Sum& sum);
  void compute(Operation& operation);

  Block& block_;
  Hopper& hopper_;
  const int index_;
  Team team_;
  int registers_;
  std::int64_t groups_ = 0;  // committed
  std::deque<std::unique_ptr<Operation>> flying_;
  std::vector<std::unique_ptr<Sum>> sums_;
  Time time_ = Clocks::BEFORE;  // of its wgmmas
};

}  // namespace multiattn::emulation
