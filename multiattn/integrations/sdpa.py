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


def _attend(call: Any, options: Options, keys: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse, by the first `keys` keys."""
    operands = Operands(*_inputs(call, keys))
    out, lse = run_forward(ready_forward(operands, options), operands)
    return laid_out_like(out, call.query), lse


def _differentiate(call: Any, options: Options, keys: int | None = None) -> Sequence[torch.Tensor]:
    """dq, dk and dv of the first `keys` keys."""
    operands = Operands(*_inputs(call, keys), call.out, call.logsumexp, call.grad_out)
    return run_backward(ready_backward(operands, options), operands)  # type: ignore[return-value]  # every one is wanted


def _inputs(call: Any, keys: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and the first `keys` of k and v, as operands."""
    k, v = (it if keys is None else it[:, :, :keys] for it in (call.key, call.value))
    return unit_stride(call.query), unit_stride(k), unit_stride(v)


# ---------------------------------------------------------------- CUDA


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
    options, keys = _from_top_left(call)
    dq, *of_keys = _differentiate(call, options, keys)
    unseen = call.key.shape[2] - keys
    return tuple(map(_sequence_first, (dq, *(F.pad(it, (0, 0, 0, unseen)) if unseen else it for it in of_keys))))


@kernel_of("_scaled_dot_product_attention_math")
def math_for_cpu(call: Any) -> NoReturn:
    """``aten::_scaled_dot_product_attention_math``, which PyTorch takes on a CPU where there is dropout.

    It is never ours. A call with dropout is told, as the ops of a GPU tell it.
    """
    if call.dropout_p != 0.0:
        options_of_call(call)
    raise Refused("", "it is PyTorch's own mathematics")


def _from_top_left(call: Any) -> tuple[Options, int]:
    """The options of a call, aligned at the bottom right of so many keys, which are all that are visible."""
    if call.attn_mask is not None:
        raise Refused("attn_mask", "attn_mask: got a tensor; allowed None")
    seq_q, seq_kv = call.query.shape[2], call.key.shape[2]
    right, keys = (max(seq_q - seq_kv, 0), min(seq_q, seq_kv)) if call.is_causal else (None, seq_kv)
    return options_of_call(call, right=right), keys


def _sequence_first(result: torch.Tensor) -> torch.Tensor:
    """``[B, H, S]`` or ``[B, H, S, D]``, in memory ``[B, S, H]`` or ``[B, S, H, D]``."""
    batch, heads, seq, *rest = result.shape
    of_batch, of_seq, of_head, *of_rest = row_major((batch, seq, heads, *rest))
    return laid_out(result, (of_batch, of_head, of_seq, *of_rest))


KERNELS: Kernels = {
    "AutogradCPU": by_op(math_for_cpu),
    "CUDA": by_op(flash_attention, flash_attention_backward),
    "CPU": by_op(flash_attention_for_cpu, flash_attention_for_cpu_backward),
}
