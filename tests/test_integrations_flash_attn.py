"""FlashAttention's functions: each against the reference in fp32, and each option that is refused.

`python -m parity flash-attention` runs FlashAttention's own tests on the same functions.
"""

import pytest
import torch

import multiattn
from multiattn.integrations import flash_attn
from parity.flash_attention_plugin import unpad_input

HEADS_Q, HEADS_KV, SEQ_Q, SEQ_KV = 4, 2, 23, 37
HEAD_DIM, HEAD_DIM_V = 20, 12
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": -0.3, "causal": True},
    "window": {"window_size": (5, 2)},
    "window_of_a_tensor": {"window_size": torch.tensor([3, 0])},
    "window_left": {"window_size": (4, -1), "causal": True},
    "window_right": {"window_size": (None, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([[0.1, 0.2, 0.0, 0.7], [0.4, 0.3, 0.9, 0.1]]), "causal": True},
    "all": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.3, 0.1, 0.2, 0.5]), "window_size": (11, 3)},
}
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def plain(q, k, v, *, softmax_scale=None, window_size=(-1, -1), softcap=0.0, **options):
    """The reference in this layout: [B, S, H, D] to out and lse [B, H, S]."""
    window = tuple(None if it is None or it < 0 else int(it) for it in window_size)
    options |= {"scale": softmax_scale, "window": window, "softcap": softcap or None}
    out, lse = multiattn.reference(*(it.transpose(1, 2) for it in (q, k, v)), **options)
    return out.transpose(1, 2), lse


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def qkv(batch=2, seq_q=SEQ_Q, seq_kv=SEQ_KV, heads_kv=HEADS_KV):
    return tensors((batch, seq_q, HEADS_Q, HEAD_DIM), *((batch, seq_kv, heads_kv, it) for it in (HEAD_DIM, HEAD_DIM_V)))


def assert_same(found, expected, inputs):
    """Both have equal values, and give `inputs` equal gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad(it, inputs, dout, retain_graph=True) for it in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@EACH_OPTION
def test_flash_attn_func(options):
    inputs = qkv()
    out, lse, nothing = flash_attn.flash_attn_func(*inputs, **options, return_attn_probs=True)
    expected, expected_lse = plain(*inputs, **options)
    assert_same(out, expected, inputs)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert nothing is None


def test_positions_are_those_of_flash_attention_2():
    inputs = qkv(seq_q=SEQ_KV, seq_kv=SEQ_Q)  # the first queries see no key
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = flash_attn.flash_attn_func(*inputs, 0.0, 0.2, True, (9, -1), 3.0, slopes, True, True)[0]
    options = {"softmax_scale": 0.2, "causal": True, "window_size": (9, -1), "softcap": 3.0, "alibi_slopes": slopes}
    assert_same(found, plain(*inputs, **options)[0], inputs)


def test_packed_tensors():
    options = OPTIONS["all"]
    q, kv, three = tensors((2, SEQ_Q, 4, 16), (2, SEQ_KV, 2, HEADS_KV, 16), (2, SEQ_Q, 3, 4, 16))
    found = flash_attn.flash_attn_kvpacked_func(q, kv, **options)
    assert_same(found, plain(q, *kv.unbind(2), **options)[0], (q, kv))
    found, lse = flash_attn.flash_attn_qkvpacked_func(three, **options, return_softmax_lse=True)
    expected, expected_lse = plain(*three.unbind(2), **options)
    assert_same(found, expected, (three,))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    heads = three.flatten(2, 3)[:, :, :8]  # four of q, two of k, two of v
    found = flash_attn.flash_attn_qkvpacked_func(heads, **options, num_heads_q=4)
    assert_same(found, plain(*heads.split((4, 2, 2), dim=2), **options)[0], (three,))


@EACH_OPTION
def test_flash_attn_varlen_func(options):
    q, k, v = qkv()
    lengths_q, lengths_kv = torch.tensor([SEQ_Q, 9]), torch.tensor([14, SEQ_KV])
    (packed_q, _, cu_q, *_), (packed_k, _, cu_k, *_), (packed_v, *_) = (
        unpad_input(it, torch.arange(it.shape[1]) < lengths[:, None])
        for it, lengths in ((q, lengths_q), (k, lengths_kv), (v, lengths_kv))
    )
    given = packed_q, packed_k, packed_v, cu_q, cu_k, SEQ_Q, SEQ_KV
    out, lse, _ = flash_attn.flash_attn_varlen_func(*given, **options, return_attn_probs=True)
    outs, lses = [], []
    for index, (of_q, of_kv) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        mine = dict(options)
        if (slopes := mine.get("alibi_slopes")) is not None and slopes.ndim == 2:
            mine["alibi_slopes"] = slopes[index]
        one = plain(*(it[index : index + 1, :count] for it, count in ((q, of_q), (k, of_kv), (v, of_kv))), **mine)
        outs.append(one[0][0])
        lses.append(one[1][0])
    assert_same(out, torch.cat(outs), (q, k, v))
    torch.testing.assert_close(lse, torch.cat(lses, dim=1), rtol=1e-5, atol=1e-5)


def test_packed_tensors_of_packed_sequences():
    cu = torch.tensor([0, 5, 5, 21], dtype=torch.int32)
    q, kv, three = tensors((21, 4, 16), (21, 2, 2, 16), (21, 3, 4, 16))
    k, v = kv.unbind(1)
    lengths = (cu, cu, 16, 16)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    found = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths, causal=True)
    assert_same(found, expected, (q, kv))
    expected = flash_attn.flash_attn_varlen_func(*three.unbind(1), *lengths, window_size=(3, 1))
    found, _ = flash_attn.flash_attn_varlen_qkvpacked_func(three, cu, 16, window_size=(3, 1), return_softmax_lse=True)
    assert_same(found, expected, (three,))


def test_sinks_are_one_more_column():
    q, k, v = qkv(batch=1)
    (sinks,) = tensors((HEADS_Q,))
    expected, lse = plain(q, k, v, causal=True)
    expected = expected * torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]
    found = flash_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks)
    assert_same(found, expected, (q, k, v, sinks))
    lengths = (*(torch.tensor([0, it], dtype=torch.int32) for it in (SEQ_Q, SEQ_KV)), SEQ_Q, SEQ_KV)
    packed = (it.squeeze(0) for it in (q, k, v))
    found = flash_attn.flash_attn_varlen_func(*packed, *lengths, causal=True, learnable_sink=sinks)
    assert_same(found, expected.squeeze(0), (q, k, v, sinks))


def test_a_named_backend_runs_its_kernel_and_keeps_the_layout():
    q, k, v = (it.detach().half() for it in tensors(*((1, 16, 1, 16),) * 3))
    out = flash_attn.flash_attn_func(q, k, v, causal=True, backend="triton")
    assert out.is_contiguous()
    torch.testing.assert_close(out.float(), plain(q.float(), k.float(), v.float(), causal=True)[0], rtol=0, atol=2e-3)


@torch.no_grad()
def test_layers_with_other_windows_compile_into_one_graph():
    torch._dynamo.reset()
    inputs = [it.half() for it in qkv()]
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="eager")
    for options in ({"window_size": (3, 0)}, {"window_size": (7, 1), "softcap": 2.0}, {"window_size": (-1, -1)}):
        expected = flash_attn.flash_attn_func(*inputs, **options, return_attn_probs=True)
        assert all(map(torch.equal, compiled(*inputs, **options, return_attn_probs=True)[:2], expected[:2]))


def test_hints_change_nothing():
    inputs = qkv()
    hints = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8, "attention_chunk": 0, "qv": None, "q_descale": None}
    assert torch.equal(flash_attn.flash_attn_func(*inputs, **hints), flash_attn.flash_attn_func(*inputs))
