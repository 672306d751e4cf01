// A block's own rows and keys where rows are queries of all heads that share keys, and blocks may divide the keys: rows of a sequence, and a
// part of its keys, which may be in a cache.
#pragma once
#include "multiattn/eight_bit.cuh"
#include "multiattn/sequence.cuh"

namespace multiattn {

// Where keys of a sequence are: in an entry of its own, which may be a cache; in pages that a tile of keys never crosses; in any
// pages.
enum class Paging { NONE, ENTRIES, WHOLE_TILES, ANY };

// A cache with a window: what lies before the first key that a tile's rows see may be freed, and is not read.
template <Band BAND, Paging PAGING>
constexpr bool FREES_KEYS = BAND == Band::TWO_SIDED && PAGING != Paging::NONE;

// In the place of a block mask among a kernel's constants: its rows are those of all heads that share keys, and these come in boxes
// of so many that no page ends within, or one by one: BOX_ROWS is 0.
template <Paging PAGING, int BOX_ROWS, StoredCache STORED = StoredCache{}>
struct Grouped {};

template <class Blocked>
constexpr bool IS_GROUPED = false;
template <Paging PAGING, int BOX_ROWS, StoredCache STORED>
constexpr bool IS_GROUPED<Grouped<PAGING, BOX_ROWS, STORED>> = true;
template <class Blocked>
constexpr Paging PAGING_OF = Paging::NONE;
template <Paging PAGING, int BOX_ROWS, StoredCache STORED>
constexpr Paging PAGING_OF<Grouped<PAGING, BOX_ROWS, STORED>> = PAGING;
template <class Blocked>
constexpr int BOX_ROWS_OF = 0;
template <Paging PAGING, int BOX_ROWS, StoredCache STORED>
constexpr int BOX_ROWS_OF<Grouped<PAGING, BOX_ROWS, STORED>> = BOX_ROWS;
template <class Blocked>
constexpr StoredCache STORED_OF{};
template <Paging PAGING, int BOX_ROWS, StoredCache STORED>
constexpr StoredCache STORED_OF<Grouped<PAGING, BOX_ROWS, STORED>> = STORED;
template <Paging PAGING, int BOX_ROWS, StoredCache STORED>
struct ListsOf<Grouped<PAGING, BOX_ROWS, STORED>> {
  using Type = typename Choice<STORED.numbers == Numbers::OF_QUERIES, void, CacheScales>::Type;
};

// Rows of out and lse, of all heads.
DEVICE int64 rows_of(const SplitParams& params) {
  return static_cast<int64>(params.cu_seqlens_q ? 1 : params.sequences) * params.heads_q * params.seq_q;
}

// Where a key is: its entry of the page table, and its row of that page. Pages have any size, and a division some thirty
// instructions: a product does it, by Granlund, Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994).
struct PlaceOfKey {
  int entry, row;

  static DEVICE PlaceOfKey of(const SplitParams& params, int key) {
    const uint64 product = static_cast<uint64>(2 * static_cast<uint32>(key)) * params.page_multiplier;
    const int entry = static_cast<int>(static_cast<uint32>(product >> 32) >> params.page_shift);
    return {entry, key - entry * params.page};
  }
};

// A row of a block's tile: a query of a head.
struct Row {
  int query, head;
};

// A number taken apart by one after another of its factors, the fastest first.
struct Digits {
  uint32 rest;
  DEVICE int take(int32 factor) {
    const uint32 all = rest;
    rest = all / static_cast<uint32>(factor);
    return static_cast<int>(all - rest * static_cast<uint32>(factor));
  }
};

// The rows of a sequence and head of keys that a block owns, and its part of the keys.
template <class T>
struct Owned {
  const SplitParams& params;
  int split, first_row, head_kv, sequence;
  int offset_q = 0, len_q = 0, len_kv = 0;  // the sequence's queries in q, how many, its keys

  // Needs no memory: `find_lengths` does.
  static DEVICE Owned of(const SplitParams& params) {
    Digits place{static_cast<uint32>(block_index())};
    const int split = place.take(params.splits), tile = place.take(params.tiles), head_kv = place.take(params.heads_kv);
    return {params, split, (params.tiles - 1 - tile) * T::TILE_M, head_kv, static_cast<int>(place.rest)};
  }

  // Whatever a cache's tensors say, its rows are those that there are.
  DEVICE void find_lengths() {
    constexpr bool IS_CACHE = T::PAGING != Paging::NONE;
    len_kv = params.seqlens_kv ? load_global_4(params.seqlens_kv + sequence) : params.seq_kv;
    if constexpr (IS_CACHE) len_kv = max(min(len_kv, params.seq_kv), 0);
    len_q = params.seq_q;
    if (params.cu_seqlens_q) {
      offset_q = load_global_4(params.cu_seqlens_q + sequence);
      int end_q = load_global_4(params.cu_seqlens_q + sequence + 1);
      if constexpr (IS_CACHE) {
        offset_q = max(min(offset_q, params.seq_q), 0);
        end_q = max(min(end_q, params.seq_q), offset_q);
      }
      len_q = end_q - offset_q;
    }
  }

  DEVICE Row row(int of_tile) const {
    const int row = first_row + of_tile;
    return {row / params.group, head_kv * params.group + row % params.group};
  }
  // Packed queries are a batch of one.
  DEVICE int batch() const { return params.cu_seqlens_q ? 0 : sequence; }
  DEVICE int64 offset(const Strides& strides, const Row& row) const {
    return batch() * strides.batch + row.head * strides.head + (offset_q + row.query) * strides.seq;
  }
  // The place of a row in lse, and in a part of the workspace.
  DEVICE int64 place(const Row& row) const {
    return (static_cast<int64>(batch()) * params.heads_q + row.head) * params.seq_q + offset_q + row.query;
  }
  DEVICE Mask<T::BAND> mask() const { return Mask<T::BAND>(params, len_q, len_kv); }

  DEVICE int page_of(int key) const {
    const int32* table = params.page_table + static_cast<int64>(sequence) * params.table_stride;
    return static_cast<int>(load_global_4(table + PlaceOfKey::of(params, key).entry));
  }

  // The keys that any of its rows sees begin with it, or with one before it.
  DEVICE int first_key() const {
    if constexpr (FREES_KEYS<T::BAND, T::PAGING>) return max(mask().first_key(first_row / params.group), 0);
    return 0;
  }

  // The tiles of keys that any of its rows sees, in the block's part of them.
  DEVICE Blocks keys() const {
    const int first_query = first_row / params.group, last_query = (first_row + T::TILE_M - 1) / params.group;
    Blocks all = mask().template keys<T::TILE_N>(first_query, last_query - first_query + 1);
    const int share = (all.end - all.begin + params.splits - 1) / params.splits;
    const int begin = min(all.begin + split * share, all.end);
    return {begin, all.full_begin, all.full_end, min(begin + share, all.end)};
  }
};

// `Owned::keys`, where an expression's mask may hide the last keys: tiles with any of these are not seen in full.
template <class T>
DEVICE Blocks keys_of(const Owned<T>& owned, const typename T::Params& params) {
  if constexpr (HAS_TAIL<typename T::Score>) {
    Blocks blocks = owned.keys();
    const int tail = static_cast<int>(T::Score::tail(0, 0, 0, Position(0), 0, 0, params.aux));
    blocks.full_end = min(blocks.full_end, max(owned.len_kv - tail, 0) / T::TILE_N);
    return blocks;
  } else {
    return owned.keys();
  }
}

// The keys that a window has left behind, for all rows of a tile. A base class: without a window it has no place in memory, which
// even unread would change the order of registers in the kernels for sm90.
template <bool>
struct FreedKeys {
  template <class T>
  DEVICE explicit FreedKeys(const Owned<T>&) {}
  static DEVICE bool is_freed(int) { return false; }
  static DEVICE int before(int) { return 0; }  // of them, from a key on
};
template <>
struct FreedKeys<true> {
  int first_key;
  template <class T>
  DEVICE explicit FreedKeys(const Owned<T>& owned) : first_key(owned.first_key()) {}
  DEVICE bool is_freed(int key) const { return key < first_key; }
  DEVICE int before(int key) const { return max(first_key - key, 0); }
};

}  // namespace multiattn
