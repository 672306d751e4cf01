// Where dS of some heads at a time is stored for a kernel of its own that makes dQ, or P and dS for one that makes all gradients.
#pragma once
#include "multiattn/sequence.cuh"

namespace multiattn {

// In the place of a block mask among a kernel's constants.
struct Stored {};

template <class Blocked>
constexpr bool IS_STORED = false;
template <>
constexpr bool IS_STORED<Stored> = true;
template <>
struct ListsOf<Stored> {
  using Type = StoredHeads;
};

// In the same place where P is stored, too.
struct StoredBoth {};
template <>
struct ListsOf<StoredBoth> {
  using Type = StoredProducts;
};

// The heads of keys of a launch: `count` of them from `first` on, which counts through the batch.
struct HeadRange {
  int first, count;
};
template <class T>
DEVICE HeadRange heads_of_launch(const typename T::Params& params) {
  if constexpr (IS_STORED<typename T::Blocked>) return {params.lists.first_head, params.lists.heads};
  return {0, params.backward.heads_kv_all};
}

// dS^T of 64 keys and 64 queries as shared memory has it, 8 KiB. Those of neighbouring queries are neighbours, in whole tiles of the
// kernel of dQ.
constexpr int DS_IMAGE_BYTES = 64 * 64 * 2;
template <class T>
DEVICE char* ds_image(const typename T::Params& params, int head, int keys, int queries) {
  const BackwardParams& backward = params.backward;
  const int64 row = static_cast<int64>(head - params.lists.first_head * backward.group) * backward.tiles_kv + keys;
  return static_cast<char*>(params.lists.ds) + (row * (2 * backward.tiles_q_own) + queries) * DS_IMAGE_BYTES;
}

// P or dS of a launch, whose rows are queries: images of 64 queries and 64 keys as shared memory has them. Those of neighbouring keys
// are neighbours, in whole tiles of the kernel of scores.
struct Images {
  static constexpr int TILE_ROWS = 128, ROWS = 64;  // queries of a tile, and of an image, which has as many keys
  int of_row, of_head;                              // images; those of a launch are counted in 32 bits

  DEVICE Images(const StoredProducts& stored, int tiles_kv, int tile_n)
      : of_row(tiles_kv * (tile_n / ROWS)), of_head(of_row * (stored.tiles * (TILE_ROWS / ROWS))) {}

  // The number of an image of a query head of the launch. `queries` and `keys` count images, of queries from the launch's first on.
  DEVICE int place(int head, int queries, int keys) const { return head * of_head + queries * of_row + keys; }
};

}  // namespace multiattn
