"""The two tests of the parity suite themselves: each must fail for every tensor that is wrong."""

import contextlib
from dataclasses import replace

import pytest
import torch

from parity import test_parity as suite
from parity.cases import CASES
from parity.launch import prepare_case, prepare_gradients
from parity.results import Contender
from parity.tolerance import Mismatch

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
CASE = replace(BY_NAME["len_1x300_full"], name="suite_of_the_suite", seq_q=9, seq_kv=20, head_dim=16)


@pytest.mark.parametrize("wrong", ["nothing", "out", "lse"])
def test_a_wrong_result_of_a_forward_fails_the_suite(wrong, monkeypatch):
    spoil(monkeypatch, "launch_plan", ("out", "lse"), wrong)
    with expected(wrong):
        suite.test_parity(CASE, Contender(backend="reference"), CPU)


@pytest.mark.parametrize("wrong", ["nothing", "dq", "dk", "dv"])
def test_a_wrong_gradient_fails_the_suite(wrong, monkeypatch):
    spoil(monkeypatch, "launch_gradients", ("dq", "dk", "dv"), wrong)
    with expected(wrong):
        suite.test_gradients(CASE, Contender(backend="reference", direction="backward"), "reference", CPU)


def spoil(monkeypatch, name, tensors, wrong):
    """Let one of the tensors that a launch writes be wrong in its last column."""
    launch = getattr(suite, name)

    def spoilt(*given):
        written = launch(*given)
        if wrong in tensors:
            written.all[tensors.index(wrong)][..., -1] += 1.0
        return written

    monkeypatch.setattr(suite, name, spoilt)


def expected(wrong):
    return contextlib.nullcontext() if wrong == "nothing" else pytest.raises(Mismatch, match=f"^{wrong} ")


def test_what_the_suite_compares_with_is_attention_in_fp64():
    """PyTorch's own in fp64, differentiated by it: a truth in the dtype of the inputs is 10^9 times as far away."""
    inputs, truth = prepare_case(CASE, CPU)
    upstream, grads = prepare_gradients(CASE, CPU)
    leaves = [tensor.double().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    scores = leaves[0] @ leaves[1].mT * CASE.head_dim**-0.5
    results = scores.softmax(dim=-1) @ leaves[2], scores.logsumexp(dim=-1)
    given = [upstream.dout.double()]
    if upstream.dlse is not None:
        given.append(upstream.dlse.double())
    wanted = torch.autograd.grad(results[: len(given)], leaves, given)
    pairs = zip((*truth.all, *grads.all), (*results, *wanted), strict=True)
    for expected, want in pairs:
        assert expected.truth.dtype == torch.float64
        torch.testing.assert_close(expected.truth, want.detach(), rtol=1e-12, atol=1e-12)
