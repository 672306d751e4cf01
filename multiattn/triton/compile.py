"""Compile a Plan for its arch with no GPU: as Triton's JIT does it, but for a target that is named, not detected."""

from __future__ import annotations

import time
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from multiattn.plan.arch import Arch
from multiattn.plan.backend import Compiled, Plan
from multiattn.plan.toolchain import resource_usage
from multiattn.triton.cpu import interpreter
from multiattn.triton.launch import Call, calls_of


def compile_plan(plan: Plan) -> tuple[Compiled, ...]:
    """Compile every kernel of a launch of `plan` for `plan.arch`; where cuobjdump is, registers and spills are known.

    Triton's cache is written but not read, so `seconds` is the compiler's own time. Triton's driver is not touched: a
    launch in another thread of this process is not disturbed.
    """
    return tuple(_compile(call, plan.arch) for call in calls_of(plan))


def _compile(call: Call, arch: Arch) -> Compiled:
    start = time.perf_counter()
    kernel = specialise(call, arch)
    seconds = time.perf_counter() - start
    cubin = kernel.asm["cubin"]
    usage = resource_usage(cubin)
    return Compiled(
        kernel=kernel.metadata.name,
        threads=32 * kernel.metadata.num_warps,
        seconds=seconds,
        cubin=cubin,
        smem_bytes=kernel.metadata.shared,
        registers=usage.registers if usage else None,
        spill_bytes=usage.stack_bytes if usage else None,
    )


def specialise(call: Call, arch: Arch) -> Any:
    """The CompiledKernel of `call` for `arch`, compiled afresh.

    These are the steps of `JITFunction.run`, which would take the target from the process-wide active driver.
    """
    major, minor = arch.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    backend = make_backend(target)
    kernel: Any = call.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    with interpreter.exclusive_language, knobs.compilation.scope():
        knobs.compilation.always_compile = True
        bound, specialization, _ = bind(*call.stubs(), **call.options)
        options, signature, constexprs, attributes = kernel._pack_args(
            backend, call.options, bound, specialization, None
        )
        make_source = GluonASTSource if kernel.is_gluon() else ASTSource
        source = make_source(kernel, signature, constexprs, attributes)
        return triton.compile(source, target=target, options=options.__dict__)
