"""`arch.occupancy` against NVIDIA's own calculator: cuda_occupancy.h of the CUDA runtime's wheel, built by g++."""

import random
import shutil
import subprocess
from importlib import metadata

import pytest

from multiattn.plan.arch import ARCHS, GPU_ARCHS, KIB, MAX_THREADS, SMEM_RESERVED, WARP_THREADS, occupancy

CASES = 2500  # of an arch
FACTORS = {"warps": 1, "registers": 2, "smem": 4, "blocks": 8}  # cudaOccLimitingFactor

# The first line of standard input is a device, every other one a question; a line of standard output is an answer.
# Limits of shared memory are the largest that a kernel can ask for: a block's opt-in, the whole carve-out of an SM.
PROGRAM = """
#include <cuda_occupancy.h>
#include <climits>
#include <cstdio>

int main() {
  cudaOccDeviceProp device;
  int smem_sm, smem_block, smem_default;
  std::scanf("%d %d %d %d %d %d %d %d %d", &device.computeMajor, &device.computeMinor, &device.maxThreadsPerBlock,
             &device.maxThreadsPerMultiprocessor, &device.regsPerMultiprocessor, &device.warpSize, &smem_sm,
             &smem_block, &smem_default);
  device.numSms = 1;
  device.regsPerBlock = device.regsPerMultiprocessor;
  device.sharedMemPerBlock = smem_default;
  device.sharedMemPerBlockOptin = smem_block;
  device.sharedMemPerMultiprocessor = smem_sm;
  device.reservedSharedMemPerBlock = smem_sm - smem_block;

  cudaOccDeviceState state;
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  int threads, registers, smem_static, smem_dynamic;
  while (std::scanf("%d %d %d %d", &threads, &registers, &smem_static, &smem_dynamic) == 4) {
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = smem_static;
    kernel.maxDynamicSharedSizeBytes = smem_dynamic;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.numBlockBarriers = 1;
    cudaOccResult found = {};
    const auto status =
        cudaOccMaxActiveBlocksPerMultiprocessor(&found, &device, &kernel, &state, threads, smem_dynamic);
    std::printf("%d %d %u\\n", status, found.activeBlocksPerMultiprocessor, found.limitingFactors);
  }
}
"""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    """The program above, compiled; skips where a compiler or the header is missing."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        files = []
    header = next((file.locate() for file in files if file.name == "cuda_occupancy.h"), None)
    if header is None:
        pytest.skip("no cuda_occupancy.h: pip install 'nvidia-cuda-runtime>=13,<14'")
    folder = tmp_path_factory.mktemp("occupancy")
    source, program = folder / "occupancy.cpp", folder / "occupancy"
    source.write_text(PROGRAM)
    subprocess.run([compiler, "-O1", "-isystem", str(header.parent), str(source), "-o", str(program)], check=True)
    return program


def ask(program, arch, questions):
    """The header's words on each (threads, registers, static, dynamic): status, blocks, bits of limiting factors."""
    threads_per_sm = arch.warps_per_sm * WARP_THREADS
    limits = (*arch.capability, MAX_THREADS, threads_per_sm, arch.registers_per_sm, WARP_THREADS)
    smem = (arch.smem_per_sm, arch.smem_per_block, 48 * KIB)
    lines = "".join(" ".join(map(str, line)) + "\n" for line in ((*limits, *smem), *questions))
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def draw(chance, arch):
    """A question: any threads and registers, and shared memory of some, one or no block, at and off its granularity."""
    threads = chance.choice(
        (chance.randint(1, MAX_THREADS), WARP_THREADS * chance.randint(1, MAX_THREADS // WARP_THREADS))
    )
    registers = chance.choice((chance.randint(1, 255), 8 * chance.randint(1, 31)))
    most = arch.smem_per_block + 2 * KIB
    smem = chance.choice((0, chance.randint(0, 8 * KIB), chance.randint(0, most), 128 * chance.randint(0, most // 128)))
    near = arch.smem_per_sm // chance.randint(1, arch.blocks_per_sm) - SMEM_RESERVED + chance.randint(-129, 129)
    smem = chance.choice((smem, max(near, 0)))  # where one more block just fits, or just not
    fixed = chance.choice((0, chance.randint(0, min(smem, 48 * KIB))))
    return threads, registers, fixed, smem - fixed


@pytest.mark.parametrize("name", GPU_ARCHS)
def test_occupancy_is_that_of_nvidias_header(name, calculator):
    arch, chance = ARCHS[name], random.Random(name)
    questions = [draw(chance, arch) for _ in range(CASES)]
    answers = ask(calculator, arch, questions)
    assert len(answers) == CASES
    seen = set()
    for (threads, registers, fixed, dynamic), (status, blocks, factors) in zip(questions, answers, strict=True):
        found = occupancy(arch, threads, registers, fixed + dynamic)
        asked = f"{name} {threads} threads {registers} registers {fixed}+{dynamic} bytes: {found}, header {blocks}"
        assert status == 0, f"{asked}: the header refuses it with {status}"
        assert found.blocks == blocks, asked
        assert factors & FACTORS[found.limiter], f"{asked}, limits {factors:#x}"
        seen.add((found.limiter, min(blocks, 2)))
    # Cases that stay clear of a limit would prove nothing about it.
    assert {limiter for limiter, _ in seen} == set(FACTORS), seen
    assert {("smem", 0), ("registers", 0), ("registers", 2), ("smem", 2)} <= seen, seen
