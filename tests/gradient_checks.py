"""Shared by the backward tests of every backend: a launch in poisoned memory, its error against the formulas."""

import math

import torch

from multiattn import reference, reference_backward
from multiattn.operands import Operands
from multiattn.plan import backend as registry

PRECISE = torch.float64
FP32_NOISE = 1e-5
"""Noise of ``dp - delta``: two fp32 sums of some hundred products of about 1 cancel where a row sees one key only."""
NAMES = ("dq", "dk", "dv")


def make_tensors(*, batch=1, heads_q=2, heads_kv=1, seq_q=37, seq_kv=75, head_dim=64, head_dim_v=None):
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(seq_q * 1000 + seq_kv + head_dim)
    queries, keys, columns = (batch, heads_q, seq_q), (batch, heads_kv, seq_kv), head_dim_v or head_dim
    shapes = (*queries, head_dim), (*keys, head_dim), (*keys, columns), (*queries, columns)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def saved(problem, q, k, v):
    """Results of a forward, exact but for their roundings: out in the dtype of q, lse in fp32."""
    out, lse = reference(q, k, v, window=problem.band.window, scale=problem.scale, compute_dtype=PRECISE)
    return out.to(q.dtype), lse.float()


def run(plan, q, k, v, dout, dlse=None, *, out=None, lse=None):
    """dq, dk and dv of a launch, NaN before it; out and dout laid out as a launch gets them."""
    problem = plan.problem
    if out is None:
        out, lse = saved(problem, q, k, v)

    def empty(like, strides):
        return torch.empty_strided(like.shape, (*strides, 1), dtype=q.dtype).fill_(math.nan)

    out, dout = (empty(it, problem.strides_out).copy_(it) for it in (out, dout))
    grads = empty(q, problem.strides_dq), empty(k, problem.strides_dk), empty(v, problem.strides_dv)
    registry.get(plan.backend).backward.prepare(plan)(Operands(q, k, v, out, lse.contiguous(), dout, dlse, *grads))
    return grads


def check(plan, q, k, v, dout, dlse=None, *, naive_dtype=None):
    """dq, dk and dv: wrong by at most twice the error of the formulas in the same dtype, plus one rounding.

    `naive_dtype` is for problems that the formulas cannot do in the dtype of q. Nothing that is given is written.
    """
    given = [tensor for tensor in (q, k, v, dout, dlse) if tensor is not None]
    before = [tensor.clone() for tensor in given]
    grads = run(plan, q, k, v, dout, dlse)
    assert all(map(torch.equal, given, before))
    options = {"window": plan.problem.band.window, "scale": plan.problem.scale}
    truth = reference(q, k, v, compute_dtype=PRECISE, **options)
    truths = reference_backward(q, k, v, *truth, dout, dlse=dlse, compute_dtype=PRECISE, **options)
    out, lse = saved(plan.problem, q, k, v)
    naives = reference_backward(q, k, v, out, lse, dout, dlse=dlse, compute_dtype=naive_dtype or q.dtype, **options)
    for name, grad, truth, naive in zip(NAMES, grads, truths, naives, strict=True):
        rounding = torch.finfo(q.dtype).eps * truth.abs().max().item() + FP32_NOISE
        allowed = 2 * (naive.double() - truth).abs().max().item() + rounding
        assert (grad.double() - truth).abs().max().item() <= allowed < math.inf, (name, plan)
    return grads
