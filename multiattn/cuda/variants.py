"""The rungs of the CUDA backend, best first: points on named axes, one kernel template."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from multiattn.arch import ARCHS
from multiattn.backend import Plan, Variant
from multiattn.cuda import backward_configs as backward
from multiattn.cuda.configs import RULES, why_not
from multiattn.support import Capability

_SPLIT_Q = {"warps": "split_q", "share": "none", "tiling": "none", "swizzle": "qkv"}

VARIANTS: tuple[Variant, ...] = (
    Variant(
        name="split_q",
        summary="FlashAttention-2: warps split the queries; mma.sync, cp.async, XOR swizzle of q, k and v",
        capability=Capability(arches=tuple(ARCHS)),
        rules=RULES,
        flags=tuple(_SPLIT_Q.items()),
        fits=partial(why_not, _SPLIT_Q),
    ),
)

BACKWARD_VARIANTS: tuple[Variant, ...] = (
    Variant(
        name="atomic",
        summary="FlashAttention-2: one pass over the keys; dq is added up in fp32 by atomics, in any order",
        capability=Capability(arches=tuple(ARCHS)),
        rules=backward.ATOMIC_RULES,
        flags=(("dq", "atomic"),),
        deterministic=False,
        workspace=backward.workspace,
        fits=partial(backward.why_not, True),
    ),
    Variant(
        name="two_pass",
        summary="a pass over the queries for dq, then one over the keys for dk and dv: the same bits each time",
        capability=Capability(arches=tuple(ARCHS)),
        rules=backward.TWO_PASS_RULES,
        flags=(("dq", "own_kernel"),),
        workspace=backward.workspace,
        fits=partial(backward.why_not, False),
    ),
)


def flags_of(plan: Plan) -> Mapping[str, Any]:
    """The flags of a Plan's variant."""
    variants = VARIANTS if plan.direction == "forward" else BACKWARD_VARIANTS
    return next(dict(variant.flags) for variant in variants if variant.name == plan.variant)
