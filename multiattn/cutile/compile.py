"""Compile a Plan for any arch with no GPU and no driver, and read from the cubin what the compiler made of it."""

from __future__ import annotations

import io
import time
from typing import Any

import cuda.tile as ct
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ScalarConstraint,
    export_kernel,
)

from multiattn.backend import Compiled, Plan
from multiattn.cutile.launch import compile_limit, get_constants, get_kernel, needs_64bit
from multiattn.problem import Problem
from multiattn.toolchain import resource_usage

ALIGNMENT = 16
"""What a launch looks for: bases and strides that are multiples of 16 bytes, lengths that are multiples of 16."""

_DTYPES = {"fp16": ct.float16, "bf16": ct.bfloat16}


def compile_plan(plan: Plan) -> Compiled:
    """Compile with the signature that a launch would derive from the plan's tensors.

    Sizes come from cuobjdump and are None where it is not installed. `spill_bytes` is the stack of a thread. Causal
    kernels have one: the repair, which runs only after a non-finite value, spills so that the hot loops need not.
    """
    buffer = io.BytesIO()
    start = time.perf_counter()
    with compile_limit():
        export_kernel(
            get_kernel(plan),
            [get_signature(plan)],
            buffer,
            gpu_code=plan.arch.name.replace("sm", "sm_"),
            output_format="cubin",
        )
    seconds = time.perf_counter() - start
    cubin = buffer.getvalue()
    usage = resource_usage(cubin)
    return Compiled(
        seconds=seconds,
        cubin=cubin,
        smem_bytes=usage.smem_bytes if usage else None,
        registers=usage.registers if usage else None,
        spill_bytes=usage.stack_bytes if usage else None,
    )


def get_signature(plan: Plan) -> Any:
    """The kernel's parameters as a launch would specialise them."""
    problem = plan.problem
    queries = problem.batch, problem.heads_q, problem.seq_q
    keys = problem.batch, problem.heads_kv, problem.seq_kv
    constants = get_constants(plan)[1:]  # without scale_log2, which is no constant
    parameters = [
        _array(problem, queries, problem.strides_q),
        _array(problem, keys, problem.strides_k),
        _array(problem, keys, problem.strides_v),
        _array(problem, queries, problem.strides_out),
        _lse(problem),
        ScalarConstraint(ct.float32),
        *constants,
    ]
    signature = KernelSignature(parameters, CallingConvention.cutile_python_v2())  # v2: a static extent
    return signature.with_mangled_symbol("forward")


def _array(problem: Problem, sizes: tuple[int, int, int], strides: tuple[int, int, int]) -> Any:
    """A 16-bit array ``[B, H, S, D]`` with static D."""
    in_elements = ALIGNMENT // 2
    is_aligned = problem.alignment == ALIGNMENT
    return ArrayConstraint(
        _DTYPES[problem.dtype],
        4,
        index_dtype=ct.int64 if needs_64bit(problem) else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=0 in strides,
        shape_constant=(None, None, None, problem.head_dim),
        shape_divisible_by=(*(ALIGNMENT if size % ALIGNMENT == 0 else 1 for size in sizes), 1),
        stride_constant=(None, None, None, 1),
        stride_divisible_by=(*(in_elements if stride % in_elements == 0 else 1 for stride in strides), 1),
        base_addr_divisible_by=ALIGNMENT if is_aligned else problem.alignment,
    )


def _lse(problem: Problem) -> Any:
    """The fp32 array ``[B, Hq, Sq]``, contiguous."""
    sizes = problem.batch, problem.heads_q, problem.seq_q
    strides = problem.heads_q * problem.seq_q, problem.seq_q
    in_elements = ALIGNMENT // 4
    return ArrayConstraint(
        ct.float32,
        3,
        index_dtype=ct.int64 if needs_64bit(problem) else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        shape_divisible_by=tuple(ALIGNMENT if size % ALIGNMENT == 0 else 1 for size in sizes),
        stride_constant=(None, None, 1),
        stride_divisible_by=(*(in_elements if stride % in_elements == 0 else 1 for stride in strides), 1),
        base_addr_divisible_by=ALIGNMENT,
    )
