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

struct Axes {
  Warps warps;
  Share share;
  Tiling tiling;
  bool swizzle_q, swizzle_k, swizzle_v;
  bool halves;  // the tensor core adds up in fp16
};

struct CudaConfig {
  int tile_m, tile_n, warps;
  int column_warps;  // that share the keys of a row; 1 with SPLIT_Q
  int stages;
  int dim_slice;  // head_dim of a slice of K and Q
  int key_slice;  // keys of a slice of V
  QPlace q_place;
};

// Constants that go together, as multiattn/cuda/forward_mma.py has it; shared memory and registers aside.
template <class Element, Features F, Axes A, CudaConfig C>
struct Legality {
  static constexpr bool SPLIT_KV = A.warps == Warps::SPLIT_KV, SLICED = A.tiling != Tiling::NONE;
  static constexpr int WIDEST = !(SPLIT_KV && SLICED) ? 256 : !A.halves ? 1024 : 512;
  static constexpr bool HEAD_DIM =
      F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0 && F.head_dim <= WIDEST && F.head_dim_v <= WIDEST;
  static constexpr bool WARPS = C.warps == 2 || C.warps == 4 || C.warps == 8 || C.warps == 16;
  static constexpr bool COLUMNS = SPLIT_KV == (C.column_warps > 1) && C.warps % C.column_warps == 0;
  static constexpr int ROW_UNIT = COLUMNS ? 16 * C.warps / C.column_warps : 16, KEY_UNIT = 16 * C.column_warps;
  static constexpr bool ROWS = C.tile_m >= ROW_UNIT && C.tile_m % ROW_UNIT == 0;
  static constexpr bool KEYS = C.tile_n >= KEY_UNIT && C.tile_n % KEY_UNIT == 0;
  static constexpr bool SHARED_Q = A.share != Share::QKV || !SLICED;
  static constexpr bool PLACE = A.share == Share::QKV ? C.q_place == QPlace::REGISTERS
                                : SLICED               ? C.q_place != QPlace::REGISTERS
                                                       : C.q_place != QPlace::STREAMED;
  static constexpr bool SLICES = (C.dim_slice == 64 || C.dim_slice == 128 || C.dim_slice == 256) &&
                                 (A.tiling != Tiling::QKV || (C.key_slice % 16 == 0 && C.tile_n % C.key_slice == 0));
  static constexpr bool RING = C.stages >= 1 && C.stages <= 4 &&
                               (A.tiling != Tiling::QK || A.share != Share::NONE ||
                                C.stages - 1 <= (F.head_dim + C.dim_slice - 1) / C.dim_slice);
  static constexpr bool SUMS = !A.halves || IS_FP16<Element>;
  static constexpr bool ALL = HEAD_DIM && WARPS && COLUMNS && ROWS && KEYS && SHARED_Q && PLACE && SLICES && RING && SUMS;
};

template <class Element, Features F, Axes A, CudaConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct ForwardTraits : Walks<Element, F, ForwardParams, Score, Blocked> {
  static constexpr int TILE_M = C.tile_m, TILE_N = C.tile_n, STAGES = C.stages, COLUMN_WARPS = C.column_warps;
  static constexpr Share SHARE = A.share;
  static constexpr QPlace Q_PLACE = C.q_place;
  using Sum = typename Choice<A.halves, HalfAccumulator, Accumulator>::Type;
  static constexpr int THREADS = C.warps * WARP;
  static constexpr bool SPLIT_KV = A.warps == Warps::SPLIT_KV;
  static constexpr bool SLICED_K = A.tiling != Tiling::NONE, SLICED_V = A.tiling == Tiling::QKV;

  // ---- what a warp owns: rows of the tile, and of them keys of the scores and columns of the output
  static constexpr int ROW_WARPS = C.warps / C.column_warps;
  static constexpr int WARP_ROWS = C.tile_m / ROW_WARPS, WARP_KEYS = C.tile_n / C.column_warps;
  static constexpr int OUT_WIDTH = round_up(F.head_dim_v, 16 * C.column_warps);
  static constexpr int ROW_FRAGMENTS = WARP_ROWS / 16, KEY_FRAGMENTS = WARP_KEYS / 16;
  static constexpr int OUT_FRAGMENTS = OUT_WIDTH / 16 / C.column_warps;

  static DEVICE int column_warp(int thread = thread_index()) { return thread / WARP % C.column_warps; }
  static DEVICE int warp_row(int thread = thread_index()) { return thread / WARP / C.column_warps * WARP_ROWS; }
  static DEVICE int warp_key(int thread = thread_index()) { return column_warp(thread) * WARP_KEYS; }
  static DEVICE int warp_column() { return column_warp() * OUT_FRAGMENTS * 16; }

  // ---- tiles in shared memory. A piece is what one load brings: K, Q with it, or V, whole or a slice.
  static constexpr int DOT_WIDTH = SLICED_K ? round_up(F.head_dim, C.dim_slice) : round_up(F.head_dim, 16);
  static constexpr int K_WIDTH = SLICED_K ? C.dim_slice : DOT_WIDTH;
  static constexpr int V_ROWS = SLICED_V ? C.key_slice : C.tile_n;
  using TileQ = Tile<C.tile_m, F.head_dim, A.swizzle_q, DOT_WIDTH>;
  using PieceQ = Tile<C.tile_m, SLICED_K ? K_WIDTH : F.head_dim, A.swizzle_q>;
  static constexpr bool STREAMED = C.q_place == QPlace::STREAMED;
  // Fragments of Q are read from this: PieceQ or TileQ.
  using SourceQ = Tile<C.tile_m, STREAMED ? K_WIDTH : F.head_dim, A.swizzle_q, STREAMED ? K_WIDTH : DOT_WIDTH>;
  using PieceK = Tile<C.tile_n, SLICED_K ? K_WIDTH : F.head_dim, A.swizzle_k>;
  using PieceV = Tile<V_ROWS, F.head_dim_v, A.swizzle_v, OUT_WIDTH>;
  using TileP = Tile<C.tile_m, C.tile_n>;  // weights, with SPLIT_KV
  static constexpr int K_PIECES = DOT_WIDTH / K_WIDTH, V_PIECES = C.tile_n / V_ROWS;
  static constexpr int DOT_FRAGMENTS = K_WIDTH / 16, VALUE_FRAGMENTS = V_ROWS / 16;  // of one piece

  // ---- the stream of pieces
  static constexpr bool SHARED_RING = A.share != Share::NONE;  // K's and V's pieces go through the same slots
  // K and V of a block arrive together, and cost one barrier.
  static constexpr bool JOINT = !SHARED_RING && !SLICED_K && C.stages > 1;
  static constexpr int PIECES = JOINT ? 1 : K_PIECES + V_PIECES;  // of a block of keys
  // Pieces under way while one is used. With a buffer of its own V is loaded while K is used, even with one stage.
  static constexpr int AHEAD = !SHARED_RING && !SLICED_K && C.stages == 1 ? 1 : C.stages - 1;
  static constexpr int K_SLOT = PieceK::BYTES + (STREAMED ? PieceQ::BYTES : 0);
  static constexpr int SLOT = SHARED_RING && PieceV::BYTES > K_SLOT ? PieceV::BYTES : K_SLOT;
  static constexpr int V_SLOTS = A.tiling == Tiling::QK ? 1 : C.stages;  // where V has its own

  // ---- shared memory: Q, the slots, what warps exchange
  static constexpr bool KEEPS_Q_TILE = !STREAMED && A.share != Share::QKV;
  static constexpr int RING_BYTES = C.stages * SLOT + (SHARED_RING ? 0 : V_SLOTS * PieceV::BYTES);
  static constexpr int RING_AT = KEEPS_Q_TILE ? TileQ::BYTES : 0;
  static constexpr int EXCHANGE_AT =
      RING_AT + (A.share == Share::QKV && TileQ::BYTES > RING_BYTES ? TileQ::BYTES : RING_BYTES);
  static constexpr int SMEM_BYTES = EXCHANGE_AT + (SPLIT_KV ? TileP::BYTES + C.column_warps * C.tile_m * 4 : 0);

  // Fragments read from shared memory ahead of their use, to cover its latency with tensor core work: what registers
  // leave room for. H200, 2026-11-21, D=512 split_kv, B1 H48 N8192: 3 give 335 TFLOPS in fp16 and 345 in bf16, 2 give 323
  // and 339. For split_q a guess.
  static constexpr int READ_AHEAD = SPLIT_KV || ROW_FRAGMENTS == 1 ? 3 : 2;
  static constexpr int REGISTERS =  // that hold scores, output and kept Q; the rest comes on top
      WARP_ROWS * (WARP_KEYS + OUT_FRAGMENTS * 16) / WARP +
      (C.q_place == QPlace::REGISTERS ? WARP_ROWS * DOT_WIDTH / (2 * WARP) : 0);

  // Where registers are scarce addresses are made anew for every block of keys. sm90, D=128, masked, 128x64: without it
  // ten spills in the loops.
  static constexpr bool CROWDED = REGISTERS >= 192;
  static DEVICE uint32 address_thread() { return CROWDED ? recomputed(thread_index()) : thread_index(); }

  using Legal = Legality<Element, F, A, C>;
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
