// Gradients of a tile of keys of which several blocks have a part.
#pragma once
#include "backward_wgmma_traits.cuh"

namespace multiattn {

// The sums of a divided tile in the workspace: of each warp's 16 keys dK and dV, fp32, as its threads have them, then how many
// steps of the tile's walk are in them, by warp.
template <int HEAD_DIM, int WARPS>
struct KeySums {
  static constexpr int WARP_FLOATS = 2 * 16 * HEAD_DIM;
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
                         float (&dv)[T::HEAD_DIM / 2]) {
  const int steps = count_steps<T>(params, query_blocks<T>(params, tile)), own = tile.end_step - tile.first_step;
  if (own == steps) return true;
  const auto sums = KeySums<T::HEAD_DIM, T::KEY_WARPS>::of(params.lists, tile.sums);
  const int lane = static_cast<int>(thread_index() % WARP);
  float* const place = sums.of_lane(warp, lane);
  constexpr int FOURS = T::HEAD_DIM / 8, FOUR = 4 * WARP;  // of dK, and of dV
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    add_global_16(place + i * FOUR, {dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]});
    add_global_16(place + (FOURS + i) * FOUR, {dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]});
  }
  sync_warp();  // all lanes have added
  uint32 before = 0;
  if (lane == 0) before = static_cast<uint32>(ordered_add_global(sums.steps(warp), own));
  if (static_cast<int>(uniform(before)) + own < steps) return false;
  sync_warp();  // what lane 0 knows of, all lanes do
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const Chunk of_k = load_global_16(place + i * FOUR), of_v = load_global_16(place + (FOURS + i) * FOUR);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dk[4 * i + e] = float_of_bits(of_k.word[e]);
      dv[4 * i + e] = float_of_bits(of_v.word[e]);
    }
  }
  return true;
}

}  // namespace multiattn
