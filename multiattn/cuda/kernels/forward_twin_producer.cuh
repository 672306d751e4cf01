// The warps of forward_twin.cuh that load: pieces of K and V in the order in which they are used, as `PieceOrder` has it.
#pragma once
#include "forward_twin_rows.cuh"

namespace multiattn {

// Boxes of a tensor, by one thread.
template <class T>
class TwinBoxes {
  using Layout = TwinLayout<T>;

 public:
  DEVICE TwinBoxes(const typename T::Params& params, const TwinQueries<T>& rows) : params_(params), rows_(rows) {}

  static constexpr DEVICE int look_up(int) { return 0; }
  DEVICE void turn_to(int twin) { place_.turn_to(twin); }
  DEVICE void load_k(int block, int, int piece) { load(params_.map_k, block, piece); }
  DEVICE void load_v(int block, int, int piece) { load(params_.map_v, block, piece); }
  static DEVICE void finish() {}

 private:
  DEVICE void load(const TensorMap& map, int block, int piece) {
    const auto ring = Layout::ring();
    const SharedAddress barrier = ring.full(place_.slot);
    ring.await_empty(place_);
    mbarrier_arrive_expect(barrier, T::Piece::BYTES);
#pragma unroll
    for (int panel = 0; panel < T::Piece::PANELS; ++panel)
      load_box(Layout::piece(place_.slot) + panel * T::Piece::PANEL_BYTES, map, barrier,
               piece * T::PIECE + panel * T::Piece::PANEL_COLUMNS, block * T::TILE_N, rows_.head_kv, keys_of(rows_.tile));
    place_.advance();
  }

  const typename T::Params& params_;
  const TwinQueries<T>& rows_;
  TwinPlaces<T> place_;
};

// Boxes of a cache.
template <class T>
class TwinCacheBoxes {
  using Pieces = typename TwinLayout<T>::Pieces;

 public:
  DEVICE TwinCacheBoxes(const typename T::Params& params, const TwinGroups<T>& rows) : params_(params), boxes_(params, rows.owned) {}

  DEVICE int look_up(int block) const { return boxes_.look_up(block); }
  DEVICE void turn_to(int twin) { boxes_.turn_to(twin); }
  DEVICE void load_k(int block, int page, int piece) { boxes_.template load<Pieces>(params_.map_k, block, page, piece * T::PIECE); }
  DEVICE void load_v(int block, int page, int piece) { boxes_.template load<Pieces>(params_.map_v, block, page, piece * T::PIECE); }
  static DEVICE void finish() {}

 private:
  const typename T::Params& params_;
  CacheBoxes<T, TwinPlaces<T>> boxes_;
};

// Keys one by one.
template <class T>
class TwinGather {
  using Pieces = typename TwinLayout<T>::Pieces;
  static constexpr int LAG = T::V_IN_K ? T::K_PIECES / 2 : 2;

 public:
  DEVICE TwinGather(const typename T::Params& params, const TwinGroups<T>& rows) : params_(params.forward), keys_(params, rows.owned) {}

  DEVICE int look_up(int block) const { return keys_.look_up(block); }
  DEVICE void turn_to(int twin) { keys_.turn_to(twin); }
  DEVICE void load_k(int block, int page, int piece) {
    keys_.template load<Pieces, T::HEAD_DIM>(params_.k, params_.strides_k, block, page, piece * T::PIECE);
  }
  DEVICE void load_v(int block, int page, int piece) {
    keys_.template load<Pieces, T::HEAD_DIM_V>(params_.v, params_.strides_v, block, page, piece * T::PIECE);
  }
  // Slots of what comes next may not be empty before this was used: nothing of it may be left untold.
  DEVICE void finish() { keys_.template finish<Pieces>(); }

 private:
  const SplitParams& params_;
  KeyGather<T, TwinPlaces<T>, LAG> keys_;
};

template <class T>
using TwinLoader = typename Choice<!T::GROUPED, TwinBoxes<T>,
                                   typename Choice<T::GATHERS, TwinGather<T>, TwinCacheBoxes<T>>::Type>::Type;

// Loads the blocks of keys from the last to the first. Pages are looked up two blocks ahead, so that nobody waits for the table.
template <class T>
DEVICE void produce_pieces(const typename T::Params& params, const TwinRows<T>& rows) {
  using Order = PieceOrder<T>;
  const int turns = rows.blocks.end - rows.blocks.begin;
  TwinLoader<T> keys(params, rows);
  const auto block = [&](int turn) { return rows.blocks.end - 1 - turn; };
  const auto look_up = [&](int turn) { return turn < turns ? keys.look_up(block(turn)) : 0; };
  const auto load_k = [&](int turn, int page) {
    keys.turn_to(turn % 2);
    for (int i = 0; i < T::K_PIECES; ++i) keys.load_k(block(turn), page, Order::piece_of_k(i, turn));
    keys.finish();
  };
  if (turns <= 0) return;
  int page = look_up(0), next = look_up(1), after_next = look_up(2);
  load_k(0, page);
#pragma unroll 1  // a producer has few registers
  for (int turn = 0; turn < turns; ++turn) {
    if (turn + 1 < turns) load_k(turn + 1, next);
    if constexpr (!T::V_IN_K) {
#pragma unroll 1
      for (int next_twin = 0; next_twin < 2; ++next_twin) {
        const int twin = (turn + next_twin) % 2;
        keys.turn_to(twin);
        for (int i = 0; i < Order::owned_by(twin); ++i) keys.load_v(block(turn), page, twin * T::OWN_PIECES + i);
        keys.finish();
      }
    }
    page = next;
    next = after_next;
    after_next = look_up(turn + 3);
  }
}

}  // namespace multiattn
