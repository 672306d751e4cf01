// Kernels for tests/test_cuda_emulation.py with one mistake each. Each macro names one, and how the error begins that it must
// be. Tiles are of 8 KiB: one box of 64 rows.
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
// A load has landed in TILE; but the threads have waited for another one, which was issued before it.
inline void wait_for_another_load(const Arguments& arguments) {
  make_barriers(BARRIER, 2, 1);
  for (int i = 1; i >= 0 && first_thread(); --i) load_expected(TILE + 8192 * i, arguments, BARRIER + 8 * i, BOX);
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

KERNEL(128, 1) nothing(PARAMETERS(Arguments)) {}
KERNEL(128, 1) checked_map(PARAMETERS(Arguments) arguments) { prefetch_map(arguments.b); }  // which the test spoils

// ---- warps and blocks, with nothing of sm90
MISTAKE_OF(32, divergent_lanes, "divergent warp: this lane is in ldmatrix_x4, another one in shuffle_xor") {
  uint32 matrix[4];
  if (thread_index() < 16)
    shuffle_xor(0.0f, 1);
  else
    ldmatrix_x4(matrix, 0);
}
MISTAKE_OF(32, lanes_left_behind, "returns while its warp waits in shuffle_xor") {
  if (thread_index() < 16) shuffle_xor(0.0f, 1);
}
MISTAKE_OF(64, deadlock, "deadlock: thread 0 in sync_block; threads 1-31 in shuffle_xor; threads 32-63 in sync_block;") {
  if (thread_index() == 0) sync_block();
  if (thread_index() > 0 && thread_index() < 32) shuffle_xor(0.0f, 1);
  sync_block();
}
MISTAKE_OF(32, missing_wait, "reads a cp.async that has not been waited for") {
  cp_async_16(thread_index() * 16, arguments.c, true);
  cp_async_commit();
  sync_block();
  load_shared_16(thread_index() * 16);
}
MISTAKE_OF(64, missing_barrier, "reads, with no barrier between, what was written") {
  store_shared_16(thread_index() * 16, Chunk{});
  sync_warp();
  load_shared_16(thread_index() % 32 * 16);  // warp 1 reads what warp 0 wrote
}
MISTAKE_OF(32, missing_warp_barrier, "thread 1: load_shared_16: reads, with no barrier between, what was written by thread 0") {
  store_shared_16(thread_index() * 16, Chunk{});
  load_shared_16(0);
}
MISTAKE_OF(64, overwritten_too_early, "overwrites, with no barrier between, what was read") {
  store_shared_16(thread_index() * 16, Chunk{});
  sync_block();
  if (thread_index() >= 32)
    load_shared_16((thread_index() - 32) * 16);
  else
    store_shared_16(thread_index() * 16, Chunk{});
}
MISTAKE_OF(32, outside_shared_memory, "store_shared_4: address 49152 is outside the 49152 bytes of shared memory") { store_shared_4(49152, 0); }
MISTAKE_OF(32, misaligned_matrix, "ldmatrix_x4: address 8 is not aligned to 16 bytes") {
  uint32 matrix[4];
  ldmatrix_x4(matrix, 8);
}
MISTAKE_OF(32, misaligned_copy, "cp_async_16: the global address is not aligned to 16 bytes") { cp_async_16(0, arguments.c + 1, true); }

// ---- mbarriers
MISTAKE(arrival_without_init, "mbarrier_arrive: there is no mbarrier at 16384: mbarrier_init") { mbarrier_arrive(BARRIER); }
MISTAKE(init_not_seen, "thread 64: mbarrier_arrive: no barrier follows the mbarrier_init of 16384") {
  if (first_thread()) mbarrier_init(BARRIER, 1);
  if (is_thread(64)) mbarrier_arrive(BARRIER);
}
MISTAKE_AT_BARRIER(init_twice, "mbarrier_init: the mbarrier at 16384 exists already") { make_barriers(BARRIER, 1, 1); }
MISTAKE(misaligned_mbarrier, "mbarrier_init: address 16388 is not aligned to 8 bytes") { mbarrier_init(BARRIER + 4, 1); }
MISTAKE(mbarrier_of_nobody, "mbarrier_init: a count of 0") { mbarrier_init(BARRIER, 0); }
MISTAKE(too_many_mbarriers, "mbarrier_init: the emulation has no more than 80 mbarriers") { make_barriers(BARRIER, 81, 1); }
MISTAKE_AT_BARRIER(too_many_arrivals, "more arrivals than the 1 of a phase at the mbarrier(16384, phase 0: 1 of 1 arrivals, ") {
  if (first_thread()) mbarrier_arrive_expect(BARRIER, BOX);
  if (is_thread(32)) mbarrier_arrive(BARRIER);
}
MISTAKE(bytes_never_come, "in mbarrier_wait(16384, phase 0: 1 of 1 arrivals, 8192 by") { load_and_wait(arguments, 2 * BOX); }
MISTAKE(too_many_bytes, "tma_load: more bytes than expected came to the mbarrier") { load_and_wait(arguments, BOX / 2); }
MISTAKE(wait_for_nobody, "deadlock: threads 0-127 in mbarrier_wait(16384, phase 0: 1 of 2 arrivals, 0 bytes missing);") {
  make_barriers(BARRIER, 1, 2);
  if (first_thread()) mbarrier_arrive(BARRIER);
  mbarrier_wait(BARRIER, 0);
}
MISTAKE_AT_BARRIER(odd_parity, "mbarrier_wait: a parity of 2") { mbarrier_wait(BARRIER, 2); }
MISTAKE_AT_BARRIER(phase_missed, "mbarrier_wait: the phase after the one waited for has gone by, too: mbarrier(16384, phase 2") {
  if (first_thread()) mbarrier_wait(BARRIER, 0);
  for (int i = 0; i < 2 && is_thread(1); ++i) mbarrier_arrive(BARRIER);
}

// ---- stmatrix
MISTAKE_OF(32, matrix_outside, "stmatrix_x4: address 49152 is outside the 49152 bytes") { stmatrix_x4(49152, {}); }
MISTAKE_OF(32, matrix_of_half_a_warp, "thread 16: returns while its warp waits in stmatrix_x4") {
  if (thread_index() < 16) stmatrix_x4(16 * thread_index(), {});
}

// ---- TMA
MISTAKE_AT_BARRIER(misaligned_tile, "tma_load: address 512 is not aligned to 1024 bytes") {
  load_box(TILE + 512, arguments, BARRIER);
}
MISTAKE_AT_BARRIER(tile_outside, "tma_load: address 41984 is outside the 49152 bytes of shared memory") {
  load_box(40960 + 1024, arguments, BARRIER);
}
MISTAKE(mbarrier_not_fenced, "tma_load: no fence_mbarrier_init follows the mbarrier_init of 16384") {
  if (first_thread()) mbarrier_init(BARRIER, 1);
  sync_block();
  load_box(TILE, arguments, BARRIER);
}
MISTAKE_AT_BARRIER(mbarrier_overwritten, "tma_load: overwrites the mbarrier at 16384") {
  load_box(BARRIER, arguments, BARRIER);
}
MISTAKE(no_map, "prefetch_map: the tensor map has a box that is not of 64 columns of one head") { prefetch_map(TensorMap{}); }
MISTAKE_AT_BARRIER(another_rank, "tma_load: the tensor map has 4 dimensions") {
  tma_load(TILE, arguments.a, BARRIER, 0, 0, 0, 0, 0);
}
MISTAKE(misaligned_map, "prefetch_map: the tensor map is not aligned to 64 bytes") {
  alignas(64) const unsigned char memory[32 + sizeof(TensorMap)] = {};
  prefetch_map(*static_cast<const TensorMap*>(static_cast<const void*>(memory + 32)));
}
MISTAKE_AT_BARRIER(load_read_too_early, "reads a TMA load under way at shared address 256") {
  if (!first_thread()) return;
  load_expected(TILE, arguments, BARRIER, BOX);
  load_shared_4(TILE + 256);
}
MISTAKE(load_read_after_another_wait, "reads, without a wait on its mbarrier, what a TMA load wrote at shared") {
  wait_for_another_load(arguments);
  load_shared_4(TILE);
}
// Only the thread that loads has waited for the slot's first phase: to another one the second looks complete before it began.
MISTAKE(load_read_in_a_phase_too_early, "reads a TMA load under way at shared address 0") {
  make_barriers(BARRIER, 2, 1);
  if (first_thread()) load_expected(TILE, arguments, BARRIER, BOX);
  if (is_thread(32)) mbarrier_wait(BARRIER, 1);
  if (is_thread(32)) load_shared_4(TILE);
}
MISTAKE_AT_BARRIER(load_overwritten_too_early, "overwrites a TMA load under way at shared address 128") {
  if (!first_thread()) return;
  load_box(TILE, arguments, BARRIER);
  store_shared_4(TILE + 128, 0);
}
MISTAKE_AT_BARRIER(load_over_what_is_read, "tma_load: overwrites, with no barrier between, what was read by thread 0 at") {
  if (thread_index() < 64) load_shared_4(TILE + 1024);
  if (late_thread()) load_box(TILE, arguments, BARRIER);
}
// Lane 0 lets know that the warp has read, without having met the others.
MISTAKE(load_after_a_lonely_arrival, "tma_load: overwrites, with no barrier between, what was read by thread 1 at") {
  make_barriers(BARRIER, 2, 1);
  if (thread_index() < 32) load_shared_4(TILE + 128 * thread_index());
  if (first_thread()) mbarrier_arrive(BARRIER);
  if (!is_thread(32)) return;
  mbarrier_wait(BARRIER, 0);
  load_box(TILE, arguments, BARRIER + 8);
}
MISTAKE_AT_BARRIER(load_over_what_is_written, "tma_load: overwrites, with no barrier between, what was written by thread 0") {
  if (first_thread()) store_shared_4(TILE + 1024, 0);
  if (late_thread()) load_box(TILE, arguments, BARRIER);
}
MISTAKE_AT_BARRIER(load_left_behind, "returns, the last thread of the block, with TMA loads under way") {
  if (first_thread()) load_box(TILE, arguments, BARRIER);
}
MISTAKE(store_not_fenced, "tma_store: reads, with no fence_async_shared after it, what thread 0 wrote") {
  write_tile(TILE);
  named_barrier_sync(1, 128);
  store_box(arguments, TILE);
}
MISTAKE_AT_BARRIER(store_fenced_too_late, "tma_store: reads, with no barrier after its fence_async_shared, what thread 0 wrote") {
  if (first_thread()) store_shared_4(TILE, 0);
  named_barrier_sync(1, 128);
  fence_async_shared();
  if (late_thread()) store_box(arguments, TILE);
}
MISTAKE_AT_BARRIER(store_of_a_load_under_way, "tma_store: reads a TMA load under way") {
  if (!first_thread()) return;
  load_box(TILE, arguments, BARRIER);
  store_box(arguments, TILE);
}
MISTAKE(store_of_a_load_not_waited_for, "tma_store: reads, without a wait on its mbarrier, what a TMA load wrote") {
  wait_for_another_load(arguments);
  store_box(arguments, TILE);
}
MISTAKE(store_before_the_tensor, "tma_store: begins before the tensor, which is an illegal instruction") {
  if (first_thread()) tma_store(arguments.out, TILE, 0, -64, 0, 0);
}
MISTAKE(stored_memory_overwritten, "overwrites what a TMA store under way reads at shared address 4096") {
  if (!first_thread()) return;
  fence_async_shared();
  store_and_commit(arguments);
  store_shared_4(TILE + 4096, 0);
}
MISTAKE_AT_BARRIER(load_over_stored_memory, "tma_load: overwrites what a TMA store under way reads") {
  if (!first_thread()) return;
  store_and_commit(arguments);
  tma_store_wait_read<1>();
  load_box(TILE, arguments, BARRIER);
}
MISTAKE_AT_BARRIER(stored_memory_overwritten_by_others, "overwrites, with no barrier between, what was read by thread 0") {
  if (first_thread()) store_and_commit(arguments);
  if (first_thread()) tma_store_wait_read<0>();
  if (is_thread(32)) store_shared_4(TILE, 0);
}
MISTAKE(store_not_waited_for, "returns without a wait for its TMA stores") {
  if (first_thread()) store_and_commit(arguments);
}
MISTAKE(store_not_committed, "returns without a wait for its TMA stores to read shared memory") {
  if (!first_thread()) return;
  store_box(arguments, TILE);
  tma_store_wait_read<0>();
}

// ---- wgmma
MISTAKE(wgmma_without_wait_on_mbarrier, "wgmma_ss: reads, without a wait on its mbarrier, what a TMA load wrote") {
  wait_for_another_load(arguments);
  multiply_and_wait(TILE, TILE);
}
MISTAKE(wgmma_diverges, "divergent warpgroup: this thread is in wgmma_ss, another one in wgmma_commit") {
  float d[4] = {};
  wgmma_fence();
  if (thread_index() >= 64)
    wgmma_commit();
  else
    wgmma_ss<fp16, 8>(d, descriptor(TILE), descriptor(TILE), true);
  wgmma_wait<0>();
}
MISTAKE(wgmma_missing_in_a_warp, "divergent warpgroup: this thread is in wgmma_wait, another one in wgmma_fence") {
  float d[4] = {};
  if (thread_index() < 96) multiply_tile(d, TILE, TILE);
  wgmma_wait<0>();
}
MISTAKE(wgmma_descriptors_differ, "wgmma_ss: the threads of the warpgroup differ in its descriptors or constants") {
  multiply_and_wait(TILE, TILE + thread_index() / 32 * 1024);
}
MISTAKE(wgmma_threads_missing, "wgmma_fence: needs all 128 threads of the warpgroup; 32") {
  if (thread_index() >= 32) wgmma_fence();
}
MISTAKE(wgmma_left_by_a_thread, "127: returns while its warpgroup waits in wgmma_wait") {
  if (!is_thread(127)) wgmma_wait<0>();
}
MISTAKE_OF(64, wgmma_of_half_a_warpgroup, "wgmma_fence: the thread is in no whole warpgroup of 128") { wgmma_fence(); }
MISTAKE(wgmma_not_waited_for, "returns with wgmmas under way") {
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
  wgmma_commit();
  wgmma_wait<1>();
}
MISTAKE(wgmma_not_committed, "returns with wgmmas under way") {
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
  wgmma_wait<0>();
}
MISTAKE(wgmma_diverges_from_a_warps_collective, "this lane is in wgmma_wait, another one in sync_warp") {
  if (first_thread())
    sync_warp();
  else
    wgmma_wait<0>();
}
MISTAKE(wgmma_outside, "wgmma_ss: address 49152 is outside the 49152 bytes") { multiply_and_wait(TILE, 40960 + 8192); }
MISTAKE(wgmma_without_swizzle, "wgmma_ss: a descriptor without the 128-byte swizzle") {
  float d[4] = {};
  wgmma_ss<fp16, 8>(d, descriptor(TILE), descriptor(TILE) & ~(uint64(3) << 62), true);
}
MISTAKE(wgmma_with_base_offset, "wgmma_ss: a descriptor with a base offset") {
  float d[4] = {};
  wgmma_ss<fp16, 8>(d, descriptor(TILE) | uint64(1) << 49, descriptor(TILE), true);
}
MISTAKE(weights_changed_under_way, "wgmma_wait: thread 100 changed operand A of a wgmma_rs under way") {
  float d[4] = {};
  uint32 a[4] = {};
  wgmma_rs<fp16, 8>(d, a, descriptor(TILE), true);
  wgmma_commit();
  if (is_thread(100)) a[3] = 1;
  wgmma_wait<0>();
}
MISTAKE(sums_changed_under_way, "wgmma_wait: thread 100 wrote accumulators of a wgmma under way") {
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
  wgmma_commit();
  if (is_thread(100)) d[1] = 0.0f;
  wgmma_wait<0>();
}
MISTAKE(sums_overlap, "wgmma_ss: accumulators that are a part of another wgmma's under way") {
  float d[8] = {};
  wgmma_ss<fp16, 16>(d, descriptor(TILE), descriptor(TILE), true);
  multiply_tile(*reinterpret_cast<float(*)[4]>(&d[4]), TILE, TILE);
}
MISTAKE(sums_elsewhere, "wgmma_ss: accumulators at another place than in the warpgroup's other threads") {
  float d[2][4] = {};
  multiply_tile(d[0], TILE, TILE);
  multiply_tile(d[thread_index() / 64], TILE, TILE);
  wgmma_wait<0>();
}
MISTAKE(load_over_what_wgmma_reads, "tma_load: overwrites what a wgmma under way reads") {
  make_barriers(BARRIER, 2, 1);
  fill_tile(TILE, arguments, BARRIER);
  float d[4] = {};
  multiply_tile(d, OTHER, TILE);
  wgmma_commit();
  if (is_thread(127)) load_box(TILE, arguments, BARRIER + 8);
  wgmma_wait<0>();
}
// An A that is MN-major lies in 16 lines, one for each step of the depth.
MISTAKE(mn_operand_not_fenced, "wgmma_ss_mn: reads, with no fence_async_shared after it, what thread 30 wrote") {
  float d[4] = {};
  if (is_thread(30)) store_shared_4(TILE + 15 * 128, 0);
  sync_block();
  multiply_mn(d, TILE, OTHER);
}
MISTAKE(mn_operand_overwritten, "store_shared_4: overwrites what a wgmma under way reads at shared address 1920") {
  float d[4] = {};
  multiply_mn(d, TILE, OTHER);
  store_shared_4(TILE + 15 * 128, 0);
}
MISTAKE(mn_operand_outside, "wgmma_ss_mn: address 49152 is outside the 49152 bytes") {
  float d[4] = {};
  multiply_mn(d, 49152 - 1024, OTHER);  // whose depths 8 to 15 would come after it
}
MISTAKE(mn_operand_without_swizzle, "wgmma_ss_mn: a descriptor without the 128-byte swizzle") {
  float d[4] = {};
  wgmma_ss_mn<fp16, 8>(d, descriptor(TILE) & ~(uint64(3) << 62), descriptor(OTHER), true);
}
// One warp of the warpgroup tells that it is done, the others might not be.
MISTAKE_OF(256, load_before_all_warps_are_done, "tma_load: overwrites, with no barrier between, what a wgmma of warpgroup 0") {
  make_barriers(BARRIER, 2, 1);
  if (thread_index() < 128) multiply_and_wait(OTHER, TILE);
  if (first_thread()) mbarrier_arrive(BARRIER);
  if (!is_thread(128)) return;
  mbarrier_wait(BARRIER, 0);
  load_box(TILE, arguments, BARRIER + 8);
}

// ---- named barriers
MISTAKE(barrier_zero, "named_barrier_sync: a barrier 0, there are 1 to 15") { named_barrier_sync(0, 128); }
MISTAKE(barrier_sixteen, "named_barrier_arrive: a barrier 16, there are 1 to 15") { named_barrier_arrive(16, 128); }
MISTAKE(barrier_of_48, "named_barrier_sync: 48 threads: a multiple of 32") { named_barrier_sync(1, 48); }
MISTAKE(barrier_of_more_than_there_are, "named_barrier_sync: 160 threads: a multiple of 32") { named_barrier_sync(1, 160); }
MISTAKE(barrier_counts_differ, "named_barrier_sync: barrier 1 is of 96 threads here, of 128 elsewhere") {
  named_barrier_sync(1, thread_index() < 64 ? 128 : 96);
}
MISTAKE(barrier_met_twice, "named_barrier_arrive: barrier 1 is not complete, and the warp comes to it once more") {
  for (int i = 0; i < 2; ++i) named_barrier_arrive(1, 128);
}
MISTAKE(barrier_of_parts_of_warps, "named_barrier_sync: barrier 1 got 16 lanes of a warp") {
  if (thread_index() < 48 || thread_index() >= 112) named_barrier_sync(1, 64);
}
MISTAKE(barrier_incomplete, "deadlock: threads 0-63 in named_barrier_sync(64 of 128 threads are there);") {
  if (thread_index() < 64) named_barrier_sync(3, 128);
}
MISTAKE(barrier_against_a_warps_collective, "this lane is in named_barrier_sync, another one in sync_warp") {
  if (first_thread())
    sync_warp();
  else
    named_barrier_sync(1, 128);
}

// ---- registers
MISTAKE_OF(384, registers_of_no_unit, "lower_registers: 25 registers: a multiple of 8 from 24 to 256") { lower_registers<25>(); }
MISTAKE_OF(384, too_few_registers, "lower_registers: 16 registers: a multiple of 8 from 24 to 256") { lower_registers<16>(); }
MISTAKE_OF(384, too_many_registers, "raise_registers: 264 registers: a multiple of 8 from 24 to 256") { raise_registers<264>(); }
MISTAKE_OF(384, lowered_upwards, "lower_registers: 176 registers a thread, where the warpgroup") { lower_registers<176>(); }
MISTAKE_OF(384, raised_downwards, "raise_registers: 160 registers a thread, where the warpgroup") { raise_registers<160>(); }
MISTAKE_OF(384, registers_differ, "lower_registers: the threads of the warpgroup differ in its descriptors or constants") {
  if (thread_index() < 64)
    lower_registers<24>();
  else
    lower_registers<32>();
}
MISTAKE_OF(384, registers_nobody_has, "in raise_registers(64 a thread are free)") {
  if (thread_index() < 256)
    raise_registers<240>();
  else
    lower_registers<32>();
}

// ---- threads among themselves, where mbarriers and named barriers order them
MISTAKE_AT_BARRIER(read_across_barriers_of_others, "reads, with no barrier between, what was written by thread 0") {
  if (first_thread()) store_shared_4(TILE, 0);
  named_barrier_sync(thread_index() < 64 ? 1 : 2, 64);
  if (late_thread()) load_shared_4(TILE);
}
MISTAKE_AT_BARRIER(read_of_a_late_write, "reads, with no barrier between, what was written by thread 0") {
  if (first_thread()) mbarrier_arrive(BARRIER);
  if (first_thread()) store_shared_4(TILE, 0);
  if (!is_thread(32)) return;
  mbarrier_wait(BARRIER, 0);
  load_shared_4(TILE);
}
MISTAKE_AT_BARRIER(overwritten_before_all_have_read, "overwrites, with no barrier between, what was read by thread 0") {
  if (thread_index() < 96) load_shared_4(TILE);
  if (thread_index() >= 32) named_barrier_sync(1, 96);
  if (is_thread(96)) store_shared_4(TILE, 0);
}

// ---- clusters of two blocks
// `arrivals` at the mbarrier of each block, which all of them know.
inline SharedAddress make_barriers_of_cluster(int arrivals) {
  make_barriers(shared_base() + BARRIER, 1, arrivals);
  meet_cluster();
  return shared_base() + BARRIER;
}

CLUSTER_MISTAKE(32, arrival_before_the_other_block_has_begun, "thread 0: mbarrier_arrive_if: no barrier follows the mb") {
  make_barriers(shared_base() + BARRIER, 1, 1);
  mbarrier_arrive_if(first_thread(), shared_base() + BARRIER, 1 - cluster_rank());
}
CLUSTER_MISTAKE(32, arrival_at_no_block, "mbarrier_arrive_if: a rank of 2 in a cluster of 2") {
  mbarrier_arrive_if(first_thread(), make_barriers_of_cluster(1), 2);
}
CLUSTER_MISTAKE(32, arrival_at_a_block_that_has_ended, "0, thread 0: mbarrier_arrive_if: block 1 of the cluster has ended") {
  const SharedAddress barrier = make_barriers_of_cluster(32);
  if (cluster_rank() == 1) return mbarrier_arrive_if(true, barrier, 0);
  mbarrier_wait(barrier, 0);
  mbarrier_arrive_if(first_thread(), barrier, 1);
}
CLUSTER_MISTAKE(32, load_over_what_the_other_block_reads, "0, thread 0: tma_load_to_all: overwrites, without a wait on its") {
  const SharedAddress barrier = make_barriers_of_cluster(1);
  for (int i = 0; i < 2; ++i) {
    if (first_thread()) mbarrier_arrive_expect(barrier, BOX);
    if (first_thread() && cluster_rank() == 0) tma_load_to_all<2>(TILE, arguments.a, barrier, 0, 0, 0, 0);
    mbarrier_wait(barrier, i);
    load_shared_16(shared_base() + TILE);
    sync_block();
  }
}
CLUSTER_MISTAKE(32, address_of_the_other_block, "block 1, thread 0: store_shared_4: address 0 is outside the 49152 bytes") {
  if (cluster_rank() == 1) store_shared_4(0, 0);
  meet_cluster();
}
CLUSTER_MISTAKE(32, cluster_incomplete, "threads 0-31 in meet_cluster; threads 32-63 in mbarrier_wait(278528, ") {
  if (cluster_rank() == 1) make_barriers(shared_base() + BARRIER, 1, 1);
  if (cluster_rank() == 1) mbarrier_wait(shared_base() + BARRIER, 0);
  meet_cluster();
}
CLUSTER_MISTAKE(32, mbarrier_of_a_cluster_not_fenced, "mbarrier_arrive_if: no barrier follows the mbarrier_init of") {
  if (first_thread()) mbarrier_init(shared_base() + BARRIER, 1);
  meet_cluster();
  mbarrier_arrive_if(first_thread(), shared_base() + BARRIER, 1 - cluster_rank());
}
CLUSTER_MISTAKE(64, memory_read_after_meeting_the_cluster, "load_shared_4: reads, with no barrier between, what was") {
  if (first_thread()) store_shared_4(shared_base(), 0);
  meet_cluster();
  load_shared_4(shared_base());
}

// ---- grids
MISTAKE_OF(32, load_before_earlier_grids_have_ended, "await_earlier_grids: global memory was touched before it") {
  make_barriers(BARRIER, 1, 1);
  if (!first_thread()) return;
  load_expected(TILE, arguments, BARRIER, BOX);
  await_earlier_grids();
}
MISTAKE_OF(32, store_beside_one_who_awaits, "await_earlier_grids: global memory was touched by a thread that did not wait") {
  if (first_thread()) await_earlier_grids();
  else if (is_thread(1)) store_global_16(arguments.c, Chunk{});
}
MISTAKE_OF(32, ticket_before_earlier_grids_have_ended, "await_earlier_grids: global memory was touched before it") {
  atomic_add_global(arguments.counter, 1);
  await_earlier_grids();
}
MISTAKE_OF(32, awaits_what_nobody_adds, "deadlock: thread 3 in await_global(5, it is 0);") {
  if (is_thread(3)) await_global(arguments.counter, 5 + block_index());
}
MISTAKE_OF(32, misaligned_addition, "ordered_add_global: the global address is not aligned to 4 bytes") {
  ordered_add_global(reinterpret_cast<int32*>(reinterpret_cast<unsigned char*>(arguments.counter) + 2), 1);
}

// ---- plain runs of bytes
constexpr int RUN = 512;  // bytes: a float for each thread

inline void load_run(SharedAddress target, const Arguments& arguments, SharedAddress barrier) {
  if (!first_thread()) return;
  mbarrier_arrive_expect(barrier, RUN);
  bulk_load(target, arguments.c, RUN, barrier);
}
inline void write_run() { store_shared_4(TILE + 4 * thread_index(), float_bits(1.0f)); }
inline void add_and_commit(const Arguments& arguments) {
  bulk_add_if(true, arguments.c, TILE, RUN);
  tma_store_commit();
}

// ---- bulk_load
MISTAKE_AT_BARRIER(run_read_too_early, "load_shared_4: reads a TMA load under way at shared address 256") {
  load_run(TILE, arguments, BARRIER);
  if (first_thread()) load_shared_4(TILE + 256);
}
MISTAKE_AT_BARRIER(misaligned_run, "bulk_load: address 16 is not aligned to 128 bytes") {
  bulk_load(TILE + 16, arguments.c, RUN, BARRIER);
}
MISTAKE_AT_BARRIER(run_from_misaligned_memory, "bulk_load: the global address is not aligned to 16 bytes") {
  bulk_load(TILE, arguments.c + 1, RUN, BARRIER);
}
MISTAKE_AT_BARRIER(run_of_a_part_of_a_line, "bulk_load: 64 bytes: a multiple of 128, which the emulation asks for") {
  bulk_load(TILE, arguments.c, 64, BARRIER);
}
MISTAKE_AT_BARRIER(run_outside, "bulk_load: address 48768 is outside the 49152 bytes of shared memory") {
  bulk_load(49152 - 384, arguments.c, RUN, BARRIER);
}

// ---- bulk_add
MISTAKE(sums_not_fenced, "bulk_add_if: reads, with no fence_async_shared after it, what thread 0 wrote") {
  write_run();
  named_barrier_sync(1, 128);
  add_and_commit(arguments);
}
MISTAKE(sums_behind_stores_not_fenced, "bulk_add_if: no fence_async_global follows its await_global") {
  release_add_global_if(is_thread(32), arguments.counter, 1);
  fence_async_global();
  if (first_thread()) await_global(arguments.counter, 1), add_and_commit(arguments);
}
MISTAKE(misaligned_sums, "bulk_add_if: address 16 is not aligned to 128 bytes") { bulk_add_if(true, arguments.c, TILE + 16, RUN); }
MISTAKE(sums_to_misaligned_memory, "bulk_add_if: the global address is not aligned to 16 bytes") {
  bulk_add_if(true, arguments.c + 2, TILE, RUN);
}
MISTAKE(sums_of_a_part_of_a_line, "bulk_add_if: 192 bytes: a multiple of 128, which") { bulk_add_if(true, arguments.c, TILE, 192); }

// ---- grids
MISTAKE_OF(32, sums_before_earlier_grids_have_ended, "await_earlier_grids: global memory was touched before it") {
  bulk_add_if(true, arguments.c, TILE, RUN);
  await_earlier_grids();
}
