"""Target architectures as data (`Arch`, `Gpu`) and `detect`, the only place that asks the driver anything."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

KIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """One compute capability, or `cpu`: where the kernel sources are interpreted or built for the host.

    Limits are per SM or per block, in bytes where they are sizes; zero where nothing is known or it has no meaning.
    """

    name: str
    title: str
    smem_per_sm: int = 0
    smem_per_block: int = 0
    """Most dynamic shared memory one block can opt in to."""
    warps_per_sm: int = 0
    blocks_per_sm: int = 0
    registers_per_sm: int = 0

    @property
    def smem_reserved(self) -> int:
        """Bytes of shared memory that the system keeps for itself in every block."""
        return self.smem_per_sm - self.smem_per_block

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


def _gpu(name: str, title: str, smem_kib: int, warps: int, blocks: int) -> Arch:
    # CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": a block can have what the
    # SM has less 1 KiB that the system keeps; every one of these has 65536 registers.
    return Arch(
        name=name,
        title=title,
        smem_per_sm=smem_kib * KIB,
        smem_per_block=(smem_kib - 1) * KIB,
        warps_per_sm=warps,
        blocks_per_sm=blocks,
        registers_per_sm=65536,
    )


CPU = Arch(name="cpu", title="host CPU: kernels interpreted or built for the host")

ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        arch.name: arch
        for arch in (
            CPU,
            _gpu("sm80", "Ampere, A100", 164, 64, 32),
            _gpu("sm86", "Ampere, RTX 30, A40", 100, 48, 16),
            _gpu("sm89", "Ada, RTX 40, L4, L40", 100, 48, 24),
            _gpu("sm90", "Hopper, H100, H200", 228, 64, 32),
            _gpu("sm100", "Blackwell, B200", 228, 64, 32),
            _gpu("sm103", "Blackwell, B300", 228, 64, 32),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """How many blocks of a kernel, and warps of theirs, an SM holds at one time; zero where not even one fits."""

    blocks: int
    warps: int
    share: float
    """Of the warps that the SM can hold, 0 to 1."""
    limiter: str
    """What keeps one more block out: blocks, warps, registers or smem."""


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
    fitting = {
        "blocks": arch.blocks_per_sm,
        "warps": arch.warps_per_sm // warps,
        "registers": _blocks_by_registers(arch, warps, registers),
        "smem": arch.smem_per_sm // _round_up(smem_bytes + arch.smem_reserved, SMEM_UNIT),
    }
    limiter = min(fitting, key=lambda name: fitting[name])  # the first of equals
    blocks = fitting[limiter]
    return Occupancy(blocks=blocks, warps=blocks * warps, share=blocks * warps / arch.warps_per_sm, limiter=limiter)


def _blocks_by_registers(arch: Arch, warps: int, registers: int) -> int:
    """Blocks whose warps the register files hold: a warp lives in one partition, whole; a block takes whole fours."""
    of_warp = _round_up(registers * WARP_THREADS, REGISTERS_UNIT)
    if of_warp * _round_up(warps, WARPS_UNIT) > arch.registers_per_sm:
        return 0
    warps_of_partition = arch.registers_per_sm // WARPS_UNIT // of_warp
    return WARPS_UNIT * warps_of_partition // warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Stated peaks of one product, dense, fp16 and bf16 with fp32 accumulation."""

    name: str
    """Part of the name the driver reports."""
    tflops: float
    gbps: float
    source: str


GPUS: tuple[Gpu, ...] = (
    Gpu(name="H200", tflops=989.4, gbps=4800, source="NVIDIA H200 datasheet, SXM, sparse figure halved"),
    Gpu(name="H100 80GB HBM3", tflops=989.4, gbps=3350, source="NVIDIA H100 datasheet, SXM, sparse figure halved"),
    Gpu(name="A100-SXM4-80GB", tflops=312.0, gbps=2039, source="NVIDIA A100 datasheet"),
    Gpu(name="B200", tflops=2250.0, gbps=7700, source="NVIDIA HGX B200 datasheet, sparse figure halved"),
    Gpu(name="RTX 4090", tflops=165.2, gbps=1008, source="NVIDIA Ada GPU architecture whitepaper"),
    Gpu(name="RTX 5090", tflops=209.5, gbps=1792, source="NVIDIA RTX Blackwell GPU architecture whitepaper"),
)


def find_gpu(device_name: str) -> Gpu | None:
    """The row whose name is part of what the driver calls the device; None for a product without a row."""
    return next((gpu for gpu in GPUS if gpu.name in device_name), None)


def by_name(name: str) -> Arch:
    """The row called `name` (``cpu``, ``sm90``); ValueError for a name without one."""
    if name not in ARCHS:
        raise ValueError(f"arch: got {name!r}; allowed {', '.join(ARCHS)}")
    return ARCHS[name]


def detect(device: torch.device) -> Arch:
    """The arch of a tensor's device.

    A GPU without a row comes back under its own name with no limits, so that every backend's capability refuses
    it by name instead of handing it a neighbour's tiles.
    """
    if device.type == "cpu":
        return CPU
    return _detect_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _detect_gpu(index: int) -> Arch:
    if torch.version.hip is not None:
        return Arch(name=torch.cuda.get_device_properties(index).gcnArchName, title="AMD GPU")
    major, minor = torch.cuda.get_device_capability(index)
    name = f"sm{major}{minor}"
    return ARCHS.get(name, Arch(name=name, title="GPU without a row in ARCHS"))
