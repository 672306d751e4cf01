"""A Plan's kernels compiled to run elsewhere, with Triton's own representations on demand.

How a forward kernel is launched is told in `multiattn.triton.bind` without Triton; here it is held against what Triton
made of the same call, so that an emitted kernel whose launch would differ is an error while it is emitted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from multiattn.plan import abi
from multiattn.plan.backend import Exported, Plan
from multiattn.triton.bind import bind
from multiattn.triton.compile import specialise
from multiattn.triton.launch import Call, calls_of
from multiattn.triton.signature import image_of, prove

KINDS = ("ttir", "ttgir", "llir", "ptx")


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """Every kernel of a Plan, compiled afresh; of `kinds` it has `KINDS`. The compiler's own error passes through.

    ValueError where the Binding of a forward kernel is not what Triton would launch, or not what its cubin takes.
    """
    return tuple(_export(call, plan, kinds) for call in calls_of(plan))


def _export(call: Call, plan: Plan, kinds: Sequence[str]) -> Exported:
    begin = time.perf_counter()
    kernel = specialise(call, plan.arch)
    seconds = time.perf_counter() - begin
    cubin, name = kernel.asm["cubin"], kernel.metadata.name
    threads = 32 * kernel.metadata.num_warps  # all, those that the compiler adds to specialise warps included
    binding = None
    if plan.direction == "forward":
        binding = bind(plan, image_of(kernel.metadata))
        prove(binding, call, kernel)
        abi.check(binding, abi.read_entry(cubin, name))
    return Exported(
        kernel=name,
        seconds=seconds,
        cubin=cubin,
        threads=threads,
        dynamic_smem_bytes=kernel.metadata.shared,
        texts={kind: kernel.asm[kind].encode() for kind in KINDS if kind in kinds},
        binding=binding,
    )
