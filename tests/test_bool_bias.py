"""A bool `bias` is a mask: every backend and tracer against PyTorch's SDPA, and blocks that it hides are left out."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import multiattn
from multiattn import fmha, fmha_backward, fmha_varlen, fmha_varlen_backward
from multiattn.plan.backend import BACKENDS

block_mask = importlib.import_module("multiattn.block_mask")  # a function of the package has its name
BATCH, HEADS, DIM = 2, 4, 32
SHORT, LONG = (24, 40), (150, 260)
FORMS = {
    "keys": (LONG, (BATCH, 1, 1, LONG[1])),
    "queries": (SHORT, (1, HEADS, SHORT[0], 1)),
    "short": (SHORT, (BATCH, HEADS, *SHORT)),
    "one": (SHORT, (1, 1, 1, 1)),
    "few queries": ((7, LONG[1]), (BATCH, 1, 7, LONG[1])),
    "long": (LONG, (1, 1, *LONG)),
    "long, of heads": (LONG, (BATCH, HEADS, *LONG)),
}
OF_BLOCKS = ("long", "long, of heads")


@pytest.fixture(autouse=True)
def short_ones_count_as_long(monkeypatch):
    monkeypatch.setattr(block_mask, "LONG", block_mask.BLOCK)


def qkv(seq_q, seq_kv, heads_kv=2, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (BATCH, HEADS, seq_q, DIM), *((BATCH, heads_kv, seq_kv, DIM),) * 2
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def visible(name):
    """A mask with a hidden block, a whole one, and rows that see nothing."""
    _, shape = FORMS[name]
    torch.manual_seed(1)
    found = torch.rand(shape) > 0.4
    if name in OF_BLOCKS:
        found[..., :128, 128:256], found[..., :128, :128], found[..., 140:, :] = False, True, False
    return found if name != "one" else torch.ones(shape, dtype=torch.bool)


def by_sdpa(q, k, v, mask):
    """Out, zero in rows that see nothing, which SDPA leaves undefined; and the gradients of its sum of squares."""
    k, v = (it.repeat_interleave(HEADS // it.shape[1], 1) for it in (k, v))
    sees = mask.expand(BATCH, HEADS, q.shape[2], k.shape[2]).any(-1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~sees).where(sees, 0.0)


def with_gradients(run, q, k, v, mask):
    out = run(q, k, v, mask)
    return (out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v)))


def by_fmha(q, k, v, mask):
    return fmha(q, k, v, bias=mask)


@pytest.mark.parametrize("name", FORMS)
def test_it_is_sdpa_s_mask(name):
    lengths, _ = FORMS[name]
    inputs, mask = qkv(*lengths), visible(name)
    expected = with_gradients(by_sdpa, *inputs, mask)
    torch.testing.assert_close(with_gradients(by_fmha, *inputs, mask), expected)
    out, lse = fmha(*inputs, bias=mask, return_lse=True)
    torch.testing.assert_close(multiattn.reference(*inputs, bias=mask), (out, lse))
    assert torch.equal(lse == -torch.inf, ~mask.expand(BATCH, HEADS, *lengths).any(-1))
    own = [it.detach() for it in (*inputs, out, lse, 2 * out)]
    torch.testing.assert_close(fmha_backward(*own, bias=mask), expected[1:])
    torch.testing.assert_close(multiattn.reference_backward(*own, bias=mask), expected[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["keys", "queries", "short", "long"])
def test_every_backend_takes_it(name, backend):
    lengths, _ = FORMS[name]
    inputs, mask = qkv(*lengths, dtype=torch.bfloat16), visible(name)
    expected = with_gradients(by_fmha, *inputs, mask)
    found = with_gradients(lambda q, k, v, mask: fmha(q, k, v, bias=mask, backend=backend), *inputs, mask)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", FORMS)
def test_its_form_follows_from_its_shape(name):
    inputs, mask = [it.detach() for it in qkv(*FORMS[name][0], dtype=torch.bfloat16)], visible(name)
    problem = multiattn.explain(*inputs, bias=mask).problem
    assert (problem.blocks is not None, problem.has_score) == (name in OF_BLOCKS, name not in OF_BLOCKS)
    beside = create_block_mask(lambda b, h, i, j: i >= 0, None, None, *FORMS[name][0], device="cpu")
    assert multiattn.explain(*inputs, bias=mask, block_mask=beside).problem.has_score
    torch.testing.assert_close(fmha(*inputs, bias=mask, block_mask=beside), fmha(*inputs, bias=mask))


@pytest.mark.parametrize(("lengths", "has_lists"), [((2048, 9000), False), ((2049, 2049), True), ((9000, 1), False)])
def test_lists_are_made_where_they_pay(lengths, has_lists, monkeypatch):
    monkeypatch.undo()
    assert block_mask.may_hide_blocks(torch.empty(1, 1, *lengths, dtype=torch.bool, device="meta")) == has_lists


LAYOUTS = {
    "of rows": lambda: random_mask(BATCH, 1, 256, 384),
    "as many rows as columns": lambda: random_mask(1, HEADS, 384, 384),
    "cut at its ends": lambda: random_mask(1, 1, 300, 380),
    "of a longer cache": lambda: random_mask(1, 1, 256, 390)[..., :384],
    "from an odd key": lambda: random_mask(1, 1, 256, 640)[..., 131:515],
    "from an even key": lambda: random_mask(1, 1, 256, 640)[..., 8:392],
    "every eighth key": lambda: random_mask(1, 1, 256, 3072)[..., ::8],
    "transposed": lambda: random_mask(1, 1, 384, 256).mT,
    "one for all": lambda: random_mask(1, 1, 256, 256).expand(BATCH, HEADS, -1, -1),
}


def random_mask(batch, heads, seq_q, seq_kv):
    torch.manual_seed(0)
    mask = torch.rand(batch, heads, seq_q, seq_kv) > 0.4
    mask[:1, :, :128, 128:256], mask[-1:, :, 128:, :256] = False, True
    return mask


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_lists_are_those_of_the_same_block_mask(name):
    mask = LAYOUTS[name]()
    expected = create_block_mask(lambda b, h, i, j: mask[b, h, i, j], *mask.shape, device="cpu")
    found = block_mask.blocks_of(mask)
    assert torch.equal(found.to_dense(), expected.to_dense())
    for name in block_mask.LISTS:
        its, others = getattr(found, name), getattr(expected, name)
        assert its.is_contiguous()
        assert torch.equal(its, others), name


@pytest.mark.parametrize("name", ["short", "long"])
def test_what_is_hidden_stays_hidden(name):
    """From a score_mod that makes a number of -inf, from what hidden keys are, and from causal."""
    lengths, _ = FORMS[name]
    q, k, v = (it.detach() for it in qkv(*lengths))
    mask = visible(name)
    mask[..., 5:9] = False
    hidden = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    changed = {"score_mod": lambda s, b, h, i, j: torch.maximum(s, torch.zeros(())), "causal": True}
    expected = fmha(q, k, v, score_mod=lambda s, b, h, i, j: s.relu() + at(hidden, b, h, i, j), causal=True)
    torch.testing.assert_close(fmha(q, k, v, bias=mask, **changed), expected)
    k[:, :, 5:9] = torch.nan
    torch.testing.assert_close(fmha(q, k, v, bias=mask, **changed), expected)


def at(hidden, b, h, i, j):
    return hidden[b if hidden.shape[0] > 1 else 0, h if hidden.shape[1] > 1 else 0, i, j]


def test_packed_sequences_have_one_each():
    starts, lengths = torch.tensor([0, 20, 53], dtype=torch.int32), (20, 33)
    q, k, v = (torch.randn(53, heads, DIM, requires_grad=True) for heads in (HEADS, 2, 2))
    mask = torch.rand(2, 1, 33, 33) > 0.4
    packing = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), starts) | {"max_seqlen_q": 33, "max_seqlen_kv": 33}
    out, lse = fmha_varlen(q, k, v, **packing, bias=mask, return_lse=True)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    parts = []
    for entry, length in enumerate(lengths):
        rows = slice(*starts[entry : entry + 2].tolist())
        own = (it[rows].transpose(0, 1)[None] for it in (q, k, v))
        parts.append(fmha(*own, bias=mask[entry : entry + 1, :, :length, :length])[0].transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (q, k, v)))
    given = [it.detach() for it in (q, k, v, out, lse, 2 * out)]
    torch.testing.assert_close(fmha_varlen_backward(*given, **packing, bias=mask), found)


# ---------------------------------------------------------------- what traces calls


@pytest.mark.parametrize("name", ["keys", "short", "long, of heads"])
def test_transforms_and_fakes_see_it(name):
    inputs, mask = qkv(*FORMS[name][0]), visible(name)
    out, *gradients = with_gradients(by_fmha, *inputs, mask)
    plain = [it.detach() for it in inputs]
    found, back = torch.func.vjp(lambda *given: fmha(*given, bias=mask), *plain)
    torch.testing.assert_close((found, *back(2 * found)), (out, *gradients))
    many = [torch.stack([it, it]) for it in plain]
    expected = torch.stack([out, fmha(*plain, bias=~mask)])
    torch.testing.assert_close(torch.func.vmap(by_fmha)(*many, torch.stack([mask, ~mask])), expected)
    with FakeTensorMode() as mode:
        assert fmha(*(mode.from_tensor(it) for it in plain), bias=mode.from_tensor(mask)).shape == out.shape
    assert fmha(*(it.to("meta") for it in plain), bias=mask.to("meta")).shape == out.shape
    assert fmha(*(it[:0] for it in plain), bias=mask[:0]).shape == (0, *out.shape[1:])


def test_a_graph_of_lengths_that_a_run_knows_makes_lists():
    graphs = []
    run = torch.compile(by_fmha, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True, dynamic=True)
    inputs, mask = qkv(*LONG), visible("long")
    torch.testing.assert_close(run(*inputs, mask), by_fmha(*inputs, mask))
    assert ["argsort" in graph.code for graph in graphs] == [True]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["keys", "long"])
def test_one_export_serves_every_length(name, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return fmha(q, k, v, bias=mask)

    (seq_q, seq_kv), mask = FORMS[name][0], visible(name)
    inputs = [it.detach() for it in qkv(seq_q, seq_kv)]
    rows, keys = torch.export.Dim("rows", max=1024), torch.export.Dim("keys", max=1024)
    of_mask = {3: keys} if name == "keys" else {2: rows, 3: keys}
    dynamic = {"q": {2: rows}, "k": {2: keys}, "v": {2: keys}, "mask": of_mask}
    run = torch.export.export(Model(), (*inputs, mask), dynamic_shapes=dynamic, strict=strict).module()
    for count in (300, 20):
        given = [torch.randn(*it.shape[:2], count, DIM) for it in inputs]
        its = torch.rand(*mask.shape[:2], count if name == "long" else 1, count) > 0.4
        torch.testing.assert_close(run(*given, its), fmha(*given, bias=its))


OPTIONS = {
    "bias": lambda batch, seq: torch.rand(batch, 1, 1, seq),
    "bool bias": lambda batch, seq: torch.rand(batch, 1, 1, seq) > 0.4,
    "alibi_slopes": lambda batch, seq: torch.rand(batch, HEADS),
    "block_mask": lambda batch, seq: create_block_mask(
        lambda b, h, i, j: i >= j, batch, HEADS, seq, seq, device="cpu", BLOCK_SIZE=16
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_known_size_is_its_symbol(name):
    """Dynamo has symbols for what has changed, and numbers for what comes for the first time."""

    def run(q, given):
        return fmha(q, q, q, **({} if given is None else {name.removeprefix("bool "): given}))

    run_compiled = torch.compile(run, backend="eager", fullgraph=True)
    for batch, seq in ((2, 16), (3, 32), (4, 48)):
        q = torch.randn(batch, HEADS, seq, 16)
        given = OPTIONS[name](batch, seq) if batch == 4 else None
        torch.testing.assert_close(run_compiled(q, given), run(q, given))


# ---------------------------------------------------------------- layers


def test_a_layer_takes_it():
    torch.manual_seed(0)
    layer, x = multiattn.nn.Attention(64, 4, dtype=torch.bfloat16), torch.randn(2, 10, 64, dtype=torch.bfloat16)
    tokens = torch.arange(10) < torch.tensor([[10], [6]])
    out = layer(x, bias=tokens[:, None, None])
    torch.testing.assert_close(out[:1], layer(x[:1]))
    torch.testing.assert_close(out[1:], layer(x[1:], x[1:, :6]))
