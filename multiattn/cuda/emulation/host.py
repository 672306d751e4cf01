"""Builds kernels for the CPU with g++ and runs them: exact and slow, for truth and debugging.

Every breach that the emulation finds (divergence, deadlock, a missing wait or barrier, an access outside shared memory
or a misaligned one) raises `EmulationError`, which says in which block and thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multiattn.cuda.emulation.tensor_map import encode
from multiattn.cuda.launches import Launch, kernels_of, launches_of, siblings_of
from multiattn.cuda.params import areas_of, struct_of
from multiattn.cuda.source import HOST_INCLUDES, ROOT, Kernel, files_reached, translation_unit
from multiattn.cuda.tools import GXX, gxx_version, run_compiler
from multiattn.plan.abi import TENSOR_MAP_ALIGNMENT, WORKSPACE, TensorMap, pack
from multiattn.plan.backend import Plan, variant_of
from multiattn.problem import Operands
from multiattn.run import cache
from multiattn.run.arguments import pack_areas
from multiattn.run.fork import hold_across_fork

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

    def run(self, params: Any) -> dict[str, Counters]:
        """Run all to their end, each with `params`; what each did, by its symbol."""
        return {launch.kernel.name: self._run(launch, params) for launch in self._launches}

    def _run(self, launch: Launch, params: Any) -> Counters:
        kernel = launch.kernel
        sizes = {"threads": kernel.threads, "smem_bytes": kernel.smem_bytes, "cluster": kernel.cluster}
        counters = run(self._library, kernel.name, params, blocks=launch.grid(MULTIPROCESSORS), **sizes)
        if kernel.overlaps and counters.grid_waits != counters.blocks:
            waiting = f"{counters.grid_waits} of {counters.blocks} blocks wait for earlier grids"
            raise EmulationError(f"{kernel.name}: it is launched to overlap, but {waiting}")
        return counters


class CpuLauncher:
    """A Plan's kernels on the CPU; see `plan.backend.Launcher`. A persistent grid has `MULTIPROCESSORS` blocks."""

    def __init__(self, plan: Plan) -> None:
        self._sequence = _Sequence(plan)
        self._plan = plan
        self._areas: Mapping[str, int] = {}
        self._workspace_bytes = 0
        if plan.direction == "backward":
            self._areas, self._workspace_bytes = pack_areas(areas_of(plan))
        self.counter = torch.zeros(plan.workspace_bytes if plan.direction == "forward" else 0, dtype=torch.uint8)
        """Of tiles, which every launch of a forward leaves at zero."""
        self.counters: Counters | None = None
        """Of the latest launch of a forward."""
        self.counters_by_kernel: dict[str, Counters] = {}
        """Of the latest launch."""

    def __call__(self, operands: Operands) -> None:
        """Run to the end; `EmulationError` for what a GPU would punish. A backward's workspace starts as NaN."""
        struct = struct_of(self._plan, has_dlse=operands.dlse is not None)
        addresses = {name: given.data_ptr() for name, given in operands._asdict().items() if given is not None}
        workspace = torch.full((self._workspace_bytes,), _NAN_BYTE, dtype=torch.uint8)
        addresses |= {name: workspace.data_ptr() + at for name, at in self._areas.items()}
        addresses[WORKSPACE] = self.counter.data_ptr()
        self.counters_by_kernel = self._sequence.run(aligned(pack(struct, addresses, encode_map)))
        if self._plan.direction == "forward":
            (self.counters,) = self.counters_by_kernel.values()


def aligned(data: bytes) -> ctypes.Array[ctypes.c_ubyte]:
    """A copy of a struct's bytes at an address that its alignment in C++ wants."""
    memory = (ctypes.c_ubyte * (len(data) + TENSOR_MAP_ALIGNMENT))()
    at = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
    memory[at : at + len(data)] = list(data)
    return (ctypes.c_ubyte * len(data)).from_buffer(memory, at)


def encode_map(tensor_map: TensorMap, address: int) -> bytes:
    """What the emulation's TMA takes for a CUtensorMap of the memory at `address`."""
    *_, rows, _ = tensor_map.box.extents
    return encode(address, tensor_map.shape[::-1], tensor_map.strides[::-1], rows)


_one_launch_at_a_time = threading.Lock()  # the emulation's state is global to a library
hold_across_fork(_one_launch_at_a_time)


def run(
    library: ctypes.CDLL,
    kernel: str,
    params: Any,
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
