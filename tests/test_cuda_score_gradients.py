"""Gradients of captured tensors in CUDA: shared memory and registers. Parity has the numbers."""

import pytest
import torch
from cuda_runs import with_nvrtc

from multiattn.cuda import BACKEND
from multiattn.cuda.instances import launches_of
from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_()


def planned(*, head_dim=64, softcap=None, variant="atomic", arch="sm90"):
    q, k, v = (torch.zeros(1, 2, 48, head_dim, dtype=torch.bfloat16) for _ in range(3))
    operands, options = with_score(Operands(q, k, v), Options(), softcap, None, drawn(1, 2, 48, 48), None)
    problem = problem_of(operands, options)
    return make_plan(BACKEND, problem, by_name(arch), direction="backward", variant=variant, probe=False)


def test_only_what_needs_it_takes_more_shared_memory():
    """Where a bias is added last, its gradient is that of the score. Behind it Q K^T is wanted, in fp32 for 16 bits."""
    plain, capped = (launches_of(planned(softcap=it))[1].kernel for it in (None, 5.0))
    assert capped.smem_bytes - plain.smem_bytes == 64 * 64 * 2
    for arch in ("sm80", "sm86", "sm90"):
        for head_dim in (64, 128, 256):
            for variant in ("atomic", "two_pass"):
                planned(softcap=5.0, arch=arch, head_dim=head_dim, variant=variant)


@with_nvrtc
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
def test_the_gradient_of_a_bias_does_not_spill():
    for facts in read_plan(planned()):
        assert facts.hot_spills == 0
