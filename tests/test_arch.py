"""Occupancy: known values, and what must hold for every arch; and the products, found by name, with sound peaks."""

import pytest

from multiattn.plan.arch import ARCHS, CPU, GPU_ARCHS, GPUS, KIB, Arch, find_gpu, gpu_by_name, occupancy
from multiattn.tune.timing import L2_FLUSH_BYTES


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem_kib", "blocks", "limiter"),
    [
        # Worked out by hand from the granularities.
        ("sm80", 128, 32, 0, 16, "warps"),
        ("sm80", 32, 16, 0, 32, "blocks"),
        ("sm80", 128, 128, 48, 3, "smem"),  # 164 KiB hold 3 blocks of 48 KiB and the system's
        ("sm80", 128, 255, 0, 2, "registers"),  # 255 are handed out as 256
        ("sm80", 256, 255, 96, 1, "registers"),
        ("sm86", 1024, 64, 0, 1, "warps"),  # 48 warps hold no second block of 32
        ("sm89", 128, 40, 99, 1, "smem"),
        ("sm90", 384, 168, 98, 1, "registers"),  # FlashAttention-3's block of three warpgroups
        ("sm90", 256, 128, 227, 1, "smem"),
        ("sm120", 128, 128, 40, 2, "smem"),
        ("sm90", 160, 64, 0, 6, "registers"),  # 5 warps: each partition holds 8 of 8 KiB, so 32 warps, so 6 blocks
        ("sm90", 32, 80, 0, 24, "registers"),  # each partition holds 6 warps of 10 KiB: no 25th lives across two
        ("sm90", 1024, 128, 0, 0, "registers"),
    ],
)
def test_known_occupancy(arch, threads, registers, smem_kib, blocks, limiter):
    found = occupancy(ARCHS[arch], threads, registers, smem_kib * KIB)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    assert found.warps == blocks * -(-threads // 32)
    assert found.share == found.warps / ARCHS[arch].warps_per_sm


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


OTHERS = (
    "none, , NVIDIA, NVIDIA A100-PCIE-40GB, NVIDIA A100 80GB PCIe, NVIDIA A100-SXM4-40GB, "
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb, NVIDIA GeForce RTX 3090 Ti, NVIDIA GeForce RTX 4090 D, "
    "NVIDIA GeForce RTX 4090 Laptop GPU, NVIDIA GeForce RTX 5090 D, NVIDIA GeForce RTX 5090 Laptop GPU, NVIDIA L2, "
    "NVIDIA L4, NVIDIA L40, NVIDIA H100, NVIDIA H100 PCIe, NVIDIA H100 NVL, NVIDIA GH200 480GB, NVIDIA H20, "
    "NVIDIA H200 NVL, NVIDIA GB200, NVIDIA GB100"
)


def test_the_like_of_a_product_is_not_taken_for_it():
    for driver in OTHERS.split(", "):
        assert find_gpu(driver) is None, driver
        with pytest.raises(ValueError, match=r"device: got .*; allowed A100 SXM 80GB, RTX 3090, .*, GB300, GB10"):
            gpu_by_name(driver)
