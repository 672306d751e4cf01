"""The config record of the kernels that divide keys into parts, and what fits a problem and an arch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from multiattn.layout import Layout
from multiattn.paged import SPLITS_MAX, area_layouts
from multiattn.plan import limits
from multiattn.plan.arch import GRID_MAX, Arch
from multiattn.plan.config import Config
from multiattn.plan.schedule import EVEN_ENOUGH, choose_splits, most_multiprocessors, one_width, row_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton.configs import ASYNCHRONOUS, ELEMENT_BYTES

VARIANT = "split_keys"

MERGED_COLUMNS = 32
"""Columns of a program that merges parts: few, so that there are many programs where there are few rows."""
_MERGED_PARTS = (4, 16, 64, SPLITS_MAX)
"""Parts that code to merge them is made for."""
_MERGED_LINES = 64
"""Lines of all parts that a program reads, if these are no more."""
_WGMMA_ROWS = 64
"""Rows of a tile from which tensor cores read it in the background, on the arches that can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonSplitConfig(Config):
    """Tiles and what Triton's compiler is told. `tile_m` is rows: queries of all heads that share keys."""

    warps: int
    stages: int
    """Tiles of keys in flight; 1 switches the pipeline off."""
    splits: int = 0
    """The parts that the keys of each tile of rows are divided into; 0 leaves it to `settle`."""
    blocks_per_sm: int = 2
    """Programs that an SM is given, if there are keys enough."""
    keys_min: int = 0
    """The least keys of the longest sequence that are a part; 0: a tile of them."""
    widens: bool = False
    """Where each tile of rows has an SM for itself, a program has twice the keys and warps: `settle` decides."""


def split_tiles(tile_m: int, tile_n: int, warps: int, stages: int, blocks_per_sm: int = 2) -> TritonSplitConfig:
    """A config in short."""
    return TritonSplitConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, blocks_per_sm=blocks_per_sm)


def settle(problem: Problem, arch: Arch, config: TritonSplitConfig) -> TritonSplitConfig:
    """The config with a number of parts."""
    if config.splits or config.tile_m < 1 or config.tile_n < 1:
        return config
    if config.widens and problem.asked_splits is None:
        config = _widened(problem, arch, config)
    config = replace(config, widens=False)
    splits = choose_splits(
        problem,
        arch,
        tile_m=config.tile_m,
        keys_min=max(config.keys_min, config.tile_n),
        blocks_per_sm=config.blocks_per_sm,
    )
    return replace(config, splits=splits)


NARROW, WIDE_KEYS = 64, 4096
"""Up to this head_dim, with more keys than these, nothing widens."""


def _widened(problem: Problem, arch: Arch, config: TritonSplitConfig) -> TritonSplitConfig:
    """The config with twice the keys and warps and one block an SM, where there are about as many tiles of rows as SMs.

    H200, 2026-11-26, B=128 8/1 1k, pages of 64: D=64 13.9 us, by two parts and more 15.4; D=128 21.3, 24.2. Of 8k keys,
    pages of 16: D=64 79.0 us, by four parts 71.9, so not there; D=128 134.1, 140.2.
    """
    if problem.head_dim <= NARROW and problem.seq_kv > WIDE_KEYS:
        return config
    sms = most_multiprocessors(arch)
    if EVEN_ENOUGH * sms <= row_tiles(problem, config.tile_m) <= sms:
        return replace(config, tile_n=2 * config.tile_n, warps=2 * config.warps, blocks_per_sm=1)
    return config


def areas_of(problem: Problem, config: Config | None) -> Mapping[str, Layout]:
    """The areas of workspace of a launch: none where all keys are one part, nor of another variant."""
    if not isinstance(config, TritonSplitConfig) or config.splits == 1:
        return {}
    return area_layouts(config.splits, problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes of device memory beside the tensors."""
    return sum(layout.size_bytes for layout in areas_of(problem, config).values())


def merged(splits: int) -> tuple[int, int]:
    """Parts and lines of a program that merges so many parts."""
    parts = next(it for it in _MERGED_PARTS if splits <= it)
    return parts, max(_MERGED_LINES // parts, 1)


def merge_programs(problem: Problem, splits: int) -> int:
    """Programs of the kernel that merges parts."""
    lines = problem.batch * problem.heads_q * problem.seq_q
    return -(-lines // merged(splits)[1]) * -(-problem.head_dim // MERGED_COLUMNS)


def smem_bytes(problem: Problem, arch: Arch, config: TritonSplitConfig) -> int:
    """Shared memory that the tiles of q, k and v take; the compiler adds barriers and scratch of a few KiB.

    One more tile of keys is held where the tensor cores read it in the background.
    """
    in_background = arch.name in ASYNCHRONOUS and config.tile_m >= _WGMMA_ROWS
    in_flight = config.stages if in_background else config.stages - 1
    rows = config.tile_m + (2 * config.tile_n * in_flight if config.stages > 1 else config.tile_n)
    return rows * one_width(problem.head_dim) * ELEMENT_BYTES


_FIELDS: Mapping[str, limits.FieldRule] = {
    **dict.fromkeys(("tile_m", "tile_n"), limits.powers_of_two(16, 256)),
    "warps": limits.powers_of_two(1, 16),
    **dict.fromkeys(("stages", "blocks_per_sm"), limits.AT_LEAST_1),
    "splits": limits.between(1, SPLITS_MAX),
}
_ROWS_MAX = 2**31 - 1 - 256
"""The most rows of a sequence: they are counted in 32 bits, and a tile may begin before the last one."""


def why_not_fit(problem: Problem, arch: Arch, config: TritonSplitConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`."""
    config = settle(problem, arch, config)
    if wrong := limits.failed(limits.field_checks(config, _FIELDS)):
        return wrong
    programs = row_tiles(problem, config.tile_m) * config.splits
    merging = 0 if config.splits == 1 else merge_programs(problem, config.splits)
    rows = f"{problem.rows} queries of the heads that share a key"
    return limits.failed(
        (
            (problem.rows <= _ROWS_MAX, rows, f"up to {_ROWS_MAX}"),
            *limits.size_checks(config, arch, smem_bytes(problem, arch, config), programs),
            (merging <= GRID_MAX, f"{merging} blocks that merge parts", f"a grid of up to {GRID_MAX}"),
        )
    )
