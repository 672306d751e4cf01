// The constants of the forward for few queries (split_keys.cuh).
#pragma once
#include "multiattn/owned.cuh"
#include "multiattn/score.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

template <int TILE_M_, int TILE_N_, int WARPS_, int ROW_WARPS_, int COLUMN_WARPS_, int STAGES_>
struct SplitShape {
  static constexpr int TILE_M = TILE_M_;                // rows of a block
  static constexpr int TILE_N = TILE_N_;                // keys of a step of a team
  static constexpr int WARPS = WARPS_;
  static constexpr int ROW_WARPS = ROW_WARPS_;          // warps that share keys and have rows of their own
  static constexpr int COLUMN_WARPS = COLUMN_WARPS_;    // warps that share rows and keys, and have columns of the output
  static constexpr int STAGES = STAGES_;                // tiles of K and of V that a team has room for
};

template <class Element, int HEAD_DIM, Band BAND, bool ALIGNED_, bool HAS_SINKS_, Paging PAGING_, bool OVERLAPS_, class S,
          class Score = NoScore>
struct SplitTraits : S, Walks<Element, HEAD_DIM, BAND, SplitParams, Score, NoBlockMask> {
  static constexpr bool ALIGNED = ALIGNED_;      // q, k, v: every row starts at a multiple of 16 bytes
  static constexpr bool HAS_SINKS = HAS_SINKS_;  // each head has one more key, without a value
  static constexpr Paging PAGING = PAGING_;
  static constexpr bool IS_PAGED = PAGING == Paging::WHOLE_TILES || PAGING == Paging::ANY;
  static constexpr bool OVERLAPS = OVERLAPS_;  // it begins while the grid before it ends, and lets the next one do so
  static constexpr int THREADS = S::WARPS * WARP;

  // ---- a team of warps walks over keys of its own, and needs no other team until all are done
  static constexpr int TEAM_WARPS = S::ROW_WARPS * S::COLUMN_WARPS, TEAM_THREADS = TEAM_WARPS * WARP;
  static constexpr int TEAMS = S::WARPS / TEAM_WARPS;
  static constexpr int WARP_ROWS = S::TILE_M / S::ROW_WARPS;
  static constexpr int WIDTH = round_up(HEAD_DIM, 16 * S::COLUMN_WARPS);
  static constexpr int ROW_FRAGMENTS = WARP_ROWS / 16, KEY_FRAGMENTS = S::TILE_N / 16;
  static constexpr int DOT_FRAGMENTS = WIDTH / 16, OUT_FRAGMENTS = DOT_FRAGMENTS / S::COLUMN_WARPS;

  static DEVICE int team() { return thread_index() / TEAM_THREADS; }
  static DEVICE int warp_row() { return thread_index() % TEAM_THREADS / WARP / S::COLUMN_WARPS * WARP_ROWS; }
  static DEVICE int warp_column() { return thread_index() / WARP % S::COLUMN_WARPS * OUT_FRAGMENTS * 16; }
  static DEVICE bool has_first_column() { return thread_index() / WARP % S::COLUMN_WARPS == 0; }

  // ---- shared memory: Q, then the teams' rings; in their place, at the end, what teams have found
  using TileQ = Tile<S::TILE_M, HEAD_DIM, true, WIDTH>;
  using TileKV = Tile<S::TILE_N, HEAD_DIM, true, WIDTH>;
  static constexpr int SLOT = 2 * TileKV::BYTES, RING = S::STAGES * SLOT;  // K, then V
  static constexpr int FOUND_PITCH = WIDTH + 8;                            // fp32: rows of a quarter of a warp have other banks
  static constexpr int FOUND_BYTES = TEAMS * S::TILE_M * (FOUND_PITCH + 2) * 4;
  static constexpr int RINGS_BYTES = TEAMS * RING;
  static constexpr int SMEM_BYTES = TileQ::BYTES + (RINGS_BYTES > FOUND_BYTES ? RINGS_BYTES : FOUND_BYTES);

  // Registers that hold the output, and Q where that leaves room for it.
  static constexpr int OUT_REGISTERS = WARP_ROWS * OUT_FRAGMENTS * 16 / WARP;
  static constexpr int Q_REGISTERS = WARP_ROWS * WIDTH / (2 * WARP);
  static constexpr bool KEEPS_Q = OUT_REGISTERS + Q_REGISTERS <= 128;

  static_assert(S::STAGES >= 2, "a tile is loaded while another is used");
  static_assert(S::WARPS % TEAM_WARPS == 0 && TEAMS <= 15, "whole teams, each with a named barrier");
  static_assert(WARP_ROWS % 16 == 0 && S::TILE_N % 16 == 0, "whole fragments");
};

template <class T>
using Scores = Accumulator[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS][2];
template <class T>
using Outputs = Accumulator[T::ROW_FRAGMENTS][T::OUT_FRAGMENTS][2];

}  // namespace multiattn
