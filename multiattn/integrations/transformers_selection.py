"""Keys that a model selects for each query, sinks of each query, and sequences that positions tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from multiattn.integrations.transformers_kinds import Inputs, attend_masked, band_of
from multiattn.integrations.transformers_lazy import LazyMask, lazy_mask
from multiattn.integrations.transformers_masks import Band, starts_of


def selected_keys(
    module: torch.nn.Module,
    query: torch.Tensor,
    count: int,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
) -> torch.Tensor | None:
    """Keys of `count` that each query selects, bool ``[B, 1|Hq, Sq, Skv]``; None for all.

    `indices` are keys ``[B, Sq, n]``. `block_indices` are blocks of keys, ``[B, H, Sq, n]`` with H heads that divide
    Hq; the module's `indexer` has the size of a block. A negative number selects nothing.

    Raises:
        NotImplementedError: For blocks of a size that nobody tells.
    """
    if indices is not None:
        return _chosen(indices, count)[:, None]
    if block_indices is None:
        return None
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if size is None:
        raise NotImplementedError(
            "block_indices: got blocks of an unknown size; allowed with an `indexer` of the attention that has a "
            '`block_size`. Use attn_implementation="eager" or "sdpa"'
        )
    chosen = _chosen(block_indices, -(-count // size)).repeat_interleave(size, -1)[..., :count]
    return chosen.repeat_interleave(query.shape[1] // chosen.shape[1], 1)


def refuse_packing_of_selected(mask: torch.Tensor | None, is_packed: bool, position_ids: torch.Tensor | None) -> None:
    """Refuse packed sequences that the mask does not tell of: keys were selected among those of other sequences, too.

    Raises:
        NotImplementedError: For lengths or positions that pack sequences, beside a mask that does not.
    """
    if is_packed:
        is_told = isinstance(mask, LazyMask) and mask.kind == "packed"
    else:
        is_told = not isinstance(mask, LazyMask) or apart(mask, position_ids) is mask
    if not is_told:
        raise NotImplementedError(
            "indices: got keys that a model selected without knowing that its batch packs sequences; allowed packing "
            "that its mask has. Give position_ids that begin again with each sequence, and use_cache=False"
        )


def _chosen(indices: torch.Tensor, count: int) -> torch.Tensor:
    chosen = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
    indices = indices.to(torch.int64)
    return chosen.scatter(-1, torch.where(indices < 0, count, indices), True)[..., :count]


def attend_selected(
    call: Inputs, mask: torch.Tensor | None, selected: torch.Tensor | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention with a mask of every score, to selected keys and with `sinks` ``[B, Hq, Sq, n]``, where they are given.

    Raises:
        NotImplementedError: For a padding mask ``[B, n]``, which does not tell of each score.
        ValueError: For a window that shows nothing.
    """
    if mask is not None and mask.ndim == 2:
        raise NotImplementedError(
            f"attention_mask: got {list(mask.shape)} beside selected keys or sinks of each query; allowed None or "
            "[B, H, Sq, Skv]"
        )
    if isinstance(mask, LazyMask):
        band_of(mask.causal, mask.window)
        mask = mask.visible()
    if mask is None:
        mask = torch.ones((1, 1, 1, call.k.shape[2]), dtype=torch.bool, device=call.q.device)
    if selected is not None:
        mask = mask & selected if mask.dtype == torch.bool else mask.masked_fill(~selected, -torch.inf)
    if sinks is None:
        out: torch.Tensor = attend_masked(call, mask)
        is_certain = selected is None or call.options["sinks"] is not None
        return out if is_certain else _with_means(out, mask, call.v)
    out, lse = attend_masked(call, mask, return_lse=True)
    weight = torch.sigmoid(lse - sinks.to(torch.float32).logsumexp(-1))
    return (out * weight[..., None]).to(out.dtype)


def _with_means(out: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output ``[B, Hq, Sq, Dv]``, with the mean of all values for queries that see none of the keys they select.

    MiniMax-M3 selects by positions, and hides by places: behind padding or other sequences nothing may be left. Eager
    attention then has the lowest number for every score, so that all values have one weight.
    """
    sees = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    mean = v.mean(2, keepdim=True).repeat_interleave(out.shape[1] // v.shape[1], 1)
    return torch.where(sees.any(-1, keepdim=True), out, mean)


def packed_mask(call: Inputs, lengths: tuple[Any, Any, Any, Any], band: Band) -> LazyMask:
    """The mask of sequences whose lengths are given.

    Raises:
        NotImplementedError: For queries that are not at the keys.
    """
    (batch, _, seq_q, _), seq_kv = call.q.shape, call.k.shape[2]
    if seq_q != seq_kv or lengths[0].shape != lengths[1].shape:
        raise NotImplementedError(
            f"cu_seq_lens_k: got {seq_kv} packed keys of {seq_q} queries beside selected keys, sinks of each query "
            "or a position_bias; allowed as many as queries"
        )
    told = lengths[0].to(torch.int32)[None]
    return lazy_mask(told, "packed", *band, (batch, 1, seq_q, seq_kv), call.q.dtype)


def apart(mask: LazyMask, position_ids: torch.Tensor | None) -> LazyMask:
    """The mask, or one that keeps the sequences apart that positions ``[B|1, S]`` pack in a causal batch.

    As for FlashAttention, a sequence begins where positions are at their least, and here where they fall, too. Reading
    them waits for the device, once for all layers with this mask. A compiled function can read none: there the mask is
    one of every score.
    """
    batch, _, seq_q, seq_kv = mask.shape
    is_whole = mask.kind == "padding" and mask.causal and mask.told.shape[0] == 0 and mask.told.shape[1] == seq_q
    if not is_whole or position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != seq_q or seq_q == 1:
        return mask
    if not is_compiling() and mask.packing is not None and mask.packing[0] is position_ids:
        return mask if mask.packing[1] is None else mask.packing[1]
    first = position_ids == position_ids.amin(-1, keepdim=True)
    falls = position_ids.diff(dim=-1) < 0
    first = torch.cat((torch.ones_like(first[:, :1]), first[:, 1:] | falls), -1).expand(batch, -1)
    if is_compiling():
        ids = first.cumsum(-1)
        same = torch.nn.functional.pad(ids[:, None, :, None] == ids[:, None, None, :], (0, seq_kv - seq_q))
        return lazy_mask(mask.visible() & same, "visible", False, None, (batch, 1, seq_q, seq_kv), mask.dtype)
    starts, found = starts_of(first), None
    if starts.shape[1] != batch + 1:
        found = lazy_mask(starts, "packed", mask.causal, mask.window, (batch, 1, seq_q, seq_kv), mask.dtype)
    mask.packing = position_ids, found
    return mask if found is None else found
