// dK and dV of a warp's 16 keys, from registers to memory.
#pragma once
#include "backward_wgmma_traits.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

// A gradient[16, D] times `factor`, to rows `stride` elements apart, of which the first `rows` are there, and the first `columns`.
template <class E, int D_2>
DEVICE void write_rows(uint16* target, int64 stride, int rows, const float (&gradient)[D_2], float factor, int columns = 2 * D_2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_row(2 * half);
    store_in_quad<2 * D_2 / CHUNK_ELEMENTS>(target + row * stride, row < rows, [&](int chunk) {
      const int i = 4 * chunk + 2 * half;
      return pack<E>(gradient[i] * factor, gradient[i + 1] * factor);
    }, columns / CHUNK_ELEMENTS);
  }
}

// dV, and dK times the scale, of the warp's keys from `first_key` on.
template <class T>
DEVICE void write_gradients(const typename T::Params& params, const KeyTile<T>& tile, int first_key,
                            const float (&dk)[T::HEAD_DIM / 2], const float (&dv)[T::HEAD_DIM_V / 2]) {
  using E = typename T::Element;
  const BackwardParams& backward = params.backward;
  const KeySequence<SequenceOf<T>> keys{backward, tile.head_kv, tile.sequence};
  int end = count_keys(backward, tile.sequence);
  if constexpr (IS_CUT<typename T::Blocked>)
    end = end_of_keys<typename T::Blocked, T::TILE_N>(backward, tile.sequence, tile.first_key);
  const int rows = end - first_key;
  write_rows<E>(keys.dv() + first_key * backward.strides_dv.seq, backward.strides_dv.seq, rows, dv, 1.0f);
  write_rows<E>(keys.dk() + first_key * backward.strides_dk.seq, backward.strides_dk.seq, rows, dk, backward.grad_factor);
}

}  // namespace multiattn
