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

// The keys of a sequence and head. A tile goes into slot `step % STAGES` of the team's ring. The pages of a tile are looked up
// before its turn: nobody waits for the table. SPAN threads share a row, which may be in a page of its own.
template <class T>
class KeyStream : FreedKeys<FREES_KEYS<T::BAND, T::PAGING>> {
  using Freed = FreedKeys<FREES_KEYS<T::BAND, T::PAGING>>;
  static constexpr int SPAN_K = T::TileK::Layout::SPAN, SPAN_V = T::TileV::Layout::SPAN;
  static constexpr int SPAN = SPAN_K < SPAN_V ? SPAN_K : SPAN_V;  // a row of either is a multiple
  static constexpr int ROWS_PER_PASS = T::TEAM_THREADS / SPAN;
  static constexpr int PASSES = (T::TILE_N + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
  static constexpr int LOOKUPS = T::PAGING == Paging::ANY ? PASSES : 1;

 public:
  DEVICE KeyStream(const Owned<T>& owned, SharedAddress ring)
      : Freed(owned), params_(owned.params), ring_(ring), len_(owned.len_kv), sequence_(owned.sequence),
        k_(static_cast<const uint16*>(params_.k) + owned.head_kv * params_.strides_k.head),
        v_(static_cast<const uint16*>(params_.v) + owned.head_kv * params_.strides_v.head) {}

  DEVICE SharedAddress k(int step) const { return ring_ + step % T::STAGES * T::SLOT; }

  // The pages of the thread's rows of a tile, or of all of them.
  struct Pages {
    int32 number[LOOKUPS];
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
  }

 private:
  static constexpr int CHUNKS = T::TileK::CHUNKS > T::TileV::CHUNKS ? T::TileK::CHUNKS : T::TileV::CHUNKS;

  // The thread's chunk from a column of a row on, if the tile has it, which lies so many bytes behind the slot's start.
  template <class Tile, int BYTES_BEFORE>
  DEVICE void copy(SharedAddress slot, int row, int column, const uint16* source, bool is_there) const {
    const int chunk = column + first_chunk();
    if (column < Tile::CHUNKS)
      copy_chunk<T::ALIGNED>(Tile::chunk(slot, row, chunk) + BYTES_BEFORE, source + column * CHUNK_ELEMENTS,
                             is_there && chunk < Tile::VALID_CHUNKS);
  }

  // Where a thread reads: its first chunk of a row of K, and of V.
  struct Sources {
    const uint16 *k, *v;
  };

  static DEVICE int first_row() { return thread_index() % T::TEAM_THREADS / SPAN; }
  static DEVICE int first_chunk() { return thread_index() % SPAN; }

  // The sources of a key in a page; where no tile crosses pages, of the thread's first row of the tile from `key` on.
  DEVICE Sources sources(int key, int32 page) const {
    int64 entry = page, row = key;
    if constexpr (!T::IS_PAGED) entry = sequence_;
    else row = PlaceOfKey::of(params_, key).row;
    if constexpr (T::PAGING != Paging::ANY) row += first_row();
    return {k_ + entry * params_.strides_k.batch + row * params_.strides_k.seq + first_chunk() * CHUNK_ELEMENTS,
            v_ + entry * params_.strides_v.batch + row * params_.strides_v.seq + first_chunk() * CHUNK_ELEMENTS};
  }

  const SplitParams& params_;
  SharedAddress ring_;
  int len_, sequence_;
  const uint16 *k_, *v_;
};

}  // namespace multiattn
