"""Values that are the first columns of keys: told from all others, in problems, calls, launches and emitted kernels."""

import argparse
from dataclasses import replace

import aot_fakes
import driver_fakes
import pytest
import torch

import multiattn
from multiattn import aot
from multiattn.cuda.instances import kernels_of
from multiattn.cuda.naming import walking_kernel
from multiattn.cuda.source import translation_unit
from multiattn.inspect.options import add_problem, called_problem
from multiattn.operands import Operands, Options
from multiattn.packed import as_batch_of_one
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, get, make_plan
from multiattn.plan.features import Features
from multiattn.problem import Problem
from multiattn.run.calls import get_forward
from multiattn.sequences import Batching, Indices

ROWS = torch.zeros(2, 1, 6, 24, dtype=torch.bfloat16)
"""A latent cache: keys of 24 columns, values of 16."""

PAIRS = {
    "the first columns": (ROWS, ROWS[..., :16], True),
    "all columns": (ROWS, ROWS, True),
    "another view of them": (ROWS, ROWS.as_strided(ROWS.shape, ROWS.stride()), True),
    "rows of tokens": (ROWS.transpose(1, 2), ROWS.transpose(1, 2)[..., :16], True),
    "every other row": (ROWS[:, :, ::2], ROWS[:, :, ::2, :16], True),
    "a broadcast head": (ROWS.expand(2, 4, 6, 24), ROWS.expand(2, 4, 6, 24)[..., :16], True),
    "strides that nobody walks": (ROWS[:1], ROWS.as_strided((1, 1, 6, 16), (7, 5, 24, 1)), True),
    "later columns": (ROWS, ROWS[..., 8:], False),
    "the next row": (ROWS[:, :, :5], ROWS[:, :, 1:], False),
    "a copy": (ROWS, ROWS[..., :16].clone(), False),
    "more columns": (ROWS[..., :16], ROWS, False),
    "other rows": (ROWS[:, :, :3], ROWS[:, :, ::2], False),
    "rows of another length": (ROWS[:1], ROWS.as_strided((1, 1, 6, 16), (144, 144, 16, 1)), False),
    "other heads": (ROWS.view(1, 2, 6, 24), ROWS[:1].expand(1, 2, 6, 24), False),
    "no keys": (ROWS[:, :, :0], ROWS[:, :, :0], False),
    "no memory": (ROWS.to("meta"), ROWS.to("meta"), False),
}


@pytest.mark.parametrize(("k", "v", "expected"), PAIRS.values(), ids=PAIRS)
def test_values_are_found_in_keys(k, v, expected):
    q = torch.zeros(k.shape[0], k.shape[1], 3, k.shape[3], dtype=k.dtype, device=k.device)
    problem = Problem.of(q, k, v)
    assert problem.v_in_k == Features.of(problem).v_in_k == (" v in k" in str(problem)) == expected
    assert not expected or problem.strides_v == problem.strides_k


@pytest.mark.parametrize("page", [None, 3])
def test_values_are_found_in_keys_of_caches(page):
    cache = ROWS.view(4, 1, 3, 24) if page else ROWS
    lengths, table = torch.ones(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    indices = Indices(seqlens_kv=lengths, page_table=table if page else None)
    options = Options(batching=Batching("pages" if page else "cache"))
    q, sized = torch.zeros(2, 4, 1, 24, dtype=torch.bfloat16), {"entries": 4 if page else 2, "page": page}
    found = Problem.of_operands(Operands(q, cache, cache[..., :16], indices=indices), options)
    batching = Batching.cached(2, max_pages=2 if page else 0, **sized)
    sizes = {"batch": 2, "heads_q": 4, "heads_kv": 1, "seq_q": 1, "seq_kv": 6, "head_dim": 24, "head_dim_v": 16}
    assert found == Problem.contiguous(**sizes, batching=batching, v_in_k=True)
    apart = Problem.of_operands(Operands(q, cache, cache[..., :16].clone(), indices=indices), options)
    assert apart == Problem.contiguous(**sizes, batching=batching)


def test_values_are_found_in_keys_of_packed_batches():
    rows, starts = ROWS.view(12, 1, 24), torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = map(as_batch_of_one, (rows, rows, rows[..., :16]))
    indices = Indices(cu_seqlens_q=starts, cu_seqlens_kv=starts)
    options = Options(batching=Batching())
    sizes = {"batch": 1, "heads_q": 1, "seq_q": 12, "head_dim": 24, "head_dim_v": 16, "batching": Batching.packed(2)}
    assert Problem.of_operands(Operands(q, k, v, indices=indices), options) == Problem.contiguous(**sizes, v_in_k=True)


def test_sizes_say_where_values_are():
    sizes = {"batch": 2, "heads_q": 1, "seq_q": 6, "head_dim": 24}
    assert Problem.contiguous(**sizes, head_dim_v=16, v_in_k=True) == Problem.of(ROWS, ROWS, ROWS[..., :16])
    assert Problem.contiguous(**sizes, head_dim_v=16).strides_v == (96, 96, 16)
    asked = argparse.ArgumentParser()
    add_problem(asked, required=True)
    for shape, flags in (("2,1,6,24/16", ()), ("2,4/1,1/96,24/16", ("--cache", "16"))):
        apart, within = (
            called_problem(asked.parse_args(["--shape", shape, *flags, *more])) for more in ((), ("--latent",))
        )
        assert within == replace(apart, v_in_k=True, strides_v=apart.strides_k)
    with pytest.raises(ValueError, match="head_dim_v: got 32; allowed up to the 24 columns of k, with v in k"):
        Problem.contiguous(**sizes, head_dim_v=32, v_in_k=True)


@pytest.mark.usefixtures("fresh_calls")
@pytest.mark.parametrize("wide", [24, 16], ids=["views", "the same tensor"])
def test_calls_share_only_with_those_whose_values_are_where_theirs_are(wide):
    """A guard of tensors knows no addresses: what it passes may read v from k, or may not."""

    def ready(k, v):
        return get_forward(Operands(torch.zeros(2, 4, 1, wide), k, v), Options(backend="reference"))

    for _ in range(3):
        one, other = (torch.randn(2, 1, 6, wide) for _ in range(2))
        of_one, of_other = ready(one, one[..., :16]), ready(other, other[..., :16])
        apart = ready(one, other[..., :16])
        assert of_one is of_other
        assert apart is ready(other, one[..., :16])
        assert (of_one.plan.problem.v_in_k, apart.plan.problem.v_in_k) == (True, False)


def test_a_plan_that_reads_k_alone_is_not_for_values_elsewhere():
    """A plan that knows of no values in keys reads them where they are, in keys, too."""
    rows, far = (torch.randn(2, 1, 6, 24, dtype=torch.bfloat16) for _ in range(2))
    within, apart = (make_plan(get("reference"), Problem.of(rows, rows, it), ARCHS["cpu"]) for it in (rows, far))
    out, lse = torch.empty(2, 1, 6, 24, dtype=torch.bfloat16), torch.empty(2, 1, 6)
    for plan, v in ((within, rows), (apart, rows), (apart, far)):
        multiattn.launch(plan, rows, rows, v, out, lse)
        assert torch.equal(out, multiattn.fmha(rows, rows, v, backend="reference"))
    with pytest.raises(ValueError, match=r"the tensors are not those of the plan: .*; the plan is for .* v in k"):
        multiattn.launch(within, rows, rows, far, out, lse)


SIZES = {"batch": 2, "heads_q": 4, "heads_kv": 1, "seq_q": 3, "seq_kv": 70, "head_dim": 64}
CACHED = {**SIZES, "batching": Batching.cached(2, 12, 16, 5), "seq_kv": 80}


@pytest.mark.parametrize("sizes", [{**it, "seq_q": 40} for it in (SIZES, CACHED)], ids=["dense", "pages"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_code_of_most_kernels_is_the_same(backend, sizes):
    """Else every caller that passes one tensor twice would have it compiled anew."""
    plans = [
        make_plan(get(backend), Problem.contiguous(**sizes, v_in_k=it), ARCHS["sm90"], probe=False)
        for it in (False, True)
    ]
    assert plans[0].config == plans[1].config
    if backend == "cuda":
        assert translation_unit(kernels_of(plans[0])) == translation_unit(kernels_of(plans[1]))


def test_a_kernel_that_reads_k_alone_says_so():
    made = {}
    for v_in_k in (False, True):
        plan = make_plan(get("cuda"), Problem.contiguous(**SIZES, v_in_k=v_in_k), ARCHS["sm90"], probe=False)
        like = kernels_of(plan)[0]
        more = {"header": like.header, "params": like.params, "threads": like.threads}
        made[v_in_k] = [
            walking_kernel(plan, "SplitTraits", "C", entry="e", sizes="s", reads_v_in_k=it, **more)
            for it in (False, True)
        ]
    assert made[False][0] == made[False][1] == made[True][0]
    assert "_v_in_k" in made[True][1].name
    assert ".v_in_k = true}" in made[True][1].traits


@pytest.mark.parametrize("name", BACKENDS)
def test_an_emitted_kernel_takes_values_where_it_reads_them(name, tmp_path, monkeypatch):
    driver = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver(), device=0)
    monkeypatch.setattr(aot, "detect", lambda device: ARCHS["sm90"])
    plain = aot_fakes.loaded(tmp_path / "plain", name)
    within = aot_fakes.loaded(tmp_path / "within", name, v_in_k=True)
    assert [it.plan.problem.v_in_k for it in (plain, within)] == [False, True]
    driver.sizes = [abi.size_of(it) for it in plain._try_binding(plain.plan.problem).arguments]
    q, k = torch.zeros(2, 4, 101, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 101, 64, dtype=torch.bfloat16)
    for kernel, v in ((plain, k), (plain, k.clone()), (within, k)):
        kernel(q, k, v)
    assert len(driver.launched) == 3
    with pytest.raises(ValueError, match="cannot run these tensors: v_in_k: got False; allowed True"):
        within(q, k, k.clone())
