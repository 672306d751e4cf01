"""The CUDA backend: raw tensor-core code (mma.sync, cp.async) compiled by NVRTC; emulated on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from multiattn.backend import Backend, BackwardLauncher, Compiled, Exported, Launcher, Op, Plan
from multiattn.cuda import backward_configs, tools
from multiattn.cuda.configs import candidates
from multiattn.cuda.variants import BACKWARD_VARIANTS, SPANNING, VARIANTS


def _prepare(plan: Plan) -> Launcher:
    if plan.arch.is_gpu:
        from multiattn.cuda.launch import GpuLauncher

        return GpuLauncher(plan)
    from multiattn.cuda.emulation.host import CpuLauncher

    return CpuLauncher(plan)


def _prepare_backward(plan: Plan) -> BackwardLauncher:
    if plan.arch.is_gpu:
        from multiattn.cuda.launch import GpuBackwardLauncher

        return GpuBackwardLauncher(plan)
    from multiattn.cuda.emulation.host import CpuBackwardLauncher

    return CpuBackwardLauncher(plan)


def _compile(plan: Plan) -> tuple[Compiled, ...]:
    from multiattn.cuda.nvrtc import compile_plan

    return compile_plan(plan)


def _export(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    from multiattn.cuda.export import export_plan

    return export_plan(plan, kinds)


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
        compile=_compile,
        export=_export,
        candidates=candidates,
    ),
    backward=Op(
        variants=BACKWARD_VARIANTS,
        prepare=_prepare_backward,
        compile=_compile,
        export=_export,
        candidates=backward_configs.candidates,
    ),
)
