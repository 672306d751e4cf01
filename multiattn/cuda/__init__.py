"""The CUDA backend: raw tensor-core code (wgmma and TMA, mma.sync and cp.async), by NVRTC; emulated on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from multiattn.cuda import tools
from multiattn.cuda.candidates import (
    backward_candidates,
    forward_candidates,
    split_candidates,
    two_pass_candidates,
    wgmma_backward_candidates,
    wgmma_candidates,
)
from multiattn.cuda.split_configs import CudaSplitConfig
from multiattn.cuda.split_wgmma_configs import SplitWgmmaConfig
from multiattn.cuda.variants import BACKWARD_VARIANTS, SPANNING, VARIANTS, is_wgmma
from multiattn.cuda.wgmma_two_pass_configs import WgmmaTwoPassConfig
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Backend, Launcher, Op, Plan, Variant, later
from multiattn.plan.config import Config
from multiattn.problem import Problem


def _prepare(plan: Plan) -> Launcher:
    if plan.arch.is_gpu:
        from multiattn.cuda.launch import prepare

        return prepare(plan)
    from multiattn.cuda.cpu.host import CpuLauncher

    return CpuLauncher(plan)


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
    if variant.config_type in (CudaSplitConfig, SplitWgmmaConfig):
        return split_candidates(variant, problem, arch)
    return (wgmma_candidates if is_wgmma(variant) else forward_candidates)(variant, problem, arch)


def _backward_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
    if variant.config_type is WgmmaTwoPassConfig:
        return two_pass_candidates(variant, problem, arch)
    return (wgmma_backward_candidates if is_wgmma(variant) else backward_candidates)(variant, problem, arch)


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
        candidates=_candidates,
    ),
    backward=Op(
        variants=BACKWARD_VARIANTS,
        prepare=_prepare,
        compile_ahead=_COMPILE_AHEAD,
        export=_EXPORT,
        candidates=_backward_candidates,
    ),
)
