// What is not finite in V, and keys that not every query sees: 0 * NaN of a masked key must not reach a row. Rare, so it
// is found out at the end and done again with care.
#pragma once
#include "forward_products.cuh"
#include "forward_stream.cuh"
#include "multiattn/mask.cuh"
#include "multiattn/special.cuh"

namespace multiattn {

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
#pragma unroll
        for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
          const int query = first_query + T::warp_row() + 16 * m;
          add_special<E>(out[m][d], visible_as_operand<E>(mask, query, first_key + 16 * n), value);
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
