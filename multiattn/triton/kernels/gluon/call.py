"""The Gluon kernel, its constants and its tensor descriptors: the part of a call that takes Gluon."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multiattn.plan.backend import Plan
from multiattn.triton.gluon_configs import GluonConfig, pieces_of
from multiattn.triton.kernels.gluon import forward
from multiattn.triton.kernels.gluon.constants import Shape
from multiattn.triton.parameters import Descriptor

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

kernel: Any = forward.attention_forward


def describe(row: Descriptor, tensor: Any) -> TensorDescriptor:
    """A TensorDescriptor with its layout in shared memory, as `multiattn.triton.launch.describe`."""
    block = [1, 1, row.rows, row.columns]
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=tensor,
        shape=list(row.layout.shape),
        strides=list(row.layout.strides),
        block_shape=block,
        layout=gl.NVMMASharedLayout.get_default_for(block, _DTYPES[row.layout.dtype]),
        padding="zero",
        round_f32_to_tf32=False,
    )
    return descriptor


def shape_of(plan: Plan) -> Shape:
    """The kernel's constants."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonConfig)
    wide, narrow = pieces_of(problem.head_dim)
    return Shape(
        causal=problem.causal,
        ragged=problem.seq_kv % config.tile_n != 0,
        scale_sign=problem.scale_sign,
        head_dim=problem.head_dim,
        wide=wide,
        narrow=narrow,
        tile_n=config.tile_n,
        warpgroups=config.warpgroups,
        stages=config.stages,
        q_slots=config.q_slots,
        is_persistent=config.scheduler != "one_tile",
        is_dynamic=config.scheduler == "dynamic",
        pingpong=config.pingpong,
        lazy_max=config.lazy_max,
        exp2_fma_sixteenths=config.exp2_fma_sixteenths,
    )
