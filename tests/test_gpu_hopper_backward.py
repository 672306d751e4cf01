"""The Gluon kernel of all gradients on a Hopper GPU, with configs that no rule has; parity has the rules' own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from multiattn import fmha
from multiattn.operands import Operands, Options
from multiattn.plan.arch import by_name, detect
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.problem import problem_of
from multiattn.run.calls import prepare
from multiattn.triton import BACKEND

SM90 = by_name("sm90")
VARIANT = find_variant(BACKEND, "warp_specialized", "backward")


def missing():
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "" if detect(torch.device("cuda")) == SM90 else "the GPU is no Hopper"


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

WAYS = [
    (64, False, {"k_stages": 2}),
    (64, True, {"descends": True, "q_stages": 3, "dout_stages": 2}),
    (64, True, {"early_scores": False, "k_in_registers": False}),
    (64, False, {"dq_registers": 88}),
    (96, True, {}),
    (128, True, {"descends": False, "dout_stages": 2}),
    (128, False, {"q_stages": 4, "dout_stages": 2}),
]
"""Head_dim, mask, and what differs from the rule's config."""


@pytest.mark.parametrize(("head_dim", "causal", "changes"), WAYS, ids=str)
def test_every_launch_gives_the_gradients_of_the_reference_and_the_same_bits_of_keys(head_dim, causal, changes):
    """Where some blocks have a second tile. dq is summed up in any order, dk and dv are not."""
    torch.manual_seed(7)
    batch, heads, seq_q, seq_kv = 3, 24, 1000, 1500
    q, dout = (torch.randn(batch, heads, seq_q, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, heads // 2, seq_kv, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    leaves = [it.float().requires_grad_() for it in (q, k, v)]
    fmha(*leaves, causal=causal, backend="reference").backward(dout.float())
    out, lse = fmha(q, k, v, causal=causal, backend="triton", return_lse=True)
    problem = problem_of(Operands(q, k, v), Options(right=0 if causal else None))
    plan = plan_variant(BACKEND, VARIANT, problem, SM90, direction="backward")
    assert isinstance(plan, Plan), plan
    plan = replace(plan, config=replace(plan.config, **changes))
    launch = prepare(plan, q.device)
    found = []
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        grads = [torch.full_like(it, float("nan")) for it in (q, k, v)]
        launch(Operands(q, k, v, out=out, lse=lse, dout=dout, dq=grads[0], dk=grads[1], dv=grads[2]))
        found = found or grads
        differ += (grads[1] != found[1]).any() | (grads[2] != found[2]).any()
    assert differ.item() == 0
    for got, leaf in zip(found, leaves, strict=True):
        error = (got.float() - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error < 0.02
