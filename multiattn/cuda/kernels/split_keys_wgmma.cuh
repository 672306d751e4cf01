// Fused multi-head attention, forward, for rows of heads that share their keys, for sm90: TMA, wgmma, warp specialisation.
//
// "Flash-Decoding" (https://pytorch.org/blog/flash-decoding/) as split_keys.cuh has it, with the products of Shah et al.,
// "FlashAttention-3" (arXiv 2407.08608), Algorithm 2: all queries of the heads that share keys are rows of tiles, and blocks
// divide the keys. In a block one warp or four only load; warpgroups own 64 rows each and walk over the block's keys from the
// last tile down to the first. While a warpgroup turns scores into weights, the tensor cores add what its earlier weights make
// of V, and work for the other warpgroup. Where keys are divided among blocks, merge_splits.cuh adds up what they leave.
#pragma once
#include "forward_wgmma_softmax.cuh"
#include "multiattn/special.cuh"
#include "multiattn/wgmma.cuh"
#include "split_keys_wgmma_output.cuh"
#include "split_keys_wgmma_producer.cuh"

namespace multiattn {

template <class T>
class SplitConsumer {
  using E = typename T::Element;
  using Shared = SplitShared<T>;
  using TileQ = typename T::TileQ;
  using TileKV = typename T::TileKV;
  using PanelOfQ = Tile<TileQ::ROWS, TileQ::PANEL_COLUMNS>;  // as ldmatrix and stores see it
  static constexpr bool HAS_LOWER_EDGE = T::BAND == Band::TWO_SIDED;
  static constexpr int HEADROOM = T::LAZY_MAX ? multiattn::HEADROOM<E> : 0;

 public:
  DEVICE SplitConsumer(const typename T::KernelParams& params, const Owned<T>& owned, const Blocks& blocks, int warpgroup)
      : params_(params), owned_(owned), blocks_(blocks), warpgroup_(warpgroup) {}

  DEVICE void run() {
    take_queries();
#pragma unroll
    for (int half = 0; half < 2; ++half) query_[half] = owned_.row(first_row() + accumulator_row(2 * half)).query;
    state_ = RowState::empty();
#pragma unroll
    for (int i = 0; i < T::HEAD_DIM / 2; ++i) out_[i] = 0.0f;
    if (blocks_.begin < blocks_.end) walk();
    SplitOutput<T>(owned_, first_row()).store(out_, state_);
  }

 private:
  // The warpgroup's rows of Q, gathered into panels as TMA would write them: rows of a tile are no box. Rows that are none, and
  // columns beyond head_dim, become zeros.
  DEVICE void take_queries() {
    constexpr int CHUNKS = 2 * T::DOT_STEPS;
    const int thread = thread_index() % WARPGROUP;
    const auto place_of = [&](int row, int chunk) {
      return PanelOfQ::chunk(Shared::q() + chunk / 8 * TileQ::PANEL_BYTES, row, chunk % 8);
    };
#pragma unroll 4
    for (int i = thread; i < T::WARPGROUP_ROWS * CHUNKS; i += WARPGROUP) {
      const int row_of_tile = warpgroup_ * T::WARPGROUP_ROWS + i / CHUNKS, chunk = i % CHUNKS;
      const Row row = owned_.row(row_of_tile);
      const bool valid = row.query < owned_.len_q && chunk < T::HEAD_DIM / CHUNK_ELEMENTS;
      const uint16* source = static_cast<const uint16*>(params_.split.q) + owned_.offset(params_.split.strides_q, row);
      cp_async_16(place_of(row_of_tile, chunk), source + chunk * CHUNK_ELEMENTS, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (params_.split.scale_sign != 1)
      for (int i = thread; i < T::WARPGROUP_ROWS * CHUNKS; i += WARPGROUP)
        fold_sign_into<E>(place_of(warpgroup_ * T::WARPGROUP_ROWS + i / CHUNKS, i % CHUNKS), params_.split.scale_sign);
    fence_async_shared();
    sync_warp();  // whole again for the barrier
    named_barrier_sync(ROWS_BARRIER + warpgroup_, WARPGROUP);  // everybody's part of Q is there, for wgmma too
    const auto reader = FragmentReader<PanelOfQ>::down();
#pragma unroll
    for (int step = 0; step < T::KEPT_STEPS; ++step)
      kept_q_[step] = reader.load(queries() + step / 4 * TileQ::PANEL_BYTES, warp_row(), step % 4 * 16);
  }

  // The paper's loop. All warpgroups see the same tiles: rows that do not see one have it masked.
  DEVICE void walk() {
    if (T::PINGPONG && warpgroup_ == T::WARPGROUPS - 1) named_barrier_arrive(TURN_BARRIER, 2 * WARPGROUP);
    const int last = blocks_.end - 1;
    make_scores();
    wgmma_wait<0>();
    weigh<true, false>(last);
    if constexpr (!T::GATHERS) clear_tail(last);
    int block = last - 1;
    for (const int full_end = max(blocks_.full_end, blocks_.begin); block >= full_end; --block) next_block<true>(block);
    for (const int full = max(blocks_.full_begin, blocks_.begin); block >= full; --block) next_block<false>(block);
    if constexpr (HAS_LOWER_EDGE)
      for (; block >= blocks_.begin; --block) next_block<true>(block);
    if constexpr (T::FREES && !T::GATHERS) clear_freed();
    add_values();
    wgmma_wait<0>();
  }

  // Values behind the last key, of the block that has it. TMA has brought whatever is there in a page or a cache, or nothing,
  // and a weight of zero would make NaN of a NaN. No slot was used before, so that V's is known.
  DEVICE void clear_tail(int last) {
    const int keys = owned_.len_kv - last * T::TILE_N;
    if (keys >= T::TILE_N) return;
    const RingPlace<T::STAGES> place{last > blocks_.begin ? 2 : 1, 0};  // behind K of it, and of the next where there is one
    Shared::ring_kv().await_full(place);
    clear_values(Shared::kv(place.slot), keys, T::TILE_N - keys);
  }

  // Those before the first key that any row sees, of the block that has it: freed boxes were not loaded at all.
  DEVICE void clear_freed() {
    const int keys = owned_.first_key() - blocks_.begin * T::TILE_N;
    if (keys <= 0) return;
    Shared::ring_kv().await_full(kv_);
    clear_values(Shared::kv(kv_.slot), 0, min(keys, T::TILE_N));
  }

  // Rows of V, `count` of them.
  DEVICE void clear_values(SharedAddress v, int first, int count) {
    constexpr int CHUNKS = 8 * TileKV::PANELS;  // of a row
#pragma unroll 1
    for (int i = thread_index(); i < count * CHUNKS; i += T::CONSUMERS) {
      const int row = first + i / CHUNKS, chunk = i % CHUNKS;
      store_shared_16(v + chunk / 8 * TileKV::PANEL_BYTES + row * TileKV::ROW_BYTES + chunk % 8 * CHUNK_BYTES, Chunk{});
    }
    fence_async_shared();
    sync_warp();                                      // whole again for the barrier
    named_barrier_sync(TAIL_BARRIER, T::CONSUMERS);  // everybody's zeros are there, for wgmma too
  }

  // A block's scores are made while the weights of the one before are multiplied by its V, and that while scores become
  // weights.
  template <bool IS_MASKED>
  DEVICE void next_block(int block) {
    await_turn();
    make_scores();
    add_values();
    pass_turn();
    weigh<IS_MASKED, true>(block);
  }

  // Scores to weights, and the state and older outputs brought up to date. With HAS_VALUES those of the block before are
  // under way behind the scores. With LAZY_MAX maxima are exact in masked blocks alone, of which the first counts as one.
  template <bool IS_MASKED, bool HAS_VALUES>
  DEVICE void weigh(int block) {
    constexpr bool EXACT = IS_MASKED || !T::LAZY_MAX;
    if constexpr (HAS_VALUES) wgmma_wait<1>();
    if constexpr (EXACT) Shared::ring_kv().release(k_slot_);
    if constexpr (HAS_SCORE<typename T::Score>) modify(block);
    if constexpr (IS_MASKED) hide(block);
    float base[2] = {state_.max[0], state_.max[1]}, sum[2], decay[2] = {1.0f, 1.0f};
    if constexpr (EXACT) settle_max(decay, base);
    exponentiate<T>(scores_, base, scale_log2(), sum);
    if constexpr (HAS_VALUES) {
      wgmma_wait<0>();
      Shared::ring_kv().release(kv_.before(kv_.slot));
    }
    pack_weights<T>(weights_, scores_);
    if constexpr (!EXACT) {
      if (any_in_warp(outgrown<E>(weights_))) redo(sum, decay);
      Shared::ring_kv().release(k_slot_);
    }
    state_.sum[0] = state_.sum[0] * decay[0] + sum[0];
    state_.sum[1] = state_.sum[1] * decay[1] + sum[1];
    if constexpr (HAS_VALUES && EXACT) decay_output(decay);  // before the first there is no output
  }

  // From scores to the log2 domain.
  DEVICE float scale_log2() const { return HAS_SCORE<typename T::Score> ? 1.0f : params_.split.scale_log2; }

  // The expression's scores in place of Q K^T. Beyond the ends of the sequences they mean nothing.
  DEVICE void modify(int block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = owned_.row(first_row() + accumulator_row(2 * half, recomputed(thread_index())));
      const HeadScores<typename T::Score> head(params_.aux, owned_.len_q, owned_.len_kv, owned_.sequence, row.head);
#pragma unroll
      for (int i = 2 * half; i < T::TILE_N / 2; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e)
          scores_[e] = head.score(scores_[e], row.query, Position(block * T::TILE_N + accumulator_column(0), e / 4 * 8 + e % 2));
    }
  }

  // Scores of keys that a row does not see. What it is compared with counts from this thread's first key of the block, so that
  // keys are constants.
  DEVICE void hide(int block) {
    const Mask<T::BAND> mask = owned_.mask();
    const int first_key = block * T::TILE_N + accumulator_column(0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int first = 0, last = mask.seq_kv - 1 - first_key;
      if constexpr (T::BAND == Band::CAUSAL) last = query_[half] + (mask.seq_kv - mask.seq_q) - first_key;
      if constexpr (HAS_LOWER_EDGE) {
        first = mask.first_key(query_[half]) - first_key;
        last = mask.last_key(query_[half]) - first_key;
      }
#pragma unroll
      for (int i = 2 * half; i < T::TILE_N / 2; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e) {
          const int key = e / 4 * 8 + e % 2;
          if (key > last || (HAS_LOWER_EDGE && key < first)) scores_[e] = -infinity();
        }
    }
  }

  DEVICE void decay_output(const float (&decay)[2]) {
    if (!any_in_warp(decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < T::HEAD_DIM / 2; ++i) out_[i] *= decay[i / 2 % 2];
  }

  DEVICE void settle_max(float (&decay)[2], float (&base)[2]) {
    float top[2];
    find_tops<T>(scores_, top, scale_log2());
    raise_max(state_, top, HEADROOM, decay, base);
  }

  // A maximum has outgrown the weights: the warp makes its scores once more, by mma.sync and while the others go on, and takes
  // their maxima first.
  DEVICE void redo(float (&sum)[2], float (&decay)[2]) {
    const auto reader_q = FragmentReader<PanelOfQ>::down();
    const auto reader_k = FragmentReader<Tile<TileKV::ROWS, TileKV::PANEL_COLUMNS>>::right();
#pragma unroll
    for (int n = 0; n < T::KEY_STEPS; ++n) {
      Accumulator pair[2] = {};
#pragma unroll 1
      for (int step = 0; step < T::DOT_STEPS; ++step) {
        const int panel = step / 4, column = step % 4 * 16;
        const Fragment q = reader_q.load(queries() + panel * TileQ::PANEL_BYTES, warp_row(), column);
        mma_pair<E>(pair, q, reader_k.load(Shared::kv(k_slot_) + panel * TileKV::PANEL_BYTES, 16 * n, column));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) scores_[8 * n + i] = pair[i / 4].value[i % 4];
    }
    float base[2];
    settle_max(decay, base);
    exponentiate<T>(scores_, base, scale_log2(), sum);
    pack_weights<T>(weights_, scores_);
    decay_output(decay);
  }

  // ---- products, left under way
  // scores[64, TILE_N] = Q K^T of the next block
  DEVICE void make_scores() {
    Shared::ring_kv().await_full(kv_);
    const Descriptor q(queries(), 16), k(Shared::kv(kv_.slot), 16);
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

  // ---- turns at the tensor cores
  static constexpr int TURN_BARRIER = 1, ROWS_BARRIER = 4, TAIL_BARRIER = 7;  // the first two of warpgroup 0

  DEVICE void await_turn() const {
    if constexpr (T::PINGPONG) named_barrier_sync(TURN_BARRIER + warpgroup_, 2 * WARPGROUP);
  }
  DEVICE void pass_turn() const {
    if constexpr (T::PINGPONG)
      named_barrier_arrive(TURN_BARRIER + (warpgroup_ + 1 == T::WARPGROUPS ? 0 : warpgroup_ + 1), 2 * WARPGROUP);
  }

  // The warpgroup's rows of Q, and the warp's first row of them and of the tile.
  DEVICE SharedAddress queries() const { return Shared::q() + warpgroup_ * T::WARPGROUP_ROWS * TileQ::ROW_BYTES; }
  static DEVICE int warp_row() { return thread_index() / WARP % 4 * 16; }
  DEVICE int first_row() const { return warpgroup_ * T::WARPGROUP_ROWS + warp_row(); }

  const typename T::KernelParams& params_;
  const Owned<T>& owned_;
  const Blocks& blocks_;
  const int warpgroup_;
  RingPlace<T::STAGES> kv_;
  int k_slot_ = 0;  // of the latest scores
  int query_[2];    // of the thread's rows

  WarpgroupScores<T> scores_;  // [64, TILE_N]; then weights
  uint32 weights_[T::KEY_STEPS][4];
  float out_[T::HEAD_DIM / 2];  // [64, HEAD_DIM]
  Fragment kept_q_[T::KEPT_STEPS ? T::KEPT_STEPS : 1];
  RowState state_;
};

template <class T>
DEVICE void split_keys_wgmma(const typename T::KernelParams& params) {
  Owned<T> owned = Owned<T>::of(params.split);
  if (!T::GATHERS && thread_index() == T::CONSUMERS) {
    prefetch_map(params.map_k);
    prefetch_map(params.map_v);
  }
  admit_next_grid();
  if (thread_index() == 0) {
    SplitShared<T>::init();
    await_earlier_grids();
  }
  sync_block();  // barriers are there, and what grids before this one wrote
  owned.find_lengths();
  if (owned.first_row >= owned.len_q * params.split.group) return;
  const Blocks blocks = owned.keys();
  const int warpgroup = static_cast<int>(uniform(thread_index() / WARPGROUP));
  if (warpgroup == T::WARPGROUPS) {
    if constexpr (T::MOVES_REGISTERS) lower_registers<T::PRODUCER_REGISTERS>();
    if (thread_index() % WARPGROUP < T::LOADING_WARPS * WARP) produce<T>(params, owned, blocks);
  } else {
    if constexpr (T::MOVES_REGISTERS) raise_registers<T::CONSUMER_REGISTERS>();
    SplitConsumer<T>(params, owned, blocks, warpgroup).run();
  }
}

}  // namespace multiattn
