// The verbs of include/multiattn/wgmma.cuh on the CPU. Accumulators are NaN in `d` until wgmma_wait; until then `d` and `a`
// have to stay where they are.
#pragma once
#include "multiattn/ptx_sm90.cuh"

namespace multiattn {

namespace emulation {
template <class E>
constexpr bool IS_BF16 = false;
template <>
inline constexpr bool IS_BF16<bf16> = true;

void wgmma_ss(bool is_bf16, int columns, float* d, uint64 a, uint64 b, bool add);
void wgmma_rs(bool is_bf16, int columns, float* d, const uint32* a, uint64 b, bool add);
void wgmma_rs_mn(bool is_bf16, int columns, float* d, const uint32* a, uint64 b, bool add);
}  // namespace emulation

template <class E, int N>
inline void wgmma_ss(float (&d)[N / 2], uint64 a, uint64 b, bool add) {
  emulation::wgmma_ss(emulation::IS_BF16<E>, N, d, a, b, add);
}
template <class E, int N>
inline void wgmma_rs(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  emulation::wgmma_rs(emulation::IS_BF16<E>, N, d, a, b, add);
}
template <class E, int N>
inline void wgmma_rs_mn(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  emulation::wgmma_rs_mn(emulation::IS_BF16<E>, N, d, a, b, add);
}

}  // namespace multiattn
