"""The constants of the two Gluon kernels of a backward in two passes, and the layouts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiattn.triton.kernels.gluon.gradient_constants import GradientConstants

TILE_N = 64
"""Keys of a block, and of a tile of the kernel that owns them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoPassConstants(GradientConstants):
    """With those of one of the kernels in two passes."""

    by_keys: bool
    """Its blocks own keys, not queries."""
    v_stages: int
    kv_in_registers: bool
    tile_n: int = TILE_N

    @property
    def is_crowded(self) -> bool:
        """No register is left for what can be computed again."""
        return self.columns > 192

    @property
    def consumer_registers(self) -> int:
        """A thread's of the warpgroups that compute."""
        return 240 if self.is_crowded and not self.by_keys else 232

    @property
    def producer_registers(self) -> int:
        """A thread's of the warp that loads: the three have 504."""
        return 504 - 2 * self.consumer_registers

    @property
    def row(self) -> Any:
        """Layout of a number for each row of scores."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(1, self.scores)

    @property
    def stored(self) -> Any:
        """Layout of a gradient as it is stored: 16 bytes a thread, exchanged among the four that have a row."""
        return _stored(self.wide, 2)

    @property
    def stored_narrow(self) -> Any:
        """The same of the narrow piece."""
        return _stored(self.narrow, 2)

    @property
    def between(self) -> Any:
        """Half way there: converted in two steps, each is done by shuffles, in one it would take shared memory."""
        return _stored(self.wide, 1)

    @property
    def between_narrow(self) -> Any:
        """The same of the narrow piece."""
        return _stored(self.narrow, 1)


def _stored(columns: int, swaps: int) -> Any:
    """An accumulator's layout, where so many bits of a thread's place in its row were swapped with bits of a column."""
    from triton.experimental.gluon import language as gl

    in_row, in_column = [[0, 2], [0, 4]], [[0, bit] for bit in (8, 16, 32, 64, 128) if bit < columns]
    for bit in range(min(swaps, len(in_column))):
        in_row[bit], in_column[bit] = in_column[bit], in_row[bit]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *in_column, [8, 0]],
        lane_bases=[*in_row, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )
