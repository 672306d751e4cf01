"""Tiles and hints of the forward that divides keys among blocks (`kernels.decode`), and what fits. No cuTile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from multiattn.cutile.configs import MAX_BLOCKS, MAX_GRID_X, MAX_GRID_Y, Grid, has_positive_strides
from multiattn.cutile.kernels.constants import SMALLEST_TILE
from multiattn.layout import VECTOR_BYTES, Layout
from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import EVEN_ENOUGH, choose_splits, most_multiprocessors, one_width, power_of_two, row_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import SPLITS_MAX, area_layouts

NAME = "split_keys"
"""The name of the variant."""

AREA_DTYPE = torch.float32
"""The dtype of parts."""

NO_TMA = ("sm80", "sm86", "sm89")
"""Arches with neither TMA nor kernels that overlap."""

KEYS_MIN = 128
"""The fewest keys of a split, where lengths are the most that they may be. A guess."""
PARTS_ENOUGH = 128
"""More parts cost more to merge than SMs gain by them. H200, 2026-11-26, B=1 8/1 32k: 126 parts 14.1 us, 244 15.4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitKeysConfig(Config):
    """`tile_m` rows, queries of the heads that share keys, and `tile_n` keys; hints of ``ct.kernel`` and ``ct.load``.

    `occupancy`, `num_worker_warps` and `latency` are as in `CutileConfig`, the last of both keys and values.
    """

    occupancy: int = 2
    num_worker_warps: int | None = None
    latency: int | None = 4
    alone: int = 0
    """Keys of a tile where each tile of rows has an SM for itself; 0: there is nothing to gain. `settled` decides."""
    splits: int = 0
    """Blocks that share the keys of a tile; 0, as in rules, has `settled` choose by the problem."""


ALONE_KEYS_MAX = 2048
"""The most keys for which a block with an SM for itself is better: longer sequences want more loads under way."""


def settled(problem: Problem, arch: Arch, config: SplitKeysConfig) -> SplitKeysConfig:
    """The config with a number of splits: the caller's, else its own, else enough to fill the chip.

    Where there are about as many tiles of rows as SMs, and keys are few, a block has an SM for itself, and all keys.
    H200, 2026-11-26, B=128 8/1 1k, pages of 64, D=128: 21.0 us, in two parts 26.2. Small pages are read at half the
    rate by the kernel of one part (B=32 32/8 8k, pages of 16, D=128: 514 us, Triton 242), for a reason that is not
    known; in four parts they are not (B=8: 69.7, Triton 71.5). So they have two.
    """
    asked = problem.asked_splits
    page_rows = page_rows_of(problem, arch, config.tile_n)
    has_small_pages = page_rows < config.tile_n
    is_alone = config.alone and asked is None and not has_small_pages and problem.seq_kv <= ALONE_KEYS_MAX
    sms = most_multiprocessors(arch)
    if is_alone and EVEN_ENOUGH * sms <= row_tiles(problem, config.tile_m) <= sms:
        config = replace(config, tile_n=config.alone, occupancy=1, latency=4)
    config = replace(config, alone=0)
    splits = asked or config.splits
    if not splits:
        least = max(KEYS_MIN, config.tile_n, -(-problem.seq_kv // PARTS_ENOUGH))
        splits = choose_splits(problem, arch, tile_m=config.tile_m, keys_min=least, blocks_per_sm=config.occupancy)
        if splits == 1 and page_rows > 0 and has_small_pages and problem.seq_kv >= 2 * least:
            splits = 2
    return replace(config, splits=splits)


PAGE_ROWS_MIN = 8
"""The fewest rows of a page that are worth a load of their own. A guess."""


def page_rows_of(problem: Problem, arch: Arch, tile_n: int) -> int:
    """Rows that a block of `tile_n` keys takes of a page; 0 where rows of any pages are found one by one.

    Loads of several pages need TMA: without it tileiras 13.4 loads them element by element.
    """
    page = None if problem.cache is None else problem.cache.page
    if page is None or page % tile_n == 0:
        return tile_n
    has_tma = arch.name not in NO_TMA and has_positive_strides(problem) and problem.alignment == VECTOR_BYTES
    return page if has_tma and tile_n % page == 0 and page >= PAGE_ROWS_MIN else 0


def areas_of(problem: Problem, splits: int) -> Mapping[str, Layout]:
    """The areas of workspace, by name; none with one split, or with nothing to launch."""
    if splits <= 1 or problem.lengths[0] == 0:
        return {}
    return area_layouts(splits, problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)


def workspace_bytes(problem: Problem, config: Config | None) -> int:
    """As `Variant.workspace`."""
    assert isinstance(config, SplitKeysConfig)
    return sum(layout.size_bytes for layout in areas_of(problem, config.splits).values())


# ---------------------------------------------------------------- grids


def tiles_of(problem: Problem, tile_m: int) -> int:
    """Tiles of the rows of a sequence, at most."""
    return max(1, -(-problem.rows // tile_m))


def grid_of(problem: Problem, config: SplitKeysConfig) -> Grid:
    """Tiles of rows of all sequences in x, heads of keys in y, splits in z."""
    return problem.lengths[0] * tiles_of(problem, config.tile_m), problem.heads_kv, config.splits


def merge_grid(problem: Problem, splits: int) -> Grid:
    """Tiles of queries in x, each with the blocks of its columns, tiles of heads in y, batch entries in z."""
    _, columns = merged_together(splits, one_width(problem.head_dim))
    heads, queries = merged_rows(problem, splits)
    x = -(-problem.seq_q // queries) * -(-problem.head_dim // columns)
    return x, -(-problem.heads_q // heads), problem.batch


def can_overlap(arch: Arch) -> bool:
    """True if a kernel may begin before the one before it has ended."""
    return arch.is_gpu and arch.name not in NO_TMA


MERGE_FEW, MERGE_MANY = 16, 128
"""Parts that are merged all at once (a guess), and of more those at a time."""
MERGE_COLUMNS_FEW, MERGE_COLUMNS_MANY = 128, 32
"""Columns that a block has of them.

H200, 2026-11-26, B=1 8/1 32k, 126 parts: 3.1 us behind the last part, 64 parts and columns 4.6."""
MERGE_ELEMENTS = 2048
"""Elements of few parts that a block merges, or two rows: 8 KiB.

H200, 2026-11-26, B=8 64/8 8k, 16 queries: 4.5 us behind the last part, 4,096 elements 6.1, 8,192 5.5."""


def merged_together(splits: int, tile_d: int) -> tuple[int, int]:
    """Parts of a row that are merged at a time, and the columns that a block has of them.

    No length and no number of rows counts here: a row's bits are the same in any batch.
    """
    if splits <= MERGE_FEW:
        return power_of_two(splits), min(tile_d, MERGE_COLUMNS_FEW)
    return MERGE_MANY, min(tile_d, MERGE_COLUMNS_MANY)


def merged_rows(problem: Problem, splits: int) -> tuple[int, int]:
    """The heads and queries that a block merges: one row of many parts, of few as many as keep it busy.

    H200, 2026-11-26, 8,192 rows of two parts, D=128: blocks of one row took 28 us.
    """
    if splits > MERGE_FEW:
        return 1, 1
    together, columns = merged_together(splits, one_width(problem.head_dim))
    rows = max(2, MERGE_ELEMENTS // (together * columns))  # of one a thread would load no vectors
    heads = min(rows, power_of_two(problem.heads_q))
    if problem.has_packed_queries:  # rows may end at any query
        return heads, 1
    return heads, min(rows // heads, power_of_two(problem.seq_q))


# ---------------------------------------------------------------- what fits

_FIELDS: Mapping[str, limits.FieldRule] = {
    "tile_m": limits.powers_of_two(SMALLEST_TILE, 128),
    "tile_n": limits.powers_of_two(SMALLEST_TILE, 256),
    "occupancy": limits.between(1, 32),
    "num_worker_warps": (lambda it: it in (None, 4, 8), "None, 4 or 8 (others need tileiras 13.5)"),
    "latency": limits.between(1, 10, None),
    "splits": limits.between(0, SPLITS_MAX),
}


def why_not(problem: Problem, arch: Arch, config: SplitKeysConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`."""
    grids = [grid_of(problem, config)]
    if config.splits > 1:
        grids.append(merge_grid(problem, config.splits))
    fits = all(_is_grid(grid) for grid in grids)
    allowed = f"grids within {MAX_GRID_X} x {MAX_GRID_Y} x {MAX_GRID_Y}"
    return limits.failed([*limits.field_checks(config, _FIELDS), (fits, f"{config} for {problem}", allowed)])


def _is_grid(grid: Grid) -> bool:
    x, y, z = grid
    return x <= MAX_GRID_X and max(y, z) <= MAX_GRID_Y and x * y * z <= MAX_BLOCKS


# ---------------------------------------------------------------- candidates

_TILES: Sequence[tuple[int, int, int]] = (
    (64, 2, 4), (64, 3, 4), (64, 4, 4), (64, 2, 8), (64, 1, 8), (128, 2, 4), (128, 1, 8), (32, 4, 6), (32, 8, 4),
    (16, 8, 8), (16, 4, 10), (64, 2, 2), (64, 3, 2), (128, 2, 2),
)  # fmt: skip
"""tile_n, occupancy and latency."""


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[SplitKeysConfig]:
    """Configs worth timing: blocks of keys with hints that suit them, in tiles of as many rows as there are."""
    if not arch.is_gpu:
        return ()
    rows = min(128, max(SMALLEST_TILE, power_of_two(problem.rows)))
    heights = (rows, 64) if rows < 128 else (64, 128)  # wgmma takes 64 rows, and keys from shared memory
    found = [
        settled(problem, arch, SplitKeysConfig(tile_m=height, tile_n=tile_n, occupancy=occupancy, latency=latency))
        for height in heights
        for tile_n, occupancy, latency in _TILES
    ]
    found += [replace(it, num_worker_warps=8) for it in found if it.tile_m >= 64 and it.occupancy <= 2]
    return tuple(dict.fromkeys(it for it in found if not variant.fits(problem, arch, it)))
