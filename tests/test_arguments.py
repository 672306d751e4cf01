"""Arguments as callers have them: NumPy's numbers, a dropout of 0, no mask of padding, dtypes that a CPU alone runs."""

import warnings

import numpy as np
import pytest
import torch

import multiattn
from multiattn import explain, flex_attention, fmha, fmha_backward, fmha_kvcache, fmha_varlen, told
from multiattn.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from multiattn.integrations.padding import fmha_padded
from multiattn.run import cpu_only

bf16 = torch.bfloat16
HEADS, DIM = 2, 16


def qkv(seq=9, batch=2, dtype=bf16, dim=DIM):
    torch.manual_seed(0)
    return torch.randn(3, batch, HEADS, seq, dim).to(dtype)


PAIRS = {
    "causal": (np.bool_(True), True),
    "causal in an array": (np.array(True), True),
    "window": ((np.int64(2), np.array(1)), (2, 1)),
    "scale": (np.float32(0.5), 0.5),
    "scale in an array": (np.array(0.5), 0.5),
    "softcap": (np.array(3.0, dtype=np.float16), 3.0),
    "deterministic": (np.bool_(True), True),
    "return_lse": (np.bool_(True), True),
    "dropout_p": (np.float32(0.0), 0.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_numbers_of_numpy_are_python_s(name):
    its, pythons = PAIRS[name]
    name = name.partition(" ")[0]
    q, k, v = qkv()
    torch.testing.assert_close(fmha(q, k, v, **{name: its}), fmha(q, k, v, **{name: pythons}), rtol=0, atol=0)
    if name == "return_lse":
        return
    assert explain(q, k, v, **{name: its}) == explain(q, k, v, **{name: pythons})
    rows = [it.transpose(1, 2).flatten(0, 1) for it in (q, k, v)]
    starts = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.tensor([0, 9, 18], dtype=torch.int32))
    most = (dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), it) for it in (np.int64(9), 9))
    found, expected = (
        fmha_varlen(*rows, **starts, **n, **{name: it}) for n, it in zip(most, (its, pythons), strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if name in ("deterministic", "dropout_p"):
        return
    given, splits = {"seqlens_kv": torch.tensor([4, 9], dtype=torch.int32)}, ((np.int32(1), its), (1, pythons))
    found, expected = (fmha_kvcache(q, k, v, **given, num_splits=n, **{name: it}) for n, it in splits)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_plan_has_python_s_numbers():
    """An option is part of keys and of generated names."""
    plan = explain(*qkv(), causal=np.bool_(True), window=(np.int64(2), None), scale=np.float32(0.5))
    its = plan.problem.band.left, plan.problem.band.right, plan.problem.scale
    assert [*map(type, its)] == [int, int, float]
    rows, starts = torch.randn(9, HEADS, DIM, dtype=bf16), torch.tensor([0, 9], dtype=torch.int32)
    lengths = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), np.int64(9))
    plan = explain(rows, rows, rows, cu_seqlens_q=starts, cu_seqlens_kv=starts, softcap=np.float64(2.0), **lengths)
    assert type(plan.problem.packing.max_q) is type(plan.problem.packing.max_kv) is int
    assert type(plan.problem.score.scalars[0]) is float


def test_a_dropout_of_nothing_is_taken_and_another_refused():
    q, k, v = qkv()
    out, lse = fmha(q, k, v, dropout_p=0.0, dropout_seed=None, return_lse=True)
    torch.testing.assert_close(out, fmha(q, k, v), rtol=0, atol=0)
    torch.testing.assert_close(flash_attn_func(q, k, v, dropout_p=np.float64(0)), flash_attn_func(q, k, v))
    starts = torch.tensor([0, 9], dtype=torch.int32)
    packed = (torch.randn(9, HEADS, DIM, dtype=bf16),) * 3
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    for run in (
        lambda **options: fmha(q, k, v, **options),
        lambda **options: explain(q, k, v, **options),
        lambda **options: fmha_backward(q, k, v, out, lse, out, **options),
        lambda **options: fmha_varlen(*packed, **lengths, **options),
        lambda **options: multiattn.fmha_varlen_backward(*packed, packed[0], lse[0], packed[0], **lengths, **options),
    ):
        with pytest.raises(NotImplementedError, match=r"dropout_p: got 0.1; allowed 0.0.*while evaluating.*scaled_dot"):
            run(dropout_p=0.1)


def test_a_batch_without_padding_needs_no_mask():
    q, k, v = qkv()
    for options in ({}, {"causal": True}, {"window": (3, 0), "softcap": 5.0}):
        torch.testing.assert_close(fmha_padded(q, k, v, kv_mask=None, **options), fmha(q, k, v, **options))


# ---------------------------------------------------------------- caches that are full


def cache(pages):
    """FlashAttention's caches of room for 8 keys of each of 2 sequences, and what says where they are."""
    if not pages:
        return torch.randn(2, 2, 8, HEADS, DIM).to(bf16), {}
    return torch.randn(2, 5, 4, HEADS, DIM).to(bf16), {"page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pages", [False, True])
def test_a_full_cache_takes_no_more_keys(pages, packed):
    (k_cache, v_cache), options = cache(pages)
    shape = (2, HEADS, DIM) if packed else (2, 1, HEADS, DIM)
    new = torch.randn(shape).to(bf16)
    if packed:
        starts = torch.tensor([0, 1, 2], dtype=torch.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": 1}

    def run(*lengths, **others):
        lengths = torch.tensor(lengths, dtype=torch.int32)
        return flash_attn_with_kvcache(new, k_cache, v_cache, new, new, cache_seqlens=lengths, **options | others)

    assert run(7, 3).shape == shape
    before = k_cache.clone()
    with pytest.raises(ValueError, match=r"cache_seqlens: got 8 keys of sequence 1 and 1 new ones; allowed 8 in all"):
        run(7, 8)
    with pytest.raises(ValueError, match="got -1 keys of sequence 0"):
        run(-1, 3)
    assert torch.equal(k_cache, before)
    if packed:  # a full one that gets none
        assert run(7, 8, cu_seqlens_k_new=torch.tensor([0, 1, 1], dtype=torch.int32)).shape == shape
    else:
        none = new[:, :0]
        full = {"cache_seqlens": 8, **options}
        out = flash_attn_with_kvcache(new, k_cache, v_cache, none, none, **full)
        torch.testing.assert_close(out, flash_attn_with_kvcache(new, k_cache, v_cache, **options))


# ---------------------------------------------------------------- told once


@pytest.fixture
def warned(monkeypatch):
    """The messages of a process that has been told nothing."""
    monkeypatch.setattr(told, "_told", set())
    monkeypatch.setattr(cpu_only, "_seen", set())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield lambda: [str(it.message) for it in found if str(it.message).startswith("multiattn: ")]


def test_what_a_cpu_alone_runs_is_told_once_for_each_kind(warned):
    for _ in range(2):
        of_dtype, of_dim = (qkv(dtype=it) for it in (torch.float32, torch.float64)), (qkv(dim=it) for it in (20, 36))
        for inputs in (*of_dtype, *of_dim, qkv(seq=5, dim=20)):
            expected = multiattn.reference(*inputs)[0].to(inputs.dtype)
            torch.testing.assert_close(fmha(*inputs), expected, rtol=0.02, atol=0.02)
    messages = warned()
    assert len(messages) == 3
    for message, reason in zip(messages, ("dtype: got fp32", "dtype: got fp64", "head_dim: got 20"), strict=True):
        assert "on the CPU, as the reference. On a GPU every kernel refuses it" in message
        assert reason in message


@pytest.mark.parametrize("compiled", [False, True])
def test_a_warning_names_the_line_of_the_call(warned, compiled):
    run = torch.compile(fmha, backend="eager") if compiled else fmha
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(*qkv(seq=11 + compiled, dtype=torch.float32))  # a plan that no other test has
    assert [it.filename for it in found if str(it.message).startswith("multiattn: ")] == [__file__]


def test_a_wide_gradient_is_told_and_nothing_else_is(warned):
    wide = qkv(dim=520)
    fmha(*wide)
    fmha(*qkv())
    fmha(*qkv(dtype=torch.float32), backend="reference")
    fmha(*qkv(dtype=torch.float32).to("meta"))
    assert explain(*qkv(dtype=torch.float32)).backend == "reference"
    assert not warned()
    fmha(*(it.clone().requires_grad_() for it in wide))
    (message,) = warned()
    assert "every kernel of a gradient refuses it: head_dim: got 520" in message


@pytest.mark.parametrize("compiled", [False, True])
def test_options_of_flex_attention_s_kernels_are_ignored_and_told(compiled, warned):
    q, k, v = qkv()

    def run(q, k, v):
        return flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})

    out = (torch.compile(run, backend="eager", fullgraph=True) if compiled else run)(q, k, v)
    run(q, k, v)
    torch.testing.assert_close(out, flex_attention(q, k, v))
    (message,) = warned()
    assert "kernel_options are ignored" in message
