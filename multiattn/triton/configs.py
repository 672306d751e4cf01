"""The config records of the plain Triton kernels, of both directions, and what fits a problem and an arch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from multiattn.plan.arch import Arch
from multiattn.plan.columns import one_width
from multiattn.plan.config import Config
from multiattn.plan.support import Reason
from multiattn.problem import Problem

ELEMENT_BYTES = 2  # fp16 and bf16
SUM_BYTES = 4  # fp32
GRID_MAX = 2**31 - 1
"""Most programs of a launch: CUDA's limit in x."""
ROWS_BESIDE = 64
"""Rows of a program of the small kernels before and after a backward's one pass."""
ASYNCHRONOUS = ("sm90", "sm100", "sm103")
"""Arches whose tensor cores read shared memory in the background."""


class Tiles(NamedTuple):
    """The tiles of one kernel in short: queries and keys of a block, warps, blocks in flight."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonConfig(Config):
    """Tiles and what Triton's compiler is told."""

    num_warps: int
    num_stages: int
    """Blocks of keys in flight; 1 switches the pipeline off."""
    heads_together: int = 1
    """Heads whose tiles alternate in launch order: 1 walks one head after the other, more suits a mask."""
    registers: int | None = None
    """Most registers per thread; None leaves it to the compiler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig(TritonConfig):
    """Tiles of the pass over the queries, and with two passes also those of the pass over the keys: dq_*."""

    dq_tile_m: int | None = None
    dq_tile_n: int | None = None
    dq_num_warps: int | None = None
    dq_num_stages: int | None = None

    @classmethod
    def of(cls, keys: Tiles, dq: Tiles | None = None, *, heads_together: int = 1) -> BackwardConfig:
        """A config with `keys` for the pass over the queries and `dq` for the one over the keys, if there is one."""
        of_dq = {} if dq is None else {f"dq_{name}": value for name, value in dq._asdict().items()}
        return cls(**keys._asdict(), **of_dq, heads_together=heads_together)

    @property
    def of_dq(self) -> TritonConfig:
        """Tiles of the pass over the keys; ValueError without one."""
        tile_m, tile_n, num_warps, num_stages = self.dq_fields
        if tile_m is None or tile_n is None or num_warps is None or num_stages is None:
            raise ValueError(f"config: got {self}; allowed one with all of dq_tile_m, dq_tile_n, dq_num_*")
        tiles = Tiles(tile_m, tile_n, num_warps, num_stages)
        return TritonConfig(**tiles._asdict(), heads_together=self.heads_together)

    @property
    def dq_fields(self) -> tuple[int | None, int | None, int | None, int | None]:
        """The tiles of the pass over the keys; all None without one."""
        return self.dq_tile_m, self.dq_tile_n, self.dq_num_warps, self.dq_num_stages


# ---------------------------------------------------------------- what a launch takes


def head_pad(head_dim: int) -> int:
    """head_dim as the kernel computes it: Triton's tiles are powers of two, and tl.dot wants at least 16."""
    return one_width(head_dim)


def query_programs(problem: Problem, rows: int) -> int:
    """Programs of a kernel that gives each a tile of `rows` queries of one head."""
    return -(-problem.seq_q // rows) * problem.batch * problem.heads_q


def key_programs(problem: Problem, rows: int) -> int:
    """Programs of a kernel that gives each a tile of `rows` keys of one key/value head."""
    return -(-problem.seq_kv // rows) * problem.batch * problem.heads_kv


def smem_bytes(problem: Problem, arch: Arch, config: TritonConfig) -> int:
    """Shared memory that the tiles of q, k and v take; the compiler adds barriers and scratch of a few KiB.

    One more block of keys is held where the tensor cores read it in the background.
    """
    if config.num_stages == 1:
        blocks = 1  # nothing is in flight: V takes the place of K
    else:
        blocks = 2 * (config.num_stages if arch.name in ASYNCHRONOUS else config.num_stages - 1)
    rows = config.tile_m + config.tile_n * blocks
    return rows * head_pad(problem.head_dim) * ELEMENT_BYTES


def smem_bytes_of_keys(problem: Problem, arch: Arch, config: TritonConfig) -> int:
    """Shared memory that a backward's pass over the queries takes at least: the blocks of q and dout in flight.

    Where the tensor cores read it in the background, also the tiles of k and v.
    """
    rows = 2 * config.tile_m * max(1, config.num_stages - 1)
    if arch.name in ASYNCHRONOUS:
        rows = 2 * config.tile_n + 2 * config.tile_m * config.num_stages
    return rows * head_pad(problem.head_dim) * ELEMENT_BYTES


def workspace(problem: Problem, config: Config | None, *, one_pass: bool) -> int:
    """Bytes of a backward's delta, and in one pass of its sum of dq, both fp32."""
    columns = 1 + (problem.head_dim if one_pass else 0)
    return problem.batch * problem.heads_q * problem.seq_q * columns * SUM_BYTES


# ---------------------------------------------------------------- what fits


def why_not_fit(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why a forward with `config` cannot run `problem` on `arch`."""
    if not isinstance(config, TritonConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="TritonConfig"),)
    return _wrong_pass_over_keys(problem, arch, config, smem_bytes(problem, arch, config))


def why_not_fit_backward(problem: Problem, arch: Arch, config: Config, *, one_pass: bool) -> tuple[Reason, ...]:
    """Every reason why a backward with `config` cannot run `problem` on `arch` in one pass, or in two."""
    if not isinstance(config, BackwardConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="BackwardConfig"),)
    reasons = [*_wrong_fields(config)]
    reasons += too_much_smem(problem, arch, config, smem_bytes_of_keys(problem, arch, config))
    reasons += too_many_programs(key_programs(problem, max(config.tile_n, 1)))
    if one_pass:
        if config.dq_fields != (None,) * 4:
            reasons.append(Reason(code="config", got=str(config), allowed="no dq_*: there is no pass over the keys"))
        return (*reasons, *too_many_programs(query_programs(problem, ROWS_BESIDE)))
    if None in config.dq_fields:
        return (*reasons, Reason(code="config", got=str(config), allowed="all of dq_*, for the pass over the keys"))
    needed = smem_bytes(problem, arch, config.of_dq)
    if arch.name in ASYNCHRONOUS:
        needed += config.of_dq.tile_m * head_pad(problem.head_dim) * ELEMENT_BYTES  # dout, beside q
    return (*reasons, *_wrong_pass_over_keys(problem, arch, config.of_dq, needed))


def _wrong_pass_over_keys(problem: Problem, arch: Arch, config: TritonConfig, needed: int) -> tuple[Reason, ...]:
    programs = query_programs(problem, max(config.tile_m, 1))
    return (*_wrong_fields(config), *too_much_smem(problem, arch, config, needed), *too_many_programs(programs))


def _wrong_fields(config: TritonConfig) -> list[Reason]:
    """A reason for every field of a config that no kernel accepts."""

    def refuse(allowed: str, *names: str) -> list[Reason]:
        return [Reason(code="config", got=f"{name}={getattr(config, name)}", allowed=allowed) for name in names]

    powers = [name for name in ("tile_m", "tile_n", "num_warps") if not _is_power_of_two(getattr(config, name))]
    tiles = [name for name in ("tile_m", "tile_n") if getattr(config, name) not in range(16, 257)]
    counts = [name for name in ("num_stages", "heads_together") if getattr(config, name) < 1]
    return [*refuse("powers of two", *powers), *refuse("16 to 256", *tiles), *refuse("at least 1", *counts)]


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def too_much_smem(problem: Problem, arch: Arch, config: Config, needed: int) -> list[Reason]:
    """A reason if a block of `arch` cannot have the bytes of shared memory that are needed."""
    if not arch.is_gpu or needed <= arch.smem_per_block:
        return []
    got = f"{config} with D={problem.head_dim}: {needed} bytes of shared memory or more"
    allowed = f"{arch.smem_per_block} bytes on {arch.name}"
    return [Reason(code="config", got=got, allowed=allowed, hint="take smaller tiles or fewer stages")]


def too_many_programs(programs: int) -> list[Reason]:
    """A reason if a launch would be larger than a grid can be."""
    if programs <= GRID_MAX:
        return []
    return [Reason(code="config", got=f"{programs} programs", allowed=f"a grid of up to {GRID_MAX}")]
