// The warpgroup that makes dQ = dS K of each step and adds it to its sums.
#pragma once
#include "backward_wgmma_traits.cuh"
#include "multiattn/wgmma.cuh"

namespace multiattn {

template <class T>
class DqWarpgroup {
  using E = typename T::Element;
  using Shared = BackwardShared<T>;
  using TileK = typename T::TileK;
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
      // Now, as behind it may be tiles without a step, for which the warps that add make room only when they have added.
      if constexpr (T::ORDERED && T::HANDS_OVER_LATE) hand_over();
      Shared::ring_k().release_apart(k_.slot);
      k_.advance();
    }
    if constexpr (T::HANDS_OVER_LATE) hand_over();
    if constexpr (T::DQ_BY_TMA && !T::ORDERED) tma_store_wait_read<0>();
  }

 private:
  DEVICE void walk(const KeyTile<T>& tile) {
    if constexpr (T::CLEARS_AHEAD) await_cleared(tile);
    if constexpr (T::LISTED) return walk_list(tile);
    const Blocks blocks = query_blocks<T>(params_, tile);
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
          make(place.slot, column);
          if (column + T::DQ_COLUMNS >= T::HEAD_DIM) Shared::ring_ds().release(place.slot);
          if (T::ORDERED || row < end_row) add(sums + column / 8 * T::SIDE, column);
        }
        row += T::DESCENDS ? -T::TILE_M : T::TILE_M;
        sums += (T::DESCENDS ? -1 : 1) * (T::TILE_M / 16 * ROW_FLOATS);
      }
      steps_left -= end - at.block;
      at.block = blocks.begin;
    }
  }

  // As `walk`, where each step comes with what it is of.
  DEVICE void walk_list(const KeyTile<T>& tile) {
    for (int step = 0; step < tile.end_step || step < tile.end_of_second; ++step) {
      if (step < tile.end_step) make_listed<0>(tile, steps_++);
      if constexpr (T::PAIRED)
        if (step < tile.end_of_second) make_listed<1>(tile, steps_of_second_++);
    }
  }
  template <int GROUP>
  DEVICE void make_listed(const KeyTile<T>& tile, uint32 step) {
    using Its = BackwardShared<T, GROUP>;
    const auto place = DsPlace::of(step);
    Its::ring_ds().await_full(place);
    const auto at = ListedStep::load(Its::step_of_ds(place.slot));
    const int first_query = first_query_in<typename T::Blocked, T::TILE_M>(tile.sequence, at.tile.tile());
    const int row = first_query + warp_row();
    float* const sums = sums_of(at.head, tile, first_query, row);
#pragma unroll
    for (int column = 0; column < T::HEAD_DIM; column += T::DQ_COLUMNS) {
      make<GROUP>(place.slot, column);
      if (column + T::DQ_COLUMNS >= T::HEAD_DIM) Its::ring_ds().release(place.slot);
      const int end = end_query_in<typename T::Blocked, T::TILE_M>(params_.backward, tile.sequence, at.tile.tile());
      if (row < end) add(sums + column / 8 * T::SIDE, column);
    }
  }

  // The sums of a query of a tile: where sequences cut tiles, they are together from its first on.
  DEVICE float* sums_of(int head, const KeyTile<T>& tile, int first_query, int row) const {
    if constexpr (IS_CUT<typename T::Blocked>)
      return dq_sums<T>(params_, head, tile.number, tile.sequence, first_query) + warp_row() / 16 * ROW_FLOATS;
    else
      return dq_sums<T>(params_, head, tile.number, tile.sequence, row);
  }

  // The tile's sums are empty, and TMA knows.
  DEVICE void await_cleared(const KeyTile<T>& tile) const {
    if (tile.head_kv < heads_cleared_before<T>(params_)) return;
    if (lane() == 0) {
      await_global(cleared_parts<T>(params_, tile.head_kv), params_.backward.tiles_kv);
      fence_async_global();
    }
    sync_warp();
  }

  // dq[TILE_M, DQ_COLUMNS] = dS K, 16 keys a step
  template <int GROUP = 0>
  DEVICE void make(int slot, int column) {
    const Descriptor ds(BackwardShared<T, GROUP>::ds(slot), T::TileDS::PANEL_BYTES);
    const Descriptor k(Shared::k(k_.slot) + GROUP * T::WARPGROUP_KEYS * TileK::ROW_BYTES + column / TileK::PANEL_COLUMNS * TileK::PANEL_BYTES, TileK::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::KEY_STEPS; ++i)
      wgmma_ss_mn<E, T::DQ_COLUMNS>(dq_, ds.at(i * 16 * T::TileDS::ROW_BYTES), k.at(i * 16 * TileK::ROW_BYTES), i > 0);
    wgmma_commit();
    if constexpr (T::HANDS_OVER_LATE) hand_over();  // the part before this one
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
      if (column + 8 * i < T::HEAD_DIM) add_global_16(sums + i * T::SIDE + lane() * 4, four);
    }
  }

  // Each warp for itself: what it adds is contiguous.
  DEVICE void add_by_tma(float* sums, int column) {
    const SharedAddress own = buffer(additions_);
    if constexpr (T::ORDERED) {
      const auto before = T::PlaceSums::of(additions_ - T::DQ_BUFFERS);  // in this buffer
      if (additions_ >= T::DQ_BUFFERS) mbarrier_wait(Shared::ring_sums().empty(before.slot), before.parity);
    } else {
      if (lane() == 0) tma_store_wait_read<T::DQ_BUFFERS - 1>();
      sync_warp();  // nothing is read from this buffer
    }
#pragma unroll
    for (int i = 0; i < T::DQ_COLUMNS / 8; ++i)
      if (column + 8 * i < T::HEAD_DIM)
        store_shared_16(own + (i * T::SIDE + lane() * 4) * 4, chunk_of(dq_ + 4 * i));
    waiting_ = sums;
    waiting_bytes_ = T::part_bytes(column);
    if constexpr (!T::HANDS_OVER_LATE) hand_over();
  }
  // With HANDS_OVER_LATE while the next products are made: the fence was a quarter of the time of this warpgroup, for which the
  // others wait.
  DEVICE void hand_over() {
    fence_async_shared();
    sync_warp();  // all lanes have written
    if constexpr (T::ORDERED) {  // another warp adds, when it is the tile's turn
      mbarrier_arrive_if(lane() == 0 && waiting_, Shared::ring_sums().full(T::PlaceSums::of(additions_).slot));
    } else {
      bulk_add_if(lane() == 0 && waiting_, waiting_, buffer(additions_), waiting_bytes_);
      tma_store_commit();
    }
    additions_ += waiting_ != nullptr;
    waiting_ = nullptr;
  }
  static DEVICE SharedAddress buffer(uint32 addition) {
    return Shared::dq(addition, thread_index() / WARP % T::DQ_WARPS);
  }

  static constexpr int ROW_FLOATS = T::DIM_STEPS * T::Sum::FRAGMENT;  // of 16 queries
  static DEVICE int lane() { return thread_index() % WARP; }

  const typename T::Params& params_;
  RingPlace<T::K_STAGES> k_;
  uint32 steps_ = 0, additions_ = 0;  // before this one, of all tiles
  uint32 steps_of_second_ = 0;        // with a list for each warpgroup
  float* waiting_ = nullptr;          // the sums of a part that is in a buffer, and not handed over
  int waiting_bytes_ = 0;
  float dq_[T::DQ_COLUMNS / 2];
};

}  // namespace multiattn
