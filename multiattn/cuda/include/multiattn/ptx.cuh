// The verbs a kernel is written in, each one instruction (or one intrinsic) of the GPU. The only inline assembly.
// cpu/include/multiattn/ptx.cuh has the same verbs on the CPU; the include path chooses.
#pragma once
#include "multiattn/types.h"

#define DEVICE __device__ __forceinline__
// The entry point of a kernel: at most `threads` a block; registers for `blocks` of them on each SM.
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
// The entry point of a kernel whose grid is of clusters of so many blocks.
#define CLUSTER_KERNEL(threads, blocks, cluster) \
  extern "C" __global__ void __cluster_dims__(cluster) __launch_bounds__(threads, blocks)
// A parameter struct that stays in constant memory.
#define PARAMETERS(Type) const __grid_constant__ Type

namespace multiattn {

// ---- who am I
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int64 block_index() { return blockIdx.x; }

// `value`, but the compiler does not know that: what is computed from it is computed where it is needed, again and
// again, instead of once and kept in registers.
DEVICE uint32 recomputed(uint32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Start of the dynamic shared memory.
DEVICE SharedAddress shared_base() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return static_cast<SharedAddress>(__cvta_generic_to_shared(bytes));
}

// ---- barriers and votes
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE bool any_in_warp(bool predicate) { return __any_sync(0xffffffffu, predicate); }
DEVICE float shuffle_xor(float value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
DEVICE uint32 shuffle_xor(uint32 value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
// The value that a lane of the warp has.
DEVICE uint32 shuffle(uint32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// ---- arithmetic
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE uint32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float float_of_bits(uint32 bits) { return __uint_as_float(bits); }
DEVICE float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
DEVICE float log2_exact(float x) { return log2f(x); }

// Two floats rounded to nearest even, `low` in the low half.
template <class E>
DEVICE uint32 pack(float low, float high);
template <>
DEVICE uint32 pack<fp16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
DEVICE uint32 pack<bf16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// The low and the high half of what `pack` made.
template <class E>
DEVICE float unpack_low(uint32 pair);
template <class E>
DEVICE float unpack_high(uint32 pair);
template <>
DEVICE float unpack_low<bf16>(uint32 pair) { return __uint_as_float(pair << 16); }
template <>
DEVICE float unpack_high<bf16>(uint32 pair) { return __uint_as_float(pair & 0xffff0000u); }
template <>
DEVICE float unpack_low<fp16>(uint32 pair) {
  float result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(result) : "r"(pair));
  return result;
}
template <>
DEVICE float unpack_high<fp16>(uint32 pair) {
  float result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(result) : "r"(pair));
  return result;
}

// ---- global memory
DEVICE uint16 load_global_2(const uint16* source) { return *source; }
DEVICE float load_global_4(const float* source) { return *source; }
DEVICE int32 load_global_4(const int32* source) { return *source; }
DEVICE Chunk load_global_16(const void* source) { return *static_cast<const Chunk*>(source); }
DEVICE void store_global_16(void* target, const Chunk& value) { *static_cast<Chunk*>(target) = value; }
DEVICE void store_global_4(float* target, float value) { *target = value; }
// Stores a pair that `pack` made at a multiple of 4 bytes.
DEVICE void store_global_pair(uint16* target, uint32 pair) { *reinterpret_cast<uint32*>(target) = pair; }
// *target += value, by many blocks at a time, in any order.
DEVICE void add_global_4(float* target, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target), "f"(value) : "memory");
}
// Four neighbours at a multiple of 16 bytes; sm90 and later.
DEVICE void add_global_16(float* target, const float (&value)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
}

// ---- shared memory
DEVICE Chunk load_shared_16(SharedAddress source) {
  Chunk value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(source)
               : "memory");
  return value;
}
DEVICE float load_shared_4(SharedAddress source) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(source) : "memory");
  return value;
}
DEVICE void load_shared_8(float (&value)[2], SharedAddress source) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value[0]), "=f"(value[1]) : "r"(source) : "memory");
}
DEVICE void store_shared_16(SharedAddress target, const Chunk& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}
DEVICE void store_shared_4(SharedAddress target, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(value) : "memory");
}

// ---- global to shared, asynchronously: 16 bytes, or zeros when `valid` is false (nothing is read then)
DEVICE void cp_async_16(SharedAddress target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
// Copies 4 bytes, or zeros.
DEVICE void cp_async_4(SharedAddress target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are under way. Other threads see the data only after a barrier.
template <int N>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- matrices
// Four 8x8 matrices of 16-bit elements; lane 8*i+r gives the address of row r of matrix i.
DEVICE void ldmatrix_x4(uint32 (&matrix)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row)
               : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32 (&matrix)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row)
               : "memory");
}

// d[16x8] += a[16x16] * b[16x8], fp32 accumulation.
template <class E>
DEVICE void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
template <>
DEVICE void mma_m16n8k16<fp16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a * b in fp16, accumulated in fp16: d[0] is of the row lane / 4, d[1] of the row 8 below.
DEVICE void mma_m16n8k16_fp16(uint32 (&d)[2], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace multiattn
