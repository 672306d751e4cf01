"""The instances of the kernels' templates that a Plan launches, in order, and the blocks of each."""

from __future__ import annotations

from multiattn.cuda import backward_configs as backward
from multiattn.cuda import configs as forward
from multiattn.cuda import wgmma_backward_configs as wgmma_backward
from multiattn.cuda import wgmma_configs as wgmma
from multiattn.cuda import wgmma_two_pass_configs as two_pass
from multiattn.cuda.axes import Axes
from multiattn.cuda.backward_configs import BackwardConfig, QueryConfig, config_of
from multiattn.cuda.configs import CudaConfig
from multiattn.cuda.naming import (
    band_trait,
    cpp_list,
    masked_traits,
    score_traits,
    suffix_of,
    traits_type,
    unaligned_suffix,
    what_of,
)
from multiattn.cuda.params import BackwardParams, ForwardParams, ListParams, WgmmaBackwardParams, WgmmaParams
from multiattn.cuda.score import lowered_of, slots_of
from multiattn.cuda.source import Instance, PlannedLaunch
from multiattn.cuda.split_configs import CudaSplitConfig
from multiattn.cuda.split_instances import split_launches
from multiattn.cuda.split_wgmma_configs import SplitWgmmaConfig
from multiattn.cuda.variants import axes_of, is_wgmma
from multiattn.cuda.wgmma_backward_configs import WgmmaBackwardConfig
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.cuda.wgmma_two_pass_configs import QUERY_TILE, WgmmaTwoPassConfig
from multiattn.packed import TILE_LISTS, PackingSpec
from multiattn.plan.arch import WARP_THREADS
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import key_tiles, query_tiles
from multiattn.problem import Problem
from multiattn.score import LoweredScore

_LIST_THREADS = 256


def launches_of(plan: Plan) -> tuple[PlannedLaunch, ...]:
    """The launches of `plan`, in order. Each kernel takes one argument, `params.argument_of`."""
    packing, launches = plan.problem.packing, _launches_of(plan)
    if packing is None:
        return launches
    return list_launch(packing, overlaps=launches[0].kernel.overlaps), *launches


def _launches_of(plan: Plan) -> tuple[PlannedLaunch, ...]:
    if isinstance(plan.config, (CudaSplitConfig, SplitWgmmaConfig)):
        return split_launches(plan)
    if plan.direction == "forward":
        return (_wgmma(plan) if is_wgmma(plan) else _forward(plan),)
    problem, config, score = plan.problem, config_of(plan), lowered_of(plan)
    slots = slots_of(plan)
    if isinstance(config, WgmmaBackwardConfig):
        keys = _wgmma_keys(problem, config, score, slots)
        return _statistics(problem, config), keys, _rows("convert_sums", problem, adds_dq=True, wide=True)
    if isinstance(config, WgmmaTwoPassConfig):
        queries, keys = (_two_pass(problem, config, score, owns) for owns in ("queries", "keys"))
        return _statistics(problem, config), queries, keys
    assert isinstance(config, BackwardConfig)
    adds_dq = config.dq is None
    prepare = _rows("prepare_rows", problem, adds_dq=adds_dq, wide=config.wide)
    keys = _keys(problem, config, score, slots)
    if config.dq is None:
        return prepare, keys, _rows("convert_dq", problem, adds_dq=adds_dq, wide=config.wide)
    return prepare, _queries(problem, config.dq, score, slots), keys


def kernels_of(plan: Plan) -> tuple[Instance, ...]:
    """The kernels that `plan` launches."""
    return tuple(launch.kernel for launch in launches_of(plan))


# ---------------------------------------------------------------- before both


def list_launch(packing: PackingSpec, *, overlaps: bool = False) -> PlannedLaunch:
    """The kernel that lists the tiles of a packed batch; there is one for all problems.

    With `overlaps` it is for a kernel that does so itself: there is one more for these.
    """
    kernel = Instance(
        name=f"list_tiles{'_overlapping' if overlaps else ''}",
        header="list_tiles.cuh",
        entry="list_tiles",
        traits=f"multiattn::ListTraits<{cpp_list(_LIST_THREADS, overlaps)}>",
        params=ListParams,
        threads=_LIST_THREADS,
        occupancy=1,
        smem_bytes=0,
        overlaps=overlaps,
    )
    warps = len(TILE_LISTS) * (packing.sequences + 3)  # rows on either side of them, and entries without a tile
    return PlannedLaunch(kernel=kernel, blocks=-(-warps * WARP_THREADS // _LIST_THREADS))


# ---------------------------------------------------------------- the forward


def forward_traits(axes: Axes, config: CudaConfig, problem: Problem, score: LoweredScore | None = None) -> str:
    """The C++ type of a forward kernel's constants, legal or not: what point, config and problem come to."""
    steps = (("Warps", axes.warps), ("Share", axes.share), ("Tiling", axes.tiling), ("QPlace", config.q_place))
    *flags, place = (f"multiattn::{axis}::{step.upper()}" for axis, step in steps)
    added = f"multiattn::{'Accumulator' if axes.accumulator == 'fp32' else 'HalfAccumulator'}"
    point = cpp_list(*flags, *(tensor in axes.swizzle for tensor in "qkv"), added)
    tiles = (config.tile_m, config.tile_n, config.warps, config.column_warps, config.stages)
    shape = cpp_list(*tiles, place, config.dim_slice, config.key_slice)
    point_and_shape = f"multiattn::Axes<{point}>", f"multiattn::Shape<{shape}>"
    behind = score_traits(problem, score, ())
    return traits_type("ForwardTraits", problem, *masked_traits(problem), problem.has_sinks, *point_and_shape, *behind)


def _forward(plan: Plan) -> PlannedLaunch:
    config, problem, axes, score = config_of(plan), plan.problem, axes_of(plan), lowered_of(plan)
    assert isinstance(config, CudaConfig)
    columns = f"c{config.column_warps}" if config.column_warps > 1 else ""
    slices = f"_{config.dim_slice}d{config.key_slice}k" if axes.tiling != "none" else ""
    tiles = f"{config.tile_m}x{config.tile_n}_w{config.warps}{columns}_s{config.stages}_q{config.q_place}"
    name = f"forward_{what_of(problem)}_{axes.name.replace('+', '_')}_{tiles}{slices}_o{config.occupancy}"
    kernel = Instance(
        name=f"{name}{unaligned_suffix(problem)}{'_sinks' if problem.has_sinks else ''}{suffix_of(problem, score)}",
        header="forward.cuh",
        entry="forward",
        traits=forward_traits(axes, config, problem, score),
        score=score,
        blocks=problem.blocks,
        packed=problem.packing is not None,
        params=ForwardParams,
        threads=config.threads,
        occupancy=config.occupancy,
        smem_bytes=forward.smem_bytes(axes, config, problem),
    )
    return PlannedLaunch(kernel=kernel, blocks=query_tiles(problem, config.tile_m))


def _wgmma(plan: Plan) -> PlannedLaunch:
    config, problem, score = plan.config, plan.problem, lowered_of(plan)
    assert isinstance(config, WgmmaConfig)
    name = f"forward_wgmma_{what_of(problem)}_{_wgmma_name(config)}{'_sinks' if problem.has_sinks else ''}"
    kernel = Instance(
        name=f"{name}{suffix_of(problem, score)}",
        header="forward_wgmma.cuh",
        entry="forward_wgmma",
        traits=traits_type(
            "WgmmaTraits",
            problem,
            problem.head_dim,
            band_trait(problem),
            problem.has_sinks,
            _wgmma_shape(config, problem),
            *score_traits(problem, score, ()),
        ),
        score=score,
        packed=problem.packing is not None,
        params=WgmmaParams,
        threads=config.threads,
        occupancy=1,
        smem_bytes=wgmma.smem_bytes(config, problem),
        cluster=config.cluster,
        overlaps=True,
        wgmma_columns=(config.tile_n, problem.head_dim),
        arch_features=True,
    )
    return PlannedLaunch(kernel=kernel, blocks=wgmma.grid_blocks(config, problem), is_persistent=config.is_persistent)


def _wgmma_shape(config: WgmmaConfig, problem: Problem) -> str:
    """The C++ type of what of the kernel's constants is the config's."""
    numbers = (config.warpgroups, config.cluster, config.tile_n, config.stages, config.q_slots)
    flags = (config.pingpong, config.lazy_max, config.tma_store)
    scheduler = f"multiattn::Scheduler::{config.scheduler.upper()}"
    return f"multiattn::WgmmaShape<{cpp_list(*numbers, wgmma.kept_steps(config, problem), *flags, scheduler)}>"


def _wgmma_name(config: WgmmaConfig) -> str:
    """Every field of the config, those that are off left out."""
    parts = [f"{config.tile_m}x{config.tile_n}", f"s{config.stages}", f"q{config.q_slots}"]
    parts += [f"cluster{config.cluster}"] if config.cluster > 1 else []
    parts += ["qregisters"] if config.q_in_registers else []
    parts += ["pingpong"] if config.pingpong else []
    parts += ["lazymax"] if config.lazy_max else []
    parts += [] if config.tma_store else ["plainstore"]
    return "_".join((*parts, config.scheduler.replace("_", "")))


# ---------------------------------------------------------------- the backward


def _rows(entry: str, problem: Problem, *, adds_dq: bool, wide: bool) -> PlannedLaunch:
    """The kernel before, or after, the products of a backward."""
    what: tuple[int | bool | str, ...] = (
        problem.head_dim,
        backward.ROW_TILE,
        backward.ROW_THREADS,
        adds_dq,
        wide,
    )
    if problem.packing is not None:
        what = (*what, "multiattn::Packed")
    overlaps = entry == "convert_sums"
    order = ("_wide" if wide else "_narrow") if adds_dq else ""
    kernel = Instance(
        name=f"{entry}_{problem.dtype}_d{problem.head_dim}{order}{'_packed' if problem.packing is not None else ''}",
        header="backward_wgmma_rows.cuh" if overlaps else "backward_rows.cuh",
        entry=entry,
        traits=traits_type("RowTraits", problem, *what),
        packed=problem.packing is not None,
        params=BackwardParams,
        threads=backward.ROW_THREADS,
        occupancy=1,
        smem_bytes=0,
        overlaps=overlaps,
    )
    return PlannedLaunch(kernel=kernel, blocks=query_tiles(problem, backward.ROW_TILE))


def _keys(
    problem: Problem, config: BackwardConfig, score: LoweredScore | None, slots: tuple[int, ...]
) -> PlannedLaunch:
    """The kernel of dk and dv, and on demand of dq."""
    adds_dq = config.dq is None
    kernel = Instance(
        name=f"backward_keys_{_tiles(problem, config)}{('_dqwide' if config.wide else '_dq') if adds_dq else ''}"
        f"{unaligned_suffix(problem)}{suffix_of(problem, score, slots)}",
        header="backward.cuh",
        entry="backward_keys",
        traits=traits_type(
            "BackwardTraits",
            problem,
            *masked_traits(problem),
            *_sizes(config),
            adds_dq,
            config.wide,
            *score_traits(problem, score, slots),
        ),
        score=score,
        slots=slots,
        blocks=problem.blocks,
        packed=problem.packing is not None,
        params=BackwardParams,
        threads=config.threads,
        occupancy=config.occupancy,
        smem_bytes=backward.smem_bytes(config, problem),
    )
    return PlannedLaunch(kernel=kernel, blocks=key_tiles(problem, config.tile_n))


def _queries(
    problem: Problem, config: QueryConfig, score: LoweredScore | None, slots: tuple[int, ...]
) -> PlannedLaunch:
    """The kernel of dq alone."""
    kernel = Instance(
        name=f"backward_queries_{_tiles(problem, config)}{unaligned_suffix(problem)}{suffix_of(problem, score, slots)}",
        header="backward_q.cuh",
        entry="backward_queries",
        traits=traits_type(
            "QueryTraits", problem, *masked_traits(problem), *_sizes(config), *score_traits(problem, score, slots)
        ),
        score=score,
        slots=slots,
        blocks=problem.blocks,
        packed=problem.packing is not None,
        params=BackwardParams,
        threads=config.threads,
        occupancy=config.occupancy,
        smem_bytes=backward.dq_smem_bytes(config, problem),
    )
    return PlannedLaunch(kernel=kernel, blocks=query_tiles(problem, config.tile_m))


def _statistics(problem: Problem, config: WgmmaBackwardConfig | WgmmaTwoPassConfig) -> PlannedLaunch:
    """The kernel before Hopper's backward."""
    packed, sums_dq = problem.packing is not None, isinstance(config, WgmmaBackwardConfig)
    is_divided = isinstance(config, WgmmaBackwardConfig) and wgmma_backward.division_of(problem, config) is not None
    lists = "Packed" if packed else "StreamK" if is_divided else "NoBlockMask"
    blocked = () if sums_dq and lists == "NoBlockMask" else (f"multiattn::{lists}",)
    rows = backward.ROW_TILE if sums_dq else QUERY_TILE
    kernel = Instance(
        name=f"prepare_statistics_{problem.dtype}_d{problem.head_dim}{'' if sums_dq else '_two_pass'}"
        f"{'_packed' if packed else '_stream_k' if is_divided else ''}",
        header="backward_wgmma_rows.cuh",
        entry="prepare_statistics",
        traits=traits_type(
            "StatisticsTraits",
            problem,
            problem.head_dim,
            config.tile_m,
            backward.ROW_THREADS,
            *blocked,
            *(() if sums_dq else (rows, False)),
        ),
        packed=packed,
        stream_k=is_divided,
        params=WgmmaBackwardParams,
        threads=backward.ROW_THREADS,
        occupancy=1,
        smem_bytes=0,
        overlaps=True,
    )
    return PlannedLaunch(kernel=kernel, blocks=query_tiles(problem, rows))


def _wgmma_keys(
    problem: Problem, config: WgmmaBackwardConfig, score: LoweredScore | None, slots: tuple[int, ...]
) -> PlannedLaunch:
    """Hopper's kernel of all gradients."""
    tiles = f"{config.tile_m}x{config.tile_n}_s{config.k_stages}_{config.q_stages}_{config.dout_stages}"
    kept = f"{'_kregisters' * config.k_in_registers}{'_vregisters' * config.v_in_registers}{'_halfdq' * config.half_dq}"
    kept += f"{'_tmadq' * config.dq_by_tma}{'_early' * config.early_scores}"
    sizes = (config.k_stages, config.q_stages, config.dout_stages, wgmma_backward.dq_columns(config, problem))
    numbers = (*sizes, config.k_in_registers, config.v_in_registers, config.early_scores, config.dq_by_tma)
    division = wgmma_backward.division_of(problem, config)
    if division is None:
        lists, blocks = score_traits(problem, score, slots), key_tiles(problem, config.tile_n)
    else:
        lists, blocks = ("multiattn::NoScore", "multiattn::StreamK"), division.ranges_from + division.ranges
        kept += "_stream_k"
    kernel = Instance(
        name=f"backward_wgmma_{what_of(problem)}_{tiles}{kept}{suffix_of(problem, score, slots)}",
        header="backward_wgmma.cuh",
        entry="backward_wgmma",
        traits=traits_type(
            "WgmmaBackwardTraits",
            problem,
            problem.head_dim,
            band_trait(problem),
            f"multiattn::WgmmaBackwardShape<{cpp_list(*numbers)}>",
            *lists,
        ),
        score=score,
        slots=slots,
        packed=problem.packing is not None,
        stream_k=division is not None,
        params=WgmmaBackwardParams,
        threads=config.threads,
        occupancy=1,
        smem_bytes=wgmma_backward.smem_bytes(config, problem),
        overlaps=True,
        wgmma_columns=wgmma_backward.wgmma_columns(config, problem),
        arch_features=True,
    )
    return PlannedLaunch(kernel=kernel, blocks=blocks, is_persistent=True)


def _two_pass(problem: Problem, config: WgmmaTwoPassConfig, score: LoweredScore | None, owns: str) -> PlannedLaunch:
    """Hopper's kernel of dk and dv, whose blocks own keys, or the one of dq, whose blocks own queries."""
    of_keys = owns == "keys"
    if of_keys:
        numbers: tuple[int | bool, ...] = (config.q_stages, config.dout_stages, config.kv_in_registers, config.ahead)
        kept, ahead = "_kvregisters" * config.kv_in_registers, config.ahead
    else:
        numbers = (config.k_stages, config.v_stages, config.dq_ahead, config.dp_late)
        kept, ahead = "_dplate" * config.dp_late, config.dq_ahead
    stages = f"s{numbers[0]}_{numbers[1]}{kept}{'_ahead' * ahead}"
    kernel = Instance(
        name=f"backward_wgmma_{owns}_{what_of(problem)}_{stages}{suffix_of(problem, score)}",
        header=f"backward_wgmma_two_pass_{owns}.cuh",
        entry=f"backward_wgmma_{owns}",
        traits=traits_type(
            f"TwoPass{owns.title()}Traits",
            problem,
            problem.head_dim,
            band_trait(problem),
            f"multiattn::TwoPass{owns.title()}Shape<{cpp_list(*numbers)}>",
            *score_traits(problem, score, ()),
        ),
        score=score,
        packed=problem.packing is not None,
        params=WgmmaBackwardParams,
        threads=config.threads,
        occupancy=1,
        smem_bytes=(two_pass.smem_bytes if of_keys else two_pass.dq_smem_bytes)(config, problem),
        overlaps=True,
        wgmma_columns=two_pass.wgmma_columns(config, problem),
        arch_features=True,
    )
    blocks = key_tiles(problem, config.tile_n) if of_keys else query_tiles(problem, QUERY_TILE)
    return PlannedLaunch(kernel=kernel, blocks=blocks, is_persistent=True)


def _tiles(problem: Problem, config: BackwardConfig | QueryConfig) -> str:
    tile_m, tile_n, warps, stages = _sizes(config)
    return f"{what_of(problem)}_{tile_m}x{tile_n}_w{warps}_s{stages}_o{config.occupancy}"


def _sizes(config: BackwardConfig | QueryConfig) -> tuple[int, int, int, int]:
    return config.tile_m, config.tile_n, config.warps, config.stages
