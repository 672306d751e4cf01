"""Keys that a model selects for each query, sinks of each query, and sequences that positions tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from multiattn.integrations.transformers_kinds import Inputs, attend_masked
from multiattn.integrations.transformers_lazy import LazyMask
from multiattn.integrations.transformers_masks import starts_of


def selected_keys(
    module: torch.nn.Module,
    query: torch.Tensor,
    count: int,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
) -> torch.Tensor | None:
    """Which of `count` keys each query selects, bool ``[B, 1|Hq, Sq, Skv]``; None for all.

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


def _chosen(indices: torch.Tensor, count: int) -> torch.Tensor:
    chosen = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
    indices = indices.to(torch.int64)
    return chosen.scatter(-1, torch.where(indices < 0, count, indices), True)[..., :count]


def attend_selected(
    call: Inputs,
    mask: torch.Tensor | None,
    causal: bool,
    selected: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a mask of every score, to selected keys and with `sinks` ``[B, Hq, Sq, n]``, where they are given.

    `causal` tells of keys behind a query where there is no mask.
    """
    seq_q, seq_kv = call.q.shape[2], call.k.shape[2]
    shown: torch.Tensor
    if isinstance(mask, LazyMask):
        shown = mask.visible()
    elif mask is not None:
        shown = mask
    else:
        shown = torch.ones(1, 1, seq_q, seq_kv, dtype=torch.bool, device=call.q.device)
        shown = shown.tril(seq_kv - seq_q) if causal else shown
    if selected is not None:
        shown = shown & selected if shown.dtype == torch.bool else shown.masked_fill(~selected, -torch.inf)
    if sinks is None:
        out: torch.Tensor = attend_masked(call, shown)
        return out
    out, lse = attend_masked(call, shown, return_lse=True)
    weight = torch.sigmoid(lse - sinks.to(torch.float32).logsumexp(-1))
    return (out * weight[..., None]).to(out.dtype)


def packed_by_positions(mask: LazyMask | None, position_ids: torch.Tensor | None, batch: int, count: int) -> Any:
    """The sequences that positions ``[B|1, S]`` of a batch without padding pack; None where each row is one.

    As for FlashAttention, a sequence begins where positions are at their least, and here where they fall, too. Reading
    them waits for the device, once for all layers with this mask.

    Returns:
        int32 ``[longest, N + 1]``, as a `LazyMask` is told them. In a compiled function, which can read no positions,
        int64 ``[B, S]``, the sequence of each token.
    """
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] != count or count == 1:
        return None
    if not is_compiling() and mask is not None and mask.packing is not None and mask.packing[0] is position_ids:
        return mask.packing[1]
    first = position_ids == position_ids.amin(-1, keepdim=True)
    falls = position_ids.diff(dim=-1) < 0
    first = torch.cat((torch.ones_like(first[:, :1]), first[:, 1:] | falls), -1).expand(batch, -1)
    if is_compiling():
        return first.cumsum(-1)
    starts = starts_of(first)
    found = None if starts.shape[1] == batch + 1 else starts
    if mask is not None:
        mask.packing = position_ids, found
    return found
