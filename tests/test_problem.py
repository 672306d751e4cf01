"""Validation: what is wrong for every backend is said before anything is planned, by name, with the shapes."""

import math

import pytest
import torch

import multiattn
from multiattn.problem import Problem


def tensors(q=(1, 4, 5, 16), kv=(1, 2, 7, 16), dtype=torch.bfloat16):
    return torch.zeros(q, dtype=dtype), torch.zeros(kv, dtype=dtype), torch.zeros(kv, dtype=dtype)


def good(**changes):
    q, k, v = tensors()
    return {"q": q, "k": k, "v": v} | changes


BAD = {
    "q is a list": (good(q=[1.0]), TypeError, "q must be a torch.Tensor; got list"),
    "v is None": (good(v=None), TypeError, r"fmha\(\) needs q, k, v; got None or nothing for v"),
    "integer dtype": (dict(zip("qkv", tensors(dtype=torch.int32), strict=True)), TypeError, "got torch.int32; allowed"),
    "mixed dtypes": (good(k=tensors(dtype=torch.float16)[1]), TypeError, "share one dtype"),
    "sparse": (good(q=tensors()[0].float().to_sparse()), TypeError, "dense strided"),
    "two devices": (good(q=tensors()[0].to("meta")), ValueError, "one device"),
    "rank 3": (good(q=tensors()[0][0]), ValueError, "q must have rank 4.*got rank 3"),
    "k and v differ": (good(v=tensors(kv=(1, 2, 8, 16))[2]), ValueError, "k and v must have one shape"),
    "batch sizes differ": (good(q=tensors(q=(2, 4, 5, 16))[0]), ValueError, "share the batch size"),
    "head_dims differ": (good(q=tensors(q=(1, 4, 5, 8))[0]), ValueError, "share head_dim"),
    "GQA ratio": (good(q=tensors(q=(1, 3, 5, 16))[0]), ValueError, "got Hq=3, Hkv=2"),
    "no heads": (dict(zip("qkv", tensors((1, 0, 5, 16), (1, 0, 7, 16)), strict=True)), ValueError, "at least 1"),
    "stride on D": (good(q=torch.zeros(1, 4, 16, 5, dtype=torch.bfloat16).mT), ValueError, "unit stride on D"),
    "causal is a string": (good(causal="yes"), TypeError, "causal must be a bool; got str"),
    "causal is 1": (good(causal=1), TypeError, "causal must be a bool; got int"),
    "window is a number": (good(window=3), TypeError, r"window must be a pair \(left, right\) or None; got 3"),
    "window of one": (good(window=(3,)), TypeError, r"window must be a pair .*got \(3,\)"),
    "window of a bool": (good(window=(True, 0)), TypeError, "window's left must be an int or None; got bool"),
    "window of a float": (good(window=(0, 1.5)), TypeError, "window's right must be an int or None; got float"),
    "window as FlashAttention has it": (good(window=(-1, 0)), ValueError, "window's left: got -1; allowed 0 and more"),
    "sinks are a list": (good(sinks=[0.0] * 4), TypeError, "sinks must be a torch.Tensor or None; got list"),
    "a sink for each key head": (good(sinks=torch.zeros(2)), ValueError, r"sinks: got shape \[2\]; allowed \[4\]"),
    "integer sinks": (good(sinks=torch.zeros(4).int()), TypeError, "sinks must be .*got torch.int32"),
    "sinks elsewhere": (good(sinks=torch.zeros(4, device="meta")), ValueError, "sinks must be on the device of q, cpu"),
    "scale is NaN": (good(scale=math.nan), ValueError, "scale must be finite.*nan"),
    "scale is infinite": (good(scale=-math.inf), ValueError, "scale must be finite.*-inf"),
    "scale is a tensor": (good(scale=torch.tensor(1.0)), TypeError, "scale must be a float or None; got Tensor"),
    "scale is a bool": (good(scale=True), TypeError, "scale must be a float or None; got bool"),
    "scale is beyond fp32": (good(scale=1e39), ValueError, r"scale must be finite, up to 2.359e\+38 .*got 1e\+39"),
    "log2 e times the scale is beyond fp32": (good(scale=-2.4e38), ValueError, "scale must be finite.*-2.4e"),
    "scale is beyond every float": (good(scale=10**400), ValueError, "scale must be finite.*inf"),
    "a negated view": (good(q=torch._neg_view(tensors()[0])), ValueError, "q must hold its own values"),
    "scale cannot be hashed": (good(scale=[1.0]), TypeError, "scale must be a float or None; got list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_before_any_launch(name):
    arguments, error, message = BAD[name]
    for backend in ("auto", *multiattn.BACKENDS):
        with pytest.raises(error, match=message):
            multiattn.fmha(**arguments, backend=backend)


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
