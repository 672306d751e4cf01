"""FlexAttention's callables and block masks, by its own names: against PyTorch's eager FlexAttention."""

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import multiattn
from multiattn import flex_attention
from parity.callables import CALLABLES, Sizes

CPU = torch.device("cpu")
BATCH, HEADS, SEQ_Q, SEQ_KV = 2, 4, 70, 90


def tensors(heads_kv=HEADS, seq_kv=SEQ_KV):
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, SEQ_Q, 16), *((BATCH, heads_kv, seq_kv, it) for it in (16, 24)))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


WITH_GRADIENT = ("relative_bias", "wrapped_bias", "bucketed_bias", "shared_bias")
"""Callables whose tensors have a gradient by PyTorch's eager FlexAttention, in fp32."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("case", CALLABLES, ids=lambda case: case.name)
def test_it_is_what_pytorch_makes_of_a_callable(case):
    made = case.make(Sizes(batch=BATCH, heads=HEADS, seq_q=SEQ_Q, seq_kv=SEQ_KV, device=CPU))
    score_mod, mask_mod = made.get("score_mod"), made.get("mask_mod")
    options = {"score_mod": score_mod, "block_mask": None}
    if mask_mod is not None:
        sizes = BATCH, HEADS, SEQ_Q, SEQ_KV
        options["block_mask"] = create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=(32, 16))
    with torch.set_grad_enabled(case.name in WITH_GRADIENT):
        expected = torch_flex_attention(*tensors(), return_lse=True, **options)
        found = flex_attention(*tensors(), return_lse=True, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if found[0].requires_grad:
        captured = (it.cell_contents for it in score_mod.__closure__)
        leaves = [it for it in captured if isinstance(it, torch.Tensor) and it.requires_grad]
        gradients = (torch.autograd.grad(out.square().sum(), leaves) for out, _ in (found, expected))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_an_order_cannot_be_fixed_where_an_index_is_computed():
    table = torch.randn(SEQ_Q + SEQ_KV, requires_grad=True)
    problem = {"score_mod": lambda s, b, h, q, kv: s + table[q - kv + SEQ_KV], "deterministic": True}
    with pytest.raises(multiattn.Unsupported, match="score_gradient: got captured tensor 0, whose index is computed"):
        multiattn.fmha(*tensors(), backend="reference", **problem)
    problem["score_mod"] = lambda s, b, h, q, kv: s + table[q] - table[kv]
    with pytest.raises(multiattn.Unsupported, match="got captured tensor 0, which is loaded 2 times"):
        multiattn.fmha(*tensors(), backend="reference", **problem)


def causal(b, h, q, kv):
    return q >= kv


def blocks(**changes):
    given = {"B": None, "H": None, "Q_LEN": SEQ_Q, "KV_LEN": SEQ_KV, "BLOCK_SIZE": 32} | changes
    return create_block_mask(causal, device="cpu", **given)


@pytest.mark.parametrize("shape", [{}, {"B": BATCH}, {"H": HEADS}, {"BLOCK_SIZE": (16, 64)}, {"Q_LEN": 100}])
def test_a_block_mask_may_be_broadcast_and_longer(shape):
    q, k, v = tensors()
    out = multiattn.fmha(q, k, v, block_mask=blocks(**shape))
    visible = torch.ones(1, 1, SEQ_Q, SEQ_KV, dtype=torch.bool).tril()
    torch.testing.assert_close(out, multiattn.reference(q, k, v, bias=visible)[0])


def test_a_block_mask_is_its_lists():
    """A full block is seen whole, whatever its mask_mod says; entries past a count mean nothing."""
    counts, indices = torch.tensor([[[1, 1, 0]]]).int(), torch.tensor([[[[2, 0], [1, 0], [1, 0]]]]).int()
    full_counts, full_indices = torch.tensor([[[0, 1, 0]]]).int(), torch.tensor([[[[0, 0], [2, 1], [0, 0]]]]).int()
    indices, full_indices = (torch.nn.functional.pad(it, (0, 1)) for it in (indices, full_indices))
    lists = (counts, indices, full_counts, full_indices)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(32, 30), mask_mod=lambda b, h, q, kv: kv % 3 == 0)
    q, k, v = tensors()
    visible = torch.zeros(SEQ_Q, SEQ_KV, dtype=torch.bool)
    visible[:32, 60:90:3] = visible[32:64, 30:60:3] = visible[32:64, 60:90] = True
    scores = (q @ k.mT / 4).masked_fill(~visible, -torch.inf)
    out, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num(0.0) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_it_returns_what_is_asked_for():
    q, k, v = tensors(heads_kv=2)
    out, lse = multiattn.fmha(q, k, v, return_lse=True)
    torch.testing.assert_close(flex_attention(q, k, v, enable_gqa=True), out)
    found, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close((found, aux.lse), (out, lse))
