"""Shared by the forwards for few queries: keys are divided into parts, and a kernel merges what these leave."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from multiattn.cuda.family import FP32_BYTES, FamilyConfig
from multiattn.cuda.naming import aggregate, enumerator, traits_type
from multiattn.cuda.source import Instance, PlannedLaunch, SplitParams
from multiattn.plan import remedies
from multiattn.plan.arch import GRID_MAX, WARP_THREADS, Arch
from multiattn.plan.backend import Plan
from multiattn.plan.limits import Check
from multiattn.plan.schedule import ROWS_MAX, choose_splits, power_of_two, row_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import SCALES, SPLITS_MAX, area_layouts

MERGE_THREADS = 256
MERGE_RESIDENT_THREADS = 1024
"""Threads on an SM that registers must allow where it overlaps: a block then fits beside those that it waits for."""
CHUNK_COLUMNS = 8  # of a row, that a thread reads and writes
MERGE_COLUMNS = 32
_MERGE_SLOTS = MERGE_THREADS // (MERGE_COLUMNS // CHUNK_COLUMNS)  # parts that a block reads at a time
_MERGE_SMEM_BYTES = (SPLITS_MAX + _MERGE_SLOTS * (MERGE_COLUMNS + 4)) * FP32_BYTES  # weights of parts, sums of them
MERGE_FEW, MERGE_FEW_THREADS = 8, 128
"""Up to so many parts of a row are few: each thread reads its columns of all of them. What it takes follows from the
number of parts alone, as a row must have the same bits in any batch.

H200, 2026-11-26, 8,192 rows of two parts, D=128: 3.2 us behind the last part, by the kernel for many parts 29.9."""
_GROUP_ROWS = 8  # in which the swizzle of a box repeats
_OVERLAPS_SINCE = (9, 0)
"""The first GPUs whose grids may begin before the one before them has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig(FamilyConfig):
    """A config whose blocks own rows, queries of all heads that share a key/value head, and divide the keys."""

    @property
    def splits(self) -> int:
        """Parts that the keys are divided into. A rule leaves it open, with 0, and a plan has a number."""
        raise NotImplementedError

    def choose_splits(self, problem: Problem, arch: Arch, *, keys_min: int, blocks_per_sm: int) -> int:
        """A number of splits, each of so many keys at least, where it is open or the caller asks for one."""
        if self.splits and problem.asked_splits is None:
            return self.splits
        return choose_splits(problem, arch, tile_m=self.tile_m, keys_min=keys_min, blocks_per_sm=blocks_per_sm)

    @property
    def merged_rows(self) -> int:
        """Rows of a block that merges many parts: one, or 2^n that have a warp each, and a slot for each part."""
        return max(min(_MERGE_SLOTS // power_of_two(self.splits), MERGE_THREADS // WARP_THREADS), 1)

    def merge_blocks(self, problem: Problem) -> int:
        """Blocks of the kernel that merges: one for some rows, of many parts one for some columns of some rows."""
        rows = problem.batch * problem.heads_q * problem.seq_q
        if self.splits <= MERGE_FEW:
            return -(-rows // (MERGE_FEW_THREADS // (problem.head_dim_v // CHUNK_COLUMNS)))
        return -(-rows // self.merged_rows) * -(-problem.head_dim_v // MERGE_COLUMNS)

    def blocks(self, problem: Problem) -> int:
        """Blocks of a launch: one for each split of each tile of rows."""
        return row_tiles(problem, self.tile_m) * self.splits

    def areas(self, problem: Problem) -> dict[str, int]:
        """Partial sums that parts leave: none with one split."""
        if self.splits <= 1:
            return {}
        sizes = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
        layouts = area_layouts(self.splits, *sizes, row_max=problem.row_max)
        return {name: layout.size_bytes for name, layout in layouts.items()}

    def rows_checks(self, problem: Problem) -> tuple[Check, ...]:
        """Checks that rows can be counted: those of a tile, and those whose parts are merged."""
        rows = f"{problem.rows} queries of the heads that share a key"
        checks: list[Check] = [(problem.rows <= ROWS_MAX, rows, f"up to {ROWS_MAX}")]
        if self.splits > 1:
            merged, merging = problem.batch * problem.heads_q * problem.seq_q, self.merge_blocks(problem)
            checks.append((merged <= ROWS_MAX, f"{merged} queries of all heads, in parts", f"up to {ROWS_MAX}"))
            checks.append((merging <= GRID_MAX, f"{merging} blocks that merge parts", f"a grid of up to {GRID_MAX}"))
        return tuple(checks)

    def multiplies(self, plan: Plan) -> Instance:
        """The kernel that multiplies."""
        raise NotImplementedError

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """The kernel that multiplies, and the one that merges: with one split the first is all."""
        multiplies = PlannedLaunch(kernel=self.multiplies(plan), blocks=self.blocks(plan.problem))
        return (multiplies,) if self.splits == 1 else (multiplies, self._merges(plan))

    def _merges(self, plan: Plan) -> PlannedLaunch:
        problem, overlaps, few = plan.problem, overlap(plan.arch), self.splits <= MERGE_FEW
        name, traits = ("merge_few_splits", "MergeFewTraits") if few else ("merge_splits", "MergeTraits")
        threads, parts_max = (MERGE_FEW_THREADS, MERGE_FEW) if few else (MERGE_THREADS, SPLITS_MAX)
        is_packed = problem.has_packed_queries
        config = aggregate(
            "MergeConfig",
            head_dim_v=problem.head_dim_v,
            threads=threads,
            **({} if few else {"columns": MERGE_COLUMNS}),
            parts_max=parts_max,
            sinks=problem.has_sinks,
            packed_queries=is_packed,
            overlaps=overlaps,
            **({"row_max": True} if problem.row_max else {}),
        )
        options = f"{'_sinks' * problem.has_sinks}{'_packed' * is_packed}{'' if overlaps else '_apart'}"
        options += "_max" * problem.row_max
        kernel = Instance(
            name=f"{name}_{problem.dtype}_d{problem.head_dim_v}{options}",
            header="merge_splits.cuh",
            entry=name,
            traits=traits_type(traits, problem, config),
            params=SplitParams,
            threads=threads,
            blocks_per_sm=MERGE_RESIDENT_THREADS // threads if overlaps else 1,
            smem_bytes=0 if few else _MERGE_SMEM_BYTES,
            row_max=problem.row_max,
            overlaps=overlaps,
        )
        return PlannedLaunch(kernel=kernel, blocks=self.merge_blocks(problem))

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles, parts and pages."""
        problem, cache = plan.problem, plan.problem.cache
        page = 0 if cache is None or cache.page is None else cache.page
        multiplier, shift = divisor_of(page) if page else (0, 0)
        return {
            "sequences": problem.lengths[0],
            "tiles": -(-problem.rows // self.tile_m),
            "splits": self.splits,
            "merged_rows": self.merged_rows,
            "page": page,
            "page_multiplier": multiplier,
            "page_shift": shift,
            "table_stride": 0 if cache is None else cache.table_stride,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxedDecodeConfig(DecodeConfig):
    """A config whose keys come by TMA, in boxes of a cache, or one by one."""

    @property
    def gathers(self) -> bool:
        """True if a warpgroup brings keys one by one with cp.async; else a warp loads boxes of them by TMA."""
        raise NotImplementedError

    def keys_of_box(self, problem: Problem) -> int:
        """Keys of a box: the most that no page and no tile ends within; 0: there is none."""
        if self.gathers:
            return 0
        page = None if problem.cache is None else problem.cache.page
        return self.tile_n if page is None else math.gcd(page, self.tile_n)

    def why_not_pages(self, problem: Problem, panels: int) -> tuple[Reason, ...]:
        """Reasons why a warp cannot load boxes of this cache, for so many panels at a time."""
        rows, page = self.keys_of_box(problem), None if problem.cache is None else problem.cache.page
        got, allowed = f"pages of {page} keys", f"multiples of {_GROUP_ROWS}"
        if page is None or not rows % _GROUP_ROWS:
            boxes = self.tile_n // rows * panels
            if boxes <= WARP_THREADS:
                return ()
            got = f"{boxes} boxes for {self.tile_n} keys in pages of {page}"
            allowed = f"up to {WARP_THREADS} boxes, one for each lane"
        return (Reason(code="page", got=got, allowed=allowed, hint=remedies.OTHERS),)

    def keys_name(self, problem: Problem) -> str:
        """How keys come, as a part of a kernel's name."""
        paging = paging_of(problem)
        boxes = "_gathered" if self.gathers else str(self.keys_of_box(problem)) * (paging == "ANY")
        return {"NONE": "dense", "ENTRIES": "entries", "ANY": "pages"}[paging] + boxes


def overlap(arch: Arch) -> bool:
    """True where the kernels overlap with those before and after them. The CPU checks that they wait."""
    return not arch.is_gpu or arch.capability >= _OVERLAPS_SINCE


def paging_of(problem: Problem, tile_n: int | None = None) -> str:
    """Where keys are; with `tile_n`, as a tile of so many sees it."""
    if problem.cache is None:
        return "NONE"
    page = problem.cache.page
    if page is None:
        return "ENTRIES"
    return "ANY" if tile_n is None or page % tile_n else "WHOLE_TILES"


def grouped_rows(paging: str, box_rows: int = 0, stored: str = "") -> str:
    """The C++ type of rows of all heads that share keys, which come in boxes of so many, or 0: one by one.

    `stored` is the C++ value of what a cache of 8-bit numbers holds.
    """
    return f"multiattn::Grouped<{enumerator('Paging', paging)}, {box_rows}{stored and f', {stored}'}>"


def stored_cache(problem: Problem) -> dict[str, bool | str]:
    """The fields of a ``StoredCache``; none of a cache of 16-bit numbers."""
    if problem.stored is None or problem.cache is None:
        return {}
    per_token = problem.cache.per_token
    tokens = {f"{name[0]}_per_token": name in per_token for name in SCALES}
    return {"numbers": enumerator("Numbers", problem.stored), **tokens}


def divisor_of(size: int) -> tuple[int, int]:
    """Multiplier and shift that divide: ``n // size == (2 * n * multiplier >> 32) >> shift`` for n below 2^31.

    Granlund, Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), theorem 4.2. ValueError for
    a size that is not from 1 to 2^31 - 1.
    """
    if not 0 < size < 2**31:
        raise ValueError(f"size: got {size}; allowed 1 to 2^31 - 1")
    shift = (size - 1).bit_length()
    return -(-(2 ** (31 + shift)) // size), shift
