"""Attention of each kind of mask that `multiattn.integrations.transformers.attend` meets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from multiattn.block_mask import blocks_of
from multiattn.integrations.padding import dense, fmha_padded, packed
from multiattn.integrations.transformers_lazy import LazyMask, lengths_of
from multiattn.kvcache import fmha_kvcache


class Inputs(NamedTuple):
    """A call, but for its mask."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    """transformers' position_bias."""
    options: dict[str, Any]
    """Options of `multiattn.fmha`, but for the mask."""


def band_of(is_causal: bool, sliding_window: int | None) -> dict[str, Any]:
    """`causal` and `window`: transformers' window counts the query's own key, on either side where it is not causal.

    Raises:
        ValueError: For a window that shows nothing.
    """
    if sliding_window is None:
        return {"causal": is_causal}
    if sliding_window < 1:
        raise ValueError(
            f"sliding_window: got {sliding_window}; allowed None for no window, or at least 1, as a query's own key "
            "counts. Set the sliding_window of the model's config"
        )
    return {"causal": is_causal, "window": (sliding_window - 1, None if is_causal else sliding_window - 1)}


def attend_lengths(call: Inputs, mask: LazyMask) -> torch.Tensor:
    """Causal attention over a static cache; a gradient, or a bias beside padding, costs a mask of every score."""
    q, k, v, bias, options = call
    lengths, tokens = lengths_of(mask.told)
    given = (q, k, v) if bias is None else (q, k, v, bias)
    wants_gradient = torch.is_grad_enabled() and any(it.requires_grad for it in given)
    bias = None if bias is None else _as_bias(bias, q)[..., : k.shape[2]]
    is_of_all = bias is None or bias.shape[3] in (1, k.shape[2])  # one of fewer keys is another's, of the last
    if is_of_all and not wants_gradient and (bias is None or tokens is None):
        options = {name: it for name, it in options.items() if name != "deterministic"}
        named = {
            "seqlens_kv": lengths,
            "bias": tokens if bias is None else bias,
            **options,
            **band_of(True, mask.window),
        }
        out: torch.Tensor = fmha_kvcache(q, k, v, **named)
        return out
    out = attend_masked(call, mask.visible())
    return out


def attend_packed(call: Inputs, lengths: tuple[Any, Any, Any, Any], band: dict[str, Any]) -> torch.Tensor:
    """Attention of sequences one after another, with no bias; `lengths` are cu_seqlens, and the longest of each."""
    q, k, v, _, options = call
    batch, _, length, _ = q.shape
    rows = [it.transpose(1, 2).flatten(0, 1) for it in (q, k, v)]
    longest = [
        int(it) if it is not None and not (is_compiling() and isinstance(it, torch.Tensor)) else of.shape[0]
        for it, of in zip(lengths[2:], rows, strict=False)
    ]
    out: torch.Tensor = packed(
        *rows,
        cu_seqlens_q=lengths[0].to(torch.int32),
        cu_seqlens_kv=lengths[1].to(torch.int32),
        max_seqlen_q=longest[0],
        max_seqlen_kv=longest[1],
        **options,
        **band,
    )
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def attend_padded(call: Inputs, mask: torch.Tensor | None, band: dict[str, Any]) -> torch.Tensor:
    """Attention over the first keys that a mask ``[B, n]`` tells of, or over all."""
    q, k, v, bias, options = call
    bias = None if bias is None else _as_bias(bias, q)
    if mask is not None and mask.shape[1] != k.shape[2]:
        keys = mask.shape[1]
        k, v, bias = k[:, :, :keys], v[:, :, :keys], None if bias is None else bias[..., :keys]
    if mask is None or mask.shape[0] == 0:
        return dense(q, k, v, bias=bias, **options, **band)
    if bias is None:
        return fmha_padded(q, k, v, kv_mask=mask, **options, **band)
    is_token = mask.to(torch.bool)

    def hide(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return torch.where(is_token[b, j], score, -torch.inf)

    return dense(q, k, v, bias=bias, score_mod=hide, **options, **band)


def attend_masked(call: Inputs, mask: torch.Tensor, **more: Any) -> Any:
    """Attention with a mask ``[B|1, H|1, Sq|1, Skv]``: bool, or numbers to add; it tells everything."""
    q, k, v, bias, options = call
    options = options | more
    mask = mask[..., : k.shape[2]]
    bias = None if bias is None else _as_bias(bias, q)[..., : k.shape[2]]
    is_bool = mask.dtype == torch.bool
    if bias is None:
        return dense(q, k, v, bias=mask if is_bool else _as_bias(mask, q), **options)
    if is_bool:
        return dense(q, k, v, bias=bias, block_mask=blocks_of(mask.expand(-1, -1, q.shape[2], -1)), **options)
    added = mask.to(torch.float32).expand(q.shape[0], q.shape[1], q.shape[2], -1)

    def add(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + added[b, h, i, j]

    return dense(q, k, v, bias=bias, score_mod=add, **options)


def _as_bias(bias: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return bias if bias.dtype in (q.dtype, torch.float32) else bias.to(q.dtype)
