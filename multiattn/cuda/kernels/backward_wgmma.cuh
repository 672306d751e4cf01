// Gradients of q, k and v, for sm90: TMA, wgmma, warp specialisation.
//
// Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 2, as FlashAttention-3 has it on Hopper: a block owns TILE_N keys of one
// key/value head and walks over the queries of all heads of its group, or a part of them, TILE_M at a time. All is transposed (rows are keys), so
// that weights and dS stay in registers as operand A of dV and dK.
//
// Two warpgroups own 64 keys each; a third makes dQ of the dS that they put into shared memory, as ThunderKittens does, and adds
// it to fp32 sums in the workspace; a fourth loads. They wait for one another only through rings of slots, so that each has
// products for the tensor cores while another does something else.
#pragma once
#include "backward_wgmma_add.cuh"
#include "backward_wgmma_clear.cuh"
#include "backward_wgmma_dq.cuh"
#include "backward_wgmma_output.cuh"
#include "backward_wgmma_parts.cuh"
#include "backward_wgmma_producer.cuh"
#include "backward_wgmma_scores.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

// A warpgroup of keys. Its number is a constant: what depends on it takes no registers, and no time.
template <class T, int GROUP>
class KeyWarpgroup : private WalkPlace<T> {
  using E = typename T::Element;
  using Shared = BackwardShared<T, T::PAIRED ? GROUP : 0>;
  using TileQ = typename T::TileQ;
  using TileDout = typename T::TileDout;
  using TileK = typename T::TileK;
  using TileV = typename T::TileV;
  using Scores = TransposedScores<T>;
  using Operand = TransposedOperand<T>;
  using DsPlace = RingPlace<T::DS_STAGES>;
  using PlaceQ = RingPlace<T::Q_STAGES>;
  using PlaceDout = RingPlace<T::DOUT_STAGES>;
  static constexpr bool IS_MODIFIED = HAS_SCORE<typename T::Score>;
  static constexpr bool IS_CROWDED = T::KEEPS_SLOPED && !T::EARLY_SCORES;  // no room for weights before dK is there
  using Statistics = QueryStatistics<T, T::KEEPS_SLOPED>;
  using Delta = typename DeltaOf<T, Statistics>::Type;

 public:
  DEVICE explicit KeyWarpgroup(const typename T::Params& params) : params_(params) {}

  // Tile after tile.
  DEVICE void run() {
    for (begin(); !tile().is_none(); begin()) {
      const Blocks blocks = group_blocks<T>(params_, tile(), GROUP);
      const int steps = count_own_steps(blocks);
      skip_before(blocks);
      if (steps > 0) {
        walk(blocks, steps);
      } else {
        Shared::ring_v().await_full(v_);
        Shared::ring_v().release_apart(0);
        clear(dk_);
        clear(dv_);
      }
      skip_behind();
      v_.advance();
      const KeyTile<T> done = tile();
      Shared::ring_k().release_apart(k_.slot);
      k_.advance();
      if constexpr (IS_STREAM_K<typename T::Blocked>)
        if (!gather_parts<T>(params_, done, GROUP * 4 + warp_row_again() / 16, dk_, dv_)) continue;
      write_gradients<T>(params_, done, first_key(done), dk_, dv_);
    }
  }

 private:
  // The next tile. Its K is there.
  DEVICE void begin() {
    Shared::ring_k().await_full(k_);
    if constexpr (T::KEEPS_K)
      if (!tile().is_none()) read_rows<TileK, T::DIM_STEPS>(kept_k_, Shared::k(k_.slot), own_row);
  }

  // Read again wherever it is asked for, as registers are scarce.
  DEVICE KeyTile<T> tile() const { return load_key_tile<T>(Shared::tile_place(k_.slot)); }

  DEVICE int count_own_steps(const Blocks& blocks) const {
    if constexpr (!IS_STREAM_K<typename T::Blocked> && !T::LISTED) return count_steps<T>(params_, blocks);
    const KeyTile<T> of = tile();
    if constexpr (T::PAIRED && GROUP == 1) return of.end_of_second;
    return of.end_step - of.first_step;
  }

  // The algorithm's inner loop: gradients of the tile.
  DEVICE void walk(const Blocks& blocks, int steps) {
    if constexpr (!T::LISTED) block_ = blocks.begin;
    if constexpr (IS_STREAM_K<typename T::Blocked>) block_ = QueryStep::of(tile().first_step, blocks).block;
    if constexpr (!T::LISTED) {
      full_begin_ = blocks.full_begin;
      full_end_ = blocks.full_end;
      end_ = blocks.end;
      if constexpr (IS_MODIFIED) begin_heads(blocks);
    }
    make_scores(steps_);
    if constexpr (T::LISTED) take_step(steps_);
    weigh<0>(steps_);
    pack_weights();
    begin_dp(steps_);
    Shared::ring_v().await_full(v_);
    if constexpr (!T::IS_COMPACT) {
      if (steps == 1) {
        step(true, true);
      } else {
        step(true, false);
        for (int left = steps - 2; left > 0; --left) step(false, false);
        step(false, true);
      }
    } else {
      bool is_first = true;
      for (int left = steps; left > 0; --left, is_first = false) step(is_first, left == 1);
    }
  }

  // The steps of a tile whose queries see none of the warpgroup's keys: Q and dO go by unread, and dS is 0.
  DEVICE void skip_before(const Blocks& own) {
    if constexpr (!T::LISTED && (T::BAND == Band::TWO_SIDED || (T::BAND == Band::CAUSAL && !T::DESCENDS))) skip(own.begin - query_blocks<T>(params_, tile()).begin);
  }
  DEVICE void skip_behind() {
    if constexpr (!T::LISTED && (T::BAND == Band::TWO_SIDED || T::DESCENDS))
      skip(query_blocks<T>(params_, tile()).end - group_blocks<T>(params_, tile(), GROUP).end);
  }
  DEVICE void skip(int steps) {
    for (; steps > 0; --steps, ++steps_) {
      const auto q = PlaceQ::of(steps_);
      const auto dout = PlaceDout::of(steps_);
      Shared::ring_q().await_full(q);
      Shared::ring_q().release_apart(q.slot);
      Shared::ring_dout().await_full(dout);
      Shared::ring_dout().release_apart(dout.slot);
#pragma unroll
      for (auto& fragment : ds()) fragment[0] = fragment[1] = fragment[2] = fragment[3] = 0;
      store_ds();
      pass_ds();
      sync_warp();
    }
  }

  // Its weights are there. Those of the next step are, afterwards, unless it is the last. If IS_COMPACT there is one
  // copy of this: the last step makes its own weights once more, and nobody reads them.
  DEVICE void step(bool is_first, bool is_last) {
    const int slot = PlaceQ::of(steps_).slot;
    const uint32 next = is_last ? steps_ : steps_ + 1;
    const bool makes_scores = T::IS_COMPACT || !is_last;
    make_dp();
    if (T::EARLY_SCORES && makes_scores) make_scores(next);
    add_dv(is_first);
    Delta delta(Shared::delta(slot));
    if (!T::EARLY_SCORES)
      wgmma_wait<0>();
    else if (makes_scores)
      wgmma_wait<2>();
    else
      wgmma_wait<1>();
    if constexpr (!T::EARLY_SCORES) release_dout(is_last);
    // An overflow where the weight is 0 would be NaN.
    if (!is_full()) mask(dp());
    make_ds<T>(ds(), sloped(), dp(), delta);
    if (!T::EARLY_SCORES && makes_scores) make_scores(next);
    store_ds();
    add_dk(slot, is_first);
    pass_ds();
    if constexpr (T::EARLY_SCORES) {
      wgmma_wait<1>();
      release_dout(is_last);
    }
    if constexpr (T::LISTED) {
      take_step(next);
    } else {
      if constexpr (IS_MODIFIED) this->head += block_ + 1 == end_ && !is_last;
      if (++block_ == end_) block_ = query_blocks<T>(params_, tile()).begin;  // of the next head
    }
    if (makes_scores) weigh<IS_CROWDED ? 0 : 1>(next);  // while dK is under way
    wgmma_wait<0>();
    if (makes_scores) begin_dp(next);
    Shared::ring_q().release(slot);
    if (makes_scores) pack_weights();
    ++steps_;
  }

  // The last products with a dO, or with V, are made.
  DEVICE void release_dout(bool is_last) {
    Shared::ring_dout().release(PlaceDout::of(steps_).slot);
    Shared::ring_v().release(0, is_last);
  }

  // Scores of a step to weights, when all but so many groups of products are there.
  template <int GROUPS>
  DEVICE void weigh(uint32 step) {
    Statistics lse(Shared::lse(PlaceQ::of(step).slot));
    if constexpr (IS_MODIFIED) {
      weigh_modified<GROUPS>(lse);
    } else {
      wgmma_wait<GROUPS>();
      exponentiate<T>(scores(), params_.backward.score_factor, lse);
      if (!is_full()) mask(scores());
    }
  }

  // Makes weights of an expression's scores. Where its slope is not 1 they are rounded at once, and so are they times the slope.
  template <int GROUPS>
  DEVICE void weigh_modified(Statistics& lse) {
    const BackwardParams& backward = params_.backward;
    const KeyTile<T> of = tile();
    const HeadScores<typename T::Score> head(params_.aux, count_queries(backward, of.sequence),
                                             count_keys(backward, of.sequence), of.number, own_head());
    const int key = first_key(of), query = first_query(of);
    wgmma_wait<GROUPS>();
    weigh_transposed<T>(scores(), head, key, query, lse, [&](int pair, const float (&times_slope)[2]) {
      if constexpr (T::KEEPS_SLOPED) {
        weights()[pair / 4][pair % 4] = pack<E>(scores()[2 * pair], scores()[2 * pair + 1]);
        sloped()[pair / 4][pair % 4] = pack<E>(times_slope[0], times_slope[1]);
      }
    });
    if (is_full()) return;
    if constexpr (T::KEEPS_SLOPED && T::LISTED) {
#pragma unroll
      for (int i = 0; i < T::TILE_M / 2; ++i)
        if (this->hidden & 1u << i) {
          clear_rounded<T>(weights(), i);
          clear_rounded<T>(sloped(), i);
        }
    } else if constexpr (T::KEEPS_SLOPED) {
      hide_transposed<T>(mask_of<T::BAND>(backward, of.sequence), key, query, [&](int i) {
        clear_rounded<T>(weights(), i);
        clear_rounded<T>(sloped(), i);
      });
    } else {
      mask(scores());
    }
  }

  // With lists: the step whose weights come next. Its Q is there.
  DEVICE void take_step(uint32 step) {
    this->at = ListedStep::load(Shared::step_of_q(PlaceQ::of(step).slot));
    if (is_full()) return;
    const KeyTile<T> of = tile();
    const HeadScores<typename T::Score> head(params_.aux, count_queries(params_.backward, of.sequence),
                                             count_keys(params_.backward, of.sequence), of.number, own_head());
    this->hidden = find_hidden<T>(params_, of, head, this->at, first_key(of));
  }

  DEVICE void begin_dp(uint32 step) {
    if constexpr (T::EARLY_SCORES) load_negative_delta<T>(dp(), Shared::delta(PlaceQ::of(step).slot));
  }

  DEVICE void pack_weights() {
    if constexpr (!T::KEEPS_SLOPED) pack_operand<E>(weights(), scores());
  }

  // The first query head of a walk. No block with queries beyond the end is full.
  DEVICE void begin_heads(const Blocks& blocks) {
    const KeyTile<T> of = tile();
    this->head = of.head_kv * params_.backward.group % params_.backward.heads_q;
    if constexpr (IS_STREAM_K<typename T::Blocked>) this->head += QueryStep::of(of.first_step, blocks).head;
    const int whole = count_queries(params_.backward, of.sequence) / T::TILE_M;
    if constexpr (T::DESCENDS)
      full_begin_ = max(full_begin_, count_query_tiles<T>(params_, of) - whole);
    else
      full_end_ = min(full_end_, whole);
  }

  // True if all queries of the block see all keys.
  DEVICE bool is_full() const {
    if constexpr (T::LISTED) return !this->at.tile.is_masked();
    else return block_ >= full_begin_ && block_ < full_end_;
  }
  DEVICE void mask(Scores& weights) const {
    if constexpr (T::LISTED) {
      clear_hidden<T>(weights, this->hidden);
    } else {
      const KeyTile<T> of = tile();
      const Mask<T::BAND> mask = mask_of<T::BAND>(params_.backward, of.sequence);
      mask_transposed<T>(weights, mask, first_key(of), first_query(of));
    }
  }

  // The query head in its batch entry, and the first query, of the block that the weights are of.
  DEVICE int own_head() const {
    if constexpr (T::LISTED) return this->at.head_of_entry;
    else return this->head;
  }
  DEVICE int first_query(const KeyTile<T>& of) const {
    if constexpr (T::LISTED)
      return first_query_in<typename T::Blocked, T::TILE_M>(of.sequence, this->at.tile.tile());
    else return query_block<T>(params_, of, block_) * T::TILE_M;
  }

  // dS^T to shared memory.
  DEVICE void store_ds() {
    Shared::ring_ds().await_empty(DsPlace::of(steps_));
    const auto fragments = FragmentReader<typename T::TileDS::Panel>::down();
    const SharedAddress rows = recomputed(Shared::ds(DsPlace::of(steps_).slot));
#pragma unroll
    for (int i = 0; i < T::QUERY_STEPS; ++i)
      stmatrix_x4(fragments.address(rows + i / 4 * T::TileDS::PANEL_BYTES, T::PAIRED ? warp_row_again() : own_row(), i % 4 * 16),
                  ds()[i]);
  }

  // It is there, for all: nobody reads it before all have written.
  DEVICE void pass_ds() {
    if constexpr (T::LISTED && (GROUP == 0 || T::PAIRED))
      if (thread_index() == GROUP * WARPGROUP) this->at.store(Shared::step_of_ds(DsPlace::of(steps_).slot));
    fence_async_shared();
    sync_warp();  // all lanes have written
    mbarrier_arrive_if(thread_index() % WARP == 0, Shared::ring_ds().full(DsPlace::of(steps_).slot));
  }

  // ---- products, left under way
  // scores^T[64, TILE_M] = K Q^T of a step
  DEVICE void make_scores(uint32 step) {
    const auto place = PlaceQ::of(step);
    Shared::ring_q().await_full(place);
    multiply<TileK, TileQ, T::KEEPS_K, false>(scores(), kept_k_, Shared::k(k_.slot), Shared::q(place.slot));
  }

  // dP^T[64, TILE_M] = V dO^T
  DEVICE void make_dp() {
    const auto place = PlaceDout::of(steps_);
    Shared::ring_dout().await_full(place);
    const Fragment kept_v[T::V_STEPS] = {};  // none of them
    multiply<TileV, TileDout, false, T::EARLY_SCORES>(dp(), kept_v, Shared::v(), Shared::dout(place.slot));
  }

  // dV[64, HEAD_DIM_V] += P^T dO
  DEVICE void add_dv(bool is_first) {
    add_product<E, T::HEAD_DIM_V, TileDout>(dv_, weights(), Shared::dout(PlaceDout::of(steps_).slot), is_first);
  }

  // dK[64, HEAD_DIM] += dS^T Q
  DEVICE void add_dk(int slot, bool is_first) { add_product<E, T::HEAD_DIM, TileQ>(dk_, ds(), Shared::q(slot), is_first); }

  // sums[64, TILE_M] = the warpgroup's rows of K or V times those of Q or dO
  template <class Keys, class Queries, bool KEPT, bool ADDS, int STEPS>
  DEVICE void multiply(Scores& sums, const Fragment (&kept)[STEPS], SharedAddress keys, SharedAddress queries) {
    multiply_rows<E, T::TILE_M, Keys, Queries, KEPT ? STEPS : 0, ADDS>(sums, kept, keys + GROUP * T::WARPGROUP_KEYS * Keys::ROW_BYTES, queries);
  }

  template <int D_2>
  static DEVICE void clear(float (&gradient)[D_2]) {
#pragma unroll
    for (float& element : gradient) element = 0.0f;
  }

  // The first of this warp's keys, in the tile and in the sequence.
  static DEVICE int own_row() { return GROUP * T::WARPGROUP_KEYS + warp_row_again(); }
  static DEVICE int first_key(const KeyTile<T>& tile) { return tile.first_key + own_row(); }

  // Where scores of the next step are made early they, and the weights, are not where dP and dS are.
  DEVICE Scores& scores() { return products_[0]; }
  DEVICE Scores& dp() { return products_[PRODUCTS - 1]; }
  DEVICE Operand& weights() { return operands_[0]; }
  DEVICE Operand& ds() { return operands_[OPERANDS - 1]; }
  // Weights, of an expression times its slope.
  DEVICE Operand& sloped() {
    if constexpr (T::KEEPS_SLOPED) return operands_[1];
    else return weights();
  }

  static constexpr int PRODUCTS = T::EARLY_SCORES ? 2 : 1, OPERANDS = T::KEEPS_SLOPED ? 3 : PRODUCTS;
  const typename T::Params& params_;
  RingPlace<T::K_STAGES> k_;
  RingPlace<1> v_;
  uint32 steps_ = 0;                  // before this one, of all tiles
  int block_;                         // that the weights are of
  int full_begin_, full_end_, end_;  // of the blocks of the walk
  Scores products_[PRODUCTS];          // scores or weights, dP^T
  Operand operands_[OPERANDS];         // P^T, dS^T
  float dk_[T::HEAD_DIM / 2], dv_[T::HEAD_DIM_V / 2];  // [64, HEAD_DIM], [64, HEAD_DIM_V]
  Fragment kept_k_[T::DIM_STEPS];
};

template <class T>
DEVICE void backward_wgmma(const typename T::Params& params) {
  const int warpgroup = begin_block<BackwardShared<T>>(params, T::WARPGROUPS * WARPGROUP);
  if (warpgroup == 0) {
    raise_registers<T::KEY_REGISTERS>();
    KeyWarpgroup<T, 0>(params).run();
  } else if (warpgroup == 1) {
    raise_registers<T::KEY_REGISTERS>();
    KeyWarpgroup<T, 1>(params).run();
  } else if (warpgroup == T::WARPGROUPS) {
    lower_registers<T::DQ_REGISTERS>();
    DqWarpgroup<T>(params).run();
  } else {
    lower_registers<T::PRODUCER_REGISTERS>();
    if (thread_index() % WARPGROUP == 0) BackwardProducer<T>(params).run();
    if constexpr (T::PAIRED)
      if (thread_index() % WARPGROUP == 3 * WARP) BackwardProducer<T, 1>(params).follow();
    if constexpr (T::SIDE_WARPS > 0) {
      const uint32 warp = uniform(thread_index() % WARPGROUP / WARP);
      if (warp > 0 && warp <= T::SIDE_WARPS) {
        if constexpr (T::ORDERED) DqAdder<T>(params, warp - 1).run();
        else clear_sums<T>(params);
      }
    }
  }
}

}  // namespace multiattn
