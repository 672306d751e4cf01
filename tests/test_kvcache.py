"""`fmha_kvcache`: its op, where results go, that lengths are the device's own, and what it and `explain` refuse."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cached_calls import COMPILED, dense, drawn, paged
from refused import assert_refused, rows
from torch._dynamo.testing import CompileCounterWithBackend

import multiattn
from multiattn import Plan
from multiattn.sequences import SPLITS_MAX, Batching

RUNNING = ("reference", "cuda")
"""Backends that tests of the call itself run: the truth, and kernels that have parts and pages."""


def equal(got, want):
    """Results have equal bits; either is a tensor, or two."""
    for one, other in zip(*(it if isinstance(it, tuple) else (it,) for it in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- one call


@pytest.mark.parametrize("backend", RUNNING)
def test_lengths_and_pages_that_change_in_place_are_seen(backend):
    """One graph serves every step: no call may keep what an earlier one has read."""
    tensors, rest = paged()
    for lengths, pages in (((33, 7, 20), None), ((3, 16, 0), None), ((32, 1, 17), (1, 0)), ((0, 0, 0), (0, 0))):
        rest["seqlens_kv"].copy_(torch.tensor(lengths))
        if pages is not None:
            rest["page_table"][0, :2] = torch.tensor(pages, dtype=torch.int32)
        got = multiattn.fmha_kvcache(*tensors, **rest, causal=True, backend=backend)
        fresh = {name: it.clone() if isinstance(it, torch.Tensor) else it for name, it in rest.items()}
        want = multiattn.fmha_kvcache(*tensors, **fresh, causal=True)
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("backend", "splits"), [*(("cuda", it) for it in (1, 2, 8, 9)), ("triton", 1), ("cutile", 1)])
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(backend, splits):
    """In one part, or in as many as either kernel merges."""
    lengths, queries = (33, 7, 20, 64, 1), (2, 1, 3, 1, 1)
    (q, k, v), rest = paged(lengths, queries)
    options = {"causal": True, "backend": backend, "num_splits": splits, "return_lse": True}
    out, lse = multiattn.fmha_kvcache(q, k, v, **rest, **options)
    starts = rest["cu_seqlens_q"].tolist()
    for entry in range(len(lengths)):
        rows = slice(starts[entry], starts[entry + 1])
        for others in ((), (3,), (0, 2, 4)):
            chosen = [entry, *others]
            its = [slice(starts[it], starts[it + 1]) for it in chosen]
            part = {
                "seqlens_kv": rest["seqlens_kv"][chosen],
                "page_table": rest["page_table"][chosen],
                "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(queries[it] for it in chosen)]).int(),
                "max_seqlen_q": 3,
            }
            got, its_lse = multiattn.fmha_kvcache(torch.cat([q[it] for it in its]), k, v, **part, **options)
            equal(got[: queries[entry]], out[rows])
            equal(its_lse[:, : queries[entry]], lse[:, rows])


def without_pages(queries):
    cache, lengths = torch.zeros(0, 1, 16, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    table = torch.zeros(4, 16, dtype=torch.int32)
    return (drawn(4, 8, queries, 64), cache, cache), {"seqlens_kv": lengths, "page_table": table}


EMPTY = {
    **{"no sequence": dense((), room=8), "no query": dense((3, 9), 0), "no room": dense((0, 0), room=0)},
    **{"no page": without_pages(1), "no page of 8 queries": without_pages(8)},
    **{"no packed sequence": paged((), ()), "no packed query": paged((20, 3), (0, 0))},
}


@pytest.mark.parametrize("backend", [*RUNNING, "triton", "cutile"])
@pytest.mark.parametrize("given", EMPTY.values(), ids=EMPTY)
def test_no_work_is_no_error(given, backend):
    tensors, rest = given
    out, lse = multiattn.fmha_kvcache(*tensors, **rest, causal=True, backend=backend, return_lse=True)
    assert out.shape == tensors[0].shape
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("make", [dense, paged])
def test_meta_tensors_have_results_of_the_same_layout(make):
    tensors, rest = make()
    want = multiattn.fmha_kvcache(*tensors, **rest, return_lse=True)
    on_meta = {name: it.to("meta") if isinstance(it, torch.Tensor) else it for name, it in rest.items()}
    got = multiattn.fmha_kvcache(*(it.to("meta") for it in tensors), **on_meta, backend="cuda", return_lse=True)
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.device.type == "meta"


def test_autocast_takes_the_caches_in_its_dtype():
    tensors, rest = dense()
    with torch.autocast("cpu", torch.bfloat16):
        got = multiattn.fmha_kvcache(*(it.float() for it in tensors), **rest)
    equal(got, multiattn.fmha_kvcache(*tensors, **rest))


@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache", "sinks"])
def test_a_gradient_is_refused(which):
    (q, k, v), rest = dense()
    named = {"q": q, "k_cache": k, "v_cache": v, "sinks": torch.zeros(4)}
    named[which].requires_grad_()
    for call in (multiattn.fmha_kvcache, lambda **given: explain(given)):
        with pytest.raises(NotImplementedError, match="fmha_kvcache has no gradient: call it under"):
            call(**named, **rest)
        with torch.no_grad():
            call(**named, **rest)


def test_many_threads_get_their_own_results():
    def request(seed):
        chosen = random.Random(seed)
        lengths = [chosen.randrange(40) for _ in range(chosen.randrange(1, 4))]
        tensors, rest = paged(tuple(lengths), tuple(chosen.randrange(3) for _ in lengths))
        backend = chosen.choice(RUNNING)
        return multiattn.fmha_kvcache(*tensors, **rest, causal=True, backend=backend), tensors, rest

    with ThreadPoolExecutor(8) as pool:
        for out, tensors, rest in pool.map(request, range(200)):
            want = multiattn.fmha_kvcache(*tensors, **rest, causal=True)
            torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)


# ---------------------------------------------------------------- where results go


def test_rows_behind_the_last_sequence_stay_where_a_profiler_or_a_compiler_has_the_op_run():
    tensors, rest = paged(behind=5)
    want = multiattn.fmha_kvcache(*tensors, **rest, causal=True)
    out, compiled_out = (torch.full_like(tensors[0], 7.0) for _ in range(2))
    with torch.profiler.profile():
        multiattn.fmha_kvcache(*tensors, **rest, causal=True, out=out)
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_kvcache, backend="aot_eager", fullgraph=True)
    compiled(*tensors, **rest, causal=True, out=compiled_out)
    for written in (out, compiled_out):
        equal(written[:4], want[:4])
        assert (written[4:] == 7.0).all()


@pytest.mark.parametrize("backend", RUNNING)
def test_results_go_where_the_caller_wants_them(backend):
    """In memory of q's layout, of heads and rows the other way round, and of rows with room behind each."""
    for make, heads in ((dense, 1), (paged, 0)):
        tensors, rest = make()
        layouts = [
            torch.empty_like,
            lambda q, at=heads: torch.empty_like(q.transpose(at, at + 1).contiguous()).transpose(at, at + 1),
            lambda q: torch.nn.functional.pad(q, (0, 8))[..., :64],
        ]
        want, want_lse = multiattn.fmha_kvcache(*tensors, **rest, causal=True, backend=backend, return_lse=True)
        for layout in layouts:
            out = layout(tensors[0])
            memory = torch.full((out.untyped_storage().nbytes() // 2,), torch.nan, dtype=out.dtype)
            out = memory.as_strided(out.shape, out.stride())
            named = {"causal": True, "backend": backend, "out": out}
            got, lse = multiattn.fmha_kvcache(*tensors, **rest, **named, return_lse=True)
            assert got is out
            equal((out, lse), (want, want_lse))
            assert int(memory.isfinite().sum()) == out.numel()  # nothing beside it


# ---------------------------------------------------------------- compiled calls


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize(("make", "options"), COMPILED)
def test_a_compiled_call_is_an_eager_one(make, options, has_out):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_kvcache, backend=counter, fullgraph=True)
    tensors, rest = make()
    for lengths in ((33, 7, 20), (1, 0, 5)):
        rest["seqlens_kv"].copy_(torch.tensor(lengths))
        named = {"out": torch.full_like(tensors[0], torch.nan)} if has_out else {}
        got = compiled(*tensors, **rest, **options, **named)
        equal(got, multiattn.fmha_kvcache(*tensors, **rest, **options))
        for one in (got[0] if isinstance(got, tuple) else got,) if has_out else ():
            equal(named["out"], one)
    assert counter.frame_count == 1


@pytest.mark.parametrize("sequences", [0, 2])
@pytest.mark.parametrize("backend", ["reference", "cuda", "triton", "cutile"])
def test_nothing_is_launched_without_queries(backend, sequences):
    """Rows behind the last sequence are all that there is: of sequences without queries, and of none."""
    q, cache = torch.randn(5, 8, 64).bfloat16(), torch.zeros(sequences, 1, 16, 64, dtype=torch.bfloat16)
    where = {"cu_seqlens_q": torch.zeros(sequences + 1, dtype=torch.int32), "max_seqlen_q": 0}
    where["seqlens_kv"] = torch.full((sequences,), 9, dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    multiattn.fmha_kvcache(q, cache, cache, out=out, backend=backend, **where)
    assert (out == 7.0).all()
    with torch.no_grad():
        plan = multiattn.explain(q, cache, cache, backend=backend, **where)
    assert plan.problem.is_empty


# ---------------------------------------------------------------- refusals

INT = torch.int32


def called(make, changes):
    """A call, some of whose arguments are made of the right ones."""
    tensors, rest = make()
    right = dict(zip(("q", "k_cache", "v_cache"), tensors, strict=True)) | rest
    return right | {name: change(right.get(name)) if callable(change) else change for name, change in changes.items()}


def strided_on_d(tensor):
    return tensor.mT.contiguous().mT


def zeros(*shape, dtype=INT):
    return torch.zeros(shape, dtype=dtype)


def with_value(place, value):
    def changed(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return changed


WRONG = {
    TypeError: [
        (dense, {"q": [0.0]}, "q must be a torch.Tensor; got list"),
        (dense, {"k_cache": lambda k: k.to_sparse()}, "k_cache must be a dense strided tensor; got layout"),
        (
            dense,
            {"k_cache": lambda k: k.half()},
            "must share one dtype, or both caches be of 8 bits; got torch.bfloat16, torch.float16, ",
        ),
        (dense, {"sinks": zeros(4)}, "sinks must be a dense floating-point tensor; got torch.int32"),
        (dense, {"seqlens_kv": [3, 4, 5]}, "seqlens_kv must be a torch.Tensor; got list"),
        (dense, {"seqlens_kv": 3}, "got int | torch.full((B,), seqlens_kv, dtype=torch.int32, device=q.device)"),
        (dense, {"seqlens_kv": lambda it: it.long()}, "seqlens_kv.dtype: got torch.int64; allowed torch.int32"),
        (paged, {"page_table": lambda it: it.long()}, "page_table.dtype: got torch.int64; allowed torch.int32"),
        (paged, {"cu_seqlens_q": (0, 1)}, "cu_seqlens_q must be a torch.Tensor; got tuple"),
        (paged, {"max_seqlen_q": None}, "max_seqlen_q must be an int with cu_seqlens_q; got None | the most queries"),
        (dense, {"max_seqlen_q": 1}, "max_seqlen_q: got 1; allowed None without cu_seqlens_q"),
        (paged, {"max_seqlen_q": 3.0}, "max_seqlen_q must be an int or None; got float"),
        (dense, {"num_splits": True}, "num_splits must be an int or None; got bool"),
        (dense, {"num_splits": "two"}, "num_splits must be an int or None; got str"),
    ],
    ValueError: [
        (dense, {"v_cache": torch._neg_view}, "v_cache must hold its own values"),
        (dense, {"q": lambda q: q[0]}, "q must be [B, Hq, Sq, D]; got shape (4, 1, 64)"),
        (dense, {"q": lambda q: q[:, :, 0]}, "got shape (3, 4, 64) | q.unsqueeze(2)"),
        (paged, {"q": lambda q: q[None]}, "q must be [T, Hq, D]; got shape (1, 4, 4, 64)"),
        (dense, {"k_cache": lambda k: k[0]}, "k_cache must be [B, Hkv, S, D]; got shape (2, 40, 64)"),
        (paged, {"v_cache": lambda v: v[0]}, "v_cache must be [pages, Hkv, page, D]; got shape"),
        (dense, {"v_cache": strided_on_d}, "v_cache must have unit stride on D; got strides (5120, 2560, 1"),
        (dense, {"k_cache": lambda k: k.to("meta")}, "must be on one device; got cpu, meta, cpu"),
        (dense, {"v_cache": lambda v: v[:, :, :-1]}, "must have one shape but for | v_cache=(3, 2, 39, 64)"),
        (dense, {"q": lambda q: q[..., :32]}, "must share head_dim; got q=(3, 4, 1, 32), k_cache=(3, 2"),
        (dense, {"q": lambda q: q[:, :0]}, "heads and head_dim must be at least 1; got q=(3, 0, 1, 64)"),
        (dense, {"q": lambda q: q[:, :3]}, "must be a multiple of | got q=(3, 3, 1, 64) | k_cache.transpose(1, 2)"),
        (dense, {"sinks": torch.zeros(2)}, "sinks: got shape [2]; allowed [4], one for each head of q"),
        (dense, {"softcap": 0.0}, "softcap: got 0.0; allowed positive and finite numbers"),
        (dense, {"scale": float("nan")}, "scale must be finite"),
        (dense, {"seqlens_kv": zeros(3, 1)}, "seqlens_kv: got shape (3, 1); allowed [B] | dimension 3"),
        (dense, {"seqlens_kv": zeros(2)}, "seqlens_kv: got shape (2,); allowed [B] | dimension 3 | a number for each"),
        (dense, {"seqlens_kv": zeros(6)[::2]}, "seqlens_kv must have unit stride | got strides (2,)"),
        (dense, {"seqlens_kv": lambda it: it.to("meta")}, "seqlens_kv must be on the device of q, cpu; got meta"),
        (dense, dict.fromkeys(("k_cache", "v_cache"), lambda it: it[:2]), "each of 3 sequences; got | k_cache[:3]"),
        (paged, {"page_table": lambda it: it[0]}, "page_table: got shape (4,); allowed [B, max_pages]"),
        (paged, {"page_table": lambda it: it[:2]}, "page_table: got shape (2, 4); allowed | dimension 3"),
        (paged, {"page_table": strided_on_d}, "page_table must have unit stride on its last dimension; got"),
        (paged, {"cu_seqlens_q": zeros(3)}, "cu_seqlens_q: got shape (3,); allowed [B + 1] | dimension 4"),
        (paged, {"max_seqlen_q": -1}, "max_seqlen_q: got -1; allowed 0 and more"),
        (dense, {"num_splits": 0}, f"num_splits: got 0; allowed 1 to {SPLITS_MAX}, or None | leaves it to the plan"),
        (dense, {"num_splits": SPLITS_MAX + 1}, f"num_splits: got 257; allowed 1 to {SPLITS_MAX}, or None"),
    ],
}
WRONG_VALUES = {
    ValueError: [
        (dense, {"seqlens_kv": with_value(1, 41)}, "got 41 of sequence 1; allowed 0 to 40 | write the new keys"),
        (dense, {"seqlens_kv": with_value(2, -1)}, "seqlens_kv: got -1 of sequence 2; allowed 0 to 40"),
        (paged, {"seqlens_kv": with_value(0, 65)}, "seqlens_kv: got 65 of sequence 0; allowed 0 to 64"),
        (paged, {"page_table": with_value((1, 0), -1)}, "page_table: got -1 of sequence 1 at 0; allowed 0 to "),
        (paged, {"page_table": with_value((0, 1), 99)}, "got 99 of sequence 0 at 1; allowed 0 to | name a page there"),
        (paged, {"cu_seqlens_q": with_value(3, 5)}, "cu_seqlens_q: got | allowed 0 first, none below | up to 4"),
        (paged, {"cu_seqlens_q": with_value(1, 9)}, "cu_seqlens_q: got 4 at 2, behind 9, in "),
        (paged, {"cu_seqlens_q": with_value(0, -1)}, "cu_seqlens_q: got -1 first, in "),
        (paged, {"max_seqlen_q": 2}, "max_seqlen_q: got 2; allowed 3 and more, as sequence 1 of cu_seqlens_q"),
    ]
}
OVERLAPPING = (0, 64, 64, 1), (64, 64, 64, 1), (512, 32, 64, 1)
"""Strides of an out whose elements share addresses."""
OF_OUT = {
    ValueError: [
        (
            dense,
            {"out": drawn(3, 4, 2, 64)},
            "out must be like q, as wide as v: got (3, 4, 2, 64), | allowed (3, 4, 1, ",
        ),
        (
            dense,
            {"out": drawn(3, 4, 1, 64).half()},
            "must be like q, as wide as v: got | torch.float16 on cpu | torch.empty_like(q)",
        ),
        (
            dense,
            {"out": drawn(3, 4, 1, 64).to("meta")},
            "out must be like q, as wide as v: got | on meta; allowed | on cpu",
        ),
        (
            dense,
            {"v_cache": lambda it: it[..., :32], "out": drawn(3, 4, 1, 64)},
            "allowed (3, 4, 1, 32), | q.new_empty((3, 4, 1, 32)) makes one",
        ),
        (dense, {"out": drawn(3, 4, 1, 64).float()}, "out must be like q, as wide as v: got | torch.float32"),
    ]
}
OF_THE_CALL = {
    TypeError: [
        (dense, {"v_cache": None}, "needs q, k_cache, v_cache, seqlens_kv; got None or nothing for v_cache"),
        (dense, {"out": 1}, "out must be a torch.Tensor or None; got int"),
    ],
    ValueError: [
        *((dense, {"out": drawn(4096).as_strided((3, 4, 1, 64), it)}, "no two elements") for it in OVERLAPPING),
        (paged, {"out": strided_on_d(drawn(4, 4, 64))}, "out: got strides (256, 1, 4), | allowed unit str"),
        (paged, {"out": drawn(4, 4, 67)[..., :64]}, "out: got strides (268, 67, 1), | that are multiples of 8"),
        (paged, {"out": drawn(4, 4, 72)[..., 3:67]}, "address 0x | allowed | a multiple of 16"),
    ],
}
OF_EXPLAIN = {
    TypeError: [
        (dense, {"v_cache": None}, "explain needs q, k and v"),
        (
            dense,
            {"cu_seqlens_kv": zeros(4)},
            "cu_seqlens_kv: got Tensor; allowed None with seqlens_kv: fmha_kvcache has",
        ),
        (dense, {"max_seqlen_kv": 9}, "max_seqlen_kv: got int; allowed None with seqlens_kv"),
        (dense, {"seqlens_kv": None, "page_table": zeros(3, 2)}, "page_table: got Tensor; allowed None without seq"),
        (dense, {"seqlens_kv": None, "num_splits": 2}, "num_splits: got int; allowed None without seqlens_kv"),
        (dense, {"seqlens_kv": None, "k_scale": 2.0}, "k_scale: got float; allowed None without seqlens_kv"),
    ],
    ValueError: [(dense, {"direction": "backward"}, "direction: got 'backward'; allowed forward with seqlens_kv")],
}


@pytest.mark.parametrize(("kind", "make", "changes", "told"), rows(WRONG, WRONG_VALUES, OF_OUT, OF_THE_CALL))
def test_what_is_wrong_is_named(kind, make, changes, told):
    given = called(make, changes)
    assert_refused(kind, lambda: multiattn.fmha_kvcache(**given), told)


@pytest.mark.parametrize(("kind", "make", "changes", "told"), rows(WRONG_VALUES, OF_OUT))
def test_a_compiled_call_names_wrong_values(kind, make, changes, told):
    """A backend crashed on them: it read pages that no table has. Nor are results cast or broadcast to fit an out."""
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_kvcache, backend="eager")
    assert_refused(kind, lambda: compiled(**called(make, changes)), told)


@pytest.mark.parametrize(("kind", "make", "changes", "told"), rows(WRONG, WRONG_VALUES, OF_EXPLAIN))
def test_explain_names_the_same(kind, make, changes, told):
    assert_refused(kind, lambda: explain(called(make, changes)), told)


def explain(given, **more):
    q, k, v = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
    return multiattn.explain(q, k, v, **given, **more)


# ---------------------------------------------------------------- explain


def test_explain_gives_the_plan_that_runs():
    given = called(paged, {"causal": True, "num_splits": 3, "backend": "cuda"})
    plan = explain(given)
    assert isinstance(plan, Plan)
    assert (plan.backend, plan.variant, plan.config.splits) == ("cuda", "split_keys", 3)
    assert str(plan.problem) == "packed B=3 Hq=4 Hkv=2 Tq=4 Skv=64 D=64 bf16 causal cache: pages of 16 splits=3"
    assert plan.problem.batching == Batching.cached(3, 6, 16, 4, max_q=3, splits=3)
    assert plan.workspace_bytes == 3 * 4 * 4 * (64 + 1) * 4


def test_explain_has_the_options_of_the_call():
    plain = explain(called(dense, {"causal": True}))
    assert (plain.backend, plain.problem.mask, plain.problem.cache.page) == ("reference", "full", None)
    changed = explain(called(dense, {"window": (9, 0), "softcap": 3.0, "sinks": torch.zeros(4), "scale": 0.5}))
    assert (changed.problem.mask, changed.problem.has_sinks, changed.problem.scale) == ("window:9:-", True, 0.5)
    assert changed.problem.has_score


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm120"])
def test_explain_of_a_gpu_that_is_not_here(arch):
    plan = explain(called(paged, {"backend": "cuda"}), arch=arch)
    assert (plan.arch.name, plan.variant) == (arch, "split_keys")
    assert 1 <= plan.config.splits <= SPLITS_MAX


def test_a_problem_has_its_own_cache():
    (q, k, v), rest = dense()
    problem = multiattn.explain(q, k, v, **rest).problem
    assert multiattn.explain(problem, arch="sm90", backend="cuda").problem is problem
    with pytest.raises(TypeError, match="takes q alone"):
        multiattn.explain(problem, arch="sm90", seqlens_kv=rest["seqlens_kv"])
