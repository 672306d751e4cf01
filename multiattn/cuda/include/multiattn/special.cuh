// Elements that are not finite, and scales that are not positive: what fast paths leave out, told in 16-bit formats.
#pragma once
#include "multiattn/mask.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

// A negative scale negates Q. A zero one empties it, but for what is not finite: 0 * inf and 0 * NaN are NaN.
template <class E>
DEVICE uint32 fold_sign(uint32 half, int sign) {
  if (sign < 0) return half ^ 0x8000u;
  return (half & E::EXPONENT) == E::EXPONENT ? E::QUIET_NAN : 0u;
}

// The same for a chunk of Q in shared memory.
template <class E>
DEVICE void fold_sign_into(SharedAddress place, int sign) {
  Chunk chunk = load_shared_16(place);
#pragma unroll
  for (int w = 0; w < 4; ++w)
    chunk.word[w] = map_halves(chunk.word[w], [&](uint32 half) { return fold_sign<E>(half, sign); });
  store_shared_16(place, chunk);
}

// What is not finite counts as zero.
template <class E>
DEVICE Fragment finite_or_zero(const Fragment& fragment) {
  return map_elements(fragment, [](uint32 half) { return (half & E::EXPONENT) == E::EXPONENT ? 0u : half; });
}

// Which of 16 keys 16 queries see, as operand A: one where visible, else zero.
template <class E, bool CAUSAL>
DEVICE Fragment visible_as_operand(const Mask<CAUSAL>& mask, int first_query, int first_key,
                                   uint32 thread = thread_index()) {
  Accumulator seen[2];
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      seen[side].value[e] =
          mask.visible(first_query + accumulator_row(e, thread), first_key + 8 * side + accumulator_column(e, thread)) ? 1.0f : 0.0f;
  return as_operand<E>(seen);
}

// out[16x16] gets inf, -inf or NaN wherever `visible`, as visible_as_operand has it, meets one in value[16 keys x 16].
template <class E>
DEVICE void add_special(Accumulator (&out)[2], const Fragment& visible, const Fragment& value) {
#pragma unroll 1  // a rare pass: its code should be small
  for (int which = 0; which < 3; ++which) {
    const uint32 wanted = which == 0 ? E::EXPONENT : which == 1 ? E::EXPONENT | 0x8000u : E::QUIET_NAN;
    const float added = which == 0 ? infinity() : which == 1 ? -infinity() : infinity() - infinity();
    const Fragment hit = map_elements(value, [&](uint32 half) {
      const bool is_nan = (half & 0x7fffu) > E::EXPONENT;
      return (is_nan ? E::QUIET_NAN : half) == wanted ? E::ONE : 0u;
    });
    Accumulator reached[2] = {};
    mma_pair<E>(reached, visible, hit);
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (reached[side].value[e] > 0.0f) out[side].value[e] += added;
  }
}

}  // namespace multiattn
