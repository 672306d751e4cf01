"""Tiles of the backward kernel for Hopper as data: its config, shared memory and workspace, and what fits."""

from __future__ import annotations

from dataclasses import dataclass

from multiattn.cuda import stream_k
from multiattn.cuda.backward_configs import ROW_TILE, dq_sum_bytes
from multiattn.cuda.configs import ELEMENT_BYTES, FP32_BYTES, list_areas, padded, tiles
from multiattn.cuda.stream_k import Divided
from multiattn.cuda.tensor_maps import BOX_COLUMNS, tensor_maps, why_not_mapped
from multiattn.cuda.wgmma_configs import BARRIER_BYTES, PANEL_ROW_BYTES, WARPGROUP_ROWS, WARPGROUP_THREADS
from multiattn.packed import RAGGED_ROWS, TILE_LISTS
from multiattn.plan.abi import WORKSPACE
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.limits import FieldRule, between, failed, field_checks, one_of, size_checks
from multiattn.plan.schedule import COUNTER_BYTES, key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

WARPGROUPS = 2  # that compute
_DS_STAGES = 2
_DQ_BUFFERS = 2
STATISTICS = 2
"""Numbers of a query, fp32: lse and delta."""
WIDE_FROM = 97
"""The head_dim from which on warpgroups of keys have 208 registers a thread: below 200 with early scores, else 184."""
_REGISTERS_MAX, _REGISTERS_MAX_FEW = 176, 152
"""The most that `registers_at_least` may be: with 208 or 200 registers a thread, and with 184."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaBackwardConfig(Config):
    """Launch parameters of Hopper's kernel of all gradients: two warpgroups of keys, one of dQ, one that loads."""

    k_stages: int = 1
    """Buffers of K: with two that of the next tile comes while the last products with one are made."""
    q_stages: int = 3
    """Buffers of Q, with lse and delta of their queries: scores are made a step ahead, and dK comes last of a step."""
    dout_stages: int = 2
    """Buffers of dO."""
    k_in_registers: bool = False
    """K is read into registers once a tile, for the scores, or by wgmma from shared memory in each step."""
    v_in_registers: bool = False
    """The same of V, for dP."""

    half_dq: bool = False
    """dQ is made 64 columns at a time, which takes half of the registers."""
    dq_by_tma: bool = False
    """dQ is added to its sums by TMA, by way of shared memory, or by each thread from its registers."""
    early_scores: bool = False
    """Scores of the next step are made while dP is, which takes 48 registers."""
    stream_k: int = 0
    """SMs among which tiles of keys are divided where whole ones keep them less busy; 0: all tiles are whole."""

    @property
    def threads(self) -> int:
        """Threads of a block, of four warpgroups."""
        return WARPGROUP_THREADS * (WARPGROUPS + 2)

    def box_rows(self, problem: Problem) -> dict[str, int]:
        """Rows of a box of each tensor that goes by TMA."""
        return {"q": self.tile_m, "dout": self.tile_m, "k": self.tile_n, "v": self.tile_n}


def smem_bytes(config: WgmmaBackwardConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block, which its kernel asserts when compiled."""
    panels = -(-problem.head_dim // BOX_COLUMNS)
    rows = (config.k_stages + 1) * config.tile_n + (config.q_stages + config.dout_stages) * config.tile_m
    ds = _DS_STAGES * config.tile_n * config.tile_m * ELEMENT_BYTES
    statistics = config.q_stages * STATISTICS * config.tile_m * FP32_BYTES
    dq = _DQ_BUFFERS * config.tile_m * padded(dq_columns(config, problem)) * FP32_BYTES if config.dq_by_tma else 0
    return rows * panels * PANEL_ROW_BYTES + ds + statistics + dq + BARRIER_BYTES


def wgmma_columns(config: WgmmaBackwardConfig, problem: Problem) -> tuple[int, ...]:
    """The widths of the kernel's wgmmas: of scores and dP, of dK and dV, of dQ."""
    return config.tile_m, problem.head_dim, dq_columns(config, problem)


def dq_columns(config: WgmmaBackwardConfig, problem: Problem) -> int:
    """The columns of dQ that are made at a time."""
    return min(problem.head_dim, BOX_COLUMNS) if config.half_dq else problem.head_dim


def registers_at_least(config: WgmmaBackwardConfig, problem: Problem) -> int:
    """32-bit registers a consumer's thread needs: dK and dV, scores or dP, weights or dS, K and V that stay."""
    head_dim, kept = padded(problem.head_dim, 8), padded(problem.head_dim) // 4
    held = kept * (config.k_in_registers + config.v_in_registers)
    products = 2 if config.early_scores else 1
    return head_dim + products * (config.tile_m // 2 + config.tile_m // 4) + held


def statistics_bytes(problem: Problem, tile_m: int) -> int:
    """Workspace of lse and delta of all queries, in whole tiles of so many."""
    if problem.packing is None:
        count = tiles(problem.seq_q, tile_m)
    else:
        count = problem.packing.tiles_max(problem.seq_q, tile_m)
    return problem.batch * problem.heads_q * count * tile_m * STATISTICS * FP32_BYTES


def division_of(problem: Problem, config: WgmmaBackwardConfig) -> Divided | None:
    """How tiles of keys are divided among SMs; None: all are whole."""
    return stream_k.division_of(problem, config.tile_m, config.tile_n, config.stream_k)


def workspace_areas(problem: Problem, config: WgmmaBackwardConfig) -> dict[str, int]:
    """The areas of a launch's workspace, and the bytes of each."""
    division = division_of(problem, config)
    return {
        "statistics": statistics_bytes(problem, config.tile_m),
        "dq_sum": dq_sum_bytes(problem),
        WORKSPACE: COUNTER_BYTES,
        **({} if division is None else {"key_sums": division.sums_bytes(problem.head_dim, config.tile_n)}),
        **list_areas(problem, TILE_LISTS),
    }


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes that a launch takes from the allocator."""
    assert isinstance(config, WgmmaBackwardConfig)
    return sum(workspace_areas(problem, config).values())


def why_not(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    assert isinstance(config, WgmmaBackwardConfig)
    fields: dict[str, FieldRule] = {
        "tile_m": one_of(ROW_TILE),
        "tile_n": one_of(WARPGROUPS * WARPGROUP_ROWS),
        "k_stages": one_of(1, 2),
        "q_stages": between(2, 8),
        "dout_stages": between(1, 8),
        "stream_k": between(0, 1024),
    }
    if wrong := failed(field_checks(config, fields)):
        return wrong
    reasons = [
        reason for it in tensor_maps(problem, config.box_rows(problem)).values() for reason in why_not_mapped(it)
    ]
    is_wide = problem.head_dim >= WIDE_FROM
    registers = registers_at_least(config, problem)
    most = _REGISTERS_MAX if is_wide or config.early_scores else _REGISTERS_MAX_FEW
    needed = f"{registers} registers for gradients, scores, weights, K and V ({config})"
    columns = dq_columns(config, problem)
    columns_max = BOX_COLUMNS if is_wide or config.early_scores else WIDE_FROM - 1
    rows = max(problem.seq_q, problem.seq_kv)
    checks = (
        (registers <= most, needed, f"up to {most}"),
        (columns <= columns_max, f"{columns} columns of dq at a time ({config})", f"up to {columns_max}: half_dq"),
        (problem.packing is None or rows <= RAGGED_ROWS, f"a packed batch of {rows} rows", f"up to {RAGGED_ROWS}"),
    )
    blocks = max(key_tiles(problem, config.tile_n), query_tiles(problem, ROW_TILE))
    return (*reasons, *failed((*checks, *size_checks(config, arch, smem_bytes(config, problem), blocks))))
