"""Target architectures as data (`Arch`, `Gpu`) and `detect`, the only place that asks the driver anything."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

KIB = 1024
SMEM_RESERVED = KIB
"""Bytes of an SM's shared memory that the system keeps for itself in every block (CUDA C++ Programming Guide)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """One compute capability, or `cpu`: where the kernel sources are interpreted or built for the host.

    Limits are per SM or per block, in bytes where they are sizes; zero where nothing is known or it has no meaning.
    """

    name: str
    title: str
    smem_per_sm: int = 0
    warps_per_sm: int = 0
    blocks_per_sm: int = 0
    registers_per_sm: int = 0
    fp32_rate: int = 0
    """FP32 FLOP per clock of an SM, a fused multiply-add counted as two."""
    ex2_rate: int = 0
    """Results per clock of an SM's special-function units: ex2, and rcp, rsqrt, sin and the like."""

    @property
    def smem_per_block(self) -> int:
        """Most dynamic shared memory one block can opt in to."""
        return max(0, self.smem_per_sm - SMEM_RESERVED)

    @property
    def is_gpu(self) -> bool:
        """False only for `cpu`."""
        return self.name != "cpu"

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor); ValueError for `cpu`."""
        if not self.is_gpu:
            raise ValueError("cpu has no compute capability")
        number = int(self.name.removeprefix("sm"))
        return number // 10, number % 10


def _gpu(
    name: str, title: str, smem_kib: int, warps: int, blocks: int, *, fp32_rate: int = 256, ex2_rate: int = 16
) -> Arch:
    # CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": every one of these has 65536
    # registers. The rates are those of its table of arithmetic throughput, where a multiply-add is one result; for
    # sm103 NVIDIA's articles on Blackwell Ultra.
    return Arch(
        name=name,
        title=title,
        smem_per_sm=smem_kib * KIB,
        warps_per_sm=warps,
        blocks_per_sm=blocks,
        registers_per_sm=65536,
        fp32_rate=fp32_rate,
        ex2_rate=ex2_rate,
    )


CPU = Arch(name="cpu", title="host CPU: kernels interpreted or built for the host")

ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        arch.name: arch
        for arch in (
            CPU,
            _gpu("sm80", "Ampere, A100", 164, 64, 32, fp32_rate=128),
            _gpu("sm86", "Ampere, RTX 30, A40", 100, 48, 16),
            _gpu("sm89", "Ada, RTX 40, L4, L40", 100, 48, 24),
            _gpu("sm90", "Hopper, H100, H200", 228, 64, 32),
            _gpu("sm100", "Blackwell, B200", 228, 64, 32),
            _gpu("sm103", "Blackwell, B300", 228, 64, 32, ex2_rate=32),
            _gpu("sm120", "Blackwell, RTX 50", 100, 48, 24),
            _gpu("sm121", "Blackwell, DGX Spark", 100, 48, 24),
        )
    }
)
"""Every arch that rules can be written for. To add one: a row here, then per backend its rules."""

GPU_ARCHS: tuple[str, ...] = tuple(name for name, arch in ARCHS.items() if arch.is_gpu)
"""Names of the target architectures: what each backend is compiled for with no GPU."""


# CUDA C++ Programming Guide, "Technical Specifications", and NVIDIA's cuda_occupancy.h: the units in which an SM hands
# out what it has. The same on every arch above.
WARP_THREADS = 32
WARPS_UNIT = 4  # an SM has four partitions, each with a quarter of the registers
REGISTERS_UNIT = 256  # of a warp
SMEM_UNIT = 128  # bytes
MAX_THREADS = 1024  # of a block
MAX_REGISTERS = 255  # of a thread
GRID_MAX = 2**31 - 1  # blocks of a launch, in x


class Occupancy(NamedTuple):
    """How many blocks of a kernel, and warps of theirs, an SM holds at one time; zero where not even one fits."""

    blocks: int
    warps: int
    share: float
    """Resident warps over the most that the SM can hold, 0 to 1."""
    limiter: str
    """The resource that keeps one more block out: blocks, warps, registers or smem."""


def occupancy(arch: Arch, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """The theoretical occupancy of a kernel.

    Args:
        arch: a GPU's row.
        threads: of a block, 1 to 1024.
        registers: of a thread, 1 to 255.
        smem_bytes: shared memory of a block, static and dynamic, without what the system keeps.

    Raises ValueError for anything else.
    """
    if not arch.registers_per_sm:
        raise ValueError(f"arch: got {arch.name}, whose limits are not known; allowed {', '.join(GPU_ARCHS)}")
    for name, value, low, high in (("threads", threads, 1, MAX_THREADS), ("registers", registers, 1, MAX_REGISTERS)):
        if not low <= value <= high:
            raise ValueError(f"{name}: got {value}; allowed {low} to {high}")
    if smem_bytes < 0:
        raise ValueError(f"smem_bytes: got {smem_bytes}; allowed 0 and more")
    warps = -(-threads // WARP_THREADS)
    of_warp = _round_up(registers * WARP_THREADS, REGISTERS_UNIT)
    warps_of_partition = arch.registers_per_sm // WARPS_UNIT // of_warp  # all of a warp lives in one partition
    fitting = {
        "blocks": arch.blocks_per_sm,
        "warps": arch.warps_per_sm // warps,
        "registers": WARPS_UNIT * warps_of_partition // warps,
        "smem": arch.smem_per_sm // _round_up(smem_bytes + SMEM_RESERVED, SMEM_UNIT),
    }
    limiter = min(fitting, key=lambda name: fitting[name])  # the first of equals
    blocks = fitting[limiter]
    return Occupancy(blocks=blocks, warps=blocks * warps, share=blocks * warps / arch.warps_per_sm, limiter=limiter)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Gpu(NamedTuple):
    """One product: what its SMs do per clock, and its stated peak, dense, fp16 and bf16 with fp32 accumulation."""

    name: str
    arch: str
    """Name of its row in `ARCHS`."""
    sms: int
    clock_ghz: float
    """At which the tensor cores reach `tflops`. A kernel that draws less power may run faster, a hotter one slower."""
    tensor_rate: int
    """Dense FLOP per clock of an SM's tensor cores, fp16 and bf16 with fp32 accumulation."""
    gbps: float
    """Bandwidth of device memory, 10^9 bytes per second."""
    l2_mib: int | None
    """None where NVIDIA says nothing that we know of."""
    tflops: float
    """As `source` has it: 10^12 FLOP per second."""
    driver_names: tuple[str, ...]
    """The full names that the driver has for it."""
    source: str

    @property
    def computed_tflops(self) -> float:
        """The peak made of its parts: SMs, FLOP per clock, clock. Within 1 % of `tflops`."""
        return self.sms * self.tensor_rate * self.clock_ghz / 1e3


_HALVED = "sparse figure halved"
_B300 = ("NVIDIA B300", "NVIDIA B300 SXM6 AC")  # AC: air-cooled
# GeForce cards, and the L20, do half as much with fp32 accumulation as with fp16.
_ROWS: tuple[tuple[Any, ...], ...] = (
    # name, arch, SMs, GHz, FLOP/clock/SM, GB/s, L2 MiB, TFLOPS, the driver's name, source
    ("A100 SXM 80GB", "sm80", 108, 1.410, 2048, 2039, 40, 312.0, ("NVIDIA A100-SXM4-80GB",),
     "NVIDIA A100 80GB datasheet; A100 architecture whitepaper"),
    ("RTX 3090", "sm86", 82, 1.695, 512, 936, 6, 71.0, ("NVIDIA GeForce RTX 3090",),
     "NVIDIA Ampere GA102 architecture whitepaper, appendix A"),
    ("RTX 4090", "sm89", 128, 2.520, 512, 1008, 72, 165.2, ("NVIDIA GeForce RTX 4090",),
     "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    ("RTX 5090", "sm120", 170, 2.407, 512, 1792, 96, 209.5, ("NVIDIA GeForce RTX 5090",),
     "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"),
    ("L20", "sm89", 92, 2.537, 512, 864, 96, 119.5, ("NVIDIA L20",),
     "NVIDIA L20 product sheet, as resellers and published measurements quote it"),
    ("L40S", "sm89", 142, 2.490, 1024, 864, 96, 362.05, ("NVIDIA L40S",),
     "NVIDIA L40S datasheet; SMs and L2: Ada GPU architecture whitepaper"),
    ("H100 SXM", "sm90", 132, 1.830, 4096, 3350, 50, 989.4, ("NVIDIA H100 80GB HBM3",),
     f"NVIDIA H100 datasheet, SXM, {_HALVED}; H100 architecture whitepaper"),
    ("H200", "sm90", 132, 1.830, 4096, 4800, None, 989.4, ("NVIDIA H200",),
     f"NVIDIA H200 datasheet, SXM, {_HALVED}"),
    ("B200", "sm100", 148, 1.856, 8192, 7700, 126, 2250.0, ("NVIDIA B200",),
     f"NVIDIA HGX B200 datasheet, {_HALVED}; L2: Blackwell tuning guide; SMs as devices report them"),
    ("B300", "sm103", 148, 1.856, 8192, 7700, None, 2250.0, _B300,
     f"NVIDIA HGX B300 datasheet, {_HALVED}; SMs as devices report them"),
    ("GB300", "sm103", 152, 2.008, 8192, 8000, None, 2500.0, ("NVIDIA GB300",),
     f"NVIDIA GB300 NVL72 datasheet, a 72nd, {_HALVED}; SMs as devices report them"),
    ("GB10", "sm121", 48, 2.543, 1024, 273, 24, 125.0, ("NVIDIA GB10",),
     "NVIDIA DGX Spark datasheet: an eighth of its sparse FP4 figure, as it states no 16-bit one"),
)  # fmt: skip
GPUS = tuple(Gpu(*row) for row in _ROWS)
"""Products with a row, by the table's short names ("H100 SXM", "GB10": DGX Spark)."""


_GPU_OF = {name.casefold(): gpu for gpu in GPUS for name in (gpu.name, *gpu.driver_names)}


def find_gpu(name: str) -> Gpu | None:
    """The row of a product by its short name or by all that the driver calls it, in any case; None without a row.

    No part of a name will do: a B300 is no GB300, and PCIe boards, laptops and MIG slices are slower than their like.
    """
    return _GPU_OF.get(name.casefold())


def gpu_by_name(name: str) -> Gpu:
    """The row that `find_gpu` finds; ValueError for a product without one."""
    if (gpu := find_gpu(name)) is None:
        raise ValueError(f"device: got {name!r}; allowed {', '.join(gpu.name for gpu in GPUS)}")
    return gpu


def by_name(name: str) -> Arch:
    """The row called `name`, in any case; ValueError for a name without one, or that several arches have.

    That is ``cpu``, ``sm90`` or ``sm_90``, the compute capability ``9.0``, or a GPU: ``H100``, ``RTX 4090``, ``4090``.
    """
    if not isinstance(name, str):
        raise TypeError(f'arch must be a string; got {type(name).__name__}; name one as "sm90" or "H100"')
    wanted = _squeezed(name)
    found = ARCHS.get(wanted, ARCHS.get(f"sm{wanted}"))
    if found is not None:
        return found
    arches = {arch for words, arch in _WORDS if wanted in words}
    if len(arches) != 1:
        why = f" (it is of {' and '.join(sorted(arches))})" if arches else ""
        gpus = ", ".join(gpu.name for gpu in GPUS)
        raise ValueError(f"arch: got {name!r}{why}; allowed {', '.join(ARCHS)}, or a GPU, as {gpus}")
    return ARCHS[arches.pop()]


def _squeezed(name: str) -> str:
    """A name without case and without what separates its words: ``sm90`` of ``SM_90``, ``90`` of ``9.0``."""
    return "".join(filter(str.isalnum, name.casefold()))


def _words_of(name: str) -> frozenset[str]:
    """Every run of words of a name, squeezed: ``rtx``, ``4090`` and ``rtx4090`` of ``RTX 4090``."""
    words = re.split(r"[\s-]+", name)
    runs = itertools.combinations(range(len(words) + 1), 2)
    return frozenset(_squeezed("".join(words[first:last])) for first, last in runs)


_WORDS = tuple(
    (_words_of(name), arch)
    for names, arch in (
        *(((gpu.name, *gpu.driver_names), gpu.arch) for gpu in GPUS),
        *((arch.title.split(", "), arch.name) for arch in ARCHS.values() if arch.is_gpu),
    )
    for name in names
)


def detect(device: torch.device) -> Arch:
    """The arch of a tensor's device; ValueError for one that runs nothing.

    A GPU without a row comes back under its own name with no limits, so that every backend's capability refuses
    it by name instead of handing it a neighbour's tiles.
    """
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ValueError(f"device: got {device}; allowed cpu and cuda")
    return _detect_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def gpu_name(index: int) -> str:
    """All that the driver calls a GPU: ``NVIDIA H200``."""
    return torch.cuda.get_device_name(index)


@functools.cache
def _detect_gpu(index: int) -> Arch:
    if torch.version.hip is not None:
        return Arch(name=torch.cuda.get_device_properties(index).gcnArchName, title="AMD GPU")
    major, minor = torch.cuda.get_device_capability(index)
    name = f"sm{major}{minor}"
    return ARCHS.get(name, Arch(name=name, title="GPU without a row in ARCHS"))
