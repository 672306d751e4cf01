// Boxes of TMA in a tensor whose rows are one batch entry's, or those of one sequence of a packed batch: the rows that are not
// there are zeros when they are loaded, and are not written.
#pragma once
#include "multiattn/ptx_sm90.cuh"
#include "multiattn/sequence.cuh"

namespace multiattn {

// Where rows of a box are: in a batch entry of a 4-D map.
struct BatchEntry {
  int number;
};

// In a sequence of a packed batch, by a ragged map: its `count` rows are the ones before row `end` of the tensor.
struct RaggedRows {
  int end, count;
};

// Where the queries and keys of a tile are: in the sequence of that number, or the batch entry.
template <class Tile>
DEVICE auto queries_of(const Tile& tile) {
  if constexpr (IS_LISTED<decltype(tile.sequence)>)
    return RaggedRows{tile.sequence.offset_q + tile.sequence.len_q, tile.sequence.len_q};
  else
    return BatchEntry{tile.number};
}
template <class Tile>
DEVICE auto keys_of(const Tile& tile) {
  if constexpr (IS_LISTED<decltype(tile.sequence)>)
    return RaggedRows{tile.sequence.offset_kv + tile.sequence.len_kv, tile.sequence.len_kv};
  else
    return BatchEntry{tile.number};
}

// Where those of one tile are that sequences cut: what is behind its last is another's, and is zeros. The tile is one of the packed
// axis.
template <class T, int TILE, class Tile>
DEVICE auto queries_in(const Tile& tile, int number) {
  if constexpr (IS_CUT<typename T::Blocked>) {
    const int end = rows_of_tile<TILE>(number, tile.sequence.offset_q, tile.sequence.len_q).end;
    return RaggedRows{tile.sequence.offset_q + end, end};
  } else {
    return queries_of(tile);
  }
}
template <class T, int TILE, class Tile>
DEVICE auto keys_in(const Tile& tile, int number) {
  if constexpr (IS_CUT<typename T::Blocked>) {
    const int end = rows_of_tile<TILE>(number, tile.sequence.offset_kv, tile.sequence.len_kv).end;
    return RaggedRows{tile.sequence.offset_kv + end, end};
  } else {
    return keys_of(tile);
  }
}
// And of the tile that a block owns, by its first row.
template <class T, int TILE, class Tile>
DEVICE auto own_queries(const Tile& tile, int first) {
  if constexpr (IS_CUT<typename T::Blocked>) return queries_in<T, TILE>(tile, (tile.sequence.offset_q + first) / TILE);
  else return queries_of(tile);
}
template <class T, int TILE, class Tile>
DEVICE auto own_keys(const Tile& tile, int first) {
  if constexpr (IS_CUT<typename T::Blocked>) return keys_in<T, TILE>(tile, (tile.sequence.offset_kv + first) / TILE);
  else return keys_of(tile);
}

constexpr int RAGGED_ROWS = 1 << 30;  // multiattn/packed.py says how these maps work

DEVICE void load_box(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                     const BatchEntry& of) {
  tma_load(target, map, barrier, column, row, head, of.number);
}
// From a row of the sequence on that is not negative: what comes before it is a neighbour's.
DEVICE void load_box(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                     const RaggedRows& of) {
  tma_load(target, map, barrier, column, RAGGED_ROWS - of.count + row, head, of.end, RAGGED_ROWS);
}

DEVICE void store_box(const TensorMap& map, SharedAddress source, int column, int row, int head, const BatchEntry& of) {
  tma_store(map, source, column, row, head, of.number);
}
DEVICE void store_box(const TensorMap& map, SharedAddress source, int column, int row, int head, const RaggedRows& of) {
  tma_store(map, source, column, RAGGED_ROWS - of.count + row, head, of.end, RAGGED_ROWS);
}

}  // namespace multiattn
