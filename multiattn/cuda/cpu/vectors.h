// Eight numbers at a time. A function with VECTOR_CLONES is compiled for AVX2, too; loading the library picks one of them.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define VECTOR_CLONES
#else
#define VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#endif

namespace multiattn::emulation {

constexpr int VECTOR = 8;

// Wherever they lie in memory. Name them: `auto` forgets that.
typedef float Floats __attribute__((vector_size(4 * VECTOR), may_alias, aligned(4)));
typedef int Ints __attribute__((vector_size(4 * VECTOR), may_alias, aligned(4)));

}  // namespace multiattn::emulation
