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
bool any_in_warp(bool predicate);
void cp_async_wait(int groups_left);
uint32 pack_fp16(float low, float high);
uint32 pack_bf16(float low, float high);
float unpack_fp16(uint32 half);
void mma_fp16(float* d, const uint32* a, uint32 b0, uint32 b1);
void mma_bf16(float* d, const uint32* a, uint32 b0, uint32 b1);
}  // namespace emulation

inline int thread_index() { return emulation::current_thread; }
inline int64 block_index() { return emulation::current_block; }
inline uint32 recomputed(uint32 value) { return value; }
inline SharedAddress shared_base() { return emulation::current_base; }

void sync_block();
void sync_warp();
inline bool any_in_warp(bool predicate) { return emulation::any_in_warp(predicate); }
float shuffle_xor(float value, int lane_mask);
uint32 shuffle_xor(uint32 value, int lane_mask);

namespace emulation {
inline float float_of_bits(uint32 bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emulation

inline float infinity() { return HUGE_VALF; }
inline uint32 float_bits(float x) {
  uint32 bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_exact(float x) { return log2f(x); }

template <class E>
uint32 pack(float low, float high);
template <>
inline uint32 pack<fp16>(float low, float high) {
  return emulation::pack_fp16(low, high);
}
template <>
inline uint32 pack<bf16>(float low, float high) {
  return emulation::pack_bf16(low, high);
}

template <class E>
float unpack_low(uint32 pair);
template <class E>
float unpack_high(uint32 pair);
template <>
inline float unpack_low<fp16>(uint32 pair) {
  return emulation::unpack_fp16(pair & 0xffffu);
}
template <>
inline float unpack_high<fp16>(uint32 pair) {
  return emulation::unpack_fp16(pair >> 16);
}
template <>
inline float unpack_low<bf16>(uint32 pair) {
  return emulation::float_of_bits(pair << 16);
}
template <>
inline float unpack_high<bf16>(uint32 pair) {
  return emulation::float_of_bits(pair & 0xffff0000u);
}

inline uint16 load_global_2(const uint16* source) { return *source; }
inline float load_global_4(const float* source) { return *source; }
Chunk load_global_16(const void* source);
void store_global_16(void* target, const Chunk& value);
inline void store_global_4(float* target, float value) { *target = value; }
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

template <class E>
void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
template <>
inline void mma_m16n8k16<fp16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulation::mma_fp16(d, a, b0, b1);
}
template <>
inline void mma_m16n8k16<bf16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulation::mma_bf16(d, a, b0, b1);
}

void mma_m16n8k16_fp16(uint32 (&d)[2], const uint32 (&a)[4], uint32 b0, uint32 b1);

}  // namespace multiattn
