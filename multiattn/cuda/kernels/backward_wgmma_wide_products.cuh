// The gradients of heads wider than 256, for sm90, from P and dS that backward_wgmma_wide_scores.cuh has stored: dQ = dS K,
// dK = dS^T Q and dV = P^T dO, a plain product each.
//
// A block owns 128 rows of a gradient, 64 a warpgroup, and up to 256 of its columns. It walks over the rows of K, Q or dO that they are
// made of, 64 at a time. A third warpgroup loads those, and images of dS or P as they lie in memory.
#pragma once
#include "backward_wgmma_output.cuh"
#include "backward_wgmma_producer.cuh"
#include "wgmma_products.cuh"

namespace multiattn {

struct WideProductsConfig {
  int tile_n;  // keys of a tile of scores
  int stages;  // steps in shared memory
};

template <class Element, Features F, WideProductsConfig C, class Score, class Blocked>
struct WideProductsTraits : Walks<Element, F, WgmmaBackwardParams, Score, Blocked> {
  static constexpr int WARPGROUPS = 2, THREADS = WARPGROUP * (WARPGROUPS + 1), GROUP_WARPS = WARPGROUP / WARP;
  static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
  static constexpr int SCORE_TILE_N = C.tile_n, STAGES = C.stages;
  static constexpr int TILE_ROWS = 64 * WARPGROUPS, STEP_ROWS = 64;  // of a block; of a step

  // The columns of a gradient are divided among as many blocks: as many each, whole panels.
  static constexpr int PARTS_K = (F.head_dim + 255) / 256, PARTS_V = (F.head_dim_v + 255) / 256;
  static constexpr int COLUMNS_K = (F.head_dim + 64 * PARTS_K - 1) / (64 * PARTS_K) * 64;
  static constexpr int COLUMNS_V = (F.head_dim_v + 64 * PARTS_V - 1) / (64 * PARTS_V) * 64;
  static constexpr int COLUMNS = COLUMNS_K > COLUMNS_V ? COLUMNS_K : COLUMNS_V;

  using Image = PanelTile<64, 64>;
  using TileK = PanelTile<STEP_ROWS, COLUMNS_K>;
  using TileV = PanelTile<STEP_ROWS, COLUMNS_V>;
  static constexpr int IMAGE_BYTES = WARPGROUPS * Image::BYTES;
  static constexpr int STAGE_BYTES = IMAGE_BYTES + COLUMNS / 64 * TileK::PANEL_BYTES;
  static constexpr int BARRIERS_AT = STAGES * STAGE_BYTES, SMEM_BYTES = BARRIERS_AT + 512;

  static_assert(F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0, "head_dim, head_dim_v: multiples of 8");
  static_assert(STAGES >= 2 && STAGES <= 8, "stages: 2 to 8");
  static_assert(TILE_ROWS == Images::TILE_ROWS && Image::BYTES == DS_IMAGE_BYTES, "images as they are stored");
};

template <class T>
struct WideProductsShared {
  static DEVICE SharedAddress images(int slot) { return shared_base() + slot * T::STAGE_BYTES; }
  static DEVICE SharedAddress rows(int slot) { return images(slot) + T::IMAGE_BYTES; }
  static DEVICE Ring<T::STAGES> ring() { return {shared_base() + T::BARRIERS_AT}; }
  static DEVICE void init() {
    ring().init(T::WARPGROUPS * T::GROUP_WARPS);
    fence_mbarrier_init();
  }
};

enum class WideGradient { DQ, DK, DV };

// The work of a block: some rows and columns of a gradient, by a walk over blocks of 64 rows of the other side, head by head.
template <class T>
struct WideShare {
  WideGradient gradient;
  int head;         // of queries for dQ, else of keys; it counts among those of the launch
  int tile, part;   // of TILE_ROWS rows, of columns
  int begin, end;   // blocks of the walk
  int heads;        // of queries, that the walk is made for

  // Shares of dK and dV come before those of dQ, and of each head longer ones before shorter ones. Heads come one after another: what
  // the shares of one read stays in L2.
  static DEVICE WideShare of(const typename T::Params& params, int index) {
    const BackwardParams& backward = params.backward;
    const StoredProducts& stored = params.lists;
    const Mask<T::BAND> mask(backward);
    constexpr int OF_KEYS = T::PARTS_K + T::PARTS_V;
    const int keys = shares_of_keys(params);
    WideShare share{};
    if (index < keys) {
      const int part = index % OF_KEYS, tile = index / OF_KEYS;
      share.gradient = part < T::PARTS_K ? WideGradient::DK : WideGradient::DV;
      share.part = part < T::PARTS_K ? part : part - T::PARTS_K;
      const int tiles = (backward.seq_kv + T::TILE_ROWS - 1) / T::TILE_ROWS;
      share.head = tile / tiles, share.tile = tile % tiles;
      share.heads = backward.group;
      const int all = (backward.seq_q + T::STEP_ROWS - 1) / T::STEP_ROWS;
      const Blocks seen = mask.template queries<T::STEP_ROWS>(share.first_row(), T::TILE_ROWS, all);
      share.begin = max(seen.begin, 2 * stored.first_tile);
      share.end = min(seen.end, 2 * (stored.first_tile + stored.tiles));
    } else {
      const int tile = (index - keys) / T::PARTS_K;
      share.gradient = WideGradient::DQ;
      share.part = (index - keys) % T::PARTS_K;
      share.head = tile / stored.tiles, share.tile = stored.first_tile + stored.tiles - 1 - tile % stored.tiles;
      share.heads = 1;
      const Blocks seen = mask.template keys<T::STEP_ROWS>(share.first_row(), T::TILE_ROWS);
      share.begin = seen.begin, share.end = seen.end;
    }
    share.end = max(share.begin, share.end);
    return share;
  }
  static DEVICE int shares_of_keys(const typename T::Params& params) {
    return (params.backward.seq_kv + T::TILE_ROWS - 1) / T::TILE_ROWS * params.lists.heads * (T::PARTS_K + T::PARTS_V);
  }

  DEVICE int first_row() const { return tile * T::TILE_ROWS; }
  DEVICE int steps() const { return (end - begin) * heads; }
};

template <class T>
class WideProductsProducer {
  using Shared = WideProductsShared<T>;

 public:
  DEVICE explicit WideProductsProducer(const typename T::Params& params) : params_(params) {}

  DEVICE void run(const WideShare<T>& share) {
    for (int head = 0; head < share.heads; ++head)
      for (int block = share.begin; block < share.end; ++block) load(share, head, block);
  }

 private:
  DEVICE void load(const WideShare<T>& share, int head, int block) {
    const BackwardParams& backward = params_.backward;
    const Images images(params_.lists, backward.tiles_kv, T::SCORE_TILE_N);
    const int first_image = 2 * params_.lists.first_tile;
    const SharedAddress target = Shared::images(place_.slot), rows = Shared::rows(place_.slot);
    Shared::ring().await_empty(place_);
    const SharedAddress barrier = Shared::ring().full(place_.slot);
    const bool is_of_v = share.gradient == WideGradient::DV;
    const int panels = is_of_v ? T::TileV::PANELS : T::TileK::PANELS;
    mbarrier_arrive_expect(barrier, T::IMAGE_BYTES + panels * T::TileK::PANEL_BYTES);
    const TensorMap* map;
    int row_head;  // through the batch
    if (share.gradient == WideGradient::DQ) {
      for (int group = 0; group < T::WARPGROUPS; ++group)
        load_images(target + group * T::Image::BYTES, params_.lists.ds,
                    images.place(share.head, 2 * share.tile + group - first_image, block), 1, barrier);
      map = &params_.map_k, row_head = params_.lists.first_head + share.head / backward.group;
    } else {
      const int query_head = share.head * backward.group + head;
      load_images(target, is_of_v ? params_.lists.weights : params_.lists.ds,
                  images.place(query_head, block - first_image, 2 * share.tile), T::WARPGROUPS, barrier);
      map = is_of_v ? &params_.map_dout : &params_.map_q, row_head = params_.lists.first_head * backward.group + query_head;
    }
    const int heads = share.gradient == WideGradient::DQ ? backward.heads_q / backward.group : backward.heads_q;
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel)
      tma_load(rows + panel * T::TileK::PANEL_BYTES, *map, barrier, (share.part * panels + panel) * T::TileK::PANEL_COLUMNS,
               block * T::STEP_ROWS, row_head % heads, row_head / heads);
    place_.advance();
  }

  static DEVICE void load_images(SharedAddress target, const void* images, int place, int count, SharedAddress barrier) {
    bulk_load(target, static_cast<const char*>(images) + static_cast<int64>(place) * T::Image::BYTES, count * T::Image::BYTES, barrier);
  }

  const typename T::Params& params_;
  RingPlace<T::STAGES> place_;
};

// 64 rows of a gradient.
template <class T, int GROUP, WideGradient OF>
class WideProductsWarpgroup {
  using E = typename T::Element;
  using Shared = WideProductsShared<T>;
  static constexpr int COLUMNS = OF == WideGradient::DV ? T::COLUMNS_V : T::COLUMNS_K;
  using Rows = PanelTile<T::STEP_ROWS, COLUMNS>;
  using Image = typename T::Image;

 public:
  DEVICE WideProductsWarpgroup(const typename T::Params& params, const WideShare<T>& share) : params_(params), share_(share) {}

  DEVICE void run() {
#pragma unroll
    for (float& element : sums_) element = 0.0f;
    walk(share_.steps());
    if constexpr (OF != WideGradient::DQ)
      if (params_.lists.turns > 1 && !add_turns()) return;
    write();
  }

 private:
  DEVICE void walk(int steps) {
    if (steps == 0) return;
    multiply();
#pragma unroll 1
    for (int left = steps - 1; left > 0; --left) {
      const int before = place_.slot;
      place_.advance();
      multiply();
      wgmma_wait<1>();
      Shared::ring().release(before);
    }
    wgmma_wait<0>();
  }

  // sums[64, COLUMNS] += rows of dS, or of dS^T or P^T, times rows of K, Q or dO, left under way.
  DEVICE void multiply() {
    Shared::ring().await_full(place_);
    const Descriptor a(Shared::images(place_.slot) + GROUP * Image::BYTES, OF == WideGradient::DQ ? 16 : Image::PANEL_BYTES);
    const Descriptor b(Shared::rows(place_.slot), Rows::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::STEP_ROWS / 16; ++i) {
      if constexpr (OF == WideGradient::DQ)
        wgmma_ss_k_mn<E, COLUMNS>(sums_, a.at(i * 32), b.at(i * 16 * Rows::ROW_BYTES), true);
      else
        wgmma_ss_mn<E, COLUMNS>(sums_, a.at(i * 16 * Image::ROW_BYTES), b.at(i * 16 * Rows::ROW_BYTES), true);
    }
    wgmma_commit();
  }

  // Adds what the turns before have left, and leaves the sums to the next one; true in the last turn.
  DEVICE bool add_turns() {
    const StoredProducts& stored = params_.lists;
    constexpr int STRIDE = T::WARPGROUPS * WARPGROUP * 4;
    float* own = stored.key_sums + static_cast<int64>(block_index()) * (T::COLUMNS / 8) * STRIDE + thread_index() * 4;
    const bool is_last = stored.turn + 1 == stored.turns;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 4, own += STRIDE) {
      const Chunk before = stored.turn > 0 ? load_global_16(own) : Chunk{};
#pragma unroll
      for (int e = 0; e < 4; ++e) sums_[i + e] += float_of_bits(before.word[e]);
      if (!is_last) store_global_16(own, chunk_of(sums_ + i));
    }
    return is_last;
  }

  DEVICE void write() const {
    const BackwardParams& backward = params_.backward;
    const StoredProducts& stored = params_.lists;
    if constexpr (OF == WideGradient::DQ) {
      const Strides& strides = strides_dq<T>(backward);
      const QuerySequence<NoSequence> queries{backward, stored.first_head * backward.group + share_.head, {}};
      write_to(queries.dq(strides), strides.seq, backward.seq_q, T::HEAD_DIM, backward.grad_factor);
    } else {
      const KeySequence<NoSequence> keys{backward, stored.first_head + share_.head, {}};
      if constexpr (OF == WideGradient::DK)
        write_to(keys.dk(), backward.strides_dk.seq, backward.seq_kv, T::HEAD_DIM, backward.grad_factor);
      else
        write_to(keys.dv(), backward.strides_dv.seq, backward.seq_kv, T::HEAD_DIM_V, 1.0f);
    }
  }
  DEVICE void write_to(uint16* gradient, int64 stride, int rows, int columns, float factor) const {
    const int row = share_.first_row() + GROUP * 64 + warp_row_again(), column = share_.part * COLUMNS;
    write_rows<E>(gradient + row * stride + column, stride, rows - row, sums_, factor, columns - column);
  }

  const typename T::Params& params_;
  const WideShare<T>& share_;
  RingPlace<T::STAGES> place_;
  float sums_[COLUMNS / 2];  // [64, COLUMNS]
};

template <class T, int GROUP>
DEVICE void make_share(const typename T::Params& params, const WideShare<T>& share) {
  if (share.gradient == WideGradient::DQ) WideProductsWarpgroup<T, GROUP, WideGradient::DQ>(params, share).run();
  else if (share.gradient == WideGradient::DK) WideProductsWarpgroup<T, GROUP, WideGradient::DK>(params, share).run();
  else WideProductsWarpgroup<T, GROUP, WideGradient::DV>(params, share).run();
}

template <class T>
DEVICE void backward_wide_products(const typename T::Params& params) {
  if (thread_index() == 0) {
    admit_next_grid();
    await_earlier_grids();  // images, and sums of the turn before, which a share with no step touches at once
  }
  const int warpgroup = begin_block<WideProductsShared<T>>(params, T::WARPGROUPS * WARPGROUP);
  const WideShare<T> share = WideShare<T>::of(params, static_cast<int>(block_index()));
  if (warpgroup < T::WARPGROUPS) {
    raise_registers<T::CONSUMER_REGISTERS>();
    if (warpgroup == 0) make_share<T, 0>(params, share);
    else make_share<T, 1>(params, share);
  } else {
    lower_registers<T::PRODUCER_REGISTERS>();
    if (thread_index() % WARPGROUP == 0) WideProductsProducer<T>(params).run(share);
  }
}

}  // namespace multiattn
