// The tile of a head that a block owns.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

// `place` is 0 for the tile that starts first. Tiles of one place run before those of the next, `heads_per_section` heads
// side by side, so that what they share stays in L2.
struct Place {
  int head, place;

  // `Index` holds the number of all tiles.
  template <class Index>
  static DEVICE Place of(Index block, int tiles, int heads, int heads_per_section) {
    const Index section_blocks = static_cast<Index>(tiles) * heads_per_section;
    const int first_head = static_cast<int>(block / section_blocks) * heads_per_section;
    const int within = static_cast<int>(block % section_blocks);
    const int side_by_side = min(heads_per_section, heads - first_head);
    return {first_head + within % side_by_side, within / side_by_side};
  }
};

}  // namespace multiattn
