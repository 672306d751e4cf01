// Kernels for tests/test_cuda_emulation.py: one verb or one mistake each. The emulation is what is tested.
#include "multiattn/ptx.cuh"
#include "multiattn/tile.cuh"

using namespace multiattn;

struct Arguments {
  const uint16* a;  // [16, 16]
  const uint16* b;  // [8, 16] (n, k), or [16, 8] (k, n) for the transposed kernel
  float* c;         // [16, 8]
};

// c = 1 + a * b through shared memory, ldmatrix and mma; one warp.
template <class E, bool TRANSPOSED>
void multiply(const Arguments& arguments) {
  const int lane = thread_index();
  const SharedAddress a_rows = shared_base(), b_rows = a_rows + 512;
  cp_async_16(a_rows + lane * 16, arguments.a + lane * 8, true);
  cp_async_16(b_rows + lane * 16, arguments.b + lane * 8, lane < 16);
  cp_async_commit();
  cp_async_wait<0>();
  sync_block();
  uint32 a[4], b[4];
  ldmatrix_x4(a, a_rows + lane % 16 * 32 + lane / 16 * 16);
  if (TRANSPOSED)
    ldmatrix_x4_trans(b, b_rows + lane % 16 * 16);
  else
    ldmatrix_x4(b, b_rows + lane % 8 * 32 + lane / 8 % 2 * 16);
  Accumulator c{{1.0f, 1.0f, 1.0f, 1.0f}};
  mma_m16n8k16<E>(c.value, a, b[0], b[1]);
  for (int e = 0; e < 4; ++e) arguments.c[accumulator_row(e) * 8 + accumulator_column(e)] = c.value[e];
}

KERNEL(32, 1) multiply_fp16(PARAMETERS(Arguments) arguments) { multiply<fp16, false>(arguments); }
KERNEL(32, 1) multiply_bf16(PARAMETERS(Arguments) arguments) { multiply<bf16, false>(arguments); }
KERNEL(32, 1) multiply_transposed(PARAMETERS(Arguments) arguments) { multiply<fp16, true>(arguments); }

// c[lane] and c[32 + lane]: the two halves of pack(a float of `b`'s bits, its negative), as floats of their bits.
KERNEL(32, 1) round_floats(PARAMETERS(Arguments) arguments) {
  const auto* values = reinterpret_cast<const float*>(arguments.b);
  arguments.c[thread_index()] = static_cast<float>(pack<fp16>(values[thread_index()], 0.0f));
  arguments.c[32 + thread_index()] = static_cast<float>(pack<bf16>(values[thread_index()], 0.0f));
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

// All rows of a matrix in one bank group: 7 conflicts for each of the 4 matrices.
KERNEL(32, 1) bank_conflicts(PARAMETERS(Arguments)) {
  uint32 matrix[4];
  ldmatrix_x4(matrix, shared_base() + thread_index() * 128);
}

KERNEL(32, 1) nothing(PARAMETERS(Arguments)) {}
