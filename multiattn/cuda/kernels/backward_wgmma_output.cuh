// dK and dV of a warp's 16 keys, from registers to memory.
#pragma once
#include "backward_wgmma_traits.cuh"

namespace multiattn {

// A gradient[16, D] times `factor`, to rows `stride` elements apart, of which the first `rows` are there. Quads of lanes gather
// 16 bytes a lane.
template <class T>
DEVICE void write_rows(uint16* target, int64 stride, int rows, const float (&gradient)[T::HEAD_DIM / 2], float factor) {
  constexpr int CHUNKS = T::HEAD_DIM / CHUNK_ELEMENTS;
  const int lane = thread_index() % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_row(2 * half);
    uint16* const own = target + row * stride + lane * CHUNK_ELEMENTS;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
      Chunk mine = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int i = 4 * (chunk + w) + 2 * half;
        if (chunk + w < CHUNKS)
          mine.word[w] = pack<typename T::Element>(gradient[i] * factor, gradient[i + 1] * factor);
      }
      store_global_16_if(chunk + lane < CHUNKS && row < rows, own + chunk * CHUNK_ELEMENTS, transpose_in_quad(mine));
    }
  }
}

// dV, and dK times the scale, of the warp's keys from `first_key` on.
template <class T>
DEVICE void write_gradients(const typename T::Params& params, const KeyTile<T>& tile, int first_key,
                            const float (&dk)[T::HEAD_DIM / 2], const float (&dv)[T::HEAD_DIM / 2]) {
  const BackwardParams& backward = params.backward;
  const KeySequence<SequenceOf<T>> keys{backward, tile.head_kv, tile.sequence};
  const int rows = count_keys(backward, tile.sequence) - first_key;
  write_rows<T>(keys.dv() + first_key * backward.strides_dv.seq, backward.strides_dv.seq, rows, dv, 1.0f);
  write_rows<T>(keys.dk() + first_key * backward.strides_dk.seq, backward.strides_dk.seq, rows, dk, backward.grad_factor);
}

}  // namespace multiattn
