"""Private hooks of PyTorch and their public stand-ins: both say the same, and a release without a hook still runs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from multiattn.run import compat

HOOKS = {
    "_cuda_getCurrentRawStream": "current_stream",
    "_cuda_getDevice": "current_device",
    "_are_functorch_transforms_active": "transforms_active",
    "_len_torch_dispatch_stack": "dispatch_modes",
    "_is_tracing": "is_tracing",
    "_has_storage": "has_storage",
    "_is_any_autocast_enabled": "autocast_active",
}


@pytest.fixture
def without_hooks(monkeypatch):
    """The module as a release of PyTorch without any of them imports it."""
    with monkeypatch.context() as patch:
        for name in HOOKS:
            patch.delattr(torch._C, name, raising=False)
        patch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda")
        patch.delattr(torch._C._dynamo.guards, "TensorGuards")
        importlib.reload(compat)
    yield compat
    importlib.reload(compat)


def test_hooks_are_used_where_there_are_any():
    """Private ones: without them a call is slower, and nothing else."""
    for hook, name in HOOKS.items():
        if hasattr(torch._C, hook):
            assert getattr(compat, name) is getattr(torch._C, hook)
    assert compat._empty_on_gpu is not None
    made = torch._C._dynamo.guards._empty_strided_cpu((2, 3), (3, 1), torch.bfloat16)  # as the GPU's
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.bfloat16)


def test_streams_devices_and_memory_are_asked_for_in_public(without_hooks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert (without_hooks.current_stream(2), without_hooks.current_device()) == (72, 3)
    made = without_hooks.empty_strided((2, 3), (1, 2), torch.bfloat16, torch.device("cpu"))
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.bfloat16)


def test_memory_past_the_dispatcher_is_for_a_gpu_that_fills_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(compat, "_empty_on_gpu", lambda *of: asked.append(of) or "past")
    monkeypatch.setattr(torch, "empty_strided", lambda *of, **how: "public")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert compat.empty_strided((4,), (1,), torch.uint8, gpu) == "past"
    assert asked == [((4,), (1,), torch.uint8)]
    assert compat.empty_strided((4,), (1,), torch.uint8, cpu) == "public"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert compat.empty_strided((4,), (1,), torch.uint8, gpu) == "public"


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_function_is_applied_without_asking_for_transforms(monkeypatch):
    apply, x = compat.applier(Double), torch.ones(3, requires_grad=True)
    monkeypatch.setattr(torch._functorch.utils, "unwrap_dead_wrappers", None)  # calling it would raise
    apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3


def test_a_function_is_applied_in_public(monkeypatch):
    monkeypatch.setattr(compat, "_FunctionBase", None)
    assert compat.applier(Double) == Double.apply


def test_autograd_calls_a_backward_itself(monkeypatch):
    x, direct = torch.ones(3, requires_grad=True), compat.direct_backward(type("Direct", (Double,), {}))
    monkeypatch.setattr(torch.autograd.function.BackwardCFunction, "apply", None)  # calling it would raise
    direct.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert compat.direct_backward(SimpleNamespace) is SimpleNamespace  # a release without that class


def test_a_guard_knows_like_tensors():
    q, k, v = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    check = compat.tensor_guard(q, k, v)
    assert check(q.clone(), k, v)
    assert not check(q[:, :1], k, v)
    assert not check(q.half(), k, v)
    check = compat.tensor_guard(q, k, q)
    assert check(k, v, k)
    assert not check(k, v, v)
    assert not check(q, k, q.clone())
    assert not check(*[q.half()] * 3)
    assert compat.tensor_guard(q, q)(k, k)


def test_a_guard_tells_a_transform_and_a_trace():
    """`Ready.fits` asks nobody else for them."""
    tensors = [torch.zeros(2, 3) for _ in range(2)]
    check, told = compat.tensor_guard(*tensors), []

    def ask(x):
        told.append(check(*tensors))
        return x.sum()

    torch.func.grad(ask)(torch.ones(3))
    torch.vmap(ask)(torch.ones(2, 3))
    torch.jit.trace(ask, torch.ones(3), check_trace=False)
    ask(torch.ones(3))
    assert told == [False, False, False, True]


def test_no_guard_or_that_of_another_release_is_not_used(without_hooks, monkeypatch):
    tensors = [torch.zeros(1) for _ in range(3)]
    assert without_hooks.tensor_guard(*tensors) is None
    monkeypatch.setattr(without_hooks, "_TensorGuards", lambda q, k, v: None)
    assert without_hooks.tensor_guard(*tensors) is None


def test_a_call_is_watched_unless_it_is_known_not_to_be(without_hooks, monkeypatch):
    assert without_hooks.transforms_active()
    assert without_hooks.dispatch_modes()
    assert not without_hooks.is_tracing()
    assert not without_hooks.in_forward_mode()
    monkeypatch.setattr(without_hooks, "forward_ad", SimpleNamespace())
    assert without_hooks.in_forward_mode()


def test_a_mapped_tensor_has_no_storage_of_its_own(without_hooks):
    hook, seen = torch._C._has_storage, []

    def see(mapped):
        seen.append((without_hooks.has_storage(mapped), hook(mapped)))
        return mapped

    torch.vmap(see)(torch.ones(2))
    assert seen == [(False, False)]
    assert without_hooks.has_storage(torch.ones(2))
