// One thread that loads for the backward: it decides which tiles of keys the block does, and keeps the rings full by TMA.
#pragma once
#include "backward_wgmma_traits.cuh"
#include "multiattn/place.cuh"

namespace multiattn {

// Tiles of keys: of each head, and of all.
struct KeyTiles {
  int of_head, all;
};
template <class T>
DEVICE KeyTiles count_key_tiles(const typename T::Params& params) {
  int of_head = params.backward.tiles_kv;
  if constexpr (IS_PACKED<typename T::Blocked>) of_head = find_sequence(tile_lists(params.lists).key_list, 0).tiles;
  return {of_head, of_head * heads_of_launch<T>(params).count};
}

// The tile of keys that has this place among all. Those of one place run side by side, and so do heads that share L2. Under a
// mask the first keys are seen by the most queries: the longest tiles come first.
template <class T>
DEVICE KeyTile<T> key_tile(const typename T::Params& params, const KeyTiles& tiles, int index) {
  if (index >= tiles.all) return {NO_TILE, 0, 0, {}};
  const HeadRange heads = heads_of_launch<T>(params);
  const Place it = Place::of(index, tiles.of_head, heads.count, params.backward.sections_kv);
  const int head_kv = heads.first + it.head, place = it.place;
  if constexpr (IS_PACKED<typename T::Blocked>) {
    const ListedTile listed = find_sequence(tile_lists(params.lists).key_list, place);
    return {listed.first_row, head_kv, listed.number, listed.sequence};
  } else {
    return {place * T::TILE_N, head_kv, head_kv / (params.backward.heads_q / params.backward.group), {}};
  }
}

// All panels of a tile; `more_bytes` come to the barrier by another load.
template <class Tile, class Rows>
DEVICE void load_boxes(SharedAddress tile, const TensorMap& map, SharedAddress barrier, int row, int head, const Rows& of,
                       int more_bytes = 0) {
  mbarrier_arrive_expect(barrier, Tile::BYTES + more_bytes);
#pragma unroll(Tile::PANELS > 2 ? 1 : Tile::PANELS)  // a producer has few registers
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    load_box(tile + panel * Tile::PANEL_BYTES, map, barrier, panel * Tile::PANEL_COLUMNS, row, head, of);
}

// Tiles of K and V, and for each of them its tiles of Q, with the statistics of their queries, and of dO.
template <class T, int GROUP = 0>
class BackwardProducer {
  using Shared = BackwardShared<T, GROUP>;
 public:
  DEVICE explicit BackwardProducer(const typename T::Params& params) : params_(params) {}

  // Loads for the second warpgroup where each has a list: what tile is next is known with its K.
  DEVICE void follow() {
    await_earlier_grids();
    while (true) {
      Shared::ring_k().await_full(k_);
      const KeyTile<T> tile = load_key_tile<T, false>(Shared::tile_place(k_.slot));
      mbarrier_arrive(Shared::ring_k().empty(k_.slot));
      k_.advance();
      if (tile.is_none()) break;
      load_list(tile, 0);
    }
  }

  DEVICE void run() {
    admit_next_grid();
    await_earlier_grids();  // tensors, statistics and the counter are touched only after this
    if constexpr (IS_STREAM_K<typename T::Blocked>) {
      store_cursor({-1, 0, 0, 0});
      for (KeyTile<T> tile = begin(next_part()); !tile.is_none(); tile = begin(next_part())) load(tile);
    } else {
      const KeyTiles tiles = count_key_tiles<T>(params_);
      const auto tile_of = [&](int index) { return key_tile<T>(params_, tiles, index); };
      int index = AWAITS_EARLIER ? next() : static_cast<int>(block_index());
      for (KeyTile<T> tile = begin(tile_of(index)); !tile.is_none(); tile = begin(tile_of(index))) {
        load(tile);
        index = next();
      }
    }
  }

 private:
  // Tiles that wait for earlier ones begin in order: not even the first is the block's own.
  static constexpr bool AWAITS_EARLIER = T::SIDE_WARPS > 0;

  // The counter is asked when all of a tile is under way: a tile that waits for its block is one that another could have
  // begun.
  DEVICE int next() const {
    const int begun = AWAITS_EARLIER ? 0 : static_cast<int>(block_count());
    return begun + atomic_add_global(params_.next_tile, 1) - heads_of_launch<T>(params_).first * params_.backward.tiles_kv;
  }

  // The tile, as soon as there is a slot for its K.
  DEVICE KeyTile<T> begin(KeyTile<T> tile) const {
    if constexpr (T::LISTED)
      if (!tile.is_none()) {
        tile.end_step = count_listed(tile, 0);
        if constexpr (T::PAIRED) tile.end_of_second = count_listed(tile, 1);
      }
    Shared::ring_k().await_empty(k_);
    store_tile<T>(Shared::tile_place(k_.slot), tile);
    if (tile.is_none()) mbarrier_arrive(Shared::ring_k().full(k_.slot));
    return tile;
  }

  // ---- with StreamK
  // Where a schedule is: what the counter gave, and of a range the next tile, its first step, and the steps left. In shared memory
  // while a tile is loaded, as a producer has few registers.
  struct Cursor {
    int item, index, step, left;
  };
  DEVICE void store_cursor(const Cursor& at) const {
    store_shared_16(Shared::cursor_place(), chunk_of(at.item, at.index, at.step, at.left));
  }
  DEVICE Cursor load_cursor() const {
    const Chunk it = load_shared_16(Shared::cursor_place());
    const auto field = [&](int word) { return static_cast<int>(it.word[word]); };
    return {field(0), field(1), field(2), field(3)};
  }

  // The next tile, or part of one.
  DEVICE KeyTile<T> next_part() const {
    const KeyTiles tiles = count_key_tiles<T>(params_);
    const Division& division = params_.lists;
    Cursor at = load_cursor();
    while (at.left == 0) {  // no range, or its end
      at.item = at.item < 0 && !AWAITS_EARLIER ? static_cast<int>(block_index()) : next();
      const int range = at.item - division.ranges_from;
      if (range >= division.ranges) return {NO_TILE, 0, 0, {}};
      if (range < 0) {
        const KeyTile<T> share = share_of_tile(tiles, at.item);
        if (share.is_none()) continue;
        store_cursor(at);
        return share;
      }
      const KeyTile<T> first_tile = key_tile<T>(params_, tiles, division.ranges_from);
      const int each = count_steps<T>(params_, query_blocks<T>(params_, first_tile)), first = range * division.range_steps;
      at.index = division.ranges_from + first / each, at.step = first % each;
      at.left = min(division.range_steps, (tiles.all - division.ranges_from) * each - first);
    }
    KeyTile<T> tile = key_tile<T>(params_, tiles, at.index);
    const int steps = count_steps<T>(params_, query_blocks<T>(params_, tile));
    tile.sums = at.index - division.ranges_from;
    tile.first_step = at.step;
    tile.end_step = min(steps, at.step + at.left);
    store_cursor({at.item, at.index + 1, 0, at.left - (tile.end_step - at.step)});
    return tile;
  }

  // A share of a tile: to the schedule those of one tile are heads of their own. None if it has no steps; but of a tile that no query
  // sees the first one is there, for its gradients.
  DEVICE KeyTile<T> share_of_tile(const KeyTiles& tiles, int index) const {
    const int shares = params_.lists.shares;
    const Place it = Place::of(index, tiles.of_head, params_.backward.heads_kv_all * shares, params_.backward.sections_kv);
    const int head_kv = it.head / shares, share = it.head % shares;
    KeyTile<T> tile{it.place * T::TILE_N, head_kv, head_kv / (params_.backward.heads_q / params_.backward.group), {}};
    const int steps = count_steps<T>(params_, query_blocks<T>(params_, tile));
    tile.sums = head_kv * tiles.of_head + it.place;
    tile.first_step = share * steps / shares;
    tile.end_step = (share + 1) * steps / shares;
    if (tile.first_step == tile.end_step && (steps > 0 || share > 0)) tile.first_key = NO_TILE;
    return tile;
  }

  DEVICE void load(const KeyTile<T>& tile) {
    const int heads_kv = params_.backward.heads_q / params_.backward.group, head_kv = tile.head_kv % heads_kv;
    load_boxes<typename T::TileK>(Shared::k(k_.slot), params_.map_k, Shared::ring_k().full(k_.slot), tile.first_key, head_kv,
                       own_keys<T, T::TILE_N>(tile, tile.first_key));
    k_.advance();
    if constexpr (T::LISTED) return load_list(tile, head_kv);
    const Blocks blocks = query_blocks<T>(params_, tile);
    int steps = count_steps<T>(params_, blocks);
    QueryStep at{0, blocks.begin};
    if constexpr (IS_STREAM_K<typename T::Blocked>) {
      steps = tile.end_step - tile.first_step;
      at = QueryStep::of(tile.first_step, blocks);
    }
    if (steps > 0) load_q(tile, at);
    Shared::ring_v().await_empty(v_);
    load_boxes<typename T::TileV>(Shared::v(), params_.map_v, Shared::ring_v().full(0), tile.first_key, head_kv, keys_of(tile));
    v_.advance();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      load_dout(tile, at);
      at.advance(blocks);
      if (step + 1 < steps) load_q(tile, at);
    }
  }

  // ---- with lists
  // The list of a query head of the tile's group, for its keys or those of a warpgroup.
  DEVICE auto list_of(const KeyTile<T>& tile, int head, int group) const {
    using Listed = ListedTiles<T::Blocked::QUERIES, T::TILE_M, T::Blocked::HAS_FULL>;
    if constexpr (IS_CUT<typename T::Blocked>) {
      if (tile.sequence.len_q == 0) return Listed{0, 0, 0};  // it has no list
      const int row = row_of_keys<typename T::Blocked>(tile.sequence, tile.number, tile.first_key);
      return Listed::of(params_.lists.queries, 0, query_head(tile, {head, 0}), row);
    } else {
      const int row = min((tile.first_key + group * T::WARPGROUP_KEYS) / T::Blocked::KEYS, (params_.backward.seq_kv - 1) / T::Blocked::KEYS);
      return Listed::of(params_.lists.queries, tile.number, query_head(tile, {head, 0}), row);
    }
  }

  // The steps of a tile, or of a warpgroup of it, over all heads.
  DEVICE int count_listed(const KeyTile<T>& tile, int group) const {
    if (tile.first_key + group * T::WARPGROUP_KEYS >= count_keys(params_.backward, tile.sequence)) return 0;
    if (params_.lists.queries.stride_head == 0) return list_of(tile, 0, group).end * params_.backward.group;
    int steps = 0;
#pragma unroll 2  // a producer has few registers
    for (int head = 0; head < params_.backward.group; ++head) steps += list_of(tile, head, group).end;
    return steps;
  }

  // A tile of queries is looked up a step ahead, as the list is in memory; what a step is of goes with its Q.
  DEVICE void load_list(const KeyTile<T>& tile, int head_kv) {
    int head = 0, step = 0;
    auto list = list_of(tile, 0, GROUP);
    const auto look_up = [&] {
      while (step == list.end) list = list_of(tile, ++head, GROUP), step = 0;
      return list.tile(params_.lists.queries, step);
    };
    int left = GROUP == 0 ? tile.end_step : tile.end_of_second, next = left > 0 ? look_up() : 0;
    const auto place = [&] {
      if constexpr (HAS_BITS<typename T::Blocked>) return list.place_of_bits(params_.lists.bit_columns, step);
      return NO_BITS;
    };
    if (left > 0) load_listed_q(tile, {head, next}, list.is_partial(step), place());
    if constexpr (GROUP == 0) {
      Shared::ring_v().await_empty(v_);
      load_boxes<typename T::TileV>(Shared::v(), params_.map_v, Shared::ring_v().full(0), tile.first_key, head_kv,
                                    own_keys<T, T::TILE_N>(tile, tile.first_key));
      v_.advance();
    }
#pragma unroll 1
    for (; left > 0; --left) {
      const QueryStep at{head, next};
      ++step;
      if (left > 1) next = look_up();
      load_dout(tile, at);
      if (left > 1) load_listed_q(tile, {head, next}, list.is_partial(step), place());
    }
  }

  DEVICE void load_listed_q(const KeyTile<T>& tile, const QueryStep& at, bool is_partial, int place) {
    const Mask<T::BAND> mask = mask_of<T::BAND>(params_.backward, tile.sequence);
    const int first_query = first_row(tile, at.block);
    const int end_query = end_query_in<typename T::Blocked, T::TILE_M>(params_.backward, tile.sequence, at.block);
    const int first_key = tile.first_key + GROUP * T::WARPGROUP_KEYS;
    bool is_cut = !mask.all_visible(first_query, T::TILE_M, first_key, T::TileDS::ROWS);
    is_cut |= first_query + (HAS_SCORE<typename T::Score> || IS_CUT<typename T::Blocked> ? T::TILE_M - 1 : 0) >= end_query;
    if constexpr (IS_CUT<typename T::Blocked>)
      is_cut |= first_key + T::TILE_N > end_of_keys<typename T::Blocked, T::TILE_N>(params_.backward, tile.sequence, first_key);
    const auto word = TileWord::of(at.block, HAS_MASK<typename T::Score> && is_partial, is_cut);
    Shared::ring_q().await_empty(q_);
    ListedStep{word, tile.head_kv * params_.backward.group + at.head, query_head(tile, at), place}.store(Shared::step_of_q(q_.slot));
    load_q(tile, at);
  }

  DEVICE void load_q(const KeyTile<T>& tile, const QueryStep& at) {
    Shared::ring_q().await_empty(q_);
    const SharedAddress barrier = Shared::ring_q().full(q_.slot);
    const int block = query_block<T>(params_, tile, at.block);
    load_boxes<typename T::TileQ>(Shared::q(q_.slot), params_.map_q, barrier, first_row(tile, block), query_head(tile, at),
                      queries_in<T, T::TILE_M>(tile, block), T::STATISTICS_BYTES);
    const int head = tile.head_kv * params_.backward.group + at.head;
    // A block of a list may have tiles beyond the last query, or before the first: they are hidden, whatever their statistics.
    int known = T::LISTED ? min(block, params_.backward.tiles_q - 1) : block;
    if constexpr (IS_CUT<typename T::Blocked>) {
      const Sequence& of = tile.sequence;
      known = min(max(block, of.offset_q / T::TILE_M), (of.offset_q + of.len_q - 1) / T::TILE_M);
    }
    bulk_load(Shared::lse(q_.slot), statistics_of<T>(params_, head, tile.number, tile.sequence, known),
              T::STATISTICS_BYTES, barrier);
    q_.advance();
  }

  DEVICE void load_dout(const KeyTile<T>& tile, const QueryStep& at) {
    Shared::ring_dout().await_empty(dout_);
    load_boxes<typename T::TileDout>(Shared::dout(dout_.slot), params_.map_dout, Shared::ring_dout().full(dout_.slot),
                      first_row(tile, query_block<T>(params_, tile, at.block)), query_head(tile, at),
                      queries_in<T, T::TILE_M>(tile, at.block));
    dout_.advance();
  }

  // The first query of a block.
  static DEVICE int first_row(const KeyTile<T>& tile, int block) {
    return first_query_in<typename T::Blocked, T::TILE_M>(tile.sequence, block);
  }

  // In its batch entry.
  DEVICE int query_head(const KeyTile<T>& tile, const QueryStep& at) const {
    return tile.head_kv * params_.backward.group % params_.backward.heads_q + at.head;
  }

  const typename T::Params& params_;
  RingPlace<T::K_STAGES> k_;
  RingPlace<1> v_;
  RingPlace<T::Q_STAGES> q_;
  RingPlace<T::DOUT_STAGES> dout_;
};

}  // namespace multiattn
