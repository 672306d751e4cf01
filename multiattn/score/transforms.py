"""Scores under `torch.func` and modes: where a callable is traced, and which tensors want a gradient."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_functorch: Any = getattr(torch._C, "_functorch", None)
_is_wrapped: Any = getattr(_functorch, "is_functorch_wrapped_tensor", None)
_unwrapped: Any = getattr(_functorch, "get_unwrapped", None)


def apart(function: Callable[[], Result]) -> Result:
    """The result of `function`, called in a fresh thread, where none of the caller's modes and transforms is active.

    A trace knows tensors by identity, and `torch.func` wraps the result of each operation anew.
    """
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(function).result()


def is_wrapped(tensor: torch.Tensor) -> bool:
    """True for a tensor of a `torch.func` transform, whose values Python cannot always read."""
    return bool(_is_wrapped(tensor)) if _is_wrapped is not None else False


def requires_grad(tensor: torch.Tensor) -> bool:
    """True if autograd wants a gradient of a tensor, or any transform around this call does.

    A tensor that `torch.vmap` maps says that it requires none, whatever is mapped. A release of PyTorch without these
    private functions takes all floating-point tensors for such.
    """
    if _is_wrapped is None or _unwrapped is None:
        return tensor.is_floating_point()
    while not tensor.requires_grad and _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor.requires_grad
