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

  // In a block whose shared memory starts at `base`.
  Matrix(std::uint64_t descriptor, std::uint32_t base)
      : start(base + field(descriptor, 0)), lead(field(descriptor, 16)), stride(field(descriptor, 32)) {}

  static const char* problem(std::uint64_t descriptor) {
    if (descriptor >> 62 != 1) return "a descriptor without the 128-byte swizzle";
    if (descriptor >> 49 & 7) return "a descriptor with a base offset";
    return nullptr;
  }

  // Calls visit(address, row, k) for each chunk of a K-major [rows, 16], of eight elements from k on, or of an MN-major
  // [16, rows], of eight rows from `row` on, of which 64 are a panel.
  template <class Visit>
  void for_each_chunk(int rows, bool mn_major, Visit visit) const {
    const int lines = mn_major ? WGMMA_DEPTH : rows, chunks = (mn_major ? rows : WGMMA_DEPTH) / 8;
    for (int line = 0; line < lines; ++line)
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const std::uint32_t address = start + line % ROWS_OF_GROUP * LINE_BYTES + line / ROWS_OF_GROUP * stride +
                                      chunk / 8 * lead + chunk % 8 * CHUNK_BYTES;
        visit(swizzled(address), mn_major ? 8 * chunk : line, mn_major ? line : 8 * chunk);
      }
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

// Reads what 16-bit elements are worth.
struct Reader {
  SharedMemory& smem;
  const bool bf16;

  // Calls put(row, k, value) for each element of a matrix of so many rows.
  template <class Put>
  void read(const Matrix& matrix, int rows, bool mn_major, Put put) const {
    matrix.for_each_chunk(rows, mn_major, [&](std::uint32_t address, int row, int k) {
      std::uint16_t half[8];
      std::memcpy(half, smem.at(address), sizeof half);
      for (int i = 0; i < 8; ++i) put(row + i * mn_major, k + i * !mn_major, widen(half[i]));
    });
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
};

// Calls copy(in the thread's memory, in the sum) for each pair of accumulators of a thread.
template <class Sum, class Copy>
void for_each_pair(Sum& sum, int lane, Copy copy) {
  for (int pair = 0; pair < sum.columns / 4; ++pair)
    copy(sum.d[lane] + 2 * pair, &sum.value[first_row(lane) + pair % 2 * 8][first_column(lane, pair / 2)]);
}

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

void Warpgroup::finish() {
  block_.leave(team_);
  if (!flying_.empty()) block_.fail("returns with wgmmas under way");
}

template <class Work>
void Warpgroup::meet(WarpgroupCall call, Work work) {
  block_.check_warp(call.verb);
  block_.meet(team_, call.verb, call, [&](Calls calls) {
    for (int i = 0; i < WARPGROUP_SIZE; ++i)
      if (!(*calls[i] == call))
        block_.fail(call.verb, "the threads of the warpgroup differ in its descriptors or constants");
    work(calls);
  });
}

void Warpgroup::fence() { meet({"wgmma_fence"}, [](Calls) {}); }
void Warpgroup::commit() { meet({"wgmma_commit"}, [&](Calls) { ++groups_; }); }

void Warpgroup::wait(int groups_left) {
  meet({"wgmma_wait", groups_left}, [&](Calls) {
    const auto due = [&] { return !flying_.empty() && flying_.front()->group < groups_ - groups_left; };
    if (due()) ++time_;
    while (due()) {
      compute(*flying_.front());
      flying_.pop_front();
    }
    for (int i = 0; i < WARPGROUP_SIZE; ++i) {
      const int thread = team_.first_thread + i;
      block_.clocks.of(thread)[block_.clocks.wgmma(thread / WARP_SIZE)] = time_;
    }
  });
}

void Warpgroup::set_registers(const char* verb, int count, bool raise, RegisterPool& pool) {
  meet({verb, count}, [&](Calls) {
    if (raise ? count < registers_ : count > registers_)
      block_.fail(verb, std::to_string(count) + " registers a thread, where the warpgroup has " + std::to_string(registers_));
    while (pool.free < count - registers_) block_.wait_for(verb, pool);
    pool.free -= count - registers_;
    registers_ = count;
    ++pool.generation;
  });
}

// ---- issue
void Warpgroup::issue(const WarpgroupCall& call) {
  meet(call, [&](Calls calls) { begin(calls); });
  hopper_.check_needs(call.verb, flying_.back()->needs);
}

void Warpgroup::begin(Calls calls) {
  const WarpgroupCall& call = *calls[0];
  if (call.number < 8 || call.number > WGMMA_COLUMNS_MAX || call.number % 8)
    block_.fail(call.verb, std::to_string(call.number) + " columns: a multiple of 8 up to 256");
  Operation& operation = *flying_.emplace_back(new Operation);
  operation.call = call;
  operation.group = groups_;
  if (call.a_registers) {
    for (int i = 0; i < WARPGROUP_SIZE; ++i) {
      operation.a[i] = calls[i]->a_registers;
      std::memcpy(operation.a_at_issue[i], calls[i]->a_registers, sizeof operation.a_at_issue[i]);
    }
  } else {
    add_operand(operation, call.a, WGMMA_ROWS, call.a_mn_major);
  }
  add_operand(operation, call.b, call.number, call.b_mn_major);
  operation.sum = &sum_of(calls);
  ++operation.sum->operations;
}

// The lines that hold a K-major [rows, 16], or an MN-major [16, rows].
void Warpgroup::add_operand(Operation& operation, std::uint64_t descriptor, int rows, bool mn_major) {
  if (const char* problem = Matrix::problem(descriptor)) block_.fail(operation.call.verb, problem);
  const Matrix matrix(descriptor, base());
  std::uint32_t latest = ~0u;
  matrix.for_each_chunk(rows, mn_major, [&](std::uint32_t chunk, int, int) {
    block_.require(operation.call.verb, block_.smem.check_address(chunk, CHUNK_BYTES, CHUNK_BYTES, rank()));
    const std::uint32_t line = chunk / LINE_BYTES * LINE_BYTES;
    if (line == latest) return;
    latest = line;
    hopper_.need_line(operation.call.verb, line, operation.needs);
    ++block_.smem.lines.of(line).wgmmas;
    operation.lines.push_back(line);
  });
}

// The one that earlier wgmmas under way add to, or a new one from the threads' memory, where NaN is left.
Warpgroup::Sum& Warpgroup::sum_of(Calls calls) {
  const char* verb = calls[0]->verb;
  const int columns = calls[0]->number;
  for (auto& sum : sums_) {
    int same = 0;
    for (int i = 0; i < WARPGROUP_SIZE; ++i) same += sum->d[i] == calls[i]->d;
    if (same == WARPGROUP_SIZE && sum->columns == columns) return *sum;
    if (same && same < WARPGROUP_SIZE)
      block_.fail(verb, "accumulators at another place than in the warpgroup's other threads");
    for (int i = 0; i < WARPGROUP_SIZE; ++i)
      if (sum->d[i] < calls[i]->d + columns / 2 && calls[i]->d < sum->d[i] + sum->columns / 2)
        block_.fail(verb, "accumulators that are a part of another wgmma's under way");
  }
  Sum& sum = *sums_.emplace_back(new Sum);  // which leaves its values as they are
  sum.columns = columns;
  for (int i = 0; i < WARPGROUP_SIZE; ++i) {
    sum.d[i] = calls[i]->d;
    for_each_pair(sum, i, [](float* thread, float* value) { std::memcpy(value, thread, 8); });
    std::memset(sum.d[i], POISON, columns / 2 * sizeof(float));
  }
  return sum;
}

// ---- completion
void Warpgroup::give_accumulators(Sum& sum) {
  for (int lane = 0; lane < WARPGROUP_SIZE; ++lane) {
    float* d = sum.d[lane];
    for (int i = 0; i < sum.columns / 2; ++i)
      if (float_bits(d[i]) != POISONED_WORD)
        block_.fail("wgmma_wait", "thread " + std::to_string(index_ * WARPGROUP_SIZE + lane) +
                               " wrote accumulators of a wgmma under way");
    for_each_pair(sum, lane, [](float* thread, float* value) { std::memcpy(thread, value, 8); });
  }
}

void Warpgroup::compute(Operation& operation) {
  const WarpgroupCall& call = operation.call;
  Operands operands;
  const Reader reader{block_.smem, call.is_bf16};
  if (call.a_registers) {
    for (int i = 0; i < WARPGROUP_SIZE; ++i) {
      if (std::memcmp(operation.a[i], operation.a_at_issue[i], sizeof operation.a_at_issue[i]) != 0)
        block_.fail("wgmma_wait", "thread " + std::to_string(index_ * WARPGROUP_SIZE + i) + " changed operand A of a " +
                                      call.verb + " under way");
      reader.read_registers(operands, i, operation.a_at_issue[i]);
    }
  } else {
    reader.read(Matrix(call.a, base()), WGMMA_ROWS, call.a_mn_major,
                [&](int row, int k, float value) { operands.a[row][k] = value; });
  }
  reader.read(Matrix(call.b, base()), call.number, call.b_mn_major,
              [&](int column, int k, float value) { operands.b[k][column] = value; });

  Sum& sum = *operation.sum;
  if (!call.add) std::memset(sum.value, 0, sizeof sum.value);
  multiply(sum.value, operands, call.number);
  for (const std::uint32_t address : operation.lines) {
    Line& line = block_.smem.lines.of(address);
    --line.wgmmas;
    line.multiplied[index_] = time_;
  }
  if (--sum.operations) return;
  give_accumulators(sum);
  sums_.erase(std::find_if(sums_.begin(), sums_.end(), [&](const auto& other) { return other.get() == &sum; }));
}

}  // namespace multiattn::emulation
