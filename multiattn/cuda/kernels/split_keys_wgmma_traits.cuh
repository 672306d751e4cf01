// The constants of the forward for rows of heads that share keys, for sm90 (split_keys_wgmma.cuh). Each rule of
// multiattn/cuda/split_wgmma_configs.py about which of them go together has its static_assert here.
#pragma once
#include "multiattn/descriptor.cuh"
#include "split_keys_traits.cuh"
#include "wgmma_ring.cuh"

namespace multiattn {

template <int WARPGROUPS_, int TILE_N_, int BOX_ROWS_, int STAGES_, int KEPT_STEPS_, bool PINGPONG_,
          bool LAZY_MAX_>
struct SplitWgmmaShape {
  static constexpr int WARPGROUPS = WARPGROUPS_;  // that compute, each 64 rows; one more loads
  static constexpr int TILE_N = TILE_N_;
  static constexpr bool GATHERS = BOX_ROWS_ == 0;  // keys come one by one, not in boxes of TMA
  static constexpr int BOX_ROWS = GATHERS ? TILE_N : BOX_ROWS_;  // keys of a box, which no page ends within
  static constexpr int STAGES = STAGES_;          // tiles of K and V in shared memory, together
  static constexpr int KEPT_STEPS = KEPT_STEPS_;  // of a wgmma's 16 columns of Q, from the first on: read into registers once
  static constexpr bool PINGPONG = PINGPONG_;     // warpgroups take turns at the tensor cores
  static constexpr bool LAZY_MAX = LAZY_MAX_;     // weights before the maximum is known; see forward_wgmma_softmax.cuh
};

template <class Element_, int HEAD_DIM_, Band BAND_, bool HAS_SINKS_, Paging PAGING_, class S, class Score_ = NoScore>
struct SplitWgmmaTraits : S {
  using Element = Element_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr Band BAND = BAND_;
  static constexpr bool HAS_SINKS = HAS_SINKS_;  // each head has one more key, without a value
  static constexpr Paging PAGING = PAGING_;
  static constexpr bool IS_PAGED = PAGING == Paging::ANY;
  static constexpr bool FREES = FREES_KEYS<BAND, PAGING>;
  using Score = Score_;                          // what changes scores
  using Params = SplitParams;                    // of what a block owns
  using KernelParams = typename WithAux<SplitWgmmaParams, Score>::Type;

  static constexpr int WARPGROUP_ROWS = 64;  // of one wgmma
  static constexpr int TILE_M = WARPGROUP_ROWS * S::WARPGROUPS;
  static constexpr int CONSUMERS = WARPGROUP * S::WARPGROUPS, THREADS = CONSUMERS + WARPGROUP;
  static constexpr int DOT_STEPS = (HEAD_DIM + 15) / 16, KEY_STEPS = S::TILE_N / 16;  // of a wgmma's 16
  // An SM's 64 Ki registers, by multiples of 8; loading takes few. One warpgroup that computes has enough without.
  static constexpr bool MOVES_REGISTERS = S::WARPGROUPS > 1;
  static constexpr int PRODUCER_REGISTERS = S::WARPGROUPS == 3 ? 32 : S::GATHERS ? 56 : 40;
  static constexpr int CONSUMER_REGISTERS = S::WARPGROUPS == 3 ? 160 : S::GATHERS ? 224 : 232;

  // A tile of keys comes in boxes, side by side in its panels of 64 columns, or is gathered by all warps that load.
  using TileQ = PanelTile<TILE_M, HEAD_DIM>;
  using TileKV = PanelTile<S::TILE_N, HEAD_DIM>;
  static constexpr int LOADING_WARPS = S::GATHERS ? WARPGROUP / WARP : 1;
  static constexpr int BOXES_OF_PANEL = S::TILE_N / S::BOX_ROWS, BOXES = BOXES_OF_PANEL * TileKV::PANELS;
  static constexpr int BOX_BYTES = S::BOX_ROWS * TileKV::ROW_BYTES;

  // ---- shared memory: Q, tiles of K and V as they come, barriers
  static constexpr int KV_AT = TileQ::BYTES, BARRIERS_AT = KV_AT + S::STAGES * TileKV::BYTES;
  static constexpr int SMEM_BYTES = BARRIERS_AT + 512;

  static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "head_dim: multiples of 8 up to 256");
  static_assert(S::WARPGROUPS >= 1 && S::WARPGROUPS <= 3, "tile_m: 64, 128, 192");
  static_assert(S::TILE_N % 16 == 0 && S::TILE_N >= 16 && S::TILE_N <= 256, "tile_n: multiples of 16 up to 256");
  static_assert(S::STAGES >= 3 && S::STAGES <= 16, "stages: 3 to 16");
  static_assert(S::BOX_ROWS % 8 == 0 && S::TILE_N % S::BOX_ROWS == 0, "a box is whole groups of 8 rows, a tile whole boxes");
  static_assert(!S::GATHERS || (S::WARPGROUPS < 3 && S::TILE_N <= 128), "gathers: for two warpgroups, a lane for each key");
  static_assert(BOXES <= WARP, "a lane for each box of a tile");
  static_assert(S::KEPT_STEPS >= 0 && S::KEPT_STEPS <= DOT_STEPS, "q_in_registers: up to all of Q");
  static_assert(!S::LAZY_MAX || !HAS_SCORE<Score>, "lazy_max: for plain scores");
  static_assert(!S::PINGPONG || S::WARPGROUPS > 1, "pingpong: of two warpgroups or three");
};

template <class T>
struct SplitShared {
  using RingKV = Ring<T::STAGES>;

  static DEVICE SharedAddress q() { return shared_base(); }
  static DEVICE SharedAddress kv(int slot) { return shared_base() + T::KV_AT + slot * T::TileKV::BYTES; }
  static DEVICE RingKV ring_kv() { return {shared_base() + T::BARRIERS_AT}; }

  static DEVICE void init() {
    ring_kv().init(T::CONSUMERS / WARP, T::LOADING_WARPS);
    fence_mbarrier_init();
  }
};

}  // namespace multiattn
