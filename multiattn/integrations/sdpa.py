"""Kernels of the aten ops behind `torch.nn.functional.scaled_dot_product_attention`.

Causal is aligned at the bottom right in the ops of a GPU, as it is here, and PyTorch asks them for no other. In those
of a CPU it is from the top left: query i sees the keys ``j <= i``. That is a window where there are more queries than
keys, and plain causal attention to the first keys where there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from multiattn.integrations.overrides import (
    Kernels,
    Refused,
    laid_out,
    laid_out_like,
    options_of_call,
    ready_backward,
    ready_forward,
)
from multiattn.layout import row_major, unit_stride
from multiattn.operands import Operands, Options
from multiattn.run.execute import run_backward, run_forward

_Tensors = tuple[torch.Tensor, ...]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse."""
    operands = Operands(unit_stride(q), unit_stride(k), unit_stride(v))
    return run_forward(ready_forward(operands, options), operands)


def _differentiate(operands: Operands, options: Options) -> Sequence[torch.Tensor]:
    """dq, dk and dv."""
    q, k, v = map(unit_stride, operands.inputs[:3])
    operands = operands._replace(q=q, k=k, v=v)
    return run_backward(ready_backward(operands, options), operands)  # type: ignore[return-value]  # every one is wanted


# ---------------------------------------------------------------- CUDA


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``. The state of a random generator, for dropout, is never read."""
    if return_debug_mask:
        raise Refused("debug mask", "return_debug_mask: got True; allowed False")
    out, lse = _attend(query, key, value, options_of_call(query, dropout_p, scale, right=0 if is_causal else None))
    seed = query.new_empty(2, dtype=torch.uint64)
    offset = query.new_empty((), dtype=torch.uint64)
    lengths = (query.shape[2], key.shape[2])
    return laid_out_like(out, query), lse, None, None, *lengths, seed, offset, query.new_empty(0)


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
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> _Tensors:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    operands = Operands(query, key, value, out, logsumexp, grad_out)
    options = options_of_call(query, dropout_p, scale, right=0 if is_causal else None)
    return tuple(map(laid_out_like, _differentiate(operands, options), operands.qkv))


# ---------------------------------------------------------------- CPU


def flash_attention_for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> _Tensors:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; lse is ``[B, S, H]`` in memory."""
    if attn_mask is not None:
        raise Refused("attn_mask", "attn_mask: got a tensor; allowed None")
    right, keys = _from_top_left(query, key, is_causal)
    options = options_of_call(query, dropout_p, scale, right=right)
    out, lse = _attend(query, key[:, :, :keys], value[:, :, :keys], options)
    return laid_out_like(out, query), _sequence_first(lse)


def flash_attention_for_cpu_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> _Tensors:
    """``aten::_scaled_dot_product_flash_attention_for_cpu_backward``; gradients are ``[B, S, H, D]`` in memory."""
    if attn_mask is not None:
        raise Refused("attn_mask", "attn_mask: got a tensor; allowed None")
    right, keys = _from_top_left(query, key, is_causal)
    options = options_of_call(query, dropout_p, scale, right=right)
    operands = Operands(query, key[:, :, :keys], value[:, :, :keys], out, logsumexp, grad_out)
    dq, *of_keys = _differentiate(operands, options)
    unseen = key.shape[2] - keys
    return tuple(map(_sequence_first, (dq, *(F.pad(it, (0, 0, 0, unseen)) if unseen else it for it in of_keys))))


def math_for_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *others: Any,
    **options: Any,
) -> NoReturn:
    """``aten::_scaled_dot_product_attention_math``, which PyTorch takes on a CPU where there is dropout.

    It is never ours. A call with dropout is told, as the ops of a GPU tell it.
    """
    if dropout_p != 0.0:
        options_of_call(query, dropout_p, None)
    raise Refused("", "it is PyTorch's own mathematics")


def _from_top_left(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> tuple[int | None, int]:
    """The right bound of the mask, aligned at the bottom right of so many keys, which are all that are visible."""
    seq_q, seq_kv = q.shape[2], k.shape[2]
    return (max(seq_q - seq_kv, 0), min(seq_q, seq_kv)) if is_causal else (None, seq_kv)


def _sequence_first(result: torch.Tensor) -> torch.Tensor:
    """``[B, H, S]`` or ``[B, H, S, D]``, in memory ``[B, S, H]`` or ``[B, S, H, D]``."""
    batch, heads, seq, *rest = result.shape
    of_batch, of_seq, of_head, *of_rest = row_major((batch, seq, heads, *rest))
    return laid_out(result, (of_batch, of_head, of_seq, *of_rest))


KERNELS: Kernels = {
    "AutogradCPU": {"_scaled_dot_product_attention_math": math_for_cpu},
    "CUDA": {
        "_scaled_dot_product_flash_attention": flash_attention,
        "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    },
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": flash_attention_for_cpu_backward,
    },
}
