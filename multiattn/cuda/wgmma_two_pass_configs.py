"""Tiles of Hopper's backward in two passes as data: its config, shared memory and workspace, and what fits."""

from __future__ import annotations

from dataclasses import dataclass

from multiattn.cuda.configs import ELEMENT_BYTES, FP32_BYTES, list_areas, padded
from multiattn.cuda.tensor_maps import BOX_COLUMNS, tensor_maps, why_not_mapped
from multiattn.cuda.wgmma_backward_configs import STATISTICS, statistics_bytes
from multiattn.cuda.wgmma_configs import BARRIER_BYTES, PANEL_ROW_BYTES, WARPGROUP_ROWS, WARPGROUP_THREADS
from multiattn.packed import RAGGED_ROWS, TILE_LISTS
from multiattn.plan.abi import WORKSPACE
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.limits import FieldRule, between, failed, field_checks, one_of, size_checks
from multiattn.plan.schedule import COUNTER_BYTES, key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

WARPGROUPS = 2
"""Warpgroups of either kernel that compute: of a gradient each, or of 64 queries each."""
QUERY_TILE = WARPGROUPS * WARPGROUP_ROWS
"""Queries of a block of the kernel of dq, and of the kernel of statistics."""
_WEIGHT_STAGES = 2
REGISTERS_MAX = 208
"""Registers for what `registers_at_least` counts: a thread has 232 or 240, and statistics and addresses come on top."""
KEPT_TO = 192
"""The last head_dim at which K and V have room in registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaTwoPassConfig(Config):
    """Launch parameters of Hopper's backward in two kernels: of dk and dv, and of dq.

    Each has two warpgroups that compute and one that loads. `tile_m` and `tile_n` are those of the first.
    """

    q_stages: int = 2
    """Buffers of Q in the kernel of dk and dv, with lse and delta of their queries."""
    dout_stages: int = 2
    """Buffers of dO in the same."""
    kv_in_registers: bool = False
    """K and V are read into registers once a tile, for scores and dP, or by wgmma from shared memory in each step."""
    ahead: bool = False
    """Scores of the next step are made before the gradients of a step, or behind them.

    Before them, weights are made while gradients are under way, but what a step loads is wanted earlier.
    """
    k_stages: int = 2
    """Buffers of K in the kernel of dq."""
    v_stages: int = 1
    """Buffers of V in the same."""
    dq_ahead: bool = False
    """As `ahead`, in the kernel of dq."""
    dp_late: bool = False
    """In the kernel of dq dP is made behind the weights of a step, not beside them.

    It leaves registers to an expression that reads an element for each key.
    """

    @property
    def threads(self) -> int:
        """Threads of a block of either kernel."""
        return WARPGROUP_THREADS * (WARPGROUPS + 1)

    def box_rows(self, problem: Problem) -> dict[str, int]:
        """Rows of a box of each tensor that goes by TMA."""
        return {"q": self.tile_m, "dout": self.tile_m, "k": self.tile_n, "v": self.tile_n}


def smem_bytes(config: WgmmaTwoPassConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block of the kernel of dk and dv, which asserts it when compiled."""
    rows = 2 * config.tile_n + (config.q_stages + config.dout_stages) * config.tile_m
    weights = _WEIGHT_STAGES * config.tile_n * config.tile_m * ELEMENT_BYTES
    statistics = config.q_stages * STATISTICS * config.tile_m * FP32_BYTES
    return rows * _row_bytes(problem) + weights + statistics + BARRIER_BYTES


def dq_smem_bytes(config: WgmmaTwoPassConfig, problem: Problem) -> int:
    """The same for the kernel of dq."""
    rows = 2 * QUERY_TILE + (config.k_stages + config.v_stages) * config.tile_n
    return rows * _row_bytes(problem) + BARRIER_BYTES


def _row_bytes(problem: Problem) -> int:
    """A row of a tile: whole panels."""
    return -(-problem.head_dim // BOX_COLUMNS) * PANEL_ROW_BYTES


def wgmma_columns(config: WgmmaTwoPassConfig, problem: Problem) -> tuple[int, ...]:
    """The widths of the wgmmas of both kernels: of scores and dP, and of gradients."""
    assert config.tile_m == config.tile_n
    return config.tile_m, problem.head_dim


def registers_at_least(config: WgmmaTwoPassConfig, problem: Problem) -> int:
    """32-bit registers a thread needs in the kernel of dk and dv: a gradient, scores or dP, weights or dS, K or V.

    In the kernel of dq there are scores and dP, and neither K nor V.
    """
    gradient, kept = padded(problem.head_dim, 8) // 2, padded(problem.head_dim) // 4 * config.kv_in_registers
    scores, operand = config.tile_m // 2, config.tile_m // 4
    keys = gradient + scores + operand * (1 + config.ahead) + kept
    return max(keys, gradient + 2 * scores + operand)


def workspace_areas(problem: Problem, config: WgmmaTwoPassConfig) -> dict[str, int]:
    """The areas of a launch's workspace, and the bytes of each."""
    return {
        "statistics": statistics_bytes(problem, config.tile_m),
        WORKSPACE: COUNTER_BYTES,
        **list_areas(problem, TILE_LISTS),
    }


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes that a launch takes from the allocator."""
    assert isinstance(config, WgmmaTwoPassConfig)
    return sum(workspace_areas(problem, config).values())


def why_not(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    assert isinstance(config, WgmmaTwoPassConfig)
    fields: dict[str, FieldRule] = {
        "tile_m": one_of(WARPGROUP_ROWS),
        "tile_n": one_of(WARPGROUP_ROWS),
        "q_stages": between(2, 8),
        "dout_stages": between(2, 8),
        "k_stages": between(2, 8),
        "v_stages": between(1, 8),
    }
    if wrong := failed(field_checks(config, fields)):
        return wrong
    reasons = [
        reason for it in tensor_maps(problem, config.box_rows(problem)).values() for reason in why_not_mapped(it)
    ]
    registers, rows = registers_at_least(config, problem), max(problem.seq_q, problem.seq_kv)
    needed = f"{registers} registers for a gradient, scores, weights, K or V ({config})"
    checks = (
        (registers <= REGISTERS_MAX, needed, f"up to {REGISTERS_MAX}"),
        (
            not config.kv_in_registers or problem.head_dim <= KEPT_TO,
            f"kv_in_registers of D={problem.head_dim}",
            f"D up to {KEPT_TO}",
        ),
        (not (config.dp_late and config.dq_ahead), "dp_late with dq_ahead", "one of them"),
        (problem.packing is None or rows <= RAGGED_ROWS, f"a packed batch of {rows} rows", f"up to {RAGGED_ROWS}"),
    )
    blocks = max(key_tiles(problem, config.tile_n), query_tiles(problem, QUERY_TILE))
    memory = max(smem_bytes(config, problem), dq_smem_bytes(config, problem))
    return (*reasons, *failed((*checks, *size_checks(config, arch, memory, blocks))))
