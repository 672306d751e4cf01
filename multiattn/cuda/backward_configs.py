"""Tiles of the backward as data: the configs of its kernels, their shared memory and workspace, what fits a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from multiattn.cuda import configs as forward
from multiattn.cuda.configs import ELEMENT_BYTES, FP32_BYTES, FRAGMENT_ROWS, CudaConfig, list_areas, padded, tiles
from multiattn.cuda.score import sends_raw
from multiattn.packed import TILE_LISTS
from multiattn.plan import remedies
from multiattn.plan.arch import WARP_THREADS, Arch
from multiattn.plan.backend import Plan
from multiattn.plan.config import Config
from multiattn.plan.limits import failed, field_checks, one_of, size_checks
from multiattn.plan.schedule import key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

ROW_TILE = 64
"""Queries of a block that makes delta or converts dq."""
ROW_THREADS = 256
WIDE_SINCE = (9, 0)
"""Vector additions to global memory came with this compute capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryConfig(Config):
    """Launch parameters of the kernel of dq alone, `kernels/backward_q.cuh`; its warps split the queries."""

    warps: int
    stages: int
    """Buffers of what the kernel walks over, K and V or Q and dO: 1 or 2."""
    occupancy: int = 1
    """Blocks on an SM that the compiler must leave registers for."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP_THREADS


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig(QueryConfig):
    """Launch parameters of the kernel of dk and dv, `kernels/backward.cuh`; pairs of its warps split the keys."""

    wide: bool = False
    """dq is added up 16 bytes at a time instead of 4; sm90 and later."""
    dq: QueryConfig | None = None
    """The config of the kernel of dq; None where dq is added up beside dk and dv."""


def cut(config: BackwardConfig, problem: Problem) -> BackwardConfig:
    """The config with tiles that lie in one block of the problem's block mask, and warps that have 16 rows each."""
    if (blocks := problem.blocks) is None:
        return config
    tile_m, tile_n = math.gcd(config.tile_m, blocks.queries), math.gcd(config.tile_n, blocks.keys)
    pairs = min(config.warps // 2, tile_n // FRAGMENT_ROWS)
    if (dq := config.dq) is not None:
        rows, keys = math.gcd(dq.tile_m, blocks.queries), math.gcd(dq.tile_n, blocks.keys)
        dq = replace(dq, tile_m=rows, tile_n=keys, warps=min(dq.warps, rows // FRAGMENT_ROWS))
    return replace(config, tile_m=tile_m, tile_n=tile_n, warps=2 * pairs, dq=dq)


def config_of(plan: Plan) -> Config:
    """The config of a Plan, as its kernels have it: cut for a block mask."""
    assert plan.config is not None
    if isinstance(plan.config, BackwardConfig):
        return cut(plan.config, plan.problem)
    return forward.cut(plan.config, plan.problem) if isinstance(plan.config, CudaConfig) else plan.config


def smem_bytes(config: BackwardConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block of the dk and dv kernel, which asserts when compiled that it needs just this."""
    row = padded(problem.head_dim) * ELEMENT_BYTES
    scores = config.tile_m * config.tile_n
    weights = scores * (FP32_BYTES if sends_raw(problem) else ELEMENT_BYTES)
    ds = scores * ELEMENT_BYTES if config.dq is None else 0
    statistics = 2 * config.tile_m * FP32_BYTES
    return 2 * config.tile_n * row + weights + ds + config.stages * (2 * config.tile_m * row + statistics)


def dq_smem_bytes(config: QueryConfig, problem: Problem) -> int:
    """The same for the kernel of dq."""
    return 2 * (config.tile_m + config.stages * config.tile_n) * padded(problem.head_dim) * ELEMENT_BYTES


def dq_sum_bytes(problem: Problem) -> int:
    """Workspace in which dq is added up: fp32, in whole fragments of 16 queries and 16 columns."""
    rows = fragments_of_dq(problem) * FRAGMENT_ROWS
    return problem.batch * problem.heads_q * rows * padded(problem.head_dim) * FP32_BYTES


def fragments_of_dq(problem: Problem) -> int:
    """Fragments of 16 queries in that workspace, per head: each sequence of a packed batch has its own."""
    if problem.packing is not None:
        return problem.packing.tiles_max(problem.seq_q, FRAGMENT_ROWS)
    return tiles(problem.seq_q, FRAGMENT_ROWS)


def workspace_areas(problem: Problem, config: BackwardConfig) -> dict[str, int]:
    """The areas of a launch's workspace, and the bytes of each. With sinks delta is an operand."""
    delta = {} if problem.has_sinks else {"delta": problem.layouts["delta"].size_bytes}
    sums = {"dq_sum": dq_sum_bytes(problem)} if config.dq is None else {}
    return {**delta, **sums, **list_areas(problem, TILE_LISTS)}


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes that a launch takes from the allocator."""
    assert isinstance(config, BackwardConfig)
    return sum(workspace_areas(problem, config).values())


def why_not(adds_dq: bool, problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; `adds_dq`: dq is added up beside dk and dv."""
    assert isinstance(config, BackwardConfig)
    if adds_dq != (config.dq is None):
        allowed = "dq=None, as dq is added up beside dk and dv" if adds_dq else "a QueryConfig as dq"
        return (Reason(code="config", got=str(config), allowed=allowed, hint=remedies.CONFIG),)
    config = cut(config, problem)
    unit, pair = FRAGMENT_ROWS, FRAGMENT_ROWS * (config.warps // 2)
    needed = [smem_bytes(config, problem)]
    blocks = [key_tiles(problem, config.tile_n), query_tiles(problem, ROW_TILE)]
    has_wide = not arch.is_gpu or arch.capability >= WIDE_SINCE
    keys_fit = pair > 0 and config.tile_n % pair == 0 and config.tile_n > 0
    checks = [
        (config.tile_m % unit == 0 and config.tile_m > 0, str(config), f"tile_m in multiples of {unit}"),
        (keys_fit, str(config), f"tile_n in multiples of {unit} per pair of warps"),
        (not config.wide or has_wide, f"wide on {arch.name}", "wide on sm90 and later"),
    ]
    if (dq := config.dq) is not None:
        allowed = f"dq: tile_m in multiples of {unit} per warp, tile_n in multiples of {unit}"
        checks.append((dq.tile_m % (unit * dq.warps) == dq.tile_n % unit == 0, str(config), allowed))
        needed.append(dq_smem_bytes(dq, problem))
        blocks.append(query_tiles(problem, dq.tile_m))
    for kernel in (config, *([] if dq is None else [dq])):
        checks += field_checks(kernel, {"warps": one_of(2, 4, 8, 16), "stages": one_of(1, 2)})
    return failed((*checks, *size_checks(config, arch, max(needed), max(blocks))))


def registers_at_least(config: QueryConfig, problem: Problem) -> int:
    """32-bit registers a thread needs for its accumulators; operands, addresses and read-ahead come on top."""
    if isinstance(config, BackwardConfig):
        return config.tile_n // (config.warps // 2) * (config.tile_m + padded(problem.head_dim)) // WARP_THREADS
    return config.tile_m // config.warps * (2 * config.tile_n + padded(problem.head_dim)) // WARP_THREADS
