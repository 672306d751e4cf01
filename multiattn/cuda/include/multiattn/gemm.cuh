// Products of tiles that a warp makes from shared memory and registers. M, N: fragments of 16 rows and columns.
#pragma once
#include "multiattn/ptx.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

template <int M, int N>
using Product = Accumulator[M][N][2];  // [16 * M, 16 * N]

template <class Sum, int M, int N>
DEVICE void clear(Sum (&sums)[M][N][2]) {
  for_each<M, N>([&](int m, int n) { sums[m][n][0] = sums[m][n][1] = Sum{}; });
}

// Calls `change(value, row, column)` for each of the lane's elements.
template <int M, int N, class Change>
DEVICE void for_each_element(Product<M, N>& product, uint32 thread, Change change) {
  for_each<M, N, 2, 4>([&](int m, int n, int side, int e) {
    change(product[m][n][side].value[e], 16 * m + accumulator_row(e, thread),
           16 * n + 8 * side + accumulator_column(e, thread));
  });
}

// Calls `use(step, fragment)` for each of STEPS fragments, which `load(step)` reads AHEAD of that.
template <int STEPS, int AHEAD, class Load, class Use>
DEVICE void read_ahead(Load load, Use use) {
  Fragment ring[AHEAD + 1];
#pragma unroll
  for (int step = 0; step < AHEAD && step < STEPS; ++step) ring[step] = load(step);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step + AHEAD < STEPS) ring[(step + AHEAD) % (AHEAD + 1)] = load(step + AHEAD);
    use(step, ring[step % (AHEAD + 1)]);
  }
}

// sums[16 M, 16 N] += left[16 M, 16 D] right[16 N, 16 D]^T. `load_left(column, d)` loads 16 elements of D for all rows,
// `load_right(step)` the same for 16 columns: those of one d, then of the next, AHEAD of their use.
template <class E, int D, int AHEAD, class Sum, int M, int N, class LoadLeft, class LoadRight>
DEVICE void multiply(Sum (&sums)[M][N][2], LoadLeft load_left, LoadRight load_right) {
  Fragment columns[2][M];
  load_left(columns[0], 0);
  read_ahead<D * N, AHEAD>(load_right, [&](int step, const Fragment& right) {
    const int d = step / N, n = step % N;
    if (n == 0 && d + 1 < D) load_left(columns[(d + 1) % 2], d + 1);
#pragma unroll
    for (int m = 0; m < M; ++m) mma_pair<E>(sums[m][n], columns[d % 2][m], right);
  });
}

// product[16 M, 16 N] = left[16 M, D] right[16 N, D]^T. Fragments are read AHEAD of their use. `thread` is thread_index(),
// or the same `recomputed` where no register is left to keep addresses across a loop.
template <class E, class TileLeft, class TileRight, int AHEAD, int M, int N>
DEVICE void multiply_rows(Product<M, N>& product, SharedAddress left, SharedAddress right, uint32 thread) {
  const auto left_reader = FragmentReader<TileLeft>::down(thread);
  const auto right_reader = FragmentReader<TileRight>::right(thread);
  const auto load_left = [&](Fragment(&column)[M], int d) {
#pragma unroll
    for (int m = 0; m < M; ++m) column[m] = left_reader.load(left, 16 * m, 16 * d);
  };
  const auto load_right = [&](int step) { return right_reader.load(right, step % N * 16, step / N * 16); };

  clear(product);
  multiply<E, TileLeft::WIDTH / 16, AHEAD>(product, load_left, load_right);
}

// sum[16 M, D] += weights[16 M, 16 N] values[16 N, D]; the sum may have more columns.
template <class E, class TileValues, int AHEAD, int M, int N, int COLUMNS>
DEVICE void accumulate_rows(Product<M, COLUMNS>& sum, const Fragment (&weights)[M][N], SharedAddress values, uint32 thread) {
  constexpr int D = TileValues::WIDTH / 16;
  static_assert(D <= COLUMNS, "a column for each");
  const auto reader = FragmentReader<TileValues>::down(thread);
  const auto load = [&](int step) { return reader.load_transposed(values, step / D * 16, step % D * 16); };
  read_ahead<N * D, AHEAD>(load, [&](int step, const Fragment& fragment) {
#pragma unroll
    for (int m = 0; m < M; ++m) mma_pair<E>(sum[m][step % D], weights[m][step / D], fragment);
  });
}

// Rounds a product to operand A of the next.
template <class E, int M, int N>
DEVICE void round_to_operand(Fragment (&operand)[M][N], const Product<M, N>& product) {
  for_each<M, N>([&](int m, int n) { operand[m][n] = as_operand<E>(product[m][n]); });
}

// Writes rows[16 M, D] times `factor`, rounded, through the warp's own rows of a tile of D columns, so that they leave in
// 16-byte stores. Rows from `valid_rows` on are not written; `target` is the first row, the next one `stride` elements on.
template <class E, class TileRows, int M, int COLUMNS>
DEVICE void store_rows(const Product<M, COLUMNS>& rows, float factor, SharedAddress tile, uint16* target,
                       int64 stride, int valid_rows) {
  const int lane = thread_index() % WARP;
  const PairWriter<TileRows> writer;
  sync_warp();  // no lane still reads the warp's rows of the tile
  for_each<M, TileRows::WIDTH / 16, 2, 2>([&](int m, int d, int side, int half) {
    const float(&value)[4] = rows[m][d][side].value;
    writer.store(tile, 16 * m + 8 * half, 2 * d + side, pack<E>(value[2 * half] * factor, value[2 * half + 1] * factor));
  });
  sync_warp();  // the warp's rows are complete
  for (int i = lane; i < 16 * M * TileRows::VALID_CHUNKS; i += WARP) {
    const int row = i / TileRows::VALID_CHUNKS, chunk = i % TileRows::VALID_CHUNKS;
    if (row < valid_rows)
      store_global_16(target + row * stride + chunk * CHUNK_ELEMENTS, load_shared_16(TileRows::chunk(tile, row, chunk)));
  }
}

}  // namespace multiattn
