"""Kernels of aten's FlashAttention ops, whose layout is ``[B, S, H, D]``: `torch.nn.attention.varlen` calls them.

With ``cum_seq_q`` tensors are packed, ``[T, H, D]``, as for `multiattn.fmha_varlen`. Masks are multiattn's. CPU tensors
work, too, for which PyTorch has no kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from multiattn.integrations.overrides import (
    Kernels,
    Refused,
    by_op,
    kernel_of,
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

_OF_NO_KERNEL = ("seqused_k", "alibi_slopes", "block_table")
"""Arguments of a forward that no kernel of ours has; not every release of PyTorch has them."""


@kernel_of("_flash_attention_forward")
def flash_attention_forward(call: Any) -> tuple[torch.Tensor, ...]:
    """``aten::_flash_attention_forward``. Its `num_splits` says how, not what."""
    q = call.query
    out, lse = _forward(call)
    seed = q.new_empty(2, dtype=torch.uint64)
    return out, lse, seed, q.new_empty((), dtype=torch.uint64), q.new_empty(0)


@kernel_of("_flash_attention_forward_no_dropout_inplace")
def flash_attention_forward_inplace(call: Any) -> torch.Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: the same into `out`, at the cost of a copy; gives lse."""
    result, lse = _forward(call)
    call.out.copy_(result)
    return lse


def _forward(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse."""
    for name in _OF_NO_KERNEL:
        if (given := getattr(call, name, None)) is not None:
            raise Refused(name, f"{name}: got {type(given).__name__}; allowed None")
    operands, options = _as_ours(call)
    out, lse = run_forward(ready_forward(operands, options), operands)
    return laid_out_like(_as_theirs(out, call.query), call.query), lse if call.cum_seq_q is None else lse[0]


@kernel_of("_flash_attention_backward")
def flash_attention_backward(call: Any) -> tuple[torch.Tensor, ...]:
    """``aten::_flash_attention_backward``."""
    operands, options = _as_ours(call)
    of_ours = _heads_first if call.cum_seq_q is None else as_batch_of_one
    lse = call.logsumexp if call.cum_seq_q is None else call.logsumexp.unsqueeze(0)
    operands = operands._replace(out=of_ours(call.out), lse=lse, dout=of_ours(call.grad_out))
    gradients = run_backward(ready_backward(operands, options), operands)[:INPUTS]
    return tuple(
        laid_out_like(_as_theirs(it, like), like)  # type: ignore[arg-type]  # every one is wanted
        for it, like in zip(gradients, (call.query, call.key, call.value), strict=True)
    )


def _as_ours(call: Any) -> tuple[Operands, Options]:
    """The operands and options of a call; a negative bound of a window is none."""
    bounds = (call.window_size_left, call.window_size_right)
    left, right = (None if it is None or it < 0 else it for it in bounds)
    options = options_of_call(call, left, 0 if call.is_causal else right)
    q, k, v = map(unit_stride, (call.query, call.key, call.value))
    if call.cum_seq_q is None:
        return Operands(_heads_first(q), _heads_first(k), _heads_first(v)), options
    if call.cum_seq_k is None:
        raise Refused("cum_seq_k", "cum_seq_k: got None; allowed a tensor, as for queries")
    lengths = Lengths(call.cum_seq_q, call.cum_seq_k, call.max_q, call.max_k)
    return with_packing(or_refuse(pack, q, k, v, lengths), options, lengths)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _as_theirs(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A result ``[B, H, S, D]``, or of a packed call ``[1, H, T, D]``, in the layout of what it is like."""
    return result[0].transpose(0, 1) if like.ndim == 3 else result.transpose(1, 2)


_EACH = by_op(flash_attention_forward, flash_attention_forward_inplace, flash_attention_backward)
KERNELS: Kernels = {"CUDA": _EACH, "CPU": _EACH}
