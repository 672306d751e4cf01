"""The records that kernels capture when they are made. A changed field is other code. Pure Python: no cuTile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

SMALLEST_TILE = 16
"""Rows: the smallest m, n and k that every arch's tensor cores take."""
LN_2 = math.log(2.0)


@dataclass(frozen=True, kw_only=True)
class BlockTiles:
    """How tiles lie in the blocks of a block mask."""

    own: int
    """Tiles, of those that a kernel's blocks own, in a block."""
    walked: int
    """Tiles, of those that they walk over, in a block."""
    has_full: bool
    """There are lists of full blocks."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Columns of the tiles that hold a row, powers of two: one, or two or three side by side.

    Loads fill up with zeros what is beyond the row, and stores clip it.
    """

    head_dim: int
    """Columns of the row."""
    tile_d: int
    tail_d: int = 0
    """The rest of the row, where it is a part of its own (`parts`); else 0."""
    last_d: int = 0
    """The rest of the row then, where it is a third part; else 0."""

    @property
    def columns(self) -> tuple[int, int, int]:
        """The columns of each tile; 0 for one that there is not."""
        return self.tile_d, self.tail_d, self.last_d


class PackedBlocks:
    """A packed batch and a block mask, as constants of kernels that may have both."""

    packed: bool
    blocks: BlockTiles | None

    @property
    def cut(self) -> bool:
        """Tiles are those of the packed axis, cut at the ends of sequences, so that none is in two blocks."""
        return self.packed and self.blocks is not None


@dataclass(frozen=True, kw_only=True)
class ForwardConstants(PackedBlocks):
    """The forward kernel's constants. Flags are those of its rung, ways to run those of its config."""

    tile_m: int
    tile_n: int
    qk: Widths
    """Tiles of q and k."""
    vo: Widths
    """Tiles of v and out."""
    banded: bool
    two_sided: bool
    """Both bounds of the mask are numbers that a launch gives (`reach`)."""
    masked: bool
    """Some block of keys needs a mask: the problem is banded, or the last block is not full."""
    has_sinks: bool
    linear_grid: bool
    """There are so many tiles that a grid can only number them; else a block's place is its place in the grid."""
    sign: int
    """The scale's sign: 1, -1 or 0."""
    k_latency: int | None
    v_latency: int | None
    tma: bool
    exp2: bool
    flush_to_zero: bool
    scale_after_max: bool
    k_transposed: bool
    approximate_division: bool
    ln_base: float
    lazy_max: bool
    headroom: float
    """log2 of how much less than one the largest weight of the keys that set the maxima is, with `lazy_max`."""
    diagonal_first: bool
    """`lazy_max` takes the maxima of the first block that needs a mask, of which each row sees some key."""
    pipeline: str
    static_grid: bool
    """A block takes every n-th tile of n blocks, not one."""
    q_in_registers: bool
    row_max: bool = False
    """The largest score of each row is stored, too: without `lazy_max`."""
    score: Any = None
    """The program of scores, a `LoweredScore`; of a kernel that is made, its `TileScoreFunctions`."""
    blocks: BlockTiles | None = None
    """Tiles in the blocks of a block mask. `masked` then says that full blocks need a mask, too."""
    packed: bool = False
    """Tiles are of a packed batch's sequences, and come from a list."""
    ragged_queries = False
    v_in_k = False
    cached = False
    paged = False
    divided = False
    stored = False
    scales_keys = False
    scales_values = False


@dataclass(frozen=True, kw_only=True)
class BackwardConstants(PackedBlocks):
    """Constants of a backward kernel with products."""

    tile_m: int
    tile_n: int
    qk: Widths
    """Tiles of q and k, and of their gradients."""
    vo: Widths
    """Tiles of v, out and dout, and of dv."""
    banded: bool
    two_sided: bool
    ragged: bool
    """The last block of keys is not full, and what is beyond its end would count: where no band hides it, or for dq."""
    latency: int
    """How far ahead the loop's loads are issued."""
    tma: bool
    tma_columns: bool
    """Rows of the fp32 arrays ``[B, Hq, Sq]`` end at multiples of 16 bytes, where TMA clips."""
    ragged_queries: bool = False
    """The last block of queries is not full, and needs a mask: a program makes anything of the zeros beyond the end."""
    score: Any = None
    """See the forward's."""
    gradients: tuple[int, ...] = ()
    """Slots of the captured tensors that want a gradient."""
    blocks: BlockTiles | None = None
    """Tiles in the blocks of a block mask. With `ragged_queries` its last block of queries is not full."""
    packed: bool = False
    """See the forward's."""
    dq_transposed: bool = False
    delta_first: bool = False
    keys_in_registers: bool = False
    stagger: int = 0
    """All four as in the config."""
    shares: int = 1
    """Blocks that share the query heads of a tile of keys."""
    own_columns: bool = False
    """Columns of lse and delta are copies, lse as the kernel takes it."""
    column_unit: int = 0
    """Rows of a packed batch that columns of each sequence begin at a multiple of; 0 where they lie as queries do."""
    linear_grid = True


@dataclass(frozen=True, kw_only=True)
class QueryGradsConstants(BackwardConstants):
    """Constants of the first of two passes."""

    has_dlse: bool


@dataclass(frozen=True, kw_only=True)
class RowConstants:
    """Constants of a kernel that has rows only, before or after the one pass."""

    tile_m: int
    latency = 2
    tma = True
    tma_columns = False
    cut = False


@dataclass(frozen=True, kw_only=True)
class RowDeltaConstants(RowConstants):
    """Constants of the one before."""

    qk: Widths
    vo: Widths
    has_dlse: bool


@dataclass(frozen=True, kw_only=True)
class RoundConstants(RowConstants):
    """Constants of the one after."""

    qk: Widths


@dataclass(frozen=True, kw_only=True)
class ColumnConstants(RowConstants):
    """Constants of the kernel that copies columns."""

    packed: bool
    own_columns = False
    linear_grid = True

    @property
    def column_unit(self) -> int:
        """As `BackwardConstants.column_unit`."""
        return self.tile_m if self.packed else 0


@dataclass(frozen=True, kw_only=True)
class SumSharesConstants(RowConstants):
    """Constants of the kernel that adds up shares."""

    qk: Widths
    vo: Widths
    shares: int


@dataclass(frozen=True, kw_only=True)
class ListTilesConstants:
    """Constants of the kernel that lists the tiles of a packed batch."""

    query_tile: int
    """Rows of a tile of queries; 0 for no list of them."""
    key_tile: int
    """Rows of a tile of keys; 0 for no list of them."""
    last_first: bool
    """The last tiles of queries, which see most keys, come first."""
    cut: bool = False
    """As `PackedBlocks.cut`."""
    group: int = 32
    """Sequences that a block lists."""
    compared: int = 64
    """Sequences that it compares them with at a time."""


@dataclass(frozen=True, kw_only=True)
class SplitKeysConstants:
    """Constants of the forward that divides keys among blocks. No length, no number of heads or splits is one."""

    tile_m: int
    tile_n: int
    qk: Widths
    vo: Widths
    v_in_k: bool
    """v is the first columns of k: a block of keys is loaded once, and no value apart from it."""
    banded: bool
    two_sided: bool
    has_sinks: bool
    sign: int
    """The scale's sign: 1, -1 or 0."""
    k_latency: int | None
    v_latency: int | None
    tma: bool
    divided: bool
    """Keys are divided: results are parts, which another kernel merges."""
    one_tile: bool
    """Rows of a sequence are one tile."""
    cached: bool
    """Lengths of keys are on the device; memory behind them holds anything."""
    paged: bool
    page_rows: int
    """Rows that a block of keys takes of a page; 0 for any pages, whose rows are found one by one."""
    page_is_tile: bool
    """A page is one block of keys."""
    packed_queries: bool
    overlapped: bool
    """The kernel that merges parts may begin once all blocks have, to wait for their end (`driver.launch_config`)."""
    row_max: bool = False
    score: Any = None
    """See the forward's."""
    masked = True
    blocks = None
    packed = False
    cut = False
    ragged_queries = False
    exp2 = True
    flush_to_zero = True
    scale_after_max = True
    k_transposed = True
    approximate_division = True
    lazy_max = False
    q_in_registers = False
    ln_base = LN_2
    stored = False
    scales_keys = False
    scales_values = False


@dataclass(frozen=True, kw_only=True)
class StoredKeysConstants(SplitKeysConstants):
    """Constants of that kernel for a cache of 8-bit numbers."""

    scales_keys: bool
    """Each key has a scale; else each head."""
    scales_values: bool
    """Each value has a scale; else each head."""
    in_weights: bool
    """Weights have the range of fp32, and take the scales of values."""
    stored = True


@dataclass(frozen=True, kw_only=True)
class MergeSplitsConstants:
    """Constants of the kernel that merges parts."""

    few: bool
    """A block merges all parts of several rows at once, else of one row `together` parts at a time."""
    together: int
    """Parts that are loaded at a time; of few a power of two that holds all."""
    heads: int
    queries: int
    """Queries of the rows that a block has."""
    columns: int
    """Columns of a row that a block has."""
    parts: int
    """Blocks of a row."""
    has_sinks: bool
    packed_queries: bool
    overlapping: bool
    """As `SplitKeysConstants.overlapped`."""
    row_max: bool = False
    ln_base = LN_2


KernelConstants = (
    ForwardConstants | BackwardConstants | RowConstants | ListTilesConstants | SplitKeysConstants | MergeSplitsConstants
)
