// Where the outputs and the lse of a warp's 16 rows go: into the warpgroup's rows of Q, which TMA stores from, or to global
// memory.
#pragma once
#include "forward_wgmma_traits.cuh"
#include "multiattn/params.h"
#include "multiattn/softmax.cuh"

namespace multiattn {

// A panel as ldmatrix and stores see it: a tile of 64 columns.
template <class T>
using PanelQ = Tile<T::TileQ::ROWS, T::TileQ::PANEL_COLUMNS>;

// log2 of a row's sum, which is normal, inf or NaN: that of the mantissa within 2^-22, whatever the exponent, which is added.
DEVICE float log2_of_sum(float sum) {
  const uint32 bits = float_bits(sum), exponent = bits & 0x7f800000u;
  const float log2 = log2_approx(float_of_bits(bits - exponent + 0x3f800000u)) + (static_cast<int>(exponent >> 23) - 127);
  return sum < infinity() ? log2 : sum;
}

template <class T>
struct WarpOutput {
  using E = typename T::Element;
  static constexpr int CHUNKS = T::HEAD_DIM / 8;  // of a row
  const ForwardParams& params;
  int batch, head;       // of the batch entry
  SequenceOf<T> sequence;
  int first_query;       // of the warp's first row
  SharedAddress staged;  // the warp's row 0 of a panel of Q

  // lse = log(sum of exp); `inverse` is what the outputs of each row are multiplied by. Without branches, so that products may
  // be under way, and both rows at a time: with a division, a logarithm and a branch for each, one after the other, it took
  // 1100 clocks of a tile's 9700 (H200, 2026-11-22, D=64 N=512 masked).
  DEVICE void settle(const RowState& state, float (&inverse)[2]) const {
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = reduce_row(state.sum[half], [](float a, float b) { return a + b; }), max = state.max[half], decay = 1.0f;
      if constexpr (T::HAS_SINKS) decay = add_sink(max, sum, load_global_4(params.sinks + head));
      const bool empty = sum == 0.0f;  // the query sees no key, or all its weights are rounded away
      inverse[half] = empty ? 0.0f : reciprocal_approx(sum) * decay;
      max = empty ? -infinity() : max;  // selecting the lse would be a branch
      lse[half] = (max + log2_of_sum(empty ? 1.0f : sum)) * LN_2;
    }
    // Lanes 0 and 1 of a quad store a row each.
    const int half = thread_index() % 4, query = first_query + accumulator_row(2 * half);
    const int64 row = first_row() + query;
    store_global_4_if(half < 2 && is_query(query), params.lse + row, half == 0 ? lse[0] : lse[1]);
  }

  // values[16, HEAD_DIM] in accumulators, each row times its `inverse`.
  DEVICE void write(const float (&values)[4 * CHUNKS], const float (&inverse)[2]) const {
    const auto pair = [&](int chunk, int half) {  // a thread's two elements of a row
      const int i = 4 * chunk + 2 * half;
      return pack<E>(values[i] * inverse[half], values[i + 1] * inverse[half]);
    };
    if constexpr (T::TMA_STORE)
      stage(pair);
    else
      store(pair);
  }

 private:
  // Neither beyond the last query nor, in the first tile, before query 0.
  DEVICE bool is_query(int row) const {
    return static_cast<uint32>(row) < static_cast<uint32>(count_queries(params, sequence));
  }

  // Of the lse of query 0.
  DEVICE int64 first_row() const {
    if constexpr (IS_PACKED<typename T::Blocked>)
      return static_cast<int64>(head) * params.seq_q + sequence.offset_q;
    else
      return static_cast<int64>(batch * params.heads_q + head) * params.seq_q;
  }

  // Of the outputs of query 0.
  DEVICE uint16* outputs() const {
    const Strides& strides = params.strides_out;
    uint16* const out = static_cast<uint16*>(params.out);
    if constexpr (IS_PACKED<typename T::Blocked>)
      return out + head * strides.head + sequence.offset_q * strides.seq;
    else
      return out + batch * strides.batch + head * strides.head;
  }

  template <class Pair>
  DEVICE void stage(Pair pair) const {
    // stmatrix takes two chunks of 16 rows, as ldmatrix has read them from here for Q. The panel has a second chunk also
    // where the tensor ends with an odd one.
    const auto fragments = FragmentReader<PanelQ<T>>::down(recomputed(thread_index()));
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
      uint32 matrix[4] = {pair(chunk, 0), pair(chunk, 1)};
      if (chunk + 1 < CHUNKS) {
        matrix[2] = pair(chunk + 1, 0);
        matrix[3] = pair(chunk + 1, 1);
      }
      stmatrix_x4(fragments.address(staged + chunk / 8 * T::TileQ::PANEL_BYTES, 0, chunk % 8 * CHUNK_ELEMENTS), matrix);
    }
  }

  // Quads of lanes gather 16 bytes a lane.
  template <class Pair>
  DEVICE void store(Pair pair) const {
    uint16* const out = outputs();
    const int lane = thread_index() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + accumulator_row(2 * half);
      uint16* const row = out + query * params.strides_out.seq + lane * CHUNK_ELEMENTS;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
        Chunk mine = {};
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (chunk + w < CHUNKS) mine.word[w] = pair(chunk + w, half);
        const bool is_there = chunk + lane < CHUNKS;
        store_global_16_if(is_there && is_query(query), row + chunk * CHUNK_ELEMENTS, transpose_in_quad(mine));
      }
    }
  }
};

}  // namespace multiattn
