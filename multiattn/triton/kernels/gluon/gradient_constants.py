"""The constants that all Gluon kernels of a backward have, and the layouts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiattn.triton.kernels.gluon.constants import accumulator


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientConstants:
    """Constants of a kernel; it gets them whole, as one constexpr."""

    banded: bool
    """The mask hides keys."""
    two_sided: bool
    """It has two bounds, which the kernel is given; a causal one is the diagonal."""
    ragged: bool
    """The last tile of keys is not full."""
    head_dim: int
    wide: int
    """Columns of head_dim in the first of its pieces, a power of two."""
    narrow: int
    """In the second, which may reach beyond head_dim; 0 where there is none."""
    q_stages: int
    dout_stages: int
    k_stages: int
    packed: bool = False
    """As in `GluonConstants`."""
    is_persistent: bool = True
    is_dynamic: bool = True
    score: Any = None
    """As in `TileConstants`: of its functions `score_and_slope` is called."""
    has_slope: bool = False
    """It does more than add: its slope differs from 1."""

    @property
    def columns(self) -> int:
        """Columns of a tile, in all of its pieces."""
        return self.wide + self.narrow

    @property
    def tile_bytes(self) -> int:
        """A tile of 64 rows of head_dim in shared memory."""
        return 2 * 64 * self.columns

    @property
    def groups(self) -> int:
        """Asynchronous products that one product of tiles takes: one a piece of head_dim."""
        return 2 if self.narrow else 1

    @property
    def scores(self) -> Any:
        """Layout of scores, weights and dS, ``[64, 64]``."""
        return accumulator(64)

    @property
    def sums(self) -> Any:
        """Layout of the wide piece of a gradient, ``[64, wide]``."""
        return accumulator(self.wide)

    @property
    def sums_narrow(self) -> Any:
        """Layout of the narrow one."""
        return accumulator(self.narrow)

    @property
    def column(self) -> Any:
        """Layout of a number for each column of scores."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(0, self.scores)

    @property
    def statistics(self) -> Any:
        """Layout of numbers of queries as they lie in memory, where the four that a thread wants of 16 are together."""
        from triton.experimental.gluon import language as gl

        registers, lanes = [[0, 1], [0, 2], [0, 16], [0, 32]], [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]]
        return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [1, 64])
