// The verbs of include/multiattn/wgmma.cuh on the CPU. Accumulators are NaN in `d` until wgmma_wait; until then `d` and `a`
// have to stay where they are.
#pragma once
#include "multiattn/ptx_sm90.cuh"

#define WGMMA(N, ...)  // any number of columns will do

namespace multiattn {

namespace emulation {
// `a_registers` is null where A is in shared memory.
void wgmma(const char* verb, bool is_bf16, int columns, float* d, const uint32* a_registers, uint64 a, uint64 b,
           bool a_mn_major, bool b_mn_major, bool add);
}  // namespace emulation

template <class E, int N>
inline void wgmma_ss(float (&d)[N / 2], uint64 a, uint64 b, bool add) {
  emulation::wgmma("wgmma_ss", E::EXPONENT == bf16::EXPONENT, N, d, nullptr, a, b, false, false, add);
}
template <class E, int N>
inline void wgmma_ss_mn(float (&d)[N / 2], uint64 a, uint64 b, bool add) {
  emulation::wgmma("wgmma_ss_mn", E::EXPONENT == bf16::EXPONENT, N, d, nullptr, a, b, true, true, add);
}
template <class E, int N>
inline void wgmma_ss_k_mn(float (&d)[N / 2], uint64 a, uint64 b, bool add) {
  emulation::wgmma("wgmma_ss_k_mn", E::EXPONENT == bf16::EXPONENT, N, d, nullptr, a, b, false, true, add);
}
template <class E, int N>
inline void wgmma_rs(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  emulation::wgmma("wgmma_rs", E::EXPONENT == bf16::EXPONENT, N, d, a, 0, b, false, false, add);
}
template <class E, int N>
inline void wgmma_rs_mn(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  emulation::wgmma("wgmma_rs_mn", E::EXPONENT == bf16::EXPONENT, N, d, a, 0, b, false, true, add);
}

}  // namespace multiattn
