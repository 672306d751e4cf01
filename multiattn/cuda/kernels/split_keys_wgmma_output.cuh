// Where the outputs and the lse of a warp's 16 rows go: to out and lse or, with several splits, to the block's part of workspace.
#pragma once
#include "multiattn/softmax.cuh"
#include "split_keys_wgmma_traits.cuh"

namespace multiattn {

template <class T>
class SplitOutput {
  static constexpr int CHUNKS = T::HEAD_DIM / CHUNK_ELEMENTS;  // of a row

 public:
  // Of the rows from `first_row` of the block's tile on.
  DEVICE SplitOutput(const Owned<T>& owned, int first_row) : owned_(owned), params_(owned.params), first_row_(first_row) {}

  // values[16, HEAD_DIM] in accumulators, of which a thread has two rows: those of halves 0 and 1.
  DEVICE void store(const float (&values)[4 * CHUNKS], const RowState& state) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = owned_.row(first_row_ + accumulator_row(2 * half));
      const float factor = settle(row, state.max[half], state.sum[half]);
      if (params_.splits > 1)
        store_part(values, row, half, factor);
      else
        store_out(values, row, half, factor);
    }
  }

 private:
  DEVICE bool is_query(const Row& row) const { return row.query < owned_.len_q; }

  // The row's place in lse, or in the block's part of the workspace.
  DEVICE int64 place(const Row& row) const {
    return owned_.place(row) + (params_.splits > 1 ? owned_.split * rows_of(params_) : 0);
  }

  // Writes lse = log(sum of exp); what it returns the row's outputs are multiplied by.
  DEVICE float settle(const Row& row, float max, float sum) const {
    const bool is_part = params_.splits > 1;
    sum = reduce_row(sum, [](float a, float b) { return a + b; });
    float decay = 1.0f;
    if constexpr (T::HAS_SINKS)
      if (!is_part) decay = add_sink(max, sum, load_global_4(params_.sinks + row.head));
    const bool empty = sum == 0.0f;  // it sees no key, or all its weights are rounded away
    const float lse_log2 = empty ? -infinity() : max + log2_exact(sum);
    float* const lse = (is_part ? params_.partial_lse : params_.lse) + place(row);
    if (thread_index() % 4 == 0 && is_query(row)) store_global_4(lse, is_part ? lse_log2 : lse_log2 * LN_2);
    return empty ? 0.0f : decay / sum;
  }

  // Quads of lanes gather 16 bytes a lane: eight columns of one chunk each.
  DEVICE void store_out(const float (&values)[4 * CHUNKS], const Row& row, int half, float factor) const {
    const int lane = thread_index() % 4;
    uint16* const out = static_cast<uint16*>(params_.out) + owned_.offset(params_.strides_out, row) + lane * CHUNK_ELEMENTS;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
      Chunk mine = {};
#pragma unroll
      for (int w = 0; w < 4; ++w)
        if (const int i = 4 * (chunk + w) + 2 * half; chunk + w < CHUNKS)
          mine.word[w] = pack<typename T::Element>(values[i] * factor, values[i + 1] * factor);
      store_global_16_if(chunk + lane < CHUNKS && is_query(row), out + chunk * CHUNK_ELEMENTS, transpose_in_quad(mine));
    }
  }

  // Pairs of lanes gather four columns a lane: the even one of one chunk, the odd one of the next.
  DEVICE void store_part(const float (&values)[4 * CHUNKS], const Row& row, int half, float factor) const {
    const int is_odd = thread_index() % 2, column = thread_index() % 4 / 2 * 4;
    float* const out = params_.partial_out + place(row) * T::HEAD_DIM + column;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
      float even[2], odd[2];  // of this chunk and of the next
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        even[e] = values[4 * chunk + 2 * half + e] * factor;
        odd[e] = chunk + 1 < CHUNKS ? values[(4 * (chunk + 1) + 2 * half + e) % (4 * CHUNKS)] * factor : 0.0f;
      }
      Chunk mine;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32 other = float_bits(shuffle_xor(is_odd ? even[e] : odd[e], 1));
        mine.word[e] = is_odd ? other : float_bits(even[e]);
        mine.word[2 + e] = is_odd ? float_bits(odd[e]) : other;
      }
      store_global_16_if(chunk + is_odd < CHUNKS && is_query(row), out + (chunk + is_odd) * CHUNK_ELEMENTS, mine);
    }
  }

  const Owned<T>& owned_;
  const SplitParams& params_;
  const int first_row_;
};

}  // namespace multiattn
