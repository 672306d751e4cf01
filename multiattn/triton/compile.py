"""Compile a Plan for its arch with no GPU, to be read or to be run elsewhere.

It is done as Triton's JIT does it, but for a target that is named, not detected.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Exported, Plan
from multiattn.triton.bind import bind, checked_binding, image_of, why_not
from multiattn.triton.calls import Call, calls_of
from multiattn.triton.cpu import interpreter
from multiattn.triton.decode_configs import VARIANT as SPLIT_KEYS

KINDS = ("ttir", "ttgir", "llir", "ptx")
"""Intermediate code that can be asked for."""


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """Every kernel of a Plan, compiled afresh; of `kinds` it has `KINDS`. The compiler's own error passes through.

    Triton's cache is written but not read, so `seconds` is the compiler's own time. Triton's driver is left alone, so a
    launch in another thread of this process is not disturbed.

    ValueError where the Binding of a forward kernel is not what Triton would launch, or not what its cubin takes.
    """
    return tuple(_export(call, plan, kinds) for call in calls_of(plan))


def _export(call: Call, plan: Plan, kinds: Sequence[str]) -> Exported:
    start = time.perf_counter()
    kernel = specialise(call, plan.arch)
    seconds = time.perf_counter() - start
    image = image_of(kernel.metadata)
    return Exported(
        kernel=kernel.metadata.name,
        seconds=seconds,
        cubin=kernel.asm["cubin"],
        threads=image.threads,
        dynamic_smem_bytes=image.dynamic_smem_bytes,
        texts={kind: kernel.asm[kind].encode() for kind in KINDS if kind in kinds},
        binding=_emitted_binding(kernel, call, plan, image) if _is_loadable(plan) else None,
    )


def _is_loadable(plan: Plan) -> bool:
    """True where the loader of emitted kernels can launch a plan: a forward of one kernel."""
    return plan.direction == "forward" and plan.problem.packing is None and plan.variant != SPLIT_KEYS


def _emitted_binding(kernel: Any, call: Call, plan: Plan, image: abi.Image) -> abi.Binding:
    """How an emitted kernel is launched where there is no Triton; held against what Triton made of the call."""
    if reason := why_not(kernel.metadata):
        raise ValueError(f"{kernel.metadata.name}: {reason}, all that the loader can launch")
    theirs = checked_binding(kernel, call.table)
    binding = bind(plan, image)
    if (got := replace(binding, constants=theirs.constants, workspace_bytes=0)) != theirs:
        raise ValueError(f"{kernel.metadata.name}: got {got}; Triton has {theirs}")
    return binding


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
        bound, specialization, _ = bind(*call.stubs(), **call.table.options)
        options, signature, constexprs, attributes = kernel._pack_args(
            backend, call.table.options, bound, specialization, None
        )
        make_source = GluonASTSource if kernel.is_gluon() else ASTSource
        source = make_source(kernel, signature, constexprs, attributes)
        return triton.compile(source, target=target, options=options.__dict__)
