"""Validation: what is wrong for every backend is said before anything is planned, by name, with the shapes."""

import math

import pytest
import torch

import multiattn
from multiattn.problem import Problem


def tensors(q=(1, 4, 5, 16), kv=(1, 2, 7, 16), dtype=torch.bfloat16):
    return torch.zeros(q, dtype=dtype), torch.zeros(kv, dtype=dtype), torch.zeros(kv, dtype=dtype)


@pytest.mark.parametrize("sizes", [{"seq_kv": -1}, {"batch": -2}, {"heads_kv": 3}, {"dtype": "fp8"}])
def test_bad_sizes_are_named_without_tensors(sizes):
    good_sizes = {"batch": 1, "heads_q": 2, "seq_q": 3, "head_dim": 8}
    with pytest.raises(ValueError, match="got"):
        Problem.contiguous(**(good_sizes | sizes))


def test_sizes_beyond_all_memory_are_a_problem_like_any_other():
    assert Problem.contiguous(batch=1, heads_q=1, seq_q=10**15, head_dim=10**6).strides_q[0] == 10**21


def test_the_scale_splits_into_a_sign_and_a_positive_factor():
    def of(scale):
        problem = Problem.contiguous(batch=1, heads_q=1, seq_q=1, head_dim=8, scale=scale)
        return problem.scale_sign, problem.scale_log2

    assert of(2.0) == (1, 2 * math.log2(math.e))
    assert of(-2.0) == (-1, 2 * math.log2(math.e))
    assert of(0.0)[0] == of(1e-40)[0] == of(-1e-40)[0] == 0
    assert of(0.0)[1] > 0


def test_a_problem_of_tensors_is_that_of_their_sizes():
    q, k, v = tensors()
    made = Problem.contiguous(batch=1, heads_q=4, heads_kv=2, seq_q=5, seq_kv=7, head_dim=16)
    assert Problem.of(q, k, v) == made
    assert hash(Problem.of(q, k, v)) == hash(made)


def test_alignment_is_of_the_worst_address_or_stride():
    wide = torch.zeros(2, 4, 5, 24, dtype=torch.bfloat16)
    q = wide[..., :16]
    assert Problem.of(q, q, q).alignment == 16
    assert Problem.of(q, q, wide[..., 4:20]).alignment == 8
    assert Problem.of(q, q, wide[..., 1:17]).alignment == 2
    odd = torch.zeros(2, 4, 5, 17, dtype=torch.bfloat16)[..., :16]
    assert Problem.of(q, odd, q).alignment == 2


def test_the_stride_of_a_single_element_dimension_does_not_matter():
    q, k, v = tensors((1, 1, 5, 16), (1, 1, 5, 16))
    odd = q.as_strided(q.shape, (3, 5, 16, 1))
    assert Problem.of(odd, k, v) == Problem.of(q, k, v)


def test_out_lies_in_memory_as_q_does():
    q = torch.zeros(2, 5, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.zeros(2, 4, 7, 16, dtype=torch.bfloat16)
    assert multiattn.fmha(q, k, k).stride() == q.stride()
    assert multiattn.fmha(q.contiguous(), k, k).is_contiguous()
    assert multiattn.fmha(q[:, :, ::2], k, k).is_contiguous()
    assert multiattn.fmha(q[:, :1].expand(2, 4, 5, 16), k, k).is_contiguous()
