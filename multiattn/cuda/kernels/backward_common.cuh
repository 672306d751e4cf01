// Shared by the kernels of a backward launch: where things live, and the sum of dq in the workspace.
#pragma once
#include "multiattn/params.h"
#include "multiattn/ptx.cuh"
#include "multiattn/score.cuh"
#include "multiattn/sequence.cuh"
#include "multiattn/softmax.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

// Words behind the statistics of a tile of queries: a whole line, for TMA.
DEVICE constexpr int turns_of(bool ordered) { return ordered ? 32 : 0; }

struct BackwardConfig {
  int tile_m, tile_n, warps;
  int stages;            // buffers of what the kernel walks over: of Q and dO, or of K and V
  bool adds_dq = false;  // beside dk and dv; else dq has a kernel of its own
  bool wide = false;     // dq is added up 16 bytes at a time
  int column_warps = 1;  // that share rows of a gradient, and have columns each; of scores they have fragments each
};

// The constants of a kernel of gradients.
template <class Element, Features F, BackwardConfig C, class Score, class Blocked>
struct ProductTraits : Walks<Element, F, BackwardParams, Score, Blocked> {
  static constexpr int TILE_M = C.tile_m, TILE_N = C.tile_n, WARPS = C.warps, STAGES = C.stages;
  static constexpr int THREADS = WARPS * WARP, COLUMN_WARPS = C.column_warps;
  static constexpr bool SHARES_ROWS = COLUMN_WARPS > 1;
  using TileQ = Tile<TILE_M, F.head_dim>;
  using TileDO = Tile<TILE_M, F.head_dim_v>;
  using TileK = Tile<TILE_N, F.head_dim>;
  using TileV = Tile<TILE_N, F.head_dim_v>;
  static_assert(F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0 && ProductTraits::WIDTH <= 512, "head_dim: a multiple of 8 up to 512");
  static_assert(STAGES == 1 || STAGES == 2, "stages");
};

// Where a block's sequence lies in one query head or key/value head: the only place that turns heads into addresses. `head`
// counts through the batch. `Of` is `Sequence` in a packed batch, else `NoSequence`.
template <class Of>
struct QuerySequence {
  const BackwardParams& params;
  int head;
  Of sequence;

  DEVICE const uint16* q() const { return static_cast<const uint16*>(params.q) + offset(params.strides_q); }
  DEVICE const uint16* out() const { return static_cast<const uint16*>(params.out) + offset(params.strides_out); }
  DEVICE const uint16* dout() const { return static_cast<const uint16*>(params.dout) + offset(params.strides_out); }
  DEVICE uint16* dq(const Strides& strides) const { return static_cast<uint16*>(params.dq) + offset(strides); }
  DEVICE const float* lse() const { return params.lse + first_row(); }
  DEVICE const float* dlse() const { return params.dlse + first_row(); }  // only where it is not null
  DEVICE float* delta() const { return params.delta + first_row(); }

 private:
  DEVICE int64 first_row() const {
    if constexpr (IS_LISTED<Of>) return static_cast<int64>(head) * params.seq_q + sequence.offset_q;
    return static_cast<int64>(head) * params.seq_q;
  }
  DEVICE int64 offset(const Strides& strides) const {
    if constexpr (IS_LISTED<Of>) return head * strides.head + sequence.offset_q * strides.seq;
    return head / params.heads_q * strides.batch + head % params.heads_q * strides.head;
  }
};

template <class Of>
struct KeySequence {
  const BackwardParams& params;
  int head;
  Of sequence;

  DEVICE const uint16* k() const { return static_cast<const uint16*>(params.k) + offset(params.strides_k); }
  DEVICE const uint16* v() const { return static_cast<const uint16*>(params.v) + offset(params.strides_v); }
  DEVICE uint16* dk() const { return static_cast<uint16*>(params.dk) + offset(params.strides_dk); }
  DEVICE uint16* dv() const { return static_cast<uint16*>(params.dv) + offset(params.strides_dv); }

 private:
  DEVICE int64 offset(const Strides& strides) const {
    if constexpr (IS_LISTED<Of>) return head * strides.head + sequence.offset_kv * strides.seq;
    const int heads_kv = params.heads_q / params.group;
    return head / heads_kv * strides.batch + head % heads_kv * strides.head;
  }
};

// The strides of dq. It is as dense as out is, in the same order, but for the width of a row.
template <class T>
DEVICE decltype(auto) strides_dq(const BackwardParams& params) {
  const Strides& out = params.strides_out;
  if constexpr (T::HEAD_DIM == T::HEAD_DIM_V) {
    return (out);
  } else {
    const auto widened = [](int64 stride) { return stride / T::HEAD_DIM_V * T::HEAD_DIM; };
    return Strides{widened(out.batch), widened(out.head), widened(out.seq)};
  }
}

// The scores of a query head of the tile's sequence.
template <class T>
DEVICE HeadScores<typename T::Score> scores_of(const typename T::Params& params, const TileOf<T>& tile, int head) {
  if constexpr (IS_PACKED<typename T::Blocked>)
    return {params.aux, tile.sequence.len_q, tile.sequence.len_kv, tile.number, head};
  else
    return {params, head / params.heads_q, head % params.heads_q};
}

// dq before its conversion, fp32 [heads_q_all, ceil(seq_q / 16), D / 16] fragments of 16x16, in the order in which lanes
// hold accumulators, so that a warp adds to whole lines of memory. WIDE: a lane's four values of a 16x8 accumulator are
// neighbours, for one 16-byte addition; else a warp's 32 are, for four of 4 bytes. A sequence of a packed batch begins with a
// fragment of its own: each of those before it has at most one more than its rows fill. So does a tile that sequences cut.
template <int DIM_FRAGMENTS, bool WIDE>
struct DqSum {
  static constexpr int FRAGMENT = 256;  // floats

  static DEVICE float* rows(const BackwardParams& params, int head, int first_query) {
    return fragments(params, head, row_fragments(params), first_query / 16);
  }
  // Tiles of 16 rows of each head.
  static DEVICE int row_fragments(const BackwardParams& params) { return (params.seq_q + 15) / 16; }

  // The rows of a packed batch.
  static DEVICE float* rows(const BackwardParams& params, const TileLists& lists, int head, int number,
                            const Sequence& sequence, int first_query) {
    const int fragment = sequence.offset_q / 16 + number + first_query / 16;
    return fragments(params, head, row_fragments(params, lists), fragment);
  }
  static DEVICE int row_fragments(const BackwardParams& params, const TileLists& lists) {
    return params.seq_q / 16 + lists.sequences + 1;
  }

  static DEVICE float* fragments(const BackwardParams& params, int head, int row_fragments, int first) {
    return params.dq_sum + (static_cast<int64>(head) * row_fragments + first) * (DIM_FRAGMENTS * FRAGMENT);
  }

  static DEVICE int index(int side, int lane, int element) {
    return side * (FRAGMENT / 2) + (WIDE ? lane * 4 + element : element * WARP + lane);
  }

  static DEVICE void add(float* fragment, const Accumulator (&pair)[2]) {
    const int lane = thread_index() % WARP;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if constexpr (WIDE) {
        add_global_16(fragment + index(side, lane, 0), pair[side].value);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) add_global_4(fragment + index(side, lane, e), pair[side].value[e]);
      }
    }
  }

  // A lane's four values of an accumulator; its first one of the first accumulator is at `first`.
  static DEVICE Chunk load(const float* first, int side) {
    const float* const at = first + side * (FRAGMENT / 2);
    if constexpr (WIDE) return load_global_16(at);
    const float four[4] = {load_global_4(at), load_global_4(at + WARP), load_global_4(at + 2 * WARP), load_global_4(at + 3 * WARP)};
    return chunk_of(four);
  }
};

DEVICE const BackwardParams& plain_of(const BackwardParams& params) { return params; }
DEVICE const BackwardParams& plain_of(const WgmmaBackwardParams& params) { return params.backward; }

// The rows of that sum from `first_query` on of the sequence of that number: where sequences cut tiles, the first of one.
template <class T>
DEVICE float* dq_sums(const typename T::Params& params, int head, int number, const SequenceOf<T>& sequence, int first_query) {
  if constexpr (IS_CUT<typename T::Blocked>) {
    const auto& lists = tile_lists(params.lists);
    const int fragment = (sequence.offset_q + first_query) / 16 + number;
    return T::Sum::fragments(plain_of(params), head, T::Sum::row_fragments(plain_of(params), lists), fragment);
  } else if constexpr (IS_PACKED<typename T::Blocked>)
    return T::Sum::rows(plain_of(params), tile_lists(params.lists), head, number, sequence, first_query);
  else
    return T::Sum::rows(plain_of(params), head, first_query);
}

}  // namespace multiattn
