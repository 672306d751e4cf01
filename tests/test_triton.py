"""Triton's forward beyond what parity runs: far rows, and what is planned for which problem."""

from dataclasses import replace

import pytest
import torch

from multiattn import Problem, explain, fmha
from multiattn.plan.arch import GRID_MAX, by_name
from multiattn.triton.plain import TritonConfig, why_not_fit

SM90 = by_name("sm90")


def problem_of(**options):
    return Problem.contiguous(**{"batch": 1, "heads_q": 1, "seq_q": 64, "head_dim": 64, **options})


@pytest.mark.parametrize("descriptors", [True, False])
def test_offsets_beyond_32_bits(descriptors):
    """Forty keys, 2^26 elements apart: 5 GB of address space, of which next to nothing is touched."""
    q, k, v = (torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    step = 1 << 26
    memory = torch.empty(40 * step, dtype=torch.bfloat16)[0 if descriptors else 1 :]  # no multiple of 16 bytes
    far = memory.as_strided((1, 1, 40, 16), (0, 0, step, 1)).copy_(k)
    if not descriptors:
        v = torch.empty(1 + v.numel(), dtype=v.dtype)[1:].view(v.shape).copy_(v)
    plans = [explain(q, keys, v, causal=True, backend="triton", variant="full") for keys in (far, k)]
    assert [it.config.descriptors for it in plans] == [descriptors] * 2
    outs = [fmha(q, keys, v, causal=True, backend="triton", variant="full") for keys in (far, k)]
    assert torch.equal(*outs)


def test_descriptors_are_chosen_where_there_can_be_any():
    q, k, v = (torch.zeros(1, 2, 40, 16, dtype=torch.bfloat16) for _ in range(3))
    assert explain(q, k, v, backend="triton").config.descriptors
    assert not explain(q, k[:, :1].expand(-1, 2, -1, -1), v, backend="triton").config.descriptors
    unaligned = torch.zeros(1 + 2 * 40 * 25).bfloat16()[1:].as_strided((1, 2, 40, 24), (0, 40 * 25, 25, 1))
    plan = explain(unaligned, unaligned, unaligned, variant="full", backend="triton")
    assert not plan.config.descriptors
    (reason,) = why_not_fit(plan.problem, plan.arch, replace(plan.config, descriptors=True))
    assert reason.code == "alignment"


def test_a_grid_that_is_too_large_is_a_reason():
    config = TritonConfig(tile_m=64, tile_n=64, warps=4, stages=2)
    assert why_not_fit(problem_of(head_dim=8), SM90, config) == ()
    large = problem_of(batch=1 << 20, heads_q=1 << 11, heads_kv=1, head_dim=8)
    (reason,) = why_not_fit(large, SM90, config)
    assert (reason.code, reason.got) == ("config", f"{GRID_MAX + 1} blocks")
