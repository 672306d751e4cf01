"""The two tests of the parity suite themselves: each must fail for every tensor that is wrong."""

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


@pytest.mark.parametrize("wrong", [None, 0, 1], ids=["right", "out", "lse"])
def test_a_wrong_result_of_a_forward_fails_the_suite(wrong, monkeypatch):
    def spoil(plan, inputs):
        return _spoil(launch(plan, inputs), wrong)

    launch = suite.launch_plan
    monkeypatch.setattr(suite, "launch_plan", spoil)
    _expect(wrong, suite.test_parity, CASE, Contender(backend="reference"), CPU)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2], ids=["right", "dq", "dk", "dv"])
def test_a_wrong_gradient_fails_the_suite(wrong, monkeypatch):
    def spoil(*given):
        return _spoil(launch(*given), wrong)

    launch = suite.launch_gradients
    monkeypatch.setattr(suite, "launch_gradients", spoil)
    who = Contender(backend="reference", direction="backward")
    _expect(wrong, suite.test_gradients, CASE, who, "reference", CPU)


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


def _spoil(written, wrong):
    if wrong is not None:
        written.all[wrong][..., -1] += 1.0
    return written


def _expect(wrong, test, *given):
    if wrong is None:
        test(*given)
        return
    with pytest.raises(Mismatch):
        test(*given)
