// Fused multi-head attention, forward, for sm90: TMA, wgmma, warp specialisation.
//
// Shah et al., "FlashAttention-3" (arXiv 2407.08608), Algorithm 2: one warpgroup only loads; the others own 64 queries each
// and walk over the keys from the last block that they see down to the first, TILE_N at a time. Products are asynchronous:
// while a warpgroup turns scores into weights, the tensor cores add what its earlier weights make of V, and work for the
// other warpgroups.
//
// It is a walk over policies. Rows (forward_wgmma_rows.cuh): queries of one head, tile after tile; or those of all heads that share
// keys, as "Flash-Decoding" (https://pytorch.org/blog/flash-decoding/) has them. Keys (forward_wgmma_keys.cuh): boxes of a tensor,
// boxes of a cache, or gathered. Part (forward_wgmma_output.cuh): out and lse of all keys, or sums of a part of them for
// merge_splits.cuh.
#pragma once
#include "forward_wgmma_output.cuh"
#include "forward_wgmma_producer.cuh"
#include "forward_wgmma_softmax.cuh"
#include "mask_bits.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

// Bits that say which of a thread's scores the expression's mask hides.
template <class T, bool = HAS_BITS<typename T::Blocked>>
struct HiddenScores {};
template <class T>
struct HiddenScores<T, true> {
  using Bits = BitsOf<typename T::Blocked, true, T::TILE_N>;
  uint32 hidden[Bits::WORDS];
  bool has_bits;
};

// Where sequences cut tiles of keys, those of one.
template <class T, bool = IS_CUT<typename T::Blocked>>
struct CutKeys {};
template <class T>
struct CutKeys<T, true> {
  TileRows keys;
};

template <class T, int TEAM = 0>
class Consumer : private HiddenScores<T>, private CutKeys<T> {
  using E = typename T::Element;
  using Shared = SharedLayout<T, TEAM>;
  using Rows = typename RowsOf<T>::Type;
  using Owned = typename RowsOf<T>::Owned;
  using TileQ = typename T::TileQ;
  using TileOut = typename T::TileOut;
  using TileK = typename T::TileK;
  using TileV = typename T::TileV;
  static constexpr bool ALL_KEPT = T::KEPT_STEPS == T::DOT_STEPS;  // nothing of Q is read from shared memory again
  static constexpr bool RELEASES_Q = !T::TMA_STORE && !T::GROUPED;  // before outputs leave
  static constexpr bool HAS_LOWER_EDGE = T::BAND == Band::TWO_SIDED && !T::LISTED;
  static constexpr int HEADROOM = T::LAZY_MAX ? multiattn::HEADROOM<E> : 0;

 public:
  DEVICE Consumer(const typename T::Params& params, const Owned& owned, int warpgroup)
      : params_(params), owned_(owned), mask_(RowsOf<T>::mask(params, owned)), warpgroup_(warpgroup) {}

  // Tile after tile.
  DEVICE void run() {
    if (T::PINGPONG && warpgroup_ == T::WARPGROUPS - 1) named_barrier_arrive(TURN_BARRIER, 2 * WARPGROUP);
    if constexpr (T::GROUPED) {
      const Rows rows = begin();
      attend(rows);
      finish(rows);
    } else {
      for (Rows rows = begin(); !rows.is_none(); rows = begin()) {
        attend(rows);
        finish(rows);
      }
    }
    if constexpr (T::TMA_STORE) tma_store_wait_read<0>();  // shared memory goes with the block
  }

 private:
  // Where a block lies in the band that the warpgroup's rows see.
  enum class Part {
    LAST,   // it may hold the last keys that rows see: masked, and its maxima come before its weights
    FULL,   // not masked
    FIRST,  // it holds first keys that rows see, after blocks that they see in full, or any of a list after those: masked
  };

  // The next tile. Its Q is there.
  DEVICE Rows begin() {
    if constexpr (T::GROUPED) {
      const Rows rows = Rows::of(owned_, keys_of(owned_, params_), warpgroup_);
      rows.gather(Shared::q(0), warpgroup_);
      await_warpgroup();  // everybody's part of Q is there, for wgmma too
      take_queries(0);
      return rows;
    } else {
      Shared::ring_q().await_full(q_);
      Rows rows{{}, load_tile<T>(Shared::tile_place(q_.slot)), 0, q_.slot, -1, 0};
      if (rows.is_none()) return rows;
      if constexpr (IS_PACKED<typename T::Blocked>) mask_ = mask_of<T::BAND>(params_.forward, rows.tile.sequence);
      rows.find(warpgroup_, mask_);
      take_queries(rows.slot);
      q_.advance();
      return rows;
    }
  }

  // The paper's loop: outputs and state of the rows.
  DEVICE void attend(const Rows& rows) {
    state_ = RowStateOf<T>::empty();
#pragma unroll
    for (int i = 0; i < T::HEAD_DIM_V / 2; ++i) out_[i] = 0.0f;
    // Blocks that only others of the tile, or of the cluster, see. The ring has K of the first, then V of each and K of the
    // next: two tiles are skipped for one turn.
    const int skipped = T::LISTED ? 0 : rows.above();
    if (skipped > 0) skip_k();
    for (int block = 1; block < skipped; ++block) skip_turn();
    if (rows.last >= rows.first) {
      if (skipped > 0) await_turn();
      make_scores(rows.slot);
      if (skipped > 0) pass_turn();
      wgmma_wait<0>();
      if (skipped > 0) skip_v();
      walk(rows);
    } else {
      if (skipped > 0) skip_v();
      await_stored(rows.slot);
    }
    if constexpr (RELEASES_Q && !ALL_KEPT) Shared::ring_q().release_apart(rows.slot);
    if (rows.last >= rows.first) {
      if constexpr (T::CLEARS && HAS_LOWER_EDGE) clear_before_first<T>(owned_, rows, kv_.v());
      if constexpr (HAS_LOWER_EDGE)
        add_last_values(rows);
      else
        add_values();
      settle(rows);
      wgmma_wait<0>();
      Shared::V::ring().release_apart(last_slot_of_v());
      if constexpr (HAS_LOWER_EDGE) skip_below(rows);
    } else {
      settle(rows);
    }
  }

  // The lse of each row, and its largest score, leave before its outputs.
  DEVICE void settle(const Rows& rows) {
    output_of(rows).settle(state_, inverse_);
    if constexpr (T::HAS_MAX) output_of(rows).leave_tops(state_.top, params_.tops.of);
  }

  // Products with V of the warpgroup's lowest block; K of the one below comes before it.
  DEVICE void add_last_values(const Rows& rows) {
    const bool others_go_on = rows.below() > 0;
    if (others_go_on) {
      await_turn();
      skip_k();
    }
    add_values();
    if (others_go_on) pass_turn();
  }

  // The rest of the blocks below, which only others see.
  DEVICE void skip_below(const Rows& rows) {
    const int skipped = rows.below();
    for (int block = 1; block < skipped; ++block) skip_turn();
    if (skipped > 0) skip_v();
  }

  // A turn for nothing, as those who see the block take it.
  DEVICE void skip_turn() {
    await_turn();
    pass_turn();
    skip_k();
    skip_v();
  }

  // A tile of K or V that only others have a use for.
  DEVICE void skip_k() { skip(Shared::K::ring(), kv_.k()); }
  DEVICE void skip_v() { skip(Shared::V::ring(), kv_.v()); }
  template <class Ring, class Place>
  static DEVICE void skip(const Ring& ring, Place& place) {
    ring.await_full(place);
    ring.release_apart(place.slot);
    place.advance();
  }

  DEVICE void take_queries(int slot) {
    if (params_.forward.scale_sign != 1) {
      fold_sign_into_rows(slot);
      fence_async_shared();
      await_warpgroup();  // Q is rewritten before anybody reads it
    }
    const auto reader = FragmentReader<typename TileQ::Panel>::down();
#pragma unroll
    for (int step = 0; step < T::KEPT_STEPS; ++step)
      kept_q_[step] = reader.load(queries(slot) + step / 4 * TileQ::PANEL_BYTES, warp_row(), step % 4 * 16);
    if constexpr (RELEASES_Q && ALL_KEPT) Shared::ring_q().release_apart(slot);
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
    if constexpr (T::LISTED) return walk_list(rows);
    weigh<Part::LAST, false>(rows, rows.last);
    if constexpr (T::CLEARS) clear_behind_last<T>(owned_, rows);
    await_stored(rows.slot);  // by now it is
    int block = rows.last - 1;
    for (; block >= rows.exact; --block) next_block<Part::LAST>(rows, block);
    for (; block >= rows.full; --block) next_block<Part::FULL>(rows, block);
    if constexpr (HAS_LOWER_EDGE)
      for (; block >= rows.first; --block) next_block<Part::FIRST>(rows, block);
  }

  // As `walk`, over the blocks of a list: full ones come first. Lazy maxima are exact until each row has one.
  DEVICE void walk_list(const Rows& rows) {
    constexpr Part MASKED = T::LAZY_MAX ? Part::FIRST : Part::LAST;
    TileWord word = take_tile(rows, slot_of_k());
    weigh<Part::LAST, false>(rows, word.word);
    await_stored(rows.slot);  // by now it is
    int left = rows.last;
    const auto take_next = [&] {
      if (left == 0) return;
      Shared::K::ring().await_full(kv_.k());
      word = take_tile(rows, kv_.k().slot);
    };
    bool was_masked = word.is_masked();
    take_next();
    if constexpr (T::LAZY_MAX) {
      for (; left > 0 && was_masked && !have_maxima(); take_next()) {
        --left;
        was_masked = word.is_masked();
        next_block<Part::LAST>(rows, word.word);
      }
    }
    for (; left > 0; take_next()) {
      for (; left > 0 && !word.is_masked(); take_next()) {
        --left;
        next_block<Part::FULL>(rows, word.word);
      }
      if (left == 0) break;
      --left;
      next_block<MASKED>(rows, word.word);
    }
  }

  // True if each row of the warpgroup has seen a key. All warps ask together, as they must issue the same products.
  DEVICE bool have_maxima() const {
    const bool has_none = state_.max[0] == -infinity() || state_.max[1] == -infinity();
    sync_warp();  // the barrier counts whole warps
    return uniform(!any_at_named_barrier(rows_barrier(), WARPGROUP, has_none));
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
      if constexpr (T::HAS_MAX) raise_own_tops();
    }
    exponentiate<T>(scores_, base, scale_log2(), sum);
    if constexpr (HAS_VALUES) {
      wgmma_wait<0>();
      release_v();
    }
    pack_operand<E>(weights_, scores_);
    if constexpr (!EXACT) {
      if (any_in_warp(outgrown<E>(weights_))) redo<PART>(rows, block, sum, decay);
    }
    if constexpr (T::LAZY_MAX) release_k();
    state_.sum[0] = state_.sum[0] * decay[0] + sum[0];
    state_.sum[1] = state_.sum[1] * decay[1] + sum[1];
    if constexpr (HAS_VALUES && EXACT) decay_output(decay);  // before the first there is no output
  }

  DEVICE void modify_block(const Rows& rows, int block) {
    modify_scores<T>(scores_, rows.heads(params_, mask_), rows.queries(), first_key(block));
  }

  // The first key of a block; of a list it is a word of its tile.
  DEVICE int first_key(int block) const {
    if constexpr (IS_CUT<typename T::Blocked>) return this->keys.first;
    else return (T::LISTED ? TileWord{block}.tile() : block) * T::TILE_N;
  }

  // From scores to the log2 domain.
  DEVICE float scale_log2() const { return HAS_SCORE<typename T::Score> ? 1.0f : params_.forward.scale_log2; }

  template <Part PART>
  DEVICE void mask_block(const Rows& rows, int block) {
    const auto queries = rows.queries();
    const int first_key = this->first_key(block);
    if constexpr (T::LISTED) {
      const TileWord word{block};
      if (word.is_cut()) mask_scores<T>(scores_, mask_, queries, first_key);
      if constexpr (IS_CUT<typename T::Blocked>)
        if (word.is_cut()) hide_from<T>(scores_, this->keys.end - first_key);
      if (has_bits_of(word)) hide_by_bits();
      if constexpr (HAS_MASK<typename T::Score> && !ALL_BITS<typename T::Blocked>)
        if (word.is_partial() && !has_bits_of(word)) mask_partial<T>(scores_, rows.heads(params_, mask_), queries, first_key);
    } else if constexpr (!HAS_LOWER_EDGE && !T::GROUPED) {
      mask_scores<T>(scores_, mask_, queries, first_key);
    } else {
      if constexpr (PART == Part::LAST) {
        hide_side<T, true>(scores_, mask_, queries, first_key);
        if constexpr (HAS_TAIL<typename T::Score>) mask_partial<T>(scores_, rows.heads(params_, mask_), queries, first_key);
      }
      if (HAS_LOWER_EDGE && (PART == Part::FIRST || block < rows.full)) hide_side<T, false>(scores_, mask_, queries, first_key);
    }
  }

  DEVICE void settle_max(float (&decay)[2], float (&base)[2]) {
    float top[2];
    find_tops<T>(scores_, top, scale_log2());
    if constexpr (T::HAS_MAX) state_.raise(top);
    raise_max(state_, top, HEADROOM, decay, base);
  }

  // A lazy block: its lanes exchange their largest scores at the end, not here.
  DEVICE void raise_own_tops() {
    const float top[2] = {top_of_thread<T>(scores_, 0) * scale_log2(), top_of_thread<T>(scores_, 1) * scale_log2()};
    state_.raise(top);
  }

  DEVICE void decay_output(const float (&decay)[2]) {
    if (!any_in_warp(decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < T::HEAD_DIM_V / 2; ++i) out_[i] *= decay[i / 2 % 2];
  }

  // A maximum has outgrown the weights: the warp makes its scores once more, by mma.sync and while the others go on, and
  // takes their maxima first.
  template <Part PART>
  DEVICE void redo(const Rows& rows, int block, float (&sum)[2], float (&decay)[2]) {
    const auto reader_q = FragmentReader<typename TileQ::Panel>::down();
    const auto reader_k = FragmentReader<typename TileK::Panel>::right();
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
        mma_pair<E>(pair, q, reader_k.load(Shared::K::at(slot_of_k()) + panel * TileK::PANEL_BYTES, 16 * n, column));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) scores_[8 * n + i] = pair[i / 4].value[i % 4];
    }
    if constexpr (PART != Part::FULL) mask_block<PART>(rows, block);
    float base[2];
    settle_max(decay, base);
    exponentiate<T>(scores_, base, scale_log2(), sum);
    pack_operand<E>(weights_, scores_);
    decay_output(decay);
  }

  // ---- products, left under way
  // scores[64, TILE_N] = Q K^T of the next block
  DEVICE void make_scores(int slot) {
    auto& place = kv_.k();
    Shared::K::ring().await_full(place);
    const Descriptor q(queries(slot), 16), k(Shared::K::at(place.slot), 16);
    wgmma_fence();
    const auto keys = [&](int step) { return k.at(step / 4 * TileK::PANEL_BYTES + step % 4 * 32); };
#pragma unroll
    for (int step = 0; step < T::KEPT_STEPS; ++step)
      wgmma_rs<E, T::TILE_N>(scores_, kept_q_[step].reg, keys(step), step > 0);
#pragma unroll
    for (int step = T::KEPT_STEPS; step < T::DOT_STEPS; ++step)
      wgmma_ss<E, T::TILE_N>(scores_, q.at(step / 4 * TileQ::PANEL_BYTES + step % 4 * 32), keys(step), step > 0);
    wgmma_commit();
    if constexpr (T::TAKES_TURNS) k_slot_ = place.slot;
    place.advance();
  }

  // out[64, HEAD_DIM_V] += weights V
  DEVICE void add_values() {
    auto& place = kv_.v();
    Shared::V::ring().await_full(place);
    add_product<E, T::HEAD_DIM_V, TileV>(out_, weights_, Shared::V::at(place.slot));
    place.advance();
  }

  DEVICE int rows_barrier() const { return ROWS_BARRIER + (T::TEAMS == 1 ? warpgroup_ : TEAM); }
  DEVICE void await_warpgroup() const {
    sync_warp();  // branches before it may have parted lanes, and the barrier counts whole warps
    named_barrier_sync(rows_barrier(), WARPGROUP);
  }

  // The block of a list that a slot of K has. The bits of its mask are sent for.
  DEVICE TileWord take_tile(const Rows& rows, int slot) {
    const auto load = [](SharedAddress at) { return static_cast<int>(uniform(float_bits(load_shared_4(at)))); };
    const TileWord word{load(Shared::key_word(slot))};
    if constexpr (IS_CUT<typename T::Blocked>) {
      const auto& of = rows.tile.sequence;
      this->keys = rows_of_tile<T::TILE_N>(word.tile(), of.offset_kv, of.len_kv);
    }
    if constexpr (HAS_BITS<typename T::Blocked>) {
      using Bits = typename HiddenScores<T>::Bits;
      const int place = load(Shared::key_word(slot) + 4);
      this->has_bits = place != NO_BITS;
      if (has_bits_of(word)) {
        const uint32* const words = Bits::words(params_.lists.mask_bits, place, rows.first_query, word.tile());
#pragma unroll
        for (int i = 0; i < Bits::WORDS; ++i) this->hidden[i] = load_constant(words + i);
      }
    }
    return word;
  }
  DEVICE bool has_bits_of(const TileWord& word) const {
    if constexpr (HAS_BITS<typename T::Blocked>) return word.is_partial() && (ALL_BITS<typename T::Blocked> || this->has_bits);
    return false;
  }
  DEVICE void hide_by_bits() {
    if constexpr (HAS_BITS<typename T::Blocked>) {
#pragma unroll
      for (int i = 0; i < T::TILE_N / 2; ++i)
        if (this->hidden[i / 32] & 1u << i % 32) scores_[i] = -infinity();
    }
  }

  DEVICE void release_k() { Shared::K::ring().release(slot_of_k()); }
  DEVICE void release_v() { Shared::V::ring().release(last_slot_of_v()); }
  DEVICE int slot_of_k() { return T::TAKES_TURNS ? k_slot_ : kv_.k().before(kv_.k().slot); }
  DEVICE int last_slot_of_v() { return kv_.v().before(kv_.v().slot); }

  // The tile, for its outputs. A packed batch's is read once more, as the registers for it are wanted in between, and so is any
  // where V has stages of its own; a slot of Q is not given back before the outputs have left it.
  DEVICE QueryTile<T> tile_of(const Rows& rows) const {
    constexpr bool AGAIN = T::TMA_STORE && (IS_PACKED<typename T::Blocked> || !T::TAKES_TURNS);
    QueryTile<T> tile = rows.tile;
    if constexpr (AGAIN) tile = load_tile<T>(Shared::tile_place(rows.slot));
    if constexpr (IS_CUT<typename T::Blocked>)  // rows behind the tile are another's
      tile.sequence.len_q = end_of_queries<typename T::Blocked, T::TILE_M>(params_.forward, tile.sequence, tile.first_query);
    return tile;
  }

  // ---- out = outputs / sum and lse = log(sum of exp)
  DEVICE auto output_of(const Rows& rows) const {
    if constexpr (T::GROUPED) {
      return WarpOutput<T, GroupPlaces<T>>{{owned_, rows.first_row}, 0};
    } else {
      const QueryTile<T> tile = tile_of(rows);
      return WarpOutput<T, QueryPlaces<T>>{
          {params_.forward, tile.number, tile.head, tile.sequence, rows.first_query + warp_row()},
          queries(rows.slot) + warp_row() * TileQ::ROW_BYTES};
    }
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
    const bool has_rows = T::LISTED ? rows.first_query < count_queries(params_.forward, tile.sequence) : rows.first_query >= 0;
    if (thread_index() % WARPGROUP == 0 && has_rows) {
#pragma unroll
      for (int panel = 0; panel < TileOut::PANELS; ++panel)
        store_box(params_.map_out, queries(rows.slot) + panel * TileOut::PANEL_BYTES, panel * TileOut::PANEL_COLUMNS,
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

  const typename T::Params& params_;
  const Owned& owned_;
  Mask<T::BAND> mask_;  // of the tile's sequence
  const int warpgroup_;
  RingPlace<T::Q_SLOTS> q_;
  typename Shared::Places kv_;
  int k_slot_ = 0;          // of the latest scores, where V takes turns with K
  bool is_storing_ = false;  // the output of the tile before, through its slot of Q

  WarpgroupScores<T> scores_;  // [64, TILE_N]; then weights
  uint32 weights_[T::KEY_STEPS][4];
  float out_[T::HEAD_DIM_V / 2];  // [64, HEAD_DIM_V]
  Fragment kept_q_[T::KEPT_STEPS ? T::KEPT_STEPS : 1];
  RowStateOf<T> state_;
  float inverse_[2];  // of the tile's sums
};

// A team: a warp that loads for it, or the warpgroup that computes.
template <class T, int TEAM>
DEVICE void load_for_team(const typename T::Params& params) {
  if (thread_index() % WARPGROUP == TEAM * WARP) ListedProducer<T, TEAM>(params).run();
}
template <class T, int TEAM, class Owned>
DEVICE void compute_as_team(const typename T::Params& params, const Owned& owned, int warpgroup) {
  if (warpgroup == TEAM) Consumer<T, TEAM>(params, owned, 0).run();
}

template <class T>
DEVICE void forward_wgmma(const typename T::Params& params) {
  auto owned = RowsOf<T>::own(params);
  if (thread_index() == 0) {
    SharedLayout<T>::init();
    if constexpr (T::TEAMS > 1) SharedLayout<T, 1>::init();
    if constexpr (T::TEAMS > 2) SharedLayout<T, 2>::init();
  }
  if (thread_index() == T::ALL_WARPGROUPS * WARPGROUP) {
    if constexpr (!T::GROUPED) prefetch_map(params.map_q);
    if constexpr (!T::GATHERS) prefetch_map(params.map_k);
    if constexpr (!T::GATHERS) prefetch_map(params.map_v);
    if constexpr (T::TMA_STORE) prefetch_map(params.map_out);
  }
  if constexpr (T::GROUPED) {
    admit_next_grid();
    if (thread_index() == 0) await_earlier_grids();
  }
  // Barriers are there, and what grids before this one wrote, if all warps read it.
  if constexpr (T::CLUSTER > 1)
    meet_cluster();
  else
    sync_block();
  if constexpr (T::GROUPED) {
    owned.find_lengths();
    if (owned.first_row >= owned.len_q * params.forward.group) return;
  }
  const int warpgroup = static_cast<int>(uniform(thread_index() / WARPGROUP));
  if (warpgroup == T::ALL_WARPGROUPS) {
    if constexpr (T::MOVES_REGISTERS) lower_registers<T::PRODUCER_REGISTERS>();
    if constexpr (T::GROUPED) {
      if (thread_index() % WARPGROUP < T::LOADING_WARPS * WARP) produce<T>(params, owned, owned.keys());
    } else {
      if constexpr (T::TEAMS > 1) load_for_team<T, 1>(params);
      if constexpr (T::TEAMS > 2) load_for_team<T, 2>(params);
      if (thread_index() % WARPGROUP == 0) {
        if constexpr (T::LISTED) ListedProducer<T>(params).run();
        else produce<T>(params);
      }
    }
  } else {
    if constexpr (T::MOVES_REGISTERS) raise_registers<T::CONSUMER_REGISTERS>();
    if constexpr (T::TEAMS == 1) {
      Consumer<T>(params, owned, warpgroup).run();
    } else {
      compute_as_team<T, 0>(params, owned, warpgroup);
      compute_as_team<T, 1>(params, owned, warpgroup);
      if constexpr (T::TEAMS > 2) compute_as_team<T, 2>(params, owned, warpgroup);
    }
  }
}

}  // namespace multiattn
