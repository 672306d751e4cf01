"""The launches of the forward that divides keys among blocks (`kernels.decode`). Pure Python: no cuTile."""

from __future__ import annotations

import math
from collections.abc import Mapping

from multiattn.cutile import configs, decode_configs
from multiattn.cutile.arrays import ArrayArgument, any_size_of, captured_of
from multiattn.cutile.decode_configs import SplitKeysConfig
from multiattn.cutile.kernels.constants import MergeSplitsConstants, SplitKeysConstants
from multiattn.cutile.launches import (
    FORWARD,
    KernelLaunch,
    aux_of,
    lowered_of,
    needs_64bit,
    reach_of,
)
from multiattn.layout import Layout, row_major
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import one_width
from multiattn.problem import Problem


def launches_of(plan: Plan, emitted: Mapping[str, str]) -> tuple[KernelLaunch, ...]:
    """The launch that divides keys, and that which merges parts where there are several."""
    config = plan.config
    assert isinstance(config, SplitKeysConfig)
    if plan.problem.lengths[0] == 0:  # no row is any sequence's
        return ()
    first = _split_keys(plan, config, emitted)
    return (first,) if config.splits <= 1 else (first, _merge_splits(plan, config, emitted))


def _split_keys(plan: Plan, config: SplitKeysConfig, emitted: Mapping[str, str]) -> KernelLaunch:
    problem, cache = plan.problem, plan.problem.cache
    assumed: dict[str, str] = {}
    abi.exactly(assumed, dtype=problem.dtype, head_dim=problem.head_dim, mask=problem.band.kind)
    abi.exactly(assumed, scale_sign=problem.scale_sign)
    one_tile = decode_configs.tiles_of(problem, config.tile_m) == 1
    abi.exactly(assumed, one_tile=one_tile, divided=config.splits > 1)
    page_rows = decode_configs.page_rows_of(problem, plan.arch, config.tile_n)
    if cache is not None:
        abi.exactly(
            assumed,
            cache="dense" if cache.page is None else f"pages in {page_rows}",
            packed_queries=cache.max_q is not None,
        )
    captured, derived = aux_of(plan, assumed, emitted)
    divided = config.splits > 1
    layouts = {name: problem.layouts[name] for name in FORWARD}
    if divided:
        layouts |= _parts(problem, config.splits)
    names = {"out": "partial_out", "lse": "partial_lse"} if divided else {}
    tma = not abi.flag(assumed, emitted, "no_tma", not configs.has_positive_strides(problem))
    return KernelLaunch(
        kernel="split_keys",
        is_64bit=abi.flag(assumed, emitted, "int64", _needs_64bit(problem, config.splits)),
        occupancy=config.occupancy,
        num_worker_warps=config.num_worker_warps,
        grid=decode_configs.grid_of(problem, config),
        arrays={
            name: any_size_of(assumed, emitted, problem, names.get(name, name), layouts[names.get(name, name)])
            for name in FORWARD
        },
        optional={
            "sinks": _sinks(problem, assumed, emitted) if not divided else (),
            "captured": captured,
            "cache": _cache_tensors(problem, assumed, emitted),
        },
        scalars={"scale": problem.scale_log2, "reach": reach_of(problem), "derived": derived},
        constants=SplitKeysConstants(
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            head_dim=problem.head_dim,
            tile_d=one_width(problem.head_dim),
            banded=problem.is_banded,
            two_sided=problem.is_two_sided,
            has_sinks=problem.has_sinks and not divided,
            sign=problem.scale_sign,
            latency=config.latency,
            tma=tma,
            divided=divided,
            one_tile=one_tile,
            cached=cache is not None,
            paged=cache is not None and cache.page is not None,
            page_rows=page_rows,
            page_is_tile=cache is not None and cache.page == config.tile_n,
            packed_queries=problem.has_packed_queries,
            overlapped=divided and decode_configs.can_overlap(plan.arch),
            score=lowered_of(plan),
        ),
        assumed=assumed,
    )


def _merge_splits(plan: Plan, config: SplitKeysConfig, emitted: Mapping[str, str]) -> KernelLaunch:
    problem = plan.problem
    assumed = {"dtype": problem.dtype}
    together, columns = decode_configs.merged_together(config.splits, one_width(problem.head_dim))
    heads, queries = decode_configs.merged_rows(problem, config.splits)
    shape = (config.splits, problem.batch * problem.heads_q, problem.seq_q, problem.head_dim)
    layouts = {
        "out": problem.layouts["out"],
        "lse": problem.layouts["lse"],
        "partial_out": Layout(shape, row_major(shape), decode_configs.AREA_DTYPE),
        "partial_lse": Layout(shape[:3], row_major(shape[:3]), decode_configs.AREA_DTYPE),
    }
    names = {"parts": "partial_out", "sums": "partial_lse"}
    starts = [name for name in problem.cache_tensors if name == "cu_seqlens_q"]
    overlaps = decode_configs.can_overlap(plan.arch)
    return KernelLaunch(
        kernel="merge_splits",
        is_64bit=abi.flag(assumed, emitted, "int64", _needs_64bit(problem, config.splits)),
        grid=decode_configs.merge_grid(problem, config.splits),
        arrays={
            name: any_size_of(assumed, emitted, problem, names.get(name, name), layouts[names.get(name, name)])
            for name in ("out", "lse", "parts", "sums")
        },
        optional={
            "sinks": _sinks(problem, assumed, emitted),
            "starts": tuple(captured_of(assumed, emitted, problem.layouts[it], it) for it in starts),
        },
        constants=MergeSplitsConstants(
            few=config.splits <= decode_configs.MERGE_FEW,
            together=together,
            heads=heads,
            queries=queries,
            columns=columns,
            parts=-(-problem.head_dim // columns),
            has_sinks=problem.has_sinks,
            packed_queries=problem.has_packed_queries,
            overlapping=overlaps,
        ),
        overlaps=overlaps,
        assumed=assumed,
    )


def _parts(problem: Problem, splits: int) -> Mapping[str, Layout]:
    """The areas as the first kernel writes them: parts of one split after those of another, all like out and lse."""
    found = {}
    for name, layout in decode_configs.areas_of(problem, splits).items():
        _, _, *rest = layout.shape
        _, *strides = layout.strides
        found[name] = Layout((splits * problem.batch, *rest), tuple(strides), layout.dtype)
    return found


def _sinks(problem: Problem, assumed: dict[str, str], emitted: Mapping[str, str]) -> tuple[ArrayArgument, ...]:
    if not problem.has_sinks:
        return ()
    abi.exactly(assumed, sinks="one a head")
    return (any_size_of(assumed, emitted, problem, "sinks", problem.layouts["sinks"]),)


def _cache_tensors(problem: Problem, assumed: dict[str, str], emitted: Mapping[str, str]) -> tuple[ArrayArgument, ...]:
    """The tensors that say where keys and queries are."""
    return tuple(captured_of(assumed, emitted, problem.layouts[it], it) for it in problem.cache_tensors)


def _needs_64bit(problem: Problem, splits: int) -> bool:
    """As `needs_64bit`, of the areas as well."""
    elements = [math.prod(layout.shape) for layout in decode_configs.areas_of(problem, splits).values()]
    return needs_64bit(problem) or max(elements, default=0) > abi.INT32_MAX
