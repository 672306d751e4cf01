"""Code that was written for FlashAttention: its functions with their signatures and layouts, and one import changed.

Tensors are ``[batch, length, heads, head_dim]``, packed ones ``[tokens, heads, head_dim]``.
"""

import torch

import multiattn
from multiattn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func  # was: from flash_attn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 48, 4, 2, 32
q = torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
k, v = torch.randn(2, BATCH, LENGTH, KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)

# The last 16 keys up to each query, its own among them.
out = flash_attn_func(q, k, v, causal=True, window_size=(15, 0))
out.float().square().mean().backward()
print("out", tuple(out.shape), "gradient of q", f"{q.grad.float().norm().item():.2f}")

# multiattn's own call has heads before positions; a transposed view costs no copy.
q_, k_, v_ = (it.transpose(1, 2) for it in (q.detach(), k, v))
ours = multiattn.fmha(q_, k_, v_, window=(15, 0)).transpose(1, 2)
torch.testing.assert_close(out.detach(), ours)

# Both sequences packed, one after the other: each attends to itself alone.
starts = torch.tensor([0, LENGTH, 2 * LENGTH], device=device, dtype=torch.int32)
packed = (it.detach().flatten(0, 1) for it in (q, k, v))
out_packed = flash_attn_varlen_func(*packed, starts, starts, LENGTH, LENGTH, causal=True, window_size=(15, 0))
apart = (out_packed - out.detach().flatten(0, 1)).abs().max().item()
print(f"packed beside padded: {apart:.1e} apart")
assert apart < 0.02
