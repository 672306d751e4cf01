"""CUDA C++ to cubin with NVRTC, through cuda.core: no host compiler, no Torch header, no GPU, no header but ours."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from multiattn.cuda.bind import bind
from multiattn.cuda.instances import launches_of
from multiattn.cuda.source import DEVICE_INCLUDES, Instance, cache_key, translation_unit
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Exported, Plan
from multiattn.plan.toolchain import version_of
from multiattn.progress import compiling
from multiattn.run import ahead, cache

_STANDARD = "c++20"


def cubin_path(kernel: Instance, arch: Arch) -> Path:
    """The compiled kernel in the disk cache, compiled now if it is not there. NVRTC's own error passes through."""
    source, target = translation_unit([kernel]), kernel.target(arch)
    key = cache_key(source, DEVICE_INCLUDES, target, _STANDARD, _compiler_version())

    def make(path: Path) -> None:
        with compiling("cuda", arch.name):
            path.write_bytes(_compile(source, target))

    return cache.fetch(key, ".cubin", make)


def compile_ahead(plan: Plan) -> None:
    """Compile the kernels of a Plan at one time into the cache on disk, where `launch.prepare` looks."""
    if plan.arch.is_gpu:
        kernels = {launch.kernel for launch in launches_of(plan)}
        with ThreadPoolExecutor(len(kernels)) as threads:
            list(threads.map(lambda kernel: cubin_path(kernel, plan.arch), kernels))


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """A Plan's kernels as a launch has them, once each, compiled afresh to run elsewhere; of `kinds` there is ``ptx``.

    NVRTC's own error passes through. Kernels that are launched
    together (of a packed batch, or with parts to merge) and those of a cache have no Binding: a loader runs a launch of
    one. ValueError where the Binding of a forward kernel is not what its cubin takes.
    """
    made, launches = [], {it.kernel: it for it in launches_of(plan)}  # some are launched again and again
    is_alone = len(launches) == 1 and plan.problem.cache is None
    for launch in launches.values():
        kernel = launch.kernel
        begin = time.perf_counter()
        cubin = _compile(translation_unit([kernel]), kernel.target(plan.arch))
        seconds = time.perf_counter() - begin
        binding = None
        if plan.direction == "forward" and is_alone:
            binding = bind(plan, launch.image())
            abi.check(binding, abi.read_entry(cubin, kernel.name))
        exported = Exported(
            kernel=kernel.name,
            seconds=seconds,
            cubin=cubin,
            threads=kernel.threads,
            dynamic_smem_bytes=kernel.smem_bytes,
            texts={"ptx": make_ptx(translation_unit([kernel]), kernel.target(plan.arch))} if "ptx" in kinds else {},
            binding=binding,
        )
        made.append(exported)
    return tuple(made)


def _compile(source: str, target: str) -> bytes:
    ahead.begin()
    options = ProgramOptions(arch=target, include_path=list(map(str, DEVICE_INCLUDES)), std=_STANDARD)
    return bytes(Program(source, "c++", options).compile("cubin").code)


@functools.cache
def _compiler_version() -> str:
    """NVRTC's own version, and that of its wheel, which also tells updates apart."""
    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor} {version_of('nvidia-cuda-nvrtc') or 'no wheel'}"


def make_ptx(source: str, target: str) -> bytes:
    """The PTX that NVRTC makes of a translation unit on its way to a cubin for a target (``sm_90``).

    By NVRTC itself: cuda.core asks the driver before it gives PTX, and here there may be none.
    """
    options = [f"--gpu-architecture={target}", f"--std={_STANDARD}"]
    options += [f"--include-path={directory}" for directory in DEVICE_INCLUDES]
    program = _ask(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        _ask(nvrtc.nvrtcCompileProgram(program, len(encoded), encoded))
        ptx = bytearray(_ask(nvrtc.nvrtcGetPTXSize(program)))
        _ask(nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(ptx).rstrip(b"\0")


def _ask(answer: tuple[Any, ...]) -> Any:
    """The answer of NVRTC; RuntimeError for a failure, which compiling to a cubin has shown before with NVRTC's log."""
    status, *rest = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {status.name}")
    return rest[0] if rest else None
