// The tiles that a block mask lists (FlexAttention's BlockMask), as one more kind of walk beside a band's.
#pragma once
#include "multiattn/mask.cuh"
#include "multiattn/params.h"
#include "multiattn/ptx_math.cuh"

namespace multiattn {

struct NoBlockMask {};  // a band alone says which tiles are seen

// Sizes of a block, and whether lists name full ones. Full blocks are seen whole, partial ones where the expression's mask
// says so, both only as far as there are keys and queries and as a band goes; others not at all.
struct BlockSpec {
  int queries = 0, keys = 0;
  bool has_full = false;
  bool has_bits = false;  // what the expression's mask says is in memory, of the first blocks of each list
  bool all_bits = false;  // of all of them
  bool packed = false;    // blocks lie on the axis that sequences are packed along, and the ends of these cut them
};
template <BlockSpec SPEC>
struct BlockMask {
  static constexpr int QUERIES = SPEC.queries, KEYS = SPEC.keys;
  static constexpr bool HAS_FULL = SPEC.has_full;
};
constexpr int NO_BITS = -1;  // the place of a block without them

// The sizes of what may be a block mask; of anything else they are zero.
template <class Blocked>
constexpr BlockSpec SPEC_OF{};
template <BlockSpec SPEC>
constexpr BlockSpec SPEC_OF<BlockMask<SPEC>> = SPEC;
template <class Blocked>
constexpr bool HAS_LISTS = SPEC_OF<Blocked>.keys > 0;
template <class Blocked>
constexpr bool HAS_BITS = SPEC_OF<Blocked>.has_bits;
template <class Blocked>
constexpr bool ALL_BITS = SPEC_OF<Blocked>.all_bits;
template <class Blocked>
constexpr bool IS_CUT = SPEC_OF<Blocked>.packed;

// The parameters of a kernel with a block mask, or without, as `WithAux` takes them.
template <class Blocked>
struct ListsOf {
  using Type = MaskLists;
};
template <>
struct ListsOf<NoBlockMask> {
  using Type = void;
};
template <bool HAS_BITS, bool PACKED>
struct ListsByKind {
  using Type = MaskLists;
};
template <>
struct ListsByKind<true, false> {
  using Type = BitLists;
};
template <>
struct ListsByKind<false, true> {
  using Type = SequenceLists;
};
template <BlockSpec SPEC>
struct ListsOf<BlockMask<SPEC>> : ListsByKind<SPEC.has_bits, SPEC.packed> {};

// The tiles of the blocks that one row of the lists names, full blocks first: one a step.
template <int BLOCK, int TILE, bool HAS_FULL>
struct ListedTiles {
  static constexpr int PER_BLOCK = BLOCK / TILE;
  static_assert(BLOCK % TILE == 0, "a tile lies in one block");
  int row;            // the place of the lists
  int full_end, end;  // steps

  static DEVICE ListedTiles of(const BlockLists& lists, int batch, int head, int row_of_head) {
    const int row = batch * lists.stride_batch + head * lists.stride_head + row_of_head;
    int full = 0;
    if constexpr (HAS_FULL) full = load_constant(lists.full_counts + row);
    return {row, full * PER_BLOCK, (full + load_constant(lists.counts + row)) * PER_BLOCK};
  }

  DEVICE bool is_partial(int step) const { return !HAS_FULL || step >= full_end; }

  // The place of a partial step's block among those that have bits, of which a list has so many.
  DEVICE int place_of_bits(int columns, int step) const {
    const int entry = (step - full_end) / PER_BLOCK;
    return entry < columns ? row * columns + entry : NO_BITS;
  }

  // The tile of a step before the end.
  DEVICE int tile(const BlockLists& lists, int step) const {
    const int32* indices = lists.indices;
    int entry = step;
    if constexpr (HAS_FULL) {
      if (is_partial(step)) entry -= full_end;
      else indices = lists.full_indices;
    }
    const int64 first = static_cast<int64>(row) * lists.columns;
    return load_constant(indices + first + entry / PER_BLOCK) * PER_BLOCK + step % PER_BLOCK;
  }
};

// A tile of a list as one warp tells it to others: its number, and what may hide a part of it.
struct TileWord {
  int word;

  static DEVICE TileWord of(int tile, bool is_partial, bool is_cut) { return {tile * 4 + is_partial * 2 + is_cut}; }
  DEVICE int tile() const { return word / 4; }
  DEVICE bool is_partial() const { return word & 2; }  // the expression's mask
  DEVICE bool is_cut() const { return word & 1; }      // a band, the end of keys or queries, or of a sequence
  DEVICE bool is_masked() const { return word & 3; }
};

// The tiles of keys that a tile of queries walks over by lists. A stream loads them in order, and each one's number a step
// ahead of it.
template <class Blocked, int TILE>
class ListedKeys {
 public:
  using Tiles = ListedTiles<Blocked::KEYS, TILE, Blocked::HAS_FULL>;
  static constexpr int begin = 0;
  int end;

  DEVICE ListedKeys(const BlockLists& lists, int batch, int head, int row)
      : lists_(lists), tiles_(Tiles::of(lists_, batch, head, row)) {
    end = tiles_.end;
    look_ahead(0);
  }

  DEVICE int to_load() const { return next_; }
  DEVICE void look_ahead(int step) {
    if (step < end) next_ = tiles_.tile(lists_, step);
  }
  DEVICE int tile(int step) const { return tiles_.tile(lists_, step); }
  DEVICE bool is_partial(int step) const { return tiles_.is_partial(step); }

 private:
  const BlockLists& lists_;
  Tiles tiles_;
  int next_ = 0;  // of the step that is loaded next
};

// The walk over keys: where a band says which, its steps are tiles.
template <class Blocked, int TILE>
struct KeyWalk {
  using Type = ListedKeys<Blocked, TILE>;
};
template <int TILE>
struct KeyWalk<NoBlockMask, TILE> {
  using Type = Blocks;
};
template <class T>
using KeysOf = typename KeyWalk<typename T::Blocked, T::TILE_N>::Type;

}  // namespace multiattn
