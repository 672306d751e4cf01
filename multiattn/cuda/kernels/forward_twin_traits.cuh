// The constants of a compiled kernel of forward_twin.cuh. Each rule of forward_twin.py and decode_twin.py about which of them go
// together has its static_assert here.
#pragma once
#include "forward_wgmma_traits.cuh"

namespace multiattn {

// Named barriers: weights of warpgroup 0 and of warpgroup 1, the rows of either, and both warpgroups.
constexpr int WEIGHTS_BARRIER = 1, HALF_BARRIER = 3, BOTH_BARRIER = 5;

// The constants that are the config's.
struct TwinConfig {
  int piece;   // columns of K or V that come at a time
  int slots;   // pieces in shared memory
  int before;  // pieces of K whose part of scores is begun before values of the turn before
};

template <class Element, Features F, TwinConfig C, class Score = NoScore, class Blocked = NoBlockMask>
struct TwinTraits : Walks<Element, F, PlainParams<Blocked>, Score, Blocked> {
  static constexpr int PIECE = C.piece, SLOTS = C.slots, BEFORE = C.before;
  static constexpr bool GROUPED = IS_GROUPED<Blocked>;  // rows are of several heads, and a block has a part of their keys

  static constexpr int WARPGROUPS = 2, WARPGROUP_ROWS = 64;  // both have the same rows
  static constexpr int TILE_M = WARPGROUP_ROWS, TILE_N = 64;
  static constexpr int THREADS = WARPGROUP * (WARPGROUPS + 1), CONSUMERS = WARPGROUP * WARPGROUPS;
  static constexpr int DOT_STEPS = (F.head_dim + 15) / 16, KEY_STEPS = TILE_N / 16;  // of a wgmma's 16

  // K and V come in pieces of some columns; where V is in K, pieces of K are pieces of V.
  using TileQ = PanelTile<WARPGROUP_ROWS, F.head_dim>;
  using Piece = PanelTile<TILE_N, PIECE>;
  static constexpr int PIECE_STEPS = PIECE / 16;
  static constexpr int K_PIECES = (F.head_dim + PIECE - 1) / PIECE, V_PIECES = (F.head_dim_v + PIECE - 1) / PIECE;
  static constexpr int OWN_PIECES = (V_PIECES + 1) / 2;  // of V: warpgroup 0's, and the most that warpgroup 1 has
  // Pieces of V that lie side by side are for one product: two where whole tiles fill the ring, which never wrap around.
  static constexpr int PRODUCT_PIECES = F.v_in_k && V_PIECES % 4 == 0 ? 2 : 1;
  static constexpr int PRODUCTS = OWN_PIECES / PRODUCT_PIECES, PRODUCT = PIECE * PRODUCT_PIECES;
  static constexpr int OWN_COLUMNS = OWN_PIECES * PIECE;
  // A slot's earlier piece must be one that the same warpgroup has waited for: a phase has one bit, and before that piece has come the
  // slot looks full. So each of the twins has slots of its own. Where V is in K all pieces of two tiles have theirs.
  static constexpr int RINGS = F.v_in_k ? 1 : 2, OWN_SLOTS = SLOTS / RINGS;

  static constexpr Paging PAGING = PAGING_OF<Blocked>;
  static constexpr bool IS_PAGED = PAGING == Paging::ANY;
  static constexpr int BOX_ROWS = GROUPED ? BOX_ROWS_OF<Blocked> : TILE_N;  // keys that come by TMA at a time
  static constexpr bool GATHERS = BOX_ROWS == 0;                            // one by one, by a whole warpgroup
  static constexpr bool CLEARS = GROUPED && !GATHERS;                       // boxes of a cache bring more than keys
  static constexpr int LOADING_WARPS = GATHERS ? WARPGROUP / WARP : 1;
  static constexpr int PRODUCER_REGISTERS = GATHERS ? 56 : 40, CONSUMER_REGISTERS = GATHERS ? 224 : 232;

  static constexpr int HANDOVER_BYTES = (KEY_STEPS + 1) * WARPGROUP * CHUNK_BYTES;
  static constexpr int RING_AT = TileQ::BYTES, HANDOVER_AT = RING_AT + SLOTS * Piece::BYTES;
  static constexpr int BARRIERS_AT = HANDOVER_AT + HANDOVER_BYTES;
  static constexpr int SMEM_BYTES = BARRIERS_AT + 512;

  static_assert(F.head_dim % 8 == 0 && F.head_dim_v % 8 == 0, "head_dim: multiples of 8");
  static_assert(OWN_COLUMNS <= 256, "head_dim of v: up to 512");
  static_assert(PIECE == 64 || PIECE == 128 || PIECE == 192, "piece: 64, 128, 192");
  static_assert(BEFORE >= 1 && BEFORE <= K_PIECES, "before: some pieces, up to all of K");
  static_assert(SLOTS <= 24, "slots: up to 24, whose barriers there is room for");
  static_assert(F.v_in_k ? SLOTS == 2 * K_PIECES : OWN_SLOTS > OWN_PIECES + K_PIECES - BEFORE,
                "slots: two tiles where V is in K, else for each twin its pieces of V, those of K that wait for it, and the last");
  static_assert(!F.v_in_k || (F.head_dim_v <= F.head_dim && PIECE == 64), "V is the first columns of K; Q has whole pieces");
  static_assert(BOX_ROWS % 8 == 0, "a box has whole groups of 8 rows, in which the swizzle repeats");
};

// Shared memory: Q, pieces of K and V as they come, what one warpgroup hands to the other, barriers.
template <class T>
struct TwinLayout {
  using RingKV = Ring<T::SLOTS>;
  using Pieces = Slots<typename T::Piece, T::RING_AT, T::Piece::BYTES, RingKV, T::BARRIERS_AT>;

  static DEVICE SharedAddress q() { return shared_base(); }
  static DEVICE SharedAddress piece(int slot) { return Pieces::at(slot); }
  // A thread's chunk of what its twin in the other warpgroup gets.
  static DEVICE SharedAddress handover(int chunk) {
    return shared_base() + T::HANDOVER_AT + (chunk * WARPGROUP + thread_index() % WARPGROUP) * CHUNK_BYTES;
  }
  static DEVICE RingKV ring() { return Pieces::ring(); }
  static DEVICE SharedAddress q_full() { return shared_base() + T::BARRIERS_AT + RingKV::BYTES; }

  // A piece has one use, where V is in K two: each by one warpgroup.
  static DEVICE void init() {
    ring().init((T::V_IN_K ? 2 : 1) * WARPGROUP / WARP, T::LOADING_WARPS);
    mbarrier_init(q_full(), 1);
    fence_mbarrier_init();
  }
};

// A place in the ring of a twin.
template <class T>
struct TwinPlace : RingPlace<T::SLOTS> {
  int first = 0;  // slot of that ring

  static DEVICE TwinPlace of(uint32 count, int twin) {
    const RingPlace<T::OWN_SLOTS> own = RingPlace<T::OWN_SLOTS>::of(count);
    const int first = T::RINGS > 1 ? twin * T::OWN_SLOTS : 0;
    return {{first + own.slot, own.parity}, first};
  }
  DEVICE void advance() {
    if (++this->slot == first + T::OWN_SLOTS) {
      this->slot = first;
      this->parity ^= 1;
    }
  }
};

// The next places in both rings, of which those who load turn to one.
template <class T>
class TwinPlaces : public TwinPlace<T> {
  TwinPlace<T> other_ = TwinPlace<T>::of(0, 1);

 public:
  DEVICE void turn_to(int twin) {
    if (T::RINGS == 1 || this->first == twin * T::OWN_SLOTS) return;
    const TwinPlace<T> own = *this;
    static_cast<TwinPlace<T>&>(*this) = other_;
    other_ = own;
  }
};

// The order in which pieces come: K of the first block, then K of a block before V of the one before it, as that is when they are used.
// Pieces of V that the warpgroup whose turn it is has use for come before the others: it is the first to be done with them. Where V is in
// K it is so for K, behind the columns that are not of V.
template <class T>
struct PieceOrder {
  static constexpr int K = T::K_PIECES, ONLY_K = T::V_IN_K ? K - T::V_PIECES : 0;
  static constexpr bool HAS_ORDER = T::V_IN_K;  // of columns of K

  // The places of a turn's K, and of a warpgroup's V of it, in their ring.
  static DEVICE uint32 keys(int turn) {
    if constexpr (T::V_IN_K) return static_cast<uint32>(turn * K);
    return static_cast<uint32>(turn / 2 * K + max(turn - 1, 0) * owned_by(turn % 2));
  }
  static DEVICE uint32 values(int turn, int turns, int warpgroup) {
    if constexpr (T::V_IN_K) return keys(turn) + ONLY_K + first(turn, warpgroup);
    const int tiles = (min(turn + 1, turns - 1) + 2 - warpgroup) / 2;  // of K, the warpgroup's, before it
    return static_cast<uint32>(turn * owned_by(warpgroup) + tiles * K);
  }
  static constexpr DEVICE int owned_by(int warpgroup) { return warpgroup == 0 ? T::OWN_PIECES : T::V_PIECES - T::OWN_PIECES; }
  // A warpgroup's first piece among those of a turn's V.
  static DEVICE int first(int turn, int warpgroup) { return turn % 2 == warpgroup ? 0 : owned_by(turn % 2); }
  // The piece of its columns that comes as the i-th of V, or of K.
  static DEVICE int piece_of_v(int i, int turn) {
    return turn % 2 == 0 ? i : i < owned_by(1) ? T::OWN_PIECES + i : i - owned_by(1);
  }
  static DEVICE int piece_of_k(int i, int turn) {
    if constexpr (!T::V_IN_K) return i;
    return i < ONLY_K ? T::V_PIECES + i : piece_of_v(i - ONLY_K, turn);
  }
};

}  // namespace multiattn
