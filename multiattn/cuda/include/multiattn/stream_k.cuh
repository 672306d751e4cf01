// A schedule of which tiles are divided among blocks, so that these end at the same time: Osama et al., "Stream-K"
// (arXiv 2301.03598).
#pragma once
#include "multiattn/sequence.cuh"

namespace multiattn {

// In the place of a block mask among a kernel's constants.
struct StreamK {};

template <class Blocked>
constexpr bool IS_STREAM_K = false;
template <>
constexpr bool IS_STREAM_K<StreamK> = true;
template <>
struct ListsOf<StreamK> {
  using Type = Division;
};

}  // namespace multiattn
