"""The constants of the plain Triton kernels, and what tensors must be like for them. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from multiattn.block_mask import BlockSpec
from multiattn.plan.schedule import one_width
from multiattn.problem import Problem
from multiattn.triton.ladder import TritonStep

OUT_VECTOR = 8
"""Elements that divide every stride of out and of the gradients: dense, so they are multiples of head_dim."""
FEW_ROWS = 32
"""Rows that are few: all those of a sequence are a tile, whose warps have different keys. A guess, not measured."""


class Width(int):
    """Columns that a tile's rows have."""

    @property
    def pad(self) -> int:
        """Columns of the tile: a power of two that tl.dot accepts; the padding is zero."""
        return one_width(self)


def widths(problem: Problem) -> dict[str, Any]:
    """The widths of q and k, and of v and out, as constants have them."""
    sizes = {"width": problem.head_dim, "width_v": problem.head_dim_v}
    return {name: Width(size) for name, size in sizes.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ListConstants:
    """Constants of the kernel that lists the tiles of a packed batch."""

    query_tile: int
    """Rows of a tile of queries; 0 where none are listed."""
    key_tile: int
    """Rows of a tile of keys; 0 where none are listed."""
    last_first: bool
    """The last tile of queries of a sequence is listed first: under a mask that hides keys it sees the most."""
    cut: bool = False
    """Tiles begin at multiples of their rows on the packed axis, not in a sequence."""
    group: int = 64
    """Sequences of a program, a power of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConstants:
    """Constants of a kernel; it gets them whole, as one constexpr."""

    width: Width
    """Columns of q and k."""
    width_v: Width
    """Columns of v and out."""
    tile_m: int
    far_rows: bool
    """Offsets inside one tile can pass 2^31 elements."""
    tile_n: int = 0
    stages: int = 1
    """Blocks in flight of what a program streams."""
    heads_in_turn: int = 1
    """Heads whose tiles alternate in launch order."""
    vector: int = OUT_VECTOR
    """Elements that divide every address and stride of q, k and v."""
    is_banded: bool = False
    """The mask hides keys: causal, if not `is_two_sided`."""
    is_two_sided: bool = False
    """The mask is a band with two bounds, `left` and `right`, which a kernel is given."""
    descriptor: bool = False
    """Tensors that a program walks over come through TMA descriptors."""
    one_pass: bool = False
    """The pass over the queries of a backward sums up dq."""
    register_operands: bool = False
    """Tensor cores take both operands from registers, as mma.sync does; for the pass over the queries."""
    scale_sign: int = 1
    """-1, 0 or 1: the sign of the scale goes into q. A backward has it in its factors."""
    step: TritonStep = field(default_factory=TritonStep)
    """The rung of a forward."""
    score: Any = None
    """The program of scores and of their mask, or None: a `LoweredScore` in a table, its `ScoreFunctions` in a
    kernel."""
    has_score: bool = False
    """It modifies scores."""
    has_slope: bool = False
    """It does more than add: its slope differs from 1."""
    gradients: tuple[int, ...] = ()
    """Slots of the captured tensors whose gradients the pass over the queries adds up."""
    compiled: bool = True
    """Not interpreted: there is inline assembly."""
    blocks: BlockSpec | None = None
    """A program walks over the blocks that a block mask lists, in tiles that divide them."""
    has_mask: bool = False
    """The program has a mask, which hides pairs of partial blocks."""
    packed: bool = False
    """Sequences are packed one after another, and tiles are those of a list, of which a program takes an entry."""
    ragged: bool = False
    """Tiles with a mask of the program, or listed ones, may have keys beyond the end that have to be hidden."""
    out_vector = OUT_VECTOR

    @property
    def packed_blocks(self) -> bool:
        """True if blocks are those of the packed axis: tiles begin where they do, and the first of a sequence later."""
        return self.packed and self.blocks is not None

    @property
    def has_gradients(self) -> bool:
        """True if there are `gradients`."""
        return bool(self.gradients)

    @property
    def key_tiles(self) -> int:
        """Tiles of keys in a listed block."""
        return 1 if self.blocks is None else self.blocks.keys // self.tile_n

    @property
    def query_tiles(self) -> int:
        """Tiles of queries in a listed block."""
        return 1 if self.blocks is None else self.blocks.queries // self.tile_m

    @property
    def key_step(self) -> int:
        """From one tile of a walk over keys to the next: listed tiles are counted."""
        return 1 if self.blocks is not None else self.tile_n

    @property
    def query_step(self) -> int:
        """The step of a walk over queries."""
        return 1 if self.blocks is not None else self.tile_m

    @property
    def asks_keys(self) -> bool:
        """True if a masked walk over keys asks of each tile whether it needs the mask, but for partial blocks."""
        return self.is_two_sided if self.blocks is None else not self.is_banded

    @property
    def asks_queries(self) -> bool:
        """True if a masked walk over queries asks so, as no operands of products are in registers across a branch."""
        return self.is_two_sided and self.blocks is None and not self.register_operands

    @property
    def hides_in_full(self) -> bool:
        """True if pairs of a full block may be hidden, by another mask or by the end of the keys."""
        return self.is_banded or self.ragged

    @property
    def hides_in_partial(self) -> bool:
        """True if pairs of a partial block may be hidden: by its mask, or as those of a full one."""
        return self.hides_in_full or self.has_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitConstants(TileConstants):
    """Constants of the kernel of parts; those of `TileConstants` that are of lists and rungs stay as they are.

    Rows of q and k may be in two tiles: `width` is then what the first has.
    """

    rest: Width = field(default_factory=Width)
    """Columns of q and k behind those; 0 where one tile has all."""
    v_in_k: bool = False
    """v is the first columns of the first tile of k, which is as wide as one of v: no other is read."""
    cached: bool = False
    """The device knows how many keys each sequence has."""
    paged: bool = False
    """Keys are in pages."""
    page: int = 0
    """Keys of a page, where a tile of keys may be in several; else 0, and no code depends on it."""
    packed_queries: bool = False
    """Queries of sequences are one after another."""
    whole: bool = True
    """All keys are one part: there is nothing to merge."""
    overlaps: bool = False
    """The kernel that merges parts may begin before this one ends."""
    stored: str | None = None
    """The dtype of keys and values of 8 bits; None: that of q."""
    per_token: tuple[str, ...] = ()
    """The scales of such numbers that are of each token; others are of each head."""

    @property
    def key_vector(self) -> int:
        """As `vector`, of k and v alone: their elements may have half the bytes."""
        return self.vector if self.stored is None else 2 * self.vector

    @property
    def scales_keys(self) -> bool:
        """True if each key has a scale."""
        return "k_scale" in self.per_token

    @property
    def scales_values(self) -> bool:
        """True if each value has a scale."""
        return "v_scale" in self.per_token

    @property
    def frees_keys(self) -> bool:
        """True if pages or rows of a cache that lie before a window may hold anything."""
        return self.cached and self.is_two_sided

    @property
    def masks_all(self) -> bool:
        """True if each tile of scores is masked, as a branch costs more than to compare so few."""
        return self.tile_m <= FEW_ROWS

    @property
    def sum_columns(self) -> int:
        """Columns of the sums of weights in the loop: a sum for each key of a tile, or for all of them."""
        return self.tile_n if self.tile_m <= FEW_ROWS else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConstants(TileConstants):
    """Constants of the kernels that store P and dS, and of the products of those.

    Of a product `width` is that of its gradient.
    """

    part: Width
    """Columns of q, k, v and dout at a time, or of a gradient that a program has; a power of two."""
    parts: int = 1
    """Programs among which the columns of a gradient are divided."""
    score_m: int
    """Queries of a tile of scores, which `tile_m` divides; so it is with `score_n`."""
    score_n: int
    tiles_together: int = 1
    """Tiles of queries that come before the next tile of keys."""
    has_turns: bool = False
    """Sums of a gradient wait for the next turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConstants:
    """Constants of the kernel that merges parts."""

    head_dim_v: int
    parts: int
    """Parts that are merged at once, all that there are or more; a power of two."""
    lines: int
    """Lines of a program, a power of two."""
    columns: int
    """Columns of a program, a power of two."""
    packed_queries: bool = False
    overlaps: bool = False
    """The kernel may begin before the one of the parts ends, and waits for it."""
    out_vector = OUT_VECTOR


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsConstants:
    """Constants of the small kernels before and after the Gluon kernels of gradients."""

    width: Width
    """As in `TileConstants`."""
    width_v: Width
    wide: int = 0
    """Columns of head_dim in the first of its pieces, as the sums of dq have them; 0 where there are no sums."""
    narrow: int = 0
    """In the second."""
    packed: bool = False
    """Sequences are packed one after another, and tiles are those of a list, and one that is of no queries."""
