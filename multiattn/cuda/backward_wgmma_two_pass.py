"""The backward for Hopper in two passes, a kernel for dk and dv and one for dq; `backward_wgmma_two_pass_*.cuh`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from multiattn.cuda.backward_wgmma import STATISTICS, HopperBackwardConfig, mean_columns
from multiattn.cuda.family import ELEMENT_BYTES, FP32_BYTES, NO_FLAGS, padded
from multiattn.cuda.naming import aggregate, aggregate_of, packed_tiles
from multiattn.cuda.source import Instance, PlannedLaunch, WgmmaBackwardParams
from multiattn.cuda.wgmma import (
    BARRIER_BYTES,
    DEPTH,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    block_check,
    packed_check,
    wgmma_kernel,
    width_bytes,
)
from multiattn.packed import TILE_LISTS
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.config import Config
from multiattn.plan.limits import Check, between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.schedule import key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem

WARPGROUPS = 2
"""Warpgroups of either kernel that compute: of a gradient each, or of 64 queries each."""
QUERY_TILE = WARPGROUPS * WARPGROUP_ROWS
"""Queries of a block of the kernel of dq, and of the kernel of statistics."""
_WEIGHT_STAGES = 2
REGISTERS_MAX = 208
"""Registers for what `registers_at_least` counts: a thread has 232 or 240, and statistics and addresses come on top."""
KEPT_TO = 192
"""The last width at which K and V have room in registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoPassQueriesConfig(Config):
    """Launch parameters of the kernel of dq."""

    tile_m: int = limited(one_of(QUERY_TILE), default=QUERY_TILE)
    tile_n: int = limited(one_of(WARPGROUP_ROWS), default=WARPGROUP_ROWS)
    k_stages: int = limited(between(2, 8), default=2)
    """Buffers of K."""
    v_stages: int = limited(between(1, 8), default=1)
    """Buffers of V."""
    dp_late: bool = False
    """dP is made behind the weights of a step, not beside them.

    It leaves registers to an expression that reads an element for each key.
    """

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which the kernel asserts when compiled."""
        rows_k, rows_v = (self.tile_m + stages * self.tile_n for stages in (self.k_stages, self.v_stages))
        rows = rows_k * width_bytes(problem.head_dim) + rows_v * width_bytes(problem.head_dim_v)
        return rows + BARRIER_BYTES

    def candidates(self, problem: Problem) -> Iterator[TwoPassQueriesConfig]:
        """Other buffers that a sweep tries, and where dP is made."""
        ways = (False, True) if problem.reads_keys else (False,)
        for dp_late, (k_stages, v_stages) in itertools.product(ways, _QUERY_BUFFERS):
            yield replace(self, k_stages=k_stages, v_stages=v_stages, dp_late=dp_late)


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperKeysConfig(HopperBackwardConfig):
    """Launch parameters of Hopper's kernel of dk and dv: a warpgroup for each gradient, and one that loads."""

    tile_m: int = limited(one_of(WARPGROUP_ROWS))
    tile_n: int = limited(one_of(WARPGROUP_ROWS))
    q_stages: int = limited(between(2, 8), default=2)
    """Buffers of Q, with lse and delta of their queries."""
    dout_stages: int = limited(between(2, 8), default=2)
    """Buffers of dO."""
    kv_in_registers: bool = False
    """K and V are read into registers once a tile, for scores and dP, or by wgmma from shared memory in each step."""
    kept_steps: int = limited(between(0, 8), default=0)
    """Steps of scores and dP, 16 columns each, whose K and V are in registers all the same."""
    dq: Any = None
    """The config of the kernel of dq."""

    @property
    def threads(self) -> int:
        """Threads of a block of this kernel, and of that of dq."""
        return WARPGROUP_THREADS * (WARPGROUPS + 1)

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block of the kernel of dk and dv, which asserts it when compiled."""
        rows_k, rows_v = (self.tile_n + stages * self.tile_m for stages in (self.q_stages, self.dout_stages))
        rows = rows_k * width_bytes(problem.head_dim) + rows_v * width_bytes(problem.head_dim_v)
        weights = _WEIGHT_STAGES * self.tile_n * self.tile_m * ELEMENT_BYTES
        statistics = self.q_stages * STATISTICS * self.tile_m * FP32_BYTES
        return rows + weights + statistics + BARRIER_BYTES

    def registers_at_least(self, problem: Problem) -> int:
        """32-bit registers a thread needs: a gradient, scores or dP, weights or dS, K or V.

        The warpgroup of dv has K, that of dk has V. In the kernel of dq there are scores and dP, and neither K nor V.
        """
        scores, operand = self.tile_m // 2, self.tile_m // 4
        widths, most = (problem.head_dim, problem.head_dim_v), self.steps_in_registers(problem)
        kept = (DEPTH // 4 * min(most, padded(depth, DEPTH) // DEPTH) for depth in widths)
        pairs = zip(reversed(widths), kept, strict=True)
        return max(width // 2 + max(of_keys, scores) for width, of_keys in pairs) + scores + operand

    def steps_in_registers(self, problem: Problem) -> int:
        """Steps of scores and dP, `DEPTH` columns each, whose K and V are in registers where they have as many."""
        return _steps_of(problem) if self.kv_in_registers else self.kept_steps

    def key_checks(self, problem: Problem) -> tuple[Check, ...]:
        """Checks of registers, and of boxes of a packed batch."""
        registers, width = self.registers_at_least(problem), problem.width
        needed = f"{registers} registers for a gradient, scores, weights, K or V ({self})"
        has_room = not self.kv_in_registers or width <= KEPT_TO
        steps = _steps_of(problem)
        return (
            (registers <= REGISTERS_MAX, needed, f"up to {REGISTERS_MAX}"),
            (self.kept_steps <= steps, f"kept_steps={self.kept_steps} of {problem.widths}", f"up to {steps}"),
            (has_room, f"kv_in_registers of {problem.widths}", f"D up to {KEPT_TO}"),
            packed_check(problem),
            block_check(problem, self, QUERY_TILE, self.tile_n),
        )

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, or of the problem with them."""
        if wrong := failed((*limit_checks(self), *limit_checks(self.dq))):
            return wrong
        memory = max(self.smem_bytes(problem), self.dq.smem_bytes(problem))
        blocks = max(key_tiles(problem, self.tile_n), query_tiles(problem, QUERY_TILE))
        sizes = size_checks(self, arch, memory, blocks)
        return (*self.why_not_boxes(problem), *failed((*self.key_checks(problem), *sizes)))

    def keys_kernel(self, plan: Plan, name: str = "", **more: Any) -> Instance:
        """The kernel, with more of what `pass_kernel` takes."""
        steps = self.steps_in_registers(plan.problem)
        stages = {"q_stages": self.q_stages, "dout_stages": self.dout_stages}
        config = aggregate("TwoPassKeysConfig", **stages, kept_steps=steps)
        sizes = f"s{self.q_stages}_{self.dout_stages}{f'_kept{steps}' if steps else ''}{name}"
        return self.pass_kernel(plan, "keys", config, sizes, self.smem_bytes(plan.problem), **more)

    def pass_kernel(self, plan: Plan, owns: str, config: str, sizes: str, smem: int, **more: Any) -> Instance:
        """The kernel whose blocks own keys, or one whose blocks own queries."""
        return wgmma_kernel(
            plan,
            f"TwoPass{owns.title()}Traits",
            config,
            entry=f"backward_wgmma_{owns}",
            sizes=sizes,
            header=f"backward_wgmma_two_pass_{owns}.cuh",
            params=WgmmaBackwardParams,
            threads=self.threads,
            smem_bytes=smem,
            # Of scores and dP, and of gradients; tile_n is tile_m.
            wgmma_columns=(self.tile_m, plan.problem.head_dim, plan.problem.head_dim_v),
            **more,
        )

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles of all kernels."""
        return self.sectioned_numbers(plan, QUERY_TILE, QUERY_TILE)

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[HopperKeysConfig]:
        """Each kernel is swept with the other one held: their times add up."""
        if not arch.is_gpu:
            return
        plain = cls(tile_m=64, tile_n=64)
        for (q_stages, dout_stages), kept in itertools.product(_KEY_BUFFERS, (False, True)):
            yield replace(plain, q_stages=q_stages, dout_stages=dout_stages, kv_in_registers=kept)
        yield from (replace(plain, dq=it) for it in plain.dq.candidates(problem))


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaTwoPassConfig(HopperKeysConfig):
    """Launch parameters of Hopper's backward in two kernels: of dk and dv, and of dq.

    Each has two warpgroups that compute and one that loads.
    """

    dq: TwoPassQueriesConfig = field(default_factory=TwoPassQueriesConfig)

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The kernel of dq, and that of dk and dv."""
        of_dq, of_keys = mean_columns(problem, of_k=2, of_v=1), mean_columns(problem, of_k=2, of_v=2)
        return self.dq.walk("q", of_dq, products=3, begin=5), self.walk("kv", of_keys, products=4, begin=5)

    def listed(self) -> Mapping[str, int]:
        """Tiles of the kernel of dq, and of that of dk and dv."""
        queries, keys = TILE_LISTS
        return {queries: self.dq.tile_m, keys: self.tile_n}

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """Statistics, dq, then dk and dv."""
        problem, packed = plan.problem, plan.problem.packing is not None
        lists, is_cut = packed_tiles(problem, cuts=True), packed and problem.blocks is not None
        name = f"_two_pass{'_packed' * packed}{'_cut' * is_cut}"
        dq = self.dq
        config = aggregate_of(dq, "k_stages", "v_stages", "dp_late")
        sizes = f"s{dq.k_stages}_{dq.v_stages}{'_dplate' * dq.dp_late}"
        queries = self.pass_kernel(plan, "queries", config, sizes, dq.smem_bytes(problem))
        of_queries, of_keys = query_tiles(problem, dq.tile_m), key_tiles(problem, self.tile_n)
        return (
            self.statistics(problem, QUERY_TILE, name, *lists, has_dq_sum=False),
            PlannedLaunch(kernel=queries, blocks=of_queries, is_persistent=True),
            PlannedLaunch(kernel=self.keys_kernel(plan), blocks=of_keys, is_persistent=True),
        )


def _steps_of(problem: Problem) -> int:
    """The more of the steps of scores and those of dP."""
    return padded(problem.width, DEPTH) // DEPTH


_KEY_BUFFERS = ((2, 2), (3, 2), (3, 3), (4, 3))  # of Q and of dO, in the kernel of dk and dv
_QUERY_BUFFERS = ((2, 1), (2, 2), (3, 1), (3, 2))  # of K and of V, in that of dq
