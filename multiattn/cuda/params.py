"""The kernels' parameter structs, which `include/multiattn/params.h` describes, filled with the numbers of a Plan.

A field that is a pointer has the name of its operand, or of an area of workspace; one called ``map_q`` is the tensor
map of q; all others are numbers. What a launch, an emitted kernel and the emulator hand over follows from that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.cuda.family import areas_of, config_of
from multiattn.cuda.score import NOTHING, lowered_of, slots_of
from multiattn.cuda.source import BitLists, ListParams, MaskLists, PlannedLaunch, SequenceLists, Strides
from multiattn.cuda.structs import TENSOR_MAP
from multiattn.cuda.wgmma import tensor_maps
from multiattn.packed import TILE_LISTS
from multiattn.plan.abi import WORKSPACE, Struct
from multiattn.plan.backend import Plan
from multiattn.sequences import CACHE_TENSORS, CU_SEQLENS, PARTIAL

_OF_PROBLEM = (
    *("heads_q", "heads_kv", "group", "seq_q", "seq_kv"),
    *("scale_sign", "scale_log2", "score_factor", "grad_factor"),
)


def numbers_of(plan: Plan) -> dict[str, Any]:
    """Every number that a kernel of the Plan is told, by the name of its field."""
    problem = plan.problem
    left, right = problem.reach
    return {
        **{f"strides_{name}": Strides(*layout.strides[:3]) for name, layout in problem.layouts.items()},
        **{name: getattr(problem, name) for name in _OF_PROBLEM},
        "left": left,
        "right": right,
        "sequences": 0 if problem.packing is None else problem.packing.sequences,
        **config_of(plan).numbers(plan),
    }


def _numbers_of_lists(plan: Plan) -> dict[str, int]:
    """Every number that the kernel of lists is told."""
    problem, packing, tile_rows = plan.problem, plan.problem.packing, config_of(plan).listed()
    assert packing is not None
    numbers: dict[str, int] = {"sequences": packing.sequences}
    rows_of = problem.seq_q, problem.seq_kv
    for side, name, rows, longest in zip(("q", "kv"), TILE_LISTS, rows_of, packing.longest(*rows_of), strict=True):
        tile = tile_rows.get(name, 0)
        tiles_max = packing.tiles_max(rows, tile) if tile else 0
        numbers |= {f"rows_{side}": rows, f"longest_{side}": longest}
        numbers |= {f"tile_{side}": tile, f"tiles_{side}": tiles_max}
    return numbers


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


def params_of(launch: PlannedLaunch, plan: Plan) -> ctypes.Structure:
    """The parameter struct of a launch of a Plan, but for pointers and tensor maps."""
    if launch.kernel.params is ListParams:
        return _filled(launch.kernel.whole_params, _numbers_of_lists(plan))
    return _filled(launch.kernel.whole_params, {**numbers_of(plan), **_arguments(plan), **launch.numbers})


def _filled(kind: type[ctypes.Structure], numbers: Mapping[str, Any], prefix: str = "") -> ctypes.Structure:
    params = kind()
    for name, field, *_ in kind._fields_:
        if field in (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_float, Strides):
            setattr(params, name, numbers[prefix + name])
        elif issubclass(field, ctypes.Structure):
            setattr(params, name, _filled(field, numbers, _prefix_in(kind, name)))
    return params


def _prefix_in(kind: type[ctypes.Structure], name: str) -> str:
    """The prefix of the names of a struct's fields, where another struct has several like it."""
    return f"{name}." if kind in (MaskLists, BitLists, SequenceLists) and name != "tiles" else ""


def argument_of(launch: PlannedLaunch, plan: Plan, *, has_dlse: bool = False) -> Struct:
    """The one argument of a launch of a Plan, as `params_of`. Pointers to what a launch does not have stay null."""
    problem, params, areas = plan.problem, params_of(launch, plan), areas_of(plan)
    names = {"next_tile": WORKSPACE, **_arguments(plan)}
    absent = {"delta", "dq_sum", "key_sums", WORKSPACE, *TILE_LISTS, *PARTIAL} - set(areas)
    absent |= set(CACHE_TENSORS) - set(problem.cache_tensors if problem.packing is None else CU_SEQLENS)
    absent |= set() if has_dlse else {"dlse"}
    if problem.has_sinks:
        absent -= {"delta"}  # the caller's
    else:
        absent |= {"sinks"}
    maps = tensor_maps(problem, config_of(plan).box_rows(problem))
    places = [(at, names.get(name, name), is_map) for at, name, is_map in _places(type(params)) if name not in absent]
    return Struct(
        data=bytes(params),
        pointers={at: name for at, name, is_map in places if not is_map and name not in (None, *absent)},
        maps={at: maps[name] for at, name, is_map in places if is_map and name in maps},
    )


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
