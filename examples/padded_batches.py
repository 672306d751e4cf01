"""A padded batch, as a tokenizer makes it: its tokens run packed, so that padding costs no attention.

`fmha_padded` takes the mask of the keys. Nothing waits for the device, so one CUDA graph serves every mask.
"""

import torch

import multiattn
from multiattn.integrations.padding import fmha_padded

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM, LENGTHS = 4, 32, (40, 7, 23)
BATCH, LONGEST = len(LENGTHS), max(LENGTHS)
shape = BATCH, HEADS, LONGEST, HEAD_DIM
q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

# 1 for a token, 0 for padding, here on the left, as for generation.
positions = torch.arange(LONGEST, device=device)
attention_mask = (positions >= LONGEST - torch.tensor(LENGTHS, device=device)[:, None]).long()

out = fmha_padded(q, k, v, kv_mask=attention_mask, causal=True)
out.float().square().sum().backward()

# Each row is what its tokens give by themselves; padding is 0, and so is its gradient.
for row, length in enumerate(LENGTHS):
    padding, tokens = slice(LONGEST - length), slice(LONGEST - length, None)
    alone = multiattn.fmha(*(it.detach()[row : row + 1, :, tokens] for it in (q, k, v)), causal=True)
    apart = (out[row, :, tokens] - alone[0]).abs().max().item()
    print(f"row of {length} tokens beside itself alone: {apart:.1e} apart")
    assert apart < 0.02
    assert not out[row, :, padding].any()
    assert not q.grad[row, :, padding].any()
