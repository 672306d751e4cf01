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

// Neither beyond the last query nor, in the first tile, before query 0.
DEVICE bool is_query(const ForwardParams& params, int row) {
  return static_cast<uint32>(row) < static_cast<uint32>(params.seq_q);
}

template <class T>
struct WarpOutput {
  using E = typename T::Element;
  const ForwardParams& params;
  int head, first_query;   // of the warp's first row
  SharedAddress staged;    // the warp's row 0 of a panel of Q

  // lse = log(sum of exp); `inverse` is what the outputs of each row are multiplied by.
  DEVICE void settle(const RowState& state, float (&inverse)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = reduce_row(state.sum[half], [](float a, float b) { return a + b; });
      const int query = first_query + accumulator_row(2 * half);
      const bool empty = sum == 0.0f;  // the query sees no key
      inverse[half] = empty ? 0.0f : 1.0f / sum;
      if (thread_index() % 4 == 0 && is_query(params, query))
        store_global_4(params.lse + static_cast<int64>(head) * params.seq_q + query,
                       empty ? -infinity() : (state.max[half] + log2_exact(sum)) * LN_2);
    }
  }

  // values[16, 8 * CHUNKS] in accumulators, each row times its `inverse`, from chunk `first` of the row on: one of 64 columns.
  template <int CHUNKS>
  DEVICE void write(const float (&values)[4 * CHUNKS], int first, const float (&inverse)[2]) const {
    const auto pair = [&](int chunk, int half) {  // a thread's two elements of a row
      const int i = 4 * chunk + 2 * half;
      return pack<E>(values[i] * inverse[half], values[i + 1] * inverse[half]);
    };
    if constexpr (T::TMA_STORE)
      stage<CHUNKS>(first, pair);
    else
      store<CHUNKS>(first, pair);
  }

 private:
  static constexpr int ALL = T::HEAD_DIM / 8;  // chunks of a row

  template <int CHUNKS, class Pair>
  DEVICE void stage(int first, Pair pair) const {
    const PairWriter<PanelQ<T>> writer;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (first + chunk < ALL)
          writer.store(staged + (first + chunk) / 8 * T::TileQ::PANEL_BYTES, 8 * half, chunk % 8, pair(chunk, half));
  }

  // Quads of lanes gather 16 bytes a lane.
  template <int CHUNKS, class Pair>
  DEVICE void store(int first, Pair pair) const {
    uint16* const out = static_cast<uint16*>(params.out) + head / params.heads_q * params.strides_out.batch +
                        head % params.heads_q * params.strides_out.head;
    const int lane = thread_index() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + accumulator_row(2 * half);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
        Chunk mine = {};
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (chunk + w < CHUNKS) mine.word[w] = pair(chunk + w, half);
        mine = transpose_in_quad(mine);
        if (chunk + lane < CHUNKS && first + chunk + lane < ALL && is_query(params, query))
          store_global_16(out + query * params.strides_out.seq + (first + chunk + lane) * CHUNK_ELEMENTS, mine);
      }
    }
  }
};

}  // namespace multiattn
