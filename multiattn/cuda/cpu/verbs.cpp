// The verbs of ptx.cuh, ptx_sm90.cuh and wgmma.cuh, on a Block of fibers; and `multiattn_launch`, which host.py calls.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "formats.h"
#include "hopper.h"
#include "multiattn/wgmma.cuh"

namespace multiattn {

namespace emulation {

namespace {

Block& block() { return *running_block; }
Hopper& hopper() { return block().hopper(); }
Warpgroup& warpgroup(const char* verb) { return hopper().warpgroup(verb); }

void check_address(const char* verb, SharedAddress address, int bytes) {
  block().require(verb, block().smem.check_address(address, bytes, bytes, block().current().block));
}

void check_global(const char* verb, const void* address, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0)
    block().fail(verb, "the global address is not aligned to " + std::to_string(bytes) + " bytes");
  hopper().touch_global();
}

template <class T>
T load_shared(const char* verb, SharedAddress source) {
  check_address(verb, source, sizeof(T));
  block().require(verb, block().smem.read(source, sizeof(T), block().now()));
  T value;
  std::memcpy(&value, block().smem.at(source), sizeof value);
  return value;
}

template <class T>
void store_shared(const char* verb, SharedAddress target, const T& value) {
  check_address(verb, target, sizeof(T));
  block().require(verb, block().smem.write(target, sizeof(T), block().now(), false));
  std::memcpy(block().smem.at(target), &value, sizeof value);
}

void copy_async(const char* verb, SharedAddress target, const void* source, bool valid, int bytes) {
  check_address(verb, target, bytes);
  if (valid) check_global(verb, source, bytes);
  block().require(verb, block().smem.write(target, bytes, block().now(), true));
  std::memset(block().smem.at(target), POISON, bytes);
  block().current().copies.push_back({target, valid ? source : nullptr, bytes, block().current().groups});
}

struct MatrixArguments {
  SharedAddress row;
  uint32* matrix;
};

// Rows of one 8x8 matrix are read in one wavefront: each of the 8 groups of 4 banks serves one row at a time.
int bank_conflicts(MatrixArguments* const* lanes, int first_lane) {
  int rows_of_bank[8] = {}, most = 0;
  for (int lane = first_lane; lane < first_lane + 8; ++lane)
    most = max(most, ++rows_of_bank[lanes[lane]->row / 16 % 8]);
  return most - 1;
}

template <bool TRANSPOSED>
void read_matrices(MatrixArguments* const* lanes) {
  ++block().counters.ldmatrix;
  for (int i = 0; i < 4; ++i) {
    uint16 element[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(element[row], block().smem.at(lanes[8 * i + row]->row), 16);
    block().counters.bank_conflicts += bank_conflicts(lanes, 8 * i);
    for (int lane = 0; lane < WARP_SIZE; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      const uint32 low = TRANSPOSED ? element[column][row] : element[row][column];
      const uint32 high = TRANSPOSED ? element[column + 1][row] : element[row][column + 1];
      lanes[lane]->matrix[i] = low | high << 16;
    }
  }
}

template <bool TRANSPOSED>
void ldmatrix(uint32* matrix, SharedAddress row) {
  const char* verb = TRANSPOSED ? "ldmatrix_x4_trans" : "ldmatrix_x4";
  check_address(verb, row, 16);
  // A lane reads, for the warp, the row whose address it gives.
  block().require(verb, block().smem.read(row, CHUNK_BYTES, block().now()));
  MatrixArguments arguments{row, matrix};
  block().meet_warp(verb, arguments, read_matrices<TRANSPOSED>);
}

// D is float (&)[4], or uint32 (&)[2] of halves.
template <class D>
struct MmaArguments {
  D& d;
  const uint32 (&a)[4];
  uint32 b[2];
};

// c[16x8] += a[16x16] * b[16x8]
VECTOR_CLONES void multiply(float (&c)[16][8], const float (&a)[16][16], const float (&b)[16][8]) {
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
}

// One mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). With an fp16 accumulator:
// products and their sum of 16 in fp32, rounded once.
template <class D>
void multiply_fragments(MmaArguments<D>* const* lanes, const float* widen) {
  constexpr bool HALVES = sizeof(D) == 8;
  float a[16][16], b[16][8], c[16][8];
  const auto widen_pair = [&](uint32 pair, float& low, float& high) {
    low = widen[pair & 0xffff];
    high = widen[pair >> 16];
  };
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    const auto& mine = *lanes[lane];
    const int group = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      float* target = &a[group + i % 2 * 8][column + i / 2 * 8];
      widen_pair(mine.a[i], target[0], target[1]);
    }
    for (int i = 0; i < 2; ++i) {
      widen_pair(mine.b[i], b[column + i * 8][group], b[column + i * 8 + 1][group]);
      float* sum = &c[group + i * 8][column];
      if constexpr (HALVES)
        widen_pair(mine.d[i], sum[0], sum[1]);
      else
        std::memcpy(sum, &mine.d[2 * i], 8);
    }
  }
  multiply(c, a, b);
  for (int lane = 0; lane < WARP_SIZE; ++lane)
    for (int half = 0; half < 2; ++half) {
      const float* sum = &c[lane / 4 + half * 8][lane % 4 * 2];
      if constexpr (HALVES)
        lanes[lane]->d[half] = narrow_fp16(sum[0]) | uint32(narrow_fp16(sum[1])) << 16;
      else
        std::memcpy(&lanes[lane]->d[2 * half], sum, 8);
    }
}

template <class D>
void mma(const char* verb, D& d, const uint32 (&a)[4], uint32 b0, uint32 b1, const float* widen) {
  MmaArguments<D> arguments{d, a, {b0, b1}};
  block().meet_warp(verb, arguments, [=](auto lanes) { multiply_fragments<D>(lanes, widen); });
}

// The value that lane `from` has.
template <class T>
T value_of(const char* verb, T value, int from) {
  struct {
    T value, result;
    int from;
  } mine{value, T{}, from};
  block().meet_warp(verb, mine, [](auto lanes) {
    for (int lane = 0; lane < WARP_SIZE; ++lane) lanes[lane]->result = lanes[lanes[lane]->from % WARP_SIZE]->value;
  });
  return mine.result;
}

}  // namespace

void cp_async_wait(int groups_left) {
  Thread& me = block().current();
  std::size_t kept = 0;
  for (const PendingCopy& copy : me.copies) {
    if (copy.group >= me.groups - groups_left) {
      me.copies[kept++] = copy;
      continue;
    }
    unsigned char* target = block().smem.at(copy.target);
    if (copy.source)
      std::memcpy(target, copy.source, copy.bytes);
    else
      std::memset(target, 0, copy.bytes);
    block().smem.land(copy.target, copy.bytes, block().now());
  }
  me.copies.resize(kept);
}

void mbarrier_arrive_at(SharedAddress barrier, int rank) { hopper().arrive_at("mbarrier_arrive_if", barrier, rank); }

void tma_load(const char* verb, int first, int last, SharedAddress target, const TensorMap& map, SharedAddress barrier,
              std::initializer_list<int> place) {
  hopper().load(verb, first, last, target, &map, barrier, place);
}
void tma_store(const char* verb, const TensorMap& map, SharedAddress source, std::initializer_list<int> place) {
  hopper().store(verb, &map, source, place);
}

void tma_store_wait(int groups_left, bool written) { hopper().wait_stores(groups_left, written); }

void set_registers(int count, bool raise) {
  hopper().set_registers(raise ? "raise_registers" : "lower_registers", count, raise);
}

void wgmma_wait(int groups_left) { warpgroup("wgmma_wait").wait(groups_left); }

void wgmma(const char* verb, bool is_bf16, int columns, float* d, const uint32* a_registers, uint64 a, uint64 b,
           bool a_mn_major, bool b_mn_major, bool add) {
  warpgroup(verb).issue({verb, columns, a, b, add, d, a_registers, is_bf16, a_mn_major, b_mn_major});
}

}  // namespace emulation

using namespace emulation;

void sync_block() { block().meet_block("sync_block"); }

void sync_warp() {
  int nothing;
  block().meet_warp("sync_warp", nothing, [](auto) { block().order_warp(); });
}

bool any_in_warp(bool predicate) {
  block().meet_warp("any_in_warp", predicate, [](auto lanes) {
    bool any = false;
    for (int lane = 0; lane < WARP_SIZE; ++lane) any |= *lanes[lane];
    for (int lane = 0; lane < WARP_SIZE; ++lane) *lanes[lane] = any;
  });
  return predicate;
}

float shuffle_xor(float value, int lane_mask) { return value_of("shuffle_xor", value, thread_index() % WARP_SIZE ^ lane_mask); }
uint32 shuffle_xor(uint32 value, int lane_mask) { return value_of("shuffle_xor", value, thread_index() % WARP_SIZE ^ lane_mask); }
uint32 shuffle(uint32 value, int lane) { return value_of("shuffle", value, lane); }

Chunk load_global_16(const void* source) {
  check_global("load_global_16", source, CHUNK_BYTES);
  Chunk value;
  std::memcpy(&value, source, CHUNK_BYTES);
  return value;
}

// Nobody else runs meanwhile, so that adding needs no care. A GPU leaves the order open.
void add_global_4(float* target, float value) {
  check_global("add_global_4", target, 4);
  *target += value;
}
void add_global_16(float* target, const float (&value)[4]) {
  check_global("add_global_16", target, CHUNK_BYTES);
  for (int i = 0; i < 4; ++i) target[i] += value[i];
}

void store_global_16(void* target, const Chunk& value) {
  check_global("store_global_16", target, CHUNK_BYTES);
  std::memcpy(target, &value, CHUNK_BYTES);
}

Chunk load_shared_16(SharedAddress source) { return load_shared<Chunk>("load_shared_16", source); }
float load_shared_4(SharedAddress source) { return load_shared<float>("load_shared_4", source); }
void load_shared_8(float (&value)[2], SharedAddress source) {
  const auto pair = load_shared<std::uint64_t>("load_shared_8", source);
  std::memcpy(value, &pair, sizeof value);
}
void store_shared_16(SharedAddress target, const Chunk& value) { store_shared("store_shared_16", target, value); }
void store_shared_4(SharedAddress target, uint32 value) { store_shared("store_shared_4", target, value); }

void cp_async_16(SharedAddress target, const void* source, bool valid) {
  copy_async("cp_async_16", target, source, valid, CHUNK_BYTES);
}
void cp_async_4(SharedAddress target, const void* source, bool valid) {
  copy_async("cp_async_4", target, source, valid, 4);
}
void cp_async_commit() { ++block().current().groups; }

#define OF_FORMAT(E)                                                                                             \
  template <> uint32 pack<E>(float low, float high) { return narrow_##E(low) | uint32(narrow_##E(high)) << 16; } \
  template <> float unpack_low<E>(uint32 pair) { return widening_table<widen_##E>()[pair & 0xffff]; }            \
  template <> float unpack_high<E>(uint32 pair) { return widening_table<widen_##E>()[pair >> 16]; }              \
  template <> void mma_m16n8k16<E>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {                  \
    mma("mma_m16n8k16<" #E ">", d, a, b0, b1, widening_table<widen_##E>());                                      \
  }
OF_FORMAT(fp16)
OF_FORMAT(bf16)
void mma_m16n8k16_fp16(uint32 (&d)[2], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  mma("mma_m16n8k16_fp16", d, a, b0, b1, widening_table<widen_fp16>());
}

void ldmatrix_x4(uint32 (&matrix)[4], SharedAddress row) { ldmatrix<false>(matrix, row); }
void ldmatrix_x4_trans(uint32 (&matrix)[4], SharedAddress row) { ldmatrix<true>(matrix, row); }

// ---- sm90
uint32 uniform(uint32 value) {
  block().meet_warp("uniform", value, [](auto lanes) {
    for (int lane = 1; lane < WARP_SIZE; ++lane) *lanes[lane] = *lanes[0];
  });
  return value;
}

// Other blocks may see something new, and go on here.
int32 atomic_add_global(int32* target, int32 value) {
  hopper().touch_global();
  const int32 before = *target;
  *target += value;
  block().give_way();
  return before;
}

int32 ordered_add_global(int32* target, int32 value) {
  check_global("ordered_add_global", target, 4);
  ++block().ordered_additions.generation;
  return atomic_add_global(target, value);
}

void release_add_global_if(bool predicate, int32* target, int32 value) {
  if (!predicate) return;
  hopper().check_written("release_add_global_if", target);
  ordered_add_global(target, value);
}

void await_global(const int32* place, int32 value) {
  check_global("await_global", place, 4);
  while (*place != value) {
    const std::string call = "await_global(" + std::to_string(value) + ", it is " + std::to_string(*place) + ")";
    block().wait_for(call.c_str(), block().ordered_additions);
  }
  hopper().note_awaited(place);
}

// A lane writes, for the warp, the row whose address it gives.
void stmatrix_x4(SharedAddress row, const uint32 (&matrix)[4]) {
  struct {
    const uint32* matrix;
    Chunk row;
  } mine{matrix, {}};
  block().meet_warp("stmatrix_x4", mine, [](auto lanes) {
    for (int lane = 0; lane < WARP_SIZE; ++lane)
      for (int word = 0; word < 4; ++word) lanes[lane]->row.word[word] = lanes[lane % 8 * 4 + word]->matrix[lane / 8];
  });
  store_shared("stmatrix_x4", row, mine.row);
}

void mbarrier_init(SharedAddress barrier, int arrivals) { hopper().init_mbarrier(barrier, arrivals); }
void mbarrier_arrive(SharedAddress barrier) { hopper().arrive("mbarrier_arrive", barrier, 0); }
void mbarrier_arrive_expect(SharedAddress barrier, int bytes) { hopper().arrive("mbarrier_arrive_expect", barrier, bytes); }
void mbarrier_wait(SharedAddress barrier, int parity) { hopper().wait(barrier, parity); }
void meet_cluster() { block().meet_cluster("meet_cluster"); }
void await_earlier_grids() { hopper().await_earlier_grids(); }

void fence_mbarrier_init() { hopper().fence_mbarriers(); }
void fence_async_shared() { hopper().fence_writes(); }
void fence_async_global() { hopper().fence_global(); }

void prefetch_map(const TensorMap& map) { Hopper::check_map("prefetch_map", &map); }
void bulk_load(SharedAddress target, const void* source, int bytes, SharedAddress barrier) {
  hopper().load_run("bulk_load", target, source, bytes, barrier);
}
void bulk_add_if(bool predicate, float* target, SharedAddress source, int bytes) {
  if (predicate) hopper().store_run("bulk_add_if", target, source, bytes, true);
}
void bulk_store_if(bool predicate, void* target, SharedAddress source, int bytes) {
  if (predicate) hopper().store_run("bulk_store_if", static_cast<float*>(target), source, bytes, false);
}
void tma_store_commit() { hopper().commit_stores(); }

void named_barrier_sync(int id, int threads) { hopper().named_barrier("named_barrier_sync", id, threads, true); }
bool any_at_named_barrier(int id, int threads, bool predicate) {
  return hopper().named_barrier("any_at_named_barrier", id, threads, true, predicate);
}
void named_barrier_arrive(int id, int threads) { hopper().named_barrier("named_barrier_arrive", id, threads, false); }

void wgmma_fence() { warpgroup("wgmma_fence").fence(); }
void wgmma_commit() { warpgroup("wgmma_commit").commit(); }

}  // namespace multiattn

// Runs a kernel's whole grid, in clusters of so many blocks, of which `residents` are there at the same time. 0, or 1 with a
// message in `error` (at most `error_bytes` with its end).
//
// One goes on until it is over or gives way: to the next one of the grid, or else to the last one there that can go on. So
// what is done in order is so because somebody waited.
extern "C" int multiattn_launch(multiattn::emulation::Kernel kernel, const void* parameters, long long blocks,
                                int threads, long long smem_bytes, int cluster, int residents,
                                multiattn::emulation::LaunchCounts* counts, char* error, long long error_bytes) {
  using multiattn::emulation::Block;
  std::string message;
  if (blocks % cluster)
    message = "a grid of " + std::to_string(blocks) + " blocks, which are no whole clusters of " + std::to_string(cluster);
  try {
    const multiattn::emulation::Stacks stacks(static_cast<std::size_t>(threads) * cluster * residents);
    multiattn::emulation::current_blocks = blocks;
    multiattn::emulation::Hopper::released_words.clear();
    std::vector<std::unique_ptr<Block>> there(residents);
    for (long long begun = 0, ended = 0; ended < blocks && message.empty();) {
      auto chosen = std::find(there.begin(), there.end(), nullptr);
      if (chosen != there.end() && begun < blocks) {
        *chosen = std::make_unique<Block>(threads, smem_bytes, cluster, begun, *counts);
        (*chosen)->prepare(kernel, parameters, stacks, (chosen - there.begin()) * threads * cluster);
        begun += cluster;
      } else {
        const auto last = std::find_if(there.rbegin(), there.rend(), [](auto& it) { return it && it->can_go(); });
        if (last == there.rend()) {
          for (const auto& block : there)
            if (block) message += (message.empty() ? "" : "\n") + block->deadlock();
          break;
        }
        chosen = last.base() - 1;
      }
      if (!(*chosen)->run()) message = (*chosen)->error;
      if ((*chosen)->is_over()) chosen->reset(), ended += cluster;
    }
  } catch (const std::bad_alloc&) {
    message = "out of memory for the stacks of " + std::to_string(threads) + " threads";
  }
  std::snprintf(error, error_bytes, "%s", message.c_str());
  return message.empty() ? 0 : 1;
}
