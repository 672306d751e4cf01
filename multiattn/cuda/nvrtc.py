"""CUDA C++ to cubin with NVRTC, through cuda.core: no host compiler, no Torch header, no GPU, no header but ours."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from multiattn.cuda.launches import kernels_of
from multiattn.cuda.source import DEVICE_INCLUDES, Kernel, files_reached, translation_unit
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Compiled, Plan
from multiattn.plan.toolchain import resource_usage, version_of
from multiattn.run import cache

_FLAGS = {"std": "c++17"}


def cubin_path(kernel: Kernel, arch: Arch) -> Path:
    """The compiled kernel in the disk cache, compiled now if it is not there. NVRTC's own error passes through."""
    source = translation_unit([kernel])
    reached = files_reached(source, DEVICE_INCLUDES)
    target = kernel.target(arch)
    parts = (source, target, str(_FLAGS), _compiler_version())
    key = cache.key_of((*parts, *(text for name in sorted(reached) for text in (name, reached[name]))))
    return cache.fetch(key, ".cubin", lambda path: _write(path, source, target))


def compile_plan(plan: Plan) -> tuple[Compiled, ...]:
    """Compile a Plan's kernels for its arch, afresh; registers and spills are None where cuobjdump is not installed."""
    return tuple(_compile_kernel(kernel, plan.arch) for kernel in kernels_of(plan))


def _compile_kernel(kernel: Kernel, arch: Arch) -> Compiled:
    begin = time.perf_counter()
    cubin = _compile(translation_unit([kernel]), kernel.target(arch))
    seconds = time.perf_counter() - begin
    usage = resource_usage(cubin)
    return Compiled(
        kernel=kernel.name,
        threads=kernel.threads,
        seconds=seconds,
        cubin=cubin,
        smem_bytes=kernel.smem_bytes,
        registers=usage.registers if usage else None,
        spill_bytes=usage.stack_bytes if usage else None,
    )


def _write(path: Path, source: str, target: str) -> None:
    path.write_bytes(_compile(source, target))


def _compile(source: str, target: str) -> bytes:
    include_path = [str(directory) for directory in DEVICE_INCLUDES]
    options = ProgramOptions(arch=target, include_path=include_path, **_FLAGS)
    code = Program(source, "c++", options).compile("cubin").code
    return bytes(code)


@functools.cache
def _compiler_version() -> str:
    """NVRTC's own version, and that of its wheel, which also tells updates apart."""
    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor} {version_of('nvidia-cuda-nvrtc') or 'no wheel'}"
