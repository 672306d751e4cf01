"""Training a small GPT: every backend follows the reference's loss curve, and a broken gradient does not."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from multiattn import reference, reference_backward
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect
from multiattn.plan.backend import BACKENDS
from parity import training
from parity.__main__ import main
from parity.training import TINY, Baseline, attend_by_reference, attend_with, round_at_random, train

CPU = torch.device("cpu")
SHORT = replace(TINY, steps=12)
"""Steps enough for a kernel on the CPU: parity holds its gradients."""


@functools.cache
def baseline(dtype, config=TINY) -> Baseline:
    return Baseline.of(config, dtype, CPU)


def attend_through(change, dtype=torch.float16):
    """The reference's forward with its backward's dq, dk and dv changed."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = reference(q, k, v, causal=True)
            out = out.to(q.dtype)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            grads = reference_backward(q, k, v, out, lse, dout, causal=True)
            return change(*(grad.to(q.dtype) for grad in grads))

    return lambda q, k, v: Attention.apply(q.to(dtype), k.to(dtype), v.to(dtype)).float()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_follows_the_reference(backend):
    if reasons := registry.get(backend).probe(detect(CPU)):
        pytest.skip("; ".join(map(str, reasons)))
    losses = train(SHORT, attend_with(backend, torch.float16), CPU)
    assert not baseline(torch.float16, SHORT).complaint(losses)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_formulas_of_backward_follow_the_reference(dtype):
    losses = train(TINY, attend_through(lambda dq, dk, dv: (dq, dk, dv), dtype), CPU)
    assert not baseline(dtype).complaint(losses)


@pytest.mark.parametrize(
    "change",
    [
        lambda dq, dk, dv: (dq * 1.05, dk * 1.05, dv * 1.05),
        lambda dq, dk, dv: (dq * 1.05, dk * 1.05, dv),
        lambda dq, dk, dv: (dq, dk, dv * 1.05),
        lambda dq, dk, dv: (dq.roll(1, dims=1), dk, dv),
        lambda dq, dk, dv: (dq, dk.roll(1, dims=0), dv),
        lambda dq, dk, dv: (dq, dv, dk),
        lambda dq, dk, dv: (dq, -dk, dv),
        lambda dq, dk, dv: (dq, dk, torch.zeros_like(dv)),
        lambda dq, dk, dv: (dq, dk * math.nan, dv),
    ],
    ids=["all_5_percent", "dq_dk_5_percent", "dv_5_percent", "dq_head", "dk_batch", "swap", "sign", "zero", "nan"],
)
def test_a_broken_gradient_leaves_the_curve(change):
    losses = train(TINY, attend_through(change), CPU)
    assert baseline(torch.float16).complaint(losses)


def test_the_model_learns_and_rounding_explains_little():
    curve = baseline(torch.float16)
    assert curve.losses[-1] < 0.1 * curve.losses[0]
    assert curve.losses[0] > 0.9 * math.log(TINY.vocabulary)
    assert len(curve.losses) == TINY.steps + 1 == 51
    assert list(curve.allowed) == sorted(curve.allowed)
    assert 0 < curve.allowed[-1] < 0.01


def test_training_is_the_same_each_time():
    short = replace(TINY, steps=3)
    one, two = (train(short, attend_by_reference(torch.bfloat16), CPU) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_at_random_is_right_on_average(dtype):
    x = torch.full((20_000,), 1.0 + 0.3 * torch.finfo(dtype).eps)
    rounded = round_at_random(x, dtype, torch.Generator().manual_seed(0)).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + torch.finfo(dtype).eps}
    assert float(rounded.mean() - 1.0) == pytest.approx(0.3 * torch.finfo(dtype).eps, rel=0.05)
    leaf = torch.ones(3, requires_grad=True)
    round_at_random(leaf, dtype, torch.Generator().manual_seed(0)).sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3))


def test_the_command_prints_the_curves_and_fails_for_one_that_leaves(monkeypatch, capsys):
    monkeypatch.setattr(training, "TINY", replace(TINY, steps=5))
    assert main(["train", "--backend", "reference", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "follows" in printed
    assert "allowed" in printed
    monkeypatch.setattr(training, "TINY", replace(TINY, steps=10))
    monkeypatch.setattr(training, "attend_with", lambda name, dtype: attend_through(lambda q, k, v: (q, v, k), dtype))
    assert main(["train", "--backend", "reference", "--device", "cpu"]) == 1
    assert "off by" in capsys.readouterr().out
