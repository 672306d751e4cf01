"""Tiles of Hopper's forward over caches as data: `SplitWgmmaConfig`, its shared memory, and what fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from multiattn.cuda.configs import padded
from multiattn.cuda.split_configs import rows_checks, workspace_areas
from multiattn.cuda.tensor_maps import BOX_COLUMNS, tensor_maps, why_not_mapped
from multiattn.cuda.wgmma_configs import BARRIER_BYTES, PANEL_ROW_BYTES, WARPGROUP_ROWS, WARPGROUP_THREADS
from multiattn.paged import SPLITS_MAX
from multiattn.plan import remedies
from multiattn.plan.arch import WARP_THREADS, Arch
from multiattn.plan.config import Config
from multiattn.plan.limits import FieldRule, between, failed, field_checks, one_of, size_checks
from multiattn.plan.schedule import choose_splits, row_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

REGISTERS_MAX: Mapping[int, int] = {1: 208, 2: 208, 3: 144}
"""By warpgroups that compute, for outputs, scores, weights and Q: the rest of a thread's is for all else."""
_ROOM_WITH_Q: Mapping[int, int] = {1: 200, 2: 192, 3: 128}
"""Up to which Q may fill them."""
_DEPTH = 16  # columns of Q that a wgmma multiplies: a fragment of 4 registers
_GROUP_ROWS = 8  # in which the swizzle repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitWgmmaConfig(Config):
    """Launch parameters of Hopper's forward over caches; `kernels/split_keys_wgmma_traits.cuh` says what each does.

    `tile_m` is rows: queries of all heads that share a key/value head.
    """

    stages: int
    """Buffers that tiles of K and of V take turns in."""
    q_in_registers: bool = False
    """As many of Q's fragments as there is room for are read into registers once."""
    pingpong: bool = False
    """Warpgroups take turns: one has the tensor cores while another has the softmax."""
    lazy_max: bool = False
    """Weights are made relative to the maxima of earlier blocks, as `WgmmaConfig` says."""
    gathers: bool = False
    """A warpgroup gathers keys one by one with cp.async; else a warp loads boxes of them by TMA."""
    keys_min: int = 512
    """The least keys of the longest sequence that are a block's part."""
    splits: int = 0
    """Parts that the keys are divided into. A rule leaves it open, with 0, and a plan has a number."""

    @property
    def warpgroups(self) -> int:
        """Those that multiply: consumers."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: its consumers, and the producer's warpgroup."""
        return WARPGROUP_THREADS * (self.warpgroups + 1)

    def box_rows(self, problem: Problem) -> dict[str, int]:
        """Rows of a box of each tensor that goes by TMA: the most that no page and no tile ends within."""
        return {} if self.gathers else dict.fromkeys(("k", "v"), box_rows(self, problem))


def box_rows(config: SplitWgmmaConfig, problem: Problem) -> int:
    """Keys of a box; 0: there is none."""
    if config.gathers:
        return 0
    page = None if problem.cache is None else problem.cache.page
    return config.tile_n if page is None else math.gcd(page, config.tile_n)


def settle(problem: Problem, arch: Arch, config: Config) -> SplitWgmmaConfig:
    """The config with a number of splits."""
    assert isinstance(config, SplitWgmmaConfig)
    if problem.has_score:
        config = replace(config, lazy_max=False)
    if config.splits and problem.asked_splits is None:
        return config
    sizes = {"tile_m": config.tile_m, "keys_min": config.keys_min, "blocks_per_sm": 1}
    return replace(config, splits=choose_splits(problem, arch, **sizes))


def smem_bytes(config: SplitWgmmaConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block: Q, stages for K and V, barriers.

    Every kernel asserts at compile time that it needs just this.
    """
    rows = config.tile_m + config.stages * config.tile_n
    return rows * _panels(problem) * PANEL_ROW_BYTES + BARRIER_BYTES


def _panels(problem: Problem) -> int:
    return -(-problem.head_dim // BOX_COLUMNS)


def kept_steps(config: SplitWgmmaConfig, problem: Problem) -> int:
    """How many of Q's parts of 16 columns, from the first on, stay in registers."""
    if not config.q_in_registers:
        return 0
    room = _ROOM_WITH_Q[config.warpgroups] - _registers_without_q(config, problem)
    return min(max(room // 4, 0), padded(problem.head_dim) // _DEPTH)


def _registers_without_q(config: SplitWgmmaConfig, problem: Problem) -> int:
    output, scores, weights = padded(problem.head_dim, 8) // 2, config.tile_n // 2, config.tile_n // 4
    return output + scores + weights


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes that a launch takes from the allocator."""
    assert isinstance(config, SplitWgmmaConfig)
    return sum(workspace_areas(problem, config).values())


def blocks(config: SplitWgmmaConfig, problem: Problem) -> int:
    """Blocks of a launch: one for each split of each tile of rows."""
    return row_tiles(problem, config.tile_m) * config.splits


def why_not(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    assert isinstance(config, SplitWgmmaConfig)
    fields: dict[str, FieldRule] = {
        "tile_m": one_of(64, 128, 192),
        "tile_n": (lambda it: it in range(16, 257, 16), "multiples of 16 from 16 to 256"),
        "stages": between(3, 16),
        "splits": between(1, SPLITS_MAX),
    }
    if wrong := failed(field_checks(config, fields)):
        return wrong
    if reasons := _why_not_boxes(problem, config):
        return reasons
    registers, kept = _registers_without_q(config, problem), kept_steps(config, problem)
    most = REGISTERS_MAX[config.warpgroups]
    needed = f"{registers} registers for output, scores and weights ({config})"
    beside = f"q_in_registers with {registers} registers for all else ({config})"
    return failed(
        (
            (not config.pingpong or config.warpgroups > 1, f"pingpong with tile_m={config.tile_m}", "tile_m 128, 192"),
            (registers <= most, needed, f"up to {most} with {config.warpgroups} warpgroups"),
            (not config.q_in_registers or kept > 0, beside, f"up to {_ROOM_WITH_Q[config.warpgroups] - 4}"),
            (not config.lazy_max or not problem.has_score, "lazy_max with an expression for scores", "exact maxima"),
            *rows_checks(problem, config),
            *size_checks(config, arch, smem_bytes(config, problem), blocks(config, problem)),
        )
    )


def _why_not_boxes(problem: Problem, config: SplitWgmmaConfig) -> tuple[Reason, ...]:
    """Reasons why TMA, or a warpgroup that gathers, cannot bring keys."""
    rows = box_rows(config, problem)
    if config.gathers:
        most = WARPGROUP_THREADS  # a lane for each
        checks = (
            (config.warpgroups < 3, f"gathers with tile_m={config.tile_m}", "tile_m 64, 128"),
            (config.tile_n <= most, f"gathers with tile_n={config.tile_n}", f"tile_n up to {most}"),
        )
        return failed(checks)
    page = None if problem.cache is None else problem.cache.page
    if page is not None and rows % _GROUP_ROWS:
        allowed = f"multiples of {_GROUP_ROWS}"
        return (Reason(code="page", got=f"pages of {page} keys", allowed=allowed, hint=remedies.OTHERS),)
    boxes = config.tile_n // rows * _panels(problem)
    if boxes > WARP_THREADS:
        got = f"{boxes} boxes for {config.tile_n} keys in pages of {page}"
        allowed = f"up to {WARP_THREADS} boxes, one for each lane"
        return (Reason(code="page", got=got, allowed=allowed, hint=remedies.OTHERS),)
    maps = tensor_maps(problem, config.box_rows(problem)).values()
    return tuple(reason for it in maps for reason in why_not_mapped(it))
