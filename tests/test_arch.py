"""Occupancy: known values, and what must hold for every arch."""

import random

import pytest

from multiattn.arch import ARCHS, CPU, GPU_ARCHS, KIB, Arch, occupancy


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
