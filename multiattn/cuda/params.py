"""The kernels' parameter structs, which `include/multiattn/params.h` describes, filled with the numbers of a Plan.

A field that is a pointer has the name of its operand, or of an area of workspace; one called ``map_q`` is the tensor
map of q; all others are numbers. What a launch, an emitted kernel and the emulator hand over follows from that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.cuda.backward_configs import ROW_TILE, BackwardConfig, config_of, workspace_areas
from multiattn.cuda.configs import FORWARD_LISTS, list_areas, tiles
from multiattn.cuda.score import NOTHING, lowered_of, slots_of, with_aux
from multiattn.cuda.source import Division, Instance, MaskLists, TileLists
from multiattn.cuda.split_configs import CudaSplitConfig, Divides, merged_rows
from multiattn.cuda.split_configs import workspace_areas as split_workspace_areas
from multiattn.cuda.split_wgmma_configs import SplitWgmmaConfig
from multiattn.cuda.stream_k import Divided
from multiattn.cuda.structs import TENSOR_MAP, read_structs
from multiattn.cuda.tensor_maps import tensor_maps
from multiattn.cuda.wgmma_backward_configs import WgmmaBackwardConfig, division_of
from multiattn.cuda.wgmma_backward_configs import workspace_areas as wgmma_workspace_areas
from multiattn.cuda.wgmma_configs import WgmmaConfig, query_tiles
from multiattn.cuda.wgmma_two_pass_configs import QUERY_TILE, WgmmaTwoPassConfig
from multiattn.cuda.wgmma_two_pass_configs import workspace_areas as two_pass_workspace_areas
from multiattn.packed import CU_SEQLENS, TILE_LISTS
from multiattn.paged import CACHE_TENSORS, PARTIAL
from multiattn.plan.abi import WORKSPACE, Struct
from multiattn.plan.backend import Plan
from multiattn.plan.config import Config
from multiattn.plan.schedule import heads_side_by_side, kv_heads_of_section, kv_heads_side_by_side
from multiattn.problem import Problem

_STRUCTS = read_structs(Path(__file__).parent / "include" / "multiattn" / "params.h")
_STRIDES = _STRUCTS["Strides"]
ForwardParams, BackwardParams, WgmmaParams = (_STRUCTS[f"{it}Params"] for it in ("Forward", "Backward", "Wgmma"))
WgmmaBackwardParams, ListParams = _STRUCTS["WgmmaBackwardParams"], _STRUCTS["ListParams"]
SplitParams, SplitWgmmaParams = _STRUCTS["SplitParams"], _STRUCTS["SplitWgmmaParams"]


def numbers_of(plan: Plan) -> dict[str, Any]:
    """Every number that a kernel of the Plan is told, by the name of its field."""
    problem, config = plan.problem, config_of(plan)
    left, right = problem.reach
    common = {
        **{f"strides_{name}": _STRIDES(*layout.strides[:3]) for name, layout in problem.layouts.items()},
        **{name: getattr(problem, name) for name in ("heads_q", "group", "seq_q", "seq_kv")},
        "left": left,
        "right": right,
        "sequences": 0 if problem.packing is None else problem.packing.sequences,
    }
    if isinstance(config, (BackwardConfig, WgmmaBackwardConfig, WgmmaTwoPassConfig)):
        own_tile = config.dq.tile_m if isinstance(config, BackwardConfig) and config.dq else 0
        is_two_pass = isinstance(config, WgmmaTwoPassConfig)
        own_tile, row_tile = (QUERY_TILE, QUERY_TILE) if is_two_pass else (own_tile, ROW_TILE)
        division = _division(plan)
        if isinstance(config, BackwardConfig):
            sections_kv = kv_heads_side_by_side(problem)
        else:
            shares = 1 if division is None else division.shares
            tiles_of_head = _tiles(problem, problem.seq_kv, config.tile_n)
            sections_kv = kv_heads_of_section(problem, plan.arch, tiles_of_head=tiles_of_head, shares=shares)
        return {
            **common,
            "heads_q_all": problem.batch * problem.heads_q,
            "heads_kv_all": problem.batch * problem.heads_kv,
            "tiles_rows": _tiles(problem, problem.seq_q, row_tile),
            "tiles_q": _tiles(problem, problem.seq_q, config.tile_m),
            "tiles_kv": _tiles(problem, problem.seq_kv, config.tile_n),
            "tiles_q_own": _tiles(problem, problem.seq_q, own_tile) if own_tile else 0,
            "sections_q": heads_side_by_side(problem),
            "sections_kv": sections_kv,
            "score_factor": problem.score_factor,
            "grad_factor": problem.grad_factor,
            **({} if division is None else _numbers_of_division(division, areas_of(plan)["key_sums"])),
        }
    if isinstance(config, (CudaSplitConfig, SplitWgmmaConfig)):
        return {**common, **_numbers_of_splits(problem, config)}
    if isinstance(config, WgmmaConfig):
        count = query_tiles(config, problem)
    else:
        count = _tiles(problem, problem.seq_q, config.tile_m)
    return {
        **common,
        "tiles": count,
        "heads": problem.batch * problem.heads_q,
        "heads_per_section": heads_side_by_side(problem),
        "scale_sign": problem.scale_sign,
        "scale_log2": problem.scale_log2,
    }


def _numbers_of_splits(problem: Problem, config: Divides) -> dict[str, Any]:
    cache = problem.cache
    page = 0 if cache is None or cache.page is None else cache.page
    multiplier, shift = divisor_of(page) if page else (0, 0)
    return {
        "heads_kv": problem.heads_kv,
        "sequences": problem.lengths[0],
        "tiles": tiles(problem.rows, config.tile_m),
        "splits": config.splits,
        "merged_rows": merged_rows(config),
        "page": page,
        "page_multiplier": multiplier,
        "page_shift": shift,
        "table_stride": 0 if cache is None else cache.table_stride,
        "scale_sign": problem.scale_sign,
        "scale_log2": problem.scale_log2,
    }


def divisor_of(size: int) -> tuple[int, int]:
    """Multiplier and shift that divide: ``n // size == (2 * n * multiplier >> 32) >> shift`` for n below 2^31.

    Granlund, Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), theorem 4.2. ValueError for
    a size that is not from 1 to 2^31 - 1.
    """
    if not 0 < size < 2**31:
        raise ValueError(f"size: got {size}; allowed 1 to 2^31 - 1")
    shift = (size - 1).bit_length()
    return -(-(2 ** (31 + shift)) // size), shift


def _division(plan: Plan) -> Divided | None:
    """The tiles of keys that a Plan divides."""
    config = plan.config
    return division_of(plan.problem, config) if isinstance(config, WgmmaBackwardConfig) else None


def _numbers_of_division(division: Divided, sums_bytes: int) -> dict[str, int]:
    numbers = {name: getattr(division, name) for name in ("shares", "ranges_from", "ranges", "range_steps")}
    return {**numbers, "key_sums_bytes": sums_bytes}


def _tiles(problem: Problem, rows: int, tile: int) -> int:
    """Tiles of a head that cover so many rows; of a packed batch the most that there can be."""
    return tiles(rows, tile) if problem.packing is None else problem.packing.tiles_max(rows, tile)


def _arguments(plan: Plan) -> Mapping[str, Any]:
    """The value of each field behind the plain parameters of a Plan, by its name: for a pointer that of its operand."""
    problem, lowered, score = plan.problem, lowered_of(plan), plan.problem.score
    found: dict[str, Any] = {NOTHING: 0}
    if lowered is not None and score is not None:
        found |= score.arguments(lowered, problem.scale)
        if slots_of(plan):
            found |= score.gradient_arguments(lowered)
    if problem.blocks is not None:
        for direction, names in (("keys", KEYS_OF_QUERIES), ("queries", QUERIES_OF_KEYS)):
            found |= {f"{direction}.{name}": value for name, value in problem.lists_of(names)._asdict().items()}
    return found


def params_of(plan: Plan, kind: type[ctypes.Structure] | None = None) -> ctypes.Structure:
    """A parameter struct for kernels of a Plan, but for pointers and tensor maps: of `kind`, or what most of them take.

    A kernel that knows of no score takes the first part of it.
    """
    kind = _kind_of(plan.config) if kind is None else kind
    lists = MaskLists if plan.problem.blocks is not None else Division if _division(plan) is not None else None
    packed = None if plan.problem.packing is None else TileLists
    whole = with_aux(kind, lowered_of(plan), slots_of(plan), lists, packed)
    return _filled(whole, {**numbers_of(plan), **_arguments(plan)})


def _kind_of(config: Config | None) -> type[ctypes.Structure]:
    """The parameters of the kernel that multiplies."""
    if isinstance(config, (WgmmaBackwardConfig, WgmmaTwoPassConfig)):
        return WgmmaBackwardParams
    if isinstance(config, BackwardConfig):
        return BackwardParams
    if isinstance(config, CudaSplitConfig):
        return SplitParams
    if isinstance(config, SplitWgmmaConfig):
        return SplitWgmmaParams
    return WgmmaParams if isinstance(config, WgmmaConfig) else ForwardParams


def _filled(kind: type[ctypes.Structure], numbers: Mapping[str, Any], prefix: str = "") -> ctypes.Structure:
    params = kind()
    for name, field, *_ in kind._fields_:
        if field in (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_float, _STRIDES):
            setattr(params, name, numbers[prefix + name])
        elif issubclass(field, ctypes.Structure):
            setattr(params, name, _filled(field, numbers, _prefix_in(kind, name)))
    return params


def _prefix_in(kind: type[ctypes.Structure], name: str) -> str:
    """The prefix of the names of a struct's fields, where another struct has several like it."""
    return f"{name}." if kind is MaskLists else ""


def list_params_of(plan: Plan) -> ctypes.Structure:
    """The same of the kernel that lists the tiles of a packed batch."""
    problem, packing, tile_rows = plan.problem, plan.problem.packing, listed_rows(plan)
    assert packing is not None
    numbers: dict[str, int] = {"sequences": packing.sequences}
    rows_of = problem.seq_q, problem.seq_kv
    for side, name, rows, longest in zip(("q", "kv"), TILE_LISTS, rows_of, packing.longest(*rows_of), strict=True):
        tile = tile_rows.get(name, 0)
        tiles_max = packing.tiles_max(rows, tile) if tile else 0
        numbers |= {f"rows_{side}": rows, f"longest_{side}": longest}
        numbers |= {f"tile_{side}": tile, f"tiles_{side}": tiles_max}
    return _filled(ListParams, numbers)


def listed_rows(plan: Plan) -> Mapping[str, int]:
    """The lists of a packed launch, by area of workspace: the rows of the tiles that each of them names."""
    config = config_of(plan)
    queries, keys = TILE_LISTS
    if isinstance(config, WgmmaBackwardConfig):
        return {queries: ROW_TILE, keys: config.tile_n}
    if isinstance(config, WgmmaTwoPassConfig):
        return {queries: QUERY_TILE, keys: config.tile_n}
    if not isinstance(config, BackwardConfig):
        return {queries: config.tile_m}
    return {queries: ROW_TILE if config.dq is None else config.dq.tile_m, keys: config.tile_n}


def argument_of(kernel: Instance, plan: Plan, *, has_dlse: bool = False) -> Struct:
    """The one argument of a kernel of a Plan: of all but the one of lists `struct_of`."""
    if kernel.params is not ListParams:
        return struct_of(plan, kernel.params, has_dlse=has_dlse)
    params, areas = list_params_of(plan), areas_of(plan)
    names = {name: name for name in CU_SEQLENS} | ({"next_tile": WORKSPACE} if WORKSPACE in areas else {})
    names |= {name: name for name in TILE_LISTS if name in areas}
    places = [(at, name) for at, name, _ in _places(ListParams) if name in names]
    return Struct(data=bytes(params), pointers={at: names[name] for at, name in places}, maps={})


def struct_of(plan: Plan, kind: type[ctypes.Structure] | None = None, *, has_dlse: bool = False) -> Struct:
    """The one argument of kernels of a Plan, as `params_of`. Pointers to what a launch does not have stay null."""
    params, names = params_of(plan, kind), {"next_tile": WORKSPACE, **_arguments(plan)}
    absent = {"delta", "dq_sum", "key_sums", WORKSPACE, *TILE_LISTS, *PARTIAL} - set(areas_of(plan))
    absent |= set(CACHE_TENSORS) - set(plan.problem.cache_tensors)
    absent |= set() if has_dlse else {"dlse"}
    if plan.problem.has_sinks:
        absent -= {"delta"}  # the caller's
    else:
        absent |= {"sinks"}
    config, maps = plan.config, {}
    if isinstance(config, (WgmmaConfig, WgmmaBackwardConfig, WgmmaTwoPassConfig, SplitWgmmaConfig)):
        maps = tensor_maps(plan.problem, config.box_rows(plan.problem))
    places = [(at, names.get(name, name), is_map) for at, name, is_map in _places(type(params)) if name not in absent]
    return Struct(
        data=bytes(params),
        pointers={at: name for at, name, is_map in places if not is_map and name not in (None, *absent)},
        maps={at: maps[name] for at, name, is_map in places if is_map and name in maps},
    )


def areas_of(plan: Plan) -> Mapping[str, int]:
    """The areas of a launch's workspace, and the bytes of each."""
    if isinstance(plan.config, BackwardConfig):
        return workspace_areas(plan.problem, plan.config)
    if isinstance(plan.config, WgmmaBackwardConfig):
        return wgmma_workspace_areas(plan.problem, plan.config)
    if isinstance(plan.config, WgmmaTwoPassConfig):
        return two_pass_workspace_areas(plan.problem, plan.config)
    if isinstance(plan.config, (CudaSplitConfig, SplitWgmmaConfig)):
        return split_workspace_areas(plan.problem, plan.config)
    lists = list_areas(plan.problem, FORWARD_LISTS)
    counter_bytes = plan.workspace_bytes - sum(lists.values())
    return {**({WORKSPACE: counter_bytes} if counter_bytes else {}), **lists}


def has_counter(plan: Plan) -> bool:
    """True if all of a launch's workspace is a counter that it finds at zero and leaves so."""
    return plan.direction == "forward" and set(areas_of(plan)) == {WORKSPACE}


def _places(kind: type[ctypes.Structure], base: int = 0, prefix: str = "") -> Iterator[tuple[int, str, bool]]:
    """Byte offset and name of every pointer and every tensor map of a struct, and whether it is a map."""
    for name, field, *_ in kind._fields_:
        at = base + getattr(kind, name).offset
        if field is ctypes.c_void_p:
            yield at, prefix + name, False
        elif field is TENSOR_MAP:
            yield at, name.removeprefix("map_"), True
        elif issubclass(field, ctypes.Structure):
            yield from _places(field, at, _prefix_in(kind, name))
