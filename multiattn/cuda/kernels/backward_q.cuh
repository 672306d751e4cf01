// Gradient of q by itself, with mma.sync (sm80 and later): the same bits each time, for one product more than adding it
// up beside those of k and v.
//
// A block owns TILE_M queries of one head and walks over the keys, TILE_N at a time, as the forward does; its warps split
// the queries, so that dS is, rounded, operand A of dQ += dS K. Where dq is wide, COLUMN_WARPS of them share its rows: all
// divide the scores by queries and by keys, and dS passes through shared memory (backward_columns.cuh).
#pragma once
#include "backward_columns.cuh"
#include "backward_common.cuh"
#include "multiattn/block_mask.cuh"
#include "multiattn/gemm.cuh"
#include "multiattn/mask.cuh"
#include "multiattn/place.cuh"
#include "multiattn/score.cuh"

namespace multiattn {

template <class Element, Features F, BackwardConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct QueryTraits : ProductTraits<Element, F, C, Score, Blocked> {
  using Base = ProductTraits<Element, F, C, Score, Blocked>;
  using Base::TILE_M, Base::TILE_N, Base::WARPS, Base::STAGES;
  using Base::SHARES_ROWS, Base::COLUMN_WARPS;
  using typename Base::TileQ, typename Base::TileDO, typename Base::TileK, typename Base::TileV;
  using TileDS = Tile<TILE_M, TILE_N>;

  // ---- what a warp owns of the scores: queries, and where warps share rows of dq, perhaps not all keys
  static constexpr int ROW_PARTS = WARPS < TILE_M / 16 ? WARPS : TILE_M / 16;
  static constexpr int KEY_PARTS = WARPS / ROW_PARTS < TILE_N / 16 ? WARPS / ROW_PARTS : TILE_N / 16;
  static constexpr bool HAS_IDLE = ROW_PARTS * KEY_PARTS < WARPS;  // warps without scores
  static constexpr int WARP_ROWS = TILE_M / ROW_PARTS, WARP_KEYS = TILE_N / KEY_PARTS;
  static constexpr int ROW_FRAGMENTS = WARP_ROWS / 16, KEY_FRAGMENTS = WARP_KEYS / 16;

  // ---- and of dq: queries and columns
  static constexpr int OWN_ROWS = TILE_M / (WARPS / COLUMN_WARPS), OWN_FRAGMENTS = OWN_ROWS / 16;
  static constexpr int COLUMN_FRAGMENTS = (TileQ::WIDTH / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS;
  static constexpr int ALL_COLUMNS = COLUMN_FRAGMENTS * COLUMN_WARPS;

  static constexpr int STAGE_BYTES = TileK::BYTES + TileV::BYTES;
  static constexpr int STAGES_AT = TileQ::BYTES + TileDO::BYTES, DS_AT = STAGES_AT + STAGES * STAGE_BYTES;
  static constexpr int SMEM_BYTES = DS_AT + (SHARES_ROWS ? TileDS::BYTES : 0);
  static constexpr int AHEAD = ROW_FRAGMENTS == 1 ? 3 : 2;  // as in the forward
  // With two fragments of rows there are no registers left to keep addresses across the loop.
  static DEVICE uint32 thread() { return ROW_FRAGMENTS == 1 ? thread_index() : recomputed(thread_index()); }

  // A warp's part of the work: the queries and the keys of its scores, in their tiles.
  static DEVICE bool has_scores() { return thread_index() / WARP < ROW_PARTS * KEY_PARTS; }
  static DEVICE int first_key() { return SHARES_ROWS ? thread_index() / WARP / ROW_PARTS * WARP_KEYS : 0; }
  // And the queries and the first fragment of columns of its dq.
  static DEVICE int first_own() { return thread_index() / WARP / COLUMN_WARPS * OWN_ROWS; }
  static DEVICE int first_fragment() { return thread_index() / WARP % COLUMN_WARPS * COLUMN_FRAGMENTS; }

  static_assert(WARPS % COLUMN_WARPS == 0 && OWN_ROWS % 16 == 0 && TILE_M == OWN_ROWS * (WARPS / COLUMN_WARPS),
                "warps own whole fragments of queries");
  static_assert(SHARES_ROWS || KEY_PARTS == 1, "a warp owns the rows of its scores");
  static_assert(WARP_ROWS % 16 == 0 && WARP_KEYS % 16 == 0 && TILE_N % 16 == 0, "scores are whole fragments");
};

// lse (log2) and delta of the two rows that a lane shares in each 16-row fragment; rows beyond the end weigh nothing.
template <int M>
struct RowStatistics {
  float lse_log2[M][2], delta[M][2];

  template <class Of>
  DEVICE RowStatistics(const QuerySequence<Of>& queries, int first_query) {
    for_each<M, 2>([&](int m, int half) {
      const int query = first_query + 16 * m + accumulator_row(2 * half);
      const bool valid = query < count_queries(queries.params, queries.sequence);
      lse_log2[m][half] = valid ? load_global_4(queries.lse() + query) * LOG2_E : infinity();
      delta[m][half] = valid ? load_global_4(queries.delta() + query) : 0.0f;
    });
  }
};

// dS = P * (dP - delta), in place of the scores.
template <int M, int N>
DEVICE void make_ds(Product<M, N>& scores, const Product<M, N>& dp, const RowStatistics<M>& rows, float score_factor) {
  for_each<M, N, 2, 4>([&](int m, int n, int side, int e) {
    float& value = scores[m][n][side].value[e];
    value = exp2_approx(fmaf(value, score_factor, -rows.lse_log2[m][e / 2])) *
            (dp[m][n][side].value[e] - rows.delta[m][e / 2]);
  });
}

// dS where the scores are an expression's.
template <class Score, int M, int N>
DEVICE void make_modified_ds(Product<M, N>& scores, const Product<M, N>& dp, const RowStatistics<M>& rows,
                             const HeadScores<Score>& head, int first_query, int first_key, uint32 thread) {
  for_each<M, N, 2, 4>([&](int m, int n, int side, int e) {
    const int query = first_query + 16 * m + accumulator_row(e, thread);
    const int key = first_key + 16 * n + 8 * side + accumulator_column(e, thread);
    float& value = scores[m][n][side].value[e];
    float sloped;
    head.weight(value, query, key, rows.lse_log2[m][e / 2], sloped);
    value = sloped * (dp[m][n][side].value[e] - rows.delta[m][e / 2]);
  });
}

template <class T>
DEVICE void store_ds(const Fragment (&ds)[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS], SharedAddress tile, int first_row) {
  const PairWriter<typename T::TileDS> writer(T::thread());
  for_each<T::ROW_FRAGMENTS, T::KEY_FRAGMENTS, 4>([&](int m, int n, int i) {
    writer.store(tile, first_row + 16 * m + 8 * (i % 2), T::first_key() / CHUNK_ELEMENTS + 2 * n + i / 2, ds[m][n].reg[i]);
  });
}

// The walk over the tiles of keys, at its beginning.
template <class T>
DEVICE KeysOf<T> keys_of(const typename T::Params& params, const Mask<T::BAND>& mask, int head, const TileOf<T>& own) {
  if constexpr (HAS_LISTS<typename T::Blocked>) {
    return listed_keys<T>(params, own.sequence, own.number, head / params.heads_q, head % params.heads_q, own.first_row);
  } else {
    return mask.template keys<T::TILE_N>(own.first_row, T::TILE_M);
  }
}

// The tile of a step of the walk, nothing from its end on.
template <class T>
DEVICE void load_keys(const BackwardParams& params, const KeySequence<SequenceOf<T>>& keys, SharedAddress stage, int tile,
                      int step, int end) {
  if (step < end) {
    int first = tile * T::TILE_N, rows = count_keys(params, keys.sequence) - first;
    if constexpr (IS_CUT<typename T::Blocked>) {
      first = first_key_in<typename T::Blocked, T::TILE_N>(keys.sequence, tile);
      rows = end_key_in<typename T::Blocked, T::TILE_N>(params, keys.sequence, tile) - first;
    }
    load_tile<typename T::TileK, T::THREADS, T::ALIGNED>(stage, keys.k() + first * params.strides_k.seq,
                                                         params.strides_k.seq, rows);
    load_tile<typename T::TileV, T::THREADS, T::ALIGNED>(
        stage + T::TileK::BYTES, keys.v() + first * params.strides_v.seq, params.strides_v.seq, rows);
  }
  cp_async_commit();
}

template <class T>
DEVICE void backward_queries(const typename T::Params& params) {
  using E = typename T::Element;
  using TileQ = typename T::TileQ;
  using TileDO = typename T::TileDO;
  using TileK = typename T::TileK;
  using TileV = typename T::TileV;
  const auto [head, place] = Place::of(block_index(), params.tiles_q_own, params.heads_q_all, params.sections_q);
  const int longest_first = (params.tiles_q_own - 1 - place) * T::TILE_M;
  const TileOf<T> own = tile_at<T>(params, &TileLists::query_list, place, longest_first);
  if (own.is_none()) return;
  const int first_query = own.first_row;
  const QuerySequence<SequenceOf<T>> queries{params, head, own.sequence};
  const KeySequence<SequenceOf<T>> keys{params, head / params.group, own.sequence};
  const Mask<T::BAND> mask = mask_of<T::BAND>(params, own.sequence);
  auto walk = keys_of<T>(params, mask, head, own);

  const SharedAddress tile_q = shared_base(), tile_do = tile_q + TileQ::BYTES, stages = tile_do + TileDO::BYTES;
  int rows = count_queries(params, own.sequence) - first_query;
  if constexpr (IS_CUT<typename T::Blocked>)
    rows = end_of_queries<typename T::Blocked, T::TILE_M>(params, own.sequence, first_query) - first_query;
  load_tile<TileQ, T::THREADS, T::ALIGNED>(tile_q, queries.q() + first_query * params.strides_q.seq,
                                           params.strides_q.seq, rows);
  load_tile<TileDO, T::THREADS, true>(tile_do, queries.dout() + first_query * params.strides_out.seq,
                                      params.strides_out.seq, rows);
  const auto load = [&](int step) {
    int tile = step;
    if constexpr (HAS_LISTS<typename T::Blocked>) tile = walk.to_load();
    load_keys<T>(params, keys, stages + step % T::STAGES * T::STAGE_BYTES, tile, step, walk.end);
    if constexpr (HAS_LISTS<typename T::Blocked>) walk.look_ahead(step + 1);
  };
  load(walk.begin);

  const int first_row = (T::SHARES_ROWS ? thread_index() / WARP % T::ROW_PARTS : thread_index() / WARP) * T::WARP_ROWS;
  const SharedAddress own_q = tile_q + first_row * TileQ::PITCH, own_do = tile_do + first_row * TileDO::PITCH;
  const RowStatistics<T::ROW_FRAGMENTS> statistics(queries, first_query + first_row);
  Product<T::OWN_FRAGMENTS, T::COLUMN_FRAGMENTS> dq;  // [OWN_ROWS, columns]
  clear(dq);
  for (int step = walk.begin; step < walk.end; ++step) {
    int block = step;
    if constexpr (HAS_LISTS<typename T::Blocked>) block = walk.tile(step);
    int first_key = block * T::TILE_N;
    if constexpr (IS_CUT<typename T::Blocked>) first_key = first_key_in<typename T::Blocked, T::TILE_N>(own.sequence, block);
    const SharedAddress k = stages + step % T::STAGES * T::STAGE_BYTES, v = k + TileK::BYTES;
    cp_async_wait<0>();
    sync_block();  // everybody's part of the block has landed; and nobody still reads what the next load overwrites
    if constexpr (T::STAGES == 2) load(step + 1);

    Product<T::ROW_FRAGMENTS, T::KEY_FRAGMENTS> scores, dp;  // [WARP_ROWS, WARP_KEYS]
    if (!T::HAS_IDLE || T::has_scores()) {
      multiply_rows<E, TileQ, TileK, T::AHEAD>(scores, own_q, k + T::first_key() * TileK::PITCH, T::thread());
      multiply_rows<E, TileDO, TileV, T::AHEAD>(dp, own_do, v + T::first_key() * TileV::PITCH, T::thread());
      if constexpr (HAS_SCORE<typename T::Score>) {
        const HeadScores<typename T::Score> of_head = scores_of<T>(params, own, head);
        make_modified_ds(scores, dp, statistics, of_head, first_query + first_row, first_key + T::first_key(),
                         recomputed(thread_index()));
      } else {
        make_ds(scores, dp, statistics, params.score_factor);
      }
      if constexpr (HAS_LISTS<typename T::Blocked> && HAS_MASK<typename T::Score>) {
        const HeadScores<typename T::Score> of_head = scores_of<T>(params, own, head);
        if (walk.is_partial(step))
          for_each_element(scores, recomputed(thread_index()), [&](float& value, int row, int column) {
            if (!of_head.visible(first_query + first_row + row, first_key + T::first_key() + column)) value = 0.0f;
          });
      }
      if constexpr (IS_CUT<typename T::Blocked>) {
        const int end_key = end_key_in<typename T::Blocked, T::TILE_N>(params, own.sequence, block);
        if (end_key < first_key + T::TILE_N || !mask.all_visible(first_query, T::TILE_M, first_key, T::TILE_N))
          for_each_element(scores, T::thread(), [&](float& value, int row, int column) {
            const int key = first_key + T::first_key() + column;
            if (key >= end_key || !mask.visible(first_query + first_row + row, key)) value = 0.0f;
          });
      } else if (!mask.all_visible(first_query, T::TILE_M, block * T::TILE_N, T::TILE_N)) {
        for_each_element(scores, T::thread(), [&](float& value, int row, int column) {
          if (!mask.visible(first_query + first_row + row, block * T::TILE_N + T::first_key() + column)) value = 0.0f;
        });
      }
    }
    Fragment ds[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS];
    round_to_operand<E>(ds, scores);
    if constexpr (T::SHARES_ROWS) {
      using Left = typename T::TileDS;
      const SharedAddress tile_ds = shared_base() + T::DS_AT;
      if (T::has_scores()) store_ds<T>(ds, tile_ds, first_row);
      sync_block();  // dS is there for all
      accumulate_columns<E, Left, TileK, T::ALL_COLUMNS>(dq, tile_ds + T::first_own() * Left::PITCH, k, T::first_fragment(),
                                                         T::thread());
    } else {
      accumulate_rows<E, TileK, T::AHEAD>(dq, ds, k, T::thread());
    }

    if constexpr (T::STAGES == 1) {
      sync_block();  // nobody still reads the block
      load(step + 1);
    }
  }

  if (T::SHARES_ROWS || walk.begin == walk.end) {  // if no query of the tile sees a key, Q has not been waited for
    cp_async_wait<0>();
    sync_block();  // everybody's part of Q has landed, and nobody still reads it, before it is overwritten
  }
  const Strides& strides = strides_dq<T>(params);
  if constexpr (T::SHARES_ROWS) {
    const int first_own = T::first_own();
    store_columns<E, TileQ, T::ALL_COLUMNS>(dq, params.grad_factor, tile_q + first_own * TileQ::PITCH,
                                            queries.dq(strides) + (first_query + first_own) * strides.seq, strides.seq,
                                            rows - first_own, T::first_fragment());
  } else {
    store_rows<E, TileQ>(dq, params.grad_factor, own_q, queries.dq(strides) + (first_query + first_row) * strides.seq,
                         strides.seq, rows - first_row);
  }
}

}  // namespace multiattn
