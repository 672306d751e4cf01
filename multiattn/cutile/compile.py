"""Compile a Plan for any arch with no GPU and no driver, and read from the cubin what the compiler made of it."""

from __future__ import annotations

import io
import time
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
)

from multiattn.cutile.bind import ALIGNMENT, GIVEN
from multiattn.cutile.launch import compile_limit, get_kernel
from multiattn.cutile.table import Step, steps_of
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Compiled, Plan
from multiattn.plan.toolchain import resource_usage
from multiattn.run.arguments import Layout, layouts

_DTYPES = {torch.float16: ct.float16, torch.bfloat16: ct.bfloat16, torch.float32: ct.float32}


def compile_plan(plan: Plan) -> tuple[Compiled, ...]:
    """Compile each kernel with the signature that a launch would derive from the plan's tensors, without a dlse.

    Sizes come from cuobjdump and are None where it is not installed. `spill_bytes` is the stack of a thread.
    """
    return tuple(_compile(plan, step) for step in steps_of(plan))


def _compile(plan: Plan, step: Step) -> Compiled:
    signature = get_signature(plan, step)
    start = time.perf_counter()
    cubin = make_cubin(get_kernel(step), signature, plan.arch)
    seconds = time.perf_counter() - start
    usage = resource_usage(cubin)
    return Compiled(
        kernel=step.kernel,
        threads=usage.threads if usage else None,
        seconds=seconds,
        cubin=cubin,
        smem_bytes=usage.smem_bytes if usage else None,
        registers=usage.registers if usage else None,
        spill_bytes=usage.stack_bytes if usage else None,
    )


def make_cubin(kernel: Any, signature: Any, arch: Arch) -> bytes:
    """Compile within the limit of compilation, or find it in cuTile's cache on disk, as `ct.launch` would."""
    buffer = io.BytesIO()
    with compile_limit():
        export_kernel(kernel, [signature], buffer, gpu_code=arch.name.replace("sm", "sm_"), output_format="cubin")
    return buffer.getvalue()


def get_signature(plan: Plan, step: Step) -> Any:
    """The parameters of a kernel as a launch would specialise them."""
    problem, known = plan.problem, layouts(plan.problem)
    parameters = [
        *(
            _array(known[name], problem.alignment if name in GIVEN else ALIGNMENT, step.is_64bit)
            for name in step.arrays.values()
        ),
        *(ScalarConstraint(ct.float32) for _ in step.scalars),
        *step.constants.values(),
    ]
    signature = KernelSignature(parameters, CallingConvention.cutile_python_v2())  # v2: a static extent
    return signature.with_mangled_symbol(step.kernel)


def _array(layout: Layout, alignment: int, is_64bit: bool) -> Any:
    """An array ``[B, H, S, D]`` with static D, or ``[B, H, S]``."""
    has_dim = len(layout.shape) == 4
    sizes, strides = layout.shape[:3], layout.strides[:-1]
    in_elements = ALIGNMENT // layout.dtype.itemsize
    static_dim = {"shape_constant": (None, None, None, layout.shape[3])} if has_dim else {}
    return ArrayConstraint(
        _DTYPES[layout.dtype],
        len(layout.shape),
        index_dtype=ct.int64 if is_64bit else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=0 in strides,
        shape_divisible_by=(*(ALIGNMENT if size % ALIGNMENT == 0 else 1 for size in sizes), *([1] if has_dim else [])),
        stride_constant=(*(None for _ in strides), 1),
        stride_divisible_by=(*(in_elements if stride % in_elements == 0 else 1 for stride in strides), 1),
        base_addr_divisible_by=alignment,
        **static_dim,
    )
