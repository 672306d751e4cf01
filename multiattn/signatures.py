"""Types of the public calls' options, for type checkers alone: each option once, for all overloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from multiattn.mask import Window
from multiattn.operands import ScoreMod
from multiattn.plan.backend import BackendName

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Common(TypedDict, total=False):
    """Options of every call."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    sinks: torch.Tensor | None
    backend: BackendName
    variant: str | None


class FmhaOptions(Common, total=False):
    """Options of `multiattn.fmha`, and of `multiattn.fmha_varlen` beside its lengths."""

    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    dropout_p: float
    dropout_seed: int | torch.Tensor | None
    deterministic: bool | None


class CacheOptions(Common, total=False):
    """Options of `multiattn.fmha_kvcache` beside its lengths."""

    page_table: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    num_splits: int | None
    out: torch.Tensor | None
