"""The kernels of the forwards that divide keys: those that multiply, and those that merge parts."""

from __future__ import annotations

from multiattn.cuda import split_configs as split
from multiattn.cuda import split_wgmma_configs as split_wgmma
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
from multiattn.cuda.params import SplitParams, SplitWgmmaParams
from multiattn.cuda.score import lowered_of
from multiattn.cuda.source import Instance, PlannedLaunch
from multiattn.cuda.split_configs import (
    MERGE_COLUMNS,
    MERGE_FEW,
    MERGE_FEW_THREADS,
    MERGE_RESIDENT_THREADS,
    MERGE_THREADS,
    CudaSplitConfig,
    Divides,
    merges_few,
)
from multiattn.cuda.split_wgmma_configs import SplitWgmmaConfig
from multiattn.paged import SPLITS_MAX
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan
from multiattn.problem import Problem

_OVERLAPS_SINCE = (9, 0)
"""The first GPUs whose grids may begin before the one before them has ended."""


def split_launches(plan: Plan) -> tuple[PlannedLaunch, ...]:
    """The launches of a Plan, in order: with one split the first is all."""
    config = plan.config
    assert isinstance(config, (CudaSplitConfig, SplitWgmmaConfig))
    multiplies = (
        _multiplies(plan, config) if isinstance(config, CudaSplitConfig) else _multiplies_by_wgmma(plan, config)
    )
    return (multiplies,) if config.splits == 1 else (multiplies, _merges(plan, config))


def _overlaps(arch: Arch) -> bool:
    """True where the kernels overlap with those before and after them. The CPU checks that they wait."""
    return not arch.is_gpu or arch.capability >= _OVERLAPS_SINCE


def _multiplies(plan: Plan, config: CudaSplitConfig) -> PlannedLaunch:
    problem, score, overlaps = plan.problem, lowered_of(plan), _overlaps(plan.arch)
    paging = _paging(problem, config.tile_n)
    shape = (config.tile_m, config.tile_n, config.warps, config.row_warps, config.column_warps, config.stages)
    sizes = f"{config.tile_m}x{config.tile_n}_w{config.warps}r{config.row_warps}c{config.column_warps}_s{config.stages}"
    options = f"{unaligned_suffix(problem)}{'_sinks' * problem.has_sinks}{'' if overlaps else '_apart'}"
    kernel = Instance(
        name=f"split_keys_{what_of(problem)}_{sizes}_o{config.occupancy}_{paging.lower()}{options}"
        f"{suffix_of(problem, score)}",
        header="split_keys.cuh",
        entry="split_keys",
        traits=traits_type(
            "SplitTraits",
            problem,
            *masked_traits(problem),
            problem.has_sinks,
            f"multiattn::Paging::{paging}",
            overlaps,
            f"multiattn::SplitShape<{cpp_list(*shape)}>",
            *score_traits(problem, score, ()),
        ),
        score=score,
        params=SplitParams,
        threads=config.threads,
        occupancy=config.occupancy,
        smem_bytes=split.smem_bytes(config, problem),
        overlaps=overlaps,
    )
    return PlannedLaunch(kernel=kernel, blocks=split.blocks(config, problem))


def _multiplies_by_wgmma(plan: Plan, config: SplitWgmmaConfig) -> PlannedLaunch:
    problem, score = plan.problem, lowered_of(plan)
    paging, rows = _paging(problem), split_wgmma.box_rows(config, problem)
    kept = split_wgmma.kept_steps(config, problem)
    keys = {"NONE": "dense", "ENTRIES": "entries", "ANY": "pages"}[paging]
    keys += "_gathered" if config.gathers else str(rows) * (paging == "ANY")
    shape = (config.warpgroups, config.tile_n, rows, config.stages, kept, config.pingpong, config.lazy_max)
    sizes = f"{config.tile_m}x{config.tile_n}_s{config.stages}_{keys}"
    options = f"{'_qregisters' * config.q_in_registers}{'_pingpong' * config.pingpong}{'_lazymax' * config.lazy_max}"
    suffix = f"{'_sinks' * problem.has_sinks}{suffix_of(problem, score)}"
    kernel = Instance(
        name=f"split_keys_wgmma_{what_of(problem)}_{sizes}{options}{suffix}",
        header="split_keys_wgmma.cuh",
        entry="split_keys_wgmma",
        traits=traits_type(
            "SplitWgmmaTraits",
            problem,
            problem.head_dim,
            band_trait(problem),
            problem.has_sinks,
            f"multiattn::Paging::{paging}",
            f"multiattn::SplitWgmmaShape<{cpp_list(*shape)}>",
            *score_traits(problem, score, ()),
        ),
        score=score,
        params=SplitWgmmaParams,
        threads=config.threads,
        occupancy=1,
        smem_bytes=split_wgmma.smem_bytes(config, problem),
        overlaps=True,
        wgmma_columns=(config.tile_n, problem.head_dim),
        arch_features=True,
    )
    return PlannedLaunch(kernel=kernel, blocks=split_wgmma.blocks(config, problem))


def _paging(problem: Problem, tile_n: int | None = None) -> str:
    """Where keys are; with `tile_n`, as a tile of so many sees it."""
    if problem.cache is None:
        return "NONE"
    page = problem.cache.page
    if page is None:
        return "ENTRIES"
    return "ANY" if tile_n is None or page % tile_n else "WHOLE_TILES"


def _merges(plan: Plan, config: Divides) -> PlannedLaunch:
    problem, overlaps, few = plan.problem, _overlaps(plan.arch), merges_few(config)
    name, traits = ("merge_few_splits", "MergeFewTraits") if few else ("merge_splits", "MergeTraits")
    threads, parts_max = (MERGE_FEW_THREADS, MERGE_FEW) if few else (MERGE_THREADS, SPLITS_MAX)
    sizes = (problem.head_dim, *(() if few else (MERGE_COLUMNS,)), threads, parts_max)
    is_packed = problem.has_packed_queries
    options = f"{'_sinks' * problem.has_sinks}{'_packed' * is_packed}{'' if overlaps else '_apart'}"
    kernel = Instance(
        name=f"{name}_{problem.dtype}_d{problem.head_dim}{options}",
        header="merge_splits.cuh",
        entry=name,
        traits=traits_type(traits, problem, *sizes, problem.has_sinks, is_packed, overlaps),
        params=SplitParams,
        threads=threads,
        occupancy=MERGE_RESIDENT_THREADS // threads if overlaps else 1,
        smem_bytes=0 if few else split.merge_smem_bytes(),
        overlaps=overlaps,
    )
    return PlannedLaunch(kernel=kernel, blocks=split.merge_blocks(config, problem))
