// The constants of the two kernels of sm90's backward in two passes, and their shared memory. Each rule of
// multiattn/cuda/backward_wgmma_two_pass.py about which of them go together has its static_assert here.
#pragma once
#include "backward_wgmma_traits.cuh"
#include "forward_wgmma_traits.cuh"

namespace multiattn {

// Sizes of a kernel of one pass: two warpgroups compute, one more loads.
struct PassSizes {
  static constexpr int WARPGROUPS = 2, GROUP_WARPS = 4, THREADS = WARPGROUP * (WARPGROUPS + 1), CLUSTER = 1;
  static constexpr int TILE_M = 64, TILE_N = 64, BLOCK_ROWS = TILE_M * WARPGROUPS;  // of a block that owns queries
  static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;           // of a thread; the three have 504
  static constexpr bool PAIRED = false;                           // all warpgroups of a block have one list
  static constexpr int GROUPS = 1, WARPGROUP_KEYS = TILE_N;
  static constexpr int TURNS = 0, STATISTICS = 2, STATISTICS_BYTES = STATISTICS * TILE_M * 4;  // lse and delta
};

// ---- dK and dV

struct TwoPassKeysConfig {
  int q_stages;     // tiles of Q in shared memory, with lse and delta of their queries
  int dout_stages;  // tiles of dO
  int kept_steps;   // of scores and dP, 16 columns each, where they have as many: K and V are read into registers once a tile
};

template <class Element, Features F, TwoPassKeysConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct TwoPassKeysTraits : Walks<Element, F, WgmmaBackwardParams, Score, Blocked>, PassSizes {
  static constexpr int K_STAGES = 1, Q_STAGES = C.q_stages, DOUT_STAGES = C.dout_stages;
  static constexpr bool DESCENDS = false;  // walks begin with the first queries
  static constexpr int QUERY_STEPS = TILE_M / 16, DIM_STEPS = (F.head_dim + 15) / 16, V_STEPS = (F.head_dim_v + 15) / 16;  // of a wgmma
  static constexpr int KEPT_K = C.kept_steps < DIM_STEPS ? C.kept_steps : DIM_STEPS, KEPT_V = C.kept_steps < V_STEPS ? C.kept_steps : V_STEPS;
  // No room for weights before dP is there.
  static constexpr bool IS_CROWDED = KEPT_V == V_STEPS && F.head_dim / 2 + 4 * V_STEPS > 120;

  using TileQ = PanelTile<TILE_M, F.head_dim>;
  using TileDout = PanelTile<TILE_M, F.head_dim_v>;
  using TileK = PanelTile<TILE_N, F.head_dim>;
  using TileV = PanelTile<TILE_N, F.head_dim_v>;
  using RingK = Ring<1>;
  using RingQ = Ring<Q_STAGES>;
  using RingDout = Ring<DOUT_STAGES>;
  static constexpr int WEIGHT_STAGES = 2, WEIGHT_BYTES = TILE_M * TILE_N * 2;
  static constexpr bool STORES_DS = IS_STORED<Blocked>;
  using TileDS = PanelTile<TILE_N, TILE_M>;  // of dS^T: rows are keys
  static constexpr int DS_BUFFERS = 2;
  using RingDS = Ring<WEIGHT_STAGES>;
  static constexpr bool ORDERED = false;
  static constexpr int SIDE_WARPS = 0;
  static constexpr bool LISTED = HAS_LISTS<Blocked>;  // a block mask lists the tiles of queries of a tile of keys
  static constexpr bool MASKS_LATE = HAS_SCORE<Score> || IS_CUT<Blocked>;  // what weights of any size, or statistics, come to
  static constexpr int STAGE_BARRIERS = LISTED ? RingQ::BYTES + RingDout::BYTES + RingDS::BYTES : 0;  // before what steps are of
  static constexpr int STEP_BYTES = LISTED ? Q_STAGES * CHUNK_BYTES : 0;

  // Shared memory: K, V, stages of Q, of dO, of weights, dS^T to be stored, statistics, then barriers and what the tile of keys is.
  static constexpr int V_AT = TileK::BYTES, Q_AT = V_AT + TileV::BYTES;
  static constexpr int DOUT_AT = Q_AT + Q_STAGES * TileQ::BYTES;
  static constexpr int WEIGHTS_AT = DOUT_AT + DOUT_STAGES * TileDout::BYTES;
  static constexpr int DS_AT = WEIGHTS_AT + WEIGHT_STAGES * WEIGHT_BYTES;
  static constexpr int STATISTICS_AT = DS_AT + STORES_DS * DS_BUFFERS * TileDS::BYTES;
  static constexpr int BARRIERS_AT = STATISTICS_AT + Q_STAGES * STATISTICS_BYTES;
  static constexpr int SMEM_BYTES = BARRIERS_AT + 512;

  static_assert(F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0 && TwoPassKeysTraits::WIDTH <= 256, "head_dim, head_dim_v: multiples of 8 up to 256");
  static_assert(Q_STAGES >= 2 && DOUT_STAGES >= 2, "q_stages, dout_stages: 2 and more");
  static_assert(RingK::BYTES + Ring<1>::BYTES + STAGE_BARRIERS + STEP_BYTES + 48 <= 512, "barriers, and what steps are of, in 512 bytes");
  static_assert(!LISTED || SPEC_OF<Blocked>.keys % TILE_N == 0, "a tile of keys lies in one block");
  static_assert(F.head_dim_v / 2 + 4 * KEPT_K <= 160 && F.head_dim / 2 + 4 * KEPT_V <= 160, "kept_steps: registers beside a gradient's");
};

template <class T>
struct TwoPassKeysShared : BackwardShared<T> {
  static DEVICE SharedAddress weights(int slot) { return shared_base() + T::WEIGHTS_AT + slot * T::WEIGHT_BYTES; }
  static DEVICE SharedAddress ds_to_store(int buffer) { return shared_base() + T::DS_AT + buffer * T::TileDS::BYTES; }
  static DEVICE auto ring_weights() { return BackwardShared<T>::ring_ds(); }

  static DEVICE void init() {
    constexpr int ALL = T::WARPGROUPS * T::GROUP_WARPS;
    BackwardShared<T>::ring_k().init(ALL);
    BackwardShared<T>::ring_v().init(T::GROUP_WARPS);
    BackwardShared<T>::ring_q().init(ALL);
    BackwardShared<T>::ring_dout().init(ALL);
    ring_weights().init(T::GROUP_WARPS, T::GROUP_WARPS);
    fence_mbarrier_init();
  }
};

// ---- dQ

struct TwoPassQueriesConfig {
  int k_stages, v_stages;  // tiles in shared memory
  bool dp_late;            // dP comes behind weights, not beside them
};

template <class Element, Features F, TwoPassQueriesConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct TwoPassQueriesTraits : Walks<Element, F, WgmmaBackwardParams, Score, Blocked>, PassSizes {
  static constexpr int K_STAGES = C.k_stages, V_STAGES = C.v_stages;
  static constexpr bool DP_LATE = C.dp_late;
  // A thread's; the three warpgroups have 504.
  static constexpr int CONSUMER_REGISTERS = F.head_dim > 224 ? 240 : 232, PRODUCER_REGISTERS = F.head_dim > 224 ? 24 : 40;
  static constexpr bool IS_CROWDED = HAS_SCORE<Score> && F.head_dim > 224;           // no register to spare
  static constexpr bool LISTED = HAS_LISTS<Blocked>;  // a block mask lists the tiles of keys of both warpgroups
  static constexpr int KEY_STEPS = TILE_N / 16, DIM_STEPS = (F.head_dim + 15) / 16, V_STEPS = (F.head_dim_v + 15) / 16;  // of a wgmma

  using TileQ = PanelTile<TILE_M, F.head_dim>;
  using TileDout = PanelTile<TILE_M, F.head_dim_v>;
  using TileK = PanelTile<TILE_N, F.head_dim>;
  using TileV = PanelTile<TILE_N, F.head_dim_v>;
  using RingK = Ring<K_STAGES>;
  using RingV = Ring<V_STAGES>;

  // Shared memory: Q, then dO, of each warpgroup, stages of K, of V, then barriers and what the tile of queries is.
  static constexpr int DOUT_AT = WARPGROUPS * TileQ::BYTES, K_AT = DOUT_AT + WARPGROUPS * TileDout::BYTES;
  static constexpr int V_AT = K_AT + K_STAGES * TileK::BYTES;
  static constexpr int BARRIERS_AT = V_AT + V_STAGES * TileV::BYTES;
  static constexpr int SMEM_BYTES = BARRIERS_AT + 512;

  static_assert(F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0 && TwoPassQueriesTraits::WIDTH <= 256, "head_dim, head_dim_v: multiples of 8 up to 256");
  static_assert(K_STAGES >= 2 && V_STAGES >= 1, "k_stages: 2 and more; v_stages: 1 and more");
  static_assert(!LISTED || SPEC_OF<Blocked>.queries % BLOCK_ROWS == 0, "both warpgroups' queries lie in one block");
};

template <class T>
struct TwoPassQueriesShared {
  static DEVICE SharedAddress q(int group) { return shared_base() + group * T::TileQ::BYTES; }
  static DEVICE SharedAddress dout(int group) { return shared_base() + T::DOUT_AT + group * T::TileDout::BYTES; }
  static DEVICE SharedAddress k(int slot) { return shared_base() + T::K_AT + slot * T::TileK::BYTES; }
  static DEVICE SharedAddress v(int slot) { return shared_base() + T::V_AT + slot * T::TileV::BYTES; }

  static DEVICE Ring<1> ring_q(int group) { return {shared_base() + T::BARRIERS_AT + group * Ring<1>::BYTES}; }
  static DEVICE Ring<1> ring_dout(int group) { return ring_q(T::WARPGROUPS + group); }
  static DEVICE typename T::RingK ring_k() { return {ring_q(2 * T::WARPGROUPS).barriers}; }
  static DEVICE typename T::RingV ring_v() { return {ring_k().barriers + T::RingK::BYTES}; }
  // With lists: the tile of keys that a slot of K has.
  static DEVICE SharedAddress key_word(int slot) { return ring_v().barriers + T::RingV::BYTES + 4 * slot; }
  // The place of the record of a warpgroup's tile of queries.
  static DEVICE SharedAddress tile_place(int group) {
    return shared_base() + T::SMEM_BYTES - (1 + group) * QueryTile<T>::BYTES;
  }

  static DEVICE void init() {
    for (int group = 0; group < T::WARPGROUPS; ++group) {
      ring_q(group).init(T::GROUP_WARPS);
      ring_dout(group).init(T::GROUP_WARPS);
    }
    ring_k().init(T::WARPGROUPS * T::GROUP_WARPS);
    ring_v().init(T::WARPGROUPS * T::GROUP_WARPS);
    fence_mbarrier_init();
  }
};

// A block of either kernel: two warpgroups compute, a thread of the third loads.
template <class T, class Shared, class First, class Second, class Producer>
DEVICE void run_pass(const typename T::Params& params) {
  const int warpgroup = begin_block<Shared>(params, T::WARPGROUPS * WARPGROUP);
  if constexpr (T::CLUSTER > 1) meet_cluster();
  if (warpgroup == 0) {
    raise_registers<T::CONSUMER_REGISTERS>();
    First(params).run();
  } else if (warpgroup == 1) {
    raise_registers<T::CONSUMER_REGISTERS>();
    Second(params).run();
  } else {
    lower_registers<T::PRODUCER_REGISTERS>();
    if (thread_index() % WARPGROUP == 0) Producer(params).run();
  }
}

}  // namespace multiattn
