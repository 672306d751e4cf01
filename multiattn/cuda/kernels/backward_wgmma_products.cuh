// Products of the backward for sm90, left under way, and how its kernels begin.
#pragma once
#include "backward_wgmma_traits.cuh"
#include "multiattn/wgmma.cuh"

namespace multiattn {

// sums[64, N] = 64 rows of a tile times N rows of another. The first are in shared memory or, KEPT, in registers.
template <class E, int N, class TileA, class TileB, bool KEPT, int STEPS>
DEVICE void multiply_rows(float (&sums)[N / 2], const Fragment (&kept)[STEPS], SharedAddress left, SharedAddress right) {
  const Descriptor a(recomputed(left), 16), b(right, 16);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const uint64 columns = b.at(i / 4 * TileB::PANEL_BYTES + i % 4 * 32);
    if constexpr (KEPT)
      wgmma_rs<E, N>(sums, kept[i].reg, columns, i > 0);
    else
      wgmma_ss<E, N>(sums, a.at(i / 4 * TileA::PANEL_BYTES + i % 4 * 32), columns, i > 0);
  }
  wgmma_commit();
}

// gradient[64, D] += operand[64, 16 * STEPS] times rows of a tile; `is_first`: = instead of +=.
template <class E, int D, class TileB, int STEPS>
DEVICE void add_product(float (&gradient)[D / 2], const uint32 (&operand)[STEPS][4], SharedAddress rows, bool is_first) {
  const Descriptor b(rows, TileB::PANEL_BYTES);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    wgmma_rs_mn<E, D>(gradient, operand[i], b.at(i * 16 * TileB::ROW_BYTES), !is_first || i > 0);
  wgmma_commit();
}

// Its barriers are there, and its maps on their way, by the thread that loads. The number of the thread's warpgroup.
template <class Shared, class Params>
DEVICE int begin_block(const Params& params, int loading_thread) {
  if (thread_index() == 0) Shared::init();
  if (thread_index() == loading_thread) {
    prefetch_map(params.map_q);
    prefetch_map(params.map_k);
    prefetch_map(params.map_v);
    prefetch_map(params.map_dout);
  }
  sync_block();  // barriers are there
  return static_cast<int>(uniform(thread_index() / WARPGROUP));
}

}  // namespace multiattn
