// Parts that the kernels with mistakes share. Each macro names one, and how the error begins that it must be. Tiles are of 8 KiB:
// one box of 64 rows.
#pragma once
#include "shared.h"

constexpr SharedAddress TILE = 0, OTHER = 8192, BARRIER = 16384;  // of shared memory, where a kernel does not say otherwise
constexpr int BOX = 8192;

#define MISTAKE_OF(threads, name, error) KERNEL(threads, 1) name([[maybe_unused]] PARAMETERS(Arguments) arguments)
#define MISTAKE(name, error) MISTAKE_OF(128, name, error)
// Where BARRIER is an mbarrier of one arrival.
#define MISTAKE_AT_BARRIER(name, error)                                       \
  inline void name##_at_barrier(const Arguments& arguments);                  \
  KERNEL(128, 1) name(PARAMETERS(Arguments) arguments) {                      \
    make_barriers(BARRIER, 1, 1);                                             \
    name##_at_barrier(arguments);                                             \
  }                                                                           \
  inline void name##_at_barrier([[maybe_unused]] const Arguments& arguments)
// In a grid of one cluster of two blocks.
#define CLUSTER_MISTAKE(threads, name, error) \
  CLUSTER_KERNEL(threads, 1, 2) name([[maybe_unused]] PARAMETERS(Arguments) arguments)

inline bool is_thread(int index) { return thread_index() == index; }
inline bool first_thread() { return is_thread(0); }
// After a barrier whoever came last to it goes on first, the next one by number then: this thread after thread 0.
inline bool late_thread() { return is_thread(64); }

inline void load_box(SharedAddress tile, const Arguments& arguments, SharedAddress barrier) {
  tma_load(tile, arguments.a, barrier, 0, 0, 0, 0);
}
inline void load_expected(SharedAddress tile, const Arguments& arguments, SharedAddress barrier, int bytes) {
  mbarrier_arrive_expect(barrier, bytes);
  load_box(tile, arguments, barrier);
}
// Thread 0 loads a box into TILE and all wait.
inline void load_and_wait(const Arguments& arguments, int bytes) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) load_expected(TILE, arguments, BARRIER, bytes);
  mbarrier_wait(BARRIER, 0);
}
// A load has landed in TILE; but the threads have waited for another one, which comes later.
inline void wait_for_another_load(const Arguments& arguments) {
  make_barriers(BARRIER, 2, 1);
  for (int i = 0; i < 2 && first_thread(); ++i) load_expected(TILE + 8192 * i, arguments, BARRIER + 8 * i, BOX);
  mbarrier_wait(BARRIER + 8, 0);
}
inline void store_box(const Arguments& arguments, SharedAddress tile) { tma_store(arguments.out, tile, 0, 0, 0, 0); }
inline void store_and_commit(const Arguments& arguments) {
  store_box(arguments, TILE);
  tma_store_commit();
}
// By all 128 threads.
inline void write_tile(SharedAddress tile) {
  for (int i = 0; i < 4; ++i) store_shared_16(tile + 64 * thread_index() + 16 * i, Chunk{});
}
inline uint64 descriptor(SharedAddress tile) { return Descriptor(tile, 16).at(0); }
inline void multiply_and_wait(SharedAddress a, SharedAddress b) {
  float d[4] = {};
  multiply_tile(d, a, b);
  wgmma_commit();
  wgmma_wait<0>();
}
// As multiply_tile, of tiles that are MN-major.
inline void multiply_mn(float (&d)[4], SharedAddress a, SharedAddress b) {
  wgmma_fence();
  wgmma_ss_mn<fp16, 8>(d, descriptor(a), descriptor(b), true);
}
