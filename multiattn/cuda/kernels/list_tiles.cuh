// The tiles of a packed batch, listed for the kernels that own them: lengths of sequences stay on the device.
//
// A warp takes one sequence at a time, and compares it with all: before its tiles come those of all sequences that are
// before it in the order. So no warp waits for another. Rows behind the last sequence are one more, those before the first are
// another, and behind these come the entries that have no tile.
//
// Nothing is taken on trust: whatever cu_seqlens has, a list names rows that there are, and has as many entries as it has room for.
#pragma once
#include "grids.cuh"
#include "multiattn/params.h"
#include "multiattn/sequence.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

struct ListConfig {
  int threads;
  bool overlaps;  // it begins while the grid before it ends, and lets the next one do so
  bool cut = false;  // tiles are those of the packed axis, as blocks of a block mask are, and sequences cut them
};

template <ListConfig C>
struct ListTraits {
  static constexpr int THREADS = C.threads;
  static constexpr bool OVERLAPS = C.overlaps, CUTS = C.cut;
  static constexpr int SMEM_BYTES = 0;
  static_assert(THREADS % WARP == 0, "whole warps");
};

// Rows of q, or of k.
struct RowRange {
  int offset, len;
};

// One side of the batch: queries, or keys.
struct ListedSide {
  const int32* cu_seqlens;
  int sequences, rows, longest;

  DEVICE int start(int number) const { return max(min(load_global_4(cu_seqlens + number), rows), 0); }

  DEVICE RowRange of(int number) const {
    const int offset = start(number);
    return {offset, min(max(start(number + 1) - offset, 0), longest)};
  }
  // The ranges of the two numbers behind those of sequences: rows behind the last one, then before the first.
  DEVICE RowRange around(int number) const {
    if (number > sequences) return {0, start(0)};
    return {start(sequences), rows - start(sequences)};
  }
};

// One of the two lists.
template <bool CUTS>
struct TileList {
  const ListParams& params;
  int32* entries;
  int rows_of_tile, count;
  bool of_queries;

  DEVICE ListedSide queries() const { return {params.cu_seqlens_q, params.sequences, params.rows_q, params.longest_q}; }
  DEVICE ListedSide keys() const { return {params.cu_seqlens_kv, params.sequences, params.rows_kv, params.longest_kv}; }
  DEVICE Sequence sequence(int number) const {
    const RowRange q = queries().of(number), kv = keys().of(number);
    return {q.offset, kv.offset, q.len, kv.len};
  }
  DEVICE Sequence around(int number) const {
    const RowRange range = (of_queries ? queries() : keys()).around(number);
    if (of_queries) return {range.offset, 0, range.len, 0};
    return {0, range.offset, 0, range.len};
  }

  DEVICE int rows(const Sequence& it) const { return of_queries ? it.len_q : it.len_kv; }
  DEVICE int tiles(const Sequence& it) const {
    if constexpr (CUTS) return rows(it) == 0 ? 0 : (rows_before(it) + rows(it) + rows_of_tile - 1) / rows_of_tile;
    else return (rows(it) + rows_of_tile - 1) / rows_of_tile;
  }
  // With CUTS: the rows before the sequence in the tile that it begins in.
  DEVICE int rows_before(const Sequence& it) const { return (of_queries ? it.offset_q : it.offset_kv) % rows_of_tile; }
  // A tile costs as much as its sequence has rows on the other side.
  DEVICE int cost(const Sequence& it) const { return of_queries ? it.len_kv : it.len_q; }

  // Tiles of all sequences that come before one, and of all; where these overlap, no more than there are entries.
  struct Counts {
    int before, all;
  };

  // Added up by a warp: before come those that cost more, and those that cost as much and have a smaller number. `cost` is
  // negative for what comes behind all.
  DEVICE Counts count_tiles(int number, int cost_of_it) const {
    Counts counts{0, 0};
    const auto add = [&](int other, const Sequence& it) {
      const int its_tiles = tiles(it);
      const bool is_before = cost(it) > cost_of_it || (cost(it) == cost_of_it && other < number);
      if (is_before) counts.before = min(counts.before + its_tiles, count);
      counts.all = min(counts.all + its_tiles, count);
    };
    const int lane = thread_index() % WARP;
#pragma unroll 4
    for (int other = lane; other < params.sequences; other += WARP) add(other, sequence(other));
    if (lane < 2) add(params.sequences + lane, around(params.sequences + lane));
    return {sum_of_warp(counts.before), sum_of_warp(counts.all)};
  }

  DEVICE int sum_of_warp(int value) const {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2)
      value = min(value + static_cast<int>(shuffle_xor(static_cast<uint32>(value), mask)), count);
    return value;
  }

  // The tiles of a sequence; under a mask those first that see the most: of queries the last ones, of keys the first.
  DEVICE void write(int number) const {
    const Sequence it = number < params.sequences ? sequence(number) : around(number);
    const auto [first, all] = count_tiles(number, cost(it));
    const int its_tiles = tiles(it);
    const int places = min(its_tiles, count - first);
    for (int place = thread_index() % WARP; place < places; place += WARP) {
      const int tile = of_queries ? its_tiles - 1 - place : place;
      int first_row = tile * rows_of_tile;
      if constexpr (CUTS) first_row = max(first_row - rows_before(it), 0);
      store_tile(entries, first + place, {number, first_row, it, all});
    }
  }

  DEVICE void write_rest() const {
    for (int entry = count_tiles(0, -1).all + thread_index() % WARP; entry < count; entry += WARP)
      store_tile(entries, entry, {-1, 0, {}, 0});
  }
};

// Where grids overlap, the earlier ones may still write what it reads, and read what it writes.
template <class T>
DEVICE void list_tiles(const ListParams& params) {
  follow_earlier_grids<T::OVERLAPS>();
  const int per_list = params.sequences + 3;  // and the rows on either side of them, and the entries behind those
  if (params.next_tile && block_index() == 0 && thread_index() == 0) *params.next_tile = 0;
  const int item = static_cast<int>(block_index()) * (T::THREADS / WARP) + thread_index() / WARP;
  if (item >= 2 * per_list) return;
  const bool of_queries = item < per_list;
  const int number = of_queries ? item : item - per_list;
  const TileList<T::CUTS> list{params, of_queries ? params.query_list : params.key_list,
                      of_queries ? params.tile_q : params.tile_kv, of_queries ? params.tiles_q : params.tiles_kv,
                      of_queries};
  if (!list.entries) return;
  if (number < params.sequences + 2)
    list.write(number);
  else
    list.write_rest();
}

}  // namespace multiattn
