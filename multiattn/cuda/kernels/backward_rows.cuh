// Before and after the products of a backward: a dot product per query, and dq's way out of the workspace.
#pragma once
#include "backward_common.cuh"
#include "multiattn/place.cuh"

namespace multiattn {

struct RowConfig {
  int head_dim;               // of dq
  int head_dim_v = head_dim;  // of out
  int threads;
  int tile_rows;           // queries of a block
  int tile_m = tile_rows;  // of a tile of the kernel of gradients, where a block owns whole ones
  bool has_dq_sum;         // dq is added up in the workspace
  bool ordered = false;      // behind the statistics of a tile is whose turn it is to add to its dq
  bool clears_ahead = false;  // or how much of later heads' sums is empty: those are left alone
  bool delta_first = false;  // dP begins with -delta, which is there twice for that
  bool wide = true;        // 16 bytes at a time
};

template <class Element_, RowConfig C, class Blocked_ = NoBlockMask, class PlainParams = BackwardParams>
struct RowTraits {
  using Element = Element_;
  static constexpr int TILE_ROWS = C.tile_rows, TILE_M = C.tile_m, THREADS = C.threads;
  static constexpr bool HAS_DQ_SUM = C.has_dq_sum;
  static constexpr bool DELTA_FIRST = C.delta_first;
  static constexpr bool CLEARS_AHEAD = C.clears_ahead;
  static constexpr int TURNS = turns_of(C.ordered || CLEARS_AHEAD);
  static constexpr int STATISTICS = DELTA_FIRST ? 3 : 2;  // numbers of a query for the kernels with wgmma: lse, and delta once or twice
  using Blocked = Blocked_;  // what lists the tiles that there are
  using Params = typename WithAux<PlainParams, NoScore, typename ListsOf<Blocked>::Type>::Type;
  static constexpr int HEAD_DIM = C.head_dim, HEAD_DIM_V = C.head_dim_v;
  static constexpr int CHUNKS = HEAD_DIM / CHUNK_ELEMENTS, CHUNKS_V = HEAD_DIM_V / CHUNK_ELEMENTS;  // of a row
  static constexpr int DIM_FRAGMENTS = (C.head_dim + 15) / 16;
  using Sum = DqSum<DIM_FRAGMENTS, C.wide>;
  // Neighbouring lanes that share a row, for a sum by shuffles.
  static constexpr int LANES = CHUNKS_V > 16 ? 32 : CHUNKS_V > 8 ? 16 : CHUNKS_V > 4 ? 8 : CHUNKS_V > 2 ? 4 : CHUNKS_V;
  static constexpr int SMEM_BYTES = 0;

  static_assert(TILE_ROWS % 16 == 0, "whole fragments of dq");
};

// The sum of dq from a fragment on, and how many fragments its head has left.
struct DqFragments {
  float* first;
  int left;
};
template <class T>
DEVICE DqFragments fragments_from(const typename T::Params& params, int head, int first_query) {
  if constexpr (IS_PACKED<typename T::Blocked>) {
    const int row_fragments = T::Sum::row_fragments(params, tile_lists(params.lists)), first = first_query / 16;
    return {T::Sum::fragments(params, head, row_fragments, first), row_fragments - first};
  } else {
    return {T::Sum::rows(params, head, first_query), (params.seq_q - first_query + 15) / 16};
  }
}

// True if the workspace has a place for a tile. It has none for rows before the first sequence of a packed batch, which no
// gradient goes through: that of another sequence may be where theirs would be.
template <class T>
DEVICE bool has_place(const typename T::Params& params, const TileOf<T>& tile) {
  if constexpr (IS_PACKED<typename T::Blocked>) return tile.number <= tile_lists(params.lists).sequences;
  else return true;
}

// A sum, and the dot product of a chunk of out and one of dout.
template <class E>
DEVICE float dot(const Chunk& out, const Chunk& dout, float sum = 0.0f) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    sum = fmaf(unpack_low<E>(out.word[w]), unpack_low<E>(dout.word[w]), sum);
    sum = fmaf(unpack_high<E>(out.word[w]), unpack_high<E>(dout.word[w]), sum);
  }
  return sum;
}

// The sum over so many neighbours, a power of two.
template <int LANES>
DEVICE float sum_of_lanes(float sum) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

// delta = rowsum(dout * out) - dlse (Dao, "FlashAttention-2", Algorithm 2, line 4; dlse as d lse / d score = p). A block
// owns TILE_ROWS queries; it also empties their sum of dq. In a packed batch it asks for no sequence: a row is a row, and as
// many fragments of the sum are its own.
template <class T>
DEVICE void prepare_rows(const typename T::Params& params) {
  const auto [head, tile] = Place::of(block_index(), params.tiles_rows, params.heads_q_all, 1);
  const int first_query = tile * T::TILE_ROWS;
  const QuerySequence<NoSequence> sequence{params, head, {}};
  const int lane = thread_index() % T::LANES;

  for (int row = thread_index() / T::LANES; row < T::TILE_ROWS; row += T::THREADS / T::LANES) {
    const int query = first_query + row;
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < T::CHUNKS_V; first += T::LANES) {
      if (query < params.seq_q && first + lane < T::CHUNKS_V) {
        const int64 place = query * params.strides_out.seq + (first + lane) * CHUNK_ELEMENTS;
        sum = dot<typename T::Element>(load_global_16(sequence.out() + place), load_global_16(sequence.dout() + place), sum);
      }
    }
    sum = sum_of_lanes<T::LANES>(sum);
    if (query < params.seq_q && lane == 0)
      store_global_4(sequence.delta() + query, params.dlse ? sum - load_global_4(sequence.dlse() + query) : sum);
  }

  if constexpr (T::HAS_DQ_SUM) {
    const auto [sums, left] = fragments_from<T>(params, head, first_query);
    const int row_fragments = min(T::TILE_ROWS / 16, left);
    for (int i = thread_index(); i < row_fragments * T::DIM_FRAGMENTS * T::Sum::FRAGMENT / 4; i += T::THREADS)
      store_global_16(sums + 4 * i, Chunk{});
  }
}

// dq = grad_factor * its sum, rounded. A block owns TILE_ROWS queries. A warp has 16 of them and 32 columns at a time: a lane loads its
// part of four accumulators, and stores a chunk of two rows.
template <class T>
DEVICE void convert_dq(const typename T::Params& params) {
  const auto [head, place] = Place::of(block_index(), params.tiles_rows, params.heads_q_all, 1);
  const TileOf<T> tile = tile_at<T>(params, &TileLists::query_list, place, place * T::TILE_ROWS);
  if (tile.is_none()) return;
  const float* sums = dq_sums<T>(params, head, tile.number, tile.sequence, tile.first_row);
  const Strides& strides = strides_dq<T>(params);
  uint16* rows = QuerySequence<SequenceOf<T>>{params, head, tile.sequence}.dq(strides) + tile.first_row * strides.seq;
  const int end = end_of_queries<typename T::Blocked, T::TILE_ROWS>(params, tile.sequence, tile.first_row);
  const int left = end - tile.first_row, lane = thread_index() % WARP;
  const bool has_sums = has_place<T>(params, tile);

  constexpr int WARPS = T::THREADS / WARP, ACROSS = (T::CHUNKS + 3) / 4, ALL = T::TILE_ROWS / 16 * ACROSS;
  constexpr int STEPS = (ALL + WARPS - 1) / WARPS;
  Chunk accumulators[STEPS][4];
  const auto first_row = [&](int step) { return (step * WARPS + thread_index() / WARP) / ACROSS * 16; };
  const auto first_chunk = [&](int step) { return (step * WARPS + thread_index() / WARP) % ACROSS * 4; };
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const float* of_lane = sums + first_row(step) * (T::DIM_FRAGMENTS * T::Sum::FRAGMENT / 16) + T::Sum::index(0, lane, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = first_chunk(step) + i;
      const bool is_there = has_sums && first_row(step) < min(left, T::TILE_ROWS) && chunk < T::CHUNKS;
      accumulators[step][i] = is_there ? T::Sum::load(of_lane, chunk) : Chunk{};
    }
  }
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 8 rows each
      Chunk result;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto scaled = [&](int at) { return params.grad_factor * float_of_bits(accumulators[step][i].word[2 * half + at]); };
        result.word[i] = pack<typename T::Element>(scaled(0), scaled(1));
      }
      result = transpose_in_quad(result);
      const int row = first_row(step) + half * 8 + lane / 4, chunk = first_chunk(step) + lane % 4;
      if (row < min(left, T::TILE_ROWS) && chunk < T::CHUNKS)
        store_global_16(rows + row * strides.seq + chunk * CHUNK_ELEMENTS, result);
    }
  }
}

}  // namespace multiattn
