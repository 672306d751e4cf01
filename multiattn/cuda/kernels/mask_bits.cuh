// The expression's mask of partial blocks as bits, asked once for all heads that share a list, and not by each of them.
//
// The threads of a warpgroup have the elements that those of the kernel have which reads the bits: each finds its own in one word, or
// in a few, beside those of its neighbours.
#pragma once
#include "multiattn/ptx_sm90.cuh"
#include "multiattn/score.cuh"
#include "multiattn/sequence.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

// Elements of a warpgroup's part of a block: 64 rows of the walk's own side, `COLUMNS` of the other. `WALKS_KEYS`: rows are queries.
template <class Blocked, bool WALKS_KEYS_, int COLUMNS_>
struct BitsOf {
  static constexpr bool WALKS_KEYS = WALKS_KEYS_;
  static constexpr int ROWS = 64, COLUMNS = COLUMNS_, ELEMENTS = COLUMNS / 2;  // of a thread
  static constexpr int WORDS = (ELEMENTS + 31) / 32, THREADS = 128;
  static constexpr int OWN = WALKS_KEYS ? Blocked::QUERIES : Blocked::KEYS, OTHER = WALKS_KEYS ? Blocked::KEYS : Blocked::QUERIES;
  static constexpr int ACROSS = OTHER / COLUMNS, PARTS = OWN / ROWS * ACROSS;

  // The words of a thread for the part with this first row and tile of the other side.
  static DEVICE uint32* words(uint32* bits, int place, int first_row, int tile) {
    const int part = first_row % OWN / ROWS * ACROSS + tile % ACROSS;
    return bits + (static_cast<int64>(place) * PARTS + part) * (THREADS * WORDS) + thread_index() % THREADS * WORDS;
  }

};

// A kernel of bits for a walk with these constants, and so many blocks for one list.
template <class Walk, class Bits_, int THREADS_, int SPLITS_>
struct MaskBitsTraits : Walk {
  using Bits = Bits_;
  static constexpr int THREADS = THREADS_, SPLITS = SPLITS_, SMEM_BYTES = 0;
};

template <class T>
DEVICE void make_mask_bits(const typename T::Params& params, const BlockLists& lists, int seq_q, int seq_kv, int heads_q) {
  using Bits = typename T::Bits;
  const int place = static_cast<int>(block_index()) / T::SPLITS, split = static_cast<int>(block_index()) % T::SPLITS;
  const int rows = ((Bits::WALKS_KEYS ? seq_q : seq_kv) - 1) / Bits::OWN + 1, heads = lists.stride_head ? heads_q : 1;
  const HeadScores<typename T::Score> head(params.aux, seq_q, seq_kv, place / rows / heads, place / rows % heads);
  const int columns = params.lists.bit_columns;
  const int count = min(load_constant(lists.counts + place), columns), warpgroup = thread_index() / Bits::THREADS;
  for (int entry = split; entry < count; entry += T::SPLITS) {
    const int block = load_constant(lists.indices + static_cast<int64>(place) * lists.columns + entry);
    for (int part = warpgroup; part < Bits::PARTS; part += T::THREADS / Bits::THREADS) {
      const int own = place % rows * Bits::OWN + part / Bits::ACROSS * Bits::ROWS;
      const int tile = block * Bits::ACROSS + part % Bits::ACROSS;
      const int first_row = own + thread_index() / WARP % 4 * 16, first_column = tile * Bits::COLUMNS;
      uint32 hidden[Bits::WORDS] = {};
#pragma unroll
      for (int i = 0; i < Bits::ELEMENTS; ++i) {
        const int row = first_row + accumulator_row(i % 4);
        const Position column(first_column + accumulator_column(0), i / 4 * 8 + i % 2);
        const bool is_seen = Bits::WALKS_KEYS ? head.visible(row, column) : head.visible(column.index(), row);
        if (!is_seen) hidden[i / 32] |= 1u << i % 32;
      }
      uint32* const words = Bits::words(params.lists.mask_bits, place * columns + entry, own, tile);
#pragma unroll
      for (int word = 0; word < Bits::WORDS; ++word) store_global_4(reinterpret_cast<float*>(words + word), float_of_bits(hidden[word]));
    }
  }
}

// Before a forward, whose counter of tiles it empties.
template <class T>
DEVICE void mask_bits_of_queries(const typename T::Params& params) {
  admit_next_grid();
  await_earlier_grids();
  const ForwardParams& forward = params.forward;
  if (forward.next_tile && block_index() == 0 && thread_index() == 0) *forward.next_tile = 0;
  make_mask_bits<T>(params, params.lists.keys, forward.seq_q, forward.seq_kv, forward.heads_q);
}

// Before a backward.
template <class T>
DEVICE void mask_bits_of_keys(const typename T::Params& params) {
  admit_next_grid();
  await_earlier_grids();
  const BackwardParams& backward = params.backward;
  make_mask_bits<T>(params, params.lists.queries, backward.seq_q, backward.seq_kv, backward.heads_q);
}

}  // namespace multiattn
