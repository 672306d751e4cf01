// Rows: what a row of a tile of Q is, for the warpgroup that owns 64 of them. They say where Q comes from, which blocks of keys are
// seen and how a row's place is told from its number in the warp's 16.
#pragma once
#include "forward_wgmma_traits.cuh"
#include "multiattn/special.cuh"

namespace multiattn {

// Blocks of keys at a band's lower edge: the first that a warpgroup sees in full, the first that it sees, and the first that
// is loaded for its tile. A band without that edge begins with block 0.
template <Band>
struct LowerEdge {
  static constexpr int full = 0, first = 0, loaded = 0;
};
template <>
struct LowerEdge<Band::TWO_SIDED> {
  int full, first, loaded;
};

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

// The queries of a thread's two rows, where those of the warp are one after another.
struct WarpQueries {
  int first;
  DEVICE int operator[](int half) const { return first + accumulator_row(2 * half); }
};

// Changes scores of a thread's two rows, where these are of one head.
template <class Score>
struct OneHead {
  HeadScores<Score> head;
  DEVICE const HeadScores<Score>& operator[](int) const { return head; }
};

// Changes scores of a thread's two rows, where these are of any heads.
template <class Score>
struct TwoHeads {
  HeadScores<Score> heads[2];
  DEVICE const HeadScores<Score>& operator[](int half) const { return heads[half]; }
};

// Lists name the tiles of keys of all rows together, one for each step of a walk.
template <class T>
using LowerEdgeOf = LowerEdge<T::LISTED ? Band::FULL : T::BAND>;

// Queries of one head, one after another, which TMA brings. Where they start (negative: there are none), the slot of Q, and of the
// blocks of keys those that the warpgroup sees, from `last` down to `first`, and the ones from `exact` on, which it sees in part, or
// starts with.
template <class T>
struct QueryRows : LowerEdgeOf<T> {
  QueryTile<T> tile;
  int first_query, slot, last, exact;

  // A warpgroup's part of the tile.
  DEVICE void find(int warpgroup, const Mask<T::BAND>& mask) {
    first_query = tile.first_query + warpgroup * T::WARPGROUP_ROWS;
    const auto blocks = mask.template keys<T::TILE_N>(first_query, T::WARPGROUP_ROWS);
    if constexpr (T::LISTED) {
      last = tile.blocks - 1;
    } else if constexpr (T::BAND == Band::TWO_SIDED) {
      find_band(mask, blocks);
    } else {
      if (first_query >= 0) last = max(blocks.end, 0) - 1;
      exact = min(blocks.full_end, last);
    }
  }

  DEVICE bool is_none() const { return tile.blocks == NO_TILE; }
  // Blocks that are loaded above and below those that the warpgroup sees: others of the tile, or of the cluster, see them.
  DEVICE int above() const { return this->loaded + tile.blocks - 1 - last; }
  DEVICE int below() const { return this->first - this->loaded; }
  // The queries of this thread's two rows.
  DEVICE WarpQueries queries() const { return {first_query + warp_row()}; }
  // Lengths without packing are from the parameters: where the mask keeps them for this, two kernels spill.
  DEVICE OneHead<typename T::Score> heads(const typename T::Params& params, const Mask<T::BAND>& mask) const {
    constexpr bool PACKED = IS_PACKED<typename T::Blocked>;
    const int seq_q = PACKED ? mask.seq_q : params.forward.seq_q, seq_kv = PACKED ? mask.seq_kv : params.forward.seq_kv;
    return {{params.aux, seq_q, seq_kv, tile.number, tile.head}};
  }

 private:
  // Maxima are exact down to the block with the last key that the first query sees: each row has one then. Where no block is
  // full, bands are narrow, and a row may see its only keys in any block.
  DEVICE void find_band(const Mask<T::BAND>& mask, const Blocks& blocks) {
    this->loaded = loaded_blocks<T>(mask, tile.first_query).begin;
    const bool see_keys = first_query >= 0 && blocks.begin < blocks.end;
    this->first = see_keys ? blocks.begin : this->loaded;
    last = see_keys ? blocks.end - 1 : this->loaded - 1;
    this->full = blocks.full_begin;
    const int with_last_key = mask.last_key(first_query) / T::TILE_N;
    exact = blocks.full_begin < blocks.full_end ? with_last_key : this->first;
  }
};

// Queries of the heads that share keys, side by side: they are no box. All warpgroups of a block see the same blocks of keys.
template <class T>
struct GroupRows {
  const Owned<T>& owned;
  int first_row;  // the warp's
  int full, first, exact, last;
  int queries_[2];  // of this thread's rows

  static constexpr int slot = 0;

  static DEVICE GroupRows of(const Owned<T>& owned, const Blocks& blocks, int warpgroup) {
    GroupRows rows{owned, warpgroup * T::WARPGROUP_ROWS + warp_row(), max(blocks.full_begin, blocks.begin), blocks.begin,
                   max(blocks.full_end, blocks.begin), blocks.end - 1, {}};
    if (blocks.full_begin >= blocks.full_end) rows.exact = blocks.begin;  // a row may see its only keys in any block
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.queries_[half] = owned.row(rows.first_row + accumulator_row(2 * half)).query;
    return rows;
  }

  static constexpr DEVICE bool is_none() { return false; }
  static constexpr DEVICE int above() { return 0; }
  static constexpr DEVICE int below() { return 0; }
  DEVICE const int* queries() const { return queries_; }
  DEVICE TwoHeads<typename T::Score> heads(const typename T::Params& params, const Mask<T::BAND>&) const {
    const auto head = [&](int half) {
      const Row row = owned.row(first_row + accumulator_row(2 * half, recomputed(thread_index())));
      return HeadScores<typename T::Score>(params.aux, owned.len_q, owned.len_kv, owned.sequence, row.head);
    };
    return {{head(0), head(1)}};
  }

  // The warpgroup's rows of Q, gathered into panels as TMA would write them. Rows that are none, and columns beyond head_dim, become
  // zeros.
  DEVICE void gather(SharedAddress tile, int warpgroup) const {
    using PanelQ = typename T::TileQ::Panel;
    constexpr int CHUNKS = 2 * T::DOT_STEPS;
#pragma unroll 4
    for (int i = thread_index() % WARPGROUP; i < T::WARPGROUP_ROWS * CHUNKS; i += WARPGROUP) {
      const int row_of_tile = warpgroup * T::WARPGROUP_ROWS + i / CHUNKS, chunk = i % CHUNKS;
      const Row row = owned.row(row_of_tile);
      const bool valid = row.query < owned.len_q && chunk < T::HEAD_DIM / CHUNK_ELEMENTS;
      const uint16* source = static_cast<const uint16*>(owned.params.q) + owned.offset(owned.params.strides_q, row);
      cp_async_16(PanelQ::chunk(tile + chunk / 8 * T::TileQ::PANEL_BYTES, row_of_tile, chunk % 8),
                  source + chunk * CHUNK_ELEMENTS, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
  }
};

// The rows that warpgroups take, and what a block owns before its warps part.
template <class T, bool = T::GROUPED>
struct RowsOf {
  using Type = QueryRows<T>;
  struct Owned {};  // nothing: a schedule gives it tiles, one after another
  static DEVICE Owned own(const typename T::Params&) { return {}; }
  static DEVICE Mask<T::BAND> mask(const typename T::Params& params, const Owned&) { return Mask<T::BAND>(params.forward); }
};
template <class T>
struct RowsOf<T, true> {
  using Type = GroupRows<T>;
  using Owned = multiattn::Owned<T>;
  static DEVICE Owned own(const typename T::Params& params) { return Owned::of(params.forward); }
  static DEVICE Mask<T::BAND> mask(const typename T::Params&, const Owned& owned) { return owned.mask(); }
};

}  // namespace multiattn
