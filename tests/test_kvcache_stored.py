"""Caches of 8-bit numbers: each stands for itself times its scale in every kernel, and nothing else is read."""

import itertools
from dataclasses import replace

import pytest
import torch
from cached_calls import dense, paged
from test_compiles import kernels_of

import multiattn
from multiattn.kvcache import Where, cached_call
from multiattn.layout import STORED
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.problem import Problem
from multiattn.truth.tolerance import Mismatch, expected_forward

BACKENDS = ("triton", "cutile", "cuda")
SHAPES = {
    "one": lambda it: (),
    "head": lambda it: (it["k_cache"].shape[1],),
    "sequence": lambda it: (it["seqlens_kv"].shape[0], it["k_cache"].shape[1]),
    "token": lambda it: tuple(it["k_cache"].shape[:3]),
}
NO_PAGE = 2**31 - 1


def drawn_scales(per, call, dtype, seed):
    """Scales that differ by up to 4 times; numbers of 8 bits times them are of about 1."""
    shape = SHAPES[per](call)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return 2 ** (2 * drawn - 1) * 4 / largest(dtype)


def largest(dtype):
    return 127.0 if dtype == torch.int8 else 448.0


def in_8_bits(cache, dtype):
    numbers = (cache.float() * (largest(dtype) / 4)).clamp(-largest(dtype), largest(dtype))
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)


def stored(call, dtype="e4m3", per="token", *, left=None, q_dtype=torch.bfloat16, **options):
    """A call of `cached_calls` with caches of 8-bit numbers; nothing that no query may see is a number.

    `left`: a window, before which pages are freed.
    """
    (q, k, v), rest = call
    its = {"q": q.to(q_dtype), "k_cache": k, "v_cache": v, **rest}
    for number, (name, scale) in enumerate((("k_cache", "k_scale"), ("v_cache", "v_scale"))):
        its[scale] = drawn_scales(per, its, STORED[dtype], 10 + number)
        its[name] = in_8_bits(its[name], STORED[dtype])
    unseen = torch.ones(k.shape[:3], dtype=torch.bool)
    queries = its["cu_seqlens_q"].diff().tolist() if "cu_seqlens_q" in its else [q.shape[2]] * len(its["seqlens_kv"])
    for entry, length in enumerate(its["seqlens_kv"].tolist()):
        seen = range(0 if left is None else max(length - queries[entry] - left, 0), length)
        if "page_table" in its:
            page, table = k.shape[2], its["page_table"][entry]
            for key in seen:
                unseen[table[key // page], :, key % page] = False
            pages = {key // page for key in seen}
            table[[it for it in range(len(table)) if it not in pages]] = NO_PAGE
        else:
            unseen[entry, :, seen.start : seen.stop] = False
    for name in ("k_cache", "v_cache"):
        its[name].view(torch.uint8)[unseen] = 0x7F  # NaN, or 127
    for name in ("k_scale", "v_scale"):
        if per == "token":
            its[name][unseen] = torch.nan
    window = {} if left is None else {"window": (left, 0)}
    return {**its, "causal": True, **window, **options}


def expected(call):
    """The truth of a call, and how far from it a kernel may be: naive attention has the numbers in the dtype of q."""
    options = {name: it for name, it in call.items() if name not in ("q", "k_cache", "v_cache")}
    operands, asked = cached_call(call["q"], call["k_cache"], call["v_cache"], options, Where.of(options))
    return expected_forward(operands, Problem.of_operands(operands, asked))


def check(call, backend, wanted=None, **options):
    out, lse = multiattn.fmha_kvcache(**call, backend=backend, return_lse=True, **options)
    if "cu_seqlens_q" in call:
        out, lse = out.transpose(0, 1)[None], lse[None]
    for want, got in zip(wanted or expected(call), (out, lse), strict=True):
        want.check(got, backend)


CASES = {
    **{
        f"{dtype} {per} {name}": lambda dtype=dtype, per=per, make=make, more=more: stored(make(), dtype, per, **more)
        for dtype in STORED
        for per in SHAPES
        for name, make, more in (
            ("dense", dense, {}),
            ("pages of 16 in parts", paged, {"num_splits": 3}),
            ("dense window", lambda: dense((70, 33, 7), 3, 96), {"left": 9, "num_splits": 2}),
        )
    },
    **{
        f"{dtype} token pages of {page}": lambda dtype=dtype, page=page: stored(paged((70, 130), (3, 1), page), dtype)
        for dtype, page in itertools.product(STORED, (1, 7, 64, 128, 192))
    },
    **{
        f"{dtype} {per} window over pages of {page}": lambda dtype=dtype, per=per, page=page: stored(
            paged((90, 7, 150), (1, 2, 1), page), dtype, per, left=20, num_splits=2
        )
        for dtype, per, page in itertools.product(STORED, ("head", "token"), (1, 16, 64))
    },
    **{
        f"{dtype} {per} D={width}": lambda dtype=dtype, per=per, width=width: stored(
            paged((33, 20), (1, 2), heads=(8, 1), head_dim=width), dtype, per, num_splits=2
        )
        for dtype, per, width in itertools.product(STORED, ("sequence", "token"), (8, 72, 256, 288))
    },
    **{
        f"{dtype} {per} fp16 {name}": lambda dtype=dtype, per=per, make=make: stored(
            make(), dtype, per, q_dtype=torch.float16
        )
        for dtype, per, (name, make) in itertools.product(STORED, SHAPES, (("dense", dense), ("pages", paged)))
    },
    **{
        f"{per} {name}": lambda per=per, options=options: stored(dense((33, 70), 3, 80), "int8", per, **options())
        for per in ("head", "token")
        for name, options in {
            "softcap": lambda: {"softcap": 2.0},
            "alibi": lambda: {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
            "bias": lambda: {"bias": torch.randn(2, 1, 3, 80, generator=torch.Generator().manual_seed(5)).bfloat16()},
            "tree": lambda: {"bias": torch.tensor([[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]).bool().expand(2, 1, 3, 3)},
            "score_mod": lambda: {"score_mod": lambda score, b, h, q, kv: score * score + (q - kv) * 0.01},
            "sinks": lambda: {"sinks": torch.tensor([0.0, 1.0, 2.0, 3.0])},
            "negative scale": lambda: {"scale": -0.2},
            "no scale": lambda: {"scale": 0.0},
        }.items()
    },
    "chunks of a prompt": lambda: stored(paged((200, 90), (130, 70), 32, heads=(2, 1)), "e4m3", "token"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_number_stands_for_itself_times_its_scale(make, backend):
    call = make()
    if backend == "cuda" and call["q"].shape[-1] % 16:  # it copies 16 numbers at a time
        with pytest.raises(multiattn.Unsupported, match="in 8-bit numbers; allowed multiples of 16"):
            check(call, backend)
    else:
        check(call, backend)


def test_the_truth_is_that_of_the_values():
    """The reference against attention over values that are multiplied here."""
    for dtype, per in itertools.product(STORED, SHAPES):
        call = stored(dense(), dtype, per)
        wide = {}
        for name, scale in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
            its = call[scale] if per == "token" else call[scale].expand(3, 2)[..., None]
            wide[name] = call[name].double() * its.double()[..., None]
        for entry, length in enumerate(call["seqlens_kv"].tolist()):
            k, v = (it[entry : entry + 1, :, :length] for it in wide.values())
            want = multiattn.reference(
                call["q"][entry : entry + 1].double(), k, v, causal=True, compute_dtype=torch.float64
            )
            for one, it in zip(expected(call), want, strict=True):
                torch.testing.assert_close(one.truth[entry : entry + 1], it)


def next_head(call):
    return {name: call[name].roll(1, 1) for name in ("k_scale", "v_scale")}


def swapped(call):
    return {"k_scale": call["v_scale"], "v_scale": call["k_scale"]}


def next_page(call):
    return {name: call[name].roll(1, 0) for name in ("k_scale", "v_scale")}


def next_token(call):
    return {"k_scale": call["k_scale"].nan_to_num(1.0).roll(1, 2)}


BROKEN = [
    *itertools.product(("sequence", "token"), (next_head, swapped)),
    *itertools.product(("token",), (next_page, next_token)),
    ("one", lambda call: {"k_scale": call["k_scale"] * 1.05}),
    ("one", lambda call: {"v_scale": call["v_scale"] * 1.05}),
    ("head", lambda call: {"v_scale": None}),
]


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("per", "broken"), BROKEN)
def test_the_tester_finds_a_wrong_scale(per, broken, dtype):
    call = stored(paged((64, 32, 48), (1, 2, 1)), dtype, per)
    wanted = expected(call)
    check(call, "reference", wanted)
    with pytest.raises(Mismatch):
        check({**call, **broken(call)}, "reference", wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per", ["head", "token"])
def test_a_scale_may_be_anything(per, backend):
    """Zero, as of a head that is nothing but zeros; negative; so small that fp16 holds no weight times it."""
    for dtype, (k_factor, v_factor) in itertools.product(STORED, ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -1e-6))):
        call = stored(dense((33, 20)), dtype, per, q_dtype=torch.float16)
        head = (slice(None), 1) if per == "token" else (1,)
        call["k_scale"][head] *= k_factor
        call["v_scale"][head] *= v_factor
        check(call, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_is_of_its_own_head_and_sequence(backend):
    """A scale that is NaN reaches no other head; of a sequence without keys none is read."""
    call = stored(dense((33, 0, 20)), "int8", "sequence")
    clean = multiattn.fmha_kvcache(**call, backend=backend)
    for name in ("k_scale", "v_scale"):
        broken = call[name].clone()
        broken[1], broken[2, 1] = torch.nan, torch.nan
        got = multiattn.fmha_kvcache(**{**call, name: broken}, backend=backend)
        assert got[2, 2:].isnan().all()
        for rows in ((0,), (1,), (2, slice(0, 2))):
            torch.testing.assert_close(got[rows], clean[rows], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_are_nan_are_nan(backend):
    call = stored(dense((33, 20)), "e4m3", "sequence")
    call["v_cache"].view(torch.uint8)[0, 1, 5] = 0xFF
    got = multiattn.fmha_kvcache(**call, backend=backend)
    assert got[0, 2:].isnan().all()
    assert got[0, :2].isfinite().all()


def far_apart(largest_scale):
    """One key has a value with a large scale, and its first query does not see it."""
    generator = torch.Generator().manual_seed(0)
    v_scale = torch.ones(1, 1, 32)
    v_scale[..., 31] = largest_scale
    k, v = (torch.randn(1, 1, 32, 64, generator=generator).to(torch.float8_e4m3fn) for _ in "kv")
    q = torch.randn(1, 2, 2, 64, generator=generator).bfloat16()
    return q, k, v, {"v_scale": v_scale, "causal": True, "seqlens_kv": torch.tensor([32], dtype=torch.int32)}


@pytest.mark.parametrize("largest_scale", [2.0**15, 2.0**20, 2.0**26])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_of_a_hidden_value_rounds_no_other_away(backend, largest_scale):
    *tensors, options = far_apart(largest_scale)
    want, got = (multiattn.fmha_kvcache(*tensors, **options, backend=it)[:, :, 0] for it in ("reference", backend))
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("k_scale", [1e-9, 1e-40, 1e-2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_zeros_and_a_small_scale_make_no_nan(backend, k_scale):
    *(q, k, v), options = far_apart(1.0)
    q[:, 1] = 0.0
    options |= {"k_scale": k_scale, "seqlens_kv": torch.tensor([20], dtype=torch.int32)}
    want, got = (multiattn.fmha_kvcache(q, k, v, **options, backend=it) for it in ("reference", backend))
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_a_token_of_zeros_rounds_no_other_away():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 1, 40, 64, generator=generator) * size for size in (1.0, 1e-5))
    v[:, :, 7] = 0.0
    call = {"seqlens_kv": torch.tensor([40], dtype=torch.int32)}
    k8, v8, call["k_scale"], call["v_scale"] = multiattn.quantize_cache(k.bfloat16(), v.bfloat16())
    q = torch.randn(1, 1, 1, 64, generator=generator).bfloat16()
    want, *found = (multiattn.fmha_kvcache(q, k8, v8, **call, backend=it).float() for it in ("reference", *BACKENDS))
    for got in found:
        assert ((got - want).norm() / want.norm()) < 5e-3


# ---------------------------------------------------------------- plans


def plan_of(backend, call, arch="sm90"):
    options = {name: it for name, it in call.items() if name not in ("q", "k_cache", "v_cache")}
    operands, asked = cached_call(call["q"], call["k_cache"], call["v_cache"], options, Where.of(options))
    problem = Problem.of_operands(operands, asked)
    return make_plan(get(backend), problem, ARCHS[arch], variant="split_keys", probe=False)


@pytest.mark.parametrize("backend", ["triton", "cutile"])
def test_code_of_a_cache_depends_on_no_size_or_stride_of_scales(backend):
    for per, make in itertools.product(("one", "sequence", "token"), (dense, paged)):
        calls = [stored(make(), "e4m3", per, num_splits=2), stored(make(heads=(16, 8)), "e4m3", per, num_splits=2)]
        if per == "sequence":
            calls.append(stored(make(), "e4m3", "one", num_splits=2))
        plans = [plan_of(backend, it) for it in calls]
        plans = [replace(it, config=plans[0].config) for it in plans]
        names = ("attention_of_parts", "split_keys")  # what merges parts reads no scale
        keys = [{name: key for name, key in kernels_of(it).items() if name in names} for it in plans]
        assert all(it == keys[0] for it in keys)


@pytest.mark.parametrize("backend", ["triton", "cutile"])
def test_an_arch_without_e4m3_says_so(backend):
    plan_of(backend, stored(dense(), "int8"), "sm80")
    with pytest.raises(multiattn.Unsupported, match=r"stored: got a cache of e4m3 on sm80; allowed int8"):
        plan_of(backend, stored(dense(), "e4m3"), "sm80")
