"""Compile a Plan for its arch with no GPU: for a launch in this process, to be read, or to be run elsewhere.

It is done as Triton's JIT does it, but for a target that is named, not detected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from multiattn.progress import compiling
from multiattn.run import ahead
from multiattn.triton.bind import bind, checked_binding, image_of, is_loadable, why_not
from multiattn.triton.calls import Call, calls_of
from multiattn.triton.cpu import interpreter
from multiattn.triton.ending import end_quietly
from multiattn.triton.hashing import hashing

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
        binding=_emitted_binding(kernel, call, plan, image) if is_loadable(plan) else None,
    )


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
    """The CompiledKernel of `call` for `arch`, compiled afresh."""
    with interpreter.exclusive_language, knobs.compilation.scope():
        knobs.compilation.always_compile = True
        return Source(call, call.stubs(), arch).compile()


# ---------------------------------------------------------------- for a launch


class Source:
    """A kernel with all that its code depends on, as Triton's compiler takes it.

    It is made as `JITFunction.run` makes it, but for a target that is named: the JIT asks Triton's driver, which first
    builds an extension module by a C compiler.
    """

    def __init__(self, call: Call, stubs: Sequence[Any], arch: Arch) -> None:
        """`stubs` are arguments of a launch, as Triton specialises on them."""
        major, minor = arch.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        backend = make_backend(self._target)
        kernel: Any = call.kernel
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, _ = bind(*stubs, **call.table.options)
        options, signature, constexprs, attributes = kernel._pack_args(
            backend, call.table.options, bound, specialization, None
        )
        make_source = GluonASTSource if kernel.is_gluon() else ASTSource
        self._source = make_source(kernel, signature, constexprs, attributes)
        self._options = options.__dict__
        self.is_gluon: bool = kernel.is_gluon()
        if self.is_gluon:
            end_quietly()
        self.target = arch.name
        self.key = self._source.hash(), str(self._options), str(self._target)
        """All that the code depends on in a process."""

    def compile(self, *, wait: Callable[[], object] | None = None, then: Callable[[], object] | None = None) -> Any:
        """The CompiledKernel, from Triton's cache on disk where it is there.

        Triton's front end, which is Python, is run between `wait` and `then`; `then` is also called where it is not.
        """
        make_ir, wait, then = self._source.make_ir, wait or _nothing, then or _nothing

        def make_ir_in_turn(*arguments: Any) -> Any:
            wait()
            try:
                return make_ir(*arguments)
            finally:
                then()

        self._source.make_ir = make_ir_in_turn
        try:
            return triton.compile(self._source, target=self._target, options=self._options)
        finally:
            self._source.make_ir = make_ir
            then()


def _nothing() -> None: ...


_known: dict[tuple[str, ...], Any] = {}
"""The CompiledKernels of this process, by their keys. Two threads may make the same; either will do."""


def compile_sources(sources: Sequence[Source]) -> list[Any]:
    """The CompiledKernel of each, all compiled at one time where they are not known.

    Python runs one front end after another, the largest first: Gluon's. What follows it holds no lock of Python's.
    """
    missing = {it.key: it for it in sorted(sources, key=lambda it: not it.is_gluon) if it.key not in _known}
    if missing:
        hashing().wait()  # else each of them would do it again
        with interpreter.exclusive_language.as_it_is(), compiling("triton", sources[0].target):
            _known.update(zip(missing, _compile_in_turn([*missing.values()]), strict=True))
    return [_known[it.key] for it in sources]


def _compile_in_turn(sources: Sequence[Source]) -> list[Any]:
    turns = [threading.Event() for _ in sources]
    turns[0].set()

    def compile_one(index: int) -> Any:
        then = turns[index + 1].set if index + 1 < len(turns) else ahead.begin
        return sources[index].compile(wait=turns[index].wait, then=then)

    with ThreadPoolExecutor(len(sources)) as threads:
        return list(threads.map(compile_one, range(len(sources))))


def compile_ahead(plan: Plan) -> None:
    """Compile the kernels of the usual launch of a Plan, for `launch.prepare` to find them known."""
    if plan.arch.is_gpu and not wants_jit():
        compile_sources([Source(call, call.stubs(), plan.arch) for call in calls_of(plan)])


def wants_jit() -> bool:
    """True while somebody listens to Triton's JIT and its launches, or has it compile other code than usual."""
    runtime, compilation = knobs.runtime, knobs.compilation
    hooks = (getattr(runtime, name, None) for name in _HOOKS)
    if any(getattr(hook, "calls", hook) for hook in hooks):  # a chain of hooks, or one, or None
        return True
    return bool(runtime.debug or getattr(compilation, "instrumentation_mode", ""))


_HOOKS = (
    "launch_enter_hook",
    "launch_exit_hook",
    "kernel_load_start_hook",
    "kernel_load_end_hook",
    "jit_cache_hook",
    "jit_post_compile_hook",
    "add_stages_inspection_hook",
)
