// Products that a warpgroup makes by wgmma and leaves under way, and their operands in registers.
#pragma once
#include "multiattn/descriptor.cuh"
#include "multiattn/wgmma.cuh"

namespace multiattn {

// sums[64, N] = 64 rows of a tile times N rows of another, or += if ADDS. KEPT steps of the first are in registers, the others in
// shared memory.
template <class E, int N, class TileA, class TileB, int KEPT, bool ADDS = false, int STEPS>
DEVICE void multiply_rows(float (&sums)[N / 2], const Fragment (&kept)[STEPS], SharedAddress left, SharedAddress right) {
  const Descriptor a(recomputed(left), 16), b(right, 16);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const uint64 columns = b.at(i / 4 * TileB::PANEL_BYTES + i % 4 * 32);
    if (i < KEPT)
      wgmma_rs<E, N>(sums, kept[i].reg, columns, ADDS || i > 0);
    else
      wgmma_ss<E, N>(sums, a.at(i / 4 * TileA::PANEL_BYTES + i % 4 * 32), columns, ADDS || i > 0);
  }
  wgmma_commit();
}

// sums[64, D] += operand[64, 16 * STEPS] times rows of a tile; `is_first`: = instead of +=.
template <class E, int D, class TileB, int STEPS>
DEVICE void add_product(float (&sums)[D / 2], const uint32 (&operand)[STEPS][4], SharedAddress rows, bool is_first = false) {
  const Descriptor b(rows, TileB::PANEL_BYTES);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    wgmma_rs_mn<E, D>(sums, operand[i], b.at(i * 16 * TileB::ROW_BYTES), !is_first || i > 0);
  wgmma_commit();
}

// Values rounded, as operand A: 16 columns in four registers.
template <class E, int STEPS>
DEVICE void pack_operand(uint32 (&packed)[STEPS][4], const float (&values)[8 * STEPS]) {
#pragma unroll
  for (int i = 0; i < 4 * STEPS; ++i) packed[i / 4][i % 4] = pack<E>(values[2 * i], values[2 * i + 1]);
}

// The warp's 16 rows of a tile from `row()` on, as operand A of COUNT steps.
template <class Tile, int COUNT, int STEPS, class Row>
DEVICE void read_rows(Fragment (&kept)[STEPS], SharedAddress tile, Row row) {
  const auto reader = FragmentReader<typename Tile::Panel>::down();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) kept[i] = reader.load(tile + i / 4 * Tile::PANEL_BYTES, row(), i % 4 * 16);
}

// A row of up to CHUNKS chunks, of which each lane of a quad has the pairs of columns `pair(chunk)`: they gather 16 bytes a lane.
template <int CHUNKS, class Pair>
DEVICE void store_in_quad(uint16* row, bool is_there, Pair pair, int chunks = CHUNKS) {
  const int lane = thread_index() % 4;
  uint16* const own = row + lane * CHUNK_ELEMENTS;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk += 4) {
    Chunk mine = {};
#pragma unroll
    for (int w = 0; w < 4; ++w)
      if (chunk + w < CHUNKS) mine.word[w] = pair(chunk + w);
    store_global_16_if(chunk + lane < chunks && is_there, own + chunk * CHUNK_ELEMENTS, transpose_in_quad(mine));
  }
}

}  // namespace multiattn
