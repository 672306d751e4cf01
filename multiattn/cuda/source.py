"""The source of kernels: the translation unit that makes them, and the files that it reaches."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multiattn.block_mask import BlockSpec
from multiattn.cuda.score import text_of, with_aux
from multiattn.cuda.structs import read_structs, struct_of
from multiattn.plan.abi import Image
from multiattn.plan.arch import Arch
from multiattn.run import cache
from multiattn.score import LoweredScore

ROOT = Path(__file__).parent
DEVICE_INCLUDES = (ROOT / "include", ROOT / "kernels")
HOST_INCLUDES = (ROOT / "cpu" / "include", *DEVICE_INCLUDES)
"""The CPU's `multiattn/ptx.cuh` comes first: a kernel never says which of the two it runs on."""

_STRUCTS = read_structs(ROOT / "include" / "multiattn" / "params.h")
Strides, ListParams = _STRUCTS["Strides"], _STRUCTS["ListParams"]
ForwardParams, WgmmaParams = _STRUCTS["ForwardParams"], _STRUCTS["WgmmaParams"]
SplitParams, SplitWgmmaParams = _STRUCTS["SplitParams"], _STRUCTS["SplitWgmmaParams"]
BackwardParams, WgmmaBackwardParams = _STRUCTS["BackwardParams"], _STRUCTS["WgmmaBackwardParams"]
MaskLists, BitLists, TileLists = (_STRUCTS[it] for it in ("MaskLists", "BitLists", "TileLists"))
SequenceLists = _STRUCTS["SequenceLists"]
Division, CacheScales, RowMax = (_STRUCTS[it] for it in ("Division", "CacheScales", "RowMax"))
StoredHeads, StoredProducts = _STRUCTS["StoredHeads"], _STRUCTS["StoredProducts"]
"""Parameters that come behind the others: with a block mask, of a packed batch, where tiles are divided, or dS is
stored, with P or without; the scales of 8-bit caches; and of a forward that writes the largest score of each row."""

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One kernel: an instance of a template of `kernels/`, with what Python believes about it."""

    name: str
    """Its C symbol, what a profiler shows."""
    header: str
    entry: str
    """The function template that it calls, with its traits as the argument."""
    traits: str
    """C++ type of its constants."""
    params: type[ctypes.Structure]
    """The parameter struct that it takes, of the same name in C++; what `score` reads comes behind it."""
    threads: int
    """Threads of a block."""
    blocks_per_sm: int = 1
    """Blocks on an SM that the compiler must leave registers for."""
    smem_bytes: int = 0
    """Dynamic shared memory of a block."""
    cluster: int = 1
    """Blocks that run together and reach one another's shared memory."""
    overlaps: bool = False
    """It waits by itself for what is before it on the stream, so that it may begin while that ends."""
    wgmma_columns: tuple[int, ...] = ()
    """The widths of its wgmmas: multiples of 8."""
    arch_features: bool = False
    """It has instructions of one arch alone (wgmma), whose code runs on no later one."""
    score: LoweredScore | None = None
    """The expression that changes its scores: among its traits by the name of the struct."""
    slots: tuple[int, ...] = ()
    """The captured tensors of `score` to whose gradients it may add."""
    blocks: BlockSpec | None = None
    """The block mask whose lists it walks over."""
    row_max: bool = False
    """It also writes the largest score of each row, and where is behind `params`."""
    packed: bool = False
    """Its tiles are those that the lists of a packed batch name."""
    lists: type[ctypes.Structure] | None = None
    """Parameters behind those of a kernel whose tiles are divided among blocks, or whose dS is stored, or that has the
    bits of a block mask beside its lists."""

    @property
    def whole_params(self) -> type[ctypes.Structure]:
        """`params`, and what comes behind them."""
        lists, tiles = self.all_lists
        params = with_max(self.params) if self.row_max else self.params
        return with_aux(params, self.score, self.slots, lists, tiles)

    @property
    def all_lists(self) -> tuple[type[ctypes.Structure] | None, type[ctypes.Structure] | None]:
        """The lists behind what an expression has, and those before it."""
        if self.blocks is not None and self.packed:
            return SequenceLists, None
        lists = self.lists if self.blocks is None else self.lists or MaskLists
        return lists, TileLists if self.packed else None

    def target(self, arch: Arch) -> str:
        """NVRTC's name of the target: ``sm_90``, or ``sm_90a`` with the features of that arch."""
        major, minor = arch.capability
        return f"sm_{major}{minor}{'a' if self.arch_features else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLaunch:
    """A kernel and the size of its grid."""

    kernel: Instance
    blocks: int
    """As many as there is work for."""
    is_persistent: bool = False
    """True where a block takes one piece of work after another: then a block per SM will do."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Fields of its parameters that are the launch's own."""

    def grid(self, multiprocessors: int) -> int:
        """Blocks to launch on a device of so many SMs: whole clusters."""
        whole = max(multiprocessors // self.kernel.cluster, 1) * self.kernel.cluster
        return min(self.blocks, whole) if self.is_persistent else self.blocks

    def image(self) -> Image:
        """How its blocks are started."""
        return Image(threads=self.kernel.threads, dynamic_smem_bytes=self.kernel.smem_bytes)


@functools.cache
def with_max(params: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """The struct of a kernel that writes the largest score of each row: C++'s ``WithMax``, by a name of its own."""
    return struct_of(f"{params.__name__}_max", [("plain", params), ("tops", RowMax)])


def translation_unit(kernels: Sequence[Instance]) -> str:
    """C++ that defines `kernels`, and asserts what Python believes about each."""
    parts = [f'#include "{header}"\n' for header in dict.fromkeys(kernel.header for kernel in kernels)]
    parts += [_wgmma(it) for it in sorted({it for kernel in kernels for it in kernel.wgmma_columns})]
    scores = dict.fromkeys((it.score, it.slots) for it in kernels)
    parts += [text_of(score, slots)[1] for score, slots in scores if score is not None]
    parts += dict.fromkeys(map(_params, kernels))
    for kernel in kernels:
        traits, bounds = f"Traits_{kernel.name}", f"{kernel.threads}, {kernel.blocks_per_sm}"
        params = kernel.whole_params
        entry = f"KERNEL({bounds})" if kernel.cluster == 1 else f"CLUSTER_KERNEL({bounds}, {kernel.cluster})"
        parts.append(
            f"using {traits} = {kernel.traits};\n"
            f'static_assert({traits}::SMEM_BYTES == {kernel.smem_bytes}, "smem_bytes of {kernel.name}");\n'
            f'static_assert({traits}::THREADS == {kernel.threads}, "threads of {kernel.name}");\n'
            f"{entry}\n"
            f"{kernel.name}(PARAMETERS(multiattn::{params.__name__}) params) {{\n"
            f"  multiattn::{kernel.entry}<{traits}>(params);\n"
            "}\n"
        )
    return "\n".join(parts)


def _params(kernel: Instance) -> str:
    """A parameter struct, which has a name where others come behind the plain one, and its size."""
    params = kernel.whole_params
    name, size = params.__name__, ctypes.sizeof(params)
    check = f'static_assert(sizeof(multiattn::{name}) == {size}, "params.{name}");\n'
    if params is kernel.params:
        return check
    behind = ["NoScore" if kernel.score is None else text_of(kernel.score, kernel.slots)[0]]
    behind += [it.__name__ for it in reversed(kernel.all_lists) if it is not None]
    plain = kernel.params.__name__
    made = f"WithAux<{', '.join((f'WithMax<{plain}, true>::Type' if kernel.row_max else plain, *behind))}>::Type"
    return f"namespace multiattn {{ using {name} = {made}; }}\n{check}"


def _wgmma(columns: int) -> str:
    """The instructions of `multiattn/wgmma.cuh` for so many columns: a thread holds half of them."""
    count = columns // 2
    places = ", ".join(f'"%{place}"' for place in range(count, count + 6))
    accumulators = ", ".join(f'"+f"(d[{index}])' for index in range(count))
    return f'WGMMA({columns}, "{", ".join(f"%{index}" for index in range(count))}", {places}, {accumulators})\n'


def cache_key(source: str, includes: Sequence[Path], *parts: str) -> str:
    """The key of compiled code in the cache: `source`, all files that it reaches, and `parts`."""
    reached = files_reached(source, includes)
    return cache.key_of((source, *parts, *(text for name in sorted(reached) for text in (name, reached[name]))))


def files_reached(source: str, includes: Sequence[Path]) -> dict[str, str]:
    """Every file that `source` includes by a quoted name, directly or not, by that name: what a cache key must cover.

    Raises FileNotFoundError for a name that is in none of `includes`.
    """
    reached: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        path = next((directory / name for directory in includes if (directory / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"#include {name!r}: in none of {', '.join(map(str, includes))}")
        reached[name] = path.read_text()
        waiting += _INCLUDE.findall(reached[name])
    return reached
