"""The Gluon kernel of all gradients for Hopper, in one pass over the keys, and the small kernels around it.

Warpgroups of keys, one of dq, which is summed up in any order, and a warp that loads by TMA. `gluon_two_pass` shares
the kernel that goes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from multiattn.block_mask import QUERIES_OF_KEYS
from multiattn.layout import Layout, row_major
from multiattn.plan import abi, limits, remedies
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem
from multiattn.score.expression import ONE
from multiattn.score.lower import lower
from multiattn.triton import gluon_forward
from multiattn.triton.family import COUNTER, Areas, TritonFamily, TritonLaunch
from multiattn.triton.gluon_forward import (
    BOOKKEEPING_BYTES,
    block_checks,
    both_columns,
    has_end,
    pieces_of,
    problem_constants,
    product_pieces,
    tiles_of_queries,
    walking_table,
)
from multiattn.triton.kernels.constants import OUT_VECTOR, StatisticsConstants, widths
from multiattn.triton.kernels.gluon.constants import TILE_N, WARPGROUP_ROWS, GluonBackwardConstants
from multiattn.triton.plain import list_rows
from multiattn.triton.score import lowered_of_pairs
from multiattn.triton.table import (
    ELEMENT_BYTES,
    NONE,
    SMALL,
    Constant,
    Descriptor,
    KernelTable,
    Parameter,
    Tensor,
    factor_rows,
    filled,
    given,
    integers,
    stride_rows,
)

VARIANT = gluon_forward.VARIANT
RULES = f"{VARIANT}_backward"
"""The name of its rules: the forward's are under the variant's own."""
HEAD_DIM_MAX = 128
"""Beyond it the gradients of 128 keys are more than the registers of two warpgroups."""
TILE_M = 64
"""Queries of a step, of a tile of statistics, and of the rows of dq that are summed up together."""
WARPGROUPS = 2
"""How many own keys; one more makes dQ, and one warp loads."""
DS_STAGES = 2
STATISTICS = 2
"""Numbers of a query, fp32: lse in the log2 domain, and delta."""
FP32_BYTES = 4
REGISTERS_BESIDE = 32
"""Registers of a thread beside gradients, scores and weights: for addresses, places in rings. A guess that tests of
spills hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonBackwardConfig(Config):
    """Launch parameters: `tile_m` is the 64 queries of a step, `tile_n` 64 keys for each of two warpgroups."""

    tile_m: int = limits.limited(limits.one_of(TILE_M))
    tile_n: int = limits.limited(limits.one_of(WARPGROUPS * WARPGROUP_ROWS))
    q_stages: int = limits.limited(limits.between(3, 8), default=3)
    """Buffers of Q, with lse and delta of their queries: scores are made a step ahead, and dK comes last of a step."""
    dout_stages: int = limits.limited(limits.between(2, 8), default=2)
    """Buffers of dO."""
    k_stages: int = limits.limited(limits.one_of(1, 2), default=1)
    """Buffers of K: with two that of the next tile comes while the last products with one are made."""
    k_in_registers: bool = False
    """K is read into registers once a tile, for the scores, or by wgmma from shared memory in each step."""
    early_scores: bool = False
    """Scores of the next step are made while dP is, which takes 48 registers."""
    half_dq: bool = False
    """dQ is made 64 columns at a time, which takes half of the registers."""
    descends: bool = False
    """Walks of a causal mask begin with the last queries, which all tiles see."""

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The kernel of all gradients."""
        return (self.walk("kv", *product_pieces(problem), products=5, begin=6),)


# ---------------------------------------------------------------- what fits


def smem_bytes(config: GluonBackwardConfig, problem: Problem) -> int:
    """Shared memory of a block, and no more than `BOOKKEEPING_BYTES` beside it."""
    of_k, of_v = both_columns(problem)
    of_keys = config.tile_n * (config.k_stages * of_k + max(of_k, of_v))  # dk leaves through V's buffer
    of_queries = config.tile_m * (config.q_stages * of_k + config.dout_stages * of_v)
    ds = DS_STAGES * config.tile_n * config.tile_m * ELEMENT_BYTES
    statistics = config.q_stages * STATISTICS * config.tile_m * FP32_BYTES
    return (of_keys + of_queries) * ELEMENT_BYTES + ds + statistics + BOOKKEEPING_BYTES


def registers_at_least(config: GluonBackwardConfig, problem: Problem) -> int:
    """32-bit registers a thread of a warpgroup of keys needs: dK and dV, scores or dP, weights or dS."""
    of_k, of_v = both_columns(problem)
    products = 2 if config.early_scores else 1
    kept = of_k // 4 if config.k_in_registers else 0
    of_score = config.tile_m // 4 if _moves_scores(problem) else 0
    gradients = (of_k + of_v) // 2
    return gradients + products * (config.tile_m // 2 + config.tile_m // 4) + of_score + kept + REGISTERS_BESIDE


def _moves_scores(problem: Problem) -> bool:
    """True for an expression whose slope differs from 1: weights times it are kept beside weights."""
    if problem.score is None:
        return False
    lowered = lower(problem.score.program, approximate=True)
    return lowered.score is not None and lowered.slope is not ONE


def why_not_fit(problem: Problem, arch: Arch, config: GluonBackwardConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if wrong := limits.failed(limits.limit_checks(config)):
        return wrong
    registers, most = registers_at_least(config, problem), GluonBackwardConstants.key_registers
    got = f"{registers} registers for gradients, scores and weights ({config})"
    blocks = max(key_tiles(problem, config.tile_n), query_tiles(problem, TILE_M))
    sizes = limits.size_checks(config, arch, smem_bytes(config, problem), blocks)
    reasons = limits.failed(((registers <= most, got, f"up to {most}"), *sizes, *block_checks(problem, config)))
    if problem.reads_keys:  # an address for each score is more registers than there are
        allowed = "none that reads an element of a tensor for each key"
        reasons += (Reason(code="score", got="an expression that does", allowed=allowed, hint=remedies.OTHERS),)
    return reasons


# ---------------------------------------------------------------- a launch


def area_of_tiles(problem: Problem, *sizes: int) -> Layout:
    """An area of fp32 numbers of each tile of queries, ``[B, Hq, tiles, ...]``; of `sizes` the first is a tile's."""
    lines, *rest = sizes
    shape = (problem.batch, problem.heads_q, max(tiles_of_queries(problem), 1) * lines, *rest)
    return Layout(shape, row_major(shape), torch.float32)


def statistics_area(problem: Problem) -> Areas:
    """Two lines a tile of queries: lse, then delta."""
    return {"statistics": area_of_tiles(problem, STATISTICS, TILE_M)}


def areas_of(problem: Problem, config: Any = None) -> Areas:
    """Statistics of tiles of queries, and fp32 sums of their dq in the order of the accumulators of wgmma."""
    return {
        **statistics_area(problem),
        "dq_fragments": area_of_tiles(problem, 1, TILE_M * both_columns(problem)[0]),
        **COUNTER,
    }


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    """Statistics of queries, gradients, dq from its sums."""
    return statistics_table(launch, has_sums=True), _gradients(launch), _round_dq(launch.problem)


def _row_constants(problem: Problem, has_sums: bool) -> Constant:
    wide, narrow = pieces_of(problem.head_dim, problem.head_dim_v) if has_sums else (0, 0)
    narrow = narrow if problem.head_dim > wide else 0
    packed = problem.packing is not None
    return Constant(value=StatisticsConstants(**widths(problem), wide=wide, narrow=narrow, packed=packed))


def _row_table(problem: Problem, kernel: str, rows: dict[str, Parameter]) -> KernelTable:
    """A small kernel of a program for each tile of queries, and one that overlaps the one before it."""
    grid = tiles_of_queries(problem) * problem.heads_q * problem.batch
    return KernelTable(kernel=kernel, grid=grid, options={**SMALL, "launch_pdl": True}, rows=rows)


def statistics_table(launch: TritonLaunch, *, has_sums: bool) -> KernelTable:
    """The kernel that goes first: `has_sums` where dq is summed up in the workspace."""
    problem, has_dlse = launch.problem, launch.has_dlse
    rows: dict[str, Parameter] = {
        "out": Tensor(of="out"),
        "dout": Tensor(of="dout"),
        "lse": Tensor(of="lse"),
        "dlse": Tensor(of="dlse" if has_dlse else "lse"),
        "delta": given(problem.has_sinks, Tensor(of="delta")),
        "statistics": Tensor(of="statistics"),
        "dq_fragments": given(has_sums, Tensor(of="dq_fragments")),
        "counter": Tensor(of=abi.WORKSPACE),
        **_tile_list(problem),
        **integers(
            dlse_rows=problem.seq_q if has_dlse else 0,
            seq_q=problem.seq_q,
            heads_q=problem.heads_q,
            tiles=tiles_of_queries(problem),
        ),
        "out_strides": stride_rows("out", problem.strides_out, OUT_VECTOR),
        "C": _row_constants(problem, has_sums),
    }
    return _row_table(problem, "prepare_statistics", rows)


def _round_dq(problem: Problem) -> KernelTable:
    rows: dict[str, Parameter] = {
        "dq_fragments": Tensor(of="dq_fragments"),
        "dq": Tensor(of="dq"),
        **_tile_list(problem),
        "grad_factor": problem.grad_factor,
        **integers(seq_q=problem.seq_q, heads_q=problem.heads_q, tiles=tiles_of_queries(problem)),
        "dq_strides": stride_rows("dq", problem.strides_dq, OUT_VECTOR),
        "C": _row_constants(problem, True),
    }
    return _row_table(problem, "round_dq", rows)


def _tile_list(problem: Problem) -> dict[str, Parameter]:
    """The tiles of queries of a packed batch, of so many sequences."""
    if problem.packing is None:
        return dict.fromkeys(("query_list", "sequences"), NONE)
    return {"query_list": Tensor(of="query_list"), **integers(sequences=problem.packing.sequences)}


def statistics_lines(problem: Problem) -> Descriptor:
    """Statistics by TMA, half a tile's at a time."""
    return Descriptor(of="statistics", layout=statistics_area(problem)["statistics"], rows=1, columns=TILE_M)


def _gradients(launch: TritonLaunch) -> KernelTable:
    problem, config = launch.problem, launch.config
    constants = filled(
        GluonBackwardConstants,
        problem,
        config,
        **problem_constants(problem, launch.assumed.flag, lowered_of_pairs(problem, launch.arch)),
        tile_n=TILE_N,
        descends=config.descends and problem.is_banded and not problem.is_two_sided and problem.blocks is None,
    )
    return walking_table(
        launch,
        "gradients",
        constants,
        maps=dict.fromkeys(("q", "k", "v", "dout", "dk", "dv"), 64),
        own={
            "statistics": statistics_lines(problem),
            "dq_fragments": Tensor(of="dq_fragments"),
            "lists": list_rows(problem, by_keys=True),
        },
        factors={"factors": factor_rows(problem)},
        tile=("kv", config.tile_n, config.tile_n),
        registers=128,  # of 512 threads; the first four warps make dQ
    )


def _has_end(problem: Problem, config: Config) -> bool:
    """`has_end`, or lists that may name tiles of queries beyond the last one."""
    if problem.blocks is None or has_end(problem, config):
        return has_end(problem, config)
    listed = problem.lists_of(QUERIES_OF_KEYS).columns * problem.blocks.queries
    return listed > tiles_of_queries(problem) * TILE_M


# ---------------------------------------------------------------- configs worth timing


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[GluonBackwardConfig]:
    """Buffers of dO, then of Q and K, each with what takes registers, and with walks from either end."""
    base = GluonBackwardConfig(tile_m=64, tile_n=128, half_dq=both_columns(problem)[0] > 64)
    buffers = ((4, 3, 1), (4, 3, 2), (3, 3, 1), (3, 2, 1))
    ways: tuple[dict[str, bool], ...] = ({"early_scores": True, "k_in_registers": True}, {"early_scores": True}, {})
    for way, (q, dout, k), descends in itertools.product(ways, buffers, (False, True)):
        yield replace(base, q_stages=q, dout_stages=dout, k_stages=k, descends=descends, **way)


ROW_KERNELS = {"prepare_statistics": "backward_rows", "round_dq": "backward_rows"}

FAMILY = TritonFamily(
    config=GluonBackwardConfig,
    kernels={**ROW_KERNELS, "gradients": "gluon.backward"},
    tables=_tables,
    tiles=lambda problem, config: (config.tile_m, config.tile_n),
    areas=areas_of,
    fits=why_not_fit,
    candidates=_candidates,
    flag=_has_end,
    flag_name="ragged",
    is_gluon=True,
)
