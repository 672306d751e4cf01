"""Builds kernels for the CPU with g++ and runs them: exact and slow, for truth and debugging.

Every breach that the emulation finds (divergence, deadlock, a missing wait or barrier, an access outside shared memory
or a misaligned one) raises `EmulationError`, which says in which block and thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from multiattn.cuda.family import areas_of, has_counter
from multiattn.cuda.instances import kernels_of, launches_of
from multiattn.cuda.params import argument_of
from multiattn.cuda.source import HOST_INCLUDES, ROOT, Instance, PlannedLaunch, cache_key, translation_unit
from multiattn.cuda.structs import read_structs
from multiattn.cuda.tools import GXX, gxx_version, run_compiler
from multiattn.operands import Operands
from multiattn.packed import TILE_LISTS
from multiattn.plan.abi import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, TensorMap, pack
from multiattn.plan.backend import Plan
from multiattn.progress import NOTE, LongWork
from multiattn.run import cache
from multiattn.run.fork import hold_across_fork
from multiattn.run.launch import pack_areas

_HERE = ROOT / "cpu"
RUNTIME = tuple(_HERE / f"{name}.cpp" for name in ("block", "verbs", "hopper", "warpgroup"))
INCLUDES = (_HERE, *HOST_INCLUDES)
# No -march=native: a cache directory may be shared by machines; the emulated mma picks its instructions at load time.
_FLAGS = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
# A kernel that is optimised takes nearly twice as long to build, and a fifth less to run: its time is the emulation's.
_KERNEL_FLAGS: tuple[str, ...] = (*_FLAGS, "-O0")
_RUNTIME_FLAGS: tuple[str, ...] = (*_FLAGS, "-O2")
_STANDARD_HEADERS = ("algorithm", "cmath", "cstring", "initializer_list")
"""Those that kernels reach."""
MULTIPROCESSORS = 2
"""SMs of the emulated GPU, with a block each: so few that each block of a persistent grid has several tiles."""
_ERROR_BYTES = 2048
_NAN_BYTE = 0xFF  # four of them are a NaN
_NO_SEQUENCE_BYTE = 0x7F  # four of them are the number of no sequence, and no sign that there is none

_RECORDS = read_structs(_HERE / "records.h")
LaunchCounts, _EncodedMap = _RECORDS["LaunchCounts"], _RECORDS["EncodedMap"]


class EmulationError(RuntimeError):
    """A kernel did on the emulated GPU what a GPU would punish with garbage, a fault or a hang."""


class BuildError(RuntimeError):
    """g++ refused a kernel."""


class CpuLauncher:
    """A Plan's kernels on the CPU; see `plan.backend.Launcher`. A persistent grid has `MULTIPROCESSORS` blocks.

    They are built for it alone, or another `library` has them.
    """

    def __init__(self, plan: Plan, library: ctypes.CDLL | None = None) -> None:
        self._library = library or load(build(kernels_of(plan)))
        self._launches = launches_of(plan)
        self._plan = plan
        self._sizes = areas_of(plan)
        self._areas, self._workspace_bytes = pack_areas(self._sizes)
        self._counts = has_counter(plan)
        self.counter = torch.zeros(self._workspace_bytes if self._counts else 0, dtype=torch.uint8)
        """The workspace of a forward: the counter of tiles, which every launch leaves at zero. Nothing of a packed
        batch, whose workspace is new in each launch."""
        self.workspace: dict[str, torch.Tensor] = {}
        """The areas of workspace of the latest launch, bytes."""
        self.counts: dict[str, Any] = {}
        """`LaunchCounts` of each kernel of the latest launch, by its symbol."""

    def __call__(self, operands: Operands) -> None:
        """Run to the end; `EmulationError` for what a GPU would punish. Workspace that is no counter starts as NaN."""
        addresses = {name: given.data_ptr() for name, given in operands.named.items()}
        workspace = self.counter
        if not self._counts:
            workspace = torch.full((self._workspace_bytes,), _NAN_BYTE, dtype=torch.uint8)
            for name in set(TILE_LISTS) & set(self._areas):
                workspace[self._areas[name] :][: self._sizes[name]] = _NO_SEQUENCE_BYTE
        self.workspace = {name: workspace[at:][: self._sizes[name]] for name, at in self._areas.items()}
        addresses |= {name: workspace.data_ptr() + at for name, at in self._areas.items()}
        has_dlse = operands.dlse is not None
        self.counts = {it.kernel.name: self._run(it, addresses, has_dlse) for it in self._launches}

    def _run(self, launch: PlannedLaunch, addresses: Mapping[str, int], has_dlse: bool) -> Any:
        argument = argument_of(launch, self._plan, has_dlse=has_dlse)
        params = aligned(pack(argument, addresses, encode_map))
        kernel, blocks = launch.kernel, launch.grid(MULTIPROCESSORS)
        sizes = {"threads": kernel.threads, "smem_bytes": kernel.smem_bytes, "cluster": kernel.cluster}
        counts = run(self._library, kernel.name, params, blocks=blocks, **sizes)
        if kernel.overlaps and counts.grid_waits != counts.blocks:
            waiting = f"{counts.grid_waits} of {counts.blocks} blocks wait for earlier grids"
            raise EmulationError(f"{kernel.name}: it is launched to overlap, but {waiting}")
        return counts


def aligned(data: bytes) -> ctypes.Array[ctypes.c_ubyte]:
    """A copy of a struct's bytes at an address that its alignment in C++ wants."""
    memory = (ctypes.c_ubyte * (len(data) + TENSOR_MAP_ALIGNMENT))()
    at = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
    memory[at : at + len(data)] = list(data)
    return (ctypes.c_ubyte * len(data)).from_buffer(memory, at)


def encode_map(tensor_map: TensorMap, address: int) -> bytes:
    """The emulation's CUtensorMap of the memory at `address`, which its first 8 bytes hold; zeros outside."""
    *_, rows, columns = tensor_map.box.extents
    sizes, strides, ones = tensor_map.shape[::-1], tensor_map.strides[::-1], (1,) * (len(tensor_map.shape) - 2)
    encoded = _EncodedMap(address, strides, sizes, (columns, rows, *ones), len(sizes))
    return bytes(encoded).ljust(TENSOR_MAP_BYTES, b"\0")


_one_launch_at_a_time = threading.Lock()  # the emulation's state is global to a library
hold_across_fork(_one_launch_at_a_time)


def run(
    library: ctypes.CDLL, kernel: str, params: Any, *, blocks: int, threads: int, smem_bytes: int, cluster: int = 1
) -> Any:
    """Run the kernel of that name over a grid of `blocks`, with `threads` and `smem_bytes` (bytes) each.

    `cluster` of them run together. What they did, as `LaunchCounts`.
    """
    counts = LaunchCounts()
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    entry = ctypes.cast(getattr(library, kernel), ctypes.c_void_p)
    sizes = blocks, threads, smem_bytes, cluster, MULTIPROCESSORS
    work = LongWork(
        f"emulating the CUDA kernel {kernel} on the CPU",
        kind=f"emulating {kernel}",
        total=blocks,
        unit="block",
        note=NOTE,
        count=lambda: counts.blocks,
    )
    with _one_launch_at_a_time, work:
        failed = library.multiattn_launch(
            entry, ctypes.byref(params), *sizes, ctypes.byref(counts), error, _ERROR_BYTES
        )
    if failed:
        raise EmulationError(f"{kernel}: {error.value.decode()}")
    return counts


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """A library made by `build` or `build_source`."""
    library = ctypes.CDLL(str(path))
    library.multiattn_launch.restype = ctypes.c_int
    library.multiattn_launch.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int,
        ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64,
    )  # fmt: skip
    return library


def build(kernels: Sequence[Instance]) -> Path:
    """A shared library with these kernels, from the disk cache or built now."""
    return build_source(translation_unit(kernels))


def build_source(source: str) -> Path:
    """A shared library of a C++ translation unit and the emulation; `BuildError` with g++'s words if it cannot be."""
    with LongWork(f"building CUDA kernels for the CPU with {GXX}", kind="building"):
        objects = [_build(path.read_text(), (*_RUNTIME_FLAGS, "-c"), f".{path.stem}.o") for path in RUNTIME]
        return _build(source, (*_KERNEL_FLAGS, "-shared"), ".so", objects, after_headers=True)


def _build(
    source: str, flags: Sequence[str], suffix: str, objects: Sequence[Path] = (), *, after_headers: bool = False
) -> Path:
    """Compiles `source` and links `objects`. With `after_headers` g++ begins with the standard headers parsed."""
    key = _key(source, flags, objects)

    def make(made: Path) -> None:
        known = ("-include", str(_parsed_headers(_KERNEL_FLAGS, cache.directory()))) if after_headers else ()
        _compile(made, *flags, *known, "-x", "c++", "-", "-x", "none", *map(str, objects), source=source)

    return cache.fetch(key, suffix, make)


def _parsed_headers(flags: tuple[str, ...], directory: Path) -> Path:
    """A header of the standard library's, in the cache `directory` beside what g++ has made of it.

    They are fetched once a process, unless somebody empties the cache meanwhile. To parse them takes half as long as to
    compile a small kernel. A g++ that cannot use what was parsed, as it is another build of its version, reads the
    header.
    """
    header = _fetch_headers(flags, directory)
    if not (header.exists() and header.with_suffix(".h.gch").exists()):
        _fetch_headers.cache_clear()
        header = _fetch_headers(flags, directory)
    return header


@functools.cache
def _fetch_headers(flags: tuple[str, ...], directory: Path) -> Path:
    text = "".join(f"#include <{name}>\n" for name in _STANDARD_HEADERS)
    key = _key(text, flags)

    def write(made: Path) -> None:
        made.write_text(text)

    header = cache.fetch(key, ".h", write)
    cache.fetch(key, ".h.gch", lambda made: _compile(made, *flags, "-x", "c++-header", str(header)))
    return header


def _key(source: str, flags: Sequence[str], objects: Sequence[Path] = ()) -> str:
    return cache_key(source, INCLUDES, *flags, *(path.name for path in objects), f"{GXX} {gxx_version()}")


def _compile(made: Path, *options: str, source: str = "") -> None:
    """Run g++, which writes `made`; BuildError with its words if it cannot."""
    command = [GXX, *(f"-I{directory}" for directory in INCLUDES), "-o", str(made), *options]
    done = run_compiler(command, source, scratch=made.parent)
    if done.returncode:
        raise BuildError(f"{GXX} exited with {done.returncode}:\n{done.stderr}")
