"""`torch.nn.attention.varlen` by our kernels, against `multiattn.fmha` of each sequence by itself."""

import inspect

import pytest
import torch
from test_integrations_torch import assert_promised
from torch.nn.attention import varlen

import multiattn.integrations.torch as provider
from multiattn import fmha
from multiattn.integrations import flash

LENGTHS_Q, LENGTHS_KV = (5, 0, 17, 1), (9, 3, 17, 0)
HEADS, HEADS_KV, HEAD_DIM = 4, 2, 16


@pytest.fixture
def active():
    handle = provider.override()
    yield
    handle.remove()


def packed(heads_kv=HEADS_KV, width_v=HEAD_DIM):
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS_Q), HEADS, HEAD_DIM), *((sum(LENGTHS_KV), heads_kv, it) for it in (HEAD_DIM, width_v)))
    tensors = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    starts = [torch.tensor((0, *it)).cumsum(0).to(torch.int32) for it in (LENGTHS_Q, LENGTHS_KV)]
    return tensors, (*starts, max(LENGTHS_Q), max(LENGTHS_KV))


def each(tensors, **options):
    """Out and lse of every sequence by itself."""
    parts = zip(*(it.split(n) for it, n in zip(tensors, (LENGTHS_Q, LENGTHS_KV, LENGTHS_KV), strict=True)), strict=True)
    found = [fmha(*(it.transpose(0, 1)[None] for it in of_one), return_lse=True, **options) for of_one in parts]
    return torch.cat([out[0].transpose(0, 1) for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


MASKS = {(-1, -1): {}, (-1, 0): {"causal": True}, (4, 2): {"window": (4, 2)}, (3, 0): {"window": (3, 0)}}


@pytest.mark.parametrize("width_v", [HEAD_DIM, 24])
@pytest.mark.parametrize("window_size", MASKS)
def test_varlen_attn(active, window_size, width_v):
    tensors, lengths = packed(width_v=width_v)
    asked = {"return_aux": varlen.AuxRequest(lse=True), "scale": 0.3, "window_size": window_size}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # before, nobody asked
        asked["enable_gqa"] = True
    out, lse = varlen.varlen_attn(*tensors, *lengths, **asked)
    expected = each(tensors, scale=0.3, **MASKS[window_size])
    torch.testing.assert_close((out, lse), expected)
    gradients, their = (torch.autograd.grad(it.float().square().sum(), tensors) for it in (out, expected[0]))
    torch.testing.assert_close(gradients, their, rtol=0.02, atol=0.02)


def test_into_a_tensor_of_the_caller(active):
    varlen_attn_out = getattr(varlen, "varlen_attn_out", None)
    if varlen_attn_out is None:
        pytest.skip("no varlen_attn_out in this release of PyTorch")
    tensors, lengths = packed()
    out = torch.full_like(tensors[0], torch.nan, requires_grad=False)
    with torch.no_grad():
        varlen_attn_out(out, *tensors, *lengths, window_size=(-1, 0), enable_gqa=True)
        torch.testing.assert_close(out, each(tensors, causal=True)[0])


def test_what_we_have_no_kernel_for_is_told(active):
    tensors, (starts_q, starts_kv, *longest) = packed()
    call = torch.ops.aten._flash_attention_forward
    used = torch.tensor(LENGTHS_KV, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="multiattn refused: seqused_k: got Tensor; allowed None"):
        call(*tensors, starts_q, starts_kv, *longest, 0.0, False, False, seqused_k=used)
    with pytest.raises(NotImplementedError, match=r"multiattn refused: cu_seqlens_q\.dtype: got torch\.int64"):
        call(*tensors, starts_q.long(), starts_kv, *longest, 0.0, False, False)


@pytest.mark.parametrize("is_packed", [False, True])
def test_results_are_what_fakes_promise(active, is_packed):
    """In memory heads before rows, as no result is by itself."""
    tensors, lengths = packed()
    tensors = [it.detach() for it in tensors]
    if not is_packed:
        tensors, lengths = [torch.stack((it, -it)) for it in tensors], (None, None, sum(LENGTHS_Q), sum(LENGTHS_KV))
    tensors = [it.transpose(-3, -2).contiguous().transpose(-3, -2) for it in tensors]

    forward = (*tensors, *lengths, 0.0, True, False)
    out, lse, *random = found = flash.flash_attention_forward(*forward)
    assert_promised("_flash_attention_forward", forward, found)
    backward = (out, *tensors, out, lse, *lengths, 0.0, True, *random[:2])
    assert_promised("_flash_attention_backward", backward, flash.flash_attention_backward(*backward))
    if not is_packed:
        q, k, v = (it.transpose(1, 2) for it in tensors)
        torch.testing.assert_close(out.transpose(1, 2), fmha(q, k, v, causal=True))
