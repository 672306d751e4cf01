"""``python -m multiattn.cuda.sanitize``: the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on the CPU.

A few problems run on heap tensors of exactly their size, so that any access beyond one is an error. With
``--break-bounds`` K is allocated 8 elements too small, which must be found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from multiattn.cuda import BACKEND
from multiattn.cuda.configs import CudaConfig
from multiattn.cuda.emulation.host import INCLUDES, MULTIPROCESSORS, RUNTIME, encode_map
from multiattn.cuda.launches import kernels_of, launches_of
from multiattn.cuda.params import areas_of, struct_of
from multiattn.cuda.source import Kernel, files_reached, translation_unit
from multiattn.cuda.tools import GXX, gxx_version, probe_host, run_compiler
from multiattn.cuda.variants import SPANNING, WGMMA
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.plan.abi import WORKSPACE, pack
from multiattn.plan.arch import CPU
from multiattn.plan.backend import Plan, make_plan
from multiattn.problem import Problem
from multiattn.run import cache

_FLAGS = ("-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
          "-Wno-unknown-pragmas")  # fmt: skip
_SINGLE_STAGE = CudaConfig(tile_m=64, tile_n=32, warps=2, stages=1, q_in_registers=True)
_HOPPER = (
    WgmmaConfig(tile_m=128, tile_n=32, pingpong=True, q_slots=2),
    WgmmaConfig(tile_m=128, tile_n=48, stages=3, scheduler="static", q_in_registers=True, exp2_fma_fraction=0.25),
    WgmmaConfig(tile_m=128, tile_n=16, cluster=2, scheduler="one_tile", lazy_max=True, tma_store=False),
)
_HALVES, _FLOATS, _OUTPUT, _WORKSPACE, _ZEROS = range(5)  # emulation/sanitize_main.h has the same


def sanitized_plans() -> tuple[Plan, ...]:
    """Ragged lengths, padded and unpadded head_dim, both masks, GQA, element loads, one stage and two, scale signs.

    And points of the forward's ladder whose buffers are shared, on a head_dim whose last slice is not whole; and the
    kernel for Hopper with each scheduler, in a cluster, and with the output from shared memory and from registers.
    """
    make = Problem.contiguous
    causal = make(batch=2, heads_q=2, heads_kv=1, seq_q=37, seq_kv=101, head_dim=64, dtype="fp16", causal=True)
    padded = make(batch=1, heads_q=2, seq_q=70, seq_kv=33, head_dim=72, dtype="bf16", scale=-0.1)
    empty_rows = make(batch=1, heads_q=1, seq_q=90, seq_kv=50, head_dim=40, dtype="fp16", causal=True, scale=0.0)
    unaligned = replace(padded, alignment=2)
    forward = [make_plan(BACKEND, problem, CPU) for problem in (causal, padded, empty_rows, unaligned)]
    sliced = make(batch=1, heads_q=1, seq_q=37, seq_kv=70, head_dim=136, dtype="fp16", causal=True, scale=-0.1)
    wide = make(batch=1, heads_q=1, seq_q=20, seq_kv=90, head_dim=328, dtype="bf16")
    rungs = [make_plan(BACKEND, sliced, CPU, variant=name) for name in SPANNING if "share" in name]
    rungs += [make_plan(BACKEND, wide, CPU), make_plan(BACKEND, replace(wide, alignment=2), CPU)]
    hopper = [
        make_plan(BACKEND, problem, CPU, variant=WGMMA.name, config=config)
        for problem, config in zip((causal, padded, empty_rows), _HOPPER, strict=True)
    ]
    backward = [
        make_plan(BACKEND, problem, CPU, direction="backward", variant=variant.name)
        for variant in BACKEND.backward.variants
        for problem in (causal, unaligned, empty_rows)
    ]
    return (*forward, make_plan(BACKEND, causal, CPU, config=_SINGLE_STAGE), *rungs, *hopper, *backward)


def run(plans: Sequence[Plan], *, missing_elements: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `plans` in the sanitized program, K `missing_elements` too small; returncode 0 when all is clean."""
    kernels = list(dict.fromkeys(kernel for plan in plans for kernel in kernels_of(plan)))
    lines = "".join(_line(plan, kernels, missing_elements) for plan in plans)
    return subprocess.run([str(_build(kernels))], input=lines, capture_output=True, text=True)


def _line(plan: Plan, kernels: Sequence[Kernel], missing_elements: int) -> str:
    """One line of the program's stdin; emulation/sanitize_main.h says what is in it."""
    struct, launches = struct_of(plan, has_dlse=True), launches_of(plan)
    numbers: list[int] = [len(launches)]
    for launch in launches:
        kernel = launch.kernel
        numbers += (
            kernels.index(kernel),
            launch.grid(MULTIPROCESSORS),
            kernel.threads,
            kernel.smem_bytes,
            kernel.cluster,
        )
    tensors = _tensors(plan, missing_elements)
    numbers.append(len(tensors))
    for name, (size, kind) in tensors.items():
        places = [at for at, tensor in struct.pointers.items() if tensor == name]
        places += [
            at for at, tensor_map in struct.maps.items() if tensor_map.tensor == name
        ]  # it starts with the address
        numbers += (size, kind, len(places), *places)
    params = pack(struct, dict.fromkeys(struct.pointers.values(), 0), lambda of, address: encode_map(of, 0))
    return f"{params.hex()} {' '.join(map(str, numbers))}\n"


def _tensors(plan: Plan, missing_elements: int) -> dict[str, tuple[int, int]]:
    """Bytes and kind of every tensor of a launch, by its field of the parameter struct."""
    problem = plan.problem
    rows_q = problem.batch * problem.heads_q * problem.seq_q
    rows_kv = problem.batch * problem.heads_kv * problem.seq_kv
    q, kv, statistic = rows_q * problem.head_dim * 2, rows_kv * problem.head_dim * 2, rows_q * 4
    inputs = {"q": (q, _HALVES), "k": (kv - 2 * missing_elements, _HALVES), "v": (kv, _HALVES)}
    if plan.direction == "forward":
        counter = {WORKSPACE: (plan.workspace_bytes, _ZEROS)} if plan.workspace_bytes else {}
        return {**inputs, "out": (q, _OUTPUT), "lse": (statistic, _WORKSPACE), **counter}
    tensors = {
        **inputs,
        **dict.fromkeys(("out", "dout"), (q, _HALVES)),
        **dict.fromkeys(("lse", "dlse"), (statistic, _FLOATS)),
        **{name: (size, _OUTPUT) for name, size in (("dq", q), ("dk", kv), ("dv", kv))},
    }
    return tensors | {name: (size, _WORKSPACE) for name, size in areas_of(plan).items()}


def _build(kernels: Sequence[Kernel]) -> Path:
    """The sanitized program with these kernels, from the disk cache or built now."""
    table = ", ".join(f"multiattn::emulation::Kernel({kernel.name})" for kernel in kernels)
    source = (
        f'#include "block.h"\n{translation_unit(kernels)}\n'
        f"const multiattn::emulation::Kernel kernels[] = {{{table}}};\n"
        '#include "sanitize_main.h"\n'
    )
    reached = {**files_reached(source, INCLUDES)}
    for path in RUNTIME:
        reached[path.name] = path.read_text()
        reached |= files_reached(reached[path.name], INCLUDES)
    parts = (source, *_FLAGS, f"{GXX} {gxx_version()}")
    key = cache.key_of((*parts, *(text for name in sorted(reached) for text in (name, reached[name]))))
    return cache.fetch(key, ".sanitized", lambda path: _compile(source, path))


def _compile(source: str, made: Path) -> None:
    includes = [f"-I{directory}" for directory in INCLUDES]
    command = [GXX, *_FLAGS, *includes, "-o", str(made), *map(str, RUNTIME), "-x", "c++", "-"]
    run_compiler(command, source, scratch=made.parent).check_returncode()


def main() -> int:
    """Run, report, and return the exit status: 0 when all is clean, 1 for a finding, 2 where this cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m multiattn.cuda.sanitize", description=__doc__)
    parser.add_argument("--break-bounds", action="store_true", help="allocate K 8 elements too small: must be found")
    arguments = parser.parse_args()
    if reasons := probe_host():
        print("\n".join(map(str, reasons)), file=sys.stderr)
        return 2
    plans = sanitized_plans()
    done = run(plans, missing_elements=8 if arguments.break_bounds else 0)
    sys.stderr.write(done.stderr)
    if done.returncode:
        return 1
    print("\n".join(f"clean: {plan}" for plan in plans))
    return 0


if __name__ == "__main__":
    sys.exit(main())
