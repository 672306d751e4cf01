"""Scores, masks and trees over caches, and caches of 8-bit numbers: equal to the dense call's, and what is refused."""

import itertools

import pytest
import torch
from cached_calls import dense, drawn, paged
from refused import assert_refused, rows
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

import multiattn

BACKENDS = ("reference", "triton", "cutile", "cuda")
EXTENT = 64
LENGTHS, QUERIES = (33, 7, 60), 4
ROOM = 64


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def relative(logits, extent=EXTENT):
    """Inkling's score_mod: ``[B, Hq, tokens, extent]`` logits of each token, by distance."""

    def score_mod(s, b, h, i, j):
        distance = i - j
        near = (distance >= 0) & (distance < extent)
        return s + torch.where(near, logits[b, h, i, distance.clamp(0, extent - 1)], 0.0)

    return score_mod


def image(prefixes):
    """Tokens of each sequence's prefix see one another; all others see what is before them."""
    return lambda b, h, i, j: (i >= j) | ((i < prefixes[b]) & (j < prefixes[b]))


PREFIXES = torch.tensor([31, 5, 58])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)[None, None]
"""Two branches of the first node, and a leaf of the first of them."""
OF_ROOM = drawn(3, 4, 1, ROOM, seed=9)
LOGITS = drawn(3, 4, ROOM, EXTENT, seed=8)
MASK = create_block_mask(image(PREFIXES), 3, None, ROOM, ROOM, device="cpu", BLOCK_SIZE=32)


def over_one(entry, length):
    """Each of the options as a dense call of one sequence takes it."""
    at = length - QUERIES
    i, j = torch.arange(at, length)[:, None], torch.arange(length)
    tree, of_rows = torch.nn.functional.pad(TREE, (at, 0), value=True), relative(LOGITS[entry : entry + 1])
    return {
        "relative": {"score_mod": lambda s, b, h, i, j: of_rows(s, b, h, i + at, j)},
        "alibi": {"alibi_slopes": SLOPES},
        "bias": {"bias": OF_ROOM[entry : entry + 1, :, :, :length]},
        "tree": {"bias": tree},
        "scored tree": {"bias": torch.where(tree, 0.5, -torch.inf).masked_fill(j < at, 0.0).bfloat16()},
        "image": {"bias": image(PREFIXES)(entry, 0, i, j)[None, None]},
    }


OPTIONS = {
    "relative": {"score_mod": relative(LOGITS)},
    "alibi": {"alibi_slopes": SLOPES},
    "bias": {"bias": OF_ROOM},
    "tree": {"bias": TREE},
    "scored tree": {"bias": torch.where(TREE, 0.5, -torch.inf).bfloat16()},
    "image": {"block_mask": MASK},
}


def call(kind, make, **more):
    """q ``[3, 4, 4, 64]`` over a cache of one of two kinds."""
    if make == "dense":
        return dense(LENGTHS, QUERIES, ROOM)
    (q, k, v), rest = paged(LENGTHS, (QUERIES,) * 3, page=16)
    rest["page_table"] = torch.nn.functional.pad(rest["page_table"], (0, ROOM // 16 - rest["page_table"].shape[1]))
    return (q, k, v), rest


def keys_of(cache, rest, entry, length):
    """A sequence's keys, or values, ``[1, Hkv, length, D]``."""
    if (table := rest.get("page_table")) is None:
        return cache[entry : entry + 1, :, :length]
    return cache[table[entry].long()].transpose(0, 1).flatten(1, 2)[None, :, :length]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", ["dense", "paged"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_scores_over_a_cache_are_those_of_a_dense_call(kind, make, backend):
    (q, k, v), rest = call(kind, make)
    causal = "causal" not in kind and kind in ("relative", "alibi", "bias")
    found = multiattn.fmha_kvcache(q, k, v, **rest, **OPTIONS[kind], causal=causal, backend=backend, return_lse=True)
    for entry, length in enumerate(LENGTHS):
        rows_of = slice(entry * QUERIES, (entry + 1) * QUERIES)
        own = q[entry : entry + 1] if make == "dense" else q[rows_of].transpose(0, 1)[None]
        its = (keys_of(it, rest, entry, length) for it in (k, v))
        out, lse = multiattn.reference(own, *its, causal=causal, **over_one(entry, length)[kind])
        got = (found[0][entry], found[1][entry])
        if make == "paged":
            got = found[0][rows_of].transpose(0, 1), found[1][:, rows_of]
        torch.testing.assert_close(got[0].float(), out[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got[1], lse[0], atol=2e-3, rtol=2e-3)


# ---------------------------------------------------------------- a model


class Inkling(torch.nn.Module):
    """Two layers with relative logits, 4 heads on 2, over a vocabulary of 50; tokens have no other positions."""

    def __init__(self, layers=2, heads=4, heads_kv=2, head_dim=16, room=ROOM):
        super().__init__()
        torch.manual_seed(5)
        self.heads, self.heads_kv, self.head_dim, width = heads, heads_kv, head_dim, heads * head_dim
        self.embedding = torch.nn.Parameter(torch.randn(50, width))
        self.qkv = torch.nn.ParameterList(
            torch.randn((heads + 2 * heads_kv) * head_dim, width) / width**0.5 for _ in range(layers)
        )
        self.out = torch.nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(layers))
        self.table = torch.nn.ParameterList(torch.randn(heads, EXTENT) for _ in range(layers))

    def score_mod(self, layer):
        """A learned table by head and distance, which the callable captures."""
        table = self.table[layer]

        def score_mod(s, b, h, i, j):
            near = (i >= j) & (i - j < EXTENT)
            return s + torch.where(near, table[h, (i - j).clamp(0, EXTENT - 1)], 0.0)

        return score_mod

    def forward(self, tokens, attend):
        """Logits of tokens ``[B, S]``; `attend` is given a layer, q, k, v ``[B, H, S, D]`` and its score_mod."""
        x = self.embedding[tokens]
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            heads = (x @ qkv.T).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            q, k, v = heads.split((self.heads, self.heads_kv, self.heads_kv), dim=1)
            x = x + attend(layer, q, k, v, self.score_mod(layer)).transpose(1, 2).flatten(2) @ out.T
        return x @ self.embedding.T


class Caches:
    """Keys and values of each layer, of so many sequences; `attend` writes new ones behind the others."""

    def __init__(self, model, batch, backend, dtype):
        shape = (len(model.qkv), 2, batch, model.heads_kv, ROOM, model.head_dim)
        self.kept, self.length, self.backend = torch.full(shape, torch.nan, dtype=dtype), 0, backend

    def attend(self, layer, q, k, v, score_mod):
        end = self.length + q.shape[2]
        for cache, new in zip(self.kept[layer], (k, v), strict=True):
            cache[:, :, self.length : end] = new
        lengths = torch.full((q.shape[0],), end, dtype=torch.int32)
        q = q.to(self.kept.dtype)
        options = {"causal": True, "score_mod": score_mod, "backend": self.backend}
        return multiattn.fmha_kvcache(q, *self.kept[layer], seqlens_kv=lengths, **options).to(k.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [1, 3])
def test_a_model_has_the_tokens_of_one_call_over_all(step, backend):
    """Greedy tokens of cached steps: each is the one that a call over all tokens before it gives."""
    model, dtype = Inkling(), torch.float32 if backend == "reference" else torch.float16

    def attend(layer, q, k, v, score_mod):
        q, k, v = (it.to(dtype) for it in (q, k, v))
        return multiattn.fmha(q, k, v, causal=True, score_mod=score_mod, backend="reference").float()

    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(3))
    while tokens.shape[1] < 20:
        tokens = torch.cat((tokens, model(tokens, attend)[:, -1:].argmax(-1)), dim=1)
    caches, found = Caches(model, 2, backend, dtype), []
    for first in (0, *range(8, 20, step)):
        part = tokens[:, first : first + (step if first else 8)]
        found.append(model(part, caches.attend).argmax(-1))
        caches.length += part.shape[1]
    assert torch.equal(torch.cat(found, dim=1)[:, 7:-1], tokens[:, 8:])


# ---------------------------------------------------------------- compiled calls


@pytest.mark.parametrize("make", ["dense", "paged"])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("graph", ["eager", "aot_eager"])
def test_a_compiled_call_is_an_eager_one(kind, make, graph):
    """For any lengths, by one graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(graph)
    compiled = torch.compile(multiattn.fmha_kvcache, backend=counter, fullgraph=True)
    tensors, rest = call(kind, make)
    for lengths in (LENGTHS, (9, 33, 5), (64, 4, 17) if make == "dense" else (4, 6, 40)):
        rest["seqlens_kv"].copy_(torch.tensor(lengths))
        got = compiled(*tensors, **rest, **OPTIONS[kind], return_lse=True)
        want = multiattn.fmha_kvcache(*tensors, **rest, **OPTIONS[kind], return_lse=True)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", OPTIONS)
def test_no_length_and_no_new_tensor_is_traced_again(kind, monkeypatch):
    """A callable made anew, of tensors with other values, has the program and the plan of the one before."""
    from multiattn.score import program

    traced = []
    trace = program.trace_program
    monkeypatch.setattr(program, "trace_program", lambda *it: traced.append(it) or trace(*it))
    plans = set()
    tensors, rest = call(kind, "dense")
    for lengths in itertools.permutations(LENGTHS):
        rest["seqlens_kv"] = torch.tensor(lengths, dtype=torch.int32)
        options = dict(OPTIONS[kind])
        if kind == "relative":
            options["score_mod"] = relative(LOGITS + len(plans))
        multiattn.fmha_kvcache(*tensors, **rest, **options, backend="cuda")
        plans.add(multiattn.explain(*tensors, **rest, **options, backend="cuda"))
    assert len(traced) <= 1
    assert len(plans) == 1


# ---------------------------------------------------------------- 8-bit numbers


def stored(dtype, granularity, make="dense"):
    """A call over 8-bit numbers, and the keys and values in fp64 that they stand for."""
    (q, k, v), rest = call("", make)
    shapes = {"number": (), "head": (2,), "batch": (3, 2), "token": k.shape[:3]}
    unit = 32 if dtype == torch.int8 else 64
    found = []
    for seed, cache in ((5, k), (6, v)):
        scale = torch.rand(shapes[granularity], generator=torch.Generator().manual_seed(seed)).add(0.5) / unit
        numbers = (cache.float() * unit).round().clamp(-127, 127).to(dtype)
        found.append((numbers, scale))
    (k, k_scale), (v, v_scale) = found
    return (q, k, v), {**rest, "k_scale": k_scale, "v_scale": v_scale}


def wide(scale, entry, rest, length):
    """The scale of a sequence's keys, fp64, that is multiplied by ``[1, Hkv, length, D]``."""
    if scale.ndim == 3:
        return keys_of(scale[..., None], rest, entry, length).double()
    return (scale[entry] if scale.ndim == 2 else scale.expand(2)).double()[None, :, None, None]


@pytest.mark.parametrize("make", ["dense", "paged"])
@pytest.mark.parametrize("granularity", ["number", "head", "batch", "token"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
def test_8_bit_numbers_stand_for_themselves_times_their_scale(dtype, granularity, make):
    (q, k, v), rest = stored(dtype, granularity, make)
    found = multiattn.fmha_kvcache(q, k, v, **rest, causal=True, score_mod=relative(LOGITS))
    for entry, length in enumerate(LENGTHS):
        own = q[entry : entry + 1] if make == "dense" else q[entry * 4 : entry * 4 + 4].transpose(0, 1)[None]
        its = [
            keys_of(cache, rest, entry, length).double() * wide(rest[name], entry, rest, length)
            for cache, name in ((k, "k_scale"), (v, "v_scale"))
        ]
        options = over_one(entry, length)["relative"]
        out, _ = multiattn.reference(own.double(), *its, causal=True, compute_dtype=torch.float64, **options)
        got = found[entry] if make == "dense" else found[entry * 4 : entry * 4 + 4].transpose(0, 1)
        torch.testing.assert_close(got.double(), out[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("given", [2.0, 1, None, torch.tensor(0.5), torch.tensor([0.5])], ids=str)
def test_a_scale_may_be_a_number_or_none(given):
    (q, k, v), rest = stored(torch.int8, "number")
    rest["v_scale"] = given
    number = 1.0 if given is None else float(given)
    want = multiattn.fmha_kvcache(q, k, v, **rest | {"v_scale": torch.full((3, 2), number)})
    torch.testing.assert_close(multiattn.fmha_kvcache(q, k, v, **rest), want, rtol=0, atol=0)


@pytest.mark.parametrize("granularity", ["head", "token"])
def test_a_compiled_call_reads_8_bit_numbers(granularity):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(multiattn.fmha_kvcache, backend=counter, fullgraph=True)
    tensors, rest = stored(torch.float8_e4m3fn, granularity)
    for lengths in (LENGTHS, (9, 64, 5)):
        rest["seqlens_kv"].copy_(torch.tensor(lengths))
        rest["k_scale"].mul_(1.5)
        want = multiattn.fmha_kvcache(*tensors, **rest, causal=True)
        torch.testing.assert_close(compiled(*tensors, **rest, causal=True), want, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("which", ["score_mod", "alibi_slopes", "bias", "k_scale", "v_scale"])
def test_a_gradient_is_refused(which):
    """No gradient is lost in silence: what scores load from has none, nor have scales."""
    (q, k, v), rest = stored(torch.int8, "head")
    learned = SLOPES.clone().requires_grad_()
    given = {
        "score_mod": {"score_mod": lambda s, b, h, i, j: s * learned[h]},
        "alibi_slopes": {"alibi_slopes": learned},
        "bias": {"bias": TREE.float().requires_grad_()},
        "k_scale": {"k_scale": torch.ones(2, requires_grad=True)},
        "v_scale": {"v_scale": torch.ones(2, requires_grad=True)},
    }
    for call_of in (multiattn.fmha_kvcache, lambda *it, **named: multiattn.explain(*it, **named)):
        with (
            torch.enable_grad(),
            pytest.raises(NotImplementedError, match="fmha_kvcache has no gradient: call it under"),
        ):
            call_of(q, k, v, **rest | given[which])
        call_of(q, k, v, **rest | given[which])


def test_a_compiled_call_takes_numbers_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(multiattn.fmha_kvcache, backend="aot_eager", fullgraph=True)
    (q, k, v), rest = stored(torch.int8, "number")
    for number in (0.25, 0.5, 2, 0.125):
        named = rest | {"k_scale": number}
        want = multiattn.fmha_kvcache(q, k, v, **named)
        torch.testing.assert_close(compiled(q, k, v, **named), want, rtol=0, atol=0)


def test_a_vmapped_call_is_a_loop_of_calls():
    """Over lengths, scales and queries at once: a callable sees the sequence of its own call."""
    (q, k, v), rest = stored(torch.int8, "head")
    lengths = torch.stack([rest.pop("seqlens_kv"), torch.tensor([3, 9, 40], dtype=torch.int32)])
    scales, queries = torch.stack([rest.pop("k_scale"), torch.tensor([0.1, 0.01])]), torch.stack([q, -q])

    def one(q, n, scale):
        mod = {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j) * (b + 1)}
        return multiattn.fmha_kvcache(q, k, v, seqlens_kv=n, k_scale=scale, causal=True, **rest, **mod)

    found = torch.func.vmap(one)(queries, lengths, scales)
    assert torch.equal(found, torch.stack([one(*it) for it in zip(queries, lengths, scales, strict=True)]))


# ---------------------------------------------------------------- refusals


def of_8_bits(tensor):
    return tensor.to(torch.int8)


SMALL = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu", BLOCK_SIZE=32)
BYTES = {"k_cache": of_8_bits, "v_cache": of_8_bits}
WRONG = {
    TypeError: [
        (BYTES | {"k_scale": torch.ones(2).double()}, "k_scale.dtype: got torch.float64; allowed torch.float32"),
        (BYTES | {"k_scale": torch.ones(2).half()}, "k_scale.dtype: got torch.float16; allowed torch.float32"),
        (BYTES | {"v_scale": [1.0, 2.0]}, "v_scale must be a number, a torch.Tensor or None; got list"),
        (BYTES | {"v_scale": True}, "v_scale must be a number, a torch.Tensor or None; got bool"),
        (
            {"k_cache": of_8_bits, "v_cache": lambda it: it.to(torch.float8_e4m3fn)},
            "or both caches be of 8 bits; got torch.bfloat16, torch.int8, torch.float8_e4m3fn",
        ),
        ({"k_cache": of_8_bits}, "must share one dtype, or both | got torch.bfloat16, torch.int8, torch.bfloat16"),
        (dict.fromkeys(("k_cache", "v_cache"), lambda it: it.to(torch.uint8)), "got torch.uint8"),
        (dict.fromkeys(("q", "k_cache", "v_cache"), of_8_bits), "torch.int8"),
        ({"bias": torch.zeros(1, 1, 4, 4).double()}, "bias: got torch.float64 | allowed dense torch.bfloat16 or"),
        ({"score_mod": 3}, "score_mod must be callable or None; got int"),
        ({"block_mask": torch.ones(1)}, "block_mask"),
    ],
    ValueError: [
        (
            {"k_scale": torch.ones(2)},
            "k_scale: got a scale for a cache of torch.bfloat16; allowed None | e4m3fn, torch.int8",
        ),
        ({"v_scale": 2.0}, "v_scale: got a scale for a cache of torch.bfloat16; allowed None for caches of the dtype"),
        (
            BYTES | {"k_scale": torch.ones(3)},
            "k_scale: got shape (3,); allowed one number, (2,), (3, 2), or (3, 2, 64)",
        ),
        (BYTES | {"v_scale": torch.ones(3, 64, 2)}, "v_scale: got shape (3, 64, 2); allowed one number, (2,), (3, 2)"),
        (BYTES | {"k_scale": float("nan")}, "k_scale must be finite; got nan"),
        (BYTES | {"v_scale": 10**400}, "v_scale must be finite; got inf"),
        (BYTES | {"v_scale": torch.ones(2, device="meta")}, "v_scale must be on the device of q, cpu; got meta"),
        ({"bias": torch.zeros(1, 1, 1, 65)}, "bias: got shape (1, 1, 1, 65); allowed | (3, 4, 4, 64)"),
        ({"bias": torch.zeros(1, 1, 5, 5)}, "bias: got shape (1, 1, 5, 5); allowed | (3, 4, 4, 5)"),
        ({"bias": torch.zeros(2, 1, 4, 4)}, "bias: got shape (2, 1, 4, 4); allowed"),
        ({"bias": torch.zeros(4, 4)}, "bias: got shape (4, 4); allowed [B|1, Hq|1, Sq|1, Skv|1]"),
        ({"alibi_slopes": torch.zeros(2)}, "alibi_slopes: got shape (2,); allowed (4,) and (3, 4)"),
        ({"block_mask": SMALL}, "block_mask: got lists [1, 1, 1, 1] of blocks 32 x 32; | Skv=64; over a cache both"),
    ],
}


@pytest.mark.parametrize(("kind", "changes", "told"), rows(WRONG))
def test_what_is_wrong_is_named(kind, changes, told):
    (q, k, v), rest = call("", "dense")
    right = {"q": q, "k_cache": k, "v_cache": v, **rest}
    given = right | {name: it(right[name]) if callable(it) and name in right else it for name, it in changes.items()}
    assert_refused(kind, lambda: multiattn.fmha_kvcache(**given), told)
    given["k"], given["v"] = given.pop("k_cache"), given.pop("v_cache")
    assert_refused(kind, lambda: multiattn.explain(**given), told)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_without_kernels_for_8_bits_says_so(backend):
    """Or runs them: nothing falls back."""
    (q, k, v), rest = stored(torch.int8, "token")
    plan = multiattn.explain(q, k, v, **rest, backend=backend)
    if not isinstance(plan, multiattn.Plan):
        assert "stored" in {it.code for it in plan}
        with pytest.raises(multiattn.Unsupported, match="a cache of int8"):
            multiattn.fmha_kvcache(q, k, v, **rest, backend=backend)
        return
    got = multiattn.fmha_kvcache(q, k, v, **rest, backend=backend)
    torch.testing.assert_close(got, multiattn.fmha_kvcache(q, k, v, **rest), atol=2e-2, rtol=2e-2)
