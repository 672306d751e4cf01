"""Every call under every transform of `torch.func`, in a process that has made none before and in one that has."""

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from conftest import forget_calls
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import multiattn
from multiattn.integrations.padding import fmha_padded
from multiattn.score import program

DTYPE = torch.float64
ENTRIES, HEADS, HEADS_KV, SEQ_Q, SEQ_KV, HEAD_DIM, HEAD_DIM_V = 2, 4, 2, 4, 5, 4, 6
SHAPES = (HEADS, SEQ_Q, HEAD_DIM), (HEADS_KV, SEQ_KV, HEAD_DIM), (HEADS_KV, SEQ_KV, HEAD_DIM_V)
ROWS = torch.tensor([0, 1, 4], dtype=torch.int32)
"""Two sequences in so many rows, and one row behind them."""
TOKENS = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 1]], dtype=torch.bool)
BLOCKS = create_block_mask(lambda b, h, i, j: j <= i + h, None, HEADS, SEQ_Q, SEQ_KV, device="cpu", BLOCK_SIZE=2)


def random(*shape, dtype=DTYPE):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def rescaled(table, temperature):
    """A score_mod that captures a tensor with indices and one without."""
    return lambda s, b, h, i, j: s * temperature + table[h, j] * torch.where(i > j, 0.5, 1.0)


FEATURES = {
    "plain": ((), lambda: {"causal": True}),
    "softcap": ((), lambda: {"softcap": 2.0}),
    "alibi": ((random(HEADS, dtype=torch.float32),), lambda slopes: {"alibi_slopes": slopes}),
    "bias": ((random(1, HEADS, 1, SEQ_KV),), lambda bias: {"bias": bias}),
    "score_mod": ((random(HEADS, SEQ_KV), torch.tensor(0.7, dtype=DTYPE)), lambda *of: {"score_mod": rescaled(*of)}),
    "block_mask": ((), lambda: {"block_mask": BLOCKS}),
    "sinks": ((random(HEADS),), lambda sinks: {"sinks": sinks, "window": (2, 1)}),
}
"""For each feature the tensors that have a gradient, and the options of a call with them."""


class Case(NamedTuple):
    """A call as a function of all tensors that have a gradient."""

    call: Any
    tensors: tuple[torch.Tensor, ...]

    def loss(self, *tensors):
        return self.call(*tensors).sin().sum()


class Layer(multiattn.nn.Attention):
    """A layer as a function of an input and the parameters."""

    def call(self, x, *parameters):
        named = dict(zip(dict(self.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(self, named, x)


LENGTHS = {"cu_seqlens_q": ROWS, "cu_seqlens_kv": ROWS, "max_seqlen_q": 3, "max_seqlen_kv": SEQ_KV}
RUNS = {
    "fmha": multiattn.fmha,
    "fmha_varlen": functools.partial(multiattn.fmha_varlen, **LENGTHS),
    "flex_attention": lambda *of, causal=None, **how: multiattn.flex_attention(*of, enable_gqa=True, **how),
    "reference": lambda *of, **how: multiattn.reference(*of, compute_dtype=DTYPE, **how)[0],
    "fmha_padded": functools.partial(fmha_padded, kv_mask=TOKENS),
}


def case_of(entry, features):
    """The call of an entry with these features; None for those that it does not take."""
    q, k, v = (random(ENTRIES, *it) for it in SHAPES)
    if entry == "layer":
        torch.manual_seed(0)
        softcap = 2.0 if "softcap" in features else None
        layer = Layer(8, HEADS, HEADS_KV, causal=True, softcap=softcap, sinks="sinks" in features, dtype=DTYPE)
        return Case(layer.call, (random(ENTRIES, SEQ_Q, 8), *(it.detach() for it in layer.parameters())))
    if entry == "fmha_varlen":
        q, k, v = (it.transpose(1, 2).flatten(0, 1) for it in (q, k, v))
    run = RUNS[entry]
    of_features = [FEATURES[it] for it in features]

    def call(q, k, v, *rest):
        rest, options = iter(rest), {}
        for tensors, options_of in of_features:
            options |= options_of(*itertools.islice(rest, len(tensors)))
        return run(q, k, v, **options)

    return Case(call, (q, k, v, *(it for tensors, _ in of_features for it in tensors)))


def forget():
    forget_calls()
    program._known.clear()


def gradients(case, *tensors):
    leaves = [it.detach().clone().requires_grad_() for it in tensors]
    return torch.autograd.grad(case.loss(*leaves), leaves)


def stacked(results):
    return tuple(torch.stack(of) for of in zip(*results, strict=True))


EVERY = tuple(FEATURES)
TAKEN = {
    "fmha": [*[(it,) for it in EVERY], EVERY],
    "fmha_varlen": [*[(it,) for it in EVERY if it != "block_mask"], tuple(it for it in EVERY if it != "block_mask")],
    "flex_attention": [("plain",), ("score_mod",), ("block_mask",), ("score_mod", "block_mask")],
    "fmha_padded": [("plain",), ("softcap",), ("alibi",), ("sinks",), ("plain", "softcap", "alibi", "sinks")],
    "reference": [EVERY],
    "layer": [("plain",), ("softcap",), ("sinks",), ("softcap", "sinks")],
}


def cases():
    """Each feature of `fmha` by itself; in a quick run the other entries have most of theirs at once."""
    for entry, all_of in TAKEN.items():
        for features in all_of:
            is_quick = entry == "fmha" or features is all_of[-1]
            marks = () if is_quick else (pytest.mark.nightly,)
            yield pytest.param(entry, features, marks=marks, id=f"{entry}-{'-'.join(features)}")


@pytest.mark.parametrize(("entry", "features"), cases())
def test_all_transforms(entry, features):
    case = case_of(entry, features)
    every = tuple(range(len(case.tensors)))
    other = tuple(it * 1.5 for it in case.tensors)
    pairs = stacked([case.tensors, other])

    def check(transformed, expected):
        forget()
        torch.testing.assert_close(transformed(), expected)  # where nothing was called before
        case.loss(*case.tensors)
        torch.testing.assert_close(transformed(), expected)

    expected, expected_other = (gradients(case, *it) for it in (case.tensors, other))
    out = case.call(*case.tensors)
    check(lambda: torch.func.grad(case.loss, every)(*case.tensors), expected)
    check(lambda: torch.func.vjp(case.loss, *case.tensors)[1](torch.ones((), dtype=DTYPE)), expected)
    check(lambda: torch.vmap(case.call)(*pairs), torch.stack([out, case.call(*other)]))
    check(lambda: torch.vmap(torch.func.grad(case.loss, every))(*pairs), stacked([expected, expected_other]))
    mapped = torch.func.grad(lambda *of: torch.vmap(case.loss)(*of).sum(), every)
    check(lambda: mapped(*pairs), stacked([expected, expected_other]))
    twice = torch.vmap(torch.vmap(torch.func.grad(case.loss, every)))
    check(lambda: [it[0] for it in twice(*(it[None] for it in pairs))], list(stacked([expected, expected_other])))
    jacobian = torch.func.jacrev(lambda *of: case.call(*of).sin().flatten(1).sum(1), every)
    check(lambda: tuple(it.sum(0) for it in jacobian(*case.tensors)), expected)

    for reentrant in (False, True):

        def recomputed(reentrant=reentrant):
            leaves = [it.clone().requires_grad_() for it in case.tensors]
            checkpoint(case.loss, *leaves, use_reentrant=reentrant).backward()
            return tuple(it.grad for it in leaves)

        check(recomputed, expected)

    if entry == "reference":
        return  # it has these
    for forward in (
        lambda: torch.func.jvp(case.loss, case.tensors, case.tensors),
        lambda: torch.func.jacfwd(case.loss)(*case.tensors),
        lambda: torch.func.hessian(case.loss)(*case.tensors),
    ):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=r"forward-mode derivative.*multiattn\.reference"):
                forward()
            case.loss(*case.tensors)
        forget()


@pytest.mark.parametrize(("entry", "features"), [("fmha", EVERY), ("fmha_varlen", EVERY[:5] + EVERY[6:])])
def test_entries_of_no_mapped_dimension_and_of_any(entry, features):
    case = case_of(entry, features)
    found = torch.vmap(torch.func.grad(case.loss, 5))(*(it[None][:0] for it in case.tensors))
    assert found.shape == (0, *case.tensors[5].shape)
    last = [torch.stack([it, it * 1.5], -1) for it in case.tensors]
    expected = torch.stack([case.call(*case.tensors), case.call(*(it * 1.5 for it in case.tensors))])
    torch.testing.assert_close(torch.vmap(case.call, -1)(*last), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_backwards_are_mapped(packed):
    q, k, v = (random(ENTRIES, *it) for it in SHAPES)
    forward, backward, lengths = multiattn.fmha, multiattn.fmha_backward, {}
    if packed:
        q, k, v = (it.transpose(1, 2).flatten(0, 1) for it in (q, k, v))
        lengths, forward, backward = LENGTHS, multiattn.fmha_varlen, multiattn.fmha_varlen_backward
    tensors = (q, k, v, random(HEADS, SEQ_KV).requires_grad_(), torch.tensor(0.7, requires_grad=True))
    tensors = (*tensors, random(1, HEADS, 1, SEQ_KV).requires_grad_(), random(HEADS))

    def run(q, k, v, table, temperature, bias, sinks):
        options = {**lengths, "score_mod": rescaled(table, temperature), "bias": bias, "sinks": sinks, "softcap": 3.0}
        out, lse = forward(q, k, v, return_lse=True, **options)
        return backward(q, k, v, out.detach(), lse.detach(), out.detach().cos(), dlse=lse.detach().sin(), **options)

    other = tuple((it * 1.5).detach().requires_grad_(it.requires_grad) for it in tensors)
    expected = stacked([run(*tensors), run(*other)])
    assert len(expected) == 7  # that of each
    for called in (False, True):
        if not called:
            forget()
        torch.testing.assert_close(torch.vmap(run)(*stacked([tensors, other])), expected)


def test_a_cache_is_mapped_and_has_no_derivative():
    q, k, v = random(2, HEADS, 1, HEAD_DIM), random(3, HEADS_KV, 2, HEAD_DIM), random(3, HEADS_KV, 2, HEAD_DIM_V)
    lengths, table = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([[2, 1], [0, 2]], dtype=torch.int32)

    def call(q, k, v, lengths, table):
        return multiattn.fmha_kvcache(q, k, v, seqlens_kv=lengths, page_table=table, softcap=2.0)

    for in_dims in ((0, 0, 0, 0, 0), (0, None, None, None, None), (None, None, None, 0, 0), (-1, 1, 2, -1, 1)):
        pairs = list(zip((q, k, v, lengths, table), in_dims, strict=True))
        mapped = [it if dim is None else torch.stack([it, it - (it > 1).to(it.dtype)], dim) for it, dim in pairs]
        dims = list(zip(mapped, in_dims, strict=True))
        each = ([it if dim is None else it.select(dim, at) for it, dim in dims] for at in range(2))
        expected = torch.stack([call(*(it.contiguous() for it in of)) for of in each])
        forget()
        torch.testing.assert_close(torch.vmap(call, in_dims)(*mapped), expected)

    def loss(q):
        return call(q, k, v, lengths, table).sum()

    for derivative in (
        lambda: torch.func.grad(loss)(q),
        lambda: torch.func.grad(lambda q: torch.vmap(loss)(q).sum())(q[None]),
        lambda: torch.vmap(torch.func.grad(loss))(q[None]),
        lambda: torch.func.jacrev(loss)(q),
        lambda: torch.func.jvp(loss, (q,), (q,)),  # these two had tangents of zeros
        lambda: torch.func.jacfwd(loss)(q),
        lambda: torch.func.hessian(loss)(q),
    ):
        with pytest.raises(NotImplementedError, match="fmha_kvcache has no gradient"):
            derivative()
    scale = torch.func.grad(lambda scale: scale * loss(q))(torch.ones((), dtype=DTYPE))
    torch.testing.assert_close(scale, loss(q))  # a cache may be part of what is differentiated


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(0, 3), (0, 0), (1, 3), (3, 3), (3, 0), (1, 0)])
def test_a_padded_batch_of_nothing(batch, seq_q, seq_kv, causal):
    if causal and seq_q > max(seq_kv, 1):  # queries are the last positions
        q, k = random(batch, HEADS, seq_q, HEAD_DIM), random(batch, HEADS, seq_kv, HEAD_DIM)
        with pytest.raises(ValueError, match="q: got Sq=3 for Skv=0; allowed Sq <= Skv"):
            fmha_padded(q, k, k, kv_mask=torch.ones(batch, seq_kv, dtype=torch.bool), causal=True)
        return
    tensors = [random(batch, HEADS, it, HEAD_DIM).requires_grad_() for it in (seq_q, seq_kv, seq_kv)]
    mask = torch.ones(batch, seq_kv, dtype=torch.bool)
    out = fmha_padded(*tensors, kv_mask=mask, causal=causal)
    torch.testing.assert_close(out, multiattn.fmha(*tensors, causal=causal))
    mapped = torch.func.grad(lambda *of: fmha_padded(*of, kv_mask=mask, causal=causal).sum(), (0, 1, 2))(*tensors)
    for found in (torch.autograd.grad(out.sum(), tensors), mapped):
        assert [it.shape for it in found] == [it.shape for it in tensors]


def test_a_padded_batch_maps_its_mask():
    q, k, v = case_of("fmha_padded", ("plain",)).tensors
    masks = torch.stack([TOKENS, TOKENS.flip(0)])
    found = torch.vmap(lambda mask: fmha_padded(q, k, v, kv_mask=mask, causal=True))(masks)
    torch.testing.assert_close(found, torch.stack([fmha_padded(q, k, v, kv_mask=it, causal=True) for it in masks]))


def test_batched_gradients_of_captured_tensors_are_refused_by_name():
    q, bias = random(1, 1, 2, 4).requires_grad_(), random(1, 1, 1, 2)
    out = multiattn.fmha(q, q, q, bias=bias)
    with pytest.raises(NotImplementedError, match=r"is_grads_batched.*torch\.func\.vjp"):
        torch.autograd.grad(out, q, out.detach().expand(2, *out.shape), is_grads_batched=True)
