// What is not finite in V, and keys that not every query sees: 0 * NaN of a masked key must not reach a row. Rare, so it
// is found out at the end and done again with care.
#pragma once
#include "forward_products.cuh"
#include "forward_stream.cuh"
#include "multiattn/mask.cuh"

namespace multiattn {

// Which of 16 keys the warp's row fragment sees, as operand A: one where visible, else zero.
template <class T>
DEVICE Fragment visible_as_operand(const Mask<T::CAUSAL>& mask, int first_query, int first_key) {
  Accumulator seen[2];
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      seen[side].value[e] =
          mask.visible(first_query + accumulator_row(e), first_key + 8 * side + accumulator_column(e)) ? 1.0f : 0.0f;
  return as_operand<typename T::Element>(seen);
}

// Adds inf, -inf and NaN of V to every output whose query sees the key they are of, whatever its weight.
template <class T>
DEVICE void add_nonfinite(Outputs<T>& out, const ForwardParams& params, Stream<T>& stream, int first_query, int end) {
  using E = typename T::Element;
  const Mask<T::CAUSAL> mask{params.seq_q, params.seq_kv};
  for (int block = 0; block < end; ++block) {
#pragma unroll 1
    for (int piece = 0; piece < T::K_PIECES; ++piece) stream.await_k(block, piece);
#pragma unroll 1
    for (int piece = 0; piece < T::V_PIECES; ++piece) {
      stream.await_v(block, piece);
      const int first_key = block * T::TILE_N + piece * T::V_ROWS;
      for_each_value<T, false>(stream.v(block, piece), [&](int n, int d, const Fragment& value) {
#pragma unroll 1  // a rare pass: its code should be small
        for (int which = 0; which < 3; ++which) {
          const uint32 wanted = which == 0 ? E::EXPONENT : which == 1 ? E::EXPONENT | 0x8000u : E::QUIET_NAN;
          const float added = which == 0 ? infinity() : which == 1 ? -infinity() : infinity() - infinity();
          const Fragment hit = map_elements(value, [&](uint32 half) {
            const bool is_nan = (half & 0x7fffu) > E::EXPONENT;
            return (is_nan ? E::QUIET_NAN : half) == wanted ? E::ONE : 0u;
          });
#pragma unroll
          for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
            Accumulator reached[2] = {};
            const int query = first_query + T::warp_row() + 16 * m;
            mma_pair<E>(reached, visible_as_operand<T>(mask, query, first_key + 16 * n), hit);
#pragma unroll
            for (int side = 0; side < 2; ++side)
#pragma unroll
              for (int e = 0; e < 4; ++e)
                if (reached[side].value[e] > 0.0f) out[m][d][side].value[e] += added;
          }
        }
      });
    }
  }
}

template <class T>
DEVICE bool has_nonfinite(const Outputs<T>& out) {
  float product = 0.0f;  // 0 * x is 0 for every finite x, else NaN: one instruction an element
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
    for (int d = 0; d < T::OUT_FRAGMENTS; ++d)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int e = 0; e < 4; ++e) product = fmaf(out[m][d][side].value[e], 0.0f, product);
  return product != 0.0f;
}

}  // namespace multiattn
