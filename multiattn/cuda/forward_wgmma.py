"""The forward for Hopper: warpgroups multiply by wgmma, one loads by TMA; `kernels/forward_wgmma.cuh` is the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.block_mask import KEYS_OF_QUERIES
from multiattn.cuda.family import NO_FLAGS, padded, tiles_of
from multiattn.cuda.forward_mma import forward_numbers
from multiattn.cuda.mask_bits import MaskBits
from multiattn.cuda.naming import aggregate_of, enumerator
from multiattn.cuda.source import PlannedLaunch, WgmmaParams
from multiattn.cuda.wgmma import (
    BARRIER_BYTES,
    DEPTH,
    TILES_OF_KEYS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    WgmmaFamilyConfig,
    block_check,
    forward_registers,
    packed_check,
    product_columns,
    row_bytes,
    wgmma_kernel,
    width_bytes,
)
from multiattn.packed import TILE_LISTS
from multiattn.plan.abi import WORKSPACE
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.limits import Check, between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.schedule import COUNTER_BYTES, SCHEDULERS
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem

_ROOM_WITH_Q = {(2, False): 196, (2, True): 192, (3, False): 128, (3, True): 128}
"""Registers up to which Q may fill them, by warpgroups and whether the mask is a band: ptxas then spills nothing."""
REGISTERS_MAX: Mapping[int, int] = {1: 208, 2: 208, 3: 144}
"""By consumer warpgroups, for what `registers_at_least` counts: setmaxnreg gives a thread 232, or 160 with three."""
_PAIR_BYTES, _TILE_BYTES = 16, (16, 32)
"""Shared memory of a buffer's two barriers, and of a tile of queries, or of one of a packed batch."""
_PLAIN_STORE_REGISTERS = 20
"""More that three warpgroups want under a mask to store from registers: with 128 in use ptxas 13 spills in the loops.

At D=128 it does with 112, which sweeps find out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaConfig(WgmmaFamilyConfig):
    """Launch parameters of the Hopper kernel: warpgroups of 64 queries each, and one that loads by TMA."""

    tile_m: int = limited(one_of(64, 128, 192))
    """Queries of a tile: 64 for each warpgroup. A lone warpgroup has tiles of a block mask, which lie in one block."""
    tile_n: int = limited(TILES_OF_KEYS)
    cluster: int = limited(one_of(1, 2), default=1)
    """Blocks on neighbouring SMs that load each tile of K and V together, a part each, for all of them."""
    stages: int = limited(between(2, 16), default=4)
    """Buffers that tiles of K and of V take turns in, with room for either; of K alone if V has some of its own."""
    v_stages: int = limited(between(0, 14), default=0)
    """Buffers of V alone, as large as its tiles; 0: it takes turns with K."""
    scheduler: str = limited(one_of(*SCHEDULERS), default="dynamic")
    """See `multiattn.plan.schedule.SCHEDULERS`."""
    q_slots: int = limited(one_of(1, 2, 3), default=1)
    """Buffers of Q; with two the next tile is begun before the output of one is stored, with three Q of two is loaded
    ahead."""
    q_in_registers: bool = False
    """As many of Q's fragments as there is room for are read into registers once a tile.

    The others, or all, are read by wgmma from shared memory for every block of keys.
    """
    pingpong: bool = False
    """Warpgroups take turns: one has the tensor cores while another has the softmax."""
    lazy_max: bool = False
    """Weights are made relative to the maxima of earlier blocks, and the output is rescaled only where one has outgrown
    them."""
    tma_store: bool = True
    """The output leaves through shared memory and TMA, or from registers."""
    teams: int = limited(between(1, 3), default=1)
    """Lone warpgroups of a block that take tiles of their own, each by a list of its own."""

    @property
    def is_persistent(self) -> bool:
        """True where a block takes one tile after another."""
        return self.scheduler != "one_tile"

    @property
    def threads(self) -> int:
        """Threads of a block: its teams, and the producer's warpgroup."""
        return WARPGROUP_THREADS * (self.teams * self.warpgroups + 1)

    def box_rows(self, problem: Problem) -> Mapping[str, int]:
        """Rows of a tile; in a packed batch q has boxes of a warpgroup's rows."""
        q, kv = self.tile_m if problem.packing is None else WARPGROUP_ROWS, self.tile_n // self.cluster
        return {"q": q, "k": kv, "v": kv, **({"out": WARPGROUP_ROWS} if self.tma_store else {})}

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which its kernel asserts: slots of Q, stages for K and V, barriers."""
        either, k, v = row_bytes(problem), width_bytes(problem.head_dim), width_bytes(problem.head_dim_v)
        q = self.tile_m * (either if self.tma_store else k)  # outputs leave through its slot
        keys = self.stages * k + self.v_stages * v if self.v_stages else self.stages * either
        barriers = BARRIER_BYTES if self.teams == 1 else 2 * BARRIER_BYTES  # each team begins where a swizzle does
        return self.teams * (self.q_slots * q + self.tile_n * keys + barriers)

    def query_tiles(self, problem: Problem) -> int:
        """Tiles of queries of one head, with those that only make clusters whole; of a packed batch the most."""
        count = tiles_of(problem, problem.seq_q, self.tile_m)
        return count if problem.packing is not None else padded(count, self.cluster)

    def grid_blocks(self, problem: Problem) -> int:
        """Blocks of a launch that has one for each tile of queries, head and batch entry, or for as many as teams."""
        return -(-self.query_tiles(problem) * problem.heads_q * problem.batch // self.teams)

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The one kernel."""
        return (self.walk("q", product_columns(problem), begin=2),)

    def registers_at_least(self, problem: Problem) -> int:
        """32-bit registers a consumer's thread needs for output, scores, weights and kept Q; the rest comes on top."""
        is_crowded = self.warpgroups == 3 and problem.is_banded and not self.tma_store
        store = _PLAIN_STORE_REGISTERS if is_crowded else 0
        return forward_registers(problem, self.tile_n) + 4 * self.kept_steps(problem) + store

    def kept_steps(self, problem: Problem) -> int:
        """How many of Q's parts of 16 columns, from the first on, stay in registers."""
        if not self.q_in_registers:
            return 0
        room = self._room_with_q(problem) - forward_registers(problem, self.tile_n)
        return min(max(room // 4, 0), padded(problem.head_dim) // DEPTH)

    def _room_with_q(self, problem: Problem) -> int:
        return _ROOM_WITH_Q[max(self.teams * self.warpgroups, 2), problem.is_banded]

    def settled(self, problem: Problem, arch: Arch) -> WgmmaConfig:
        """The config with tiles of keys that lie in one block of a block mask, and as many keys in buffers."""
        if problem.blocks is None or (tile_n := math.gcd(self.tile_n, problem.blocks.keys)) == self.tile_n:
            return self
        most = min(16, self._stages_with_room(problem))
        return replace(self, tile_n=tile_n, stages=min(self.stages * self.tile_n // tile_n, most))

    def _stages_with_room(self, problem: Problem) -> int:
        """Buffers of K that have room for two barriers each, and with lists 8 bytes, beside all else."""
        room = BARRIER_BYTES - self.q_slots * (_TILE_BYTES[problem.packing is not None] + _PAIR_BYTES)
        return (room - self.v_stages * _PAIR_BYTES) // (_PAIR_BYTES + 8 * (problem.blocks is not None))

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of fields alone, or of the problem with them."""
        together = (
            self.cluster == 1 or self.scheduler != "dynamic",
            f"scheduler=dynamic with cluster={self.cluster}",
            "one_tile, static: blocks of a cluster take their tiles together",
        )
        buffers = self.stages + self.v_stages
        most = min(16, self._stages_with_room(problem) + self.v_stages)
        enough = 3 <= buffers <= most, f"{buffers} buffers of K and V ({self})", f"3 to {most}"
        teams = self.teams == 1 or self.warpgroups == 1, f"teams={self.teams} ({self})", "1, or tile_m=64"
        if wrong := failed((*limit_checks(self), together, enough, teams)):
            return wrong
        registers, most = self.registers_at_least(problem), REGISTERS_MAX[self.teams * self.warpgroups]
        beside, room = forward_registers(problem, self.tile_n), self._room_with_q(problem)
        needed = f"{registers} registers for output, scores, weights, Q and stores ({self})"
        kept, got = self.kept_steps(problem), f"q_in_registers with {beside} registers for all else ({self})"
        checks = (
            (registers <= most, needed, f"up to {most} with {self.warpgroups} warpgroups"),
            (not self.q_in_registers or kept > 0, got, f"up to {room - 4}"),
            (not self.lazy_max or not problem.has_score, "lazy_max with an expression for scores", "exact maxima"),
            (problem.packing is None or self.cluster == 1, f"a packed batch ({self})", "cluster=1"),
            block_check(problem, self, self.tile_m, self.tile_n),
            *self._list_checks(problem),
            packed_check(problem),
        )
        sizes = size_checks(self, arch, self.smem_bytes(problem), self.grid_blocks(problem))
        return (*self.why_not_boxes(problem), *failed((*checks, *sizes)))

    def _list_checks(self, problem: Problem) -> tuple[Check, ...]:
        """A lone warpgroup is for block masks alone, and a cluster for calls without one."""
        alone, has_lists = self.warpgroups == 1, problem.blocks is not None
        return (
            (not alone or not self.pingpong, "pingpong with one warpgroup", "two or three"),
            (not alone or has_lists, f"tile_m={self.tile_m} without a block mask", "128, 192"),
            (self.cluster == 1 or not has_lists, f"cluster={self.cluster} with a block mask", "1"),
        )

    def areas(self, problem: Problem) -> dict[str, int]:
        """The tile counter of a dynamic scheduler, one for each stream; the bits of a block mask."""
        bits = self._bits(problem)
        counter = {WORKSPACE: COUNTER_BYTES} if self.scheduler == "dynamic" else {}
        return {**counter, **({} if bits is None else bits.areas)}

    def _bits(self, problem: Problem) -> MaskBits | None:
        return MaskBits.of(problem, KEYS_OF_QUERIES, self.tile_n)

    def listed(self) -> Mapping[str, int]:
        """A forward owns tiles of queries."""
        return {TILE_LISTS[0]: self.tile_m}

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """One kernel, behind that of a block mask's bits."""
        problem, bits = plan.problem, self._bits(plan.problem)
        names = ["warpgroups", "cluster", "tile_n", "stages", "q_slots", "pingpong", "lazy_max", "tma_store"]
        names[4:4] = ["v_stages"] if self.v_stages else []
        more = {"teams": self.teams} if self.teams > 1 else {}
        scheduler = enumerator("Scheduler", self.scheduler)
        config = aggregate_of(self, *names, scheduler=scheduler, **more, kept_steps=self.kept_steps(problem))
        kernel = wgmma_kernel(
            plan,
            "WgmmaTraits",
            config,
            entry="forward_wgmma",
            sizes=self._name(),
            header="forward_wgmma.cuh",
            params=WgmmaParams,
            threads=self.threads,
            smem_bytes=self.smem_bytes(problem),
            cluster=self.cluster,
            wgmma_columns=(self.tile_n, problem.head_dim_v),
            bits=bits,
        )
        before = () if bits is None else (bits.launch(kernel, KEYS_OF_QUERIES, self.tile_n),)
        blocks = self.grid_blocks(problem)
        return (*before, PlannedLaunch(kernel=kernel, blocks=blocks, is_persistent=self.is_persistent))

    def _name(self) -> str:
        """Every field, those that are off left out."""
        stages = f"s{self.stages}" + (f"v{self.v_stages}" if self.v_stages else "")
        parts = [f"{self.tile_m}x{self.tile_n}", stages, f"q{self.q_slots}"]
        parts += [f"cluster{self.cluster}"] if self.cluster > 1 else []
        parts += ["qregisters"] if self.q_in_registers else []
        parts += ["pingpong"] if self.pingpong else []
        parts += ["lazymax"] if self.lazy_max else []
        parts += [] if self.tma_store else ["plainstore"]
        parts += [f"teams{self.teams}"] if self.teams > 1 else []
        return "_".join((*parts, self.scheduler.replace("_", "")))

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles and heads, and their order."""
        bits = self._bits(plan.problem)
        numbers = forward_numbers(plan.problem, self.query_tiles(plan.problem))
        return {**numbers, **({} if bits is None else {"bit_columns": bits.columns})}

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[WgmmaConfig]:
        """Shapes, each with ways to run it, then single changes of the first."""
        widths = (it for it in SHAPES if problem.head_dim <= it[0] and problem.head_dim_v <= it[1])
        shapes = SHAPES[found] if (found := next(widths, None)) else ()
        alone = "one_tile" if problem.is_banded else "static"  # the third loses in each
        orders: list[dict[str, Any]] = [{"scheduler": "dynamic"}]
        orders += [{"scheduler": alone, "cluster": cluster} for cluster in (1, 2)]
        lazy_max = not problem.has_score
        for number, (tile_m, tile_n, q_slots) in enumerate(shapes):
            config = cls(tile_m=tile_m, tile_n=tile_n, q_slots=q_slots, pingpong=True, lazy_max=lazy_max)
            choices = _OPEN[: (6, 2, 1, 1)[number]] if problem.head_dim > 128 else ({},)
            tried = [{**choice, **order} for choice in choices for order in orders]
            for way in (*tried, *(_ALONE if number == 0 else ())):
                yield from replace(config, **way)._deepest(problem, arch)

    def _deepest(self, problem: Problem, arch: Arch) -> Iterator[WgmmaConfig]:
        """The config with as many stages as fit, if three do: of K and of V if their rows differ in size."""
        is_apart = width_bytes(problem.head_dim) != width_bytes(problem.head_dim_v)
        for stages in range(16, 2, -1):
            less, more = stages // 2, stages - stages // 2
            for of_k, of_v in ((more, less), (less, more)) if is_apart else ((stages, 0),):
                if not (config := replace(self, stages=of_k, v_stages=of_v)).why_not(problem, arch):
                    yield config
                    return


# ---------------------------------------------------------------- what a sweep tries

SHAPES: Mapping[tuple[int, int], tuple[tuple[int, int, int], ...]] = {
    (64, 64): ((192, 128, 3), (192, 64, 3), (192, 96, 3), (192, 128, 2), (192, 64, 2)),
    (96, 96): ((192, 96, 2), (192, 64, 2), (192, 80, 2), (192, 80, 1), (128, 128, 2)),
    (128, 64): ((192, 96, 2), (192, 128, 2), (192, 112, 2), (192, 64, 2)),
    (128, 128): ((192, 64, 2), (192, 80, 2), (192, 80, 1), (128, 128, 2), (128, 160, 2)),
    (160, 160): ((192, 64, 1), (192, 48, 1), (128, 96, 1), (128, 80, 2)),
    (192, 128): ((128, 64, 1), (128, 80, 1), (192, 64, 1), (128, 128, 1)),
    (192, 192): ((128, 96, 1), (128, 128, 1), (128, 80, 2), (128, 64, 2)),
    (256, 128): ((128, 64, 1), (128, 80, 1), (192, 64, 1)),
    (256, 256): ((128, 64, 1), (128, 80, 1)),
}
"""(tile_m, tile_n, q_slots) by the widest head_dim and head_dim_v of a class: one that has as many panels, and
registers for as wide a tile of keys. The first is tried in the most ways."""
_ALONE: tuple[Mapping[str, Any], ...] = (
    {"pingpong": False},
    {"tma_store": False},
    {"lazy_max": False},
    {"q_slots": 1},
    {"q_in_registers": True},
)
"""Tried with the first shape only: what a technique is worth, rather than what may win."""
_OPEN: tuple[Mapping[str, Any], ...] = (
    *({"pingpong": False, "tma_store": tma_store} for tma_store in (True, False)),
    *({"pingpong": True, "tma_store": tma_store} for tma_store in (True, False)),
    *({"q_in_registers": True, "tma_store": tma_store} for tma_store in (True, False)),
)
"""Choices that sweeps take either way, from head_dim 129 on; each shape but the first is tried with fewer of them."""
