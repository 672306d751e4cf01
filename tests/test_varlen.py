"""`fmha_varlen`: what it refuses and says, its ops, and that nothing is made anew for other lengths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import multiattn
from multiattn.packed import LIST_FIELDS, ROWS_MIN
from multiattn.problem import Problem
from multiattn.sequences import Batching


def batch(lengths, heads=(4, 2), head_dim=16, dtype=torch.bfloat16, behind=0, seed=0):
    """q, k and v of sequences with these lengths, and the other arguments."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    rows = int(cu_seqlens[-1]) + behind
    sizes = ((rows, each, head_dim) for each in (heads[0], heads[1], heads[1]))
    q, k, v = (torch.randn(it, generator=generator).to(dtype) for it in sizes)
    longest = max(lengths, default=0)
    starts = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return (q, k, v), starts | {"max_seqlen_q": longest, "max_seqlen_kv": longest}


def test_backward_without_autograd_is_that_of_autograd():
    tensors, lengths = batch((5, 0, 33, 7), behind=3)
    sinks = torch.randn(4, requires_grad=True)
    leaves = [it.requires_grad_() for it in tensors]
    out, lse = multiattn.fmha_varlen(*leaves, **lengths, sinks=sinks, return_lse=True)
    dout = torch.randn(out.shape, dtype=out.dtype)
    dout[45:] = torch.nan  # of rows that are in no sequence
    dlse = torch.randn(lse.shape)
    found = torch.autograd.grad((out, lse), (*leaves, sinks), (dout, dlse))
    saved = (it.detach() for it in (*leaves, out, lse))
    again = multiattn.fmha_varlen_backward(*saved, dout, dlse=dlse, **lengths, sinks=sinks.detach())
    assert len(again) == len(found)
    for one, other in zip(found, again, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_compiles_once_for_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_varlen, backend=counter, fullgraph=True, dynamic=True)
    for seed, lengths in enumerate(((5, 9), (31, 2, 17), (8, 8, 8, 8, 3), (90,))):
        tensors, rest = batch(lengths, seed=seed)
        got = compiled(*tensors, **rest, causal=True)
        torch.testing.assert_close(got, multiattn.fmha_varlen(*tensors, **rest, causal=True), rtol=0, atol=0)
    assert counter.frame_count == 1


def test_explain_says_what_runs():
    tensors, lengths = batch((5, 3))
    plan = multiattn.explain(*tensors, **lengths, causal=True)
    assert plan.problem.packing == Batching.packed(2)
    assert str(plan.problem) == "packed B=2 Hq=4 Hkv=2 Tq=8 Tkv=8 D=16 bf16 causal"
    with pytest.raises(TypeError, match="cu_seqlens_kv must be a"):
        multiattn.explain(*tensors, cu_seqlens_q=lengths["cu_seqlens_q"])


def test_lists_have_room_for_every_tile():
    for lengths in ((1, 1, 1), (16, 17, 0), (5000,), ()):
        rows = sum(lengths) + 20  # some behind the last
        tiles = sum(-(-length // ROWS_MIN) for length in (*lengths, 20))
        spec = Batching.packed(len(lengths))
        assert tiles <= spec.tiles_max(rows, ROWS_MIN)
        (layout, *_) = spec.tile_layouts(rows, rows).values()
        assert layout.shape == (spec.tiles_max(rows, ROWS_MIN), len(LIST_FIELDS))


def test_no_plan_depends_on_lengths():
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 1, "head_dim": 64, "window": (100, 0)}
    problems = {
        Problem.contiguous(**sizes, seq_q=rows, batching=Batching.packed(sequences))
        for rows in (1, 31, 128, 4096, 65536)
        for sequences in (1, 7, 300)
    }
    described = {(it.strides_q, it.strides_k, it.strides_out, it.alignment, it.band) for it in problems}
    assert len(described) == 1
