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
      if (tile.is_none()) break;
      walk(tile);
      Shared::ring_k().release_apart(k_.slot);
      k_.advance();
    }
    if constexpr (T::DQ_BY_TMA) tma_store_wait_read<0>();
  }

 private:
  DEVICE void walk(const KeyTile<T>& tile) {
    const Blocks blocks = query_blocks<T>(params_, tile);
    const Blocks of_low = group_blocks<T>(params_, tile, 0), of_high = group_blocks<T>(params_, tile, 1);
    const int first_head = tile.head_kv * params_.backward.group, end_head = first_head + params_.backward.group;
    const int end_row = count_queries(params_.backward, tile.sequence);
    int steps_left = count_steps<T>(params_, blocks);
    QueryStep at{0, blocks.begin};
    if constexpr (IS_STREAM_K<typename T::Blocked>) {
      steps_left = tile.end_step - tile.first_step;
      at = QueryStep::of(tile.first_step, blocks);
    }
    for (int head = first_head + at.head; head < end_head; ++head) {
      int row = query_block<T>(params_, tile, at.block) * T::TILE_M + warp_row(), end = blocks.end;
      if constexpr (IS_STREAM_K<typename T::Blocked>) end = min(end, at.block + steps_left);
      float* sums = dq_sums<T>(params_, head, tile.number, tile.sequence, row);
      for (int block = at.block; block < end; ++block) {
        const auto place = DsPlace::of(steps_++);
        Shared::ring_ds().await_full(place);
#pragma unroll
        for (int column = 0; column < T::HEAD_DIM; column += T::DQ_COLUMNS) {
          if (!sees(of_high, block))
            make<0, T::KEY_STEPS / 2>(place.slot, column);
          else if (!sees(of_low, block))
            make<T::KEY_STEPS / 2, T::KEY_STEPS>(place.slot, column);
          else
            make<0, T::KEY_STEPS>(place.slot, column);
          if (column + T::DQ_COLUMNS >= T::HEAD_DIM) Shared::ring_ds().release(place.slot);
          if (row < end_row) add(sums + column / 8 * SIDE, column);
        }
        row += T::DESCENDS ? -T::TILE_M : T::TILE_M;
        sums += (T::DESCENDS ? -1 : 1) * (T::TILE_M / 16 * ROW_FLOATS);
      }
      steps_left -= end - at.block;
      at.block = blocks.begin;
    }
  }

  // True if a block of queries sees keys of a warpgroup, which has put dS into shared memory.
  static DEVICE bool sees(const Blocks& of_group, int block) {
    return T::BAND == Band::FULL || (block >= of_group.begin && block < of_group.end);
  }

  // dq[TILE_M, DQ_COLUMNS] = dS K of some of the tile's keys, 16 a step
  template <int BEGIN, int END>
  DEVICE void make(int slot, int column) {
    const Descriptor ds(Shared::ds(slot), T::TileDS::PANEL_BYTES);
    const Descriptor k(Shared::k(k_.slot) + column / TileKV::PANEL_COLUMNS * TileKV::PANEL_BYTES, TileKV::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = BEGIN; i < END; ++i)
      wgmma_ss_mn<E, T::DQ_COLUMNS>(dq_, ds.at(i * 16 * T::TileDS::ROW_BYTES), k.at(i * 16 * TileKV::ROW_BYTES), i > BEGIN);
    wgmma_commit();
    wgmma_wait<0>();
  }

  // The columns from `column` on of the warp's 16 queries to their sums.
  DEVICE void add(float* sums, int column) {
    if constexpr (T::DQ_BY_TMA)
      add_by_tma(sums, column);
    else
      add_from_registers(sums, column);
  }

  DEVICE void add_from_registers(float* sums, int column) const {
#pragma unroll
    for (int i = 0; i < T::DQ_COLUMNS / 8; ++i) {
      const float four[4] = {dq_[4 * i], dq_[4 * i + 1], dq_[4 * i + 2], dq_[4 * i + 3]};
      if (column + 8 * i < T::HEAD_DIM) add_global_16(sums + i * SIDE + lane() * 4, four);
    }
  }

  // Each warp for itself: what it adds is contiguous.
  DEVICE void add_by_tma(float* sums, int column) {
    constexpr int BYTES = T::DQ_BYTES / T::DQ_WARPS;
    const SharedAddress own = Shared::dq(additions_++ % T::DQ_BUFFERS) + thread_index() / WARP % T::DQ_WARPS * BYTES;
    if (lane() == 0) tma_store_wait_read<T::DQ_BUFFERS - 1>();
    sync_warp();  // nothing is read from this buffer
#pragma unroll
    for (int i = 0; i < T::DQ_COLUMNS / 8; ++i)
      if (column + 8 * i < T::HEAD_DIM)
        store_shared_16(own + (i * SIDE + lane() * 4) * 4, chunk_of(dq_ + 4 * i));
    fence_async_shared();
    sync_warp();  // all lanes have written
    if (lane() == 0) {
      bulk_add(sums, own, min(T::DQ_COLUMNS, T::HEAD_DIM - column) / 8 * SIDE * 4);
      tma_store_commit();
    }
  }

  static constexpr int ROW_FLOATS = T::DIM_STEPS * T::Sum::FRAGMENT;  // of 16 queries
  static constexpr int SIDE = T::Sum::FRAGMENT / 2;                    // of these, 8 columns
  static DEVICE int lane() { return thread_index() % WARP; }

  const typename T::Params& params_;
  RingPlace<T::K_STAGES> k_;
  uint32 steps_ = 0, additions_ = 0;  // before this one, of all tiles
  float dq_[T::DQ_COLUMNS / 2];
};

}  // namespace multiattn
