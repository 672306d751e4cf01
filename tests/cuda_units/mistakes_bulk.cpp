// As mistakes.cpp, with bulk_load and bulk_add.
#include "mistakes.h"

constexpr int RUN = 512;  // bytes: a float for each thread

inline void load_run(SharedAddress target, const Arguments& arguments, SharedAddress barrier) {
  if (!first_thread()) return;
  mbarrier_arrive_expect(barrier, RUN);
  bulk_load(target, arguments.c, RUN, barrier);
}
inline void write_run() { store_shared_4(TILE + 4 * thread_index(), float_bits(1.0f)); }
inline void add_and_commit(const Arguments& arguments) {
  bulk_add(arguments.c, TILE, RUN);
  tma_store_commit();
}

// ---- bulk_load
MISTAKE_AT_BARRIER(run_read_too_early, "load_shared_4: reads a TMA load under way at shared address 256") {
  load_run(TILE, arguments, BARRIER);
  if (first_thread()) load_shared_4(TILE + 256);
}
MISTAKE(run_read_after_another_wait, "load_shared_4: reads, without a wait on its mbarrier, what a TMA load wrote") {
  make_barriers(BARRIER, 2, 1);
  for (int i = 0; i < 2; ++i) load_run(TILE + RUN * i, arguments, BARRIER + 8 * i);
  mbarrier_wait(BARRIER + 8, 0);
  load_shared_4(TILE);
}
MISTAKE_AT_BARRIER(run_overwritten_too_early, "store_shared_4: overwrites a TMA load under way at shared address 128") {
  load_run(TILE, arguments, BARRIER);
  if (first_thread()) store_shared_4(TILE + 128, 0);
}
MISTAKE_AT_BARRIER(run_over_what_is_read, "bulk_load: overwrites, with no barrier between, what was read by thread 0 at") {
  if (thread_index() < 64) load_shared_4(TILE + 384);
  if (late_thread()) bulk_load(TILE, arguments.c, RUN, BARRIER);
}
MISTAKE(run_at_no_mbarrier, "bulk_load: there is no mbarrier at 16384: mbarrier_init is missing") {
  bulk_load(TILE, arguments.c, RUN, BARRIER);
}
MISTAKE(run_at_an_mbarrier_not_fenced, "bulk_load: no fence_mbarrier_init follows the mbarrier_init of 16384") {
  if (first_thread()) mbarrier_init(BARRIER, 1);
  sync_block();
  bulk_load(TILE, arguments.c, RUN, BARRIER);
}
MISTAKE_AT_BARRIER(run_of_more_than_is_expected, "bulk_load: more bytes than expected came to the mbarrier") {
  if (first_thread()) mbarrier_arrive_expect(BARRIER, RUN / 2);
  if (first_thread()) bulk_load(TILE, arguments.c, RUN, BARRIER);
  mbarrier_wait(BARRIER, 0);
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
MISTAKE_AT_BARRIER(run_left_behind, "returns, the last thread of the block, with TMA loads under way") {
  load_run(TILE, arguments, BARRIER);
}

// ---- bulk_add
MISTAKE(sums_not_fenced, "bulk_add: reads, with no fence_async_shared after it, what thread 0 wrote") {
  write_run();
  named_barrier_sync(1, 128);
  add_and_commit(arguments);
}
MISTAKE_AT_BARRIER(sums_fenced_too_late, "bulk_add: reads, with no barrier after its fence_async_shared, what thread 0 wrote") {
  if (first_thread()) store_shared_4(TILE, 0);
  named_barrier_sync(1, 128);
  fence_async_shared();
  if (late_thread()) add_and_commit(arguments);
}
MISTAKE_AT_BARRIER(sums_of_a_load_under_way, "bulk_add: reads a TMA load under way") {
  load_run(TILE, arguments, BARRIER);
  if (first_thread()) add_and_commit(arguments);
}
MISTAKE(sums_overwritten, "store_shared_4: overwrites what a TMA store under way reads at shared address 0") {
  if (!first_thread()) return;
  add_and_commit(arguments);
  store_shared_4(TILE, 0);
}
MISTAKE(sums_overwritten_by_others, "overwrites, with no barrier between, what was read by thread 0") {
  if (first_thread()) add_and_commit(arguments);
  if (first_thread()) tma_store_wait_read<0>();
  sync_warp();
  if (is_thread(32)) store_shared_4(TILE, 0);
}
MISTAKE(sums_not_waited_for, "returns without a wait for its TMA stores") {
  if (first_thread()) add_and_commit(arguments);
}
MISTAKE(sums_not_committed, "returns without a wait for its TMA stores to read shared memory") {
  if (!first_thread()) return;
  bulk_add(arguments.c, TILE, RUN);
  tma_store_wait_read<0>();
}
MISTAKE(misaligned_sums, "bulk_add: address 16 is not aligned to 128 bytes") { bulk_add(arguments.c, TILE + 16, RUN); }
MISTAKE(sums_to_misaligned_memory, "bulk_add: the global address is not aligned to 16 bytes") {
  bulk_add(arguments.c + 2, TILE, RUN);
}
MISTAKE(sums_of_a_part_of_a_line, "bulk_add: 192 bytes: a multiple of 128, which") { bulk_add(arguments.c, TILE, 192); }

// ---- grids
MISTAKE_OF(32, run_before_earlier_grids_have_ended, "await_earlier_grids: global memory was touched before it") {
  make_barriers(BARRIER, 1, 1);
  load_run(TILE, arguments, BARRIER);
  await_earlier_grids();
}
MISTAKE_OF(32, sums_before_earlier_grids_have_ended, "await_earlier_grids: global memory was touched before it") {
  bulk_add(arguments.c, TILE, RUN);
  await_earlier_grids();
}
