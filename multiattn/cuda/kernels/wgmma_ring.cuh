// Rings of slots in shared memory that some warps fill, for others that compute: shared by the kernels for sm90.
#pragma once
#include "multiattn/ptx_sm90.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

constexpr int WARPGROUP = 4 * WARP;
constexpr int NO_TILE = -1;  // a schedule is done

// A warp's first row among the warpgroup's. `again`: no register keeps it.
DEVICE int warp_row() { return thread_index() / WARP % 4 * 16; }
DEVICE int warp_row_again() { return recomputed(thread_index()) / WARP % 4 * 16; }

// Where a role is in a ring: the slot, and the parity of the phase that it waits for.
template <int SLOTS>
struct RingPlace {
  int slot = 0, parity = 0;

  DEVICE void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }

  // After so many advances; fewer than 2^32 in all, unless a power of two divides them.
  static DEVICE RingPlace of(uint32 count) {
    return {static_cast<int>(count % SLOTS), static_cast<int>(count / SLOTS % 2)};
  }

  static DEVICE int before(int slot) { return slot == 0 ? SLOTS - 1 : slot - 1; }

  // The places of K and of V where both take turns in a ring.
  DEVICE RingPlace& k() { return *this; }
  DEVICE RingPlace& v() { return *this; }
};

// Where a role is among the slots of K and those of V, which have a ring each.
template <int STAGES, int V_STAGES>
class PlacesApart {
  RingPlace<STAGES> k_;
  RingPlace<V_STAGES> v_;

 public:
  DEVICE RingPlace<STAGES>& k() { return k_; }
  DEVICE RingPlace<V_STAGES>& v() { return v_; }
};

// The barriers of a ring of slots in shared memory that one thread fills by TMA, or `fillers` warps do, for warps to use. One of a
// cluster is filled in all of its blocks at once: a slot of it is empty when it is so in each.
template <int SLOTS, int CLUSTER = 1>
struct Ring {
  SharedAddress barriers;
  static constexpr int BYTES = 2 * SLOTS * 8;

  DEVICE SharedAddress full(int slot) const { return barriers + 8 * slot; }
  DEVICE SharedAddress empty(int slot) const { return barriers + 8 * (SLOTS + slot); }

  // `users` of each block release a slot.
  DEVICE void init(int users, int fillers = 1) const {
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(full(slot), fillers);
      mbarrier_init(empty(slot), users * CLUSTER);
    }
  }
  DEVICE void await_full(const RingPlace<SLOTS>& place) const { mbarrier_wait(full(place.slot), place.parity); }
  // A slot that was never used counts as emptied.
  DEVICE void await_empty(const RingPlace<SLOTS>& place) const { mbarrier_wait(empty(place.slot), place.parity ^ 1); }
  // The warp uses the slot no more, if `is_over`; wgmmas may be under way. Each warp arrives for itself: sync_warp orders what all
  // lanes have read of the slot, the tile's words too, before lane 0's arrival, and the producer waits for that phase of `empty`
  // before it writes there. racecheck does not carry the order from lane 0 to the other lanes, and reports those words.
  DEVICE void release(int slot, bool is_over = true) const {
    sync_warp();
    const int lane = thread_index() % WARP;
    if constexpr (CLUSTER == 1)
      mbarrier_arrive_if(lane == 0 && is_over, empty(slot));
    else
      mbarrier_arrive_if(lane < CLUSTER && is_over, empty(slot), lane % CLUSTER);
  }
  // Releases a slot where no wgmma is under way, as after the loop over keys, and a branch may end. ptxas 13 has made a jump of a
  // predicated arrival that ended one, and taken the warp for whole all the same, sync_warp or not; of a warp that the source parts
  // it knows.
  // See multiattn.inspect.sass.parted_arrivals.
  DEVICE void release_apart(int slot) const {
    sync_warp();
    const int lane = thread_index() % WARP;
    if constexpr (CLUSTER == 1) {
      if (lane == 0) mbarrier_arrive(empty(slot));
    } else {
      if (lane < CLUSTER) mbarrier_arrive_if(true, empty(slot), lane);
    }
    sync_warp();
  }
};

}  // namespace multiattn
