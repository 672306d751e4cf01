// The warps that load: they decide which tiles the block does, in which order, and keep the rings full.
#pragma once
#include "forward_wgmma_keys.cuh"
#include "multiattn/place.cuh"

namespace multiattn {

// How many tiles of queries a head has: the parameters know, or in a packed batch the list, which is asked once.
template <class Blocked, bool = IS_PACKED<Blocked>>
struct TileCount {
  template <class Params>
  DEVICE explicit TileCount(const Params&) {}
  DEVICE int of_head(const WgmmaParams& params) const { return params.forward.tiles; }
};
template <class Blocked>
struct TileCount<Blocked, true> {
  int listed;
  template <class Params>
  DEVICE explicit TileCount(const Params& params) : listed(find_sequence(tile_lists(params.lists).query_list, 0).tiles) {}
  DEVICE int of_head(const WgmmaParams&) const { return listed; }
};

// The tile that a block does first: the one of its own number. A grid has no more blocks than there are tiles, unless it was
// not known how many the list has.
template <class T, int TEAM = 0>
DEVICE int first_tile(const TileCount<typename T::Blocked>& count, const WgmmaParams& params) {
  const int tile = T::TEAMS == 1 ? static_cast<int>(block_index()) : static_cast<int>(block_index()) * T::TEAMS + TEAM;
  constexpr bool KNOWN = T::TEAMS == 1 && !IS_PACKED<typename T::Blocked>;
  if (KNOWN || tile < count.of_head(params) * params.forward.heads) return tile;
  return NO_TILE;
}

// The tile that it does after `tile`, or NO_TILE.
template <class T>
DEVICE int tile_after(int tile, const TileCount<typename T::Blocked>& count, const WgmmaParams& params) {
  if constexpr (T::SCHEDULER == Scheduler::ONE_TILE) return NO_TILE;
  const int tiles = count.of_head(params) * params.forward.heads;
  const int takers = static_cast<int>(block_count()) * T::TEAMS;
  int next = tile + takers;
  if constexpr (T::SCHEDULER == Scheduler::DYNAMIC) {
    // Each tile beyond the grid is asked for once, by the block that gets it, and each block asks once in vain. The last to ask
    // leaves the counter as it was found, for the launch that comes next on the stream. A packed batch's is emptied by the
    // kernel that lists the tiles.
    const int asked = atomic_add_global(params.forward.next_tile, 1);
    if (!IS_PACKED<typename T::Blocked> && asked == tiles - 1) atomic_add_global(params.forward.next_tile, -tiles);
    next = takers + asked;
  }
  return next < tiles ? next : NO_TILE;
}

// As Place::of, but the last section has the heads of two. Each begins with its longest tiles; where it is the last and has
// about as many as there are SMs, all of them begin one and the longest end alone. The short ones of twice as many fill that
// up. H200, 2026-11-22, N=8192 masked, beside FlashAttention-4: 22 heads of D=192 in 11 sections 0.93, 16 of D=256 in 8 1.03.
template <Band BAND>
DEVICE Place scheduled_place(int block, int tiles, int heads, int heads_per_section) {
  constexpr int ENOUGH = 256;  // tiles of one head: twice the SMs of an H200. K and V of two such may be more than L2 holds
  if constexpr (BAND == Band::CAUSAL) {
    const int before = max((heads - 1) / heads_per_section - 1, 0) * heads_per_section;  // heads in the other sections
    if (tiles < ENOUGH && block >= before * tiles) {
      const auto [head, place] = Place::of(block - before * tiles, tiles, heads - before, heads - before);
      return {before + head, place};
    }
  }
  return Place::of(block, tiles, heads, heads_per_section);
}

// The tile's queries. In a packed batch each warpgroup's come by themselves, so that no box begins before the sequence, where
// rows are a neighbour's or nobody's: a warpgroup without queries gets its first ones, and does not use them.
template <class T>
DEVICE void load_queries(SharedAddress target, const TensorMap& map, SharedAddress barrier, const QueryTile<T>& tile) {
  using TileQ = typename T::TileQ;
  if constexpr (IS_PACKED<typename T::Blocked>) {
    mbarrier_arrive_expect(barrier, TileQ::BYTES);
#pragma unroll 1  // a producer has few registers
    for (int group = 0; group < T::WARPGROUPS; ++group)
#pragma unroll
      for (int panel = 0; panel < TileQ::PANELS; ++panel)
        load_box(target + panel * TileQ::PANEL_BYTES + group * T::WARPGROUP_ROWS * TileQ::ROW_BYTES, map, barrier,
                 panel * TileQ::PANEL_COLUMNS, max(tile.first_query + group * T::WARPGROUP_ROWS, 0), tile.head,
                 queries_of(tile));
  } else {
    load_panels<TileQ>(target, map, barrier, tile.first_query, tile.head, queries_of(tile));
  }
}

// K or V of a block of keys into the next of its slots that is empty. No lambda with a type of its own: NVRTC 13.0 takes that
// for a function of the host.
template <class T, class Slots, class Place>
DEVICE void load_keys(Place& place, const TensorMap& map, const QueryTile<T>& tile, int head_kv, int block) {
  const auto ring = Slots::ring();
  ring.await_empty(place);
  if constexpr (IS_CUT<typename T::Blocked>)
    load_panels<typename Slots::Tile>(Slots::at(place.slot), map, ring.full(place.slot),
                                      first_key_in<typename T::Blocked, T::TILE_N>(tile.sequence, block), head_kv,
                                      keys_in<T, T::TILE_N>(tile, block));
  else
    load_panels<typename Slots::Tile, T::CLUSTER>(Slots::at(place.slot), map, ring.full(place.slot), block * T::TILE_N, head_kv,
                                                  keys_of(tile));
  place.advance();
}

// Waits until all slots are empty, from `place` on.
template <class Ring, int SLOTS>
DEVICE void await_all_empty(const Ring& ring, RingPlace<SLOTS>& place) {
  for (int slot = 0; slot < SLOTS; ++slot, place.advance()) ring.await_empty(place);
}

// The first query of a tile. A list counts from query 0 on, but the last tile ends where the queries do here, too.
template <class T>
DEVICE int first_query_of(const WgmmaParams& params, const TileOf<T>& listed, int tile, int place) {
  if constexpr (IS_PACKED<typename T::Blocked>) {
    const int len_q = listed.sequence.len_q;
    return listed.first_row - (round_up(len_q, T::TILE_M) - end_of_tiles<T>(len_q));
  } else {
    return end_of_tiles<T>(params.forward.seq_q) - (T::CLUSTER * (1 + place) - tile % T::CLUSTER) * T::TILE_M;
  }
}

// Tiles of Q, and for each its blocks of keys from the last to the first, in the order in which they are used: K of a block
// before V of the block before it. Tiles that see the most keys come first, heads that share an L2 side by side; in a packed
// batch its list has them in this order, those of long sequences before those of shorter ones. Blocks of a cluster
// have tiles next to one another. The last tile ends where the queries do, so that what is short of a tile is the first, which
// begins before query 0: under a mask it is the one that sees the fewest keys.
template <class T>
DEVICE void produce(const typename T::Params& params) {
  using Shared = SharedLayout<T>;
  const auto ring_q = Shared::ring_q();
  const ForwardParams& forward = params.forward;
  Mask<T::BAND> mask(forward);
  RingPlace<T::Q_SLOTS> q;
  RingPlace<T::STAGES> k;
  RingPlace<T::V_STAGES> v;  // of V, if it does not take turns with K

  const auto load_k = [&](const QueryTile<T>& tile, int head_kv, int block) {
    load_keys<T, typename Shared::K>(k, params.map_k, tile, head_kv, block);
  };
  const auto load_v = [&](const QueryTile<T>& tile, int head_kv, int block) {
    if constexpr (T::TAKES_TURNS)
      load_keys<T, typename Shared::V>(k, params.map_v, tile, head_kv, block);
    else
      load_keys<T, typename Shared::V>(v, params.map_v, tile, head_kv, block);
  };

  admit_next_grid();
  await_earlier_grids();  // tensors and the counter are touched only after this
  // A counter is asked when all of a tile is under way, not before: a tile that waits for its block is one that another
  // could have begun. H200, 2026-11-22, D=256 N=8192 masked: asked at a tile's start, 668 TFLOPS for ONE_TILE's 765.
  const TileCount<typename T::Blocked> count(params);
  int tile = first_tile<T>(count, params);
  for (; tile != NO_TILE; tile = tile_after<T>(tile, count, params)) {
    const auto [any_head, place] = scheduled_place<T::BAND>(tile / T::CLUSTER, count.of_head(params) / T::CLUSTER,
                                                            forward.heads, forward.heads_per_section);
    const int batch = any_head / forward.heads_q, head = any_head % forward.heads_q, head_kv = head / forward.group;
    const TileOf<T> listed = tile_at<T>(params, &TileLists::query_list, place, 0);
    const int first_query = first_query_of<T>(params, listed, tile, place);
    if constexpr (IS_PACKED<typename T::Blocked>) mask = mask_of<T::BAND>(forward, listed.sequence);
    const Blocks blocks = loaded_blocks<T>(mask, first_query);
    QueryTile<T> own{first_query, head, batch, blocks.end - blocks.begin, listed.sequence};
    if constexpr (IS_PACKED<typename T::Blocked>) own.number = listed.number;
    if (blocks.end > blocks.begin) load_k(own, head_kv, blocks.end - 1);
    ring_q.await_empty(q);
    store_tile<T>(Shared::tile_place(q.slot), own);
    load_queries<T>(Shared::q(q.slot), params.map_q, ring_q.full(q.slot), own);
    q.advance();
    for (int block = blocks.end - 1; block > blocks.begin; --block) {
      load_k(own, head_kv, block - 1);
      load_v(own, head_kv, block);
    }
    if (blocks.end > blocks.begin) load_v(own, head_kv, blocks.begin);
  }
  ring_q.await_empty(q);
  store_tile<T>(Shared::tile_place(q.slot), {0, 0, 0, NO_TILE, {}});
  mbarrier_arrive(ring_q.full(q.slot));
  // Shared memory must be there for the other blocks of the cluster until they have released every slot.
  if constexpr (T::CLUSTER > 1) await_all_empty(Shared::K::ring(), k);
  if constexpr (T::CLUSTER > 1 && !T::TAKES_TURNS) await_all_empty(Shared::V::ring(), v);
}

// As `produce`, where a block mask lists the tiles of keys: full blocks first. A tile is looked up two steps ahead, as the list is
// in memory, and its word goes to a slot of K with it. Tiles of queries begin with query 0, as blocks do.
template <class T, int TEAM = 0>
class ListedProducer {
  using Shared = SharedLayout<T, TEAM>;
  using Listed = ListedTiles<T::Blocked::KEYS, T::TILE_N, T::Blocked::HAS_FULL>;
  static_assert(T::Blocked::QUERIES % T::TILE_M == 0, "a tile of queries lies in one block");

 public:
  DEVICE explicit ListedProducer(const typename T::Params& params) : params_(params), mask_(params.forward) {}

  DEVICE void run() {
    const auto ring_q = Shared::ring_q();
    admit_next_grid();
    await_earlier_grids();  // tensors, lists and the counter are touched only after this
    const TileCount<typename T::Blocked> count(params_);
    for (int tile = first_tile<T, TEAM>(count, params_); tile != NO_TILE; tile = tile_after<T>(tile, count, params_))
      load(tile, count.of_head(params_));
    ring_q.await_empty(q_);
    store_tile<T>(Shared::tile_place(q_.slot), {0, 0, 0, NO_TILE, {}});
    mbarrier_arrive(ring_q.full(q_.slot));
  }

 private:
  DEVICE void load(int tile, int tiles) {
    const ForwardParams& forward = params_.forward;
    const auto [any_head, place] = scheduled_place<T::BAND>(tile, tiles, forward.heads, forward.heads_per_section);
    const int batch = any_head / forward.heads_q, head = any_head % forward.heads_q;
    const TileOf<T> at = tile_at<T>(params_, &TileLists::query_list, place, (tiles - 1 - place) * T::TILE_M);
    const int first_query = at.first_row;
    QueryTile<T> own{first_query, head, batch, 0, at.sequence};
    if constexpr (IS_CUT<typename T::Blocked>) {
      own.number = at.number;
      mask_ = mask_of<T::BAND>(forward, at.sequence);
    }
    const Listed listed = list_of(own, batch);
    own.blocks = listed.end;
    const auto look_up = [&](int step) { return step < listed.end ? word_of(listed, own, step) : 0; };
    int word = look_up(0), next = look_up(1);
    if (listed.end > 0) load_k(own, word, place_of(listed, 0));
    Shared::ring_q().await_empty(q_);
    store_tile<T>(Shared::tile_place(q_.slot), own);
    load_queries<T>(Shared::q(q_.slot), params_.map_q, Shared::ring_q().full(q_.slot), own);
    q_.advance();
#pragma unroll 1  // a producer has few registers
    for (int step = 1; step < listed.end; ++step) {
      const int after_next = look_up(step + 1);
      load_k(own, next, place_of(listed, step));
      load_v(own, word);
      word = next;
      next = after_next;
    }
    if (listed.end > 0) load_v(own, word);
  }

  // The list of the tile's keys. Those that sequences cut have none of a sequence without keys.
  DEVICE Listed list_of(const QueryTile<T>& own, int batch) const {
    if constexpr (IS_CUT<typename T::Blocked>)
      if (own.sequence.len_kv == 0) return {0, 0, 0};
    const int row = row_of_queries<typename T::Blocked>(own.sequence, own.number, own.first_query);
    return Listed::of(params_.lists.keys, batch, own.head, row);
  }

  // The word of a step's tile.
  DEVICE int word_of(const Listed& listed, const QueryTile<T>& own, int step) const {
    const int tile = listed.tile(params_.lists.keys, step);
    const bool is_partial = HAS_MASK<typename T::Score> && listed.is_partial(step);
    const int first_key = first_key_in<typename T::Blocked, T::TILE_N>(own.sequence, tile);
    bool is_cut = !mask_.all_visible(own.first_query, T::TILE_M, first_key, T::TILE_N);
    if constexpr (IS_CUT<typename T::Blocked>)
      is_cut |= end_key_in<typename T::Blocked, T::TILE_N>(params_.forward, own.sequence, tile) < first_key + T::TILE_N;
    return TileWord::of(tile, is_partial, is_cut).word;
  }

  // The place of the bits of a step's block.
  DEVICE int place_of(const Listed& listed, int step) const {
    if constexpr (HAS_BITS<typename T::Blocked>) return listed.place_of_bits(params_.lists.bit_columns, step);
    return NO_BITS;
  }

  DEVICE void load_k(const QueryTile<T>& tile, int word, int place) {
    Shared::K::ring().await_empty(kv_.k());
    store_shared_4(Shared::key_word(kv_.k().slot), static_cast<uint32>(word));
    if constexpr (HAS_BITS<typename T::Blocked>)
      store_shared_4(Shared::key_word(kv_.k().slot) + 4, static_cast<uint32>(place));
    load_keys<T, typename Shared::K>(kv_.k(), params_.map_k, tile, tile.head / params_.forward.group, TileWord{word}.tile());
  }
  DEVICE void load_v(const QueryTile<T>& tile, int word) {
    load_keys<T, typename Shared::V>(kv_.v(), params_.map_v, tile, tile.head / params_.forward.group, TileWord{word}.tile());
  }

  const typename T::Params& params_;
  Mask<T::BAND> mask_;  // of the tile's sequence
  RingPlace<T::Q_SLOTS> q_;
  typename Shared::Places kv_;
};

// Loads keys for the one tile of grouped rows that a block owns, and for which Q is gathered by those who compute. Pages are looked up
// three blocks ahead, so that nobody waits for the table.
template <class T>
DEVICE void produce(const typename T::Params& params, const Owned<T>& owned, const Blocks& blocks) {
  const int last = blocks.end - 1;
  if (last < blocks.begin) return;
  LoaderOf<T> keys(params, owned);
  const auto look_up = [&](int block) { return block < blocks.begin ? 0 : keys.look_up(block); };
  int page = look_up(last), next = look_up(last - 1), after_next = look_up(last - 2);
  keys.load_k(last, page);
#pragma unroll 1  // a producer has few registers
  for (int block = last; block > blocks.begin; --block) {
    keys.load_k(block - 1, next);
    keys.load_v(block, page);
    page = next;
    next = after_next;
    after_next = look_up(block - 3);
  }
  keys.load_v(blocks.begin, page);
  keys.finish();
}

}  // namespace multiattn
