// Online softmax in the log2 domain (Dao, FlashAttention-2, Algorithm 1), on scores that lie in accumulators.
#pragma once
#include "multiattn/ptx.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

// The maximum that a row subtracts may lag behind the true one by this much (log2): weights then reach 2^8, which
// changes no relative error, and most blocks need no rescaling of the output (FlashAttention-4 does the same).
constexpr int MAX_LAG = 8;

constexpr float LN_2 = 0.693147180559945309f, LOG2_E = 1.44269504088896341f;

// The four lanes of a quad hold one row.
template <class Combine>
DEVICE float reduce_row(float value, Combine combine) {
  value = combine(value, shuffle_xor(value, 1));
  return combine(value, shuffle_xor(value, 2));
}

// Running state of the two rows that a lane shares in a 16-row fragment: half 0 is row lane / 4, half 1 the row 8 below.
struct RowState {
  float max[2];  // what weights are relative to, in log2 units: -inf until a key is seen
  float sum[2];  // this lane's part of the sum of weights

  static DEVICE RowState empty() { return {{-infinity(), -infinity()}, {0.0f, 0.0f}}; }
};

// The factor of the scores of one of a lane's two rows: that of all, or its own.
DEVICE float of_half(float scale, int) { return scale; }
DEVICE float of_half(const float (&scales)[2], int half) { return scales[half]; }
// As it is where a kernel also writes the largest score of each row, behind which `max` may lag.
struct ToppedRowState : RowState {
  float top[2];  // of the keys seen, in log2 units, -inf of none; of all lanes of a quad, or of this one

  static DEVICE ToppedRowState empty() { return {RowState::empty(), {-infinity(), -infinity()}}; }
  DEVICE void raise(const float (&others)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], others[half]);
  }
};
template <bool HAS_MAX>
struct RowStateKind {
  using Type = RowState;
};
template <>
struct RowStateKind<true> {
  using Type = ToppedRowState;
};
template <class T>
using RowStateOf = typename RowStateKind<T::HAS_MAX>::Type;

// The largest score of each of a lane's two rows, in the log2 domain; all lanes of a quad have it. scale_log2 is positive.
template <int N, class Scale>
DEVICE void find_tops(const Accumulator (&scores)[N][2], float (&top)[2], const Scale& scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = -infinity();
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side)
        top[half] = fmaxf(top[half], fmaxf(scores[n][side].value[2 * half], scores[n][side].value[2 * half + 1]));
    top[half] = reduce_row(top[half], [](float a, float b) { return fmaxf(a, b); }) * of_half(scale_log2, half);
  }
}

// Turns scores into weights, `exp2(score * scale_log2 - max)`, and brings the state up to date: its maximum is raised to
// `top` where that is more than LAG above it. `decay` is what older sums and outputs must be multiplied by.
template <int LAG, int N, class Scale>
DEVICE void update_softmax(Accumulator (&scores)[N][2], const float (&top)[2], RowState& state, float (&decay)[2],
                           const Scale& scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float old = state.max[half];
    state.max[half] = top[half] - old > LAG ? top[half] : old;  // -inf - -inf is NaN: stays -inf
    const float base = state.max[half] == -infinity() ? 0.0f : state.max[half];
    decay[half] = exp2_approx(old - base);

    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          float& score = scores[n][side].value[e];
          score = exp2_approx(fmaf(score, of_half(scale_log2, half), -base));
          sum += score;
        }
    state.sum[half] = state.sum[half] * decay[half] + sum;
  }
}

// A sink is one more key of a row, with a logit (natural log, not scaled) and without a value. Brings the row's maximum (log2)
// and its whole sum up to date for it; what it returns the row's outputs must be multiplied by.
DEVICE float add_sink(float& max, float& sum, float sink) {
  const float old = max, sink_log2 = sink * LOG2_E;
  max = fmaxf(old, sink_log2);
  const float base = max == -infinity() ? 0.0f : max;  // no key is seen, and a sink of -inf is none
  const float decay = exp2_approx(old - base);
  sum = sum * decay + exp2_approx(sink_log2 - base);
  return decay;
}

}  // namespace multiattn
