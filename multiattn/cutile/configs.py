"""Tiles and compiler hints: the records of both directions. What may be asked for: `fits`; what is chosen: `rules`.

Shared memory is tileiras' own choice (it fits its pipeline to the occupancy asked for), so nothing here computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from multiattn.plan.columns import one_width, two_widths
from multiattn.plan.config import Config
from multiattn.problem import Problem

SCHEDULERS = ("one_tile", "static")
"""Those of `multiattn.plan.schedule.SCHEDULERS` that need no counter, as a block has none to ask."""
PIPELINES = ("plain", "ahead", "pairs", "apart", "pilot", "pilot_pairs")

HEADROOM = {"bf16": 16.0, "fp16": 0.0}
"""log2, by dtype: how much less than one the largest weight of the block that comes first is with `lazy_max`.

In bf16 it costs nothing, as weights have the range of fp32, and keeps large values of v from overflowing the sums. In
fp16 small weights would be lost, which many of together count."""

ROW_TILE = 16
"""Rows a block takes in the kernels that have rows only, those before and after the one pass. H200, 2026-11-21, 64 Mi
elements: 0.11 ms with `ROW_OCCUPANCY` before, where 64 rows take 0.16 and no hint 0.35; after it all take 0.05."""
ROW_OCCUPANCY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CutileConfig(Config):
    """Tiles of the forward, and hints of ``ct.kernel`` and ``ct.load``.

    `occupancy` is blocks per SM; None, as of a latency, gives no hint. `num_worker_warps` None lets the compiler choose
    (4); 8 spreads a tile's rows over two warpgroups. A latency, 1 to 10, is how far ahead a load is issued. About
    `heads_together` heads advance together, if need be of several batch entries (`grid.together_of`).
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
    128. At D=256 two of 128 save none, but twice as many loads, of half the size, suit short masked problems."""
    q_in_registers: bool = False
    """Products with keys take q from registers, in tiles of 64 rows head_dim / 4 of each thread, and read keys alone
    from shared memory. tcgen05 has no such products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnePassConfig(Config):
    """Tiles of the backward's kernel that owns `tile_n` keys and walks over the queries, `tile_m` at a time; and hints.

    At most `heads_together` heads of keys advance together.
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


def widths_of(problem: Problem, config: CutileConfig) -> tuple[int, int]:
    """Columns of a tile as wide as head_dim, and of a second one, 0 where there is none."""
    widths = two_widths(problem.head_dim) if config.split_head_dim else None
    return widths or (one_width(problem.head_dim), 0)


def begins_at_diagonal(problem: Problem, config: CutileConfig) -> bool:
    """True where a tile's maxima are those of the first block that needs a mask, not of the first of all.

    The walk of its keys begins there, too, but not with a pilot.

    Where tiles of rows start with blocks of keys, every row sees some key of that block. The first row sees one, whose
    score is a poor guess of the others': only with the range of bf16, and not where attention has sinks in fp16.
    """
    aligned = (problem.seq_kv - problem.seq_q) % config.tile_m == 0 and config.tile_m % config.tile_n == 0
    return config.lazy_max and problem.is_banded and problem.dtype == "bf16" and aligned
