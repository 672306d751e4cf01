"""A prompt that many sequences share: its keys are read once for all of them, and each one's own keys apart.

`multiattn.merge` puts both parts together, to what attention over the whole sequences gives. That is cascade attention.
"""

import torch

import multiattn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, KV_HEADS, HEAD_DIM, SHARED, OWN = 8, 4, 2, 32, 512, 16


def keys(batch: int, length: int) -> torch.Tensor:
    """Keys, or values, of so many sequences."""
    return torch.randn(batch, KV_HEADS, length, HEAD_DIM, device=device, dtype=torch.bfloat16)


q = torch.randn(BATCH, HEADS, OWN, HEAD_DIM, device=device, dtype=torch.bfloat16)
k_shared, v_shared = keys(1, SHARED), keys(1, SHARED)
k_own, v_own = keys(BATCH, OWN), keys(BATCH, OWN)

# The queries of all sequences are one long sequence to the prompt: each of them sees all of it.
together = q.transpose(0, 1).flatten(1, 2)[None]  # [1, HEADS, BATCH * OWN, HEAD_DIM]
out, lse = multiattn.fmha(together, k_shared, v_shared, return_lse=True)
shared = (
    out[0].unflatten(1, (BATCH, OWN)).transpose(0, 1),
    lse[0].unflatten(1, (BATCH, OWN)).transpose(0, 1),
)

# Each sequence's own tokens see those before them.
own = multiattn.fmha(q, k_own, v_own, causal=True, return_lse=True)
out, lse = multiattn.merge(*shared, *own)

# Without that, every sequence has a copy of the prompt.
k, v = (
    torch.cat((prompt.expand(BATCH, -1, -1, -1), its_own), dim=2)
    for prompt, its_own in ((k_shared, k_own), (v_shared, v_own))
)
whole, whole_lse = multiattn.fmha(q, k, v, causal=True, return_lse=True)
print(f"keys: {SHARED + BATCH * OWN} in place of {BATCH * (SHARED + OWN)}")
print(f"beside whole sequences: out {(out - whole).abs().max():.1e}, lse {(lse - whole_lse).abs().max():.1e} apart")
torch.testing.assert_close(out, whole, atol=0.02, rtol=0.02)
torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=1e-3)
