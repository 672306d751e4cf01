"""The Triton backend: one forward kernel, which reads k and v through TMA descriptors or through pointers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from multiattn.arch import ARCHS, GPU_ARCHS, Arch
from multiattn.backend import Backend, Compiled, Launcher, Op, Plan, Variant
from multiattn.problem import VECTOR_BYTES
from multiattn.support import Capability, Reason
from multiattn.toolchain import probe_gpu, version_of
from multiattn.triton.configs import DESCRIPTOR_RULES, POINTER_RULES, candidates, why_not_fit

OLDEST, NEWEST = (3, 6), (3, 9)
"""Triton versions that this was run with; the interpreter and the descriptors differ outside of them."""


def _prepare(plan: Plan) -> Launcher:
    from multiattn.triton.launch import prepare

    return prepare(plan)


def _compile(plan: Plan) -> Compiled:
    from multiattn.triton.compile import compile_plan

    return compile_plan(plan)


def _versions() -> Mapping[str, str | None]:
    return {"triton": version_of("triton"), "torch": torch.__version__}


def _probe_module() -> tuple[Reason, ...]:
    allowed = f"triton {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    version = version_of("triton")
    if version is None or importlib.util.find_spec("triton") is None:
        return (Reason(code="module", got="no triton", allowed=allowed, hint="pip install multiattn[triton]"),)
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST:
        return (Reason(code="module", got=f"triton {version}", allowed=allowed),)
    return ()


def _probe_jit() -> tuple[Reason, ...]:
    if reasons := _probe_module():
        return reasons
    from triton import knobs

    if not knobs.runtime.interpret:
        return ()
    return (Reason(code="host", got="TRITON_INTERPRET=1", allowed="TRITON_INTERPRET unset, to compile kernels"),)


def _probe(arch: Arch) -> tuple[Reason, ...]:
    if not arch.is_gpu:
        return _probe_module()
    return (*_probe_jit(), *probe_gpu())


TMA_ARCHS = tuple(name for name in GPU_ARCHS if ARCHS[name].capability >= (9, 0))
"""Arches with a Tensor Memory Accelerator."""

BACKEND = Backend(
    name="triton",
    summary="Triton, plain triton.language",
    probe=_probe,
    probe_compiler=_probe_jit,
    versions=_versions,
    forward=Op(
        variants=(
            Variant(
                name="descriptor",
                summary="k and v through TMA descriptors made on the host",
                # cuTensorMapEncodeTiled: address and strides in multiples of 16 bytes, strides not zero. That q, read
                # through pointers, could do with less is not told apart by a Problem.
                capability=Capability(arches=("cpu", *TMA_ARCHS), alignment=VECTOR_BYTES, zero_strides=False),
                rules=DESCRIPTOR_RULES,
                flags=(("descriptor", True),),
                fits=why_not_fit,
            ),
            Variant(
                name="pointer",
                summary="q, k and v through pointers and strides: any stride, any alignment",
                capability=Capability(arches=("cpu", *GPU_ARCHS)),
                rules=POINTER_RULES,
                flags=(("descriptor", False),),
                fits=why_not_fit,
            ),
        ),
        prepare=_prepare,
        compile=_compile,
        candidates=candidates,
    ),
)
