// Gradients of a tile of keys of which several blocks have a part.
#pragma once
#include "backward_wgmma_traits.cuh"

namespace multiattn {

// The sums of a divided tile in the workspace: of each warp's 16 keys dK and dV, fp32, as its threads have them, then how many
// steps of the tile's walk are in them, by warp.
template <class T>
struct KeySums {
  static constexpr int WARPS = T::KEY_WARPS, WARP_FLOATS = 16 * (T::HEAD_DIM + T::HEAD_DIM_V);
  static constexpr int TILE_FLOATS = WARPS * WARP_FLOATS + WARPS;

  float* place;

  static DEVICE KeySums of(const Division& division, int tile) {
    return {division.key_sums + static_cast<int64>(tile) * TILE_FLOATS};
  }
  // A lane's own: four floats, then four more behind those of all lanes.
  DEVICE float* of_lane(int warp, int lane) const { return place + warp * WARP_FLOATS + lane * 4; }
  DEVICE int32* steps(int warp) const { return reinterpret_cast<int32*>(place + WARPS * WARP_FLOATS) + warp; }
};

// Adds a part to its tile's sums. True for the last part, and for a whole tile: dk and dv are those of the tile then.
template <class T>
DEVICE bool gather_parts(const typename T::Params& params, const KeyTile<T>& tile, int warp, float (&dk)[T::HEAD_DIM / 2],
                         float (&dv)[T::HEAD_DIM_V / 2]) {
  const int steps = count_steps<T>(params, query_blocks<T>(params, tile)), own = tile.end_step - tile.first_step;
  if (own == steps) return true;
  const auto sums = KeySums<T>::of(params.lists, tile.sums);
  const int lane = static_cast<int>(thread_index() % WARP);
  float* const place = sums.of_lane(warp, lane);
  constexpr int OF_K = T::HEAD_DIM / 8, OF_V = T::HEAD_DIM_V / 8, FOUR = 4 * WARP;  // fours of dK, and of dV
#pragma unroll
  for (int i = 0; i < T::WIDTH / 8; ++i) {
    if (i < OF_K) add_global_16(place + i * FOUR, {dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]});
    if (i < OF_V) add_global_16(place + (OF_K + i) * FOUR, {dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]});
  }
  sync_warp();  // all lanes have added
  uint32 before = 0;
  if (lane == 0) before = static_cast<uint32>(ordered_add_global(sums.steps(warp), own));
  if (static_cast<int>(uniform(before)) + own < steps) return false;
  sync_warp();  // what lane 0 knows of, all lanes do
#pragma unroll
  for (int i = 0; i < T::WIDTH / 8; ++i) {
    const Chunk of_k = i < OF_K ? load_global_16(place + i * FOUR) : Chunk{};
    const Chunk of_v = i < OF_V ? load_global_16(place + (OF_K + i) * FOUR) : Chunk{};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (i < OF_K) dk[4 * i + e] = float_of_bits(of_k.word[e]);
      if (i < OF_V) dv[4 * i + e] = float_of_bits(of_v.word[e]);
    }
  }
  return true;
}

}  // namespace multiattn
