"""Tiles and compiler hints per arch: the rules, and what may be asked for.

Shared memory is tileiras' own choice (it fits its pipeline to the occupancy asked for), so nothing here computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from multiattn.arch import Arch
from multiattn.config import COMPILED, Config, Rule, inherit
from multiattn.cutile.steps import STEPS, Step
from multiattn.exp2_fma import SIXTEENTHS_MAX
from multiattn.problem import Problem
from multiattn.support import Reason

SMALLEST_TILE = 16
"""Rows: the smallest m, n and k that every arch's tensor cores take."""

MAX_GRID_X = 2**24 - 1  # cuda.tile's own limit for each dimension
MAX_GRID_Y = 2**16 - 1  # CUDA's
MAX_BLOCKS = 2**31 - 1
GRID_ALLOWED = "a grid within 2^24 x 2^16, and fewer than 2^31 blocks"


SCHEDULERS = ("one_tile", "static")
"""Of `multiattn.schedule.SCHEDULERS`: a block has no counter to ask."""
PIPELINES = ("plain", "ahead", "pairs", "apart")
"""In the order of the kernel's constants."""

HEADROOM = {"bf16": 16.0, "fp16": 0.0}
"""log2, by dtype: how much less than one the largest weight of the block that comes first is with `lazy_max`.

In bf16 it costs nothing, as weights have the range of fp32, and keeps large values of v from overflowing the sums. In
fp16 small weights would be lost, which many of together count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutileConfig(Config):
    """Tiles, and hints of ``ct.kernel`` and ``ct.load``.

    `occupancy` is blocks per SM; None, as of a latency, gives no hint. `num_worker_warps` None lets the compiler choose
    (4); 8 spreads a tile's rows over two warpgroups. A latency, 1 to 10, is how far ahead a load is issued. At most
    `heads_together` heads advance together.
    """

    occupancy: int | None = 1
    num_worker_warps: int | None = None
    k_latency: int | None = 2
    v_latency: int | None = 4
    heads_together: int = 1
    lazy_max: bool = False
    """Weights are relative to the maxima of one block of keys (`begins_at_diagonal` says which), and a tile in which
    scores outgrow those is done again: by 2^115 in bf16, by 2^16 in fp16, whose weights hold no more. It then takes
    more than twice as long."""
    pipeline: str = "plain"
    """``ahead``: the next block's scores are begun before the weights of one. ``apart``: so from the second block on.
    ``pairs``: blocks come in twos, scores of both first. All need `lazy_max`. ``plain``: as the compiler orders it."""
    scheduler: str = "one_tile"
    """``one_tile``: a block per tile of queries. ``static``: `occupancy` blocks per SM, each of which takes every n-th
    tile of n blocks."""
    split_head_dim: bool = False
    """Where head_dim is no power of two: tiles of two parts (64 and 32 columns at D=96) in place of one with zeros."""
    exp2_fma_fraction: float = 0.0
    """Share of the exponentials that are a polynomial on the FMA units, in sixteenths, 0 to 0.5. Needs `lazy_max`, and
    tile_n=32 takes eighths, tile_n=16 quarters."""

    @property
    def exp2_fma_sixteenths(self) -> int:
        """`exp2_fma_fraction` in the kernel's unit."""
        return int(16 * self.exp2_fma_fraction)


_BY_ROWS = ("sm100", "sm103")
"""Where a thread has whole rows of an accumulator: there it computes both kinds of exponentials of every score."""

_H200 = "H200, 2026-11-21, tileiras 13.4, B4 N=4096 H*D=2048 bf16, best of the candidates: "

_LAZY = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16, of 246 candidates of one experiment: "

_LANDED = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16, of this kernel's candidates: "

_SWEPT = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16, finals of bench/results/h200/tune-cutile.json: "

_DIAGONAL = "H200, 2026-11-23, tileiras 13.4, 16k tokens H*D=2048 bf16 (docs/experiments.md): "

_LAZY_128X64 = CutileConfig(
    tile_m=128, tile_n=64, occupancy=1, num_worker_warps=8, k_latency=None, v_latency=None, lazy_max=True
)
"""For causal problems at the widest head_dims, but for the order of tiles and blocks."""

_SPLIT_128X128 = CutileConfig(
    tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, lazy_max=True, split_head_dim=True
)  # fmt: skip
"""For head_dims of 128 columns and up to 64 more, but for the order of tiles."""

_GUESSED_SPLIT = (
    COMPILED
    + "a guess from the SASS: 352 to 403 instructions for 128 keys, no spills; as D=256 is done, over 256 columns in "
    "128x64, 480 to 494, and products with zeros"
)

FULL_RULES: tuple[Rule[CutileConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=CutileConfig(tile_m=64, tile_n=64),
        why="interpreted: small enough that a short sequence still has several blocks of keys and a ragged one",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        causal=False,
        seq_max=512,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=4, heads_together=4, lazy_max=True, scheduler="static"),
        why=_LAZY + "N=512: 398 TFLOPS, cuDNN 353 beside it; a block a tile 389, online 380 of 433 in a first pass",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        causal=False,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=4, heads_together=4, lazy_max=True),
        why=_LAZY
        + "N=1k 457, 4k 501, 16k 521 TFLOPS, cuDNN 384, 391, 397; 128x64 with 8 warps 476 at 4k; static 433 at 1k",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        causal=True,
        seq_min=8192,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=4, heads_together=8, lazy_max=True),
        why=_LAZY + "N=16k: 542 TFLOPS, cuDNN 394; 32 heads together 525; pairs at occupancy 3 491",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        causal=True,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=4, heads_together=32, lazy_max=True),
        why=_LAZY
        + "N=512 268, 1k 363, 4k 462 TFLOPS, cuDNN 245, 296, 348; online 266, 332, -; 4 heads together 436 at 4k",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=False,
        seq_max=1024,
        config=CutileConfig(tile_m=64, tile_n=128, occupancy=2, heads_together=2, lazy_max=True, scheduler="static"),
        why=_LAZY + "N=512 450, 1k 534 TFLOPS, cuDNN 492, 554; online, a block a tile 419 at 512",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=False,
        config=CutileConfig(tile_m=64, tile_n=128, occupancy=2, lazy_max=True, pipeline="ahead"),
        why=_LAZY
        + "N=4k 625, 16k 680 TFLOPS, cuDNN 594, 612; 128x128 with 8 warps 615, 663; 2 heads together 610, 647",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=True,
        seq_max=724,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=2, lazy_max=True, scheduler="static"),
        why=_DIAGONAL + "N=512: 297 TFLOPS, cuDNN 340; 4 heads together 295, in pairs 290, a block a tile 287",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=True,
        seq_max=4095,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=2, heads_together=8, lazy_max=True, pipeline="pairs"),
        why=_DIAGONAL + "N=1k 391, 2k 485 TFLOPS, cuDNN 415, 471; 4 heads together 385, 478; 128x128, 8 warps -, 477",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        causal=True,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=4, lazy_max=True),
        why=_DIAGONAL
        + "N=4k 551, 8k 603, 16k 637 TFLOPS, cuDNN 493, 520, 529; 64x64 in pairs 545, 584, 598; 128x64 546, 591, 611",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        head_dim_max=192,
        causal=False,
        config=replace(_SPLIT_128X128, heads_together=2),
        why=_GUESSED_SPLIT,
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        head_dim_max=192,
        causal=True,
        seq_max=2896,
        config=replace(_SPLIT_128X128, heads_together=8),
        why=_GUESSED_SPLIT,
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        head_dim_max=192,
        causal=True,
        config=replace(_SPLIT_128X128, heads_together=4),
        why=_GUESSED_SPLIT,
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=False,
        seq_max=512,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=4),
        why=_LAZY + "N=512: 470 TFLOPS, cuDNN 514; lazy 128x64 in pairs, static 453",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=False,
        config=CutileConfig(
            tile_m=128, tile_n=64, occupancy=1, num_worker_warps=8, heads_together=4, lazy_max=True, pipeline="pairs"
        ),
        why=_LAZY
        + "N=1k 569, 4k 676, 16k 734 TFLOPS, cuDNN 585, 619, 655; online 128x128 709 of 779 at 4k in a first pass",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=True,
        dtype="bf16",
        seq_max=1448,
        config=replace(_LAZY_128X64, heads_together=8, pipeline="ahead"),
        why=_DIAGONAL + "N=512 307, 1k 434 TFLOPS, cuDNN 360, 457; plain 295, 425, in a static grid 291, 397",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=True,
        dtype="bf16",
        seq_max=2896,
        config=replace(_LAZY_128X64, heads_together=8),
        why=_DIAGONAL + "N=2k: 549 TFLOPS, cuDNN 515; 4 heads together 518; online 128x128 511",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=True,
        dtype="bf16",
        seq_max=5792,
        config=replace(_LAZY_128X64, heads_together=4),
        why=_DIAGONAL + "N=4k: 635 TFLOPS, cuDNN 540; 8 heads together 599; online 128x128 597",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=True,
        seq_max=1448,
        config=replace(_LAZY_128X64, heads_together=8),
        why=_SWEPT + "in bf16, from the first block as fp16 does, N=1k: 403 TFLOPS, cuDNN 457; a block ahead 402",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=True,
        seq_max=2896,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=8),
        why=_LANDED + "in bf16, from the first block as fp16 does, N=2k: 489 TFLOPS, cuDNN 499; lazy 128x64 462",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        causal=True,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8, heads_together=4),
        why=_DIAGONAL + "N=8k 654, 16k 675 TFLOPS, cuDNN 569, 573; lazy 128x64 652, 669",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        causal=True,
        config=CutileConfig(tile_m=128, tile_n=64, occupancy=2),
        why=COMPILED + "no spills in its loops; 128x128 spills once there at D=128, 256x128 252 times",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        causal=False,
        seq_min=4096,
        config=CutileConfig(tile_m=256, tile_n=128, occupancy=1),
        why=COMPILED + "no spills; NVIDIA's own cuTile examples take it; k and v are read half as often as at 128x128",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_max=128,
        causal=False,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=2),
        why=COMPILED + "no spills in its loops; the other tile of NVIDIA's examples, in twice as many blocks",
    ),
    Rule(
        arches=("sm100", "sm103"),
        head_dim_min=129,
        config=CutileConfig(tile_m=128, tile_n=128, occupancy=1),
        why=COMPILED + "the accumulator of one tile fills half of tensor memory",
    ),
    Rule(
        arches=("sm86", "sm89"),
        head_dim_min=65,
        head_dim_max=128,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=2, k_latency=4, v_latency=6),
        why=COMPILED
        + "no spills in its loops, at latencies of 2 and 4 up to 12; of 64x64 causal tileiras gives up the pipeline",
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_max=128,
        config=CutileConfig(tile_m=64, tile_n=64, occupancy=2),
        why=COMPILED + "NVIDIA's own cuTile examples take 64x64 at occupancy 2 on sm120",
    ),
    Rule(
        arches=("sm86", "sm89"),
        head_dim_min=129,
        causal=True,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=1, num_worker_warps=8),
        why=COMPILED + "no spills; with 4 warps 205 in its loops, 64x16 39",
    ),
    Rule(
        arches=("sm120", "sm121"),
        head_dim_min=129,
        causal=True,
        config=CutileConfig(tile_m=128, tile_n=16, occupancy=1, num_worker_warps=8),
        why=COMPILED + "no spills in its loops; 64x32 108, with 8 warps 26",
    ),
    Rule(
        arches=("sm80", "sm86", "sm89", "sm120", "sm121"),
        head_dim_min=129,
        config=CutileConfig(tile_m=64, tile_n=32, occupancy=1),
        why=COMPILED + "what fits 99 KiB; 8 warps spill more in its loops, and so do 64x16 and 128x16",
    ),
)


_NO_HINTS = CutileConfig(
    tile_m=128, tile_n=128, occupancy=None, num_worker_warps=8, k_latency=None, v_latency=None
)  # fmt: skip


def _causal_128(config: CutileConfig, evidence: str) -> tuple[Rule[CutileConfig], ...]:
    """What was swept for a rung below full: D=128 with the mask, the cell that the ladder is climbed on."""
    why = _H200 + evidence
    return (Rule(arches=("sm90",), head_dim_min=65, head_dim_max=128, causal=True, config=config, why=why),)


OWN_RULES: Mapping[str, tuple[Rule[CutileConfig], ...]] = {
    "full": FULL_RULES,
    "memory": _causal_128(
        CutileConfig(tile_m=128, tile_n=64, occupancy=None, num_worker_warps=8),
        "483 TFLOPS; 128x128 479; 64x128, which without a hint takes too many registers for two blocks an SM, 386",
    ),
    "math": _causal_128(_NO_HINTS, "481 TFLOPS; 128x64 472; 64x128 with 4 warps 360"),
    "basic": _causal_128(_NO_HINTS, "384 TFLOPS; 128x64 349; 64x128 with 4 warps 312"),
}
"""Rules made for a rung, by its name. Where it has none, it goes by those of the rung that it leads to."""


def rules_of(name: str) -> tuple[Rule[CutileConfig], ...]:
    """The rules of a rung, by its name."""
    own = OWN_RULES.get(name, ())
    if name == "full":
        return own
    return inherit(own, FULL_RULES, top="full", limit=STEPS[name].step.limit)


def why_not_fit(problem: Problem, arch: Arch, config: Config, *, step: Step | None = None) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`; with a step also what it does not do."""
    if not isinstance(config, CutileConfig):
        return (Reason(code="config", got=type(config).__name__, allowed="CutileConfig"),)
    tiles = f"tile_m={config.tile_m} tile_n={config.tile_n}"
    fraction, sixteenths = f"exp2_fma_fraction={config.exp2_fma_fraction}", 16 * config.exp2_fma_fraction
    unit = max(1, 64 // max(1, config.tile_n))
    checks = (
        (_is_tile(config.tile_m) and _is_tile(config.tile_n), tiles, f"powers of two from {SMALLEST_TILE}"),
        (config.occupancy is None or 1 <= config.occupancy <= 32, f"occupancy={config.occupancy}", "1 to 32"),
        (
            config.num_worker_warps in (None, 4, 8),
            f"num_worker_warps={config.num_worker_warps}",
            "None, 4 or 8 (others need tileiras 13.5)",
        ),
        (_is_latency(config.k_latency), f"k_latency={config.k_latency}", "1 to 10"),
        (_is_latency(config.v_latency), f"v_latency={config.v_latency}", "1 to 10"),
        (config.heads_together >= 1, f"heads_together={config.heads_together}", "1 or more"),
        (config.pipeline in PIPELINES, f"pipeline={config.pipeline}", ", ".join(PIPELINES)),
        (config.lazy_max or config.pipeline == "plain", f"pipeline={config.pipeline} without lazy_max", "plain"),
        (config.scheduler in SCHEDULERS, f"scheduler={config.scheduler}", ", ".join(SCHEDULERS)),
        (
            not config.split_head_dim or split_widths(problem.head_dim) is not None,
            f"split_head_dim=True at head_dim={problem.head_dim}",
            "72 to 96, 136 to 192 and their like, less than a power of two by a quarter or more",
        ),
        (config.lazy_max or not sixteenths, f"{fraction} without lazy_max", "0.0"),
        (not (sixteenths and arch.name in _BY_ROWS), f"{fraction} on {arch.name}", "0.0"),
        (
            0 <= sixteenths <= SIXTEENTHS_MAX and sixteenths % unit == 0,
            f"{fraction} with tile_n={config.tile_n}",
            f"multiples of {unit}/16 from 0 to 0.5",
        ),
        (find_grid(problem, config.tile_m) is not None, f"{tiles} for {problem}", GRID_ALLOWED),
    )
    reasons = [Reason(code="config", got=got, allowed=allowed) for holds, got, allowed in checks if not holds]
    return (*reasons, *(beyond_step(step, config) if step is not None else ()))


def beyond_step(step: Step, config: CutileConfig) -> list[Reason]:
    """A reason for every field of a config that asks for what a step does not do: what is planned is what runs."""
    limited = step.limit(config)
    return [
        Reason(code="config", got=f"{name}={asked}", allowed=f"{name}={done} in this variant")
        for name in (field.name for field in fields(config))
        if (asked := getattr(config, name)) != (done := getattr(limited, name))
    ]


def widths_of(problem: Problem, config: CutileConfig) -> tuple[int, int]:
    """Columns of a tile as wide as head_dim, and of a second one, 0 where there is none."""
    whole = max(SMALLEST_TILE, 1 << (problem.head_dim - 1).bit_length())
    return split_widths(problem.head_dim) or (whole, 0) if config.split_head_dim else (whole, 0)


def split_widths(head_dim: int) -> tuple[int, int] | None:
    """Powers of two that hold a head_dim together, and are less than the next power of two; None if no two do."""
    first = 1 << head_dim.bit_length() - 1
    tail = max(SMALLEST_TILE, 1 << (head_dim - first - 1).bit_length()) if head_dim > first else 0
    return (first, tail) if first >= SMALLEST_TILE and 0 < tail < first else None


def begins_at_diagonal(problem: Problem, config: CutileConfig) -> bool:
    """Whether the walk of a tile's keys begins at the first block that needs a mask, not at the first of all.

    Where tiles of rows start with blocks of keys, every row sees some key of that block. The first row sees one, whose
    score is a poor guess of the others': only with the range of bf16, and not where attention has sinks in fp16.
    """
    aligned = (problem.seq_kv - problem.seq_q) % config.tile_m == 0 and config.tile_m % config.tile_n == 0
    return config.lazy_max and problem.causal and problem.dtype == "bf16" and aligned


def find_grid(problem: Problem, tile_m: int) -> tuple[int, int] | None:
    """Blocks in x and y, whose product is one block per tile of queries of every head; None if there are too many."""
    return factor_grid(-(-problem.seq_q // tile_m) * problem.heads_q * problem.batch)


def is_linear(problem: Problem, config: CutileConfig) -> bool:
    """Whether the grid numbers the tiles of all heads: one whose blocks take several, or too large in y or z."""
    x, y, z = _grid_by_head(problem, config)
    return config.scheduler == "static" or x > MAX_GRID_X or max(y, z) > MAX_GRID_Y


def _grid_by_head(problem: Problem, config: CutileConfig) -> tuple[int, int, int]:
    together = math.gcd(config.heads_together, problem.heads_q)
    return -(-problem.seq_q // config.tile_m) * together, problem.heads_q // together, problem.batch


def grid_of(
    problem: Problem, config: CutileConfig, multiprocessors: int, *, linear: bool
) -> tuple[int, int, int] | None:
    """Blocks in x, y and z on a device of so many SMs; None if there are too many. `linear`: of code that numbers."""
    if not linear:
        return _grid_by_head(problem, config)
    grid = find_grid(problem, config.tile_m)
    if grid is None:
        return None
    if config.scheduler == "static":
        return min(grid[0] * grid[1], multiprocessors * (config.occupancy or 1)), 1, 1
    return *grid, 1


def factor_grid(blocks: int) -> tuple[int, int] | None:
    """Blocks in x and y, whose product is `blocks`; None if no grid has exactly that many.

    Nor more than 2^31 - 1: a kernel numbers them in 32 bits.
    """
    if blocks > MAX_BLOCKS:
        return None
    for y in range(max(1, -(-blocks // MAX_GRID_X)), MAX_GRID_Y + 1):
        if blocks % y == 0:
            return blocks // y, y
    return None


def _is_tile(extent: int) -> bool:
    return extent >= SMALLEST_TILE and extent & (extent - 1) == 0


def _is_latency(latency: int | None) -> bool:
    return latency is None or 1 <= latency <= 10
