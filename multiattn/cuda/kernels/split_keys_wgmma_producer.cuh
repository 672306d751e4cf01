// The warps that load: they keep a ring full of tiles of K and V from a cache.
#pragma once
#include "split_keys_wgmma_traits.cuh"

namespace multiattn {

// One warp loads boxes by TMA. A lane has one box of every tile. A box whose keys are all beyond the last, or freed, is not
// loaded: its entry of the table may name anything.
template <class T>
class BoxLoader : FreedKeys<T::FREES> {
  using Freed = FreedKeys<T::FREES>;
  using Shared = SplitShared<T>;
  using TileKV = typename T::TileKV;

 public:
  DEVICE BoxLoader(const typename T::KernelParams& params, const Owned<T>& owned)
      : Freed(owned), params_(params), owned_(owned) {}

  // The page of the lane's box.
  DEVICE int look_up(int block) const {
    const int key = block * T::TILE_N + row_of_tile();
    if (!T::IS_PAGED || key >= owned_.len_kv || is_freed_box(key)) return 0;
    const int32* table = params_.split.page_table + static_cast<int64>(owned_.sequence) * params_.split.table_stride;
    return static_cast<int>(load_global_4(table + PlaceOfKey::of(params_.split, key).entry));
  }
  DEVICE void load_k(int block, int page) { load(params_.map_k, block, page); }
  DEVICE void load_v(int block, int page) { load(params_.map_v, block, page); }
  DEVICE void finish() {}

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int row_of_tile() { return lane() % T::BOXES_OF_PANEL * T::BOX_ROWS; }
  // Of a box by its first key.
  DEVICE bool is_freed_box(int key) const { return Freed::is_freed(key + T::BOX_ROWS - 1); }

  DEVICE void load(const TensorMap& map, int block, int page) {
    const auto ring = Shared::ring_kv();
    const int first_key = block * T::TILE_N, key = first_key + row_of_tile(), panel = lane() / T::BOXES_OF_PANEL;
    const int end = min((owned_.len_kv - first_key - 1) / T::BOX_ROWS + 1, T::BOXES_OF_PANEL);
    const int boxes = (end - Freed::before(first_key) / T::BOX_ROWS) * TileKV::PANELS;
    ring.await_empty(place_);
    if (lane() == 0) mbarrier_arrive_expect(ring.full(place_.slot), boxes * T::BOX_BYTES);
    sync_warp();  // the phase expects its bytes before they come
    if (panel < TileKV::PANELS && key < owned_.len_kv && !is_freed_box(key)) {
      const int entry = T::IS_PAGED ? page : owned_.sequence, row = T::IS_PAGED ? PlaceOfKey::of(params_.split, key).row : key;
      tma_load(Shared::kv(place_.slot) + panel * TileKV::PANEL_BYTES + row_of_tile() * TileKV::ROW_BYTES, map,
               ring.full(place_.slot), panel * TileKV::PANEL_COLUMNS, row, owned_.head_kv, entry);
    }
    sync_warp();
    place_.advance();
  }

  const typename T::KernelParams& params_;
  const Owned<T>& owned_;
  RingPlace<T::STAGES> place_;
};

// Four warps gather keys one by one with cp.async, so that pages have any size. A warp has a share of the keys of each tile, and
// a lane knows where one of them is. Eight lanes copy 128 bytes of a key at a time. Copies land late, so a tile is told of as
// full when LAG younger ones are on their way.
template <class T>
class GatherLoader : FreedKeys<T::FREES> {
  using Freed = FreedKeys<T::FREES>;
  using Shared = SplitShared<T>;
  using TileKV = typename T::TileKV;
  using Panel = Tile<TileKV::ROWS, TileKV::PANEL_COLUMNS>;
  static constexpr int KEYS = T::TILE_N / T::LOADING_WARPS;  // of a warp
  static constexpr int CHUNKS = 8, KEYS_OF_PASS = WARP / CHUNKS;
  // Two tiles are used together, K of a block and V of the one after it, and must both be told of: no more than STAGES - 2. Half
  // of that leaves as many to a warpgroup that is behind.
  static constexpr int LAG = (T::STAGES - 2) / 2;

 public:
  DEVICE GatherLoader(const typename T::KernelParams& params, const Owned<T>& owned)
      : Freed(owned), params_(params.split), owned_(owned) {}

  // The page of the lane's key.
  DEVICE int look_up(int block) const {
    const int key = first_key(block) + lane() % KEYS;
    if (!T::IS_PAGED || key >= owned_.len_kv || Freed::is_freed(key)) return 0;
    const int32* table = params_.page_table + static_cast<int64>(owned_.sequence) * params_.table_stride;
    return static_cast<int>(load_global_4(table + PlaceOfKey::of(params_, key).entry));
  }
  DEVICE void load_k(int block, int page) { load(params_.k, params_.strides_k, block, page); }
  DEVICE void load_v(int block, int page) { load(params_.v, params_.strides_v, block, page); }
  DEVICE void finish() {
    while (loaded_-- > 0) tell<0>();
  }

 private:
  static DEVICE int lane() { return thread_index() % WARP; }
  static DEVICE int first_row() { return thread_index() % WARPGROUP / WARP * KEYS; }
  static DEVICE int first_key(int block) { return block * T::TILE_N + first_row(); }

  // Keys beyond the last, or freed, and columns beyond head_dim become zeros.
  DEVICE void load(const void* tensor, const Strides& strides, int block, int page) {
    const int first = first_key(block), own = first + lane() % KEYS, chunk = lane() % CHUNKS;
    const int64 entry = T::IS_PAGED ? page : owned_.sequence, row = T::IS_PAGED ? PlaceOfKey::of(params_, own).row : own;
    const uint64 offset = static_cast<uint64>(entry * strides.batch + row * strides.seq);  // of the lane's key
    const uint16* head = static_cast<const uint16*>(tensor) + owned_.head_kv * strides.head + chunk * CHUNK_ELEMENTS;
    const SharedAddress tile = Shared::kv(place_.slot);
    Shared::ring_kv().await_empty(place_);
    sync_warp();
#pragma unroll
    for (int pass = 0; pass < KEYS / KEYS_OF_PASS; ++pass) {
      const int key = pass * KEYS_OF_PASS + lane() / CHUNKS;  // of the warp's
      const uint64 low = shuffle(static_cast<uint32>(offset), key), high = shuffle(static_cast<uint32>(offset >> 32), key);
      const uint16* source = head + static_cast<int64>(high << 32 | low);
#pragma unroll
      for (int panel = 0; panel < TileKV::PANELS; ++panel) {
        const bool is_key = first + key < owned_.len_kv && !Freed::is_freed(first + key);
        const bool valid = is_key && panel * CHUNKS + chunk < T::HEAD_DIM / CHUNK_ELEMENTS;
        cp_async_16(Panel::chunk(tile + panel * TileKV::PANEL_BYTES, first_row() + key, chunk),
                    source + panel * TileKV::PANEL_COLUMNS, valid);
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
    if (lane() == 0) mbarrier_arrive(Shared::ring_kv().full(told_.slot));
    sync_warp();
    told_.advance();
  }

  const SplitParams& params_;
  const Owned<T>& owned_;
  RingPlace<T::STAGES> place_, told_;
  int loaded_ = 0;  // tiles that were not told of
};

template <class T, bool GATHERS = T::GATHERS>
struct LoaderOf {
  using Type = BoxLoader<T>;
};
template <class T>
struct LoaderOf<T, true> {
  using Type = GatherLoader<T>;
};

// The blocks of keys from the last to the first, in the order in which they are used: K of a block before V of the block after
// it. Pages are looked up three blocks ahead, so that nobody waits for the table.
template <class T>
DEVICE void produce(const typename T::KernelParams& params, const Owned<T>& owned, const Blocks& blocks) {
  const int last = blocks.end - 1;
  if (last < blocks.begin) return;
  typename LoaderOf<T>::Type loader(params, owned);
  const auto look_up = [&](int block) { return block < blocks.begin ? 0 : loader.look_up(block); };
  int page = look_up(last), next = look_up(last - 1), after_next = look_up(last - 2);
  loader.load_k(last, page);
#pragma unroll 1  // a producer has few registers
  for (int block = last; block > blocks.begin; --block) {
    loader.load_k(block - 1, next);
    loader.load_v(block, page);
    page = next;
    next = after_next;
    after_next = look_up(block - 3);
  }
  loader.load_v(blocks.begin, page);
  loader.finish();
}

}  // namespace multiattn
