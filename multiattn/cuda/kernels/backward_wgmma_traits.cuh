// The constants of a compiled backward kernel for sm90, and its shared memory. Each rule of
// multiattn/cuda/backward_wgmma.py about which of them go together has its static_assert here.
#pragma once
#include "backward_common.cuh"
#include "multiattn/descriptor.cuh"
#include "multiattn/mask.cuh"
#include "multiattn/ragged.cuh"
#include "multiattn/stored.cuh"
#include "multiattn/stream_k.cuh"
#include "wgmma_ring.cuh"

namespace multiattn {

struct WgmmaBackwardConfig {
  int k_stages;       // tiles of K in shared memory: with two the next is there in time
  int q_stages;       // tiles of Q in shared memory, with lse and delta of their queries
  int dout_stages;    // tiles of dO
  bool k_in_registers;  // K is read into registers once a tile, for the scores
  bool early_scores;    // of the next step: made while dP is, in registers of their own
  bool dq_by_tma;       // dQ is added to its sums by TMA, by way of shared memory
  int dq_columns;       // of dQ that are made at a time
  bool ordered = false;       // tiles of keys add to dQ one after another, from the first on: the same bits each time
  bool clears_ahead = false;  // sums of dQ are emptied by tiles of earlier heads, but those of the first section
  bool keeps_sloped = false;  // weights times the slope of an expression, beside the weights
};

template <class Element, Features F, WgmmaBackwardConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct WgmmaBackwardTraits : Walks<Element, F, WgmmaBackwardParams, Score, Blocked> {
  static constexpr int K_STAGES = C.k_stages, Q_STAGES = C.q_stages, DOUT_STAGES = C.dout_stages;
  static constexpr int DQ_COLUMNS = C.dq_columns;
  static constexpr bool KEEPS_K = C.k_in_registers;
  static constexpr bool EARLY_SCORES = C.early_scores, DQ_BY_TMA = C.dq_by_tma, KEEPS_SLOPED = C.keeps_sloped;
  // One half of dQ is handed to TMA while the other half is made.
  static constexpr bool ORDERED = C.ordered;
  static constexpr bool HANDS_OVER_LATE = DQ_BY_TMA && C.dq_columns < F.head_dim;
  // One copy of a step does for the first and the last too: with a mask three are more than the instruction cache holds. Fetches
  // took a quarter of the time at D=64. With an expression three have too few registers above D=96.
  static constexpr bool LISTED = HAS_LISTS<Blocked>;  // a block mask lists the tiles of queries of a tile of keys
  static constexpr bool IS_COMPACT = F.band != Band::FULL || LISTED || (HAS_SCORE<Score> && WgmmaBackwardTraits::WIDTH > 96);
  // With a causal mask walks begin with the last queries, which all tiles of keys see: blocks read the same Q and dO at a time,
  // and add to the same dQ. At D=128 3 % faster, at D=64, where threads add and not TMA, 2 % slower.
  // Those that add in order all descend: each finds that the tile before it has been there.
  static constexpr bool DESCENDS =
      !LISTED && (ORDERED ? F.band != Band::FULL : F.band == Band::CAUSAL && WgmmaBackwardTraits::WIDTH > 64);
  static constexpr int WARPGROUPS = 2;       // that own keys; one more makes dQ, and one loads
  static constexpr int WARPGROUP_KEYS = 64;  // rows of one wgmma
  static constexpr int TILE_M = 64, TILE_N = WARPGROUP_KEYS * WARPGROUPS;
  // With blocks of 64 keys each warpgroup has a list of its own, with stages of its own, which one more warp fills.
  static constexpr bool PAIRED = LISTED && SPEC_OF<Blocked>.keys % TILE_N != 0;
  static constexpr int GROUPS = PAIRED ? WARPGROUPS : 1;  // of stages
  static constexpr int THREADS = WARPGROUP * (WARPGROUPS + 2);
  static constexpr int KEY_WARPS = 4 * WARPGROUPS, DQ_WARPS = 4;
  // Warps beside the one that loads: they add to dQ in order, or one empties its sums for later tiles.
  static constexpr bool CLEARS_AHEAD = C.clears_ahead;
  static constexpr int ADDING_WARPS = ORDERED ? 3 : 0, SIDE_WARPS = ADDING_WARPS + CLEARS_AHEAD;
  static constexpr int TILE_READERS = KEY_WARPS + DQ_WARPS + SIDE_WARPS + PAIRED;  // warps that read what a tile of keys is
  static constexpr int STAGE_USERS = KEY_WARPS / GROUPS;
  // A thread's registers; the four warpgroups have 512.
  static constexpr int KEY_REGISTERS = WgmmaBackwardTraits::WIDTH > 96 ? 208 : EARLY_SCORES ? 200 : 184;
  static constexpr int PRODUCER_REGISTERS = WgmmaBackwardTraits::WIDTH > 96 ? 24 : 40;
  static constexpr int DQ_REGISTERS = 512 - 2 * KEY_REGISTERS - PRODUCER_REGISTERS;
  static constexpr int DIM_STEPS = (F.head_dim + 15) / 16, V_STEPS = (F.head_dim_v + 15) / 16;  // of a wgmma
  static constexpr int QUERY_STEPS = TILE_M / 16, KEY_STEPS = (PAIRED ? WARPGROUP_KEYS : TILE_N) / 16;

  using TileQ = PanelTile<TILE_M, F.head_dim>;
  using TileDout = PanelTile<TILE_M, F.head_dim_v>;
  using TileK = PanelTile<TILE_N, F.head_dim>;
  using TileV = PanelTile<TILE_N, F.head_dim_v>;
  using TileDS = PanelTile<PAIRED ? WARPGROUP_KEYS : TILE_N, TILE_M>;  // of dS^T: rows are keys
  using Sum = DqSum<DIM_STEPS, true>;
  using RingK = Ring<K_STAGES>;
  using RingQ = Ring<Q_STAGES>;
  using RingDout = Ring<DOUT_STAGES>;
  static constexpr int DS_STAGES = 2, DQ_BUFFERS = DQ_BY_TMA ? 2 : 0;
  using RingDS = Ring<DS_STAGES>;
  // Parts of dQ wait for their turn. Each warp that adds has barriers of its own, as nobody may await a phase before the one ahead of
  // it is over.
  static constexpr int DQ_PARTS = (F.head_dim + DQ_COLUMNS - 1) / DQ_COLUMNS;
  using RingSums = Ring<ADDING_WARPS * DQ_PARTS>;
  using PlaceSums = RingPlace<ADDING_WARPS * DQ_PARTS>;
  // dP begins with -delta where its accumulators are not those of scores: a step has a tenth fewer instructions.
  static constexpr int STATISTICS = EARLY_SCORES ? 3 : 2, STATISTICS_BYTES = STATISTICS * TILE_M * 4;  // lse, and delta, or -delta twice
  static constexpr int TURNS = turns_of(ORDERED || CLEARS_AHEAD);

  // Shared memory: K, V, stages of Q, of dO, of dS^T, of statistics, dQ, then barriers and what the tile of keys is.
  static constexpr int V_AT = K_STAGES * TileK::BYTES, Q_AT = V_AT + TileV::BYTES;
  static constexpr int DOUT_AT = Q_AT + GROUPS * Q_STAGES * TileQ::BYTES;
  static constexpr int DS_AT = DOUT_AT + GROUPS * DOUT_STAGES * TileDout::BYTES;
  static constexpr int STATISTICS_AT = DS_AT + GROUPS * DS_STAGES * TileDS::BYTES;
  static constexpr int DQ_AT = STATISTICS_AT + GROUPS * Q_STAGES * STATISTICS_BYTES;
  static constexpr int DQ_BYTES = TILE_M * ((DQ_COLUMNS + 15) / 16 * 16) * 4;  // as much of dQ as is made at a time
  // Floats of 16 queries in the sums, of 8 columns; and the bytes that a warp has of a part that begins with a column.
  static constexpr int SIDE = Sum::FRAGMENT / 2;
  static DEVICE constexpr int part_bytes(int column) {
    return (F.head_dim - column < DQ_COLUMNS ? F.head_dim - column : DQ_COLUMNS) / 8 * SIDE * 4;
  }
  static constexpr int BARRIERS_AT = DQ_AT + DQ_BUFFERS * DQ_BYTES;
  static constexpr int SMEM_BYTES = BARRIERS_AT + 512;

  static constexpr int STAGE_BARRIERS = RingQ::BYTES + RingDout::BYTES + RingDS::BYTES;  // of one group
  static constexpr int STEP_BYTES = LISTED ? (Q_STAGES + DS_STAGES) * CHUNK_BYTES : 0;  // what its steps are of
  static_assert(RingK::BYTES + Ring<1>::BYTES + GROUPS * (STAGE_BARRIERS + STEP_BYTES) + RingSums::BYTES + (K_STAGES + !LISTED) * (IS_CUT<Blocked> ? 48 : 32) <= 512,
                "stages: barriers, and what tiles of keys are, in 512 bytes");
  static_assert(!LISTED || !ORDERED, "with lists in any order");
  static_assert(!LISTED || SPEC_OF<Blocked>.keys % WARPGROUP_KEYS == 0, "a warpgroup's keys lie in one block");
  static_assert(!IS_CUT<Blocked> || !PAIRED, "where sequences cut tiles, both warpgroups have one list");
  static_assert(F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0 && WgmmaBackwardTraits::WIDTH <= 128, "head_dim, head_dim_v: multiples of 8 up to 128");
  static_assert(K_STAGES == 1 || K_STAGES == 2, "k_stages: 1, 2");
  static_assert(DQ_COLUMNS == F.head_dim || DQ_COLUMNS == 64, "dq_columns: head_dim, or a panel of K");
  static_assert(DQ_COLUMNS / 2 + 40 <= DQ_REGISTERS, "dq_columns: so many accumulators beside all else");
  static_assert(!ORDERED || (DQ_BY_TMA && !IS_PACKED<Blocked> && !IS_STREAM_K<Blocked>), "ordered: by TMA, whole tiles, of one length");
  static_assert(!CLEARS_AHEAD || (DQ_BY_TMA && !ORDERED && !IS_PACKED<Blocked>), "clears_ahead: by TMA, in any order, of one length");
  static_assert(Q_STAGES >= 2 && DOUT_STAGES >= 1, "q_stages: 2 and more; dout_stages: 1 and more");
};

// A tile of keys: where it starts, its key/value head and the number of its sequence, both through the batch. Without keys, a
// schedule is done. With StreamK also the steps of its walk that a block makes, and the place of its sums; with lists how many there
// are.
template <class T>
struct KeyTile {
  int first_key, head_kv, number;
  SequenceOf<T> sequence;
  int first_step = 0, end_step = 0, sums = 0;
  int end_of_second = 0;  // with a list for each warpgroup: the steps of the second

  static constexpr int STEPS_AT = IS_CUT<typename T::Blocked> ? 32 : 16;  // with lists, behind a sequence
  static constexpr int BYTES = IS_CUT<typename T::Blocked> ? 48 : 32;     // in shared memory

  DEVICE bool is_none() const { return first_key == NO_TILE; }
};

template <class T>
DEVICE void store_tile(SharedAddress place, const KeyTile<T>& tile) {
  store_shared_16(place, chunk_of(tile.first_key, tile.head_kv, tile.number, 0));
  if constexpr (IS_PACKED<typename T::Blocked>) store_shared_16(place + 16, chunk_of(tile.sequence));
  if constexpr (IS_STREAM_K<typename T::Blocked>)
    store_shared_16(place + 16, chunk_of(tile.first_step, tile.end_step, tile.sums, 0));
  if constexpr (T::LISTED) store_shared_16(place + KeyTile<T>::STEPS_AT, chunk_of(tile.end_step, tile.end_of_second, 0, 0));
}

// A step of a walk by lists: its tile of queries, the query head through the batch, and in its batch entry; the place of its bits.
struct ListedStep {
  TileWord tile;
  int head, head_of_entry, place;

  DEVICE void store(SharedAddress at) const { store_shared_16(at, chunk_of(tile.word, head, head_of_entry, place)); }
  static DEVICE ListedStep load(SharedAddress place) {
    const Chunk it = load_shared_16(place);
    const auto field = [&](int word) { return static_cast<int>(uniform(it.word[word])); };
    return {{field(0)}, field(1), field(2), field(3)};
  }
};

// The tile at `place`, as one value in all lanes of a warp; or for one thread alone.
template <class T, bool OF_WARP = true>
DEVICE KeyTile<T> load_key_tile(SharedAddress place) {
  const auto field = [](const Chunk& chunk, int word) {
    return static_cast<int>(OF_WARP ? uniform(chunk.word[word]) : chunk.word[word]);
  };
  const Chunk it = load_shared_16(place);
  KeyTile<T> tile{field(it, 0), field(it, 1), field(it, 2), {}};
  if constexpr (IS_PACKED<typename T::Blocked>) {
    const Chunk of = load_shared_16(place + 16);
    tile.sequence = {field(of, 0), field(of, 1), field(of, 2), field(of, 3)};
  }
  if constexpr (T::LISTED) {
    const Chunk steps = load_shared_16(place + KeyTile<T>::STEPS_AT);
    tile.end_step = field(steps, 0), tile.end_of_second = field(steps, 1);
  }
  if constexpr (IS_STREAM_K<typename T::Blocked>) {
    const Chunk part = load_shared_16(place + 16);
    tile.first_step = field(part, 0), tile.end_step = field(part, 1), tile.sums = field(part, 2);
  }
  return tile;
}

// A step of the walk of a tile of keys over the tiles of queries that see it, query head by query head of its group.
struct QueryStep {
  int head, block;  // heads count from the first of the group on

  // A step of a walk that begins with the first query head.
  static DEVICE QueryStep of(int step, const Blocks& blocks) {
    const int count = max(blocks.end - blocks.begin, 1);
    return {step / count, blocks.begin + step % count};
  }

  DEVICE void advance(const Blocks& blocks) {
    if (++block < blocks.end) return;
    block = blocks.begin;
    ++head;
  }
};

template <class T>
DEVICE int count_query_tiles(const typename T::Params& params, const KeyTile<T>& tile) {
  return (count_queries(params.backward, tile.sequence) + T::TILE_M - 1) / T::TILE_M;
}

// Blocks of queries in the order of a walk: one that descends counts them from the last on.
template <class T>
DEVICE Blocks in_walk(const Blocks& it, int tiles) {
  if constexpr (!T::DESCENDS) return it;
  return {tiles - it.end, tiles - it.full_end, tiles - it.full_begin, tiles - it.begin};
}
template <class T>
DEVICE int query_block(const typename T::Params& params, const KeyTile<T>& tile, int walked) {
  return T::DESCENDS ? count_query_tiles<T>(params, tile) - 1 - walked : walked;
}

// The blocks of queries of a tile of keys, in each head of its group.
template <class T>
DEVICE Blocks query_blocks(const typename T::Params& params, const KeyTile<T>& tile) {
  const Mask<T::BAND> mask = mask_of<T::BAND>(params.backward, tile.sequence);
  const int tiles = count_query_tiles<T>(params, tile);
  return in_walk<T>(mask.template queries<T::TILE_M>(tile.first_key, T::TILE_N, tiles), tiles);
}

// The steps of the walk over them.
template <class T>
DEVICE int count_steps(const typename T::Params& params, const Blocks& blocks) {
  return max(blocks.end - blocks.begin, 0) * params.backward.group;
}

// The tile's blocks that see keys of a warpgroup. With several query heads all of them, as one walk follows another without a break,
// and with a part of a walk.
template <class T>
DEVICE Blocks group_blocks(const typename T::Params& params, const KeyTile<T>& tile, int group) {
  const Blocks all = query_blocks<T>(params, tile);
  if (T::BAND == Band::FULL || IS_STREAM_K<typename T::Blocked> || params.backward.group > 1) return all;
  const Mask<T::BAND> mask = mask_of<T::BAND>(params.backward, tile.sequence);
  const int tiles = count_query_tiles<T>(params, tile), first_key = tile.first_key + group * T::WARPGROUP_KEYS;
  Blocks own = in_walk<T>(mask.template queries<T::TILE_M>(first_key, T::WARPGROUP_KEYS, tiles), tiles);
  own.begin = min(max(own.begin, all.begin), max(all.begin, all.end));
  own.end = max(min(own.end, all.end), own.begin);
  return own;
}

// The place of a query's lse, or delta, in the list of its tile: what a thread wants at a time, of two queries in two neighbouring
// accumulators of 8 columns, is together.
DEVICE int statistic_place(int query) {
  return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2;
}

// The place of a query's -delta in the list of its tile, and two behind it once more: a thread's accumulators of two keys and two
// queries begin with the four numbers that are together.
DEVICE int accumulator_place(int query) { return query / 8 * 16 + query % 8 / 2 * 4 + query % 2; }

// lse (log2) and delta of a tile of queries, of a query head that counts through the batch. Behind them is, where dQ is added up in
// order, how many tiles of keys have added to the tile's, or how many have emptied their part of the sums of a head of keys. A sequence
// of a packed batch begins with a tile of its own: each of those before it has at most one more than its rows fill. Where sequences
// cut tiles, `block` is one of the packed axis.
template <class T>
DEVICE float* statistics_of(const typename T::Params& params, int head, int number, const SequenceOf<T>& sequence, int block) {
  int64 place = static_cast<int64>(head) * params.backward.tiles_q + block;
  if constexpr (IS_CUT<typename T::Blocked>) place += number;
  else if constexpr (IS_PACKED<typename T::Blocked>) place += sequence.offset_q / T::TILE_M + number;
  return params.statistics + place * (T::STATISTICS * T::TILE_M + T::TURNS);
}

// Where the lse of a query of a tile that sequences cut is; its delta is TILE_M numbers behind.
template <class T>
DEVICE float* statistics_of_query(const typename T::Params& params, int head, int number, const Sequence& sequence, int query) {
  const int block = (sequence.offset_q + query) / T::TILE_M;
  const int row = query - first_query_in<typename T::Blocked, T::TILE_M>(sequence, block);
  return statistics_of<T>(params, head, number, sequence, block) + statistic_place(row);
}

// ---- sums of dQ that are emptied while tiles of other heads are made, so that L2 has them when the first tile adds

// The heads of keys whose sums are empty before: those of the first section, or all. Tiles empty the sums of the head so many later.
template <class T>
DEVICE int heads_cleared_before(const typename T::Params& params) {
  if constexpr (IS_STREAM_K<typename T::Blocked>)
    if (params.lists.shares > 1) return params.backward.heads_kv_all;
  return params.backward.sections_kv;
}

// How many tiles have emptied their part of the sums of a head of keys.
template <class T>
DEVICE int32* cleared_parts(const typename T::Params& params, int head_kv) {
  float* const first = statistics_of<T>(params, head_kv * params.backward.group, 0, {}, 0);
  return reinterpret_cast<int32*>(first + T::STATISTICS * T::TILE_M);
}

template <class T, int GROUP = 0>
struct BackwardShared {
  static DEVICE SharedAddress k(int slot) { return shared_base() + slot * T::TileK::BYTES; }
  static DEVICE SharedAddress v() { return shared_base() + T::V_AT; }
  static DEVICE SharedAddress q(int slot) { return shared_base() + T::Q_AT + (GROUP * T::Q_STAGES + slot) * T::TileQ::BYTES; }
  static DEVICE SharedAddress dout(int slot) { return shared_base() + T::DOUT_AT + (GROUP * T::DOUT_STAGES + slot) * T::TileDout::BYTES; }
  static DEVICE SharedAddress ds(int slot) { return shared_base() + T::DS_AT + (GROUP * T::DS_STAGES + slot) * T::TileDS::BYTES; }
  static DEVICE SharedAddress lse(int slot) { return shared_base() + T::STATISTICS_AT + (GROUP * T::Q_STAGES + slot) * T::STATISTICS_BYTES; }
  // The buffer of an addition to dQ, of the 16 queries of a warp.
  static DEVICE SharedAddress dq(uint32 addition, int warp) {
    const int buffer = addition % T::DQ_BUFFERS;
    return shared_base() + T::DQ_AT + buffer * T::DQ_BYTES + warp * (T::DQ_BYTES / T::DQ_WARPS);
  }
  static DEVICE SharedAddress delta(int slot) { return lse(slot) + T::TILE_M * 4; }

  static DEVICE typename T::RingK ring_k() { return {shared_base() + T::BARRIERS_AT}; }
  static DEVICE Ring<1> ring_v() { return {ring_k().barriers + T::RingK::BYTES}; }
  static DEVICE typename T::RingQ ring_q() { return {ring_v().barriers + Ring<1>::BYTES + GROUP * T::STAGE_BARRIERS}; }
  static DEVICE typename T::RingDout ring_dout() { return {ring_q().barriers + T::RingQ::BYTES}; }
  static DEVICE typename T::RingDS ring_ds() { return {ring_dout().barriers + T::RingDout::BYTES}; }
  static DEVICE auto ring_sums() { return typename T::RingSums{ring_ds().barriers + T::RingDS::BYTES}; }  // of one group
  // The place of the record of a slot's tile of keys.
  static DEVICE SharedAddress tile_place(int slot) {
    return shared_base() + T::SMEM_BYTES - (1 + slot) * KeyTile<T>::BYTES;
  }
  // With lists, the step of a slot of Q, and of one of dS.
  static DEVICE SharedAddress step_of_q(int slot) {
    return ring_v().barriers + Ring<1>::BYTES + T::GROUPS * T::STAGE_BARRIERS + GROUP * T::STEP_BYTES + slot * CHUNK_BYTES;
  }
  static DEVICE SharedAddress step_of_ds(int slot) { return step_of_q(T::Q_STAGES + slot); }
  // Where the producer is in a schedule with StreamK.
  static DEVICE SharedAddress cursor_place() { return tile_place(T::K_STAGES); }

  static DEVICE void init() {
    ring_k().init(T::TILE_READERS);
    ring_v().init(T::KEY_WARPS);
    init_stages();
    if constexpr (T::PAIRED) BackwardShared<T, 1>::init_stages();
    ring_sums().init(1, T::DQ_WARPS);
    fence_mbarrier_init();
  }
  static DEVICE void init_stages() {
    ring_q().init(T::STAGE_USERS);
    ring_dout().init(T::STAGE_USERS);
    ring_ds().init(T::DQ_WARPS, T::STAGE_USERS);
  }
};

// Makes a block's barriers, and sends for its maps by the thread that loads. Returns the number of the thread's warpgroup.
template <class Shared, class Params>
DEVICE int begin_block(const Params& params, int loading_thread) {
  if (thread_index() == 0) Shared::init();
  if (thread_index() == loading_thread) {
    prefetch_map(params.map_q);
    prefetch_map(params.map_k);
    prefetch_map(params.map_v);
    prefetch_map(params.map_dout);
  }
  sync_block();  // barriers are there
  return static_cast<int>(uniform(thread_index() / WARPGROUP));
}

}  // namespace multiattn
