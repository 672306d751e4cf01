"""PyTorch's attention ops of a GPU by our kernels. Skipped without one."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
    varlen,
)
from torch.nn.attention.bias import causal_lower_right

import multiattn
import multiattn.integrations.torch as provider

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture
def ran(ran):
    """And PyTorch has no choice."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield ran


def qkv(seq_q=300, seq_kv=300, head_dim=64, width_v=None, heads_kv=2):
    shapes = ((2, 4, seq_q, head_dim), *((2, heads_kv, seq_kv, it) for it in (head_dim, width_v or head_dim)))
    return [torch.randn(it, device="cuda", dtype=torch.bfloat16).requires_grad_() for it in shapes]


def results(attention, inputs, **options):
    out = attention(*inputs, **options)
    return out, *torch.autograd.grad(out.double().square().sum(), inputs)


def truth(inputs, **options):
    exact = [it.detach().double().requires_grad_() for it in inputs]
    return results(lambda *it: multiattn.reference(*it, **options, compute_dtype=torch.float64)[0], exact)


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 0.01 * other.norm()


@pytest.mark.parametrize("backend", ["auto", *multiattn.BACKENDS])
def test_sdpa(ran, backend):
    if backend != "auto" and multiattn.backends("cuda")[backend]:
        pytest.skip(f"{backend} cannot run here")
    provider.use(backend)
    inputs = qkv()
    found = results(F.scaled_dot_product_attention, inputs, is_causal=True, enable_gqa=True)
    assert_near(found, truth(inputs, causal=True))
    assert ran == ["forward", "backward"]


def test_a_head_dim_that_pytorch_pads(ran):
    inputs = qkv(head_dim=44)
    assert_near(results(F.scaled_dot_product_attention, inputs, enable_gqa=True), truth(inputs))
    assert ran == ["forward", "backward"]


def test_causal_from_the_bottom_right(ran):
    q, k, v = qkv(200, 300)
    k, v = (it.detach().repeat_interleave(2, 1).requires_grad_() for it in (k, v))
    found = results(F.scaled_dot_product_attention, (q, k, v), attn_mask=causal_lower_right(200, 300))
    assert_near(found, truth((q, k, v), causal=True))
    assert ran == ["forward", "backward"]


def test_dropout_is_pytorchs(ran, caplog):
    out, *_ = results(F.scaled_dot_product_attention, qkv(), dropout_p=0.5, enable_gqa=True)
    assert ran == []
    assert "dropout_p: got 0.5" in caplog.text
    assert out.isfinite().all()


OF_TWO_WIDTHS = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
}
"""Where PyTorch may send values of another width, and whether it would."""


@pytest.mark.parametrize(("head_dim", "width_v"), [(192, 128), (64, 128)])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(300, 300), (300, 200), (200, 300)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize("where", OF_TWO_WIDTHS, ids=lambda it: it.name)
def test_values_of_another_width(ran, where, heads_kv, is_causal, seq_q, seq_kv, head_dim, width_v):
    inputs = qkv(seq_q, seq_kv, head_dim, width_v, heads_kv)
    options = {"is_causal": is_causal, "enable_gqa": heads_kv == 2}
    with sdpa_kernel(where):
        if not OF_TWO_WIDTHS[where](SDPAParams(*inputs, None, 0.0, *options.values())):
            pytest.skip("PyTorch does not send it there")
        found = results(F.scaled_dot_product_attention, inputs, **options)
    with sdpa_kernel(SDPBackend.MATH):
        exact = [it.detach().double().requires_grad_() for it in inputs]
        assert_near(found, results(F.scaled_dot_product_attention, exact, **options))
    assert ran == ["forward", "backward"]


@pytest.mark.parametrize("where", OF_TWO_WIDTHS, ids=lambda it: it.name)
def test_either_backward_follows_either_forward(ran, where):
    """Our results and PyTorch's are laid out alike, so that its backward takes over where ours refuses."""
    inputs = qkv(head_dim=128, width_v=64, heads_kv=4)
    with sdpa_kernel(where):
        ours = F.scaled_dot_product_attention(*inputs)
        restore_flash_attention_impl()
        theirs = F.scaled_dot_product_attention(*inputs)
        of_ours = torch.autograd.grad(ours.double().square().sum(), inputs)
        activate_flash_attention_impl(provider.NAME)
        of_theirs = torch.autograd.grad(theirs.double().square().sum(), inputs)
    expected = truth(inputs)
    assert_near((ours, *of_ours), expected)
    assert_near((theirs, *of_theirs), expected)
    assert ran == ["forward", "backward"]


@pytest.mark.parametrize("where", OF_TWO_WIDTHS, ids=lambda it: it.name)
def test_values_of_another_width_compiled(ran, where):
    torch._dynamo.reset()
    inputs = qkv(width_v=128, heads_kv=4)
    with sdpa_kernel(where):
        found = results(torch.compile(F.scaled_dot_product_attention, fullgraph=True), inputs, is_causal=True)
    assert_near(found, truth(inputs, causal=True))
    assert ran == ["forward", "backward"]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(ran, mode):
    torch._dynamo.reset()
    inputs = qkv()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, mode=mode)
    for _ in range(3):  # the second is captured, the third replayed
        torch.compiler.cudagraph_mark_step_begin()
        assert_near(results(compiled, inputs, is_causal=True, enable_gqa=True), truth(inputs, causal=True))
    assert ran[:2] == ["forward", "backward"]


def test_autocast(ran):
    inputs = [it.detach().float().requires_grad_() for it in qkv()]
    for attention in (F.scaled_dot_product_attention, multiattn.fmha):
        options = {"enable_gqa": True} if attention is F.scaled_dot_product_attention else {}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = results(attention, inputs, **options)
        assert [it.dtype for it in found] == [torch.bfloat16, *[torch.float32] * 3]
        assert_near(found, truth(inputs))
    assert ran == ["forward", "backward"]


def test_varlen_attn(ran):
    lengths_q, lengths_kv = (70, 0, 300, 1), (90, 5, 300, 0)
    tensors = [
        torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for lengths, heads in ((lengths_q, 4), (lengths_kv, 2), (lengths_kv, 2))
    ]
    starts = [torch.tensor((0, *it), device="cuda").cumsum(0).int() for it in (lengths_q, lengths_kv)]
    options = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        options["enable_gqa"] = True
    found = results(lambda *it: varlen.varlen_attn(*it, *starts, max(lengths_q), max(lengths_kv), **options), tensors)

    def each(*tensors):
        parts = zip(*map(torch.split, tensors, (lengths_q, lengths_kv, lengths_kv)), strict=True)
        whole = ([it.transpose(0, 1)[None] for it in part] for part in parts)
        outs = (multiattn.reference(*it, causal=True, compute_dtype=torch.float64)[0] for it in whole)
        return torch.cat([it[0].transpose(0, 1) for it in outs])

    assert_near(found, results(each, [it.detach().double().requires_grad_() for it in tensors]))
    assert ran == ["forward", "backward"]
