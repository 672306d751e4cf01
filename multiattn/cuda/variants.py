"""The rungs of the CUDA backend, best first: points on named axes, one kernel template."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from multiattn.arch import ARCHS
from multiattn.backend import Plan, Variant
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


def flags_of(plan: Plan) -> Mapping[str, Any]:
    """The flags of a Plan's variant."""
    return next(dict(variant.flags) for variant in VARIANTS if variant.name == plan.variant)
