// The gradient of q, for sm90 and wide heads: TMA, wgmma, warp specialisation. backward_wgmma_two_pass_keys.cuh has those of
// k and v.
//
// A block owns 128 queries of a query head, 64 a warpgroup, and walks over the keys that they see, 64 at a time. Rows are
// queries, so that dS stays in registers as operand A of dQ += dS K; no warpgroup has anything that another wants. A third
// loads.
#pragma once
#include "backward_wgmma_output.cuh"
#include "backward_wgmma_producer.cuh"
#include "backward_wgmma_scores.cuh"
#include "backward_wgmma_two_pass_traits.cuh"
#include "multiattn/softmax.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

// The tile of queries that has this place among all. Those of one place run side by side, and so do heads that share L2. Under
// a mask the last queries see the most keys: the longest tiles come first.
template <class T>
DEVICE QueryTile<T> query_tile(const typename T::Params& params, int index) {
  const BackwardParams& backward = params.backward;
  int tiles = backward.tiles_q_own;  // of each head
  if constexpr (IS_PACKED<typename T::Blocked>) tiles = find_sequence(tile_lists(params.lists).query_list, 0).tiles;
  tiles = round_up(tiles, T::CLUSTER);
  const HeadRange heads_kv = heads_of_launch<T>(params);
  const int heads = IS_STORED<typename T::Blocked> ? heads_kv.count * backward.group : backward.heads_q_all;
  if (index >= tiles * heads) return {0, 0, 0, NO_TILE, {}};
  const Place it = Place::of(index / T::CLUSTER, tiles / T::CLUSTER, heads, backward.sections_q);
  const int head = heads_kv.first * backward.group + it.head, place = it.place;
  if constexpr (IS_PACKED<typename T::Blocked>) {
    const ListedTile listed = find_sequence(tile_lists(params.lists).query_list, place);
    return {listed.first_row, head, listed.number, 0, listed.sequence};
  } else {
    const int tile = tiles - T::CLUSTER * (1 + place) + index % T::CLUSTER;
    return {tile * T::BLOCK_ROWS, head, head / backward.heads_q, 0, {}};
  }
}

// The blocks of keys that so many queries see, from one of the tile on.
template <class T>
DEVICE Blocks key_blocks(const typename T::Params& params, const QueryTile<T>& tile, int first_query, int rows) {
  const Mask<T::BAND> mask = mask_of<T::BAND>(params.backward, tile.sequence);
  return mask.template keys<T::TILE_N>(first_query, rows);
}

// dQ of the warp's queries, of those that a warpgroup has from `first_query` on.
template <class T>
DEVICE void write_dq(const typename T::Params& params, const QueryTile<T>& tile, int first_query,
                     const float (&dq)[T::HEAD_DIM / 2]) {
  const BackwardParams& backward = params.backward;
  const int first = first_query + warp_row_again();
  const Strides& strides = strides_dq<T>(backward);
  const int64 stride = strides.seq;
  const QuerySequence<SequenceOf<T>> queries{backward, tile.head, tile.sequence};
  int end = count_queries(backward, tile.sequence);
  if constexpr (IS_CUT<typename T::Blocked>)
    end = end_of_queries<typename T::Blocked, T::BLOCK_ROWS>(backward, tile.sequence, tile.first_query);
  write_rows<typename T::Element>(queries.dq(strides) + first * stride, stride, end - first, dq, backward.grad_factor);
}

// Tiles of Q and dO, and for each of them its blocks of K and V.
template <class T>
class TwoPassQueriesProducer {
  using Shared = TwoPassQueriesShared<T>;

 public:
  DEVICE explicit TwoPassQueriesProducer(const typename T::Params& params) : params_(params) {}

  DEVICE void run() {
    admit_next_grid();
    await_earlier_grids();  // tensors, statistics and the counter are touched only after this
    QueryTile<T> tile = query_tile<T>(params_, static_cast<int>(block_index()));
    while (tile.blocks != NO_TILE) {
      if constexpr (T::LISTED) load_list(tile);
      else load(tile);
      const int asked = atomic_add_global(params_.next_tile + 1, 1);
      tile = query_tile<T>(params_, static_cast<int>(block_count()) + asked);
    }
#pragma unroll 1
    for (int group = 0; group < T::WARPGROUPS; ++group) {
      Shared::ring_q(group).await_empty(q_);
      store_tile<T>(Shared::tile_place(group), tile);
      mbarrier_arrive(Shared::ring_q(group).full(0));
    }
  }

 private:
  DEVICE void load(const QueryTile<T>& tile) {
    const auto [begin, full_begin, full_end, end] = key_blocks<T>(params_, tile, tile.first_query, T::BLOCK_ROWS);
    const auto keys = keys_of(tile);
    const int head = tile.head % params_.backward.heads_q, head_kv = head / params_.backward.group;
    uint32 step = steps_;
    if (begin < end) load_k(keys, head_kv, begin, step);
    load_queries(tile, head);
    for (int block = begin; block < end; ++block) {
      load_v(keys, head_kv, block, step++);
      if (block + 1 < end) load_k(keys, head_kv, block + 1, step);
    }
    steps_ = step;
  }

  DEVICE void load_queries(const QueryTile<T>& tile, int head) {
#pragma unroll 1
    for (int group = 0; group < T::WARPGROUPS; ++group) {
      const int row = tile.first_query + group * T::TILE_M;
      Shared::ring_q(group).await_empty(q_);
      store_tile<T>(Shared::tile_place(group), tile);
      const auto rows = own_queries<T, T::BLOCK_ROWS>(tile, tile.first_query);
      load_boxes<typename T::TileQ>(Shared::q(group), params_.map_q, Shared::ring_q(group).full(0), row, head, rows);
      Shared::ring_dout(group).await_empty(q_);
      load_boxes<typename T::TileDout>(Shared::dout(group), params_.map_dout, Shared::ring_dout(group).full(0), row, head, rows);
    }
    q_.advance();
  }

  // As `load`, where a block mask lists the tiles of keys. Each is looked up a step ahead, and its word goes with its K.
  DEVICE void load_list(QueryTile<T> tile) {
    const int heads_q = params_.backward.heads_q, head = tile.head % heads_q, head_kv = head / params_.backward.group;
    const auto listed = list_of(tile, tile.head / heads_q, head);
    tile.blocks = listed.end;
    const auto look_up = [&](int step) { return step < listed.end ? listed.tile(params_.lists.keys, step) : 0; };
    int block = look_up(0), next = look_up(1);
    if (listed.end > 0) load_listed_k(tile, head_kv, block, steps_, listed.is_partial(0));
    load_queries(tile, head);
#pragma unroll 1
    for (int step = 0; step < listed.end; ++step) {
      load_v_at(keys_in<T, T::TILE_N>(tile, block), head_kv, first_key(tile, block), steps_++);
      block = next;
      next = look_up(step + 2);
      if (step + 1 < listed.end) load_listed_k(tile, head_kv, block, steps_, listed.is_partial(step + 1));
    }
  }

  using Listed = ListedTiles<SPEC_OF<typename T::Blocked>.keys, T::TILE_N, SPEC_OF<typename T::Blocked>.has_full>;
  DEVICE Listed list_of(const QueryTile<T>& tile, int batch, int head) const {
    if constexpr (IS_CUT<typename T::Blocked>)
      if (tile.sequence.len_kv == 0) return {0, 0, 0};  // it has no list
    const int row = row_of_queries<typename T::Blocked>(tile.sequence, tile.number, tile.first_query);
    return Listed::of(params_.lists.keys, batch, head, row);
  }

  static DEVICE int first_key(const QueryTile<T>& tile, int block) {
    return first_key_in<typename T::Blocked, T::TILE_N>(tile.sequence, block);
  }

  DEVICE void load_listed_k(const QueryTile<T>& tile, int head_kv, int block, uint32 step, bool is_partial) {
    const BackwardParams& backward = params_.backward;
    const auto place = RingPlace<T::K_STAGES>::of(step);
    const int first = first_key(tile, block), end = end_key_in<typename T::Blocked, T::TILE_N>(backward, tile.sequence, block);
    const Mask<T::BAND> mask = mask_of<T::BAND>(backward, tile.sequence);
    const bool is_cut = first + T::TILE_N > end || !mask.all_visible(tile.first_query, T::BLOCK_ROWS, first, T::TILE_N);
    Shared::ring_k().await_empty(place);
    store_shared_4(Shared::key_word(place.slot), TileWord::of(block, HAS_MASK<typename T::Score> && is_partial, is_cut).word);
    load_boxes<typename T::TileK>(Shared::k(place.slot), params_.map_k, Shared::ring_k().full(place.slot), first, head_kv,
                                  keys_in<T, T::TILE_N>(tile, block));
  }

  template <class Rows>
  DEVICE void load_k(const Rows& keys, int head_kv, int block, uint32 step) {
    const auto place = RingPlace<T::K_STAGES>::of(step);
    Shared::ring_k().await_empty(place);
    load_boxes<typename T::TileK>(Shared::k(place.slot), params_.map_k, Shared::ring_k().full(place.slot), block * T::TILE_N,
                                  head_kv, keys);
  }

  template <class Rows>
  DEVICE void load_v(const Rows& keys, int head_kv, int block, uint32 step) {
    load_v_at(keys, head_kv, block * T::TILE_N, step);
  }
  template <class Rows>
  DEVICE void load_v_at(const Rows& keys, int head_kv, int first_key, uint32 step) {
    const auto place = RingPlace<T::V_STAGES>::of(step);
    Shared::ring_v().await_empty(place);
    load_boxes<typename T::TileV>(Shared::v(place.slot), params_.map_v, Shared::ring_v().full(place.slot), first_key, head_kv, keys);
  }

  const typename T::Params& params_;
  RingPlace<1> q_;    // of Q and dO of both warpgroups
  uint32 steps_ = 0;  // blocks of keys before, of all tiles
};

// With lists, the tile of keys whose scores there are, and a bit for each of a thread's elements that is hidden.
template <class T, bool = T::LISTED>
struct KeysAt : ScoredHead<typename T::Score> {};
template <class T>
struct KeysAt<T, true> : ScoredHead<typename T::Score> {
  TileWord at;
  uint32 hidden;
};

// A warpgroup of queries. Its number is a constant: what depends on it takes no registers, and no time.
template <class T, int GROUP>
class QueryWarpgroup : private KeysAt<T> {
  using E = typename T::Element;
  using Shared = TwoPassQueriesShared<T>;
  using PlaceK = RingPlace<T::K_STAGES>;
  using PlaceV = RingPlace<T::V_STAGES>;

 public:
  DEVICE explicit QueryWarpgroup(const typename T::Params& params) : params_(params) {}

  // Tile after tile.
  DEVICE void run() {
    for (begin(); tile_.blocks != NO_TILE; begin()) {
      const int first_query = first_of_group();
      Blocks loaded = key_blocks<T>(params_, tile_, tile_.first_query, T::BLOCK_ROWS);
      Blocks own = key_blocks<T>(params_, tile_, first_query, T::TILE_M);
      if constexpr (T::LISTED) own = loaded = {0, 0, 0, tile_.blocks};
      const bool has_keys = first_query < count_queries(params_.backward, tile_.sequence) && own.begin < own.end;
      if (!has_keys) own.begin = own.end = loaded.end;
#pragma unroll
      for (float& element : dq_) element = 0.0f;
      for (int block = loaded.begin; block < own.begin; ++block) skip();
      Shared::ring_dout(GROUP).await_full(q_);
      if (has_keys)
        walk(own);
      else
        release_queries();
      for (int block = own.end; block < loaded.end; ++block) skip();
      q_.advance();
      write_dq<T>(params_, tile_, first_of_group(), dq_);
    }
  }

 private:
  // The next tile. Its Q is there.
  DEVICE void begin() {
    Shared::ring_q(GROUP).await_full(q_);
    tile_ = load_tile<T>(Shared::tile_place(GROUP));
    if (tile_.blocks == NO_TILE) return;
    if constexpr (HAS_SCORE<typename T::Score>) this->head = tile_.head % params_.backward.heads_q;
    read_statistics();
  }

  // Reads lse and delta of the thread's two queries. One that is not there weighs nothing.
  DEVICE void read_statistics() {
    const int first = first_of_group();
    const int rows = count_queries(params_.backward, tile_.sequence) - first;
    const float* list = nullptr;
    if constexpr (!IS_CUT<typename T::Blocked>)
      list = statistics_of<T>(params_, tile_.head, tile_.number, tile_.sequence, first / T::TILE_M);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row_again() + accumulator_row(2 * half);
      const float* place = nullptr;
      if constexpr (IS_CUT<typename T::Blocked>)
        place = statistics_of_query<T>(params_, tile_.head, tile_.number, tile_.sequence, min(first + row, tile_.sequence.len_q - 1));
      else
        place = list + statistic_place(row);
      lse_[half] = row < rows ? load_global_4(place) : infinity();
      delta_[half] = row < rows ? load_global_4(place + T::TILE_M) : 0.0f;
    }
  }

  // A block of keys that only the other warpgroup sees.
  DEVICE void skip() {
    const auto k = PlaceK::of(steps_);
    const auto v = PlaceV::of(steps_++);
    Shared::ring_k().await_full(k);
    Shared::ring_k().release_apart(k.slot);
    Shared::ring_v().await_full(v);
    Shared::ring_v().release_apart(v.slot);
  }

  DEVICE void release_queries() const {
    Shared::ring_q(GROUP).release(0);
    Shared::ring_dout(GROUP).release(0);
  }

  DEVICE void walk(const Blocks& own) {
    block_ = own.begin;
    make_scores(steps_);
    if constexpr (T::LISTED) take_step();
    if constexpr (T::DP_LATE) {
      weigh<0>(own);
      make_dp(steps_);
    } else {
      make_dp(steps_);
      weigh<1>(own);
    }
    wgmma_wait<0>();
    Shared::ring_v().release(PlaceV::of(steps_).slot);
    make_ds(own);
    pack_operand<E>(operand_, scores_);
    for (int left = own.end - own.begin - 1; left > 0; --left) step(own);
    add_dq();
    release_queries();
    wgmma_wait<0>();
    Shared::ring_k().release(PlaceK::of(steps_++).slot);
  }

  // Its dS is there; that of the next block is, afterwards.
  DEVICE void step(const Blocks& own) {
    ++block_;
    add_dq();
    make_scores(steps_ + 1);
    if constexpr (T::DP_LATE) {
      wgmma_wait<1>();
      Shared::ring_k().release(PlaceK::of(steps_++).slot);
      if constexpr (T::LISTED) take_step();
      weigh<0>(own);
      make_dp(steps_);
    } else {
      make_dp(steps_ + 1);
      wgmma_wait<2>();
      Shared::ring_k().release(PlaceK::of(steps_++).slot);
      if constexpr (T::LISTED) take_step();
      weigh<1>(own);  // while dP is under way
    }
    wgmma_wait<0>();
    Shared::ring_v().release(PlaceV::of(steps_).slot);
    make_ds(own);
    pack_operand<E>(operand_, scores_);
  }

  // Scores to weights, exp2(score - lse) with both in the log2 domain, when all but so many groups of products are there. With
  // an expression they are times its slope.
  template <int GROUPS>
  DEVICE void weigh(const Blocks& own) {
    wgmma_wait<GROUPS>();
    if constexpr (HAS_SCORE<typename T::Score>) {
      weigh_modified();
    } else {
      const float factor = params_.backward.score_factor;
#pragma unroll
      for (int i = 0; i < T::TILE_N / 2; ++i) scores_[i] = exp2_approx(fmaf(scores_[i], factor, -lse_[i / 2 % 2]));
    }
    if (!is_full(own)) mask(scores_);  // the branch also keeps ptxas from moving the exponentials behind the next wait
  }

  DEVICE void weigh_modified() {
    const BackwardParams& backward = params_.backward;
    const HeadScores<typename T::Score> head(params_.aux, count_queries(backward, tile_.sequence),
                                             count_keys(backward, tile_.sequence), tile_.number, this->head);
    const int first_query = first_of_group() + warp_row_again();
    const int first_key = this->first_key() + accumulator_column(0);
#pragma unroll
    for (int i = 0; i < T::TILE_N / 2; ++i) {
      const Position key(first_key, i / 4 * 8 + i % 2);
      head.weight_of_seen(scores_[i], first_query + accumulator_row(i % 4), key, lse_[i / 2 % 2], scores_[i]);
    }
  }

  // Weights to dS = P * (dP - delta).
  DEVICE void make_ds(const Blocks& own) {
    // An overflow where the weight is 0 would be NaN.
    if (!is_full(own)) mask(dp_);
#pragma unroll
    for (int i = 0; i < T::TILE_N / 2; ++i) scores_[i] *= dp_[i] - delta_[i / 2 % 2];
  }

  // True if all queries of the warpgroup see all keys of the block.
  DEVICE bool is_full(const Blocks& own) const {
    if constexpr (T::LISTED) return !this->at.is_masked();
    else return block_ >= own.full_begin && block_ < own.full_end;
  }

  DEVICE int first_key() const {
    if constexpr (T::LISTED) return first_key_in<typename T::Blocked, T::TILE_N>(tile_.sequence, this->at.tile());
    else return block_ * T::TILE_N;
  }

  // With lists: the tile of keys whose scores come next, and what is hidden of it. Its K is there.
  DEVICE void take_step() {
    this->at = {static_cast<int>(uniform(float_bits(load_shared_4(Shared::key_word(PlaceK::of(steps_).slot)))))};
    if (!this->at.is_masked()) return;
    this->hidden = 0;
    const BackwardParams& backward = params_.backward;
    const int first_query = first_of_group() + warp_row_again(), first_key = this->first_key() + accumulator_column(0);
    if (this->at.is_cut()) {
      const int end = end_key_in<typename T::Blocked, T::TILE_N>(backward, tile_.sequence, this->at.tile());
      const Mask<T::BAND> mask = mask_of<T::BAND>(backward, tile_.sequence);
#pragma unroll
      for (int i = 0; i < T::TILE_N / 2; ++i) {
        const int key = first_key + i / 4 * 8 + i % 2;
        if (key >= end || !mask.visible(first_query + accumulator_row(i % 4), key)) this->hidden |= 1u << i;
      }
    }
    if constexpr (HAS_MASK<typename T::Score>) {
      if (!this->at.is_partial()) return;
      const HeadScores<typename T::Score> head(params_.aux, count_queries(backward, tile_.sequence),
                                               count_keys(backward, tile_.sequence), tile_.number, tile_.head % backward.heads_q);
#pragma unroll
      for (int i = 0; i < T::TILE_N / 2; ++i)
        if (!head.visible(first_query + accumulator_row(i % 4), {first_key, i / 4 * 8 + i % 2})) this->hidden |= 1u << i;
    }
  }

  // 0 in place of what the mask hides.
  DEVICE void mask(float (&values)[T::TILE_N / 2]) const {
    if constexpr (T::LISTED) return clear_hidden(values);
    const Mask<T::BAND> mask = mask_of<T::BAND>(params_.backward, tile_.sequence);
    int first_query = first_of_group() + warp_row_again();
    if (T::IS_CROWDED) first_query = recomputed(first_query);  // or ptxas keeps what a row is compared with, and spills
#pragma unroll
    for (int i = 0; i < T::TILE_N / 2; ++i) {
      const int query = first_query + accumulator_row(i % 4);
      const int key = block_ * T::TILE_N + i / 4 * 8 + accumulator_column(i % 4);
      if (!mask.visible(query, key)) values[i] = 0.0f;
    }
  }

  DEVICE void clear_hidden(float (&values)[T::TILE_N / 2]) const {
    if constexpr (T::LISTED) {
#pragma unroll
      for (int i = 0; i < T::TILE_N / 2; ++i)
        if (this->hidden & 1u << i) values[i] = 0.0f;
    }
  }

  // ---- products, left under way
  // scores[64, TILE_N] = Q K^T of a step
  DEVICE void make_scores(uint32 step) {
    const auto place = PlaceK::of(step);
    Shared::ring_k().await_full(place);
    multiply<typename T::TileQ, typename T::TileK, T::DIM_STEPS>(scores_, Shared::q(GROUP), Shared::k(place.slot));
  }

  // dP[64, TILE_N] = dO V^T
  DEVICE void make_dp(uint32 step) {
    const auto place = PlaceV::of(step);
    Shared::ring_v().await_full(place);
    multiply<typename T::TileDout, typename T::TileV, T::V_STEPS>(dp_, Shared::dout(GROUP), Shared::v(place.slot));
  }

  // sums[64, TILE_N] = rows of Q or dO times those of K or V
  template <class Queries, class Keys, int STEPS>
  static DEVICE void multiply(float (&sums)[T::TILE_N / 2], SharedAddress queries, SharedAddress keys) {
    const Descriptor a(recomputed(queries), 16), b(keys, 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      wgmma_ss<E, T::TILE_N>(sums, a.at(i / 4 * Queries::PANEL_BYTES + i % 4 * 32),
                             b.at(i / 4 * Keys::PANEL_BYTES + i % 4 * 32), i > 0);
    wgmma_commit();
  }

  // dQ[64, D] += dS K, of this step
  DEVICE void add_dq() {
    add_product<E, T::HEAD_DIM, typename T::TileK>(dq_, operand_, Shared::k(PlaceK::of(steps_).slot));
  }

  DEVICE int first_of_group() const { return tile_.first_query + GROUP * T::TILE_M; }

  const typename T::Params& params_;
  QueryTile<T> tile_;
  RingPlace<1> q_;    // of Q and dO
  uint32 steps_ = 0;  // blocks before this one, of all tiles
  int block_;         // that scores and dP are of
  float lse_[2], delta_[2];
  float scores_[T::TILE_N / 2], dp_[T::TILE_N / 2];  // [64, TILE_N]
  uint32 operand_[T::KEY_STEPS][4];                  // dS
  float dq_[T::HEAD_DIM / 2];                        // [64, HEAD_DIM]
};

template <class T>
DEVICE void backward_wgmma_queries(const typename T::Params& params) {
  run_pass<T, TwoPassQueriesShared<T>, QueryWarpgroup<T, 0>, QueryWarpgroup<T, 1>, TwoPassQueriesProducer<T>>(params);
}

}  // namespace multiattn
