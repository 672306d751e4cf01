"""Tiles and compiler hints: the records of both directions, the grids that follow, and what fits. Imports no cuTile.

Shared memory is tileiras' own choice (it fits its pipeline to the occupancy asked for), so nothing here computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from multiattn.cutile.kernels.constants import SMALLEST_TILE
from multiattn.layout import Layout, row_major
from multiattn.packed import USUAL_LENGTH
from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.schedule import NARROWEST, key_tiles, one_width, query_tiles, three_widths, two_widths
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.score.lower import lower

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
    128. At D=256 two of 128 save none, but twice as many loads, of half the size, suit short masked problems."""
    split_tail: bool = False
    """The second of these parts is two, too: 64, 32 and 16 columns at D=104."""
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
    dq_transposed: bool = False
    """A block's share of dq is made as ``k^T ds^T``, from shared memory, and turned around as it is handed over."""
    delta_first: bool = False
    """The product dp begins with -delta, not with zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoPassConfig(OnePassConfig):
    """With the same of the kernel that comes first: it owns `dq_tile_m` queries and walks over the keys."""

    dq_tile_m: int = 64
    dq_tile_n: int = 64
    dq_occupancy: int = 1
    dq_num_worker_warps: int | None = None
    dq_latency: int = 4
    dq_heads_together: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConfig(TwoPassConfig):
    """With ds stored by the kernel that owns keys, which comes first; `dq_tile_m` is a multiple of `tile_m`."""

    stagger: int = 0
    """Without a mask: a tile of keys begins this many blocks of queries further than the tile before it, and comes back
    to the first. With 0 tiles of a head are at the same queries at all times, and so at the same part of ds."""


STORED_BYTES = 1 << 30
"""The most memory for ds. A launch has as many heads as it holds: 16 at N=4096 and 2 at N=16384."""


def stored_layout(problem: Problem, config: StoredConfig) -> Layout:
    """The layout of ds of the heads of one launch: ``[heads, tiles of dq, Skv, dq_tile_m]``."""
    heads = heads_at_a_time(problem, config) * problem.group
    shape = (heads, -(-problem.seq_q // config.dq_tile_m), problem.seq_kv, config.dq_tile_m)
    return Layout(shape, row_major(shape), problem.torch_dtype)


def heads_at_a_time(problem: Problem, config: StoredConfig) -> int:
    """Heads of keys of one launch: a divisor of those of a batch entry, or those of several; 0 if memory holds none."""
    tiles = -(-problem.seq_q // config.dq_tile_m)
    of_head = problem.group * tiles * config.dq_tile_m * max(problem.seq_kv, 1) * problem.torch_dtype.itemsize
    most = min(STORED_BYTES // max(of_head, 1), problem.batch * problem.heads_kv)
    if most >= problem.heads_kv:
        return most // problem.heads_kv * problem.heads_kv
    return max((it for it in range(1, most + 1) if problem.heads_kv % it == 0), default=0)


def stored_bytes(problem: Problem, config: Config | None) -> int:
    """As `Variant.workspace`, with delta."""
    assert isinstance(config, StoredConfig)
    return problem.layouts["delta"].size_bytes + stored_layout(problem, config).size_bytes


def widths_of(problem: Problem, config: CutileConfig) -> tuple[int, int, int]:
    """Columns of a tile as wide as head_dim, of a second and a third one, 0 where there is none."""
    three = three_widths(problem.head_dim) if config.split_head_dim and config.split_tail else None
    two = two_widths(problem.head_dim) if config.split_head_dim else None
    return three or (*(two or (one_width(problem.head_dim), 0)), 0)


def begins_at_diagonal(problem: Problem, config: CutileConfig) -> bool:
    """True where a tile's maxima are those of the first block that needs a mask, not of the first of all.

    The walk of its keys begins there, too, but not with a pilot.

    Where tiles of rows start with blocks of keys, every row sees some key of that block. The first row sees one, whose
    score is a poor guess of the others': only with the range of bf16, and not where attention has sinks in fp16.
    """
    if problem.packing is not None:
        return False
    aligned = (problem.seq_kv - problem.seq_q) % config.tile_m == 0 and config.tile_m % config.tile_n == 0
    is_causal = problem.is_banded and not problem.is_two_sided
    return keeps_maxima(problem, config) and is_causal and problem.dtype == "bf16" and aligned


def keeps_maxima(problem: Problem, config: CutileConfig) -> bool:
    """True where the config's `lazy_max` is of use: not with a program of scores, which may hide every key of a block.

    With a two-sided mask maxima are those of the first full block.

    A full block is one of which every row of the tile sees all keys, so it is a good guess in fp16, too. A tile without
    one, as the first of a sequence, is done with exact maxima; where the window is so narrow that many tiles have none,
    all are. So it is with a block mask, of blocks that it says are full, unless there is a band as well.
    """
    if problem.blocks is not None and (problem.is_banded or not problem.blocks.has_full):
        return False
    if problem.has_score or not problem.is_two_sided:
        return config.lazy_max and not problem.has_score
    left, right = problem.reach
    rows, diagonal, tile_n = min(config.tile_m, problem.seq_q), problem.diagonal, config.tile_n
    if problem.packing is not None:
        (left, right), rows, diagonal = problem.band.reach(USUAL_LENGTH, USUAL_LENGTH), config.tile_m, 0
    levels = [diagonal + first for first in range(0, max(config.tile_m, tile_n), config.tile_m)]
    full = [(level + right + 1) // tile_n + (left - level - rows + 1) // tile_n for level in levels]
    return config.lazy_max and min(full) > 0


def has_positive_strides(problem: Problem) -> bool:
    """True if TMA can read q, k and v: it wants positive strides."""
    return 0 not in (*problem.strides_q, *problem.strides_k, *problem.strides_v)


# ---------------------------------------------------------------- block masks

_Tiles = TypeVar("_Tiles", CutileConfig, OnePassConfig, TwoPassConfig)


SCORES_ADDED_BY_THREAD, WARP_THREADS, USUAL_WARPS = 16, 32, 4


def _adds_each_score(problem: Problem) -> bool:
    """True if the gradient of a captured tensor of 16 bits takes an atomic addition for each score."""
    if (score := problem.score) is None or not score.gradients:
        return False
    lowered = lower(score.program, apart=score.scores is not None)
    return any(
        not it.is_exclusive and not it.summed and score.program.tensors[it.load.value].dtype.itemsize == 2
        for it in lowered.gradients_of(score.gradients)
    )


def within_blocks(problem: Problem, config: _Tiles) -> _Tiles:
    """The config, with a block mask cut to tiles each of which lies in one block: sizes are powers of two.

    Also cut where each score is added to an element of a 16-bit tensor's gradient: tileiras 13.4 ends in an error
    ("Invalid use-def chain in LoopSchedule") for more than 16 scores a thread.
    """
    if isinstance(config, OnePassConfig) and _adds_each_score(problem):
        most = SCORES_ADDED_BY_THREAD * WARP_THREADS * (config.num_worker_warps or USUAL_WARPS)
        config = replace(config, tile_m=max(SMALLEST_TILE, min(config.tile_m, most // config.tile_n)))
    if (blocks := problem.blocks) is None:
        return config
    sizes = {"tile_m": blocks.queries, "tile_n": blocks.keys}
    sizes |= {f"dq_{name}": size for name, size in sizes.items() if hasattr(config, f"dq_{name}")}
    cut: dict[str, Any] = {name: math.gcd(getattr(config, name), size) for name, size in sizes.items()}
    return replace(config, **cut)


def of_packed(problem: Problem, config: CutileConfig) -> CutileConfig:
    """The config, for a packed batch with a block for each tile: its list has the long ones first."""
    return config if problem.packing is None else replace(config, scheduler="one_tile")


# ---------------------------------------------------------------- grids


Grid = tuple[int, int, int]

MAX_GRID_X = 2**24 - 1  # cuda.tile's own limit for each dimension
MAX_GRID_Y = 2**16 - 1  # CUDA's
MAX_BLOCKS = 2**31 - 1
MAX_QUOTIENT = 2**29
"""More than any number that is divided by a `reciprocal`."""
GRID_ALLOWED = "a grid within 2^24 x 2^16, and fewer than 2^31 blocks"


def factor_grid(blocks: int) -> Grid | None:
    """A grid of exactly so many blocks, in x and y; None if there is none, or its blocks need more than 31 bits."""
    if blocks > MAX_BLOCKS:
        return None
    for y in range(max(1, -(-blocks // MAX_GRID_X)), MAX_GRID_Y + 1):
        if blocks % y == 0:
            return blocks // y, y, 1
    return None


def reciprocal(divisor: int) -> tuple[int, int]:
    """A factor of 31 bits, and a shift: ``n * factor >> shift`` is ``n // divisor`` for n below `MAX_QUOTIENT`.

    Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994), Theorem 4.2.
    """
    shift = 29 + divisor.bit_length()
    return -(-(1 << shift) // divisor), shift


def divisor_near(wanted: int, heads: int) -> int:
    """The number of heads that advance together: of those that divide `heads` the nearest by ratio, else the smaller.

    Of 11 heads it is 11, not 1, where 8 are wanted: one head at a time costs masked problems up to a tenth.
    """
    divisors = (it for low in range(1, math.isqrt(heads) + 1) if heads % low == 0 for it in (low, heads // low))
    return min(divisors, key=lambda count: (max(wanted / count, count / wanted), count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """How many heads advance together; `entries`: those of so many whole batch entries, a power of two."""

    heads: int
    entries: int = 1


def together_of(problem: Problem, config: CutileConfig) -> Together:
    """About as many heads as the config wants: of several batch entries, where one has too few.

    A banded section ends with its short tiles, and the next begins with long ones. Where a section is a fraction of
    what runs at one time, the last long ones begin late, and most SMs wait for them. The number of entries is a power
    of two.
    """
    fit = config.heads_together // problem.heads_q if problem.is_banded else 0
    entries = math.gcd(1 << fit.bit_length() >> 1, problem.batch) if fit else 1
    if entries == 1:
        return Together(heads=divisor_near(config.heads_together, problem.heads_q))
    return Together(heads=entries * problem.heads_q, entries=entries)


def is_linear(problem: Problem, config: CutileConfig, together: Together) -> bool:
    """True if the grid can only number the tiles of all heads: it is too large in x, y or z, or has too many heads."""
    if problem.packing is not None:
        return False
    x, y, z = _grid_by_head(problem, config, together)
    return x > MAX_GRID_X or max(y, z) > MAX_GRID_Y or problem.batch * problem.heads_q >= MAX_QUOTIENT


def _grid_by_head(problem: Problem, config: CutileConfig, together: Together) -> Grid:
    if problem.packing is not None:
        return grid_of_list(query_tiles(problem, config.tile_m), problem.heads_q, together.heads)
    x = -(-problem.seq_q // config.tile_m) * together.heads
    return x, problem.heads_q * together.entries // together.heads, problem.batch // together.entries


def grid_of_list(tiles: int, heads: int, together: int) -> Grid:
    """A block for each of a packed batch's tiles: entries times heads that advance together in x, sections in y."""
    return tiles // heads * together, heads // together, 1


LIST_BLOCKS = 32
"""The most blocks that share the tiles of a group of sequences."""
ENTRIES_OF_BLOCK = 16
"""Entries for which one of them is worth it. A guess, not measured."""
LIST_GROUPS = 128
"""Groups of which only one block has each."""


def list_grid(sequences: int, entries: int, lists: int, group: int) -> Grid:
    """Blocks that share a group's tiles, groups of sequences, and lists. Rows around all sequences are two more."""
    groups = (sequences + 1) // group + 1
    parts = max(1, min(LIST_BLOCKS, -(-entries // ENTRIES_OF_BLOCK), LIST_GROUPS // groups))
    return parts, groups, lists


def grid_of(
    problem: Problem, config: CutileConfig, together: Together, multiprocessors: int, *, linear: bool
) -> Grid | None:
    """Blocks in x, y and z on a device of so many SMs; None if there are too many. `linear`: of code that numbers."""
    tiles = query_tiles(problem, config.tile_m)
    if config.scheduler == "static" and factor_grid(tiles) is not None:
        return min(tiles, multiprocessors * (config.occupancy or 1)), 1, 1
    return factor_grid(tiles) if linear else _grid_by_head(problem, config, together)


# ---------------------------------------------------------------- what fits


TCGEN05 = ("sm100", "sm103")
"""Arches whose products take nothing from registers."""
_LATENCY = limits.between(1, 10, None)
_FIELDS: Mapping[str, limits.FieldRule] = {
    **dict.fromkeys(("tile_m", "tile_n"), limits.powers_of_two(SMALLEST_TILE)),
    "occupancy": limits.between(1, 32, None),
    "num_worker_warps": (lambda it: it in (None, 4, 8), "None, 4 or 8 (others need tileiras 13.5)"),
    "heads_together": limits.AT_LEAST_1,
}
_BACKWARD_FIELDS = {**_FIELDS, "latency": _LATENCY}
_FORWARD_FIELDS = {
    **_FIELDS,
    **dict.fromkeys(("k_latency", "v_latency"), _LATENCY),
    "pipeline": limits.one_of(*PIPELINES),
    "scheduler": limits.one_of(*SCHEDULERS),
}


def why_not_forward(problem: Problem, arch: Arch, config: CutileConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`."""
    checks: list[limits.Check] = [
        *limits.field_checks(config, _FORWARD_FIELDS),
        (config.lazy_max or config.pipeline == "plain", f"pipeline={config.pipeline} without lazy_max", "plain"),
        (
            not config.split_head_dim or two_widths(problem.head_dim) is not None,
            f"split_head_dim=True at head_dim={problem.head_dim}",
            f"more than {NARROWEST}",
        ),
        (
            not config.split_tail or (config.split_head_dim and three_widths(problem.head_dim) is not None),
            f"split_tail=True at head_dim={problem.head_dim}",
            "with split_head_dim, where three parts have fewer columns than two",
        ),
        (not (config.q_in_registers and arch.name in TCGEN05), f"q_in_registers=True on {arch.name}", "False"),
        _grid(f"tile_m={config.tile_m}", query_tiles(problem, config.tile_m), problem),
    ]
    return limits.failed(checks)


def why_not_backward(problem: Problem, arch: Arch, config: OnePassConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`, in one pass or in two."""
    checks = [
        *limits.field_checks(config, _BACKWARD_FIELDS),
        _grid(f"tile_n={config.tile_n}", key_tiles(problem, config.tile_n), problem),
        _grid(f"rows in tiles of {ROW_TILE}", query_tiles(problem, ROW_TILE), problem),
    ]
    if isinstance(config, TwoPassConfig):
        only_one = config.dq_transposed or (config.delta_first and not isinstance(config, StoredConfig))
        checks.append((not only_one, "dq_transposed or delta_first in two kernels", "False"))
        checks += limits.field_checks(config, _BACKWARD_FIELDS, "dq_")
        checks.append(_grid(f"dq_tile_m={config.dq_tile_m}", query_tiles(problem, config.dq_tile_m), problem))
    if isinstance(config, StoredConfig):
        whole, fits = config.dq_tile_m >= config.tile_m, heads_at_a_time(problem, config) > 0
        checks.append((whole, f"dq_tile_m={config.dq_tile_m}", f"tile_m={config.tile_m} and more"))
        checks.append((config.stagger >= 0, f"stagger={config.stagger}", "0 and more"))
        checks.append((fits, f"ds of a head of {problem}", f"{STORED_BYTES >> 20} MiB"))
    return limits.failed(checks)


def _grid(what: str, blocks: int, problem: Problem) -> limits.Check:
    return factor_grid(blocks) is not None, f"{what} for {problem}", GRID_ALLOWED
