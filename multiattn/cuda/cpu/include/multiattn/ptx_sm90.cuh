// The verbs of include/multiattn/ptx_sm90.cuh on the CPU; the work is done in cpu/verbs.cpp.
#pragma once
#include <initializer_list>

#include "multiattn/ptx.cuh"
#include "multiattn/ptx_math.cuh"

namespace multiattn {

namespace emulation {
extern int64 current_blocks;
void mbarrier_arrive_at(SharedAddress barrier, int rank);
// To the blocks of ranks `first` to `last`; a box's place innermost first.
void tma_load(const char* verb, int first, int last, SharedAddress target, const TensorMap& map, SharedAddress barrier,
              std::initializer_list<int> place);
void tma_store(const char* verb, const TensorMap& map, SharedAddress source, std::initializer_list<int> place);
void tma_store_wait(int groups_left, bool written);
void set_registers(int count, bool raise);
void wgmma_wait(int groups_left);
}  // namespace emulation

inline int64 block_count() { return emulation::current_blocks; }
uint32 uniform(uint32 value);
inline void store_global_4_if(bool predicate, float* target, float value) {
  if (predicate) *target = value;
}
inline void store_global_16_if(bool predicate, void* target, const Chunk& value) {
  if (predicate) store_global_16(target, value);
}
void stmatrix_x4(SharedAddress row, const uint32 (&matrix)[4]);
inline uint32 max_of_halves(uint32 a, uint32 b) {
  return max(a & 0xffffu, b & 0xffffu) | max(a & 0xffff0000u, b & 0xffff0000u);
}
int32 atomic_add_global(int32* target, int32 value);
// Blocks run one after another: a wait for what a later one adds would never end.
int32 ordered_add_global(int32* target, int32 value);
void await_global(const int32* place, int32 value);
void release_add_global_if(bool predicate, int32* target, int32 value);

void mbarrier_init(SharedAddress barrier, int arrivals);
void mbarrier_arrive(SharedAddress barrier);
inline void mbarrier_arrive_if(bool predicate, SharedAddress barrier) {
  if (predicate) mbarrier_arrive(barrier);
}
void mbarrier_arrive_expect(SharedAddress barrier, int bytes);
void mbarrier_wait(SharedAddress barrier, int parity);

inline int cluster_rank() { return emulation::current_rank; }
void meet_cluster();
inline void mbarrier_arrive_if(bool predicate, SharedAddress barrier, int rank) {
  if (predicate) emulation::mbarrier_arrive_at(barrier, rank);
}

void await_earlier_grids();
inline void admit_next_grid() {}

void fence_mbarrier_init();
void fence_async_shared();
void fence_async_global();

void prefetch_map(const TensorMap& map);
inline void tma_load(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                     int batch) {
  const int rank = emulation::current_rank;
  emulation::tma_load("tma_load", rank, rank, target, map, barrier, {column, row, head, batch});
}
inline void tma_load(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                     int end, int wrap) {
  const int rank = emulation::current_rank;
  emulation::tma_load("tma_load", rank, rank, target, map, barrier, {column, row, head, end, wrap});
}
template <int CLUSTER>
inline void tma_load_to_all(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                            int batch) {
  emulation::tma_load("tma_load_to_all", 0, CLUSTER - 1, target, map, barrier, {column, row, head, batch});
}
// Whole lines of 128 bytes, aligned to 128: what the emulation watches.
void bulk_load(SharedAddress target, const void* source, int bytes, SharedAddress barrier);
inline void tma_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int batch) {
  emulation::tma_store("tma_store", map, source, {column, row, head, batch});
}
inline void tma_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int end, int wrap) {
  emulation::tma_store("tma_store", map, source, {column, row, head, end, wrap});
}
// Whole lines, as bulk_load.
void bulk_add_if(bool predicate, float* target, SharedAddress source, int bytes);
void bulk_store_if(bool predicate, void* target, SharedAddress source, int bytes);
void tma_store_commit();
template <int N>
inline void tma_store_wait_read() {
  emulation::tma_store_wait(N, false);
}

template <int N>
inline void tma_store_wait() {
  emulation::tma_store_wait(N, true);
}

void named_barrier_sync(int id, int threads);
bool any_at_named_barrier(int id, int threads, bool predicate);
void named_barrier_arrive(int id, int threads);

template <int N>
inline void lower_registers() {
  emulation::set_registers(N, false);
}
template <int N>
inline void raise_registers() {
  emulation::set_registers(N, true);
}

void wgmma_fence();
void wgmma_commit();
template <int N>
inline void wgmma_wait() {
  emulation::wgmma_wait(N);
}

}  // namespace multiattn
