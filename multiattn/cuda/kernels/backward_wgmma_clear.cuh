// A warp that empties sums of dQ beside the one that loads.
#pragma once
#include "backward_wgmma_traits.cuh"

namespace multiattn {

// Each tile empties an equal part of the sums of a head of the next section. A kernel before this one would write them to memory,
// from where the first additions would read them.
template <class T>
DEVICE void clear_sums(const typename T::Params& params) {
  using Shared = BackwardShared<T>;
  const BackwardParams& backward = params.backward;
  RingPlace<T::K_STAGES> k;
  while (true) {
    Shared::ring_k().await_full(k);
    const KeyTile<T> tile = load_key_tile<T>(Shared::tile_place(k.slot));
    Shared::ring_k().release_apart(k.slot);
    k.advance();
    if (tile.is_none()) return;
    const int head_kv = tile.head_kv + heads_cleared_before<T>(params);
    if (head_kv >= backward.heads_kv_all || tile.first_step > 0) continue;
    const int fragments = backward.group * T::Sum::row_fragments(backward) * T::DIM_STEPS;
    const int of_tile = (fragments + backward.tiles_kv - 1) / backward.tiles_kv;
    const int first = tile.first_key / T::TILE_N * of_tile, end = min(first + of_tile, fragments);
    const int lane = thread_index() % WARP;
    float* sums = T::Sum::rows(backward, head_kv * backward.group, 0) + first * static_cast<int64>(T::Sum::FRAGMENT) + lane * 4;
    for (int left = end - first; left > 0; --left, sums += T::Sum::FRAGMENT) {
      store_global_16(sums, Chunk{});
      store_global_16(sums + WARP * 4, Chunk{});
    }
    sync_warp();  // all lanes have
    release_add_global_if(lane == 0, cleared_parts<T>(params, head_kv), 1);
  }
}

}  // namespace multiattn
