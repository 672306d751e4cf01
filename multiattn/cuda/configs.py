"""Tiles of the CUDA backend as data: `CudaConfig`, what of it fits a GPU, the rules, and what a sweep tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multiattn.arch import KIB, WARP_THREADS, Arch
from multiattn.backend import Variant
from multiattn.config import Config, Rule
from multiattn.problem import Problem
from multiattn.support import Reason

FRAGMENT_ROWS = 16  # of mma.m16n8k16: queries of one fragment, and what head_dim is padded to a multiple of
ELEMENT_BYTES = 2
GRID_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig(Config):
    """Launch parameters of the forward kernel; `kernels/forward.cuh` says what each does."""

    warps: int
    """Of a block; they split the tile's queries, whole fragments of 16 each."""
    stages: int
    """Buffers of K and of V. One: K and V are loaded in turns. More: `stages - 1` blocks ahead."""
    q_in_registers: bool = False
    """Q's fragments stay in registers, or are read from shared memory for every block of keys."""
    occupancy: int = 1
    """Blocks on an SM that the compiler must leave registers for."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP_THREADS

    @property
    def rows_per_warp(self) -> int:
        """Queries of one warp."""
        return self.tile_m // self.warps


def padded(head_dim: int) -> int:
    """The width of a row in shared memory, in elements."""
    return -(-head_dim // FRAGMENT_ROWS) * FRAGMENT_ROWS


def smem_bytes(flags: Mapping[str, Any], config: CudaConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block. Every kernel asserts at compile time that it needs just this."""
    if flags["share"] != "none":
        raise ValueError(f"share: got {flags['share']!r}; allowed none")
    row = padded(problem.head_dim) * ELEMENT_BYTES
    return (config.tile_m + 2 * config.stages * config.tile_n) * row


def registers_at_least(config: CudaConfig, problem: Problem) -> int:
    """32-bit registers a thread needs for scores, output and kept Q; addresses and read-ahead come on top."""
    rows = config.rows_per_warp
    kept_q = rows * padded(problem.head_dim) // (2 * WARP_THREADS) if config.q_in_registers else 0
    return rows * (config.tile_n + padded(problem.head_dim)) // WARP_THREADS + kept_q


def why_not(flags: Mapping[str, Any], problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`."""
    assert isinstance(config, CudaConfig)
    reasons = []
    if config.tile_m % (FRAGMENT_ROWS * config.warps) or config.tile_n % FRAGMENT_ROWS or config.tile_n < 1:
        allowed = f"tile_m in multiples of {FRAGMENT_ROWS} per warp, tile_n in multiples of {FRAGMENT_ROWS}"
        reasons.append(Reason(code="config", got=str(config), allowed=allowed))
    if config.warps not in (2, 4, 8, 16):
        reasons.append(Reason(code="config", got=f"warps={config.warps}", allowed="2, 4, 8, 16"))
    if not 1 <= config.stages <= 4:
        reasons.append(Reason(code="config", got=f"stages={config.stages}", allowed="1 to 4"))
    needed = smem_bytes(flags, config, problem)
    if arch.is_gpu and needed > arch.smem_per_block:
        got = f"{needed} bytes of shared memory ({config})"
        reasons.append(Reason(code="config", got=got, allowed=f"{arch.smem_per_block} bytes a block on {arch.name}"))
    blocks = grid_blocks(config, problem)
    if blocks > GRID_MAX:
        reasons.append(Reason(code="config", got=f"{blocks} blocks", allowed=f"a grid of up to {GRID_MAX}"))
    return tuple(reasons)


def query_tiles(config: CudaConfig, problem: Problem) -> int:
    """Tiles of queries of one head."""
    return -(-problem.seq_q // config.tile_m)


def grid_blocks(config: CudaConfig, problem: Problem) -> int:
    """Blocks of a launch: one per tile of queries, head and batch entry."""
    return query_tiles(config, problem) * problem.heads_q * problem.batch


_BIG_SMEM = ("sm80", "sm100", "sm103")  # 163 KiB a block and more
_SMALL_SMEM = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB

_GUESS = "a guess, no GPU of this kind measured: "

_H200 = "H200, 2026-11-21, NVRTC 13.0, B4 N=4096 H*D=2048 bf16, best of the candidates: "

RULES: tuple[Rule[CudaConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2),
        why="emulated: small tiles build and run fast, yet have two loops, two stages and four warps",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=3, q_in_registers=True),
        why=_H200 + "320 TFLOPS full, 303 causal; 2 stages 314 and 298; Q in shared memory 311 and 294",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=False,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=1),
        why=_H200 + "387 TFLOPS; 2 stages 384; 64x128 with Q in registers 329",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=True,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=2),
        why=_H200.replace("best", "the best that spills nothing")
        + "359 TFLOPS; 1 stage 360; 64x128 with Q in registers 316",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        config=CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2, q_in_registers=True),
        why=_H200 + "327 TFLOPS full, 309 causal; 64x64 with 1 stage 322 and 305; 128x128 with 8 warps 316 and 303",
    ),
    Rule(
        arches=(*_BIG_SMEM, *_SMALL_SMEM),
        head_dim_max=64,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=2, q_in_registers=True),
        why=_GUESS + "32 rows a warp read K and V half as often; Q, scores and output take 160 registers",
    ),
    Rule(
        arches=("sm80", *_SMALL_SMEM),
        head_dim_min=65,
        head_dim_max=128,
        causal=False,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=1),
        why=_GUESS + "FlashAttention-2's tile for D=128; two blocks an SM where it has 128 KiB",
    ),
    Rule(
        arches=(*_BIG_SMEM, *_SMALL_SMEM),
        head_dim_min=65,
        head_dim_max=128,
        config=CudaConfig(tile_m=128, tile_n=32, warps=4, stages=2),
        why=_GUESS + "as many bytes as 128x64 with 1 stage, which spills when causal, and on sm100 always",
    ),
    Rule(
        arches=_BIG_SMEM,
        head_dim_min=129,
        config=CudaConfig(tile_m=128, tile_n=64, warps=8, stages=1),
        why=_GUESS + "16 rows a warp is what the output leaves registers for; eight warps share one K and V",
    ),
    Rule(
        arches=_SMALL_SMEM,
        head_dim_min=129,
        config=CudaConfig(tile_m=64, tile_n=64, warps=4, stages=1),
        why=_GUESS + "96 KiB at D=256 is what a block can have",
    ),
)
"""First match wins."""

_SHAPES = ((64, 4), (128, 4), (128, 8))  # (tile_m, warps)
_REGISTERS_MAX = 208  # of 255: the rest is addresses, read-ahead and the softmax state
_REGISTERS_OF_THREE = 128  # of 168, which three blocks of four warps on an SM leave a thread
_ROOM_FOR_Q = 176  # up to here Q in registers costs nothing


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[CudaConfig]:
    """Configs worth timing: those that fit shared memory and, by a lower bound, the registers."""
    tried = (
        CudaConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            warps=warps,
            stages=stages,
            q_in_registers=q_in_registers,
            occupancy=occupancy,
        )
        for tile_m, warps in _SHAPES
        for tile_n in (32, 64, 128)
        for stages in (1, 2, 3)
        for q_in_registers in (True, False)
        for occupancy in (1, 3)
    )
    return tuple(config for config in tried if _is_worth_timing(variant, problem, arch, config))


def _is_worth_timing(variant: Variant, problem: Problem, arch: Arch, config: CudaConfig) -> bool:
    """Whether nothing else beats `config` on paper: a sweep is some twenty configs, not a hundred."""
    registers = registers_at_least(config, problem)
    blocks = max(config.occupancy, 2 if config.warps == 4 else 1)  # four warps alone on an SM starve it
    registers_max = _REGISTERS_MAX if config.occupancy == 1 else _REGISTERS_OF_THREE
    if variant.fits(problem, arch, config) or registers > registers_max:
        return False
    if blocks * (smem_bytes(dict(variant.flags), config, problem) + KIB) > arch.smem_per_sm:
        return False
    if config.occupancy > 1 and (config.warps == 8 or config.tile_n == 32):
        return False
    if config.tile_n == 32 and (config.stages != 2 or problem.head_dim <= 64):
        return False  # a barrier every 32 keys is for where registers leave no choice
    if config.tile_n == 128 and config.stages == 3:
        return False  # 128 keys ahead are ahead enough
    with_q = registers_at_least(replace(config, q_in_registers=True), problem)
    return config.q_in_registers or with_q > _ROOM_FOR_Q
