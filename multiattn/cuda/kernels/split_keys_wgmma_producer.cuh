// One warp that loads: it keeps a ring full of tiles of K and V from a cache, by TMA.
#pragma once
#include "split_keys_wgmma_traits.cuh"

namespace multiattn {

// The blocks of keys from the last to the first, in the order in which they are used: K of a block before V of the block after
// it. A lane has one box of every tile. It looks up the page of that box three blocks ahead, so that nobody waits for the table.
// A box whose keys are all beyond the last is not loaded: its entry of the table may name anything.
template <class T>
DEVICE void produce(const typename T::KernelParams& params, const Owned<T>& owned, const Blocks& blocks) {
  using Shared = SplitShared<T>;
  using TileKV = typename T::TileKV;
  const auto ring = Shared::ring_kv();
  const int lane = thread_index() % WARP, panel = lane / T::BOXES_OF_PANEL;
  const int row_of_tile = lane % T::BOXES_OF_PANEL * T::BOX_ROWS;
  const int32* table = params.split.page_table + static_cast<int64>(owned.sequence) * params.split.table_stride;

  const auto look_up = [&](int block) {
    const int key = block * T::TILE_N + row_of_tile;
    if (!T::IS_PAGED || block < blocks.begin || key >= owned.len_kv) return 0;
    return static_cast<int>(load_global_4(table + key / params.split.page));
  };

  RingPlace<T::STAGES> place;
  const auto load = [&](const TensorMap& map, int block, int page) {
    const int first_key = block * T::TILE_N, key = first_key + row_of_tile;
    const int boxes = min((owned.len_kv - first_key - 1) / T::BOX_ROWS + 1, T::BOXES_OF_PANEL) * TileKV::PANELS;
    ring.await_empty(place);
    if (lane == 0) mbarrier_arrive_expect(ring.full(place.slot), boxes * T::BOX_BYTES);
    sync_warp();  // the phase expects its bytes before they come
    if (panel < TileKV::PANELS && key < owned.len_kv) {
      const int entry = T::IS_PAGED ? page : owned.sequence, row = T::IS_PAGED ? key % params.split.page : key;
      tma_load(Shared::kv(place.slot) + panel * TileKV::PANEL_BYTES + row_of_tile * TileKV::ROW_BYTES, map,
               ring.full(place.slot), panel * TileKV::PANEL_COLUMNS, row, owned.head_kv, entry);
    }
    sync_warp();
    place.advance();
  };

  const int last = blocks.end - 1;
  if (last < blocks.begin) return;
  int page = look_up(last), next = look_up(last - 1), after_next = look_up(last - 2);
  load(params.map_k, last, page);
#pragma unroll 1  // a producer has few registers
  for (int block = last; block > blocks.begin; --block) {
    load(params.map_k, block - 1, next);
    load(params.map_v, block, page);
    page = next;
    next = after_next;
    after_next = look_up(block - 3);
  }
  load(params.map_v, blocks.begin, page);
}

}  // namespace multiattn
