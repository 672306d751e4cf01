#include "warpgroup.h"

#include <algorithm>
#include <cstring>

#include "formats.h"
#include "hopper.h"

namespace multiattn::emulation {

namespace {

constexpr std::uint32_t POISONED_WORD = 0xffffffff;
constexpr int ROWS_OF_GROUP = 8;  // of a swizzled matrix; a row is a line

// A matrix in shared memory (PTX ISA, "Matrix Descriptor Format") with the 128-byte swizzle.
struct Matrix {
  std::uint32_t start, lead, stride;  // bytes

  // Of a block whose shared memory starts at `base`.
  Matrix(std::uint64_t descriptor, std::uint32_t base)
      : start(base + field(descriptor, 0)), lead(field(descriptor, 16)), stride(field(descriptor, 32)) {}

  static const char* problem(std::uint64_t descriptor) {
    if (descriptor >> 62 != 1) return "a descriptor without the 128-byte swizzle";
    if (descriptor >> 49 & 7) return "a descriptor with a base offset";
    return nullptr;
  }

  // Elements 8 * half to 8 * half + 7 of a row's 16.
  std::uint32_t k_major(int row, int half) const {
    return swizzled(start + row % ROWS_OF_GROUP * LINE_BYTES + row / ROWS_OF_GROUP * stride + half * CHUNK_BYTES);
  }
  // Columns 8 * chunk to 8 * chunk + 7 of row k; 64 columns are a panel.
  std::uint32_t mn_major(int k, int chunk) const {
    return swizzled(start + chunk / 8 * lead + chunk % 8 * CHUNK_BYTES + k % ROWS_OF_GROUP * LINE_BYTES +
                    k / ROWS_OF_GROUP * stride);
  }

 private:
  static std::uint32_t field(std::uint64_t descriptor, int bit) { return (descriptor >> bit & 0x3fff) << 4; }
};

// Where a thread's accumulators 4 * group to 4 * group + 3 lie: two in this row, two in the row 8 below (PTX ISA, "Register
// Fragments for wgmma.mma_async.m64nNk16").
int first_row(int lane) { return lane / WARP_SIZE * 16 + lane % WARP_SIZE / 4; }
int first_column(int lane, int group) { return 8 * group + lane % 4 * 2; }

struct Operands {
  alignas(32) float a[WGMMA_ROWS][WGMMA_DEPTH], b[WGMMA_DEPTH][WGMMA_COLUMNS_MAX];
};

// Fills operands with what 16-bit elements are worth.
struct Reader {
  SharedMemory& smem;
  const bool bf16;

  void read_a(Operands& operands, const Matrix& matrix) const {
    for (int row = 0; row < WGMMA_ROWS; ++row)
      for (int half = 0; half < 2; ++half) widen_chunk(matrix.k_major(row, half), &operands.a[row][8 * half]);
  }
  void read_b_k_major(Operands& operands, const Matrix& matrix, int columns) const {
    for (int column = 0; column < columns; ++column) {
      float element[WGMMA_DEPTH];
      for (int half = 0; half < 2; ++half) widen_chunk(matrix.k_major(column, half), &element[8 * half]);
      for (int k = 0; k < WGMMA_DEPTH; ++k) operands.b[k][column] = element[k];
    }
  }
  void read_b_mn_major(Operands& operands, const Matrix& matrix, int columns) const {
    for (int k = 0; k < WGMMA_DEPTH; ++k)
      for (int chunk = 0; chunk < columns / 8; ++chunk)
        widen_chunk(matrix.mn_major(k, chunk), &operands.b[k][8 * chunk]);
  }
  // A thread's part of operand A, as of mma.m16n8k16.
  void read_registers(Operands& operands, int lane, const std::uint32_t (&a)[4]) const {
    for (int i = 0; i < 4; ++i) {
      float* target = &operands.a[first_row(lane) + i % 2 * 8][first_column(lane, i / 2)];
      target[0] = widen(a[i] & 0xffff);
      target[1] = widen(a[i] >> 16);
    }
  }

 private:
  float widen(std::uint32_t half) const { return bf16 ? widen_bf16(half) : widening_table<widen_fp16>()[half]; }
  void widen_chunk(std::uint32_t address, float* target) const {
    std::uint16_t half[8];
    std::memcpy(half, smem.at(address), sizeof half);
    const float* table = widening_table<widen_fp16>();
    if (bf16)
      for (int i = 0; i < 8; ++i) target[i] = widen_bf16(half[i]);
    else
      for (int i = 0; i < 8; ++i) target[i] = table[half[i]];
  }
};

// c[64, columns] += a[64, 16] * b[16, columns]
VECTOR_CLONES void multiply(float (*c)[WGMMA_COLUMNS_MAX], const Operands& operands, int columns) {
  constexpr int ROWS = 8;  // at a time: their sums stay in registers
  for (int row = 0; row < WGMMA_ROWS; row += ROWS)
    for (int column = 0; column < columns; column += VECTOR) {
      Floats sum[ROWS];
      for (int i = 0; i < ROWS; ++i) sum[i] = *reinterpret_cast<const Floats*>(&c[row + i][column]);
      for (int k = 0; k < WGMMA_DEPTH; ++k) {
        const Floats right = *reinterpret_cast<const Floats*>(&operands.b[k][column]);
        for (int i = 0; i < ROWS; ++i) sum[i] += operands.a[row + i][k] * right;
      }
      for (int i = 0; i < ROWS; ++i) *reinterpret_cast<Floats*>(&c[row + i][column]) = sum[i];
    }
}

}  // namespace

std::string RegisterPool::state() const { return "(" + std::to_string(free) + " a thread are free)"; }

std::string Warpgroup::state() const {
  return "(" + std::to_string(arrived_) + " of " + std::to_string(WARPGROUP_SIZE) + " threads are there)";
}

Warpgroup::Warpgroup(Block& block, Hopper& hopper, int index) : block_(block), hopper_(hopper), index_(index) {}

void Warpgroup::start(int registers) {
  live_ = 0;
  for (int i = 0; i < WARPGROUP_SIZE; ++i) live_ += !block_.done(index_ * WARPGROUP_SIZE + i);
  arrived_ = 0;
  registers_ = registers;
  steps_.clear();
  std::fill(std::begin(cursor_), std::end(cursor_), 0);
  groups_ = 0;
  time_ = Clocks::BEFORE;
  flying_.clear();
  sums_.clear();
}

void Warpgroup::finish() {
  --live_;
  if (arrived_) block_.fail(std::string("returns while its warpgroup waits in ") + verb_);
  if (!flying_.empty()) block_.fail("returns with wgmmas under way");
}

Warpgroup::Step& Warpgroup::take_step(const Step& step, bool& is_new) {
  if (live_ < WARPGROUP_SIZE)
    block_.fail(step.verb, "needs all 128 threads of the warpgroup; " + std::to_string(WARPGROUP_SIZE - live_) + " returned");
  std::size_t& cursor = cursor_[lane()];
  is_new = cursor == steps_.size();
  if (is_new) steps_.push_back(step);
  Step& mine = steps_[cursor++];
  if (std::strcmp(mine.verb, step.verb) != 0)
    block_.fail(std::string("divergent warpgroup: this thread is in ") + step.verb + ", another one in " + mine.verb);
  if (!(mine == step)) block_.fail(step.verb, "the threads of the warpgroup differ in its descriptors or constants");
  return mine;
}

template <class Work>
void Warpgroup::meet(const char* verb, Work work) {
  block_.check_warp(verb);
  verb_ = verb;
  if (++arrived_ < WARPGROUP_SIZE) return block_.wait_for(verb, *this);
  work();
  arrived_ = 0;
  steps_.clear();
  std::fill(std::begin(cursor_), std::end(cursor_), 0);
  ++generation;
}

void Warpgroup::fence() {
  bool is_new;
  take_step({"wgmma_fence"}, is_new);
}

void Warpgroup::commit() {
  bool is_new;
  take_step({"wgmma_commit"}, is_new);
  groups_ += is_new;
}

void Warpgroup::wait(int groups_left) {
  bool is_new;
  take_step({"wgmma_wait", groups_left}, is_new);
  meet("wgmma_wait", [&] {
    const auto due = [&] { return !flying_.empty() && flying_.front()->group < groups_ - groups_left; };
    if (due()) ++time_;
    while (due()) {
      compute(*flying_.front());
      flying_.pop_front();
    }
    for (int i = 0; i < WARPGROUP_SIZE; ++i) {
      const int thread = index_ * WARPGROUP_SIZE + i;
      hopper_.clocks.of(thread)[hopper_.clocks.wgmma(thread / WARP_SIZE)] = time_;
    }
  });
}

void Warpgroup::set_registers(const char* verb, int count, bool raise, RegisterPool& pool) {
  bool is_new;
  take_step({verb, count}, is_new);
  meet(verb, [&] {
    if (raise ? count < registers_ : count > registers_)
      block_.fail(verb, std::to_string(count) + " registers a thread, where the warpgroup has " + std::to_string(registers_));
    while (pool.free < count - registers_) block_.wait_for(verb, pool);
    pool.free -= count - registers_;
    registers_ = count;
    ++pool.generation;
  });
}

// ---- issue
void Warpgroup::issue(const WgmmaCall& call) {
  bool is_new;
  Step& step = take_step({call.verb, call.columns, call.a, call.b, call.add}, is_new);
  if (is_new) step.operation = begin(call);
  Operation& operation = *step.operation;
  hopper_.check_needs(call.verb, operation.needs);
  if (call.a_registers) {
    operation.a[lane()] = call.a_registers;
    std::memcpy(operation.a_at_issue[lane()], call.a_registers, sizeof operation.a_at_issue[0]);
  }
  take_accumulators(*operation.sum, call);
}

Warpgroup::Operation* Warpgroup::begin(const WgmmaCall& call) {
  if (call.columns < 8 || call.columns > WGMMA_COLUMNS_MAX || call.columns % 8)
    block_.fail(call.verb, std::to_string(call.columns) + " columns: a multiple of 8 up to 256");
  Operation& operation = *flying_.emplace_back(new Operation);
  operation.call = call;
  operation.group = groups_;
  if (!call.a_registers) add_operand(operation, call.a, WGMMA_ROWS, false);
  add_operand(operation, call.b, call.columns, call.b_mn_major);
  operation.sum = &sum_of(call);
  ++operation.sum->operations;
  return &operation;
}

// The lines that hold a K-major [rows, 16], or an MN-major [16, rows].
void Warpgroup::add_operand(Operation& operation, std::uint64_t descriptor, int rows, bool mn_major) {
  if (const char* problem = Matrix::problem(descriptor)) block_.fail(operation.call.verb, problem);
  const Matrix matrix(descriptor, base());
  std::uint32_t latest = ~0u;
  const auto add = [&](std::uint32_t chunk) {
    block_.require(operation.call.verb, block_.smem.check_address(chunk, CHUNK_BYTES, CHUNK_BYTES, rank()));
    const std::uint32_t line = chunk / LINE_BYTES * LINE_BYTES;
    if (line == latest) return;
    latest = line;
    hopper_.need_line(operation.call.verb, line, operation.needs);
    ++hopper_.lines.of(line).wgmmas;
    operation.lines.push_back(line);
  };
  if (mn_major) {
    for (int k = 0; k < WGMMA_DEPTH; ++k)
      for (int chunk = 0; chunk < rows / 8; ++chunk) add(matrix.mn_major(k, chunk));
  } else {
    for (int row = 0; row < rows; ++row)
      for (int half = 0; half < 2; ++half) add(matrix.k_major(row, half));
  }
}

// The one that earlier wgmmas under way add to, or a new one.
Warpgroup::Sum& Warpgroup::sum_of(const WgmmaCall& call) {
  const int mine = lane();
  for (auto& sum : sums_) {
    if (sum->d[mine] == call.d && sum->columns == call.columns) return *sum;
    if (sum->d[mine] < call.d + call.columns / 2 && call.d < sum->d[mine] + sum->columns / 2)
      block_.fail(call.verb, "accumulators that are a part of another wgmma's under way");
  }
  Sum& sum = *sums_.emplace_back(new Sum);  // which leaves its values as they are
  sum.columns = call.columns;
  return sum;
}

// From the thread's memory, where NaN is left.
void Warpgroup::take_accumulators(Sum& sum, const WgmmaCall& call) {
  const int mine = lane();
  if (sum.d[mine] == call.d) return;
  if (sum.d[mine]) block_.fail(call.verb, "accumulators at another place than in the warpgroup's other threads");
  sum.d[mine] = call.d;
  const int row = first_row(mine);
  for (int group = 0; group < sum.columns / 8; ++group) {
    const int column = first_column(mine, group);
    std::memcpy(&sum.value[row][column], call.d + 4 * group, 8);
    std::memcpy(&sum.value[row + 8][column], call.d + 4 * group + 2, 8);
  }
  std::memset(call.d, POISON, sum.columns / 2 * sizeof(float));
}

// ---- completion
void Warpgroup::give_accumulators(Sum& sum) {
  for (int lane = 0; lane < WARPGROUP_SIZE; ++lane) {
    float* d = sum.d[lane];
    const int row = first_row(lane);
    for (int i = 0; i < sum.columns / 2; ++i)
      if (bits_of(d[i]) != POISONED_WORD)
        block_.fail("wgmma_wait", "thread " + std::to_string(index_ * WARPGROUP_SIZE + lane) +
                               " wrote accumulators of a wgmma under way");
    for (int group = 0; group < sum.columns / 8; ++group) {
      const int column = first_column(lane, group);
      std::memcpy(d + 4 * group, &sum.value[row][column], 8);
      std::memcpy(d + 4 * group + 2, &sum.value[row + 8][column], 8);
    }
  }
}

void Warpgroup::compute(Operation& operation) {
  const WgmmaCall& call = operation.call;
  Operands operands;
  const Reader reader{block_.smem, call.bf16};
  if (call.a_registers) {
    check_registers(operation);
    for (int i = 0; i < WARPGROUP_SIZE; ++i) reader.read_registers(operands, i, operation.a_at_issue[i]);
  } else {
    reader.read_a(operands, Matrix(call.a, base()));
  }
  if (call.b_mn_major)
    reader.read_b_mn_major(operands, Matrix(call.b, base()), call.columns);
  else
    reader.read_b_k_major(operands, Matrix(call.b, base()), call.columns);

  Sum& sum = *operation.sum;
  if (!call.add) std::memset(sum.value, 0, sizeof sum.value);
  multiply(sum.value, operands, call.columns);
  for (const std::uint32_t address : operation.lines) {
    Line& line = hopper_.lines.of(address);
    --line.wgmmas;
    line.multiplied[index_] = time_;
  }
  if (--sum.operations) return;
  give_accumulators(sum);
  sums_.erase(std::find_if(sums_.begin(), sums_.end(), [&](const auto& other) { return other.get() == &sum; }));
}

void Warpgroup::check_registers(const Operation& operation) const {
  for (int i = 0; i < WARPGROUP_SIZE; ++i)
    if (std::memcmp(operation.a[i], operation.a_at_issue[i], sizeof operation.a_at_issue[i]) != 0)
      block_.fail("wgmma_wait", "thread " + std::to_string(index_ * WARPGROUP_SIZE + i) + " changed operand A of a " +
                             operation.call.verb + " under way");
}

}  // namespace multiattn::emulation
