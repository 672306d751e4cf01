// The sequence of a block in a packed batch, where sequences of any lengths lie one after another in one tensor.
#pragma once
#include "multiattn/block_mask.cuh"
#include "multiattn/params.h"
#include "multiattn/ptx.cuh"
#include "multiattn/score.cuh"

namespace multiattn {

// In the place of a block mask among a kernel's constants: its tiles are those that the lists of a packed batch name.
struct Packed {};
// In its place for kernels that know of no block mask, beside those of one: its tiles are those of the packed axis.
struct CutTiles {};
template <>
constexpr bool IS_CUT<CutTiles> = true;

template <class Blocked>
constexpr bool IS_PACKED = false;
template <>
constexpr bool IS_PACKED<Packed> = true;
template <>
constexpr bool IS_PACKED<CutTiles> = true;
template <BlockSpec SPEC>
constexpr bool IS_PACKED<BlockMask<SPEC>> = SPEC.packed;
template <>
struct ListsOf<Packed> {
  using Type = TileLists;
};
template <>
struct ListsOf<CutTiles> {
  using Type = TileLists;
};
// The lists come before what an expression has: the kernels of a launch share one struct, and some of them know of none.
template <class Params, class Score>
struct WithAux<Params, Score, TileLists, true> {
  struct Type : Params {
    TileLists lists;
    typename Score::Aux aux;
    typename Score::Gradients gradients;
  };
};
template <class Params, class Score>
struct WithAux<Params, Score, TileLists, false> {
  struct Type : Params {
    TileLists lists;
    typename Score::Aux aux;
  };
};
template <class Params>
struct WithAux<Params, NoScore, TileLists, false> {
  struct Type : Params {
    TileLists lists;
  };
};
template <int TILE>
struct KeyWalk<Packed, TILE> {
  using Type = Blocks;
};

// One of two types.
template <bool CONDITION, class Then, class Else>
struct Choice {
  using Type = Then;
};
template <class Then, class Else>
struct Choice<false, Then, Else> {
  using Type = Else;
};

// The part of a problem that code depends on, as multiattn/plan/features.py has it, but for what is a type here.
struct Features {
  int head_dim;    // of q and k
  int head_dim_v;  // of v and out
  Band band;
  bool sinks = false;   // each head has one more key, without a value
  bool aligned = true;  // every row of q, k and v starts at a multiple of 16 bytes
  bool v_in_k = false;  // v is the first columns of k, and the kernel reads k alone
  bool row_max = false;  // a forward also writes the largest score of each row
};

// The parameters of a kernel that writes the largest score of each row. What comes behind them never lies in their padding.
template <class Params, bool HAS_MAX>
struct WithMax {
  using Type = Params;
};
template <class Params>
struct WithMax<Params, true> {
  struct alignas(alignof(Params)) Whole {
    RowMax of;
  };
  struct Type : Params {
    Whole tops;
  };
};

// The constants of every kernel that walks over scores.
template <class Element_, Features F, class PlainParams, class Score_, class Blocked_>
struct Walks {
  using Element = Element_;
  static constexpr int HEAD_DIM = F.head_dim, HEAD_DIM_V = F.head_dim_v;
  static constexpr int WIDTH = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;  // the wider of the two
  static constexpr Band BAND = F.band;
  static constexpr bool HAS_SINKS = F.sinks, ALIGNED = F.aligned, V_IN_K = F.v_in_k, HAS_MAX = F.row_max;
  using Score = Score_;      // what changes scores
  using Blocked = Blocked_;  // what lists the tiles that are seen, or those that there are; or what rows are
  using Params = typename WithAux<typename WithMax<PlainParams, HAS_MAX>::Type, Score, typename ListsOf<Blocked>::Type>::Type;
};

// The `len_q` queries from row `offset_q` of q on, and the `len_kv` keys from row `offset_kv` of k and v on. Positions in a
// sequence start at 0.
struct Sequence {
  int32 offset_q, offset_kv, len_q, len_kv;
};

// Four numbers, and those of a sequence, as memory has them.
DEVICE Chunk chunk_of(int a, int b, int c, int d) {
  const auto word = [](int32 field) { return static_cast<uint32>(field); };
  return {{word(a), word(b), word(c), word(d)}};
}
DEVICE Chunk chunk_of(const Sequence& it) { return chunk_of(it.offset_q, it.offset_kv, it.len_q, it.len_kv); }

// One entry of a list: the tile that starts with `first_row` of its sequence, a query or a key. `number` is that of the
// sequence; negative: there is no tile, and the block that gets it has nothing to do. Rows behind the last sequence make
// up one more, and those before the first another, with queries but no keys, or keys but no queries: nothing may be loaded
// by their numbers.
struct ListedTile {
  int32 number, first_row;
  Sequence sequence;
  int32 tiles;  // of the whole list, which are its first entries

  static constexpr int FIELDS = 8;  // of int32; multiattn/packed.py names them

  DEVICE bool is_none() const { return number < 0; }
};

DEVICE ListedTile find_sequence(const int32* list, int entry) {
  const int32* place = list + static_cast<int64>(entry) * ListedTile::FIELDS;
  const Chunk tile = load_global_16(place), keys = load_global_16(place + 4);
  const auto field = [](const Chunk& chunk, int word) { return static_cast<int32>(chunk.word[word]); };
  return {field(tile, 0), field(tile, 1), {field(tile, 2), field(keys, 0), field(tile, 3), field(keys, 1)}, field(keys, 2)};
}

// A tile of a batch that is not packed: the parameters have the lengths that all sequences share.
struct NoSequence {};
struct UnlistedTile {
  int32 first_row;
  NoSequence sequence;

  static constexpr int number = 0;
  static constexpr DEVICE bool is_none() { return false; }
};

// The tile of a block, and its sequence, by what lists a kernel's tiles.
template <class Blocked, bool = IS_PACKED<Blocked>>
struct TileKind {
  using Tile = UnlistedTile;
  using Sequence = NoSequence;
};
template <class Blocked>
struct TileKind<Blocked, true> {
  using Tile = ListedTile;
  using Sequence = multiattn::Sequence;
};
template <class Sequence>
constexpr bool IS_LISTED = true;
template <>
constexpr bool IS_LISTED<NoSequence> = false;
template <class T>
using TileOf = typename TileKind<typename T::Blocked>::Tile;
template <class T>
using SequenceOf = typename TileKind<typename T::Blocked>::Sequence;

// The lists of tiles among the parameters that are lists.
DEVICE const TileLists& tile_lists(const TileLists& lists) { return lists; }
DEVICE const TileLists& tile_lists(const SequenceLists& lists) { return lists.tiles; }

// The tile of a place in one of the lists, or without lists the one that starts with this row.
template <class T>
DEVICE TileOf<T> tile_at(const typename T::Params& params, const int32* TileLists::*list, int place, int first_row) {
  if constexpr (IS_PACKED<typename T::Blocked>)
    return find_sequence(tile_lists(params.lists).*list, place);
  else
    return {first_row, {}};
}

// The queries and keys of a block's sequence.
template <class Params>
DEVICE int32 count_queries(const Params& params, const NoSequence&) { return params.seq_q; }
template <class Params>
DEVICE int32 count_queries(const Params&, const Sequence& it) { return it.len_q; }
template <class Params>
DEVICE int32 count_keys(const Params& params, const NoSequence&) { return params.seq_kv; }
template <class Params>
DEVICE int32 count_keys(const Params&, const Sequence& it) { return it.len_kv; }

// Rows of a sequence, from `first` on, up to `end`.
struct TileRows {
  int first, end;
};

// The rows that a tile of the axis along which sequences are packed has of one of them: `before` it has so many rows there.
template <int TILE>
DEVICE TileRows rows_of_tile(int tile, int before, int len) {
  return {max(tile * TILE - before, 0), min((tile + 1) * TILE - before, len)};
}

// The first key of a tile, which a block mask may list, and the one behind its last: that of all keys, unless sequences cut the tiles
// of the packed axis. And so of queries.
template <class Blocked, int TILE, class Of>
DEVICE int first_key_in(const Of& sequence, int tile) {
  if constexpr (IS_CUT<Blocked>) return rows_of_tile<TILE>(tile, sequence.offset_kv, sequence.len_kv).first;
  else return tile * TILE;
}
template <class Blocked, int TILE, class Params, class Of>
DEVICE int end_key_in(const Params& params, const Of& sequence, int tile) {
  if constexpr (IS_CUT<Blocked>) return rows_of_tile<TILE>(tile, sequence.offset_kv, sequence.len_kv).end;
  else return count_keys(params, sequence);
}
template <class Blocked, int TILE, class Of>
DEVICE int first_query_in(const Of& sequence, int tile) {
  if constexpr (IS_CUT<Blocked>) return rows_of_tile<TILE>(tile, sequence.offset_q, sequence.len_q).first;
  else return tile * TILE;
}
template <class Blocked, int TILE, class Params, class Of>
DEVICE int end_query_in(const Params& params, const Of& sequence, int tile) {
  if constexpr (IS_CUT<Blocked>) return rows_of_tile<TILE>(tile, sequence.offset_q, sequence.len_q).end;
  else return count_queries(params, sequence);
}

// Where a tile that a block owns ends, by its first row.
template <class Blocked, int TILE, class Params, class Of>
DEVICE int end_of_queries(const Params& params, const Of& sequence, int first) {
  if constexpr (IS_CUT<Blocked>) return end_query_in<Blocked, TILE>(params, sequence, (sequence.offset_q + first) / TILE);
  else return count_queries(params, sequence);
}
template <class Blocked, int TILE, class Params, class Of>
DEVICE int end_of_keys(const Params& params, const Of& sequence, int first) {
  if constexpr (IS_CUT<Blocked>) return end_key_in<Blocked, TILE>(params, sequence, (sequence.offset_kv + first) / TILE);
  else return count_keys(params, sequence);
}

// The row of a block mask's lists for a tile of queries that begins with `first`, and so of keys. `number` is that of the sequence.
template <class Blocked, class Of>
DEVICE int row_of_queries(const Of& sequence, int number, int first) {
  if constexpr (IS_CUT<Blocked>) return (sequence.offset_q + first) / Blocked::QUERIES + number;
  else return first / Blocked::QUERIES;
}
template <class Blocked, class Of>
DEVICE int row_of_keys(const Of& sequence, int number, int first) {
  if constexpr (IS_CUT<Blocked>) return (sequence.offset_kv + first) / Blocked::KEYS + number;
  else return first / Blocked::KEYS;
}

// The walk of a tile of queries that begins with `first` over the keys that lists name. A sequence without keys has no list.
template <class T>
DEVICE KeysOf<T> listed_keys(const typename T::Params& params, const SequenceOf<T>& sequence, int number, int batch, int head,
                             int first) {
  using Blocked = typename T::Blocked;
  if constexpr (IS_CUT<Blocked>) {
    const bool has_keys = sequence.len_kv > 0;
    KeysOf<T> walk(params.lists.keys, 0, head, has_keys ? row_of_queries<Blocked>(sequence, number, first) : 0);
    if (!has_keys) walk.end = 0;
    return walk;
  } else {
    return {params.lists.keys, batch, head, first / Blocked::QUERIES};
  }
}

template <Band BAND, class Params>
DEVICE Mask<BAND> mask_of(const Params& params, const NoSequence&) { return Mask<BAND>(params); }
template <Band BAND, class Params>
DEVICE Mask<BAND> mask_of(const Params& params, const Sequence& it) { return Mask<BAND>(params, it.len_q, it.len_kv); }

// Writes the entry that `find_sequence` reads.
DEVICE void store_tile(int32* list, int entry, const ListedTile& tile) {
  int32* place = list + static_cast<int64>(entry) * ListedTile::FIELDS;
  const Sequence& of = tile.sequence;
  store_global_16(place, chunk_of(tile.number, tile.first_row, of.offset_q, of.len_q));
  store_global_16(place + 4, chunk_of(of.offset_kv, of.len_kv, tile.tiles, 0));
}

}  // namespace multiattn
