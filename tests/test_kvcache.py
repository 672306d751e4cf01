"""`fmha_kvcache`: what it refuses and says, its op, where results go, and that lengths are the device's own."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cached_calls import COMPILED, dense, drawn, paged
from torch._dynamo.testing import CompileCounterWithBackend

import multiattn

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
    for call in (multiattn.fmha_kvcache, explained):
        with pytest.raises(NotImplementedError, match="fmha_kvcache has no gradient: call it under"):
            call(**named, **rest)
        with torch.no_grad():
            call(**named, **rest)


def explained(q, k_cache, v_cache, **rest):
    return multiattn.explain(q, k_cache, v_cache, **rest)


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
