"""The Gluon kernel of the forward for Hopper and heads wider than 256: two warpgroups have half of the outputs each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from multiattn.plan import limits
from multiattn.plan.arch import ARCHS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import SCHEDULERS, query_tiles
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem
from multiattn.score import LoweredScore
from multiattn.triton import gluon_forward
from multiattn.triton.family import TritonLaunch
from multiattn.triton.gluon_forward import (
    ARCHES,
    BOOKKEEPING_BYTES,
    REGISTERS_MAX,
    problem_constants,
    walking_table,
)
from multiattn.triton.kernels.gluon.constants import WARPGROUP_ROWS, TwinConstants
from multiattn.triton.score import lowered_of_pairs
from multiattn.triton.staged import under_diagonal
from multiattn.triton.table import ELEMENT_BYTES, KernelTable, Tensor, factor_row, filled, sinks_row, tops_row

VARIANT = "warp_specialized_twin"
WARPGROUPS = 2
"""How many compute, the same rows; another one warp loads."""
LAUNCH_REGISTERS = 168
"""A thread's when the kernel begins; the loading warp gives most of its own to the others."""
ROW_BYTES = 8
"""The warpgroups tell each other a row's maximum and its sum, in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonTwinConfig(Config):
    """Launch parameters: both warpgroups have the same 64 queries."""

    tile_m: int = limits.limited(limits.one_of(WARPGROUP_ROWS))
    tile_n: int = limits.limited(limits.one_of(32, 64, 128))
    piece: int = limits.limited(limits.one_of(64, 128, 256), default=128)
    """Columns of the pieces that all rows come in; those of v are shared out among the warpgroups."""
    k_stages: int = limits.limited(limits.between(1, 4), default=1)
    """Buffers of K, each of whose pieces is loaded anew when its product is done."""
    v_stages: int = limits.limited(limits.between(1, 4), default=1)
    """Buffers of V."""
    scheduler: str = limits.limited(limits.one_of(*SCHEDULERS), default="dynamic")
    """See `multiattn.plan.schedule.SCHEDULERS`."""

    @property
    def is_persistent(self) -> bool:
        """True if a block takes one tile after another."""
        return self.scheduler != "one_tile"

    @property
    def is_dynamic(self) -> bool:
        """True if a counter in device memory gives out tiles."""
        return self.scheduler == "dynamic"

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The one kernel."""
        return (self.walk("q", self.piece * sum(pieces_of(self, problem)) / 2),)


# ---------------------------------------------------------------- what fits


def pieces_of(config: GluonTwinConfig, problem: Problem) -> tuple[int, int]:
    """Pieces of rows of q and k, and of v and out; each warpgroup has one of these at least."""
    return -(-problem.head_dim // config.piece), max(WARPGROUPS, -(-problem.head_dim_v // config.piece))


def smem_bytes(config: GluonTwinConfig, problem: Problem) -> int:
    """Shared memory of a block: Q, which outputs leave through, K, V and weights, and no more than
    `BOOKKEEPING_BYTES` beside them."""
    of_k, of_v = pieces_of(config, problem)
    rows = config.tile_m * max(of_k, of_v) + config.tile_n * (of_k * config.k_stages + of_v * config.v_stages)
    handed = WARPGROUPS * config.tile_m * (config.tile_n * ELEMENT_BYTES + ROW_BYTES)
    return rows * config.piece * ELEMENT_BYTES + handed + BOOKKEEPING_BYTES


def registers_at_least(config: GluonTwinConfig, problem: Problem) -> int:
    """32-bit registers a consumer's thread needs for its outputs, scores and weights; the rest comes on top."""
    own = -(-pieces_of(config, problem)[1] // WARPGROUPS)
    return own * config.piece // 2 + config.tile_n // 2 + config.tile_n // 4


def why_not_fit(problem: Problem, arch: Arch, config: GluonTwinConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if wrong := limits.failed(limits.limit_checks(config)):
        return wrong
    registers, most = registers_at_least(config, problem), REGISTERS_MAX[WARPGROUPS]
    got = f"{registers} registers for output, scores and weights ({config})"
    sizes = limits.size_checks(config, arch, smem_bytes(config, problem), query_tiles(problem, config.tile_m))
    return limits.failed(((registers <= most, got, f"up to {most}"), *sizes))


# ---------------------------------------------------------------- a launch


def constants_of(
    problem: Problem, config: GluonTwinConfig, *, ragged: bool, score: LoweredScore | None = None
) -> TwinConstants:
    """The constants of the kernel."""
    if score is not None and problem.is_banded and not problem.is_two_sided:
        score = under_diagonal(score)
    spare = REGISTERS_MAX[WARPGROUPS] - registers_at_least(config, problem)
    own = problem_constants(problem, ragged, score) | {"wide": config.piece, "narrow": 0}
    early = score is not None and spare >= config.tile_n // 2
    return filled(TwinConstants, problem, config, **own, loads_early=early)


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    problem, config = launch.problem, launch.config
    # As on its GPUs, also where it is interpreted: with their tanh.
    lowered = lowered_of_pairs(problem, ARCHS[ARCHES[0]])
    table = walking_table(
        launch,
        "attention_twins",
        constants_of(problem, config, ragged=launch.assumed.flag, score=lowered),
        maps={"q": config.tile_m, "k": config.tile_n, "v": config.tile_n, "out": config.tile_m},
        own={"rows": {"lse": Tensor(of="lse"), "sinks": sinks_row(problem), "tops": tops_row(problem)}},
        factors={"scale": factor_row(problem, problem.scale_log2)},
        tile=("q", config.tile_m, config.tile_m),
        registers=LAUNCH_REGISTERS,
        piece=config.piece,
    )
    return (table,)


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[GluonTwinConfig]:
    """Pieces and schedulers, each with as many buffers as fit."""
    for piece, scheduler in itertools.product((128, 64, 256), SCHEDULERS):
        stages = ((2, 2), (2, 1), (1, 2), (1, 1))
        tried = (
            GluonTwinConfig(tile_m=64, tile_n=64, piece=piece, k_stages=of_k, v_stages=of_v, scheduler=scheduler)
            for of_k, of_v in stages
        )
        if (found := next((it for it in tried if not why_not_fit(problem, arch, it)), None)) is not None:
            yield found


FAMILY = replace(
    gluon_forward.FAMILY,
    config=GluonTwinConfig,
    kernels={"attention_twins": "gluon.forward_twin"},
    tables=_tables,
    fits=why_not_fit,
    settle=lambda problem, arch, config: config,
    candidates=_candidates,
)
