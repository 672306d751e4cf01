"""The ops that tracers and transforms see: compiled, exported, mapped and faked calls agree with eager ones."""

import pytest
import torch
from cached_calls import COMPILED
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from multiattn import fmha, fmha_backward, fmha_kvcache, fmha_varlen
from multiattn.score.record import program_of


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def qkv(seq_q=5, seq_kv=7, requires_grad=False, transposed=False, batch=2, width_v=8):
    shapes = ((batch, 4, seq_q, 8), (batch, 2, seq_kv, 8), (batch, 2, seq_kv, width_v))
    tensors = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    if transposed:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    return [tensor.requires_grad_(requires_grad) for tensor in tensors]


def loss_of(q, k, v, **options):
    out, lse = fmha(q, k, v, return_lse=True, **options)
    return (out * out).sum() + lse.sin().sum()


SOFTCAP, *_ = program_of("cpu", (True, False, False, False, False), None, None, ())
SAMPLES = {
    "full": ({}, False),
    "causal, by name": ({"right": 0, "scale": -0.3, "backend": "reference", "deterministic": True}, True),
    "window": ({"left": 2, "right": 1}, False),
    "sinks": ({"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}, False),
    "softcap": ({"score": SOFTCAP, "scalars": [2.0]}, False),
    "narrow v": ({"right": 0, "width_v": 4}, False),
    "wide v": ({"left": 3, "width_v": 12}, True),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    options, transposed = dict(SAMPLES[name][0]), SAMPLES[name][1]
    inputs = qkv(requires_grad=True, transposed=transposed, width_v=options.pop("width_v", 8))
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].clone().requires_grad_()}
    forward, backward = torch.ops.multiattn.fmha_forward.default, torch.ops.multiattn.fmha_backward.default
    torch.library.opcheck(forward, (*inputs, [], []), {**options, "needs_grad": True})
    out, lse = (result.detach() for result in forward(*inputs, [], [], **options))
    inputs = [tensor.detach() for tensor in inputs]
    options = {name: it.detach() if isinstance(it, torch.Tensor) else it for name, it in options.items()}
    crooked = out.mT.contiguous().mT
    torch.library.opcheck(backward, (*inputs, out, lse, crooked), options)
    torch.library.opcheck(backward, (*inputs, out, lse, out, lse.cos()), options)


def test_opcheck_with_captured_tensors():
    inputs, bias = qkv(requires_grad=True), torch.randn(1, 4, 1, 7, dtype=torch.float64, requires_grad=True)
    specs = ("cpu", "float32", (4,)), ("cpu", "float64", tuple(bias.shape))
    text, *_ = program_of("cpu", (False, True, True, False, False), None, None, specs)
    captured = [torch.rand(4), bias]
    options = {"score": text, "slots": [1], "needs_grad": True}
    forward, backward = torch.ops.multiattn.fmha_forward.default, torch.ops.multiattn.fmha_backward_captured.default
    torch.library.opcheck(forward, (*inputs, captured, []), options)
    out, lse = (result.detach() for result in forward(*inputs, captured, [], **options))
    given = [tensor.detach() for tensor in (*inputs, out, lse, out)]
    rest = (None, None, None, None, None, text, None, [1], None, None, "auto", None, False)
    torch.library.opcheck(backward, (*given, [it.detach() for it in captured], [], *rest))


def test_an_op_is_asked_for_what_the_call_is():
    asked = {"backend": "reference", "variant": "eager", "deterministic": True}
    assert "'reference', 'eager', True" in make_fx(lambda *of: fmha(*of, **asked))(*qkv()).code


def packed():
    starts = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    return [random(14, heads, 8, seed=heads) for heads in (4, 2, 2)], lengths


PACKED = ((fmha_varlen, "fmha_forward", packed, it) for it in ({}, {"causal": True, "softcap": 3.0}))
OF_SEQUENCES = [*PACKED, *((fmha_kvcache, "fmha_kvcache", *it) for it in COMPILED)]


@pytest.mark.parametrize(("call", "name", "make", "options"), OF_SEQUENCES)
def test_opcheck_of_batches_of_sequences(call, name, make, options):
    """A dispatch mode is not told defaults; what is left at its default does not reach autograd either."""
    op = getattr(torch.ops.multiattn, name).default
    tensors, lengths = make()
    asked = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                asked.append((args, kwargs or {}))
            return func(*args, **kwargs or {})

    with Recorder():
        call(*tensors, **lengths, **options)
    ((given, named),) = asked
    args = [*given, *(it.default_value for it in op._schema.arguments[len(given) :])]
    if call is fmha_varlen:
        args = [*(it.detach().requires_grad_() for it in args[:3]), *args[3:-1], True]
    torch.library.opcheck(op, tuple(args), named)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(5, 7), (1, 7), (5, 0), (0, 7)])
@pytest.mark.parametrize("width_v", [8, 4, 12])
def test_fakes_have_the_strides_of_the_real_ones(sizes, transposed, width_v):
    inputs = qkv(*sizes, transposed=transposed, width_v=width_v)
    out, lse = torch.ops.multiattn.fmha_forward(*inputs, [], [])
    real = (out, lse, *torch.ops.multiattn.fmha_backward(*inputs, out, lse, out)[:3])
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(tensor) for tensor in inputs]
        out, lse = fmha(*inputs, return_lse=True)
        fake = (out, lse, *fmha_backward(*inputs, out, lse, out))
    for made, known in zip(fake, real, strict=True):
        assert (made.shape, made.stride(), made.dtype) == (known.shape, known.stride(), known.dtype)


@pytest.mark.parametrize("width_v", [8, 12])
def test_compiles_whole_for_every_length(width_v):
    torch._dynamo.reset()
    graphs = []

    def count(graph, examples):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=count)
    whole = torch.compile(loss_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((5, 7), (9, 11), (12, 6)):  # in the last some rows see no key
        inputs = qkv(*lengths, requires_grad=True, transposed=True, width_v=width_v)
        expected = torch.autograd.grad(loss_of(*inputs, causal=True), inputs)
        torch.testing.assert_close(torch.autograd.grad(compiled(*inputs, causal=True), inputs), expected)
        torch.testing.assert_close(torch.autograd.grad(whole(*inputs, causal=True), inputs), expected)
    assert len(graphs) == 1, "a new length must not compile anew"


@pytest.mark.parametrize("width_v", [8, 12])
def test_flops_are_those_of_both_widths(width_v):
    with FlopCounterMode(display=False) as counter:
        loss_of(*qkv(requires_grad=True, width_v=width_v)).backward()
    pairs = 2 * 4 * 5 * 7
    assert counter.get_total_flops() == pairs * (2 * (8 + width_v) + 2 * (3 * 8 + 2 * width_v))


def test_a_refusal_comes_through_a_compiled_graph():
    torch._dynamo.reset()
    inputs = [tensor.requires_grad_() for tensor in qkv()]
    compiled = torch.compile(lambda *of: fmha(*of, backend="cuda"), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="dtype: got fp64; allowed fp16, bf16"):
        compiled(*inputs)


@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, 0), (None, 1, 2), (3, None, 0), (4, 4, 4)])
def test_vmap_maps_any_mix_of_inputs(in_dims):
    plain = zip(qkv(width_v=12), in_dims, strict=True)
    inputs = [it if dim is None else torch.stack([it, 2 * it, it.cos()], dim) for it, dim in plain]
    pairs = list(zip(inputs, in_dims, strict=True))
    each = [[it if dim is None else it.select(dim, i).contiguous() for it, dim in pairs] for i in range(3)]
    out, lse = torch.vmap(lambda *of: fmha(*of, causal=True, return_lse=True), in_dims)(*inputs)
    torch.testing.assert_close(out, torch.stack([fmha(*of, causal=True) for of in each]))
    torch.testing.assert_close(lse, torch.stack([fmha(*of, causal=True, return_lse=True)[1] for of in each]))
    grads = torch.vmap(torch.func.grad(loss_of, (0, 1, 2)), in_dims)(*inputs)
    for i, of in enumerate(each):
        torch.testing.assert_close([grad[i] for grad in grads], list(torch.func.grad(loss_of, (0, 1, 2))(*of)))


@pytest.mark.parametrize(("backend", "softcap"), [("reference", None), ("cutile", None), ("reference", 3.0)])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 4)])
def test_vmap_over_nothing_is_empty(in_dims, backend, softcap):
    dtype = torch.float64 if backend == "reference" else torch.bfloat16
    pairs = zip([it.to(dtype) for it in qkv()], in_dims, strict=True)
    inputs = [it if dim is None else it.unsqueeze(dim).narrow(dim, 0, 0) for it, dim in pairs]
    q, k, v = qkv()
    run = torch.vmap(lambda *of: fmha(*of, backend=backend, softcap=softcap, return_lse=True), in_dims)
    out, lse = run(*inputs)
    assert (out.shape, out.dtype, lse.shape) == ((0, *q.shape), dtype, (0, *q.shape[:3]))
    loss = torch.func.grad(lambda *of: fmha(*of, backend=backend, softcap=softcap).sum(), (0, 1, 2))
    grads = torch.vmap(loss, in_dims)(*inputs)
    assert [grad.shape for grad in grads] == [(0, *tensor.shape) for tensor in (q, k, v)]
    leaves = [tensor.requires_grad_() for tensor in inputs]
    grads = torch.autograd.grad(run(*leaves)[0].sum(), leaves)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in leaves]
    assert not any(grad.any() for grad in grads)


def test_func_does_not_differentiate_twice():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match=r"differentiated once.*multiattn\.reference"):
        torch.func.grad(lambda q: torch.func.grad(loss_of)(q, k, v).sum())(q)


def test_a_tensor_subclass_goes_through_the_ops():
    class Tagged(torch.Tensor):
        pass

    q, k, v = qkv()
    out = fmha(q.as_subclass(Tagged), k, v)
    assert isinstance(out, Tagged)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), fmha(q, k, v))
    parameter = torch.nn.Parameter(q)
    assert "Attention" in type(fmha(parameter, k, v).grad_fn).__name__


def test_bad_input_is_named_by_the_ops_too():
    q, k, v = qkv()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (q, k, v)]
        with pytest.raises(ValueError, match="k and v must have one shape"):
            fmha(*fakes[:2], fakes[2][:, :, :3])
        with pytest.raises(ValueError, match="dout: got"):
            fmha_backward(*fakes, fakes[0], fakes[0][..., 0].float(), fakes[0][:, :, :1])
    out, lse = fmha(q, k, v, return_lse=True)
    for options, message in (
        ({"causal": 1}, "causal must be a bool; got int"),
        ({"scale": "x"}, "scale must be a float or None; got str"),
        ({"variant": 4}, "variant must be a string; got int"),
    ):
        with pytest.raises(TypeError, match=message):
            torch.vmap(lambda q, options=options: fmha(q, k, v, **options))(q[None])
        with pytest.raises(TypeError, match=message):
            torch.vmap(lambda d, options=options: fmha_backward(q, k, v, out, lse, d, **options))(out[None])
