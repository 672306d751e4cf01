// The verbs of sm90 and later, as in ptx.cuh: each one instruction of the GPU. Those of wgmma are in wgmma.cuh.
// cpu/include/multiattn/ptx_sm90.cuh has the same verbs on the CPU.
#pragma once
#include "multiattn/ptx.cuh"
#include "multiattn/ptx_math.cuh"

namespace multiattn {

DEVICE int64 block_count() { return gridDim.x; }
// The value of the warp's lane 0: tells the compiler that all lanes have the same.
DEVICE uint32 uniform(uint32 value) { return __shfl_sync(0xffffffffu, value, 0); }
// Stores that are predicated, not branched over: wgmmas may be under way, and ptxas moves other work across.
DEVICE void store_global_4_if(bool predicate, float* target, float value) {
  asm volatile(
      "{.reg .pred chosen;\n"
      "setp.ne.b32 chosen, %0, 0;\n"
      "@chosen st.global.f32 [%1], %2;}" ::"r"(static_cast<int>(predicate)),
      "l"(target), "f"(value)
      : "memory");
}
DEVICE void store_global_16_if(bool predicate, void* target, const Chunk& value) {
  asm volatile(
      "{.reg .pred chosen;\n"
      "setp.ne.b32 chosen, %0, 0;\n"
      "@chosen st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(static_cast<int>(predicate)),
      "l"(target), "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
      : "memory");
}
// As ldmatrix_x4, the other way.
DEVICE void stmatrix_x4(SharedAddress row, const uint32 (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrix[0]),
               "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}
// The larger of each 16-bit half, as unsigned numbers: of positive floating-point ones too.
DEVICE uint32 max_of_halves(uint32 a, uint32 b) {
  uint32 result;
  asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
// Returns what was there.
DEVICE int32 atomic_add_global(int32* target, int32 value) { return atomicAdd(target, value); }
// Adds in order, and returns what was there: what a thread of the GPU did and knew of before its addition, those that add later know of.
DEVICE int32 ordered_add_global(int32* target, int32 value) {
  int32 before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(target), "r"(value) : "memory");
  return before;
}
// Loads a word; all that its writer knew of, this thread knows of.
DEVICE int32 load_acquire_global(const int32* place) {
  int32 found;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(place) : "memory");
  return found;
}
// Until the word has this value.
DEVICE void await_global(const int32* place, int32 value) {
  while (load_acquire_global(place) != value) {
  }
}
// Adds for threads with a true `predicate`: who awaits the sum knows of what the thread did before.
DEVICE void release_add_global_if(bool predicate, int32* target, int32 value) {
  asm volatile(
      "{.reg .pred chosen;\n"
      "setp.ne.b32 chosen, %0, 0;\n"
      "@chosen red.release.gpu.global.add.s32 [%1], %2;}" ::"r"(static_cast<int>(predicate)),
      "l"(target), "r"(value)
      : "memory");
}

// ---- mbarriers: phases 0, 1, 0, ...; one ends when all arrivals and all bytes that it expects have come
DEVICE void mbarrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives for threads with a true `predicate`. Predicated, not branched over, so that the warp stays converged: what follows
// may be an instruction that all of it must execute together.
DEVICE void mbarrier_arrive_if(bool predicate, SharedAddress barrier) {
  asm volatile(
      "{.reg .pred chosen;\n"
      "setp.ne.b32 chosen, %0, 0;\n"
      "@chosen mbarrier.arrive.shared::cta.b64 _, [%1];}" ::"r"(static_cast<int>(predicate)),
      "r"(barrier)
      : "memory");
}
// Arrives; the phase waits for so many bytes of TMA, too.
DEVICE void mbarrier_arrive_expect(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
DEVICE void mbarrier_wait(SharedAddress barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- clusters: blocks that run together on SMs next to one another. Shared addresses are of the thread's own block; what
// reaches another's, at the same address there, says so.
DEVICE int cluster_rank() {
  int result;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(result));
  return result;
}
// Until all threads of the cluster are here. They see one another's mbarriers, where fence_mbarrier_init followed, and of
// other memory nothing.
DEVICE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// As mbarrier_arrive_if, in the block of that rank, which there must be whatever the predicate: mapa under one, too, makes
// ptxas spill.
DEVICE void mbarrier_arrive_if(bool predicate, SharedAddress barrier, int rank) {
  asm volatile(
      "{.reg .pred chosen;\n"
      ".reg .b32 there;\n"
      "setp.ne.b32 chosen, %0, 0;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "@chosen mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(static_cast<int>(predicate)),
      "r"(barrier), "r"(rank)
      : "memory");
}

// ---- grids that follow one another on a stream: where the launch allows it, one begins before the one before it has ended
// Until the grids before it have ended and what they wrote is visible to all of this grid.
DEVICE void await_earlier_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The grid after it may begin, once every block has come here and as there is room.
DEVICE void admit_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- the async proxy: TMA, and wgmma's reads of shared memory
// Makes what mbarrier_init wrote visible to it.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Makes what this thread wrote to shared memory visible to it.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Makes what this thread knows to be in device memory known to it.
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// A box of the tensor from these coordinates on; zeros outside. Counts as the bytes of the whole box at `barrier`.
DEVICE void tma_load(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                     int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// A box of a 5-D map, by two more coordinates: ragged.cuh.
DEVICE void tma_load(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                     int end, int wrap) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(end), "r"(wrap)
      : "memory");
}
// As of a 4-D map for every block of a cluster of CLUSTER: the box and its bytes come to each, to `target` and `barrier` there.
template <int CLUSTER>
DEVICE void tma_load_to_all(SharedAddress target, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                            int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch),
      "h"(static_cast<uint16>((1 << CLUSTER) - 1))  // a bit for each rank
      : "memory");
}
// So many bytes as they are, with no map; addresses and bytes are multiples of 16. They count at `barrier`.
DEVICE void bulk_load(SharedAddress target, const void* source, int bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
// The other way; what lies beyond the tensor is not written. It may not begin before it, as a load may: with stores from
// rows below 0 an H200 told of an illegal instruction, without them of none (2026-11-22).
DEVICE void tma_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
DEVICE void tma_store(const TensorMap& map, SharedAddress source, int column, int row, int head, int end, int wrap) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(end), "r"(wrap)
               : "memory");
}
// Adds so many bytes of floats to global memory, for threads with a true `predicate`, in no order with what others add; addresses
// and bytes are multiples of 16. It is one of the thread's stores: tma_store_wait_read tells that shared memory was read, not that the sums are there.
DEVICE void bulk_add_if(bool predicate, float* target, SharedAddress source, int bytes) {
  asm volatile(
      "{.reg .pred chosen;\n"
      "setp.ne.b32 chosen, %0, 0;\n"
      "@chosen cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%1], [%2], %3;}" ::"r"(
          static_cast<int>(predicate)),
      "l"(target), "r"(source), "r"(bytes)
      : "memory");
}
// Stores instead what `bulk_add_if` adds.
DEVICE void bulk_store_if(bool predicate, void* target, SharedAddress source, int bytes) {
  asm volatile(
      "{.reg .pred chosen;\n"
      "setp.ne.b32 chosen, %0, 0;\n"
      "@chosen cp.async.bulk.global.shared::cta.bulk_group [%1], [%2], %3;}" ::"r"(static_cast<int>(predicate)),
      "l"(target), "r"(source), "r"(bytes)
      : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most N of this thread's groups of stores still read shared memory.
template <int N>
DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// At most N of them have still something to write.
template <int N>
DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// ---- named barriers, 1 to 15 (0 is sync_block): of `threads` of the block, by whole warps, which must have converged: after a
// branch that some lanes took, sync_warp
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// As named_barrier_sync; true for all if the predicate is for one of them.
DEVICE bool any_at_named_barrier(int id, int threads, bool predicate) {
  uint32 any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 q, %3, 0;\nbar.red.or.pred p, %1, %2, q;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32>(predicate))
      : "memory");
  return any != 0;
}
DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- registers of each thread of a warpgroup, from here on
template <int N>
DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- order of wgmma
// Registers that this thread wrote are visible to the wgmmas that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products since the last commit are a group.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most N groups are under way.
template <int N>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

}  // namespace multiattn
