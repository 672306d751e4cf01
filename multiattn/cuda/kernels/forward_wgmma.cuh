// Fused multi-head attention, forward, for sm90: TMA, wgmma, warp specialisation.
//
// Shah et al., "FlashAttention-3" (arXiv 2407.08608), Algorithm 2: one warpgroup only loads; the others own 64 queries each
// and walk over the keys from the last block that they see down to the first, TILE_N at a time. Products are asynchronous:
// while a warpgroup turns scores into weights, the tensor cores add what its earlier weights make of V, and work for the
// other warpgroups.
#pragma once
#include "forward_wgmma_output.cuh"
#include "forward_wgmma_producer.cuh"
#include "forward_wgmma_softmax.cuh"
#include "multiattn/special.cuh"
#include "multiattn/wgmma.cuh"

namespace multiattn {

// Blocks of keys at a band's lower edge: the first that a warpgroup sees in full, the first that it sees, and the first that
// is loaded for its tile. A band without that edge begins with block 0.
template <Band>
struct LowerEdge {
  static constexpr int full = 0, first = 0, loaded = 0;
};
template <>
struct LowerEdge<Band::TWO_SIDED> {
  int full, first, loaded;
};

template <class T>
class Consumer {
  using E = typename T::Element;
  using Shared = SharedLayout<T>;
  using TileQ = typename T::TileQ;
  using TileKV = typename T::TileKV;
  static constexpr bool ALL_KEPT = T::KEPT_STEPS == T::DOT_STEPS;  // nothing of Q is read from shared memory again
  static constexpr bool HAS_LOWER_EDGE = T::BAND == Band::TWO_SIDED;
  static constexpr int HEADROOM = T::LAZY_MAX ? multiattn::HEADROOM<E> : 0;

 public:
  DEVICE Consumer(const typename T::Params& params, int warpgroup)
      : params_(params), mask_(params.forward), warpgroup_(warpgroup) {}

  // Tile after tile.
  DEVICE void run() {
    if (T::PINGPONG && warpgroup_ == T::WARPGROUPS - 1) named_barrier_arrive(TURN_BARRIER, 2 * WARPGROUP);
    for (Rows rows = begin(); rows.tile.blocks != NO_TILE; rows = begin()) {
      attend(rows);
      finish(rows);
    }
    if constexpr (T::TMA_STORE) tma_store_wait_read<0>();  // shared memory goes with the block
  }

 private:
  // A warpgroup's part of a tile of queries: where it starts (negative: it has none), the slot of Q, and of the blocks of keys
  // those that the warpgroup sees, from `last` down to `first`, and the ones from `exact` on, which it sees in part, or starts
  // with.
  struct Rows : LowerEdge<T::BAND> {
    QueryTile<T> tile;
    int first_query, slot, last, exact;
  };

  // Where a block lies in the band that the warpgroup's rows see.
  enum class Part {
    LAST,   // it may hold the last keys that rows see: masked, and its maxima come before its weights
    FULL,   // not masked
    FIRST,  // it holds first keys that rows see, after blocks that they see in full: masked
  };

  // The next tile. Its Q is there.
  DEVICE Rows begin() {
    Shared::ring_q().await_full(q_);
    Rows rows{{}, load_tile<T>(Shared::tile_place(q_.slot)), 0, q_.slot, -1, 0};
    if (rows.tile.blocks == NO_TILE) return rows;
    if constexpr (IS_PACKED<typename T::Blocked>) mask_ = mask_of<T::BAND>(params_.forward, rows.tile.sequence);
    rows.first_query = rows.tile.first_query + warpgroup_ * T::WARPGROUP_ROWS;
    const auto blocks = mask_.template keys<T::TILE_N>(rows.first_query, T::WARPGROUP_ROWS);
    if constexpr (HAS_LOWER_EDGE) {
      find_band(rows, blocks);
    } else {
      if (rows.first_query >= 0) rows.last = max(blocks.end, 0) - 1;
      rows.exact = min(blocks.full_end, rows.last);
    }
    take_queries(rows.slot);
    q_.advance();
    return rows;
  }

  // Maxima are exact down to the block with the last key that the first query sees: each row has one then. Where no block is
  // full, bands are narrow, and a row may see its only keys in any block.
  DEVICE void find_band(Rows& rows, const Blocks& blocks) const {
    rows.loaded = loaded_blocks<T>(mask_, rows.tile.first_query).begin;
    const bool see_keys = rows.first_query >= 0 && blocks.begin < blocks.end;
    rows.first = see_keys ? blocks.begin : rows.loaded;
    rows.last = see_keys ? blocks.end - 1 : rows.loaded - 1;
    rows.full = blocks.full_begin;
    const int with_last_key = mask_.last_key(rows.first_query) / T::TILE_N;
    rows.exact = blocks.full_begin < blocks.full_end ? with_last_key : rows.first;
  }

  // The paper's loop: outputs and state of the rows.
  DEVICE void attend(const Rows& rows) {
    state_ = RowState::empty();
#pragma unroll
    for (int i = 0; i < T::HEAD_DIM / 2; ++i) out_[i] = 0.0f;
    // Blocks that only others of the tile, or of the cluster, see. The ring has K of the first, then V of each and K of the
    // next: two tiles are skipped for one turn.
    const int skipped = rows.loaded + rows.tile.blocks - 1 - rows.last;
    if (skipped > 0) skip();
    for (int block = 1; block < skipped; ++block) skip_turn();
    if (rows.last >= rows.first) {
      if (skipped > 0) await_turn();
      make_scores(rows.slot);
      if (skipped > 0) pass_turn();
      wgmma_wait<0>();
      if (skipped > 0) skip();
      walk(rows);
    } else {
      if (skipped > 0) skip();
      await_stored(rows.slot);
    }
    if constexpr (!T::TMA_STORE && !ALL_KEPT) Shared::ring_q().release_apart(rows.slot);
    if (rows.last >= rows.first) {
      if constexpr (HAS_LOWER_EDGE)
        add_last_values(rows);
      else
        add_values();
      output_of(rows).settle(state_, inverse_);
      wgmma_wait<0>();
      Shared::ring_kv().release_apart(last_slot());
      if constexpr (HAS_LOWER_EDGE) skip_below(rows);
    } else {
      output_of(rows).settle(state_, inverse_);
    }
  }

  // Products with V of the warpgroup's lowest block; K of the one below comes before it.
  DEVICE void add_last_values(const Rows& rows) {
    const bool others_go_on = rows.first > rows.loaded;
    if (others_go_on) {
      await_turn();
      skip();
    }
    add_values();
    if (others_go_on) pass_turn();
  }

  // The rest of the blocks below, which only others see.
  DEVICE void skip_below(const Rows& rows) {
    const int skipped = rows.first - rows.loaded;
    for (int block = 1; block < skipped; ++block) skip_turn();
    if (skipped > 0) skip();
  }

  // A turn for nothing, as those who see the block take it.
  DEVICE void skip_turn() {
    await_turn();
    pass_turn();
    skip();
    skip();
  }

  // A tile of K or V that only others have a use for.
  DEVICE void skip() {
    Shared::ring_kv().await_full(kv_);
    Shared::ring_kv().release_apart(kv_.slot);
    kv_.advance();
  }

  DEVICE void take_queries(int slot) {
    if (params_.forward.scale_sign != 1) {
      fold_sign_into_rows(slot);
      fence_async_shared();
      await_warpgroup();  // Q is rewritten before anybody reads it
    }
    const auto reader = FragmentReader<PanelQ<T>>::down();
#pragma unroll
    for (int step = 0; step < T::KEPT_STEPS; ++step)
      kept_q_[step] = reader.load(queries(slot) + step / 4 * TileQ::PANEL_BYTES, warp_row(), step % 4 * 16);
    if constexpr (!T::TMA_STORE && ALL_KEPT) Shared::ring_q().release_apart(slot);
  }

  DEVICE void fold_sign_into_rows(int slot) const {
    constexpr int CHUNKS = T::WARPGROUP_ROWS * 8;  // of a panel
    for (int i = thread_index() % WARPGROUP; i < TileQ::PANELS * CHUNKS; i += WARPGROUP)
      fold_sign_into<E>(queries(slot) + i / CHUNKS * TileQ::PANEL_BYTES + i % CHUNKS * CHUNK_BYTES,
                        params_.forward.scale_sign);
  }

  // The blocks that the warpgroup sees; scores of the last are there, and it is the first. Weights of the lowest are left: what
  // they make of V is yet to be added.
  DEVICE void walk(const Rows& rows) {
    weigh<Part::LAST, false>(rows, rows.last);
    await_stored(rows.slot);  // by now it is
    int block = rows.last - 1;
    for (; block >= rows.exact; --block) next_block<Part::LAST>(rows, block);
    for (; block >= rows.full; --block) next_block<Part::FULL>(rows, block);
    if constexpr (HAS_LOWER_EDGE)
      for (; block >= rows.first; --block) next_block<Part::FIRST>(rows, block);
  }

  // A block's scores are made while the weights of the one before are multiplied by its V, and that while scores become
  // weights.
  template <Part PART>
  DEVICE void next_block(const Rows& rows, int block) {
    await_turn();
    make_scores(rows.slot);
    add_values();
    pass_turn();
    weigh<PART, true>(rows, block);
  }

  // Scores to weights, and the state and older outputs brought up to date. With HAS_VALUES those of the block before are
  // under way behind the scores.
  template <Part PART, bool HAS_VALUES>
  DEVICE void weigh(const Rows& rows, int block) {
    constexpr bool EXACT = PART == Part::LAST || !T::LAZY_MAX;
    if constexpr (HAS_VALUES) wgmma_wait<1>();
    if constexpr (!T::LAZY_MAX) release_k();
    float base[2], sum[2], decay[2] = {1.0f, 1.0f};
    if constexpr (HAS_SCORE<typename T::Score>) modify_block(rows, block);
    if constexpr (PART != Part::FULL) mask_block<PART>(rows, block);
    if constexpr (EXACT) {
      settle_max(decay, base);
    } else {
      base[0] = state_.max[0];
      base[1] = state_.max[1];
    }
    exponentiate<T>(scores_, base, scale_log2(), sum);
    if constexpr (HAS_VALUES) {
      wgmma_wait<0>();
      release_v();
    }
    pack_weights<T>(weights_, scores_);
    if constexpr (!EXACT) {
      if (any_in_warp(outgrown<E>(weights_))) redo<PART>(rows, block, sum, decay);
    }
    if constexpr (T::LAZY_MAX) release_k();
    state_.sum[0] = state_.sum[0] * decay[0] + sum[0];
    state_.sum[1] = state_.sum[1] * decay[1] + sum[1];
    if constexpr (HAS_VALUES && EXACT) decay_output(decay);  // before the first there is no output
  }

  DEVICE void modify_block(const Rows& rows, int block) {
    // Without packing from the parameters: where the mask keeps them for this, two kernels spill.
    const ForwardParams& forward = params_.forward;
    const int seq_q = IS_PACKED<typename T::Blocked> ? mask_.seq_q : forward.seq_q;
    const int seq_kv = IS_PACKED<typename T::Blocked> ? mask_.seq_kv : forward.seq_kv;
    const HeadScores<typename T::Score> head(params_.aux, seq_q, seq_kv, rows.tile.batch, rows.tile.head);
    modify_scores<T>(scores_, head, rows.first_query + warp_row(), block * T::TILE_N);
  }

  // From scores to the log2 domain.
  DEVICE float scale_log2() const { return HAS_SCORE<typename T::Score> ? 1.0f : params_.forward.scale_log2; }

  template <Part PART>
  DEVICE void mask_block(const Rows& rows, int block) {
    const int first_query = rows.first_query + warp_row(), first_key = block * T::TILE_N;
    if constexpr (!HAS_LOWER_EDGE) {
      mask_scores<T>(scores_, mask_, first_query, first_key);
    } else {
      if constexpr (PART == Part::LAST) hide_after<T>(scores_, mask_, first_query, first_key);
      if (PART == Part::FIRST || block < rows.full) hide_before<T>(scores_, mask_, first_query, first_key);
    }
  }

  DEVICE void settle_max(float (&decay)[2], float (&base)[2]) {
    float top[2];
    find_tops<T>(scores_, top, scale_log2());
    raise_max(state_, top, HEADROOM, decay, base);
  }

  DEVICE void decay_output(const float (&decay)[2]) {
    if (!any_in_warp(decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < T::HEAD_DIM / 2; ++i) out_[i] *= decay[i / 2 % 2];
  }

  // A maximum has outgrown the weights: the warp makes its scores once more, by mma.sync and while the others go on, and
  // takes their maxima first.
  template <Part PART>
  DEVICE void redo(const Rows& rows, int block, float (&sum)[2], float (&decay)[2]) {
    const auto reader_q = FragmentReader<PanelQ<T>>::down();
    const auto reader_k = FragmentReader<Tile<TileKV::ROWS, TileKV::PANEL_COLUMNS>>::right();
#pragma unroll
    for (int n = 0; n < T::KEY_STEPS; ++n) {
      Accumulator pair[2] = {};
#pragma unroll(ALL_KEPT ? T::DOT_STEPS : 1)
      for (int step = 0; step < T::DOT_STEPS; ++step) {
        const int panel = step / 4, column = step % 4 * 16;
        Fragment q;
        if constexpr (ALL_KEPT)
          q = kept_q_[step];
        else
          q = reader_q.load(queries(rows.slot) + panel * TileQ::PANEL_BYTES, warp_row(), column);
        mma_pair<E>(pair, q, reader_k.load(Shared::kv(k_slot_) + panel * TileKV::PANEL_BYTES, 16 * n, column));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) scores_[8 * n + i] = pair[i / 4].value[i % 4];
    }
    if constexpr (PART != Part::FULL) mask_block<PART>(rows, block);
    float base[2];
    settle_max(decay, base);
    exponentiate<T>(scores_, base, scale_log2(), sum);
    pack_weights<T>(weights_, scores_);
    decay_output(decay);
  }

  // ---- products, left under way
  // scores[64, TILE_N] = Q K^T of the next block
  DEVICE void make_scores(int slot) {
    Shared::ring_kv().await_full(kv_);
    const Descriptor q(queries(slot), 16), k(Shared::kv(kv_.slot), 16);
    wgmma_fence();
    const auto keys = [&](int step) { return k.at(step / 4 * TileKV::PANEL_BYTES + step % 4 * 32); };
#pragma unroll
    for (int step = 0; step < T::KEPT_STEPS; ++step)
      wgmma_rs<E, T::TILE_N>(scores_, kept_q_[step].reg, keys(step), step > 0);
#pragma unroll
    for (int step = T::KEPT_STEPS; step < T::DOT_STEPS; ++step)
      wgmma_ss<E, T::TILE_N>(scores_, q.at(step / 4 * TileQ::PANEL_BYTES + step % 4 * 32), keys(step), step > 0);
    wgmma_commit();
    k_slot_ = kv_.slot;
    kv_.advance();
  }

  // out[64, HEAD_DIM] += weights V
  DEVICE void add_values() {
    Shared::ring_kv().await_full(kv_);
    const Descriptor v(Shared::kv(kv_.slot), TileKV::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < T::KEY_STEPS; ++step)
      wgmma_rs_mn<E, T::HEAD_DIM>(out_, weights_[step], v.at(step * 16 * TileKV::ROW_BYTES), true);
    wgmma_commit();
    kv_.advance();
  }

  DEVICE void await_warpgroup() const {
    sync_warp();  // branches before it may have parted lanes, and the barrier counts whole warps
    named_barrier_sync(ROWS_BARRIER + warpgroup_, WARPGROUP);
  }

  DEVICE void release_k() const { Shared::ring_kv().release(k_slot_); }
  DEVICE void release_v() const { Shared::ring_kv().release(last_slot()); }
  DEVICE int last_slot() const { return kv_.before(kv_.slot); }

  // The tile, for its outputs. A packed batch's is read once more, as the registers for it are wanted in between; its slot of Q
  // is not given back before the outputs have left it.
  DEVICE QueryTile<T> tile_of(const Rows& rows) const {
    if constexpr (IS_PACKED<typename T::Blocked> && T::TMA_STORE) return load_tile<T>(Shared::tile_place(rows.slot));
    return rows.tile;
  }

  // ---- out = outputs / sum and lse = log(sum of exp)
  DEVICE WarpOutput<T> output_of(const Rows& rows) const {
    const QueryTile<T> tile = tile_of(rows);
    return {params_.forward, tile.batch, tile.head, tile.sequence, rows.first_query + warp_row(),
            queries(rows.slot) + warp_row() * TileQ::ROW_BYTES};
  }

  DEVICE void finish(const Rows& rows) {
    if constexpr (T::TMA_STORE) await_warpgroup();  // nobody of it reads Q any more
    output_of(rows).write(out_, inverse_);
    if constexpr (T::TMA_STORE) store_staged(rows);
  }

  DEVICE void store_staged(const Rows& rows) {
    fence_async_shared();
    await_warpgroup();  // everybody's outputs are there
    const QueryTile<T> tile = tile_of(rows);
    // A store that begins before its tensor is an illegal instruction; a load is not.
    if (thread_index() % WARPGROUP == 0 && rows.first_query >= 0) {
#pragma unroll
      for (int panel = 0; panel < TileQ::PANELS; ++panel)
        store_box(params_.map_out, queries(rows.slot) + panel * TileQ::PANEL_BYTES, panel * TileQ::PANEL_COLUMNS,
                  rows.first_query, tile.head, queries_of(tile));
      tma_store_commit();
    }
    sync_warp();  // whole again for what its lanes must do together
    is_storing_ = true;
    if constexpr (T::Q_SLOTS == 1) await_stored(rows.slot);
  }

  // Gives the slot of Q of the tile before the one in `slot` back, once its output has left it. Of one slot it is the same.
  DEVICE void await_stored(int slot) {
    if (!T::TMA_STORE || !is_storing_) return;
    tma_store_wait_read<0>();  // only the thread that stored has any
    Shared::ring_q().release_apart(q_.before(slot));
    is_storing_ = false;
  }

  // ---- turns at the tensor cores
  static constexpr int TURN_BARRIER = 1, ROWS_BARRIER = 4;  // of warpgroup 0

  DEVICE void await_turn() const {
    if constexpr (T::PINGPONG) named_barrier_sync(TURN_BARRIER + warpgroup_, 2 * WARPGROUP);
  }
  DEVICE void pass_turn() const {
    if constexpr (T::PINGPONG)
      named_barrier_arrive(TURN_BARRIER + (warpgroup_ + 1 == T::WARPGROUPS ? 0 : warpgroup_ + 1), 2 * WARPGROUP);
  }

  // The warpgroup's rows of Q.
  DEVICE SharedAddress queries(int slot) const {
    return Shared::q(slot) + warpgroup_ * T::WARPGROUP_ROWS * TileQ::ROW_BYTES;
  }
  static DEVICE int warp_row() { return thread_index() / WARP % 4 * 16; }

  const typename T::Params& params_;
  Mask<T::BAND> mask_;  // of the tile's sequence
  const int warpgroup_;
  RingPlace<T::Q_SLOTS> q_;
  RingPlace<T::STAGES> kv_;
  int k_slot_ = 0;          // of the latest scores
  bool is_storing_ = false;  // the output of the tile before, through its slot of Q

  WarpgroupScores<T> scores_;  // [64, TILE_N]; then weights
  uint32 weights_[T::KEY_STEPS][4];
  float out_[T::HEAD_DIM / 2];  // [64, HEAD_DIM]
  Fragment kept_q_[T::KEPT_STEPS ? T::KEPT_STEPS : 1];
  RowState state_;
  float inverse_[2];  // of the tile's sums
};

template <class T>
DEVICE void forward_wgmma(const typename T::Params& params) {
  if (thread_index() == 0) SharedLayout<T>::init();
  if (thread_index() == T::WARPGROUPS * WARPGROUP) {
    prefetch_map(params.map_q);
    prefetch_map(params.map_k);
    prefetch_map(params.map_v);
    if constexpr (T::TMA_STORE) prefetch_map(params.map_out);
  }
  // Barriers are there.
  if constexpr (T::CLUSTER > 1)
    meet_cluster();
  else
    sync_block();
  const int warpgroup = static_cast<int>(uniform(thread_index() / WARPGROUP));
  if (warpgroup == T::WARPGROUPS) {
    lower_registers<T::PRODUCER_REGISTERS>();
    if (thread_index() % WARPGROUP == 0) produce<T>(params);
  } else {
    raise_registers<T::CONSUMER_REGISTERS>();
    Consumer<T>(params, warpgroup).run();
  }
}

}  // namespace multiattn
