"""Gradients of plain eager calls: autograd of the reference in fp64 is the truth, for every way that training takes."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

import multiattn
from multiattn import api, fmha, fmha_backward, reference
from multiattn.operands import Operands, Options
from multiattn.plan import backend as registry
from multiattn.plan import choice
from multiattn.plan.arch import ARCHS
from multiattn.run import calls


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(seq_q=5, seq_kv=7, heads_kv=2, head_dim=8, dtype=torch.float64, requires_grad=True, head_dim_v=None):
    shapes = ((2, 4, seq_q, head_dim), *((2, heads_kv, seq_kv, it) for it in (head_dim, head_dim_v or head_dim)))
    return [random(*shape, seed=i, dtype=dtype).requires_grad_(requires_grad) for i, shape in enumerate(shapes)]


def truth(q, k, v, **options):
    return reference(q, k, v, compute_dtype=torch.float64, **options)


def weigh(out, lse=None):
    """A scalar that depends on every element of out, and of lse, each in its own way."""
    total = (out * random(*out.shape, seed=9)).sum()
    if lse is not None:
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        total = total + (lse * random(*lse.shape, seed=8)).sum()
    return total


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, check_dtype=False)  # lse and dlse are fp32


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("shape", [None, (2, 4, 7, 3), (1, 4, 1, 3), (2, 1, 7, 1), (1, 1, 1, 1)])
def test_agrees_with_autograd_of_the_reference(shape, return_lse):
    """By autograd and by hand, plain and with a bias of this shape and all else of scores; some rows are empty."""
    inputs, options = qkv(seq_q=7, seq_kv=3, head_dim_v=12 if return_lse else 4), {"causal": True}
    if shape is not None:
        slopes, bias = random(4, dtype=torch.float32).requires_grad_(), random(*shape).requires_grad_()
        options |= {"alibi_slopes": slopes, "bias": bias, "softcap": 3.0, "scale": -0.7}
        inputs += [slopes, bias]
    results = fmha(*inputs[:3], return_lse=return_lse, deterministic=shape is not None, **options)
    expected = truth(*inputs[:3], **options)
    known = expected[: 1 + return_lse]
    wanted = gradients(weigh(*known), inputs)
    close(gradients(weigh(*results) if return_lse else weigh(results), inputs), wanted)
    dout, *dlse = torch.autograd.grad(weigh(*known), known)
    given = [it.detach() for it in (*inputs[:3], *expected)]
    of_lse = {"dlse": dlse[0].float()} if dlse else {}
    close(fmha_backward(*given[:4], given[4].float(), dout, **of_lse, **options), wanted)


def test_only_lse_may_be_used_and_only_one_input_may_require_grad():
    inputs = qkv()
    q_k = inputs[:2]
    _, lse = fmha(*inputs, causal=True, return_lse=True)
    close(gradients(lse.sin().sum(), q_k), gradients(truth(*inputs, causal=True)[1].sin().sum(), q_k))
    for which in range(3):
        inputs = qkv(requires_grad=False)
        inputs[which].requires_grad_()
        close(gradients(weigh(fmha(*inputs)), inputs[which]), gradients(weigh(truth(*inputs)[0]), inputs[which]))


def misaligned(grad):
    return torch.empty(grad.numel() + 1, dtype=grad.dtype)[1:].view(grad.shape).copy_(grad)


LAYOUTS = {
    "expanded": lambda out: out.sum(),
    "transposed": lambda out: (out.transpose(1, 2).contiguous() * random(2, 5, 4, 8, seed=3)).sum(),
    "one row": lambda out: out[:, :, 2].square().sum(),
    "unaligned": lambda out: (out.register_hook(misaligned), out.square().sum())[1],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dout_of_any_layout(name):
    inputs = qkv()
    gradients(weigh(fmha(*inputs)), inputs)  # so that a backward is ready for a dout that is laid out as out is
    ready = calls.get_forward(Operands(*inputs), Options(), True).gradient
    launch, seen = ready.launch, []
    ready.launch = lambda operands: (seen.append(operands), launch(operands))[1]
    gradients(weigh(fmha(*inputs)), inputs)
    close(gradients(LAYOUTS[name](fmha(*inputs)), inputs), gradients(LAYOUTS[name](truth(*inputs)[0]), inputs))
    ready.launch = launch
    assert len(seen) == 2
    assert {operands.dout.stride() for operands in seen} == {seen[0].out.stride()}
    assert not any(operands.dout.data_ptr() % 16 for operands in seen)


def test_views_of_one_packed_tensor_and_transposed_inputs_get_their_layout_back():
    packed = random(2, 6, 3, 4, 8).requires_grad_()  # [B, S, 3, H, D]
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
    out = fmha(q, k, v, causal=True)
    close(gradients(weigh(out), packed), gradients(weigh(truth(q, k, v, causal=True)[0]), packed))
    latent = random(2, 1, 6, 12, seed=4).requires_grad_()  # MLA: its first columns are the values, too
    queries = random(2, 4, 6, 12, seed=5).requires_grad_()
    of_mla = queries, latent, latent[..., :8]
    found, wanted = fmha(*of_mla, causal=True), truth(*of_mla, causal=True)[0]
    close(*(gradients(weigh(it), of_mla[:2]) for it in (found, wanted)))
    tensors = [random(2, 6, 4, 8, seed=seed).transpose(1, 2).requires_grad_() for seed in range(3)]
    out, lse = fmha(*tensors, return_lse=True)
    assert out.stride() == tensors[0].stride()
    for grad in fmha_backward(*tensors, out, lse, out.detach()):
        assert grad.stride() == tensors[0].stride()


def test_a_graph_may_be_kept_is_freed_else_and_tells_what_was_written_over():
    inputs = qkv()
    loss = weigh(fmha(*inputs))
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    close(torch.autograd.grad(loss, inputs), first)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, inputs)
    out = fmha(*inputs)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_see_gradients_and_saved_tensors_may_come_back_in_another_layout():
    inputs = [tensor.detach().mT.contiguous().mT.contiguous().requires_grad_() for tensor in qkv()]
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().clone(), lambda kept: kept.transpose(1, 2).contiguous().transpose(1, 2)
    ):
        out = fmha(*inputs, causal=True)
    out.register_hook(lambda grad: seen.append(grad.shape))
    inputs[0].register_hook(lambda grad: grad * 2)
    actual = gradients(weigh(out), inputs)
    expected = gradients(weigh(truth(*inputs, causal=True)[0]), inputs)
    close(actual, expected)  # a hook on a leaf acts on the reference's gradient too
    assert seen == [out.shape]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_no_graph_where_none_is_wanted(guard):
    with guard():
        out, lse = fmha(*qkv(), return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert not fmha(*qkv(requires_grad=False)).requires_grad


def test_differentiating_twice_is_refused_when_it_is_done():
    inputs = qkv()
    (dq,) = torch.autograd.grad(weigh(fmha(*inputs)), inputs[:1], create_graph=True)
    close(dq, gradients(weigh(truth(*inputs)[0]), inputs[:1])[0])
    once = r"differentiated once.*no gradient of their own.*multiattn\.reference"
    with pytest.raises(NotImplementedError, match=once):
        dq.sum().backward()
    out, lse = fmha(*inputs, return_lse=True)
    dq, _, _ = fmha_backward(*inputs, out, lse, out)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        dq.sum().backward()


def test_who_watches_or_transforms_only_one_direction_is_seen():
    """A warm backward asks the tensors' guard, which knows nothing of these."""
    inputs, dout = qkv(), random(2, 4, 5, 8, seed=9)
    gradients(weigh(fmha(*inputs)), inputs)
    out = fmha(*inputs)

    def differentiate(dout):
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    expected = differentiate(dout)
    traced = make_fx(differentiate)(dout)
    assert "fmha_backward" in traced.code
    close(traced(dout), expected)
    with FlopCounterMode(display=False) as counter:
        differentiate(dout)
    assert counter.get_total_flops() > 0
    with compiled_autograd._enable(torch.compile(backend="eager")):
        close(differentiate(dout), expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(dout, torch.ones_like(dout))
        for call in (differentiate, lambda dual: fmha(dual, *inputs[1:])):
            with pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*multiattn\.reference"):
                call(dual)


def test_threads_may_share_it(fresh_calls):
    inputs = qkv()
    expected = gradients(weigh(truth(*inputs)[0]), inputs)
    barrier = threading.Barrier(4)

    def work(_):
        mine = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        barrier.wait()
        return gradients(weigh(fmha(*mine)), mine)

    with ThreadPoolExecutor(4) as threads:
        for grads in threads.map(work, range(4)):
            close(grads, expected)


EMPTY = torch.tensor([0, 1, 2])
"""Rows that see no key, each way of hiding them."""
HIDDEN = {
    "causal": lambda: {"causal": True},
    "bias": lambda: {"bias": torch.zeros(1, 1, 6, 1, dtype=torch.bfloat16).index_fill(2, EMPTY, -math.inf)},
    "block_mask": lambda: {"block_mask": create_block_mask(lambda b, h, i, j: i > 2, None, None, 6, 3, device="cpu")},
}


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", ["auto", *multiattn.BACKENDS])
def test_what_comes_of_the_minus_infinity_of_an_empty_row_goes_nowhere(backend, deterministic, how):
    """As where ring attention joins parts, or a loss divides by exp(lse): the gradient of -inf is NaN."""
    inputs = qkv(seq_q=6, seq_kv=3, head_dim=16, dtype=torch.bfloat16)
    _, lse = fmha(*inputs, backend=backend, return_lse=True, deterministic=deterministic, **HIDDEN[how]())
    assert (lse[:, :, EMPTY] == -math.inf).all()
    for loss in (torch.logaddexp(lse, lse).exp().sum(), (lse / lse.exp()).sum()):
        grads = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][:, :, EMPTY] == 0).all()


def test_many_gradients_at_once():
    inputs = qkv()
    out, lse = fmha(*inputs, causal=True, return_lse=True)
    douts = random(3, *out.shape, seed=3)
    many = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(out, inputs, douts[i], retain_graph=True)
        close([grad[i] for grad in many], list(one))
    dlses = random(3, *lse.shape, seed=4, dtype=torch.float32)
    many = torch.autograd.grad(lse, inputs[:2], dlses, is_grads_batched=True, retain_graph=True)
    one = torch.autograd.grad(lse, inputs[:2], dlses[1])
    close([grad[1] for grad in many], list(one))


@pytest.fixture
def launched(fresh_calls, monkeypatch):
    """Plays a GPU whose records prefer one backend forward and another backward; each launch is told here."""
    eager, told = registry.get("reference"), []

    def play(name):
        def tell(op):
            def prepare(plan):
                launch = op.prepare(plan)
                return lambda operands: (told.append((name, plan.direction, plan.variant)), launch(operands))[1]

            return prepare

        (variant,) = eager.forward.variants
        ways = (variant, replace(variant, name="other"))
        forward = replace(eager.forward, variants=ways, prepare=tell(eager.forward))
        backward = replace(eager.backward, prepare=tell(eager.backward))
        return replace(eager, name=name, forward=forward, backward=backward)

    best = {"forward": "triton", "backward": "cuda"}
    monkeypatch.setattr(registry, "get", play)
    for module in (calls, api):
        monkeypatch.setattr(module, "detect", lambda device: ARCHS["sm90"])
    monkeypatch.setattr(choice, "preferred_order", lambda *of: ((best[of[-1]], f"best {of[-1]}"),))
    return told


def by_dispatch_mode(call):
    with FlopCounterMode(display=False):
        return call()


def by_compiler(call):
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)()


WAYS = {"eager": lambda call: call(), "a dispatch mode": by_dispatch_mode, "compiled": by_compiler}


@pytest.mark.parametrize("way", WAYS)
def test_auto_chooses_the_backward_by_its_own_record(way, launched):
    inputs = qkv()
    out = WAYS[way](lambda: fmha(*inputs))
    close(gradients(weigh(out), inputs), gradients(weigh(truth(*inputs)[0]), inputs))
    assert launched == [("triton", "forward", "eager"), ("cuda", "backward", "eager")]
    for direction, (backend, *_) in zip(("forward", "backward"), launched, strict=True):
        plan = multiattn.explain(*inputs, direction=direction)
        assert (plan.backend, plan.direction) == (backend, direction)
        assert plan.why.startswith(f"best {direction}; ")


@pytest.mark.parametrize("way", WAYS)
def test_a_named_backend_keeps_its_backward_whatever_the_variant_of_its_forward(way, launched):
    inputs = qkv()
    WAYS[way](lambda: fmha(*inputs, backend="triton", variant="other")).sum().backward()
    assert launched == [("triton", "forward", "other"), ("triton", "backward", "eager")]
    kept = dict(calls._backward.ready)
    assert kept
    fmha(*inputs, backend="triton").sum().backward()
    assert calls._backward.ready == kept, "a backward is the same for all variants of the forward"


def test_a_warm_backward_looks_up_nothing(monkeypatch):
    inputs = qkv()
    dout = random(2, 4, 5, 8, seed=9)
    for _ in range(2):
        expected = torch.autograd.grad(fmha(*inputs, causal=True), inputs, dout)
    with monkeypatch.context() as patch:
        patch.setattr(calls._backward, "find", None)
        close(torch.autograd.grad(fmha(*inputs, causal=True), inputs, dout), expected)


class TestBackwardCall:
    def arguments(self, **changes):
        q, k, v = qkv(requires_grad=False)
        out, lse = fmha(q, k, v, return_lse=True)
        return {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": random(*out.shape, seed=9)} | changes

    def test_any_layout_is_taken(self):
        straight = self.arguments(dlse=random(2, 4, 5).float())
        names = ("out", "lse", "dout", "dlse")
        crooked = {name: straight[name].transpose(1, 2).contiguous().transpose(1, 2) for name in names}
        close(fmha_backward(**(straight | crooked)), fmha_backward(**straight))
        negated = {name: torch._neg_view(-straight[name]) for name in ("dout", "lse")}
        close(fmha_backward(**(straight | negated)), fmha_backward(**straight))

    def test_a_forward_plan_is_no_backward_plan(self):
        given = self.arguments()
        q, k, v = given["q"], given["k"], given["v"]
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        rest = (q, k, v, given["out"], given["lse"], given["dout"], None, *grads)
        with pytest.raises(ValueError, match=r"plan\.direction: got forward; allowed backward"):
            multiattn.launch_backward(multiattn.explain(q, k, v), *rest)
        plan = multiattn.explain(q, k, v, direction="backward")
        multiattn.launch_backward(plan, *rest)
        close(grads, fmha_backward(**given))
        with pytest.raises(ValueError, match=r"plan\.direction: got backward; allowed forward"):
            multiattn.launch(plan, q, k, v, given["out"], given["lse"])
        with pytest.raises(ValueError, match="dv: got strides"):
            multiattn.launch_backward(plan, *rest[:-1], grads[2].transpose(1, 2).contiguous().transpose(1, 2))
