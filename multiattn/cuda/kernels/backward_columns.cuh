// Gradients whose rows several warps share: each has some of the columns, and the operand that their rows have in common
// comes through shared memory. So a gradient may be wider than what one warp's registers hold.
#pragma once
#include "multiattn/gemm.cuh"

namespace multiattn {

// The tile has this fragment of columns: of widths that warps do not share evenly the last warps have fewer.
template <class Tile, int ALL>
DEVICE constexpr bool has_columns(int fragment) {
  return Tile::WIDTH / 16 == ALL || fragment < Tile::WIDTH / 16;
}

// sum[16 M, 16 N] += left[16 M, TileLeft::WIDTH] values[TileLeft::WIDTH, 16 N], whose columns begin with fragment
// `first` of ALL that warps share.
template <class E, class TileLeft, class TileValues, int ALL, int M, int N>
DEVICE void accumulate_columns(Product<M, N>& sum, SharedAddress left, SharedAddress values, int first, uint32 thread) {
  const auto left_reader = FragmentReader<TileLeft>::down(thread);
  const auto reader = FragmentReader<TileValues>::down(thread);
#pragma unroll
  for (int n = 0; n < TileLeft::WIDTH; n += 16) {
    Fragment rows[M];
#pragma unroll
    for (int m = 0; m < M; ++m) rows[m] = left_reader.load(left, 16 * m, n);
#pragma unroll
    for (int d = 0; d < N; ++d) {
      if (!has_columns<TileValues, ALL>(first + d)) continue;
      const Fragment right = reader.load_transposed(values, n, 16 * (first + d));
#pragma unroll
      for (int m = 0; m < M; ++m) mma_pair<E>(sum[m][d], rows[m], right);
    }
  }
}

// Writes rows[16 M, 16 N] as `store_rows` does, of columns from fragment `first` on. No lane reads the warp's part of the
// tile any more.
template <class E, class TileRows, int ALL, int M, int N>
DEVICE void store_columns(const Product<M, N>& rows, float factor, SharedAddress tile, uint16* target, int64 stride,
                          int valid_rows, int first) {
  const PairWriter<TileRows> writer;
  for_each<M, N, 2, 2>([&](int m, int d, int side, int half) {
    const float(&value)[4] = rows[m][d][side].value;
    const uint32 pair = pack<E>(value[2 * half] * factor, value[2 * half + 1] * factor);
    if (has_columns<TileRows, ALL>(first + d)) writer.store(tile, 16 * m + 8 * half, 2 * (first + d) + side, pair);
  });
  sync_warp();  // the warp's part is complete
  for (int i = thread_index() % WARP; i < 16 * M * 2 * N; i += WARP) {
    const int row = i / (2 * N), chunk = 2 * first + i % (2 * N);
    if (row < valid_rows && chunk < TileRows::VALID_CHUNKS)
      store_global_16(target + row * stride + chunk * CHUNK_ELEMENTS, load_shared_16(TileRows::chunk(tile, row, chunk)));
  }
}

}  // namespace multiattn
