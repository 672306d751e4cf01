"""Kernels of the aten ops behind `torch.nn.functional.scaled_dot_product_attention`.

Their mask is causal from the top left: query i sees the keys ``j <= i``. Ours is aligned at the bottom right, so that
one is a window where there are more queries than keys, and where there are fewer, plain causal attention to the first
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from multiattn.integrations.overrides import (
    Refused,
    laid_out,
    laid_out_like,
    options_of_call,
    ready_backward,
    ready_forward,
)
from multiattn.layout import row_major
from multiattn.operands import Operands, Options
from multiattn.run.execute import run_backward, run_forward

_Tensors = tuple[torch.Tensor, ...]


def _as_ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Operands, Options]:
    """The same call with the mask of `multiattn.fmha`."""
    right = None
    if is_causal:
        right = max(q.shape[2] - k.shape[2], 0)
        if k.shape[2] > q.shape[2]:
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    return Operands(q, k, v), options_of_call(q, dropout_p, scale, right=right)


def _attend(*call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse."""
    operands, options = _as_ours(*call)
    return run_forward(ready_forward(operands, options), operands.inputs)


def _differentiate(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *call: Any) -> list[torch.Tensor]:
    """dq, dk and dv."""
    operands, options = _as_ours(*call)
    operands = operands._replace(out=out, lse=lse, dout=dout)
    dq, *of_keys = run_backward(ready_backward(operands, options), operands)
    assert dq is not None
    unseen = call[1].shape[2] - operands.k.shape[2]
    return [dq, *(torch.nn.functional.pad(it, (0, 0, 0, unseen)) if unseen else it for it in of_keys)]  # type: ignore[list-item, arg-type]


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
    out, lse = _attend(query, key, value, dropout_p, is_causal, scale)
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
    call = (query, key, value, dropout_p, is_causal, scale)
    gradients = _differentiate(grad_out, out, logsumexp, *call)
    return tuple(laid_out_like(it, like) for it, like in zip(gradients, (query, key, value), strict=True))


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
    out, lse = _attend(query, key, value, dropout_p, is_causal, scale)
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
    gradients = _differentiate(grad_out, out, logsumexp, query, key, value, dropout_p, is_causal, scale)
    return tuple(map(_sequence_first, gradients))


def _sequence_first(result: torch.Tensor) -> torch.Tensor:
    """``[B, H, S]`` or ``[B, H, S, D]``, in memory ``[B, S, H]`` or ``[B, S, H, D]``."""
    batch, heads, seq, *rest = result.shape
    of_batch, of_seq, of_head, *of_rest = row_major((batch, seq, heads, *rest))
    return laid_out(result, (of_batch, of_head, of_seq, *of_rest))


KERNELS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "CUDA": {
        "_scaled_dot_product_flash_attention": flash_attention,
        "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    },
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": flash_attention_for_cpu_backward,
    },
}
"""By dispatch key and op."""
