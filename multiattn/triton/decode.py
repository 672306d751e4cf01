"""The kernels that divide keys into parts, for few queries and for caches: one of the parts, one that merges them.

No code depends on a stride of theirs, as it may be the capacity of a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from multiattn.layout import VECTOR_BYTES
from multiattn.plan import limits
from multiattn.plan.arch import GRID_MAX, Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import (
    EVEN_ENOUGH,
    NARROWEST,
    ROWS_MAX,
    choose_splits,
    most_multiprocessors,
    one_width,
    power_of_two,
    row_tiles,
    saving_widths,
)
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import SPLITS_MAX, area_layouts
from multiattn.triton.family import ASYNCHRONOUS, Areas, TritonFamily, TritonLaunch
from multiattn.triton.kernels.constants import FEW_ROWS, OUT_VECTOR, MergeConstants, SplitConstants, Width
from multiattn.triton.ladder import STEPS
from multiattn.triton.score import lowered_score
from multiattn.triton.table import (
    ELEMENT_BYTES,
    INT32,
    NONE,
    Constant,
    KernelTable,
    Parameter,
    Tensor,
    aux_row,
    factor_row,
    filled,
    given,
    integers,
    reach_rows,
    sinks_row,
    stride_rows,
    tops_row,
)

VARIANT = "split_keys"
PARTS, MERGE = "attention_of_parts", "merge_splits"
"""The names of the kernels."""

HEAD_DIM_MAX, VALUES_MAX = 576, 512
"""The most columns of q and k, and of v: those of absorbed latent attention."""
ONE_TILE_MAX = 256
"""The most columns of q and k that are always one tile."""
MERGED_COLUMNS = 32
"""Columns of a program that merges parts: few, so that there are many programs where there are few rows."""
_MERGED_PARTS = (4, 16, 64, SPLITS_MAX)
"""Parts that code to merge them is made for."""
_MERGED_LINES = 64
"""Lines of all parts that a program reads, if these are no more."""
_E4M3_FROM = (8, 9)
"""The first arch on which Triton converts float8_e4m3fn."""
_WGMMA_ROWS = 64
"""Rows of a tile from which tensor cores read it in the background, on the arches that can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonSplitConfig(Config):
    """Tiles and what Triton's compiler is told. `tile_m` is rows: queries of all heads that share keys."""

    tile_m: int = limits.limited(limits.powers_of_two(16, 256))
    tile_n: int = limits.limited(limits.powers_of_two(16, 256))
    warps: int = limits.limited(limits.powers_of_two(1, 16))
    stages: int = limits.limited(limits.AT_LEAST_1)
    """Tiles of keys in flight; 1 switches the pipeline off."""
    splits: int = limits.limited(limits.between(1, SPLITS_MAX), default=0)
    """The parts that the keys of each tile of rows are divided into; 0 leaves it to `settle`."""
    blocks_per_sm: int = limits.limited(limits.AT_LEAST_1, default=2)
    """Programs that an SM is given, if there are keys enough."""
    keys_min: int = 0
    """The least keys of the longest sequence that are a part; 0: a tile of them."""
    widens: bool = False
    """Where each tile of rows has an SM for itself, a program has twice the keys and warps: `settle` decides."""


def split_tiles(tile_m: int, tile_n: int, warps: int, stages: int, blocks_per_sm: int = 2) -> TritonSplitConfig:
    """A config in short."""
    return TritonSplitConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, blocks_per_sm=blocks_per_sm)


def settle(problem: Problem, arch: Arch, config: TritonSplitConfig) -> TritonSplitConfig:
    """The config with a number of parts."""
    if config.splits or config.tile_m < 1 or config.tile_n < 1:
        return config
    if config.widens and problem.asked_splits is None:
        config = _widened(problem, arch, config)
    config = replace(config, widens=False)
    splits = choose_splits(
        problem,
        arch,
        tile_m=config.tile_m,
        keys_min=max(config.keys_min, config.tile_n),
        blocks_per_sm=config.blocks_per_sm,
    )
    return replace(config, splits=splits)


NARROW, WIDE_KEYS = 64, 4096
"""Up to this head_dim, with more keys than these, nothing widens."""


def _widened(problem: Problem, arch: Arch, config: TritonSplitConfig) -> TritonSplitConfig:
    """The config with twice the keys and warps and one block an SM, where there are about as many tiles of rows as SMs.

    H200, 2026-11-26, B=128 8/1 1k, pages of 64: D=64 13.9 us, by two parts and more 15.4; D=128 21.3, 24.2. Of 8k keys,
    pages of 16: D=64 79.0 us, by four parts 71.9, so not there; D=128 134.1, 140.2.
    """
    if problem.head_dim + problem.head_dim_v <= 2 * NARROW and problem.seq_kv > WIDE_KEYS:
        return config
    sms = most_multiprocessors(arch)
    if EVEN_ENOUGH * sms <= row_tiles(problem, config.tile_m) <= sms:
        return replace(config, tile_n=2 * config.tile_n, warps=2 * config.warps, blocks_per_sm=1)
    return config


# ---------------------------------------------------------------- what fits


def areas_of(problem: Problem, config: TritonSplitConfig) -> Areas:
    """The areas of workspace of a launch: none where all keys are one part."""
    if config.splits == 1:
        return {}
    sizes = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
    return area_layouts(config.splits, *sizes, row_max=problem.row_max)


def merged(splits: int) -> tuple[int, int]:
    """Parts and lines of a program that merges so many parts."""
    parts = next(it for it in _MERGED_PARTS if splits <= it)
    return parts, max(_MERGED_LINES // parts, 1)


def merge_programs(problem: Problem, splits: int) -> int:
    """Programs of the kernel that merges parts."""
    lines = problem.batch * problem.heads_q * problem.seq_q
    return -(-lines // merged(splits)[1]) * -(-problem.head_dim_v // MERGED_COLUMNS)


def widths_of(problem: Problem) -> tuple[Width, Width, bool]:
    """Columns of q and k in their first tile and behind it, and whether v is read there.

    Up to 256 columns are one tile, unless the first columns of k are v, and are read once.
    """
    head_dim, first = problem.head_dim, one_width(problem.head_dim_v)
    if problem.v_in_k and first < head_dim <= 2 * first:
        return Width(first), Width(head_dim - first), True
    pieces = saving_widths(head_dim) if head_dim > ONE_TILE_MAX else None
    if pieces is not None:
        return Width(pieces[0]), Width(head_dim - pieces[0]), False
    return Width(head_dim), Width(0), problem.v_in_k and one_width(head_dim) == first


def smem_bytes(problem: Problem, arch: Arch, config: TritonSplitConfig) -> int:
    """Shared memory that the tiles of q, k and v take; the compiler adds barriers and scratch of a few KiB.

    One more tile of keys is held where the tensor cores read it in the background; of 8 bits, one in the dtype of q.
    """
    in_background = arch.name in ASYNCHRONOUS and config.tile_m >= _WGMMA_ROWS
    is_stored = problem.stored is not None
    in_flight = config.stages if in_background and not is_stored else config.stages - 1
    width, rest, v_in_k = widths_of(problem)
    of_q = width.pad + (rest.pad if rest else 0)
    of_v = 0 if v_in_k else one_width(problem.head_dim_v)
    streamed = in_flight * (of_q + of_v) if config.stages > 1 else max(of_q, of_v)
    of_keys = streamed * problem.cache_dtype.itemsize
    if in_background and is_stored:
        of_keys += max(of_q, of_v) * ELEMENT_BYTES
    return config.tile_m * of_q * ELEMENT_BYTES + config.tile_n * of_keys


def why_not_fit(problem: Problem, arch: Arch, config: TritonSplitConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`."""
    config = settle(problem, arch, config)
    if wrong := limits.failed(limits.limit_checks(config)):
        return wrong
    if problem.stored == "e4m3" and arch.is_gpu and arch.capability < _E4M3_FROM:
        allowed = "int8 on arches before sm89, on which Triton has no float8_e4m3fn"
        hint = "quantise to torch.int8, or use another backend"
        return (Reason(code="stored", got=f"a cache of e4m3 on {arch.name}", allowed=allowed, hint=hint),)
    programs = row_tiles(problem, config.tile_m) * config.splits
    merging = 0 if config.splits == 1 else merge_programs(problem, config.splits)
    rows = f"{problem.rows} queries of the heads that share a key"
    return limits.failed(
        (
            (problem.rows <= ROWS_MAX, rows, f"up to {ROWS_MAX}"),
            (problem.head_dim_v <= VALUES_MAX, f"values of {problem.head_dim_v} columns", f"up to {VALUES_MAX}"),
            *limits.size_checks(config, arch, smem_bytes(problem, arch, config), programs),
            (merging <= GRID_MAX, f"{merging} blocks that merge parts", f"a grid of up to {GRID_MAX}"),
        )
    )


# ---------------------------------------------------------------- a launch


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    """The kernel of the parts and, if there is more than one, that which merges them."""
    parts = _parts(launch.plan, launch.config)
    return (parts,) if launch.config.splits == 1 else (parts, _merge(launch.plan, launch.config))


def _parts(plan: Plan, config: TritonSplitConfig) -> KernelTable:
    problem, cache = plan.problem, plan.problem.cache
    known, constants = problem.layouts, _constants(plan, config)
    is_aligned, streamed = problem.alignment == VECTOR_BYTES, ("k",) if constants.v_in_k else ("k", "v")
    paging: Parameter = NONE
    if cache is not None and cache.page is not None:
        paging = integers(page_keys=cache.page, table_stride=cache.table_stride)
    rows: dict[str, Parameter] = {
        **{name: Tensor(of=name, is_aligned=is_aligned) for name in ("q", "k")},
        "v": given("v" in streamed, Tensor(of="v", is_aligned=is_aligned)),
        **{name: given(constants.whole, Tensor(of=name)) for name in ("out", "lse")},
        **{name: given(not constants.whole, Tensor(of=name)) for name in ("partial_out", "partial_lse")},
        "tops": tops_row(problem) if constants.whole else _partial_max(problem),
        "scale": factor_row(problem, problem.scale_log2),
        "sizes": integers(
            seq_q=problem.seq_q,
            seq_kv=problem.seq_kv,
            sequences=problem.lengths[0],
            heads_q=problem.heads_q,
            group=problem.group,
            tiles=-(-problem.rows // config.tile_m),
            splits=config.splits,
        ),
        "strides": {
            "q": stride_rows("q", known["q"].strides[:3], constants.vector),
            **{name: stride_rows(name, known[name].strides[:3], constants.key_vector) for name in streamed},
            "out": _out_strides(problem),
        },
        "paging": paging,
        "reach": reach_rows(problem),
        "sinks": given(constants.whole, sinks_row(problem)),
        "aux": aux_row(problem, constants.score),
        **{name: _index(problem, name) for name in ("seqlens_kv", "page_table", "cu_seqlens_q")},
        "scales": _scales(problem),
        "C": Constant(value=constants),
    }
    return KernelTable(
        kernel=PARTS,
        grid=row_tiles(problem, config.tile_m) * config.splits,
        options={"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True},
        rows=rows,
    )


def _constants(plan: Plan, config: TritonSplitConfig) -> SplitConstants:
    problem, cache = plan.problem, plan.problem.cache
    page = None if cache is None else cache.page
    width, rest, v_in_k = widths_of(problem)
    return filled(
        SplitConstants,
        problem,
        config,
        width=width,
        width_v=Width(problem.head_dim_v),
        rest=rest,
        v_in_k=v_in_k,
        step=STEPS["full"].step,
        far_rows=max(problem.strides_k[2], problem.strides_v[2]) * config.tile_n >= INT32,
        vector=problem.alignment // ELEMENT_BYTES,
        per_token=() if cache is None else cache.per_token,
        score=lowered_score(problem, plan.arch),
        has_mask=problem.has_tail,
        ragged=problem.has_tail,
        compiled=plan.arch.is_gpu,
        cached=cache is not None,
        paged=page is not None,
        page=0 if page is None or page % config.tile_n == 0 else page,
        packed_queries=problem.has_packed_queries,
        whole=config.splits == 1,
        overlaps=config.splits > 1 and _overlaps(plan),
    )


def _merge(plan: Plan, config: TritonSplitConfig) -> KernelTable:
    problem = plan.problem
    parts, lines = merged(config.splits)
    constants = MergeConstants(
        head_dim_v=problem.head_dim_v,
        parts=parts,
        lines=lines,
        columns=MERGED_COLUMNS,
        packed_queries=problem.has_packed_queries,
        overlaps=_overlaps(plan),
    )
    rows: dict[str, Parameter] = {
        **{name: Tensor(of=name) for name in ("partial_out", "partial_lse", "out", "lse")},
        "partial_max": _partial_max(problem),
        "tops": tops_row(problem),
        "sizes": integers(
            seq_q=problem.seq_q, sequences=problem.lengths[0], heads_q=problem.heads_q, splits=config.splits
        ),
        "out_strides": _out_strides(problem),
        "sinks": sinks_row(problem),
        "cu_seqlens_q": _index(problem, "cu_seqlens_q"),
        "C": Constant(value=constants),
    }
    options = {"num_warps": 8 if parts * lines > 64 else 4, "num_stages": 1, "enable_fp_fusion": True}
    options |= {"launch_pdl": True} if constants.overlaps else {}
    return KernelTable(kernel=MERGE, grid=merge_programs(problem, config.splits), options=options, rows=rows)


def _partial_max(problem: Problem) -> Parameter:
    """The largest score of each row in each part."""
    return given(problem.row_max, Tensor(of="partial_max"))


def _overlaps(plan: Plan) -> bool:
    """True on arches where a kernel may begin before the one in front of it ends."""
    return plan.arch.is_gpu and plan.arch.capability >= (9, 0)


def _index(problem: Problem, name: str) -> Parameter:
    """A tensor that says where keys or queries are, at any multiple of 4 bytes; None where a problem has none."""
    return given(name in problem.cache_tensors, Tensor(of=name, is_aligned=False))


def _scales(problem: Problem) -> Parameter:
    """The scales of keys and values of 8 bits, with their strides, of which no code knows anything."""
    if problem.stored is None or problem.cache is None:
        return NONE
    pairs = zip("kv", problem.cache.scalings.items(), strict=True)
    found: dict[str, Parameter] = {}
    strides: dict[str, Parameter] = {}
    for short, (name, its) in pairs:
        found[short] = Tensor(of=name, is_aligned=False)
        strides[f"of_{short}"] = stride_rows(name, its.strides if its.per_token else (*its.strides, 0), 1)
    return found | strides


def _out_strides(problem: Problem) -> Parameter:
    """The strides of out. That of a dimension with one element may be anything in a caller's own out."""
    layout = problem.layouts["out"]
    pairs = zip(layout.shape[:3], layout.strides[:3], strict=True)
    strides = tuple(0 if size == 1 else stride for size, stride in pairs)
    return stride_rows("out", strides, OUT_VECTOR)


# ---------------------------------------------------------------- configs worth timing

_Numbers = tuple[int, int, int, int]
_FEW_ROWS: tuple[_Numbers, ...] = (
    (64, 4, 3, 2), (64, 4, 3, 1), (64, 4, 3, 3), (64, 4, 3, 4), (64, 4, 2, 4), (64, 4, 4, 2), (64, 4, 5, 1),
    (128, 4, 3, 1), (128, 4, 3, 2), (128, 4, 2, 2), (128, 8, 3, 1), (128, 8, 3, 2), (128, 8, 2, 2),
    (32, 4, 3, 2), (32, 4, 3, 4), (32, 4, 5, 2), (32, 4, 5, 4), (32, 2, 3, 4), (32, 2, 4, 4), (32, 2, 5, 2),
    (64, 2, 3, 2), (64, 2, 3, 4), (32, 1, 4, 4),
)  # fmt: skip
"""(tile_n, warps, stages, blocks_per_sm) where all rows of a sequence are one tile."""
_MANY_ROWS: tuple[_Numbers, ...] = (
    (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3),
    (128, 32, 8, 2), (128, 128, 8, 2),
)  # fmt: skip
"""(tile_m, tile_n, warps, stages) for more rows, each with one and with two blocks on an SM."""


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[TritonSplitConfig]:
    """They leave the number of parts to the plan, as rules do."""
    if problem.rows > FEW_ROWS:
        yield from (split_tiles(*shape, blocks) for shape, blocks in itertools.product(_MANY_ROWS, (1, 2)))
    else:
        yield from (split_tiles(max(NARROWEST, power_of_two(problem.rows)), *rest) for rest in _FEW_ROWS)


FAMILY = TritonFamily(
    config=TritonSplitConfig,
    kernels={PARTS: "decode", MERGE: "decode"},
    tables=_tables,
    tiles=lambda problem, config: (0, 0),
    areas=areas_of,
    fits=why_not_fit,
    settle=settle,
    candidates=_candidates,
)
