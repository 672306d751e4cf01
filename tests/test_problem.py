"""Problems and masks outside the kernels: what is wrong for every backend, sizes and strides; bounds, pairs, names."""

import itertools
import math

import pytest
import torch

import multiattn
from multiattn.mask import Band, band_of, parse_band
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


# ---------------------------------------------------------------- masks

BOUNDS = (None, 0, 1, 3, 7, 20, 2**40)
LENGTHS = list(itertools.product((0, 1, 2, 5, 9), (0, 1, 3, 8, 12)))


@pytest.mark.parametrize("left", BOUNDS)
@pytest.mark.parametrize("right", BOUNDS)
def test_a_band_is_what_the_contract_says(left, right):
    band = Band(left, right)
    for seq_q, seq_kv in LENGTHS:
        level = torch.arange(seq_q)[:, None] + seq_kv - seq_q
        key = torch.arange(seq_kv)[None, :]
        expected = torch.ones(seq_q, seq_kv, dtype=torch.bool)
        if left is not None:
            expected &= key >= level - left
        if right is not None:
            expected &= key <= level + right
        for same in (band, band.within(seq_q, seq_kv), Band(*band.reach(seq_q, seq_kv))):
            assert torch.equal(same.visible(seq_q, seq_kv, torch.device("cpu")), expected)
            assert same.count_pairs(seq_q, seq_kv) == int(expected.sum())
        assert max(band.reach(seq_q, seq_kv)) < 2**31


@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(3, 0), Band(1, 2), Band(None, 3), Band(7, None)])
def test_some_queries_have_a_mask_of_their_own(band):
    for seq_q, seq_kv in itertools.product((1, 5, 9), (1, 3, 8, 12)):
        whole = band.visible(seq_q, seq_kv, torch.device("cpu"))
        for first, last in itertools.combinations(range(seq_q + 1), 2):
            part, keys = band.of_rows(first, last, seq_q, seq_kv)
            found = torch.zeros_like(whole[first:last])
            found[:, keys] = part.visible(last - first, keys.stop - keys.start, torch.device("cpu"))
            assert torch.equal(found, whole[first:last])


def test_only_the_causal_mask_needs_no_numbers():
    kinds = {band: band.kind for band in (Band(), Band(right=0), Band(right=1), Band(left=3), Band(3, 0))}
    assert list(kinds.values()) == ["full", "causal", "two_sided", "two_sided", "two_sided"]
    assert Band(100, 100).within(5, 7) == Band()
    assert Band(100, 0).within(5, 7) == Band(right=0)
    assert Band(right=0).within(1, 7) == Band(right=0)  # a caller's causal stays what it is


def test_causal_bounds_a_window():
    assert band_of(True, (3, None)) == band_of(True, (3, 5)) == Band(3, 0)
    assert band_of(False, [None, 5]) == Band(None, 5)


@pytest.mark.parametrize("text", ["full", "causal", "window:1023:0", "window:-:3", "window:3:-"])
def test_a_mask_has_a_name(text):
    assert str(parse_band(text)) == text


@pytest.mark.parametrize("text", ["", "banded", "window", "window:1", "window:1:-2", "window:a:1"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=f"mask: got '{text}'; allowed full, causal, or window:LEFT:RIGHT"):
        parse_band(text)
