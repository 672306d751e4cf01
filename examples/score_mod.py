"""Attention with scores of one's own: a function as FlexAttention takes it becomes code of each kernel's language.

It may read tensors, learned ones too. Here: a bias per head and distance, clipped, and documents that do not mix.
"""

import torch

import multiattn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, LENGTH, HEAD_DIM, FARTHEST = 2, 4, 96, 32, 16
q, k, v = (torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
by_distance = torch.zeros(HEADS, FARTHEST + 1, device=device, requires_grad=True)
document = (torch.arange(LENGTH, device=device) // 40).expand(BATCH, -1).contiguous()


def score_mod(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """The score of query i and key j, of batch entry b and head h."""
    near = torch.clamp(i - j, 0, FARTHEST)
    score = score + by_distance[h, near]
    return torch.where(document[b, i] == document[b, j], score, -float("inf"))


out = multiattn.fmha(q, k, v, causal=True, score_mod=score_mod)

# Keys of other documents might as well not be there.
alone = multiattn.fmha(q[:, :, 40:80], k[:, :, 40:80], v[:, :, 40:80], causal=True)
print(f"beside the second document alone: {(out[:, :, 40:80] - alone).abs().max().item():.1e}")
torch.testing.assert_close(out[:, :, 40:80], alone, atol=0.02, rtol=0.02)

# The gradient reaches what the function reads.
(out.float() * torch.randn(out.shape, device=device)).sum().backward()
print("gradient of the bias by distance:", tuple(by_distance.grad.shape), f"{by_distance.grad.norm().item():.2f}")
assert by_distance.grad.abs().min() > 0

# Why this backend, and who else could: the Plan of the same call, or the reasons against it.
plan = multiattn.explain(q, k, v, causal=True, score_mod=score_mod)
print(plan.describe())
