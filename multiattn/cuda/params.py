"""`ForwardParams`: the kernel's parameter struct of `include/multiattn/params.h`, filled from a Problem."""

from __future__ import annotations

import ctypes

import torch

from multiattn.cuda.configs import ELEMENT_BYTES, CudaConfig, query_tiles
from multiattn.problem import Problem, Strides

_KV_BYTES_SIDE_BY_SIDE = 16 << 20
"""K and V of heads whose tiles run side by side: a part of L2 (40 MB on A100, 50 on H100). A guess, not measured."""


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


def make_params(problem: Problem, config: CudaConfig) -> ForwardParams:
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
        heads_per_section=_heads_per_section(problem),
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


def _strides(strides: Strides) -> _Strides:
    return _Strides(*strides)


def _heads_per_section(problem: Problem) -> int:
    kv_bytes = 2 * problem.seq_kv * problem.head_dim * ELEMENT_BYTES
    heads = max(1, _KV_BYTES_SIDE_BY_SIDE // kv_bytes) * problem.group
    return min(heads, problem.batch * problem.heads_q)
