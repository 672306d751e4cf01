// Kernels for tests/test_cuda_emulation_sm90.py with one mistake each. Tiles are of 8 KiB: one box of 64 rows.
#include "sm90.h"

constexpr SharedAddress TILE = 0, OTHER = 8192, BARRIER = 16384;  // of shared memory, where a kernel does not say otherwise
constexpr int BOX = 8192;

#define MISTAKE(name, threads) KERNEL(threads, 1) name([[maybe_unused]] PARAMETERS(Arguments) arguments)

inline bool first_thread() { return thread_index() == 0; }
inline void load_box(SharedAddress tile, const Arguments& arguments, SharedAddress barrier) {
  tma_load(tile, arguments.a, barrier, 0, 0, 0, 0);
}
inline void store_box(const Arguments& arguments, SharedAddress tile) { tma_store(arguments.out, tile, 0, 0, 0, 0); }
// By all 128 threads.
inline void write_tile(SharedAddress tile) {
  for (int i = 0; i < 4; ++i) store_shared_16(tile + 64 * thread_index() + 16 * i, Chunk{});
}

// A load has landed in TILE; but the threads have waited for another one, which comes later.
inline void wait_for_another_load(const Arguments& arguments) {
  make_barriers(BARRIER, 2, 1);
  if (first_thread()) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_arrive_expect(BARRIER + 8 * i, BOX);
      load_box(TILE + 8192 * i, arguments, BARRIER + 8 * i);
    }
  }
  mbarrier_wait(BARRIER + 8, 0);
}
// After a barrier whoever came last to it goes on first, the next one by number then: this thread after thread 0.
inline bool late_thread() { return thread_index() == 64; }

MISTAKE(nothing, 128) {}

// ---- mbarriers
MISTAKE(arrival_without_init, 128) { mbarrier_arrive(BARRIER); }
MISTAKE(wait_without_init, 128) { mbarrier_wait(BARRIER, 0); }
MISTAKE(expectation_without_init, 128) { mbarrier_arrive_expect(BARRIER, 16); }
MISTAKE(init_not_seen, 128) {
  if (first_thread()) mbarrier_init(BARRIER, 1);
  if (thread_index() == 64) mbarrier_arrive(BARRIER);
}
MISTAKE(init_twice, 128) {
  make_barriers(BARRIER, 1, 1);
  make_barriers(BARRIER, 1, 1);
}
MISTAKE(misaligned_mbarrier, 128) { mbarrier_init(BARRIER + 4, 1); }
MISTAKE(mbarrier_of_nobody, 128) { mbarrier_init(BARRIER, 0); }
MISTAKE(too_many_mbarriers, 128) { make_barriers(BARRIER, 65, 1); }
MISTAKE(too_many_arrivals, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) mbarrier_arrive_expect(BARRIER, BOX);
  if (thread_index() == 32) mbarrier_arrive(BARRIER);
}
MISTAKE(bytes_never_come, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    mbarrier_arrive_expect(BARRIER, 2 * BOX);
    load_box(TILE, arguments, BARRIER);
  }
  mbarrier_wait(BARRIER, 0);
}
MISTAKE(too_many_bytes, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    mbarrier_arrive_expect(BARRIER, BOX / 2);
    load_box(TILE, arguments, BARRIER);
  }
  mbarrier_wait(BARRIER, 0);
}
MISTAKE(wait_for_nobody, 128) {
  make_barriers(BARRIER, 1, 2);
  if (first_thread()) mbarrier_arrive(BARRIER);
  mbarrier_wait(BARRIER, 0);
}
MISTAKE(odd_parity, 128) {
  make_barriers(BARRIER, 1, 1);
  mbarrier_wait(BARRIER, 2);
}
MISTAKE(phase_missed, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) mbarrier_wait(BARRIER, 0);
  if (thread_index() == 1)
    for (int i = 0; i < 2; ++i) mbarrier_arrive(BARRIER);
}

// ---- stmatrix
MISTAKE(matrix_outside, 32) {
  const uint32 matrix[4] = {};
  stmatrix_x4(49152, matrix);
}
MISTAKE(matrix_of_half_a_warp, 32) {
  const uint32 matrix[4] = {};
  if (thread_index() < 16) stmatrix_x4(16 * thread_index(), matrix);
}

// ---- TMA
MISTAKE(misaligned_tile, 128) {
  make_barriers(BARRIER, 1, 1);
  load_box(TILE + 512, arguments, BARRIER);
}
MISTAKE(tile_outside, 128) {
  make_barriers(BARRIER, 1, 1);
  load_box(40960 + 1024, arguments, BARRIER);
}
MISTAKE(mbarrier_not_fenced, 128) {
  if (first_thread()) mbarrier_init(BARRIER, 1);
  sync_block();
  load_box(TILE, arguments, BARRIER);
}
MISTAKE(load_without_mbarrier, 128) { load_box(TILE, arguments, BARRIER); }
MISTAKE(mbarrier_overwritten, 128) {
  make_barriers(BARRIER, 1, 1);
  load_box(BARRIER, arguments, BARRIER);
}
MISTAKE(no_map, 128) {
  const TensorMap map{};
  prefetch_map(map);
}
MISTAKE(misaligned_map, 128) {
  struct Unaligned {
    unsigned char before[32];
    unsigned char map[128];
  };
  alignas(64) const Unaligned memory{};
  prefetch_map(*static_cast<const TensorMap*>(static_cast<const void*>(memory.map)));
}
MISTAKE(checked_map, 128) { prefetch_map(arguments.b); }  // which the test spoils
MISTAKE(load_read_too_early, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    mbarrier_arrive_expect(BARRIER, BOX);
    load_box(TILE, arguments, BARRIER);
    load_shared_4(TILE + 256);
  }
}
MISTAKE(load_read_after_another_wait, 128) {
  wait_for_another_load(arguments);
  load_shared_4(TILE);
}
MISTAKE(load_overwritten_too_early, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    load_box(TILE, arguments, BARRIER);
    store_shared_4(TILE + 128, 0);
  }
}
MISTAKE(load_over_a_load, 128) {
  make_barriers(BARRIER, 1, 1);
  for (int i = 0; i < 2; ++i) load_box(TILE, arguments, BARRIER);
}
MISTAKE(load_over_what_is_read, 128) {
  make_barriers(BARRIER, 1, 1);
  if (thread_index() < 64) load_shared_4(TILE + 1024);
  if (thread_index() == 64) load_box(TILE, arguments, BARRIER);
}
// Lane 0 lets know that the warp has read, without having met the others.
MISTAKE(load_after_a_lonely_arrival, 128) {
  make_barriers(BARRIER, 2, 1);
  if (thread_index() < 32) {
    load_shared_4(TILE + 128 * thread_index());
    if (first_thread()) mbarrier_arrive(BARRIER);
  }
  if (thread_index() == 32) {
    mbarrier_wait(BARRIER, 0);
    load_box(TILE, arguments, BARRIER + 8);
  }
}
MISTAKE(load_over_what_is_written, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) store_shared_4(TILE + 1024, 0);
  if (thread_index() == 64) load_box(TILE, arguments, BARRIER);
}
MISTAKE(load_left_behind, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) load_box(TILE, arguments, BARRIER);
}
MISTAKE(store_not_fenced, 128) {
  write_tile(TILE);
  named_barrier_sync(1, 128);
  store_box(arguments, TILE);
}
MISTAKE(store_fenced_too_late, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) store_shared_4(TILE, 0);
  named_barrier_sync(1, 128);
  fence_async_shared();
  if (late_thread()) store_box(arguments, TILE);
}
MISTAKE(store_without_barrier, 128) {
  make_barriers(BARRIER, 1, 1);
  write_tile(TILE);
  fence_async_shared();
  if (late_thread()) store_box(arguments, TILE);
}
MISTAKE(store_of_a_load_under_way, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    load_box(TILE, arguments, BARRIER);
    store_box(arguments, TILE);
  }
}
MISTAKE(store_of_a_load_not_waited_for, 128) {
  wait_for_another_load(arguments);
  store_box(arguments, TILE);
}
MISTAKE(store_before_the_tensor, 128) {
  if (first_thread()) tma_store(arguments.out, TILE, 0, -64, 0, 0);
}
MISTAKE(stored_memory_overwritten, 128) {
  if (first_thread()) {
    fence_async_shared();
    store_box(arguments, TILE);
    tma_store_commit();
    store_shared_4(TILE + 4096, 0);
  }
}
MISTAKE(load_over_stored_memory, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    store_box(arguments, TILE);
    tma_store_commit();
    tma_store_wait_read<1>();
    load_box(TILE, arguments, BARRIER);
  }
}
MISTAKE(stored_memory_overwritten_by_others, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    store_box(arguments, TILE);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
  if (thread_index() == 32) store_shared_4(TILE, 0);
}
MISTAKE(store_not_waited_for, 128) {
  if (first_thread()) {
    store_box(arguments, TILE);
    tma_store_commit();
  }
}
MISTAKE(store_not_committed, 128) {
  if (first_thread()) {
    store_box(arguments, TILE);
    tma_store_wait_all();
  }
}

// ---- wgmma
MISTAKE(wgmma_of_a_load_under_way, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) load_box(TILE, arguments, BARRIER);
  sync_block();
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
}
MISTAKE(wgmma_without_wait_on_mbarrier, 128) {
  wait_for_another_load(arguments);
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
}
MISTAKE(wgmma_of_writes_not_fenced, 128) {
  write_tile(TILE);
  sync_block();
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
}
MISTAKE(wgmma_of_writes_without_barrier, 128) {
  make_barriers(BARRIER, 1, 1);
  write_tile(TILE);
  fence_async_shared();
  sync_warp();
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
  wgmma_commit();
  wgmma_wait<0>();
}
MISTAKE(wgmma_diverges, 128) {
  float d[4] = {};
  wgmma_fence();
  if (thread_index() < 64)
    wgmma_commit();
  else
    wgmma_ss<fp16, 8>(d, Descriptor(TILE, 16).at(0), Descriptor(TILE, 16).at(0), true);
  wgmma_wait<0>();
}
MISTAKE(wgmma_missing_in_a_warp, 128) {
  float d[4] = {};
  if (thread_index() < 96) multiply_tile(d, TILE, TILE);
  wgmma_wait<0>();
}
MISTAKE(wgmma_descriptors_differ, 128) {
  float d[4] = {};
  multiply_tile(d, TILE, TILE + thread_index() / 32 * 1024);
  wgmma_wait<0>();
}
MISTAKE(wgmma_threads_missing, 128) {
  if (thread_index() < 32) return;
  wgmma_fence();
}
MISTAKE(wgmma_left_by_a_thread, 128) {
  if (thread_index() == 127) return;
  wgmma_wait<0>();
}
MISTAKE(wgmma_of_half_a_warpgroup, 64) { wgmma_fence(); }
MISTAKE(wgmma_not_waited_for, 128) {
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
  wgmma_commit();
  wgmma_wait<1>();
}
MISTAKE(wgmma_not_committed, 128) {
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
  wgmma_wait<0>();
}
MISTAKE(wgmma_diverges_from_a_warps_collective, 128) {
  if (first_thread())
    sync_warp();
  else
    wgmma_wait<0>();
}
MISTAKE(wgmma_outside, 128) {
  float d[4] = {};
  multiply_tile(d, TILE, 40960 + 8192);
}
MISTAKE(wgmma_without_swizzle, 128) {
  float d[4] = {};
  wgmma_ss<fp16, 8>(d, Descriptor(TILE, 16).at(0), Descriptor(TILE, 16).at(0) & ~(uint64(3) << 62), true);
}
MISTAKE(wgmma_with_base_offset, 128) {
  float d[4] = {};
  wgmma_ss<fp16, 8>(d, Descriptor(TILE, 16).at(0) | uint64(1) << 49, Descriptor(TILE, 16).at(0), true);
}
MISTAKE(weights_changed_under_way, 128) {
  float d[4] = {};
  uint32 a[4] = {};
  wgmma_rs<fp16, 8>(d, a, Descriptor(TILE, 16).at(0), true);
  wgmma_commit();
  if (thread_index() == 100) a[3] = 1;
  wgmma_wait<0>();
}
MISTAKE(sums_changed_under_way, 128) {
  float d[4] = {};
  multiply_tile(d, TILE, TILE);
  wgmma_commit();
  if (thread_index() == 100) d[1] = 0.0f;
  wgmma_wait<0>();
}
MISTAKE(sums_overlap, 128) {
  float d[8] = {};
  wgmma_ss<fp16, 16>(d, Descriptor(TILE, 16).at(0), Descriptor(TILE, 16).at(0), true);
  multiply_tile(*reinterpret_cast<float(*)[4]>(&d[4]), TILE, TILE);
}
MISTAKE(sums_elsewhere, 128) {
  float d[2][4] = {};
  multiply_tile(d[0], TILE, TILE);
  multiply_tile(d[thread_index() / 64], TILE, TILE);
  wgmma_wait<0>();
}
MISTAKE(load_over_what_wgmma_reads, 128) {
  make_barriers(BARRIER, 2, 1);
  fill_tile(TILE, arguments, BARRIER);
  float d[4] = {};
  multiply_tile(d, OTHER, TILE);
  wgmma_commit();
  if (thread_index() == 127) load_box(TILE, arguments, BARRIER + 8);
  wgmma_wait<0>();
}
MISTAKE(write_over_what_wgmma_reads, 128) {
  float d[4] = {};
  multiply_tile(d, OTHER, TILE);
  wgmma_commit();
  if (thread_index() == 127) store_shared_4(TILE, 0);
  wgmma_wait<0>();
}
// One warp of the warpgroup tells that it is done, the others might not be.
MISTAKE(load_before_all_warps_are_done, 256) {
  make_barriers(BARRIER, 2, 1);
  if (thread_index() < 128) {
    float d[4] = {};
    multiply_tile(d, OTHER, TILE);
    wgmma_commit();
    wgmma_wait<0>();
    if (first_thread()) mbarrier_arrive(BARRIER);
  } else if (thread_index() == 128) {
    mbarrier_wait(BARRIER, 0);
    load_box(TILE, arguments, BARRIER + 8);
  }
}

// ---- named barriers
MISTAKE(barrier_zero, 128) { named_barrier_sync(0, 128); }
MISTAKE(barrier_sixteen, 128) { named_barrier_arrive(16, 128); }
MISTAKE(barrier_of_48, 128) { named_barrier_sync(1, 48); }
MISTAKE(barrier_of_more_than_there_are, 128) { named_barrier_sync(1, 160); }
MISTAKE(barrier_counts_differ, 128) { named_barrier_sync(1, thread_index() < 64 ? 128 : 96); }
MISTAKE(barrier_met_twice, 128) {
  named_barrier_arrive(1, 128);
  named_barrier_arrive(1, 128);
}
MISTAKE(barrier_of_parts_of_warps, 128) {
  if (thread_index() < 48 || thread_index() >= 112) named_barrier_sync(1, 64);
}
MISTAKE(barrier_incomplete, 128) {
  if (thread_index() < 64) named_barrier_sync(3, 128);
}
MISTAKE(barrier_against_a_warps_collective, 128) {
  if (first_thread())
    sync_warp();
  else
    named_barrier_sync(1, 128);
}

// ---- registers
MISTAKE(registers_of_no_unit, 384) { lower_registers<25>(); }
MISTAKE(too_few_registers, 384) { lower_registers<16>(); }
MISTAKE(too_many_registers, 384) { raise_registers<264>(); }
MISTAKE(lowered_upwards, 384) { lower_registers<176>(); }
MISTAKE(raised_downwards, 384) { raise_registers<160>(); }
MISTAKE(registers_differ, 384) {
  if (thread_index() < 64)
    lower_registers<24>();
  else
    lower_registers<32>();
}
MISTAKE(registers_nobody_has, 384) {
  if (thread_index() < 256)
    raise_registers<240>();
  else
    lower_registers<32>();
}

// ---- threads among themselves, where mbarriers and named barriers order them
MISTAKE(read_across_barriers_of_others, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) store_shared_4(TILE, 0);
  named_barrier_sync(thread_index() < 64 ? 1 : 2, 64);
  if (thread_index() == 64) load_shared_4(TILE);
}
MISTAKE(read_of_a_late_write, 128) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    mbarrier_arrive(BARRIER);
    store_shared_4(TILE, 0);
  }
  if (thread_index() == 32) {
    mbarrier_wait(BARRIER, 0);
    load_shared_4(TILE);
  }
}
MISTAKE(overwritten_before_all_have_read, 128) {
  make_barriers(BARRIER, 1, 1);
  if (thread_index() < 96) load_shared_4(TILE);
  if (thread_index() >= 32) named_barrier_sync(1, 96);
  if (thread_index() == 96) store_shared_4(TILE, 0);
}

// ---- clusters of two blocks
#define CLUSTER_MISTAKE(name, threads) \
  CLUSTER_KERNEL(threads, 1, 2) name([[maybe_unused]] PARAMETERS(Arguments) arguments)

// `arrivals` at the mbarrier of each block, which all of them know.
inline SharedAddress make_barriers_of_cluster(int arrivals) {
  make_barriers(shared_base() + BARRIER, 1, arrivals);
  meet_cluster();
  return shared_base() + BARRIER;
}

CLUSTER_MISTAKE(arrival_before_the_other_block_has_begun, 32) {
  make_barriers(shared_base() + BARRIER, 1, 1);
  mbarrier_arrive_if(first_thread(), shared_base() + BARRIER, 1 - cluster_rank());
}
CLUSTER_MISTAKE(arrival_at_no_block, 32) { mbarrier_arrive_if(first_thread(), make_barriers_of_cluster(1), 2); }
CLUSTER_MISTAKE(arrival_at_a_block_that_has_ended, 32) {
  const SharedAddress barrier = make_barriers_of_cluster(32);
  if (cluster_rank() == 1) return mbarrier_arrive_if(true, barrier, 0);
  mbarrier_wait(barrier, 0);
  mbarrier_arrive_if(first_thread(), barrier, 1);
}
CLUSTER_MISTAKE(load_over_what_the_other_block_reads, 32) {
  const SharedAddress barrier = make_barriers_of_cluster(1);
  for (int i = 0; i < 2; ++i) {
    if (first_thread()) {
      mbarrier_arrive_expect(barrier, BOX);
      if (cluster_rank() == 0) tma_load_to_all<2>(TILE, arguments.a, barrier, 0, 0, 0, 0);
    }
    mbarrier_wait(barrier, i);
    load_shared_16(shared_base() + TILE);
    sync_block();
  }
}
CLUSTER_MISTAKE(address_of_the_other_block, 32) {
  if (cluster_rank() == 1) store_shared_4(0, 0);
  meet_cluster();
}
CLUSTER_MISTAKE(cluster_incomplete, 32) {
  if (cluster_rank() == 1) {
    make_barriers(shared_base() + BARRIER, 1, 1);
    mbarrier_wait(shared_base() + BARRIER, 0);
  }
  meet_cluster();
}
CLUSTER_MISTAKE(mbarrier_of_a_cluster_not_fenced, 32) {
  if (first_thread()) mbarrier_init(shared_base() + BARRIER, 1);
  meet_cluster();
  mbarrier_arrive_if(first_thread(), shared_base() + BARRIER, 1 - cluster_rank());
}
CLUSTER_MISTAKE(memory_read_after_meeting_the_cluster, 64) {
  if (first_thread()) store_shared_4(shared_base(), 0);
  meet_cluster();
  load_shared_4(shared_base());
}

// ---- grids
MISTAKE(load_before_earlier_grids_have_ended, 32) {
  make_barriers(BARRIER, 1, 1);
  if (first_thread()) {
    mbarrier_arrive_expect(BARRIER, BOX);
    load_box(TILE, arguments, BARRIER);
    await_earlier_grids();
  }
}
MISTAKE(ticket_before_earlier_grids_have_ended, 32) {
  atomic_add_global(arguments.counter, 1);
  await_earlier_grids();
}
