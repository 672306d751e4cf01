"""Tiles and compiler hints per arch: the rules, what may be asked for, and what is worth timing.

Shared memory is tileiras' own choice (it fits its pipeline to the occupancy asked for), so nothing here computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiattn.arch import Arch
from multiattn.backend import Variant
from multiattn.config import Config, Rule
from multiattn.problem import Problem
from multiattn.support import Reason

SMALLEST_TILE = 16
"""Rows: the smallest m, n and k that every arch's tensor cores take."""

MAX_GRID_X = 2**24 - 1  # cuda.tile's own limit for each dimension
MAX_GRID_Y = 2**16 - 1  # CUDA's


@dataclass(frozen=True, kw_only=True, slots=True)
class CutileConfig(Config):
    """Tiles, and hints of ``ct.kernel`` and ``ct.load``.

    `occupancy` is blocks per SM. `num_worker_warps` None lets the compiler choose (4); 8 spreads a tile's rows over two
    warpgroups. A latency, 1 to 10, is how far ahead a load is issued. At most `heads_together` heads advance together.
    """

    occupancy: int = 1
    num_worker_warps: int | None = None
    k_latency: int = 2
    v_latency: int = 4
    heads_together: int = 1


_H200 = "H200, 2026-11-21, tileiras 13.4, B4 N=4096 H*D=2048 bf16, best of the candidates: "
_GUESS = "a guess, never run: {}"

RULES: tuple[Rule[CutileConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=CutileConfig(tile_m=64, tile_n=64),
        why="interpreted: small enough that a short sequence still has several blocks of keys and a ragged one",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        causal=False,
        config=CutileConfig(tile_m=128, tile_n=64, occupancy=2, num_worker_warps=8, heads_together=4),
        why=_H200 + "466 TFLOPS; 64x64 at occupancy 4 456",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        causal=True,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=4, heads_together=32),
        why=_H200 + "450 TFLOPS; 4 heads together 433, one 430; 128x64 with 8 warps 404",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=False,
        config=CutileConfig(tile_m=64, tile_n=128, occupancy=2),
        why=_H200 + "622 TFLOPS; 4 heads together 606; 64x64 544; 128x128 with 8 warps 558 in an earlier run",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=True,
        config=CutileConfig(tile_m=64, tile_n=128, occupancy=2, heads_together=4),
        why=_H200 + "551 TFLOPS; one head at a time 531; 128x128 with 8 warps 489",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=False,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8),
        why=_H200 + "721 TFLOPS; without the 8 warps q spills: 64",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=True,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=4),
        why=_H200 + "649 TFLOPS; one head at a time 578; 128x64 595",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        causal=True,
        config=CutileConfig(tile_m=128, tile_n=64, occupancy=2),
        why=_GUESS.format("as without a mask, but 128x128 spills in the loop"),
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        causal=False,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=2),
        why=_GUESS.format("NVIDIA's own cuTile examples take 256x128 at occupancy 1 or 128x128 at 2 here"),
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_min=129,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1),
        why=_GUESS.format("the accumulator of one tile fills half of tensor memory"),
    ),
    Rule(
        arches=("sm86", "sm89"),
        head_dim_min=65,
        head_dim_max=128,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=2),
        why=_GUESS.format("of 64x64 causal tileiras 13.4 gives up the pipeline (16 KiB of shared memory, not 49)"),
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_max=128,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=2),
        why=_GUESS.format("NVIDIA's own cuTile examples take 64x64 at occupancy 2 on sm120"),
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_min=129,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=1),
        why=_GUESS.format("64 rows of q and 32 of k and of v fit the 99 KiB of the smaller arches"),
    ),
)


def why_not_fit(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`."""
    if not isinstance(config, CutileConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="CutileConfig"),)
    tiles = f"tile_m={config.tile_m} tile_n={config.tile_n}"
    checks = (
        (_is_tile(config.tile_m) and _is_tile(config.tile_n), tiles, f"powers of two from {SMALLEST_TILE}"),
        (1 <= config.occupancy <= 32, f"occupancy={config.occupancy}", "1 to 32"),
        (
            config.num_worker_warps in (None, 4, 8),
            f"num_worker_warps={config.num_worker_warps}",
            "None, 4 or 8 (others need tileiras 13.5)",
        ),
        (_is_latency(config.k_latency), f"k_latency={config.k_latency}", "1 to 10"),
        (_is_latency(config.v_latency), f"v_latency={config.v_latency}", "1 to 10"),
        (config.heads_together >= 1, f"heads_together={config.heads_together}", "1 or more"),
        (find_grid(problem, config.tile_m) is not None, f"{tiles} for {problem}", "a grid within 2^24 x 2^16 blocks"),
    )
    return tuple(Reason(code="config", got=got, allowed=allowed) for holds, got, allowed in checks if not holds)


def find_grid(problem: Problem, tile_m: int) -> tuple[int, int] | None:
    """Blocks in x and y, whose product is one block per tile of queries of every head; None if there are too many."""
    return factor_grid(-(-problem.seq_q // tile_m) * problem.heads_q * problem.batch)


def factor_grid(blocks: int) -> tuple[int, int] | None:
    """Blocks in x and y, whose product is `blocks`; None if no grid has exactly that many."""
    for y in range(max(1, -(-blocks // MAX_GRID_X)), MAX_GRID_Y + 1):
        if blocks % y == 0:
            return blocks // y, y
    return None


def _is_tile(extent: int) -> bool:
    return extent >= SMALLEST_TILE and extent & (extent - 1) == 0


def _is_latency(latency: int) -> bool:
    return 1 <= latency <= 10


# (tile_m, tile_n, occupancy, num_worker_warps)
_Shape = tuple[int, int, int, int | None]

_HOPPER_64: tuple[_Shape, ...] = (
    (64, 64, 4, None), (128, 64, 2, 8), (64, 128, 3, None), (64, 64, 3, None), (64, 64, 2, None), (64, 128, 2, None),
    (64, 128, 2, 8), (128, 64, 3, 8), (128, 128, 2, 8), (128, 128, 1, 8),
)  # fmt: skip
_HOPPER_128: tuple[_Shape, ...] = (
    (64, 128, 2, None), (64, 128, 3, None), (64, 128, 1, None), (64, 128, 2, 8), (64, 64, 3, None), (64, 64, 2, None),
    (128, 128, 1, 8), (128, 128, 2, 8), (128, 64, 2, 8), (128, 64, 1, 8),
)  # fmt: skip
_HOPPER_256: tuple[_Shape, ...] = (
    (128, 128, 1, 8), (128, 64, 1, 8), (128, 32, 1, 8), (64, 128, 1, None), (64, 128, 1, 8), (64, 64, 2, None),
    (64, 64, 1, None), (64, 32, 2, None),
)  # fmt: skip
_BLACKWELL: tuple[_Shape, ...] = (
    (128, 128, 2, None), (128, 128, 1, None), (256, 128, 1, None), (256, 64, 1, None), (128, 64, 2, None),
    (64, 128, 2, None), (64, 64, 4, None), (256, 128, 1, 8), (128, 128, 1, 8),
)  # fmt: skip
_SMALL: tuple[_Shape, ...] = (
    (64, 64, 2, None), (64, 64, 1, None), (64, 32, 2, None), (64, 32, 1, None), (64, 64, 3, None), (128, 64, 1, None),
    (128, 32, 1, None), (128, 64, 1, 8), (32, 64, 2, None),
)  # fmt: skip


def _shapes(problem: Problem, arch: Arch) -> tuple[_Shape, ...]:
    if arch.name == "sm90":
        return _HOPPER_64 if problem.head_dim <= 64 else _HOPPER_128 if problem.head_dim <= 128 else _HOPPER_256
    return _BLACKWELL if arch.name in ("sm100", "sm103") else _SMALL


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[CutileConfig]:
    """Configs worth timing: tiles with the occupancies and warps that may suit them, then variations of the first."""
    if not arch.is_gpu:
        return ()
    configs = [
        CutileConfig(tile_m=tile_m, tile_n=tile_n, occupancy=occupancy, num_worker_warps=warps)
        for tile_m, tile_n, occupancy, warps in _shapes(problem, arch)
    ]
    best = configs[0]
    configs += [replace(best, k_latency=k, v_latency=v) for k, v in ((1, 1), (4, 6))]
    configs += [replace(config, heads_together=4) for config in configs[:4]]
    configs += [replace(best, heads_together=heads) for heads in (problem.group, problem.heads_q)]
    return tuple(dict.fromkeys(config for config in configs if not why_not_fit(problem, arch, config)))
