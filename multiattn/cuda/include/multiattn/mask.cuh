// The keys that a query sees: one predicate, and the loop bounds that follow from it, over keys and over queries.
//
// The band of visible keys is aligned bottom-right: the last query is level with the last key.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

enum class Band {
  FULL,       // every key is visible
  CAUSAL,     // up to the one that is level with the query
  TWO_SIDED,  // from `left` before that one to `right` after it
};

// Blocks that a tile of the other sequence walks over: it sees [begin, full_begin) in part, [full_begin, full_end) in
// full, [full_end, end) in part, and nothing of any other.
struct Blocks {
  int begin, full_begin, full_end, end;
};

// The two numbers of a band with two sides: neither is negative, and their sum is less than seq_q + seq_kv. Another band
// has none, not even unread ones: those change the order of registers in the kernels for sm90.
template <Band BAND>
struct Reach {
  static constexpr int32 left = 0, right = 0;
  template <class Params>
  DEVICE explicit Reach(const Params&) {}
};
template <>
struct Reach<Band::TWO_SIDED> {
  int32 left, right;
  template <class Params>
  DEVICE explicit Reach(const Params& params) : left(params.left), right(params.right) {}
};

template <Band BAND>
struct Mask : private Reach<BAND> {
  int32 seq_q, seq_kv;

  template <class Params>
  DEVICE explicit Mask(const Params& params) : Reach<BAND>(params), seq_q(params.seq_q), seq_kv(params.seq_kv) {}

  // The mask of a sequence that is shorter than all of the parameters' rows.
  template <class Params>
  DEVICE Mask(const Params& params, int32 seq_q, int32 seq_kv) : Reach<BAND>(params), seq_q(seq_q), seq_kv(seq_kv) {}

  // The band is aligned bottom-right, which keeps every query below seq_q from keys at seq_kv and beyond; unless there is one
  // to its right.
  DEVICE bool visible(int query, int key) const {
    if constexpr (BAND == Band::FULL) return key < seq_kv;
    if constexpr (BAND == Band::CAUSAL) return key <= query + (seq_kv - seq_q);
    return key >= first_key(query) && key <= last_key(query);
  }

  // The first key that a query sees, of a band with two sides, which may be negative; and the last, of any band.
  DEVICE int first_key(int query) const { return query + (seq_kv - seq_q) - left; }
  DEVICE int last_key(int query) const {
    if constexpr (BAND == Band::FULL) return seq_kv - 1;
    return min(query + (seq_kv - seq_q) + right, seq_kv - 1);
  }

  // True if every query of a tile sees every key of the other.
  DEVICE bool all_visible(int first_query, int tile_m, int first_key, int tile_n) const {
    const bool is_below_upper_edge = visible(first_query, first_key + tile_n - 1);
    if constexpr (BAND != Band::TWO_SIDED) return is_below_upper_edge;
    return is_below_upper_edge && visible(min(first_query + tile_m, seq_q) - 1, first_key);
  }

  // Blocks of TILE_N keys for a tile of queries, which may begin before query 0.
  template <int TILE_N>
  DEVICE Blocks keys(int first_query, int tile_m) const {
    const int offset = seq_kv - seq_q, last_query = min(first_query + tile_m, seq_q) - 1;
    int end_of_all = seq_kv, end_of_any = seq_kv;
    if constexpr (BAND != Band::FULL) {
      end_of_all = max(first_query + offset + right + 1, 0);
      end_of_any = max(last_query + offset + right + 1, 0);
    }
    if constexpr (BAND != Band::TWO_SIDED) return {0, 0, end_of_all / TILE_N, (end_of_any - 1 + TILE_N) / TILE_N};
    const int first_of_any = max(max(first_query, 0) + offset - left, 0), first_of_all = max(last_query + offset - left, 0);
    return in_order(first_of_any / TILE_N, (first_of_all - 1 + TILE_N) / TILE_N, min(end_of_all, seq_kv) / TILE_N,
                    (min(end_of_any, seq_kv) - 1 + TILE_N) / TILE_N);
  }

  // Blocks of TILE_M queries for a tile of keys; `tiles` cover all queries. Of a tile that ends beyond the last key no block
  // is full.
  template <int TILE_M>
  DEVICE Blocks queries(int first_key, int tile_n, int tiles) const {
    const int offset = seq_kv - seq_q, last_key = first_key + tile_n - 1;
    int first_of_any = 0, first_of_all = 0;
    if constexpr (BAND != Band::FULL) {
      first_of_any = max(first_key - offset - right, 0);
      first_of_all = max(last_key - offset - right, 0);
    }
    const int full_begin = last_key < seq_kv ? (first_of_all - 1 + TILE_M) / TILE_M : tiles;
    if constexpr (BAND != Band::TWO_SIDED) return {first_of_any / TILE_M, full_begin, tiles, tiles};
    const int end_of_all = first_key - offset + left + 1, end_of_any = min(last_key, seq_kv - 1) - offset + left + 1;
    return in_order(first_of_any / TILE_M, full_begin, end_of_all < seq_q ? max(end_of_all, 0) / TILE_M : tiles,
                    (max(min(end_of_any, seq_q), 0) - 1 + TILE_M) / TILE_M);
  }

 private:
  using Reach<BAND>::left, Reach<BAND>::right;

  // A tile may see nothing, or no block in full.
  static DEVICE Blocks in_order(int begin, int full_begin, int full_end, int end) {
    end = max(begin, end);
    full_begin = min(full_begin, end);
    return {begin, full_begin, max(full_begin, full_end), end};
  }
};

}  // namespace multiattn
