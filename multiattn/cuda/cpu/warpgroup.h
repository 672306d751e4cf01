// What the 128 threads of a warpgroup do together: wgmma, and trading registers.
//
// Threads issue wgmmas without meeting: the first of them to come to a step of the sequence makes it, the others must do the
// same. They meet in wgmma_wait, where the last one computes. Until then accumulators are NaN in the threads' memory, and
// operands in registers must stay as they are.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "block.h"

namespace multiattn::emulation {

class Hopper;

constexpr int WARPGROUP_SIZE = 128;
constexpr int WGMMA_ROWS = 64, WGMMA_DEPTH = 16, WGMMA_COLUMNS_MAX = 256;

// What the reader of a line must know: the time of an actor; `reason` when it does not.
struct Need {
  int actor;
  Time time;
  std::string reason;
};
using Needs = std::vector<Need>;

// One thread's call.
struct WgmmaCall {
  const char* verb;
  bool bf16;
  int columns;
  float* d;
  const std::uint32_t* a_registers;  // or null, and a descriptor
  std::uint64_t a, b;
  bool b_mn_major, add;
};

// The registers that no warpgroup of the block has: so many for each of the 128 threads of one.
struct RegisterPool : Condition {
  int free = 0;
  std::string state() const override;
};

class Warpgroup : public Condition {
 public:
  Warpgroup(Block& block, Hopper& hopper, int index);

  void start(int registers);
  // The current thread returns.
  void finish();

  void issue(const WgmmaCall& call);
  void fence();
  void commit();
  void wait(int groups_left);
  void set_registers(const char* verb, int count, bool raise, RegisterPool& pool);

  std::string state() const override;

 private:
  struct Operation;
  // A step of the sequence, which all threads go through.
  struct Step {
    const char* verb;
    int number = 0;  // columns, groups left, registers
    std::uint64_t a = 0, b = 0;
    bool add = false;
    Operation* operation = nullptr;
    bool operator==(const Step& other) const {
      return number == other.number && a == other.a && b == other.b && add == other.add;
    }
  };
  // d[64, columns] of all threads while wgmmas on it are under way.
  struct Sum {
    int columns = 0, operations = 0;
    float* d[WARPGROUP_SIZE] = {};
    alignas(32) float value[WGMMA_ROWS][WGMMA_COLUMNS_MAX];
  };
  struct Operation {
    WgmmaCall call;
    std::int64_t group;
    Sum* sum;
    Needs needs;
    std::vector<std::uint32_t> lines;  // of shared memory that it reads
    const std::uint32_t* a[WARPGROUP_SIZE] = {};
    std::uint32_t a_at_issue[WARPGROUP_SIZE][4];
  };

  int rank() const { return index_ * WARPGROUP_SIZE / block_.threads_of_block(); }
  std::uint32_t base() const { return rank() * WINDOW_BYTES; }
  int lane() const { return block_.current().index % WARPGROUP_SIZE; }
  // The current thread's next step; `is_new` where it is the first to come to it.
  Step& take_step(const Step& step, bool& is_new);
  // All threads meet, and the last one calls work().
  template <class Work>
  void meet(const char* verb, Work work);

  Operation* begin(const WgmmaCall& call);
  void add_operand(Operation& operation, std::uint64_t descriptor, int rows, bool mn_major);
  Sum& sum_of(const WgmmaCall& call);
  void take_accumulators(Sum& sum, const WgmmaCall& call);
  void give_accumulators(Sum& sum);
  void compute(Operation& operation);
  void check_registers(const Operation& operation) const;

  Block& block_;
  Hopper& hopper_;
  const int index_;
  int live_ = 0, arrived_ = 0, registers_ = 0;
  const char* verb_ = nullptr;  // in which those wait that have arrived
  std::vector<Step> steps_;     // since the latest wait
  std::size_t cursor_[WARPGROUP_SIZE];  // of each thread in them
  std::int64_t groups_ = 0;     // committed
  std::deque<std::unique_ptr<Operation>> flying_;
  std::vector<std::unique_ptr<Sum>> sums_;
  Time time_ = 0;  // of its wgmmas
};

}  // namespace multiattn::emulation
