// Tiles of K and V on their way from a cache to a team's ring, with cp.async.
#pragma once
#include "grids.cuh"
#include "split_keys_traits.cuh"

namespace multiattn {

// Threads of a team that see what each of them has loaded, and are done with what is overwritten next.
template <class T>
DEVICE void sync_team() {
  if constexpr (T::TEAM_WARPS == 1) sync_warp();
  else if constexpr (T::TEAMS == 1) sync_block();
  else named_barrier_sync(1 + T::team(), T::TEAM_THREADS);
}

// The scales of a cache's tokens, of one head: where they are. A base class: without any it has no place in memory.
template <class T, bool = T::HAS_TOKEN_SCALES>
struct TokenScales {
  DEVICE TokenScales(const typename T::Params&, int) {}
};
template <class T>
struct TokenScales<T, true> {
  const CacheScales& scales;
  const float *k, *v;

  DEVICE TokenScales(const typename T::Params& params, int head_kv)
      : scales(params.lists), k(scales.k_scale + head_kv * scales.strides_k_scale.head),
        v(scales.v_scale + head_kv * scales.strides_v_scale.head) {}

  // Begins to load those of a row of an entry into a slot, or zeros.
  DEVICE void load(SharedAddress slot, int row_of_tile, int64 entry, int64 row, bool is_there) const {
    const auto at = [&](const Strides& strides) { return entry * strides.batch + row * strides.seq; };
    const SharedAddress target = slot + row_of_tile * 4;
    if constexpr (T::STORED.k_per_token) cp_async_4(target + T::K_SCALES_AT, k + at(scales.strides_k_scale), is_there);
    if constexpr (T::STORED.v_per_token) cp_async_4(target + T::V_SCALES_AT, v + at(scales.strides_v_scale), is_there);
  }
};

// The keys of a sequence and head. A tile goes into slot `step % STAGES` of the team's ring. The pages of a tile are looked up
// before its turn: nobody waits for the table. SPAN threads share a row, which may be in a page of its own.
template <class T>
class KeyStream : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>, TokenScales<T> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  using Number = typename T::Number;
  static constexpr int SPAN_K = T::TileK::Layout::SPAN, SPAN_V = T::TileV::Layout::SPAN;
  static constexpr int SPAN = SPAN_K < SPAN_V ? SPAN_K : SPAN_V;  // a row of either is a multiple
  static constexpr int ROWS_PER_PASS = T::TEAM_THREADS / SPAN;
  static constexpr int PASSES = (T::TILE_N + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
  static constexpr int LOOKUPS = T::PAGING == Paging::ANY ? PASSES : 1;
  static constexpr int SCALE_PASSES = T::HAS_TOKEN_SCALES ? (T::TILE_N + T::TEAM_THREADS - 1) / T::TEAM_THREADS : 0;
  static constexpr int SCALE_LOOKUPS = T::PAGING == Paging::ANY ? SCALE_PASSES : 0;

 public:
  DEVICE KeyStream(const typename T::Params& params, const Owned<T>& owned, SharedAddress ring)
      : Freed(owned), TokenScales<T>(params, owned.head_kv), params_(owned.params), ring_(ring), len_(owned.len_kv), sequence_(owned.sequence),
        k_(static_cast<const Number*>(params_.k) + owned.head_kv * params_.strides_k.head),
        v_(static_cast<const Number*>(params_.v) + owned.head_kv * params_.strides_v.head) {}

  DEVICE SharedAddress k(int step) const { return ring_ + step % T::STAGES * T::SLOT; }

  // The pages of the thread's rows of a tile, or of all of them; then those of the keys whose scales it loads.
  struct Pages {
    int32 number[LOOKUPS + SCALE_LOOKUPS];
  };

  // Keys beyond the last, or freed, have no page: their entries may name anything.
  DEVICE Pages look_up(int tile) const {
    Pages pages{};
    if constexpr (T::IS_PAGED) {
      const int32* table = params_.page_table + static_cast<int64>(sequence_) * params_.table_stride;
#pragma unroll
      for (int i = 0; i < LOOKUPS; ++i) {
        const int key = tile * T::TILE_N + (T::PAGING == Paging::ANY ? first_row() + i * ROWS_PER_PASS : 0);
        const bool has_page = key < len_ && (T::PAGING != Paging::ANY || !Freed::is_freed(key));
        pages.number[i] = has_page ? load_global_4(table + PlaceOfKey::of(params_, key).entry) : 0;
      }
#pragma unroll
      for (int i = 0; i < SCALE_LOOKUPS; ++i) {
        const int row = row_of_scale(i), key = tile * T::TILE_N + row;
        const bool has_page = row < T::TILE_N && key < len_ && !Freed::is_freed(key);
        pages.number[LOOKUPS + i] = has_page ? load_global_4(table + PlaceOfKey::of(params_, key).entry) : 0;
      }
    }
    return pages;
  }

  // Begins to load a tile. Keys beyond the last, or freed, become zeros, and are not read.
  DEVICE void load(int tile, int step, const Pages& pages) const {
    const SharedAddress target = k(step);
    const int first_key = tile * T::TILE_N;
    Sources rows = sources(first_key, pages.number[0]);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int row = first_row() + pass * ROWS_PER_PASS, key = first_key + row;
      if (T::TILE_N % ROWS_PER_PASS != 0 && row >= T::TILE_N) break;
      if constexpr (T::PAGING == Paging::ANY) rows = sources(key, pages.number[pass]);
#pragma unroll
      for (int column = 0; column < CHUNKS; column += SPAN) {
        const bool is_there = key < len_ && !Freed::is_freed(key);
        copy<typename T::TileK, 0>(target, row, column, rows.k, is_there);
        if constexpr (!T::V_IN_K) copy<typename T::TileV, T::V_AT>(target, row, column, rows.v, is_there);
      }
      rows.k += ROWS_PER_PASS * params_.strides_k.seq;
      rows.v += ROWS_PER_PASS * params_.strides_v.seq;
    }
    if constexpr (T::HAS_TOKEN_SCALES) {
#pragma unroll
      for (int i = 0; i < SCALE_PASSES; ++i) {
        const int row = row_of_scale(i), key = first_key + row;
        if (T::TILE_N % T::TEAM_THREADS != 0 && row >= T::TILE_N) break;
        const int entry = T::IS_PAGED ? pages.number[SCALE_LOOKUPS ? LOOKUPS + i : 0] : sequence_;
        TokenScales<T>::load(target, row, entry, T::IS_PAGED ? PlaceOfKey::of(params_, key).row : key,
                             key < len_ && !Freed::is_freed(key));
      }
    }
  }

 private:
  static constexpr int CHUNK_NUMBERS = CHUNK_BYTES / sizeof(Number);
  static constexpr int CHUNKS = T::TileK::CHUNKS > T::TileV::CHUNKS ? T::TileK::CHUNKS : T::TileV::CHUNKS;

  // The thread's chunk from a column of a row on, if the tile has it, which lies so many bytes behind the slot's start.
  template <class Tile, int BYTES_BEFORE>
  DEVICE void copy(SharedAddress slot, int row, int column, const Number* source, bool is_there) const {
    const int chunk = column + first_chunk();
    if (column < Tile::CHUNKS)
      copy_chunk<T::ALIGNED>(Tile::chunk(slot, row, chunk) + BYTES_BEFORE,
                             reinterpret_cast<const uint16*>(source + column * CHUNK_NUMBERS),
                             is_there && chunk < Tile::VALID_CHUNKS);
  }

  // Where a thread reads: its first chunk of a row of K, and of V.
  struct Sources {
    const Number *k, *v;
  };

  static DEVICE int first_row() { return thread_index() % T::TEAM_THREADS / SPAN; }
  static DEVICE int first_chunk() { return thread_index() % SPAN; }
  // The key of a tile whose scales the thread loads.
  static DEVICE int row_of_scale(int pass) { return thread_index() % T::TEAM_THREADS + pass * T::TEAM_THREADS; }

  // The sources of a key in a page; where no tile crosses pages, of the thread's first row of the tile from `key` on.
  DEVICE Sources sources(int key, int32 page) const {
    int64 entry = page, row = key;
    if constexpr (!T::IS_PAGED) entry = sequence_;
    else row = PlaceOfKey::of(params_, key).row;
    if constexpr (T::PAGING != Paging::ANY) row += first_row();
    return {k_ + entry * params_.strides_k.batch + row * params_.strides_k.seq + first_chunk() * CHUNK_NUMBERS,
            v_ + entry * params_.strides_v.batch + row * params_.strides_v.seq + first_chunk() * CHUNK_NUMBERS};
  }

  const SplitParams& params_;
  SharedAddress ring_;
  int len_, sequence_;
  const Number *k_, *v_;
};

}  // namespace multiattn
