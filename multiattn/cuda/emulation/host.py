"""Builds kernels for the CPU with g++ and runs them: exact and slow, for truth and debugging.

Every breach that the emulation finds (divergence, deadlock, a missing wait or barrier, an access outside shared memory
or a misaligned one) raises `EmulationError`, which says in which block and thread.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from multiattn.backend import Plan
from multiattn.cuda import cache
from multiattn.cuda.configs import CudaConfig, grid_blocks
from multiattn.cuda.params import ForwardParams, make_params, set_pointers
from multiattn.cuda.source import HOST_INCLUDES, ROOT, Kernel, files_reached, kernel_of, translation_unit
from multiattn.cuda.tools import GXX, gxx_version

RUNTIME = tuple(ROOT / "emulation" / name for name in ("block.cpp", "verbs.cpp"))
INCLUDES = (ROOT / "emulation", *HOST_INCLUDES)
# No -march=native: a cache directory may be shared by machines; the emulated mma picks its instructions at load time.
_FLAGS = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
_KERNEL_FLAGS = (*_FLAGS, "-O1")
_RUNTIME_FLAGS = (*_FLAGS, "-O2")
_ERROR_BYTES = 2048


class EmulationError(RuntimeError):
    """A kernel did on the emulated GPU what a GPU would punish with garbage, a fault or a hang."""


class BuildError(RuntimeError):
    """g++ refused a kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What one launch did. Counts are of warps (mma, ldmatrix), chunks (cp_async) and blocks (barriers).

    `bank_conflicts` is how many more wavefronts the ldmatrix took than one per 8x8 matrix.
    """

    blocks: int
    mma: int
    ldmatrix: int
    bank_conflicts: int
    cp_async: int
    barriers: int
    switches: int


class _Counters(ctypes.Structure):
    """Mirrors emulation/block.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in Counters.__slots__)


class CpuLauncher:
    """A kernel built for the CPU; see `multiattn.backend.Launcher`. `counters` is of the latest launch."""

    def __init__(self, plan: Plan) -> None:
        assert isinstance(plan.config, CudaConfig)
        kernel = kernel_of(plan)
        self._library = load(build(_siblings(kernel)))
        self._name = kernel.name
        self._params = make_params(plan.problem, plan.config)
        self._blocks = grid_blocks(plan.config, plan.problem)
        self._threads = plan.config.threads
        self._smem_bytes = kernel.smem_bytes
        self.counters: Counters | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Run to the end; `EmulationError` for what a GPU would punish."""
        params = ForwardParams.from_buffer_copy(self._params)
        set_pointers(params, q, k, v, out, lse)
        self.counters = run(
            self._library,
            self._name,
            params,
            blocks=self._blocks,
            threads=self._threads,
            smem_bytes=self._smem_bytes,
        )


_one_launch_at_a_time = threading.Lock()  # the emulation's state is global to a library


def run(
    library: ctypes.CDLL, kernel: str, params: ctypes.Structure, *, blocks: int, threads: int, smem_bytes: int
) -> Counters:
    """Run the kernel of that name over a grid of `blocks`, with `threads` and `smem_bytes` (bytes) each."""
    counters = _Counters()
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    entry = ctypes.cast(getattr(library, kernel), ctypes.c_void_p)
    with _one_launch_at_a_time:
        failed = library.multiattn_launch(
            entry, ctypes.byref(params), blocks, threads, smem_bytes, ctypes.byref(counters), error, _ERROR_BYTES
        )
    if failed:
        raise EmulationError(f"{kernel}: {error.value.decode()}")
    return Counters(**{name: getattr(counters, name) for name in Counters.__slots__})


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """A library made by `build` or `build_source`."""
    library = ctypes.CDLL(str(path))
    library.multiattn_launch.restype = ctypes.c_int
    library.multiattn_launch.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64,
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64,
    )  # fmt: skip
    return library


def build(kernels: Sequence[Kernel]) -> Path:
    """A shared library with these kernels, from the disk cache or built now."""
    return build_source(translation_unit(kernels))


def build_source(source: str) -> Path:
    """A shared library of a C++ translation unit and the emulation; `BuildError` with g++'s words if it cannot be."""
    objects = [_build_runtime(path) for path in RUNTIME]
    key = _key(source, (*_KERNEL_FLAGS, *(path.name for path in objects)))
    return cache.fetch(key, ".so", lambda path: _compile(source, (*_KERNEL_FLAGS, "-shared"), path, objects))


def _siblings(kernel: Kernel) -> list[Kernel]:
    """All kernels of one head_dim and config: built together, as starting g++ and linking is most of the time."""
    return [
        replace(kernel, dtype=dtype, causal=causal, aligned=aligned)
        for dtype in ("fp16", "bf16")
        for causal in (False, True)
        for aligned in (False, True)
    ]


def _build_runtime(path: Path) -> Path:
    source = path.read_text()
    key = _key(source, _RUNTIME_FLAGS)
    return cache.fetch(key, f".{path.stem}.o", lambda made: _compile(source, (*_RUNTIME_FLAGS, "-c"), made, ()))


def _key(source: str, flags: Sequence[str]) -> str:
    reached = files_reached(source, INCLUDES)
    contents = (text for name in sorted(reached) for text in (name, reached[name]))
    return cache.key_of((source, *flags, f"{GXX} {gxx_version()}", *contents))


def _compile(source: str, flags: Sequence[str], made: Path, objects: Sequence[Path]) -> None:
    includes = (f"-I{directory}" for directory in INCLUDES)
    command = [GXX, *flags, *includes, "-o", str(made), "-x", "c++", "-", "-x", "none", *map(str, objects)]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{GXX} exited with {done.returncode}:\n{done.stderr}")
