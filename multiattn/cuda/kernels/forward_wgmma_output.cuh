// Where the outputs and the lse of a warp's 16 rows go: into the warpgroup's rows of Q, which TMA stores from, or to global
// memory, as they are or as a part of sums that merge_splits.cuh adds up.
#pragma once
#include "forward_wgmma_traits.cuh"
#include "multiattn/softmax.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

// log2 of a row's sum, which is normal, inf or NaN: that of the mantissa within 2^-22, whatever the exponent, which is added.
DEVICE float log2_of_sum(float sum) {
  const uint32 bits = float_bits(sum), exponent = bits & 0x7f800000u;
  const float log2 = log2_approx(float_of_bits(bits - exponent + 0x3f800000u)) + (static_cast<int>(exponent >> 23) - 127);
  return sum < infinity() ? log2 : sum;
}

// Part: what leaves a block, and where to. Rows of one head, of which a block has all keys.
template <class T>
struct QueryPlaces {
  const ForwardParams& params;
  int batch, head;  // of the batch entry
  SequenceOf<T> sequence;
  int first_query;  // of the warp's first row

  DEVICE int operator[](int row) const { return first_query + row; }

  // Neither beyond the last query nor, in the first tile, before query 0.
  DEVICE bool is_there(int query) const {
    return static_cast<uint32>(query) < static_cast<uint32>(count_queries(params, sequence));
  }
  static constexpr DEVICE bool is_part() { return false; }
  DEVICE float sink(int) const { return load_global_4(params.sinks + head); }
  DEVICE float* lse() const { return params.lse; }
  static constexpr DEVICE float lse_unit() { return LN_2; }  // of lse in the log2 domain
  DEVICE int64 place(int query) const {
    int64 first = 0;
    if constexpr (IS_PACKED<typename T::Blocked>)
      first = static_cast<int64>(head) * params.seq_q + sequence.offset_q;
    else
      first = static_cast<int64>(batch * params.heads_q + head) * params.seq_q;
    return first + query;
  }
  // The outputs of query 0, and of a query from there on.
  DEVICE uint16* outputs() const {
    const Strides& strides = params.strides_out;
    uint16* const out = static_cast<uint16*>(params.out);
    if constexpr (IS_PACKED<typename T::Blocked>)
      return out + head * strides.head + sequence.offset_q * strides.seq;
    else
      return out + batch * strides.batch + head * strides.head;
  }
  DEVICE int64 offset(int query) const { return query * params.strides_out.seq; }
};

// Rows of several heads, of which a block may have a part of the keys: then it leaves partial sums.
template <class T>
struct GroupPlaces {
  const Owned<T>& owned;
  int first_row;  // the warp's

  DEVICE Row operator[](int row) const { return owned.row(first_row + row); }
  DEVICE bool is_there(const Row& row) const { return row.query < owned.len_q; }
  DEVICE bool is_part() const { return owned.params.splits > 1; }
  DEVICE float sink(const Row& row) const { return load_global_4(owned.params.sinks + row.head); }
  DEVICE float* lse() const { return is_part() ? owned.params.partial_lse : owned.params.lse; }
  DEVICE float lse_unit() const { return is_part() ? 1.0f : LN_2; }
  DEVICE int64 place(const Row& row) const { return owned.place(row) + (is_part() ? owned.split * rows_of(owned.params) : 0); }
  DEVICE uint16* outputs() const { return static_cast<uint16*>(owned.params.out); }
  DEVICE int64 offset(const Row& row) const { return owned.offset(owned.params.strides_out, row); }
};

// Lanes 0 and 1 of a quad store the largest score of a row each: of those that its lanes have, in the log2 domain.
template <class Places>
DEVICE void leave_row_tops(const Places& places, const float (&found)[2], const RowMax& target, bool stores) {
  float top[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    top[half] = reduce_row(found[half], [](float a, float b) { return fmaxf(a, b); }) * places.lse_unit();
  const int half = thread_index() % 4;
  const auto row = places[accumulator_row(2 * half)];
  float* const all = places.is_part() ? target.partial_max : target.row_max;
  store_global_4_if(stores && half < 2 && places.is_there(row), all + places.place(row), half == 0 ? top[0] : top[1]);
}

template <class T, class Places>
struct WarpOutput {
  using E = typename T::Element;
  static constexpr int CHUNKS = T::HEAD_DIM_V / 8;  // of a row
  Places places;
  SharedAddress staged;  // the warp's row 0 of a panel of Q

  // lse = log(sum of exp); `inverse` is what the outputs of each row are multiplied by. Without branches, so that products may
  // be under way, and both rows at a time: with a division, a logarithm and a branch for each, one after the other, it took
  // 1100 clocks of a tile's 9700 (H200, 2026-11-22, D=64 N=512 masked).
  DEVICE void settle(const RowState& state, float (&inverse)[2]) const {
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = reduce_row(state.sum[half], [](float a, float b) { return a + b; }), max = state.max[half], decay = 1.0f;
      if constexpr (T::HAS_SINKS)
        if (!places.is_part()) decay = add_sink(max, sum, places.sink(places[accumulator_row(2 * half)]));
      const bool empty = sum == 0.0f;  // the query sees no key, or all its weights are rounded away
      inverse[half] = empty ? 0.0f : reciprocal_approx(sum) * decay;
      max = empty ? -infinity() : max;  // selecting the lse would be a branch
      lse[half] = (max + log2_of_sum(empty ? 1.0f : sum)) * places.lse_unit();
    }
    // Lanes 0 and 1 of a quad store a row each.
    const int half = thread_index() % 4;
    const auto row = places[accumulator_row(2 * half)];
    const int64 place = places.place(row);
    store_global_4_if(half < 2 && places.is_there(row), places.lse() + place, half == 0 ? lse[0] : lse[1]);
  }

  // The largest score of each row, of those that the lanes of a quad have found.
  DEVICE void leave_tops(const float (&found)[2], const RowMax& target) const {
    leave_row_tops(places, found, target, true);
  }

  // values[16, HEAD_DIM_V] in accumulators, each row times its `inverse`.
  DEVICE void write(const float (&values)[4 * CHUNKS], const float (&inverse)[2]) const {
    const auto pair = [&](int chunk, int half) {  // a thread's two elements of a row
      const int i = 4 * chunk + 2 * half;
      return pack<E>(values[i] * inverse[half], values[i + 1] * inverse[half]);
    };
    if constexpr (T::TMA_STORE) {
      stage(pair);
    } else if constexpr (T::GROUPED) {
      if (places.is_part())
        store_part(values, inverse);
      else
        store(pair);
    } else {
      store(pair);
    }
  }

 private:
  template <class Pair>
  DEVICE void stage(Pair pair) const {
    // stmatrix takes two chunks of 16 rows, as ldmatrix has read them from here for Q. The panel has a second chunk also
    // where the tensor ends with an odd one.
    const auto fragments = FragmentReader<typename T::TileOut::Panel>::down(recomputed(thread_index()));
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
      uint32 matrix[4] = {pair(chunk, 0), pair(chunk, 1)};
      if (chunk + 1 < CHUNKS) {
        matrix[2] = pair(chunk + 1, 0);
        matrix[3] = pair(chunk + 1, 1);
      }
      stmatrix_x4(fragments.address(staged + chunk / 8 * T::TileOut::PANEL_BYTES, 0, chunk % 8 * CHUNK_ELEMENTS), matrix);
    }
  }

  template <class Pair>
  DEVICE void store(Pair pair) const {
    uint16* const out = places.outputs();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto row = places[accumulator_row(2 * half)];
      store_in_quad<CHUNKS>(out + places.offset(row), places.is_there(row), [&](int chunk) { return pair(chunk, half); });
    }
  }

  // Pairs of lanes gather four columns a lane: the even one of one chunk, the odd one of the next.
  DEVICE void store_part(const float (&values)[4 * CHUNKS], const float (&inverse)[2]) const {
    const int is_odd = thread_index() % 2, column = thread_index() % 4 / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto row = places[accumulator_row(2 * half)];
      float* const target = places.owned.params.partial_out + places.place(row) * T::HEAD_DIM_V + column;
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
        float even[2], odd[2];  // of this chunk and of the next
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          even[e] = values[4 * chunk + 2 * half + e] * inverse[half];
          odd[e] = chunk + 1 < CHUNKS ? values[(4 * (chunk + 1) + 2 * half + e) % (4 * CHUNKS)] * inverse[half] : 0.0f;
        }
        Chunk mine;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32 other = float_bits(shuffle_xor(is_odd ? even[e] : odd[e], 1));
          mine.word[e] = is_odd ? other : float_bits(even[e]);
          mine.word[2 + e] = is_odd ? float_bits(odd[e]) : other;
        }
        const bool is_there = chunk + is_odd < CHUNKS;
        store_global_16_if(is_there && places.is_there(row), target + (chunk + is_odd) * CHUNK_ELEMENTS, mine);
      }
    }
  }
};

}  // namespace multiattn
