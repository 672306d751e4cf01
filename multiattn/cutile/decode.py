"""The forward that divides keys among blocks (decode) as a family: config, splits, launches, candidates. No cuTile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from multiattn.cutile import launches
from multiattn.cutile.arrays import ArrayArgument, Assumptions
from multiattn.cutile.kernels.constants import (
    SMALLEST_TILE,
    MergeSplitsConstants,
    SplitKeysConstants,
    StoredKeysConstants,
    Widths,
)
from multiattn.cutile.launches import Asked, Family, KernelLaunch
from multiattn.layout import VECTOR_BYTES, Layout, row_major
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.limits import between, failed, limit_checks, limited, powers_of_two
from multiattn.plan.schedule import (
    EVEN_ENOUGH,
    choose_splits,
    most_multiprocessors,
    one_width,
    power_of_two,
    row_tiles,
    saving_widths,
)
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import CACHE_TENSORS, SCALES, SPLITS_MAX, area_layouts

NAME = "split_keys"
"""The name of the variant."""

AREA_DTYPE = torch.float32
"""The dtype of parts."""

NO_TMA = ("sm80", "sm86", "sm89")
"""Arches with neither TMA nor kernels that overlap."""

NO_E4M3 = NO_TMA
"""Arches for which cuTile 1.7 has no float8_e4m3fn."""

KEYS_MIN = 128
"""The fewest keys of a split, where lengths are the most that they may be. A guess."""
PARTS_ENOUGH = 128
"""More parts cost more to merge than SMs gain by them. H200, 2026-11-26, B=1 8/1 32k: 126 parts 14.1 us, 244 15.4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitKeysConfig(Config):
    """`tile_m` rows, queries of the heads that share keys, and `tile_n` keys; hints of ``ct.kernel`` and ``ct.load``.

    `blocks_per_sm`, `warps` and `latency` are as in the forward's, the last of both keys and values.
    """

    tile_m: int = limited(powers_of_two(SMALLEST_TILE, 128))
    tile_n: int = limited(powers_of_two(SMALLEST_TILE, 256))
    blocks_per_sm: int = limited(between(1, 32), default=2)
    warps: int | None = limited(launches.WARPS, default=None)
    latency: int | None = limited(launches.LATENCY, default=4)
    alone: int = 0
    """Keys of a tile where each tile of rows has an SM for itself; 0: there is nothing to gain. `settled` decides."""
    splits: int = limited(between(0, SPLITS_MAX), default=0)
    """Blocks that share the keys of a tile; 0, as in rules, has `settled` choose by the problem."""


ALONE_KEYS_MAX = 2048
"""The most keys for which a block with an SM for itself is better: longer sequences want more loads under way."""


def settled(problem: Problem, arch: Arch, config: SplitKeysConfig) -> SplitKeysConfig:
    """The config with a number of splits: the caller's, else its own, else enough to fill the chip.

    Where there are about as many tiles of rows as SMs, and keys are few, a block has an SM for itself, and all keys.
    H200, 2026-11-26, B=128 8/1 1k, pages of 64, D=128: 21.0 us, in two parts 26.2. Small pages are read at half the
    rate by the kernel of one part (B=32 32/8 8k, pages of 16, D=128: 514 us, Triton 242), for a reason that is not
    known; in four parts they are not (B=8: 69.7, Triton 71.5). So they have two.
    """
    asked = problem.asked_splits
    page_rows = page_rows_of(problem, arch, config.tile_n)
    has_small_pages = page_rows < config.tile_n
    is_alone = config.alone and asked is None and not has_small_pages and problem.seq_kv <= ALONE_KEYS_MAX
    sms = most_multiprocessors(arch)
    if is_alone and EVEN_ENOUGH * sms <= row_tiles(problem, config.tile_m) <= sms:
        config = replace(config, tile_n=config.alone, blocks_per_sm=1, latency=4)
    config = replace(config, alone=0)
    splits = asked or config.splits
    if not splits:
        least = max(KEYS_MIN, config.tile_n, -(-problem.seq_kv // PARTS_ENOUGH))
        splits = choose_splits(problem, arch, tile_m=config.tile_m, keys_min=least, blocks_per_sm=config.blocks_per_sm)
        if splits == 1 and page_rows > 0 and has_small_pages and problem.seq_kv >= 2 * least:
            splits = 2
    return replace(config, splits=splits)


PAGE_ROWS_MIN = 8
"""The fewest rows of a page that are worth a load of their own. A guess."""


def page_rows_of(problem: Problem, arch: Arch, tile_n: int) -> int:
    """Rows that a block of `tile_n` keys takes of a page; 0 where rows of any pages are found one by one.

    Loads of several pages need TMA: without it tileiras 13.4 loads them element by element.
    """
    page = None if problem.cache is None else problem.cache.page
    if page is None or page % tile_n == 0:
        return tile_n
    has_tma = arch.name not in NO_TMA and launches.has_positive_strides(problem) and problem.alignment == VECTOR_BYTES
    return page if has_tma and tile_n % page == 0 and page >= PAGE_ROWS_MIN else 0


def areas_of(problem: Problem, config: SplitKeysConfig) -> Mapping[str, Layout]:
    """The areas of workspace, by name; none with one split, or with nothing to launch."""
    if config.splits <= 1 or problem.lengths[0] == 0:
        return {}
    sizes = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
    return area_layouts(config.splits, *sizes, row_max=problem.row_max)


# ---------------------------------------------------------------- grids


def tiles_of(problem: Problem, tile_m: int) -> int:
    """Tiles of the rows of a sequence, at most."""
    return max(1, -(-problem.rows // tile_m))


def grid_of(problem: Problem, config: SplitKeysConfig) -> launches.Grid:
    """Tiles of rows of all sequences in x, heads of keys in y, splits in z."""
    return problem.lengths[0] * tiles_of(problem, config.tile_m), problem.heads_kv, config.splits


def merge_grid(problem: Problem, splits: int) -> launches.Grid:
    """Tiles of queries in x, each with the blocks of its columns, tiles of heads in y, batch entries in z."""
    _, columns = merged_together(splits, one_width(problem.head_dim_v))
    heads, queries = merged_rows(problem, splits)
    x = -(-problem.seq_q // queries) * -(-problem.head_dim_v // columns)
    return x, -(-problem.heads_q // heads), problem.batch


def can_overlap(arch: Arch) -> bool:
    """True if a kernel may begin before the one before it has ended."""
    return arch.is_gpu and arch.name not in NO_TMA


MERGE_FEW, MERGE_MANY = 16, 128
"""Parts that are merged all at once (a guess), and of more those at a time."""
MERGE_COLUMNS_FEW, MERGE_COLUMNS_MANY = 128, 32
"""Columns that a block has of them.

H200, 2026-11-26, B=1 8/1 32k, 126 parts: 3.1 us behind the last part, 64 parts and columns 4.6."""
MERGE_ELEMENTS = 2048
"""Elements of few parts that a block merges, or two rows: 8 KiB.

H200, 2026-11-26, B=8 64/8 8k, 16 queries: 4.5 us behind the last part, 4,096 elements 6.1, 8,192 5.5."""


def merged_together(splits: int, tile_d: int) -> tuple[int, int]:
    """Parts of a row that are merged at a time, and the columns that a block has of them.

    No length and no number of rows counts here: a row's bits are the same in any batch.
    """
    if splits <= MERGE_FEW:
        return power_of_two(splits), min(tile_d, MERGE_COLUMNS_FEW)
    return MERGE_MANY, min(tile_d, MERGE_COLUMNS_MANY)


def merged_rows(problem: Problem, splits: int) -> tuple[int, int]:
    """The heads and queries that a block merges: one row of many parts, of few as many as keep it busy.

    H200, 2026-11-26, 8,192 rows of two parts, D=128: blocks of one row took 28 us.
    """
    if splits > MERGE_FEW:
        return 1, 1
    together, columns = merged_together(splits, one_width(problem.head_dim_v))
    rows = max(2, MERGE_ELEMENTS // (together * columns))  # of one a thread would load no vectors
    heads = min(rows, power_of_two(problem.heads_q))
    if problem.has_packed_queries:  # rows may end at any query
        return heads, 1
    return heads, min(rows // heads, power_of_two(problem.seq_q))


ONE_TILE_MAX = 256
"""Columns beyond which rows are in two parts, where that saves columns: 512 and 64 of 576."""


def widths_of(width: int) -> Widths:
    """The tiles of rows of a width."""
    first, tail = (saving_widths(width) if width > ONE_TILE_MAX else None) or (one_width(width), 0)
    return Widths(head_dim=width, tile_d=first, tail_d=tail)


def reads_v_in_k(problem: Problem) -> bool:
    """True where values are read as a part of k, whose first tile is as wide as theirs."""
    qk, vo = widths_of(problem.head_dim), widths_of(problem.head_dim_v)
    return problem.v_in_k and qk.head_dim > vo.head_dim and vo.columns == (qk.tile_d, 0, 0)


# ---------------------------------------------------------------- what fits


def why_not(problem: Problem, arch: Arch, config: SplitKeysConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem`."""
    if problem.stored == "e4m3" and arch.name in NO_E4M3:
        allowed = f"int8 on {', '.join(NO_E4M3)}, for which cuTile has no float8_e4m3fn"
        hint = "quantise to torch.int8, or use another backend"
        return (Reason(code="stored", got=f"a cache of e4m3 on {arch.name}", allowed=allowed, hint=hint),)
    grids = [grid_of(problem, config)]
    if config.splits > 1:
        grids.append(merge_grid(problem, config.splits))
    fits = all(_is_grid(grid) for grid in grids)
    allowed = f"grids within {launches.MAX_GRID_X} x {launches.MAX_GRID_Y} x {launches.MAX_GRID_Y}"
    return failed([*limit_checks(config), (fits, f"{config} for {problem}", allowed)])


def _is_grid(grid: launches.Grid) -> bool:
    x, y, z = grid
    return x <= launches.MAX_GRID_X and max(y, z) <= launches.MAX_GRID_Y and x * y * z <= launches.MAX_BLOCKS


# ---------------------------------------------------------------- launches


def describe(call: Asked) -> tuple[KernelLaunch, ...]:
    """The launch that divides keys, and that which merges parts where there are several."""
    if call.problem.lengths[0] == 0:  # no row is any sequence's
        return ()
    return (_split_keys(call),) if call.config.splits <= 1 else (_split_keys(call), _merge_splits(call))


def _split_keys(call: Asked) -> KernelLaunch:
    plan, problem, cache, config = call.plan, call.problem, call.problem.cache, call.config
    assumed = Assumptions(problem=problem, emitted=call.emitted)
    assumed.exactly(dtype=problem.dtype, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v)
    assumed.exactly(mask=problem.band.kind, scale_sign=problem.scale_sign)
    if reads_v_in_k(problem):
        assumed.exactly(v_in_k=True)
    one_tile, divided = tiles_of(problem, config.tile_m) == 1, config.splits > 1
    assumed.exactly(one_tile=one_tile, divided=divided)
    page_rows = page_rows_of(problem, plan.arch, config.tile_n)
    if cache is not None:
        pages = "dense" if cache.page is None else f"pages in {page_rows}"
        assumed.exactly(cache=pages, packed_queries=cache.max_q is not None)
    kind: type[SplitKeysConstants] = SplitKeysConstants
    more: dict[str, bool] = {}
    if problem.stored is not None and cache is not None:
        dtype = str(problem.cache_dtype).removeprefix("torch.")
        assumed.exactly(k_dtype=dtype, v_dtype=dtype, scales_of_tokens=",".join(cache.per_token) or "none")
        kind, in_weights = StoredKeysConstants, problem.dtype == "bf16"
        each = {f"scales_{it}": name in cache.per_token for it, name in zip(("keys", "values"), SCALES, strict=True)}
        more = {**each, "in_weights": in_weights}
    captured, derived = launches.aux_of(plan, assumed)
    layouts, names = {**problem.layouts}, {name: name for name in launches.FORWARD}
    if divided:
        layouts |= _parts(problem, config)
        names |= {"out": "partial_out", "lse": "partial_lse"}
    return KernelLaunch(
        kernel="split_keys",
        module="decode",
        is_64bit=assumed.flag("int64", _needs_64bit(problem, config)),
        blocks_per_sm=config.blocks_per_sm,
        warps=config.warps,
        grid=grid_of(problem, config),
        arrays={name: assumed.sized(tensor, layouts[tensor]) for name, tensor in names.items()},
        optional={
            "tops": _tops(problem, assumed, layouts, "partial_max" if divided else "row_max"),
            "sinks": assumed.sinks() if not divided else (),
            "captured": captured,
            "cache": assumed.all_captured(it for it in CACHE_TENSORS if it in problem.cache_tensors),
        },
        scalars={"scale": problem.scale_log2, "reach": launches.reach_of(problem), "derived": derived},
        constants=kind(
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            qk=widths_of(problem.head_dim),
            vo=widths_of(problem.head_dim_v),
            v_in_k=reads_v_in_k(problem),
            banded=problem.is_banded,
            two_sided=problem.is_two_sided,
            has_sinks=problem.has_sinks and not divided,
            row_max=problem.row_max,
            sign=problem.scale_sign,
            k_latency=config.latency,
            v_latency=config.latency,
            tma=not assumed.flag("no_tma", not launches.has_positive_strides(problem)),
            divided=divided,
            one_tile=one_tile,
            cached=cache is not None,
            paged=cache is not None and cache.page is not None,
            page_rows=page_rows,
            page_is_tile=cache is not None and cache.page == config.tile_n,
            packed_queries=problem.has_packed_queries,
            overlapped=divided and can_overlap(plan.arch),
            score=launches.lowered_of(plan),
            **more,
        ),
        assumed=assumed.constants,
    )


def _merge_splits(call: Asked) -> KernelLaunch:
    problem, config = call.problem, call.config
    assumed = Assumptions(problem=problem, emitted=call.emitted, constants={"dtype": problem.dtype})
    together, columns = merged_together(config.splits, one_width(problem.head_dim_v))
    heads, queries = merged_rows(problem, config.splits)
    shape = (config.splits, problem.batch * problem.heads_q, problem.seq_q, problem.head_dim_v)
    parts, sums = (Layout(it, row_major(it), AREA_DTYPE) for it in (shape, shape[:3]))
    starts = (name for name in problem.cache_tensors if name == "cu_seqlens_q")
    overlaps = can_overlap(call.plan.arch)
    return KernelLaunch(
        kernel="merge_splits",
        module="merge",
        is_64bit=assumed.flag("int64", _needs_64bit(problem, config)),
        grid=merge_grid(problem, config.splits),
        arrays={
            **{name: assumed.sized(name, problem.layouts[name]) for name in ("out", "lse")},
            "parts": assumed.sized("partial_out", parts),
            "sums": assumed.sized("partial_lse", sums),
        },
        optional={
            "tops": _tops(problem, assumed, {**problem.layouts, "partial_max": sums}, "row_max", "partial_max"),
            "sinks": assumed.sinks(),
            "starts": assumed.all_captured(starts),
        },
        constants=MergeSplitsConstants(
            few=config.splits <= MERGE_FEW,
            together=together,
            heads=heads,
            queries=queries,
            columns=columns,
            parts=-(-problem.head_dim_v // columns),
            has_sinks=problem.has_sinks,
            packed_queries=problem.has_packed_queries,
            overlapping=overlaps,
            row_max=problem.row_max,
        ),
        overlaps=overlaps,
        assumed=assumed.constants,
    )


def _tops(
    problem: Problem, assumed: Assumptions, layouts: Mapping[str, Layout], *names: str
) -> tuple[ArrayArgument, ...]:
    """The arrays of the largest scores of rows, if a forward writes them."""
    return tuple(assumed.sized(name, layouts[name]) for name in names) if problem.row_max else ()


def _parts(problem: Problem, config: SplitKeysConfig) -> Mapping[str, Layout]:
    """The areas as the first kernel writes them: parts of one split after those of another, all like out and lse."""
    found = {}
    for name, layout in areas_of(problem, config).items():
        _, _, *rest = layout.shape
        _, *strides = layout.strides
        found[name] = Layout((config.splits * problem.batch, *rest), tuple(strides), layout.dtype)
    return found


def _needs_64bit(problem: Problem, config: SplitKeysConfig) -> bool:
    """As `needs_64bit`, of the areas as well."""
    elements = [math.prod(layout.shape) for layout in areas_of(problem, config).values()]
    return launches.needs_64bit(problem) or max(elements, default=0) > abi.INT32_MAX


# ---------------------------------------------------------------- candidates

_TILES: Sequence[tuple[int, int, int]] = (
    (64, 2, 4), (64, 3, 4), (64, 4, 4), (64, 2, 8), (64, 1, 8), (128, 2, 4), (128, 1, 8), (32, 4, 6), (32, 8, 4),
    (16, 8, 8), (16, 4, 10), (64, 2, 2), (64, 3, 2), (128, 2, 2),
)  # fmt: skip
"""tile_n, blocks an SM and latency."""


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[SplitKeysConfig]:
    """Blocks of keys with hints that suit them, in tiles of as many rows as there are."""
    rows = min(128, max(SMALLEST_TILE, power_of_two(problem.rows)))
    heights = (rows, 64) if rows < 128 else (64, 128)  # wgmma takes 64 rows, and keys from shared memory
    for warps, height, (tile_n, blocks, latency) in itertools.product((None, 8), heights, _TILES):
        if warps is None or (height >= 64 and blocks <= 2):
            config = SplitKeysConfig(tile_m=height, tile_n=tile_n, blocks_per_sm=blocks, latency=latency)
            yield replace(settled(problem, arch, config), warps=warps)


FAMILY = Family(
    summary="decode: query heads that share keys are rows of one tile, keys divided among blocks, parts merged after",
    config=SplitKeysConfig,
    capability=replace(
        launches.EVERYWHERE,
        head_dim_max=launches.HEAD_DIM_MAX,
        block_masks=0,
        packed_blocks=0,
        packing=False,
        caches=True,
        stored=True,
    ),
    launches=describe,
    fits=why_not,
    candidates=candidates,
    settle=settled,
    own_areas=areas_of,
)
