"""A Plan's kernels compiled to run elsewhere: cubins as a launch has them, PTX on demand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cuda.bindings import nvrtc

from multiattn.cuda import nvrtc as compiler
from multiattn.cuda.bind import bind, image_of
from multiattn.cuda.launches import kernels_of
from multiattn.cuda.source import DEVICE_INCLUDES, Kernel, translation_unit
from multiattn.plan import abi
from multiattn.plan.backend import Exported, Plan


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """Every kernel of a Plan, compiled afresh; of `kinds` it has ``ptx``. NVRTC's own error passes through.

    ValueError where the Binding of a forward kernel is not what its cubin takes.
    """
    return tuple(_export(kernel, plan, kinds) for kernel in kernels_of(plan))


def _export(kernel: Kernel, plan: Plan, kinds: Sequence[str]) -> Exported:
    source, target = translation_unit([kernel]), kernel.target(plan.arch)
    begin = time.perf_counter()
    cubin = compiler._compile(source, target)
    seconds = time.perf_counter() - begin
    binding = None
    if plan.direction == "forward":
        binding = bind(plan, image_of(plan))
        abi.check(binding, abi.read_entry(cubin, kernel.name))
    return Exported(
        kernel=kernel.name,
        seconds=seconds,
        cubin=cubin,
        threads=kernel.threads,
        dynamic_smem_bytes=kernel.smem_bytes,
        texts={"ptx": make_ptx(source, target)} if "ptx" in kinds else {},
        binding=binding,
    )


def make_ptx(source: str, target: str) -> bytes:
    """The PTX that NVRTC makes of a translation unit on its way to a cubin for a target (``sm_90``).

    By NVRTC itself: cuda.core asks the driver before it gives PTX, and here there may be none.
    """
    options = [f"--gpu-architecture={target}", f"--std={compiler._FLAGS['std']}"]
    options += [f"--include-path={directory}" for directory in DEVICE_INCLUDES]
    program = _ask(None, nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        _ask(program, nvrtc.nvrtcCompileProgram(program, len(encoded), encoded))
        ptx = bytearray(_ask(program, nvrtc.nvrtcGetPTXSize(program)))
        _ask(program, nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(ptx).rstrip(b"\0")


def _ask(program: Any, answer: tuple[Any, ...]) -> Any:
    """What NVRTC answered; RuntimeError with its log for a failure."""
    status, *rest = answer
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return rest[0] if rest else None
    log = b""
    if program is not None:
        text = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, text)
        log = bytes(text).rstrip(b"\0")
    raise RuntimeError(f"NVRTC: {status.name}: {log.decode()}")
