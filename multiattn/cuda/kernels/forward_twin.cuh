// Fused multi-head attention, forward, for sm90 and heads wider than 256: the outputs of 64 rows are more than the registers of one
// warpgroup, so that two have a half of their columns each.
//
// FlashMLA (https://github.com/deepseek-ai/FlashMLA, "seesaw" scheduling): the warpgroups, twins, take turns at the blocks of keys. One
// makes scores and weights of a block and hands the weights to the other, with the maxima that they are relative to; both multiply
// them by their half of V. So one has products for the tensor cores while the other turns scores into weights. The third
// warpgroup loads, by TMA or one by one.
//
// It is a walk over policies. Rows (forward_twin_rows.cuh): queries of one head, or of all heads that share keys. Keys
// (forward_twin_producer.cuh): boxes of a tensor, boxes of a cache, or gathered; V may be in K. Part (forward_twin_output.cuh): out and
// lse of all keys, or sums of a part of them for merge_splits.cuh.
#pragma once
#include "forward_twin_output.cuh"
#include "forward_twin_producer.cuh"
#include "forward_wgmma_softmax.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

template <class T>
class Twin {
  using E = typename T::Element;
  using Layout = TwinLayout<T>;
  using Order = PieceOrder<T>;
  using Place = TwinPlace<T>;
  using Piece = typename T::Piece;

 public:
  DEVICE Twin(const typename T::Params& params, const TwinRows<T>& rows, int warpgroup)
      : params_(params), rows_(rows), warpgroup_(warpgroup), turns_(max(rows.blocks.end - rows.blocks.begin, 0)),
        upper_edge_(rows.blocks.full_begin < rows.blocks.full_end ? rows.blocks.full_end : rows.blocks.begin) {}

  DEVICE void run() {
    take_queries();
#pragma unroll
    for (int i = 0; i < T::PRODUCTS; ++i)
#pragma unroll
      for (int e = 0; e < T::PRODUCT / 2; ++e) out_[i][e] = 0.0f;
    // A turn is a block of keys, from the last to the first: even ones are warpgroup 0's.
    for (int turn = warpgroup_; turn < turns_; turn += 2) {
      float decay[2];
      make_scores<0, T::BEFORE>(turn);
      if (turn > 0) add_twins(turn - 1);
      else commit_nothing();  // what waits count must not depend on the turn
      if constexpr (T::BEFORE < T::K_PIECES) {
        make_scores<T::BEFORE, T::K_PIECES>(turn);
        wgmma_wait<0>();
        release_key(turn, T::K_PIECES - 1);
        weigh(turn, decay);
      } else {
        wgmma_wait<T::PRODUCTS>();
        release_key(turn, T::K_PIECES - 1);
        weigh(turn, decay);
        finish_values<0>(turn - 1);
      }
      pack_operand<E>(weights_, scores_);
      hand_over();
      decay_output(decay);
      add_values(turn);
      finish_values<0>(turn);
    }
    if (turns_ > 0 && (turns_ - 1) % 2 != warpgroup_) {
      add_twins(turns_ - 1);
      finish_values<0>(turns_ - 1);
    }
    finish();
  }

 private:
  // Q is there, with the sign of the scale in it.
  DEVICE void take_queries() {
    if constexpr (T::GROUPED)
      rows_.gather(Layout::q());
    else
      mbarrier_wait(Layout::q_full(), 0);
    if (params_.forward.scale_sign != 1) {
      if constexpr (T::GROUPED) await(BOTH_BARRIER, T::CONSUMERS);
      constexpr int CHUNKS = T::TileQ::BYTES / CHUNK_BYTES;
      for (int i = thread_index(); i < CHUNKS; i += T::CONSUMERS)
        fold_sign_into<E>(Layout::q() + i * CHUNK_BYTES, params_.forward.scale_sign);
      fence_async_shared();
      await(BOTH_BARRIER, T::CONSUMERS);
    } else if constexpr (T::GROUPED) {
      await(BOTH_BARRIER, T::CONSUMERS);  // everybody's part of Q is there, for wgmma too
    }
  }

  // ---- products, left under way
  // scores[64, TILE_N] = Q K^T, of some pieces, which are given back when the next ones are under way: with the first of them V of the
  // other's turn, whose products come before.
  template <int FROM, int END>
  DEVICE void make_scores(int turn) {
    Place place = Place::of(Order::keys(turn) + FROM, warpgroup_);
    const Descriptor q(Layout::q(), 16);
#pragma unroll
    for (int i = FROM; i < END; ++i) {
      const int column = Order::piece_of_k(i, warpgroup_) * T::PIECE_STEPS;  // in steps
      Layout::ring().await_full(place);
      const Descriptor k(Layout::piece(place.slot), 16);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < T::PIECE_STEPS; ++step) {
        if (Order::HAS_ORDER || i * T::PIECE_STEPS + step < T::DOT_STEPS)
          wgmma_ss<E, T::TILE_N>(scores_, q.at((column + step) / 4 * T::TileQ::PANEL_BYTES + step % 4 * 32),
                                 k.at(step / 4 * Piece::PANEL_BYTES + step % 4 * 32), i > 0 || step > 0);
      }
      wgmma_commit();
      if constexpr (FROM > 0)
        if (i == FROM) finish_values<1>(turn - 1);
      if (i > 0) {
        wgmma_wait<1>();
        release_key(turn, i - 1);
      }
      place.advance();
    }
  }
  // Where V is in K, a slot has two uses: a piece that is not of V has the first one twice.
  DEVICE void release_key(int turn, int i) const {
    const int slot = Place::of(Order::keys(turn) + i, warpgroup_).slot;
    Layout::ring().release(slot);
    if (T::V_IN_K && i < T::K_PIECES - T::V_PIECES) Layout::ring().release(slot);
  }

  // out[64, own half of HEAD_DIM_V] += weights V
  DEVICE void add_values(int turn) {
    Place place = first_values(turn);
    clear_values(turn, place);
#pragma unroll
    for (int i = 0; i < T::PRODUCTS; ++i) {
      if (has_product(i)) {
        const Descriptor v(Layout::piece(place.slot), Piece::PANEL_BYTES);
#pragma unroll
        for (int piece = 0; piece < T::PRODUCT_PIECES; ++piece, place.advance()) Layout::ring().await_full(place);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < T::KEY_STEPS; ++step)
          wgmma_rs_mn<E, T::PRODUCT>(out_[i], weights_[step], v.at(step * 16 * Piece::ROW_BYTES), true);
      }
      wgmma_commit();
    }
  }
  static DEVICE void commit_nothing() {
#pragma unroll
    for (int i = 0; i < T::PRODUCTS; ++i) wgmma_commit();
  }
  // Waits for each product with V, behind which LATER groups are under way, and gives its slots back. Turn -1 has none.
  template <int LATER, int I = 0>
  DEVICE void finish_values(int turn) const {
    if constexpr (I < T::PRODUCTS) {
      wgmma_wait<LATER + T::PRODUCTS - 1 - I>();
      const uint32 first = Order::values(turn, turns_, warpgroup_) + I * T::PRODUCT_PIECES;
#pragma unroll
      for (int piece = 0; piece < T::PRODUCT_PIECES; ++piece)
        Layout::ring().release(Place::of(first + piece, warpgroup_).slot, turn >= 0 && has_product(I));
      finish_values<LATER, I + 1>(turn);
    }
  }
  // Warpgroup 1 has fewer pieces where their number is odd.
  DEVICE bool has_product(int i) const { return i * T::PRODUCT_PIECES < own_pieces(); }
  DEVICE Place first_values(int turn) const {
    return Place::of(Order::values(turn, turns_, warpgroup_), warpgroup_);
  }
  DEVICE int own_pieces() const { return Order::owned_by(warpgroup_); }

  // A row of V that no key is for may hold anything where boxes bring it, and a weight of zero would make NaN of a NaN: such rows of the
  // half become zeros.
  DEVICE void clear_values(int turn, Place place) const {
    if constexpr (T::CLEARS) {
      const int first_key = block(turn) * T::TILE_N;
      const int behind = min(rows_.owned.len_kv - first_key, T::TILE_N), before = max(rows_.owned.first_key() - first_key, 0);
      if (behind == T::TILE_N && before == 0) return;
      await(HALF_BARRIER + warpgroup_, WARPGROUP);  // where V is in K, no warp reads it as K any more
      for (int piece = 0; piece < own_pieces(); ++piece, place.advance()) {
        Layout::ring().await_full(place);
        constexpr int CHUNKS = 8 * Piece::PANELS;
        for (int i = thread_index() % WARPGROUP; i < T::TILE_N * CHUNKS; i += WARPGROUP) {
          const int row = i / CHUNKS, chunk = i % CHUNKS;
          if (row < before || row >= behind)
            store_shared_16(Layout::piece(place.slot) + chunk / 8 * Piece::PANEL_BYTES + row * Piece::ROW_BYTES +
                                chunk % 8 * CHUNK_BYTES,
                            Chunk{});
        }
      }
      fence_async_shared();
      await(HALF_BARRIER + warpgroup_, WARPGROUP);  // everybody's zeros are there, for wgmma too
    }
  }

  // ---- scores to weights
  // Brings the state up to date; `decay` is what older outputs are to be multiplied by.
  DEVICE void weigh(int turn, float (&decay)[2]) {
    const int first_key = block(turn) * T::TILE_N;
    const auto queries = rows_.queries();
    if constexpr (HAS_SCORE<typename T::Score>) modify_scores<T>(scores_, rows_.heads(params_), queries, first_key);
    if (block(turn) >= upper_edge_) {
      hide_side<T, true>(scores_, rows_.mask, queries, first_key);
      if constexpr (HAS_TAIL<typename T::Score>) mask_partial<T>(scores_, rows_.heads(params_), queries, first_key);
    }
    if constexpr (T::BAND == Band::TWO_SIDED)
      if (block(turn) < rows_.blocks.full_begin) hide_side<T, false>(scores_, rows_.mask, queries, first_key);
    const float scale_log2 = HAS_SCORE<typename T::Score> ? 1.0f : params_.forward.scale_log2;
    float top[2], base[2], sum[2];
    find_tops<T>(scores_, top, scale_log2);
    if constexpr (T::HAS_MAX) state_.raise(top);
    raise_max(state_, top, 0, decay, base);
    exponentiate<T>(scores_, base, scale_log2, sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state_.sum[half] = state_.sum[half] * decay[half] + sum[half];
      twins_sum_[half] *= decay[half];
    }
  }

  DEVICE void decay_output(const float (&decay)[2]) {
    if (!any_in_warp(decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < T::PRODUCTS; ++i)
#pragma unroll
      for (int e = 0; e < T::PRODUCT / 2; ++e) out_[i][e] *= decay[e / 2 % 2];
  }

  // ---- from twin to twin: each thread to the one in its place, which has the same rows and columns of weights
  DEVICE void hand_over() const {
#pragma unroll
    for (int step = 0; step < T::KEY_STEPS; ++step) {
      const uint32(&it)[4] = weights_[step];
      store_shared_16(Layout::handover(step), {{it[0], it[1], it[2], it[3]}});
    }
    const float state[4] = {state_.max[0], state_.max[1], state_.sum[0], state_.sum[1]};
    store_shared_16(Layout::handover(T::KEY_STEPS), chunk_of(state));
    sync_warp();
    named_barrier_arrive(WEIGHTS_BARRIER + warpgroup_, T::CONSUMERS);
  }

  // Weights of the other's turn times this half of its V. Nothing but scores is under way. The other writes the next weights there when
  // it has got those of this warpgroup's next turn: each thread has read before.
  DEVICE void add_twins(int turn) {
    await(WEIGHTS_BARRIER + 1 - warpgroup_, T::CONSUMERS);
#pragma unroll
    for (int step = 0; step < T::KEY_STEPS; ++step) {
      const Chunk it = load_shared_16(Layout::handover(step));
#pragma unroll
      for (int word = 0; word < 4; ++word) weights_[step][word] = it.word[word];
    }
    const Chunk state = load_shared_16(Layout::handover(T::KEY_STEPS));
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = float_of_bits(state.word[half]);
      decay[half] = exp2_approx(state_.max[half] - (max == -infinity() ? 0.0f : max));
      state_.max[half] = max;
      state_.sum[half] *= decay[half];
      twins_sum_[half] = float_of_bits(state.word[2 + half]);
    }
    decay_output(decay);
    add_values(turn);
  }

  // ---- out = outputs / sum and lse = log(sum of exp)
  DEVICE void finish() {
    const TwinOutput<T, decltype(rows_.places(params_))> output{rows_.places(params_), warpgroup_};
    float sum[2], inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = reduce_row(state_.sum[half] + twins_sum_[half], [](float a, float b) { return a + b; });
    output.settle(state_.max, sum, inverse);
    if constexpr (T::HAS_MAX) leave_tops();
    output.write([&](int i) { return out_[i / (T::PRODUCT / 2)][i % (T::PRODUCT / 2)]; }, inverse);
  }

  // Each twin has the largest scores of its own turns: the second hands them over, the first stores.
  DEVICE void leave_tops() {
    await(BOTH_BARRIER, T::CONSUMERS);  // no weights are handed over any more
    const float own[4] = {state_.top[0], state_.top[1], 0.0f, 0.0f};
    if (warpgroup_ == 1) store_shared_16(Layout::handover(0), chunk_of(own));
    await(BOTH_BARRIER, T::CONSUMERS);
    const Chunk twins = load_shared_16(Layout::handover(0));
    if (warpgroup_ == 0) state_.raise({float_of_bits(twins.word[0]), float_of_bits(twins.word[1])});
    leave_row_tops(rows_.places(params_), state_.top, params_.tops.of, warpgroup_ == 0);
  }

  DEVICE int block(int turn) const { return rows_.blocks.end - 1 - turn; }

  DEVICE void await(int barrier, int threads) const {
    sync_warp();  // branches before it may have parted lanes, and the barrier counts whole warps
    named_barrier_sync(barrier, threads);
  }

  const typename T::Params& params_;
  const TwinRows<T>& rows_;
  const int warpgroup_, turns_;
  const int upper_edge_;  // blocks from it on may hide their last keys

  WarpgroupScores<T> scores_;                 // [64, TILE_N]; then weights
  uint32 weights_[T::KEY_STEPS][4];           // of this warpgroup's turn, or of the other's
  float out_[T::PRODUCTS][T::PRODUCT / 2];    // [64, own half of HEAD_DIM_V]
  RowStateOf<T> state_ = RowStateOf<T>::empty();  // sums of this warpgroup's turns
  float twins_sum_[2] = {0.0f, 0.0f};         // of the other's, by its last turn
};

template <class T>
DEVICE void forward_twin(const typename T::Params& params) {
  if (thread_index() == 0) TwinLayout<T>::init();
  if (thread_index() == T::CONSUMERS) {
    if constexpr (!T::GROUPED) prefetch_map(params.map_q);
    if constexpr (!T::GATHERS) prefetch_map(params.map_k);
    if constexpr (!T::GATHERS && !T::V_IN_K) prefetch_map(params.map_v);
  }
  admit_next_grid();
  if (thread_index() == 0) await_earlier_grids();
  // Barriers are there, and what grids before this one wrote.
  sync_block();
  const TwinRows<T> rows = TwinRows<T>::of(params);
  if (rows.is_none()) return;
  const int warpgroup = static_cast<int>(uniform(thread_index() / WARPGROUP));
  if (warpgroup == T::WARPGROUPS) {
    lower_registers<T::PRODUCER_REGISTERS>();
    if constexpr (T::GROUPED) {
      if (thread_index() % WARPGROUP < T::LOADING_WARPS * WARP) produce_pieces<T>(params, rows);
    } else if (thread_index() % WARPGROUP == 0) {
      rows.load(TwinLayout<T>::q(), params, TwinLayout<T>::q_full());
      produce_pieces<T>(params, rows);
    }
  } else {
    raise_registers<T::CONSUMER_REGISTERS>();
    Twin<T>(params, rows, warpgroup).run();
  }
}

}  // namespace multiattn
