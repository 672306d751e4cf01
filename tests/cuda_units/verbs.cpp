// Kernels for tests/test_cuda_emulation.py: verbs whose results numbers tell. Barriers, turns and clusters are what the
// forward for Hopper shows; ldmatrix and mma are in tests/test_cuda_layout.py, mistakes in mistakes.cpp.
#include "shared.h"

// c[64, N] = c + a[64, DEPTH] * b, with zeros for what is beyond the tensors; one warpgroup. What c holds comes along as the
// first wgmma's sum, or does not where ADD is false.
enum class Kind { SS, SS_MN, RS, RS_MN };
constexpr int DEPTH = 72, STEPS = (DEPTH + 15) / 16;

template <class E, int N, Kind KIND, bool ADD>
void multiply(const Arguments& arguments) {
  constexpr bool MN_A = KIND == Kind::SS_MN, MN = MN_A || KIND == Kind::RS_MN;
  using TileA = std::conditional_t<MN_A, PanelTile<16 * STEPS, 64>, PanelTile<64, DEPTH>>;
  using TileB = std::conditional_t<MN, PanelTile<16 * STEPS, N>, PanelTile<N, DEPTH>>;
  constexpr SharedAddress A = 0, B = TileA::BYTES, BARRIER = B + (TileB::BYTES + 1023) / 1024 * 1024;
  make_barriers(BARRIER, 1, 1);
  if (thread_index() == 0) {
    mbarrier_arrive_expect(BARRIER, TileA::BYTES + TileB::BYTES);
    load_boxes<TileA>(A, arguments.a, BARRIER);
    load_boxes<TileB>(B, arguments.b, BARRIER);
  }
  mbarrier_wait(BARRIER, 0);

  const int warp = thread_index() / WARP;
  uint32 fragment[STEPS][4];
  if (KIND == Kind::RS || KIND == Kind::RS_MN) {
    const auto reader = FragmentReader<Tile<64, 64>>::down();
    for (int step = 0; step < STEPS; ++step) {
      const Fragment loaded = reader.load(A + step / 4 * TileA::PANEL_BYTES, 16 * warp, step % 4 * 16);
      for (int i = 0; i < 4; ++i) fragment[step][i] = loaded.reg[i];
    }
  }
  float d[N / 2];
  const auto place = [&](int i) -> float& {
    return arguments.c[(16 * warp + accumulator_row(i % 4)) * N + i / 4 * 8 + accumulator_column(i % 4)];
  };
  for (int i = 0; i < N / 2; ++i) d[i] = place(i);
  const Descriptor a(A, 16), b(B, TileB::PANEL_BYTES);
  wgmma_fence();
  for (int step = 0; step < STEPS; ++step) {
    const bool add = ADD || step > 0;
    const uint64 right = b.at(MN ? step * 16 * TileB::ROW_BYTES : step / 4 * TileB::PANEL_BYTES + step % 4 * 32);
    if constexpr (KIND == Kind::SS)
      wgmma_ss<E, N>(d, a.at(step / 4 * TileA::PANEL_BYTES + step % 4 * 32), right, add);
    else if constexpr (KIND == Kind::SS_MN)
      wgmma_ss_mn<E, N>(d, a.at(step * 16 * TileA::ROW_BYTES), right, add);
    else if constexpr (KIND == Kind::RS)
      wgmma_rs<E, N>(d, fragment[step], right, add);
    else
      wgmma_rs_mn<E, N>(d, fragment[step], right, add);
    if (step % 2) wgmma_commit();
  }
  wgmma_commit();
  const bool under_way = std::isnan(d[0]) && std::isnan(d[N / 2 - 1]);
  wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i) place(i) = under_way ? d[i] : infinity();
}

#define MULTIPLY(N)                                                                                                      \
  KERNEL(128, 1) ss_fp16_##N(PARAMETERS(Arguments) arguments) { multiply<fp16, N, Kind::SS, true>(arguments); }          \
  KERNEL(128, 1) ss_mn_fp16_##N(PARAMETERS(Arguments) arguments) { multiply<fp16, N, Kind::SS_MN, false>(arguments); }   \
  KERNEL(128, 1) rs_fp16_##N(PARAMETERS(Arguments) arguments) { multiply<fp16, N, Kind::RS, false>(arguments); }         \
  KERNEL(128, 1) rs_mn_fp16_##N(PARAMETERS(Arguments) arguments) { multiply<fp16, N, Kind::RS_MN, true>(arguments); }    \
  KERNEL(128, 1) ss_bf16_##N(PARAMETERS(Arguments) arguments) { multiply<bf16, N, Kind::SS, false>(arguments); }         \
  KERNEL(128, 1) ss_mn_bf16_##N(PARAMETERS(Arguments) arguments) { multiply<bf16, N, Kind::SS_MN, true>(arguments); }    \
  KERNEL(128, 1) rs_bf16_##N(PARAMETERS(Arguments) arguments) { multiply<bf16, N, Kind::RS, true>(arguments); }          \
  KERNEL(128, 1) rs_mn_bf16_##N(PARAMETERS(Arguments) arguments) { multiply<bf16, N, Kind::RS_MN, false>(arguments); }
MULTIPLY(8)
MULTIPLY(40)
MULTIPLY(64)
MULTIPLY(80)
MULTIPLY(128)
MULTIPLY(256)

// Two groups on different sums: the first may be used while the second is under way.
KERNEL(128, 1) two_groups(PARAMETERS(Arguments) arguments) {
  constexpr SharedAddress A = 0, BARRIER = 8192;
  make_barriers(BARRIER, 1, 1);
  fill_tile(A, arguments, BARRIER);
  float first[4] = {}, second[4] = {};
  multiply_tile(first, A, A);
  wgmma_commit();
  multiply_tile(second, A, A);
  wgmma_commit();
  wgmma_wait<1>();
  const bool right = !std::isnan(first[0]) && std::isnan(second[0]);
  wgmma_wait<0>();
  arguments.c[thread_index()] = right && first[0] == second[0] ? first[0] : infinity();
}

// out's box from (row, column) on = a's box from there on; what is beyond either end is left out. Where a's begins before
// the tensor, out's begins with it.
KERNEL(128, 1) copy_box(PARAMETERS(Arguments) arguments) {
  constexpr SharedAddress TILE = 1024, BARRIER = 0;
  make_barriers(BARRIER, 1, 1);
  if (thread_index() == 0) {
    mbarrier_arrive_expect(BARRIER, 8192);
    tma_load(TILE, arguments.a, BARRIER, arguments.column, arguments.row, 1, 1);
    mbarrier_wait(BARRIER, 0);
    tma_store(arguments.out, TILE, max(arguments.column, 0), max(arguments.row, 0), 1, 1);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

// The threads' own numbers through shared memory.
KERNEL(128, 1) write_box(PARAMETERS(Arguments) arguments) {
  const int row = thread_index() / 2, half = thread_index() % 2;
  for (int chunk = 4 * half; chunk < 4 * half + 4; ++chunk) {
    Chunk value;
    for (int i = 0; i < 4; ++i) value.word[i] = pack<fp16>(row, 8 * chunk + 2 * i);
    store_shared_16(Tile<64, 64>::chunk(0, row, chunk), value);
  }
  fence_async_shared();
  named_barrier_sync(1, 128);
  if (thread_index() != 0) return;
  tma_store(arguments.out, 0, 0, 0, 0, 0);
  tma_store_commit();
  tma_store(arguments.out, 0, 0, 0, 1, 0);
  tma_store_commit();
  tma_store_wait_read<1>();
  tma_store_wait_read<0>();
}

// ldmatrix reads all that stmatrix writes; row 5 of the second chunk as it lies there.
KERNEL(32, 1) matrices(PARAMETERS(Arguments) arguments) {
  using T = Tile<16, 16>;
  const int lane = thread_index();
  uint32 given[4], found[4];
  for (int i = 0; i < 4; ++i) given[i] = 4 * lane + i;
  const SharedAddress row = T::chunk(shared_base(), lane % 16, lane / 16);
  stmatrix_x4(row, given);
  sync_warp();
  ldmatrix_x4(found, row);
  for (int i = 0; i < 4; ++i) arguments.c[4 * lane + i] = static_cast<float>(found[i]);
  const Chunk chunk = load_shared_16(T::chunk(shared_base(), 5, 1));
  for (int i = 0; i < 4; ++i) arguments.c[128 + i] = static_cast<float>(chunk.word[i]);
  const Chunk pair{{float_bits(1.0f), float_bits(2.0f), float_bits(3.0f), float_bits(4.0f)}};
  store_global_16_if(lane == 1, arguments.c + 132, pair);
  store_global_4_if(lane == 2, arguments.c + 136, reciprocal_approx(4.0f) + log2_approx(8.0f));
}

KERNEL(128, 1) tickets(PARAMETERS(Arguments) arguments) {
  arguments.c[thread_index()] = static_cast<float>(atomic_add_global(arguments.counter, 2) + block_count());
  arguments.c[128 + thread_index()] = static_cast<float>(max_of_halves(0x00020001u * thread_index(), 0x00030002u));
}

// c[ticket]: the block that took it.
KERNEL(32, 1) tickets_of_blocks(PARAMETERS(Arguments) arguments) {
  if (thread_index() != 0) return;
  for (int ticket; (ticket = atomic_add_global(arguments.counter, 1)) < 5;) arguments.c[ticket] = block_index();
}

// The first of two blocks waits for the second, and for those before both: c[0] = 2 * c[0] + its index.
KERNEL(32, 1) turns(PARAMETERS(Arguments) arguments) {
  if (thread_index() != 0) return;
  await_global(arguments.counter, 3 * (block_index() ^ 1));
  arguments.c[0] = 2 * arguments.c[0] + block_index();
  arguments.c[1 + block_index()] = static_cast<float>(ordered_add_global(arguments.counter, 3) + 3);
}

// c[lane] and c[32 + lane]: the two halves of pack(c[lane], 0), as floats of their bits.
KERNEL(32, 1) round_floats(PARAMETERS(Arguments) arguments) {
  const float value = arguments.c[thread_index()];
  arguments.c[thread_index()] = static_cast<float>(pack<fp16>(value, 0.0f));
  arguments.c[32 + thread_index()] = static_cast<float>(pack<bf16>(value, 0.0f));
}

KERNEL(64, 1) vote(PARAMETERS(Arguments) arguments) {
  const float lanes = shuffle_xor(static_cast<float>(thread_index()), 3);
  arguments.c[thread_index()] = lanes + 100.0f * any_in_warp(thread_index() == 40);
  arguments.c[64 + thread_index()] = static_cast<float>(shuffle(thread_index(), 31 - thread_index() % 32 / 2));
}

// c is NaN: shared memory starts poisoned.
KERNEL(32, 1) read_unwritten(PARAMETERS(Arguments) arguments) { arguments.c[thread_index()] = load_shared_4(0); }

// c's first 128 floats through shared memory, lines that TMA does not swizzle, to the 128 behind: they come when all wait.
KERNEL(128, 1) copy_run(PARAMETERS(Arguments) arguments) {
  constexpr SharedAddress LINES = 128, BARRIER = 0;
  make_barriers(BARRIER, 1, 1);
  if (thread_index() == 0) {
    mbarrier_arrive_expect(BARRIER, 512);
    bulk_load(LINES, arguments.c, 256, BARRIER);
    bulk_load(LINES + 256, arguments.c + 64, 256, BARRIER);
    arguments.c[1] += 1.0f;  // which they have still to read
  }
  mbarrier_wait(BARRIER, 0);
  arguments.c[128 + thread_index()] = load_shared_4(LINES + 4 * thread_index());
}

// Adds the threads' numbers to c's first 128 floats, and twice that to the 128 behind: both when thread 0 waits.
KERNEL(128, 1) add_runs(PARAMETERS(Arguments) arguments) {
  constexpr SharedAddress ONCE = 0, TWICE = 512;
  store_shared_4(ONCE + 4 * thread_index(), float_bits(1.0f * thread_index()));
  store_shared_4(TWICE + 4 * thread_index(), float_bits(2.0f * thread_index()));
  fence_async_shared();
  sync_block();
  if (thread_index() != 0) return;
  bulk_add_if(true, arguments.c, ONCE, 512);
  tma_store_commit();
  bulk_add_if(true, arguments.c + 128, TWICE, 512);
  tma_store_commit();
  const float before = arguments.c[1], behind = arguments.c[129];
  tma_store_wait_read<1>();
  const float after = arguments.c[1];
  const bool late = arguments.c[129] == behind;
  tma_store_wait_read<0>();
  arguments.c[256] = after - before;
  arguments.c[257] = static_cast<float>(late);
}
