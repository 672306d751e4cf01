// The warpgroup that makes dQ = dS K of each step and adds it to its sums.
#pragma once
#include "backward_wgmma_traits.cuh"
#include "multiattn/wgmma.cuh"

namespace multiattn {

template <class T>
class DqWarpgroup {
  using E = typename T::Element;
  using Shared = BackwardShared<T>;
  using TileKV = typename T::TileKV;
  using DsPlace = RingPlace<T::DS_STAGES>;

 public:
  DEVICE explicit DqWarpgroup(const typename T::Params& params) : params_(params) {}

  // Tile after tile.
  DEVICE void run() {
    while (true) {
      Shared::ring_k().await_full(k_);
      const KeyTile<T> tile = load_key_tile<T>(Shared::tile_place(k_.slot));
      if (tile.is_none()) return;
      walk(tile);
      Shared::ring_k().release_apart(k_.slot);
      k_.advance();
    }
  }

 private:
  DEVICE void walk(const KeyTile<T>& tile) {
    const Blocks blocks = query_blocks<T>(params_, tile);
    const int first_head = tile.head_kv * params_.backward.group, end_head = first_head + params_.backward.group;
    const int end_row = count_queries(params_.backward, tile.sequence);
    for (int head = first_head; head < end_head; ++head) {
      int row = blocks.begin * T::TILE_M + warp_row();
      float* sums = dq_sums_of<T>(params_, head, tile.number, tile.sequence, row) + thread_index() % WARP * 4;
      for (int block = blocks.begin; block < blocks.end; ++block) {
        const auto place = DsPlace::of(steps_++);
        Shared::ring_ds().await_full(place);
#pragma unroll
        for (int column = 0; column < T::HEAD_DIM; column += T::DQ_COLUMNS) {
          make(place.slot, column);
          if (column + T::DQ_COLUMNS >= T::HEAD_DIM) Shared::ring_ds().release(place.slot);
          if (row < end_row) add(sums, column);
        }
        row += T::TILE_M;
        sums += T::TILE_M / 16 * ROW_FLOATS;
      }
    }
  }

  // dq[TILE_M, DQ_COLUMNS] = dS K
  DEVICE void make(int slot, int column) {
    const Descriptor ds(Shared::ds(slot), T::TileDS::PANEL_BYTES);
    const Descriptor k(Shared::k(k_.slot) + column / TileKV::PANEL_COLUMNS * TileKV::PANEL_BYTES, TileKV::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::KEY_STEPS; ++i)
      wgmma_ss_mn<E, T::DQ_COLUMNS>(dq_, ds.at(i * 16 * T::TileDS::ROW_BYTES), k.at(i * 16 * TileKV::ROW_BYTES), i > 0);
    wgmma_commit();
    wgmma_wait<0>();
  }

  // The columns from `column` on of the warp's 16 queries to their sums.
  DEVICE void add(float* sums, int column) const {
#pragma unroll
    for (int i = 0; i < T::DQ_COLUMNS / 8; ++i) {
      const float values[4] = {dq_[4 * i], dq_[4 * i + 1], dq_[4 * i + 2], dq_[4 * i + 3]};
      if (column + 8 * i < T::HEAD_DIM) add_global_16(sums + (column / 8 + i) * (T::Sum::FRAGMENT / 2), values);
    }
  }

  static constexpr int ROW_FLOATS = T::DIM_STEPS * T::Sum::FRAGMENT;  // of 16 queries
  static DEVICE int warp_row() { return thread_index() / WARP % 4 * 16; }

  const typename T::Params& params_;
  RingPlace<T::K_STAGES> k_;
  uint32 steps_ = 0;  // before this one, of all tiles
  float dq_[T::DQ_COLUMNS / 2];
};

}  // namespace multiattn
