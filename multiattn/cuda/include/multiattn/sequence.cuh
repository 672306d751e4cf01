// The sequence of a block in a packed batch, where sequences of any lengths lie one after another in one tensor.
#pragma once
#include "multiattn/block_mask.cuh"
#include "multiattn/params.h"
#include "multiattn/ptx.cuh"

namespace multiattn {

// In the place of a block mask among a kernel's constants: its tiles are those that the lists of a packed batch name.
struct Packed {};

template <class Blocked>
constexpr bool IS_PACKED = false;
template <>
constexpr bool IS_PACKED<Packed> = true;
template <>
constexpr bool HAS_LISTS<Packed> = false;  // a band alone says which tiles are seen
template <>
struct ListsOf<Packed> {
  using Type = TileLists;
};
template <int TILE>
struct KeyWalk<Packed, TILE> {
  using Type = Blocks;
};

// The `len_q` queries from row `offset_q` of q on, and the `len_kv` keys from row `offset_kv` of k and v on. Positions in a
// sequence start at 0.
struct Sequence {
  int32 offset_q, offset_kv, len_q, len_kv;
};

// One entry of a list: the tile that starts with `first_row` of its sequence, a query or a key. `number` is that of the
// sequence; negative: there is no tile, and the block that gets it has nothing to do. Rows behind the last sequence make
// up one more, with queries but no keys, or keys but no queries: nothing may be loaded by its number.
struct ListedTile {
  int32 number, first_row;
  Sequence sequence;

  static constexpr int FIELDS = 8;  // of int32; multiattn/packed.py names them

  DEVICE bool is_none() const { return number < 0; }
};

DEVICE ListedTile find_sequence(const int32* list, int entry) {
  const int32* place = list + static_cast<int64>(entry) * ListedTile::FIELDS;
  const Chunk tile = load_global_16(place), keys = load_global_16(place + 4);
  const auto field = [](const Chunk& chunk, int word) { return static_cast<int32>(chunk.word[word]); };
  return {field(tile, 0), field(tile, 1), {field(tile, 2), field(keys, 0), field(tile, 3), field(keys, 1)}};
}

// What `find_sequence` reads.
DEVICE void store_tile(int32* list, int entry, const ListedTile& tile) {
  int32* place = list + static_cast<int64>(entry) * ListedTile::FIELDS;
  const auto word = [](int32 field) { return static_cast<uint32>(field); };
  const Sequence& of = tile.sequence;
  store_global_16(place, Chunk{{word(tile.number), word(tile.first_row), word(of.offset_q), word(of.len_q)}});
  store_global_16(place + 4, Chunk{{word(of.offset_kv), word(of.len_kv), 0, 0}});
}

}  // namespace multiattn
