"""The backward for Hopper and heads wider than 256: P and dS are stored, and gradients are plain products of them.

The kernels are in `backward_wgmma_wide_scores.cuh` and `backward_wgmma_wide_products.cuh`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from multiattn.cuda.backward_wgmma import HopperBackwardConfig, mean_columns
from multiattn.cuda.family import ELEMENT_BYTES, FP32_BYTES, NO_FLAGS, padded
from multiattn.cuda.naming import aggregate, features_of, traits_type
from multiattn.cuda.source import Instance, PlannedLaunch, StoredProducts, WgmmaBackwardParams
from multiattn.cuda.wgmma import BARRIER_BYTES, BOX_COLUMNS, WARPGROUP_ROWS, WARPGROUP_THREADS, wgmma_kernel
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.limits import between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.schedule import STORED_BYTES, Turn, stored_turns
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem

_WARPGROUPS = 2  # that compute
_TILE_ROWS = _WARPGROUPS * WARPGROUP_ROWS
_PANEL_BYTES = WARPGROUP_ROWS * BOX_COLUMNS * ELEMENT_BYTES
_COLUMNS_MAX = 256
_IMAGE_BUFFERS = 2  # of a warpgroup, for P and dS on their way out
_STORED = 2
"""Tensors that are stored: P and dS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaWideConfig(HopperBackwardConfig):
    """Launch parameters of Hopper's backward with P and dS stored: a kernel of scores, and one of products.

    They take turns: each has as many heads of keys at a time as `STORED_BYTES` have P and dS of. Where one head of keys
    has more, each turn has some of its queries, and sums of dk and dv stay in fp32.
    """

    tile_m: int = limited(one_of(WARPGROUP_ROWS))
    """Queries of a warpgroup, and of a tile of statistics."""
    tile_n: int = limited(one_of(128, 256))
    """Keys of a tile of scores, which has 128 queries."""
    score_stages: int = limited(between(2, 8), default=3)
    """Pieces of 64 columns, of queries and of keys, in the kernel of scores.

    H200 2026-11-30, D=512 N=4096, 3 and 4: full 1188 and 1264 us, causal 761 and 811. Less than half of the time is
    that of products: blocks wait for pieces from L2, and turn scores into weights beside no products.
    """
    stages: int = limited(between(2, 8), default=4)
    """Steps of 64 rows in the kernel of products."""

    @property
    def threads(self) -> int:
        """Threads of a block of either kernel."""
        return WARPGROUP_THREADS * (_WARPGROUPS + 1)

    def box_rows(self, problem: Problem) -> Mapping[str, int]:
        """As many of each."""
        return dict.fromkeys(("q", "dout", "k", "v"), WARPGROUP_ROWS)

    def score_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block of the kernel of scores, which asserts it when compiled."""
        piece = (_TILE_ROWS + self.tile_n) * BOX_COLUMNS * ELEMENT_BYTES
        return self.score_stages * piece + _WARPGROUPS * _IMAGE_BUFFERS * _PANEL_BYTES + BARRIER_BYTES

    def product_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block of the kernel of products, which asserts it when compiled."""
        columns = max(columns for _, columns in map(parts_of, (problem.head_dim, problem.head_dim_v)))
        return self.stages * (_WARPGROUPS + columns // BOX_COLUMNS) * _PANEL_BYTES + BARRIER_BYTES

    def tile_bytes(self, problem: Problem) -> int:
        """Bytes of P and dS of 128 queries of all heads that share keys."""
        return _STORED * _TILE_ROWS * padded(problem.seq_kv, self.tile_n) * ELEMENT_BYTES * problem.group

    def turns(self, problem: Problem) -> list[Turn]:
        """The turns of a launch."""
        return stored_turns(problem, _TILE_ROWS, self.tile_bytes(problem))

    def areas(self, problem: Problem) -> dict[str, int]:
        """Statistics, the counter, P and dS of a turn, and sums of dk and dv where a head of keys has several."""
        turns = self.turns(problem)
        most = max((it.heads * it.tiles for it in turns), default=0)
        stored = dict.fromkeys(("weights", "ds"), max(most * self.tile_bytes(problem) // _STORED, 1))
        sums = {"key_sums": self._sums_bytes(problem)} if any(it.turns > 1 for it in turns) else {}
        return {**HopperBackwardConfig.areas(self, problem), **stored, **sums}

    def _sums_bytes(self, problem: Problem) -> int:
        """Sums of dk and dv of one head of keys: a block's part is as large as the largest."""
        (parts_k, columns_k), (parts_v, columns_v) = map(parts_of, (problem.head_dim, problem.head_dim_v))
        rows = padded(problem.seq_kv, _TILE_ROWS)
        return rows * (parts_k + parts_v) * max(columns_k, columns_v) * FP32_BYTES

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The kernel of products, by its shares of keys, and that of scores."""
        keys = Walk(
            owns="kv",
            rows=_TILE_ROWS,
            step=WARPGROUP_ROWS,
            pieces=(mean_columns(problem, of_k=2, of_v=1),),
            products=3,
        )
        scores = Walk(
            owns="q", rows=_TILE_ROWS, step=self.tile_n, pieces=(mean_columns(problem, of_k=1, of_v=1),), products=2
        )
        return keys, scores

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, or of the problem with them."""
        if wrong := failed(limit_checks(self)):
            return wrong
        memory = max(self.score_bytes(problem), self.product_bytes(problem))
        blocks = max((max(self._grids(problem, it)) for it in self.turns(problem)), default=0)
        needed = f"{self.tile_bytes(problem) >> 20} MiB for P and dS of {_TILE_ROWS} queries of a head of keys"
        fits = (self.tile_bytes(problem) <= STORED_BYTES, needed, f"up to {STORED_BYTES >> 20} MiB")
        return (*self.why_not_boxes(problem), *failed((fits, *size_checks(self, arch, memory, blocks))))

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """Statistics, then for some heads and queries at a time scores, and products."""
        problem = plan.problem
        scores, products = self._scores_kernel(plan), self._products_kernel(plan)
        launches = [self.statistics(problem, _TILE_ROWS, "_wide", has_dq_sum=False)]
        for turn in self.turns(problem):
            tiles, shares = self._grids(problem, turn)
            numbers = turn._asdict()
            launches.append(PlannedLaunch(kernel=scores, blocks=tiles, is_persistent=True, numbers=numbers))
            launches.append(PlannedLaunch(kernel=products, blocks=shares, numbers=numbers))
        return tuple(launches)

    def _grids(self, problem: Problem, turn: Turn) -> tuple[int, int]:
        """Tiles of scores of a turn, and shares of gradients."""
        parts_k, parts_v = (parts_of(it)[0] for it in (problem.head_dim, problem.head_dim_v))
        of_queries, of_keys = turn.tiles * problem.group, -(-problem.seq_kv // _TILE_ROWS)
        tiles = of_queries * -(-problem.seq_kv // self.tile_n)
        return turn.heads * tiles, turn.heads * (of_keys * (parts_k + parts_v) + of_queries * parts_k)

    def _scores_kernel(self, plan: Plan) -> Instance:
        return wgmma_kernel(
            plan,
            "WideScoresTraits",
            aggregate("WideScoresConfig", tile_n=self.tile_n, stages=self.score_stages),
            entry="backward_wide_scores",
            sizes=f"n{self.tile_n}_s{self.score_stages}",
            rows="multiattn::StoredBoth",
            header="backward_wgmma_wide_scores.cuh",
            params=WgmmaBackwardParams,
            lists=StoredProducts,
            threads=self.threads,
            smem_bytes=self.score_bytes(plan.problem),
            wgmma_columns=(self.tile_n,),
        )

    def _products_kernel(self, plan: Plan) -> Instance:
        problem = plan.problem
        config = aggregate("WideProductsConfig", tile_n=self.tile_n, stages=self.stages)
        constants = (features_of(problem, "backward"), config, "multiattn::NoScore", "multiattn::StoredBoth")
        return Instance(
            name=f"backward_wide_products_{problem.dtype}_{problem.widths_in_names}_{problem.band.kind}"
            f"_n{self.tile_n}_s{self.stages}",
            header="backward_wgmma_wide_products.cuh",
            entry="backward_wide_products",
            traits=traits_type("WideProductsTraits", problem, *constants),
            params=WgmmaBackwardParams,
            lists=StoredProducts,
            threads=self.threads,
            smem_bytes=self.product_bytes(problem),
            wgmma_columns=tuple(dict.fromkeys(parts_of(it)[1] for it in (problem.head_dim, problem.head_dim_v))),
            overlaps=True,
            arch_features=True,
        )

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles of all kernels."""
        return self.sectioned_numbers(plan, _TILE_ROWS, _TILE_ROWS)

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[WgmmaWideConfig]:
        """Tiles of scores, with as many buffers as fit, and steps of products."""
        for (tile_n, score_stages), stages in itertools.product(((256, 4), (256, 3), (128, 6)), (4, 3)):
            yield cls(tile_m=WARPGROUP_ROWS, tile_n=tile_n, score_stages=score_stages, stages=stages)


def parts_of(head_dim: int) -> tuple[int, int]:
    """Blocks among which columns of a gradient are divided, and the columns of each: whole panels."""
    parts = -(-head_dim // _COLUMNS_MAX)
    return parts, padded(-(-head_dim // parts), BOX_COLUMNS)
