// Kernels for tests/test_cuda_emulation.py: one verb or one mistake each. The emulation is what is tested.
#include "multiattn/ptx.cuh"
#include "multiattn/tile.cuh"

using namespace multiattn;

struct Arguments {
  const uint16* a;
  const float* b;  // [32]
  float* c;        // [128]
};

// c[lane] and c[32 + lane]: the two halves of pack(a float of `b`'s bits, its negative), as floats of their bits.
KERNEL(32, 1) round_floats(PARAMETERS(Arguments) arguments) {
  const float value = arguments.b[thread_index()];
  arguments.c[thread_index()] = static_cast<float>(pack<fp16>(value, 0.0f));
  arguments.c[32 + thread_index()] = static_cast<float>(pack<bf16>(value, 0.0f));
}

KERNEL(64, 1) vote(PARAMETERS(Arguments) arguments) {
  const float lanes = shuffle_xor(static_cast<float>(thread_index()), 3);
  arguments.c[thread_index()] = lanes + 100.0f * any_in_warp(thread_index() == 40);
}

// ---- mistakes, one each, and how the error begins that it must be
#define MISTAKE_OF(threads, name, error) KERNEL(threads, 1) name([[maybe_unused]] PARAMETERS(Arguments) arguments)

MISTAKE_OF(32, divergent_lanes, "divergent warp: this lane is in ldmatrix_x4, another one in shuffle_xor") {
  uint32 matrix[4];
  if (thread_index() < 16)
    shuffle_xor(0.0f, 1);
  else
    ldmatrix_x4(matrix, shared_base());
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
  cp_async_16(shared_base() + thread_index() * 16, arguments.a, true);
  cp_async_commit();
  sync_block();
  load_shared_16(shared_base() + thread_index() * 16);
}

MISTAKE_OF(64, missing_barrier, "reads, with no barrier between, what was written") {
  store_shared_16(shared_base() + thread_index() * 16, Chunk{});
  sync_warp();
  load_shared_16(shared_base() + thread_index() % 32 * 16);  // warp 1 reads what warp 0 wrote
}

MISTAKE_OF(32, missing_warp_barrier, "thread 1: load_shared_16: reads, with no barrier between, what was written by thread 0") {
  store_shared_16(shared_base() + thread_index() * 16, Chunk{});
  load_shared_16(shared_base());
}

MISTAKE_OF(64, overwritten_too_early, "overwrites, with no barrier between, what was read") {
  store_shared_16(shared_base() + thread_index() * 16, Chunk{});
  sync_block();
  if (thread_index() >= 32)
    load_shared_16(shared_base() + (thread_index() - 32) * 16);
  else
    store_shared_16(shared_base() + thread_index() * 16, Chunk{});
}

MISTAKE_OF(32, outside_shared_memory, "store_shared_4: address 1024 is outside the 1024 bytes of shared memory") { store_shared_4(shared_base() + 1024, 0); }

MISTAKE_OF(32, misaligned_matrix, "ldmatrix_x4: address 8 is not aligned to 16 bytes") {
  uint32 matrix[4];
  ldmatrix_x4(matrix, shared_base() + 8);
}

MISTAKE_OF(32, misaligned_copy, "cp_async_16: the global address is not aligned to 16 bytes") { cp_async_16(shared_base(), arguments.a + 1, true); }

// c[0] is NaN: shared memory starts poisoned.
KERNEL(32, 1) read_unwritten(PARAMETERS(Arguments) arguments) {
  const uint32 word = load_shared_16(shared_base()).word[0];
  std::memcpy(&arguments.c[thread_index()], &word, sizeof word);
}

KERNEL(32, 1) nothing(PARAMETERS(Arguments)) {}
