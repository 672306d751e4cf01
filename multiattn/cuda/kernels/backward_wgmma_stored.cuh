// The gradient of q from dS that the kernel of k and v has stored, for sm90: dQ = dS K, one product.
//
// A block owns 128 queries of a query head, 64 a warpgroup, and walks over the keys that they see, 64 at a time. A third
// warpgroup loads K, and dS^T as it lies in memory. Two blocks of a cluster have tiles next to one another: each loads half of
// K, for both.
#pragma once
#include "backward_wgmma_two_pass_queries.cuh"

namespace multiattn {

struct StoredQueriesConfig {
  int stages;   // blocks of keys in shared memory, with their dS^T
  int cluster;  // blocks that share K
};

template <class Element, Features F, StoredQueriesConfig C, class Score, class Blocked>
struct StoredQueriesTraits : Walks<Element, F, WgmmaBackwardParams, Score, Blocked>, PassSizes {
  static constexpr int STAGES = C.stages, CLUSTER = C.cluster;
  static constexpr int KEY_STEPS = TILE_N / 16;  // of a wgmma

  using TileK = PanelTile<TILE_N, F.head_dim>;
  using TileDS = PanelTile<TILE_N, TILE_M>;  // of dS^T: rows are keys
  static constexpr int TILES = 2;            // of queries that are known

  // Shared memory: stages of K, of dS^T of both warpgroups, then barriers and what tiles of queries are.
  static constexpr int DS_AT = STAGES * TileK::BYTES, DS_BYTES = WARPGROUPS * TileDS::BYTES;
  static constexpr int BARRIERS_AT = DS_AT + STAGES * DS_BYTES;
  static constexpr int SMEM_BYTES = BARRIERS_AT + 512;

  static_assert(IS_STORED<Blocked> && TileDS::BYTES == DS_IMAGE_BYTES, "dS^T as it is stored");
  static_assert(F.head_dim % 8 == 0 && F.head_dim <= 256, "head_dim: multiples of 8 up to 256");
  static_assert(STAGES >= 2 && STAGES <= 8, "stages: 2 to 8");
  static_assert(CLUSTER == 1 || F.band == Band::FULL, "cluster: its tiles see the same keys");
};

template <class T>
struct StoredQueriesShared {
  using Steps = Ring<T::STAGES, T::CLUSTER>;
  using Tiles = Ring<T::TILES>;
  static DEVICE SharedAddress k(int slot) { return shared_base() + slot * T::TileK::BYTES; }
  static DEVICE SharedAddress ds(int slot) { return shared_base() + T::DS_AT + slot * T::DS_BYTES; }
  static DEVICE Steps ring() { return {shared_base() + T::BARRIERS_AT}; }
  static DEVICE Tiles ring_tiles() { return {ring().barriers + Steps::BYTES}; }
  static DEVICE SharedAddress tile_place(int slot) {
    return shared_base() + T::SMEM_BYTES - (1 + slot) * QueryTile<T>::BYTES;
  }

  static DEVICE void init() {
    ring().init(T::WARPGROUPS * T::GROUP_WARPS);
    ring_tiles().init(T::WARPGROUPS * T::GROUP_WARPS);
    fence_mbarrier_init();
  }
};

// Blocks of K and dS of tile after tile.
template <class T>
class StoredQueriesProducer {
  using Shared = StoredQueriesShared<T>;

 public:
  DEVICE explicit StoredQueriesProducer(const typename T::Params& params) : params_(params) {}

  DEVICE void run() {
    admit_next_grid();
    await_earlier_grids();  // dS and the counter are touched only after this
    const int earlier = heads_of_launch<T>(params_).first * params_.backward.group * params_.backward.tiles_q_own;
    QueryTile<T> tile = query_tile<T>(params_, static_cast<int>(block_index()));
    int index = static_cast<int>(block_index());
    for (begin(tile); tile.blocks != NO_TILE; begin(tile)) {
      load(tile);
      if constexpr (T::CLUSTER > 1)
        index += static_cast<int>(block_count());  // its blocks take their tiles together
      else
        index = static_cast<int>(block_count()) + atomic_add_global(params_.next_tile + 1, 1) - earlier;
      tile = query_tile<T>(params_, index);
    }
    // Shared memory must be there for the other block until it has released every slot.
    for (int slot = 0; T::CLUSTER > 1 && slot < T::STAGES; ++slot, step_.advance()) Shared::ring().await_empty(step_);
  }

 private:
  DEVICE void begin(const QueryTile<T>& tile) {
    Shared::ring_tiles().await_empty(tile_);
    store_tile<T>(Shared::tile_place(tile_.slot), tile);
    mbarrier_arrive(Shared::ring_tiles().full(tile_.slot));
    tile_.advance();
  }

  DEVICE void load(const QueryTile<T>& tile) {
    const Blocks blocks = key_blocks<T>(params_, tile, tile.first_query, T::BLOCK_ROWS);
    const int head_kv = tile.head % params_.backward.heads_q / params_.backward.group;
    for (int block = blocks.begin; block < blocks.end; ++block) {
      Shared::ring().await_empty(step_);
      const SharedAddress barrier = Shared::ring().full(step_.slot);
      load_k(barrier, block * T::TILE_N, head_kv, tile);
      // A tile that only makes a cluster whole has no dS: that of the last one is loaded, and not used.
      const int queries = min(tile.first_query, (params_.backward.tiles_q_own - 1) * T::BLOCK_ROWS);
      bulk_load(Shared::ds(step_.slot), ds_image<T>(params_, tile.head, block, queries / T::TILE_M), T::DS_BYTES, barrier);
      step_.advance();
    }
  }

  // Each block of a cluster loads some panels, for both.
  DEVICE void load_k(SharedAddress barrier, int first_key, int head_kv, const QueryTile<T>& tile) const {
    using TileK = typename T::TileK;
    const SharedAddress target = Shared::k(step_.slot);
    if constexpr (T::CLUSTER == 1) {
      load_boxes<TileK>(target, params_.map_k, barrier, first_key, head_kv, keys_of(tile), T::DS_BYTES);
    } else {
      mbarrier_arrive_expect(barrier, TileK::BYTES + T::DS_BYTES);
#pragma unroll 1
      for (int panel = cluster_rank(); panel < TileK::PANELS; panel += T::CLUSTER)
        tma_load_to_all<T::CLUSTER>(target + panel * TileK::PANEL_BYTES, params_.map_k, barrier,
                                    panel * TileK::PANEL_COLUMNS, first_key, head_kv, tile.number);
    }
  }

  const typename T::Params& params_;
  RingPlace<T::TILES> tile_;
  RingPlace<T::STAGES> step_;
};

// A warpgroup of queries.
template <class T, int GROUP>
class StoredQueryWarpgroup {
  using E = typename T::Element;
  using Shared = StoredQueriesShared<T>;
  using TileK = typename T::TileK;
  using TileDS = typename T::TileDS;

 public:
  DEVICE explicit StoredQueryWarpgroup(const typename T::Params& params) : params_(params) {}

  // Tile after tile.
  DEVICE void run() {
    for (begin(); tile_.blocks != NO_TILE; begin()) {
      const Blocks loaded = key_blocks<T>(params_, tile_, tile_.first_query, T::BLOCK_ROWS);
      Blocks own = key_blocks<T>(params_, tile_, first_query(), T::TILE_M);
      if (first_query() >= count_queries(params_.backward, tile_.sequence) || own.begin >= own.end)
        own.begin = own.end = loaded.end;
#pragma unroll
      for (float& element : dq_) element = 0.0f;
      skip(own.begin - loaded.begin);
      walk(own.end - own.begin);
      skip(loaded.end - own.end);
      write_dq<T>(params_, tile_, first_query(), dq_);
    }
  }

 private:
  DEVICE void begin() {
    Shared::ring_tiles().await_full(place_);
    tile_ = load_tile<T>(Shared::tile_place(place_.slot));
    Shared::ring_tiles().release_apart(place_.slot);
    place_.advance();
  }

  // Blocks of keys that only the other warpgroup sees: their dS of this one's queries was never stored.
  DEVICE void skip(int steps) {
    for (; steps > 0; --steps) {
      Shared::ring().await_full(step_);
      Shared::ring().release_apart(step_.slot);
      step_.advance();
    }
  }

  DEVICE void walk(int steps) {
    if (steps == 0) return;
    add_dq();
    for (int left = steps - 1; left > 0; --left) {
      const int before = step_.slot;
      step_.advance();
      add_dq();
      wgmma_wait<1>();
      Shared::ring().release(before);
    }
    wgmma_wait<0>();
    Shared::ring().release_apart(step_.slot);
    step_.advance();
  }

  // dQ[64, D] += dS K of a step, left under way.
  DEVICE void add_dq() {
    Shared::ring().await_full(step_);
    const Descriptor ds(Shared::ds(step_.slot) + GROUP * TileDS::BYTES, TileDS::PANEL_BYTES);
    const Descriptor k(Shared::k(step_.slot), TileK::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::KEY_STEPS; ++i)
      wgmma_ss_mn<E, T::HEAD_DIM>(dq_, ds.at(i * 16 * TileDS::ROW_BYTES), k.at(i * 16 * TileK::ROW_BYTES), true);
    wgmma_commit();
  }

  DEVICE int first_query() const { return tile_.first_query + GROUP * T::TILE_M; }

  const typename T::Params& params_;
  QueryTile<T> tile_;
  RingPlace<T::TILES> place_;
  RingPlace<T::STAGES> step_;
  float dq_[T::HEAD_DIM / 2];  // [64, HEAD_DIM]
};

template <class T>
DEVICE void backward_wgmma_stored(const typename T::Params& params) {
  run_pass<T, StoredQueriesShared<T>, StoredQueryWarpgroup<T, 0>, StoredQueryWarpgroup<T, 1>, StoredQueriesProducer<T>>(params);
}

}  // namespace multiattn
