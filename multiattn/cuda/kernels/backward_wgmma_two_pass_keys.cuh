// Gradients of k and v, for sm90 and wide heads: TMA, wgmma, warp specialisation. backward_wgmma_two_pass_queries.cuh has
// that of q.
//
// A block owns 64 keys of one key/value head and walks over the queries of all heads of its group, 64 at a time. All is
// transposed (rows are keys), so that weights and dS stay in registers as operand A. At D=256 a gradient takes 128 registers a
// thread: two warpgroups own the same keys and one gradient each. That of dV makes scores and weights, which it hands to that
// of dK through shared memory; that of dK makes dP and dS. A third loads.
#pragma once
#include "backward_wgmma_output.cuh"
#include "backward_wgmma_producer.cuh"
#include "backward_wgmma_scores.cuh"
#include "backward_wgmma_two_pass_traits.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

// The warpgroup of dV, or that of dK.
template <class T, bool OF_V>
class GradientWarpgroup : private WalkPlace<T> {
  using E = typename T::Element;
  using Shared = TwoPassKeysShared<T>;
  // Columns of its gradient, and the depth of its products: of scores, or dP.
  static constexpr int WIDTH = OF_V ? T::HEAD_DIM_V : T::HEAD_DIM, DEPTH = OF_V ? T::HEAD_DIM : T::HEAD_DIM_V;
  static constexpr int STEPS = OF_V ? T::DIM_STEPS : T::V_STEPS, KEPT_STEPS = OF_V ? T::KEPT_K : T::KEPT_V;
  static constexpr bool KEEPS_KEYS = KEPT_STEPS == STEPS;
  using TileKeys = PanelTile<T::TILE_N, DEPTH>;     // K or V
  using TileQueries = PanelTile<T::TILE_M, DEPTH>;  // Q or dO
  using TileInput = PanelTile<T::TILE_M, WIDTH>;    // dO or Q
  using WeightsPlace = RingPlace<T::WEIGHT_STAGES>;
  using PlaceQ = RingPlace<T::Q_STAGES>;
  using PlaceDout = RingPlace<T::DOUT_STAGES>;
  static constexpr bool IS_MODIFIED = OF_V && HAS_SCORE<typename T::Score>;  // it makes weights of an expression's scores
  static constexpr bool STORES_DS = !OF_V && T::STORES_DS;

 public:
  DEVICE explicit GradientWarpgroup(const typename T::Params& params) : params_(params) {}

  // Tile after tile.
  DEVICE void run() {
    for (begin(); !tile_.is_none(); begin()) {
      const Blocks blocks = query_blocks<T>(params_, tile_);
      int steps = count_steps<T>(params_, blocks);
      if constexpr (T::LISTED) steps = tile_.end_step;
#pragma unroll
      for (float& element : gradient_) element = 0.0f;
      if constexpr (!OF_V) await_v();
      if (steps > 0)
        walk(blocks, steps);
      else
        release_keys();
      place_.advance();
      write();
    }
    if constexpr (STORES_DS) tma_store_wait_read<0>();
  }

 private:
  // The next tile, and its K.
  DEVICE void begin() {
    Shared::ring_k().await_full(place_);
    tile_ = load_key_tile<T>(Shared::tile_place(0));
    if (tile_.is_none()) return;
    if constexpr (OF_V && KEPT_STEPS > 0) read_rows<TileKeys, KEPT_STEPS>(kept_, Shared::k(0), warp_row_again);
    if constexpr (!OF_V || KEEPS_KEYS) Shared::ring_k().release_apart(0);  // of dK: only the tile was read
  }

  DEVICE void await_v() {
    Shared::ring_v().await_full(place_);
    if constexpr (KEPT_STEPS > 0) read_rows<TileKeys, KEPT_STEPS>(kept_, Shared::v(), warp_row_again);
    if constexpr (KEEPS_KEYS) Shared::ring_v().release_apart(0);
  }

  // K, or V, is used no more in this tile.
  DEVICE void release_keys() {
    if constexpr (KEEPS_KEYS) return;
    if constexpr (OF_V)
      Shared::ring_k().release(0);
    else
      Shared::ring_v().release(0);
  }

  DEVICE void walk(const Blocks& blocks, int steps) {
    block_ = blocks.begin;
    if constexpr (IS_MODIFIED && !T::LISTED) this->head = tile_.head_kv * params_.backward.group % params_.backward.heads_q;
    if constexpr (STORES_DS)
      ds_ = ds_image<T>(params_, tile_.head_kv * params_.backward.group, tile_.first_key / T::TILE_N, block_);
    make_products(steps_);
    weigh(blocks);
    pack();
    for (int left = steps - 1; left > 0; --left) step(blocks);
    add_gradient();
    release_keys();
    if constexpr (STORES_DS) hand_over_ds();
    wgmma_wait<0>();
    release_gradient_input(steps_++);
  }

  // Its operand is there; that of the next step is, afterwards.
  DEVICE void step(const Blocks& blocks) {
    add_gradient();
    make_products(steps_ + 1);
    if constexpr (STORES_DS) hand_over_ds();
    wgmma_wait<1>();
    release_gradient_input(steps_);
    advance(blocks);
    weigh(blocks);
    pack();
  }

  DEVICE void advance(const Blocks& blocks) {
    ++steps_;
    if constexpr (STORES_DS) {
      const BackwardParams& backward = params_.backward;
      const int64 of_head = static_cast<int64>(backward.tiles_kv) * (2 * backward.tiles_q_own);
      ds_ += (block_ + 1 == blocks.end ? of_head - (blocks.end - 1 - blocks.begin) : 1) * DS_IMAGE_BYTES;
    }
    if constexpr (T::LISTED) return;
    else if constexpr (IS_MODIFIED) this->head += block_ + 1 == blocks.end;
    if (++block_ == blocks.end) block_ = blocks.begin;  // of the next head
  }

  // Scores to P^T, or dP to dS^T, when they are there.
  DEVICE void weigh(const Blocks& blocks) {
    bool is_full = block_ >= blocks.full_begin && block_ < blocks.full_end;
    if constexpr (HAS_SCORE<typename T::Score> && !T::LISTED)
      is_full &= (block_ + 1) * T::TILE_M <= count_queries(params_.backward, tile_.sequence);
    if constexpr (OF_V) {
      const int slot = PlaceQ::of(steps_).slot;
      if constexpr (T::LISTED) is_full = take_step(slot);
      const QueryStatistics<T> lse(Shared::lse(slot));
      wgmma_wait<0>();
      if constexpr (IS_MODIFIED)
        weigh_modified(lse);
      else
        exponentiate<T>(products_, params_.backward.score_factor, lse);
      Shared::ring_q().release(slot);
      if (!is_full) mask();
    } else {
      const auto place_q = PlaceQ::of(steps_);
      Shared::ring_q().await_full(place_q);
      if constexpr (T::LISTED) is_full = take_step(place_q.slot);
      const QueryStatistics<T> delta(Shared::delta(place_q.slot));
      const auto place = WeightsPlace::of(steps_);
      Shared::ring_weights().await_full(place);
      Chunk weights[T::QUERY_STEPS];
      const auto load = [&](int i) { weights[i] = load_shared_16(weights_place(place.slot, i)); };
#pragma unroll
      for (int i = 0; !T::IS_CROWDED && i < T::QUERY_STEPS; ++i) load(i);
      if constexpr (!T::IS_CROWDED) Shared::ring_weights().release(place.slot);
      wgmma_wait<0>();
      Shared::ring_dout().release(PlaceDout::of(steps_).slot);
      // An overflow where the weight is 0 would be NaN. With an expression weights are of any size there: what comes of them
      // is masked. So are statistics of queries that another sequence has in the tile.
      if (!T::MASKS_LATE && !is_full) mask();
#pragma unroll
      for (int i = 0; i < T::QUERY_STEPS; ++i) {
        if constexpr (T::IS_CROWDED) load(i);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int low = 8 * i + 2 * w, high = low + 1;
          products_[low] = unpack_low<E>(weights[i].word[w]) * (products_[low] - delta.of(low));
          products_[high] = unpack_high<E>(weights[i].word[w]) * (products_[high] - delta.of(high));
        }
      }
      if constexpr (T::IS_CROWDED) Shared::ring_weights().release(place.slot);
      if (T::MASKS_LATE && !is_full) mask();
    }
  }

  // With lists: what the step of a slot of Q is of. True if no element of it is hidden.
  DEVICE bool take_step(int slot) {
    this->at = ListedStep::load(Shared::step_of_q(slot));
    if (!this->at.tile.is_masked()) return true;
    const BackwardParams& backward = params_.backward;
    const HeadScores<typename T::Score> head(params_.aux, count_queries(backward, tile_.sequence), count_keys(backward, tile_.sequence),
                                             tile_.number, own_head());
    this->hidden = find_hidden<T>(params_, tile_, head, this->at, first_key());
    return false;
  }

  // The query head in its batch entry, and the first query, of the block that the weights are of.
  DEVICE int own_head() const {
    if constexpr (T::LISTED) return this->at.head_of_entry;
    else return this->head;
  }
  DEVICE int first_query() const {
    if constexpr (T::LISTED) return first_query_in<typename T::Blocked, T::TILE_M>(tile_.sequence, this->at.tile.tile());
    else return block_ * T::TILE_M;
  }

  // P^T of an expression's scores. To the warpgroup of dK goes P^T times the slope; it masks what comes of that.
  DEVICE void weigh_modified(const QueryStatistics<T>& lse) {
    const BackwardParams& backward = params_.backward;
    const HeadScores<typename T::Score> head(params_.aux, count_queries(backward, tile_.sequence),
                                             count_keys(backward, tile_.sequence), tile_.number, own_head());
    const auto place = WeightsPlace::of(steps_);
    Shared::ring_weights().await_empty(place);
    const int first_query = this->first_query() + accumulator_column(0), first = first_key() + accumulator_row(0);
#pragma unroll
    for (int i = 0; i < T::QUERY_STEPS; ++i) {
      Chunk sent;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float sloped[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int e = 8 * i + 2 * w + odd, query = first_query + e / 4 * 8 + odd;
          products_[e] = head.weight_of_seen(products_[e], query, {first, w % 2 * 8}, lse.of(e), sloped[odd]);
        }
        sent.word[w] = multiattn::pack<E>(sloped[0], sloped[1]);
      }
      store_shared_16(weights_place(place.slot, i), sent);
    }
    send_weights(place);
  }

  // P^T or dS^T as operand A, and P^T to the warpgroup of dK.
  DEVICE void pack() {
    pack_operand<E>(operand_, products_);
    if constexpr (OF_V && !IS_MODIFIED) {
      const auto place = WeightsPlace::of(steps_);
      Shared::ring_weights().await_empty(place);
#pragma unroll
      for (int i = 0; i < T::QUERY_STEPS; ++i)
        store_shared_16(weights_place(place.slot, i),
                        {operand_[i][0], operand_[i][1], operand_[i][2], operand_[i][3]});
      send_weights(place);
    }
    if constexpr (STORES_DS) place_ds();
  }

  // dS^T to the buffer that the store before the last has read: 16 keys of each warp, which stores them for itself.
  DEVICE void place_ds() const {
    if (thread_index() % WARP == 0) tma_store_wait_read<T::DS_BUFFERS - 1>();
    sync_warp();
    const auto fragments = FragmentReader<typename T::TileDS::Panel>::down();
    const SharedAddress rows = recomputed(Shared::ds_to_store(steps_ % T::DS_BUFFERS));
#pragma unroll
    for (int i = 0; i < T::QUERY_STEPS; ++i) stmatrix_x4(fragments.address(rows, warp_row_again(), i * 16), operand_[i]);
  }
  // While products are made, as the fence takes long.
  DEVICE void hand_over_ds() const {
    fence_async_shared();
    sync_warp();  // all lanes have written
    const int own = warp_row_again() * T::TileDS::ROW_BYTES;
    bulk_store_if(thread_index() % WARP == 0, ds_ + own, Shared::ds_to_store(steps_ % T::DS_BUFFERS) + own,
                  16 * T::TileDS::ROW_BYTES);
    tma_store_commit();
  }

  static DEVICE void send_weights(const WeightsPlace& place) {
    sync_warp();  // all lanes have written
    mbarrier_arrive_if(thread_index() % WARP == 0, Shared::ring_weights().full(place.slot));
  }

  // A thread of dK has the same part of the weights as one of dV.
  static DEVICE SharedAddress weights_place(int slot, int i) {
    return Shared::weights(slot) + i * WARPGROUP * CHUNK_BYTES + thread_index() % WARPGROUP * CHUNK_BYTES;
  }

  DEVICE void mask() {
    if constexpr (T::LISTED) {
      clear_hidden<T>(products_, this->hidden);
    } else {
      const Mask<T::BAND> mask = mask_of<T::BAND>(params_.backward, tile_.sequence);
      mask_transposed<T>(products_, mask, first_key(), block_ * T::TILE_M);
    }
  }

  // The operands of a step's gradient are used no more.
  DEVICE void release_gradient_input(uint32 step) {
    if constexpr (OF_V)
      Shared::ring_dout().release(PlaceDout::of(step).slot);
    else
      Shared::ring_q().release(PlaceQ::of(step).slot);
  }

  // ---- products, left under way
  // scores^T[64, TILE_M] = K Q^T, or dP^T = V dO^T, of a step
  DEVICE void make_products(uint32 step) {
    if constexpr (OF_V) {
      const auto place = PlaceQ::of(step);
      Shared::ring_q().await_full(place);
      multiply(Shared::k(0), Shared::q(place.slot));
    } else {
      const auto place = PlaceDout::of(step);
      Shared::ring_dout().await_full(place);
      multiply(Shared::v(), Shared::dout(place.slot));
    }
  }

  DEVICE void multiply(SharedAddress keys, SharedAddress queries) {
    multiply_rows<E, T::TILE_M, TileKeys, TileQueries, KEPT_STEPS>(products_, kept_, keys, queries);
  }

  // dV[64, HEAD_DIM_V] += P^T dO, or dK[64, HEAD_DIM] += dS^T Q, of this step
  DEVICE void add_gradient() {
    SharedAddress queries;
    if constexpr (OF_V) {
      const auto place = PlaceDout::of(steps_);
      Shared::ring_dout().await_full(place);
      queries = Shared::dout(place.slot);
    } else {
      queries = Shared::q(PlaceQ::of(steps_).slot);
    }
    add_product<E, WIDTH, TileInput>(gradient_, operand_, queries);
  }

  // The gradient of the warp's keys.
  DEVICE void write() const {
    const BackwardParams& backward = params_.backward;
    const KeySequence<SequenceOf<T>> keys{backward, tile_.head_kv, tile_.sequence};
    int end = count_keys(backward, tile_.sequence);
    if constexpr (IS_CUT<typename T::Blocked>)
      end = end_of_keys<typename T::Blocked, T::TILE_N>(backward, tile_.sequence, tile_.first_key);
    const int rows = end - first_key();
    const int64 stride = OF_V ? backward.strides_dv.seq : backward.strides_dk.seq;
    uint16* const target = (OF_V ? keys.dv() : keys.dk()) + first_key() * stride;
    write_rows<E>(target, stride, rows, gradient_, OF_V ? 1.0f : backward.grad_factor);
  }

  // The first of this warp's keys.
  DEVICE int first_key() const { return tile_.first_key + warp_row_again(); }

  const typename T::Params& params_;
  KeyTile<T> tile_;
  RingPlace<1> place_;  // of K and of V
  uint32 steps_ = 0;    // before this one, of all tiles
  int block_;           // that the products are of
  char* ds_ = nullptr;  // where its dS^T is stored
  float products_[T::TILE_M / 2];     // scores, weights or dP^T [64, TILE_M]
  uint32 operand_[T::QUERY_STEPS][4];  // P^T or dS^T
  float gradient_[WIDTH / 2];  // [64, WIDTH]
  Fragment kept_[STEPS];
};

template <class T>
DEVICE void backward_wgmma_keys(const typename T::Params& params) {
  run_pass<T, TwoPassKeysShared<T>, GradientWarpgroup<T, true>, GradientWarpgroup<T, false>, BackwardProducer<T>>(params);
}

}  // namespace multiattn
