"""FlashAttention's attention over caches: each against plain attention of what the cache should have."""

import pytest
import torch
from test_integrations_flash_attn import plain

from multiattn.integrations import flash_attn
from multiattn.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

HEADS_Q, HEADS_KV, HEAD_DIM, CAPACITY = 4, 2, 16, 24
LENGTHS = (9, 0, 20)
NEW = 3
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (5, -1), "softcap": 1.5, "softmax_scale": 0.4},
}
CACHES = {"dense": None, "entries": None, "pages of 1": 1, "pages of 8": 8}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def starts(lengths):
    return torch.tensor((0, *lengths)).cumsum(0).int()


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Cached:
    """The keys of some sequences, in a cache of a kind and as plain tensors; what no sequence has is NaN."""

    def __init__(self, kind, lengths=LENGTHS, dtype=torch.float32):
        page = CACHES[kind] or CAPACITY
        pages = -(-CAPACITY // page)
        order = torch.randperm(len(lengths) * pages + 2, generator=torch.Generator().manual_seed(7))
        if kind == "dense":
            order = torch.arange(len(lengths))
        self.table = order[: len(lengths) * pages].view(-1, pages).int()
        self.rows = [normal(length, 2, HEADS_KV, HEAD_DIM, seed=length, dtype=dtype) for length in lengths]
        both = torch.full((len(order), page, 2, HEADS_KV, HEAD_DIM), torch.nan, dtype=dtype)
        for entries, rows in zip(self.table, self.rows, strict=True):
            for place, row in enumerate(rows):
                both[entries[place // page], place % page] = row
        self.views = both.unbind(2)
        self.where = {"cache_seqlens": ints(*lengths)}
        if kind == "entries":
            self.where["cache_batch_idx"] = self.table[:, 0]
        elif kind != "dense":
            self.where["page_table"] = self.table

    def add(self, new):
        """New rows ``[2, length, Hkv, D]`` of each sequence."""
        self.rows = [torch.cat((rows, its.transpose(0, 1))) for rows, its in zip(self.rows, new, strict=True)]

    def expected(self, queries, **options):
        """Out and lse of each sequence's queries ``[length, Hq, D]``."""
        for q, rows in zip(queries, self.rows, strict=True):
            out, lse = plain(*(it[None].float() for it in (q, *rows.unbind(1))), **options)
            yield out[0], lse[0]

    def assert_rows(self):
        """The cache has these rows and no others."""
        for cache, of in zip(self.views, (0, 1), strict=True):
            for entries, rows in zip(self.table, self.rows, strict=True):
                found = cache[entries.long()].flatten(0, 1)[: len(rows)]
                torch.testing.assert_close(found, rows[:, of], rtol=0, atol=0)
            assert cache.isfinite().all(-1).all(-1).sum() == sum(map(len, self.rows))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", CACHES)
def test_new_keys_are_put_into_the_cache_and_attended(kind, options):
    cached = Cached(kind)
    q, k, v = (normal(3, NEW, heads, HEAD_DIM, seed=9 + heads) for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
    out, lse = flash_attn_with_kvcache(q, *cached.views, k, v, **cached.where, **options, return_softmax_lse=True)
    cached.add(torch.stack((k, v), dim=1))
    cached.assert_rows()
    for found, its_lse, (wanted, wanted_lse) in zip(out, lse, cached.expected(q, **options), strict=True):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(its_lse, wanted_lse)
    cached.where["cache_seqlens"] = cached.where["cache_seqlens"] + NEW
    assert torch.equal(flash_attn_with_kvcache(q, *cached.views, **cached.where, **options), out)


@pytest.mark.parametrize("kind", CACHES)
def test_values_may_have_a_width_of_their_own(kind):
    cached = Cached(kind)
    q, k, v = (normal(3, NEW, heads, HEAD_DIM, seed=9 + heads) for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
    views, narrow = cached.views, (cached.views[0], cached.views[1][..., :8])
    out = flash_attn_with_kvcache(q, *narrow, k, v[..., :8], **cached.where, causal=True)
    wanted = flash_attn_with_kvcache(q, *views, k, v, **cached.where, causal=True)
    torch.testing.assert_close(out, wanted[..., :8])


@pytest.mark.parametrize("new", [(2, 0, 4), (0, 0, 0), (0, 5, 0)], ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_packed_queries_and_packed_new_keys(kind, new):
    """Lengths differ, and the rows behind the last sequence, here NaN, go nowhere."""
    cached, asked = Cached(kind), (4, 1, 3)
    q = normal(sum(asked), HEADS_Q, HEAD_DIM)
    both = normal(2, sum(new) + 2, HEADS_KV, HEAD_DIM, seed=1)
    both[:, sum(new) :] = torch.nan
    more = {"cu_seqlens_q": starts(asked), "max_seqlen_q": 4, "cu_seqlens_k_new": starts(new), "causal": True}
    out, lse = flash_attn_with_kvcache(q, *cached.views, *both, **cached.where, **more, return_softmax_lse=True)
    cached.add(both[:, : sum(new)].split(new, dim=1))
    cached.assert_rows()
    wanted, wanted_lse = zip(*cached.expected(q.split(asked), causal=True), strict=True)
    torch.testing.assert_close(out, torch.cat(wanted))
    torch.testing.assert_close(lse, torch.cat(wanted_lse, dim=1))


def test_lengths_may_be_one_number_or_none():
    cached = Cached("dense", (20, 20))
    q = normal(2, 1, HEADS_Q, HEAD_DIM)
    expected = torch.stack([out for out, _ in cached.expected(q)])
    torch.testing.assert_close(flash_attn_with_kvcache(q, *cached.views, cache_seqlens=20), expected)
    whole = [it[:, :20] for it in cached.views]
    torch.testing.assert_close(flash_attn_with_kvcache(q, *whole), expected)


@pytest.mark.parametrize("name", ["page_table", "block_table"])
def test_a_table_of_more_sequences_is_indexed(name):
    cached, order = Cached("pages of 8"), ints(2, 0)
    q = normal(2, 2, HEADS_Q, HEAD_DIM)
    lengths = cached.where["cache_seqlens"][order]
    named = {"cache_batch_idx": order, name: cached.table, "num_splits": 2, "sm_margin": 3}
    found = flash_attn_with_kvcache(q, *cached.views, cache_seqlens=lengths, **named)
    cached.rows = [cached.rows[it] for it in order]
    torch.testing.assert_close(found, torch.stack([out for out, _ in cached.expected(q)]))


def test_sinks_and_a_named_backend():
    """Triton's kernel, interpreted, over pages in the layout of FlashAttention."""
    cached = Cached("pages of 8", dtype=torch.float16)
    q, sinks = normal(3, 1, HEADS_Q, HEAD_DIM, dtype=torch.float16), torch.tensor([0.5, -1.0, 0.0, 2.0])
    found = flash_attn_with_kvcache(q, *cached.views, **cached.where, learnable_sink=sinks, backend="triton")
    assert found.is_contiguous()
    for its, (wanted, lse) in zip(found, cached.expected(q), strict=True):
        share = torch.sigmoid(lse - sinks[:, None]).transpose(0, 1)[..., None]
        torch.testing.assert_close(its.float(), wanted * share, rtol=0, atol=2e-3)


def test_it_compiles_into_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")
    q, k, v = (normal(3, 1, heads, HEAD_DIM, dtype=torch.float16) for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
    outs = []
    for function in (flash_attn_with_kvcache, compiled):
        cached = Cached("pages of 8", dtype=torch.float16)
        outs.append(function(q, *cached.views, k, v, **cached.where, causal=True))
        cached.add(torch.stack((k, v), dim=1))
        cached.assert_rows()
    assert torch.equal(*outs)
    scale, slopes = torch.full((3, HEADS_KV), 0.5), SLOPES["heads"]
    stored = [it.nan_to_num().to(torch.float8_e4m3fn) for it in cached.views]
    more = {**cached.where, "k_descale": scale, "v_descale": scale, "alibi_slopes": slopes}
    assert torch.equal(compiled(q, *stored, **more), flash_attn_with_kvcache(q, *stored, **more))


@pytest.mark.parametrize("kind", ["dense", "pages of 8"])
def test_the_packed_function_takes_caches(kind):
    """As vLLM calls it: by keywords, with its own names, its scales of an fp8 cache, and an out to write to."""
    cached, asked = Cached(kind), (4, 0, 3)
    q, sinks, out = normal(7, HEADS_Q, HEAD_DIM), normal(HEADS_Q), torch.empty(7, HEADS_Q, HEAD_DIM)
    k, v = cached.views
    tensors = {"q": q, "k": k, "v": v, "out": out, "s_aux": sinks, "k_descale": torch.ones(3, HEADS_KV)}
    lengths = {"cu_seqlens_q": starts(asked), "max_seqlen_q": 4, "max_seqlen_k": CAPACITY}
    where = {"seqused_k": cached.where["cache_seqlens"], "block_table": cached.where.get("page_table")}
    hints = {"scheduler_metadata": None, "fa_version": 3, "num_splits": 0, "softcap": 0}
    options = {"softmax_scale": 0.3, "causal": True, "window_size": [6, 0]}
    call = {**tensors, **lengths, **where, **hints, **options}
    found, lse = flash_attn_varlen_func(**call, return_softmax_lse=True)
    assert found is out
    expected, expected_lse = zip(*cached.expected(q.split(asked), **options), strict=True)
    share = torch.sigmoid(torch.cat(expected_lse, dim=1) - sinks[:, None]).transpose(0, 1)[..., None]
    torch.testing.assert_close(out, torch.cat(expected) * share)
    torch.testing.assert_close(lse, torch.logaddexp(torch.cat(expected_lse, dim=1), sinks[:, None]))
    if kind != "dense":  # FlashAttention 2 has the lengths in cu_seqlens_k
        by_position = starts(asked), starts(LENGTHS), 4, 24, 0.0, 0.3, True, (6, 0)
        again = flash_attn_varlen_func(q, k, v, *by_position, block_table=cached.table, s_aux=sinks)
        assert torch.equal(again, out)


SLOPES = {"heads": torch.tensor([0.5, 0.25, 0.1, 0.0]), "batch": torch.linspace(0, 1, 12).view(3, HEADS_Q)}


@pytest.mark.parametrize("slopes", SLOPES.values(), ids=SLOPES)
@pytest.mark.parametrize("kind", CACHES)
def test_slopes_are_of_the_end_of_each_sequence(kind, slopes):
    cached = Cached(kind)
    q, k, v = (normal(3, NEW, heads, HEAD_DIM, seed=9 + heads) for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
    options = {"alibi_slopes": slopes, "causal": True, "softcap": 2.0}
    out, lse = flash_attn_with_kvcache(q, *cached.views, k, v, **cached.where, **options, return_softmax_lse=True)
    cached.add(torch.stack((k, v), dim=1))
    for entry, (its_q, rows) in enumerate(zip(q, cached.rows, strict=True)):
        options["alibi_slopes"] = slopes if slopes.ndim == 1 else slopes[entry]
        wanted, wanted_lse = plain(*(it[None] for it in (its_q, *rows.unbind(1))), **options)
        torch.testing.assert_close(out[entry], wanted[0])
        torch.testing.assert_close(lse[entry], wanted_lse[0])
    if kind != "dense":
        return
    where = {"seqused_k": cached.where["cache_seqlens"] + NEW, "cu_seqlens_q": starts((NEW,) * 3), "max_seqlen_q": NEW}
    found = flash_attn_varlen_func(q.flatten(0, 1), *cached.views, **where, **options | {"alibi_slopes": slopes})
    torch.testing.assert_close(found, out.flatten(0, 1))


def quantised(tensor, scale, dtype):
    numbers = (tensor / scale).clamp(-127, 127)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("new", ["batch", "packed"])
@pytest.mark.parametrize("kind", CACHES)
def test_8_bit_caches_have_the_descales_of_flash_attention_3(kind, new, dtype):
    """``[B, Hkv]`` of keys and of values, as vLLM expands a layer's one; new keys are quantised by the caller."""
    cached = Cached(kind, dtype=torch.float16)
    scales = [normal(3, HEADS_KV, seed=it).abs().add(1.0) / 32 for it in (20, 21)]
    views = []
    for cache, scale in zip(cached.views, scales, strict=True):
        stored = torch.zeros(cache.shape, dtype=dtype)
        for entries, its in zip(cached.table.long(), scale, strict=True):
            stored[entries] = quantised(cache[entries].nan_to_num(), its[:, None], dtype)
        views.append(stored)
    q, k, v = (normal(3, NEW, heads, HEAD_DIM, seed=9 + heads).half() for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
    k, v = (quantised(it, scale[:, None, :, None], dtype) for it, scale in zip((k, v), scales, strict=True))
    more = {"causal": True, "k_descale": scales[0], "v_descale": scales[1], "return_softmax_lse": True}
    given = (q, k, v)
    if new == "packed":
        given = [it.flatten(0, 1) for it in given]
        more |= {"cu_seqlens_q": starts((NEW,) * 3), "max_seqlen_q": NEW, "cu_seqlens_k_new": starts((NEW,) * 3)}
    out, lse = flash_attn_with_kvcache(given[0], *views, *given[1:], **cached.where, **more)
    lses = lse if new == "batch" else lse.unflatten(1, (3, NEW)).transpose(0, 1)
    for entry, length in enumerate(LENGTHS):
        rows = [
            (it[cached.table[entry].long()].flatten(0, 1)[: length + NEW].float() * scale[entry][:, None])
            for it, scale in zip(views, scales, strict=True)
        ]
        assert all(
            torch.equal(it[length:], of[entry].float() * scale[entry][:, None])
            for it, of, scale in zip(rows, (k, v), scales, strict=True)
        )
        wanted, wanted_lse = plain(q[entry][None].float(), *(it[None] for it in rows), causal=True)
        its = out.unflatten(0, (3, NEW))[entry] if new == "packed" else out[entry]
        torch.testing.assert_close(its.float(), wanted[0], rtol=0, atol=2e-3)
        torch.testing.assert_close(lses[entry], wanted_lse[0], rtol=0, atol=1e-4)


def test_the_packed_function_has_descales_where_a_cache_has_8_bits():
    """Over 16 bits it ignores them; q's is refused, as q has none."""
    cached, asked = Cached("pages of 8", dtype=torch.float16), (4, 0, 3)
    where = {"seqused_k": cached.where["cache_seqlens"], "block_table": cached.table, "causal": True}
    where |= {"cu_seqlens_q": starts(asked), "max_seqlen_q": 4, "max_seqlen_k": CAPACITY}
    q, scale = normal(7, HEADS_Q, HEAD_DIM).half(), torch.tensor(1 / 32).expand(3, HEADS_KV)
    k, v = (it.nan_to_num() for it in cached.views)
    wanted = flash_attn_varlen_func(q, k, v, **where, k_descale=scale, v_descale=scale, q_descale=scale)
    assert torch.equal(wanted, flash_attn_varlen_func(q, k, v, **where))
    k, v = (quantised(it, 1 / 32, torch.int8) for it in (k, v))
    found = flash_attn_varlen_func(q, k, v, **where, k_descale=scale, v_descale=scale, q_descale=1.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)
    for other in (scale, 0.5):
        with pytest.raises(NotImplementedError, match=r"flash_attn_varlen_func: q_descale: got .*; allowed None or 1,"):
            flash_attn_varlen_func(q, k, v, **where, k_descale=scale, q_descale=other)


def test_new_keys_of_16_bits_go_into_no_8_bit_cache():
    q, new = normal(1, 1, HEADS_Q, HEAD_DIM).half(), normal(1, 1, HEADS_KV, HEAD_DIM).half()
    cache = torch.zeros(1, CAPACITY, HEADS_KV, HEAD_DIM, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"k: got .*float16 .*; allowed .* torch.int8 .*; divide by its scale"):
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=3, k_descale=torch.ones(1, HEADS_KV))


def test_out_without_a_cache_is_written():
    q, out = normal(7, 4, HEAD_DIM), torch.empty(7, 4, HEAD_DIM)
    lengths = (starts((4, 3)), starts((4, 3)), 4, 4)
    found = flash_attn_varlen_func(q, q, q, *lengths, out=out, causal=True)
    assert found is out
    assert torch.equal(out, flash_attn_varlen_func(q, q, q, *lengths, causal=True))


def test_new_keys_go_to_no_page_below_0():
    """An index of -1 is the last page, which may be another sequence's."""
    cached = Cached("pages of 8")
    cached.table[1, cached.where["cache_seqlens"][1] // cached.views[0].shape[1]] = -1
    kept = [it.clone() for it in cached.views]
    new = torch.ones(3, 1, HEADS_KV, HEAD_DIM)
    with pytest.raises(ValueError, match="page_table: got -1 where new keys go; allowed pages from 0 to "):
        flash_attn_with_kvcache(normal(3, 1, HEADS_Q, HEAD_DIM), *cached.views, new, new, **cached.where)
    for it, was in zip(cached.views, kept, strict=True):
        torch.testing.assert_close(it, was, rtol=0, atol=0, equal_nan=True)


def test_what_goes_with_rotary_embedding_is_nothing_without_it():
    cached, q = Cached("pages of 8"), normal(3, 1, HEADS_Q, HEAD_DIM)
    wanted = flash_attn_with_kvcache(q, *cached.views, **cached.where)
    found = flash_attn_with_kvcache(q, *cached.views, **cached.where, rotary_seqlens=ints(1, 2, 3))
    assert torch.equal(found, wanted)


def test_no_gradient_is_lost_in_silence():
    q, cache = torch.ones(1, 1, 2, 16, requires_grad=True), torch.zeros(1, 8, 2, 16)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="no gradient"):
        flash_attn_with_kvcache(q, cache, cache, q.detach(), q, cache_seqlens=3)
    assert not cache.any()


def test_every_function_is_exported():
    assert flash_attn.flash_attn_with_kvcache is flash_attn_with_kvcache
    assert set(flash_attn.__all__) == {name for name in vars(flash_attn) if name.startswith("flash_attn_")}
