// The constants of the forward for few queries (split_keys.cuh).
#pragma once
#include "multiattn/owned.cuh"
#include "multiattn/score.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

struct CudaSplitConfig {
  int tile_m;        // rows of a block
  int tile_n;        // keys of a step of a team
  int warps;
  int row_warps;     // warps that share keys and have rows of their own
  int column_warps;  // warps that share rows and keys, and have columns of the output
  int stages;        // tiles of K and of V that a team has room for
  bool overlaps;     // it begins while the grid before it ends, and lets the next one do so
};

template <class Element_, Features F, CudaSplitConfig C, class Score, class Blocked>
struct SplitTraits : Walks<Element_, F, SplitParams, Score, Blocked> {
  static constexpr int TILE_M = C.tile_m, TILE_N = C.tile_n, STAGES = C.stages;
  static constexpr Paging PAGING = PAGING_OF<Blocked>;
  static constexpr bool IS_PAGED = PAGING == Paging::WHOLE_TILES || PAGING == Paging::ANY;
  static constexpr bool OVERLAPS = C.overlaps;

  // ---- numbers: those of 8 bits are multiplied as fp16, and so is what they meet
  static constexpr StoredCache STORED = STORED_OF<Blocked>;
  static constexpr bool IS_STORED = STORED.numbers != Numbers::OF_QUERIES;
  static constexpr bool HAS_TOKEN_SCALES = STORED.k_per_token || STORED.v_per_token;
  static constexpr int PACKING = IS_STORED ? 2 : 1;  // numbers of K and V in 16 bits
  using OutElement = Element_;
  using Element = typename Choice<IS_STORED, fp16, Element_>::Type;
  using Number = typename Choice<IS_STORED, unsigned char, uint16>::Type;

  static constexpr int THREADS = C.warps * WARP;

  // ---- a team of warps walks over keys of its own, and needs no other team until all are done
  static constexpr int TEAM_WARPS = C.row_warps * C.column_warps, TEAM_THREADS = TEAM_WARPS * WARP;
  static constexpr int TEAMS = C.warps / TEAM_WARPS;
  static constexpr int WARP_ROWS = C.tile_m / C.row_warps;
  static constexpr int WIDTH = round_up(F.head_dim, 16 * PACKING * C.column_warps);
  static constexpr int WIDTH_V = round_up(F.head_dim_v, 16 * PACKING * C.column_warps);
  static constexpr int ROW_FRAGMENTS = WARP_ROWS / 16, KEY_FRAGMENTS = C.tile_n / 16;
  static constexpr int DOT_FRAGMENTS = WIDTH / 16, OUT_FRAGMENTS = WIDTH_V / 16 / C.column_warps;

  static DEVICE int team() { return thread_index() / TEAM_THREADS; }
  static DEVICE int warp_row() { return thread_index() % TEAM_THREADS / WARP / C.column_warps * WARP_ROWS; }
  static DEVICE int warp_column() { return thread_index() / WARP % C.column_warps * OUT_FRAGMENTS * 16; }
  static DEVICE bool has_first_column() { return thread_index() / WARP % C.column_warps == 0; }

  // ---- shared memory: Q, then the teams' rings; in their place, at the end, what teams have found. Of 8-bit numbers there
  // is a factor for each row of Q behind it, and behind K and V of a slot are the scales of its tokens.
  using TileQ = Tile<C.tile_m, F.head_dim, true, WIDTH>;
  using TileK = Tile<C.tile_n, F.head_dim / PACKING, true, WIDTH / PACKING>;
  using TileV = typename Choice<F.v_in_k, TileK, Tile<C.tile_n, F.head_dim_v / PACKING, true, WIDTH_V / PACKING>>::Type;
  static constexpr int Q_BYTES = TileQ::BYTES + (IS_STORED ? C.tile_m * 4 : 0);
  static constexpr int V_AT = F.v_in_k ? 0 : TileK::BYTES;  // in a slot: V is the first columns of K, or behind it
  static constexpr int K_SCALES_AT = V_AT + TileV::BYTES, V_SCALES_AT = K_SCALES_AT + (STORED.k_per_token ? C.tile_n * 4 : 0);
  static constexpr int SLOT = V_SCALES_AT + (STORED.v_per_token ? C.tile_n * 4 : 0), RING = C.stages * SLOT;
  static constexpr int FOUND_PITCH = WIDTH_V + 8;  // fp32: rows of a quarter of a warp have other banks
  static constexpr int FOUND_BYTES = TEAMS * C.tile_m * (FOUND_PITCH + 2) * 4;
  static constexpr int RINGS_BYTES = TEAMS * RING;
  static constexpr int SMEM_BYTES = Q_BYTES + (RINGS_BYTES > FOUND_BYTES ? RINGS_BYTES : FOUND_BYTES);

  // Registers that hold the output, and Q where that leaves room for it.
  static constexpr int OUT_REGISTERS = WARP_ROWS * OUT_FRAGMENTS * 16 / WARP;
  static constexpr int Q_REGISTERS = WARP_ROWS * WIDTH / (2 * WARP);
  static constexpr bool KEEPS_Q = OUT_REGISTERS + Q_REGISTERS <= 128;

  static_assert(C.stages >= 2, "a tile is loaded while another is used");
  static_assert(C.warps % TEAM_WARPS == 0 && TEAMS <= 15, "whole teams, each with a named barrier");
  static_assert(!IS_STORED || (F.head_dim % 16 == 0 && F.head_dim_v % 16 == 0 && !F.v_in_k), "whole chunks of 8-bit numbers");
  static_assert(!F.v_in_k || F.head_dim_v <= F.head_dim, "columns of K");
  static_assert(WARP_ROWS % 16 == 0 && C.tile_n % 16 == 0, "whole fragments");
};

template <class T>
using Scores = Accumulator[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS][2];
template <class T>
using Outputs = Accumulator[T::ROW_FRAGMENTS][T::OUT_FRAGMENTS][2];

}  // namespace multiattn
