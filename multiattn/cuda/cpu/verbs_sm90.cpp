// The verbs of ptx_sm90.cuh and wgmma.cuh, on a Block of fibers.
#include "hopper.h"
#include "multiattn/ptx_sm90.cuh"
#include "multiattn/wgmma.cuh"

namespace multiattn {

namespace emulation {

extern Block* running_block;
void store_chunk(const char* verb, SharedAddress target, const Chunk& value);

namespace {

Hopper& hopper() { return running_block->hopper(); }
Warpgroup& warpgroup(const char* verb) { return hopper().warpgroup(verb); }

// The row of the one of four 8x8 matrices of which the lane has the address.
Chunk gather_row(const uint32* matrix) {
  struct Arguments {
    const uint32* matrix;
    Chunk row;
  } mine{matrix, {}};
  running_block->meet_warp("stmatrix_x4", &mine, [](void* const* lanes) {
    for (int lane = 0; lane < WARP_SIZE; ++lane)
      for (int word = 0; word < 4; ++word)
        static_cast<Arguments*>(lanes[lane])->row.word[word] =
            static_cast<Arguments*>(lanes[lane % 8 * 4 + word])->matrix[lane / 8];
  });
  return mine.row;
}

}  // namespace

void mbarrier_arrive_at(SharedAddress barrier, int rank) { hopper().arrive_at("mbarrier_arrive_if", barrier, rank); }

void tma_load(const char* verb, int first, int last, SharedAddress target, const TensorMap& map, SharedAddress barrier,
              int column, int row, int head, int batch) {
  hopper().load(verb, first, last, target, &map, barrier, column, row, head, batch);
}

void tma_store_wait(int groups_left) { hopper().wait_stores(groups_left); }

void set_registers(int count, bool raise) {
  hopper().set_registers(raise ? "raise_registers" : "lower_registers", count, raise);
}

void wgmma_wait(int groups_left) { warpgroup("wgmma_wait").wait(groups_left); }

void wgmma(const char* verb, bool is_bf16, int columns, float* d, const uint32* a_registers, uint64 a, uint64 b,
           bool b_mn_major, bool add) {
  warpgroup(verb).issue({verb, is_bf16, columns, d, a_registers, a, b, b_mn_major, add});
}

}  // namespace emulation

using namespace emulation;

uint32 uniform(uint32 value) {
  running_block->meet_warp("uniform", &value, [](void* const* lanes) {
    for (int lane = 1; lane < WARP_SIZE; ++lane) *static_cast<uint32*>(lanes[lane]) = *static_cast<uint32*>(lanes[0]);
  });
  return value;
}

// Blocks run one after another.
int32 atomic_add_global(int32* target, int32 value) {
  hopper().touch_global();
  const int32 before = *target;
  *target += value;
  return before;
}

void stmatrix_x4(SharedAddress row, const uint32 (&matrix)[4]) { store_chunk("stmatrix_x4", row, gather_row(matrix)); }

void mbarrier_init(SharedAddress barrier, int arrivals) { hopper().init_mbarrier(barrier, arrivals); }
void mbarrier_arrive(SharedAddress barrier) { hopper().arrive("mbarrier_arrive", barrier, 0); }
void mbarrier_arrive_expect(SharedAddress barrier, int bytes) { hopper().arrive("mbarrier_arrive_expect", barrier, bytes); }
void mbarrier_wait(SharedAddress barrier, int parity) { hopper().wait(barrier, parity); }
void meet_cluster() {
  hopper();  // which publishes mbarriers
  running_block->meet_cluster("meet_cluster");
}
void await_earlier_grids() { hopper().await_earlier_grids(); }

void fence_mbarrier_init() { hopper().fence_mbarriers(); }
void fence_async_shared() { hopper().fence_writes(); }

void prefetch_map(const TensorMap& map) { Hopper::check_map("prefetch_map", &map); }
void tma_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int batch) {
  hopper().store(&map, source, column, row, head, batch);
}
void tma_store_commit() { hopper().commit_stores(); }

void named_barrier_sync(int id, int threads) { hopper().named_barrier("named_barrier_sync", id, threads, true); }
void named_barrier_arrive(int id, int threads) { hopper().named_barrier("named_barrier_arrive", id, threads, false); }

void wgmma_fence() { warpgroup("wgmma_fence").fence(); }
void wgmma_commit() { warpgroup("wgmma_commit").commit(); }

}  // namespace multiattn
