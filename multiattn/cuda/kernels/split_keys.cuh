// Fused multi-head attention, forward, for few queries over many keys, with mma.sync (sm80 and later).
//
// "Flash-Decoding" (https://pytorch.org/blog/flash-decoding/): time is that of reading K and V once, so all queries of the heads
// that share them are rows of one tile, and blocks divide the keys until the GPU is full. In a block teams of warps divide them
// again: each has a ring of tiles of its own, and waits for no other. Where keys are divided among blocks, merge_splits.cuh
// adds up what they leave.
#pragma once
#include "multiattn/gemm.cuh"
#include "multiattn/softmax.cuh"
#include "multiattn/special.cuh"
#include "split_keys_stored.cuh"
#include "split_keys_stream.cuh"

namespace multiattn {

// Q[TILE_M, WIDTH] to shared memory; rows that are none become zeros.
template <class T>
DEVICE void load_queries(const Owned<T>& owned) {
  using Tile = typename T::TileQ;
  for (int i = thread_index(); i < Tile::ROWS * Tile::CHUNKS; i += T::THREADS) {
    const int row_of_tile = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
    const Row row = owned.row(row_of_tile);
    const bool valid = row.query < owned.len_q && chunk < Tile::VALID_CHUNKS;
    const uint16* source = static_cast<const uint16*>(owned.params.q) + owned.offset(owned.params.strides_q, row);
    copy_chunk<T::ALIGNED>(Tile::chunk(shared_base(), row_of_tile, chunk), source + chunk * CHUNK_ELEMENTS, valid);
  }
}

// The warp's rows of Q as operand A, in registers where these have room for it.
template <class T>
class SplitQueries {
 public:
  using Column = Fragment[T::ROW_FRAGMENTS];  // all rows of the warp, 16 elements of head_dim

  DEVICE SplitQueries() : reader_(Reader::down()) {
    if constexpr (T::KEEPS_Q)
      for_each<T::DOT_FRAGMENTS, T::ROW_FRAGMENTS>([&](int d, int m) { kept_[d][m] = read(d, m); });
  }
  DEVICE void load(Column& column, int d) const {
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) column[m] = T::KEEPS_Q ? kept_[T::KEEPS_Q ? d : 0][m] : read(d, m);
  }

 private:
  using Reader = FragmentReader<typename T::TileQ>;
  DEVICE Fragment read(int d, int m) const {
    return reader_.load(shared_base() + T::warp_row() * T::TileQ::PITCH, 16 * m, 16 * d);
  }

  Reader reader_;
  Column kept_[T::KEEPS_Q ? T::DOT_FRAGMENTS : 1];
};

// The rows of accumulators that a lane has: of fragment m those at lane / 4 and 8 below.
template <class T>
struct LaneRows {
  Row row[T::ROW_FRAGMENTS][2];

  DEVICE explicit LaneRows(const Owned<T>& owned) {
    for_each<T::ROW_FRAGMENTS, 2>(
        [&](int m, int half) { row[m][half] = owned.row(T::warp_row() + 16 * m + accumulator_row(2 * half)); });
  }
};

// Shared by the steps of a team's walk over its keys.
template <class T>
struct SplitWalk {
  const typename T::Params& params;
  const Owned<T>& owned;
  const SplitQueries<T>& queries;
  const LaneRows<T>& rows;

  DEVICE float scale_log2() const { return HAS_SCORE<typename T::Score> ? 1.0f : params.scale_log2; }
  DEVICE HeadScores<typename T::Score> head(const Row& row) const {
    return {params.aux, owned.len_q, owned.len_kv, owned.sequence, row.head};
  }
};

// scores[WARP_ROWS, TILE_N] = Q K^T
template <class T>
DEVICE void multiply_keys(Scores<T>& scores, const SplitQueries<T>& queries, SharedAddress k) {
  constexpr int AHEAD = 3;
  const auto reader = FragmentReader<typename T::TileK>::right();
  const auto load = [&](int step) { return reader.load(k, step % T::KEY_FRAGMENTS * 16, step / T::KEY_FRAGMENTS * 16); };
  const auto load_q = [&](typename SplitQueries<T>::Column& column, int d) { queries.load(column, d); };
  clear(scores);
  if constexpr (T::IS_STORED) multiply_stored_keys<T, AHEAD>(scores, load_q, load);
  else multiply<typename T::Element, T::DOT_FRAGMENTS, AHEAD>(scores, load_q, load);
}

// The expression's scores, in the log2 domain, in place of Q K^T.
template <class T>
DEVICE void modify_scores(Scores<T>& scores, const SplitWalk<T>& it, int first_key) {
  for_each<T::ROW_FRAGMENTS, T::KEY_FRAGMENTS, 2, 4>([&](int m, int n, int side, int e) {
    const Row row = it.rows.row[m][e / 2];
    float& score = scores[m][n][side].value[e];
    score = it.head(row).score(score, row.query, first_key + 16 * n + 8 * side + accumulator_column(e));
  });
}

template <class T>
DEVICE void mask_scores(Scores<T>& scores, const SplitWalk<T>& it, int first_key) {
  const Mask<T::BAND> mask = it.owned.mask();
  for_each<T::ROW_FRAGMENTS, T::KEY_FRAGMENTS, 2, 4>([&](int m, int n, int side, int e) {
    const Row row = it.rows.row[m][e / 2];
    const int key = first_key + 16 * n + 8 * side + accumulator_column(e);
    bool is_visible = mask.visible(row.query, key);
    if constexpr (HAS_TAIL<typename T::Score>) is_visible = is_visible && it.head(row).visible(row.query, key);
    if (!is_visible) scores[m][n][side].value[e] = -infinity();
  });
}

// out[WARP_ROWS, the warp's columns] += weights[WARP_ROWS, TILE_N] V[TILE_N, the warp's columns]
template <class T>
DEVICE void accumulate(Outputs<T>& out, const Scores<T>& weights, SharedAddress v) {
  constexpr int AHEAD = 3, D = T::OUT_FRAGMENTS;
  const auto reader = FragmentReader<typename T::TileV>::down();
  const auto load = [&](int step) { return reader.load_transposed(v, step / D * 16, T::warp_column() / T::PACKING + step % D * 16); };
  Fragment left[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS];
  round_to_operand<typename T::Element>(left, weights);
  if constexpr (T::IS_STORED) return add_stored_values<T, AHEAD>(out, left, load);
  read_ahead<T::KEY_FRAGMENTS * D, AHEAD>(load, [&](int step, const Fragment& value) {
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) mma_pair<typename T::Element>(out[m][step % D], left[m][step / D], value);
  });
}

// One step of Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 1, for the warp's rows.
template <class T>
DEVICE void attend_to_tile(Outputs<T>& out, RowStateOf<T> (&state)[T::ROW_FRAGMENTS], const SplitWalk<T>& it,
                           StoredWalk<T>& stored, SharedAddress k, int first_key, bool is_masked) {
  Scores<T> scores;  // [WARP_ROWS, TILE_N]; then weights
  multiply_keys<T>(scores, it.queries, k);
  stored.scale_scores(scores, k);
  if constexpr (HAS_SCORE<typename T::Score>) modify_scores<T>(scores, it, first_key);
  if (is_masked) mask_scores<T>(scores, it, first_key);
  bool decays = false;
  float decay[T::ROW_FRAGMENTS][2];
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
    float top[2];
    if constexpr (T::IS_STORED) {
      find_tops(scores[m], top, stored.row_scales[m]);
      if constexpr (T::HAS_MAX) state[m].raise(top);
      update_softmax<MAX_LAG>(scores[m], top, state[m], decay[m], stored.row_scales[m]);
    } else {
      find_tops(scores[m], top, it.scale_log2());
      if constexpr (T::HAS_MAX) state[m].raise(top);
      update_softmax<MAX_LAG>(scores[m], top, state[m], decay[m], it.scale_log2());
    }
    decays |= decay[m][0] != 1.0f || decay[m][1] != 1.0f;
  }
  decays |= stored.scale_weights(scores, decay, k);
  if (any_in_warp(decays))
    for_each<T::ROW_FRAGMENTS, T::OUT_FRAGMENTS, 2, 4>(
        [&](int m, int d, int side, int e) { out[m][d][side].value[e] *= decay[m][e / 2]; });
  accumulate<T>(out, scores, k + T::V_AT);
}

// The results of teams for each row, in shared memory: outputs, the largest score behind them, then maxima (log2) and sums.
template <class T>
struct Found {
  static DEVICE SharedAddress out(int team, int row, int column) {
    return shared_base() + T::Q_BYTES + ((team * T::TILE_M + row) * T::FOUND_PITCH + column) * 4;
  }
  static DEVICE SharedAddress max(int team, int row) { return out(T::TEAMS, 0, 0) + (team * T::TILE_M + row) * 8; }
  static DEVICE SharedAddress sum(int team, int row) { return max(team, row) + 4; }
  static DEVICE SharedAddress top(int team, int row) { return out(team, row, T::FOUND_PITCH - 1); }
};

template <class T>
DEVICE void leave(const Outputs<T>& out, const RowStateOf<T> (&state)[T::ROW_FRAGMENTS], const StoredWalk<T>& stored) {
  for_each<T::ROW_FRAGMENTS, 2>([&](int m, int half) {
    const int row = T::warp_row() + 16 * m + accumulator_row(2 * half);
    const float sum = reduce_row(state[m].sum[half], [](float a, float b) { return a + b; });
    if (thread_index() % 4 == 0 && T::has_first_column()) {
      store_shared_4(Found<T>::max(T::team(), row), float_bits(state[m].max[half]));
      store_shared_4(Found<T>::sum(T::team(), row), float_bits(sum));
      if constexpr (T::HAS_MAX) store_shared_4(Found<T>::top(T::team(), row), float_bits(state[m].top[half]));
    }
    if constexpr (T::IS_STORED) {
#pragma unroll
      for (int d = 0; d < T::OUT_FRAGMENTS; ++d)
        store_shared_16(Found<T>::out(T::team(), row, T::warp_column() + 16 * d + thread_index() % 4 * 4),
                        stored.four_columns(out[m][d], m, half));
      return;
    }
#pragma unroll
    for (int d = 0; d < T::OUT_FRAGMENTS; ++d)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const SharedAddress place = Found<T>::out(T::team(), row, T::warp_column() + 16 * d + 8 * side + accumulator_column(0));
        store_shared_4(place, float_bits(out[m][d][side].value[2 * half]));
        store_shared_4(place + 4, float_bits(out[m][d][side].value[2 * half + 1]));
      }
  });
}

// A row's maximum and sum over all teams, without its sink.
struct RowTotal {
  float max, sum;
};
template <class T>
DEVICE RowTotal total_of(int row) {
  RowTotal total{-infinity(), 0.0f};
#pragma unroll
  for (int team = 0; team < T::TEAMS; ++team) total.max = fmaxf(total.max, load_shared_4(Found<T>::max(team, row)));
  const float base = total.max == -infinity() ? 0.0f : total.max;
#pragma unroll
  for (int team = 0; team < T::TEAMS; ++team)
    total.sum += load_shared_4(Found<T>::sum(team, row)) * exp2_approx(load_shared_4(Found<T>::max(team, row)) - base);
  return total;
}

// The largest score of a row over all teams (log2).
template <class T>
DEVICE float top_of(int row) {
  float top = -infinity();
#pragma unroll
  for (int team = 0; team < T::TEAMS; ++team) top = fmaxf(top, load_shared_4(Found<T>::top(team, row)));
  return top;
}

// Eight columns of a row, added up over the teams and multiplied by `factor`.
template <class T>
DEVICE void add_up(float (&value)[CHUNK_ELEMENTS], int row, int column, float max, float factor) {
  const float base = max == -infinity() ? 0.0f : max;
#pragma unroll
  for (int i = 0; i < CHUNK_ELEMENTS; ++i) value[i] = 0.0f;
#pragma unroll
  for (int team = 0; team < T::TEAMS; ++team) {
    const float weight = factor * exp2_approx(load_shared_4(Found<T>::max(team, row)) - base);
    const SharedAddress place = Found<T>::out(team, row, column);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const Chunk four = load_shared_16(place + 16 * part);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[4 * part + i] += weight * float_of_bits(four.word[i]);
    }
  }
}

// The block's rows: out and lse, or with several splits its part of them.
template <class T>
DEVICE void store(const Owned<T>& owned, const typename T::Params& params, const StoredWalk<T>& stored) {
  const bool is_part = params.splits > 1;
  constexpr int CHUNKS = T::HEAD_DIM_V / CHUNK_ELEMENTS;  // of a row
  for (int i = thread_index(); i < T::TILE_M * CHUNKS; i += T::THREADS) {
    const int row_of_tile = i / CHUNKS, column = i % CHUNKS * CHUNK_ELEMENTS;
    const Row row = owned.row(row_of_tile);
    if (row.query >= owned.len_q) break;
    auto [max, sum] = total_of<T>(row_of_tile);
    float decay = 1.0f;
    const float max_of_keys = max;
    if constexpr (T::HAS_SINKS)
      if (!is_part) decay = add_sink(max, sum, load_global_4(params.sinks + row.head));
    const bool empty = sum == 0.0f;
    const float lse_log2 = empty ? -infinity() : max + log2_exact(sum);
    const int64 place = owned.place(row) + (is_part ? owned.split * rows_of(params) : 0);
    float* lse = is_part ? params.partial_lse : params.lse;
    if (column == 0) store_global_4(lse + place, is_part ? lse_log2 : lse_log2 * LN_2);
    if constexpr (T::HAS_MAX) {
      const RowMax& target = params.tops.of;
      if (column == 0)
        store_global_4((is_part ? target.partial_max : target.row_max) + place, top_of<T>(row_of_tile) * (is_part ? 1.0f : LN_2));
    }
    if (is_part && empty) continue;  // nobody reads it
    float value[CHUNK_ELEMENTS];
    add_up<T>(value, row_of_tile, column, max_of_keys, empty ? 0.0f : stored.scaled(decay / sum));
    if (is_part) {
      float* target = params.partial_out + place * T::HEAD_DIM_V + column;
#pragma unroll
      for (int part = 0; part < 2; ++part)
        store_global_16(target + 4 * part, chunk_of(value + 4 * part));
    } else {
      Chunk chunk;
#pragma unroll
      for (int w = 0; w < 4; ++w) chunk.word[w] = pack<typename T::OutElement>(value[2 * w], value[2 * w + 1]);
      store_global_16(static_cast<uint16*>(params.out) + owned.offset(params.strides_out, row) + column, chunk);
    }
  }
}

template <class T>
DEVICE void split_keys(const typename T::Params& params) {
  Owned<T> owned = Owned<T>::of(params);
  follow_earlier_grids<T::OVERLAPS>();
  owned.find_lengths();
  if (owned.first_row >= owned.len_q * params.group) return;
  load_queries<T>(owned);
  cp_async_commit();
  const Blocks tiles = keys_of(owned, params);
  const KeyStream<T> stream(params, owned, shared_base() + T::Q_BYTES + T::team() * T::RING);
  const int first = tiles.begin + T::team();  // the team's tiles are every TEAMS-th from here on
  typename KeyStream<T>::Pages pages[T::STAGES];
#pragma unroll
  for (int step = 0; step < T::STAGES; ++step) pages[step] = stream.look_up(first + step * T::TEAMS);
#pragma unroll
  for (int step = 0; step < T::STAGES - 1; ++step) {
    const int tile = first + step * T::TEAMS;
    if (tile < tiles.end) stream.load(tile, step, pages[step]);
    cp_async_commit();
  }
  cp_async_wait<T::STAGES - 1>();
  sync_block();  // everybody's part of Q has landed
  if constexpr (T::IS_STORED) {
    halve_queries<T>(params.scale_sign, StoredWalk<T>::keys_of_head(params, owned));
    sync_block();  // Q is rewritten before anybody reads it
  } else if (params.scale_sign != 1) {
    for (int i = thread_index(); i < T::TileQ::BYTES / CHUNK_BYTES; i += T::THREADS)
      fold_sign_into<typename T::Element>(shared_base() + i * CHUNK_BYTES, params.scale_sign);
    sync_block();  // Q is rewritten before anybody reads it
  }

  const SplitQueries<T> queries;
  const LaneRows<T> rows(owned);
  const SplitWalk<T> it{params, owned, queries, rows};
  StoredWalk<T> stored(params, owned, it.scale_log2());
  Outputs<T> out;                     // [WARP_ROWS, the warp's columns]
  RowStateOf<T> state[T::ROW_FRAGMENTS];  // of WARP_ROWS rows
  clear(out);
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) state[m] = RowStateOf<T>::empty();

  typename KeyStream<T>::Pages next_pages = pages[T::STAGES - 1];
#pragma unroll 1
  for (int step = 0, tile = first; tile < tiles.end; ++step, tile += T::TEAMS) {
    cp_async_wait<T::STAGES - 2>();
    sync_team<T>();  // the tile has landed, and nobody reads the one that is overwritten
    const int next = tile + (T::STAGES - 1) * T::TEAMS;
    if (next < tiles.end) stream.load(next, step + T::STAGES - 1, next_pages);
    cp_async_commit();
    next_pages = stream.look_up(next + T::TEAMS);
    const bool is_masked = tile < tiles.full_begin || tile >= tiles.full_end;
    attend_to_tile<T>(out, state, it, stored, stream.k(step), tile * T::TILE_N, is_masked);
  }
  cp_async_wait<0>();
  sync_block();  // nobody reads Q's neighbours, the rings, any more
  leave<T>(out, state, stored);
  sync_block();  // what all teams have found is there
  store<T>(owned, params, stored);
}

}  // namespace multiattn
