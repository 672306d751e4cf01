"""The config record of the two Gluon kernels for Hopper that make gradients in two passes, and what fits a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from multiattn.layout import Layout
from multiattn.packed import TILE_LISTS
from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.schedule import COUNTER_BYTES, key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton import gluon_backward_configs
from multiattn.triton.configs import ELEMENT_BYTES
from multiattn.triton.gluon_backward_configs import STATISTICS, TILE_M, columns_of
from multiattn.triton.gluon_configs import BOOKKEEPING_BYTES

TILE_N = 64
"""Keys of a block, and of a tile of the kernel that owns them."""
WARPGROUPS = 2
"""That compute, in each kernel; one warp loads."""
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

    q_stages: int = 2
    """Buffers of Q, with lse and delta of their queries, where gradients of keys are made."""
    dout_stages: int = 2
    """The same of dO."""
    k_stages: int = 2
    """Buffers of K where gradients of queries are made."""
    v_stages: int = 1
    """The same of V."""
    kv_in_registers: bool = False
    """K and V are read into registers once a tile, where gradients of keys are made."""


def smem_bytes(config: GluonTwoPassConfig, problem: Problem) -> int:
    """Shared memory of a block of the kernel that takes more, and no more than `BOOKKEEPING_BYTES` beside it."""
    tile = TILE_N * columns_of(problem) * ELEMENT_BYTES
    weights = WEIGHT_STAGES * TILE_M * TILE_N * ELEMENT_BYTES
    statistics = config.q_stages * STATISTICS * TILE_M * 4
    of_keys = (2 + config.q_stages + config.dout_stages) * tile + weights + statistics
    of_queries = (2 * WARPGROUPS + config.k_stages + config.v_stages) * tile
    return max(of_keys, of_queries) + BOOKKEEPING_BYTES


def areas_of(problem: Problem) -> Mapping[str, Layout]:
    """Statistics of tiles of queries, as `gluon_backward_configs.areas_of` has them."""
    return {"statistics": gluon_backward_configs.areas_of(problem)["statistics"]}


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes of device memory beside the tensors."""
    lists = 0 if problem.packing is None else sum(problem.layouts[name].size_bytes for name in TILE_LISTS)
    return sum(it.size_bytes for it in areas_of(problem).values()) + COUNTER_BYTES + lists


_FIELDS: Mapping[str, limits.FieldRule] = {
    "tile_m": limits.one_of(TILE_M),
    "tile_n": limits.one_of(TILE_N),
    **dict.fromkeys(("q_stages", "dout_stages", "k_stages"), limits.between(2, 8)),
    "v_stages": limits.between(1, 8),
}


def why_not_fit(problem: Problem, arch: Arch, config: GluonTwoPassConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if wrong := limits.failed(limits.field_checks(config, _FIELDS)):
        return wrong
    columns, most = columns_of(problem), COLUMNS_IN_REGISTERS
    kept = (not config.kv_in_registers or columns <= most, f"kv_in_registers with {columns} columns", f"up to {most}")
    blocks = max(key_tiles(problem, TILE_N), query_tiles(problem, TILE_M))
    return limits.failed((kept, *limits.size_checks(config, arch, smem_bytes(config, problem), blocks)))
