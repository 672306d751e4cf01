"""`return_max`: the largest score of each row, exact in every kernel that has it, in calls, ops and transforms."""

import functools
import math

import pytest
import torch
from cached_calls import dense, paged
from cuda_runs import on_cpu
from torch.nn.attention.flex_attention import create_block_mask

import multiattn
from multiattn import Plan, Problem
from multiattn.cuda.decode_mma import CudaSplitConfig
from multiattn.cuda.decode_wgmma import SplitWgmmaConfig
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.cutile.decode import SplitKeysConfig
from multiattn.cutile.forward import PIPELINES, CutileConfig
from multiattn.operands import Operands, Options
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU, by_name
from multiattn.plan.backend import BACKENDS, make_plan
from multiattn.triton.decode import TritonSplitConfig
from multiattn.triton.gluon_forward import GluonConfig
from multiattn.truth.tolerance import Expected, derive_budget, expected_forward, lse_atol

TILED = "split_kv+share_kv+tiling_qkv+swizzle_qkv"
VARIANTS = [
    *(pytest.param("cuda", it, marks=on_cpu) for it in ("split_q", TILED, "wgmma", "split_keys")),
    *(("triton", it) for it in ("full", "basic", "split_keys", "warp_specialized")),
    *(("cutile", it) for it in ("full", "basic", "split_keys")),
]
WIDE = [pytest.param("cuda", "wgmma_twin", marks=on_cpu), ("triton", "warp_specialized_twin")]
CACHED = [
    *(pytest.param("cuda", it, marks=on_cpu) for it in ("split_keys", "split_keys_wgmma")),
    ("triton", "split_keys"),
    ("cutile", "split_keys"),
]


def drawn(seq_q, seq_kv, head_dim=64, dtype=torch.float16, grows=None):
    """q, k and v: two heads that share one of keys, which may grow along the sequence by a factor."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(1, heads, rows, head_dim, generator=generator)
        for heads, rows in ((2, seq_q), (1, seq_kv), (1, seq_kv))
    )
    if grows is not None:
        k *= torch.linspace(*grows, seq_kv)[:, None]
    return [it.to(dtype) for it in (q, k, v)]


def hiding_bias(seq_q, seq_kv):
    """A bias of any size, -inf for some keys and for all of some rows."""
    bias = 4 * torch.randn(1, 2, seq_q, seq_kv, generator=torch.Generator().manual_seed(8))
    bias[:, :, :, ::3] = -math.inf
    bias[:, 1, 5:9] = -math.inf
    return bias


def far_mask(seq_q, seq_kv):
    return create_block_mask(
        lambda b, h, i, j: (i // 3 + j) % 5 < 2, None, None, seq_q, seq_kv, device="cpu", BLOCK_SIZE=64
    )


SLOPES = torch.tensor([0.5, 0.03])
CASES = {
    "keys that grow": lambda: (drawn(70, 300, grows=(1, 30)), {}),
    "keys that fall, causal, sinks above all scores": lambda: (
        drawn(70, 300, grows=(30, 1)), {"causal": True, "sinks": torch.tensor([900.0, -math.inf])}
    ),
    "rows without a key": lambda: (drawn(150, 40, dtype=torch.bfloat16), {"causal": True, "sinks": torch.ones(2)}),
    "a window, a negative scale": lambda: (
        drawn(140, 140, dtype=torch.bfloat16, grows=(1, 30)), {"window": (40, 9), "scale": -0.7}
    ),
    "a scale of zero": lambda: (drawn(20, 70), {"scale": 0.0}),
    "scores far below zero": lambda: (
        [it.abs() * sign for it, sign in zip(drawn(70, 140), (1, -6, 1), strict=True)], {"causal": True}
    ),
    "softcap, ALiBi, a bias that hides": lambda: (
        drawn(70, 200, grows=(30, 1)),
        {"softcap": 9.0, "alibi_slopes": SLOPES, "bias": hiding_bias(70, 200), "causal": True},
    ),
    "a block mask and a score_mod": lambda: (
        drawn(70, 200), {"block_mask": far_mask(70, 200), "score_mod": lambda score, b, h, i, j: score * (1 + j % 4)}
    ),
}  # fmt: skip


def expected(call, tensors, options):
    """The truth of the largest scores, within what fp32 makes of a product and a change of it."""
    exact, naive = (
        call(*(it.to(dtype) for it in tensors), **options, backend="reference", return_max=True)[1]
        for dtype in (torch.float64, torch.float32)
    )
    budget = derive_budget((naive,), exact, atol=lse_atol(exact, tensors[0].shape[-1]))
    return Expected(name="max", truth=exact, budget=budget)


def check(call, tensors, options, backend, variant):
    """Results with the largest scores; the others are those of the call that does not ask, bit for bit."""
    asked = {**options, "backend": backend, "variant": variant}
    out, lse, largest = call(*tensors, **asked, return_lse=True, return_max=True)
    assert largest.dtype == torch.float32
    assert largest.shape == lse.shape
    expected(call, tensors, options).check(largest, f"{backend} {variant}")
    for got, want in zip((out, lse), call(*tensors, **asked, return_lse=True), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "variant"), VARIANTS)
def test_the_largest_scores_are_exact(backend, variant, case):
    """Also where what weights are relative to lags behind them."""
    tensors, options = CASES[case]()
    variants = {it.name: it.capability for it in registry.get(backend).forward.variants}
    if "block_mask" in options and not variants[variant].block_masks:
        options = {**options, "block_mask": None}
    check(multiattn.fmha, tensors, options, backend, variant)


LAZY = [
    pytest.param("cuda", "wgmma", WgmmaConfig(tile_m=128, tile_n=64, lazy_max=True), marks=on_cpu),
    pytest.param(
        "cuda",
        "split_keys_wgmma",
        SplitWgmmaConfig(tile_m=64, tile_n=64, stages=4, lazy_max=True, splits=3),
        marks=on_cpu,
    ),
    ("triton", "warp_specialized", GluonConfig(tile_m=128, tile_n=64, lazy_max=True)),
    *(("cutile", "full", CutileConfig(tile_m=64, tile_n=64, lazy_max=True, pipeline=it)) for it in PIPELINES[:2]),
]


MANY = [
    pytest.param("cuda", CudaSplitConfig(tile_m=16, tile_n=16, warps=1, stages=2, splits=140), marks=on_cpu),
    ("triton", TritonSplitConfig(tile_m=16, tile_n=16, warps=4, stages=1, splits=140)),
    ("cutile", SplitKeysConfig(tile_m=16, tile_n=16, splits=140)),
]


def check_plan(tensors, problem, **choice):
    """All results of a plan with a config of the test's choice."""
    plan = make_plan(registry.get(choice.pop("backend")), problem, CPU, **choice)
    results = {
        name: torch.full(layout.shape, torch.nan, dtype=layout.dtype).as_strided(layout.shape, layout.strides)
        for name in problem.forward_results
        for layout in (problem.layouts[name],)
    }
    multiattn.launch(plan, *tensors, **results)
    for it in expected_forward(Operands(*tensors), problem):
        it.check(results[it.name], plan)


@pytest.mark.parametrize("grows", [(1, 30), (30, 1), (-9, 9)])
@pytest.mark.parametrize(("backend", "config"), MANY)
def test_more_parts_than_are_merged_at_a_time(backend, config, grows):
    tensors = drawn(2, 2300, head_dim=16, grows=grows)
    problem = Problem.of_operands(Operands(*tensors), Options(row_max=True))
    check_plan(tensors, problem, backend=backend, variant="split_keys", config=config)


@pytest.mark.parametrize("grows", [(1, 30), (1, 2), (-9, 9)])
@pytest.mark.parametrize("options", [{"right": 0}, {"left": 150, "right": 20}], ids=["causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("backend", "variant", "config"), LAZY)
def test_weights_with_lazy_maxima_leave_the_largest_scores(backend, variant, config, dtype, options, grows):
    """They are made before a block's own maxima are known: its largest scores are no maximum of any state."""
    tensors = drawn(150, 400, dtype=dtype, grows=grows)
    problem = Problem.of_operands(Operands(*tensors), Options(**options, row_max=True))
    check_plan(tensors, problem, backend=backend, variant=variant, config=config)


@pytest.mark.parametrize("case", ["keys that fall, causal, sinks above all scores", "rows without a key"])
@pytest.mark.parametrize(("backend", "variant"), WIDE)
def test_wide_heads_have_them(backend, variant, case):
    (q, k, v), options = CASES[case]()
    check(multiattn.fmha, [torch.cat((it,) * 5, -1) for it in (q, k, v)], options, backend, variant)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "sinks": torch.ones(4), "softcap": 4.0}], ids=["full", "more"]
)
@pytest.mark.parametrize(
    ("backend", "variant"), [it for it in (*VARIANTS, *WIDE) if "split_keys" not in str(it) and "tiling" not in str(it)]
)
def test_packed_batches_have_them(backend, variant, options):
    """One sequence has no keys, one no queries, one is of several tiles; there are rows behind the last."""
    width = 320 if "twin" in variant else 64
    q, k, v = (torch.randn(250, heads, width, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    starts, starts_kv = (
        torch.tensor(it, dtype=torch.int32) for it in ((0, 3, 3, 9, 180, 240), (0, 0, 40, 50, 240, 250))
    )
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts_kv, "max_seqlen_q": 180, "max_seqlen_kv": 190}
    check(multiattn.fmha_varlen, [it.half() for it in (q, k, v)], {**lengths, **options}, backend, variant)


@pytest.mark.parametrize("parts", [1, 3, 20])
@pytest.mark.parametrize(
    "call",
    [functools.partial(dense, (300, 0, 7), 1, 320), functools.partial(paged, (230, 7, 20))],
    ids=["dense", "paged"],
)
@pytest.mark.parametrize(("backend", "variant"), CACHED)
def test_caches_have_them(backend, variant, call, parts):
    """Parts are merged, by either kernel; some have no key, and some sequences."""
    tensors, options = call()
    tensors[1].mul_(torch.linspace(1, 30, tensors[1].shape[2])[:, None])
    options |= {"causal": True, "num_splits": parts, "sinks": torch.full((4,), 60.0)}
    check(multiattn.fmha_kvcache, tensors, options, backend, variant)
    if parts == 3:
        check(functools.partial(multiattn.fmha_kvcache, window=(90, None)), tensors, options, backend, variant)


@pytest.mark.parametrize("call", [dense, paged])
def test_rows_of_no_sequence_are_left_and_results_go_where_they_should(call):
    (q, k, v), rest = call()
    out = torch.full_like(q, 7.0)
    got, largest = multiattn.fmha_kvcache(q, k, v, **rest, out=out, return_max=True)
    assert got is out
    torch.testing.assert_close(largest, multiattn.fmha_kvcache(q, k, v, **rest, return_max=True)[1])


# ---------------------------------------------------------------- who asks, and how


def test_it_is_the_last_result_of_each_call():
    q, k, v = drawn(9, 12)
    out, lse = multiattn.fmha(q, k, v, return_lse=True)
    largest = multiattn.reference(q, k, v, return_max=True)[2]
    for got, want in (
        (multiattn.fmha(q, k, v, return_max=True), (out, largest)),
        (multiattn.fmha(q, k, v, return_lse=True, return_max=True), (out, lse, largest)),
    ):
        assert len(got) == len(want)
        torch.testing.assert_close(got, want)
    scores = q.float() @ k.float().transpose(2, 3) / 8
    torch.testing.assert_close(largest, scores.amax(-1))


@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=on_cpu)])
def test_it_has_no_gradient_and_the_others_keep_theirs(backend):
    tensors = [it.requires_grad_() for it in drawn(9, 12)]
    out, lse, largest = multiattn.fmha(*tensors, backend=backend, return_lse=True, return_max=True)
    assert not largest.requires_grad
    found = torch.autograd.grad(out.float().sum() + lse.sum(), tensors)
    out, lse = multiattn.fmha(*tensors, backend=backend, return_lse=True)
    want = torch.autograd.grad(out.float().sum() + lse.sum(), tensors)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)


def test_compiled_calls_have_them():
    q, k, v = (it.requires_grad_() for it in drawn(9, 12))

    def ask(q, k, v):
        return multiattn.fmha(q, k, v, causal=True, return_max=True)

    out, largest = torch.compile(ask, fullgraph=True, backend="aot_eager")(q, k, v)
    assert not largest.requires_grad
    torch.testing.assert_close(largest, ask(q, k, v)[1])
    (dq,) = torch.autograd.grad(out.float().sum(), q)
    torch.testing.assert_close(dq, torch.autograd.grad(ask(q, k, v)[0].float().sum(), q)[0])
    (a, b, c), rest = paged()
    cached = functools.partial(multiattn.fmha_kvcache, **rest, causal=True, return_lse=True, return_max=True)
    for got, want in zip(
        torch.compile(cached, fullgraph=True, backend="aot_eager")(a, b, c), cached(a, b, c), strict=True
    ):
        torch.testing.assert_close(got, want)
    ops = torch.ops.multiattn
    plain, asking = (str(it.default._schema) for it in (ops.fmha_forward, ops.fmha_forward_max))
    assert asking == plain.replace("fmha_forward", "fmha_forward_max").replace("Tensor lse)", "Tensor lse, Tensor max)")


def test_ops_are_what_pytorch_wants_of_them():
    q, k, v = (it.requires_grad_() for it in drawn(5, 7))
    torch.library.opcheck(torch.ops.multiattn.fmha_forward_max.default, (q, k, v, [], []), {"needs_grad": True})


def test_transforms_have_it():
    q, k, v = drawn(9, 12)
    each = torch.vmap(lambda q: multiattn.fmha(q, k, v, return_max=True)[1])(torch.stack((q, -q)))
    torch.testing.assert_close(each[1], multiattn.fmha(-q, k, v, return_max=True)[1])

    def loss(q):
        out, largest = multiattn.fmha(q, k, v, return_max=True)
        return out.float().sum(), largest

    dq, largest = torch.func.grad(loss, has_aux=True)(q)
    torch.testing.assert_close(largest, loss(q)[1])
    torch.testing.assert_close(dq, torch.func.grad(lambda q: multiattn.fmha(q, k, v).float().sum())(q))


@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=on_cpu)])
@pytest.mark.parametrize("shapes", [(5, 0), (0, 7)], ids=["no keys", "no queries"])
def test_nothing_to_launch_for(backend, shapes):
    largest = multiattn.fmha(*drawn(*shapes), backend=backend, return_max=True)[1]
    assert torch.equal(largest, torch.full((1, 2, shapes[0]), -math.inf))
    (q, k, v), rest = paged((0, 0), (1, 2))
    got = multiattn.fmha_kvcache(q, k, v, **rest, backend=backend, return_max=True)[1]
    assert torch.equal(got, torch.full((4, 3), -math.inf))


def test_explain_tells_it():
    q, k, v = drawn(9, 12)
    plan = multiattn.explain(q, k, v, return_max=True, backend="cuda", arch="sm90")
    assert isinstance(plan, Plan)
    assert plan.problem.row_max
    assert " row max " in str(plan)
    assert " row max " not in str(multiattn.explain(q, k, v, backend="cuda", arch="sm90"))


def test_a_kernel_without_it_refuses_by_name():
    """A backward never writes it."""
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=128, head_dim=64, row_max=True)
    for name in BACKENDS:
        backend = registry.get(name)
        for variant in backend.forward.variants:
            reasons = variant.capability.why_not(problem, by_name("sm90"))
            assert ("row_max" in {it.code for it in reasons}) == (not variant.capability.row_max)
        plan = make_plan(backend, problem, by_name("sm90"), direction="backward", probe=False)
        assert not plan.problem.row_max


def test_qk_clip_reduces_it_per_head():
    """MuonClip (arXiv 2507.20534, section 2.1) scales a head's weights down where its largest logit passes a bound."""
    q, k, v = drawn(64, 64, grows=(1, 30))
    largest = multiattn.fmha(q, k, v, causal=True, return_max=True)[1].amax((0, 2))  # [Hq]
    factor = (20.0 / largest).clamp(max=1.0)
    clipped = multiattn.fmha((q * factor[:, None, None]).half(), k, v, causal=True, return_max=True)[1].amax((0, 2))
    torch.testing.assert_close(clipped, largest.clamp(max=20.0), rtol=1e-3, atol=0)
