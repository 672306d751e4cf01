"""`score_mod` and `block_mask` under `torch.compile` and `torch.export`: values and gradients of eager calls."""

import functools
import json

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from multiattn import flex_attention, fmha
from multiattn.score import bind_score
from multiattn.score.serial import dumps
from parity.callables import CALLABLES, Sizes

CPU = torch.device("cpu")
HEADS, SEQ_Q, SEQ_KV = 4, 20, 24


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def qkv(seq_q=SEQ_Q, seq_kv=SEQ_KV):
    shapes = (2, HEADS, seq_q, 8), (2, 2, seq_kv, 8), (2, 2, seq_kv, 8)
    return [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


class Counted:
    """A backend that counts graphs, and keeps the programs of their calls."""

    def __init__(self, backend):
        self.graphs, self.programs, self.backend = 0, [], torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, examples):
        self.graphs += 1
        calls = [it for it in graph.graph.nodes if it.target is torch.ops.multiattn.fmha_forward.default]
        self.programs += [it.args[9] for it in calls]
        return self.backend(graph, examples)


def compiled(function, dynamic=False, backend="aot_eager"):
    torch._dynamo.reset()
    counted = Counted(backend)
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counted), counted


def with_gradients(function, inputs, wanted):
    out = function(*inputs)
    return out, torch.autograd.grad(out.square().sum(), wanted)


def blocks(mask_mod, seq_q=SEQ_Q, seq_kv=SEQ_KV):
    return create_block_mask(mask_mod, None, None, seq_q, seq_kv, device="cpu", BLOCK_SIZE=16)


SIZES = Sizes(batch=2, heads=HEADS, seq_q=SEQ_Q, seq_kv=SEQ_KV, device=CPU)


def first_of_their_kind():
    """Callables each of which has an operation or a dtype that none before it has, no program, or a write."""
    seen = set()
    for case in CALLABLES:
        bound = bind_score(device=CPU, **case.make(SIZES))
        kinds = set() if bound is None else {tuple(it[:2]) for it in json.loads(dumps(bound.program))["nodes"]}
        if bound is None or not kinds <= seen or case.name == "in_place":
            yield case
        seen |= kinds


@pytest.mark.parametrize("which", ["kinds", pytest.param("all", marks=pytest.mark.nightly)])
def test_every_callable_gives_the_program_of_an_eager_call(which):
    made = [case.make(SIZES) for case in (CALLABLES if which == "all" else first_of_their_kind())]
    options = [{"score_mod": it.get("score_mod")} for it in made]
    for option, it in zip(options, made, strict=True):
        if "mask_mod" in it:
            option["block_mask"] = blocks(it["mask_mod"])

    def run(q, k, v):
        return [fmha(q, k, v, **it) for it in options]

    run_compiled, counted = compiled(run, backend="eager")
    inputs = [it.detach() for it in qkv()]
    with torch.no_grad():
        torch.testing.assert_close(run_compiled(*inputs), run(*inputs))
    bound = [bind_score(device=CPU, **it) for it in made]
    assert counted.programs == [None if it is None else dumps(it.program) for it in bound]


TABLE = random(HEADS, seed=7).requires_grad_()


class Model(torch.nn.Module):
    """Captures a parameter through `self`, a buffer, a global, a tensor of the graph, and lengths."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(random(HEADS, 64, seed=3))
        self.register_buffer("documents", torch.arange(64) // 9)
        self.bound = 5.0

    def softcap(self, score, cap):
        return self.bound * torch.tanh(score / self.bound) * cap

    def forward(self, q, k, v):
        cap = 2 + q.mean().square()
        middle, share = k.shape[2] // 2, q.shape[2] / 8  # exact in fp32

        def score_mod(s, b, h, i, j):
            s = self.softcap(s, cap) + self.bias[h][(i - j).abs()] + share * TABLE[h] + TABLE[-1]
            return torch.where(j > middle, 1 - s, s)

        def mask_mod(b, h, i, j):
            return (self.documents[i] == self.documents[j]) | (j < middle)

        block_mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_module_with_everything_is_one_graph(dynamic):
    model = Model()
    run, counted = compiled(model, dynamic)
    graphs = []
    for lengths in (SEQ_Q, SEQ_KV), (23, 29):
        inputs = qkv(*lengths)
        wanted = (*inputs, model.bias, TABLE)
        torch.testing.assert_close(with_gradients(run, inputs, wanted), with_gradients(model, inputs, wanted))
        graphs.append(counted.graphs)
    assert (graphs[0] == graphs[1]) is dynamic


def add_table(s, b, h, i, j, table=None):
    return s + table[h, (i - j).abs()]


def shifted(table):
    return lambda s, b, h, i, j: s + table[h, (i - j).abs()]


def scaled(table, by=2.0):
    return lambda s, b, h, i, j: s * by + table[h, 0]


class Callable:
    def __init__(self, table):
        self.table = table

    def method(self, s, b, h, i, j):
        return s + self.table[h, (i - j).abs()]

    __call__ = method


KINDS = {
    "closure": shifted,
    "partial": lambda table: functools.partial(add_table, table=table),
    "method": lambda table: Callable(table).method,
    "object": Callable,
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_tensors_need_no_other_graph_and_another_callable_does(kind):
    def run(q, k, v, score_mod):
        return fmha(q, k, v, score_mod=score_mod)

    run_compiled, counted = compiled(run)
    inputs = qkv()
    for seed in (1, 2):
        table = random(HEADS, 32, seed=seed).requires_grad_()
        given, leaves = (*inputs, KINDS[kind](table)), (*inputs, table)
        torch.testing.assert_close(with_gradients(run_compiled, given, leaves), with_gradients(run, given, leaves))
    assert counted.graphs == 1
    for by in (2.0, 3.0):
        torch.testing.assert_close(run_compiled(*inputs, scaled(table, by)), run(*inputs, scaled(table, by)))
    assert counted.graphs == 3
    assert len(set(counted.programs)) == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_other_block_masks_need_no_other_graph(dynamic):
    def run(q, k, v, block_mask):
        return fmha(q, k, v, block_mask=block_mask, softcap=3.0)

    run_compiled, counted = compiled(run, dynamic)
    inputs = qkv()
    for seed in (1, 2):
        documents = random(32, seed=seed) > 0
        block_mask = blocks(lambda b, h, i, j, documents=documents: documents[i] == documents[j])
        expected = with_gradients(run, (*inputs, block_mask), inputs)
        torch.testing.assert_close(with_gradients(run_compiled, (*inputs, block_mask), inputs), expected)
    assert counted.graphs == 1
    other = blocks(lambda b, h, i, j: i >= j)
    torch.testing.assert_close(run_compiled(*inputs, other), run(*inputs, other))
    assert counted.graphs == 2


def test_a_number_that_changes_becomes_a_tensor():
    """Each value of a captured number is a program of its own, but what a graph calculates of lengths is none."""

    def run(q, k, v):
        return fmha(q, k, v, score_mod=lambda s, b, h, i, j: s + j / k.shape[2])

    run_compiled, counted = compiled(run, dynamic=True)
    for length in (5, 9, 13):
        torch.testing.assert_close(run_compiled(*qkv(7, length)), run(*qkv(7, length)))
    assert counted.graphs == 1


class Exported(Model):
    """Every option, and a block mask from outside: PyTorch cannot save its own create_block_mask."""

    def __init__(self):
        super().__init__()
        self.block_mask = blocks(lambda b, h, i, j: self.documents[i] >= self.documents[j], 32, 32)
        self.sinks, self.added = random(HEADS, seed=5), random(1, HEADS, 1, 1, seed=6)

    def forward(self, q, k, v):
        scale = 1 + q.mean().square()

        def score_mod(s, b, h, i, j):
            return s * scale + self.bias[h][(i - j).abs()] + j / k.shape[2] + self.bias[-1, 0]

        scores = {"score_mod": score_mod, "block_mask": self.block_mask, "bias": self.added, "softcap": 3.0}
        return fmha(q, k, v, window=(9, None), sinks=self.sinks, return_lse=True, **scores)


@pytest.mark.parametrize("strict", [False, True])
def test_export_round_trip(strict, tmp_path):
    torch._dynamo.reset()
    model = Exported().requires_grad_(False)
    lengths = torch.export.Dim("seq_q", min=17, max=32), torch.export.Dim("seq_kv", min=17, max=32)
    shapes = ({2: lengths[0]}, {2: lengths[1]}, {2: lengths[1]})
    inputs = [it.detach() for it in qkv()]
    program = torch.export.export(model, tuple(inputs), dynamic_shapes=shapes, strict=strict)
    assert "multiattn.fmha_forward" in str(program.graph)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for seq_q, seq_kv in ((SEQ_Q, SEQ_KV), (23, 29)):
        inputs = [it.detach() for it in qkv(seq_q, seq_kv)]
        torch.testing.assert_close(loaded(*inputs), model(*inputs))


CAP = torch.tensor(2.0)

BAD = {
    "score_mod": {
        "control flow": (lambda s, b, h, i, j: s if s.item() > 0 else -s, "allowed torch.where"),
        "a whole tensor": (lambda s, b, h, i, j: s + TABLE, r"tensor of shape \(\d,\) as a whole; allowed one element"),
        "an operation": (lambda s, b, h, i, j: torch.erfinv(s), "erfinv.*allowed arithmetic"),
        "a slice": (lambda s, b, h, i, j: s + TABLE[1:][h], "an index slice.*allowed b, h, q_idx, kv_idx"),
        "a place": (lambda s, b, h, i, j: s + TABLE[9], "index 9 is out of bounds for a dimension of 4"),
        "no number": (lambda s, b, h, i, j: None, "a result of NoneType; allowed a tensor"),
        "two results": (lambda s, b, h, i, j: torch.frexp(s)[0], "result of an operation that cannot be recorded"),
        "a write": (lambda s, b, h, i, j: CAP.add_(s), "writes to a captured tensor"),
        "no callable": (3, "score_mod must be callable or None; got int"),
    },
    "block_mask": {
        "no mask": (torch.ones(3), "block_mask must be a .*BlockMask; got Tensor"),
        "lists": (blocks(lambda b, h, i, j: i >= j, 20, 8), r"block_mask: got lists \[1, 1, 2, 1\]"),
    },
    "softcap": {"a number": (-1.0, "softcap: got -1.0; allowed positive")},
    "bias": {"a shape": (torch.ones(2, 3, 1, 1, dtype=torch.float64), r"bias: got shape \(2, 3, 1, 1\); allowed")},
}


@pytest.mark.parametrize(("option", "kind"), [(option, kind) for option, kinds in BAD.items() for kind in kinds])
def test_what_is_bad_is_named_in_a_graph_too(option, kind):
    value, words = BAD[option][kind]
    run, _ = compiled(lambda q, k, v: fmha(q, k, v, **{option: value}))
    with pytest.raises(Exception, match=words), torch._dynamo.config.patch(capture_scalar_outputs=True):
        run(*qkv())


def test_a_softcap_that_changes_is_a_graphs_own():
    def run(q, k, v, softcap):
        return fmha(q, k, v, softcap=softcap, score_mod=lambda s, b, h, i, j: s / softcap)

    run_compiled, _ = compiled(run, dynamic=True)
    for softcap in (2.0, 4.0, 8.0):  # exact in fp32
        torch.testing.assert_close(run_compiled(*qkv(), softcap), run(*qkv(), softcap))
