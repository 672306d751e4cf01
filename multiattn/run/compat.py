"""PyTorch's private hooks that a call uses because the public way costs the host more, each with that public way.

A release of PyTorch without one of these hooks is slower by it, and as right. Callers ask for these names when they
call (``compat.current_stream(device)``) or when they are made, never when they are imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

Guard = Callable[..., bool]
"""Called with as many tensors: true if they are like those that the guard was made of."""


def _private(*path: str) -> Any:
    """The object of a name in PyTorch's extension module; None for a name that this release does not have."""
    found: Any = torch._C
    for name in path:
        found = getattr(found, name, None)
    return found


# ---------------------------------------------------------------- devices and streams


def _public_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _public_device() -> int:
    return int(torch.cuda.current_device())


current_stream: Callable[[int], int] = _private("_cuda_getCurrentRawStream") or _public_stream
"""The driver's handle of the current stream of a device, without a `torch.cuda.Stream` for each launch."""

current_device: Callable[[], int] = _private("_cuda_getDevice") or _public_device
"""The current device once there are tensors on one, without asking first whether CUDA is initialised."""


# ---------------------------------------------------------------- memory

_empty_on_gpu: Any = _private("_dynamo", "guards", "_empty_strided_cuda")


def empty_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised tensor on `device`, which is the current one where it is a GPU."""
    return allocator([(shape, strides, dtype)], device)()[0]


def allocator(
    layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]], device: torch.device
) -> Callable[[], list[torch.Tensor]]:
    """Makes uninitialised tensors of these shapes, strides and dtypes on `device`, the current one where it is a GPU.

    On a GPU past PyTorch's dispatcher, as in the code that Inductor writes: that costs half as much. Not where PyTorch
    may have to fill them first (`torch.utils.deterministic.fill_uninitialized_memory`): the dispatcher's way does so.
    """

    def through_dispatcher() -> list[torch.Tensor]:
        return [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in layouts]

    def past_dispatcher() -> list[torch.Tensor]:
        if torch.are_deterministic_algorithms_enabled():
            return through_dispatcher()
        return [_empty_on_gpu(*layout) for layout in layouts]

    return through_dispatcher if _empty_on_gpu is None or device.type != "cuda" else past_dispatcher


data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
"""The address of a tensor's first element; public, and here because `map` calls it faster than a method."""


# ---------------------------------------------------------------- what like calls share

_TensorGuards: Any = _private("_dynamo", "guards", "TensorGuards")


def tensor_guard(*tensors: torch.Tensor | None) -> Guard | None:
    """Tells whether tensors are like these; None where PyTorch has no such guard, or not of these.

    Dynamo's own guard: Python types, dispatch keys (which kind of device, whether a negated view), dtypes, indices of
    devices, who requires grad, sizes and strides. The keys are those of the moment: no tensor is like itself under a
    `torch.func` transform or in a trace that it was not under before. A guard tells nothing of `dispatch_modes` and
    `in_forward_mode`, takes no None, and keeps no tensor. One that comes twice, as one cu_seqlens for queries and keys
    does, must do so at the same places.
    """
    if _TensorGuards is None:
        return None
    places = {id(it): place for place, it in enumerate(tensors)}
    if len(places) < len(tensors):  # Dynamo's guard takes each once
        apart = sorted(places.values())
        are_apart = tensor_guard(*(tensors[place] for place in apart))
        return None if are_apart is None else _guard_of_repeated(are_apart, apart, [places[id(it)] for it in tensors])
    try:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except TypeError:  # it takes no None, and another release may take other arguments
        return None
    check: Guard = guards.check
    return check


def _guard_of_repeated(are_alike: Guard, apart: Sequence[int], same: Sequence[int]) -> Guard:
    """Tells by the guard of tensors at the places `apart`; each place has the very tensor of its place in `same`."""

    def check(*tensors: torch.Tensor) -> bool:
        at = tensors.__getitem__
        return all(map(operator.is_, tensors, map(at, same))) and are_alike(*map(at, apart))

    return check


# ---------------------------------------------------------------- what else is active while a call is made


def _always() -> bool:
    return True


def _public_tracing() -> bool:
    asked: Any = torch.jit  # is_tracing is public, but neither exported nor typed
    return bool(asked.is_tracing())


_FunctionBase: Any = _private("_FunctionBase")


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for callers who know that no `torch.func` transform is active: without asking for one again."""
    if _FunctionBase is None:
        return function.apply
    past_transforms: Any = super(torch.autograd.Function, function)
    return past_transforms.apply  # type: ignore[no-any-return]


def direct_backward(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Have autograd call `function.backward` itself, where PyTorch would look on each call which method that is."""
    if (node := getattr(function, "_backward_cls", None)) is not None:
        node.apply = function.backward
    return function


transforms_active: Callable[[], bool] = _private("_are_functorch_transforms_active") or _always
"""True if `torch.func` transforms this call. Without the hook: always, and calls go through the ops."""

dispatch_modes: Callable[[], int] = _private("_len_torch_dispatch_stack") or _always
"""The number of modes that intercept the dispatcher. Without the hook: one, and calls go through the ops."""

autocast_active: Callable[[], bool] = _private("_is_any_autocast_enabled") or _always
"""True if tensors of some kind of device are autocast. Without the hook: always, and callers ask for that kind."""

profiler_active: Callable[[], bool] = _private("_autograd", "_profiler_enabled") or (lambda: False)
"""True if a profiler records what this thread runs. Without the hook: never, and calls go around the ops."""

is_tracing: Callable[[], bool] = _private("_is_tracing") or _public_tracing
"""True if `torch.jit.trace` records this call."""


def _public_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


has_storage: Callable[[torch.Tensor], bool] = _private("_has_storage") or _public_storage
"""True if a tensor has memory of its own; one that `torch.vmap` maps has none."""


def in_forward_mode() -> bool:
    """True if forward-mode differentiation is active. Without the hook: always, and calls go through the ops."""
    level: int = getattr(forward_ad, "_current_level", 0)
    return level >= 0
