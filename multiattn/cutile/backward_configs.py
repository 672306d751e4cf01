"""Tiles and compiler hints of the backward per arch: the rules, what may be asked for, and what is worth timing.

As in `configs`, shared memory is tileiras' own choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiattn.cutile.configs import GRID_ALLOWED, SMALLEST_TILE, factor_grid
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import COMPILED, Config, Rule
from multiattn.plan.support import Reason
from multiattn.problem import Problem

ROW_TILE = 16
"""Rows a block takes in the kernels that have rows only, those before and after the one pass. H200, 2026-11-21, 64 Mi
elements: 0.11 ms with `ROW_OCCUPANCY` before, where 64 rows take 0.16 and no hint 0.35; after it all take 0.05."""

ROW_OCCUPANCY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class OnePassConfig(Config):
    """Tiles, and hints of ``ct.kernel`` and ``ct.load`` as in `CutileConfig`, of the kernel that owns `tile_n` keys.

    It walks over the queries, `tile_m` at a time. At most `heads_together` heads of keys advance together.
    """

    occupancy: int = 1
    num_worker_warps: int | None = None
    latency: int = 4
    heads_together: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoPassConfig(OnePassConfig):
    """With the same of the kernel that comes first: it owns `dq_tile_m` queries and walks over the keys."""

    dq_tile_m: int = 64
    dq_tile_n: int = 64
    dq_occupancy: int = 1
    dq_num_worker_warps: int | None = None
    dq_latency: int = 4
    dq_heads_together: int = 1


_H200 = "H200, 2026-11-21, tileiras 13.4, B4 N=4096 H*D=2048 bf16, best of the candidates: "

_INTERPRETED = "interpreted: small enough that a short sequence still has several blocks of keys and a ragged one"

_SHORT_OF_SMEM = TwoPassConfig(
    tile_m=64,
    tile_n=32,
    num_worker_warps=8,
    latency=1,
    dq_tile_m=64,
    dq_tile_n=32,
    dq_num_worker_warps=8,
    dq_latency=1,
)
"""For 99 KiB a block at D=128, with 8 warps to share the accumulators."""

TWO_PASS_RULES: tuple[Rule[TwoPassConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=TwoPassConfig(tile_m=32, tile_n=32, dq_tile_m=32, dq_tile_n=32),
        why=_INTERPRETED,
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        banded=False,
        config=TwoPassConfig(
            tile_m=64,
            tile_n=128,
            num_worker_warps=8,
            dq_tile_m=64,
            dq_tile_n=64,
            dq_occupancy=2,
        ),
        why=_H200 + "363 TFLOPS, 2.32 ms for the keys and 1.47 for the queries; keys in 128x64 2.18, but it spills",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        banded=True,
        seq_max=8191,
        config=TwoPassConfig(
            tile_m=64,
            tile_n=128,
            num_worker_warps=8,
            dq_tile_m=64,
            dq_tile_n=64,
            dq_occupancy=3,
            dq_heads_together=16,
        ),
        why=_H200 + "337 TFLOPS, 1.23 ms and 0.81; 4 heads of queries together 0.85; queries in 128x64 0.84",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        banded=True,
        seq_min=8192,
        config=TwoPassConfig(
            tile_m=64,
            tile_n=128,
            num_worker_warps=8,
            heads_together=4,
            dq_tile_m=128,
            dq_tile_n=64,
            dq_num_worker_warps=8,
            dq_heads_together=4,
        ),
        why=_H200.replace("B4 N=4096", "B1 N=16384") + "379 TFLOPS, 4.45 ms and 2.81; queries in 64x64 2.98",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        banded=False,
        config=TwoPassConfig(
            tile_m=32,
            tile_n=128,
            num_worker_warps=8,
            dq_tile_m=128,
            dq_tile_n=64,
            dq_num_worker_warps=8,
        ),
        why=_H200 + "430 TFLOPS, 2.04 ms and 1.16; keys in 64x128 2.19; one pass 415",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        banded=True,
        config=TwoPassConfig(
            tile_m=32,
            tile_n=128,
            num_worker_warps=8,
            heads_together=4,
            dq_tile_m=128,
            dq_tile_n=64,
            dq_num_worker_warps=8,
            dq_heads_together=4,
        ),
        why=_H200 + "402 TFLOPS, 1.08 ms and 0.63; one head at a time 1.14 and 0.67; one pass 375",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        banded=False,
        config=TwoPassConfig(
            tile_m=64,
            tile_n=64,
            num_worker_warps=8,
            latency=2,
            dq_tile_m=64,
            dq_tile_n=64,
            dq_num_worker_warps=8,
        ),
        why=_H200 + "392 TFLOPS, 1.86 ms and 1.65; latency 4 for the keys 1.90",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        banded=True,
        config=TwoPassConfig(
            tile_m=64,
            tile_n=64,
            num_worker_warps=8,
            dq_tile_m=64,
            dq_tile_n=32,
            dq_heads_together=4,
        ),
        why=_H200 + "350 TFLOPS, 1.06 ms and 0.90; queries in 64x64 0.98",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        config=TwoPassConfig(
            tile_m=64,
            tile_n=128,
            num_worker_warps=8,
            dq_tile_m=128,
            dq_tile_n=64,
            dq_num_worker_warps=8,
        ),
        why=COMPILED + "two warpgroups share the accumulators, as on sm90",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_min=129,
        config=TwoPassConfig(
            tile_m=64,
            tile_n=64,
            num_worker_warps=8,
            dq_tile_m=64,
            dq_tile_n=64,
            dq_num_worker_warps=8,
        ),
        why=COMPILED + "the tiles of sm90",
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_max=128,
        config=_SHORT_OF_SMEM,
        why=COMPILED + "of the tiles that do not spill at D=128 the largest; 32x64 and 64x64 do",
    ),
    Rule(
        arches=("sm80",),
        head_dim_min=129,
        config=replace(_SHORT_OF_SMEM, tile_m=32, dq_tile_m=32),
        why=COMPILED + "38 spills in its loops when causal, 64x16 81; 16 queries leave the tensor cores out",
    ),
    Rule(
        arches=("sm86", "sm89", "sm120", "sm121"),
        head_dim_min=129,
        config=replace(_SHORT_OF_SMEM, tile_n=16, dq_tile_m=32),
        why=COMPILED + "what fits 99 KiB and spills least; 16 queries a block leave the tensor cores out",
    ),
)

ATOMIC_RULES: tuple[Rule[OnePassConfig], ...] = (
    Rule(arches=("cpu",), config=OnePassConfig(tile_m=32, tile_n=32), why=_INTERPRETED),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        banded=False,
        seq_min=2048,
        config=OnePassConfig(tile_m=128, tile_n=128, num_worker_warps=8, heads_together=4),
        why=_H200 + "393 TFLOPS; 64x128 369; two passes 363; at N=1024 two passes are as fast",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        banded=False,
        seq_min=2048,
        config=OnePassConfig(tile_m=64, tile_n=64, num_worker_warps=8),
        why=_H200 + "406 TFLOPS; two passes 392; at N=1024 two passes are faster",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        banded=True,
        seq_min=2048,
        config=OnePassConfig(tile_m=64, tile_n=64, num_worker_warps=8, heads_together=4),
        why=_H200 + "373 TFLOPS; one head at a time 359; two passes 350; at N=1024 two passes are as fast",
    ),
    # From here on two passes, which give the same bits each time, are as fast or faster, or nobody has measured.
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        config=OnePassConfig(tile_m=128, tile_n=128, num_worker_warps=8, heads_together=4),
        why=_H200 + "330 TFLOPS causal, two passes 337; full the other rule's; short ones not measured",
        only_named=True,
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        config=OnePassConfig(tile_m=64, tile_n=128, num_worker_warps=8, heads_together=4),
        why=_H200 + "415 TFLOPS full, 375 causal; two passes 430 and 402",
        only_named=True,
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        config=OnePassConfig(tile_m=64, tile_n=64, num_worker_warps=8, heads_together=4),
        why="H200, 2026-11-21, tileiras 13.4, N=1024: two passes are faster full and as fast causal",
        only_named=True,
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        config=OnePassConfig(tile_m=64, tile_n=128, num_worker_warps=8),
        why=COMPILED + "two warpgroups share the accumulators, as on sm90",
        only_named=True,
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_min=129,
        config=OnePassConfig(tile_m=64, tile_n=64, num_worker_warps=8),
        why=COMPILED + "the tiles of sm90",
        only_named=True,
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_max=128,
        config=OnePassConfig(tile_m=32, tile_n=32, num_worker_warps=8, latency=1),
        why=COMPILED + "of the tiles that do not spill at D=128 the largest; 64x32 and 16x32 do",
        only_named=True,
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_min=129,
        config=OnePassConfig(tile_m=32, tile_n=32, num_worker_warps=8, latency=1),
        why=COMPILED + "what fits 99 KiB; 32x16 and 16x32 leave the tensor cores out",
        only_named=True,
    ),
)


def why_not_fit_one_pass(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem` in one pass."""
    if not isinstance(config, OnePassConfig) or isinstance(config, TwoPassConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="OnePassConfig"),)
    return _refusals(_checks(config, "") + _grid_checks(problem, config))


def why_not_fit_two_pass(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem` in two passes."""
    if not isinstance(config, TwoPassConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="TwoPassConfig"),)
    blocks = count_query_tiles(problem, config.dq_tile_m)
    return _refusals(
        _checks(config, "")
        + _checks(config, "dq_")
        + _grid_checks(problem, config)
        + [_grid_check(f"dq_tile_m={config.dq_tile_m}", blocks, problem)]
    )


_Check = tuple[bool, str, str]
"""Whether it holds, what came, what is allowed."""


def _refusals(checks: Sequence[_Check]) -> tuple[Reason, ...]:
    return tuple(Reason(code="config", got=got, allowed=allowed) for holds, got, allowed in checks if not holds)


def _grid_checks(problem: Problem, config: OnePassConfig) -> list[_Check]:
    return [
        _grid_check(f"tile_n={config.tile_n}", count_key_tiles(problem, config.tile_n), problem),
        _grid_check(f"rows in tiles of {ROW_TILE}", count_query_tiles(problem, ROW_TILE), problem),
    ]


def _grid_check(what: str, blocks: int, problem: Problem) -> _Check:
    return factor_grid(blocks) is not None, f"{what} for {problem}", GRID_ALLOWED


def _checks(config: OnePassConfig, prefix: str) -> list[_Check]:
    """Of the fields of one kernel."""

    def field(name: str) -> tuple[int, str]:
        value = getattr(config, prefix + name)
        return value, f"{prefix}{name}={value}"

    checks = []
    for name in ("tile_m", "tile_n"):
        extent, got = field(name)
        is_tile = extent >= SMALLEST_TILE and extent & (extent - 1) == 0
        checks.append((is_tile, got, f"powers of two from {SMALLEST_TILE}"))
    occupancy, got = field("occupancy")
    checks.append((1 <= occupancy <= 32, got, "1 to 32"))
    warps, got = field("num_worker_warps")
    checks.append((warps in (None, 4, 8), got, "None, 4 or 8 (others need tileiras 13.5)"))
    latency, got = field("latency")
    checks.append((1 <= latency <= 10, got, "1 to 10"))
    heads, got = field("heads_together")
    checks.append((heads >= 1, got, "1 or more"))
    return checks


def count_query_tiles(problem: Problem, tile: int) -> int:
    """Tiles of `tile` queries of every head."""
    return -(-problem.seq_q // tile) * problem.heads_q * problem.batch


def count_key_tiles(problem: Problem, tile: int) -> int:
    """Tiles of `tile` keys of every head of keys."""
    return -(-problem.seq_kv // tile) * problem.heads_kv * problem.batch


def delta_bytes(problem: Problem) -> int:
    """Of delta, fp32 ``[B, Hq, Sq]``: the workspace of two passes."""
    return 4 * problem.batch * problem.heads_q * problem.seq_q


def one_pass_bytes(problem: Problem) -> int:
    """Of delta and of the sum of dq, fp32 ``[B, Hq, Sq, D]``: the workspace of one pass."""
    return delta_bytes(problem) * (1 + problem.head_dim)


# (tile_m, tile_n, occupancy, num_worker_warps)
_Shape = tuple[int, int, int, int | None]

_HOPPER_KEYS: tuple[tuple[_Shape, ...], ...] = (
    ((64, 128, 1, 8), (128, 128, 1, 8), (128, 64, 2, None), (64, 64, 2, None)),
    ((32, 128, 1, 8), (64, 128, 1, 8), (128, 64, 1, 8), (64, 64, 1, 8)),
    ((64, 64, 1, 8), (32, 64, 1, 8)),
)
"""For D up to 64, up to 128 and beyond."""
_HOPPER_QUERIES: tuple[tuple[_Shape, ...], ...] = (
    ((64, 64, 2, None), (64, 64, 3, None), (128, 64, 1, 8), (64, 128, 2, None)),
    ((128, 64, 1, 8), (64, 64, 2, None), (128, 128, 1, 8)),
    ((64, 64, 1, 8), (64, 32, 1, None), (128, 32, 1, 8)),
)
_BLACKWELL_KEYS: tuple[_Shape, ...] = ((64, 128, 1, 8), (128, 128, 1, 8), (64, 64, 1, None), (64, 64, 1, 8))
_BLACKWELL_QUERIES: tuple[_Shape, ...] = ((128, 64, 1, 8), (128, 128, 1, 8), (64, 64, 1, None))
_SMALL_KEYS: tuple[_Shape, ...] = ((64, 32, 1, 8), (32, 32, 1, 8), (32, 64, 1, 8), (16, 32, 1, 8))
_SMALL_QUERIES: tuple[_Shape, ...] = ((64, 32, 1, 8), (32, 32, 1, None), (64, 64, 1, None))


def _shapes(problem: Problem, arch: Arch) -> tuple[tuple[_Shape, ...], tuple[_Shape, ...]]:
    """Of the kernel that owns keys and of the one that owns queries."""
    if arch.name == "sm90":
        row = 0 if problem.head_dim <= 64 else 1 if problem.head_dim <= 128 else 2
        return _HOPPER_KEYS[row], _HOPPER_QUERIES[row]
    if arch.name in ("sm100", "sm103"):
        return _BLACKWELL_KEYS, _BLACKWELL_QUERIES
    return _SMALL_KEYS, _SMALL_QUERIES


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[OnePassConfig]:
    """Configs worth timing: tiles with the occupancies and warps that suit them, each with two orders of heads."""
    if not arch.is_gpu:
        return ()
    keys, queries = _shapes(problem, arch)
    hints = [(shape, latency) for shape in keys for latency in ((4, 2) if arch.name == "sm90" else (4, 1))]
    if variant.deterministic:  # two passes: each way to own keys with the first to own queries, then the others
        pairs = [(hint, queries[0]) for hint in hints] + [(hints[0], shape) for shape in queries[1:]]
        configs: list[OnePassConfig] = [_two_passes(*hint, shape) for hint, shape in pairs]
    else:
        configs = [_one_pass(*hint) for hint in hints]
    configs += [_together(config, 4) for config in configs]
    return tuple(dict.fromkeys(config for config in configs if not variant.fits(problem, arch, config)))[:24]


def _one_pass(shape: _Shape, latency: int) -> OnePassConfig:
    tile_m, tile_n, occupancy, warps = shape
    return OnePassConfig(tile_m=tile_m, tile_n=tile_n, occupancy=occupancy, num_worker_warps=warps, latency=latency)


def _two_passes(shape: _Shape, latency: int, dq_shape: _Shape) -> TwoPassConfig:
    tile_m, tile_n, occupancy, warps = shape
    dq_tile_m, dq_tile_n, dq_occupancy, dq_warps = dq_shape
    return TwoPassConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        occupancy=occupancy,
        num_worker_warps=warps,
        latency=latency,
        dq_tile_m=dq_tile_m,
        dq_tile_n=dq_tile_n,
        dq_occupancy=dq_occupancy,
        dq_num_worker_warps=dq_warps,
    )


def _together(config: OnePassConfig, heads: int) -> OnePassConfig:
    if isinstance(config, TwoPassConfig):
        return replace(config, heads_together=heads, dq_heads_together=heads)
    return replace(config, heads_together=heads)
