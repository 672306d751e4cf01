"""Packed batches and caches on a GPU: one graph for all lengths, pages in no order, many threads, no waiting."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import multiattn
from multiattn import Plan
from multiattn.plan.backend import BACKENDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def captured(run):
    """A graph of `run`, and what it returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def check_no_wait(run):
    """A warm run never waits for the device."""
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def files_in(folders):
    return {path for folder in folders for path in folder.rglob("*")}


# ---------------------------------------------------------------- packed batches

ROWS = 600


def starts(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)


def call_packed(tensors, cu_seqlens, backend, **options):
    longest = {"max_seqlen_q": ROWS, "max_seqlen_kv": ROWS}
    named = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "causal": True}
    return multiattn.fmha_varlen(*tensors, **named, **longest, backend=backend, **options)


def draw(rows=ROWS, head_dim=64):
    return [torch.randn(rows, heads, head_dim, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_serves_all_lengths(backend):
    leaves = [it.requires_grad_() for it in draw()]
    cu_seqlens = starts(300, 0, 100, 150, 50)
    dout = torch.randn_like(leaves[0])

    def train():
        out = call_packed(leaves, cu_seqlens, backend)
        return out, *torch.autograd.grad(out, leaves, dout)

    train()  # compiles
    graph, results = captured(train)
    for lengths in ((1, 2, 3, 4, 5), (600, 0, 0, 0, 0), (0, 100, 200, 7, 200)):
        cu_seqlens.copy_(starts(*lengths))
        graph.replay()
        out = call_packed(leaves, cu_seqlens.clone(), "reference")
        expected = (out, *torch.autograd.grad(out, leaves, dout))
        for got, want in zip(results, expected, strict=True):
            torch.testing.assert_close(got.float(), want.float(), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_200_batches_compile_nothing_after_the_first(backend, own_caches):
    """By the files that compilers leave: all of them keep what they make on disk."""
    generator = torch.Generator().manual_seed(0)

    def train():
        lengths = torch.randint(1, 400, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)
        leaves = [it.requires_grad_() for it in draw(int(lengths.sum()), head_dim=128)]
        call_packed(leaves, starts(*lengths.tolist()), backend).sum().backward()
        torch.cuda.synchronize()

    train()
    before = files_in(own_caches)
    for _ in range(200):
        train()
    assert files_in(own_caches) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_packed_call_waits_for_the_device(backend):
    leaves = [it.requires_grad_() for it in draw()]
    cu_seqlens = starts(300, 0, 100, 150, 50)
    check_no_wait(lambda: call_packed(leaves, cu_seqlens, backend).sum().backward())


# ---------------------------------------------------------------- caches


DEVICE = "cuda"
PAGE, HEADS_Q, HEADS_KV, HEAD_DIM = 16, 8, 2, 128
CLOSE = {"atol": 2e-2, "rtol": 2e-2}


def drawn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def pages_of(sequences, longest, *, slack=3, seed=0):
    """A page table in no order, of pages of which no sequence has two, and how many pages there are."""
    each = -(-longest // PAGE)
    number = sequences * each + slack
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))[: sequences * each]
    return order.view(sequences, each).to(DEVICE, torch.int32), number


def caches(pages):
    """K and V of NaN, views of one tensor ``[pages, 2, page, Hkv, D]``, as vLLM has them."""
    both = torch.full((pages, 2, PAGE, HEADS_KV, HEAD_DIM), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)


def put(k, v, table, lengths):
    """Keys and values of sequences of these lengths, where the table says."""
    for entry, length in enumerate(lengths):
        keys = torch.arange(length, device=DEVICE)
        places = table[entry].long()[keys // PAGE], keys % PAGE
        for it in (k, v):
            it.transpose(1, 2)[places] = drawn(length, HEADS_KV, HEAD_DIM)


def int32(*numbers):
    return torch.tensor(numbers, device=DEVICE, dtype=torch.int32)


def call(q, k, v, rest, backend, **options):
    return multiattn.fmha_kvcache(q, k, v, **rest, causal=True, backend=backend, **options)


def truth(q, k, v, rest):
    """In fp32, by the reference."""
    return call(q.float(), k.float(), v.float(), rest, "reference")


def needs(backend, q, k, v, rest, **options):
    """Skip where a backend does not take such a call, with its reasons."""
    plan = multiattn.explain(q, k, v, **rest, causal=True, backend=backend, **options)
    if not isinstance(plan, Plan):
        pytest.skip("; ".join(map(str, plan)))


LONGEST = 4096


@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_captured_at_length_1_serves_every_step(backend, num_splits):
    """Each step appends a token to each sequence and replays. The second sequence starts 77 tokens later."""
    sequences = 3
    table, pages = pages_of(sequences, LONGEST)
    k, v = caches(pages)
    rows_of_pages = [it.transpose(1, 2) for it in (k, v)]  # [pages, page, Hkv, D]
    q, lengths = drawn(sequences, HEADS_Q, 1, HEAD_DIM), int32(1, 1, 1)
    put(k, v, table, (1, 1, 1))
    rest = {"seqlens_kv": lengths, "page_table": table, "num_splits": num_splits}
    needs(backend, q, k, v, rest)
    call(q, k, v, rest, backend)  # compiles
    graph, out = captured(lambda: call(q, k, v, rest, backend))
    rows = torch.arange(sequences, device=DEVICE)
    starts = int32(0, 77, 0)
    checked = {2**size for size in range(13)} | {*random.Random(0).sample(range(1, LONGEST), 40)}
    for step in range(1, LONGEST + 1):
        if step > 1:
            place = (step - 1 - starts).clamp(min=0)
            page = table[rows, (place // PAGE).long()].long()
            for it in rows_of_pages:
                it.index_put_((page, (place % PAGE).long()), drawn(sequences, HEADS_KV, HEAD_DIM))
            lengths.copy_(place + 1)
            q.copy_(drawn(*q.shape))
        graph.replay()
        if step in checked:
            torch.testing.assert_close(
                out.float(), truth(q, k, v, rest), **CLOSE, msg=lambda it, step=step: f"step {step}: {it}"
            )
    assert lengths.tolist() == [LONGEST, LONGEST - 77, LONGEST]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_serves_chunks_single_tokens_and_other_pages(backend):
    """Sequences have other rows of q and other pages in each replay. Rows behind the last stay as they are."""
    table, pages = pages_of(5, 600)
    k, v = caches(pages)
    q, out = drawn(64, HEADS_Q, HEAD_DIM), torch.empty(64, HEADS_Q, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    starts, lengths = int32(0, 1, 2, 3, 4, 5), int32(1, 1, 1, 1, 1)
    rest = {"seqlens_kv": lengths, "page_table": table, "cu_seqlens_q": starts, "max_seqlen_q": 40}
    needs(backend, q, k, v, rest)
    put(k, v, table, (1, 1, 1, 1, 1))
    call(q, k, v, rest, backend, out=out)
    graph, _ = captured(lambda: call(q, k, v, rest, backend, out=out))
    for seed, (queries, keys) in enumerate(
        (((40, 1, 0, 1, 7), (600, 35, 20, 1, 7)), ((1, 1, 1, 1, 1), (0, 1, 16, 17, 599)), ((0,) * 5, (9,) * 5))
    ):
        table.copy_(pages_of(5, 600, seed=seed + 1)[0])
        put(k, v, table, keys)
        starts.copy_(int32(0, *itertools.accumulate(queries)))
        lengths.copy_(int32(*keys))
        out.fill_(7.0)
        graph.replay()
        rows = sum(queries)
        torch.testing.assert_close(out[:rows].float(), truth(q, k, v, rest)[:rows], **CLOSE)
        assert (out[rows:] == 7.0).all()


def relative(table):
    """A bias of each distance up to the width of a table ``[Hq, extent]``."""

    def modify(score, b, h, i, j):
        distance = i - j
        near = (distance >= 0) & (distance < table.shape[1])
        return score + torch.where(near, table[h, distance.clamp(0, table.shape[1] - 1)], 0.0)

    return modify


def scored(name, sequences, queries):
    """Options of a call with scores or a mask over a cache."""
    made = {
        "relative": lambda: {"score_mod": relative(torch.randn(HEADS_Q, 64, device=DEVICE))},
        "alibi": lambda: {"alibi_slopes": torch.rand(HEADS_Q, device=DEVICE)},
        "tree": lambda: {"bias": torch.rand(sequences, 1, queries, queries, device=DEVICE) > 0.5},
        "plain": dict,
    }
    return made[name]()


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("name", ["relative", "alibi", "tree", "plain"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_serves_all_lengths_with_scores_and_8_bits(backend, name, stored):
    """New tokens are quantised in the graph, into pages that each replay has anew."""
    if name == "plain" and stored is None:
        pytest.skip("tested above")
    sequences, queries, longest = 3, 5, 600
    table, pages = pages_of(sequences, longest)
    filled = [drawn(pages, HEADS_KV, PAGE, HEAD_DIM) for _ in "kv"]
    new = [drawn(sequences, HEADS_KV, queries, HEAD_DIM) for _ in "kv"]
    q, lengths = drawn(sequences, HEADS_Q, queries, HEAD_DIM), int32(9, 9, 9)
    slots = torch.zeros(sequences * queries, device=DEVICE, dtype=torch.int64)
    options, scales = scored(name, sequences, queries), {}
    if stored is not None:
        *filled, k_scale, v_scale = multiattn.quantize_cache(*filled, stored)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    rest = {"seqlens_kv": lengths, "page_table": table, "return_lse": True, "return_max": True, **scales, **options}

    def step():
        if stored is not None:
            multiattn.quantize_cache(*new, k_cache=filled[0], v_cache=filled[1], **scales, slots=slots)
        return call(q, *filled, rest, backend)

    step()  # compiles
    graph, results = captured(step)
    for seed, keys in enumerate(((600, 5, 77), (16, 599, 300), (5, 64, 65))):
        table.copy_(pages_of(sequences, longest, seed=seed + 1)[0])
        lengths.copy_(int32(*keys))
        at = lengths[:, None] - queries + torch.arange(queries, device=DEVICE)
        slots.copy_((table.gather(1, (at // PAGE).long()).long() * PAGE + at % PAGE).flatten())
        for it in (q, *new):
            it.copy_(drawn(*it.shape))
        graph.replay()
        got = [it.clone() for it in results]
        want = call(q, *filled, rest, "reference")
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.float(), other.float(), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("per", ["token", "head"])
def test_a_cache_is_quantised_as_on_a_cpu(per, dtype):
    k, v = drawn(3, HEADS_KV, 100, HEAD_DIM), drawn(3, HEADS_KV, 100, 64)
    k[0, 0, 3] = 0.0
    found = multiattn.quantize_cache(k, v, dtype, per=per)
    expected = multiattn.quantize_cache(k.cpu(), v.cpu(), dtype, per=per)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got.cpu().float(), want.float())


@pytest.mark.parametrize("splits", [1, 2, 8, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_so_many_parts_a_sequence_has_the_same_bits_in_any_batch(backend, splits):
    table, pages = pages_of(9, 900)
    k, v = caches(pages)
    lengths = (900, 1, 333, 16, 17, 512, 800, 64, 5)
    put(k, v, table, lengths)
    q, all_lengths = drawn(9, HEADS_Q, 1, HEAD_DIM), int32(*lengths)
    rest = {"seqlens_kv": all_lengths, "page_table": table}
    needs(backend, q, k, v, rest, num_splits=splits)
    whole = call(q, k, v, rest, backend, num_splits=splits)
    for chosen in ([0], [2, 0], [8, 5, 2, 1], [0, *range(3, 9)]):
        some = {"seqlens_kv": all_lengths[chosen], "page_table": table[chosen]}
        assert torch.equal(call(q[chosen], k, v, some, backend, num_splits=splits), whole[chosen])


def request(backend, seed):
    """A request of random sequences: what came of it, and the truth."""
    chosen = random.Random(seed)
    lengths = [chosen.randrange(1 + 2 ** chosen.randrange(12)) for _ in range(chosen.randrange(1, 9))]
    table, pages = pages_of(len(lengths), 2048, seed=seed)
    k, v = caches(pages)
    put(k, v, table, lengths)
    queries = [chosen.choice((0, 1, 1, 1, 5)) for _ in lengths]
    q = drawn(max(sum(queries), 1), HEADS_Q, HEAD_DIM)
    rest = {"seqlens_kv": int32(*lengths), "page_table": table, "max_seqlen_q": 5}
    rest["cu_seqlens_q"] = int32(0, *itertools.accumulate(queries))
    rows = sum(queries)
    return call(q, k, v, rest, backend)[:rows], truth(q, k, v, rest)[:rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_and_a_thousand_requests(backend):
    table, pages = pages_of(1, PAGE)
    rest = {"seqlens_kv": int32(1), "page_table": table, "cu_seqlens_q": int32(0, 1), "max_seqlen_q": 5}
    needs(backend, drawn(1, HEADS_Q, HEAD_DIM), *caches(pages), rest)

    def serve(thread):
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(125):
                got, want = request(backend, 125 * thread + number)
                torch.testing.assert_close(got.float(), want, **CLOSE)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(serve, range(8)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_200_requests_compile_nothing_after_the_first(backend, own_caches):
    """By the files that compilers leave: all of them keep what they make on disk."""
    table, pages = pages_of(4, 2048)
    k, v = caches(pages)
    put(k, v, table, (2048,) * 4)
    q = drawn(40, HEADS_Q, HEAD_DIM)
    rest = {"page_table": table, "max_seqlen_q": 5, "num_splits": 3}

    def serve(lengths, queries):
        starts = int32(0, *itertools.accumulate(queries))
        return call(q, k, v, rest | {"seqlens_kv": int32(*lengths), "cu_seqlens_q": starts}, backend)

    needs(backend, q, k, v, rest | {"seqlens_kv": int32(1, 1, 1, 1), "cu_seqlens_q": int32(0, 1, 1, 1, 1)})
    serve((1, 1, 1, 1), (1, 0, 0, 0))
    torch.cuda.synchronize()
    before, chosen = files_in(own_caches), random.Random(0)
    for _ in range(200):
        serve([chosen.randrange(2049) for _ in range(4)], [chosen.randrange(6) for _ in range(4)])
    torch.cuda.synchronize()
    assert files_in(own_caches) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_waits_for_the_device(backend):
    table, pages = pages_of(3, 300)
    k, v = caches(pages)
    put(k, v, table, (300, 7, 0))
    q, sinks = drawn(3, HEADS_Q, 4, HEAD_DIM), torch.zeros(HEADS_Q, device=DEVICE)
    rest = {"seqlens_kv": int32(300, 7, 0), "page_table": table}
    needs(backend, q, k, v, rest, sinks=sinks)
    check_no_wait(lambda: call(q, k, v, rest, backend, sinks=sinks))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls_with_out_are_eager_ones(backend):
    table, pages = pages_of(3, 300)
    k, v = caches(pages)
    put(k, v, table, (300, 7, 20))
    q = drawn(3, HEADS_Q, 1, HEAD_DIM)
    rest = {"seqlens_kv": int32(300, 7, 20), "page_table": table}
    needs(backend, q, k, v, rest)
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_kvcache, fullgraph=True)
    out = torch.empty_like(q)
    got = compiled(q, k, v, **rest, causal=True, backend=backend, out=out)
    assert torch.equal(got, call(q, k, v, rest, backend))
    assert torch.equal(out, got)
