"""Masks for transformers' `AttentionMaskInterface`: `make_mask`, whose masks `attend` takes.

None is full attention, as for eager attention. Every other mask is a `LazyMask`. A band that some keys are hidden from
is told in few numbers, and any other mask in full.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.compiler import is_compiling
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from multiattn.integrations.transformers_keywords import refuse_trace
from multiattn.integrations.transformers_lazy import LazyMask, lazy_mask
from multiattn.integrations.transformers_models import refuse_own_attention

MaskFunction = Callable[..., Any]
"""transformers' ``(batch, head, q_idx, kv_idx) -> bool``, an element of a mask."""

Band = tuple[bool, int | None]
"""Causal, and the window as a `LazyMask` counts it."""


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
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> LazyMask | None:
    """The mask that `attend` takes, for transformers' `AttentionMaskInterface`, whose arguments these are.

    `mask_function` tells what the mask is. A compiled function cannot read it, so there the other arguments tell: by
    `allow_is_causal_skip` and `allow_is_bidirectional_skip` transformers says that it is a band. They are False for a
    step over a static cache with a window, for padding there, and for a batch without `attention_mask` and cache,
    whose positions might pack sequences. In a compiled function these have the mask in full, ``[B, 1, Sq, Skv]``.

    Returns:
        None for full attention that nothing is hidden from; else a mask ``[B, 1, Sq, Skv]`` of this dtype.

    Raises:
        ValueError: For an `attention_mask` that is not ``[B, n]``.
        NotImplementedError: For a model that does not call the attention of transformers' `AttentionInterface`.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        got = f"{attention_mask.dtype} {list(attention_mask.shape)}"
        raise ValueError(f"attention_mask: got {got}; allowed [B, Skv] or [B, H, Sq, Skv]")
    size, config = (batch_size, 1, q_length, kv_length), kwargs.get("config")
    ids: torch.Tensor | None = None
    is_chunk = False
    if is_compiling():
        is_chunk = _is_chunk(config, local_size, kv_offset + kv_length)
        band = _band_of_arguments(
            mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, is_chunk
        )
    else:
        kind: Any = type(config)
        refuse_trace()
        refuse_own_attention(kind)
        ids, band = _read(mask_function, kv_offset + kv_length)
        if band is not None and band[1] is not None and band[1] >= kv_length:
            band = (band[0], None)  # a window that shows all
    told: torch.Tensor | None = None
    if band is not None and ids is None:
        is_step = q_length == 1 and (isinstance(q_offset, torch.Tensor) or not allow_is_causal_skip)
        where = (q_length, kv_length, q_offset, kv_offset)
        told = _keys(band, batch_size, where, attention_mask, is_step, torch.device(kwargs.get("device", "cpu")))
    elif band is not None and attention_mask is None:
        assert ids is not None
        return lazy_mask(_packed(ids), "packed", *band, size, dtype)
    if told is not None:
        assert band is not None
        is_all = told.dtype == torch.bool and told.shape[0] == 0 and band == (False, None)
        if is_all and allow_is_bidirectional_skip:
            return None
        return lazy_mask(told, "padding" if told.dtype == torch.bool else "lengths", *band, size, dtype)
    whole: torch.Tensor = sdpa_mask(
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
    is_band = is_compiling() and not (allow_is_bidirectional_skip or is_chunk or kwargs.get("use_vmap"))
    if is_band and attention_mask is None:
        return lazy_mask(whole, "visible", True, local_size, size, dtype)
    return lazy_mask(whole, "visible", False, None, size, dtype)


def _keys(
    band: Band,
    batch: int,
    where: tuple[int, int, int | torch.Tensor, int],
    attention_mask: torch.Tensor | None,
    is_step: bool,
    device: torch.device,
) -> torch.Tensor | None:
    """Keys of a band, as a `LazyMask` is told them; None where only the mask in full can tell."""
    q_length, kv_length, q_offset, kv_offset = where
    (causal, window), is_on_device = band, isinstance(q_offset, torch.Tensor)
    keys = q_offset + q_length - kv_offset
    if causal and (is_step or (is_compiling() and is_on_device)):
        lengths = _lengths(keys, batch, device)
        return lengths if attention_mask is None else _with_tokens(lengths, attention_mask, kv_offset, kv_length)
    if not causal and (window is None or is_on_device or keys != kv_length):
        keys = kv_length  # queries need not be of the sequence of the keys
        if window is not None:
            return None
    keys = int(keys) if isinstance(keys, torch.Tensor) else keys  # once for a prefill
    if attention_mask is not None and attention_mask.shape[1] < kv_offset + keys:
        return None  # the last queries are not among its tokens
    if attention_mask is not None:
        attention_mask = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + keys]
    if attention_mask is None or (not is_compiling() and attention_mask.all()):
        return torch.empty((0, keys), dtype=torch.bool, device=device)
    if window is not None and (is_compiling() or has_holes(attention_mask)):
        return None
    return attention_mask


def has_holes(mask: torch.Tensor) -> bool:
    """True if padding is between tokens of a row of ``[B, n]``: a window counts it, and `fmha_padded` does not."""
    begins = (mask[:, 1:] & ~mask[:, :-1]).sum(-1) + mask[:, 0]
    return bool((begins > 1).any())


def _band_of_arguments(
    mask_function: MaskFunction,
    local_size: int | None,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
    is_chunk: bool,
) -> Band | None:
    """The band of a mask whose function cannot be read, as its arguments tell it."""
    if (allow_is_causal_skip and not is_chunk) or mask_function is causal_mask_function:
        return True, local_size
    if allow_is_bidirectional_skip:
        return False, None if local_size is None else local_size + 1
    return None


def _is_chunk(config: Any, local_size: int | None, end: int) -> bool:
    chunk = getattr(config, "attention_chunk_size", None)
    return chunk is not None and chunk == local_size and end > chunk


def _read(mask_function: MaskFunction, end: int) -> tuple[torch.Tensor | None, Band | None]:
    """The sequence of each token ``[B, S]``, where several are packed, and the band; no band for another mask.

    Only closures tell. Where they are not those that transformers makes, the mask is one of any kind.
    """
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return None, (mask_function is causal_mask_function, None)
    is_both = _code(mask_function) is _CODES["both"]
    both: tuple[Any, ...] = _variables(mask_function).get("mask_functions", ()) if is_both else ()
    if len(both) != 2:
        return None, None
    code, variables = _code(both[0]), _variables(both[0])
    if _code(both[1]) is _CODES["packed"]:
        ids: torch.Tensor = _variables(both[1])["packed_sequence_mask"]
        inner = variables["mask_function"] if code is _CODES.get("positions", 0) else both[0]
        band = _read(inner, end)[1]
        if band is None or not band[0] or (ids.diff(dim=-1) < 0).any():  # a sequence that goes on behind another
            return None, None
        return ids, band
    if both[1] is causal_mask_function and code is _CODES["window"]:
        return None, (True, variables["sliding_window"])
    if both[1] is causal_mask_function and code is _CODES["chunk"] and end <= variables["chunk_size"]:
        return None, (True, None)
    if both[1] is bidirectional_mask_function and code is _CODES["both sides"]:
        return None, (False, variables["sliding_window"] + 1)  # transformers leaves the query's own key out
    return None, None


def _code(function: MaskFunction) -> CodeType | None:
    return getattr(function, "__code__", None)


def _variables(function: MaskFunction) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (it.cell_contents for it in cells), strict=True)) if cells else {}


def _lengths(keys: int | torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    """The keys of each sequence, int32 ``[B]``, where all have as many."""
    if isinstance(keys, torch.Tensor):
        return keys.reshape(1).to(torch.int32).repeat(batch)
    return torch.full((batch,), keys, dtype=torch.int32, device=device)


def _with_tokens(lengths: torch.Tensor, attention_mask: torch.Tensor, kv_offset: int, kv_length: int) -> torch.Tensor:
    """Lengths, and whether each key is a token, as `LazyMask` is told them: int32 ``[B, 1 + Skv]``."""
    tokens = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + kv_length].to(torch.int32)
    tokens = torch.nn.functional.pad(tokens, (0, kv_length - tokens.shape[1]))
    return torch.cat((lengths[:, None], tokens.to(lengths.device)), dim=1)


def _packed(ids: torch.Tensor) -> torch.Tensor:
    """The ``cu_seqlens`` of packed sequences, as `LazyMask` is told them."""
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return starts_of(is_first)


def starts_of(is_first: torch.Tensor) -> torch.Tensor:
    """``cu_seqlens`` of the sequences whose first tokens are told, ``[B, S]``: int32 ``[longest, N + 1]``.

    It waits for the device, once for all layers.
    """
    starts = is_first.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=is_first.numel()).to(torch.int32)
    return cu_seqlens[None].expand(int(cu_seqlens.diff().max()), -1)


_CODES = {
    "both": and_masks(causal_mask_function).__code__,
    "packed": packed_sequence_mask_function(None).__code__,
    "window": sliding_window_overlay(1).__code__,
    "chunk": chunked_overlay(1, None).__code__,
    "both sides": sliding_window_bidirectional_overlay(1).__code__,
}
"""The code of transformers' closures."""
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # not in its older releases
    _positions: Any = masking_utils.remap_positions_for_packed_sequence
    _CODES["positions"] = _positions(None, None).__code__
