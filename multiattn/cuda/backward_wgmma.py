"""The backward for Hopper in one pass: dq, and dk and dv of divided tiles, are summed in fp32; `backward_wgmma.cuh`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from ctypes import Structure
from dataclasses import dataclass, replace
from typing import Any

from multiattn.block_mask import QUERIES_OF_KEYS
from multiattn.cuda import stream_k
from multiattn.cuda.backward_mma import ROW_THREADS, ROW_TILE, backward_numbers, dq_sum_bytes, rows_launch
from multiattn.cuda.family import ELEMENT_BYTES, FP32_BYTES, NO_FLAGS, padded, tiles_of
from multiattn.cuda.mask_bits import MaskBits
from multiattn.cuda.naming import aggregate, aggregate_of, packed_tiles, traits_type
from multiattn.cuda.source import Division, Instance, PlannedLaunch, WgmmaBackwardParams
from multiattn.cuda.stream_k import Divided, steps_of_tiles
from multiattn.cuda.wgmma import (
    BARRIER_BYTES,
    BOX_COLUMNS,
    DEPTH,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    WgmmaFamilyConfig,
    block_check,
    packed_check,
    wgmma_kernel,
    width_bytes,
)
from multiattn.packed import TILE_LISTS
from multiattn.plan.abi import WORKSPACE
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.limits import between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.schedule import COUNTER_BYTES, key_tiles, kv_heads_of_section, most_multiprocessors, query_tiles
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem
from multiattn.score.expression import ONE
from multiattn.score.lower import lower

WARPGROUPS = 2  # that compute
_DS_STAGES = 2
_DQ_BUFFERS = 2
STATISTICS = 2
"""Numbers of a query, fp32: lse and delta."""
CHAIN_STEPS = 3
"""Steps from one tile's addition to dq to the next one's, where they come in order. H200, 2026-11-29: 1, 2, 3 and 5 are
level where heads are many; 4 heads at D=128 N=8192 full 471, 415, 525 and 507 TFLOPS."""
TURN_BYTES = 128
"""Behind the statistics of a tile: a line, so that TMA may load those of the next one."""
WIDE_FROM = 97
"""The width from which on warpgroups of keys have 208 registers a thread: below 200 with early scores, else 184."""
_REGISTERS_MAX, _REGISTERS_MAX_FEW = 176, 152
"""The most that `registers_at_least` may be: with 208 or 200 registers a thread, and with 184."""


def mean_columns(problem: Problem, *, of_k: int, of_v: int = 0) -> float:
    """The mean columns of so many products with head_dim as depth or width, and so many with that of v.

    As a depth it is padded to 16, as a width to 8.
    """
    widths = (problem.head_dim,) * of_k + (problem.head_dim_v,) * of_v
    return sum((padded(it, DEPTH) + padded(it, 8)) / 2 for it in widths) / len(widths)


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperBackwardConfig(WgmmaFamilyConfig):
    """A config of either backward for Hopper, with statistics of queries before the products."""

    @property
    def row_statistics(self) -> int:
        """Numbers of a query that are prepared."""
        return STATISTICS

    @property
    def is_ordered(self) -> bool:
        """True if behind the statistics of a tile is how many tiles of keys have added to its dq."""
        return False

    def clears_ahead(self, problem: Problem) -> bool:
        """True if sums of dq are emptied by tiles of earlier heads, but those of the first section."""
        return False

    def box_rows(self, problem: Problem) -> Mapping[str, int]:
        """Whole tiles."""
        return {"q": self.tile_m, "dout": self.tile_m, "k": self.tile_n, "v": self.tile_n}

    def areas(self, problem: Problem) -> dict[str, int]:
        """Statistics, and the counter of tiles."""
        rows = problem.batch * problem.heads_q * tiles_of(problem, problem.seq_q, self.tile_m) * self.tile_m
        has_turns = self.is_ordered or self.clears_ahead(problem)
        row_bytes = self.row_statistics * FP32_BYTES + (TURN_BYTES // self.tile_m if has_turns else 0)
        return {"statistics": rows * row_bytes, WORKSPACE: COUNTER_BYTES}

    def statistics(
        self,
        problem: Problem,
        rows: int,
        name: str,
        *lists: str,
        has_dq_sum: bool = True,
        behind: type[Structure] | None = None,
    ) -> PlannedLaunch:
        """The kernel of statistics, with blocks of so many queries."""
        sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v, "threads": ROW_THREADS}
        sizes |= {"tile_rows": rows, "tile_m": self.tile_m}
        delta_first = self.row_statistics > STATISTICS
        is_ahead = self.clears_ahead(problem)
        prepared = f"{'_delta' * delta_first}{'_ordered' * self.is_ordered}{'_ahead' * is_ahead}"
        kept = {"has_dq_sum": has_dq_sum, "ordered": self.is_ordered, "clears_ahead": is_ahead}
        config = aggregate("RowConfig", **sizes, **kept, delta_first=delta_first)
        kernel = Instance(
            name=f"prepare_statistics_{problem.dtype}_{problem.widths_in_names}{prepared}{name}",
            header="backward_wgmma_rows.cuh",
            entry="prepare_statistics",
            traits=traits_type("StatisticsTraits", problem, config, *lists),
            packed=problem.packing is not None,
            lists=behind,
            params=WgmmaBackwardParams,
            threads=ROW_THREADS,
            overlaps=True,
        )
        return PlannedLaunch(kernel=kernel, blocks=query_tiles(problem, rows))

    def sectioned_numbers(self, plan: Plan, row_tile: int, own_tile: int | None, shares: int = 1) -> dict[str, Any]:
        """Numbers that kernels are told where persistent blocks take tiles of keys, in so many shares."""
        tiles = tiles_of(plan.problem, plan.problem.seq_kv, self.tile_n)
        sections_kv = kv_heads_of_section(plan.problem, plan.arch, tiles_of_head=tiles, shares=shares)
        return backward_numbers(plan.problem, self, row_tile, own_tile, sections_kv)


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaBackwardConfig(HopperBackwardConfig):
    """Launch parameters of Hopper's kernel of all gradients: two warpgroups of keys, one of dQ, one that loads."""

    tile_m: int = limited(one_of(ROW_TILE))
    tile_n: int = limited(one_of(WARPGROUPS * WARPGROUP_ROWS))
    k_stages: int = limited(one_of(1, 2), default=1)
    """Buffers of K: with two that of the next tile comes while the last products with one are made."""
    q_stages: int = limited(between(2, 8), default=3)
    """Buffers of Q, with lse and delta of their queries: scores are made a step ahead, and dK comes last of a step."""
    dout_stages: int = limited(between(1, 8), default=2)
    """Buffers of dO."""
    k_in_registers: bool = False
    """K is read into registers once a tile, for the scores, or by wgmma from shared memory in each step."""
    half_dq: bool = False
    """dQ is made 64 columns at a time, which takes half of the registers."""
    dq_by_tma: bool = False
    """dQ is added to its sums by TMA, by way of shared memory, or by each thread from its registers."""
    early_scores: bool = False
    """Scores of the next step are made while dP is, which takes 48 registers. dP begins with -delta."""
    ordered: bool = False
    """Tiles of keys add to dq one after another, so that it has the same bits each time."""
    stream_k: int = limited(between(0, 1024), default=0)
    """SMs among which tiles of keys are divided where whole ones keep them less busy; 0: all tiles are whole."""

    @property
    def row_statistics(self) -> int:
        """lse and delta. dP with registers of its own begins with -delta, which is there for both keys of a thread."""
        return STATISTICS + self.early_scores

    @property
    def is_ordered(self) -> bool:
        """As asked."""
        return self.ordered

    def clears_ahead(self, problem: Problem) -> bool:
        """From `WIDE_FROM` on, where TMA adds to them.

        H200, 2026-11-29, causal, us: D=128 N=1024 466 for 476, N=2048 706 for 719, N=4096 1190 for 1226; but D=96
        N=1024 577 for 560, and D=64, where threads add, N=1024 550 for 526: there gradients lose more than this saves.
        """
        is_wide = problem.head_dim >= WIDE_FROM and self.dq_by_tma
        return is_wide and not self.ordered and problem.packing is None

    def is_paired(self, problem: Problem) -> bool:
        """True if each warpgroup of keys has a list of a block mask, and stages, of its own."""
        return problem.blocks is not None and problem.blocks.keys % self.tile_n != 0

    def settled(self, problem: Problem, arch: Arch) -> WgmmaBackwardConfig:
        """As many stages of each warpgroup's own as there is room for."""
        if not self.is_paired(problem):
            return self
        least = replace(self, q_stages=2, dout_stages=1)
        ways = (replace(least, dout_stages=2), least, replace(least, half_dq=True))
        fitting = (it for it in ways if not arch.is_gpu or it.smem_bytes(problem) <= arch.smem_per_block)
        return next(fitting, self)

    @property
    def threads(self) -> int:
        """Threads of a block, of four warpgroups."""
        return WARPGROUP_THREADS * (WARPGROUPS + 2)

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which its kernel asserts when compiled."""
        groups = WARPGROUPS if self.is_paired(problem) else 1
        rows_k = self.k_stages * self.tile_n + groups * self.q_stages * self.tile_m
        rows_v = self.tile_n + groups * self.dout_stages * self.tile_m
        rows = rows_k * width_bytes(problem.head_dim) + rows_v * width_bytes(problem.head_dim_v)
        ds = _DS_STAGES * self.tile_n * self.tile_m * ELEMENT_BYTES
        statistics = groups * self.q_stages * self.row_statistics * self.tile_m * FP32_BYTES
        dq = _DQ_BUFFERS * self.tile_m * padded(self.dq_columns(problem)) * FP32_BYTES if self.dq_by_tma else 0
        return rows + ds + statistics + dq + BARRIER_BYTES

    def dq_columns(self, problem: Problem) -> int:
        """The columns of dQ that are made at a time."""
        return min(problem.head_dim, BOX_COLUMNS) if self.half_dq else problem.head_dim

    def registers_at_least(self, problem: Problem) -> int:
        """32-bit registers a consumer's thread needs: dK and dV, scores or dP, weights or dS, K that stays."""
        gradients, kept = (problem.head_dim + problem.head_dim_v) // 2, padded(problem.head_dim) // 4
        products = 2 if self.early_scores else 1
        return gradients + products * (self.tile_m // 2 + self.tile_m // 4) + kept * self.k_in_registers

    def division(self, problem: Problem) -> Divided | None:
        """How tiles of keys are divided among SMs; None: all are whole, as with lists, which the host does not know."""
        if problem.blocks is not None:
            return None
        return stream_k.division_of(problem, self.tile_m, self.tile_n, self.stream_k)

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The kernel of all gradients."""
        division = self.division(problem)
        parts, is_even = (1, False) if division is None else (division.shares, division.ranges > 0)
        more = {"products": 5, "begin": stream_k.PART_STEPS, "parts": parts, "is_even": is_even}
        return (self.walk("kv", mean_columns(problem, of_k=3, of_v=2), **more),)

    def listed(self) -> Mapping[str, int]:
        """Tiles of rows, and of keys."""
        queries, keys = TILE_LISTS
        return {queries: ROW_TILE, keys: self.tile_n}

    def areas(self, problem: Problem) -> dict[str, int]:
        """Sums of dq and, of divided tiles, of dk and dv."""
        division, columns = self.division(problem), problem.head_dim + problem.head_dim_v
        sums = {} if division is None else {"key_sums": division.sums_bytes(columns, self.tile_n)}
        bits = self._bits(problem)
        sums |= {} if bits is None else bits.areas
        return {**HopperBackwardConfig.areas(self, problem), "dq_sum": dq_sum_bytes(problem), **sums}

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, or of the problem with them."""
        if wrong := failed(limit_checks(self)):
            return wrong
        is_wide = problem.width >= WIDE_FROM
        registers, columns = self.registers_at_least(problem), self.dq_columns(problem)
        most = _REGISTERS_MAX if is_wide or self.early_scores else _REGISTERS_MAX_FEW
        needed = f"{registers} registers for gradients, scores, weights and K ({self})"
        columns_max = BOX_COLUMNS if is_wide or self.early_scores else WIDE_FROM - 1
        checks = (
            (registers <= most, needed, f"up to {most}"),
            (columns <= columns_max, f"{columns} columns of dq at a time ({self})", f"up to {columns_max}: half_dq"),
            packed_check(problem),
            block_check(problem, self, self.tile_m, self.tile_n if problem.packing is not None else WARPGROUP_ROWS),
            (
                self.ordered == flags.get("ordered", False),
                f"ordered={self.ordered}",
                "of wgmma_ordered alone, and always",
            ),
            (
                not self.ordered or (self.dq_by_tma and not self.stream_k),
                f"parts of tiles that add in order, or additions without TMA ({self})",
                "stream_k=0 and dq_by_tma=True",
            ),
        )
        blocks = max(key_tiles(problem, self.tile_n), query_tiles(problem, ROW_TILE))
        sizes = size_checks(self, arch, self.smem_bytes(problem), blocks)
        return (*self.why_not_boxes(problem), *failed((*checks, *sizes)))

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """Statistics, the bits of a block mask, all gradients, and dq from its sums."""
        problem, division = plan.problem, self.division(plan.problem)
        is_packed, is_divided = problem.packing is not None, division is not None
        lists = packed_tiles(problem, cuts=True) or (("multiattn::StreamK",) if is_divided else ())
        is_cut = is_packed and problem.blocks is not None
        name = f"{'_packed' * is_packed}{'_cut' * is_cut}{'_stream_k' * is_divided}"
        gradients, its = self._gradients(plan, division), self._bits(problem)
        bits = () if its is None else (its.launch(gradients.kernel, QUERIES_OF_KEYS, self.tile_m),)
        return (
            self.statistics(problem, ROW_TILE, name, *lists, behind=Division if is_divided else None),
            *bits,
            gradients,
            rows_launch("convert_sums", problem, adds_dq=True, wide=True),
        )

    def _bits(self, problem: Problem) -> MaskBits | None:
        return MaskBits.of(problem, QUERIES_OF_KEYS, self.tile_m)

    def _gradients(self, plan: Plan, division: Divided | None) -> PlannedLaunch:
        problem, is_divided = plan.problem, division is not None
        tiles = f"{self.tile_m}x{self.tile_n}_s{self.k_stages}_{self.q_stages}_{self.dout_stages}"
        kept = f"{'_kregisters' * self.k_in_registers}{'_halfdq' * self.half_dq}"
        kept += f"{'_tmadq' * self.dq_by_tma}{'_early' * self.early_scores}{'_ordered' * self.ordered}"
        kept += "_stream_k" * is_divided
        columns = self.dq_columns(problem)
        kept_fields = ("k_in_registers", "early_scores", "dq_by_tma")
        score = problem.score
        named = {
            "ordered": self.ordered,
            "clears_ahead": self.clears_ahead(problem),
            "keeps_sloped": score is not None and lower(score.program).slope is not ONE,
        }
        extra = {name: True for name, is_so in named.items() if is_so}
        config = aggregate_of(self, "k_stages", "q_stages", "dout_stages", *kept_fields, dq_columns=columns, **extra)
        kernel = wgmma_kernel(
            plan,
            "WgmmaBackwardTraits",
            config,
            entry="backward_wgmma",
            sizes=f"{tiles}{kept}",
            header="backward_wgmma.cuh",
            rows="multiattn::StreamK" if is_divided else None,
            exponents=True,
            lists=Division if is_divided else None,
            bits=self._bits(problem),
            params=WgmmaBackwardParams,
            threads=self.threads,
            smem_bytes=self.smem_bytes(problem),
            wgmma_columns=(self.tile_m, problem.head_dim, problem.head_dim_v, columns),
        )
        blocks = key_tiles(problem, self.tile_n) if division is None else division.ranges_from + division.ranges
        return PlannedLaunch(kernel=kernel, blocks=blocks, is_persistent=True)

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles, and how they are divided."""
        division = self.division(plan.problem)
        if division is None:
            numbers = self.sectioned_numbers(plan, ROW_TILE, None)
            bits = self._bits(plan.problem)
            numbers |= {} if bits is None else {"bit_columns": bits.columns}
            return {**numbers, "sections_kv": max(numbers["sections_kv"], self._heads_of_chains(plan))}
        numbers = {name: getattr(division, name) for name in ("shares", "ranges_from", "ranges", "range_steps")}
        sums = self.areas(plan.problem)["key_sums"]
        return {**self.sectioned_numbers(plan, ROW_TILE, None, division.shares), **numbers, "key_sums_bytes": sums}

    def _heads_of_chains(self, plan: Plan) -> int:
        """Heads of keys whose tiles run side by side at least, so that no SM waits for its turn.

        Tiles of a head begin `CHAIN_STEPS` apart, so that one head at a time begins fewer than SMs end.
        """
        if not self.ordered:
            return 1
        problem = plan.problem
        steps = steps_of_tiles(problem, self.tile_m, self.tile_n)
        heads = CHAIN_STEPS * most_multiprocessors(plan.arch) * len(steps) / max(sum(steps), 1)
        return min(math.ceil(heads), problem.batch * problem.heads_kv)

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[WgmmaBackwardConfig]:
        """All that can be kept in registers and buffered; as many columns of dQ as have room."""
        if not arch.is_gpu:
            return
        is_wide = problem.width >= WIDE_FROM
        plain = cls(tile_m=64, tile_n=128, half_dq=is_wide, stream_k=most_multiprocessors(arch))
        is_ordered = dict(variant.flags).get("ordered", False)
        plain = replace(plain, ordered=True, stream_k=0) if is_ordered else plain
        ways = (True,) if is_ordered else (False, True)
        choices = itertools.product((False, True), (False, True), ways, (1, 2), _BUFFERS)
        for early_scores, k_in_registers, by_tma, k_stages, (q_stages, dout_stages) in choices:
            stages: dict[str, Any] = {"k_stages": k_stages, "q_stages": q_stages, "dout_stages": dout_stages}
            kept = {"early_scores": early_scores, "k_in_registers": k_in_registers}
            yield replace(plain, **stages, **kept, dq_by_tma=by_tma)


_BUFFERS = ((2, 2), (3, 2), (3, 3), (4, 3))  # of Q and of dO
