"""Calls under autocast and profilers, and of tensors without memory."""

import pytest
import torch
import torch.nn.functional as F

import multiattn
from multiattn import fmha
from multiattn.run import compat


def qkv(dtype=torch.float32, width_v=24, **options):
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 16), (2, 16), (2, width_v)
    tensors = (torch.randn(2, heads, 12, width, generator=generator, dtype=dtype) for heads, width in sizes)
    return [it.to(**options).requires_grad_() for it in tensors]


def with_gradients(attention, inputs, **options):
    out = attention(*inputs, **options)
    return out, *torch.autograd.grad(out.float().square().sum(), inputs)


def packed(q, k, v):
    lengths = torch.tensor([0, 24], dtype=torch.int32)
    named = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 24, "max_seqlen_kv": 24}
    return multiattn.fmha_varlen(*(it.transpose(1, 2).flatten(0, 1) for it in (q, k, v)), **named)


@pytest.mark.parametrize("has_hook", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_sdpa(dtype, has_hook, monkeypatch):
    if not has_hook:
        monkeypatch.setattr(compat, "autocast_active", lambda: True)
    inputs = qkv()
    expected = with_gradients(fmha, [it.detach().to(dtype).requires_grad_() for it in inputs])
    with torch.autocast("cpu", dtype=dtype):
        found = with_gradients(fmha, inputs)
        for other in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            of_sdpa = F.scaled_dot_product_attention(*qkv(other), enable_gqa=True)
            assert fmha(*qkv(other)).dtype == of_sdpa.dtype
        assert packed(*inputs).dtype == dtype
    assert [it.dtype for it in found] == [dtype, *[torch.float32] * 3]
    torch.testing.assert_close(found, expected, check_dtype=False)
    assert fmha(*inputs).dtype == torch.float32
    with pytest.raises(TypeError, match="needs q, k, v; got None"), torch.autocast("cpu"):
        fmha(None, None, None)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_autocast_inside_and_around_compiled_code():
    inputs = qkv()

    def inside(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fmha(q, k, v)

    torch._dynamo.reset()
    expected = with_gradients(inside, inputs)
    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, inputs), expected)
    around = torch.compile(fmha, fullgraph=True, backend="aot_eager")
    assert around(*inputs).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(around(*inputs), expected[0])


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_tensors_without_memory_have_results_of_the_right_layout(backend):
    expected = with_gradients(fmha, qkv(), causal=True)
    found = with_gradients(fmha, qkv(device="meta"), causal=True, backend=backend)
    described = [[(it.shape, it.stride(), it.dtype) for it in results] for results in (found, expected)]
    assert described[0] == described[1]
    assert {it.device.type for it in found} == {"meta"}
    q, k, v = qkv(device="meta", dtype=torch.bfloat16)
    assert multiattn.explain(q.detach(), k.detach(), v.detach(), arch="sm90").arch.name == "sm90"
    with pytest.raises(ValueError, match="device: got meta; allowed cpu and cuda"):
        multiattn.explain(q, k, v)


def test_a_profiler_shows_ops_by_name():
    with torch.profiler.profile() as profile:
        with_gradients(fmha, qkv())
    assert {"multiattn::fmha_forward", "multiattn::fmha_backward"} <= {it.key for it in profile.key_averages()}
