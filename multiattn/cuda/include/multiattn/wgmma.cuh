// wgmma.mma_async m64nNk16 for every N: d[64xN] += a[64x16] * b[16xN], fp32 accumulation, by a warpgroup.
// Asynchronous: operands stay as they are until wgmma_wait. The register list of an instruction is as long as N / 2, so
// that the preprocessor writes it: N / 8 groups of four accumulators, then the operands by their place after them.
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
// A from registers, a thread's as for mma.m16n8k16; B K-major.
template <class E, int N>
DEVICE void wgmma_rs(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  Wgmma<E, N>::rs(d, a, b, add);
}
// The same with B MN-major.
template <class E, int N>
DEVICE void wgmma_rs_mn(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, bool add) {
  Wgmma<E, N>::rs_mn(d, a, b, add);
}

// ---- "%0, %1, ...": of the first 4 * n accumulators
#define LIST_1 "%0, %1, %2, %3"
#define LIST_2 LIST_1 ", %4, %5, %6, %7"
#define LIST_3 LIST_2 ", %8, %9, %10, %11"
#define LIST_4 LIST_3 ", %12, %13, %14, %15"
#define LIST_5 LIST_4 ", %16, %17, %18, %19"
#define LIST_6 LIST_5 ", %20, %21, %22, %23"
#define LIST_7 LIST_6 ", %24, %25, %26, %27"
#define LIST_8 LIST_7 ", %28, %29, %30, %31"
#define LIST_9 LIST_8 ", %32, %33, %34, %35"
#define LIST_10 LIST_9 ", %36, %37, %38, %39"
#define LIST_11 LIST_10 ", %40, %41, %42, %43"
#define LIST_12 LIST_11 ", %44, %45, %46, %47"
#define LIST_13 LIST_12 ", %48, %49, %50, %51"
#define LIST_14 LIST_13 ", %52, %53, %54, %55"
#define LIST_15 LIST_14 ", %56, %57, %58, %59"
#define LIST_16 LIST_15 ", %60, %61, %62, %63"
#define LIST_17 LIST_16 ", %64, %65, %66, %67"
#define LIST_18 LIST_17 ", %68, %69, %70, %71"
#define LIST_19 LIST_18 ", %72, %73, %74, %75"
#define LIST_20 LIST_19 ", %76, %77, %78, %79"
#define LIST_21 LIST_20 ", %80, %81, %82, %83"
#define LIST_22 LIST_21 ", %84, %85, %86, %87"
#define LIST_23 LIST_22 ", %88, %89, %90, %91"
#define LIST_24 LIST_23 ", %92, %93, %94, %95"
#define LIST_25 LIST_24 ", %96, %97, %98, %99"
#define LIST_26 LIST_25 ", %100, %101, %102, %103"
#define LIST_27 LIST_26 ", %104, %105, %106, %107"
#define LIST_28 LIST_27 ", %108, %109, %110, %111"
#define LIST_29 LIST_28 ", %112, %113, %114, %115"
#define LIST_30 LIST_29 ", %116, %117, %118, %119"
#define LIST_31 LIST_30 ", %120, %121, %122, %123"
#define LIST_32 LIST_31 ", %124, %125, %126, %127"
// ---- and the accumulators themselves
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_1 FOUR(0)
#define SUMS_2 SUMS_1, FOUR(4)
#define SUMS_3 SUMS_2, FOUR(8)
#define SUMS_4 SUMS_3, FOUR(12)
#define SUMS_5 SUMS_4, FOUR(16)
#define SUMS_6 SUMS_5, FOUR(20)
#define SUMS_7 SUMS_6, FOUR(24)
#define SUMS_8 SUMS_7, FOUR(28)
#define SUMS_9 SUMS_8, FOUR(32)
#define SUMS_10 SUMS_9, FOUR(36)
#define SUMS_11 SUMS_10, FOUR(40)
#define SUMS_12 SUMS_11, FOUR(44)
#define SUMS_13 SUMS_12, FOUR(48)
#define SUMS_14 SUMS_13, FOUR(52)
#define SUMS_15 SUMS_14, FOUR(56)
#define SUMS_16 SUMS_15, FOUR(60)
#define SUMS_17 SUMS_16, FOUR(64)
#define SUMS_18 SUMS_17, FOUR(68)
#define SUMS_19 SUMS_18, FOUR(72)
#define SUMS_20 SUMS_19, FOUR(76)
#define SUMS_21 SUMS_20, FOUR(80)
#define SUMS_22 SUMS_21, FOUR(84)
#define SUMS_23 SUMS_22, FOUR(88)
#define SUMS_24 SUMS_23, FOUR(92)
#define SUMS_25 SUMS_24, FOUR(96)
#define SUMS_26 SUMS_25, FOUR(100)
#define SUMS_27 SUMS_26, FOUR(104)
#define SUMS_28 SUMS_27, FOUR(108)
#define SUMS_29 SUMS_28, FOUR(112)
#define SUMS_30 SUMS_29, FOUR(116)
#define SUMS_31 SUMS_30, FOUR(120)
#define SUMS_32 SUMS_31, FOUR(124)

// `p0` to `p5`: places of the operands that follow the accumulators.
#define SHARED_A(n, columns, type, p0, p1, p2)                                                            \
  static DEVICE void ss(float(&d)[4 * n], uint64 a, uint64 b, bool add) {                                  \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " p2 ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" LIST_##n "}, "   \
                 p0 ", " p1 ", add, 1, 1, 0, 0;}"                                                          \
                 : SUMS_##n                                                                                \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                            \
  }
#define REGISTERS_A(n, columns, type, name, mn_major, p0, p1, p2, p3, p4, p5)                              \
  static DEVICE void name(float(&d)[4 * n], const uint32(&a)[4], uint64 b, bool add) {                     \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " p5 ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" LIST_##n "}, "   \
                 "{" p0 ", " p1 ", " p2 ", " p3 "}, " p4 ", add, 1, 1, " mn_major ";}"                      \
                 : SUMS_##n                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));         \
  }
#define OF_TYPE(n, columns, E, type, p0, p1, p2, p3, p4, p5)                  \
  template <>                                                                \
  struct Wgmma<E, 8 * n> {                                                   \
    SHARED_A(n, columns, type, p0, p1, p2)                                   \
    REGISTERS_A(n, columns, type, rs, "0", p0, p1, p2, p3, p4, p5)           \
    REGISTERS_A(n, columns, type, rs_mn, "1", p0, p1, p2, p3, p4, p5)        \
  };
#define OF_COLUMNS(n, columns, ...)                 \
  OF_TYPE(n, columns, fp16, "f16", __VA_ARGS__)     \
  OF_TYPE(n, columns, bf16, "bf16", __VA_ARGS__)

OF_COLUMNS(1, "8", "%4", "%5", "%6", "%7", "%8", "%9")
OF_COLUMNS(2, "16", "%8", "%9", "%10", "%11", "%12", "%13")
OF_COLUMNS(3, "24", "%12", "%13", "%14", "%15", "%16", "%17")
OF_COLUMNS(4, "32", "%16", "%17", "%18", "%19", "%20", "%21")
OF_COLUMNS(5, "40", "%20", "%21", "%22", "%23", "%24", "%25")
OF_COLUMNS(6, "48", "%24", "%25", "%26", "%27", "%28", "%29")
OF_COLUMNS(7, "56", "%28", "%29", "%30", "%31", "%32", "%33")
OF_COLUMNS(8, "64", "%32", "%33", "%34", "%35", "%36", "%37")
OF_COLUMNS(9, "72", "%36", "%37", "%38", "%39", "%40", "%41")
OF_COLUMNS(10, "80", "%40", "%41", "%42", "%43", "%44", "%45")
OF_COLUMNS(11, "88", "%44", "%45", "%46", "%47", "%48", "%49")
OF_COLUMNS(12, "96", "%48", "%49", "%50", "%51", "%52", "%53")
OF_COLUMNS(13, "104", "%52", "%53", "%54", "%55", "%56", "%57")
OF_COLUMNS(14, "112", "%56", "%57", "%58", "%59", "%60", "%61")
OF_COLUMNS(15, "120", "%60", "%61", "%62", "%63", "%64", "%65")
OF_COLUMNS(16, "128", "%64", "%65", "%66", "%67", "%68", "%69")
OF_COLUMNS(17, "136", "%68", "%69", "%70", "%71", "%72", "%73")
OF_COLUMNS(18, "144", "%72", "%73", "%74", "%75", "%76", "%77")
OF_COLUMNS(19, "152", "%76", "%77", "%78", "%79", "%80", "%81")
OF_COLUMNS(20, "160", "%80", "%81", "%82", "%83", "%84", "%85")
OF_COLUMNS(21, "168", "%84", "%85", "%86", "%87", "%88", "%89")
OF_COLUMNS(22, "176", "%88", "%89", "%90", "%91", "%92", "%93")
OF_COLUMNS(23, "184", "%92", "%93", "%94", "%95", "%96", "%97")
OF_COLUMNS(24, "192", "%96", "%97", "%98", "%99", "%100", "%101")
OF_COLUMNS(25, "200", "%100", "%101", "%102", "%103", "%104", "%105")
OF_COLUMNS(26, "208", "%104", "%105", "%106", "%107", "%108", "%109")
OF_COLUMNS(27, "216", "%108", "%109", "%110", "%111", "%112", "%113")
OF_COLUMNS(28, "224", "%112", "%113", "%114", "%115", "%116", "%117")
OF_COLUMNS(29, "232", "%116", "%117", "%118", "%119", "%120", "%121")
OF_COLUMNS(30, "240", "%120", "%121", "%122", "%123", "%124", "%125")
OF_COLUMNS(31, "248", "%124", "%125", "%126", "%127", "%128", "%129")
OF_COLUMNS(32, "256", "%128", "%129", "%130", "%131", "%132", "%133")

#undef FOUR
#undef SHARED_A
#undef REGISTERS_A
#undef OF_TYPE
#undef OF_COLUMNS

}  // namespace multiattn
