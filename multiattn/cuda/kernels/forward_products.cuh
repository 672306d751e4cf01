// The two products of the forward as a warp makes them: scores from Q and K, and what weights and V add to the output.
#pragma once
#include "forward_traits.cuh"
#include "multiattn/gemm.cuh"
#include "multiattn/params.h"
#include "multiattn/special.cuh"

namespace multiattn {

template <class T, class Tile>
DEVICE void fold_sign_into_q(SharedAddress tile, int sign) {
  for (int i = thread_index(); i < Tile::BYTES / CHUNK_BYTES; i += T::THREADS)
    fold_sign_into<typename T::Element>(tile + i * CHUNK_BYTES, sign);
}

// The warp's rows of Q as operand A: kept in registers, or read from shared memory again for every block of keys.
template <class T>
class Queries {
 public:
  static constexpr bool KEPT = T::Q_PLACE == QPlace::REGISTERS;
  using Tile = typename T::SourceQ;
  using Reader = FragmentReader<Tile>;
  using Column = Fragment[T::ROW_FRAGMENTS];  // all rows of the warp, 16 elements of head_dim

  // The part of Q that goes with a piece of K.
  class Part {
   public:
    DEVICE Part(const Queries& all, SharedAddress rows)
        : all_(all), rows_(rows + T::warp_row() * Tile::PITCH), reader_(Reader::down(T::address_thread())) {}

    DEVICE void load(Column& column, int d) const {
#pragma unroll
      for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
        if constexpr (KEPT)
          column[m] = all_.kept_[d][m];
        else
          column[m] = reader_.load(rows_, 16 * m, 16 * d);
      }
    }

   private:
    const Queries& all_;
    SharedAddress rows_;
    Reader reader_;
  };

  // `tile` is of the whole of Q; where Q streams it has no meaning.
  DEVICE explicit Queries(SharedAddress tile) : tile_(tile) {
    if constexpr (KEPT) {
      const auto reader = Reader::down();
#pragma unroll
      for (int d = 0; d < T::DOT_FRAGMENTS; ++d)
#pragma unroll
        for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
          kept_[d][m] = reader.load(tile + T::warp_row() * Tile::PITCH, 16 * m, 16 * d);
    }
  }

  // `streamed` is where Q's part was loaded with the piece of K.
  DEVICE SharedAddress source(int piece, SharedAddress streamed) const {
    if constexpr (T::STREAMED) return streamed;
    return tile_ + piece * (T::K_WIDTH * 2);
  }

 private:
  SharedAddress tile_;
  Column kept_[KEPT ? T::DOT_FRAGMENTS : 1];
};

// The tensor core adds scores up in these, [WARP_ROWS, WARP_KEYS].
template <class T>
using ScoreSums = typename T::Sum[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS][2];

// sums[WARP_ROWS, WARP_KEYS] += Q[WARP_ROWS, K_WIDTH] K[WARP_KEYS, K_WIDTH]^T, of one piece of K
template <class T>
DEVICE void add_scores(ScoreSums<T>& sums, const Queries<T>& queries, SharedAddress source_q, SharedAddress k) {
  const auto reader = FragmentReader<typename T::PieceK>::right(T::address_thread());
  const typename Queries<T>::Part q(queries, source_q);
  const SharedAddress keys = k + T::warp_key() * T::PieceK::PITCH;
  const auto load = [&](int step) { return reader.load(keys, step % T::KEY_FRAGMENTS * 16, step / T::KEY_FRAGMENTS * 16); };
  const auto load_q = [&](typename Queries<T>::Column& column, int d) { q.load(column, d); };
  multiply<typename T::Element, T::DOT_FRAGMENTS, T::READ_AHEAD>(sums, load_q, load);
}

// The weights of a warp's rows as operand A, for all keys of a block: what the warp itself made of its scores, or what
// the warps that share its rows have left in shared memory.
template <class T>
class Weights {
 public:
  using Column = Fragment[T::ROW_FRAGMENTS];  // all rows of the warp, 16 keys

  DEVICE Weights(const Scores<T>& own, SharedAddress exchanged)
      : own_(own), exchanged_(exchanged + T::warp_row() * T::TileP::PITCH), reader_(Reader::down()) {}

  DEVICE void load(Column& column, int n) const {
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
      if constexpr (T::SPLIT_KV)
        column[m] = reader_.load(exchanged_, 16 * m, 16 * n);
      else
        column[m] = as_operand<typename T::Element>(own_[m][n]);
    }
  }

 private:
  using Reader = FragmentReader<typename T::TileP>;
  const Scores<T>& own_;
  SharedAddress exchanged_;
  Reader reader_;
};

// Walks over the fragments of a piece of V that are the warp's, reading ahead: all columns of 16 keys, then the next 16,
// or all keys of 16 columns (KEYS_INSIDE). Calls `use(key_fragment, column_fragment, fragment)`.
template <class T, bool KEYS_INSIDE, class Use>
DEVICE void for_each_value(SharedAddress v, Use use) {
  constexpr int INNER = KEYS_INSIDE ? T::VALUE_FRAGMENTS : T::OUT_FRAGMENTS;
  const auto reader = FragmentReader<typename T::PieceV>::down(T::address_thread());
  const auto key = [](int step) { return KEYS_INSIDE ? step % INNER : step / INNER; };
  const auto column = [](int step) { return KEYS_INSIDE ? step / INNER : step % INNER; };
  const auto load = [&](int step) { return reader.load_transposed(v, key(step) * 16, T::warp_column() + column(step) * 16); };
  read_ahead<T::VALUE_FRAGMENTS * T::OUT_FRAGMENTS, T::READ_AHEAD>(
      load, [&](int step, const Fragment& fragment) { use(key(step), column(step), fragment); });
}

// out[WARP_ROWS, columns] += weights[WARP_ROWS, V_ROWS] V[V_ROWS, columns], of one piece of V
template <class T>
DEVICE void accumulate(Outputs<T>& out, const Weights<T>& weights, SharedAddress v, int piece) {
  using E = typename T::Element;
  constexpr int AHEAD = T::SPLIT_KV ? 1 : 0;  // columns that come from shared memory are read one ahead
  const int first = piece * T::VALUE_FRAGMENTS;
  typename Weights<T>::Column left[AHEAD + 1];
  weights.load(left[0], first);
  for_each_value<T, false>(v, [&](int n, int d, const Fragment& value) {
    if (d == 0 && n + AHEAD < T::VALUE_FRAGMENTS && n + AHEAD > 0)
      weights.load(left[(n + AHEAD) % (AHEAD + 1)], first + n + AHEAD);
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) mma_pair<E>(out[m][d], left[n % (AHEAD + 1)][m], value);
  });
}

// Weights times V with products added up in fp16, of one piece at most: sums of all keys would lose too much, and overflow.
template <class T>
DEVICE void accumulate_in_halves(Outputs<T>& out, const Weights<T>& weights, SharedAddress v, int piece) {
  using E = typename T::Element;
  typename Weights<T>::Column left[T::VALUE_FRAGMENTS];
#pragma unroll
  for (int n = 0; n < T::VALUE_FRAGMENTS; ++n) weights.load(left[n], piece * T::VALUE_FRAGMENTS + n);
  HalfAccumulator sums[T::ROW_FRAGMENTS][2];
  for_each_value<T, true>(v, [&](int n, int d, const Fragment& value) {
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
      if (n == 0) sums[m][0] = sums[m][1] = HalfAccumulator{};
      mma_pair<E>(sums[m], left[n][m], value);
      if (n + 1 == T::VALUE_FRAGMENTS) {
        for_each<2, 4>([&](int side, int e) { out[m][d][side].value[e] += widened(sums[m][side]).value[e]; });
      }
    }
  });
}

}  // namespace multiattn
