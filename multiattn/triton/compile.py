"""Compile a Plan for its arch with no GPU: through the JIT's own path, under a driver that only names the target."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from multiattn.arch import Arch
from multiattn.backend import Compiled, Plan
from multiattn.toolchain import resource_usage
from multiattn.triton.forward import attention_forward
from multiattn.triton.launch import Call, specialise


def compile_plan(plan: Plan) -> Compiled:
    """Compile `plan` for `plan.arch`; registers and spills are known where cuobjdump is installed.

    Nothing is read from or written to Triton's cache, so `seconds` is the compiler's own time. The driver that was
    active stays so, and a later launch on a GPU of this process is not disturbed.
    """
    call = Call(plan)
    with target(plan.arch):
        start = time.perf_counter()
        kernel = specialise(call)
        seconds = time.perf_counter() - start
    cubin = kernel.asm["cubin"]
    usage = resource_usage(cubin)
    return Compiled(
        seconds=seconds,
        cubin=cubin,
        smem_bytes=kernel.metadata.shared,
        registers=usage.registers if usage else None,
        spill_bytes=usage.stack_bytes if usage else None,
    )


@contextlib.contextmanager
def target(arch: Arch) -> Iterator[None]:
    """For a while Triton's active driver names `arch`, and what it compiles goes into no cache."""
    before = driver._active  # not `driver.active`: that would look for a GPU
    stand_in = _Target(arch)
    driver.set_active(stand_in)
    try:
        with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
            knobs.cache.dir = cache
            yield
    finally:
        driver._active = before
        attention_forward.device_caches.pop(stand_in, None)


class _Target(DriverBase):  # type: ignore[misc]  # Triton has no stubs
    """A driver of no GPU."""

    def __init__(self, arch: Arch) -> None:
        major, minor = arch.capability
        self._gpu_target = GPUTarget("cuda", 10 * major + minor, 32)

    @classmethod
    def is_active(cls) -> bool:
        """Never chosen by Triton itself."""
        return False

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._gpu_target

    def get_current_device(self) -> Any:
        """Itself: a key of the JIT's cache that no GPU has."""
        return self

    def get_current_stream(self, device: Any) -> int:
        """Nothing is launched."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Nothing is launched."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing is launched."""
        return ty

    def get_benchmarker(self) -> Any:
        """Nothing is launched."""
        raise NotImplementedError
