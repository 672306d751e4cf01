// The parameter struct of the forward kernel.
// multiattn/cuda/params.py mirrors it; every translation unit asserts that both have one size.
#pragma once
#include "multiattn/types.h"

namespace multiattn {

// Strides in elements; the stride of D is 1. Any of them may be 0 (broadcast).
struct Strides {
  int64 batch, head, seq;
};

struct ForwardParams {
  const void* q;  // [batch, heads_q, seq_q, D] 16-bit, never null
  const void* k;  // [batch, heads_q / group, seq_kv, D] 16-bit, never null
  const void* v;  // like k
  void* out;      // [batch, heads_q, seq_q, D] 16-bit, never null, rows 16-byte aligned
  float* lse;     // [batch, heads_q, seq_q], contiguous, natural log, never null
  Strides strides_q, strides_k, strides_v, strides_out;
  int32 heads_q;
  int32 group;  // query heads that share one key/value head
  int32 seq_q, seq_kv;
  int32 tiles;              // of TILE_M queries, per head
  int32 heads;              // batch * heads_q
  int32 heads_per_section;  // heads whose tiles run side by side, so that their K and V stay in L2
  int32 scale_sign;         // of the softmax scale: 1, -1 or 0; it is folded into Q
  float scale_log2;         // |scale| * log2(e), always positive; without meaning when scale_sign is 0
};

}  // namespace multiattn
