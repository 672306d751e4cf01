// Fused multi-head attention, forward, for tensor cores with mma.sync (sm80 and later).
//
// Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 1: a block owns TILE_M queries of one head and walks over the
// keys, TILE_N at a time. Its warps split the queries, so a warp owns whole rows and softmax needs no shared memory.
#pragma once
#include "multiattn/mask.cuh"
#include "multiattn/params.h"
#include "multiattn/ptx.cuh"
#include "multiattn/softmax.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

template <class Element_, int HEAD_DIM, bool CAUSAL_, bool ALIGNED_, int TILE_M_, int TILE_N_, int WARPS_, int STAGES_,
          bool Q_IN_REGISTERS_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_;
  static constexpr int STAGES = STAGES_;                  // buffers of K and of V
  static constexpr bool CAUSAL = CAUSAL_;
  static constexpr bool ALIGNED = ALIGNED_;               // q, k, v: every row starts at a multiple of 16 bytes
  static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_; // else read from shared memory for every block of keys
  static constexpr int THREADS = WARPS_ * WARP;

  using TileQ = Tile<TILE_M, HEAD_DIM>;
  using TileKV = Tile<TILE_N, HEAD_DIM>;
  static constexpr int WARP_ROWS = TILE_M / WARPS_;
  static constexpr int ROW_FRAGMENTS = WARP_ROWS / 16;      // of queries, per warp
  static constexpr int KEY_FRAGMENTS = TILE_N / 16;         // of keys
  static constexpr int DIM_FRAGMENTS = TileQ::WIDTH / 16;   // of head_dim
  static constexpr int SMEM_BYTES = TileQ::BYTES + 2 * STAGES * TileKV::BYTES;

  // Fragments read from shared memory ahead of their use, to cover its latency with tensor core work. A guess.
  static constexpr int AHEAD = ROW_FRAGMENTS == 1 ? 3 : 2;

  static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "head_dim: a multiple of 8 up to 256");
  static_assert(WARP_ROWS % 16 == 0 && TILE_M == WARP_ROWS * WARPS_, "a warp owns whole fragments of queries");
  static_assert(TILE_N % 16 == 0, "a block of keys is whole fragments");
  static_assert(STAGES >= 1 && STAGES <= 4, "stages");
};

template <class T>
using Scores = Accumulator[T::ROW_FRAGMENTS][T::KEY_FRAGMENTS][2];
template <class T>
using Outputs = Accumulator[T::ROW_FRAGMENTS][T::DIM_FRAGMENTS][2];

// Which queries of which head a block owns. One grid dimension, longest causal tiles first; the heads of a section run
// side by side.
struct Work {
  int batch, head, first_query;

  static DEVICE Work of(const ForwardParams& params, int tile_m) {
    const int64 section_blocks = static_cast<int64>(params.tiles) * params.heads_per_section;
    const int first_head = static_cast<int>(block_index() / section_blocks) * params.heads_per_section;
    const int place = static_cast<int>(block_index() % section_blocks);
    const int heads = min(params.heads_per_section, params.heads - first_head);
    const int head = first_head + place % heads;
    return {head / params.heads_q, head % params.heads_q, (params.tiles - 1 - place / heads) * tile_m};
  }
};

// Where the sequences of one head live: the only place that turns (batch, head) into addresses. Each address is made
// where it is needed, as one that is kept across the loop costs registers there.
struct Sequence {
  const ForwardParams& params;
  Work work;

  DEVICE const uint16* q() const {
    return static_cast<const uint16*>(params.q) + offset(params.strides_q, work.head) +
           work.first_query * params.strides_q.seq;
  }
  DEVICE const uint16* k() const { return static_cast<const uint16*>(params.k) + offset(params.strides_k, head_kv()); }
  DEVICE const uint16* v() const { return static_cast<const uint16*>(params.v) + offset(params.strides_v, head_kv()); }
  DEVICE uint16* out() const { return static_cast<uint16*>(params.out) + offset(params.strides_out, work.head); }
  DEVICE float* lse() const {
    return params.lse + (static_cast<int64>(work.batch) * params.heads_q + work.head) * params.seq_q;
  }

 private:
  DEVICE int head_kv() const { return work.head / params.group; }
  DEVICE int64 offset(const Strides& strides, int head) const {
    return work.batch * strides.batch + head * strides.head;
  }
};

// The ring of STAGES tiles of K and of V, filled with cp.async ahead of use.
//
// One stage: K and V have a group each; V is loaded while K is used, and the next K while V is. Two barriers a block.
// More: K and V share a group, STAGES - 1 blocks ahead of their use. One barrier a block.
template <class T>
class KeyValueRing {
 public:
  DEVICE KeyValueRing(const ForwardParams& params, const Sequence& sequence, SharedAddress smem, int end)
      : params_(params), k_(sequence.k()), v_(sequence.v()), smem_(smem), end_(end) {}

  // Groups under way after `start`.
  static constexpr int STARTED = T::STAGES == 1 ? 1 : T::STAGES - 1;

  DEVICE void start() {
    if constexpr (T::STAGES == 1) {
      load_k(0);
      cp_async_commit();
    } else {
#pragma unroll
      for (int block = 0; block < STARTED; ++block) {
        load_k(block);
        load_v(block);
        cp_async_commit();
      }
    }
  }

  // K of the block is there for all threads when this returns.
  DEVICE void await_k(int block) {
    cp_async_wait<STARTED - 1>();
    sync_block();  // everybody's part of K has landed; and nobody still reads what the next load overwrites
    if constexpr (T::STAGES == 1) {
      load_v(block);
    } else {
      load_k(block + STARTED);
      load_v(block + STARTED);
    }
    cp_async_commit();
  }

  // V of the block is there for all threads when this returns; K of the block is no longer needed.
  DEVICE void await_v(int block) {
    if constexpr (T::STAGES == 1) {
      cp_async_wait<0>();
      sync_block();  // everybody's part of V has landed; and nobody still reads K
      load_k(block + 1);
      cp_async_commit();
    }
  }

  DEVICE SharedAddress k(int block) const { return smem_ + stage(block) * 2 * T::TileKV::BYTES; }
  DEVICE SharedAddress v(int block) const { return k(block) + T::TileKV::BYTES; }

 private:
  static DEVICE int stage(int block) { return T::STAGES == 1 ? 0 : block % T::STAGES; }

  DEVICE void load_k(int block) { load(k(block), k_, params_.strides_k.seq, block); }
  DEVICE void load_v(int block) { load(v(block), v_, params_.strides_v.seq, block); }

  DEVICE void load(SharedAddress tile, const uint16* rows, int64 stride, int block) {
    if (block >= end_) return;
    const int first = block * T::TILE_N;
    load_tile<typename T::TileKV, T::THREADS, T::ALIGNED>(tile, rows + first * stride, stride, params_.seq_kv - first);
  }

  const ForwardParams& params_;
  const uint16 *k_, *v_;  // of the head, [seq_kv, D]
  SharedAddress smem_;
  int end_;
};

// A negative scale negates Q. A zero one empties it, but for what is not finite: 0 * inf and 0 * NaN are NaN.
template <class E>
DEVICE uint32 fold_sign(uint32 half, int sign) {
  if (sign < 0) return half ^ 0x8000u;
  return (half & E::EXPONENT) == E::EXPONENT ? E::QUIET_NAN : 0u;
}

template <class T>
DEVICE void fold_sign_into_q(SharedAddress tile, int sign) {
  for (int i = thread_index(); i < T::TileQ::BYTES / CHUNK_BYTES; i += T::THREADS) {
    Chunk chunk = load_shared_16(tile + i * CHUNK_BYTES);
#pragma unroll
    for (int w = 0; w < 4; ++w)
      chunk.word[w] = map_halves(chunk.word[w], [&](uint32 half) { return fold_sign<typename T::Element>(half, sign); });
    store_shared_16(tile + i * CHUNK_BYTES, chunk);
  }
}

// The warp's rows of Q as operand A: kept in registers, or read again for every block of keys.
template <class T>
class Queries {
 public:
  DEVICE explicit Queries(SharedAddress tile)
      : tile_(tile + thread_index() / WARP * T::WARP_ROWS * T::TileQ::PITCH), reader_(Reader::down()) {
    if constexpr (T::Q_IN_REGISTERS) {
#pragma unroll
      for (int d = 0; d < T::DIM_FRAGMENTS; ++d) read(kept_[d], d);
    }
  }

  using Column = Fragment[T::ROW_FRAGMENTS];  // all rows of the warp, 16 elements of head_dim

  DEVICE void load(Column& column, int d) const {
    if constexpr (T::Q_IN_REGISTERS) {
#pragma unroll
      for (int m = 0; m < T::ROW_FRAGMENTS; ++m) column[m] = kept_[d][m];
    } else {
      read(column, d);
    }
  }

 private:
  using Reader = FragmentReader<typename T::TileQ>;

  DEVICE void read(Column& column, int d) const {
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) column[m] = reader_.load(tile_, 16 * m, 16 * d);
  }

  SharedAddress tile_;
  Reader reader_;
  Column kept_[T::Q_IN_REGISTERS ? T::DIM_FRAGMENTS : 1];
};

// scores[WARP_ROWS, TILE_N] = Q[WARP_ROWS, D] K[TILE_N, D]^T
template <class T>
DEVICE void compute_scores(Scores<T>& scores, const Queries<T>& queries, SharedAddress k) {
  constexpr int STEPS = T::DIM_FRAGMENTS * T::KEY_FRAGMENTS, RING = T::AHEAD + 1;
  const auto reader = FragmentReader<typename T::TileKV>::right();
  const auto load = [&](int step) { return reader.load(k, step % T::KEY_FRAGMENTS * 16, step / T::KEY_FRAGMENTS * 16); };

#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
    for (int n = 0; n < T::KEY_FRAGMENTS; ++n) scores[m][n][0] = scores[m][n][1] = Accumulator{};

  typename Queries<T>::Column q[2];
  Fragment ring[RING];
  queries.load(q[0], 0);
#pragma unroll
  for (int step = 0; step < T::AHEAD && step < STEPS; ++step) ring[step] = load(step);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int d = step / T::KEY_FRAGMENTS, n = step % T::KEY_FRAGMENTS;
    if (step + T::AHEAD < STEPS) ring[(step + T::AHEAD) % RING] = load(step + T::AHEAD);
    if (n == 0 && d + 1 < T::DIM_FRAGMENTS) queries.load(q[(d + 1) % 2], d + 1);
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
      mma_pair<typename T::Element>(scores[m][n], q[d % 2][m], ring[step % RING]);
  }
}

// The one place that changes a score. Calls `change(score, query, key)` for each of the warp's in a block of keys.
template <class T, class Change>
DEVICE void for_each_score(Scores<T>& scores, int first_query, int first_key, Change change) {
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
    for (int n = 0; n < T::KEY_FRAGMENTS; ++n)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          change(scores[m][n][side].value[e], first_query + 16 * m + accumulator_row(e),
                 first_key + 16 * n + 8 * side + accumulator_column(e));
}

// Walks over the fragments of a tile of V, reading ahead. Calls `use(key_fragment, dim_fragment, fragment)`.
template <class T, class Use>
DEVICE void for_each_value(SharedAddress v, Use use) {
  constexpr int STEPS = T::KEY_FRAGMENTS * T::DIM_FRAGMENTS, RING = T::AHEAD + 1;
  const auto reader = FragmentReader<typename T::TileKV>::down();
  const auto load = [&](int step) {
    return reader.load_transposed(v, step / T::DIM_FRAGMENTS * 16, step % T::DIM_FRAGMENTS * 16);
  };

  Fragment ring[RING];
#pragma unroll
  for (int step = 0; step < T::AHEAD && step < STEPS; ++step) ring[step] = load(step);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step + T::AHEAD < STEPS) ring[(step + T::AHEAD) % RING] = load(step + T::AHEAD);
    use(step / T::DIM_FRAGMENTS, step % T::DIM_FRAGMENTS, ring[step % RING]);
  }
}

// out[WARP_ROWS, D] += weights[WARP_ROWS, TILE_N] V[TILE_N, D]
template <class T, bool CAREFUL>
DEVICE void accumulate(Outputs<T>& out, const Scores<T>& weights, SharedAddress v) {
  using E = typename T::Element;
  for_each_value<T>(v, [&](int n, int d, Fragment value) {
    if constexpr (CAREFUL)
      value = map_elements(value, [](uint32 half) { return (half & E::EXPONENT) == E::EXPONENT ? 0u : half; });
#pragma unroll
    for (int m = 0; m < T::ROW_FRAGMENTS; ++m) mma_pair<E>(out[m][d], as_operand<E>(weights[m][n]), value);
  });
}

template <class T>
DEVICE void decay_outputs(Outputs<T>& out, const float (&decay)[T::ROW_FRAGMENTS][2]) {
  bool needed = false;
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) needed |= decay[m][0] != 1.0f || decay[m][1] != 1.0f;
  if (!any_in_warp(needed)) return;
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
    for (int d = 0; d < T::DIM_FRAGMENTS; ++d)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][d][side].value[e] *= decay[m][e / 2];
}

// One step of the paper's loop: what a block of keys adds to outputs and state. MASKED blocks are visible in part.
// CAREFUL counts what is not finite in V as zero, as a masked key's 0 * NaN would else reach rows that do not see it.
template <class T, bool MASKED, bool CAREFUL>
DEVICE void attend_to_block(int block, Outputs<T>& out, RowState (&state)[T::ROW_FRAGMENTS],
                            const ForwardParams& params, const Queries<T>& queries, KeyValueRing<T>& ring,
                            int first_query) {
  ring.await_k(block);
  Scores<T> scores;  // [WARP_ROWS, TILE_N]
  compute_scores<T>(scores, queries, ring.k(block));
  if constexpr (MASKED) {
    const Mask<T::CAUSAL> mask{params.seq_q, params.seq_kv};
    for_each_score<T>(scores, first_query + thread_index() / WARP * T::WARP_ROWS, block * T::TILE_N,
                      [&](float& score, int query, int key) {
                        if (!mask.visible(query, key)) score = -infinity();
                      });
  }
  ring.await_v(block);
  float decay[T::ROW_FRAGMENTS][2];
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) update_softmax(scores[m], state[m], decay[m], params.scale_log2);
  decay_outputs<T>(out, decay);
  accumulate<T, CAREFUL>(out, scores, ring.v(block));
}

// The paper's loop over the blocks of keys: those that all queries see in full, then those with a mask. The ring has
// been started.
template <class T, bool CAREFUL>
DEVICE void attend(Outputs<T>& out, RowState (&state)[T::ROW_FRAGMENTS], const ForwardParams& params,
                   const Queries<T>& queries, KeyValueRing<T>& ring, int first_query) {
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
    state[m] = RowState::empty();
#pragma unroll
    for (int d = 0; d < T::DIM_FRAGMENTS; ++d) out[m][d][0] = out[m][d][1] = Accumulator{};
  }
  const Mask<T::CAUSAL> mask{params.seq_q, params.seq_kv};
  const auto blocks = mask.template blocks<T::TILE_N>(first_query, T::TILE_M);
  int block = 0;
  if constexpr (!CAREFUL)  // the rare pass masks every block: one copy of the body less
    for (; block < blocks.first_masked; ++block)
      attend_to_block<T, false, CAREFUL>(block, out, state, params, queries, ring, first_query);
  for (; block < blocks.end; ++block)
    attend_to_block<T, true, CAREFUL>(block, out, state, params, queries, ring, first_query);
}

// Adds inf, -inf and NaN of V to every output whose query sees the key they are of, whatever its weight.
template <class T>
DEVICE void add_nonfinite(Outputs<T>& out, const ForwardParams& params, KeyValueRing<T>& ring, int first_query) {
  using E = typename T::Element;
  const Mask<T::CAUSAL> mask{params.seq_q, params.seq_kv};
  const int end = mask.template blocks<T::TILE_N>(first_query, T::TILE_M).end;
  for (int block = 0; block < end; ++block) {
    ring.await_k(block);
    ring.await_v(block);
    Scores<T> seen;  // [WARP_ROWS, TILE_N]: 1 where visible, else 0
    for_each_score<T>(seen, first_query + thread_index() / WARP * T::WARP_ROWS, block * T::TILE_N,
                      [&](float& score, int query, int key) { score = mask.visible(query, key) ? 1.0f : 0.0f; });
    for_each_value<T>(ring.v(block), [&](int n, int d, const Fragment& value) {
#pragma unroll 1  // a rare pass: its code should be small
      for (int which = 0; which < 3; ++which) {
        const uint32 wanted = which == 0 ? E::EXPONENT : which == 1 ? E::EXPONENT | 0x8000u : E::QUIET_NAN;
        const float added = which == 0 ? infinity() : which == 1 ? -infinity() : infinity() - infinity();
        const Fragment hit = map_elements(value, [&](uint32 half) {
          const bool is_nan = (half & 0x7fffu) > E::EXPONENT;
          return (is_nan ? E::QUIET_NAN : half) == wanted ? E::ONE : 0u;
        });
#pragma unroll
        for (int m = 0; m < T::ROW_FRAGMENTS; ++m) {
          Accumulator reached[2] = {};
          mma_pair<E>(reached, as_operand<E>(seen[m][n]), hit);
#pragma unroll
          for (int side = 0; side < 2; ++side)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (reached[side].value[e] > 0.0f) out[m][d][side].value[e] += added;
        }
      }
    });
  }
}

template <class T>
DEVICE bool has_nonfinite(const Outputs<T>& out) {
  float product = 0.0f;  // 0 * x is 0 for every finite x, else NaN: one instruction an element
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
    for (int d = 0; d < T::DIM_FRAGMENTS; ++d)
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int e = 0; e < 4; ++e) product = fmaf(out[m][d][side].value[e], 0.0f, product);
  return product != 0.0f;
}

// out = outputs / sum and lse = log(sum of exp); the rows pass through the warp's own part of the tile of Q, so that
// they leave in 16-byte stores.
template <class T>
DEVICE void store(const Outputs<T>& out, const RowState (&state)[T::ROW_FRAGMENTS], const ForwardParams& params,
                  const Sequence& sequence, SharedAddress tile, int first_query) {
  using TileQ = typename T::TileQ;
  const int first_row = thread_index() / WARP * T::WARP_ROWS, lane = thread_index() % WARP;
  sync_warp();  // no lane still reads the warp's rows of Q
#pragma unroll
  for (int m = 0; m < T::ROW_FRAGMENTS; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + accumulator_row(2 * half);
      const float sum = reduce_row(state[m].sum[half], [](float a, float b) { return a + b; });
      const bool empty = sum == 0.0f;  // the query sees no key
      const float inverse = empty ? 0.0f : 1.0f / sum;
      if (lane % 4 == 0 && first_query + row < params.seq_q)
        store_global_4(sequence.lse() + first_query + row,
                       empty ? -infinity() : (state[m].max[half] + log2_exact(sum)) * LN_2);
#pragma unroll
      for (int d = 0; d < T::DIM_FRAGMENTS; ++d)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float(&value)[4] = out[m][d][side].value;
          store_shared_4(TileQ::chunk(tile, row, 2 * d + side) + lane % 4 * 4,
                         pack<typename T::Element>(value[2 * half] * inverse, value[2 * half + 1] * inverse));
        }
    }
  sync_warp();  // the warp's rows of the output are complete
  for (int i = lane; i < T::WARP_ROWS * TileQ::VALID_CHUNKS; i += WARP) {
    const int row = first_row + i / TileQ::VALID_CHUNKS, chunk = i % TileQ::VALID_CHUNKS;
    if (first_query + row < params.seq_q)
      store_global_16(sequence.out() + (first_query + row) * params.strides_out.seq + chunk * CHUNK_ELEMENTS,
                      load_shared_16(TileQ::chunk(tile, row, chunk)));
  }
}

template <class T>
DEVICE void forward(const ForwardParams& params) {
  const Work work = Work::of(params, T::TILE_M);
  const Sequence sequence{params, work};
  const Mask<T::CAUSAL> mask{params.seq_q, params.seq_kv};
  const SharedAddress tile_q = shared_base();
  KeyValueRing<T> ring(params, sequence, tile_q + T::TileQ::BYTES,
                       mask.template blocks<T::TILE_N>(work.first_query, T::TILE_M).end);

  load_tile<typename T::TileQ, T::THREADS, T::ALIGNED>(tile_q, sequence.q(), params.strides_q.seq,
                                                       params.seq_q - work.first_query);
  cp_async_commit();
  ring.start();
  cp_async_wait<KeyValueRing<T>::STARTED>();
  sync_block();  // everybody's part of Q has landed
  if (params.scale_sign != 1) {
    fold_sign_into_q<T>(tile_q, params.scale_sign);
    sync_block();  // Q is rewritten before anybody reads it
  }
  const Queries<T> queries(tile_q);

  Outputs<T> out;                       // [WARP_ROWS, D]
  RowState state[T::ROW_FRAGMENTS];     // of WARP_ROWS rows
  attend<T, false>(out, state, params, queries, ring, work.first_query);

  if constexpr (T::CAUSAL) {
    if (any_in_block(has_nonfinite<T>(out))) {  // a barrier too: nobody still reads the ring
      ring.start();
      attend<T, true>(out, state, params, queries, ring, work.first_query);
      sync_block();  // nobody still reads the ring
      ring.start();
      add_nonfinite<T>(out, params, ring, work.first_query);
    }
  }
  store<T>(out, state, params, sequence, tile_q, work.first_query);
}

}  // namespace multiattn
