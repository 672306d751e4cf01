"""Hopper's forward over caches for wide heads, absorbed latent attention among them: `forward_twin`'s kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.cuda.decode import BoxedDecodeConfig, grouped_rows, paging_of
from multiattn.cuda.family import NO_FLAGS
from multiattn.cuda.forward_twin import TILE_N, TwinFamilyConfig
from multiattn.cuda.source import Instance, SplitWgmmaParams
from multiattn.cuda.wgmma import BOX_COLUMNS, WARPGROUP_ROWS
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.limits import between, failed, limit_checks, limited, size_checks
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import SPLITS_MAX


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTwinConfig(TwinFamilyConfig, BoxedDecodeConfig):
    """Launch parameters of the forward over caches: a tile's rows are queries of all heads that share a key/value
    head."""

    gathers: bool = False
    """A warpgroup gathers keys one by one with cp.async; else a warp loads boxes of them by TMA."""
    keys_min: int = 512
    """The least keys of the longest sequence that are a block's part."""
    splits: int = limited(between(1, SPLITS_MAX), default=0)

    def box_rows(self, problem: Problem) -> Mapping[str, int]:
        """Boxes of K and V have as many keys."""
        names = () if self.gathers else ("k",) if problem.v_in_k else ("k", "v")
        return dict.fromkeys(names, self.keys_of_box(problem))

    def settled(self, problem: Problem, arch: Arch) -> SplitTwinConfig:
        """The config with pieces, slots and a number of splits."""
        splits = self.choose_splits(problem, arch, keys_min=self.keys_min, blocks_per_sm=1)
        return replace(self.filled(problem), splits=splits)

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, of pages, or of the problem with them."""
        is_settled = self.piece > 0, f"piece={self.piece}", "64, 128, 192"
        if wrong := failed((*limit_checks(self), is_settled)) or self._why_not_boxes(problem):
            return wrong
        sizes = size_checks(self, arch, self.smem_bytes(problem), self.blocks(problem))
        return failed((*self.checks(problem), *self.rows_checks(problem), *sizes))

    def _why_not_boxes(self, problem: Problem) -> tuple[Reason, ...]:
        """Reasons why TMA cannot bring keys."""
        if self.gathers:
            return ()
        return self.why_not_pages(problem, self.piece // BOX_COLUMNS) or self.why_not_boxes(problem)

    def multiplies(self, plan: Plan) -> Instance:
        """Its constants are mask, sinks, pages, and the shape."""
        paging, rows = paging_of(plan.problem), self.keys_of_box(plan.problem)
        tiles = f"_{self.keys_name(plan.problem)}"
        return self.twin_kernel(plan, tiles=tiles, rows=grouped_rows(paging, rows), params=SplitWgmmaParams)

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[SplitTwinConfig]:
        """Ways to bring keys."""
        for gathers in (False, True):
            yield cls(tile_m=WARPGROUP_ROWS, tile_n=TILE_N, gathers=gathers)
