"""The Triton backend: kernels for both directions, each reading through TMA descriptors or through pointers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from multiattn.plan.arch import Arch
from multiattn.plan.backend import Backend, Direction, Launcher, Op, Plan, Variant, later
from multiattn.plan.ladder import rung_variants
from multiattn.plan.support import Reason
from multiattn.plan.toolchain import probe_gpu, probe_release, version_of
from multiattn.triton import (
    decode,
    gluon_backward,
    gluon_forward,
    gluon_twin,
    gluon_two_pass,
    plain,
    plain_backward,
    stored_backward,
)
from multiattn.triton.families import candidates
from multiattn.triton.hashing import hashing
from multiattn.triton.ladder import STEPS
from multiattn.triton.rules import rules_of

GLUON_VARIANTS = (gluon_backward.VARIANT, gluon_two_pass.VARIANT)
"""Variants of Gluon kernels; the first is of both directions."""
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


_ON_HOPPER = replace(
    plain.THROUGH_DESCRIPTORS,
    arches=("cpu", *gluon_forward.ARCHES),
    packing=True,
    block_masks=0,
    packed_blocks=0,
    arch_hint="for Hopper's wgmma and TMA, and a CPU that interprets it; other variants run elsewhere",
)
_HOPPER_BACKWARD = replace(_ON_HOPPER, score_gradients=False)


_FORWARD = (
    decode.FAMILY.variant(
        decode.VARIANT,
        rules=rules_of(decode.VARIANT),
        summary="decode: query heads that share keys are rows of one tile, keys divided among blocks, parts merged by "
        "a second kernel",
        capability=replace(
            plain.CAPABILITY,
            head_dim_max=decode.HEAD_DIM_MAX,
            block_masks=0,
            packed_blocks=0,
            packing=False,
            caches=True,
            stored=True,
        ),
    ),
    gluon_forward.FAMILY.variant(
        gluon_forward.VARIANT,
        rules=rules_of(gluon_forward.VARIANT),
        summary="Gluon for Hopper: a warp that loads by TMA, warpgroups that compute by wgmma",
        capability=replace(_ON_HOPPER, block_masks=64, packed_blocks=64),
    ),
    gluon_twin.FAMILY.variant(
        gluon_twin.VARIANT,
        rules=rules_of(gluon_twin.VARIANT),
        summary="Gluon for Hopper and wide heads: two warpgroups of the same rows, each with half of the outputs, take "
        "turns at blocks of keys; a warp that loads by TMA",
        capability=replace(_ON_HOPPER, head_dim_max=plain.WIDE_CAPABILITY.head_dim_max),
    ),
    *rung_variants(
        STEPS,
        plain.FAMILY.config,
        capability_of=lambda step: plain.WIDE_CAPABILITY,
        rules_of=rules_of,
        fits=plain.why_not_fit,
        workspace=plain.FAMILY.workspace,
    ),
)
_BACKWARD = (  # Gluon's first, then those whose bits are the same each time: the faster ones where both were measured
    gluon_backward.FAMILY.variant(
        gluon_backward.VARIANT,
        rules=rules_of(gluon_backward.RULES),
        summary="Gluon for Hopper, one pass over the keys: warpgroups of keys, one of dq, which is summed up in any "
        "order, a warp that loads by TMA",
        capability=replace(_HOPPER_BACKWARD, head_dim_max=gluon_backward.HEAD_DIM_MAX, block_masks=64),
        deterministic=False,
    ),
    gluon_two_pass.FAMILY.variant(
        gluon_two_pass.VARIANT,
        rules=rules_of(gluon_two_pass.VARIANT),
        summary="Gluon for Hopper: dq, then dk and dv, each by two warpgroups and a warp that loads by TMA",
        capability=_HOPPER_BACKWARD,
    ),
    stored_backward.FAMILY.variant(
        stored_backward.VARIANT,
        rules=rules_of(stored_backward.VARIANT),
        summary="for wide heads: P and dS of some heads at a time are stored, and gradients are plain products of them",
        capability=stored_backward.CAPABILITY,
    ),
    *(
        plain_backward.FAMILY.variant(
            name,
            rules=rules_of(name),
            summary=summary,
            capability=plain.CAPABILITY if one_pass else plain.WIDE_CAPABILITY,
            flags=(("one_pass", one_pass),),
            deterministic=not one_pass,
            fits=functools.partial(plain_backward.why_not_fit, one_pass=one_pass),
        )
        for name, one_pass, summary in (
            ("two_pass", False, "dq, then dk and dv"),
            ("atomic", True, "one pass over the keys, dq summed up in any order"),
        )
    ),
)


def _prepare(plan: Plan) -> Launcher:
    if plan.arch.is_gpu:
        hashing()
    launcher: Launcher = later("multiattn.triton.launch", "prepare")(plan)
    return launcher


def _op(direction: Direction, variants: tuple[Variant, ...]) -> Op:
    return Op(
        variants=variants,
        prepare=_prepare,
        compile_ahead=later("multiattn.triton.compile", "compile_ahead"),
        export=later("multiattn.triton.compile", "export_plan"),
        candidates=functools.partial(candidates, direction),
    )


BACKEND = Backend(
    name="triton",
    summary="Triton: plain triton.language, and Gluon on Hopper",
    probe=_probe,
    probe_compiler=_probe_jit,
    versions=_versions,
    forward=_op("forward", _FORWARD),
    backward=_op("backward", _BACKWARD),
)
