// One thread that loads: it decides which tiles the block does, in which order, and keeps the rings full by TMA.
#pragma once
#include "forward_wgmma_traits.cuh"
#include "multiattn/mask.cuh"
#include "multiattn/params_sm90.h"
#include "multiattn/place.cuh"

namespace multiattn {

constexpr int NO_TILE = -1;

// ---- schedulers: the tile that a block does after one, or NO_TILE. The first is the one of its own number.
template <Scheduler>
struct TileSchedule;

template <>
struct TileSchedule<Scheduler::ONE_TILE> {
  DEVICE static int after(int, const WgmmaParams&) { return NO_TILE; }
};

template <>
struct TileSchedule<Scheduler::STATIC> {
  DEVICE static int after(int tile, const WgmmaParams& params) {
    const int next = tile + static_cast<int>(block_count());
    return next < params.forward.tiles * params.forward.heads ? next : NO_TILE;
  }
};

template <>
struct TileSchedule<Scheduler::DYNAMIC> {
  DEVICE static int after(int, const WgmmaParams& params) {
    const int next = static_cast<int>(block_count()) + atomic_add_global(params.next_tile, 1);
    return next < params.forward.tiles * params.forward.heads ? next : NO_TILE;
  }
};

template <class T>
DEVICE void load_panels(SharedAddress tile, const TensorMap& map, SharedAddress barrier, int row, int head, int batch) {
  mbarrier_arrive_expect(barrier, T::BYTES);
#pragma unroll
  for (int panel = 0; panel < T::PANELS; ++panel)
    tma_load(tile + panel * T::PANEL_BYTES, map, barrier, panel * T::PANEL_COLUMNS, row, head, batch);
}

// Tiles of Q, and for each its blocks of keys from the last to the first, in the order in which they are used: K of a block
// before V of the block before it. Longest causal tiles come first, heads that share an L2 side by side.
template <class T>
DEVICE void produce(const WgmmaParams& params) {
  using Shared = SharedLayout<T>;
  const auto ring_q = Shared::ring_q();
  const auto ring_kv = Shared::ring_kv();
  const ForwardParams& forward = params.forward;
  const Mask<T::CAUSAL> mask{forward.seq_q, forward.seq_kv};
  RingPlace<T::Q_SLOTS> q;
  RingPlace<T::STAGES> kv;

  const auto load = [&](const TensorMap& map, int head, int block) {
    ring_kv.await_empty(kv);
    load_panels<typename T::TileKV>(Shared::kv(kv.slot), map, ring_kv.full(kv.slot), block * T::TILE_N,
                                    head % forward.heads_q / forward.group, head / forward.heads_q);
    kv.advance();
  };

  // A counter is asked when all of a tile is under way, not before: a tile that waits for its block is one that another
  // could have begun. H200, 2026-11-22, D=256 N=8192 causal: asked at a tile's start, 668 TFLOPS for ONE_TILE's 765.
  int tile = static_cast<int>(block_index());
  for (; tile != NO_TILE; tile = TileSchedule<T::SCHEDULER>::after(tile, params)) {
    const auto [head, place] = Place::of(tile, forward.tiles, forward.heads, forward.heads_per_section);
    const int first_query = (forward.tiles - 1 - place) * T::TILE_M;
    const int blocks = max(mask.template blocks<T::TILE_N>(first_query, T::TILE_M).end, 0);
    if (blocks > 0) load(params.map_k, head, blocks - 1);
    ring_q.await_empty(q);
    store_shared_4(Shared::tile_place(q.slot), first_query);
    store_shared_4(Shared::tile_place(q.slot) + 4, head);
    load_panels<typename T::TileQ>(Shared::q(q.slot), params.map_q, ring_q.full(q.slot), first_query,
                                   head % forward.heads_q, head / forward.heads_q);
    q.advance();
    for (int block = blocks - 1; block > 0; --block) {
      load(params.map_k, head, block - 1);
      load(params.map_v, head, block);
    }
    if (blocks > 0) load(params.map_v, head, 0);
  }
  ring_q.await_empty(q);
  store_shared_4(Shared::tile_place(q.slot), static_cast<uint32>(NO_TILE));
  mbarrier_arrive(ring_q.full(q.slot));
}

}  // namespace multiattn
