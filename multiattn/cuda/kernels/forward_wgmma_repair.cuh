// What is not finite in V, and keys that not every query sees: 0 * NaN of a masked key must not reach a row. Rare, so it is
// found out at the end of a tile, and done again by each warp that it struck: by mma.sync, from global memory, 16 keys and
// 64 columns of V at a time. Slow, but of few registers: with more, those of the hot loop would spill.
#pragma once
#include "forward_wgmma_output.cuh"
#include "multiattn/special.cuh"

namespace multiattn {

// Two neighbouring elements, or zeros.
DEVICE uint32 load_pair(const uint16* source, bool valid) {
  return valid ? float_bits(load_global_4(reinterpret_cast<const float*>(source))) : 0u;
}

// The warp's 16 queries from `first_query` on.
template <class T>
class CarefulWarp {
  using E = typename T::Element;
  static constexpr int CHUNKS = 8;  // of 64 columns
  using Values = float[4 * CHUNKS];

 public:
  DEVICE CarefulWarp(const ForwardParams& params, int batch, int head, int first_query)
      : params_(params),
        mask_{params.seq_q, params.seq_kv},
        first_query_(first_query),
        thread_(recomputed(thread_index())),
        blocks_(max(mask_.template blocks<16>(first_query, 16).end, 0)) {
    const int head_kv = head / params.group;
    q_ = static_cast<const uint16*>(params.q) + batch * params.strides_q.batch + head * params.strides_q.head;
    k_ = static_cast<const uint16*>(params.k) + batch * params.strides_k.batch + head_kv * params.strides_k.head;
    v_ = static_cast<const uint16*>(params.v) + batch * params.strides_v.batch + head_kv * params.strides_v.head;
  }

  // Outputs and lse of the rows, from scratch.
  DEVICE void attend(const WarpOutput<T>& output) const {
#pragma unroll 1
    for (int first = 0; first < T::HEAD_DIM / 8; first += CHUNKS) {
      Values out = {};
      RowState state = RowState::empty();
#pragma unroll 1
      for (int block = 0; block < blocks_; ++block) {
        const Fragment weights = weigh(block, out, state);
        for_each_value(block, first, out, [&](Accumulator (&pair)[2], const Fragment& value) {
          mma_pair<E>(pair, weights, finite_or_zero<E>(value));
        });
      }
#pragma unroll 1
      for (int block = 0; block < blocks_; ++block) {
        const Fragment visible = visible_as_operand<E>(mask_, first_query_, 16 * block, thread_);
        for_each_value(block, first, out, [&](Accumulator (&pair)[2], const Fragment& value) {
          add_special<E>(pair, visible, value);
        });
      }
      float inverse[2];
      output.settle(state, inverse);
      output.template write<CHUNKS>(out, first, inverse);
    }
  }

 private:
  // Weights of 16 keys, as operand A; state and outputs are brought up to date.
  DEVICE Fragment weigh(int block, Values& out, RowState& state) const {
    Accumulator scores[1][2] = {};
#pragma unroll 1
    for (int step = 0; step < T::DOT_STEPS; ++step) mma_pair<E>(scores[0], query(step), keys(block, step));
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!mask_.visible(first_query_ + accumulator_row(e, thread_), 16 * block + 8 * side + accumulator_column(e, thread_)))
          scores[0][side].value[e] = -infinity();
    float top[2], decay[2];
    find_tops(scores, top, params_.scale_log2);
    update_softmax<MAX_LAG>(scores, top, state, decay, params_.scale_log2);
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) out[i] *= decay[i / 2 % 2];
    return as_operand<E>(scores[0]);
  }

  // Operand A: 16 queries, 16 elements of head_dim.
  DEVICE Fragment query(int step) const {
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_query_ + accumulator_row(2 * (i % 2), thread_), column = 16 * step + i / 2 * 8 + accumulator_column(0, thread_);
      fragment.reg[i] = load_pair(q_ + row * params_.strides_q.seq + column, is_query(params_, row) && column < T::HEAD_DIM);
    }
    if (params_.scale_sign == 1) return fragment;
    return map_elements(fragment, [&](uint32 half) { return fold_sign<E>(half, params_.scale_sign); });
  }

  // Operand B: 16 elements of head_dim of 16 keys.
  DEVICE Fragment keys(int block, int step) const {
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 16 * block + i / 2 * 8 + accumulator_row(0, thread_), column = 16 * step + i % 2 * 8 + accumulator_column(0, thread_);
      fragment.reg[i] = load_pair(k_ + key * params_.strides_k.seq + column, key < params_.seq_kv && column < T::HEAD_DIM);
    }
    return fragment;
  }

  // Calls `use(pair, value)` with 16 columns of the output and of 16 keys' values, as operand B; four times.
  template <class Use>
  DEVICE void for_each_value(int block, int first, Values& out, Use use) const {
#pragma unroll
    for (int d = 0; d < CHUNKS / 2; ++d) {
      const uint32 thread = recomputed(thread_);
      Fragment value;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 16 * block + i % 2 * 8 + accumulator_column(0, thread);
        const int column = 8 * first + 16 * d + i / 2 * 8 + accumulator_row(0, thread);
        value.reg[i] = element(key, column) | element(key + 1, column) << 16;
      }
      Accumulator pair[2];
#pragma unroll
      for (int i = 0; i < 8; ++i) pair[i / 4].value[i % 4] = out[8 * d + i];
      use(pair, value);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[8 * d + i] = pair[i / 4].value[i % 4];
    }
  }

  DEVICE uint32 element(int key, int column) const {
    const bool valid = key < params_.seq_kv && column < T::HEAD_DIM;
    return valid ? load_global_2(v_ + key * params_.strides_v.seq + column) : 0u;
  }

  const ForwardParams& params_;
  const Mask<T::CAUSAL> mask_;
  const int first_query_;
  const uint32 thread_;  // opaque, or all that follows from it is computed ahead of the loop over tiles, and kept
  const int blocks_;
  const uint16 *q_, *k_, *v_;
};

}  // namespace multiattn
