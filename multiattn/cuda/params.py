"""The kernels' parameter structs of `include/multiattn/params*.h`, filled from a Problem."""

from __future__ import annotations

import ctypes

import torch

from multiattn.abi import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES
from multiattn.config import Config
from multiattn.cuda import wgmma_configs
from multiattn.cuda.backward_configs import ROW_TILE, BackwardConfig, tiles
from multiattn.cuda.configs import ELEMENT_BYTES, query_tiles
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.problem import Problem, Strides
from multiattn.schedule import KV_BYTES_SIDE_BY_SIDE, heads_side_by_side


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


def set_pointers(
    params: ForwardParams, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Point `params` at the tensors."""
    params.q = q.data_ptr()
    params.k = k.data_ptr()
    params.v = v.data_ptr()
    params.out = out.data_ptr()
    params.lse = lse.data_ptr()


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


def aligned_wgmma_params(data: bytes) -> WgmmaParams:
    """A copy of a struct's bytes at an address that its alignment in C++ wants."""
    memory = bytearray(len(data) + TENSOR_MAP_ALIGNMENT)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    at = -start % TENSOR_MAP_ALIGNMENT
    memory[at : at + len(data)] = data
    return WgmmaParams.from_buffer(memory, at)


def set_map(params: WgmmaParams, name: str, encoded: bytes) -> None:
    """Put the encoded map of the tensor called `name` (``q k v out``) into `params`."""
    at = ctypes.addressof(params) + map_offset(name)
    ctypes.memmove(at, encoded, TENSOR_MAP_BYTES)


def map_offset(name: str) -> int:
    """Where the map of the tensor called `name` is in a WgmmaParams, in bytes."""
    offset: int = getattr(WgmmaParams, f"map_{name}").offset
    return offset


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


def set_backward_pointers(
    params: BackwardParams,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    workspace: torch.Tensor,
    dq_sum_at: int,
) -> None:
    """Point `params` at the tensors; `workspace` holds delta, then at byte `dq_sum_at` the sum of dq."""
    params.q = q.data_ptr()
    params.k = k.data_ptr()
    params.v = v.data_ptr()
    params.out = out.data_ptr()
    params.lse = lse.data_ptr()
    params.dout = dout.data_ptr()
    if dlse is not None:
        params.dlse = dlse.data_ptr()
    params.dq = dq.data_ptr()
    params.dk = dk.data_ptr()
    params.dv = dv.data_ptr()
    params.delta = base = workspace.data_ptr()
    params.dq_sum = base + dq_sum_at


def _strides(strides: Strides) -> _Strides:
    return _Strides(*strides)


def _kv_heads_per_section(problem: Problem) -> int:
    """Of a block of keys what is shared is Q, dO and the fp32 sum of dq of its group."""
    row_bytes = problem.head_dim * (2 * ELEMENT_BYTES + 4)
    heads = max(1, KV_BYTES_SIDE_BY_SIDE // (problem.seq_q * row_bytes * problem.group))
    return min(heads, problem.batch * problem.heads_kv)
