// Warps that add dQ to its sums where tiles of keys do so one after another: those that multiply do not wait for their turn.
#pragma once
#include "backward_wgmma_traits.cuh"

namespace multiattn {

// They take the steps of a block in turns, as the word that an addition is there takes longer than a step.
template <class T>
class DqAdder {
  using Shared = BackwardShared<T>;

 public:
  DEVICE DqAdder(const typename T::Params& params, uint32 number) : params_(params), number_(number) {}

  // Tile after tile.
  DEVICE void run() {
    while (true) {
      Shared::ring_k().await_full(k_);
      const KeyTile<T> tile = load_key_tile<T>(Shared::tile_place(k_.slot));
      Shared::ring_k().release_apart(k_.slot);
      k_.advance();
      if (tile.is_none()) break;
      walk(tile);
    }
  }

 private:
  DEVICE void walk(const KeyTile<T>& tile) {
    const Blocks blocks = query_blocks<T>(params_, tile);
    const int steps = count_steps<T>(params_, blocks);
    for (int step = 0; step < steps; ++step, ++steps_) {
      if (steps_ % T::ADDING_WARPS != number_) continue;
      const QueryStep at = QueryStep::of(step, blocks);
      add(tile, tile.head_kv * params_.backward.group + at.head, query_block<T>(params_, tile, at.block));
    }
  }

  // The tile's turn to add to a block of queries comes behind those before it that see the block. Each of four lanes adds 16 rows.
  DEVICE void add(const KeyTile<T>& tile, int head, int block) {
    const Mask<T::BAND> mask = mask_of<T::BAND>(params_.backward, tile.sequence);
    const int first_row = block * T::TILE_M, row = first_row + lane() * 16;
    int32* const turns = reinterpret_cast<int32*>(
        statistics_of<T>(params_, head, tile.number, tile.sequence, block) + T::STATISTICS * T::TILE_M);
    const int turn = tile.first_key / T::TILE_N - mask.template keys<T::TILE_N>(first_row, T::TILE_M).begin;
    if (lane() == 0) await_global(turns, turn);
    sync_warp();  // all lanes know
    float* const sums = dq_sums<T>(params_, head, tile.number, tile.sequence, row);
    const bool is_there = lane() < T::DQ_WARPS && row < count_queries(params_.backward, tile.sequence);
#pragma unroll
    for (int part = 0; part < T::DQ_PARTS; ++part) {
      const int column = part * T::DQ_COLUMNS, bytes = T::part_bytes(column);
      const uint32 addition = steps_ * T::DQ_PARTS + part;
      const SharedAddress buffer = Shared::dq(addition, lane());
      Shared::ring_sums().await_full(T::PlaceSums::of(addition));
      bulk_store_if(is_there && turn == 0, sums + column / 8 * T::SIDE, buffer, bytes);  // nobody has emptied them
      bulk_add_if(is_there && turn > 0, sums + column / 8 * T::SIDE, buffer, bytes);
      tma_store_commit();
    }
    tma_store_wait_read<0>();
#pragma unroll
    for (int part = 0; part < T::DQ_PARTS; ++part)
      Shared::ring_sums().release_apart(T::PlaceSums::of(steps_ * T::DQ_PARTS + part).slot);
    tma_store_wait<0>();
    sync_warp();  // all lanes have added
    release_add_global_if(lane() == 0, turns, 1);
  }

  static DEVICE int lane() { return thread_index() % WARP; }

  const typename T::Params& params_;
  const uint32 number_;
  RingPlace<T::K_STAGES> k_;
  uint32 steps_ = 0;  // before this one, of all tiles
};

}  // namespace multiattn
