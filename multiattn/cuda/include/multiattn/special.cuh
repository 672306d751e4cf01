// Scales that are not positive: their sign goes into Q.
#pragma once
#include "multiattn/tile.cuh"

namespace multiattn {

// A negative scale negates Q. A zero one empties it, but for what is not finite: 0 * inf and 0 * NaN are NaN.
template <class E>
DEVICE uint32 fold_sign(uint32 half, int sign) {
  if (sign < 0) return half ^ 0x8000u;
  return (half & E::EXPONENT) == E::EXPONENT ? E::QUIET_NAN : 0u;
}

// Folds the sign into a chunk of Q in shared memory.
template <class E>
DEVICE void fold_sign_into(SharedAddress place, int sign) {
  Chunk chunk = load_shared_16(place);
#pragma unroll
  for (int w = 0; w < 4; ++w)
    chunk.word[w] = fold_sign<E>(chunk.word[w] & 0xffffu, sign) | fold_sign<E>(chunk.word[w] >> 16, sign) << 16;
  store_shared_16(place, chunk);
}

}  // namespace multiattn
