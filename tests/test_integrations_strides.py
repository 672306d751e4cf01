"""Tensors whose head dim has no unit stride, as a convolution leaves them: every hook copies what the core refuses."""

import pytest
import torch

import multiattn.integrations.flash_attn as flash_attn
from multiattn.integrations.padding import fmha_padded

pytest.importorskip("transformers")

from multiattn.integrations.torch import override
from multiattn.integrations.transformers import attend

LENGTHS = torch.tensor([0, 4, 9], dtype=torch.int32)
aten = torch.ops.aten


def strided(seed, length=9):
    """[B, H, S, D], whose last stride is the length."""
    of = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, 16, length, generator=of).to(torch.bfloat16).mT


def rows(tensor):
    return tensor[0].transpose(0, 1)


def sdpa_gradients(q, k, v):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, lse, 0.0, True)
    return torch.cat(grads)


def flash_op(tensors, *lengths):
    return aten._flash_attention_forward(*tensors, *lengths, 0.0, True, False)[0]


TOKENS = torch.arange(9)[None] > 1
HOOKS = {
    "transformers": lambda q, k, v: attend(torch.nn.Module(), q, k, v, None, is_causal=True)[0],
    "padded": lambda q, k, v: fmha_padded(q, k, v, kv_mask=TOKENS, causal=True),
    "padded step": lambda q, k, v: fmha_padded(q[:, :, -1:], k, v, kv_mask=TOKENS),
    "flash_attn": lambda q, k, v: flash_attn.flash_attn_func(*(it.transpose(1, 2) for it in (q, k, v)), causal=True),
    "flash_attn varlen": lambda q, k, v: flash_attn.flash_attn_varlen_func(
        *map(rows, (q, k, v)), LENGTHS, LENGTHS, 5, 5, causal=True
    ),
    "sdpa": lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0],
    "sdpa backward": sdpa_gradients,
    "flash op": lambda *of: flash_op([it.transpose(1, 2) for it in of], None, None, 9, 9),
    "varlen op": lambda *of: flash_op(map(rows, of), LENGTHS, LENGTHS, 5, 5),
}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_copies_them(name, caplog):
    given = [strided(seed) for seed in range(3)]
    overrides = override()
    try:
        found = HOOKS[name](*given)
        wanted = HOOKS[name](*(it.contiguous() for it in given))
    finally:
        overrides.remove()
    assert torch.equal(found, wanted)
    assert not caplog.records  # none runs PyTorch's own kernel
