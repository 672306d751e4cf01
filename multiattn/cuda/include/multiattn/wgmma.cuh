// wgmma.mma_async m64nNk16 for every N: d[64xN] += a[64x16] * b[16xN], fp32 accumulation, by a warpgroup.
// Asynchronous: operands stay as they are until wgmma_wait.
#pragma once
#include "multiattn/ptx_sm90.cuh"

namespace multiattn {

// A matrix in shared memory is told by a descriptor, see descriptor.cuh. `add` false: what was in d does not count.
template <class E, int N>
struct Wgmma;

// A from shared memory, K-major; B too.
template <class E, int N>
DEVICE void wgmma_ss(float (&d)[N / 2], uint64 a, uint64 b, bool add) {
  Wgmma<E, N>::ss(d, a, b, add);
}
// A and B from shared memory, both MN-major: A is [16, 64], one panel.
template <class E, int N>
DEVICE void wgmma_ss_mn(float (&d)[N / 2], uint64 a, uint64 b, bool add) {
  Wgmma<E, N>::ss_mn(d, a, b, add);
}
// A from shared memory, K-major; B MN-major.
template <class E, int N>
DEVICE void wgmma_ss_k_mn(float (&d)[N / 2], uint64 a, uint64 b, bool add) {
  Wgmma<E, N>::ss_k_mn(d, a, b, add);
}
// A from registers, a thread's as for mma.m16n8k16; B K-major.
template <class E, int N>
DEVICE void wgmma_rs(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  Wgmma<E, N>::rs(d, a, b, add);
}
// A from registers, B MN-major.
template <class E, int N>
DEVICE void wgmma_rs_mn(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  Wgmma<E, N>::rs_mn(d, a, b, add);
}

// `WGMMA` defines those of N columns, in both formats. What the preprocessor cannot count, source.py writes: `list` has the
// accumulators' places, "%0, %1, ...", `p0` to `p5` the next ones, and the rest are the accumulators themselves.
#define SHARED_A(N, type, name, mn_major, list, p0, p1, p2, ...)                                          \
  static DEVICE void name(float(&d)[N / 2], uint64 a, uint64 b, bool add) {                               \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " p2 ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" list "}, "          \
                 p0 ", " p1 ", add, 1, 1, " mn_major ";}"                                                 \
                 : __VA_ARGS__                                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
  }
#define REGISTERS_A(N, type, name, mn_major, list, p0, p1, p2, p3, p4, p5, ...)                           \
  static DEVICE void name(float(&d)[N / 2], const uint32(&a)[4], uint64 b, bool add) {                    \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " p5 ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" list "}, "          \
                 "{" p0 ", " p1 ", " p2 ", " p3 "}, " p4 ", add, 1, 1, " mn_major ";}"                    \
                 : __VA_ARGS__                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));       \
  }
#define OF_TYPE(N, E, type, list, p0, p1, p2, p3, p4, p5, ...)                                            \
  template <>                                                                                             \
  struct Wgmma<E, N> {                                                                                    \
    SHARED_A(N, type, ss, "0, 0", list, p0, p1, p2, __VA_ARGS__)                                          \
    SHARED_A(N, type, ss_mn, "1, 1", list, p0, p1, p2, __VA_ARGS__)                                       \
    SHARED_A(N, type, ss_k_mn, "0, 1", list, p0, p1, p2, __VA_ARGS__)                                     \
    REGISTERS_A(N, type, rs, "0", list, p0, p1, p2, p3, p4, p5, __VA_ARGS__)                              \
    REGISTERS_A(N, type, rs_mn, "1", list, p0, p1, p2, p3, p4, p5, __VA_ARGS__)                           \
  };
#define WGMMA(N, ...)                     \
  namespace multiattn {                   \
  OF_TYPE(N, fp16, "f16", __VA_ARGS__)    \
  OF_TYPE(N, bf16, "bf16", __VA_ARGS__)   \
  }

}  // namespace multiattn
