// Rows of a tile of forward_twin.cuh: what they are, where Q comes from, and the blocks of keys that they see.
#pragma once
#include "forward_twin_traits.cuh"
#include "forward_wgmma_output.cuh"
#include "forward_wgmma_producer.cuh"

namespace multiattn {

// Queries of one head, one after another, which TMA brings. The last tile ends where the queries do, so that what is short of a tile is
// the first, whose rows are partly or all negative: under a mask they see the fewest keys.
template <class T>
struct TwinQueries {
  QueryTile<T> tile;
  Mask<T::BAND> mask;
  Blocks blocks;
  int head_kv;

  // Tiles that see the most keys come first, heads that share an L2 side by side; a packed batch's list has them in this order.
  static DEVICE TwinQueries of(const typename T::Params& params) {
    const ForwardParams& forward = params.forward;
    const TileCount<typename T::Blocked> count(params);
    const int tiles = count.of_head(params), number_of_all = static_cast<int>(block_index());
    TwinQueries rows{{0, 0, 0, NO_TILE, {}}, Mask<T::BAND>(forward), {}, 0};
    if (IS_PACKED<typename T::Blocked> && number_of_all >= tiles * forward.heads) return rows;
    const auto [any_head, place] = scheduled_place<T::BAND>(number_of_all, tiles, forward.heads, forward.heads_per_section);
    const TileOf<T> listed = tile_at<T>(params, &TileLists::query_list, place, 0);
    const int head = any_head % forward.heads_q;
    int first_query = listed.first_row, number = any_head / forward.heads_q;
    if constexpr (IS_PACKED<typename T::Blocked>) {
      number = listed.number;
      rows.mask = mask_of<T::BAND>(forward, listed.sequence);
    } else {
      first_query = end_of_tiles<T>(forward.seq_q) - (1 + place) * T::TILE_M;
    }
    rows.blocks = rows.mask.template keys<T::TILE_N>(first_query, T::TILE_M);
    rows.tile = {first_query, head, number, 0, listed.sequence};
    rows.head_kv = head / forward.group;
    return rows;
  }

  DEVICE bool is_none() const { return tile.blocks == NO_TILE; }
  DEVICE WarpQueries queries() const { return {tile.first_query + warp_row()}; }
  DEVICE OneHead<typename T::Score> heads(const typename T::Params& params) const {
    return {{params.aux, mask.seq_q, mask.seq_kv, tile.number, tile.head}};
  }
  DEVICE QueryPlaces<T> places(const typename T::Params& params) const {
    return {params.forward, tile.number, tile.head, tile.sequence, tile.first_query + warp_row()};
  }

  // All of Q, by one thread.
  DEVICE void load(SharedAddress target, const typename T::Params& params, SharedAddress barrier) const {
    using TileQ = typename T::TileQ;
    mbarrier_arrive_expect(barrier, TileQ::BYTES);
#pragma unroll 1
    for (int panel = 0; panel < TileQ::PANELS; ++panel)
      load_box(target + panel * TileQ::PANEL_BYTES, params.map_q, barrier, panel * TileQ::PANEL_COLUMNS, tile.first_query,
               tile.head, queries_of(tile));
  }
};

// Queries of the heads that share keys, side by side: they are no box, and those who compute gather them.
template <class T>
struct TwinGroups {
  Owned<T> owned;
  Mask<T::BAND> mask;
  Blocks blocks;

  static DEVICE TwinGroups of(const typename T::Params& params) {
    Owned<T> owned = Owned<T>::of(params.forward);
    owned.find_lengths();
    return {owned, owned.mask(), keys_of(owned, params)};
  }

  DEVICE bool is_none() const { return owned.first_row >= owned.len_q * owned.params.group; }

  struct Queries {
    int query[2];
    DEVICE int operator[](int half) const { return query[half]; }
  };
  DEVICE Queries queries() const {
    return {{owned.row(warp_row() + accumulator_row(0)).query, owned.row(warp_row() + accumulator_row(2)).query}};
  }
  DEVICE TwoHeads<typename T::Score> heads(const typename T::Params& params) const {
    const auto head = [&](int half) {
      const Row it = owned.row(warp_row() + accumulator_row(2 * half, recomputed(thread_index())));
      return HeadScores<typename T::Score>(params.aux, owned.len_q, owned.len_kv, owned.sequence, it.head);
    };
    return {{head(0), head(1)}};
  }
  DEVICE GroupPlaces<T> places(const typename T::Params&) const { return {owned, warp_row()}; }

  // Gathered by all who compute, into panels as TMA would write them. Rows that are none, and columns beyond head_dim, become zeros.
  DEVICE void gather(SharedAddress tile) const {
    using TileQ = typename T::TileQ;
    constexpr int CHUNKS = 8 * TileQ::PANELS;
#pragma unroll 4
    for (int i = thread_index(); i < T::WARPGROUP_ROWS * CHUNKS; i += T::CONSUMERS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      const Row it = owned.row(row);
      const bool valid = it.query < owned.len_q && chunk < T::HEAD_DIM / CHUNK_ELEMENTS;
      const uint16* source = static_cast<const uint16*>(owned.params.q) + owned.offset(owned.params.strides_q, it);
      cp_async_16(TileQ::Panel::chunk(tile + chunk / 8 * TileQ::PANEL_BYTES, row, chunk % 8),
                  source + chunk * CHUNK_ELEMENTS, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
  }
};

template <class T>
using TwinRows = typename Choice<T::GROUPED, TwinGroups<T>, TwinQueries<T>>::Type;

}  // namespace multiattn
