"""Hugging Face transformers: ``attn_implementation="multiattn"``, and ``"multiattn_<backend>"``, after `register()`.

transformers makes one mask for each kind of layer in a forward, by `make_mask`, and hands it to each layer's attention,
`attend`. What counts is what the model's own eager attention would do: a mask tells everything, and no mask is full
attention. A mask that `make_mask` made is a `LazyMask`, which costs no memory as long as nobody touches it.

A model may hand over masks of its own: ``[B|1, H|1, Sq|1, Skv]``, bool, or numbers that are added to scores, or a
padding mask ``[B, n]``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface

from multiattn.block_mask import blocks_of
from multiattn.integrations.transformers_keywords import HARMLESS, refuse_trace, refuse_unknown
from multiattn.integrations.transformers_kinds import (
    Inputs,
    attend_lengths,
    attend_masked,
    attend_packed,
    attend_padded,
    band_of,
)
from multiattn.integrations.transformers_lazy import LazyMask, lazy_mask
from multiattn.integrations.transformers_masks import Band, has_holes, make_mask
from multiattn.integrations.transformers_models import is_eager_only, makes_blocks, refuse_bools, refuse_untested
from multiattn.integrations.transformers_paged import NAME, attend_paged, register_continuous_batching
from multiattn.integrations.transformers_selection import (
    apart,
    attend_selected,
    packed_mask,
    refuse_packing_of_selected,
    selected_keys,
)
from multiattn.layout import unit_stride
from multiattn.plan.backend import BACKENDS
from multiattn.validate import refuse_dropout

__all__ = [
    "HARMLESS",
    "NAME",
    "LazyMask",
    "attend",
    "blocks_of",
    "make_mask",
    "register",
    "register_continuous_batching",
]

_WITHOUT_DROPOUT = (
    "Set the model's to 0 (attention_dropout, attention_probs_dropout_prob or dropout_rate of its config), or call "
    "model.eval()"
)


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
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    max_length_k: int | torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    deterministic: bool | None = None,
    *,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' `AttentionInterface`, whose arguments these are; the output is ``[B, Sq, Hq, Dv]``.

    Args:
        module: The attention layer. With no mask and no `is_causal`, `module.is_causal` decides if it is there, and the
            model knows more than eager attention, for which no mask is full attention.
        query: ``[B|1, Hq, Sq, D]``; any strides, as for all tensors. It takes the dtype of value, and all three that of
            autocast, where it is on.
        key: ``[B, Hkv, Skv, D]``.
        value: ``[B, Hkv, Skv, Dv]``.
        attention_mask: A `LazyMask`, a mask that tells everything ``[B|1, H|1, Sq|1, Skv]``, bool or numbers to add, or
            a padding mask ``[B, n]``, bool or integers. None is full attention, or causal where that is said.
        dropout: 0.
        scaling: ``1 / sqrt(D)`` by default.
        is_causal: With no mask, or a padding mask ``[B, n]``: whether keys behind a query are hidden. transformers
            makes its masks after the `is_causal` that a model is called with.
        sliding_window: The keys that a query sees, itself among them, where no mask tells it.
        softcap: As `multiattn.fmha`.
        s_aux: Sinks ``[Hq]``.
        sinks: Sinks ``[Hq]``, or of each query ``[B, Hq, Sq, n]``.
        position_bias: ``[B|1, Hq, Sq, Skv]``, added to scores.
        position_ids: ``[B|1, S]``. In a causal batch without padding and earlier keys, sequences begin where they are
            at their least or fall, and stay apart. Positions of other shapes tell nothing.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: Lengths of packed sequences. Each sequence sees its
            own band, as with FlashAttention, whatever mask a compiled function makes.
        indices, block_indices: The keys or the blocks of keys that each query selects.
        deterministic: As `multiattn.fmha`.
        backend: As `multiattn.fmha`.
        **kwargs: `HARMLESS` keywords.

    Raises:
        NotImplementedError: For dropout, weights (`output_attentions`), a keyword that is not known, a model that does
            not support SDPA and is not known, and calls that have no certain meaning.
        TypeError, ValueError, Unsupported: As `multiattn.fmha`.
    """
    layer: Any = type(module)
    if dropout:
        refuse_dropout(dropout, "dropout", _WITHOUT_DROPOUT)
    refuse_unknown(kwargs)
    if not is_compiling():
        refuse_trace()
        refuse_untested(layer)
    query, key, value = _prepared(query, key, value)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "backend": backend}
    if deterministic:
        options["deterministic"] = True
    if sinks is not None and sinks.ndim == 1:
        options["sinks"], sinks = sinks, None
    call = Inputs(query, key, value, position_bias, options)
    mask, says_causal = _as_mask(attention_mask, query), _says_causal(module, is_causal)
    selected = selected_keys(module, query, key.shape[2], indices, block_indices)
    table, is_packed = kwargs.get("block_table"), _has_lengths(cu_seq_lens_q, cu_seq_lens_k)
    if mask is None and says_causal and not is_packed and (is_causal or not is_eager_only(layer)):
        mask = _causal_mask(call, sliding_window)
    if selected is not None and not is_compiling():
        refuse_packing_of_selected(mask, is_packed, position_ids)
    if isinstance(mask, LazyMask) and not is_packed:
        mask = apart(mask, position_ids)
    if table is not None:  # continuous batching
        assert cu_seq_lens_k is not None
        _refuse_over_pages(position_bias=position_bias, sinks=sinks, indices=selected)
        caches, band_options = (kwargs["k_cache"], kwargs["v_cache"]), band_of(says_causal is not False, sliding_window)
        lengths_kv = cu_seq_lens_k.to(torch.int32)
        out = attend_paged(query, key, value, caches, table, lengths_kv, options | band_options)
    elif is_packed:
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        band = _band_of_lengths(mask, says_causal, sliding_window)
        if isinstance(mask, LazyMask) and mask.kind == "visible" and makes_blocks(layer):
            band, selected = (False, None), mask.visible() if selected is None else mask.visible() & selected
        if selected is not None or sinks is not None or position_bias is not None:
            out = attend_selected(call, packed_mask(call, lengths, band), selected, sinks)
        else:
            out = attend_packed(call, lengths, band_of(*band))
    elif selected is not None or sinks is not None:
        out = attend_selected(call, mask, selected, sinks)
    elif isinstance(mask, LazyMask):
        out = _attend_lazy(call, mask)
    elif mask is None:
        _refuse_window(sliding_window, key.shape[2])
        out = attend_padded(call, None, band_of(False, None))
    elif mask.ndim == 2:
        _refuse_holes(mask, sliding_window)
        out = attend_padded(call, mask, band_of(says_causal is True, sliding_window))
    else:
        if mask.dtype == torch.bool and not is_compiling():
            refuse_bools(layer)
        out = attend_masked(call, mask)
    return out.transpose(1, 2).contiguous(), None


def _prepared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as multiattn takes them."""
    dtype = value.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(value.device.type):
        dtype = torch.get_autocast_dtype(value.device.type)
    query, key, value = (unit_stride(it.to(dtype)) for it in (query, key, value))
    batch = max(query.shape[0], key.shape[0])
    if query.shape[0] != key.shape[0]:  # learned queries, or keys, that all sequences share
        query, key, value = (it.expand(batch, -1, -1, -1) for it in (query, key, value))
    return query, key, value


def _as_mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """The mask as the rest of this module takes it: a `LazyMask` that nobody has written to, ``[B, n]`` or 4-D.

    Raises:
        ValueError: For a mask of another shape, or of two meanings.
    """
    if mask is None or mask.ndim == 4:
        if not isinstance(mask, LazyMask) or is_compiling():
            return mask
        return mask if mask.written is None else mask.written
    (batch, heads, seq_q, _), shape = query.shape, tuple(mask.shape)
    if mask.ndim == 2:
        is_padding = shape[0] == batch and not mask.is_floating_point()
        is_scores = shape[0] == seq_q
        if is_padding and not (is_scores and batch > 1):
            return mask
        if is_scores and not is_padding:
            return mask[None, None]
    elif mask.ndim == 3 and shape[0] in (1, heads) and shape[1] in (1, seq_q):  # as it is added to scores
        return mask[None]
    raise ValueError(
        f"attention_mask: got {mask.dtype} {shape} for B={batch}, Sq={seq_q}; allowed None, [B, Skv] of bools or "
        "integers, or [B, H, Sq, Skv]"
    )


def _says_causal(module: torch.nn.Module, is_causal: bool | None) -> bool | None:
    """The caller decides, else the module; a config that makes a decoder bidirectional makes its masks so, too."""
    if is_causal is not None:
        return bool(is_causal)
    says = getattr(module, "is_causal", None)
    if says is None:
        return None
    return bool(says) and getattr(getattr(module, "config", None), "is_causal", True) is not False


def _has_lengths(cu_seq_lens_q: torch.Tensor | None, cu_seq_lens_k: torch.Tensor | None) -> bool:
    """True if lengths of packed sequences are given; ValueError for those of one side alone."""
    given = {"cu_seq_lens_q": cu_seq_lens_q is not None, "cu_seq_lens_k": cu_seq_lens_k is not None}
    if len(set(given.values())) > 1:
        missing, told = sorted(given, key=lambda it: given[it])
        raise ValueError(f"{told}: got lengths without {missing}; allowed both, or neither")
    return given["cu_seq_lens_q"]


def _band_of_lengths(mask: torch.Tensor | None, says_causal: bool | None, window: int | None) -> Band:
    """The band of each of the sequences whose lengths are given beside a mask.

    Raises:
        ValueError: For a mask of padding, or one of a model's own.
        NotImplementedError: If nothing tells whether it is causal.
    """
    is_whole = isinstance(mask, LazyMask) and mask.kind == "padding" and mask.told.shape[0] == 0
    if isinstance(mask, LazyMask) and (is_whole or mask.kind == "packed" or (mask.kind == "visible" and mask.causal)):
        return mask.causal, mask.window
    if mask is None and says_causal is not None:
        return says_causal, window
    if mask is None:
        raise NotImplementedError(
            "cu_seq_lens_q: got lengths for an attention that does not say whether it is causal; allowed is_causal="
        )
    raise ValueError(
        "cu_seq_lens_q: got lengths beside an attention_mask; allowed either: packed sequences have no padding"
    )


def _attend_lazy(call: Inputs, mask: LazyMask) -> torch.Tensor:
    """Attention with a mask of `make_mask`.

    Raises:
        ValueError: For a mask of other sizes than the call's.
    """
    told, causal, window = mask.told, mask.causal, mask.window
    (batch, _, seq_q, _), seq_kv = call.q.shape, call.k.shape[2]
    if not is_compiling() and mask.shape != (batch, 1, seq_q, seq_kv):
        if mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, seq_q) or mask.shape[3] != seq_kv:
            got = f"attention_mask: got one made for {list(mask.shape)}"
            raise ValueError(f"{got}; allowed [B|1, 1, Sq|1, Skv] of the call, {[batch, 1, seq_q, seq_kv]}")
        out: torch.Tensor = attend_masked(call, mask.visible())
        return out
    if mask.kind == "visible" or (mask.kind == "packed" and call.bias is not None):
        return attend_selected(call, mask, None, None)
    if mask.kind == "lengths":
        return attend_lengths(call, mask)
    if mask.kind == "packed":
        # keys behind them are unused places of a static cache
        call = call._replace(k=call.k[:, :, :seq_q], v=call.v[:, :, :seq_q])
        return attend_packed(call, (told[0], told[0], *2 * (told.shape[0],)), band_of(causal, window))
    return attend_padded(call, told, band_of(causal, window))


def _causal_mask(call: Inputs, sliding_window: int | None) -> LazyMask:
    """The mask of a causal call that has none.

    Raises:
        NotImplementedError: For more keys than queries, or fewer, if there are several.
        ValueError: For a window that is less than 1.
    """
    (batch, _, seq_q, _), seq_kv = call.q.shape, call.k.shape[2]
    if 1 < seq_q != seq_kv:
        raise NotImplementedError(
            f"attention_mask: got None for causal attention of {seq_q} queries to {seq_kv} keys; allowed a mask, as "
            "nothing tells which keys the queries are at. Let transformers make it, by create_causal_mask"
        )
    band_of(True, sliding_window)
    told = torch.empty((0, seq_kv), dtype=torch.bool, device=call.q.device)
    return lazy_mask(told, "padding", True, sliding_window, (batch, 1, seq_q, seq_kv), call.q.dtype)


def _refuse_over_pages(**given: torch.Tensor | None) -> None:
    """Refuse what attention over pages would leave out.

    Raises:
        NotImplementedError: For a bias or sinks of each query, and for keys that are selected.
    """
    for name, it in given.items():
        if it is not None:
            hint = "max_blocks_per_request=0 of ContinuousBatchingConfig has packed sequences in place of pages"
            raise NotImplementedError(f"{name}: got {list(it.shape)} beside a block_table; allowed None; {hint}")


def _refuse_holes(mask: torch.Tensor, sliding_window: int | None) -> None:
    """Refuse a padding mask ``[B, n]`` beside a window, which counts padding between tokens.

    Raises:
        NotImplementedError: For a window where there is such padding, or might be in a compiled function.
    """
    if sliding_window is not None and (is_compiling() or has_holes(mask.to(torch.bool))):
        raise NotImplementedError(
            f"attention_mask: got padding {list(mask.shape)} that may be between tokens, which sliding_window="
            f"{sliding_window} counts; allowed a mask that has the window. Let transformers make it"
        )


def _refuse_window(sliding_window: int | None, seq_kv: int) -> None:
    """Refuse a window that no mask has.

    Raises:
        NotImplementedError: For a window that would hide a key.
    """
    if sliding_window is not None and sliding_window < seq_kv:
        raise NotImplementedError(
            f"sliding_window: got {sliding_window} and no mask for {seq_kv} keys; allowed a mask that has the window, "
            "as eager attention knows none. Let transformers make it, by create_bidirectional_sliding_window_mask"
        )
