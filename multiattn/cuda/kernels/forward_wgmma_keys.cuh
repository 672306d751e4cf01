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

// Loads a cache's keys: one warp loads boxes by TMA. A lane has one box of every tile. A box whose keys are all beyond the last, or freed, is not
// loaded: its entry of the table may name anything.
template <class T>
class BoxLoader : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  using Shared = SharedLayout<T>;
  static constexpr int BOXES_OF_PANEL = T::TILE_N / T::BOX_ROWS;

 public:
  DEVICE BoxLoader(const typename T::Params& params, const Owned<T>& owned)
      : Freed(owned), params_(params), owned_(owned) {}

  // The page of the lane's box.
  DEVICE int look_up(int block) const {
    const int key = block * T::TILE_N + row_of_tile();
    if (!T::IS_PAGED || key >= owned_.len_kv || is_freed_box(key)) return 0;
    return owned_.page_of(key);
  }
  DEVICE void load_k(int block, int page) { load<typename Shared::K>(params_.map_k, block, page); }
  DEVICE void load_v(int block, int page) { load<typename Shared::V>(params_.map_v, block, page); }
  DEVICE void finish() {}

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int row_of_tile() { return lane() % BOXES_OF_PANEL * T::BOX_ROWS; }
  // True if a box is freed, by its first key.
  DEVICE bool is_freed_box(int key) const { return Freed::is_freed(key + T::BOX_ROWS - 1); }

  template <class Slots>
  DEVICE void load(const TensorMap& map, int block, int page) {
    using Tile = typename Slots::Tile;
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
               ring.full(place_.slot), panel * Tile::PANEL_COLUMNS, row, owned_.head_kv, entry);
    }
    sync_warp();
    place_.advance();
  }

  const typename T::Params& params_;
  const Owned<T>& owned_;
  RingPlace<T::STAGES> place_;
};

// Four warps gather keys one by one with cp.async, so that pages have any size. A warp has a share of the keys of each tile, and
// a lane knows where one of them is. Eight lanes copy 128 bytes of a key at a time. Copies land late, so a tile is told of as
// full when LAG younger ones are on their way.
template <class T>
class GatherLoader : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  using Shared = SharedLayout<T>;
  using Panel = typename T::TileK::Panel;
  static constexpr int KEYS = T::TILE_N / T::LOADING_WARPS;  // of a warp
  static constexpr int CHUNKS = 8, KEYS_OF_PASS = WARP / CHUNKS;
  // Two tiles are used together, K of a block and V of the one after it, and must both be told of: no more than STAGES - 2. Half
  // of that leaves as many to a warpgroup that is behind.
  static constexpr int LAG = (T::STAGES - 2) / 2;

 public:
  DEVICE GatherLoader(const typename T::Params& params, const Owned<T>& owned)
      : Freed(owned), params_(params.forward), owned_(owned) {}

  // The page of the lane's key.
  DEVICE int look_up(int block) const {
    const int key = first_key(block) + lane() % KEYS;
    if (!T::IS_PAGED || key >= owned_.len_kv || Freed::is_freed(key)) return 0;
    return owned_.page_of(key);
  }
  DEVICE void load_k(int block, int page) { load<typename Shared::K, T::HEAD_DIM>(params_.k, params_.strides_k, block, page); }
  DEVICE void load_v(int block, int page) { load<typename Shared::V, T::HEAD_DIM_V>(params_.v, params_.strides_v, block, page); }
  DEVICE void finish() {
    while (loaded_-- > 0) tell<0>();
  }

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int first_row() { return thread_index() % WARPGROUP / WARP * KEYS; }
  static DEVICE int first_key(int block) { return block * T::TILE_N + first_row(); }

  // Keys beyond the last, or freed, and columns beyond COLUMNS become zeros.
  template <class Slots, int COLUMNS>
  DEVICE void load(const void* tensor, const Strides& strides, int block, int page) {
    using Panels = typename Slots::Tile;
    const int first = first_key(block), own = first + lane() % KEYS, chunk = lane() % CHUNKS;
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
      for (int panel = 0; panel < Panels::PANELS; ++panel) {
        const bool is_key = first + key < owned_.len_kv && !Freed::is_freed(first + key);
        const bool valid = is_key && panel * CHUNKS + chunk < COLUMNS / CHUNK_ELEMENTS;
        cp_async_16(Panel::chunk(tile + panel * Panels::PANEL_BYTES, first_row() + key, chunk),
                    source + panel * Panels::PANEL_COLUMNS, valid);
      }
    }
    cp_async_commit();
    place_.advance();
    if (loaded_ < LAG) ++loaded_;
    else tell<LAG>();
  }

  // The oldest tile that was not told of is full: at most LEFT younger ones may be on their way.
  template <int LEFT>
  DEVICE void tell() {
    cp_async_wait<LEFT>();
    fence_async_shared();
    sync_warp();  // all lanes' copies are there, for wgmma too
    if (lane() == 0) mbarrier_arrive(Shared::K::ring().full(told_.slot));
    sync_warp();
    told_.advance();
  }

  const SplitParams& params_;
  const Owned<T>& owned_;
  RingPlace<T::STAGES> place_, told_;
  int loaded_ = 0;  // tiles that were not told of
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
