// Online softmax on the accumulators of wgmma (Dao, FlashAttention-2, Algorithm 1), in the log2 domain.
//
// A thread has two rows of its warp's 16: half 0 is row lane / 4, half 1 the row 8 below. Of 8 keys it has two of each row:
// value[4 * i + 2 * half] and the next are of keys 8 * i + 2 * (lane % 4) and the next.
#pragma once
#include "forward_wgmma_traits.cuh"
#include "multiattn/ptx_sm90.cuh"
#include "multiattn/softmax.cuh"

namespace multiattn {

template <class T>
using WarpgroupScores = float[T::TILE_N / 2];

// LAZY_MAX: weights of a block are made relative to the maxima of earlier blocks, before its own are known, and checked
// afterwards: as long as all are representable nothing is lost, as sums are fp32 and 16-bit formats are as precise at any
// exponent. bf16 has exponents to spare: what weights are relative to is this much (log2) above the maximum, so that one
// bit of an exponent, which an OR of all weights shows, tells that a row's maximum has outgrown it.
template <class E>
constexpr int HEADROOM = IS_FP16<E> ? 0 : 16;

// True if one of a thread's weights is too large: in bf16 2 or more, in fp16 2^15 or more, inf or NaN.
template <class E, int N>
DEVICE bool outgrown(const uint32 (&weights)[N][4]) {
  uint32 all = 0;
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) {
    const uint32 pair = weights[i / 4][i % 4];
    all = IS_FP16<E> ? max_of_halves(all, pair) : all | pair;
  }
  if constexpr (IS_FP16<E>) return max_of_halves(all, 0x77ff77ffu) != 0x77ff77ffu;
  return (all & 0x40004000u) != 0;
}

// The expression's scores in place of Q K^T. Beyond the ends of the sequences they mean nothing.
template <class T, class Heads, class Queries>
DEVICE void modify_scores(WarpgroupScores<T>& scores, const Heads& heads, const Queries& queries, int first_key) {
#pragma unroll
  for (int i = 0; i < T::TILE_N / 2; ++i) {
    const Position key(first_key + accumulator_column(0), i / 4 * 8 + i % 2);
    scores[i] = heads[i / 2 % 2].score(scores[i], queries[i / 2 % 2], key);
  }
}

template <class T, class Queries>
DEVICE void mask_scores(WarpgroupScores<T>& scores, const Mask<T::BAND>& mask, const Queries& queries, int first_key) {
#pragma unroll
  for (int i = 0; i < T::TILE_N / 2; ++i) {
    const int query = queries[i / 2 % 2], key = first_key + i / 4 * 8 + accumulator_column(i % 4);
    if (!mask.visible(query, key)) scores[i] = -infinity();
  }
}

// Hides a block's scores from one of its keys on.
template <class T>
DEVICE void hide_from(WarpgroupScores<T>& scores, int key) {
#pragma unroll
  for (int i = 0; i < T::TILE_N / 2; ++i)
    if (i / 4 * 8 + accumulator_column(i % 4) >= key) scores[i] = -infinity();
}

// Hides the scores of a partial block that the expression's mask hides.
template <class T, class Heads, class Queries>
DEVICE void mask_partial(WarpgroupScores<T>& scores, const Heads& heads, const Queries& queries, int first_key) {
#pragma unroll
  for (int i = 0; i < T::TILE_N / 2; ++i) {
    const Position key(first_key + accumulator_column(0), i / 4 * 8 + i % 2);
    if (!heads[i / 2 % 2].visible(queries[i / 2 % 2], key)) scores[i] = -infinity();
  }
}

// The two sides of a band, each for itself, as most blocks have one of them at most. What a row is compared with counts from
// this thread's first key of the block, so that keys are constants.
template <class T, bool AFTER, class Queries>
DEVICE void hide_side(WarpgroupScores<T>& scores, const Mask<T::BAND>& mask, const Queries& queries, int first_key) {
  int edge[2];  // the last key that is visible, or the first
#pragma unroll
  for (int half = 0; half < 2; ++half)
    edge[half] = (AFTER ? mask.last_key(queries[half]) : mask.first_key(queries[half])) - first_key - accumulator_column(0);
#pragma unroll
  for (int i = 0; i < T::TILE_N / 2; ++i)
    if (const int key = i / 4 * 8 + i % 2, own = edge[i / 2 % 2]; AFTER ? key > own : key < own) scores[i] = -infinity();
}

// The largest of a thread's scores of one row.
template <class T>
DEVICE float top_of_thread(const WarpgroupScores<T>& scores, int half) {
  float even = scores[2 * half], odd = scores[2 * half + 1];  // two chains
#pragma unroll
  for (int i = 4 + 2 * half; i < T::TILE_N / 2; i += 4) {
    even = fmaxf(even, scores[i]);
    odd = fmaxf(odd, scores[i + 1]);
  }
  return fmaxf(even, odd);
}

// The largest score of each row, in the log2 domain; all lanes of a quad have it. scale_log2 is positive.
template <class T>
DEVICE void find_tops(const WarpgroupScores<T>& scores, float (&top)[2], float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    top[half] = reduce_row(top_of_thread<T>(scores, half), [](float a, float b) { return fmaxf(a, b); }) * scale_log2;
}

// Scores to weights, `exp2(score * scale_log2 - base)`, and each row's sum of this thread's.
template <class T>
DEVICE void exponentiate(WarpgroupScores<T>& scores, const float (&base)[2], float scale_log2, float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < T::TILE_N / 2; i += 4) {
      float &first = scores[i], &second = scores[i + 1];
      first = fmaf(first, scale_log2, -base[half]);
      second = fmaf(second, scale_log2, -base[half]);
      first = exp2_approx(first);
      second = exp2_approx(second);
      even += first;
      odd += second;
    }
    sum[half] = even + odd;
  }
}

// Raises the state's maxima to `top` and `headroom` where that is more than MAX_LAG above; `decay` is what older sums and
// outputs must be multiplied by, `base` what the weights are relative to.
DEVICE void raise_max(RowState& state, const float (&top)[2], int headroom, float (&decay)[2], float (&base)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float old = state.max[half], wanted = top[half] + headroom;
    state.max[half] = wanted - old > MAX_LAG ? wanted : old;  // -inf - -inf is NaN: stays -inf
    base[half] = state.max[half] == -infinity() ? 0.0f : state.max[half];
    decay[half] = exp2_approx(old - base[half]);
  }
}

}  // namespace multiattn
