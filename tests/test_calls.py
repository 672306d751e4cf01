"""Like calls share: a warm call finds what an earlier one made ready, and only what was made for such tensors."""

import weakref
from fractions import Fraction

import pytest
import torch

import multiattn
from multiattn.operands import Operands, Options
from multiattn.run import calls, compat
from multiattn.run.calls import get_forward

pytestmark = pytest.mark.usefixtures("fresh_calls")


def qkv(dtype=torch.float64, seq=9):
    return tuple(torch.randn(2, 4, seq, 8, dtype=dtype) for _ in range(3))


def options_of(**given):
    unset = dict.fromkeys(("window", "scale", "variant"))
    unset |= {"causal": False, "backend": "reference", "deterministic": False}
    return Options.of(**(unset | given))


def ready_of(q, k, v, *, needs_grad=False, **options):
    return get_forward(Operands(q, k, v), options_of(**options), needs_grad)


@pytest.fixture(params=["guards", "no guards", "guards of another PyTorch"])
def _guards(request, monkeypatch):
    """A PyTorch with Dynamo's guards, one without, and one whose guards are made in some other way."""
    if request.param != "guards":
        other = None if request.param == "no guards" else (lambda: None)
        monkeypatch.setattr(compat, "_TensorGuards", other)


@pytest.mark.usefixtures("_guards")
def test_like_calls_share_and_others_do_not():
    q, k, v = qkv()
    first = ready_of(q, k, v)
    views = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    for _ in range(3):
        assert ready_of(q, k, v) is first
        assert ready_of(*qkv()) is first
        assert ready_of(*(tensor.clone().requires_grad_() for tensor in (q, k, v))) is first
        assert ready_of(torch.nn.Parameter(q), k, v) is first
        others = [
            ready_of(*qkv(torch.float32)),
            ready_of(*qkv(seq=10)),
            ready_of(*views),
            ready_of(q, views[1], v),
            ready_of(q, k, views[2]),
            ready_of(q, k, v, causal=True),
            ready_of(q, k, v, scale=1.0),
            ready_of(q, k, v, needs_grad=True),
        ]
        assert len({id(ready) for ready in (first, *others)}) == 1 + len(others)
    twice = ready_of(q, k, k)
    assert ready_of(q, k, k) is twice
    assert ready_of(q, q, q) is twice


@pytest.mark.usefixtures("_guards")
def test_addresses_that_are_aligned_otherwise_are_another_call():
    memory = torch.randn(3, 2 * 4 * 9 * 8 + 2, dtype=torch.float64)
    near, far = (tuple(row[at : at + 576].view(2, 4, 9, 8) for row in memory) for at in (0, 1))
    for _ in range(3):
        found = [ready_of(*of).plan.problem.alignment for of in (near, far)]
        assert found[0] != found[1]


@pytest.mark.usefixtures("_guards")
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"causal": 1}, TypeError, "causal must be a bool; got int"),
        ({"scale": True}, TypeError, "scale must be a float or None; got bool"),
        ({"backend": ["reference"]}, TypeError, "backend must be a string; got list"),
        ({"q": torch._neg_view}, ValueError, "q must hold its own values; got a negated view"),
        ({"v": torch._neg_view}, ValueError, "v must hold its own values; got a negated view"),
        ({"v": torch.Tensor.to_sparse}, TypeError, "v must be a dense strided tensor; got layout torch.sparse_coo"),
        ({"k": lambda k: k.to("meta")}, ValueError, "q, k and v must be on one device"),
        ({"k": torch.Tensor.numpy}, TypeError, "k must be a torch.Tensor; got numpy.ndarray"),
    ],
)
def test_what_equals_a_good_call_but_is_wrong_is_refused(given, error, message):
    q, k, v = qkv()
    tensors, options = {"q": q, "k": k, "v": v}, {"causal": True, "scale": 1.0}
    for _ in range(3):
        multiattn.fmha(*tensors.values(), **options)
    for name, value in given.items():
        if name in tensors:
            tensors[name] = value(tensors[name])
        else:
            options[name] = value
    with pytest.raises(error, match=message):
        multiattn.fmha(*tensors.values(), **options)
    options = {"backend": "reference", **options}
    with pytest.raises(error, match=message):
        ready_of(*tensors.values(), **options)


def test_a_warm_call_asks_no_tensor_for_its_strides(monkeypatch):
    q, k, v = qkv()
    first = [ready_of(q, k, v) for _ in range(2)][-1]
    monkeypatch.setattr(torch.Tensor, "stride", None)
    assert ready_of(q, k, v) is first


class Elsewhere(torch.Tensor):
    """A tensor that says it is on some GPU, where this machine may have none."""

    device = property(lambda self: torch.device(self.where))

    @classmethod
    def of(cls, tensor, where):
        made = tensor.as_subclass(cls)
        made.where = where
        return made


@pytest.mark.parametrize("calls", [calls._forward, calls._backward], ids=["forward", "backward"])
def test_the_same_tensors_on_another_device_are_another_call(calls, monkeypatch):
    monkeypatch.setattr(compat, "tensor_guard", lambda *tensors: None)  # it would see through these
    tensors = qkv()
    first, second = (Operands(*(Elsewhere.of(tensor, where) for tensor in tensors)) for where in ("cuda:0", "cuda:1"))
    calls.keep(calls.find(first, options_of()), "made for the first device")
    assert calls.find(first, options_of()) == "made for the first device"
    assert isinstance(calls.find(second, options_of()), tuple)
    calls.clear()


def test_options_are_normal_once_they_are_made():
    for scale in (2, Fraction(2), 2.0):
        made = options_of(causal=True, scale=scale)
        assert (made, type(made.scale)) == (options_of(causal=True, scale=2.0), float)


def test_guards_keep_no_tensor():
    tensors = qkv()
    for _ in range(3):
        ready_of(*tensors)
    assert calls._forward._latest
    gone = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    assert [tensor() for tensor in gone] == [None] * 3


def test_the_number_of_calls_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "_LIMIT", 3)
    for seq in range(1, 9):
        for _ in range(2):
            ready_of(*qkv(seq=seq))
    assert len(calls._forward.ready) <= 3
    assert len(calls._forward._latest) <= 3
