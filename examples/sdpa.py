"""PyTorch's own attention by these kernels: an import and a call, and models stay as they are.

What these kernels refuse, such as fp32 on a GPU or dropout, still runs PyTorch's own.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import multiattn.integrations.torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(d_model=128, nhead=4, dropout=0.0, batch_first=True).to(device, torch.bfloat16)
x, goal = torch.randn(2, 2, 64, 128, device=device, dtype=torch.bfloat16)
mask = torch.nn.Transformer.generate_square_subsequent_mask(64, device=device, dtype=torch.bfloat16)


def step() -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of a weight of the attention."""
    layer.zero_grad()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # not cuDNN's, which PyTorch prefers on some GPUs
        out = layer(x, src_mask=mask, is_causal=True)
        (out.float() * goal).sum().backward()
    return out.detach(), layer.self_attn.in_proj_weight.grad.clone()


before = step()
torch.nn.attention.activate_flash_attention_impl("multiattn")
after = step()
print("attention of PyTorch by", torch.nn.attention.current_flash_attention_impl())

for name, theirs, ours in zip(("output", "gradient"), before, after, strict=True):
    error = (theirs - ours).float().norm() / theirs.float().norm()
    print(f"{name} beside PyTorch's own kernel: {error:.1e}")
    assert error < 0.02  # a few roundings of bfloat16

# One backend in place of the fastest of each call; on the CPU that interprets its kernels.
multiattn.integrations.torch.use("triton")
print(f"by Triton: {(step()[0] - after[0]).abs().max().item():.1e} apart")

multiattn.integrations.torch.use("auto")
torch.nn.attention.restore_flash_attention_impl()
