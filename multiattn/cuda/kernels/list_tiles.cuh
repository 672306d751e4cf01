// The tiles of a packed batch, listed for the kernels that own them: lengths of sequences stay on the device.
//
// A warp takes one sequence at a time, and compares it with all: before its tiles come those of all sequences that are
// before it in the order. So no warp waits for another. Rows behind the last sequence are one more, and behind that come the
// entries that have no tile.
#pragma once
#include "multiattn/params.h"
#include "multiattn/ptx_math.cuh"
#include "multiattn/sequence.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

template <int THREADS_>
struct ListTraits {
  static constexpr int THREADS = THREADS_;
  static constexpr int SMEM_BYTES = 0;
  static_assert(THREADS % WARP == 0, "whole warps");
};

// Sequence `number` of the batch; the one after the last has the rows behind it, `with_queries` or with keys.
DEVICE Sequence sequence_of(const ListParams& params, int number, bool with_queries) {
  const int first_q = load_constant(params.cu_seqlens_q + number), first_kv = load_constant(params.cu_seqlens_kv + number);
  if (number == params.sequences) {
    if (with_queries) return {first_q, 0, params.rows_q - first_q, 0};
    return {0, first_kv, 0, params.rows_kv - first_kv};
  }
  return {first_q, first_kv, load_constant(params.cu_seqlens_q + number + 1) - first_q,
          load_constant(params.cu_seqlens_kv + number + 1) - first_kv};
}

// One of the two lists.
struct TileList {
  const ListParams& params;
  int32* entries;
  int rows_of_tile, count;
  bool of_queries;

  DEVICE int rows(const Sequence& it) const { return of_queries ? it.len_q : it.len_kv; }
  DEVICE int tiles(const Sequence& it) const { return (rows(it) + rows_of_tile - 1) / rows_of_tile; }
  // A tile costs as much as its sequence has rows on the other side.
  DEVICE int cost(const Sequence& it) const { return of_queries ? it.len_kv : it.len_q; }

  // Tiles of all sequences that come before this one, added up by a warp: of those that cost more, and of those that cost as
  // much and have a smaller number. `cost` is negative for what comes behind all.
  DEVICE int tiles_before(int number, int cost_of_it) const {
    int before = 0;
    for (int other = thread_index() % WARP; other <= params.sequences; other += WARP) {
      const Sequence it = sequence_of(params, other, of_queries);
      if (cost(it) > cost_of_it || (cost(it) == cost_of_it && other < number)) before += tiles(it);
    }
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) before += static_cast<int>(shuffle_xor(static_cast<uint32>(before), mask));
    return before;
  }

  // The tiles of a sequence; under a mask those first that see the most: of queries the last ones, of keys the first.
  DEVICE void write(int number) const {
    const Sequence it = sequence_of(params, number, of_queries);
    const int first = tiles_before(number, cost(it)), its_tiles = tiles(it);
    for (int place = thread_index() % WARP; place < its_tiles; place += WARP) {
      const int tile = of_queries ? its_tiles - 1 - place : place;
      store_tile(entries, first + place, {number, tile * rows_of_tile, it});
    }
  }

  DEVICE void write_rest() const {
    for (int entry = tiles_before(0, -1) + thread_index() % WARP; entry < count; entry += WARP)
      store_tile(entries, entry, {-1, 0, {}});
  }
};

template <class T>
DEVICE void list_tiles(const ListParams& params) {
  const int per_list = params.sequences + 2;  // and the rows behind them, and the entries behind those
  if (params.next_tile && block_index() == 0 && thread_index() == 0) *params.next_tile = 0;
  const int item = static_cast<int>(block_index()) * (T::THREADS / WARP) + thread_index() / WARP;
  if (item >= 2 * per_list) return;
  const bool of_queries = item < per_list;
  const int number = of_queries ? item : item - per_list;
  const TileList list{params, of_queries ? params.query_list : params.key_list,
                      of_queries ? params.tile_q : params.tile_kv, of_queries ? params.tiles_q : params.tiles_kv,
                      of_queries};
  if (!list.entries) return;
  if (number <= params.sequences)
    list.write(number);
  else
    list.write_rest();
}

}  // namespace multiattn
