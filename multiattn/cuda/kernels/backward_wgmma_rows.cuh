// Before and after the products of the backward for sm90: what it must know of each query, in the order in which TMA loads it, and
// dq's way out of the workspace.
#pragma once
#include "backward_rows.cuh"
#include "backward_wgmma_traits.cuh"

namespace multiattn {

template <class Element, RowConfig C, class Blocked = NoBlockMask>
using StatisticsTraits = RowTraits<Element, C, Blocked, WgmmaBackwardParams>;

// For a kernel that begins while the one before it ends: nobody touches memory before that has.
DEVICE void follow_earlier_grids() {
  if (thread_index() == 0) {
    admit_next_grid();
    await_earlier_grids();
  }
  sync_block();
}

// Empties the sums of divided tiles, all blocks together.
template <class T>
DEVICE void clear_key_sums(const typename T::Params& params) {
  const int64 chunks = params.lists.key_sums_bytes / CHUNK_BYTES, stride = static_cast<int64>(block_count()) * T::THREADS;
  for (int64 i = static_cast<int64>(block_index()) * T::THREADS + thread_index(); i < chunks; i += stride)
    store_global_16(params.lists.key_sums + i * 4, Chunk{});
}

// Empties the tile's sums of dq if nobody else does.
template <class T>
DEVICE void clear_sums(const typename T::Params& params, int head, const TileOf<T>& tile, int rows) {
  if constexpr (T::CLEARS_AHEAD) {
    if (head / params.backward.group >= heads_cleared_before<T>(params)) return;
  } else if constexpr (T::TURNS > 0) {  // the first tile of keys to add stores, where there is one
    const auto keys = mask_of<Band::TWO_SIDED>(params.backward, tile.sequence).template keys<1>(tile.first_row, T::TILE_ROWS);
    if (keys.begin < keys.end) return;
  }
  float* const sums = dq_sums<T>(params, head, tile.number, tile.sequence, tile.first_row);
  const int floats = (min(rows, T::TILE_ROWS) + 15) / 16 * T::DIM_FRAGMENTS * T::Sum::FRAGMENT;
  for (int i = thread_index(); i < floats / 4; i += T::THREADS) store_global_16(sums + 4 * i, Chunk{});
}

// lse in the log2 domain, and delta = rowsum(dout * out) - dlse (Dao, "FlashAttention-2", Algorithm 2, line 4; dlse as
// d lse / d score = p). A query that is not there, or sees no key, gets an lse of inf: its weights are 0. A block owns a tile of
// queries, and empties their sum of dq if nobody else does.
template <class T>
DEVICE void prepare_statistics(const typename T::Params& params) {
  follow_earlier_grids();
  const BackwardParams& backward = params.backward;
  if (block_index() == 0 && thread_index() == 0) {
    params.next_tile[0] = 0;
    if constexpr (!T::HAS_DQ_SUM) params.next_tile[1] = 0;  // of the kernel of dq
  }
  if constexpr (IS_STREAM_K<typename T::Blocked>) clear_key_sums<T>(params);
  const auto [head, place] = Place::of(block_index(), backward.tiles_rows, backward.heads_q_all, 1);
  const TileOf<T> tile = tile_at<T>(params, &TileLists::query_list, place, place * T::TILE_ROWS);
  if (tile.is_none()) return;
  const QuerySequence<SequenceOf<T>> queries{backward, head, tile.sequence};
  const int end = end_of_queries<typename T::Blocked, T::TILE_ROWS>(backward, tile.sequence, tile.first_row);
  const int rows = end - tile.first_row, lane = thread_index() % T::LANES;
  static_assert(!IS_CUT<typename T::Blocked> || T::TILE_ROWS == T::TILE_M || !T::HAS_DQ_SUM, "a tile that sequences cut is one of the walk");
  int block = tile.first_row / T::TILE_M;
  if constexpr (IS_CUT<typename T::Blocked>) block = (tile.sequence.offset_q + tile.first_row) / T::TILE_M;
  float* const lse = statistics_of<T>(params, head, tile.number, tile.sequence, block);
  float* const delta = lse + T::TILE_M;
  const auto store = [&](int row, float of_lse, float of_delta) {
    if constexpr (IS_CUT<typename T::Blocked> && T::TILE_ROWS > T::TILE_M) {
      if (row >= rows) return;  // what is not there is hidden
      float* const place = statistics_of_query<T>(params, head, tile.number, tile.sequence, tile.first_row + row);
      store_global_4(place, of_lse);
      store_global_4(place + T::TILE_M, of_delta);
      return;
    }
    const int tile_at = row / T::TILE_M * (T::STATISTICS * T::TILE_M + T::TURNS), of_tile = row % T::TILE_M;
    const int at = tile_at + statistic_place(of_tile);
    store_global_4(lse + at, of_lse);
    if (T::TURNS > 0 && of_tile == 0) store_global_16(lse + tile_at + T::STATISTICS * T::TILE_M, Chunk{});
    if constexpr (T::DELTA_FIRST) {
      float* const both = delta + tile_at + accumulator_place(of_tile);
      store_global_4(both, -of_delta);
      store_global_4(both + 2, -of_delta);
    } else {
      store_global_4(delta + at, of_delta);
    }
  };

  if constexpr (T::HAS_DQ_SUM)
    if (has_place<T>(params, tile)) clear_sums<T>(params, head, tile, rows);
  // Some rows are loaded before any of them is stored, as each store might be to what is loaded next.
  constexpr int STRIDE = T::THREADS / T::LANES, ALL = (T::TILE_ROWS + STRIDE - 1) / STRIDE, AT_ONCE = ALL < 4 ? ALL : 4;
#pragma unroll
  for (int first = 0; first < T::TILE_ROWS; first += AT_ONCE * STRIDE) {
    Chunk out[AT_ONCE], dout[AT_ONCE];
    float natural[AT_ONCE];
    [[maybe_unused]] float behind[AT_ONCE] = {};  // the part of a sum that a lane has of chunks behind its first
    const auto row_of = [&](int i) { return first + i * STRIDE + thread_index() / T::LANES; };
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int query = tile.first_row + row_of(i);
      const bool is_there = row_of(i) < min(rows, T::TILE_ROWS);
      const int64 at = query * backward.strides_out.seq + lane * CHUNK_ELEMENTS;
      const bool has_chunk = is_there && lane < T::CHUNKS_V;
      out[i] = has_chunk ? load_global_16(queries.out() + at) : Chunk{};
      dout[i] = has_chunk ? load_global_16(queries.dout() + at) : Chunk{};
      natural[i] = is_there && lane == 0 ? load_global_4(queries.lse() + query) : -infinity();
      for (int more = T::LANES; more < T::CHUNKS_V; more += T::LANES)
        if (is_there && lane + more < T::CHUNKS_V)
          behind[i] = dot<typename T::Element>(load_global_16(queries.out() + at + more * CHUNK_ELEMENTS),
                                               load_global_16(queries.dout() + at + more * CHUNK_ELEMENTS), behind[i]);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = row_of(i), query = tile.first_row + row;
      float sum = 0.0f;
      if constexpr (T::CHUNKS_V > T::LANES) sum = behind[i];
      sum = sum_of_lanes<T::LANES>(dot<typename T::Element>(out[i], dout[i], sum));
      if (lane > 0 || row >= min(round_up(rows, T::TILE_M), T::TILE_ROWS)) continue;
      if (row < rows) {
        if (backward.dlse) sum -= load_global_4(queries.dlse() + query);
        if (backward.delta) store_global_4(queries.delta() + query, sum);
      }
      if (has_place<T>(params, tile)) store(row, natural[i] == -infinity() ? infinity() : natural[i] * LOG2_E, sum);
    }
  }
}

// As convert_dq.
template <class T>
DEVICE void convert_sums(const typename T::Params& params) {
  follow_earlier_grids();
  convert_dq<T>(params);
}

}  // namespace multiattn
