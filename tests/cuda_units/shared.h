// Parts that all kernels of this folder share.
#pragma once
#include <type_traits>

#include "multiattn/descriptor.cuh"
#include "multiattn/wgmma.cuh"

using namespace multiattn;

struct Arguments {
  TensorMap a, b, out;  // boxes of out: 64 rows
  float* c;
  int32* counter;
  int32 row, column;
};

// `count` mbarriers of as many arrivals.
inline void make_barriers(SharedAddress first, int count, int arrivals) {
  if (thread_index() == 0) {
    for (int i = 0; i < count; ++i) mbarrier_init(first + 8 * i, arrivals);
    fence_mbarrier_init();
  }
  sync_block();
}

template <class T>
void load_boxes(SharedAddress tile, const TensorMap& map, SharedAddress barrier) {
  for (int panel = 0; panel < T::PANELS; ++panel)
    tma_load(tile + panel * T::PANEL_BYTES, map, barrier, panel * T::PANEL_COLUMNS, 0, 1, 1);
}

// One box of 64 rows of a, by all threads of the block.
inline void fill_tile(SharedAddress tile, const Arguments& arguments, SharedAddress barrier) {
  if (thread_index() == 0) {
    mbarrier_arrive_expect(barrier, 8192);
    tma_load(tile, arguments.a, barrier, 0, 0, 1, 1);
  }
  mbarrier_wait(barrier, 0);
}

// d[64, 8] = a's first 16 columns * those of b's first 8 rows, under way and not committed
inline void multiply_tile(float (&d)[4], SharedAddress a, SharedAddress b) {
  wgmma_fence();
  wgmma_ss<fp16, 8>(d, Descriptor(a, 16).at(0), Descriptor(b, 16).at(0), true);
}
