// Tiles of 16-bit elements in shared memory as TMA writes them and wgmma reads them.
#pragma once
#include "multiattn/ptx_sm90.cuh"
#include "multiattn/tile.cuh"

namespace multiattn {

// [ROWS, HEAD_DIM] as panels of 64 columns, one after the other; a row of a panel is 128 bytes, its 8 chunks XORed with
// row % 8 (CUtensorMap's 128-byte swizzle). Columns beyond HEAD_DIM are zero.
template <int ROWS_, int HEAD_DIM>
struct PanelTile {
  static_assert(ROWS_ % 8 == 0, "the swizzle repeats every 8 rows");
  static constexpr int ROWS = ROWS_;
  static constexpr int PANEL_COLUMNS = 64, ROW_BYTES = 128;
  static constexpr int PANELS = (HEAD_DIM + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
  static constexpr int PANEL_BYTES = ROWS * ROW_BYTES, BYTES = PANELS * PANEL_BYTES;
  using Panel = Tile<ROWS, PANEL_COLUMNS>;  // as ldmatrix and stores see it
};

// A matrix descriptor (PTX ISA, "Matrix Descriptor Format"), for the 128-byte swizzle: groups of 8 rows are 1024 bytes
// apart; so are, for an MN-major operand, groups of 8 keys, and its panels `panel_bytes`.
class Descriptor {
 public:
  DEVICE Descriptor(SharedAddress start, int panel_bytes)
      : low_((start & 0x3ffff) / UNIT | static_cast<uint32>(panel_bytes / UNIT) << 16) {}

  // A descriptor of what lies `bytes` further on.
  DEVICE uint64 at(int bytes) const { return HIGH | (low_ + bytes / UNIT); }

 private:
  static constexpr int UNIT = 16;
  static constexpr uint64 HIGH = static_cast<uint64>(1024 / UNIT) << 32 | static_cast<uint64>(1) << 62;
  uint32 low_;
};

}  // namespace multiattn
