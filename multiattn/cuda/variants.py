"""The variants of the CUDA backend: a forward for Hopper, and rungs: points on named axes, one template for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from multiattn.cuda import axes as points
from multiattn.cuda.axes import Axes
from multiattn.cuda.backward_mma import BackwardConfig
from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.backward_wgmma_stored import WgmmaStoredConfig
from multiattn.cuda.backward_wgmma_two_pass import WgmmaTwoPassConfig
from multiattn.cuda.backward_wgmma_wide import WgmmaWideConfig
from multiattn.cuda.decode_mma import CudaSplitConfig
from multiattn.cuda.decode_twin import SplitTwinConfig
from multiattn.cuda.decode_wgmma import SplitWgmmaConfig
from multiattn.cuda.family import FamilyConfig
from multiattn.cuda.forward_mma import CudaConfig
from multiattn.cuda.forward_twin import HEAD_DIM_MAX, TwinConfig
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.cuda.rules.ampere import ATOMIC_RULES, SPLIT_RULES, TWO_PASS_RULES, rules_of
from multiattn.cuda.rules.hopper import (
    SPLIT_WGMMA_RULES,
    WGMMA_BACKWARD_RULES,
    WGMMA_ORDERED_RULES,
    WGMMA_RULES,
    WGMMA_STORED_RULES,
    WGMMA_TWO_PASS_RULES,
)
from multiattn.cuda.rules.hopper_wide import SPLIT_TWIN_RULES, TWIN_RULES, WIDE_BACKWARD_RULES
from multiattn.layout import VECTOR_BYTES
from multiattn.mask import KINDS
from multiattn.plan.arch import ARCHS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.support import Capability
from multiattn.problem import Problem

_OFFERED = {
    points.SPLIT_Q: "FlashAttention-2: warps split the queries; mma.sync, cp.async, XOR swizzle of q, k and v",
    points.TILED: "head_dim in slices: warps share keys and head_dim; one ring for K and V, XOR swizzle of all",
}


_capability = partial(
    Capability,
    arches=tuple(ARCHS),
    masks=KINDS,
    sinks=True,
    row_max=True,
    scores=True,
    score_gradients=True,
    packing=True,
)
"""The capability of kernels with mma.sync."""

_wgmma_capability = partial(
    Capability, arches=("sm90", "cpu"), alignment=VECTOR_BYTES, masks=KINDS, sinks=True, row_max=True, packing=True
)
"""The capability of kernels with wgmma."""

_BLOCKS = {points.SPLIT_Q: 32, points.TILED: 64}
"""The blocks of a block mask by the points that take one: two warps have 16 rows each, four share 16 keys each."""
_BACKWARD_BLOCKS = 32


def _variant(config_type: type[FamilyConfig], *, flags: Mapping[str, Any] | None = None, **more: Any) -> Variant:
    """A variant of a family, whose config answers for it; `more` is of Variant."""
    flags = flags or {}
    return Variant(
        config_type=config_type,
        flags=tuple(flags.items()),
        workspace=lambda problem, config: sum(config.workspace(problem).values()),
        settle=lambda problem, arch, config: config.settled(problem, arch),
        fits=lambda problem, arch, config: config.why_not(problem, arch, flags),
        **more,
    )


def _point(axes: Axes) -> Variant:
    blocks = _BLOCKS.get(axes, 0)
    return _variant(
        CudaConfig,
        name=axes.name,
        summary=_OFFERED.get(axes, axes.summary),
        capability=_capability(
            dtypes=axes.dtypes, head_dim_max=axes.head_dim_max, block_masks=blocks, packed_blocks=blocks
        ),
        rules=rules_of(axes),
        flags=dict(axes.flags),
        parent=axes.parent.name if axes.parent else None,
        only_named=axes not in _OFFERED,
    )


WGMMA = _variant(
    WgmmaConfig,
    name="wgmma",
    summary="Hopper: a warpgroup loads by TMA, others multiply by wgmma; FlashAttention-3",
    capability=_wgmma_capability(scores=True, score_gradients=True, block_masks=64, packed_blocks=64),
    rules=WGMMA_RULES,
)

SPLIT_KEYS = _variant(
    CudaSplitConfig,
    name="split_keys",
    summary="few queries: heads that share keys are rows of one tile, keys are divided among blocks, a kernel merges",
    capability=_capability(packing=False, caches=True, stored=True, head_dim_max=576),
    rules=SPLIT_RULES,
)

SPLIT_KEYS_WGMMA = _variant(
    SplitWgmmaConfig,
    name="split_keys_wgmma",
    summary="Hopper: as split_keys, for more rows: warps load by TMA or gather, warpgroups multiply by wgmma",
    capability=_wgmma_capability(packing=False, scores=True, score_gradients=True, caches=True),
    rules=SPLIT_WGMMA_RULES,
)

_twin_capability = partial(_wgmma_capability, head_dim_max=HEAD_DIM_MAX, scores=True, score_gradients=True)
"""The capability of kernels whose twin warpgroups have half of v's columns each."""

WGMMA_TWIN = _variant(
    TwinConfig,
    name="wgmma_twin",
    summary="Hopper, heads wider than 256: as wgmma, but two warpgroups have half of v's columns each, and take turns "
    "at the weights of both; FlashMLA",
    capability=_twin_capability(),
    rules=TWIN_RULES,
)

SPLIT_KEYS_TWIN = _variant(
    SplitTwinConfig,
    name="split_keys_twin",
    summary="Hopper, heads wider than 256: as split_keys, with the warpgroups of wgmma_twin; v may be in k",
    capability=_twin_capability(packing=False, caches=True),
    rules=SPLIT_TWIN_RULES,
)

VARIANTS: tuple[Variant, ...] = (
    SPLIT_KEYS_WGMMA,
    SPLIT_KEYS_TWIN,
    SPLIT_KEYS,
    WGMMA,
    WGMMA_TWIN,
    *map(_point, _OFFERED),
    *(_point(axes) for axes in points.POINTS if axes not in _OFFERED),
)
"""Variants that are offered, best first; then the other points of the axes."""

SPANNING: tuple[str, ...] = (
    points.SPLIT_Q.name,
    points.TILED.name,
    "split_kv",
    "split_q+swizzle_k",
    "split_q+share_kv",
    "split_q+share_qkv+swizzle_qkv",
    "split_q+tiling_qk",
    "split_q+share_kv+tiling_qkv+swizzle_qkv",
    "split_kv+share_qkv+swizzle_qkv",
    "split_kv+share_kv+tiling_qk",
    "split_kv+tiling_qkv",
    WGMMA.name,
    SPLIT_KEYS.name,
    SPLIT_KEYS_WGMMA.name,
    WGMMA_TWIN.name,
    SPLIT_KEYS_TWIN.name,
)
"""Variants that keep the contract (sums in fp32): Hopper's kernel, and points that together have all legal pairs of
warps, share and tiling, and tensors that are swizzled beside some that are not."""

BACKWARD_VARIANTS: tuple[Variant, ...] = (
    _variant(
        WgmmaBackwardConfig,
        name="wgmma",
        summary="Hopper: a warpgroup loads by TMA, others multiply by wgmma; dq, and dk and dv of "
        "divided tiles, are added up in fp32, in any order",
        capability=_wgmma_capability(head_dim_max=128, scores=True, block_masks=64, packed_blocks=64),
        rules=WGMMA_BACKWARD_RULES,
        deterministic=False,
    ),
    _variant(
        WgmmaStoredConfig,
        name="wgmma_stored",
        summary="Hopper: as wgmma_two_pass, but dS is stored, for some heads at a time, and dq is one product of it",
        capability=_wgmma_capability(scores=True, packing=False),
        rules=WGMMA_STORED_RULES,
    ),
    _variant(
        WgmmaBackwardConfig,
        name="wgmma_ordered",
        summary="Hopper: as wgmma, but tiles of keys wait for their turn to add to dq: the same bits each time",
        capability=_wgmma_capability(head_dim_max=128, scores=True, packing=False),
        rules=WGMMA_ORDERED_RULES,
        flags={"ordered": True},
    ),
    _variant(
        WgmmaTwoPassConfig,
        name="wgmma_two_pass",
        summary="Hopper: as wgmma, but a kernel for dk and dv and one for dq, each gradient in registers",
        capability=_wgmma_capability(scores=True, block_masks=64, packed_blocks=64),
        rules=WGMMA_TWO_PASS_RULES,
    ),
    _variant(
        WgmmaWideConfig,
        name="wgmma_wide",
        summary="Hopper, heads wider than 256: P and dS are stored, for some heads or queries at a time, and each "
        "gradient is one product of them",
        capability=_wgmma_capability(head_dim_max=512, scores=True, packing=False),
        rules=WIDE_BACKWARD_RULES,
    ),
    _variant(
        BackwardConfig,
        name="atomic",
        summary="FlashAttention-2: one pass over the keys; dq is added up in fp32 by atomics, in any order",
        capability=_capability(block_masks=_BACKWARD_BLOCKS, head_dim_max=512),
        rules=ATOMIC_RULES,
        flags={"dq": "atomic"},
        deterministic=False,
    ),
    _variant(
        BackwardConfig,
        name="two_pass",
        summary="a pass over the queries for dq, then one over the keys for dk and dv: the same bits each time",
        capability=_capability(block_masks=_BACKWARD_BLOCKS, packed_blocks=_BACKWARD_BLOCKS, head_dim_max=512),
        rules=TWO_PASS_RULES,
        flags={"dq": "own_kernel"},
    ),
)


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
    """Configs that a sweep times: those that fit and, on paper, may win; some twenty for each variant and problem."""
    kind = cast("type[FamilyConfig]", variant.config_type)
    tried = kind.candidates(variant, problem, arch)
    settled = dict.fromkeys(variant.settle(problem, arch, it) for it in tried)
    return tuple(it for it in settled if not variant.fits(problem, arch, it))
