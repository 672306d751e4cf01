"""Kernels of the aten ops behind `torch.nn.functional.scaled_dot_product_attention`.

Causal is aligned at the bottom right in FlashAttention's ops of a GPU, as it is here, and PyTorch asks them for no
other. In all others it is from the top left: query i sees the keys ``j <= i``. That is a window where there are more
queries than keys, and plain causal attention to the first keys where there are fewer.

On a GPU PyTorch asks FlashAttention for no values of another width than queries. Such calls go to cuDNN's op or to the
memory-efficient one. These are ours for such calls alone: for others PyTorch had a reason to prefer them. Results are
laid out as those of PyTorch's kernels, so that a backward can read them whoever ran the forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from multiattn.integrations.overrides import (
    Kernels,
    Refused,
    by_op,
    kernel_of,
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
_LSE_ALIGNMENT = 32  # of PyTorch's memory-efficient kernels


def _attend(call: Any, options: Options, keys: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse, by the first `keys` keys."""
    operands = Operands(*_inputs(call, keys))
    out, lse = run_forward(ready_forward(operands, options), operands)
    return laid_out_like(out, call.query), lse


def _differentiate(call: Any, options: Options, keys: int | None = None) -> Sequence[torch.Tensor]:
    """dq, dk and dv of the first `keys` keys."""
    operands = Operands(*_inputs(call, keys), call.out, call.logsumexp, call.grad_out)
    return run_backward(ready_backward(operands, options), operands)  # type: ignore[return-value]  # every one is wanted


def _differentiate_from_top_left(call: Any) -> _Tensors:
    """dq, dk and dv of a call that is causal from the top left, if at all."""
    options, keys = _from_top_left(call)
    dq, *of_keys = _differentiate(call, options, keys)
    unseen = call.key.shape[2] - keys
    return dq, *(F.pad(it, (0, 0, 0, unseen)) if unseen else it for it in of_keys)


def _inputs(call: Any, keys: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and the first `keys` of k and v, as operands."""
    k, v = (it if keys is None else it[:, :, :keys] for it in (call.key, call.value))
    return unit_stride(call.query), unit_stride(k), unit_stride(v)


def _from_top_left(call: Any) -> tuple[Options, int]:
    """The options of a call, aligned at the bottom right of so many keys, which are all that are visible."""
    if getattr(call, "attn_mask", None) is not None:
        raise Refused("attn_mask", "attn_mask: got a tensor; allowed None")
    seq_q, seq_kv = call.query.shape[2], call.key.shape[2]
    right, keys = (max(seq_q - seq_kv, 0), min(seq_q, seq_kv)) if call.is_causal else (None, seq_kv)
    return options_of_call(call, right=right), keys


def _sequence_first(result: torch.Tensor) -> torch.Tensor:
    """``[B, H, S]`` or ``[B, H, S, D]``, in memory ``[B, S, H]`` or ``[B, S, H, D]``."""
    batch, heads, seq, *rest = result.shape
    of_batch, of_seq, of_head, *of_rest = row_major((batch, seq, heads, *rest))
    return laid_out(result, (of_batch, of_head, of_seq, *of_rest))


# ---------------------------------------------------------------- CUDA, FlashAttention's


@kernel_of("_scaled_dot_product_flash_attention")
def flash_attention(call: Any) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``. The state of a random generator, for dropout, is never read."""
    q = call.query
    out, lse = _attend(call, options_of_call(call, right=0 if call.is_causal else None))
    seed = q.new_empty(2, dtype=torch.uint64)
    offset = q.new_empty((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], call.key.shape[2], seed, offset, q.new_empty(0)


@kernel_of("_scaled_dot_product_flash_attention_backward")
def flash_attention_backward(call: Any) -> _Tensors:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    gradients = _differentiate(call, options_of_call(call, right=0 if call.is_causal else None))
    return tuple(map(laid_out_like, gradients, (call.query, call.key, call.value)))


# ---------------------------------------------------------------- CUDA, values of another width


@kernel_of("_scaled_dot_product_cudnn_attention")
def cudnn_attention(call: Any) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_cudnn_attention``; lse is ``[B, H, S, 1]``."""
    _check_is_of_two_widths(call)
    q = call.query
    out, lse = _attend(call, *_from_top_left(call))
    return out, lse.unsqueeze(3), None, None, q.shape[2], call.key.shape[2], *_no_dropout(q), None


@kernel_of("_scaled_dot_product_cudnn_attention_backward")
def cudnn_attention_backward(call: Any) -> _Tensors:
    """``aten::_scaled_dot_product_cudnn_attention_backward``."""
    _check_is_of_two_widths(call)
    call.logsumexp = call.logsumexp.reshape(call.query.shape[:3])
    gradients = _differentiate_from_top_left(call)
    return tuple(map(laid_out_like, gradients, (call.query, call.key, call.value)))


@kernel_of("_scaled_dot_product_efficient_attention")
def efficient_attention(call: Any) -> _Tensors:
    """``aten::_scaled_dot_product_efficient_attention``; out is ``[B, S, H, D]`` in memory.

    lse has so many queries more, of infinity, that 32 divides their number. It is empty where nobody wants it.
    """
    _check_is_of_two_widths(call)
    out, lse = _attend(call, *_from_top_left(call))
    if not call.compute_log_sumexp:
        lse = lse.new_empty((*lse.shape[:2], 0))
    elif more := -lse.shape[2] % _LSE_ALIGNMENT:
        lse = F.pad(lse, (0, more), value=math.inf)
    return _sequence_first(out), lse, *_no_dropout(call.query)


@kernel_of("_scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(call: Any) -> tuple[torch.Tensor | None, ...]:
    """``aten::_scaled_dot_product_efficient_attention_backward``; gradients are ``[B, S, H, D]`` in memory."""
    _check_is_of_two_widths(call)
    call.grad_out, call.logsumexp = call.grad_out_, call.logsumexp[:, :, : call.query.shape[2]]
    return *map(_sequence_first, _differentiate_from_top_left(call)), None


def _check_is_of_two_widths(call: Any) -> None:
    """`Refused`, silently, for a call that PyTorch gives to this op for another reason than the width of v."""
    if call.attn_bias is not None or call.value.shape[-1] == call.query.shape[-1]:
        raise Refused("", "PyTorch prefers this op to FlashAttention's")


def _no_dropout(q: torch.Tensor) -> _Tensors:
    """Seed and offset of a random generator, which nobody reads."""
    return q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)


# ---------------------------------------------------------------- CPU


@kernel_of("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_for_cpu(call: Any) -> _Tensors:
    """``aten::_scaled_dot_product_flash_attention_for_cpu``; lse is ``[B, S, H]`` in memory."""
    options, keys = _from_top_left(call)
    out, lse = _attend(call, options, keys)
    return out, _sequence_first(lse)


@kernel_of("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_for_cpu_backward(call: Any) -> _Tensors:
    """``aten::_scaled_dot_product_flash_attention_for_cpu_backward``; gradients are ``[B, S, H, D]`` in memory."""
    return tuple(map(_sequence_first, _differentiate_from_top_left(call)))


@kernel_of("_scaled_dot_product_attention_math")
def math_for_cpu(call: Any) -> NoReturn:
    """``aten::_scaled_dot_product_attention_math``, which PyTorch takes on a CPU where there is dropout.

    It is never ours. A call with dropout is told, as the ops of a GPU tell it.
    """
    if call.dropout_p != 0.0:
        options_of_call(call)
    raise Refused("", "it is PyTorch's own mathematics")


KERNELS: Kernels = {
    "AutogradCPU": by_op(math_for_cpu),
    "CUDA": by_op(
        flash_attention,
        flash_attention_backward,
        cudnn_attention,
        cudnn_attention_backward,
        efficient_attention,
        efficient_attention_backward,
    ),
    "CPU": by_op(flash_attention_for_cpu, flash_attention_for_cpu_backward),
}
