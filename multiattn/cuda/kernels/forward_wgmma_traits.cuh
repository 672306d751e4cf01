// The constants of a compiled forward kernel for sm90. Each rule of forward_wgmma.py and decode_wgmma.py about which of them go
// together has its static_assert here.
#pragma once
#include "multiattn/descriptor.cuh"
#include "multiattn/owned.cuh"
#include "multiattn/ragged.cuh"
#include "multiattn/score.cuh"
#include "wgmma_ring.cuh"

namespace multiattn {

// Named barriers: of warpgroup 0, and of all that compute.
constexpr int TURN_BARRIER = 1, ROWS_BARRIER = 4, TAIL_BARRIER = 7;

enum class Scheduler {
  ONE_TILE,  // a block for every tile; the hardware hands them out
  STATIC,    // a block for every SM: tiles at a fixed distance
  DYNAMIC,   // a block for every SM: a free block takes the next tile from a counter
};

// The constants that are the config's.
struct WgmmaConfig {
  int warpgroups;   // that compute; one more loads
  int cluster = 1;  // blocks that share tiles of K and V, each loads a part
  int tile_n;
  int stages;       // tiles of K and V in shared memory, together, or of K alone
  int v_stages = 0;  // tiles of V, if it does not take turns with K
  int q_slots = 1;  // tiles of Q
  bool pingpong;    // warpgroups take turns at the tensor cores
  bool lazy_max;    // weights before the maximum is known; see forward_wgmma_softmax.cuh
  bool tma_store = false;  // the output leaves through Q's tile
  Scheduler scheduler = Scheduler::ONE_TILE;
  int teams = 1;  // lone warpgroups with tiles, and shared memory, of their own
  int kept_steps = 0;  // of a wgmma's 16 columns of Q, from the first on: read into registers once
};

template <class Blocked>
using PlainParams = typename Choice<IS_GROUPED<Blocked>, SplitWgmmaParams, WgmmaParams>::Type;

template <class Element, Features F, WgmmaConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct WgmmaTraits : Walks<Element, F, PlainParams<Blocked>, Score, Blocked> {
  static constexpr int WARPGROUPS = C.warpgroups, CLUSTER = C.cluster, TILE_N = C.tile_n;
  static constexpr int STAGES = C.stages, V_STAGES = C.v_stages;
  static constexpr int Q_SLOTS = C.q_slots, KEPT_STEPS = C.kept_steps;
  static constexpr bool PINGPONG = C.pingpong, LAZY_MAX = C.lazy_max, TMA_STORE = C.tma_store;
  static constexpr Scheduler SCHEDULER = C.scheduler;
  static constexpr bool GROUPED = IS_GROUPED<Blocked>;  // rows are of several heads, and a block has a part of their keys

  static constexpr int WARPGROUP_ROWS = 64;  // of one wgmma
  static constexpr int TILE_M = WARPGROUP_ROWS * WARPGROUPS;
  static constexpr bool LISTED = HAS_LISTS<Blocked>;  // a block mask lists the tiles of keys, for all rows of a tile
  static constexpr int TEAMS = C.teams, ALL_WARPGROUPS = TEAMS * WARPGROUPS;
  static constexpr int THREADS = WARPGROUP * (ALL_WARPGROUPS + 1);
  static constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;
  static constexpr int DOT_STEPS = (F.head_dim + 15) / 16, KEY_STEPS = TILE_N / 16;  // of a wgmma's 16

  static constexpr Paging PAGING = PAGING_OF<Blocked>;
  static constexpr bool IS_PAGED = PAGING == Paging::ANY;
  static constexpr int BOX_ROWS = GROUPED ? BOX_ROWS_OF<Blocked> : TILE_N / CLUSTER;  // keys that come by TMA at a time
  static constexpr bool GATHERS = BOX_ROWS == 0;  // one by one, by all warps of the warpgroup that loads
  static constexpr bool CLEARS = GROUPED && !GATHERS;  // boxes of a cache bring more than keys
  static constexpr int LOADING_WARPS = GATHERS ? WARPGROUP / WARP : 1;
  // An SM's 64 Ki registers, by multiples of 8; loading takes few. One warpgroup that computes has enough without.
  static constexpr bool MOVES_REGISTERS = ALL_WARPGROUPS > 1;
  static constexpr int PRODUCER_REGISTERS = ALL_WARPGROUPS == 3 ? 32 : GATHERS ? 56 : 40;
  static constexpr int CONSUMER_REGISTERS = ALL_WARPGROUPS == 3 ? 160 : GATHERS ? 224 : 232;

  using TileQ = PanelTile<TILE_M, F.head_dim>;
  using TileOut = PanelTile<TILE_M, F.head_dim_v>;  // in the place of Q
  using TileK = PanelTile<TILE_N, F.head_dim>;
  using TileV = PanelTile<TILE_N, F.head_dim_v>;
  static constexpr bool TAKES_TURNS = V_STAGES == 0;  // K and V do, in slots that have room for either
  static constexpr int KV_BYTES = TileK::BYTES > TileV::BYTES ? TileK::BYTES : TileV::BYTES;
  static constexpr int Q_BYTES = TMA_STORE && TileOut::BYTES > TileQ::BYTES ? TileOut::BYTES : TileQ::BYTES;
  static constexpr int K_BYTES = TAKES_TURNS ? KV_BYTES : TileK::BYTES, V_BYTES = TAKES_TURNS ? KV_BYTES : TileV::BYTES;
  static constexpr int K_AT = Q_SLOTS * Q_BYTES, V_AT = TAKES_TURNS ? K_AT : K_AT + STAGES * K_BYTES;
  static constexpr int BARRIERS_AT = K_AT + STAGES * K_BYTES + V_STAGES * V_BYTES;
  static constexpr int BARRIER_BYTES = TEAMS == 1 ? 512 : 1024;  // each team's tiles begin where a swizzle does
  static constexpr int TEAM_BYTES = BARRIERS_AT + BARRIER_BYTES, SMEM_BYTES = TEAMS * TEAM_BYTES;

  static_assert(F.head_dim % 8 == 0 && F.head_dim <= 256, "head_dim: multiples of 8 up to 256");
  static_assert(F.head_dim_v % 8 == 0 && F.head_dim_v <= 256, "head_dim of v: multiples of 8 up to 256");
  static_assert(WARPGROUPS >= (GROUPED || LISTED ? 1 : 2) && WARPGROUPS <= 3, "tile_m: 128, 192, of groups and lists also 64");
  static_assert(!LISTED || CLUSTER == 1, "each tile of queries has a list of its own");
  static_assert(TEAMS == 1 || (LISTED && WARPGROUPS == 1 && TEAMS <= 3), "teams: up to three, of one warpgroup, with lists");
  static_assert(CLUSTER == 1 || CLUSTER == 2, "cluster: 1, 2");
  static_assert(BOX_ROWS % 8 == 0, "a block loads whole groups of 8 rows, in which the swizzle repeats");
  static_assert(CLUSTER == 1 || !IS_PACKED<Blocked>, "in a packed batch a cluster's tiles are of several sequences");
  static_assert(CLUSTER == 1 || SCHEDULER != Scheduler::DYNAMIC, "a cluster's blocks take their tiles together");
  static_assert(TILE_N % 16 == 0 && TILE_N >= 16 && TILE_N <= 256, "tile_n: multiples of 16 up to 256");
  static_assert(STAGES >= 2 && STAGES + V_STAGES >= 3 && STAGES + V_STAGES <= 16, "stages: 3 to 16 with those of V");
  static_assert(Q_SLOTS >= 1 && Q_SLOTS <= 3, "q_slots: 1 to 3");
  static_assert(!LAZY_MAX || !HAS_SCORE<Score>, "lazy_max: for plain scores");
  static_assert(KEPT_STEPS >= 0 && KEPT_STEPS <= DOT_STEPS, "q_in_registers: up to all of Q");
  static_assert(!PINGPONG || WARPGROUPS > 1, "pingpong: of two warpgroups or three");
  static_assert(!GROUPED || (CLUSTER == 1 && Q_SLOTS == 1 && !TMA_STORE && SCHEDULER == Scheduler::ONE_TILE),
                "rows of groups are no box, and a block has one tile of them");
  static_assert(!GROUPED || TAKES_TURNS, "stages of V: not for rows of groups");
  static_assert(!GATHERS || (WARPGROUPS < 3 && TILE_N <= WARPGROUP), "gathers: for two warpgroups, a lane for each key");
  static_assert(!CLEARS || KV_BYTES <= WARP * BOX_ROWS * TileK::ROW_BYTES, "a lane for each box of a tile");
};

// A tile of queries: where it starts (negative: it has rows without a query), its head, the number of its batch entry or
// sequence, and how many blocks of keys are loaded for it, or NO_TILE.
template <class T>
struct QueryTile {
  int first_query, head, number, blocks;
  SequenceOf<T> sequence;

  static constexpr int BYTES = IS_PACKED<typename T::Blocked> ? 32 : 16;  // in shared memory
};

template <class T>
DEVICE void store_tile(SharedAddress place, const QueryTile<T>& tile) {
  store_shared_16(place, chunk_of(tile.first_query, tile.head, tile.number, tile.blocks));
  if constexpr (IS_PACKED<typename T::Blocked>) store_shared_16(place + 16, chunk_of(tile.sequence));
}

template <class T>
DEVICE QueryTile<T> load_tile(SharedAddress place) {
  const auto field = [](const Chunk& chunk, int word) { return static_cast<int>(chunk.word[word]); };
  const Chunk it = load_shared_16(place);
  QueryTile<T> tile{field(it, 0), field(it, 1), field(it, 2), field(it, 3), {}};
  if constexpr (IS_PACKED<typename T::Blocked>) {
    const Chunk of = load_shared_16(place + 16);
    tile.sequence = {field(of, 0), field(of, 1), field(of, 2), field(of, 3)};
  }
  return tile;
}

// Slots of K or of V: their tile, where they are, their ring.
template <class Tile_, int AT, int SLOT_BYTES, class Ring_, int RING_AT>
struct Slots {
  using Tile = Tile_;
  using Ring = Ring_;
  static DEVICE SharedAddress at(int slot) { return shared_base() + AT + slot * SLOT_BYTES; }
  static DEVICE Ring ring() { return {shared_base() + RING_AT}; }
};

// Shared memory: tiles of Q, tiles of K and V as they come, barriers, and what each slot of Q is of. A team has its own: its number is a
// constant, as operands of wgmma have addresses in uniform registers.
template <class T, int TEAM = 0>
struct SharedLayout {
  static constexpr int AT = TEAM * T::TEAM_BYTES;
  using RingQ = Ring<T::Q_SLOTS>;
  using RingK = Ring<T::STAGES, T::CLUSTER>;
  using RingV = typename Choice<T::TAKES_TURNS, RingK, Ring<T::V_STAGES, T::CLUSTER>>::Type;
  static constexpr int RING_K_AT = AT + T::BARRIERS_AT + RingQ::BYTES;
  static constexpr int RING_V_AT = T::TAKES_TURNS ? RING_K_AT : RING_K_AT + RingK::BYTES;
  using K = Slots<typename T::TileK, AT + T::K_AT, T::K_BYTES, RingK, RING_K_AT>;
  using V = Slots<typename T::TileV, AT + T::V_AT, T::V_BYTES, RingV, RING_V_AT>;
  using Places = typename Choice<T::TAKES_TURNS, RingPlace<T::STAGES>, PlacesApart<T::STAGES, T::V_STAGES>>::Type;

  static DEVICE SharedAddress q(int slot) { return shared_base() + AT + slot * T::Q_BYTES; }
  static DEVICE RingQ ring_q() { return {shared_base() + AT + T::BARRIERS_AT}; }
  static DEVICE SharedAddress tile_place(int slot) {
    return shared_base() + RING_V_AT + RingV::BYTES + QueryTile<T>::BYTES * slot;
  }
  // With lists: the tile of keys that a slot of K has, and the place of its bits.
  static DEVICE SharedAddress key_word(int slot) { return tile_place(T::Q_SLOTS) + 8 * slot; }
  static_assert(RING_V_AT + RingV::BYTES + QueryTile<T>::BYTES * T::Q_SLOTS + 8 * T::STAGES * T::LISTED <= AT + T::TEAM_BYTES,
                "barriers, tiles of queries and of keys in 512 bytes");

  static DEVICE void init() {
    ring_q().init(T::CONSUMER_WARPS);
    K::ring().init(T::CONSUMER_WARPS, T::LOADING_WARPS);
    if constexpr (!T::TAKES_TURNS) V::ring().init(T::CONSUMER_WARPS, T::LOADING_WARPS);
    fence_mbarrier_init();
  }
};

}  // namespace multiattn
