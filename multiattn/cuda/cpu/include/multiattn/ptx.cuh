// The verbs of include/multiattn/ptx.cuh on the CPU. A kernel built against this header runs one fiber per CUDA thread;
// the work is done in cpu/verbs.cpp, built once, so that kernels build fast.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "multiattn/types.h"

#define DEVICE inline
#define KERNEL(threads, blocks) extern "C" void
#define CLUSTER_KERNEL(threads, blocks, cluster) extern "C" void
#define PARAMETERS(Type) const Type&

namespace multiattn {

using std::max;
using std::min;

namespace emulation {
extern int current_thread, current_rank;
extern SharedAddress current_base;
extern int64 current_block;
void cp_async_wait(int groups_left);
}  // namespace emulation

inline int thread_index() { return emulation::current_thread; }
inline int64 block_index() { return emulation::current_block; }
inline uint32 recomputed(uint32 value) { return value; }
inline SharedAddress shared_base() { return emulation::current_base; }

void sync_block();
void sync_warp();
bool any_in_warp(bool predicate);
float shuffle_xor(float value, int lane_mask);
uint32 shuffle_xor(uint32 value, int lane_mask);
uint32 shuffle(uint32 value, int lane);

template <class To, class From>
inline To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float infinity() { return HUGE_VALF; }
inline uint32 float_bits(float x) { return bits_as<uint32>(x); }
inline float float_of_bits(uint32 bits) { return bits_as<float>(bits); }
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_exact(float x) { return log2f(x); }

// verbs.cpp has these for fp16 and bf16.
template <class E> uint32 pack(float low, float high);
template <class E> float unpack_low(uint32 pair);
template <class E> float unpack_high(uint32 pair);
template <class E> void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
#define OF_FORMAT(E)                                  \
  template <> uint32 pack<E>(float low, float high);  \
  template <> float unpack_low<E>(uint32 pair);       \
  template <> float unpack_high<E>(uint32 pair);      \
  template <> void mma_m16n8k16<E>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
OF_FORMAT(fp16)
OF_FORMAT(bf16)
#undef OF_FORMAT
void mma_m16n8k16_fp16(uint32 (&d)[2], const uint32 (&a)[4], uint32 b0, uint32 b1);

inline uint16 load_global_2(const uint16* source) { return *source; }
inline float load_global_4(const float* source) { return *source; }
inline int32 load_global_4(const int32* source) { return *source; }
Chunk load_global_16(const void* source);
void store_global_16(void* target, const Chunk& value);
inline void store_global_4(float* target, float value) { *target = value; }
inline void store_global_pair(uint16* target, uint32 pair) { std::memcpy(target, &pair, sizeof pair); }
void add_global_4(float* target, float value);
void add_global_16(float* target, const float (&value)[4]);

Chunk load_shared_16(SharedAddress source);
float load_shared_4(SharedAddress source);
void load_shared_8(float (&value)[2], SharedAddress source);
void store_shared_16(SharedAddress target, const Chunk& value);
void store_shared_4(SharedAddress target, uint32 value);

void cp_async_16(SharedAddress target, const void* source, bool valid);
void cp_async_4(SharedAddress target, const void* source, bool valid);
void cp_async_commit();
template <int N>
inline void cp_async_wait() {
  emulation::cp_async_wait(N);
}

void ldmatrix_x4(uint32 (&matrix)[4], SharedAddress row);
void ldmatrix_x4_trans(uint32 (&matrix)[4], SharedAddress row);

}  // namespace multiattn
