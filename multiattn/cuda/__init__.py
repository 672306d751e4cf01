"""The CUDA backend: raw tensor-core code (wgmma and TMA, mma.sync and cp.async), by NVRTC; emulated on the CPU."""

from __future__ import annotations

from multiattn.cuda import tools
from multiattn.cuda.variants import BACKWARD_VARIANTS, SPANNING, VARIANTS, candidates
from multiattn.plan.backend import Backend, Launcher, Op, Plan, later


def _prepare(plan: Plan) -> Launcher:
    if plan.arch.is_gpu:
        from multiattn.cuda.launch import prepare

        return prepare(plan)
    from multiattn.cuda.cpu.host import CpuLauncher

    return CpuLauncher(plan)


_EXPORT = later("multiattn.cuda.compile", "export_plan")
_COMPILE_AHEAD = later("multiattn.cuda.compile", "compile_ahead")

BACKEND = Backend(
    name="cuda",
    summary="raw CUDA tensor-core code",
    probe=tools.probe,
    probe_compiler=tools.probe_nvrtc,
    versions=tools.versions,
    forward=Op(
        variants=VARIANTS,
        spanning=SPANNING,
        prepare=_prepare,
        compile_ahead=_COMPILE_AHEAD,
        export=_EXPORT,
        candidates=candidates,
    ),
    backward=Op(
        variants=BACKWARD_VARIANTS,
        prepare=_prepare,
        compile_ahead=_COMPILE_AHEAD,
        export=_EXPORT,
        candidates=candidates,
    ),
)
