"""The forward as a family: its config and ladder, what fits, its launch, and configs worth timing. Imports no cuTile.

Shared memory is tileiras' own choice (it fits its pipeline to the occupancy asked for), so nothing here computes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from multiattn.block_mask import KEYS_OF_QUERIES
from multiattn.cutile import launches
from multiattn.cutile.arrays import Assumptions
from multiattn.cutile.kernels.constants import ForwardConstants, Widths
from multiattn.cutile.launches import Asked, Family, KernelLaunch
from multiattn.packed import TILE_LISTS, USUAL_LENGTH
from multiattn.plan import abi
from multiattn.plan.arch import GPUS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config, has_whole_sectors
from multiattn.plan.ladder import LadderStep, Rung
from multiattn.plan.limits import AT_LEAST_1, failed, limit_checks, limited, one_of
from multiattn.plan.schedule import one_width, query_tiles, three_widths
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem
from multiattn.validate import LOG2_E

SCHEDULERS = ("one_tile", "static")
"""Entries of `multiattn.plan.schedule.SCHEDULERS` that need no counter, as a block has none to ask."""
PIPELINES = ("plain", "ahead", "pairs", "pilot", "pilot_pairs")

PARTS_OF_SECTORS, RAGGED = 1.05, 1.04
"""How much longer it takes where rows are no whole sectors: 0 to 17 % (H200, 2026-11-26, N=4096, D=40 to 248); where
the last block of keys is not full: 0 to 8 % (N=3000, D=40 to 256)."""

HEADROOM = {"bf16": 16.0, "fp16": 0.0}
"""log2, by dtype: how much less than one the largest weight of the block that comes first is with `lazy_max`.

In bf16 it costs nothing, as weights have the range of fp32, and keeps large values of v from overflowing the sums. In
fp16 small weights would be lost, which many of together count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutileConfig(Config):
    """Tiles of the forward, and hints of ``ct.kernel`` and ``ct.load``.

    `blocks_per_sm` is blocks per SM; None, as of a latency, gives no hint. `warps` None lets the compiler choose
    (4); 8 spreads a tile's rows over two warpgroups. A latency, 1 to 10, is how far ahead a load is issued. About
    `heads_together` heads advance together, if need be of several batch entries (`together_of`).
    """

    tile_m: int = limited(launches.TILE)
    tile_n: int = limited(launches.TILE)
    blocks_per_sm: int | None = limited(launches.BLOCKS, default=1)
    warps: int | None = limited(launches.WARPS, default=None)
    k_latency: int | None = limited(launches.LATENCY, default=2)
    v_latency: int | None = limited(launches.LATENCY, default=4)
    heads_together: int = limited(AT_LEAST_1, default=1)
    lazy_max: bool = False
    """Weights are relative to the maxima of one block of keys (`begins_at_diagonal` says which), and a tile in which
    scores outgrow those is done again: by 2^115 in bf16, by 2^16 in fp16, whose weights hold no more. It then takes
    more than twice as long."""
    pipeline: str = limited(one_of(*PIPELINES), default="plain")
    """``ahead``: the next block's scores are begun before the weights of one.
    ``pairs``: blocks come in twos, scores of both first. ``pilot``: the maxima are those of the first 16 keys of the
    block, whose scores come before all others, and the block is one of the loop's. ``pilot_pairs``: both. All need
    `lazy_max`. ``plain``: as the compiler orders it."""
    scheduler: str = limited(one_of(*SCHEDULERS), default="one_tile")
    """``one_tile``: a block per tile of queries. ``static``: `blocks_per_sm` blocks per SM, each of which takes every
    n-th tile of n blocks."""
    split_head_dim: bool = False
    """Tiles of two parts in place of one as wide as head_dim (`two_widths`): 64 and 32 columns at D=96, where one has
    128. At D=256 two of 128 save none, but twice as many loads, of half the size, suit short masked problems. The
    narrower of q and v, where they differ, is in parts only where that saves columns."""
    split_tail: bool = False
    """The second of these parts is two, too: 64, 32 and 16 columns at D=104."""
    q_in_registers: bool = False
    """Products with keys take q from registers, in tiles of 64 rows head_dim / 4 of each thread, and read keys alone
    from shared memory. tcgen05 has no such products."""

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The one kernel."""
        width = math.gcd(problem.head_dim, problem.head_dim_v)
        slowness = 1.0 if has_whole_sectors(width, problem.torch_dtype.itemsize) else PARTS_OF_SECTORS
        slowness *= RAGGED if launches.has_ragged_keys(problem, self.tile_n) else 1.0
        columns = (sum(it) / 2 for it in zip(*(it.columns for it in widths_of(problem, self).values()), strict=True))
        return (self.walk("q", *columns, blocks_per_sm=self.blocks_per_sm or 1, begin=4, slowness=slowness),)


def widths_of(problem: Problem, config: CutileConfig) -> dict[str, Widths]:
    """The tiles of rows, by names of constants."""
    return launches.widths_of(problem, split=config.split_head_dim, tail=config.split_tail)


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
    all are. So it is with a block mask, of blocks that it says are full, unless there is a band as well. In a packed
    batch a full block may have no key of the sequence.

    Nor where the largest score of each row is asked: kept beside, it takes registers that loops lack. sm90, N=4096
    full: 73 spills in loops at D=128, 64 at D=64, and with exact maxima none, of as many instructions.
    """
    if problem.row_max:
        return False
    is_packed = problem.packing is not None
    if (blocks := problem.blocks) is not None and (problem.is_banded or is_packed or not blocks.has_full):
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


# ---------------------------------------------------------------- the ladder


@dataclass(frozen=True, kw_only=True, slots=True)
class CutileStep(LadderStep):
    """A rung's flags. Some are constants of the kernel, by the same name; the rest limit the config."""

    flush_to_zero: bool = False
    """exp2 takes a subnormal number for zero: one instruction, with no scaling around it."""
    k_transposed: bool = False
    """K comes transposed out of memory, by the order of its load: no tile is turned around in registers."""
    latency_hints: bool = False
    """The config's latencies of k and v: how far ahead their loads are issued, to hide behind the products."""
    approximate_division: bool = False
    """A multiplication by an approximate reciprocal, flushing to zero; else an IEEE division an element."""
    occupancy_hint: bool = False
    """The config's blocks per SM, for which the compiler saves registers and shared memory."""
    lazy_max: bool = False
    """The config's lazy_max, and its pipeline, which needs that."""
    static_grid: bool = False
    """The config's scheduler: blocks may take tile after tile."""
    q_in_registers: bool = False
    """The config's q_in_registers."""

    def limit(self, config: CutileConfig) -> CutileConfig:
        """The config less what this step does not do."""
        return replace(
            config,
            k_latency=config.k_latency if self.latency_hints else None,
            v_latency=config.v_latency if self.latency_hints else None,
            blocks_per_sm=config.blocks_per_sm if self.occupancy_hint else None,
            lazy_max=config.lazy_max and self.lazy_max,
            pipeline=config.pipeline if self.lazy_max else "plain",
            scheduler=config.scheduler if self.static_grid else "one_tile",
            q_in_registers=config.q_in_registers and self.q_in_registers,
        )


_MATH = CutileStep(exp2=True, flush_to_zero=True, scale_after_max=True)
_MEMORY = replace(_MATH, k_transposed=True, latency_hints=True)
_FULL = replace(
    _MEMORY, approximate_division=True, occupancy_hint=True, lazy_max=True, static_grid=True, q_in_registers=True
)

STEPS: Mapping[str, Rung[CutileStep]] = {
    "full": Rung(
        parent="memory",
        summary="approximate division, lazy maxima, grid and blocks per SM as measured; tileiras picks how to load",
        step=_FULL,
    ),
    "memory": Rung(
        parent="math",
        summary="K loaded transposed, k and v as far ahead as their latencies say: loads hide behind the products",
        step=_MEMORY,
    ),
    "math": Rung(
        parent="basic",
        summary="exp2 of one multiply-add a score: log2(e) is in the scale, which is applied after the row's maximum",
        step=_MATH,
    ),
    "basic": Rung(
        parent=None,
        summary="FlashAttention-2 as written: natural exp, K transposed in registers, IEEE division, no hints",
        step=CutileStep(),
    ),
}
"""Every rung by name. Those that need no naming come first: no other rung has them as its parent."""


# ---------------------------------------------------------------- grids


def together_of(problem: Problem, config: CutileConfig) -> launches.Together:
    """About as many heads as the config wants: of several batch entries, where one has too few.

    A banded section ends with its short tiles, and the next begins with long ones. Where a section is a fraction of
    what runs at one time, the last long ones begin late, and most SMs wait for them. The number of entries is a power
    of two.
    """
    fit = config.heads_together // problem.heads_q if problem.is_banded else 0
    entries = math.gcd(1 << fit.bit_length() >> 1, problem.batch) if fit else 1
    if entries == 1:
        return launches.Together(heads=launches.divisor_near(config.heads_together, problem.heads_q))
    return launches.Together(heads=entries * problem.heads_q, entries=entries)


def is_linear(problem: Problem, config: CutileConfig, together: launches.Together) -> bool:
    """True if the grid can only number the tiles of all heads: it is too large in x, y or z, or has too many heads."""
    if problem.packing is not None:
        return False
    x, y, z = _grid_by_head(problem, config, together)
    return (
        x > launches.MAX_GRID_X
        or max(y, z) > launches.MAX_GRID_Y
        or problem.batch * problem.heads_q >= launches.MAX_QUOTIENT
    )


def _grid_by_head(problem: Problem, config: CutileConfig, together: launches.Together) -> launches.Grid:
    if problem.packing is not None:
        return launches.grid_of_list(query_tiles(problem, config.tile_m), problem.heads_q, together.heads)
    x = -(-problem.seq_q // config.tile_m) * together.heads
    return x, problem.heads_q * together.entries // together.heads, problem.batch // together.entries


def grid_of(
    problem: Problem, config: CutileConfig, together: launches.Together, multiprocessors: int, *, linear: bool
) -> launches.Grid | None:
    """Blocks in x, y and z on a device of so many SMs; None if there are too many. `linear`: of code that numbers."""
    tiles = query_tiles(problem, config.tile_m)
    if config.scheduler == "static" and launches.factor_grid(tiles) is not None:
        return min(tiles, multiprocessors * (config.blocks_per_sm or 1)), 1, 1
    return launches.factor_grid(tiles) if linear else _grid_by_head(problem, config, together)


# ---------------------------------------------------------------- what fits


TCGEN05 = ("sm100", "sm103")
"""Arches whose products take nothing from registers."""


def why_not(problem: Problem, arch: Arch, config: CutileConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`."""
    three = three_widths(problem.width)
    checks = [
        *limit_checks(config),
        (config.lazy_max or config.pipeline == "plain", f"pipeline={config.pipeline} without lazy_max", "plain"),
        launches.split_check(problem, config),
        (
            not config.split_tail or (config.split_head_dim and three is not None),
            f"split_tail=True at {problem.widths}",
            "with split_head_dim, where three parts have fewer columns than two",
        ),
        (not (config.q_in_registers and arch.name in TCGEN05), f"q_in_registers=True on {arch.name}", "False"),
        launches.grid_check(f"tile_m={config.tile_m}", query_tiles(problem, config.tile_m), problem),
    ]
    return failed(checks)


# ---------------------------------------------------------------- the launch


DIAGONAL = "seq_kv_less_seq_q"
"""Name of the difference of lengths, which a kernel that begins at the diagonal takes for a multiple of tile_m."""
_OF_STEP = ("exp2", "flush_to_zero", "scale_after_max", "k_transposed", "approximate_division", "ln_base")
_OF_CONFIG = ("tile_m", "tile_n", "k_latency", "v_latency", "pipeline", "q_in_registers")
"""Constants of the kernel that a rung and a config have by the same name; a rung's others limit the config."""


def describe(call: Asked) -> tuple[KernelLaunch, ...]:
    """The one kernel, behind that which lists the tiles of a packed batch; ValueError where it has no grid."""
    plan, problem, step = call.plan, call.problem, STEPS[call.plan.variant].step
    config: CutileConfig = launches.within_blocks(problem, call.config)
    if problem.packing is not None:  # its list has the long tiles first
        config = replace(config, scheduler="one_tile")
    assumed = Assumptions(problem=problem, emitted=call.emitted)
    assumed.exactly(dtype=problem.dtype, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v)
    assumed.exactly(mask=problem.band.kind, scale_sign=problem.scale_sign)
    captured, derived = launches.aux_of(plan, assumed)
    masked = assumed.flag("masked", problem.is_banded or launches.has_ragged_keys(problem, config.tile_n))
    aligned_to = config.tile_m if begins_at_diagonal(problem, config) else 1
    diagonal = assumed.multiple(DIAGONAL, aligned_to, problem.seq_kv - problem.seq_q)
    lazy_max = keeps_maxima(problem, config)
    if problem.is_two_sided:  # one code for every window: how wide it is may ask for another, but none is wrong
        entered = abi.settle(assumed.constants, assumed.emitted, "lazy_max", str(lazy_max), lambda there: True)
        lazy_max = entered == "True"
    together = together_of(problem, config)
    tma = not assumed.flag("no_tma", not launches.has_positive_strides(problem))
    linear = assumed.flag("linear_grid", is_linear(problem, config, together))
    grid = grid_of(problem, config, together, call.multiprocessors, linear=linear)
    if grid is None:
        raise ValueError(f"no grid for {plan}")
    widths = widths_of(problem, config)
    launch = KernelLaunch(
        kernel="forward",
        module="forward",
        is_64bit=assumed.flag("int64", launches.needs_64bit(problem)),
        blocks_per_sm=config.blocks_per_sm,
        warps=config.warps,
        grid=grid,
        arrays={name: assumed.array(name) for name in launches.FORWARD},
        optional={
            "tops": assumed.tops(),
            "sinks": assumed.sinks(),
            "captured": captured,
            "listed": assumed.lists(KEYS_OF_QUERIES, TILE_LISTS[0]),
        },
        scalars={
            "scale": problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E,
            "reach": launches.reach_of(problem),
            "numbers": launches.order_of(problem, together),
            "derived": derived,
        },
        constants=ForwardConstants(
            qk=widths["qk"],
            vo=widths["vo"],
            banded=problem.is_banded,
            two_sided=problem.is_two_sided,
            masked=masked,
            has_sinks=problem.has_sinks,
            row_max=problem.row_max,
            linear_grid=linear,
            sign=problem.scale_sign,
            tma=tma,
            **{name: getattr(step, name) for name in _OF_STEP},
            **{name: getattr(config, name) for name in _OF_CONFIG},
            lazy_max=lazy_max,
            headroom=HEADROOM[problem.dtype],
            diagonal_first=diagonal > 1,
            static_grid=config.scheduler == "static",
            score=launches.lowered_of(plan),
            blocks=launches.tiles_of_blocks(problem, KEYS_OF_QUERIES, config.tile_m, config.tile_n),
            packed=problem.packing is not None,
        ),
        assumed=assumed.constants,
    )
    return (*launches.tile_lists(plan, query_tile=config.tile_m), launch)


# ---------------------------------------------------------------- candidates


L2_BYTES = max(gpu.l2_mib or 0 for gpu in GPUS if gpu.arch == "sm90") << 20
"""The L2 of the largest Hopper product: the ways below are for that arch."""
_SHAPES = tuple[int, int, int, int | None]
_BLACKWELL: tuple[_SHAPES, ...] = (
    (128, 128, 2, None), (128, 128, 1, None), (256, 128, 1, None), (256, 64, 1, None), (128, 64, 2, None),
    (64, 128, 2, None), (64, 64, 4, None), (256, 128, 1, 8), (128, 128, 1, 8),
)  # fmt: skip
"""tile_m, tile_n, blocks an SM and warps."""
_SMALL: tuple[_SHAPES, ...] = (
    (64, 64, 2, None), (64, 64, 1, None), (64, 32, 2, None), (64, 32, 1, None), (64, 64, 3, None), (128, 64, 1, None),
    (128, 32, 1, None), (128, 64, 1, 8), (32, 64, 2, None),
)  # fmt: skip


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[CutileConfig]:
    """Tiles with the hints that may suit them; on sm90 those of any rule for a head_dim like this, in several ways."""
    if arch.name == "sm90":
        yield from _lazy_candidates(variant, problem)
        return
    shapes = _BLACKWELL if arch.name in TCGEN05 else _SMALL
    tiles = [CutileConfig(tile_m=m, tile_n=n, blocks_per_sm=blocks, warps=it) for m, n, blocks, it in shapes]
    best = tiles[0]
    found = [*tiles, *(replace(best, k_latency=k, v_latency=v) for k, v in ((1, 1), (4, 6)))]
    found += [replace(config, heads_together=4) for config in tiles[:4]]
    found += [replace(best, heads_together=heads) for heads in (problem.group, problem.heads_q)]
    yield from map(STEPS[variant.name].step.limit, found)


def _lazy_candidates(variant: Variant, problem: Problem) -> Iterator[CutileConfig]:
    """The ways of rules, with several latencies; heads side by side where tiles are not of one length."""
    width = max(64, one_width(problem.width))
    rules = (it for it in variant.rules if "sm90" in it.arches)
    known = (it.config for it in rules if it.head_dim_min <= width and it.head_dim_max > width // 2)
    one, is_wide = one_width(problem.width), problem.width > 128
    for way in dict.fromkeys(replace(it, heads_together=1) for it in known):
        saves = max(sum(it.columns) for it in widths_of(problem, way).values()) < one
        if way.split_head_dim and not saves and not (is_wide and way.pipeline == "ahead"):
            continue
        latencies = ((way.k_latency, way.v_latency), (None, None), (1, 1), (2, 4))
        for (k, v), heads in itertools.product(latencies, _heads_together(problem, way)):
            yield STEPS[variant.name].step.limit(replace(way, k_latency=k, v_latency=v, heads_together=heads))


def _heads_together(problem: Problem, way: CutileConfig) -> dict[int, None]:
    """Distinct counts of heads. Small ones are left out of a banded grid with a block a tile, unless keys exceed L2.

    A static grid turns from head to head. Hopper's L2 has two halves, and what both need is in both: so the keys of
    four heads count twice.
    """
    few, several = (1, 2, 4), (4, 8, 16, 32, problem.heads_q)
    if not problem.is_banded:
        return dict.fromkeys((*few, 8) if way.scheduler == "static" else few)
    if way.scheduler == "static":
        return dict.fromkeys(few)
    keys = (problem.head_dim + problem.head_dim_v) * problem.torch_dtype.itemsize * problem.seq_kv
    return dict.fromkeys((*few, *several) if 8 * keys > L2_BYTES else several)


FAMILY = Family(
    config=CutileConfig,
    capability=replace(launches.EVERYWHERE, head_dim_max=launches.HEAD_DIM_MAX),
    launches=describe,
    fits=why_not,
    candidates=candidates,
    lists=TILE_LISTS[:1],
    is_emitted=True,
)
