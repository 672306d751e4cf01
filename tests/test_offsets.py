"""Heads that lie 2^31 elements apart: offsets of 32 bits wrap. Memory in between is reserved and never touched."""

import pytest
import torch

import multiattn
from multiattn import reference

HEADS, SEQ, HEAD_DIM = 3, 20, 16
APART = (1 << 30) + 65
"""Elements from head to head: the third head begins past 2^31, and a stride by itself fits 32 bits.

Odd, as Triton counts strides in units of what divides them: in units of 8 the product would fit.
"""


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_heads_past_2_to_31_elements(backend, name):
    """4 GiB of addresses, of which 3 pages are used."""
    shape = 1, HEADS, SEQ, HEAD_DIM
    near = {
        each: torch.randn(shape, generator=torch.Generator().manual_seed(at)).bfloat16()
        for at, each in enumerate("qkv")
    }
    memory = torch.empty((HEADS - 1) * APART + SEQ * HEAD_DIM, dtype=torch.bfloat16)
    far = {**near, name: memory.as_strided(shape, (HEADS * APART, APART, HEAD_DIM, 1)).copy_(near[name])}
    results = []
    for tensors in (near, far):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
        out = multiattn.fmha(*leaves, backend=backend)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    truth, _ = reference(*near.values())
    torch.testing.assert_close(results[0][0].float(), truth.float(), rtol=2e-2, atol=2e-2)
    for ours, same in zip(*results, strict=True):
        torch.testing.assert_close(ours, same, rtol=1e-2, atol=1e-2)
