// One thread that loads: it decides which tiles the block does, in which order, and keeps the rings full by TMA.
#pragma once
#include "forward_wgmma_traits.cuh"
#include "multiattn/params.h"
#include "multiattn/place.cuh"

namespace multiattn {

// The tile that a block does after `tile`, or NO_TILE. The first is the one of its own number.
template <Scheduler SCHEDULER>
DEVICE int tile_after(int tile, const WgmmaParams& params) {
  if constexpr (SCHEDULER == Scheduler::ONE_TILE) return NO_TILE;
  const int tiles = params.forward.tiles * params.forward.heads;
  int next = tile + static_cast<int>(block_count());
  if constexpr (SCHEDULER == Scheduler::DYNAMIC) {
    // Each tile beyond the grid is asked for once, by the block that gets it, and each block asks once in vain. The last to ask
    // leaves the counter as it was found, for the launch that comes next on the stream.
    const int asked = atomic_add_global(params.forward.next_tile, 1);
    if (asked == tiles - 1) atomic_add_global(params.forward.next_tile, -tiles);
    next = static_cast<int>(block_count()) + asked;
  }
  return next < tiles ? next : NO_TILE;
}

// As Place::of, but the last section has the heads of two. Each begins with its longest tiles; where it is the last and has
// about as many as there are SMs, all of them begin one and the longest end alone. The short ones of twice as many fill that
// up. H200, 2026-11-22, N=8192 masked, beside FlashAttention-4: 22 heads of D=192 in 11 sections 0.93, 16 of D=256 in 8 1.03.
template <Band BAND>
DEVICE Place scheduled_place(int block, int tiles, int heads, int heads_per_section) {
  constexpr int ENOUGH = 256;  // tiles of one head: twice the SMs of an H200. K and V of two such may be more than L2 holds
  if constexpr (BAND == Band::CAUSAL) {
    const int before = max((heads - 1) / heads_per_section - 1, 0) * heads_per_section;  // heads in the other sections
    if (tiles < ENOUGH && block >= before * tiles) {
      const auto [head, place] = Place::of(block - before * tiles, tiles, heads - before, heads - before);
      return {before + head, place};
    }
  }
  return Place::of(block, tiles, heads, heads_per_section);
}

// Where the last tile of a head ends. Whole warpgroups, so that the rows of each are queries from the first on, or none.
template <class T>
DEVICE int end_of_tiles(int seq_q) {
  return round_up(seq_q, T::WARPGROUP_ROWS);
}

// Blocks of keys that are loaded for a tile of queries, from `begin` to `end`: what it sees or, in a cluster, what its tiles
// see together.
template <class T>
DEVICE Blocks loaded_blocks(const Mask<T::BAND>& mask, int first_query) {
  constexpr int ROWS = T::CLUSTER * T::TILE_M;
  const int end = end_of_tiles<T>(mask.seq_q);
  Blocks blocks = mask.template keys<T::TILE_N>(end - round_up(end - first_query, ROWS), ROWS);
  blocks.end = max(blocks.end, 0);  // it is no less, but the compiler does not know
  return blocks;
}

// All panels of a tile. One of a cluster comes in parts, of which each block loads one, for all.
template <class T, int CLUSTER = 1>
DEVICE void load_panels(SharedAddress tile, const TensorMap& map, SharedAddress barrier, int row, int head, int batch) {
  mbarrier_arrive_expect(barrier, T::BYTES);
  if constexpr (CLUSTER > 1) {
    tile += cluster_rank() * (T::PANEL_BYTES / CLUSTER);
    row += cluster_rank() * (T::ROWS / CLUSTER);
  }
#pragma unroll
  for (int panel = 0; panel < T::PANELS; ++panel) {
    const SharedAddress target = tile + panel * T::PANEL_BYTES;
    if constexpr (CLUSTER > 1)
      tma_load_to_all<CLUSTER>(target, map, barrier, panel * T::PANEL_COLUMNS, row, head, batch);
    else
      tma_load(target, map, barrier, panel * T::PANEL_COLUMNS, row, head, batch);
  }
}

// Tiles of Q, and for each its blocks of keys from the last to the first, in the order in which they are used: K of a block
// before V of the block before it. Tiles that see the most keys come first, heads that share an L2 side by side. Blocks of a cluster
// have tiles next to one another. The last tile ends where the queries do, so that what is short of a tile is the first, which
// begins before query 0: under a mask it is the one that sees the fewest keys.
template <class T>
DEVICE void produce(const WgmmaParams& params) {
  using Shared = SharedLayout<T>;
  const auto ring_q = Shared::ring_q();
  const auto ring_kv = Shared::ring_kv();
  const ForwardParams& forward = params.forward;
  const Mask<T::BAND> mask(forward);
  RingPlace<T::Q_SLOTS> q;
  RingPlace<T::STAGES> kv;

  const auto load = [&](const TensorMap& map, int head_kv, int batch, int block) {
    ring_kv.await_empty(kv);
    load_panels<typename T::TileKV, T::CLUSTER>(Shared::kv(kv.slot), map, ring_kv.full(kv.slot), block * T::TILE_N, head_kv,
                                                batch);
    kv.advance();
  };

  admit_next_grid();
  await_earlier_grids();  // tensors and the counter are touched only after this
  // A counter is asked when all of a tile is under way, not before: a tile that waits for its block is one that another
  // could have begun. H200, 2026-11-22, D=256 N=8192 masked: asked at a tile's start, 668 TFLOPS for ONE_TILE's 765.
  int tile = static_cast<int>(block_index());
  for (; tile != NO_TILE; tile = tile_after<T::SCHEDULER>(tile, params)) {
    const auto [any_head, place] =
        scheduled_place<T::BAND>(tile / T::CLUSTER, forward.tiles / T::CLUSTER, forward.heads, forward.heads_per_section);
    const int batch = any_head / forward.heads_q, head = any_head % forward.heads_q, head_kv = head / forward.group;
    const int first_query =
        end_of_tiles<T>(forward.seq_q) - (T::CLUSTER * (1 + place) - tile % T::CLUSTER) * T::TILE_M;
    const Blocks blocks = loaded_blocks<T>(mask, first_query);
    if (blocks.end > blocks.begin) load(params.map_k, head_kv, batch, blocks.end - 1);
    ring_q.await_empty(q);
    store_tile(Shared::tile_place(q.slot), {first_query, head, batch, blocks.end - blocks.begin});
    load_panels<typename T::TileQ>(Shared::q(q.slot), params.map_q, ring_q.full(q.slot), first_query, head, batch);
    q.advance();
    for (int block = blocks.end - 1; block > blocks.begin; --block) {
      load(params.map_k, head_kv, batch, block - 1);
      load(params.map_v, head_kv, batch, block);
    }
    if (blocks.end > blocks.begin) load(params.map_v, head_kv, batch, blocks.begin);
  }
  ring_q.await_empty(q);
  store_tile(Shared::tile_place(q.slot), {0, 0, 0, NO_TILE});
  mbarrier_arrive(ring_q.full(q.slot));
  // Shared memory must be there for the other blocks of the cluster until they have released every slot.
  for (int slot = 0; T::CLUSTER > 1 && slot < T::STAGES; ++slot, kv.advance()) ring_kv.await_empty(kv);
}

}  // namespace multiattn
