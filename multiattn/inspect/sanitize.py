"""``python -m multiattn.inspect.sanitize``: the kernels on the CPU under AddressSanitizer and UBSan.

A few problems run on tensors of exactly their size, so that any access beyond one is an error. With ``--break-bounds``
K is allocated 8 elements too small, which must be found. With ``--sample`` only three of them run: to build them
takes most of the time.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from multiattn.block_mask import BlockSpec
from multiattn.cuda import BACKEND
from multiattn.cuda.cpu import host
from multiattn.cuda.forward_mma import CudaConfig
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.cuda.instances import kernels_of
from multiattn.cuda.tools import GXX, probe_host
from multiattn.cuda.variants import SPANNING, WGMMA
from multiattn.layout import VECTOR_BYTES, Layout
from multiattn.operands import Operands
from multiattn.plan.arch import CPU
from multiattn.plan.backend import Plan, make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching

_PRELOADED = "MULTIATTN_SANITIZERS_PRELOADED"
"""Set where Python runs with the sanitizers' library, as code that is built with them wants."""
_FLAGS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_SINGLE_STAGE = CudaConfig(tile_m=64, tile_n=32, warps=2, stages=1, q_in_registers=True)
_HOPPER = (
    WgmmaConfig(tile_m=128, tile_n=32, pingpong=True, q_slots=2),
    WgmmaConfig(tile_m=128, tile_n=48, stages=3, scheduler="static", q_in_registers=True),
    WgmmaConfig(tile_m=128, tile_n=16, cluster=2, scheduler="one_tile", lazy_max=True, tma_store=False),
)


def sanitized_plans() -> Iterator[Plan]:
    """Ragged lengths, padded and unpadded head_dim, both masks, GQA, element loads, one stage and two, scale signs.

    And points of the forward's ladder whose buffers are shared, on a head_dim whose last slice is not whole; and the
    kernel for Hopper with each scheduler, in a cluster, and with the output from shared memory and from registers. Its
    forward also has a v narrower than k, and its backward a wider one.
    """
    make = Problem.contiguous
    masked = make(batch=2, heads_q=2, heads_kv=1, seq_q=37, seq_kv=101, head_dim=64, dtype="fp16", causal=True)
    padded = make(batch=1, heads_q=2, seq_q=70, seq_kv=33, head_dim=72, dtype="bf16", scale=-0.1)
    empty_rows = make(batch=1, heads_q=1, seq_q=90, seq_kv=50, head_dim=40, dtype="fp16", causal=True, scale=0.0)
    sliced = make(batch=1, heads_q=1, seq_q=37, seq_kv=70, head_dim=136, dtype="fp16", causal=True, scale=-0.1)
    wide = make(batch=1, heads_q=1, seq_q=20, seq_kv=90, head_dim=328, dtype="bf16")
    unaligned = replace(padded, alignment=2)
    for problem in (masked, padded, empty_rows, unaligned, wide, replace(wide, alignment=2)):
        yield make_plan(BACKEND, problem, CPU)
    yield make_plan(BACKEND, masked, CPU, config=_SINGLE_STAGE)
    for name in SPANNING:
        if "share" in name:
            yield make_plan(BACKEND, sliced, CPU, variant=name)
    for problem, config in zip((masked, padded, empty_rows), _HOPPER, strict=True):
        yield make_plan(BACKEND, problem, CPU, variant=WGMMA.name, config=config)
    narrow = make(batch=1, heads_q=1, seq_q=37, seq_kv=70, head_dim=72, head_dim_v=40, dtype="fp16", causal=True)
    wider = make(batch=1, heads_q=1, seq_q=37, seq_kv=70, head_dim=40, head_dim_v=72, dtype="fp16", causal=True)
    yield make_plan(BACKEND, narrow, CPU, variant=WGMMA.name)
    yield make_plan(BACKEND, wider, CPU, direction="backward", variant=WGMMA.name)
    yield from _listed_plans()
    for variant in BACKEND.backward.variants:
        for problem in (masked, unaligned if variant.capability.alignment < VECTOR_BYTES else padded, empty_rows):
            yield make_plan(BACKEND, problem, CPU, direction="backward", variant=variant.name)


def _listed_plans() -> Iterator[Plan]:
    """Block masks, also of two packed sequences of which one is empty: every list names block 1, in part and whole."""
    for size, length, causal in ((64, 101, True), (128, 200, False)):
        plain = Problem.contiguous(
            batch=2, heads_q=2, heads_kv=1, seq_q=length - 11, seq_kv=length, head_dim=72, causal=causal
        )
        listed = replace(plain, blocks=BlockSpec(size, size, has_full=True), lists=((2, 2, 2), (2, 2, 2, 2)) * 4)
        packed = replace(listed, batch=1, batching=Batching.packed(2), lists=((1, 2, 4), (1, 2, 4, 2)) * 4)
        for problem in (listed, packed):
            yield make_plan(BACKEND, problem, CPU, variant=WGMMA.name)
            if size == 128 or problem is listed:
                yield make_plan(BACKEND, problem, CPU, direction="backward", variant=WGMMA.name)
            if size == 128:
                yield make_plan(BACKEND, problem, CPU, direction="backward", variant="wgmma_two_pass")
        yield make_plan(BACKEND, packed, CPU)
        yield make_plan(BACKEND, packed, CPU, direction="backward", variant="two_pass")


def operands_of(plan: Plan, missing_elements: int) -> Operands:
    """Tensors of a launch, each an allocation of its own; K of too few elements."""

    def ones(layout: Layout) -> torch.Tensor:
        return torch.ones(math.prod(layout.shape), dtype=layout.dtype)

    operands = Operands.like(plan.problem.layouts, ones)
    assert operands.lse is not None
    assert operands.dlse is not None
    operands.lse.fill_(4.0)
    operands.dlse.fill_(4.0)
    rows = plan.problem.seq_q - 3
    for starts in operands.indices[:2]:  # of a packed batch
        if starts is not None:
            starts.copy_(torch.tensor([rows // 2, rows, rows]))  # which is wrong: no row of the first has a list
    return operands._replace(k=operands.k[: operands.k.numel() - missing_elements].clone())


def main() -> int:
    """Run, report, and return the exit status: 0 when all is clean, 1 for a finding, 2 where this cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m multiattn.inspect.sanitize", description=__doc__)
    parser.add_argument("--break-bounds", action="store_true", help="allocate K 8 elements too small: must be found")
    parser.add_argument("--sample", action="store_true", help="one forward, one of Hopper's, one backward")
    options = parser.parse_args()
    if reasons := probe_host():
        print("\n".join(map(str, reasons)), file=sys.stderr)
        return 2
    plans = tuple(sanitized_plans())
    if options.sample:
        plans = tuple({(it.direction, it.variant == WGMMA.name): it for it in reversed(plans)}.values())
    runtime = (it for it in host._RUNTIME_FLAGS if it != "-O2")  # which takes g++ 10 s more with the sanitizers
    optimised = () if options.sample else ("-O1",)  # which warns of more, and takes g++ 5 s more for the sample
    host._KERNEL_FLAGS, host._RUNTIME_FLAGS = (*host._KERNEL_FLAGS, *optimised, *_FLAGS), (*runtime, *_FLAGS)
    path = host.build(list(dict.fromkeys(kernel for plan in plans for kernel in kernels_of(plan))))
    if _PRELOADED in os.environ:
        library = host.load(path)
        for plan in plans:
            host.CpuLauncher(plan, library)(operands_of(plan, 8 if options.break_bounds else 0))
            print(f"clean: {plan}", flush=True)
        return 0
    libraries = [
        subprocess.run([GXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    ours = {"LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", _PRELOADED: "1"}
    command = [sys.executable, "-m", "multiattn.inspect.sanitize", *sys.argv[1:]]
    return int(subprocess.run(command, env={**os.environ, **ours}).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
