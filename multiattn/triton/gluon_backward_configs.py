"""The config record of the Gluon kernel of all gradients for Hopper, and what fits a problem.

The variant has the name of the forward's; another one, in two passes, has its own record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from multiattn.layout import Layout, row_major
from multiattn.packed import TILE_LISTS
from multiattn.plan import limits, remedies
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.schedule import COUNTER_BYTES, key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.score.expression import ONE
from multiattn.score.lower import lower
from multiattn.triton.configs import ELEMENT_BYTES
from multiattn.triton.gluon_configs import BOOKKEEPING_BYTES, VARIANT, WARPGROUP_ROWS, pieces_of

TWO_PASS = "warp_specialized_two_pass"
"""The variant in two passes; that in one has the name of the forward's."""
RULES, TWO_PASS_RULES = f"{VARIANT}_backward", TWO_PASS
"""The names of their rules: the forward's are under the variant's own."""
GLUON_VARIANTS = (VARIANT, TWO_PASS)
HEAD_DIM_MAX = 128
"""Beyond it the gradients of 128 keys are more than the registers of two warpgroups."""
TILE_M = 64
"""Queries of a step, of a tile of statistics, and of the rows of dq that are summed up together."""
WARPGROUPS = 2
"""That own keys; one more makes dQ, and one warp loads."""
DS_STAGES = 2
STATISTICS = 2
"""Numbers of a query, fp32: lse in the log2 domain, and delta."""
_FP32_BYTES = 4
AREAS = ("statistics", "dq_fragments")
"""Areas of workspace that are this variant's own, beside the counter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonBackwardConfig(Config):
    """Launch parameters: `tile_m` is the 64 queries of a step, `tile_n` 64 keys for each of two warpgroups."""

    q_stages: int = 3
    """Buffers of Q, with lse and delta of their queries: scores are made a step ahead, and dK comes last of a step."""
    dout_stages: int = 2
    """Buffers of dO."""
    k_stages: int = 1
    """Buffers of K: with two that of the next tile comes while the last products with one are made."""
    k_in_registers: bool = False
    """K is read into registers once a tile, for the scores, or by wgmma from shared memory in each step."""
    early_scores: bool = False
    """Scores of the next step are made while dP is, which takes 48 registers."""
    half_dq: bool = False
    """dQ is made 64 columns at a time, which takes half of the registers."""
    descends: bool = False
    """Walks of a causal mask begin with the last queries, which all tiles see."""
    dq_registers: int = 72
    """Registers of a thread of the warpgroup that makes dQ; the producer has 24, and the others what is left of 512."""

    @property
    def key_registers(self) -> int:
        """Registers of a thread of a warpgroup of keys."""
        return (512 - PRODUCER_REGISTERS - self.dq_registers) // 2 // 8 * 8


PRODUCER_REGISTERS = 24
REGISTERS_BESIDE = 32
"""Registers of a thread beside gradients, scores and weights: for addresses, places in rings. A guess that tests of
spills hold."""


def columns_of(problem: Problem) -> int:
    """Columns of a tile: head_dim as its pieces hold it."""
    return sum(pieces_of(problem.head_dim))


def smem_bytes(config: GluonBackwardConfig, problem: Problem) -> int:
    """Shared memory of a block, and no more than `BOOKKEEPING_BYTES` beside it."""
    rows = (config.k_stages + 1) * config.tile_n + (config.q_stages + config.dout_stages) * config.tile_m
    ds = DS_STAGES * config.tile_n * config.tile_m * ELEMENT_BYTES
    statistics = config.q_stages * STATISTICS * config.tile_m * _FP32_BYTES
    return rows * columns_of(problem) * ELEMENT_BYTES + ds + statistics + BOOKKEEPING_BYTES


def registers_at_least(config: GluonBackwardConfig, problem: Problem) -> int:
    """32-bit registers a thread of a warpgroup of keys needs: dK and dV, scores or dP, weights or dS."""
    products = 2 if config.early_scores else 1
    kept = columns_of(problem) // 4 if config.k_in_registers else 0
    of_score = config.tile_m // 4 if moves_scores(problem) else 0
    return (
        columns_of(problem) + products * (config.tile_m // 2 + config.tile_m // 4) + of_score + kept + REGISTERS_BESIDE
    )


def moves_scores(problem: Problem) -> bool:
    """True for an expression whose slope differs from 1: weights times it are kept beside weights."""
    if problem.score is None:
        return False
    lowered = lower(problem.score.program, approximate=True)
    return lowered.score is not None and lowered.slope is not ONE


def tiles_of_queries(problem: Problem) -> int:
    """Tiles of `TILE_M` queries of a head. Of a packed batch the most that there can be, and one that is of none."""
    if problem.packing is not None:
        return problem.packing.tiles_max(problem.seq_q, TILE_M) + 1
    return -(-problem.seq_q // TILE_M)


def areas_of(problem: Problem) -> Mapping[str, Layout]:
    """Statistics of tiles of queries, and fp32 sums of their dq in the order of the accumulators of wgmma.

    Statistics are two lines a tile: lse, then delta.
    """
    tiles = max(tiles_of_queries(problem), 1)
    statistics = (problem.batch, problem.heads_q, STATISTICS * tiles, TILE_M)
    sums = (problem.batch, problem.heads_q, tiles, TILE_M * columns_of(problem))
    return {
        name: Layout(shape, row_major(shape), torch.float32)
        for name, shape in zip(AREAS, (statistics, sums), strict=True)
    }


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes of device memory beside the tensors."""
    lists = 0 if problem.packing is None else sum(problem.layouts[name].size_bytes for name in TILE_LISTS)
    return sum(it.size_bytes for it in areas_of(problem).values()) + COUNTER_BYTES + lists


_FIELDS: Mapping[str, limits.FieldRule] = {
    "tile_m": limits.one_of(TILE_M),
    "tile_n": limits.one_of(WARPGROUPS * WARPGROUP_ROWS),
    "q_stages": limits.between(3, 8),
    "dout_stages": limits.between(2, 8),
    "k_stages": limits.one_of(1, 2),
    "dq_registers": limits.one_of(72, 88, 104, 120),
}


def why_not_fit(problem: Problem, arch: Arch, config: GluonBackwardConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if wrong := limits.failed(limits.field_checks(config, _FIELDS)):
        return wrong
    registers, most = registers_at_least(config, problem), config.key_registers
    got = f"{registers} registers for gradients, scores and weights ({config})"
    blocks = max(key_tiles(problem, config.tile_n), query_tiles(problem, TILE_M))
    sizes = limits.size_checks(config, arch, smem_bytes(config, problem), blocks)
    reasons = limits.failed(((registers <= most, got, f"up to {most}"), *sizes))
    if problem.reads_keys:  # an address for each score is more registers than there are
        allowed = "none that reads an element of a tensor for each key"
        reasons += (Reason(code="score", got="an expression that does", allowed=allowed, hint=remedies.OTHERS),)
    return reasons
