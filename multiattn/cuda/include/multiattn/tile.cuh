// Tiles of [ROWS, D] 16-bit elements in shared memory, and the fragments that the tensor core takes from them.
#pragma once
#include "multiattn/ptx.cuh"
#include "multiattn/swizzle.cuh"

namespace multiattn {

constexpr int WARP = 32;
constexpr int CHUNK_BYTES = 16;
constexpr int CHUNK_ELEMENTS = 8;

// Calls `body` with all indices below the sizes, the last one fastest, unrolled: elements of arrays stay in registers.
template <int SIZE, int... SIZES, class Body, class... Indices>
DEVICE void for_each(Body body, Indices... indices) {
#pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    if constexpr (sizeof...(SIZES) == 0)
      body(indices..., i);
    else
      for_each<SIZES...>(body, indices..., i);
  }
}

DEVICE constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

template <int ROWS_, int HEAD_DIM, bool SWIZZLED = true, int WIDTH_ = (HEAD_DIM + 15) / 16 * 16>
struct Tile {
  static constexpr int ROWS = ROWS_;
  static constexpr int WIDTH = WIDTH_;                               // elements, zero-filled beyond HEAD_DIM
  static constexpr int CHUNKS = WIDTH / CHUNK_ELEMENTS;              // of a row
  static constexpr int VALID_CHUNKS = HEAD_DIM / CHUNK_ELEMENTS;     // of them, those with data
  static constexpr int PITCH = CHUNKS * CHUNK_BYTES;                 // bytes from row to row
  static constexpr int BYTES = ROWS * PITCH;
  using Layout = Swizzle<CHUNKS, SWIZZLED>;

  static DEVICE SharedAddress chunk(SharedAddress tile, int row, int chunk) {
    return tile + row * PITCH + (chunk ^ Layout::key(row)) * CHUNK_BYTES;
  }
};

// Eight elements of global memory to shared memory, or zeros. Unaligned ones go through registers, one by one.
template <bool ALIGNED>
DEVICE void copy_chunk(SharedAddress target, const uint16* source, bool valid) {
  if constexpr (ALIGNED) {
    cp_async_16(target, source, valid);
  } else {
    Chunk chunk = {};
    if (valid) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        chunk.word[i] = load_global_2(source + 2 * i) | static_cast<uint32>(load_global_2(source + 2 * i + 1)) << 16;
    }
    store_shared_16(target, chunk);
  }
}

// Copies `T::ROWS` rows, `stride` elements apart, into a tile; rows from `valid_rows` on and chunks from `valid_chunks` on
// become zeros. SPAN threads share a row, so that the swizzle of a thread's chunks is the same in every pass and every
// address a constant apart.
template <class T, int THREADS, bool ALIGNED>
DEVICE void load_tile(SharedAddress tile, const uint16* rows, int64 stride, int valid_rows,
                      int thread = thread_index(), int valid_chunks = T::VALID_CHUNKS) {
  constexpr int SPAN = T::Layout::SPAN;
  constexpr int ROWS_PER_PASS = THREADS / SPAN;
  static_assert(ROWS_PER_PASS % 8 == 0, "the swizzle repeats every 8 rows");
  const int first_row = thread / SPAN, first_chunk = thread % SPAN;
  const SharedAddress target = T::chunk(tile, first_row, first_chunk);
  const uint16* source = rows + first_row * stride + first_chunk * CHUNK_ELEMENTS;
#pragma unroll
  for (int row = 0; row < T::ROWS; row += ROWS_PER_PASS, source += ROWS_PER_PASS * stride) {
    if (T::ROWS % ROWS_PER_PASS != 0 && first_row + row >= T::ROWS) break;
#pragma unroll
    for (int chunk = 0; chunk < T::CHUNKS; chunk += SPAN) {
      const bool valid = first_row + row < valid_rows && first_chunk + chunk < valid_chunks;
      copy_chunk<ALIGNED>(target + row * T::PITCH + chunk * CHUNK_BYTES,
                          source + chunk * CHUNK_ELEMENTS, valid);
    }
  }
}

// Four 8x8 matrices: a 16x16 operand A, or a 16x16 part of operand B as two 16x8 ones, {0, 1} and {2, 3}.
struct Fragment {
  uint32 reg[4];
};

// Addresses of 16x16 fragments of a tile for ldmatrix. The lane's share is computed once; a fragment's place adds
// constants to it, as the XOR never reaches beyond the low bits of an address within a tile.
template <class T>
class FragmentReader {
 public:
  // Operand A from rows of Q, and operand B from V (transposed on load): lanes walk down 16 rows, then one chunk right.
  static DEVICE FragmentReader down(uint32 thread = thread_index()) {
    return FragmentReader(thread % 16, thread % WARP / 16);
  }
  // Operand B from rows of K: lanes walk down 8 rows, one chunk right, then the next 8 rows.
  static DEVICE FragmentReader right(uint32 thread = thread_index()) {
    const int lane = thread % WARP;
    return FragmentReader(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  // `row` and `column` (elements) are multiples of 16.
  DEVICE Fragment load(SharedAddress tile, int row, int column) const {
    Fragment fragment;
    ldmatrix_x4(fragment.reg, address(tile, row, column));
    return fragment;
  }
  DEVICE Fragment load_transposed(SharedAddress tile, int row, int column) const {
    Fragment fragment;
    ldmatrix_x4_trans(fragment.reg, address(tile, row, column));
    return fragment;
  }

  // The address that the lane gives to ldmatrix, or to stmatrix, which writes what ldmatrix would read.
  DEVICE SharedAddress address(SharedAddress tile, uint32 row, uint32 column) const {
    constexpr uint32 SPAN = T::Layout::SPAN;
    const uint32 chunk = column / CHUNK_ELEMENTS;
    return tile + (lane_offset_ ^ chunk % SPAN * CHUNK_BYTES) + (row * T::PITCH + chunk / SPAN * SPAN * CHUNK_BYTES);
  }

 private:
  DEVICE FragmentReader(int row, int chunk) : lane_offset_(T::chunk(0, row, chunk)) {}

  SharedAddress lane_offset_;
};

// The accumulator of one 16x8 product: elements 0, 1 are of row lane / 4, elements 2, 3 of the row 8 below; columns
// are 2 * (lane % 4) and the next.
struct Accumulator {
  float value[4];
};

// An accumulator in fp16, two columns of a row in a register. Sums of more than 65504 overflow.
struct HalfAccumulator {
  uint32 value[2];
};

template <class Sum>
constexpr bool IS_FP32 = false;
template <>
constexpr bool IS_FP32<Accumulator> = true;
template <class E>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<fp16> = true;

DEVICE Accumulator widened(const Accumulator& sum) { return sum; }
DEVICE Accumulator widened(const HalfAccumulator& sum) {
  return {{unpack_low<fp16>(sum.value[0]), unpack_high<fp16>(sum.value[0]),  //
           unpack_low<fp16>(sum.value[1]), unpack_high<fp16>(sum.value[1])}};
}

DEVICE int accumulator_row(int element, uint32 thread = thread_index()) { return thread % WARP / 4 + element / 2 * 8; }
DEVICE int accumulator_column(int element, uint32 thread = thread_index()) { return thread % 4 * 2 + element % 2; }

// Addresses of a lane's pairs of an accumulator in a tile, two elements wide: those of FragmentReader, the other way.
template <class T>
class PairWriter {
 public:
  DEVICE explicit PairWriter(uint32 thread = thread_index())
      : lane_offset_(T::chunk(0, thread % WARP / 4, 0) + thread % 4 * 4) {}

  // `row` is a multiple of 8, `chunk` of the row.
  DEVICE void store(SharedAddress tile, int row, int chunk, uint32 pair) const {
    constexpr int SPAN = T::Layout::SPAN;
    store_shared_4(tile + (lane_offset_ ^ chunk % SPAN * CHUNK_BYTES) + (row * T::PITCH + chunk / SPAN * SPAN * CHUNK_BYTES),
                   pair);
  }

 private:
  SharedAddress lane_offset_;
};

// Two neighbouring 16x8 products from one fragment of operand B.
template <class E>
DEVICE void mma_pair(Accumulator (&pair)[2], const Fragment& a, const Fragment& b) {
  mma_m16n8k16<E>(pair[0].value, a.reg, b.reg[0], b.reg[1]);
  mma_m16n8k16<E>(pair[1].value, a.reg, b.reg[2], b.reg[3]);
}
template <class E>
DEVICE void mma_pair(HalfAccumulator (&pair)[2], const Fragment& a, const Fragment& b) {
  mma_m16n8k16_fp16(pair[0].value, a.reg, b.reg[0], b.reg[1]);
  mma_m16n8k16_fp16(pair[1].value, a.reg, b.reg[2], b.reg[3]);
}

// A lane's elements of two neighbouring 16x8 accumulators are those that it must have of one 16x16 operand A.
template <class E>
DEVICE Fragment as_operand(const Accumulator (&pair)[2]) {
  const float(&left)[4] = pair[0].value;
  const float(&right)[4] = pair[1].value;
  return {{pack<E>(left[0], left[1]), pack<E>(left[2], left[3]),  //
           pack<E>(right[0], right[1]), pack<E>(right[2], right[3])}};
}

// Four floats as a chunk.
DEVICE Chunk chunk_of(const float* four) {
  return {{float_bits(four[0]), float_bits(four[1]), float_bits(four[2]), float_bits(four[3])}};
}

// Four words of each lane of a quad, turned: lane i gets word i of all four. What were pairs of columns in four 8-column
// chunks become a chunk for each lane.
DEVICE Chunk transpose_in_quad(Chunk mine) {
  const int lane = thread_index() % 4;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & step) continue;
      const uint32 given = shuffle_xor(upper ? mine.word[low] : mine.word[low + step], step);
      if (upper)
        mine.word[low] = given;
      else
        mine.word[low + step] = given;
    }
  }
  return mine;
}

}  // namespace multiattn
