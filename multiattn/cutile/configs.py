"""Tiles and compiler hints: what may be asked for. What is chosen: `multiattn.cutile.rules`.

Shared memory is tileiras' own choice (it fits its pipeline to the occupancy asked for), so nothing here computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from multiattn.cutile.steps import Step
from multiattn.plan.arch import Arch
from multiattn.plan.columns import NARROWEST, one_width, two_widths
from multiattn.plan.config import Config
from multiattn.plan.exp2_fma import SIXTEENTHS_MAX
from multiattn.plan.support import Reason
from multiattn.problem import Problem

SMALLEST_TILE = 16
"""Rows: the smallest m, n and k that every arch's tensor cores take."""

MAX_GRID_X = 2**24 - 1  # cuda.tile's own limit for each dimension
MAX_GRID_Y = 2**16 - 1  # CUDA's
MAX_BLOCKS = 2**31 - 1
GRID_ALLOWED = "a grid within 2^24 x 2^16, and fewer than 2^31 blocks"


SCHEDULERS = ("one_tile", "static")
"""Of `multiattn.plan.schedule.SCHEDULERS`: a block has no counter to ask."""
PIPELINES = ("plain", "ahead", "pairs", "apart", "pilot", "pilot_pairs")
"""In the order of the kernel's constants."""

HEADROOM = {"bf16": 16.0, "fp16": 0.0}
"""log2, by dtype: how much less than one the largest weight of the block that comes first is with `lazy_max`.

In bf16 it costs nothing, as weights have the range of fp32, and keeps large values of v from overflowing the sums. In
fp16 small weights would be lost, which many of together count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutileConfig(Config):
    """Tiles, and hints of ``ct.kernel`` and ``ct.load``.

    `occupancy` is blocks per SM; None, as of a latency, gives no hint. `num_worker_warps` None lets the compiler choose
    (4); 8 spreads a tile's rows over two warpgroups. A latency, 1 to 10, is how far ahead a load is issued. About
    `heads_together` heads advance together, if need be of several batch entries (`together_of`).
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
    ``pairs``: blocks come in twos, scores of both first. ``pilot``: the maxima are those of the first 16 keys of the
    block, whose scores come before all others, and the block is one of the loop's. ``pilot_pairs``: both. All need
    `lazy_max`. ``plain``: as the compiler orders it."""
    scheduler: str = "one_tile"
    """``one_tile``: a block per tile of queries. ``static``: `occupancy` blocks per SM, each of which takes every n-th
    tile of n blocks."""
    split_head_dim: bool = False
    """Tiles of two parts in place of one as wide as head_dim (`two_widths`): 64 and 32 columns at D=96, where one has
    128. At D=256 two of 128 save none, but twice as many loads, of half the size, suit short causal problems."""
    q_in_registers: bool = False
    """Products with keys take q from registers, in tiles of 64 rows head_dim / 4 of each thread, and read keys alone
    from shared memory. tcgen05 has no such products."""
    exp2_fma_fraction: float = 0.0
    """Share of the exponentials that are a polynomial on the FMA units, in sixteenths, 0 to 0.5. Needs `lazy_max`, and
    tile_n=32 takes eighths, tile_n=16 quarters."""

    @property
    def exp2_fma_sixteenths(self) -> int:
        """`exp2_fma_fraction` in the kernel's unit."""
        return int(16 * self.exp2_fma_fraction)


_TCGEN05 = ("sm100", "sm103")
"""Where products take nothing from registers, and where a thread has whole rows of an accumulator: it would compute
both kinds of exponentials of every score there."""


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
            not config.split_head_dim or two_widths(problem.head_dim) is not None,
            f"split_head_dim=True at head_dim={problem.head_dim}",
            f"more than {NARROWEST}",
        ),
        (config.lazy_max or not sixteenths, f"{fraction} without lazy_max", "0.0"),
        (not (sixteenths and arch.name in _TCGEN05), f"{fraction} on {arch.name}", "0.0"),
        (
            not (config.q_in_registers and arch.name in _TCGEN05),
            f"q_in_registers=True on {arch.name}",
            "False",
        ),
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
    widths = two_widths(problem.head_dim) if config.split_head_dim else None
    return widths or (one_width(problem.head_dim), 0)


def begins_at_diagonal(problem: Problem, config: CutileConfig) -> bool:
    """Whether a tile's maxima are those of the first block that needs a mask, not of the first of all.

    The walk of its keys begins there, too, but not with a pilot.

    Where tiles of rows start with blocks of keys, every row sees some key of that block. The first row sees one, whose
    score is a poor guess of the others': only with the range of bf16, and not where attention has sinks in fp16.
    """
    aligned = (problem.seq_kv - problem.seq_q) % config.tile_m == 0 and config.tile_m % config.tile_n == 0
    return config.lazy_max and problem.is_banded and problem.dtype == "bf16" and aligned


def find_grid(problem: Problem, tile_m: int) -> tuple[int, int] | None:
    """Blocks in x and y, whose product is one block per tile of queries of every head; None if there are too many."""
    return factor_grid(-(-problem.seq_q // tile_m) * problem.heads_q * problem.batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Heads that advance together; `spanning`: counted over batch entries, whose heads are then a divisor of them."""

    heads: int
    spanning: bool = False


def together_of(problem: Problem, config: CutileConfig) -> Together:
    """As many heads as the config wants, or nearly: where it wants more than a batch entry has, of several of them.

    A causal section ends with its short tiles, and the next begins with long ones. Where a section is a fraction of
    what runs at one time, the last long ones begin late, and most SMs wait for them. Powers of two of entries, so that
    batches of many sizes share code.
    """
    fit = config.heads_together // problem.heads_q if problem.is_banded else 0
    entries = math.gcd(1 << fit.bit_length() >> 1, problem.batch) if fit else 1
    if entries == 1:
        return Together(heads=divisor_near(config.heads_together, problem.heads_q))
    return Together(heads=entries * problem.heads_q, spanning=True)


def is_linear(problem: Problem, config: CutileConfig, together: Together) -> bool:
    """Whether the grid numbers the tiles of all heads: one whose blocks take several, or too large in y or z."""
    x, y, z = _grid_by_head(problem, config, together)
    return config.scheduler == "static" or x > MAX_GRID_X or max(y, z) > MAX_GRID_Y


def _grid_by_head(problem: Problem, config: CutileConfig, together: Together) -> tuple[int, int, int]:
    x = -(-problem.seq_q // config.tile_m) * together.heads
    if together.spanning:
        return x, problem.batch * problem.heads_q // together.heads, 1
    return x, problem.heads_q // together.heads, problem.batch


def grid_of(
    problem: Problem, config: CutileConfig, together: Together, multiprocessors: int, *, linear: bool
) -> tuple[int, int, int] | None:
    """Blocks in x, y and z on a device of so many SMs; None if there are too many. `linear`: of code that numbers."""
    if not linear:
        return _grid_by_head(problem, config, together)
    grid = find_grid(problem, config.tile_m)
    if grid is None:
        return None
    if config.scheduler == "static":
        return min(grid[0] * grid[1], multiprocessors * (config.occupancy or 1)), 1, 1
    return *grid, 1


def divisor_near(wanted: int, heads: int) -> int:
    """The number of heads that advance together: of those that divide `heads` the nearest by ratio, else the smaller.

    Of 11 heads it is 11, not 1, where 8 are wanted: one head at a time costs causal problems up to a tenth.
    """
    divisors = (it for low in range(1, math.isqrt(heads) + 1) if heads % low == 0 for it in (low, heads // low))
    return min(divisors, key=lambda count: (max(wanted / count, count / wanted), count))


def own_grid(problem: Problem, config: CutileConfig, multiprocessors: int) -> tuple[int, int, int] | None:
    """As `grid_of`, for code that is made for the problem."""
    together = together_of(problem, config)
    return grid_of(problem, config, together, multiprocessors, linear=is_linear(problem, config, together))


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
