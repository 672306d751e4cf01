// Gradients of k and v, and on demand of q, with mma.sync (sm80 and later).
//
// Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 2: a block owns TILE_N keys of one key/value head and walks over
// the queries of all heads of its group, TILE_M at a time. Everything is transposed (rows are keys), so that what a
// product gives is, rounded, operand A of the next one.
//
// Warps come in pairs that share keys. The first half of the warps makes the weights P^T = exp2(K Q^T) and dV += P^T dO,
// the second half makes dP^T = V dO^T, dS^T = P^T * (dP^T - delta) and dK += dS^T Q: the same two products with other
// tiles. A warp so keeps one accumulator instead of two, and has registers for twice the keys, which halves what is read
// from shared memory. P passes from a warp to its partner through shared memory, dS to all warps for dQ += dS K.
//
// A wide gradient is of COLUMN_WARPS warps, which share its keys. A half's warps then divide the scores otherwise, by keys
// and by queries, and find the whole of P or of dS in shared memory (backward_columns.cuh).
#pragma once
#include "backward_columns.cuh"
#include "backward_ring.cuh"
#include "backward_traits.cuh"
#include "multiattn/block_mask.cuh"
#include "multiattn/gemm.cuh"
#include "multiattn/mask.cuh"
#include "multiattn/place.cuh"
#include "multiattn/ptx_sm90.cuh"
#include "multiattn/score.cuh"

namespace multiattn {

// Calls `change(value, statistic)` for each of the warp's, with its query's entry of a list of TILE_M in shared memory.
template <class T, class Change>
DEVICE void with_statistic(KeyScores<T>& scores, SharedAddress list, Change change) {
  const SharedAddress own = list + accumulator_column(0, T::thread()) * 4;
  for_each<T::QUERY_FRAGMENTS, 2>([&](int n, int side) {
    float statistic[2];
    load_shared_8(statistic, own + (16 * n + 8 * side) * 4);
    for_each<T::KEY_FRAGMENTS, 4>([&](int m, int e) { change(scores[m][n][side].value[e], statistic[e % 2]); });
  });
}

// Elements that the mask hides become 0, and those of queries beyond the end: there an expression may be of any size. So do those of
// keys of another tile.
template <class T>
DEVICE void clear_masked(KeyScores<T>& scores, const Mask<T::BAND>& mask, int first_key, int first_query, int end_query, int end_key) {
  for_each_element(scores, T::thread(), [&](float& value, int row, int column) {
    const bool is_beyond = HAS_SCORE<typename T::Score> && first_query + column >= end_query;
    if (is_beyond || !mask.visible(first_query + column, first_key + row)) value = 0.0f;
    if constexpr (IS_CUT<typename T::Blocked>)
      if (first_key + row >= end_key) value = 0.0f;
  });
}

// Elements of a partial block that the expression's mask hides become 0.
template <class T>
DEVICE void clear_partial(KeyScores<T>& scores, const typename T::Params& params, const TileOf<T>& tile, int query_head,
                          int first_key, int first_query) {
  const HeadScores<typename T::Score> head = scores_of<T>(params, tile, query_head);
  for_each_element(scores, T::thread(), [&](float& value, int row, int column) {
    if (!head.visible(first_query + column, first_key + row)) value = 0.0f;
  });
}

// P^T as operands, or Q K^T in fp32, each lane's for the same lane of the partner.
template <class T>
class Mailbox {
 public:
  static constexpr int CHUNKS = T::KEY_FRAGMENTS * T::QUERY_FRAGMENTS * (T::SENDS_RAW ? 2 : 1);  // of a lane

  DEVICE Mailbox(SharedAddress smem, int pair)
      : first_(smem + T::WEIGHTS_AT + (pair * CHUNKS * WARP + thread_index() % WARP) * CHUNK_BYTES) {}

  DEVICE void put(const Operand<T>& weights) const {
    for_each<T::KEY_FRAGMENTS, T::QUERY_FRAGMENTS>([&](int m, int n) { put(m, n, weights[m][n]); });
  }

  DEVICE void put(int m, int n, const Fragment& weights) const {
    const uint32(&reg)[4] = weights.reg;
    store_shared_16(slot(m, n), Chunk{{reg[0], reg[1], reg[2], reg[3]}});
  }

  DEVICE Chunk get(int m, int n) const { return load_shared_16(slot(m, n)); }

  DEVICE void put_raw(int m, int n, int side, const Accumulator& raw) const {
    store_shared_16(slot(2 * m + side, n), chunk_of(raw.value));
  }
  DEVICE Chunk get_raw(int m, int n, int side) const { return load_shared_16(slot(2 * m + side, n)); }

 private:
  DEVICE SharedAddress slot(int m, int n) const {
    return first_ + (m * T::QUERY_FRAGMENTS + n) * (WARP * CHUNK_BYTES);
  }

  SharedAddress first_;
};

// P^T of the expression's scores, in place of K Q^T. The partner gets P^T times the slope, its factor of dS^T, and masks
// what comes of it; or K Q^T, of which it makes both.
template <class T>
DEVICE void weigh_modified(KeyScores<T>& product, const HeadScores<typename T::Score>& head, SharedAddress lse,
                           const Mailbox<T>& mailbox, int first_key, int first_query) {
  const uint32 thread = T::thread();
  for_each<T::QUERY_FRAGMENTS>([&](int n) {
    const int column = 16 * n + accumulator_column(0, thread);
    float statistic[2][2];
    for_each<2>([&](int side) { load_shared_8(statistic[side], lse + (column + 8 * side) * 4); });
    for_each<T::KEY_FRAGMENTS>([&](int m) {
      if constexpr (T::SENDS_RAW) for_each<2>([&](int side) { mailbox.put_raw(m, n, side, product[m][n][side]); });
      Accumulator sloped[2];
      for_each<2, 4>([&](int side, int e) {
        const int query = first_query + column + 8 * side + e % 2, key = first_key + 16 * m + accumulator_row(e, thread);
        float& value = product[m][n][side].value[e];
        value = head.weight(value, query, key, statistic[side][e % 2] * LOG2_E, sloped[side].value[e]);
      });
      if constexpr (!T::SENDS_RAW) mailbox.put(m, n, as_operand<typename T::Element>(sloped));
    });
  });
}

// Sums of the warp's queries and keys, for gradients of elements that depend on neither.
template <class T>
class GradientSums {
 public:
  static constexpr int COUNT = T::Score::SUMS;
  float sums[COUNT > 0 ? COUNT : 1] = {};

  // Adds them to memory, one lane for its warp.
  template <class Gradients>
  DEVICE void add_to(const Gradients& gradients, const HeadScores<typename T::Score>& head) {
    if constexpr (COUNT > 0) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2) sums[i] += shuffle_xor(sums[i], mask);
      if (thread_index() % WARP == 0) head.add_sums(gradients, sums);
    }
  }
};

// Adds dS^T, where the expression's slope is 1, to the gradients of captured tensors. Masked elements are 0.
template <class T>
DEVICE void add_gradients(KeyScores<T>& ds, const typename T::Params& params,
                          const HeadScores<typename T::Score>& head, int first_key, int first_query) {
  GradientSums<T> sums;
  for_each<T::QUERY_FRAGMENTS, 2>([&](int n, int side) {
    const uint32 thread = recomputed(thread_index());  // an address that is kept costs registers
    for_each<2, T::KEY_FRAGMENTS, 2>([&](int odd, int m, int half) {
      const int e = 2 * half + odd;
      const int query = first_query + 16 * n + 8 * side + accumulator_column(e, thread);
      const int key = first_key + 16 * m + accumulator_row(e, thread);
      head.add_gradients(params.gradients, 0.0f, ds[m][n][side].value[e], query, key, sums.sums);
    });
  });
  sums.add_to(params.gradients, head);
}

// dS^T = P^T * (dP^T - delta) * slope. `product` is the second factor, the others are made of the K Q^T that the partner has
// sent; what the first two give is the gradient of the expression's score. Masked elements are 0, whatever their weights.
template <class T>
DEVICE void multiply_by_slopes(KeyScores<T>& product, const typename T::Params& params,
                               const HeadScores<typename T::Score>& head, SharedAddress lse, const Mailbox<T>& mailbox,
                               int first_key, int first_query) {
  const uint32 thread = T::thread();
  GradientSums<T> sums;
  for_each<T::QUERY_FRAGMENTS, 2>([&](int n, int side) {
    const int column = 16 * n + 8 * side + accumulator_column(0, thread);
    float statistic[2];
    load_shared_8(statistic, lse + column * 4);
    for_each<T::KEY_FRAGMENTS>([&](int m) {
      const Chunk sent = mailbox.get_raw(m, n, side);
      for_each<4>([&](int e) {
        const int query = first_query + column + e % 2, key = first_key + 16 * m + accumulator_row(e, thread);
        const float raw = float_of_bits(sent.word[e]);
        float& value = product[m][n][side].value[e];
        float slope;
        const float weight = head.weight_and_slope(raw, query, key, statistic[e % 2] * LOG2_E, slope);
        const float dscore = value == 0.0f ? 0.0f : value * weight;
        head.add_gradients(params.gradients, raw, dscore, query, key, sums.sums);
        value = value == 0.0f ? 0.0f : dscore * slope;
      });
    });
  });
  sums.add_to(params.gradients, head);
}

// dS^T = P^T * (dP^T - delta), of which `product` is the second factor.
template <class T>
DEVICE void multiply_by_weights(KeyScores<T>& product, const Mailbox<T>& mailbox) {
  using E = typename T::Element;
  for_each<T::KEY_FRAGMENTS, T::QUERY_FRAGMENTS>([&](int m, int n) {
    const Chunk weights = mailbox.get(m, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&value)[4] = product[m][n][i / 2].value;
      value[i % 2 * 2] *= unpack_low<E>(weights.word[i]);
      value[i % 2 * 2 + 1] *= unpack_high<E>(weights.word[i]);
    }
  });
}

// To a tile of dS^T, or of P^T.
template <class T>
DEVICE void store_operand(const Operand<T>& operand, SharedAddress tile, int first_row, int pair) {
  const PairWriter<typename T::TileDS> writer(T::thread());
  const int first_chunk = Role<T>::first_query(pair) / CHUNK_ELEMENTS;
  for_each<T::KEY_FRAGMENTS, T::QUERY_FRAGMENTS, 4>([&](int m, int n, int i) {
    writer.store(tile, first_row + 16 * m + 8 * (i % 2), first_chunk + 2 * n + i / 2, operand[m][n].reg[i]);
  });
}

// dQ[TILE_M, D] += dS[TILE_M, TILE_N] K[TILE_N, D], each warp its part, added to the workspace.
template <class T>
DEVICE void add_dq(const typename T::Params& params, const TileOf<T>& tile, SharedAddress ds, SharedAddress k, int head,
                   int first_query) {
  using E = typename T::Element;
  const uint32 warp = T::thread() / WARP;
  const int first_row = warp % T::DQ_ROW_PARTS * T::DQ_ROW_FRAGMENTS;
  const int first_dim = warp / T::DQ_ROW_PARTS * T::DQ_DIM_FRAGMENTS;
  const auto owns = [&](int d) { return T::DIM_FRAGMENTS % T::DQ_DIM_PARTS == 0 || first_dim + d < T::DIM_FRAGMENTS; };
  const auto ds_reader = FragmentReader<typename T::TileDS>::right(T::thread());
  const auto k_reader = FragmentReader<typename T::TileK>::down(T::thread());

  Product<T::DQ_ROW_FRAGMENTS, T::DQ_DIM_FRAGMENTS> dq;
  clear(dq);
#pragma unroll
  for (int n = 0; n < T::TILE_N; n += 16) {
    Fragment left[T::DQ_ROW_FRAGMENTS];
#pragma unroll
    for (int m = 0; m < T::DQ_ROW_FRAGMENTS; ++m) left[m] = ds_reader.load_transposed(ds, n, 16 * (first_row + m));
#pragma unroll
    for (int d = 0; d < T::DQ_DIM_FRAGMENTS; ++d) {
      if (!owns(d)) continue;
      const Fragment right = k_reader.load_transposed(k, n, 16 * (first_dim + d));
#pragma unroll
      for (int m = 0; m < T::DQ_ROW_FRAGMENTS; ++m) mma_pair<E>(dq[m][d], left[m], right);
    }
  }
  float* sums = dq_sums<T>(params, head, tile.number, tile.sequence, first_query);
#pragma unroll
  for (int m = 0; m < T::DQ_ROW_FRAGMENTS; ++m) {
    if (first_query + 16 * (first_row + m) >= count_queries(params, tile.sequence)) break;
#pragma unroll
    for (int d = 0; d < T::DQ_DIM_FRAGMENTS; ++d)
      if (owns(d))
        T::Sum::add(sums + ((first_row + m) * T::DIM_FRAGMENTS + first_dim + d) * T::Sum::FRAGMENT, dq[m][d]);
  }
}

// The tiles of queries that cover the sequence.
template <class T>
DEVICE int count_tiles(const typename T::Params& params, const TileOf<T>& tile) {
  if constexpr (IS_PACKED<typename T::Blocked>)
    return (tile.sequence.len_q + T::TILE_M - 1) / T::TILE_M;
  else
    return params.tiles_q;
}

// K Q^T of a warp's keys and queries, or V dO^T. `queries` are all of the tile.
template <class T, class Keys, class Queries>
DEVICE void multiply_tiles(KeyScores<T>& product, Role<T> role, SharedAddress keys, SharedAddress queries) {
  const SharedAddress own = queries + Role<T>::first_query(role.pair) * Queries::PITCH;
  multiply_rows<typename T::Element, Keys, Queries, T::AHEAD>(product, keys, own, T::thread());
}
// One code is for both if they are as wide.
template <class T>
DEVICE void multiply_own(KeyScores<T>& product, Role<T> role, SharedAddress keys, SharedAddress queries) {
  if (!T::HAS_TWO_WIDTHS || role.makes_weights)
    multiply_tiles<T, typename T::TileK, typename T::TileQ>(product, role, keys, queries);
  else
    multiply_tiles<T, typename T::TileV, typename T::TileDO>(product, role, keys, queries);
}

// Adds P^T dO, or dS^T Q, to a warp's gradient. `operand` is the warp's own; those of warps that share keys are in shared
// memory.
template <class T, class Queries>
DEVICE void accumulate_tile(Gradient<T>& gradient, Role<T> role, const Operand<T>& operand, SharedAddress smem,
                            SharedAddress queries) {
  using E = typename T::Element;
  if constexpr (T::SHARES_ROWS) {
    using Left = typename T::TileDS;
    const SharedAddress left = smem + (role.makes_weights ? T::P_AT : T::DS_AT) + role.first_own() * Left::PITCH;
    accumulate_columns<E, Left, Queries, T::ALL_COLUMNS>(gradient, left, queries, role.first_fragment(), T::thread());
  } else {
    accumulate_rows<E, Queries, T::AHEAD>(gradient, operand, queries, T::thread());
  }
}
template <class T>
DEVICE void accumulate(Gradient<T>& gradient, Role<T> role, const Operand<T>& operand, SharedAddress smem,
                       SharedAddress queries) {
  if (T::HAS_TWO_WIDTHS && role.makes_weights)
    accumulate_tile<T, typename T::TileDO>(gradient, role, operand, smem, queries);
  else
    accumulate_tile<T, typename T::TileQ>(gradient, role, operand, smem, queries);
}

// Writes dV, or dK, through the warp's rows of a tile that nobody reads any more.
template <class T, class Keys>
DEVICE void store_tile_rows(const Gradient<T>& gradient, Role<T> role, float factor, SharedAddress tile, uint16* target,
                            int64 stride, int rows) {
  using E = typename T::Element;
  if constexpr (T::SHARES_ROWS)
    store_columns<E, Keys, T::ALL_COLUMNS>(gradient, factor, tile, target, stride, rows, role.first_fragment());
  else
    store_rows<E, Keys>(gradient, factor, tile, target, stride, rows);
}
template <class T>
DEVICE void store_gradient(const Gradient<T>& gradient, Role<T> role, float factor, SharedAddress tile, uint16* target,
                           int64 stride, int rows) {
  if (T::HAS_TWO_WIDTHS && role.makes_weights)
    store_tile_rows<T, typename T::TileV>(gradient, role, factor, tile, target, stride, rows);
  else
    store_tile_rows<T, typename T::TileK>(gradient, role, factor, tile, target, stride, rows);
}

template <class T>
DEVICE void backward_keys(const typename T::Params& params) {
  using E = typename T::Element;
  const auto [head_kv, place] = Place::of(block_index(), params.tiles_kv, params.heads_kv_all, params.sections_kv);
  const TileOf<T> tile = tile_at<T>(params, &TileLists::key_list, place, place * T::TILE_N);
  if (tile.is_none()) return;
  const int first_key = tile.first_row;
  const KeySequence<SequenceOf<T>> keys{params, head_kv, tile.sequence};
  int end_key = 0;  // of a tile that sequences cut
  if constexpr (IS_CUT<typename T::Blocked>) end_key = end_of_keys<typename T::Blocked, T::TILE_N>(params, tile.sequence, first_key);
  const Mask<T::BAND> mask = mask_of<T::BAND>(params, tile.sequence);
  const Blocks tiles = mask.template queries<T::TILE_M>(first_key, T::TILE_N, count_tiles<T>(params, tile));
  const int first_head = head_kv * params.group, end_head = first_head + params.group;
  const auto first = first_walk<T>(params, tiles, tile, first_head, end_head);

  const SharedAddress smem = shared_base(), tile_k = smem, tile_v = smem + T::TileK::BYTES;
  QueryRing<T> ring(params, tile.sequence, smem, first, end_head);
  typename WalksOf<T>::User walk(first);
  load_tile<typename T::TileK, T::THREADS, T::ALIGNED>(tile_k, keys.k() + first_key * params.strides_k.seq,
                                                       params.strides_k.seq, count_keys(params, tile.sequence) - first_key);
  load_tile<typename T::TileV, T::THREADS, T::ALIGNED>(tile_v, keys.v() + first_key * params.strides_v.seq,
                                                       params.strides_v.seq, count_keys(params, tile.sequence) - first_key);
  ring.load_next(0);

  constexpr bool MASKS_PARTIAL = HAS_LISTS<typename T::Blocked> && HAS_MASK<typename T::Score>;
  Gradient<T> gradient;  // of V, or of K
  clear(gradient);
  cp_async_wait<0>();
  sync_block();  // everybody's part of K, V and the first tile has landed
  for (int stage = 0; walk.head < end_head; stage = T::STAGES - 1 - stage, walk.advance()) {
    int first_query = tile_of<T>(walk) * T::TILE_M;
    if constexpr (IS_CUT<typename T::Blocked>)
      first_query = first_query_in<typename T::Blocked, T::TILE_M>(tile.sequence, tile_of<T>(walk));
    const int end_query = end_query_in<typename T::Blocked, T::TILE_M>(params, tile.sequence, tile_of<T>(walk));
    if constexpr (HAS_LISTS<typename T::Blocked>) walk.follow(ring.next());
    if constexpr (T::STAGES == 2) ring.load_next(1 - stage);
    bool masked = !mask.all_visible(first_query, T::TILE_M, first_key, T::TILE_N);
    if constexpr (IS_CUT<typename T::Blocked>) masked |= first_key + T::TILE_N > end_key;
    if constexpr (HAS_SCORE<typename T::Score>) masked |= first_query + T::TILE_M > end_query;

    const Role<T> role = Role<T>::mine();
    const bool makes_weights = role.makes_weights;
    const int column = Role<T>::first_query(role.pair), own_query = first_query + column;  // of its scores
    const Mailbox<T> mailbox(smem, role.pair);
    Operand<T> operand;  // P^T, or dS^T
    KeyScores<T> product;   // [WARP_KEYS, WARP_QUERIES]: K Q^T, or V dO^T
    if (Role<T>::has_scores(role.pair)) {
      multiply_own<T>(product, role, role.own_rows(smem), makes_weights ? ring.q(stage) : ring.dout(stage));
      if (makes_weights) {
        if constexpr (HAS_SCORE<typename T::Score>) {
          const HeadScores<typename T::Score> head = scores_of<T>(params, tile, walk.head);
          weigh_modified<T>(product, head, ring.lse(stage) + 4 * column, mailbox, first_key + role.first_row, own_query);
        } else {
          with_statistic<T>(product, ring.lse(stage) + 4 * column, [&](float& score, float lse) {
            score = exp2_approx(fmaf(score, params.score_factor, -lse * LOG2_E));
          });
        }
        if (masked) clear_masked<T>(product, mask, first_key + role.first_row, own_query, end_query, end_key);
        if constexpr (MASKS_PARTIAL)
          if (walk.is_partial()) clear_partial<T>(product, params, tile, walk.head, first_key + role.first_row, own_query);
        round_to_operand<E>(operand, product);
        if constexpr (!HAS_SCORE<typename T::Score>) mailbox.put(operand);
        if constexpr (T::SHARES_ROWS) store_operand<T>(operand, smem + T::P_AT, role.first_row, role.pair);
      } else {
        with_statistic<T>(product, ring.delta(stage) + 4 * column, [](float& value, float delta) { value -= delta; });
      }
    }
    sync_block();  // the weights are there for their partners
    if (!makes_weights) {
      if (Role<T>::has_scores(role.pair)) {
        if constexpr (!T::SENDS_RAW) multiply_by_weights<T>(product, mailbox);
        if (masked) clear_masked<T>(product, mask, first_key + role.first_row, own_query, end_query, end_key);
        if constexpr (MASKS_PARTIAL)
          if (walk.is_partial()) clear_partial<T>(product, params, tile, walk.head, first_key + role.first_row, own_query);
        if constexpr (HAS_GRADIENTS<typename T::Score>) {
          const HeadScores<typename T::Score> head = scores_of<T>(params, tile, walk.head);
          if constexpr (T::SENDS_RAW)
            multiply_by_slopes<T>(product, params, head, ring.lse(stage) + 4 * column, mailbox, first_key + role.first_row,
                                  own_query);
          else
            add_gradients<T>(product, params, head, first_key + role.first_row, own_query);
        }
        round_to_operand<E>(operand, product);
      }
      if constexpr (T::SHARES_ROWS) named_barrier_sync(1, T::THREADS / 2);  // the half has read its weights
      if constexpr (T::ADDS_DQ || T::SHARES_ROWS)
        if (Role<T>::has_scores(role.pair)) store_operand<T>(operand, smem + T::DS_AT, role.first_row, role.pair);
      if constexpr (T::SHARES_ROWS) named_barrier_sync(1, T::THREADS / 2);  // dS is there for the half
    }
    accumulate<T>(gradient, role, operand, smem, makes_weights ? ring.dout(stage) : ring.q(stage));

    if constexpr (T::STAGES == 2) cp_async_wait<0>();
    sync_block();  // dS is complete; nobody still reads this stage or the weights; with two, the next stage has landed
    if constexpr (T::STAGES == 1) ring.load_next(stage);
    if constexpr (T::ADDS_DQ) add_dq<T>(params, tile, smem + T::DS_AT, tile_k, walk.head, first_query);
    if constexpr (T::STAGES == 1) cp_async_wait<0>();
    if constexpr (T::STAGES == 1 || (T::SHARES_ROWS && T::ADDS_DQ))
      sync_block();  // everybody's part of the next tile has landed; nobody still reads dS
  }

  sync_block();  // nobody still reads K and V
  const Role<T> role = Role<T>::mine();
  const int first_row = first_key + role.first_own();
  const Strides& strides = role.makes_weights ? params.strides_dv : params.strides_dk;
  uint16* target = (role.makes_weights ? keys.dv() : keys.dk()) + first_row * strides.seq;
  store_gradient<T>(gradient, role, role.makes_weights ? 1.0f : params.grad_factor, role.gradient_rows(smem), target,
                    strides.seq, (IS_CUT<typename T::Blocked> ? end_key : count_keys(params, tile.sequence)) - first_row);
}

}  // namespace multiattn
