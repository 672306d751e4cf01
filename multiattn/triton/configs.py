"""The config records of the plain Triton kernels, of both directions, and what fits a problem and an arch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.schedule import NARROWEST, key_tiles, one_width, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

ELEMENT_BYTES = 2  # fp16 and bf16
ROWS_BESIDE = 64
"""Rows of a program of the small kernels before and after a backward's one pass."""
ASYNCHRONOUS = ("sm90", "sm100", "sm103")
"""Arches whose tensor cores read shared memory in the background."""


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


def tiles(tile_m: int, tile_n: int, num_warps: int, num_stages: int, **more: Any) -> TritonConfig:
    """A config in short."""
    return TritonConfig(tile_m=tile_m, tile_n=tile_n, num_warps=num_warps, num_stages=num_stages, **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonTwoPassConfig(TritonConfig):
    """Tiles of a backward's pass over the queries, and those of its pass over the keys, which comes first: dq_*."""

    dq_tile_m: int
    dq_tile_n: int
    dq_num_warps: int
    dq_num_stages: int

    @classmethod
    def of(cls, keys: TritonConfig, dq: TritonConfig) -> TritonTwoPassConfig:
        """A config with `keys` for the pass over the queries and the tiles of `dq` for the one over the keys."""
        return cls(**asdict(keys), **{f"dq_{name}": getattr(dq, name) for name in _TILE_FIELDS})

    @property
    def of_dq(self) -> TritonConfig:
        """Tiles of the pass over the keys."""
        own = {name: getattr(self, f"dq_{name}") for name in _TILE_FIELDS}
        return TritonConfig(**own, heads_together=self.heads_together)


_REGISTERS_OF_GRADIENTS = 192
"""Registers of a thread for the sums of dk and dv, and for four tiles like the scores, where captured tensors have a
gradient. Compiled for sm90 with a bias of every score, instructions of the loops that spill: at D=64 none with 64 x 64
and 700 with 128 x 64, at D=128 21 with 32 x 64 and 234 with 64 x 64."""


def cut(config: TritonConfig, problem: Problem, *, is_backward: bool) -> TritonConfig:
    """The config with tiles that divide the blocks of a block mask, and leave registers for gradients.

    Where captured tensors have a gradient, a backward's pass over the queries takes fewer of them at a time: beside
    scores, weights and their gradients a thread has the addresses of what it reads and adds to.
    """
    if (blocks := problem.blocks) is not None:
        sizes = {"tile_m": blocks.queries, "tile_n": blocks.keys, "dq_tile_m": blocks.queries, "dq_tile_n": blocks.keys}
        own = {name: math.gcd(getattr(config, name), size) for name, size in sizes.items() if hasattr(config, name)}
        config = replace(config, **own)
    if is_backward and problem.score is not None and problem.score.gradients:
        per_key = _REGISTERS_OF_GRADIENTS * 32 * config.num_warps // config.tile_n
        tile_m = config.tile_m
        while tile_m > NARROWEST and 2 * one_width(problem.head_dim) + 4 * tile_m > per_key:
            tile_m //= 2
        config = replace(config, tile_m=tile_m)
    return config


_TILE_FIELDS = ("tile_m", "tile_n", "num_warps", "num_stages")


# ---------------------------------------------------------------- what a launch takes


def smem_bytes(problem: Problem, arch: Arch, config: TritonConfig) -> int:
    """Shared memory that the tiles of q, k and v take; the compiler adds barriers and scratch of a few KiB.

    One more block of keys is held where the tensor cores read it in the background.
    """
    if config.num_stages == 1:
        blocks = 1  # nothing is in flight: V takes the place of K
    else:
        blocks = 2 * (config.num_stages if arch.name in ASYNCHRONOUS else config.num_stages - 1)
    rows = config.tile_m + config.tile_n * blocks
    return rows * one_width(problem.head_dim) * ELEMENT_BYTES


def smem_bytes_of_keys(problem: Problem, arch: Arch, config: TritonConfig) -> int:
    """Shared memory that a backward's pass over the queries takes at least: the blocks of q and dout in flight.

    Where the tensor cores read it in the background, also the tiles of k and v.
    """
    rows = 2 * config.tile_m * max(1, config.num_stages - 1)
    if arch.name in ASYNCHRONOUS:
        rows = 2 * config.tile_n + 2 * config.tile_m * config.num_stages
    return rows * one_width(problem.head_dim) * ELEMENT_BYTES


# ---------------------------------------------------------------- what fits


_FIELDS: Mapping[str, limits.FieldRule] = {
    **dict.fromkeys(("tile_m", "tile_n"), limits.powers_of_two(16, 256)),
    "num_warps": limits.powers_of_two(1),
    **dict.fromkeys(("num_stages", "heads_together"), limits.AT_LEAST_1),
}


def why_not_fit(problem: Problem, arch: Arch, config: TritonConfig) -> tuple[Reason, ...]:
    """Every reason why a forward with `config` cannot run `problem` on `arch`."""
    config = cut(config, problem, is_backward=False)
    return limits.failed(_checks_by_queries(problem, arch, config, smem_bytes(problem, arch, config)))


def why_not_fit_backward(problem: Problem, arch: Arch, config: TritonConfig) -> tuple[Reason, ...]:
    """Every reason why a backward with `config` cannot run `problem` on `arch`: in two passes, or in one."""
    config = cut(config, problem, is_backward=True)
    programs, needed = key_tiles(problem, max(config.tile_n, 1)), smem_bytes_of_keys(problem, arch, config)
    checks = [*limits.field_checks(config, _FIELDS), *limits.size_checks(config, arch, needed, programs)]
    if isinstance(config, TritonTwoPassConfig):
        needed = smem_bytes(problem, arch, config.of_dq)
        if arch.name in ASYNCHRONOUS:
            needed += config.dq_tile_m * one_width(problem.head_dim) * ELEMENT_BYTES  # dout, beside q
        checks += _checks_by_queries(problem, arch, config.of_dq, needed)
    else:
        checks += limits.size_checks(config, arch, 0, query_tiles(problem, ROWS_BESIDE))
    return limits.failed(checks)


def _checks_by_queries(problem: Problem, arch: Arch, config: TritonConfig, needed: int) -> list[limits.Check]:
    """Checks of a kernel whose programs own queries, and that needs so many bytes of shared memory."""
    programs = query_tiles(problem, max(config.tile_m, 1))
    return [*limits.field_checks(config, _FIELDS), *limits.size_checks(config, arch, needed, programs)]
