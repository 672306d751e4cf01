// Which keys a query sees: one predicate, and the loop bounds that follow from it.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

template <bool CAUSAL>
struct Mask {
  int32 seq_q, seq_kv;

  // The band is aligned bottom-right, which keeps every query below seq_q from keys at seq_kv and beyond.
  DEVICE bool visible(int query, int key) const {
    if constexpr (CAUSAL) return key <= query + (seq_kv - seq_q);
    return key < seq_kv;
  }

  // The first query that sees a key.
  DEVICE int first_query(int key) const {
    if constexpr (CAUSAL) return max(key - (seq_kv - seq_q), 0);
    return 0;
  }

  // Blocks of TILE_N keys for a tile of queries: [0, first_masked) is visible to all of them, [first_masked, end) in
  // part, and nothing from `end` on to any.
  struct Blocks {
    int first_masked, end;
  };

  template <int TILE_N>
  DEVICE Blocks blocks(int first_query, int tile_m) const {
    int keys_of_all = seq_kv, keys_of_any = seq_kv;
    if constexpr (CAUSAL) {
      const int offset = seq_kv - seq_q;
      const int last_query = min(first_query + tile_m, seq_q) - 1;
      keys_of_all = max(first_query + offset + 1, 0);
      keys_of_any = max(last_query + offset + 1, 0);
    }
    return {keys_of_all / TILE_N, (keys_of_any - 1 + TILE_N) / TILE_N};
  }
};

}  // namespace multiattn
