// Keys: how tiles of K and V come to the ring.
#pragma once
#include "forward_wgmma_rows.cuh"

namespace multiattn {

// All panels of a tile. One of a cluster comes in parts, of which each block loads one, for all.
template <class T, int CLUSTER = 1, class Rows>
DEVICE void load_panels(SharedAddress tile, const TensorMap& map, SharedAddress barrier, int row, int head, const Rows& of) {
  mbarrier_arrive_expect(barrier, T::BYTES);
  if constexpr (CLUSTER > 1) {
    tile += cluster_rank() * (T::PANEL_BYTES / CLUSTER);
    row += cluster_rank() * (T::ROWS / CLUSTER);
  }
#pragma unroll
  for (int panel = 0; panel < T::PANELS; ++panel) {
    const SharedAddress target = tile + panel * T::PANEL_BYTES;
    if constexpr (CLUSTER > 1)
      tma_load_to_all<CLUSTER>(target, map, barrier, panel * T::PANEL_COLUMNS, row, head, of.number);
    else
      load_box(target, map, barrier, panel * T::PANEL_COLUMNS, row, head, of);
  }
}

// Boxes of a cache, by one warp, of which a lane has one box of every tile. A box whose keys are all beyond the last, or freed, is not
// loaded: its entry of the table may name anything.
template <class T, class Places>
class CacheBoxes : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  static constexpr int BOXES_OF_PANEL = T::TILE_N / T::BOX_ROWS;

 public:
  DEVICE CacheBoxes(const typename T::Params& params, const Owned<T>& owned)
      : Freed(owned), params_(params), owned_(owned) {}

  // The page of the lane's box.
  DEVICE int look_up(int block) const {
    const int key = block * T::TILE_N + row_of_tile();
    if (!T::IS_PAGED || key >= owned_.len_kv || is_freed_box(key)) return 0;
    return owned_.page_of(key);
  }

  // The next tiles are a twin's.
  DEVICE void turn_to(int twin) { place_.turn_to(twin); }

  // A block's columns from `column` on, to the next slot.
  template <class Slots>
  DEVICE void load(const TensorMap& map, int block, int page, int column = 0) {
    using Tile = typename Slots::Tile;
    static_assert(BOXES_OF_PANEL * Tile::PANELS <= WARP, "a lane for each box of a tile");
    const auto ring = Slots::ring();
    const int first_key = block * T::TILE_N, key = first_key + row_of_tile(), panel = lane() / BOXES_OF_PANEL;
    const int end = min((owned_.len_kv - first_key - 1) / T::BOX_ROWS + 1, BOXES_OF_PANEL);
    const int boxes = (end - Freed::before(first_key) / T::BOX_ROWS) * Tile::PANELS;
    ring.await_empty(place_);
    if (lane() == 0) mbarrier_arrive_expect(ring.full(place_.slot), boxes * T::BOX_ROWS * Tile::ROW_BYTES);
    sync_warp();  // the phase expects its bytes before they come
    if (panel < Tile::PANELS && key < owned_.len_kv && !is_freed_box(key)) {
      const int entry = T::IS_PAGED ? page : owned_.sequence, row = T::IS_PAGED ? PlaceOfKey::of(params_.forward, key).row : key;
      tma_load(Slots::at(place_.slot) + panel * Tile::PANEL_BYTES + row_of_tile() * Tile::ROW_BYTES, map,
               ring.full(place_.slot), column + panel * Tile::PANEL_COLUMNS, row, owned_.head_kv, entry);
    }
    sync_warp();
    place_.advance();
  }

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int row_of_tile() { return lane() % BOXES_OF_PANEL * T::BOX_ROWS; }
  // True if a box is freed, by its first key.
  DEVICE bool is_freed_box(int key) const { return Freed::is_freed(key + T::BOX_ROWS - 1); }

  const typename T::Params& params_;
  const Owned<T>& owned_;
  Places place_;
};

// Four warps gather keys one by one with cp.async, so that pages have any size. A warp has a share of the keys of each tile, and
// a lane knows where one of them is. Eight lanes copy 128 bytes of a key at a time. Copies land late, so a tile is told of as
// full when LAG younger ones are on their way.
template <class T, class Places, int LAG>
class KeyGather : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  static constexpr int KEYS = T::TILE_N / T::LOADING_WARPS;  // of a warp
  static constexpr int CHUNKS = 8, KEYS_OF_PASS = WARP / CHUNKS;

 public:
  DEVICE KeyGather(const typename T::Params& params, const Owned<T>& owned)
      : Freed(owned), params_(params.forward), owned_(owned) {}

  // The page of the lane's key.
  DEVICE int look_up(int block) const {
    const int key = first_key(block) + lane() % KEYS;
    if (!T::IS_PAGED || key >= owned_.len_kv || Freed::is_freed(key)) return 0;
    return owned_.page_of(key);
  }

  // The next tiles are a twin's. Nothing is left untold.
  DEVICE void turn_to(int twin) {
    place_.turn_to(twin);
    told_.turn_to(twin);
  }

  // A block's columns from `column` on, to the next slot. Keys beyond the last, or freed, and columns beyond COLUMNS become zeros.
  template <class Slots, int COLUMNS>
  DEVICE void load(const void* tensor, const Strides& strides, int block, int page, int column = 0) {
    using Tile = typename Slots::Tile;
    const int first = first_key(block), own = first + lane() % KEYS, chunk = column / CHUNK_ELEMENTS + lane() % CHUNKS;
    const int64 entry = T::IS_PAGED ? page : owned_.sequence, row = T::IS_PAGED ? PlaceOfKey::of(params_, own).row : own;
    const uint64 offset = static_cast<uint64>(entry * strides.batch + row * strides.seq);  // of the lane's key
    const uint16* head = static_cast<const uint16*>(tensor) + owned_.head_kv * strides.head + chunk * CHUNK_ELEMENTS;
    const SharedAddress tile = Slots::at(place_.slot);
    Slots::ring().await_empty(place_);
    sync_warp();
#pragma unroll
    for (int pass = 0; pass < KEYS / KEYS_OF_PASS; ++pass) {
      const int key = pass * KEYS_OF_PASS + lane() / CHUNKS;  // of the warp's
      const uint64 low = shuffle(static_cast<uint32>(offset), key), high = shuffle(static_cast<uint32>(offset >> 32), key);
      const uint16* source = head + static_cast<int64>(high << 32 | low);
#pragma unroll
      for (int panel = 0; panel < Tile::PANELS; ++panel) {
        const bool is_key = first + key < owned_.len_kv && !Freed::is_freed(first + key);
        const bool valid = is_key && panel * CHUNKS + chunk < COLUMNS / CHUNK_ELEMENTS;
        cp_async_16(Tile::Panel::chunk(tile + panel * Tile::PANEL_BYTES, first_row() + key, lane() % CHUNKS),
                    source + panel * Tile::PANEL_COLUMNS, valid);
      }
    }
    cp_async_commit();
    place_.advance();
    if (loaded_ < LAG) ++loaded_;
    else tell<LAG>(Slots::ring());
  }

  // Nothing is left untold.
  template <class Slots>
  DEVICE void finish() {
    for (; loaded_ > 0; --loaded_) tell<0>(Slots::ring());
  }

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int first_row() { return thread_index() % WARPGROUP / WARP * KEYS; }
  static DEVICE int first_key(int block) { return block * T::TILE_N + first_row(); }

  // The oldest tile that was not told of is full: at most LEFT younger ones may be on their way.
  template <int LEFT, class Ring>
  DEVICE void tell(const Ring& ring) {
    cp_async_wait<LEFT>();
    fence_async_shared();
    sync_warp();  // all lanes' copies are there, for wgmma too
    if (lane() == 0) mbarrier_arrive(ring.full(told_.slot));
    sync_warp();
    told_.advance();
  }

  const SplitParams& params_;
  const Owned<T>& owned_;
  Places place_, told_;
  int loaded_ = 0;  // tiles that were not told of
};

// Whole tiles of a cache's keys, by boxes.
template <class T>
class BoxLoader {
  using Shared = SharedLayout<T>;

 public:
  DEVICE BoxLoader(const typename T::Params& params, const Owned<T>& owned) : params_(params), boxes_(params, owned) {}

  DEVICE int look_up(int block) const { return boxes_.look_up(block); }
  DEVICE void load_k(int block, int page) { boxes_.template load<typename Shared::K>(params_.map_k, block, page); }
  DEVICE void load_v(int block, int page) { boxes_.template load<typename Shared::V>(params_.map_v, block, page); }
  DEVICE void finish() {}

 private:
  const typename T::Params& params_;
  CacheBoxes<T, RingPlace<T::STAGES>> boxes_;
};

// Whole tiles of keys that are gathered.
template <class T>
class GatherLoader {
  using Shared = SharedLayout<T>;
  // Two tiles are used together, K of a block and V of the one after it, and must both be told of: no more than STAGES - 2. Half
  // of that leaves as many to a warpgroup that is behind.
  static constexpr int LAG = (T::STAGES - 2) / 2;

 public:
  DEVICE GatherLoader(const typename T::Params& params, const Owned<T>& owned) : params_(params.forward), keys_(params, owned) {}

  DEVICE int look_up(int block) const { return keys_.look_up(block); }
  DEVICE void load_k(int block, int page) {
    keys_.template load<typename Shared::K, T::HEAD_DIM>(params_.k, params_.strides_k, block, page);
  }
  DEVICE void load_v(int block, int page) {
    keys_.template load<typename Shared::V, T::HEAD_DIM_V>(params_.v, params_.strides_v, block, page);
  }
  DEVICE void finish() { keys_.template finish<typename Shared::K>(); }

 private:
  const SplitParams& params_;
  KeyGather<T, RingPlace<T::STAGES>, LAG> keys_;
};

// A row of V that no key is for may hold anything where boxes bring it, and a weight of zero would make NaN of a NaN: `count` rows of
// a tile of V become zeros.
template <class T>
DEVICE void clear_values(SharedAddress v, int first, int count) {
  using TileV = typename T::TileV;
  constexpr int CHUNKS = 8 * TileV::PANELS, CONSUMERS = T::CONSUMER_WARPS * WARP;
#pragma unroll 1
  for (int i = thread_index(); i < count * CHUNKS; i += CONSUMERS) {
    const int row = first + i / CHUNKS, chunk = i % CHUNKS;
    store_shared_16(v + chunk / 8 * TileV::PANEL_BYTES + row * TileV::ROW_BYTES + chunk % 8 * CHUNK_BYTES, Chunk{});
  }
  fence_async_shared();
  sync_warp();                                   // whole again for the barrier
  named_barrier_sync(TAIL_BARRIER, CONSUMERS);  // everybody's zeros are there, for wgmma too
}

// Clears V's rows behind the last key, of the block that has it: the end of a page, or of a cache. No slot was used before, so that V's is
// known.
template <class T>
DEVICE void clear_behind_last(const Owned<T>& owned, const GroupRows<T>& rows) {
  const int keys = owned.len_kv - rows.last * T::TILE_N;
  if (keys >= T::TILE_N) return;
  const RingPlace<T::STAGES> place{rows.last > rows.first ? 2 : 1, 0};  // behind K of it, and of the next where there is one
  SharedLayout<T>::V::ring().await_full(place);
  clear_values<T>(SharedLayout<T>::V::at(place.slot), keys, T::TILE_N - keys);
}

// Clears V's rows before the first key that any row sees, of the block that has it, which is the next in the ring: freed boxes are not loaded
// at all.
template <class T>
DEVICE void clear_before_first(const Owned<T>& owned, const GroupRows<T>& rows, const RingPlace<T::STAGES>& next) {
  const int keys = owned.first_key() - rows.first * T::TILE_N;
  if (keys <= 0) return;
  SharedLayout<T>::V::ring().await_full(next);
  clear_values<T>(SharedLayout<T>::V::at(next.slot), 0, min(keys, T::TILE_N));
}

template <class T>
using LoaderOf = typename Choice<T::GATHERS, GatherLoader<T>, BoxLoader<T>>::Type;

}  // namespace multiattn
