// Fused multi-head attention, forward, for tensor cores with mma.sync (sm80 and later).
//
// Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 1: a block owns TILE_M queries of one head and walks over the
// keys, TILE_N at a time. One template for the whole ladder; forward_traits.cuh names its axes, docs/ladder.md tells them.
#pragma once
#include "forward_products.cuh"
#include "forward_stream.cuh"
#include "forward_traits.cuh"
#include "multiattn/mask.cuh"
#include "multiattn/params.h"
#include "multiattn/softmax.cuh"

namespace multiattn {

// Running state of the warp's rows.
template <class T>
using RowStates = RowStateOf<T>[T::ROW_FRAGMENTS];

// With SPLIT_KV, what warps that share rows tell each other through shared memory: a value of each row from each warp,
// [COLUMN_WARPS, TILE_M] fp32. Else a warp has its rows to itself.
template <class T, class Combine>
DEVICE void combine_rows(float (&value)[T::ROW_FRAGMENTS][2], SharedAddress exchange, Combine combine) {
  if constexpr (T::SPLIT_KV) {
    const auto place = [&](int warp, int m, int half) {
      return exchange + (warp * T::TILE_M + T::warp_row() + 16 * m + accumulator_row(2 * half)) * 4;
    };
    for_each<T::ROW_FRAGMENTS, 2>([&](int m, int half) {
      if (thread_index() % 4 == 0) store_shared_4(place(T::column_warp(), m, half), float_bits(value[m][half]));
    });
    sync_block();  // every warp's values are there
    for_each<T::ROW_FRAGMENTS, 2>([&](int m, int half) {
      value[m][half] = load_shared_4(place(0, m, half));
#pragma unroll
      for (int warp = 1; warp < T::COLUMN_WARPS; ++warp)
        value[m][half] = combine(value[m][half], load_shared_4(place(warp, m, half)));
    });
  }
}

// With SPLIT_KV, the warp's weights go where the warps that share its rows read them.
template <class T>
DEVICE void hand_out(const Scores<T>& weights, SharedAddress tile) {
  if constexpr (T::SPLIT_KV) {
    const PairWriter<typename T::TileP> writer;
    const int first_chunk = T::warp_key() / CHUNK_ELEMENTS;
    // No for_each: of that ptxas makes other code at D=1024 for sm100.
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
      for (int n = 0; n < T::KEY_FRAGMENTS; ++n)
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float(&value)[4] = weights[m][n][side].value;
            writer.store(tile, T::warp_row() + 16 * m + 8 * half, first_chunk + 2 * n + side,
                         pack<typename T::Element>(value[2 * half], value[2 * half + 1]));
          }
  }
}

// The steps of the loop over the keys share this.
template <class T>
struct Walk {
  const typename T::Params& params;
  const Queries<T>& queries;
  Stream<T>& stream;
  const Work<T>& work;

  static DEVICE SharedAddress ring() { return shared_base() + T::RING_AT; }
  static DEVICE SharedAddress weights() { return shared_base() + T::EXCHANGE_AT; }
  static DEVICE SharedAddress tops() { return weights() + (T::SPLIT_KV ? T::TileP::BYTES : 0); }
  DEVICE Mask<T::BAND> mask() const { return mask_of<T::BAND>(params, work.sequence); }
  DEVICE int seq_q() const { return count_queries(params, work.sequence); }
  // The query behind the last of the tile, or of the sequence.
  DEVICE int end_query() const { return end_of_queries<typename T::Blocked, T::TILE_M>(params, work.sequence, work.first_query); }
  // The first key of a tile that sequences cut, and the one behind its last.
  DEVICE int first_key(int tile) const { return first_key_in<typename T::Blocked, T::TILE_N>(work.sequence, tile); }
  DEVICE int end_key(int tile) const { return end_key_in<typename T::Blocked, T::TILE_N>(params, work.sequence, tile); }
  DEVICE HeadScores<typename T::Score> head() const {
    return {params.aux, seq_q(), count_keys(params, work.sequence), work.batch, work.head};
  }
  // From `scores` to the log2 domain.
  DEVICE float scale_log2() const { return HAS_SCORE<typename T::Score> ? 1.0f : params.scale_log2; }
};

// scores[WARP_ROWS, WARP_KEYS] = Q K^T, piece by piece of head_dim
template <class T>
DEVICE void compute_scores(Scores<T>& scores, const Walk<T>& it, int step) {
  ScoreSums<T> sums;
  clear(sums);
#pragma unroll 1
  for (int piece = 0; piece < T::K_PIECES; ++piece) {
    it.stream.await_k(step, piece);
    const SharedAddress q = it.queries.source(piece, it.stream.q(step, piece));
    if (T::STREAMED && it.params.scale_sign != 1) {
      fold_sign_into_q<T, typename T::PieceQ>(q, it.params.scale_sign);
      sync_block();  // Q is rewritten before anybody reads it
    }
    add_scores<T>(sums, it.queries, q, it.stream.k(step, piece));
  }
  for_each<T::ROW_FRAGMENTS, T::KEY_FRAGMENTS, 2>(
      [&](int m, int n, int side) { scores[m][n][side] = widened(sums[m][n][side]); });
}

// The expression's scores in place of Q K^T. Beyond the ends of the sequences they mean nothing.
template <class T>
DEVICE void modify_scores(Scores<T>& scores, const Walk<T>& it, int block) {
  const HeadScores<typename T::Score> head = it.head();
  const uint32 thread = recomputed(thread_index());
  const int first_query = it.work.first_query + T::warp_row(thread);
  int first_key = block * T::TILE_N + T::warp_key(thread);
  if constexpr (IS_CUT<typename T::Blocked>) first_key = it.first_key(block) + T::warp_key(thread);
  // Columns first: what depends on the key alone is then in registers for a few scores only.
  for_each<T::KEY_FRAGMENTS, 2, T::ROW_FRAGMENTS, 4>([&](int n, int side, int m, int e) {
    float& score = scores[m][n][side].value[e];
    score = head.score(score, first_query + 16 * m + accumulator_row(e, thread),
                       first_key + 16 * n + 8 * side + accumulator_column(e, thread));
  });
}

// Hides the scores of a partial block that the expression's mask hides.
template <class T>
DEVICE void mask_partial(Scores<T>& scores, const Walk<T>& it, int block) {
  const HeadScores<typename T::Score> head = it.head();
  const uint32 thread = recomputed(thread_index());
  const int first_query = it.work.first_query + T::warp_row(thread);
  int first_key = block * T::TILE_N + T::warp_key(thread);
  if constexpr (IS_CUT<typename T::Blocked>) first_key = it.first_key(block) + T::warp_key(thread);
  for_each<T::KEY_FRAGMENTS, 2, T::ROW_FRAGMENTS, 4>([&](int n, int side, int m, int e) {
    const int query = first_query + 16 * m + accumulator_row(e, thread);
    const int key = first_key + 16 * n + 8 * side + accumulator_column(e, thread);
    if (!head.visible(query, key)) scores[m][n][side].value[e] = -infinity();
  });
}

// The one place that hides a score by the band.
template <class T>
DEVICE void mask_scores(Scores<T>& scores, const Walk<T>& it, int block) {
  constexpr bool ASKS = T::BAND == Band::TWO_SIDED || HAS_LISTS<typename T::Blocked>;
  const Mask<T::BAND> mask = it.mask();
  if constexpr (IS_CUT<typename T::Blocked>) {
    const int first = it.first_key(block);
    if (first + T::TILE_N == it.end_key(block) && mask.all_visible(it.work.first_query, T::TILE_M, first, T::TILE_N)) return;
  } else if constexpr (ASKS) {
    if (mask.all_visible(it.work.first_query, T::TILE_M, block * T::TILE_N, T::TILE_N)) return;
  }
  // The bounds of a row are made for each block: registers are scarce.
  const uint32 thread = ASKS ? recomputed(thread_index()) : thread_index();
  const int first_query = it.work.first_query + T::warp_row(thread);
  int first_key = block * T::TILE_N + T::warp_key(thread);
  if constexpr (IS_CUT<typename T::Blocked>) first_key = it.first_key(block) + T::warp_key(thread);
  for_each<T::ROW_FRAGMENTS, T::KEY_FRAGMENTS, 2, 4>([&](int m, int n, int side, int e) {
    const int query = first_query + 16 * m + accumulator_row(e, thread), key = first_key + 16 * n + 8 * side + accumulator_column(e, thread);
    if (!mask.visible(query, key)) scores[m][n][side].value[e] = -infinity();
    if constexpr (IS_CUT<typename T::Blocked>)
      if (key >= it.end_key(block)) scores[m][n][side].value[e] = -infinity();
  });
}

template <class T>
DEVICE void decay_outputs(Outputs<T>& out, const float (&decay)[T::ROW_FRAGMENTS][2]) {
  bool needed = false;
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) needed |= decay[m][0] != 1.0f || decay[m][1] != 1.0f;
  if (!any_in_warp(needed)) return;
  for_each<T::ROW_FRAGMENTS, T::OUT_FRAGMENTS, 2, 4>(
      [&](int m, int d, int side, int e) { out[m][d][side].value[e] *= decay[m][e / 2]; });
}

// One step of the paper's loop: what a block of keys adds to outputs and state. MASKED blocks may be visible in part. The
// stream knows the block as `step`, which is its number unless a block mask lists it.
template <class T, bool MASKED>
DEVICE void attend_to_block(int step, int block, Outputs<T>& out, RowStates<T>& state, const Walk<T>& it) {
  constexpr int LAG = IS_FP32<typename T::Sum> ? MAX_LAG : 0;  // sums in fp16 have no room for weights above 1
  Scores<T> scores;  // [WARP_ROWS, WARP_KEYS]; then weights
  compute_scores<T>(scores, it, step);
  if constexpr (HAS_SCORE<typename T::Score>) modify_scores<T>(scores, it, block);
  if constexpr (HAS_LISTS<typename T::Blocked> && HAS_MASK<typename T::Score>)
    if (it.stream.walk().is_partial(step)) mask_partial<T>(scores, it, block);
  if constexpr (MASKED) mask_scores<T>(scores, it, block);
  if constexpr (!T::SPLIT_KV) it.stream.await_v(step, 0);  // early: the softmax covers the next load

  float top[T::ROW_FRAGMENTS][2], decay[T::ROW_FRAGMENTS][2];
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) find_tops(scores[m], top[m], it.scale_log2());
  combine_rows<T>(top, it.tops(), [](float a, float b) { return fmaxf(a, b); });
  if constexpr (T::HAS_MAX)
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) state[m].raise(top[m]);
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
    update_softmax<LAG>(scores[m], top[m], state[m], decay[m], it.scale_log2());
  hand_out<T>(scores, it.weights());
  decay_outputs<T>(out, decay);

  const Weights<T> weights(scores, it.weights());
  if constexpr (T::SPLIT_KV && T::JOINT) sync_block();  // everybody's weights are there; else await_v sees to it
#pragma unroll(T::SPLIT_KV ? 1 : T::V_PIECES)  // a warp's own weights are registers: they have no index at run time
  for (int piece = 0; piece < T::V_PIECES; ++piece) {
    if (T::SPLIT_KV || piece > 0) it.stream.await_v(step, piece);
    if constexpr (IS_FP32<typename T::Sum>)
      accumulate<T>(out, weights, it.stream.v(step, piece), piece);
    else
      accumulate_in_halves<T>(out, weights, it.stream.v(step, piece), piece);
  }
}

// The paper's loop over the blocks of keys: those that all queries see in full, then those with a mask. Of a mask with two
// sides one loop has both: three would be half as much code again, and spill. So it is of a block mask, whose full blocks
// may end beyond the last key. The stream has been started.
template <class T>
DEVICE void attend(Outputs<T>& out, RowStates<T>& state, const Walk<T>& it) {
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
    state[m] = RowStateOf<T>::empty();
#pragma unroll
    for (int d = 0; d < T::OUT_FRAGMENTS; ++d) out[m][d][0] = out[m][d][1] = Accumulator{};
  }
  if constexpr (HAS_LISTS<typename T::Blocked>) {
    const auto& walk = it.stream.walk();
    for (int step = walk.begin; step < walk.end; ++step) attend_to_block<T, true>(step, walk.tile(step), out, state, it);
  } else {
    const Blocks blocks = it.mask().template keys<T::TILE_N>(it.work.first_query, T::TILE_M);
    int block = blocks.begin;
    if constexpr (T::BAND != Band::TWO_SIDED)
      for (; block < blocks.full_end; ++block) attend_to_block<T, false>(block, block, out, state, it);
    for (; block < blocks.end; ++block) attend_to_block<T, true>(block, block, out, state, it);
  }
}

// out = outputs / sum and lse = log(sum of exp). Quads of lanes gather 16 bytes a lane, so that rows leave in such stores.
template <class T>
DEVICE void store(const Outputs<T>& out, const RowStates<T>& state, const Walk<T>& it, const HeadTensors<T>& tensors) {
  const int lane = thread_index() % WARP;
  float sum[T::ROW_FRAGMENTS][2];
  const auto add = [](float a, float b) { return a + b; };
  for_each<T::ROW_FRAGMENTS, 2>([&](int m, int half) { sum[m][half] = reduce_row(state[m].sum[half], add); });
  combine_rows<T>(sum, it.tops(), add);
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = it.work.first_query + T::warp_row() + 16 * m + accumulator_row(2 * half);
      float max = state[m].max[half], decay = 1.0f;
      if constexpr (T::HAS_SINKS) decay = add_sink(max, sum[m][half], tensors.sink());
      const bool empty = sum[m][half] == 0.0f;  // the query sees no key
      const float inverse = empty ? 0.0f : decay / sum[m][half];
      if (lane % 4 == 0 && T::column_warp() == 0 && query < it.end_query())
        store_global_4(tensors.lse() + query,
                       empty ? -infinity() : (max + log2_exact(sum[m][half])) * LN_2);
      if constexpr (T::HAS_MAX)
        if (lane % 4 == 0 && T::column_warp() == 0 && query < it.end_query())
          store_global_4(tensors.rows(it.params.tops.of.row_max) + query, state[m].top[half] * LN_2);
#pragma unroll
      for (int d = 0; d < T::OUT_FRAGMENTS; d += 2) {  // 32 columns: a chunk of 8 for each lane of the quad
        Chunk chunk = {};
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (d + w / 2 < T::OUT_FRAGMENTS) {
            const float(&value)[4] = out[m][d + w / 2][w % 2].value;
            chunk.word[w] = pack<typename T::Element>(value[2 * half] * inverse, value[2 * half + 1] * inverse);
          }
        chunk = transpose_in_quad(chunk);
        const int column = T::warp_column() + 16 * d + lane % 4 * CHUNK_ELEMENTS;
        const bool mine = lane % 4 < 2 * (T::OUT_FRAGMENTS - d) && column < T::HEAD_DIM_V;
        if (mine && query < it.end_query())
          store_global_16(tensors.out() + query * it.params.strides_out.seq + column, chunk);
      }
    }
}

// Q as operand A. SHARE qkv: it comes through the buffer of K and V, before them; else it has one of its own.
template <class T>
DEVICE Queries<T> take_queries(const ForwardParams& params, const HeadTensors<T>& tensors, Stream<T>& stream) {
  const SharedAddress tile = shared_base();
  if constexpr (T::STREAMED) {
    stream.start();
    return Queries<T>(tile);
  }
  constexpr bool FIRST = T::SHARE == Share::QKV;
  load_tile<typename T::TileQ, T::THREADS, T::ALIGNED>(tile, tensors.q(), params.strides_q.seq,
                                                       count_queries(params, tensors.work.sequence) - tensors.work.first_query);
  cp_async_commit();
  if constexpr (!FIRST) stream.start();
  cp_async_wait<FIRST ? 0 : T::AHEAD>();
  sync_block();  // everybody's part of Q has landed
  if (params.scale_sign != 1) {
    fold_sign_into_q<T, typename T::TileQ>(tile, params.scale_sign);
    sync_block();  // Q is rewritten before anybody reads it
  }
  const Queries<T> queries(tile);
  if constexpr (FIRST) {
    sync_block();  // everybody has Q in registers: K may overwrite it
    stream.start();
  }
  return queries;
}

template <class T>
DEVICE void forward(const typename T::Params& params) {
  const Work<T> work = Work<T>::of(params);
  if constexpr (IS_PACKED<typename T::Blocked>)
    if (work.batch < 0) return;  // the list has fewer tiles than it may have
  const HeadTensors<T> tensors{params, work};
  const Mask<T::BAND> mask = mask_of<T::BAND>(params, work.sequence);
  Stream<T> stream(params, tensors, Walk<T>::ring(), keys_of<T>(params, mask, work));
  const Queries<T> queries = take_queries<T>(params, tensors, stream);
  const Walk<T> it{params, queries, stream, work};

  Outputs<T> out;       // [WARP_ROWS, the warp's columns]
  RowStates<T> state;   // of WARP_ROWS rows
  attend<T>(out, state, it);
  store<T>(out, state, it, tensors);
}

}  // namespace multiattn
