"""Kernels of aten's FlashAttention ops, whose layout is ``[B, S, H, D]``: `torch.nn.attention.varlen` calls them.

With ``cum_seq_q`` tensors are packed, ``[T, H, D]``, as for `multiattn.fmha_varlen`. Masks are multiattn's. CPU tensors
work, too, for which PyTorch has no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from multiattn.integrations.overrides import (
    Kernels,
    Refused,
    laid_out_like,
    options_of_call,
    or_refuse,
    ready_backward,
    ready_forward,
)
from multiattn.layout import unit_stride
from multiattn.operands import INPUTS, Operands, Options
from multiattn.packed import as_batch_of_one
from multiattn.run.execute import run_backward, run_forward
from multiattn.varlen import Lengths, pack, with_packing

_IGNORED = frozenset(("num_splits",))
"""Arguments that say how, not what."""


def flash_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    """``aten::_flash_attention_forward``. `others` are of no kernel of ours, and not in every release of PyTorch."""
    if return_debug_mask:
        raise Refused("debug mask", "return_debug_mask: got True; allowed False")
    for name in others:
        if others[name] is not None and name not in _IGNORED:
            raise Refused(name, f"{name}: got {type(others[name]).__name__}; allowed None")
    options = _options(query, dropout_p, is_causal, scale, window_size_left, window_size_right)
    operands, options = _as_ours(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, options)
    out, lse = run_forward(ready_forward(operands, options), operands)
    if cum_seq_q is not None:
        lse = lse[0]
    seed = query.new_empty(2, dtype=torch.uint64)
    unused = query.new_empty((), dtype=torch.uint64)
    return laid_out_like(_as_theirs(out, query), query), lse, seed, unused, query.new_empty(0)


def flash_attention_forward_inplace(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: the same into `out`, at the cost of a copy; gives lse."""
    result, lse, *_ = flash_attention_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """``aten::_flash_attention_backward``."""
    options = _options(query, dropout_p, is_causal, scale, window_size_left, window_size_right)
    operands, options = _as_ours(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, options)
    of_ours = _heads_first if cum_seq_q is None else as_batch_of_one
    lse = logsumexp if cum_seq_q is None else logsumexp.unsqueeze(0)
    operands = operands._replace(out=of_ours(out), lse=lse, dout=of_ours(grad_out))
    gradients = run_backward(ready_backward(operands, options), operands)[:INPUTS]
    return tuple(
        laid_out_like(_as_theirs(it, like), like)  # type: ignore[arg-type]  # every one is wanted
        for it, like in zip(gradients, (query, key, value), strict=True)
    )


def _options(
    q: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None, left: int | None, right: int | None
) -> Options:
    """The Options of a call; a negative bound of a window is none."""
    left = None if left is None or left < 0 else left
    right = 0 if is_causal else None if right is None or right < 0 else right
    return options_of_call(q, dropout_p, scale, left, right)


def _as_ours(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    options: Options,
) -> tuple[Operands, Options]:
    """The operands of a call, and its options with its packing."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    if cum_seq_q is None:
        return Operands(_heads_first(q), _heads_first(k), _heads_first(v)), options
    if cum_seq_k is None:
        raise Refused("cum_seq_k", "cum_seq_k: got None; allowed a tensor, as for queries")
    lengths = Lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    return with_packing(or_refuse(pack, q, k, v, lengths), options, lengths, None, None, None, None)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _as_theirs(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A result ``[B, H, S, D]``, or of a packed call ``[1, H, T, D]``, in the shape of what it is like."""
    return result.transpose(1, 2).view(like.shape) if like.ndim == 3 else result.transpose(1, 2)


_EACH: Mapping[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
}
KERNELS: Kernels = {"CUDA": _EACH, "CPU": _EACH}
