"""The constants of the Gluon kernels, and the layouts that follow from them. Only the layouts take Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiattn.block_mask import BlockSpec

WARPGROUP_ROWS = 64
TILE_N = 64
"""Columns of scores in all kernels of gradients."""
TILE_WORDS = 6
"""Words of shared memory that say what the tile of a slot of Q is."""
SEQUENCE_WORDS = 3
"""Further ones that say where its sequence is in a packed batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperConstants:
    """Constants of any kernel; it gets them whole, as one constexpr."""

    is_banded: bool
    """The mask hides keys."""
    is_two_sided: bool
    """It has two bounds, which the kernel is given; a causal one is the diagonal."""
    ragged: bool
    """The last tile of keys is not full."""
    head_dim: int
    head_dim_v: int
    wide: int
    """Columns of the first piece of a row, a power of two."""
    narrow: int
    """Columns of the second, which may reach beyond the row; 0 where neither q nor v has one."""
    packed: bool
    """Sequences are packed one after another, and tiles are those of a list."""
    tile_n: int = TILE_N
    """Columns of scores."""
    is_persistent: bool = True
    is_dynamic: bool = True
    score: Any = None
    """As in `TileConstants`: of its functions the forward calls `once`, `ahead` and `rest`, a backward
    `score_and_slope`."""
    has_score: bool = False
    """It modifies scores."""
    has_slope: bool = False
    """It does more than add: its slope differs from 1."""
    has_mask: bool = False
    """It has a mask, which hides pairs of partial blocks."""
    blocks: BlockSpec | None = None
    """Blocks walk over the tiles of the blocks that a block mask lists."""

    @property
    def packed_blocks(self) -> bool:
        """True if blocks are those of the packed axis: see `TileConstants.packed_blocks`."""
        return self.packed and self.blocks is not None

    @property
    def hides_in_full(self) -> bool:
        """True if pairs of a full block may be hidden, by a band or by the end of the keys."""
        return self.is_banded or self.ragged

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each piece."""
        return (self.wide, self.narrow) if self.narrow else (self.wide,)

    @property
    def pieces(self) -> int:
        """Pieces of q and k, and asynchronous products that one product of their tiles takes."""
        return 1 if self.head_dim <= self.wide else 2

    @property
    def pieces_v(self) -> int:
        """Pieces of v and out."""
        return 1 if self.head_dim_v <= self.wide else 2

    @property
    def columns(self) -> int:
        """Columns of a tile of q or k, in all of its pieces."""
        return sum(self.widths[: self.pieces])

    @property
    def columns_v(self) -> int:
        """Columns of a tile of v or out."""
        return sum(self.widths[: self.pieces_v])

    @property
    def scores(self) -> Any:
        """Layout of scores and weights, ``[64, tile_n]``."""
        return accumulator(self.tile_n)

    @property
    def sums(self) -> tuple[Any, ...]:
        """Layout of each piece of an output or a gradient, ``[64, columns]``."""
        return tuple(map(accumulator, self.widths))

    @property
    def row(self) -> Any:
        """Layout of a number for each row of scores."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(1, self.scores)

    @property
    def column(self) -> Any:
        """Layout of a number for each column of scores."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(0, self.scores)


def accumulator(columns: int) -> Any:
    """Layout of what wgmma adds to."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


# ---------------------------------------------------------------- the forward


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonConstants(HopperConstants):
    """Constants of the forward."""

    has_sinks: bool
    """Each head has one more column: a logit, and no value."""
    row_max: bool
    """The largest score of each row is written, too."""
    scale_sign: int
    """1, -1 or 0: the sign of the scale."""
    warpgroups: int
    stages: int
    q_slots: int
    pingpong: bool
    lazy_max: bool
    """Not with an expression whose scores of later blocks may be of another size: a bias may hide all of the first."""
    loads_early: bool = False
    """`ahead` is called while products are under way: there are registers for an element beside each score."""
    free_first = True
    """Listed tiles that need no mask come before all others."""

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def tiles_of_block(self) -> int:
        """Tiles of keys in a listed block."""
        return 1 if self.blocks is None else self.blocks.keys // self.tile_n

    @property
    def words(self) -> int:
        """Words of a slot of Q: which tile it has, whether each warpgroup found it spoiled, its sequence, and how many
        listed tiles are free."""
        return self.free_word + (0 if self.blocks is None else 1)

    @property
    def free_word(self) -> int:
        """The word of the number of free tiles."""
        return self.sequence_words + (SEQUENCE_WORDS if self.packed else 0)

    @property
    def sequence_words(self) -> int:
        """The first of those that say where a packed tile's sequence is, and how long."""
        return TILE_WORDS + self.warpgroups


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinConstants(HopperConstants):
    """Constants of the forward whose two warpgroups own columns of the same rows. All pieces have `wide` columns."""

    has_sinks: bool
    """Each head has one more column: a logit, and no value."""
    row_max: bool
    """As in `GluonConstants`."""
    scale_sign: int
    """1, -1 or 0: the sign of the scale."""
    k_stages: int
    v_stages: int
    loads_early: bool = False
    """As in `GluonConstants`."""
    tile_m = WARPGROUP_ROWS
    lazy_max = False
    sequence_words = 4
    """The first of those that say where a packed tile's sequence is; before them is which tile a block has."""

    @property
    def words(self) -> int:
        """Words that say what the tile is."""
        return self.sequence_words + (SEQUENCE_WORDS if self.packed else 0)

    @property
    def pieces(self) -> int:
        """Pieces of q and k."""
        return -(-self.head_dim // self.wide)

    @property
    def pieces_v(self) -> int:
        """Pieces of v and out, at least one for each warpgroup: of narrow ones the second is beyond the columns."""
        return max(2, -(-self.head_dim_v // self.wide))

    @property
    def begins(self) -> tuple[int, int]:
        """The first piece of v and out that each warpgroup has."""
        return 0, (self.pieces_v + 1) // 2

    @property
    def ends(self) -> tuple[int, int]:
        """The first that it has not, nor any after it."""
        return self.begins[1], self.pieces_v

    @property
    def columns(self) -> int:
        """Columns of a tile of q or k, in all of its pieces."""
        return self.wide * self.pieces

    @property
    def columns_v(self) -> int:
        """Columns of a tile of v or out."""
        return self.wide * self.pieces_v


# ---------------------------------------------------------------- gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientConstants(HopperConstants):
    """Constants of all kernels of gradients."""

    q_stages: int
    dout_stages: int
    k_stages: int
    free_first = False

    @property
    def hides_in_full(self) -> bool:
        """True as in the forward, or by the end of the queries: an expression may make anything of those beyond."""
        return self.is_banded or self.ragged or self.has_score

    @property
    def tiles_of_block(self) -> int:
        """Tiles of queries in a listed block."""
        return 1 if self.blocks is None else self.blocks.queries // WARPGROUP_ROWS

    @property
    def tile_bytes(self) -> int:
        """A tile of 64 rows of q or k in shared memory."""
        return 2 * 64 * self.columns

    @property
    def tile_bytes_v(self) -> int:
        """A tile of 64 rows of v or dout."""
        return 2 * 64 * self.columns_v

    @property
    def statistics(self) -> Any:
        """Layout of numbers of queries as they lie in memory, where the four that a thread wants of 16 are together."""
        from triton.experimental.gluon import language as gl

        registers, lanes = [[0, 1], [0, 2], [0, 16], [0, 32]], [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]]
        return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [1, 64])


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonBackwardConstants(GradientConstants):
    """Constants of the kernel in one pass. Scores are transposed: ``[64 keys, 64 queries]``."""

    k_in_registers: bool
    early_scores: bool
    half_dq: bool
    descends: bool
    """Blocks of queries are counted from the last one on."""
    key_registers = 208  # a thread's of a warpgroup of keys; of dQ's 72, of the producer 24

    @property
    def dq_columns(self) -> int:
        """Columns of the wide piece of dQ that are made at a time."""
        return min(self.wide, 64) if self.half_dq else self.wide

    @property
    def dq(self) -> Any:
        """Layout of the columns of dQ that are made at a time, ``[64, dq_columns]``."""
        return accumulator(self.dq_columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoPassConstants(GradientConstants):
    """Constants of one of the kernels in two passes."""

    by_keys: bool
    """Its blocks own keys, not queries."""
    v_stages: int
    kv_in_registers: bool

    @property
    def is_crowded(self) -> bool:
        """No register is left for what can be computed again."""
        return max(self.columns, self.columns_v) > 192

    @property
    def consumer_registers(self) -> int:
        """A thread's of the warpgroups that compute."""
        return 240 if self.is_crowded and not self.by_keys else 232

    @property
    def producer_registers(self) -> int:
        """A thread's of the warp that loads: the three have 504."""
        return 504 - 2 * self.consumer_registers

    @property
    def stored(self) -> tuple[Any, ...]:
        """Layout of a gradient's pieces as they are stored: 16 bytes a thread, exchanged among the four of a row."""
        return tuple(_stored(columns, 2) for columns in self.widths)

    @property
    def between(self) -> tuple[Any, ...]:
        """Half way there: converted in two steps, each is done by shuffles, in one it would take shared memory."""
        return tuple(_stored(columns, 1) for columns in self.widths)


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
