// The parameter struct of the forward kernel for sm90; multiattn/cuda/params.py reads it from here.
#pragma once
#include "multiattn/params.h"
#include "multiattn/tensor_map.h"

namespace multiattn {

struct WgmmaParams {
  // 4-D: D, S, H, B, innermost first; boxes are 64 columns of TILE_M rows of q, TILE_N / CLUSTER of k and v, 64 of
  // out.
  TensorMap map_q, map_k, map_v, map_out;
  ForwardParams forward;
  int32* next_tile;  // with Scheduler::DYNAMIC a counter, zero at launch and again afterwards; else null
};

}  // namespace multiattn
