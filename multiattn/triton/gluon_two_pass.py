"""The Gluon kernels of gradients for Hopper in two passes: dq, then dk and dv.

Each has two warpgroups that compute and a warp that loads by TMA.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config, select
from multiattn.plan.schedule import key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem
from multiattn.triton.family import COUNTER, TritonFamily, TritonLaunch
from multiattn.triton.gluon_backward import (
    FP32_BYTES,
    ROW_KERNELS,
    STATISTICS,
    TILE_M,
    statistics_area,
    statistics_lines,
    statistics_table,
)
from multiattn.triton.gluon_forward import (
    BOOKKEEPING_BYTES,
    both_columns,
    has_end,
    problem_constants,
    product_pieces,
    walking_table,
)
from multiattn.triton.kernels.constants import OUT_VECTOR
from multiattn.triton.kernels.gluon.constants import TILE_N, TwoPassConstants
from multiattn.triton.score import lowered_of_pairs
from multiattn.triton.table import ELEMENT_BYTES, KernelTable, Parameter, Tensor, factor_rows, filled, stride_rows

VARIANT = "warp_specialized_two_pass"
WARPGROUPS = 2
"""How many compute, in each kernel; one warp loads."""
BLOCK_QUERIES = WARPGROUPS * TILE_M
"""Queries of a tile of the kernel that owns them."""
WEIGHT_STAGES = 2
"""Buffers of weights between the warpgroups of the kernel that owns keys."""
COLUMNS_IN_REGISTERS = 192
"""The most columns of K or V that a thread holds beside a gradient that has as many."""
LAUNCH_REGISTERS = 168
"""A thread's when a kernel begins; the loading warp gives most of its own to the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonTwoPassConfig(Config):
    """Launch parameters: buffers of both kernels. Tiles are of 64 queries and 64 keys."""

    tile_m: int = limits.limited(limits.one_of(TILE_M))
    tile_n: int = limits.limited(limits.one_of(TILE_N))
    q_stages: int = limits.limited(limits.between(2, 8), default=2)
    """Buffers of Q, with lse and delta of their queries, where gradients of keys are made."""
    dout_stages: int = limits.limited(limits.between(2, 8), default=2)
    """Buffers of dO there."""
    k_stages: int = limits.limited(limits.between(2, 8), default=2)
    """Buffers of K where gradients of queries are made."""
    v_stages: int = limits.limited(limits.between(1, 8), default=1)
    """Buffers of V there."""
    kv_in_registers: bool = False
    """K and V are read into registers once a tile, where gradients of keys are made."""

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The kernel of dq, and that of dk and dv."""
        keys = self.walk("kv", *product_pieces(problem), products=4, begin=6)
        return keys._replace(owns="q", rows=BLOCK_QUERIES, products=3), keys


def smem_bytes(config: GluonTwoPassConfig, problem: Problem) -> int:
    """Shared memory of a block of the kernel that takes more, and no more than `BOOKKEEPING_BYTES` beside it."""
    of_k, of_v = (TILE_N * columns * ELEMENT_BYTES for columns in both_columns(problem))
    weights = WEIGHT_STAGES * TILE_M * TILE_N * ELEMENT_BYTES
    statistics = config.q_stages * STATISTICS * TILE_M * FP32_BYTES
    of_keys = (1 + config.q_stages) * of_k + (1 + config.dout_stages) * of_v + weights + statistics
    of_queries = (WARPGROUPS + config.k_stages) * of_k + (WARPGROUPS + config.v_stages) * of_v
    return max(of_keys, of_queries) + BOOKKEEPING_BYTES


def why_not_fit(problem: Problem, arch: Arch, config: GluonTwoPassConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if wrong := limits.failed(limits.limit_checks(config)):
        return wrong
    columns, most = max(both_columns(problem)), COLUMNS_IN_REGISTERS
    kept = (not config.kv_in_registers or columns <= most, f"kv_in_registers with {columns} columns", f"up to {most}")
    blocks = max(key_tiles(problem, TILE_N), query_tiles(problem, TILE_M))
    return limits.failed((kept, *limits.size_checks(config, arch, smem_bytes(config, problem), blocks)))


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    """Statistics of queries, gradients of queries, gradients of keys."""
    passes = (_table(launch, by_keys=by_keys) for by_keys in (False, True))
    return (statistics_table(launch, has_sums=False), *passes)


def _table(launch: TritonLaunch, *, by_keys: bool) -> KernelTable:
    """The kernel whose blocks own keys, or queries."""
    problem = launch.problem
    owned = ("dk", "dv") if by_keys else ("dq",)
    strides = {"dq": problem.strides_dq, "dk": problem.strides_dk, "dv": problem.strides_dv}
    lowered = lowered_of_pairs(problem, launch.arch)
    constants = filled(
        TwoPassConstants,
        problem,
        launch.config,
        **problem_constants(problem, launch.assumed.flag, lowered),
        by_keys=by_keys,
    )
    own: dict[str, Parameter] = {"statistics": statistics_lines(problem) if by_keys else Tensor(of="statistics")}
    return walking_table(
        launch,
        "gradients_of_own_keys" if by_keys else "gradient_of_own_queries",
        constants,
        maps=dict.fromkeys(("q", "dout", "k", "v"), 64),
        own=own | {name: Tensor(of=name) for name in owned},
        factors={
            **{f"{name}_strides": stride_rows(name, strides[name], OUT_VECTOR) for name in owned},
            "factors": factor_rows(problem),
        },
        tile=("kv", TILE_N, TILE_N) if by_keys else ("q", BLOCK_QUERIES, TILE_N),
        registers=LAUNCH_REGISTERS,
    )


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[GluonTwoPassConfig]:
    """The rule's, then with K and V elsewhere, and with a buffer more or less of each kind."""
    rule, _ = select(variant.rules, problem, arch)
    if rule is None:
        return
    first = rule.config
    yield first
    yield replace(first, kv_in_registers=not first.kv_in_registers)
    for name, more in itertools.product(("q_stages", "dout_stages", "k_stages", "v_stages"), (1, -1)):
        yield replace(first, **{name: getattr(first, name) + more})


FAMILY = TritonFamily(
    config=GluonTwoPassConfig,
    kernels={
        **ROW_KERNELS,
        "gradient_of_own_queries": "gluon.backward_two_pass_queries",
        "gradients_of_own_keys": "gluon.backward_two_pass_keys",
    },
    tables=_tables,
    tiles=lambda problem, config: (config.tile_m, config.tile_n),
    areas=lambda problem, config: {**statistics_area(problem), **COUNTER},
    fits=why_not_fit,
    candidates=_candidates,
    flag=has_end,
    flag_name="ragged",
    is_gluon=True,
)
