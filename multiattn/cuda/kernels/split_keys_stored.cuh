// Split keys of 8-bit numbers: what is done to products that plain ones do not need.
//
// A word of a row of K has four numbers of one key, and a lane has a word of ldmatrix where of 16-bit numbers it has two. So columns of Q
// are in another order, by which a lane's four are those that its two operands must have. A word of V, transposed, has two
// columns of two keys: products are of even and of odd columns, and a lane has four neighbours of a row of the output.
#pragma once
#include "multiattn/gemm.cuh"
#include "multiattn/softmax.cuh"
#include "split_keys_traits.cuh"

namespace multiattn {

// The factor of the scores of a row of Q, in shared memory.
template <class T>
DEVICE SharedAddress row_factor(int row) {
  return shared_base() + T::TileQ::BYTES + row * 4;
}

// Rewrites Q in fp16, its 16 columns at a time in the order that keys have. Numbers of bf16 become smaller or larger by a power of two,
// a row's own, which its scores are multiplied by: then all that counts is exact. The sign of the scale goes in, and that of the
// scale of a head's keys, if all have one.
template <class T>
DEVICE void halve_queries(int scale_sign, float scale_of_keys) {
  const float sign = scale_of_keys == 0.0f ? 0.0f : scale_of_keys < 0.0f ? -scale_sign : scale_sign;
  using Tile = typename T::TileQ;
  using E = typename T::OutElement;
  constexpr int GROUPS = Tile::CHUNKS / 2, WARPS = T::THREADS / WARP;
  static_assert(GROUPS <= WARP, "a lane for each 16 columns");
  const int group = thread_index() % WARP;
#pragma unroll 1
  for (int row = thread_index() / WARP; row < Tile::ROWS; row += WARPS) {
    const SharedAddress first = Tile::chunk(shared_base(), row, 2 * (group % GROUPS));
    const SharedAddress second = Tile::chunk(shared_base(), row, 2 * (group % GROUPS) + 1);
    const Chunk given[2] = {load_shared_16(first), load_shared_16(second)};
    float factor = 1.0f, inverse = 1.0f;
    if constexpr (!IS_FP16<E>) {
      uint32 largest = 0;  // exponent of a number that is finite
      for_each<2, 4, 2>([&](int chunk, int word, int half) {
        const uint32 exponent = given[chunk].word[word] >> (16 * half + 7) & 0xffu;
        if (exponent != 0xffu) largest = max(largest, exponent);
      });
#pragma unroll
      for (int lanes = 1; lanes < WARP; lanes *= 2) largest = max(largest, shuffle_xor(largest, lanes));
      const int raised = min(141 - static_cast<int>(largest), 120);  // 2^14 and more, but less than 2^15
      inverse = float_of_bits(static_cast<uint32>(127 + raised) << 23);
      factor = float_of_bits(static_cast<uint32>(127 - raised) << 23);
    }
    inverse *= sign;  // 0 * inf and 0 * NaN are NaN
    Chunk made[2];
    for_each<2, 4>([&](int chunk, int word) {
      const uint32 pair = given[chunk].word[word];
      const uint32 halved = pack<fp16>(unpack_low<E>(pair) * inverse, unpack_high<E>(pair) * inverse);
      made[word % 2].word[2 * chunk + word / 2] = halved;
    });
    sync_warp();  // all of the row is read
    if (group < GROUPS) {
      store_shared_16(first, made[0]);
      store_shared_16(second, made[1]);
      if (group == 0) store_shared_4(row_factor<T>(row), float_bits(factor));
    }
  }
}

// scores[16 M, 16 N] += Q K^T: `load` gives 32 columns of 16 keys, as words.
template <class T, int AHEAD, class LoadLeft, class Load>
DEVICE void multiply_stored_keys(Scores<T>& scores, LoadLeft load_left, Load load) {
  constexpr Numbers NUMBERS = T::STORED.numbers;
  Fragment columns[2][T::ROW_FRAGMENTS];
  read_ahead<T::DOT_FRAGMENTS / 2 * T::KEY_FRAGMENTS, AHEAD>(load, [&](int step, const Fragment& words) {
    const int n = step % T::KEY_FRAGMENTS, d = step / T::KEY_FRAGMENTS * 2;
    if (n == 0) {
      load_left(columns[0], d);
      load_left(columns[1], d + 1);
    }
    for_each<2>([&](int side) {
      uint32 upper[2], lower[2];  // of keys 0 to 7, and of the 8 behind
      halve<NUMBERS, false>(upper, words.reg[side]);
      halve<NUMBERS, false>(lower, words.reg[side + 2]);
      const Fragment keys{{upper[0], upper[1], lower[0], lower[1]}};
#pragma unroll
      for (int m = 0; m < T::ROW_FRAGMENTS; ++m) mma_pair<fp16>(scores[m][n], columns[side][m], keys);
    });
  });
}

// out[16 M, columns] += weights V: `load` gives 16 keys of 32 columns, as words. Of a pair of products the first has even columns.
template <class T, int AHEAD, class Load>
DEVICE void add_stored_values(Outputs<T>& out, const Fragment (&weights)[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS], Load load) {
  constexpr Numbers NUMBERS = T::STORED.numbers;
  constexpr int D = T::OUT_FRAGMENTS / 2;
  const auto of_32 = [&](int step) { return load(step / D * T::OUT_FRAGMENTS + step % D); };
  read_ahead<T::KEY_FRAGMENTS * D, AHEAD>(of_32, [&](int step, const Fragment& words) {
    for_each<2>([&](int side) {
      uint32 upper[2], lower[2];  // even and odd columns of keys 0 to 7, and of the 8 behind
      halve<NUMBERS, true>(upper, words.reg[2 * side]);
      halve<NUMBERS, true>(lower, words.reg[2 * side + 1]);
      const Fragment values{{upper[0], lower[0], upper[1], lower[1]}};
#pragma unroll
      for (int m = 0; m < T::ROW_FRAGMENTS; ++m) mma_pair<fp16>(out[m][step % D * 2 + side], weights[m][step / D], values);
    });
  });
}

// The scales of a walk. Without any nothing is done, and nothing is kept.
template <class T, bool = T::IS_STORED>
struct StoredWalk {
  DEVICE StoredWalk(const typename T::Params&, const Owned<T>&, float) {}
  DEVICE void scale_scores(Scores<T>&, SharedAddress) const {}
  static DEVICE bool scale_weights(Scores<T>&, float (&)[T::ROW_FRAGMENTS][2], SharedAddress) { return false; }
  static DEVICE float scaled(float factor) { return factor; }
};

template <class T>
struct StoredWalk<T, true> {
  // Factors of scores to the log2 domain, or with an expression, which wants them scaled, 1.
  float row_scales[T::ROW_FRAGMENTS][2];
  float row_factors[T::ROW_FRAGMENTS][2];  // of q k, for an expression
  float values = 1.0f;                     // scale of a head's values
  // A row's outputs are in it: a power of two, as large as its weights times the scales of tokens have been.
  float unit[T::ROW_FRAGMENTS][2];

  static constexpr float UNIT_MIN = 0x1p-100f;

  DEVICE StoredWalk(const typename T::Params& params, const Owned<T>& owned, float scale_log2) {
    const float scale = fabsf(keys_of_head(params, owned)), keys = scale == 0.0f ? 1.0f : scale;
    if constexpr (!T::STORED.v_per_token) values = of_head(owned, params.lists.v_scale, params.lists.strides_v_scale);
    for_each<T::ROW_FRAGMENTS, 2>([&](int m, int half) {
      unit[m][half] = UNIT_MIN;
      const float factor = keys * load_shared_4(row_factor<T>(T::warp_row() + 16 * m + accumulator_row(2 * half)));
      row_factors[m][half] = HAS_SCORE<typename T::Score> ? factor : 1.0f;
      const float own = factor * scale_log2;  // not 0, which times the -inf of a hidden key is NaN; NaN stays
      row_scales[m][half] = HAS_SCORE<typename T::Score> ? 1.0f : own < 0x1p-126f ? 0x1p-126f : own;
    });
  }

  // The scale of all keys of the block's head, where it is one; else 1. It may have any sign.
  static DEVICE float keys_of_head(const typename T::Params& params, const Owned<T>& owned) {
    if constexpr (T::STORED.k_per_token) return 1.0f;
    return of_head(owned, params.lists.k_scale, params.lists.strides_k_scale);
  }

  DEVICE void scale_scores(Scores<T>& scores, SharedAddress slot) const {
    if constexpr (!T::STORED.k_per_token && !HAS_SCORE<typename T::Score>) return;
    for_each<T::KEY_FRAGMENTS, 2>([&](int n, int side) {
      float scale[2] = {1.0f, 1.0f};
      if constexpr (T::STORED.k_per_token) load_shared_8(scale, of_keys(slot + T::K_SCALES_AT, n, side));
      for_each<T::ROW_FRAGMENTS, 4>(
          [&](int m, int e) { scores[m][n][side].value[e] *= row_factors[m][e / 2] * scale[e % 2]; });
    });
  }

  // Weights times the scales of their tokens' values, in a row's unit: fp16 has the result. A key without weight does not
  // count. True if outputs decay by a larger unit.
  DEVICE bool scale_weights(Scores<T>& weights, float (&decay)[T::ROW_FRAGMENTS][2], SharedAddress slot) {
    if constexpr (!T::STORED.v_per_token) return false;
    float top[T::ROW_FRAGMENTS][2] = {};
    for_each<T::KEY_FRAGMENTS, 2>([&](int n, int side) {
      float scale[2];
      load_shared_8(scale, of_keys(slot + T::V_SCALES_AT, n, side));
      for_each<T::ROW_FRAGMENTS, 4>([&](int m, int e) {
        float& weight = weights[m][n][side].value[e];
        weight *= scale[e % 2];
        top[m][e / 2] = fmaxf(top[m][e / 2], fabsf(weight));
      });
    });
    bool decays = false;
    for_each<T::ROW_FRAGMENTS, 2>([&](int m, int half) {
      const float largest = reduce_row(top[m][half], [](float a, float b) { return fmaxf(a, b); }), old = unit[m][half];
      unit[m][half] = fmaxf(old, float_of_bits(min(float_bits(largest) & 0x7f800000u, 0x7e800000u)));
      const float inverse = float_of_bits(0x7f000000u - float_bits(unit[m][half]));
      decay[m][half] *= old * inverse;
      decays |= unit[m][half] != old;
      for_each<T::KEY_FRAGMENTS, 2, 2>(
          [&](int n, int side, int e) { weights[m][n][side].value[2 * half + e] *= inverse; });
    });
    return decays;
  }

  DEVICE float scaled(float factor) const { return factor * values; }

  // Four neighbouring columns of one of the lane's rows, of a pair of accumulators of its fragment m.
  DEVICE Chunk four_columns(const Accumulator (&pair)[2], int m, int half) const {
    const float factor = T::STORED.v_per_token ? unit[m][half] : 1.0f;
    const float(&even)[4] = pair[0].value;
    const float(&odd)[4] = pair[1].value;
    const float four[4] = {even[2 * half] * factor, odd[2 * half] * factor, even[2 * half + 1] * factor, odd[2 * half + 1] * factor};
    return chunk_of(four);
  }

 private:
  static DEVICE float of_head(const Owned<T>& owned, const float* all, const Strides& strides) {
    return load_global_4(all + owned.sequence * strides.batch + owned.head_kv * strides.head);
  }
  // The scales of the lane's two keys of a fragment.
  static DEVICE SharedAddress of_keys(SharedAddress scales, int n, int side) {
    return scales + (16 * n + 8 * side + accumulator_column(0)) * 4;
  }
};

}  // namespace multiattn
