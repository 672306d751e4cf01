// Weights and dS on the accumulators of wgmma, transposed: a thread has two keys of its warp's 16, half 0 is row lane / 4, half 1
// the row 8 below. Of 8 queries it has two for each: value[4 * i + 2 * half] and the next are of queries 8 * i + 2 * (lane % 4)
// and the next.
#pragma once
#include "backward_wgmma_traits.cuh"
#include "mask_bits.cuh"
#include "multiattn/softmax.cuh"

namespace multiattn {

// [64, TILE_M] of a warpgroup.
template <class T>
using TransposedScores = float[T::TILE_M / 2];

// The query head, in its batch entry, of which an expression knows. Without one there is not even an unread number: that changes
// the order of registers.
template <class Score, bool = HAS_SCORE<Score>>
struct ScoredHead {};
template <class Score>
struct ScoredHead<Score, true> {
  int head;
};
// With lists, the step whose weights there are, and a bit for each of a thread's elements that is hidden.
template <class T, bool = T::LISTED>
struct WalkPlace : ScoredHead<typename T::Score> {};
template <class T>
struct WalkPlace<T, true> {
  ListedStep at;
  uint32 hidden;
};

// lse or delta of a thread's queries, from their list in shared memory: asked for before there is a use for them, as shared
// memory is busy. LATE: 16 queries at a time, when they are wanted, as there are no registers for more.
template <class T, bool LATE = false>
class QueryStatistics {
 public:
  DEVICE explicit QueryStatistics(SharedAddress list) {
    // Above D=96 there is no register to keep this: it is read again.
    const uint32 thread = T::WIDTH > 96 ? recomputed(thread_index()) : thread_index();
    own_ = list + thread % 4 * 16;
#pragma unroll
    for (int i = 0; !LATE && i < T::QUERY_STEPS; ++i) load(i);
  }

  // Before the use of element i of the accumulators.
  DEVICE void want(int i) {
    if (LATE && i % 8 == 0) load(i / 8);
  }

  // The statistic of element i of the accumulators.
  DEVICE float of(int i) const { return float_of_bits(four_[i / 8].word[i / 4 % 2 * 2 + i % 2]); }

 private:
  DEVICE void load(int i) { four_[i] = load_shared_16(own_ + i * 64); }

  SharedAddress own_;
  Chunk four_[T::QUERY_STEPS];
};

// Scores to weights, exp2(score - lse) with both in the log2 domain. lse is inf for a query that is not there or sees no key.
template <class T>
DEVICE void exponentiate(TransposedScores<T>& scores, float factor, const QueryStatistics<T>& lse) {
#pragma unroll
  for (int i = 0; i < T::TILE_M / 2; ++i) scores[i] = exp2_approx(fmaf(scores[i], factor, -lse.of(i)));
}

// Calls `hide` for each element that the mask hides, and for queries beyond the end: there an expression may be of any size.
template <class T, class Hide>
DEVICE void hide_transposed(const Mask<T::BAND>& mask, int first_key, int first_query, Hide hide) {
#pragma unroll
  for (int i = 0; i < T::TILE_M / 2; ++i) {
    const int query = first_query + i / 4 * 8 + accumulator_column(i % 4), key = first_key + accumulator_row(i % 4);
    const bool is_beyond = (HAS_SCORE<typename T::Score> || HAS_LISTS<typename T::Blocked>) && query >= mask.seq_q;
    if (is_beyond || !mask.visible(query, key)) hide(i);
  }
}

// Calls `hide` for each element behind so many keys, or queries.
template <class T, class Hide>
DEVICE void hide_beyond(int keys, int queries, Hide hide) {
#pragma unroll
  for (int i = 0; i < T::TILE_M / 2; ++i)
    if (i / 4 * 8 + accumulator_column(i % 4) >= queries || accumulator_row(i % 4) >= keys) hide(i);
}

// A bit for each element that is hidden by the mask, by the expression's in a partial block, or as `hide_transposed` has it.
template <class T>
DEVICE uint32 find_hidden(const typename T::Params& params, const KeyTile<T>& of, const HeadScores<typename T::Score>& head,
                          const ListedStep& at, int first_key) {
  const int first_query = first_query_in<typename T::Blocked, T::TILE_M>(of.sequence, at.tile.tile());
  uint32 hidden = 0;
  if constexpr (HAS_BITS<typename T::Blocked>) {
    using Bits = BitsOf<typename T::Blocked, false, T::TILE_M>;
    if (at.tile.is_partial() && at.place != NO_BITS) hidden = load_constant(Bits::words(params.lists.mask_bits, at.place, first_key, at.tile.tile()));
  }
  if (at.tile.is_cut())
    hide_transposed<T>(mask_of<T::BAND>(params.backward, of.sequence), first_key, first_query, [&](int i) { hidden |= 1u << i; });
  if constexpr (IS_CUT<typename T::Blocked>) {
    const int end_query = end_query_in<typename T::Blocked, T::TILE_M>(params.backward, of.sequence, at.tile.tile());
    const int end_key = end_of_keys<typename T::Blocked, T::TILE_N>(params.backward, of.sequence, of.first_key);
    if (at.tile.is_cut())
      hide_beyond<T>(end_key - first_key, end_query - first_query, [&](int i) { hidden |= 1u << i; });
  }
  if constexpr (HAS_MASK<typename T::Score> && !ALL_BITS<typename T::Blocked>) {
    if (at.tile.is_partial() && at.place == NO_BITS) {
#pragma unroll
      for (int i = 0; i < T::TILE_M / 2; ++i) {
        const int query = first_query + i / 4 * 8 + accumulator_column(i % 4);
        if (!head.visible(query, {first_key + accumulator_row(0), i / 2 % 2 * 8})) hidden |= 1u << i;
      }
    }
  }
  return hidden;
}

// 0 in place of those that have a bit.
template <class T>
DEVICE void clear_hidden(TransposedScores<T>& weights, uint32 hidden) {
#pragma unroll
  for (int i = 0; i < T::TILE_M / 2; ++i)
    if (hidden & 1u << i) weights[i] = 0.0f;
}

// 0 in place of what the mask hides.
template <class T>
DEVICE void mask_transposed(TransposedScores<T>& weights, const Mask<T::BAND>& mask, int first_key, int first_query) {
  hide_transposed<T>(mask, first_key, first_query, [&](int i) { weights[i] = 0.0f; });
}

// Accumulators rounded, as operand A of wgmma_rs: 16 queries in four registers.
template <class T>
using TransposedOperand = uint32[T::QUERY_STEPS][4];

// The delta of a thread's queries where dP begins with it.
struct NoDelta {
  DEVICE explicit NoDelta(SharedAddress) {}
  DEVICE void want(int) {}
  static DEVICE float of(int) { return 0.0f; }
};
template <class T, class Statistics, bool = T::EARLY_SCORES>
struct DeltaOf {
  using Type = Statistics;
};
template <class T, class Statistics>
struct DeltaOf<T, Statistics, true> {
  using Type = NoDelta;
};

// Where dP begins: -delta of a thread's queries, each for two keys.
template <class T>
DEVICE void load_negative_delta(TransposedScores<T>& dp, SharedAddress list) {
  const SharedAddress own = list + thread_index() % 4 * 16;
#pragma unroll
  for (int i = 0; i < T::TILE_M / 8; ++i) {
    const Chunk four = load_shared_16(own + i * 64);
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[4 * i + e] = float_of_bits(four.word[e]);
  }
}

// Element i = 0.
template <class T>
DEVICE void clear_rounded(TransposedOperand<T>& weights, int i) {
  weights[i / 8][i / 2 % 4] &= i % 2 ? 0x0000ffffu : 0xffff0000u;
}

// The scores of an expression to weights: when two neighbours are there, `take` has both times their slopes.
template <class T, class Statistics, class Take>
DEVICE void weigh_transposed(TransposedScores<T>& scores, const HeadScores<typename T::Score>& head, int first_key,
                             int first_query, Statistics& lse, Take take) {
  const int query = first_query + accumulator_column(0), key = first_key + accumulator_row(0);
#pragma unroll
  for (int pair = 0; pair < T::TILE_M / 4; ++pair) {
    float sloped[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int i = 2 * pair + odd;
      lse.want(i);
      scores[i] = head.weight_of_exponent(scores[i], {query, i / 4 * 8 + odd}, {key, pair % 2 * 8}, lse.of(i), sloped[odd]);
    }
    take(pair, sloped);
  }
}

// dS^T = P^T * (dP^T - delta); it may take the place of P^T.
template <class T, class Statistics>
DEVICE void make_ds(TransposedOperand<T>& ds, const TransposedOperand<T>& weights, const TransposedScores<T>& dp,
                    Statistics& delta) {
  using E = typename T::Element;
#pragma unroll
  for (int pair = 0; pair < T::TILE_M / 4; ++pair) {
    const int low = 2 * pair, high = low + 1;
    delta.want(low);
    const uint32 weight = weights[pair / 4][pair % 4];
    ds[pair / 4][pair % 4] =
        pack<E>(unpack_low<E>(weight) * (dp[low] - delta.of(low)), unpack_high<E>(weight) * (dp[high] - delta.of(high)));
  }
}

}  // namespace multiattn
