"""Builds kernels for the CPU with g++ and runs them: exact and slow, for truth and debugging.

Every breach that the emulation finds (divergence, deadlock, a missing wait or barrier, an access outside shared memory
or a misaligned one) raises `EmulationError`, which says in which block and thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from multiattn import cache
from multiattn.abi import TensorMap
from multiattn.backend import Plan, variant_of
from multiattn.cuda.backward_configs import delta_bytes
from multiattn.cuda.emulation.tensor_map import encode
from multiattn.cuda.launches import Launch, kernels_of, launches_of, params_of, siblings_of
from multiattn.cuda.params import (
    BackwardParams,
    ForwardParams,
    aligned_wgmma_params,
    set_backward_pointers,
    set_map,
    set_pointers,
)
from multiattn.cuda.source import HOST_INCLUDES, ROOT, Kernel, files_reached, translation_unit
from multiattn.cuda.tensor_maps import tensor_maps
from multiattn.cuda.tools import GXX, gxx_version, run_compiler
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.fork import hold_across_fork

RUNTIME = tuple(
    ROOT / "emulation" / name for name in ("block.cpp", "verbs.cpp", "hopper.cpp", "warpgroup.cpp", "verbs_sm90.cpp")
)
INCLUDES = (ROOT / "emulation", *HOST_INCLUDES)
# No -march=native: a cache directory may be shared by machines; the emulated mma picks its instructions at load time.
_FLAGS = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
_KERNEL_FLAGS = (*_FLAGS, "-O1")
_RUNTIME_FLAGS = (*_FLAGS, "-O2")
MULTIPROCESSORS = 2
"""Of the emulated GPU, as a persistent grid is told: so each block of it has several tiles."""
_ERROR_BYTES = 2048
_NAN_BYTE = 0xFF  # four of them are a NaN


class EmulationError(RuntimeError):
    """A kernel did on the emulated GPU what a GPU would punish with garbage, a fault or a hang."""


class BuildError(RuntimeError):
    """g++ refused a kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What one launch did.

    Counts are of warps (mma, ldmatrix), warpgroups (wgmma), chunks (cp_async), boxes (tma) and blocks (barriers).
    `bank_conflicts` is how many more wavefronts the ldmatrix took than one per 8x8 matrix.
    """

    blocks: int
    mma: int
    ldmatrix: int
    bank_conflicts: int
    cp_async: int
    barriers: int
    switches: int
    wgmma: int
    tma_loads: int
    tma_stores: int
    grid_waits: int
    """For earlier grids, of which each block of a kernel that overlaps them has one."""


class _Counters(ctypes.Structure):
    """Mirrors emulation/block.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in Counters.__slots__)


class _Sequence:
    """The kernels of a Plan built for the CPU, to be run one after another.

    With those of the same head_dim and config that a next call may want; of a rung, which few ask for, without.
    """

    def __init__(self, plan: Plan) -> None:
        self._library = load(build(kernels_of(plan) if variant_of(plan).only_named else siblings_of(plan)))
        self._launches = launches_of(plan)

    def run(self, params: ctypes.Structure) -> dict[str, Counters]:
        """Run all to their end, each with `params`; what each did, by its symbol."""
        return {launch.kernel.name: self._run(launch, params) for launch in self._launches}

    def _run(self, launch: Launch, params: ctypes.Structure) -> Counters:
        kernel = launch.kernel
        sizes = {"threads": kernel.threads, "smem_bytes": kernel.smem_bytes, "cluster": kernel.cluster}
        counters = run(self._library, kernel.name, params, blocks=launch.grid(MULTIPROCESSORS), **sizes)
        if kernel.overlaps and counters.grid_waits != counters.blocks:
            waiting = f"{counters.grid_waits} of {counters.blocks} blocks wait for earlier grids"
            raise EmulationError(f"{kernel.name}: it is launched to overlap, but {waiting}")
        return counters


class CpuLauncher:
    """The forward of a Plan on the CPU; see `multiattn.backend.Launcher`. `counters` is of the latest launch."""

    def __init__(self, plan: Plan) -> None:
        self._sequence = _Sequence(plan)
        self._template = bytes(params_of(plan))
        self.counters: Counters | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Run to the end; `EmulationError` for what a GPU would punish."""
        params = ForwardParams.from_buffer_copy(self._template)
        set_pointers(params, q, k, v, out, lse)
        (self.counters,) = self._sequence.run(params).values()


class CpuWgmmaLauncher:
    """The forward of a Plan of the kernel for Hopper on the CPU, as `CpuLauncher`; a persistent grid has two blocks."""

    def __init__(self, plan: Plan) -> None:
        assert isinstance(plan.config, WgmmaConfig)
        self._sequence = _Sequence(plan)
        self._template = bytes(params_of(plan))
        self._maps = tensor_maps(plan.problem, plan.config)
        self._workspace_bytes = plan.workspace_bytes
        self.counter = torch.zeros(plan.workspace_bytes, dtype=torch.uint8)
        """Of tiles, which every launch leaves at zero."""
        self.counters: Counters | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Run to the end; `EmulationError` for what a GPU would punish."""
        params = aligned_wgmma_params(self._template)
        set_pointers(params.forward, q, k, v, out, lse)
        tensors = {"q": q, "k": k, "v": v, "out": out}
        for name, tensor_map in self._maps.items():
            set_map(params, name, encode_map(tensor_map, tensors[name].data_ptr()))
        if self._workspace_bytes:
            params.next_tile = self.counter.data_ptr()
        (self.counters,) = self._sequence.run(params).values()


def encode_map(tensor_map: TensorMap, address: int) -> bytes:
    """What the emulation's TMA takes for a CUtensorMap of the memory at `address`."""
    *_, rows, _ = tensor_map.box.extents
    return encode(address, tensor_map.shape[::-1], tensor_map.strides[::-1], rows)


class CpuBackwardLauncher:
    """The backward of a Plan on the CPU; see `multiattn.backend.BackwardLauncher`.

    `counters` is of the latest launch, by kernel.
    """

    def __init__(self, plan: Plan) -> None:
        self._sequence = _Sequence(plan)
        self._template = bytes(params_of(plan))
        self._workspace_bytes = plan.workspace_bytes
        self._dq_sum_at = delta_bytes(plan.problem)
        self.counters: dict[str, Counters] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Run to the end; `EmulationError` for what a GPU would punish. The workspace starts as NaN."""
        workspace = torch.full((self._workspace_bytes,), _NAN_BYTE, dtype=torch.uint8)
        params = BackwardParams.from_buffer_copy(self._template)
        set_backward_pointers(params, q, k, v, out, lse, dout, dlse, dq, dk, dv, workspace, self._dq_sum_at)
        self.counters = self._sequence.run(params)


_one_launch_at_a_time = threading.Lock()  # the emulation's state is global to a library
hold_across_fork(_one_launch_at_a_time)


def run(
    library: ctypes.CDLL,
    kernel: str,
    params: ctypes.Structure,
    *,
    blocks: int,
    threads: int,
    smem_bytes: int,
    cluster: int = 1,
) -> Counters:
    """Run the kernel of that name over a grid of `blocks`, with `threads` and `smem_bytes` (bytes) each.

    `cluster` of them run together.
    """
    counters = _Counters()
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    entry = ctypes.cast(getattr(library, kernel), ctypes.c_void_p)
    with _one_launch_at_a_time:
        failed = library.multiattn_launch(
            entry,
            ctypes.byref(params),
            blocks,
            threads,
            smem_bytes,
            cluster,
            ctypes.byref(counters),
            error,
            _ERROR_BYTES,
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
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int,
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
    return cache.fetch(key, ".so", lambda made: _compile(source, (*_KERNEL_FLAGS, "-shared"), made, objects))


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
    done = run_compiler(command, source, scratch=made.parent)
    if done.returncode:
        raise BuildError(f"{GXX} exited with {done.returncode}:\n{done.stderr}")
