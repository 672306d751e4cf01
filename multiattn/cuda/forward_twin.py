"""The forward for Hopper and wide heads: twin warpgroups have half of v's columns each; `kernels/forward_twin.cuh`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from multiattn.cuda.family import NO_FLAGS, tiles_of
from multiattn.cuda.forward_mma import forward_numbers
from multiattn.cuda.naming import aggregate
from multiattn.cuda.source import Instance, PlannedLaunch, WgmmaParams
from multiattn.cuda.wgmma import (
    BARRIER_BYTES,
    BOX_COLUMNS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    WgmmaFamilyConfig,
    packed_check,
    product_columns,
    wgmma_kernel,
)
from multiattn.packed import TILE_LISTS
from multiattn.plan.arch import ARCHS, Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.limits import Check, between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem

TILE_N = 64
HEAD_DIM_MAX, HEAD_DIM_V_MAX = 576, 512
_PANEL_BYTES = TILE_N * BOX_COLUMNS * 2
_HANDOVER_BYTES = 5 * WARPGROUP_THREADS * 16  # weights of a tile, maxima and sums
_SLOTS_MAX = 24  # whose barriers there is room for
_PRODUCT_MAX = 256  # columns of a wgmma

T = TypeVar("T", bound="TwinFamilyConfig")


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinFamilyConfig(WgmmaFamilyConfig):
    """Launch parameters of kernels whose two consumer warpgroups have the same 64 rows, and half of v's columns each.

    Blocks of clusters that share tiles of K and V were no faster: H200 2026-11-30, D=512 full N=4096 609 for 645
    TFLOPS, causal N=16384 627 for 600, 16 heads of one causal N=8192 576 for 657.
    """

    tile_m: int = limited(one_of(WARPGROUP_ROWS))
    tile_n: int = limited(one_of(TILE_N))
    piece: int = limited(one_of(0, 64, 128, 192), default=0)
    """Columns of K or V that come at a time. A rule leaves it open, with 0, and `slots` too."""
    slots: int = limited(between(0, _SLOTS_MAX), default=0)
    """Pieces that there is room for."""
    before: int = limited(between(0, _SLOTS_MAX), default=0)
    """Pieces whose part of a block's scores is begun before the other twin's weights are multiplied by their V.

    Where v is in k the next keys wait for those products. H200 2026-11-30, 576/512, B=66 128 heads 8k: 5 pieces of 9
    276 us, 6 272, 7 278, 9 309. Elsewhere all come first: D=512 full N=4096 4 of 4 645 TFLOPS, 3 566, 2 497.
    """

    @property
    def warpgroups(self) -> int:
        """The twins."""
        return 2

    def filled(self: T, problem: Problem) -> T:
        """The config with pieces and as many slots as fit: where v is in k those of two tiles, which lie whole then."""
        piece = self.piece or _piece(problem)
        room = ARCHS["sm90"].smem_per_block - _beside_ring(problem)
        slots = min(room // (piece // BOX_COLUMNS * _PANEL_BYTES), _SLOTS_MAX)
        slots = min(slots, 2 * -(-problem.head_dim // piece)) if problem.v_in_k else slots // 2 * 2
        pieces_k, pieces_v = -(-problem.head_dim // piece), -(-problem.head_dim_v // piece)
        before = min(pieces_k - pieces_v // 2 + 1, pieces_k) if problem.v_in_k else pieces_k
        return replace(self, piece=piece, slots=self.slots or slots, before=min(self.before, pieces_k) or before)

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which its kernel asserts: Q, pieces of K and V, a handover, barriers."""
        return _beside_ring(problem) + self.slots * (self.piece // BOX_COLUMNS) * _PANEL_BYTES

    def pieces(self, head_dim: int) -> int:
        """Pieces of a tile of so many columns."""
        return -(-head_dim // self.piece)

    def product(self, problem: Problem) -> int:
        """Columns of the products with V: a piece's, or those of two that lie side by side."""
        return self.piece * (2 if problem.v_in_k and self.pieces(problem.head_dim_v) % 4 == 0 else 1)

    def checks(self, problem: Problem) -> tuple[Check, ...]:
        """Checks that a head is no wider than the registers, and that slots hold what is in use at a time."""
        pieces_k, pieces_v = self.pieces(problem.head_dim), self.pieces(problem.head_dim_v)
        least = 2 * (pieces_k if problem.v_in_k else -(-pieces_v // 2) + pieces_k - self.before + 1)
        columns = -(-pieces_v // 2) * self.piece
        return (
            (columns <= _PRODUCT_MAX, f"{columns} columns of v a warpgroup ({self})", f"up to {_PRODUCT_MAX}"),
            (not problem.v_in_k or self.piece == BOX_COLUMNS, f"piece={self.piece} with v in k", f"{BOX_COLUMNS}"),
            (0 < self.before <= pieces_k, f"before={self.before} of {pieces_k} pieces ({self})", f"1 to {pieces_k}"),
            (
                self.slots == least or (self.slots > least and not problem.v_in_k),
                f"{self.slots} slots for {problem.widths} ({self})",
                f"{least}" if problem.v_in_k else f"{least} or more",
            ),
        )

    def twin_kernel(self, plan: Plan, *, tiles: str, **more: Any) -> Instance:
        """The kernel; `tiles` is a part of its name."""
        problem = plan.problem
        config = aggregate("TwinConfig", piece=self.piece, slots=self.slots, before=self.before)
        return wgmma_kernel(
            plan,
            "TwinTraits",
            config,
            entry="forward_twin",
            sizes=f"{self.tile_m}x{self.tile_n}_p{self.piece}x{self.slots}_b{self.before}{tiles}",
            header="forward_twin.cuh",
            threads=self.threads,
            smem_bytes=self.smem_bytes(problem),
            wgmma_columns=(self.tile_n, self.product(problem)),
            reads_v_in_k=True,
            **more,
        )


def _piece(problem: Problem) -> int:
    """Columns of a piece, so that both twins have as many pieces of V. Where v is in k two tiles fill the ring best in
    the smallest."""
    if problem.v_in_k:
        return 64
    return next((it for it in (128, 192, 64) if -(-problem.head_dim_v // it) % 2 == 0), 128)


def _beside_ring(problem: Problem) -> int:
    """Shared memory of all but the ring."""
    return -(-problem.head_dim // BOX_COLUMNS) * _PANEL_BYTES + _HANDOVER_BYTES + BARRIER_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinConfig(TwinFamilyConfig):
    """Launch parameters of the forward: a block for each 64 queries of a head."""

    def box_rows(self, problem: Problem) -> Mapping[str, int]:
        """Rows of a tile."""
        return {"q": self.tile_m, "k": self.tile_n, **({} if problem.v_in_k else {"v": self.tile_n})}

    def settled(self, problem: Problem, arch: Arch) -> TwinConfig:
        """The config with pieces and slots."""
        return self.filled(problem)

    def query_tiles(self, problem: Problem) -> int:
        """Tiles of queries of one head; of a packed batch the most."""
        return tiles_of(problem, problem.seq_q, self.tile_m)

    def grid_blocks(self, problem: Problem) -> int:
        """Blocks of a launch."""
        return self.query_tiles(problem) * problem.heads_q * problem.batch

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The one kernel."""
        return (self.walk("q", product_columns(problem), begin=2),)

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, or of the problem with them."""
        is_settled = self.piece > 0, f"piece={self.piece}", "64, 128, 192"
        if wrong := failed((*limit_checks(self), is_settled)):
            return wrong
        checks = (
            *self.checks(problem),
            packed_check(problem),
            *size_checks(self, arch, self.smem_bytes(problem), self.grid_blocks(problem)),
        )
        return (*self.why_not_boxes(problem), *failed(checks))

    def listed(self) -> Mapping[str, int]:
        """A forward owns tiles of queries."""
        return {TILE_LISTS[0]: self.tile_m}

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """One kernel."""
        kernel = self.twin_kernel(plan, tiles="", params=WgmmaParams)
        return (PlannedLaunch(kernel=kernel, blocks=self.grid_blocks(plan.problem)),)

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles and heads, and their order."""
        return forward_numbers(plan.problem, self.query_tiles(plan.problem))

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[TwinConfig]:
        """Ways to cut tiles."""
        for piece in (64,) if problem.v_in_k else (128, 192, 64):
            yield cls(tile_m=WARPGROUP_ROWS, tile_n=TILE_N, piece=piece)
