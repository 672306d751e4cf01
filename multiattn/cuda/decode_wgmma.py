"""Hopper's forward over caches, for more rows than `decode_mma`; the forward's kernel with rows of groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.cuda.decode import BoxedDecodeConfig, grouped_rows, paging_of
from multiattn.cuda.family import NO_FLAGS
from multiattn.cuda.naming import aggregate
from multiattn.cuda.source import Instance, SplitWgmmaParams
from multiattn.cuda.wgmma import (
    BARRIER_BYTES,
    TILES_OF_KEYS,
    WARPGROUP_THREADS,
    WgmmaFamilyConfig,
    forward_registers,
    panels_of,
    row_bytes,
    wgmma_kernel,
    width_bytes,
)
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.limits import between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import SPLITS_MAX

REGISTERS_MAX: Mapping[int, int] = {1: 208, 2: 208, 3: 144}
"""By warpgroups that compute, for outputs, scores and weights: the rest of a thread's is for all else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitWgmmaConfig(BoxedDecodeConfig, WgmmaFamilyConfig):
    """Launch parameters of Hopper's forward over caches; `kernels/forward_wgmma_traits.cuh` says what each does.

    `tile_m` is rows: queries of all heads that share a key/value head.
    """

    tile_m: int = limited(one_of(64, 128, 192))
    tile_n: int = limited(TILES_OF_KEYS)
    stages: int = limited(between(3, 16))
    """Buffers that tiles of K and of V take turns in."""
    pingpong: bool = False
    """Warpgroups take turns: one has the tensor cores while another has the softmax."""
    lazy_max: bool = False
    """Weights are made relative to the maxima of earlier blocks, as `WgmmaConfig` says."""
    gathers: bool = False
    """A warpgroup gathers keys one by one with cp.async; else a warp loads boxes of them by TMA."""
    keys_min: int = 512
    """The least keys of the longest sequence that are a block's part."""
    splits: int = limited(between(1, SPLITS_MAX), default=0)

    def box_rows(self, problem: Problem) -> Mapping[str, int]:
        """Boxes of K and V have as many keys."""
        return {} if self.gathers else dict.fromkeys(("k", "v"), self.keys_of_box(problem))

    def settled(self, problem: Problem, arch: Arch) -> SplitWgmmaConfig:
        """The config with a number of splits."""
        splits = self.choose_splits(problem, arch, keys_min=self.keys_min, blocks_per_sm=1)
        return replace(self, lazy_max=self.lazy_max and not problem.has_score, splits=splits)

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which its kernel asserts: Q, stages for K and V, barriers."""
        q, keys = self.tile_m * width_bytes(problem.head_dim), self.stages * self.tile_n * row_bytes(problem)
        return q + keys + BARRIER_BYTES

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, of pages, or of the problem with them."""
        if wrong := failed(limit_checks(self)) or self._why_not_keys(problem):
            return wrong
        registers, most = forward_registers(problem, self.tile_n), REGISTERS_MAX[self.warpgroups]
        needed = f"{registers} registers for output, scores and weights ({self})"
        return failed(
            (
                (not self.pingpong or self.warpgroups > 1, f"pingpong with tile_m={self.tile_m}", "tile_m 128, 192"),
                (registers <= most, needed, f"up to {most} with {self.warpgroups} warpgroups"),
                (not self.lazy_max or not problem.has_score, "lazy_max with an expression for scores", "exact maxima"),
                *self.rows_checks(problem),
                *size_checks(self, arch, self.smem_bytes(problem), self.blocks(problem)),
            )
        )

    def _why_not_keys(self, problem: Problem) -> tuple[Reason, ...]:
        """Reasons why TMA, or a warpgroup that gathers, cannot bring keys."""
        if self.gathers:
            most = WARPGROUP_THREADS  # a lane for each
            checks = (
                (self.warpgroups < 3, f"gathers with tile_m={self.tile_m}", "tile_m 64, 128"),
                (self.tile_n <= most, f"gathers with tile_n={self.tile_n}", f"tile_n up to {most}"),
            )
            return failed(checks)
        return self.why_not_pages(problem, panels_of(problem)) or self.why_not_boxes(problem)

    def multiplies(self, plan: Plan) -> Instance:
        """Its constants are mask, sinks, pages, and the shape."""
        problem = plan.problem
        paging, rows = paging_of(problem), self.keys_of_box(problem)
        sizes = {name: getattr(self, name) for name in ("warpgroups", "tile_n", "stages", "pingpong", "lazy_max")}
        config = aggregate("WgmmaConfig", **sizes)
        options = f"{'_pingpong' * self.pingpong}{'_lazymax' * self.lazy_max}"
        tiles = f"{self.tile_m}x{self.tile_n}_s{self.stages}_{self.keys_name(problem)}{options}"
        return wgmma_kernel(
            plan,
            "WgmmaTraits",
            config,
            entry="forward_wgmma",
            sizes=tiles,
            rows=grouped_rows(paging, rows),
            header="forward_wgmma.cuh",
            params=SplitWgmmaParams,
            threads=self.threads,
            smem_bytes=self.smem_bytes(problem),
            wgmma_columns=(self.tile_n, problem.head_dim_v),
        )

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[SplitWgmmaConfig]:
        """One warpgroup, or two that take turns."""
        for tile_m, tile_n, stages, lazy_max, gathers in itertools.product(
            (64, 128), (64, 128), (4, 6, 12), (True, False), (False, True)
        ):
            ways = {"pingpong": tile_m > 64, "lazy_max": lazy_max, "gathers": gathers}
            yield cls(tile_m=tile_m, tile_n=tile_n, stages=stages, **ways)
