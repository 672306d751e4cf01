"""The kernels' parameter structs of `include/multiattn/params*.h`: the tables of their arguments, filled from a Plan.

A field that is a pointer has the name of its operand, or of an area of workspace; one called ``map_q`` is the tensor
map of q; all others are numbers. What a launch, an emitted kernel and the emulator hand over follows from that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping

from multiattn.cuda import wgmma_configs
from multiattn.cuda.backward_configs import ROW_TILE, BackwardConfig, delta_bytes, dq_sum_bytes, tiles
from multiattn.cuda.configs import ELEMENT_BYTES, query_tiles
from multiattn.cuda.tensor_maps import tensor_maps
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.plan.abi import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, WORKSPACE, Struct
from multiattn.plan.backend import Plan
from multiattn.plan.config import Config
from multiattn.plan.schedule import KV_BYTES_SIDE_BY_SIDE, heads_side_by_side
from multiattn.problem import Problem, Strides


class _Strides(ctypes.Structure):
    _fields_ = (("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("seq", ctypes.c_int64))


class ForwardParams(ctypes.Structure):
    """Mirrors `multiattn::ForwardParams`; every compiled kernel asserts its size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((name, _Strides) for name in ("strides_q", "strides_k", "strides_v", "strides_out")),
        *((name, ctypes.c_int32) for name in ("heads_q", "group", "seq_q", "seq_kv")),
        *((name, ctypes.c_int32) for name in ("tiles", "heads", "heads_per_section", "scale_sign")),
        ("scale_log2", ctypes.c_float),
    )


def make_params(problem: Problem, config: Config) -> ForwardParams:
    """Everything but the pointers."""
    return ForwardParams(
        strides_q=_strides(problem.strides_q),
        strides_k=_strides(problem.strides_k),
        strides_v=_strides(problem.strides_v),
        strides_out=_strides(problem.strides_out),
        heads_q=problem.heads_q,
        group=problem.group,
        seq_q=problem.seq_q,
        seq_kv=problem.seq_kv,
        tiles=query_tiles(config, problem),
        heads=problem.batch * problem.heads_q,
        heads_per_section=heads_side_by_side(problem),
        scale_sign=problem.scale_sign,
        scale_log2=problem.scale_log2,
    )


class WgmmaParams(ctypes.Structure):
    """Mirrors `multiattn::WgmmaParams`, which is as aligned as its tensor maps: so its size is a multiple of that."""

    _fields_ = (
        *((f"map_{name}", ctypes.c_ubyte * TENSOR_MAP_BYTES) for name in ("q", "k", "v", "out")),
        ("forward", ForwardParams),
        ("next_tile", ctypes.c_void_p),
        ("_padding", ctypes.c_ubyte * (-(ctypes.sizeof(ForwardParams) + 8) % TENSOR_MAP_ALIGNMENT)),
    )


def make_wgmma_params(problem: Problem, config: WgmmaConfig) -> WgmmaParams:
    """Everything but the tensor maps and the pointers."""
    forward = make_params(problem, config)
    forward.tiles = wgmma_configs.query_tiles(config, problem)
    return WgmmaParams(forward=forward)


class BackwardParams(ctypes.Structure):
    """Mirrors `multiattn::BackwardParams`; every compiled kernel asserts its size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "dout", "lse", "dlse", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("delta", "dq_sum")),
        *((f"strides_{name}", _Strides) for name in ("q", "k", "v", "out", "dk", "dv")),
        *((name, ctypes.c_int32) for name in ("heads_q", "group", "seq_q", "seq_kv", "heads_q_all", "heads_kv_all")),
        *((name, ctypes.c_int32) for name in ("tiles_rows", "tiles_q", "tiles_kv", "tiles_q_own")),
        *((name, ctypes.c_int32) for name in ("sections_q", "sections_kv")),
        *((name, ctypes.c_float) for name in ("score_factor", "grad_factor")),
    )


def make_backward_params(problem: Problem, config: BackwardConfig) -> BackwardParams:
    """Everything but the pointers."""
    sections_q = heads_side_by_side(problem)
    return BackwardParams(
        strides_q=_strides(problem.strides_q),
        strides_k=_strides(problem.strides_k),
        strides_v=_strides(problem.strides_v),
        strides_out=_strides(problem.strides_out),
        strides_dk=_strides(problem.strides_dk),
        strides_dv=_strides(problem.strides_dv),
        heads_q=problem.heads_q,
        group=problem.group,
        seq_q=problem.seq_q,
        seq_kv=problem.seq_kv,
        heads_q_all=problem.batch * problem.heads_q,
        heads_kv_all=problem.batch * problem.heads_kv,
        tiles_rows=tiles(problem.seq_q, ROW_TILE),
        tiles_q=tiles(problem.seq_q, config.tile_m),
        tiles_kv=tiles(problem.seq_kv, config.tile_n),
        tiles_q_own=tiles(problem.seq_q, config.dq.tile_m) if config.dq else 0,
        sections_q=sections_q,
        sections_kv=_kv_heads_per_section(problem),
        score_factor=problem.score_factor,
        grad_factor=problem.grad_factor,
    )


def _strides(strides: Strides) -> _Strides:
    return _Strides(*strides)


def _kv_heads_per_section(problem: Problem) -> int:
    """Of a block of keys what is shared is Q, dO and the fp32 sum of dq of its group."""
    row_bytes = problem.head_dim * (2 * ELEMENT_BYTES + 4)
    heads = max(1, KV_BYTES_SIDE_BY_SIDE // (problem.seq_q * row_bytes * problem.group))
    return min(heads, problem.batch * problem.heads_kv)


# ---------------------------------------------------------------- as arguments

_MAP = "map_"
_AREAS = {"next_tile": WORKSPACE}
"""Names of areas of workspace that are not those of their fields."""


def params_of(plan: Plan) -> ctypes.Structure:
    """The parameter struct of all kernels of a Plan, but for pointers and tensor maps."""
    problem, config = plan.problem, plan.config
    if isinstance(config, BackwardConfig):
        return make_backward_params(problem, config)
    if isinstance(config, WgmmaConfig):
        return make_wgmma_params(problem, config)
    assert config is not None
    return make_params(problem, config)


def struct_of(plan: Plan, *, has_dlse: bool = False) -> Struct:
    """The one argument of all kernels of a Plan. Pointers to what a launch does not have stay null."""
    params = params_of(plan)
    absent = set() if has_dlse else {"dlse"}
    absent |= {"delta", "dq_sum", WORKSPACE} - set(areas_of(plan))
    maps = tensor_maps(plan.problem, plan.config) if isinstance(plan.config, WgmmaConfig) else {}
    fields = dict(_fields_of(type(params)))
    return Struct(
        data=bytes(params),
        pointers={at: name for at, name in fields.items() if not name.startswith(_MAP) and name not in absent},
        maps={
            at: maps[tensor]
            for at, name in fields.items()
            if (tensor := name.removeprefix(_MAP)) != name and tensor in maps
        },
    )


def areas_of(plan: Plan) -> Mapping[str, int]:
    """The areas of a launch's workspace, and the bytes of each."""
    if not isinstance(plan.config, BackwardConfig):
        return {WORKSPACE: plan.workspace_bytes} if plan.workspace_bytes else {}
    sums = {"dq_sum": dq_sum_bytes(plan.problem)} if plan.config.dq is None else {}
    return {"delta": delta_bytes(plan.problem), **sums}


def _fields_of(kind: type[ctypes.Structure], base: int = 0) -> Iterator[tuple[int, str]]:
    """(byte offset, name) of every pointer and every tensor map of a struct."""
    for name, field, *_ in kind._fields_:
        at = base + getattr(kind, name).offset
        if field is ctypes.c_void_p:
            yield at, _AREAS.get(name, name)
        elif name.startswith(_MAP):
            yield at, name
        elif issubclass(field, ctypes.Structure):
            yield from _fields_of(field, at)
