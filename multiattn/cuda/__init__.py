"""The CUDA backend: raw tensor-core code (wgmma and TMA, mma.sync and cp.async), by NVRTC; emulated on the CPU."""

from __future__ import annotations

import functools

from multiattn.cuda import tools
from multiattn.cuda.variants import BACKWARD_VARIANTS, SPANNING, VARIANTS, candidates
from multiattn.plan.backend import Backend, Launcher, Op, Plan, later


def _prepare(plan: Plan) -> Launcher:
    if plan.arch.is_gpu:
        from multiattn.cuda.launch import prepare

        return prepare(plan)
    from multiattn.cuda.cpu.host import CpuLauncher

    return CpuLauncher(plan)


_op = functools.partial(
    Op,
    prepare=_prepare,
    compile_ahead=later("multiattn.cuda.compile", "compile_ahead"),
    export=later("multiattn.cuda.compile", "export_plan"),
    candidates=candidates,
)

BACKEND = Backend(
    name="cuda",
    summary="raw CUDA tensor-core code",
    probe=tools.probe,
    probe_compiler=tools.probe_nvrtc,
    versions=tools.versions,
    forward=_op(variants=VARIANTS, spanning=SPANNING),
    backward=_op(variants=BACKWARD_VARIANTS),
)
