"""Occupancy: known values, and what must hold for every arch; and the products, found by name, with sound peaks."""

import random

import pytest

from bench.timing import L2_FLUSH_BYTES
from multiattn.plan.arch import ARCHS, CPU, GPU_ARCHS, GPUS, KIB, Arch, find_gpu, gpu_by_name, occupancy


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem_kib", "blocks", "limiter"),
    [
        # Worked out by hand from the granularities.
        ("sm80", 128, 32, 0, 16, "warps"),
        ("sm80", 32, 16, 0, 32, "blocks"),
        ("sm80", 128, 128, 48, 3, "smem"),  # 164 KiB hold 3 blocks of 48 KiB and the system's
        ("sm80", 128, 255, 0, 2, "registers"),  # 255 are handed out as 256
        ("sm80", 256, 255, 96, 1, "registers"),
        ("sm86", 128, 32, 0, 12, "warps"),
        ("sm86", 1024, 64, 0, 1, "warps"),  # 48 warps hold no second block of 32
        ("sm89", 128, 40, 99, 1, "smem"),
        ("sm90", 384, 168, 98, 1, "registers"),  # FlashAttention-3's block of three warpgroups
        ("sm90", 128, 168, 64, 3, "registers"),
        ("sm90", 256, 128, 227, 1, "smem"),
        ("sm120", 128, 128, 40, 2, "smem"),
        ("sm90", 160, 64, 0, 6, "registers"),  # 5 warps: each partition holds 8 of 8 KiB, so 32 warps, so 6 blocks
        ("sm90", 1024, 128, 0, 0, "registers"),
    ],
)
def test_known_occupancy(arch, threads, registers, smem_kib, blocks, limiter):
    found = occupancy(ARCHS[arch], threads, registers, smem_kib * KIB)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    assert found.warps == blocks * -(-threads // 32)
    assert found.share == found.warps / ARCHS[arch].warps_per_sm


def test_occupancy_by_its_limits():
    """Never more than an SM has, never fewer blocks than a unit less of everything would leave room for."""
    chance = random.Random(3)
    for _ in range(4000):
        arch = ARCHS[chance.choice(GPU_ARCHS)]
        threads, registers = chance.randrange(1, 1025), chance.randrange(1, 256)
        smem = chance.choice((0, chance.randrange(arch.smem_per_block + 2048)))
        found = occupancy(arch, threads, registers, smem)
        asked = f"{arch.name} {threads} threads {registers} registers {smem} bytes: {found}"
        warps = -(-threads // 32)
        assert found.warps <= arch.warps_per_sm, asked
        assert found.blocks <= arch.blocks_per_sm, asked
        assert found.blocks * (smem + KIB) <= arch.smem_per_sm, asked
        assert found.blocks * warps * 32 * registers <= arch.registers_per_sm, asked
        assert (found.blocks == 0) == (smem > arch.smem_per_block or _too_many_registers(warps, registers)), asked
        more = occupancy(arch, min(threads + 32, 1024), min(registers + 8, 255), smem + 128)
        assert more.blocks <= found.blocks, asked
        if found.limiter == "smem":
            assert (found.blocks + 1) * (smem + KIB + 127) > arch.smem_per_sm, asked


def _too_many_registers(warps, registers):
    return -(-warps // 4) * 4 * -(-registers * 32 // 256) * 256 > 65536


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CPU, 128, 32, 0), "arch: got cpu, whose limits are not known; allowed sm80"),
        ((Arch(name="sm75", title="Turing"), 128, 32, 0), "arch: got sm75"),
        ((ARCHS["sm90"], 0, 32, 0), "threads: got 0; allowed 1 to 1024"),
        ((ARCHS["sm90"], 2048, 32, 0), "threads: got 2048"),
        ((ARCHS["sm90"], 128, 256, 0), "registers: got 256; allowed 1 to 255"),
        ((ARCHS["sm90"], 128, 32, -1), "smem_bytes: got -1"),
    ],
)
def test_occupancy_says_what_it_accepts(arguments, message):
    with pytest.raises(ValueError, match=message):
        occupancy(*arguments)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_product_is_its_datasheet(gpu):
    assert gpu.computed_tflops == pytest.approx(gpu.tflops, rel=0.01)
    assert gpu.arch in GPU_ARCHS
    assert gpu.source.startswith("NVIDIA ")
    for name in (gpu.name, *gpu.driver_names):
        assert find_gpu(name) is gpu, name
        assert gpu_by_name(name.lower()) is gpu, name


def test_names_of_products_are_distinct_and_their_l2_is_flushed():
    names = [name.casefold() for gpu in GPUS for name in (gpu.name, *gpu.driver_names)]
    assert len(names) == len(set(names))
    assert 2 * max(gpu.l2_mib or 0 for gpu in GPUS) * KIB**2 <= L2_FLUSH_BYTES


def test_every_gpu_arch_has_rates():
    """Four partitions of 32 FP32 lanes, or 16 in A100; four special-function units each, eight in Blackwell Ultra."""
    assert {name: (ARCHS[name].fp32_rate, ARCHS[name].ex2_rate) for name in GPU_ARCHS} == {
        **dict.fromkeys(GPU_ARCHS, (256, 16)),
        "sm80": (128, 16),
        "sm103": (256, 32),
    }


@pytest.mark.parametrize(
    "driver",
    [
        "none", "", "NVIDIA", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA L2", "NVIDIA L4", "NVIDIA L40", "NVIDIA H100", "NVIDIA H100 PCIe", "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA H200 NVL", "NVIDIA GB200", "NVIDIA GB100",
    ],
)  # fmt: skip
def test_its_slower_and_faster_like_are_not_taken_for_it(driver):
    assert find_gpu(driver) is None
    with pytest.raises(ValueError, match=r"device: got .*; allowed A100 SXM 80GB, RTX 3090, .*, GB300, GB10"):
        gpu_by_name(driver)
