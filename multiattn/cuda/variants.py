"""The variants of the CUDA backend: a forward for Hopper, and rungs: points on named axes, one template for all."""

from __future__ import annotations

from functools import partial

from multiattn.cuda import axes as points
from multiattn.cuda import backward_configs as backward
from multiattn.cuda import configs, split_configs, split_wgmma_configs, wgmma_configs
from multiattn.cuda import wgmma_backward_configs as wgmma_backward
from multiattn.cuda import wgmma_two_pass_configs as wgmma_two_pass
from multiattn.cuda.axes import Axes
from multiattn.cuda.configs import CudaConfig, why_not
from multiattn.cuda.rules.ampere import ATOMIC_RULES, TWO_PASS_RULES, rules_of
from multiattn.cuda.rules.hopper import WGMMA_BACKWARD_RULES, WGMMA_RULES, WGMMA_TWO_PASS_RULES
from multiattn.cuda.rules.split_keys import SPLIT_RULES
from multiattn.cuda.rules.split_wgmma import SPLIT_WGMMA_RULES
from multiattn.layout import VECTOR_BYTES
from multiattn.mask import KINDS
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, Variant, variant_of
from multiattn.plan.support import Capability

_OFFERED = {
    points.SPLIT_Q: "FlashAttention-2: warps split the queries; mma.sync, cp.async, XOR swizzle of q, k and v",
    points.TILED: "head_dim in slices: warps share keys and head_dim; one ring for K and V, XOR swizzle of all",
}


_capability = partial(
    Capability, arches=tuple(ARCHS), masks=KINDS, sinks=True, scores=True, score_gradients=True, packing=True
)
"""The capability of kernels with mma.sync."""

_wgmma_capability = partial(
    Capability, arches=("sm90", "cpu"), alignment=VECTOR_BYTES, masks=KINDS, sinks=True, packing=True
)
"""The same of kernels with wgmma."""

_BLOCKS = {points.SPLIT_Q: 32, points.TILED: 64}
"""The blocks of a block mask by the points that take one: two warps have 16 rows each, four share 16 keys each."""
_BACKWARD_BLOCKS = 32


def _variant(axes: Axes, summary: str, *, only_named: bool) -> Variant:
    return Variant(
        name=axes.name,
        summary=summary,
        capability=_capability(dtypes=axes.dtypes, head_dim_max=axes.head_dim_max, block_masks=_BLOCKS.get(axes, 0)),
        rules=rules_of(axes),
        flags=axes.flags,
        parent=axes.parent.name if axes.parent else None,
        only_named=only_named,
        workspace=configs.workspace,
        config_type=CudaConfig,
        fits=partial(why_not, axes),
    )


WGMMA = Variant(
    name="wgmma",
    summary="Hopper: a warpgroup loads by TMA, others multiply by wgmma; FlashAttention-3",
    capability=_wgmma_capability(scores=True, score_gradients=True),
    rules=WGMMA_RULES,
    workspace=wgmma_configs.workspace,
    config_type=wgmma_configs.WgmmaConfig,
    fits=wgmma_configs.why_not,
)
"""It is on no ladder: it has no flags and no parent."""

SPLIT_KEYS = Variant(
    name="split_keys",
    summary="few queries: heads that share keys are rows of one tile, keys are divided among blocks, a kernel merges",
    capability=_capability(packing=False, caches=True, head_dim_max=512),
    rules=SPLIT_RULES,
    workspace=split_configs.workspace,
    config_type=split_configs.CudaSplitConfig,
    settle=split_configs.settle,
    fits=split_configs.why_not,
)
"""It is on no ladder."""

SPLIT_KEYS_WGMMA = Variant(
    name="split_keys_wgmma",
    summary="Hopper: as split_keys, for more rows: warps load by TMA or gather, warpgroups multiply by wgmma",
    capability=_wgmma_capability(packing=False, scores=True, score_gradients=True, caches=True),
    rules=SPLIT_WGMMA_RULES,
    workspace=split_wgmma_configs.workspace,
    config_type=split_wgmma_configs.SplitWgmmaConfig,
    settle=split_wgmma_configs.settle,
    fits=split_wgmma_configs.why_not,
)
"""It is on no ladder."""

VARIANTS: tuple[Variant, ...] = (
    SPLIT_KEYS_WGMMA,
    SPLIT_KEYS,
    WGMMA,
    *(_variant(axes, summary, only_named=False) for axes, summary in _OFFERED.items()),
    *(_variant(axes, axes.summary, only_named=True) for axes in points.cross_product() if axes not in _OFFERED),
)
"""Those that are offered, best first; then the rest of the cross product, illegal points included."""

SPANNING: tuple[str, ...] = (
    points.SPLIT_Q.name,
    points.TILED.name,
    "split_kv",
    "split_q+share_kv+swizzle_qk",
    "split_q+share_qkv+swizzle_k",
    "split_q+tiling_qk+swizzle_qv",
    "split_q+share_kv+tiling_qkv+swizzle_q",
    "split_kv+share_qkv+swizzle_v",
    "split_kv+share_kv+tiling_qk+swizzle_kv",
    "split_kv+tiling_qkv+swizzle_qk",
    WGMMA.name,
    SPLIT_KEYS.name,
    SPLIT_KEYS_WGMMA.name,
)
"""Variants that keep the contract (sums in fp32): Hopper's kernel, and points that together have every swizzle and all
legal pairs of warps, share and tiling."""

BACKWARD_VARIANTS: tuple[Variant, ...] = (
    Variant(
        name="wgmma",
        summary="Hopper: a warpgroup loads by TMA, others multiply by wgmma; dq, and dk and dv of "
        "divided tiles, are added up in fp32, in any order",
        capability=_wgmma_capability(head_dim_max=128),
        rules=WGMMA_BACKWARD_RULES,
        deterministic=False,
        workspace=wgmma_backward.workspace,
        config_type=wgmma_backward.WgmmaBackwardConfig,
        fits=wgmma_backward.why_not,
    ),
    Variant(
        name="wgmma_two_pass",
        summary="Hopper: as wgmma, but a kernel for dk and dv and one for dq, each gradient in registers",
        capability=_wgmma_capability(scores=True),
        rules=WGMMA_TWO_PASS_RULES,
        workspace=wgmma_two_pass.workspace,
        config_type=wgmma_two_pass.WgmmaTwoPassConfig,
        fits=wgmma_two_pass.why_not,
    ),
    Variant(
        name="atomic",
        summary="FlashAttention-2: one pass over the keys; dq is added up in fp32 by atomics, in any order",
        capability=_capability(block_masks=_BACKWARD_BLOCKS),
        rules=ATOMIC_RULES,
        flags=(("dq", "atomic"),),
        deterministic=False,
        workspace=backward.workspace,
        config_type=backward.BackwardConfig,
        fits=partial(backward.why_not, True),
    ),
    Variant(
        name="two_pass",
        summary="a pass over the queries for dq, then one over the keys for dk and dv: the same bits each time",
        capability=_capability(block_masks=_BACKWARD_BLOCKS),
        rules=TWO_PASS_RULES,
        flags=(("dq", "own_kernel"),),
        workspace=backward.workspace,
        config_type=backward.BackwardConfig,
        fits=partial(backward.why_not, False),
    ),
)


def is_wgmma(made: Plan | Variant) -> bool:
    """True for a Plan or Variant of the kernels for Hopper."""
    return (made.variant if isinstance(made, Plan) else made.name) == WGMMA.name


def axes_of(made: Plan | Variant) -> Axes:
    """The point of a forward Plan or Variant; the kernel for Hopper has none."""
    return Axes(**dict((variant_of(made) if isinstance(made, Plan) else made).flags))
