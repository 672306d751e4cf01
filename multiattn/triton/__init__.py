"""The Triton backend: kernels for both directions, each reading through TMA descriptors or through pointers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from multiattn.layout import VECTOR_BYTES
from multiattn.mask import KINDS
from multiattn.packed import TILE_LISTS
from multiattn.plan.arch import ARCHS, GPU_ARCHS, Arch
from multiattn.plan.backend import Backend, Launcher, Op, Plan, Variant, bytes_of_areas, later
from multiattn.plan.ladder import rung_variants
from multiattn.plan.support import Capability, Reason
from multiattn.plan.toolchain import probe_gpu, probe_release, version_of
from multiattn.triton import configs, decode_configs, gluon_backward_configs, gluon_configs, gluon_two_pass_configs
from multiattn.triton.candidates import candidates
from multiattn.triton.configs import TritonConfig, TritonTwoPassConfig
from multiattn.triton.hashing import hashing
from multiattn.triton.ladder import STEPS
from multiattn.triton.rules import rules_of

OLDEST, NEWEST = (3, 6), (3, 9)
"""The oldest and newest Triton that this was run with; in others the interpreter and the descriptors differ."""


def _versions() -> Mapping[str, str | None]:
    return {"triton": version_of("triton"), "torch": torch.__version__}


def _probe_module() -> tuple[Reason, ...]:
    return probe_release("triton", "triton", OLDEST, NEWEST, "pip install 'multiattn[triton]'")


def _probe_jit() -> tuple[Reason, ...]:
    if reasons := _probe_module():
        return reasons
    from triton import knobs

    if not knobs.runtime.interpret:
        return ()
    hint = "unset it before Python starts; on CPU tensors kernels are interpreted without it"
    got, allowed = "TRITON_INTERPRET=1", "TRITON_INTERPRET unset, to compile kernels"
    return (Reason(code="host", got=got, allowed=allowed, hint=hint),)


def _probe(arch: Arch) -> tuple[Reason, ...]:
    if not arch.is_gpu:
        return _probe_module()
    return (*_probe_jit(), *probe_gpu())


TMA_ARCHS = tuple(name for name in GPU_ARCHS if ARCHS[name].capability >= (9, 0))
"""Arches with a Tensor Memory Accelerator."""

_THROUGH_POINTERS = Capability(
    arches=("cpu", *GPU_ARCHS),
    masks=KINDS,
    sinks=True,
    scores=True,
    block_masks=16,
    score_gradients=True,
    packing=True,
)
# cuTensorMapEncodeTiled: address and strides are multiples of 16 bytes, and no stride is zero. A Problem has one
# alignment for all tensors, so this also holds for those that are read through pointers. A map knows one length: a tile
# at the end of a packed sequence would have rows of the next one.
_THROUGH_DESCRIPTORS = replace(
    _THROUGH_POINTERS, arches=("cpu", *TMA_ARCHS), alignment=VECTOR_BYTES, zero_strides=False, packing=False
)


def _gluon_variant() -> Variant:
    return Variant(
        name=gluon_configs.VARIANT,
        summary="Gluon for Hopper: a warp that loads by TMA, warpgroups that compute by wgmma",
        capability=replace(
            _THROUGH_DESCRIPTORS,
            arches=("cpu", *gluon_configs.ARCHES),
            block_masks=0,
            packing=True,
            arch_hint="for Hopper's wgmma and TMA, and a CPU that interprets it; other variants run elsewhere",
        ),
        config_type=gluon_configs.GluonConfig,
        rules=rules_of(gluon_configs.VARIANT),
        workspace=gluon_configs.workspace,
        fits=gluon_configs.why_not_fit,
    )


def _split_variant() -> Variant:
    return Variant(
        name=decode_configs.VARIANT,
        summary="decode: query heads that share keys are rows of one tile, keys divided among blocks, parts merged by "
        "a second kernel",
        capability=replace(_THROUGH_POINTERS, block_masks=0, packing=False, caches=True),
        config_type=decode_configs.TritonSplitConfig,
        rules=rules_of(decode_configs.VARIANT),
        workspace=decode_configs.workspace,
        settle=decode_configs.settle,
        fits=decode_configs.why_not_fit,
    )


def _backward_variant(*, one_pass: bool, descriptor: bool) -> Variant:
    """`atomic` or `two_pass`, which read what they stream through TMA descriptors or through pointers."""
    name = ("" if descriptor else "pointer_") + ("atomic" if one_pass else "two_pass")
    access = "TMA descriptors" if descriptor else "pointers: any stride, any alignment"
    return Variant(
        name=name,
        summary=("one pass over the keys, dq summed up in any order" if one_pass else "dq, then dk and dv")
        + f"; through {access}",
        capability=_THROUGH_DESCRIPTORS if descriptor else _THROUGH_POINTERS,
        config_type=TritonConfig if one_pass else TritonTwoPassConfig,
        rules=rules_of(name),
        flags=(("one_pass", one_pass), ("descriptor", descriptor)),
        deterministic=not one_pass,
        workspace=bytes_of_areas(*((("delta", "dq_sum"), ("key_list",)) if one_pass else (("delta",), TILE_LISTS))),
        fits=configs.why_not_fit_backward,
    )


_GLUON_BACKWARD = replace(
    _THROUGH_DESCRIPTORS,
    arches=("cpu", *gluon_configs.ARCHES),
    score_gradients=False,
    block_masks=0,
    packing=True,
    arch_hint="for Hopper's wgmma and TMA, and a CPU that interprets it; other variants run elsewhere",
)


def _gluon_backward_variant() -> Variant:
    return Variant(
        name=gluon_configs.VARIANT,
        summary="Gluon for Hopper, one pass over the keys: warpgroups of keys, one of dq, which is summed up in any "
        "order, a warp that loads by TMA",
        capability=replace(_GLUON_BACKWARD, head_dim_max=gluon_backward_configs.HEAD_DIM_MAX),
        config_type=gluon_backward_configs.GluonBackwardConfig,
        rules=rules_of(gluon_backward_configs.RULES),
        deterministic=False,
        workspace=gluon_backward_configs.workspace,
        fits=gluon_backward_configs.why_not_fit,
    )


def _gluon_two_pass_variant() -> Variant:
    return Variant(
        name=gluon_backward_configs.TWO_PASS,
        summary="Gluon for Hopper: dq, then dk and dv, each by two warpgroups and a warp that loads by TMA",
        capability=replace(_GLUON_BACKWARD, scores=True),
        config_type=gluon_two_pass_configs.GluonTwoPassConfig,
        rules=rules_of(gluon_backward_configs.TWO_PASS_RULES),
        workspace=gluon_two_pass_configs.workspace,
        fits=gluon_two_pass_configs.why_not_fit,
    )


def _prepare(plan: Plan) -> Launcher:
    if plan.arch.is_gpu:
        hashing()
    launcher: Launcher = later("multiattn.triton.launch", "prepare")(plan)
    return launcher


def _op(*variants: Variant) -> Op:
    return Op(
        variants=variants,
        prepare=_prepare,
        compile_ahead=later("multiattn.triton.compile", "compile_ahead"),
        export=later("multiattn.triton.compile", "export_plan"),
        candidates=candidates,
    )


BACKEND = Backend(
    name="triton",
    summary="Triton: plain triton.language, and Gluon on Hopper",
    probe=_probe,
    probe_compiler=_probe_jit,
    versions=_versions,
    forward=_op(
        _split_variant(),
        _gluon_variant(),
        *rung_variants(
            STEPS,
            TritonConfig,
            capability_of=lambda step: _THROUGH_DESCRIPTORS if step.descriptor else _THROUGH_POINTERS,
            rules_of=rules_of,
            fits=configs.why_not_fit,
            workspace=bytes_of_areas((), ("query_list",)),
        ),
    ),
    backward=_op(  # Gluon's first, then two passes: the faster ones where both were measured
        _gluon_backward_variant(),
        _gluon_two_pass_variant(),
        _backward_variant(one_pass=False, descriptor=True),
        _backward_variant(one_pass=True, descriptor=True),
        _backward_variant(one_pass=False, descriptor=False),
        _backward_variant(one_pass=True, descriptor=False),
    ),
)
