"""Attention to keys in two places, put together as FlashInfer's users do it: by states, and one import changed.

A state is the output over some of the keys and the log, to base 2, of the sum of exp of their scores.
"""

import math

import torch

import multiattn
from multiattn.integrations.flashinfer import merge_state, merge_states  # was: from flashinfer

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HEADS, HEAD_DIM, PLACES = 40, 4, 32, (96, 64, 16)
q = torch.randn(1, HEADS, TOKENS, HEAD_DIM, device=device, dtype=torch.bfloat16)
k, v = torch.randn(2, 1, HEADS, sum(PLACES), HEAD_DIM, device=device, dtype=torch.bfloat16)


def state(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v ``[T, H, D]`` and s ``[T, H]`` of attention to these keys."""
    out, lse = multiattn.fmha(q, k, v, return_lse=True)
    return out[0].transpose(0, 1), lse[0].T * math.log2(math.e)  # ours is the natural log


whole_v, whole_s = state(k, v)
states = [state(*it) for it in zip(k.split(PLACES, dim=2), v.split(PLACES, dim=2), strict=True)]

# Two at a time, or all at once with one dimension more.
two_v, two_s = merge_state(*states[0], *states[1])
by_twos = merge_state(two_v, two_s, *states[2])
at_once = merge_states(*(torch.stack(its, dim=1) for its in zip(*states, strict=True)))
for name, (merged_v, merged_s) in (("by twos", by_twos), ("at once", at_once)):
    print(
        f"{name}, beside all keys: v {(merged_v - whole_v).abs().max():.1e}, s {(merged_s - whole_s).abs().max():.1e}"
    )
    torch.testing.assert_close(merged_v, whole_v, atol=0.02, rtol=0.02)
    torch.testing.assert_close(merged_s, whole_s, atol=1e-3, rtol=1e-3)
