"""Hugging Face transformers: ``attn_implementation="multiattn"``, and ``"multiattn_<backend>"``, after `register()`.

transformers makes one mask for each kind of layer in a forward, by `make_mask`, and hands it to each layer's attention,
`attend`. The mask must be a tensor, and a tensor with an entry for every score costs memory and time. So its shape
carries most of the meaning:

- None: `is_causal` and `sliding_window` of the attention say everything.
- bool ``[B, n, W]``, W times the same: a padding mask of the first n keys. Keys behind them are unused places of a
  static cache. With no row, ``[0, n, W]``, nothing is padding. A W above 1 is a window, as `sliding_window` counts:
  eager attention knows windows only by its masks, and not every model tells its attention of them.
- int32 ``[longest, N + 1, W]``, the same in every row: ``cu_seqlens`` of the N sequences that the batch packs.
- int32 ``[B, 1, W]``: the used length of each sequence in a static cache. It stays on the device, and the mask of every
  step has one shape, so a compiled function or a graph serves them all.
- ``[B|1, H|1, Sq|1, Skv]``, bool, or numbers that are added to scores: any other mask, in full.

A model that makes its own masks may hand over the last kind, or a padding mask ``[B, n]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from multiattn.block_mask import blocks_of
from multiattn.integrations.padding import dense, fmha_padded, hiding_bias, packed
from multiattn.integrations.transformers_paged import NAME, attend_paged, register_continuous_batching
from multiattn.kvcache import fmha_kvcache
from multiattn.plan.backend import BACKENDS

__all__ = ["NAME", "attend", "blocks_of", "make_mask", "register", "register_continuous_batching"]

FORCING_MASKS = ("falcon", "doge", "dots3_note", "diffusion_gemma", "mistral_large4")
"""Models that have a mask made in every case, to put another beside it; no argument tells that from a static cache."""

MaskFunction = Callable[..., Any]
"""transformers' ``(batch, head, q_idx, kv_idx) -> bool``, an element of a mask."""


def register() -> None:
    """Let `attn_implementation` of a model be ``"multiattn"`` or ``"multiattn_<backend>"``.

    Name one in ``AutoModel.from_pretrained(..., attn_implementation="multiattn")`` or in
    ``model.set_attn_implementation``. ``"multiattn"`` chooses the backend of each call as `backend="auto"` of
    `multiattn.fmha` does; the others run their backend or raise `multiattn.Unsupported`. Calling it again does nothing
    new.
    """
    for name, backend in {NAME: "auto", **{f"{NAME}_{it}": it for it in BACKENDS}}.items():
        AttentionInterface.register(name, partial(attend, backend=backend))
        AttentionMaskInterface.register(name, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that `attend` takes, for transformers' `AttentionMaskInterface`, whose arguments these are.

    transformers says by `allow_is_causal_skip` and `allow_is_bidirectional_skip` that `mask_function` is a band. For
    the one query of a step over a static cache it does not. There the function itself tells, except in a compiled
    function, which cannot read the function of a window. Nor can it read a tensor, so there a static cache with padding
    has a mask ``[B, 1, Sq, Skv]``. So has a batch without `attention_mask` and cache, because its positions might pack
    sequences.
    """
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    is_chunked = chunk is not None and chunk == local_size and kv_offset + kv_length > chunk
    is_band = (allow_is_causal_skip or allow_is_bidirectional_skip) and not is_chunked and local_size != 1
    if attention_mask is not None and attention_mask.ndim == 3:  # made ahead, by `generate`
        if not is_compiling() and not (attention_mask == attention_mask[..., :1]).all():
            got = f"{attention_mask.dtype} {list(attention_mask.shape)}"
            raise ValueError(f"attention_mask: got {got}; allowed [B, Skv] or [B, H, Sq, Skv]")
        return attention_mask
    if not is_compiling() and attention_mask is None and (ids := _packed_ids(mask_function)) is not None:
        return _packed_mask(ids, local_size)
    keys, is_on_device = q_offset + q_length - kv_offset, isinstance(q_offset, torch.Tensor)
    if attention_mask is None and q_length == 1 and not (is_band or is_chunked or local_size == 1):
        is_static = is_on_device or keys < kv_length or kv_length == local_size
        is_lengths = is_static and _is_causal_band(mask_function) and not _forces_masks(kwargs.get("config"))
    else:
        is_lengths = attention_mask is None and is_band and allow_is_causal_skip and is_compiling() and is_on_device
    if is_lengths:
        width = local_size if local_size is not None and local_size < kv_length else 1
        return _lengths_mask(keys, batch_size, width, kwargs.get("device"))
    if not is_band or (is_compiling() and is_on_device):
        mask: torch.Tensor | None = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **kwargs,
        )
        return mask
    window = local_size
    # Without a causal band queries need not be of the sequence of the keys.
    keys = int(keys) if allow_is_causal_skip else kv_length
    if not allow_is_causal_skip and window is not None:
        window += 1  # transformers leaves a query's own key out of a bidirectional window
    window = window if window is not None and window < keys else 1
    if attention_mask is not None:
        attention_mask = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + keys]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, keys - attention_mask.shape[1]))
    if attention_mask is None or not (is_compiling() or not attention_mask.all()):
        if keys == kv_length and window == 1:
            return None
        attention_mask = torch.empty((0, keys), dtype=torch.bool, device=kwargs.get("device"))
    return attention_mask[..., None].expand(-1, -1, window)


def _packed_ids(mask_function: MaskFunction) -> torch.Tensor | None:
    """The sequence of each token ``[B, S]``, where a mask is a causal band in each of several; None for another mask.

    Only closures tell. Where they are not those that transformers 5.4 to 5.24 makes, the mask is one of any kind.
    """
    both = _variables(mask_function).get("mask_functions", ())
    if len(both) != 2:
        return None
    ids = _variables(both[1]).get("packed_sequence_mask")
    return ids if _is_causal_band(_variables(both[0]).get("mask_function")) else None


def _forces_masks(config: Any) -> bool:
    return getattr(config, "model_type", None) in FORCING_MASKS


def _is_causal_band(mask_function: MaskFunction | None) -> bool:
    if mask_function is None or mask_function is causal_mask_function or is_compiling():  # which shows no closures
        return mask_function is causal_mask_function
    both = _variables(mask_function).get("mask_functions", ())
    return len(both) == 2 and set(_variables(both[0])) == {"sliding_window"} and both[1] is causal_mask_function


def _variables(function: MaskFunction) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (it.cell_contents for it in cells), strict=True)) if cells else {}


def _lengths_mask(keys: int | torch.Tensor, batch: int, window: int, device: torch.device | None) -> torch.Tensor:
    """The mask of a static cache that has so many keys of each sequence."""
    if isinstance(keys, torch.Tensor):
        lengths = keys.reshape(1).to(torch.int32).repeat(batch)
    else:
        lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    return lengths[:, None, None].expand(-1, -1, window)


def _packed_mask(ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """The mask of packed sequences; it waits for the device, once for all layers."""
    batch, length = ids.shape
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = is_first.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)
    longest = int(cu_seqlens.diff().max())
    return cu_seqlens[:, None].expand(longest, -1, 1 if window is None else window)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    *,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' `AttentionInterface`, whose arguments these are; the output is ``[B, Sq, Hq, D]``.

    query is ``[B, Hq, Sq, D]``, key and value are ``[B, Hkv, Skv, D]``; value may have a smaller D. query and key take
    the dtype of value, and all three the dtype of autocast, where it is on. `s_aux` are sinks. Where the lengths of
    packed sequences are given, each sequence sees its own band, as with FlashAttention, whatever mask a compiled
    function makes.

    Raises:
        NotImplementedError: For dropout, and for weights (`output_attentions`).
        TypeError, ValueError, Unsupported: As `multiattn.fmha`.
    """
    _refuse(dropout, kwargs)
    dtype = value.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(value.device.type):
        dtype = torch.get_autocast_dtype(value.device.type)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    head_dim = value.shape[-1]
    if head_dim < query.shape[-1]:  # multi-head latent attention
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - head_dim))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "backend": backend}
    mask, lengths = attention_mask, (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    is_packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    lengths_kv = None
    if mask is not None and mask.ndim == 3:
        sliding_window = mask.shape[2] if mask.shape[2] > 1 else sliding_window
        mask = mask[..., 0]
        if mask.dtype == torch.int32 and mask.shape[1] == 1:
            lengths_kv = mask[:, 0]
        elif mask.dtype == torch.int32 and not is_packed:
            is_packed, lengths = True, (mask[0], mask[0], mask.shape[0], mask.shape[0])
        is_padded = mask.dtype == torch.bool and mask.shape[0] > 0
    else:
        is_padded = mask is not None and (mask.ndim == 2 or not is_compiling())
    if is_packed and is_padded:
        raise ValueError(
            "cu_seq_lens_q: got lengths beside an attention_mask; allowed either: packed sequences have no padding"
        )
    band = _band(_is_causal(module, is_causal), sliding_window)
    if (table := kwargs.get("block_table")) is not None:  # continuous batching
        assert cu_seq_lens_k is not None
        caches = (kwargs["k_cache"], kwargs["v_cache"])
        out = attend_paged(query, key, value, caches, table, cu_seq_lens_k.to(torch.int32), options | band)
    elif lengths_kv is not None:
        out = _attend_static(query, key, value, lengths_kv, position_bias, options, sliding_window)
    elif is_packed:
        out = _attend_packed(query, key, value, position_bias, lengths, options | band)
    elif mask is None or mask.ndim == 2:
        out = _attend_padded(query, key, value, mask, position_bias, options | band)
    elif mask.ndim == 4:
        out = _attend_masked(query, key, value, mask, position_bias, options)
    else:
        got = tuple(mask.shape)
        raise ValueError(f"attention_mask: got shape {got}; allowed None, [B, Skv] or [B, H, Sq, Skv]")
    return out[..., :head_dim].transpose(1, 2), None


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(
            f"multiattn has no dropout of attention weights; got dropout={dropout}. Set the model's to 0 "
            "(attention_dropout, attention_probs_dropout_prob or dropout_rate of its config), or call model.eval()"
        )
    if others.get("output_attentions"):
        raise NotImplementedError(
            "multiattn never has the attention weights in memory; for output_attentions=True use "
            'attn_implementation="eager"'
        )


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """The caller decides, else the module; a config that makes a decoder bidirectional makes its masks so, too."""
    if is_causal is not None:
        return bool(is_causal)
    in_config = getattr(getattr(module, "config", None), "is_causal", True)
    return bool(getattr(module, "is_causal", True)) and in_config is not False


def _band(is_causal: bool, sliding_window: int | None) -> dict[str, Any]:
    """`causal` and `window`: transformers' window counts the query's own key, on either side where it is not causal."""
    if sliding_window is None:
        return {"causal": is_causal}
    return {"causal": is_causal, "window": (sliding_window - 1, None if is_causal else sliding_window - 1)}


def _attend_static(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention over a static cache; a gradient or a `position_bias` costs a mask of every score."""
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if position_bias is None and not wants_gradient:
        out: torch.Tensor = fmha_kvcache(q, k, v, seqlens_kv=lengths, **options, **_band(True, sliding_window))
        return out
    last = lengths[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
    behind = last[:, None, :, None] - torch.arange(k.shape[2], device=q.device)
    visible = behind >= 0 if sliding_window is None else (behind >= 0) & (behind < sliding_window)
    return _attend_masked(q, k, v, visible, position_bias, options)


def _attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_bias: torch.Tensor | None,
    lengths: tuple[Any, Any, Any, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of sequences one after another; `lengths` are both cu_seqlens, and the longest of each."""
    if position_bias is not None:
        raise NotImplementedError("multiattn: a position_bias of packed sequences is not implemented")
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
    )
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def _attend_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention over the first keys that a mask ``[B, n]`` tells of, or over all."""
    bias = None if position_bias is None else _as_bias(position_bias, q)
    if mask is not None:
        keys = mask.shape[1]
        k, v, bias = k[:, :, :keys], v[:, :, :keys], None if bias is None else bias[..., :keys]
    if mask is None or mask.shape[0] == 0:
        return dense(q, k, v, bias=bias, **options)
    if bias is None:
        return fmha_padded(q, k, v, kv_mask=mask, **options)
    is_token = mask.to(torch.bool)

    def hide(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return torch.where(is_token[b, j], score, -torch.inf)

    return dense(q, k, v, bias=bias, score_mod=hide, **options)


def _attend_masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    position_bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention with a mask ``[B|1, H|1, Sq|1, Skv]``: bool, or numbers to add."""
    mask = mask[..., : k.shape[2]].expand(-1, -1, q.shape[2], -1)
    bias = None if position_bias is None else _as_bias(position_bias, q)[..., : k.shape[2]]
    if mask.dtype == torch.bool:
        if bias is None and q.shape[2] == 1:
            return dense(q, k, v, bias=hiding_bias(mask, q.dtype), **options)
        return dense(q, k, v, bias=bias, block_mask=blocks_of(mask), **options)
    if bias is None:
        return dense(q, k, v, bias=_as_bias(mask, q), **options)
    added = mask.to(torch.float32).expand(q.shape[0], q.shape[1], -1, -1)

    def add(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return score + added[b, h, i, j]

    return dense(q, k, v, bias=bias, score_mod=add, **options)


def _as_bias(bias: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return bias if bias.dtype in (q.dtype, torch.float32) else bias.to(q.dtype)
