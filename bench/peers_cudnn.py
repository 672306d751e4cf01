"""The open block-sparse kernels of cuDNN Frontend, for lists without a mask.

Imported only where it runs, as it needs the wheel and the CuTe DSL. Its backward makes the lists of blocks of keys in
each call; others are given them.
"""

from __future__ import annotations

from typing import Any

import torch
from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

from bench.matrix import Cell, Tensors
from multiattn.tune.timing import Call


class _Attend(torch.autograd.Function):
    """Attention of q, k and v ``[B, S, H, D]`` with ``[B, H, rows, listed]`` blocks of keys, of `size` rows."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *tensors, blocks, size = given
        found = block_sparse_attention_forward(*tensors, blocks, sparse_block_size=size, layout="bshd")
        ctx.save_for_backward(*tensors, found["o_tensor"], found["lse_tensor"], blocks)
        ctx.size = size
        out: torch.Tensor = found["o_tensor"]
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        asked = {"sparse_block_size": ctx.size, "layout": "bshd"}
        found = block_sparse_attention_backward(*upstream, *ctx.saved_tensors, **asked)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None


def build(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
    """Its call for a cell each of whose rows lists as many blocks: it is fastest without a tensor of their numbers."""
    mask = cell.block_mask(tensors[0].device)
    listed = int(mask.full_kv_num_blocks[0, 0, 0])
    blocks = mask.full_kv_indices[..., :listed].contiguous()
    q, k, v = (it.transpose(1, 2) for it in tensors)

    def call() -> torch.Tensor:
        out: torch.Tensor = _Attend.apply(q, k, v, blocks, mask.BLOCK_SIZE[0])  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    return call, "block_sparse_attention"
