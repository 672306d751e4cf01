"""A prompt that many sequences share: its keys are read once for all of them, and each one's own keys apart.

`multiattn.merge` puts both parts together, to what attention over the whole sequences gives. That is cascade attention.
A score_mod counts positions in the call that it is given to, so the prompt's call adds an offset.
"""

from collections.abc import Callable

import torch

import multiattn

T = torch.Tensor
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, KV_HEADS, HEAD_DIM, SHARED, OWN, EXTENT = 8, 4, 2, 32, 512, 16, 64


def keys(batch: int, length: int) -> torch.Tensor:
    """Keys, or values, of so many sequences."""
    return torch.randn(batch, KV_HEADS, length, HEAD_DIM, device=device, dtype=torch.bfloat16)


q = torch.randn(BATCH, HEADS, OWN, HEAD_DIM, device=device, dtype=torch.bfloat16)
k_shared, v_shared = keys(1, SHARED), keys(1, SHARED)
k_own, v_own = keys(BATCH, OWN), keys(BATCH, OWN)
# Without the cascade, every sequence has a copy of the prompt.
k, v = (
    torch.cat((prompt.expand(BATCH, -1, -1, -1), its_own), dim=2)
    for prompt, its_own in ((k_shared, k_own), (v_shared, v_own))
)
table = torch.randn(HEADS, EXTENT, device=device)


def relative(first: int) -> Callable[[T, T, T, T, T], T]:
    """Adds a learned number for each distance to the keys before a token, as far as the table reaches.

    Row i of a call is the token at place ``first + i % OWN`` of a sequence whose keys the call counts from 0.
    """

    def score_mod(score: T, b: T, h: T, i: T, j: T) -> T:
        distance = first + i % OWN - j
        is_near = (distance >= 0) & (distance < EXTENT)
        return score + torch.where(is_near, table[h, distance.clamp(0, EXTENT - 1)], 0.0)

    return score_mod


# Own keys need no offset: the token and its keys lack the prompt alike, so their distance is right.
for name, of_prompt, of_own, of_whole in (
    ("plain", None, None, None),
    ("relative", relative(SHARED), relative(0), relative(SHARED)),
):
    # The queries of all sequences are one long sequence to the prompt: each of them sees all of it.
    together = q.transpose(0, 1).flatten(1, 2)[None]  # [1, HEADS, BATCH * OWN, HEAD_DIM]
    out, lse = multiattn.fmha(together, k_shared, v_shared, score_mod=of_prompt, return_lse=True)
    shared = (
        out[0].unflatten(1, (BATCH, OWN)).transpose(0, 1),
        lse[0].unflatten(1, (BATCH, OWN)).transpose(0, 1),
    )

    # Each sequence's own tokens see those before them. A cache counts positions in itself, as they are here.
    lengths = torch.full((BATCH,), OWN, dtype=torch.int32, device=device)
    own = multiattn.fmha_kvcache(q, k_own, v_own, seqlens_kv=lengths, causal=True, score_mod=of_own, return_lse=True)
    out, lse = multiattn.merge(*shared, *own)

    whole, whole_lse = multiattn.fmha(q, k, v, causal=True, score_mod=of_whole, return_lse=True)
    print(f"{name}: keys: {SHARED + BATCH * OWN} in place of {BATCH * (SHARED + OWN)}")
    print(f"beside whole sequences: out {(out - whole).abs().max():.1e}, lse {(lse - whole_lse).abs().max():.1e} apart")
    torch.testing.assert_close(out, whole, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=1e-3)
