"""`fmha_varlen`: its ops, that nothing is made anew for other lengths, and what it refuses and says.

Values of cu_seqlens that are no starts of sequences are refused by name on a CPU, in every entry that takes them.
"""

import itertools
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import multiattn
from multiattn.integrations.flash_attn import flash_attn_varlen_func
from multiattn.integrations.flash_attn_kvcache import flash_attn_with_kvcache
from multiattn.packed import LIST_FIELDS, ROWS_MIN
from multiattn.problem import Problem
from multiattn.run import values
from multiattn.sequences import Batching
from multiattn.varlen import check_lengths


def batch(lengths, heads=(4, 2), head_dim=16, dtype=torch.bfloat16, behind=0, seed=0):
    """q, k and v of sequences with these lengths, and the other arguments."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    rows = int(cu_seqlens[-1]) + behind
    sizes = ((rows, each, head_dim) for each in (heads[0], heads[1], heads[1]))
    q, k, v = (torch.randn(it, generator=generator).to(dtype) for it in sizes)
    longest = max(lengths, default=0)
    starts = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return (q, k, v), starts | {"max_seqlen_q": longest, "max_seqlen_kv": longest}


def test_backward_without_autograd_is_that_of_autograd():
    tensors, lengths = batch((5, 0, 33, 7), behind=3)
    sinks = torch.randn(4, requires_grad=True)
    leaves = [it.requires_grad_() for it in tensors]
    out, lse = multiattn.fmha_varlen(*leaves, **lengths, sinks=sinks, return_lse=True)
    dout = torch.randn(out.shape, dtype=out.dtype)
    dout[45:] = torch.nan  # of rows that are in no sequence
    dlse = torch.randn(lse.shape)
    found = torch.autograd.grad((out, lse), (*leaves, sinks), (dout, dlse))
    saved = (it.detach() for it in (*leaves, out, lse))
    again = multiattn.fmha_varlen_backward(*saved, dout, dlse=dlse, **lengths, sinks=sinks.detach())
    assert len(again) == len(found)
    for one, other in zip(found, again, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_compiles_once_for_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_varlen, backend=counter, fullgraph=True, dynamic=True)
    for seed, lengths in enumerate(((5, 9), (31, 2, 17), (8, 8, 8, 8, 3), (90,))):
        tensors, rest = batch(lengths, seed=seed)
        got = compiled(*tensors, **rest, causal=True)
        torch.testing.assert_close(got, multiattn.fmha_varlen(*tensors, **rest, causal=True), rtol=0, atol=0)
    assert counter.frame_count == 1


def test_explain_says_what_runs():
    tensors, lengths = batch((5, 3))
    plan = multiattn.explain(*tensors, **lengths, causal=True)
    assert plan.problem.packing == Batching.packed(2)
    assert str(plan.problem) == "packed B=2 Hq=4 Hkv=2 Tq=8 Tkv=8 D=16 bf16 causal"
    with pytest.raises(TypeError, match="cu_seqlens_kv must be a"):
        multiattn.explain(*tensors, cu_seqlens_q=lengths["cu_seqlens_q"])


def test_lists_have_room_for_every_tile():
    for lengths in ((1, 1, 1), (16, 17, 0), (5000,), ()):
        rows = sum(lengths) + 20  # some behind the last
        tiles = sum(-(-length // ROWS_MIN) for length in (*lengths, 20))
        spec = Batching.packed(len(lengths))
        assert tiles <= spec.tiles_max(rows, ROWS_MIN)
        (layout, *_) = spec.tile_layouts(rows, rows).values()
        assert layout.shape == (spec.tiles_max(rows, ROWS_MIN), len(LIST_FIELDS))


def test_no_plan_depends_on_lengths():
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 1, "head_dim": 64, "window": (100, 0)}
    lengths = itertools.product((1, 31, 128, 4096, 65536), (1, 7, 300))
    problems = {Problem.contiguous(**sizes, seq_q=rows, batching=Batching.packed(of)) for rows, of in lengths}
    described = {(it.strides_q, it.strides_k, it.strides_out, it.alignment, it.band) for it in problems}
    assert len(described) == 1


# ---------------------------------------------------------------- values that are no starts of sequences

ROWS = {"q": 10, "kv": 12}
RIGHT = {"q": (0, 4, 7, 10), "kv": (0, 5, 5, 12)}
WRONG = {
    "no leading 0": ((4, 7, 10), "got 4 first, in [4, 7, 10]; allowed 0 first"),
    "lengths": ((4, 3, 3), "got 4 first"),
    "negative": ((-1, 4, 7), "got -1 first"),
    "falls": ((0, 7, 4), "got 4 at 2, behind 7"),
    "falls below 0": ((0, -2, 4), "got -2 at 1, behind 0"),
    "past the end": ((0, 4, 30), "got 30 last"),
    "far": ((0, 2**31 - 1, 7), "got 7 at 2, behind 2147483647"),
}


def int32(starts):
    return torch.tensor(starts, dtype=torch.int32)


def call(side=None, starts=None):
    """q, k and v, and the lengths of a call, those of one side wrong."""
    q, k = torch.randn(ROWS["q"], 4, 16).bfloat16(), torch.randn(ROWS["kv"], 2, 16).bfloat16()
    given = {"q": RIGHT["q"], "kv": RIGHT["kv"]}
    if side is not None:
        given = {it: starts if it == side else (*RIGHT[it][: len(starts) - 1], ROWS[it]) for it in given}
    return (q, k, k.clone()), {"cu_seqlens_q": int32(given["q"]), "cu_seqlens_kv": int32(given["kv"])}


MOST = {"max_seqlen_q": 10, "max_seqlen_kv": 12}


def varlen(tensors, starts, **options):
    return multiattn.fmha_varlen(*tensors, **{**starts, **MOST, **options})


def backward(tensors, starts, **options):
    out, lse = tensors[0], torch.zeros(4, ROWS["q"])
    return multiattn.fmha_varlen_backward(*tensors, out, lse, out, **{**starts, **MOST, **options})


def explain(tensors, starts, **options):
    return multiattn.explain(*tensors, **{**starts, **MOST, **options})


def by_flash_attn(tensors, starts, **options):
    most = {**MOST, **options}
    return flash_attn_varlen_func(*tensors, *starts.values(), most["max_seqlen_q"], most["max_seqlen_kv"])


ENTRIES = {it.__name__: it for it in (varlen, backward, explain, by_flash_attn)}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("side", ["q", "kv"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_starts_are_named(entry, side, wrong):
    starts, said = WRONG[wrong]
    with pytest.raises(ValueError, match=re.escape(f"cu_seqlens_{side}: {said}")):
        ENTRIES[entry](*call(side, starts))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("side", "longest"), [("q", 4), ("kv", 7)])
def test_a_sequence_longer_than_told_is_named(entry, side, longest):
    said = f"max_seqlen_{side}: got {longest - 1}; allowed {longest} and more, as sequence"
    with pytest.raises(ValueError, match=said):
        ENTRIES[entry](*call(), **{f"max_seqlen_{side}": longest - 1})
    ENTRIES[entry](*call(), **{f"max_seqlen_{side}": longest})


def plain(tensors, cu_seqlens_q, entry=varlen):
    return entry(tensors, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": int32(RIGHT["kv"])})


def compiled(tensors, cu_seqlens_q, entry=varlen):
    torch._dynamo.reset()
    return torch.compile(plain, backend="aot_eager", fullgraph=True)(tensors, cu_seqlens_q, entry)


def profiled(tensors, cu_seqlens_q):
    with torch.profiler.profile():
        return plain(tensors, cu_seqlens_q)


def graphed(tensors, cu_seqlens_q):
    graph = make_fx(lambda *of: plain(of[:3], of[3]))(*tensors, int32(RIGHT["q"]))
    return graph(*tensors, cu_seqlens_q)


WAYS = {
    "compiled": compiled,
    "compiled backward": lambda of, starts: compiled(of, starts, backward),
    "compiled with grad": lambda of, starts: compiled([it.requires_grad_() for it in of], starts).sum().backward(),
    "mapped": lambda of, starts: torch.vmap(lambda starts: plain(of, starts))(starts[None]),
    "differentiated": lambda of, starts: torch.func.grad(lambda q: plain((q, *of[1:]), starts).float().sum())(of[0]),
    "profiled": profiled,
    "graphed": graphed,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_ops_name_them_too(way):
    tensors, _ = call()
    WAYS[way](tensors, int32(RIGHT["q"]))
    with pytest.raises(ValueError, match="cu_seqlens_q: got 4 at 2, behind 7"):
        WAYS[way](tensors, int32((0, 7, 4, 10)))


def test_fakes_have_no_values():
    tensors, starts = call("q", (0, 30))
    assert varlen([it.to("meta") for it in tensors], {name: it.to("meta") for name, it in starts.items()}).is_meta
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(it) for it in tensors]
        assert varlen(fakes, {name: mode.from_tensor(it) for name, it in starts.items()}).shape == tensors[0].shape


def test_new_keys_of_flash_attention_have_starts():
    q, cache, new = (torch.randn(2, it, 1, 16).bfloat16() for it in (1, 8, 3))
    options = {"cache_seqlens": int32((1, 2)), "cu_seqlens_q": int32((0, 1, 2)), "max_seqlen_q": 1}
    for starts, said in (((1, 3, 6), "got 1 first"), ((0, 5, 3), "got 3 at 2, behind 5"), ((0, 3, 7), "got 7 last")):
        before, rows = cache.clone(), dict.fromkeys("kv", new.flatten(0, 1)) | {"cu_seqlens_k_new": int32(starts)}
        with pytest.raises(ValueError, match=f"cu_seqlens_k_new: {said}"):
            flash_attn_with_kvcache(q[:, 0], cache, cache, **rows, **options)
        assert cache.equal(before)


def test_transformers_names_them():
    transformers = pytest.importorskip("multiattn.integrations.transformers")
    q, k = torch.randn(1, 4, 10, 16).bfloat16(), torch.randn(1, 2, 10, 16).bfloat16()
    for starts, said in (((0, 4, 11), "got 11 last"), ((4, 10), "got 4 first")):
        lengths = {"cu_seq_lens_q": int32(starts), "cu_seq_lens_k": int32(starts)}
        with pytest.raises(ValueError, match=f"cu_seqlens_q: {said}"):
            transformers.attend(torch.nn.Module(), q, k, k, None, is_causal=True, **lengths)


def test_a_gpu_is_asked_where_the_variable_says_so(monkeypatch):
    gpu, capturing = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    try:
        for value, expected in ((None, False), ("0", False), ("1", True)):
            values.is_asked.cache_clear()
            monkeypatch.delenv(values.VARIABLE, raising=False)
            if value is not None:
                monkeypatch.setenv(values.VARIABLE, value)
            assert values.are_read(gpu) is expected
            assert values.are_read(torch.device("cpu"))
            assert not values.are_read(torch.device("meta"))
        capturing.append(True)
        assert not values.are_read(gpu)
        values.is_asked.cache_clear()
        monkeypatch.setenv(values.VARIABLE, "yes")
        with pytest.raises(ValueError, match="MULTIATTN_CHECK: got 'yes'; allowed 1 to check values on a GPU"):
            values.are_read(gpu)
    finally:
        values.is_asked.cache_clear()


def test_checks_cost_microseconds():
    """A call on a CPU takes a hundred of them at least."""
    import timeit

    starts = int32(range(0, 33, 4))
    arguments = ((32, 32), (starts, starts), (4, 4))
    assert min(timeit.repeat(lambda: check_lengths(*arguments), number=100, repeat=20)) / 100 < 50e-6
    assert min(timeit.repeat(lambda: values.can_be_read(starts, starts), number=100, repeat=20)) / 100 < 20e-6
