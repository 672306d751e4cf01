// P and dS of heads wider than 256, for sm90: TMA, wgmma, warp specialisation. backward_wgmma_wide_products.cuh makes the gradients
// of them.
//
// A gradient of 64 rows and 512 columns is more than the registers of a warpgroup, and there are three. So nothing is summed here: a
// block makes tile after tile of scores, 128 queries and TILE_N keys, then dP of the same tile in the same accumulators, and stores
// both, rounded as operands are. Q and K, then dO and V come 64 columns at a time. Two warpgroups have 64 queries each; a third
// loads.
#pragma once
#include "backward_wgmma_producer.cuh"
#include "multiattn/softmax.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

struct WideScoresConfig {
  int tile_n;  // keys of a tile
  int stages;  // pieces in shared memory, of 64 columns of queries and of keys
};

template <class Element, Features F, WideScoresConfig C, class Score, class Blocked>
struct WideScoresTraits : Walks<Element, F, WgmmaBackwardParams, Score, Blocked> {
  static constexpr int WARPGROUPS = 2, THREADS = WARPGROUP * (WARPGROUPS + 1), GROUP_WARPS = WARPGROUP / WARP;
  static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
  static constexpr int TILE_M = 64, TILE_N = C.tile_n, STAGES = C.stages;  // TILE_M: queries of a warpgroup
  static constexpr int BLOCK_ROWS = TILE_M * WARPGROUPS, BOX_ROWS = 64;
  static constexpr int KEY_STEPS = TILE_N / 16, DIM_STEPS = (F.head_dim + 15) / 16, V_STEPS = (F.head_dim_v + 15) / 16;  // of a wgmma
  static constexpr int TURNS = 0, STATISTICS = 2;  // lse and delta

  using PieceQ = PanelTile<BLOCK_ROWS, 64>;
  using PieceK = PanelTile<TILE_N, 64>;
  using Image = PanelTile<64, 64>;
  static constexpr int STAGE_BYTES = PieceQ::BYTES + PieceK::BYTES, IMAGES = TILE_N / 64;  // of 64 queries
  static constexpr int BOX_BYTES = BOX_ROWS * PieceQ::ROW_BYTES, BOXES = STAGE_BYTES / BOX_BYTES;

  // Shared memory: pieces, images of both warpgroups that leave, barriers.
  static constexpr int BUFFERS = 2;
  static constexpr int IMAGES_AT = STAGES * STAGE_BYTES;
  static constexpr int BARRIERS_AT = IMAGES_AT + WARPGROUPS * BUFFERS * Image::BYTES;
  static constexpr int SMEM_BYTES = BARRIERS_AT + 512;

  static_assert(F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0, "head_dim, head_dim_v: multiples of 8");
  static_assert(TILE_N == 128 || TILE_N == 256, "tile_n: 128, 256");
  static_assert(STAGES >= 2 && STAGES <= 8, "stages: 2 to 8");
  static_assert(BLOCK_ROWS == Images::TILE_ROWS && Image::BYTES == DS_IMAGE_BYTES, "images as they are stored");
};

template <class T>
struct WideScoresShared {
  static DEVICE SharedAddress queries(int slot) { return shared_base() + slot * T::STAGE_BYTES; }
  static DEVICE SharedAddress keys(int slot) { return queries(slot) + T::PieceQ::BYTES; }
  static DEVICE SharedAddress image(int group, int buffer) {
    return shared_base() + T::IMAGES_AT + (group * T::BUFFERS + buffer) * T::Image::BYTES;
  }
  static DEVICE Ring<T::STAGES> ring() { return {shared_base() + T::BARRIERS_AT}; }
  static DEVICE void init() {
    ring().init(T::WARPGROUPS * T::GROUP_WARPS);
    fence_mbarrier_init();
  }
};

// A tile of scores: of a query head, which counts among those of the launch, the first query, and the number of its keys' tile.
struct ScoreTile {
  int head, first_query, keys;
  DEVICE bool is_none() const { return head == NO_TILE; }
};

// The tiles of a block: every n-th of all where a query sees a key. Those of eight neighbouring tiles of queries come before the next
// tile of keys: what 132 blocks read at a time stays in L2.
template <class T>
class ScoreTiles {
  static constexpr int NEIGHBOURS = 8;

 public:
  DEVICE explicit ScoreTiles(const typename T::Params& params) : params_(params), index_(static_cast<int>(block_index())) {}

  DEVICE ScoreTile next() {
    const StoredProducts& stored = params_.lists;
    const int columns = params_.backward.tiles_kv, of_head = stored.tiles * columns;
    const int all = of_head * stored.heads * params_.backward.group;
    while (index_ < all) {
      const int head = index_ / of_head, within = index_ % of_head;
      const int first = within / (NEIGHBOURS * columns) * NEIGHBOURS, rows = min(NEIGHBOURS, stored.tiles - first);
      const int left = within - first * columns, keys = left / rows, tile = stored.first_tile + first + left % rows;
      index_ += static_cast<int>(block_count());
      const auto seen = Mask<T::BAND>(params_.backward).template keys<T::TILE_N>(tile * T::BLOCK_ROWS, T::BLOCK_ROWS);
      if (keys >= seen.begin && keys < seen.end) return {head, tile * T::BLOCK_ROWS, keys};
    }
    return {NO_TILE, 0, 0};
  }

 private:
  const typename T::Params& params_;
  int index_;
};

// The query head of a launch's, through the batch.
template <class T>
DEVICE int query_head_of(const typename T::Params& params, int head) {
  return params.lists.first_head * params.backward.group + head;
}

template <class T>
class WideScoresProducer {
  using Shared = WideScoresShared<T>;

 public:
  DEVICE explicit WideScoresProducer(const typename T::Params& params) : params_(params) {}

  DEVICE void run() {
    admit_next_grid();
    await_earlier_grids();  // tensors and statistics are touched only after this, and images of an earlier launch
    ScoreTiles<T> tiles(params_);
    for (ScoreTile tile = tiles.next(); !tile.is_none(); tile = tiles.next()) {
      load(params_.map_q, params_.map_k, tile, T::DIM_STEPS);
      load(params_.map_dout, params_.map_v, tile, T::V_STEPS);
    }
  }

 private:
  DEVICE void load(const TensorMap& of_queries, const TensorMap& of_keys, const ScoreTile& tile, int steps) {
    const BackwardParams& backward = params_.backward;
    const int head = query_head_of<T>(params_, tile.head), number = head / backward.heads_q, of_entry = head % backward.heads_q;
#pragma unroll 1
    for (int column = 0; column < steps * 16; column += 64) {
      Shared::ring().await_empty(place_);
      const SharedAddress barrier = Shared::ring().full(place_.slot);
      mbarrier_arrive_expect(barrier, T::STAGE_BYTES);
#pragma unroll 1
      for (int box = 0; box < T::BOXES; ++box) {
        const bool is_of_queries = box < T::WARPGROUPS;
        const int row = is_of_queries ? tile.first_query + box * T::BOX_ROWS
                                      : tile.keys * T::TILE_N + (box - T::WARPGROUPS) * T::BOX_ROWS;
        tma_load(Shared::queries(place_.slot) + box * T::BOX_BYTES, is_of_queries ? of_queries : of_keys, barrier, column, row,
                 is_of_queries ? of_entry : of_entry / backward.group, number);
      }
      place_.advance();
    }
  }

  const typename T::Params& params_;
  RingPlace<T::STAGES> place_;
};

// A warpgroup of queries.
template <class T, int GROUP>
class WideScoresWarpgroup {
  using E = typename T::Element;
  using Shared = WideScoresShared<T>;

 public:
  DEVICE explicit WideScoresWarpgroup(const typename T::Params& params) : params_(params) {}

  // Images leave while the next products are made.
  DEVICE void run() {
    ScoreTiles<T> tiles(params_);
    int before = NO_TILE;  // the place of the tile's images
    for (tile_ = tiles.next(); !tile_.is_none(); tile_ = tiles.next()) {
      multiply<T::DIM_STEPS>([&](int image) { store(params_.lists.ds, before, image, weights_ + 4 * image); });
      before = place_of_images();
      read_statistics();
      if constexpr (HAS_SCORE<typename T::Score>) {
        weigh_modified();
#pragma unroll
        for (int image = 0; image < T::IMAGES; ++image) store_sums(image);
        multiply<T::V_STEPS>([](int) {});
      } else {
        weigh();
        multiply<T::V_STEPS>([&](int image) { store(params_.lists.weights, before, image, weights_ + 4 * image); });
      }
      make_ds();
    }
#pragma unroll
    for (int image = 0; image < T::IMAGES; ++image) store(params_.lists.ds, before, image, weights_ + 4 * image);
    if (lane() == 0) tma_store_wait_read<0>();
  }

 private:
  // sums[64, TILE_N] = Q K^T or dO V^T; `store` is called for each image while it is made.
  template <int STEPS, class Store>
  DEVICE void multiply(Store store) {
    constexpr int PIECES = (STEPS + 3) / 4;
    int before = 0;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      Shared::ring().await_full(place_);
      const Descriptor a(Shared::queries(place_.slot) + GROUP * T::BOX_BYTES, 16), b(Shared::keys(place_.slot), 16);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4 && 4 * piece + i < STEPS; ++i)
        wgmma_ss<E, T::TILE_N>(sums_, a.at(i * 32), b.at(i * 32), piece + i > 0);
      wgmma_commit();
#pragma unroll
      for (int image = piece; image < T::IMAGES && (image == piece || piece == PIECES - 1); ++image) store(image);
      if (piece > 0) {
        wgmma_wait<1>();
        Shared::ring().release(before);
      }
      before = place_.slot;
      place_.advance();
    }
    wgmma_wait<0>();
    Shared::ring().release(before);
  }

  // lse and delta of the thread's two queries. One that is not there weighs nothing.
  DEVICE void read_statistics() {
    const float* const list =
        statistics_of<T>(params_, query_head_of<T>(params_, tile_.head), 0, {}, first_query() / T::TILE_M);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row_again() + accumulator_row(2 * half);
      const bool is_there = first_query() + row < params_.backward.seq_q;
      lse_[half] = is_there ? load_global_4(list + statistic_place(row)) : infinity();
      delta_[half] = is_there ? load_global_4(list + statistic_place(row) + T::TILE_M) : 0.0f;
    }
  }

  // Scores to P, exp2(score - lse) with both in the log2 domain.
  DEVICE void weigh() {
    const float factor = params_.backward.score_factor;
#pragma unroll
    for (int i = 0; i < T::TILE_N / 2; ++i) sums_[i] = exp2_approx(fmaf(sums_[i], factor, -lse_[i / 2 % 2]));
    if (!is_full()) mask();
    pack_operand<E>(weights_, sums_);
  }

  // Scores of an expression to P; `weights_` has P times its slope.
  DEVICE void weigh_modified() {
    const BackwardParams& backward = params_.backward;
    const int head = query_head_of<T>(params_, tile_.head), row = first_query() + warp_row_again();
    const HeadScores<typename T::Score> scores(params_.aux, backward.seq_q, backward.seq_kv, head / backward.heads_q,
                                               head % backward.heads_q);
#pragma unroll
    for (int pair = 0; pair < T::TILE_N / 4; ++pair) {
      float sloped[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int i = 2 * pair + odd;
        const Position key(first_key() + accumulator_column(0), i / 4 * 8 + odd);
        sums_[i] = scores.weight_of_seen(sums_[i], row + accumulator_row(i % 4), key, lse_[pair % 2], sloped[odd]);
      }
      weights_[pair / 4][pair % 4] = pack<E>(sloped[0], sloped[1]);
    }
    if (!is_full()) mask();
  }

  // dP to dS = P * (dP - delta), in `weights_`. What the mask hides is 0 whatever comes of it.
  DEVICE void make_ds() {
#pragma unroll
    for (int pair = 0; pair < T::TILE_N / 4; ++pair) {
      const uint32 weights = weights_[pair / 4][pair % 4];
      const float delta = delta_[pair % 2];
      sums_[2 * pair] = unpack_low<E>(weights) * (sums_[2 * pair] - delta);
      sums_[2 * pair + 1] = unpack_high<E>(weights) * (sums_[2 * pair + 1] - delta);
    }
    if (!is_full()) mask();
    pack_operand<E>(weights_, sums_);
  }

  // True if all queries of the warpgroup see all keys of the tile. With an expression those beyond the end count, too.
  DEVICE bool is_full() const {
    const BackwardParams& backward = params_.backward;
    const auto seen = Mask<T::BAND>(backward).template keys<T::TILE_N>(first_query(), T::TILE_M);
    const bool are_there = !HAS_SCORE<typename T::Score> || first_query() + T::TILE_M <= backward.seq_q;
    return are_there && tile_.keys >= seen.full_begin && tile_.keys < seen.full_end;
  }

  // 0 in place of what the mask hides.
  DEVICE void mask() {
    const Mask<T::BAND> mask(params_.backward);
    const int first_row = first_query() + warp_row_again();
#pragma unroll
    for (int i = 0; i < T::TILE_N / 2; ++i) {
      const int query = first_row + accumulator_row(i % 4), key = first_key() + i / 4 * 8 + accumulator_column(i % 4);
      const bool is_beyond = HAS_SCORE<typename T::Score> && query >= mask.seq_q;
      if (is_beyond || !mask.visible(query, key)) sums_[i] = 0.0f;
    }
  }

  // ---- images: 16 rows of each warp, which stores them for itself
  DEVICE int place_of_images() const {
    const StoredProducts& stored = params_.lists;
    const int queries = first_query() / Images::ROWS - 2 * stored.first_tile;
    return Images(stored, params_.backward.tiles_kv, T::TILE_N).place(tile_.head, queries, tile_.keys * T::IMAGES);
  }

  // Steps of an image, by the buffer that the store before the last has read. NO_TILE: nobody wants it.
  DEVICE void store(void* images, int place, int image, const uint32 (*steps)[4]) const {
    const SharedAddress buffer = Shared::image(GROUP, image % T::BUFFERS);
    if (lane() == 0) tma_store_wait_read<T::BUFFERS - 1>();
    sync_warp();
    const auto fragments = FragmentReader<typename T::Image::Panel>::down();
#pragma unroll
    for (int i = 0; i < 4; ++i) stmatrix_x4(fragments.address(buffer, warp_row_again(), i * 16), steps[i]);
    fence_async_shared();
    sync_warp();  // all lanes have written
    const int own = warp_row_again() * T::Image::ROW_BYTES;
    bulk_store_if(lane() == 0 && place != NO_TILE, static_cast<char*>(images) + static_cast<int64>(place + image) * T::Image::BYTES + own, buffer + own,
                  16 * T::Image::ROW_BYTES);
    tma_store_commit();
  }

  // P of an expression, which is not what `weights_` has.
  DEVICE void store_sums(int image) const {
    uint32 packed[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i / 4][i % 4] = pack<E>(sums_[32 * image + 2 * i], sums_[32 * image + 2 * i + 1]);
    store(params_.lists.weights, place_of_images(), image, packed);
  }

  static DEVICE int lane() { return thread_index() % WARP; }
  DEVICE int first_query() const { return tile_.first_query + GROUP * T::TILE_M; }
  DEVICE int first_key() const { return tile_.keys * T::TILE_N; }

  const typename T::Params& params_;
  RingPlace<T::STAGES> place_;
  ScoreTile tile_;
  float lse_[2], delta_[2];
  float sums_[T::TILE_N / 2];        // [64, TILE_N]: scores, P, dP or dS
  uint32 weights_[T::KEY_STEPS][4];  // P, times the slope of an expression
};

template <class T>
DEVICE void backward_wide_scores(const typename T::Params& params) {
  const int warpgroup = begin_block<WideScoresShared<T>>(params, T::WARPGROUPS * WARPGROUP);
  if (warpgroup < T::WARPGROUPS) {
    raise_registers<T::CONSUMER_REGISTERS>();
    if (warpgroup == 0) WideScoresWarpgroup<T, 0>(params).run();
    else WideScoresWarpgroup<T, 1>(params).run();
  } else {
    lower_registers<T::PRODUCER_REGISTERS>();
    if (thread_index() % WARPGROUP == 0) WideScoresProducer<T>(params).run();
  }
}

}  // namespace multiattn
