// The constants of a compiled forward kernel: a point on the axes of the ladder, and a shape. Each rule of
// multiattn/cuda/forward_mma.py about which of them go together has its static_assert here.
#pragma once
#include "multiattn/block_mask.cuh"
#include "multiattn/mask.cuh"
#include "multiattn/params.h"
#include "multiattn/score.cuh"
#include "multiattn/sequence.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

enum class Warps {
  SPLIT_KV,  // warps share the keys of a block for the scores, and head_dim for the output; weights pass through smem
  SPLIT_Q,   // a warp owns whole rows (FlashAttention-2)
};
enum class Share {
  NONE,  // Q, K and V have a buffer each
  KV,    // K and V take turns in one
  QKV,   // and Q was there before them, on its way to the registers
};
enum class Tiling {
  NONE,  // K and V arrive whole
  QK,    // K in slices of head_dim, and on demand Q with it
  QKV,   // and V in slices of keys
};
enum class QPlace { REGISTERS, SHARED, STREAMED };  // of Q's fragments; STREAMED: loaded again for every block of keys

template <Warps WARPS_, Share SHARE_, Tiling TILING_, bool SWIZZLE_Q_, bool SWIZZLE_K_, bool SWIZZLE_V_, class Sum_>
struct Axes {
  static constexpr Warps WARPS = WARPS_;
  static constexpr Share SHARE = SHARE_;
  static constexpr Tiling TILING = TILING_;
  static constexpr bool SWIZZLE_Q = SWIZZLE_Q_, SWIZZLE_K = SWIZZLE_K_, SWIZZLE_V = SWIZZLE_V_;
  using Sum = Sum_;  // what the tensor core adds up in: Accumulator or HalfAccumulator
};

template <int TILE_M_, int TILE_N_, int WARPS_, int COLUMN_WARPS_, int STAGES_, QPlace Q_PLACE_, int DIM_SLICE_,
          int KEY_SLICE_>
struct Shape {
  static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_, WARPS = WARPS_;
  static constexpr int COLUMN_WARPS = COLUMN_WARPS_;  // that share the keys of a row; 1 with SPLIT_Q
  static constexpr int STAGES = STAGES_;
  static constexpr QPlace Q_PLACE = Q_PLACE_;
  static constexpr int DIM_SLICE = DIM_SLICE_;  // head_dim of a slice of K and Q
  static constexpr int KEY_SLICE = KEY_SLICE_;  // keys of a slice of V
};

// Which constants go together, as multiattn/cuda/forward_mma.py has it; shared memory and registers aside.
template <class Element, int HEAD_DIM_, class A, class S>
struct Legality {
  static constexpr bool SPLIT_KV = A::WARPS == Warps::SPLIT_KV, SLICED = A::TILING != Tiling::NONE;
  static constexpr int WIDEST = !(SPLIT_KV && SLICED) ? 256 : IS_FP32<typename A::Sum> ? 1024 : 512;
  static constexpr bool HEAD_DIM = HEAD_DIM_ % 8 == 0 && HEAD_DIM_ <= WIDEST;
  static constexpr bool WARPS = S::WARPS == 2 || S::WARPS == 4 || S::WARPS == 8 || S::WARPS == 16;
  static constexpr bool COLUMNS = SPLIT_KV == (S::COLUMN_WARPS > 1) && S::WARPS % S::COLUMN_WARPS == 0;
  static constexpr int ROW_UNIT = COLUMNS ? 16 * S::WARPS / S::COLUMN_WARPS : 16, KEY_UNIT = 16 * S::COLUMN_WARPS;
  static constexpr bool ROWS = S::TILE_M >= ROW_UNIT && S::TILE_M % ROW_UNIT == 0;
  static constexpr bool KEYS = S::TILE_N >= KEY_UNIT && S::TILE_N % KEY_UNIT == 0;
  static constexpr bool SHARED_Q = A::SHARE != Share::QKV || !SLICED;
  static constexpr bool PLACE = A::SHARE == Share::QKV ? S::Q_PLACE == QPlace::REGISTERS
                                : SLICED               ? S::Q_PLACE != QPlace::REGISTERS
                                                       : S::Q_PLACE != QPlace::STREAMED;
  static constexpr bool SLICES = (S::DIM_SLICE == 64 || S::DIM_SLICE == 128 || S::DIM_SLICE == 256) &&
                                 (A::TILING != Tiling::QKV || (S::KEY_SLICE % 16 == 0 && S::TILE_N % S::KEY_SLICE == 0));
  static constexpr bool RING = S::STAGES >= 1 && S::STAGES <= 4 &&
                               (A::TILING != Tiling::QK || A::SHARE != Share::NONE ||
                                S::STAGES - 1 <= (HEAD_DIM_ + S::DIM_SLICE - 1) / S::DIM_SLICE);
  static constexpr bool SUMS = IS_FP32<typename A::Sum> || IS_FP16<Element>;
  static constexpr bool ALL = HEAD_DIM && WARPS && COLUMNS && ROWS && KEYS && SHARED_Q && PLACE && SLICES && RING && SUMS;
};

template <class Element, int HEAD_DIM, Band BAND, bool ALIGNED_, bool HAS_SINKS_, class A, class S, class Score = NoScore,
          class Blocked = NoBlockMask>
struct ForwardTraits : A, S, Walks<Element, HEAD_DIM, BAND, ForwardParams, Score, Blocked> {
  static constexpr bool ALIGNED = ALIGNED_;  // q, k, v: every row starts at a multiple of 16 bytes
  static constexpr bool HAS_SINKS = HAS_SINKS_;  // each head has one more key, without a value
  static constexpr int THREADS = S::WARPS * WARP;
  static constexpr bool SPLIT_KV = A::WARPS == Warps::SPLIT_KV;
  static constexpr bool SLICED_K = A::TILING != Tiling::NONE, SLICED_V = A::TILING == Tiling::QKV;

  // ---- what a warp owns: rows of the tile, and of them keys of the scores and columns of the output
  static constexpr int ROW_WARPS = S::WARPS / S::COLUMN_WARPS;
  static constexpr int WARP_ROWS = S::TILE_M / ROW_WARPS, WARP_KEYS = S::TILE_N / S::COLUMN_WARPS;
  static constexpr int OUT_WIDTH = round_up(HEAD_DIM, 16 * S::COLUMN_WARPS);
  static constexpr int ROW_FRAGMENTS = WARP_ROWS / 16, KEY_FRAGMENTS = WARP_KEYS / 16;
  static constexpr int OUT_FRAGMENTS = OUT_WIDTH / 16 / S::COLUMN_WARPS;

  static DEVICE int column_warp(int thread = thread_index()) { return thread / WARP % S::COLUMN_WARPS; }
  static DEVICE int warp_row(int thread = thread_index()) { return thread / WARP / S::COLUMN_WARPS * WARP_ROWS; }
  static DEVICE int warp_key(int thread = thread_index()) { return column_warp(thread) * WARP_KEYS; }
  static DEVICE int warp_column() { return column_warp() * OUT_FRAGMENTS * 16; }

  // ---- tiles in shared memory. A piece is what one load brings: K, Q with it, or V, whole or a slice.
  static constexpr int DOT_WIDTH = SLICED_K ? round_up(HEAD_DIM, S::DIM_SLICE) : round_up(HEAD_DIM, 16);
  static constexpr int K_WIDTH = SLICED_K ? S::DIM_SLICE : DOT_WIDTH;
  static constexpr int V_ROWS = SLICED_V ? S::KEY_SLICE : S::TILE_N;
  using TileQ = Tile<S::TILE_M, HEAD_DIM, A::SWIZZLE_Q, DOT_WIDTH>;
  using PieceQ = Tile<S::TILE_M, SLICED_K ? K_WIDTH : HEAD_DIM, A::SWIZZLE_Q>;
  static constexpr bool STREAMED = S::Q_PLACE == QPlace::STREAMED;
  // Fragments of Q are read from this: PieceQ or TileQ.
  using SourceQ = Tile<S::TILE_M, STREAMED ? K_WIDTH : HEAD_DIM, A::SWIZZLE_Q, STREAMED ? K_WIDTH : DOT_WIDTH>;
  using PieceK = Tile<S::TILE_N, SLICED_K ? K_WIDTH : HEAD_DIM, A::SWIZZLE_K>;
  using PieceV = Tile<V_ROWS, HEAD_DIM, A::SWIZZLE_V, OUT_WIDTH>;
  using TileP = Tile<S::TILE_M, S::TILE_N>;  // weights, with SPLIT_KV
  static constexpr int K_PIECES = DOT_WIDTH / K_WIDTH, V_PIECES = S::TILE_N / V_ROWS;
  static constexpr int DOT_FRAGMENTS = K_WIDTH / 16, VALUE_FRAGMENTS = V_ROWS / 16;  // of one piece

  // ---- the stream of pieces
  static constexpr bool SHARED_RING = A::SHARE != Share::NONE;  // K's and V's pieces go through the same slots
  // K and V of a block arrive together, and cost one barrier.
  static constexpr bool JOINT = !SHARED_RING && !SLICED_K && S::STAGES > 1;
  static constexpr int PIECES = JOINT ? 1 : K_PIECES + V_PIECES;  // of a block of keys
  // Pieces under way while one is used. With a buffer of its own V is loaded while K is used, even with one stage.
  static constexpr int AHEAD = !SHARED_RING && !SLICED_K && S::STAGES == 1 ? 1 : S::STAGES - 1;
  static constexpr int K_SLOT = PieceK::BYTES + (STREAMED ? PieceQ::BYTES : 0);
  static constexpr int SLOT = SHARED_RING && PieceV::BYTES > K_SLOT ? PieceV::BYTES : K_SLOT;
  static constexpr int V_SLOTS = A::TILING == Tiling::QK ? 1 : S::STAGES;  // where V has its own

  // ---- shared memory: Q, the slots, what warps exchange
  static constexpr bool KEEPS_Q_TILE = !STREAMED && A::SHARE != Share::QKV;
  static constexpr int RING_BYTES = S::STAGES * SLOT + (SHARED_RING ? 0 : V_SLOTS * PieceV::BYTES);
  static constexpr int RING_AT = KEEPS_Q_TILE ? TileQ::BYTES : 0;
  static constexpr int EXCHANGE_AT =
      RING_AT + (A::SHARE == Share::QKV && TileQ::BYTES > RING_BYTES ? TileQ::BYTES : RING_BYTES);
  static constexpr int SMEM_BYTES = EXCHANGE_AT + (SPLIT_KV ? TileP::BYTES + S::COLUMN_WARPS * S::TILE_M * 4 : 0);

  // Fragments read from shared memory ahead of their use, to cover its latency with tensor core work: what registers
  // leave room for. H200, 2026-11-21, D=512 split_kv, B1 H48 N8192: 3 give 335 TFLOPS in fp16 and 345 in bf16, 2 give 323
  // and 339. For split_q a guess.
  static constexpr int READ_AHEAD = SPLIT_KV || ROW_FRAGMENTS == 1 ? 3 : 2;
  static constexpr int REGISTERS =  // that hold scores, output and kept Q; the rest comes on top
      WARP_ROWS * (WARP_KEYS + OUT_FRAGMENTS * 16) / WARP +
      (S::Q_PLACE == QPlace::REGISTERS ? WARP_ROWS * DOT_WIDTH / (2 * WARP) : 0);

  // Where registers are scarce addresses are made anew for every block of keys. sm90, D=128, masked, 128x64: without it
  // ten spills in the loops.
  static constexpr bool CROWDED = REGISTERS >= 192;
  static DEVICE uint32 address_thread() { return CROWDED ? recomputed(thread_index()) : thread_index(); }

  using Legal = Legality<Element, HEAD_DIM, A, S>;
  static_assert(Legal::HEAD_DIM, "head_dim: multiples of 8 up to 1024; above 256 split_kv with tiling, above 512 fp32");
  static_assert(Legal::WARPS, "warps: 2, 4, 8, 16");
  static_assert(Legal::COLUMNS, "column_warps: 1 with split_q; with split_kv a divisor of warps from 2 on");
  static_assert(Legal::ROWS, "tile_m: 16 rows a warp");
  static_assert(Legal::KEYS, "tile_n: 16 keys a warp");
  static_assert(Legal::SHARED_Q, "share_qkv: Q is whole in the buffer that it shares, so no tiling");
  static_assert(Legal::PLACE, "q: registers with share_qkv; shared or streamed with tiling; else registers or shared");
  static_assert(Legal::SLICES, "dim_slice: 64, 128 or 256; key_slice: multiples of 16 that divide tile_n");
  static_assert(Legal::RING, "stages: 1 to 4, and V's one buffer with tiling_qk and share none is loaded once a block");
  static_assert(Legal::SUMS, "fp16 accumulators take fp16 elements");
  static_assert(REGISTERS <= 224, "a thread's registers for scores, output and Q");
};

template <class T>
using Scores = Accumulator[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS][2];
template <class T>
using Outputs = Accumulator[T::ROW_FRAGMENTS][T::OUT_FRAGMENTS][2];

}  // namespace multiattn
