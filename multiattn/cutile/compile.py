"""A launch's kernel and signature as cuTile has them, compiled for any arch with no GPU and no driver."""

from __future__ import annotations

import functools
import io
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ScalarConstraint, export_kernel

from multiattn.cutile.configs import PIPELINES
from multiattn.cutile.kernels import backward, forward
from multiattn.cutile.kernels.constants import KernelConstants
from multiattn.cutile.kernels.tiles import IN_64_BITS
from multiattn.cutile.table import ArrayArgument, KernelLaunch
from multiattn.plan.arch import Arch

COMPILE_SECONDS = 120.0
"""Longest compilation: a tile too large for the registers can take tileiras minutes, a good one takes it seconds."""

_DTYPES = {torch.float16: ct.float16, torch.bfloat16: ct.bfloat16, torch.float32: ct.float32}


def get_kernel(launch: KernelLaunch) -> Any:
    """The kernel with its constants and hints; launches that share them share the kernel, and what it has compiled."""
    return _kernel(launch.kernel, launch.constants, launch.is_64bit, launch.occupancy, launch.num_worker_warps)


@functools.cache
def _kernel(
    name: str, constants: KernelConstants, is_64bit: bool, occupancy: int | None, num_worker_warps: int | None
) -> Any:
    module: Any = forward if name == "forward" else backward
    function = getattr(module, f"{name}_kernel")(constants)
    if is_64bit:
        annotations = function.__annotations__
        function.__annotations__ = {it: IN_64_BITS.get(kind, kind) for it, kind in annotations.items()}
    return ct.kernel(function, occupancy=occupancy, num_worker_warps=num_worker_warps)


def get_signature(launch: KernelLaunch) -> Any:
    """The parameters of a kernel as a launch would specialise them; its symbol tells the constants, too."""
    dtype = ct.int64 if launch.is_64bit else ct.int32
    parameters = [
        *(_array(array, dtype) for array in launch.arrays.values()),
        *(ScalarConstraint(ct.float32) for _ in launch.scalars),
    ]
    convention = CallingConvention.cutile_python_v2()  # v2: a static extent
    constants = map(_number, asdict(launch.constants).values())
    named = KernelSignature([*parameters, *constants], convention).with_mangled_symbol(launch.kernel)
    return KernelSignature(parameters, convention, named.symbol)


def _number(constant: float | str | None) -> float:
    """A constant as a symbol can have it."""
    if constant is None:
        return 0
    return PIPELINES.index(constant) if isinstance(constant, str) else constant


def _array(array: ArrayArgument, index_dtype: Any) -> Any:
    """With a static D, where it has one."""
    shape = array.layout.shape
    tail = [1] * (len(shape) - 3)
    static_dim = {"shape_constant": (None, None, None, shape[3])} if tail else {}
    return ArrayConstraint(
        _DTYPES[array.layout.dtype],
        len(shape),
        index_dtype=index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=array.overlaps,
        shape_divisible_by=(*array.extents, *tail),
        stride_constant=(*(None for _ in array.strides), 1),
        stride_divisible_by=(*array.strides, 1),
        base_addr_divisible_by=array.alignment,
        **static_dim,
    )


def compile_limit() -> AbstractContextManager[None]:
    """Bounds compilation to `COMPILE_SECONDS`, unless the environment has its own limit."""
    if "CUDA_TILE_COMPILER_TIMEOUT_SEC" in os.environ:
        return nullcontext()
    limit: AbstractContextManager[None] = ct.compiler_timeout(COMPILE_SECONDS)
    return limit


def make_cubin(launch: KernelLaunch, signature: Any, arch: Arch) -> bytes:
    """Compile within the limit of compilation, or find it in cuTile's cache on disk, as `ct.launch` would."""
    buffer, gpu_code = io.BytesIO(), arch.name.replace("sm", "sm_")
    with compile_limit():
        export_kernel(get_kernel(launch), [signature], buffer, gpu_code=gpu_code, output_format="cubin")
    return buffer.getvalue()
