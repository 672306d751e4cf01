// The constants of the kernel of dk and dv (backward.cuh), and what each of its warps has.
#pragma once
#include "backward_common.cuh"
#include "multiattn/gemm.cuh"

namespace multiattn {

template <class Element, Features F, BackwardConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct BackwardTraits : ProductTraits<Element, F, C, Score, Blocked> {
  using Base = ProductTraits<Element, F, C, Score, Blocked>;
  using Base::TILE_M, Base::TILE_N, Base::WARPS, Base::STAGES;
  using Base::SHARES_ROWS, Base::COLUMN_WARPS;
  using typename Base::TileQ, typename Base::TileDO, typename Base::TileK, typename Base::TileV;
  static constexpr bool ADDS_DQ = C.adds_dq, HAS_TWO_WIDTHS = F.head_dim != F.head_dim_v;
  using TileDS = Tile<TILE_N, TILE_M>;           // of dS^T, and of P^T
  static constexpr int PAIRS = WARPS / 2;

  // ---- what a warp owns of the scores: keys, and where warps share keys of gradients, perhaps not all queries
  static constexpr int TILE_FRAGMENTS = TILE_M / 16;
  static constexpr int KEY_PARTS = PAIRS < TILE_N / 16 ? PAIRS : TILE_N / 16;
  static constexpr int QUERY_PARTS = PAIRS / KEY_PARTS < TILE_FRAGMENTS ? PAIRS / KEY_PARTS : TILE_FRAGMENTS;
  static constexpr bool HAS_IDLE = KEY_PARTS * QUERY_PARTS < PAIRS;  // warps without scores
  static constexpr int WARP_KEYS = TILE_N / KEY_PARTS, WARP_QUERIES = TILE_M / QUERY_PARTS;
  static constexpr int KEY_FRAGMENTS = WARP_KEYS / 16, QUERY_FRAGMENTS = WARP_QUERIES / 16;

  // ---- and of dK or dV: keys and columns
  static constexpr int OWN_KEYS = TILE_N / (PAIRS / COLUMN_WARPS), OWN_FRAGMENTS = OWN_KEYS / 16;
  static constexpr int DIM_FRAGMENTS = TileQ::WIDTH / 16, DIM_FRAGMENTS_V = TileDO::WIDTH / 16;
  static constexpr int WIDEST_FRAGMENTS = DIM_FRAGMENTS > DIM_FRAGMENTS_V ? DIM_FRAGMENTS : DIM_FRAGMENTS_V;
  static constexpr int COLUMN_FRAGMENTS = (WIDEST_FRAGMENTS + COLUMN_WARPS - 1) / COLUMN_WARPS;
  static constexpr int ALL_COLUMNS = COLUMN_FRAGMENTS * COLUMN_WARPS;

  // dQ[TILE_M, D] is split among the warps: by rows into parts of 32, then by columns.
  static constexpr int DQ_ROW_PARTS = WARPS < TILE_FRAGMENTS / 2 ? WARPS : TILE_FRAGMENTS % 2 ? 1 : TILE_FRAGMENTS / 2;
  static constexpr int DQ_ROW_FRAGMENTS = TILE_FRAGMENTS / DQ_ROW_PARTS;
  static constexpr int DQ_DIM_PARTS = WARPS / DQ_ROW_PARTS;
  static constexpr int DQ_DIM_FRAGMENTS = (DIM_FRAGMENTS + DQ_DIM_PARTS - 1) / DQ_DIM_PARTS;
  using Sum = DqSum<DIM_FRAGMENTS, C.wide>;

  // Partners get Q K^T in fp32 and not weights, where a gradient of a captured tensor needs it.
  static constexpr bool SENDS_RAW = NEEDS_RAW<Score>;

  // Shared memory: K, V, stages of (Q, dO), weights on their way to partners, dS, stages of (lse, delta). Warps that share
  // keys put P^T before the statistics, and dS in the place of the weights that it is made of.
  static constexpr int WEIGHT_BYTES = TILE_M * TILE_N * (SENDS_RAW ? 4 : 2);
  static constexpr int STAGE_BYTES = TileQ::BYTES + TileDO::BYTES, STATISTIC_BYTES = 2 * TILE_M * 4;
  static constexpr int STAGES_AT = TileK::BYTES + TileV::BYTES;
  static constexpr int WEIGHTS_AT = STAGES_AT + STAGES * STAGE_BYTES;
  static constexpr int DS_AT = SHARES_ROWS ? WEIGHTS_AT : WEIGHTS_AT + WEIGHT_BYTES;
  static constexpr int P_AT = WEIGHTS_AT + WEIGHT_BYTES;
  static constexpr int STATISTICS_AT = SHARES_ROWS ? P_AT + TileDS::BYTES : DS_AT + (ADDS_DQ ? TileDS::BYTES : 0);
  static constexpr int SMEM_BYTES = STATISTICS_AT + STAGES * STATISTIC_BYTES;

  // True if registers are left to keep addresses across the loop.
  static constexpr bool HAS_ROOM = OWN_FRAGMENTS * COLUMN_FRAGMENTS <= 8;
  static DEVICE uint32 thread() { return HAS_ROOM ? thread_index() : recomputed(thread_index()); }

  // Fragments read from shared memory ahead of their use, to cover its latency with tensor core work. A guess.
  static constexpr int AHEAD = HAS_ROOM || KEY_FRAGMENTS == 1 ? 2 : 1;

  static_assert(!ADDS_DQ || !IS_CUT<Blocked>, "sums of dq have no place for tiles that sequences cut");
  static_assert(WARPS % 2 == 0 && PAIRS % COLUMN_WARPS == 0, "halves of warps, of which some share keys");
  static_assert(OWN_KEYS % 16 == 0 && TILE_N == OWN_KEYS * (PAIRS / COLUMN_WARPS), "warps own fragments of keys");
  static_assert(SHARES_ROWS || QUERY_PARTS == 1, "a pair owns the keys of its scores");
  static_assert(WARP_KEYS % 16 == 0 && WARP_QUERIES % 16 == 0, "scores are whole fragments");
  static_assert(TILE_M % 16 == 0 && TILE_FRAGMENTS % DQ_ROW_PARTS == 0 && WARPS % DQ_ROW_PARTS == 0,
                "a block of queries is whole fragments, and warps share it evenly");
};

template <class T>
using KeyScores = Product<T::KEY_FRAGMENTS, T::QUERY_FRAGMENTS>;  // [WARP_KEYS, WARP_QUERIES], fp32
template <class T>
using Operand = Fragment[T::KEY_FRAGMENTS][T::QUERY_FRAGMENTS];  // the same, rounded
template <class T>
using Gradient = Product<T::OWN_FRAGMENTS, T::COLUMN_FRAGMENTS>;  // [OWN_KEYS, columns]: dV or dK

// A warp's part of the work. As registers are scarce, it is computed wherever it is asked for.
template <class T>
struct Role {
  bool makes_weights;  // and dV; else dP, dS and dK
  int pair, first_row;  // the keys of its scores, shared with its partner

  static DEVICE Role mine() {
    const uint32 warp = T::thread() / WARP, pair = warp % T::PAIRS;
    const uint32 part = T::SHARES_ROWS ? pair % T::KEY_PARTS : pair;
    return {warp < T::PAIRS, static_cast<int>(pair), static_cast<int>(part * T::WARP_KEYS)};
  }
  // Some have no scores where warps share keys. The first query of them, in its tile.
  static DEVICE bool has_scores(int pair) { return !T::HAS_IDLE || pair < T::KEY_PARTS * T::QUERY_PARTS; }
  static DEVICE int first_query(int pair) { return T::QUERY_PARTS == 1 ? 0 : pair / T::KEY_PARTS * T::WARP_QUERIES; }
  // The first key and the first fragment of columns of its gradient.
  DEVICE int first_own() const { return T::SHARES_ROWS ? pair / T::COLUMN_WARPS * T::OWN_KEYS : first_row; }
  DEVICE int first_fragment() const { return pair % T::COLUMN_WARPS * T::COLUMN_FRAGMENTS; }
  // Its rows of K or of V.
  DEVICE SharedAddress own_rows(SharedAddress smem) const {
    const bool is_v = T::HAS_TWO_WIDTHS && !makes_weights;
    return smem + (makes_weights ? 0 : T::TileK::BYTES) + first_row * (is_v ? T::TileV::PITCH : T::TileK::PITCH);
  }
  // The rows of a tile of keys as wide as its gradient, for the way out of that.
  DEVICE SharedAddress gradient_rows(SharedAddress smem) const {
    if constexpr (!T::SHARES_ROWS && !T::HAS_TWO_WIDTHS) return own_rows(smem);
    return smem + (makes_weights ? T::TileK::BYTES + first_own() * T::TileV::PITCH : first_own() * T::TileK::PITCH);
  }
};

}  // namespace multiattn
