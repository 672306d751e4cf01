"""The config record of the Gluon kernel for Hopper, and what fits a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.schedule import COUNTER_BYTES, SCHEDULERS, one_width, query_tiles, saving_widths
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton.configs import ELEMENT_BYTES

VARIANT = "warp_specialized"
ARCHES = ("sm90",)

WARPGROUP_ROWS = 64
BOOKKEEPING_BYTES = 1536
"""Shared memory beside the tiles: barriers, words, what the compiler keeps for partitions and reductions. An upper
bound; a test holds compiled kernels against it."""
REGISTERS_MAX = {2: 208, 3: 128}
"""By consumer warpgroups, of what `registers_at_least` counts: a thread has 240, or 160 with three."""
STAGES_MAX = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonConfig(Config):
    """Launch parameters: `tile_m` is 64 queries for each of two or three warpgroups; another one warp loads by TMA."""

    stages: int = 4
    """Buffers that tiles of K and of V take turns in."""
    scheduler: str = "dynamic"
    """See `multiattn.plan.schedule.SCHEDULERS`."""
    q_slots: int = 1
    """Buffers of Q; with two the next tile is begun before the output of one is stored."""
    pingpong: bool = False
    """Warpgroups take turns: one has the tensor cores while another has the softmax."""
    lazy_max: bool = False
    """Weights are made relative to the maxima of a tile's first blocks; where those are outgrown it is done again."""

    @property
    def warpgroups(self) -> int:
        """That compute: consumers."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def counts(self) -> bool:
        """True if a counter in device memory gives out tiles."""
        return self.scheduler == "dynamic"

    @property
    def registers(self) -> int:
        """Per thread at launch. Of these the producer gives most to the consumers."""
        return {2: 168, 3: 128}[self.warpgroups]


def pieces_of(head_dim: int) -> tuple[int, int]:
    """Columns of the one or two pieces that head_dim is computed in, powers of two; the second is 0 where one does."""
    return saving_widths(head_dim) or (one_width(head_dim), 0)


def smem_bytes(config: GluonConfig, problem: Problem) -> int:
    """Shared memory of a block: slots of Q, stages of K and V, and no more than `BOOKKEEPING_BYTES` beside them."""
    rows = config.q_slots * config.tile_m + config.stages * config.tile_n
    return rows * sum(pieces_of(problem.head_dim)) * ELEMENT_BYTES + BOOKKEEPING_BYTES


def registers_at_least(config: GluonConfig, problem: Problem) -> int:
    """32-bit registers a consumer's thread needs for output, scores and weights; the rest comes on top."""
    return sum(pieces_of(problem.head_dim)) // 2 + config.tile_n // 2 + config.tile_n // 4


def spare_registers(config: GluonConfig, problem: Problem) -> int:
    """How many of a consumer's are left of `REGISTERS_MAX`."""
    return REGISTERS_MAX[config.warpgroups] - registers_at_least(config, problem)


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes of device memory beside the tensors: the tile counter of a dynamic scheduler, one for each stream.

    And a packed batch's list of tiles.
    """
    counter = COUNTER_BYTES if isinstance(config, GluonConfig) and config.counts else 0
    return counter + (0 if problem.packing is None else problem.layouts["query_list"].size_bytes)


_FIELDS: Mapping[str, limits.FieldRule] = {
    "tile_m": limits.one_of(128, 192),
    "tile_n": limits.one_of(16, 32, 64, 128, 256),
    "stages": limits.between(2, STAGES_MAX),
    "scheduler": limits.one_of(*SCHEDULERS),
    "q_slots": limits.one_of(1, 2, 3),
}


def why_not_fit(problem: Problem, arch: Arch, config: GluonConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if wrong := limits.failed(limits.field_checks(config, _FIELDS)):
        return wrong
    registers, most = registers_at_least(config, problem), REGISTERS_MAX[config.warpgroups]
    got = f"{registers} registers for output, scores and weights ({config})"
    allowed = f"up to {most} with {config.warpgroups} warpgroups"
    sizes = limits.size_checks(config, arch, smem_bytes(config, problem), query_tiles(problem, config.tile_m))
    return limits.failed(((registers <= most, got, allowed), *sizes))
