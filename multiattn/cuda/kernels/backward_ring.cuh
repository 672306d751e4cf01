// The tiles of queries that a block of the kernel of k and v walks over, and their way to shared memory.
#pragma once
#include "backward_common.cuh"
#include "multiattn/block_mask.cuh"

namespace multiattn {

// The tiles of queries that a block walks over, head by head.
struct QueryWalk {
  int first_tile, end_tile;  // of each head
  int head, tile;            // where it is

  DEVICE void advance() {
    if (++tile < end_tile) return;
    tile = first_tile;
    ++head;
  }
};

// A tile of a walk by lists, which may lie in a partial block. What uses the tiles of the ring follows its walk, a tile
// behind: that takes fewer registers than a walk of its own.
struct ListedPlace {
  int head, place;  // of the tile: twice its number, and one in a partial block

  DEVICE int tile() const { return place / 2; }
  DEVICE bool is_partial() const { return place % 2; }
};
struct ListedFollower : ListedPlace {
  ListedPlace following;

  DEVICE explicit ListedFollower(const ListedPlace& first) : ListedPlace(first), following(first) {}
  DEVICE void follow(const ListedPlace& next) { following = next; }
  DEVICE void advance() { static_cast<ListedPlace&>(*this) = following; }
};

// The tiles of queries that a block mask lists for the tile of keys, head by head.
template <class T>
class ListedQueryWalk : public ListedPlace {
 public:
  DEVICE ListedQueryWalk(const BlockLists& lists, int heads_q, int row, int first_head, int end_head)
      : ListedPlace{first_head - 1, 0}, lists_(lists), heads_q_(heads_q), row_(row), end_head_(end_head) {
    advance();
  }

  // The number of the next tile is loaded now, its queries in the next step of the loop.
  DEVICE void advance() {
    ++step_;
    while (step_ >= tiles_.end) {
      if (++head >= end_head_) return;
      step_ = 0;
      tiles_ = Tiles::of(lists_, head / heads_q_, head % heads_q_, row_);
    }
    place = 2 * tiles_.tile(lists_, step_) + tiles_.is_partial(step_);
  }

 private:
  using Tiles = ListedTiles<T::Blocked::QUERIES, T::TILE_M, T::Blocked::HAS_FULL>;
  const BlockLists& lists_;
  int heads_q_, row_, end_head_, step_ = 0;
  Tiles tiles_ = {};
};

// The walk of the ring, and that of what uses its tiles.
template <class T, class Blocked = typename T::Blocked>
struct WalksOf {
  using Place = ListedPlace;
  using Ring = ListedQueryWalk<T>;
  using User = ListedFollower;
};
template <class T>
struct WalksOf<T, NoBlockMask> {
  using Place = QueryWalk;
  using Ring = QueryWalk;
  using User = QueryWalk;
};

template <class T>
struct WalksOf<T, Packed> : WalksOf<T, NoBlockMask> {};

// The walk over the queries of some heads for a tile of keys, at its beginning; `tiles` are those of the band.
template <class T>
DEVICE typename WalksOf<T>::Ring first_walk(const typename T::Params& params, const Blocks& tiles, const TileOf<T>& of,
                                            int first_head, int end_head) {
  if constexpr (HAS_LISTS<typename T::Blocked>) {
    const int row = row_of_keys<typename T::Blocked>(of.sequence, of.number, of.first_row);
    if constexpr (IS_CUT<typename T::Blocked>)
      if (of.sequence.len_q == 0) first_head = end_head;  // a sequence without queries has no list
    return {params.lists.queries, params.heads_q, row, first_head, end_head};
  } else {
    QueryWalk walk{tiles.begin, tiles.end, first_head, tiles.begin};
    constexpr bool MAY_BE_EMPTY = T::BAND == Band::TWO_SIDED || IS_PACKED<typename T::Blocked>;
    if (MAY_BE_EMPTY && tiles.begin == tiles.end) walk.head = end_head;  // no query sees a key of the tile
    return walk;
  }
}

// Where a walk is.
template <class T>
DEVICE int tile_of(const typename WalksOf<T>::Place& walk) {
  if constexpr (HAS_LISTS<typename T::Blocked>)
    return walk.tile();
  else
    return walk.tile;
}

// STAGES buffers of Q and dO, lse and delta, filled with cp.async.
template <class T>
class QueryRing {
 public:
  using Walk = typename WalksOf<T>::Ring;

  DEVICE QueryRing(const BackwardParams& params, const SequenceOf<T>& sequence, SharedAddress smem, const Walk& walk,
                   int end_head)
      : params_(params), sequence_(sequence), smem_(smem), next_(walk), end_head_(end_head) {}

  // Starts to load the next tile of the walk; nothing beyond its end.
  DEVICE void load_next(int stage) {
    if (next_.head < end_head_) {
      const QuerySequence<SequenceOf<T>> sequence{params_, next_.head, sequence_};
      const int thread = T::thread();
      int first = tile_of<T>(next_) * T::TILE_M, rows = count_queries(params_, sequence_) - first;
      if constexpr (IS_CUT<typename T::Blocked>) {
        first = first_query_in<typename T::Blocked, T::TILE_M>(sequence_, tile_of<T>(next_));
        rows = end_query_in<typename T::Blocked, T::TILE_M>(params_, sequence_, tile_of<T>(next_)) - first;
      }
      load_tile<typename T::TileQ, T::THREADS, T::ALIGNED>(q(stage), sequence.q() + first * params_.strides_q.seq,
                                                           params_.strides_q.seq, rows, thread);
      load_tile<typename T::TileDO, T::THREADS, true>(dout(stage), sequence.dout() + first * params_.strides_out.seq,
                                                      params_.strides_out.seq, rows, thread);
      for (int i = thread; i < 2 * T::TILE_M; i += T::THREADS) {
        const int row = i % T::TILE_M;
        const float* source = i < T::TILE_M ? sequence.lse() : sequence.delta();
        cp_async_4(lse(stage) + 4 * i, source + first + row, row < rows);
      }
      next_.advance();
    }
    cp_async_commit();
  }

  // Where the walk is: the tile that is loaded next.
  DEVICE const Walk& next() const { return next_; }

  DEVICE SharedAddress q(int stage) const { return smem_ + T::STAGES_AT + stage * T::STAGE_BYTES; }
  DEVICE SharedAddress dout(int stage) const { return q(stage) + T::TileQ::BYTES; }
  DEVICE SharedAddress lse(int stage) const { return smem_ + T::STATISTICS_AT + stage * T::STATISTIC_BYTES; }
  DEVICE SharedAddress delta(int stage) const { return lse(stage) + T::TILE_M * 4; }

 private:
  const BackwardParams& params_;
  SequenceOf<T> sequence_;
  SharedAddress smem_;
  Walk next_;
  int end_head_;
};

}  // namespace multiattn
