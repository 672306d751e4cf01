"""Shared by the tests of cuTile's forward: tensors, a launch of one config on the CPU, and its error."""

import math

import torch

import multiattn
from multiattn import Problem, reference
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan

BACKEND = get("cutile")


def make_inputs(
    *, batch=1, heads_q=2, heads_kv=1, seq_q=113, seq_kv=203, head_dim=64, dtype=torch.bfloat16, spread=1.0
):
    """q, k and v; scores grow with the square of `spread`."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads, seq, factor):
        return (torch.randn(batch, heads, seq, head_dim, generator=generator) * factor).to(dtype)

    return normal(heads_q, seq_q, spread), normal(heads_kv, seq_kv, spread), normal(heads_kv, seq_kv, 1.0)


def grow(k, *, start, factor):
    """Keys from `start` on that many times as long: scores grow by hundreds in log2."""
    k[:, :, start:] *= factor
    return k


def launch(config, q, k, v, *, variant=None, **options):
    """out and lse of a config."""
    plan = make_plan(BACKEND, Problem.of(q, k, v, **options), ARCHS["cpu"], variant=variant, config=config)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    multiattn.launch(plan, q, k, v, out, lse, sinks=options.get("sinks"))
    return out, lse


def check(config, q, k, v, *, variant=None, **options):
    """Positions of NaN and inf as the reference's, and an error of at most twice the naive one's, plus one rounding."""
    out, lse = launch(config, q, k, v, variant=variant, **options)
    truth, truth_lse = reference(q, k, v, compute_dtype=torch.float64, **options)
    # In fp32, with one rounding of the weights to come: in the 16 bit dtypes naive scores of this size are any numbers.
    naive, _ = reference(q, k, v, compute_dtype=torch.float32, **options)
    for got, want in ((out, truth), (lse, truth_lse)):
        torch.testing.assert_close(got.isnan(), want.isnan())
        torch.testing.assert_close(got.isinf() * got.sign(), (want.isinf() * want.sign()).to(got.dtype), equal_nan=True)
    finite = truth.isfinite()
    truth, out, naive = (tensor.double()[finite] for tensor in (truth, out, naive))
    if truth.numel():
        rounding = (v[v.isfinite()].abs().max() * torch.finfo(q.dtype).eps).item()
        naive_error = (naive - truth)[naive.isfinite()].abs().max().item()
        assert (out - truth).abs().max().item() <= 2 * naive_error + rounding
    finite = truth_lse.isfinite()
    torch.testing.assert_close(lse[finite].double(), truth_lse[finite], rtol=1e-5, atol=1e-5)
