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
