"""Tiles of the forward for few queries as data: `CudaSplitConfig`, its shared memory, and what fits a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from multiattn.cuda.configs import ELEMENT_BYTES, FP32_BYTES, FRAGMENT_ROWS, padded
from multiattn.paged import SPLITS_MAX, area_layouts
from multiattn.plan.arch import GRID_MAX, WARP_THREADS, Arch
from multiattn.plan.config import Config
from multiattn.plan.limits import Check, between, failed, field_checks, one_of, size_checks
from multiattn.plan.schedule import EVEN_ENOUGH, choose_splits, most_multiprocessors, power_of_two, row_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

LONE_ROWS, LONE_MAX = 32, 128
"""With more rows than these and more heads, of which none share keys, heads fill the GPU, and the forwards that own
queries are faster: a tile of theirs has as few rows.

H200, 2026-11-26, B=64 12/12, 128 queries and keys: D=64 31.4 us, wgmma 19.5; D=128 43.5, 30.2; B=32 12/12, 64 queries
of 512 keys 23.1, 20.9. Where heads share keys it is not so: B=8 64/8, 16 queries of 8k keys 42.2, 198.7."""

MERGE_THREADS = 256
MERGE_RESIDENT_THREADS = 1024
"""Threads on an SM that registers must allow where it overlaps: a block then fits beside those that it waits for."""
CHUNK_COLUMNS = 8  # of a row, that a thread reads and writes
MERGE_COLUMNS = 32
_MERGE_SLOTS = MERGE_THREADS // (MERGE_COLUMNS // CHUNK_COLUMNS)  # parts that a block reads at a time
MERGE_FEW, MERGE_FEW_THREADS = 8, 128
"""Up to so many parts of a row are few: each thread reads its columns of all of them. What it takes follows from the
number of parts alone, as a row must have the same bits in any batch.

H200, 2026-11-26, 8,192 rows of two parts, D=128: 3.2 us behind the last part, by the kernel for many parts 29.9."""
_TEAMS_MAX = 15  # a named barrier each
_FOUND_PADDING = 8  # fp32 behind each row that teams leave


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaSplitConfig(Config):
    """Launch parameters of the forward for few queries; `kernels/split_keys_traits.cuh` says what each does.

    `tile_m` is rows: queries of all heads that share a key/value head.
    """

    warps: int
    """Warps of a block, in teams that walk over keys of their own."""
    row_warps: int = 1
    """Warps of a team that have rows of their own."""
    column_warps: int = 1
    """Warps of a team that share rows and have columns of the output."""
    stages: int
    """Tiles of K and of V that a team has room for: all but one are on their way while that one is used."""
    occupancy: int = 1
    """Blocks on an SM that the compiler must leave registers for, and that a split fills it with."""
    widens: bool = False
    """Where that is as good or better, a block has twice the warps and an SM for itself: `settle` decides."""
    splits: int = 0
    """Parts that the keys are divided into. A rule leaves it open, with 0, and a plan has a number."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP_THREADS

    @property
    def teams(self) -> int:
        """Groups of warps with keys of their own."""
        return self.warps // (self.row_warps * self.column_warps)


def settle(problem: Problem, arch: Arch, config: Config) -> CudaSplitConfig:
    """The config with a number of splits, of which each has at least a tile of keys for each team."""
    assert isinstance(config, CudaSplitConfig)
    if min(config.tile_m, config.tile_n, config.row_warps, config.column_warps) < 1 or not config.teams:
        return config  # `why_not` says what is wrong
    if config.widens and problem.asked_splits is None:
        config = _widened(problem, arch, config)
    config = replace(config, widens=False)
    if config.splits and problem.asked_splits is None:
        return config
    sizes = {"tile_m": config.tile_m, "keys_min": config.tile_n * config.teams, "blocks_per_sm": config.occupancy}
    return replace(config, splits=choose_splits(problem, arch, **sizes))


FEW = 8
"""Tiles of rows are few where SMs are this many times more."""
WIDE_STAGES = 4
"""The most tiles that a team of a wide block has room for, of the room that the blocks in its place would have.

H200, 2026-11-26, D=64, pages of 16, B=128 8/1 8k: 67.5 us, six 68.0."""


def _widened(problem: Problem, arch: Arch, config: CudaSplitConfig) -> CudaSplitConfig:
    """The config with twice the warps and one block an SM, where tiles of rows are few, or each has an SM.

    H200, 2026-11-26, D=128, one query, us wide and not: B=1 32/8 N=1k 6.8, 7.6; B=1 8/1 8k 7.5, 8.3; B=128 8/1 1k 18.7,
    22.0, 8k 123.7, 127.0. Of others not: B=32 8/1 1k 10.3, 9.5; B=8 32/8 1k 14.2, 13.6.
    """
    tiles, sms = row_tiles(problem, config.tile_m), most_multiprocessors(arch)
    if tiles * FEW <= sms or EVEN_ENOUGH * sms <= tiles <= sms:
        stages = max(min(config.stages * config.occupancy // 2, WIDE_STAGES), config.stages)
        return replace(config, warps=2 * config.warps, stages=stages, occupancy=1)
    return config


def smem_bytes(config: CudaSplitConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block: Q, and the teams' rings, or in their place what teams have found.

    Every kernel asserts at compile time that it needs just this.
    """
    width = padded(problem.head_dim, FRAGMENT_ROWS * config.column_warps)
    rings = config.teams * config.stages * 2 * config.tile_n * width * ELEMENT_BYTES
    found = config.teams * config.tile_m * (width + _FOUND_PADDING + 2) * FP32_BYTES
    return config.tile_m * width * ELEMENT_BYTES + max(rings, found)


def merge_smem_bytes() -> int:
    """The same of the kernel that merges many parts: a weight for each part of each row, and sums of parts."""
    return (SPLITS_MAX + _MERGE_SLOTS * (MERGE_COLUMNS + 4)) * FP32_BYTES


class Divides(Protocol):
    """A config whose blocks divide the keys, and leave parts to be merged."""

    @property
    def splits(self) -> int:
        """Parts that the keys are divided into."""

    @property
    def tile_m(self) -> int:
        """Rows of a block."""


def merged_rows(config: Divides) -> int:
    """Rows of a block that merges many parts: one, or 2^n that have a warp each, and a slot for each part."""
    return max(min(_MERGE_SLOTS // power_of_two(config.splits), MERGE_THREADS // WARP_THREADS), 1)


def merges_few(config: Divides) -> bool:
    """True where parts are few enough for the kernel that has a thread read all parts of its columns."""
    return config.splits <= MERGE_FEW


def merge_blocks(config: Divides, problem: Problem) -> int:
    """Blocks of the kernel that merges: one for some rows, of many parts one for some columns of some rows."""
    rows = problem.batch * problem.heads_q * problem.seq_q
    if merges_few(config):
        return -(-rows // (MERGE_FEW_THREADS // (problem.head_dim // CHUNK_COLUMNS)))
    return -(-rows // merged_rows(config)) * -(-problem.head_dim // MERGE_COLUMNS)


def workspace_areas(problem: Problem, config: Divides) -> dict[str, int]:
    """The areas of a launch's workspace, and the bytes of each: none with one split."""
    if config.splits <= 1:
        return {}
    sizes = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
    return {name: layout.size_bytes for name, layout in area_layouts(config.splits, *sizes).items()}


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes that a launch takes from the allocator."""
    assert isinstance(config, CudaSplitConfig)
    return sum(workspace_areas(problem, config).values())


def blocks(config: CudaSplitConfig, problem: Problem) -> int:
    """Blocks of a launch: one for each split of each tile of rows."""
    return row_tiles(problem, config.tile_m) * config.splits


_ROWS_MAX = 2**31 - 1 - 256
"""The most rows of a sequence: they are counted in 32 bits, and a tile may end beyond the last one."""


def rows_checks(problem: Problem, config: Divides) -> tuple[Check, ...]:
    """Checks that rows can be counted: those of a tile, and those whose parts are merged."""
    rows = f"{problem.rows} queries of the heads that share a key"
    checks: list[Check] = [(problem.rows <= _ROWS_MAX, rows, f"up to {_ROWS_MAX}")]
    if config.splits > 1:
        merged, merging = problem.batch * problem.heads_q * problem.seq_q, merge_blocks(config, problem)
        checks.append((merged <= _ROWS_MAX, f"{merged} queries of all heads, in parts", f"up to {_ROWS_MAX}"))
        checks.append((merging <= GRID_MAX, f"{merging} blocks that merge parts", f"a grid of up to {GRID_MAX}"))
    return tuple(checks)


def why_not(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`."""
    assert isinstance(config, CudaSplitConfig)
    fields = {
        "warps": one_of(1, 2, 4, 8, 16),
        "row_warps": one_of(1, 2, 4, 8),
        "column_warps": one_of(1, 2),
        "stages": between(2, 8),
        "splits": between(1, SPLITS_MAX),
    }
    team = config.row_warps * config.column_warps
    is_whole = config.warps % team == 0 and config.warps // team <= _TEAMS_MAX
    rows = FRAGMENT_ROWS * config.row_warps
    checks = (
        (is_whole, f"warps={config.warps} in teams of {team}", f"whole teams, up to {_TEAMS_MAX}"),
        (config.tile_m % rows == 0 and config.tile_m > 0, f"tile_m={config.tile_m}", f"multiples of {rows}"),
        (config.tile_n % FRAGMENT_ROWS == 0 and config.tile_n > 0, f"tile_n={config.tile_n}", "multiples of 16"),
    )
    if wrong := failed((*field_checks(config, fields), *checks)):
        return wrong
    return failed(
        (
            *rows_checks(problem, config),
            *size_checks(config, arch, smem_bytes(config, problem), blocks(config, problem)),
        )
    )
