// The constants of the forward for few queries (split_keys.cuh), and who owns what.
#pragma once
#include "multiattn/mask.cuh"
#include "multiattn/params.h"
#include "multiattn/score.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

// Where keys of a sequence are: in an entry of its own, which may be a cache; in pages that a tile of keys never crosses; in any
// pages.
enum class Paging { NONE, ENTRIES, WHOLE_TILES, ANY };

// A cache with a window: what lies before the first key that a tile's rows see may be freed, and is not read.
template <Band BAND, Paging PAGING>
constexpr bool FREES_KEYS = BAND == Band::TWO_SIDED && PAGING != Paging::NONE;

template <int TILE_M_, int TILE_N_, int WARPS_, int ROW_WARPS_, int COLUMN_WARPS_, int STAGES_>
struct SplitShape {
  static constexpr int TILE_M = TILE_M_;                // rows of a block
  static constexpr int TILE_N = TILE_N_;                // keys of a step of a team
  static constexpr int WARPS = WARPS_;
  static constexpr int ROW_WARPS = ROW_WARPS_;          // warps that share keys and have rows of their own
  static constexpr int COLUMN_WARPS = COLUMN_WARPS_;    // warps that share rows and keys, and have columns of the output
  static constexpr int STAGES = STAGES_;                // tiles of K and of V that a team has room for
};

template <class Element_, int HEAD_DIM_, Band BAND_, bool ALIGNED_, bool HAS_SINKS_, Paging PAGING_, bool OVERLAPS_, class S,
          class Score_ = NoScore>
struct SplitTraits : S {
  using Element = Element_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr Band BAND = BAND_;
  static constexpr bool ALIGNED = ALIGNED_;      // q, k, v: every row starts at a multiple of 16 bytes
  static constexpr bool HAS_SINKS = HAS_SINKS_;  // each head has one more key, without a value
  static constexpr Paging PAGING = PAGING_;
  static constexpr bool IS_PAGED = PAGING == Paging::WHOLE_TILES || PAGING == Paging::ANY;
  static constexpr bool OVERLAPS = OVERLAPS_;  // it begins while the grid before it ends, and lets the next one do so
  using Score = Score_;                        // what changes scores
  using Params = typename WithAux<SplitParams, Score>::Type;
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

// Rows of out and lse, of all heads.
DEVICE int64 rows_of(const SplitParams& params) {
  return static_cast<int64>(params.cu_seqlens_q ? 1 : params.sequences) * params.heads_q * params.seq_q;
}

// Where a key is: its entry of the page table, and its row of that page. Pages have any size, and a division some thirty
// instructions: a product does it, by Granlund, Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994).
struct PlaceOfKey {
  int entry, row;

  static DEVICE PlaceOfKey of(const SplitParams& params, int key) {
    const uint64 product = static_cast<uint64>(2 * static_cast<uint32>(key)) * params.page_multiplier;
    const int entry = static_cast<int>(static_cast<uint32>(product >> 32) >> params.page_shift);
    return {entry, key - entry * params.page};
  }
};

// A row of a block's tile: a query of a head.
struct Row {
  int query, head;
};

// A number taken apart by one after another of its factors, the fastest first.
struct Digits {
  uint32 rest;
  DEVICE int take(int32 factor) {
    const uint32 all = rest;
    rest = all / static_cast<uint32>(factor);
    return static_cast<int>(all - rest * static_cast<uint32>(factor));
  }
};

// The rows of a sequence and head of keys that a block owns, and its part of the keys.
template <class T>
struct Owned {
  const typename T::Params& params;
  int split, first_row, head_kv, sequence;
  int offset_q = 0, len_q = 0, len_kv = 0;  // the sequence's queries in q, how many, its keys

  // Needs no memory: `find_lengths` does.
  static DEVICE Owned of(const typename T::Params& params) {
    Digits place{static_cast<uint32>(block_index())};
    const int split = place.take(params.splits), tile = place.take(params.tiles), head_kv = place.take(params.heads_kv);
    return {params, split, (params.tiles - 1 - tile) * T::TILE_M, head_kv, static_cast<int>(place.rest)};
  }

  // Whatever a cache's tensors say, its rows are those that there are.
  DEVICE void find_lengths() {
    constexpr bool IS_CACHE = T::PAGING != Paging::NONE;
    len_kv = params.seqlens_kv ? load_global_4(params.seqlens_kv + sequence) : params.seq_kv;
    if constexpr (IS_CACHE) len_kv = max(min(len_kv, params.seq_kv), 0);
    len_q = params.seq_q;
    if (params.cu_seqlens_q) {
      offset_q = load_global_4(params.cu_seqlens_q + sequence);
      int end_q = load_global_4(params.cu_seqlens_q + sequence + 1);
      if constexpr (IS_CACHE) {
        offset_q = max(min(offset_q, params.seq_q), 0);
        end_q = max(min(end_q, params.seq_q), offset_q);
      }
      len_q = end_q - offset_q;
    }
  }

  DEVICE Row row(int of_tile) const {
    const int row = first_row + of_tile;
    return {row / params.group, head_kv * params.group + row % params.group};
  }
  // Packed queries are a batch of one.
  DEVICE int batch() const { return params.cu_seqlens_q ? 0 : sequence; }
  DEVICE int64 offset(const Strides& strides, const Row& row) const {
    return batch() * strides.batch + row.head * strides.head + (offset_q + row.query) * strides.seq;
  }
  // The place of a row in lse, and in a part of the workspace.
  DEVICE int64 place(const Row& row) const {
    return (static_cast<int64>(batch()) * params.heads_q + row.head) * params.seq_q + offset_q + row.query;
  }
  DEVICE Mask<T::BAND> mask() const { return Mask<T::BAND>(params, len_q, len_kv); }

  // The keys that any of its rows sees begin with it, or with one before it.
  DEVICE int first_key() const {
    if constexpr (FREES_KEYS<T::BAND, T::PAGING>) return max(mask().first_key(first_row / params.group), 0);
    return 0;
  }

  // The tiles of keys that any of its rows sees, in the block's part of them.
  DEVICE Blocks keys() const {
    const int first_query = first_row / params.group, last_query = (first_row + T::TILE_M - 1) / params.group;
    Blocks all = mask().template keys<T::TILE_N>(first_query, last_query - first_query + 1);
    const int share = (all.end - all.begin + params.splits - 1) / params.splits;
    const int begin = min(all.begin + split * share, all.end);
    return {begin, all.full_begin, all.full_end, min(begin + share, all.end)};
  }
};

// The keys that a window has left behind, for all rows of a tile. A base class: without a window it has no place in memory, which
// even unread would change the order of registers in the kernels for sm90.
template <bool>
struct FreedKeys {
  template <class T>
  DEVICE explicit FreedKeys(const Owned<T>&) {}
  static DEVICE bool is_freed(int) { return false; }
  static DEVICE int before(int) { return 0; }  // of them, from a key on
};
template <>
struct FreedKeys<true> {
  int first_key;
  template <class T>
  DEVICE explicit FreedKeys(const Owned<T>& owned) : first_key(owned.first_key()) {}
  DEVICE bool is_freed(int key) const { return key < first_key; }
  DEVICE int before(int key) const { return max(first_key - key, 0); }
};

template <class T>
using Scores = Accumulator[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS][2];
template <class T>
using Outputs = Accumulator[T::ROW_FRAGMENTS][T::OUT_FRAGMENTS][2];

}  // namespace multiattn
