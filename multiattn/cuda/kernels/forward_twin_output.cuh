// Outputs of a warpgroup of forward_twin.cuh, which are half of its rows' columns, and from one of the two the rows' lse.
#pragma once
#include "forward_twin_rows.cuh"

namespace multiattn {

template <class T, class Places>
struct TwinOutput {
  using E = typename T::Element;
  static constexpr int CHUNKS = T::OWN_COLUMNS / 8;  // of the widest half of a row
  Places places;
  int warpgroup;

  // lse = log(sum of exp); `inverse` is what the outputs of each row are multiplied by. `sum` is that of all lanes of a quad.
  DEVICE void settle(const float (&row_max)[2], const float (&row_sum)[2], float (&inverse)[2]) const {
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[half], max = row_max[half], decay = 1.0f;
      if constexpr (T::HAS_SINKS)
        if (!places.is_part()) decay = add_sink(max, sum, places.sink(places[accumulator_row(2 * half)]));
      const bool empty = sum == 0.0f;  // the query sees no key, or all its weights are rounded away
      inverse[half] = empty ? 0.0f : reciprocal_approx(sum) * decay;
      max = empty ? -infinity() : max;
      lse[half] = (max + log2_of_sum(empty ? 1.0f : sum)) * places.lse_unit();
    }
    // Lanes 0 and 1 of a quad store a row each.
    const int half = thread_index() % 4;
    const auto row = places[accumulator_row(2 * half)];
    const bool stores = warpgroup == 0 && half < 2 && places.is_there(row);
    store_global_4_if(stores, places.lse() + places.place(row), half == 0 ? lse[0] : lse[1]);
  }

  // values[16, OWN_COLUMNS] in accumulators, each row times its `inverse`: as they are, or as a part of sums.
  template <class Values>
  DEVICE void write(const Values& values, const float (&inverse)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto row = places[accumulator_row(2 * half)];
      const auto value = [&](int chunk, int e) { return values(4 * chunk + 2 * half + e) * inverse[half]; };
      if constexpr (T::GROUPED)
        if (places.is_part()) {
          store_part(places.owned.params.partial_out + places.place(row) * T::HEAD_DIM_V, places.is_there(row), value);
          continue;
        }
      store(places.outputs() + places.offset(row), places.is_there(row), value);
    }
  }

 private:
  DEVICE int first_chunk() const { return warpgroup * CHUNKS; }
  // True if out has a chunk of the half.
  DEVICE bool has(int chunk) const { return first_chunk() + chunk < T::HEAD_DIM_V / 8; }

  // The lanes of a quad gather 16 bytes each.
  template <class Value>
  DEVICE void store(uint16* row, bool is_there, Value value) const {
    const int lane = thread_index() % 4;
    uint16* const own = row + (first_chunk() + lane) * CHUNK_ELEMENTS;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
      Chunk mine = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) mine.word[w] = pack<E>(value(chunk + w, 0), value(chunk + w, 1));
      store_global_16_if(is_there && has(chunk + lane), own + chunk * CHUNK_ELEMENTS, transpose_in_quad(mine));
    }
  }

  // Pairs of lanes gather four columns a lane: the even one of one chunk, the odd one of the next.
  template <class Value>
  DEVICE void store_part(float* row, bool is_there, Value value) const {
    const int is_odd = thread_index() % 2, column = thread_index() % 4 / 2 * 4;
    float* const own = row + (first_chunk() + is_odd) * CHUNK_ELEMENTS + column;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
      Chunk mine;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float even = value(chunk, e), odd = value(chunk + 1, e);  // of this chunk and of the next
        const uint32 other = float_bits(shuffle_xor(is_odd ? even : odd, 1));
        mine.word[e] = is_odd ? other : float_bits(even);
        mine.word[2 + e] = is_odd ? float_bits(odd) : other;
      }
      store_global_16_if(is_there && has(chunk + is_odd), own + chunk * CHUNK_ELEMENTS, mine);
    }
  }
};

}  // namespace multiattn
