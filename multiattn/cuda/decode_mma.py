"""The forward for few queries with mma.sync, whose teams of warps walk over keys of their own; `split_keys.cuh`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.cuda.decode import DecodeConfig, grouped_rows, overlap, paging_of, stored_cache
from multiattn.cuda.family import ELEMENT_BYTES, FP32_BYTES, FRAGMENT_ROWS, NO_FLAGS, padded
from multiattn.cuda.naming import aggregate, aggregate_of, walking_kernel
from multiattn.cuda.source import CacheScales, Instance, SplitParams
from multiattn.plan.arch import WARP_THREADS, Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.limits import between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.schedule import EVEN_ENOUGH, most_multiprocessors, row_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import SPLITS_MAX

LONE_ROWS, LONE_MAX = 32, 128
"""With more rows than these and more heads, of which none share keys, heads fill the GPU, and the forwards that own
queries are faster: a tile of theirs has as few rows.

H200, 2026-11-26, B=64 12/12, 128 queries and keys: D=64 31.4 us, wgmma 19.5; D=128 43.5, 30.2; B=32 12/12, 64 queries
of 512 keys 23.1, 20.9. Where heads share keys it is not so: B=8 64/8, 16 queries of 8k keys 42.2, 198.7."""

FEW = 8
"""Tiles of rows are few where SMs are this many times more."""
WIDE_STAGES = 4
"""The most tiles that a team of a wide block has room for, of the room that the blocks in its place would have.

H200, 2026-11-26, D=64, pages of 16, B=128 8/1 8k: 67.5 us, six 68.0."""
CHUNK_BYTES = 16  # of a copy
_TEAMS_MAX = 15  # a named barrier each
_FOUND_PADDING = 8  # fp32 behind each row that teams leave
_TEAMS = ((16, 1), (32, 1), (64, 2), (64, 4), (128, 8))  # (tile_m, row_warps) that a sweep tries


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaSplitConfig(DecodeConfig):
    """Launch parameters of the forward for few queries; `kernels/split_keys_traits.cuh` says what each does.

    `tile_m` is rows: queries of all heads that share a key/value head.
    """

    warps: int = limited(one_of(1, 2, 4, 8, 16))
    """Warps of a block, in teams that walk over keys of their own."""
    row_warps: int = limited(one_of(1, 2, 4, 8), default=1)
    """Warps of a team that have rows of their own."""
    column_warps: int = limited(one_of(1, 2), default=1)
    """Warps of a team that share rows and have columns of the output."""
    stages: int = limited(between(2, 8))
    """Tiles of K and of V that a team has room for: all but one are on their way while that one is used."""
    blocks_per_sm: int = 1
    """Blocks on an SM that the compiler must leave registers for, and that a split fills it with."""
    widens: bool = False
    """Where that is as good or better, a block has twice the warps and an SM for itself: `settled` decides."""
    splits: int = limited(between(1, SPLITS_MAX), default=0)

    @property
    def teams(self) -> int:
        """Groups of warps with keys of their own."""
        return self.warps // (self.row_warps * self.column_warps)

    def settled(self, problem: Problem, arch: Arch) -> CudaSplitConfig:
        """The config with a number of splits, of which each has at least a tile of keys for each team."""
        if min(self.tile_m, self.tile_n, self.row_warps, self.column_warps) < 1 or not self.teams:
            return self  # `why_not` says what is wrong
        config = self._widened(problem, arch) if self.widens and problem.asked_splits is None else self
        keys_min = config.tile_n * config.teams
        splits = config.choose_splits(problem, arch, keys_min=keys_min, blocks_per_sm=config.blocks_per_sm)
        return replace(config, widens=False, splits=splits)

    def _widened(self, problem: Problem, arch: Arch) -> CudaSplitConfig:
        """The config with twice the warps and one block an SM, where tiles of rows are few, or each has an SM.

        H200, 2026-11-26, D=128, one query, us wide and not: B=1 32/8 N=1k 6.8, 7.6; B=1 8/1 8k 7.5, 8.3; B=128 8/1 1k
        18.7, 22.0, 8k 123.7, 127.0. Of others not: B=32 8/1 1k 10.3, 9.5; B=8 32/8 1k 14.2, 13.6.
        """
        tiles, sms = row_tiles(problem, self.tile_m), most_multiprocessors(arch)
        if tiles * FEW <= sms or EVEN_ENOUGH * sms <= tiles <= sms:
            stages = max(min(self.stages * self.blocks_per_sm // 2, WIDE_STAGES), self.stages)
            return replace(self, warps=2 * self.warps, stages=stages, blocks_per_sm=1)
        return self

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which its kernel asserts: Q, and rings of teams or what they found."""
        number_bytes, factors, scales = ELEMENT_BYTES, 0, 0
        if problem.stored is not None and problem.cache is not None:
            number_bytes, factors, scales = 1, FP32_BYTES, FP32_BYTES * len(problem.cache.per_token)
        unit = FRAGMENT_ROWS * self.column_warps * ELEMENT_BYTES // number_bytes
        width, width_v = padded(problem.head_dim, unit), padded(problem.head_dim_v, unit)
        row = width if problem.v_in_k else width + width_v
        rings = self.teams * self.stages * self.tile_n * (row * number_bytes + scales)
        found = self.teams * self.tile_m * (width_v + _FOUND_PADDING + 2) * FP32_BYTES
        return self.tile_m * (width * ELEMENT_BYTES + factors) + max(rings, found)

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, or of the problem with them."""
        team = self.row_warps * self.column_warps
        is_whole = self.warps % team == 0 and self.warps // team <= _TEAMS_MAX
        rows = FRAGMENT_ROWS * self.row_warps
        checks = (
            (is_whole, f"warps={self.warps} in teams of {team}", f"whole teams, up to {_TEAMS_MAX}"),
            (self.tile_m % rows == 0 and self.tile_m > 0, f"tile_m={self.tile_m}", f"multiples of {rows}"),
            (self.tile_n % FRAGMENT_ROWS == 0 and self.tile_n > 0, f"tile_n={self.tile_n}", "multiples of 16"),
        )
        if wrong := failed((*limit_checks(self), *checks)):
            return wrong
        sizes = size_checks(self, arch, self.smem_bytes(problem), self.blocks(problem))
        chunks = f"{problem.widths} in 8-bit numbers", f"multiples of {CHUNK_BYTES}"
        whole = problem.stored is None or not (problem.head_dim % CHUNK_BYTES or problem.head_dim_v % CHUNK_BYTES)
        return failed(((whole, *chunks), *self.rows_checks(problem), *sizes))

    def multiplies(self, plan: Plan) -> Instance:
        """Its constants are mask, sinks, pages, and the shape."""
        problem, overlaps, paging = plan.problem, overlap(plan.arch), paging_of(plan.problem, self.tile_n)
        names = ("tile_m", "tile_n", "warps", "row_warps", "column_warps", "stages")
        config = aggregate_of(self, *names, overlaps=overlaps)
        sizes = f"{self.tile_m}x{self.tile_n}_w{self.warps}r{self.row_warps}c{self.column_warps}_s{self.stages}"
        stored = stored_cache(problem)
        numbers = "".join(f"_{name[0]}s" for name in problem.cache.per_token) if problem.cache is not None else ""
        numbers = f"_{problem.stored}{numbers}" if stored else ""
        return walking_kernel(
            plan,
            "SplitTraits",
            config,
            entry="split_keys",
            sizes=f"{sizes}_o{self.blocks_per_sm}_{paging.lower()}{numbers}{'' if overlaps else '_apart'}",
            rows=grouped_rows(paging, stored=aggregate("StoredCache", **stored) if stored else ""),
            reads_v_in_k=True,
            lists=CacheScales if stored else None,
            header="split_keys.cuh",
            params=SplitParams,
            threads=self.warps * WARP_THREADS,
            blocks_per_sm=self.blocks_per_sm,
            smem_bytes=self.smem_bytes(problem),
            overlaps=overlaps,
        )

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[CudaSplitConfig]:
        """Tiles of as many rows as a sequence has, or of half as many."""
        rows = min(max(problem.rows, 1), 128)
        teams = (it for it in _TEAMS if rows <= 2 * it[0] <= max(4 * rows, 64))
        for (tile_m, row_warps), tile_n, (warps, blocks), stages in itertools.product(
            teams, (16, 32, 64), ((4, 1), (4, 2), (8, 1)), (2, 3, 4)
        ):
            sizes: dict[str, Any] = {"tile_m": tile_m, "tile_n": tile_n, "warps": warps, "row_warps": row_warps}
            yield cls(**sizes, stages=stages, blocks_per_sm=blocks)
