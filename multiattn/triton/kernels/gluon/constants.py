"""The constants of the Gluon kernel, and the layouts that follow from them. Only the layouts take Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARPGROUP_ROWS = 64
TILE_WORDS = 6
"""Words of shared memory that say what the tile of a slot of Q is."""
SEQUENCE_WORDS = 3
"""Further ones that say where its sequence is in a packed batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonConstants:
    """Constants of a kernel; it gets them whole, as one constexpr."""

    banded: bool
    """The mask hides keys."""
    two_sided: bool
    """It has two bounds, which the kernel is given; a causal one is the diagonal."""
    has_sinks: bool
    """Each head has one more column: a logit, and no value."""
    ragged: bool
    """The last block of keys is not full."""
    scale_sign: int
    """1, -1 or 0: the sign of the scale."""
    head_dim: int
    wide: int
    """Columns of head_dim in the first of its pieces, a power of two."""
    narrow: int
    """In the second, which may reach beyond head_dim; 0 where there is none."""
    tile_n: int
    warpgroups: int
    stages: int
    q_slots: int
    is_persistent: bool
    is_dynamic: bool
    pingpong: bool
    lazy_max: bool
    """Not with an expression whose scores of later blocks may be of another size: a bias may hide all of the first."""
    score: Any = None
    """As in `TileConstants`: of its functions `once`, `ahead` and `rest` are called."""
    loads_early: bool = False
    """`ahead` is called while products are under way: there are registers for an element beside each score."""
    packed: bool = False
    """Sequences are packed one after another, and tiles are those of a list."""

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def words(self) -> int:
        """Words of a slot of Q: which tile it has, whether each warpgroup found it spoiled, and its sequence."""
        return self.sequence_words + (SEQUENCE_WORDS if self.packed else 0)

    @property
    def sequence_words(self) -> int:
        """The first of those that say where a packed tile's sequence is, and how long."""
        return TILE_WORDS + self.warpgroups

    @property
    def scores(self) -> Any:
        """Layout of scores and weights, ``[64, tile_n]``."""
        return accumulator(self.tile_n)

    @property
    def out(self) -> Any:
        """Layout of the wide piece of the output, ``[64, wide]``."""
        return accumulator(self.wide)

    @property
    def out_narrow(self) -> Any:
        """Layout of the narrow one."""
        return accumulator(self.narrow)

    @property
    def row(self) -> Any:
        """Layout of a number for each row."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(1, self.scores)


def accumulator(columns: int) -> Any:
    """Layout of what wgmma adds to."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
