"""Kernels of PyTorch's dispatcher with ours before them: ours runs what it can, and PyTorch's own what ours refuses."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from multiattn.operands import Operands, Options
from multiattn.plan import backend as registry
from multiattn.plan.support import Unsupported
from multiattn.run.calls import Ready, get_backward, get_forward
from multiattn.validate.results import check_results

log = logging.getLogger(__name__)

T = TypeVar("T")
Kernels = Mapping[str, Mapping[str, Callable[..., Any]]]
"""Kernels of aten ops, by dispatch key and op."""

_backend = "auto"


def use(backend: str) -> None:
    """Let every override run this backend from now on.

    It is one of `multiattn.backends()`, ``"reference"``, or ``"auto"``, the default: the fastest by recorded
    measurements on a GPU, the reference on CPU tensors.

    Raises:
        ValueError: There is no backend of this name.
    """
    global _backend
    if backend != "auto":
        registry.get(backend)
    _backend = backend


class Refused(Exception):  # noqa: N818 - an answer, which `Override` takes
    """Ours does not run this call. `kind` is the same for refusals that are worth telling once; none is told of ""."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Override:
    """One kernel of an aten op: `ours` if it does not raise `Refused`, else the kernel that was there before."""

    def __init__(self, library: torch.library.Library, op: str, key: str, ours: Callable[..., Any]) -> None:
        self._op = op
        self._key = key
        self._ours = ours
        self._told: set[str] = set()
        self._theirs = _kernel_of(f"aten::{op}", key)
        library.impl(op, self, key, with_keyset=True)

    def __call__(self, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """The kernel as a dispatcher calls it, with the keys that a kernel of C++ must be handed on."""
        try:
            return self._ours(*args, **kwargs)
        except Refused as refused:
            if self._theirs is None:
                raise NotImplementedError(
                    f"aten::{self._op} has no kernel of PyTorch's for {self._key}, and multiattn refused: {refused}"
                ) from refused
            if refused.kind and refused.kind not in self._told:
                self._told.add(refused.kind)
                log.warning("aten::%s runs PyTorch's own kernel, as multiattn refused: %s", self._op, refused)
        return self._theirs.call_boxed(keys, *args, **kwargs)


def _kernel_of(op: str, key: str) -> Any:
    """The kernel that the dispatcher would run now; None where there is none."""
    try:
        return torch.library.get_kernel(op, key)
    except RuntimeError:  # says so; a build without CUDA has none of its
        return None


class Overrides:
    """Overrides that are in force until `remove`, as `torch.nn.attention.register_flash_attention_impl` wants them."""

    def __init__(self, *kernels: Kernels) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # the caller asked for them
            warnings.filterwarnings("ignore", "(?s).*previously registered kernel", UserWarning)
            for key, of_key in itertools.chain.from_iterable(it.items() for it in kernels):
                for op, ours in of_key.items():
                    if hasattr(torch.ops.aten, op):  # not in every release of PyTorch
                        Override(self._library, op, key, ours)

    def remove(self) -> None:
        """Give the ops their former kernels back."""
        self._library = None  # the dispatcher forgets what a library registered when that is gone


# ---------------------------------------------------------------- for kernels of ours


@functools.cache
def _parameters(op: Any) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """The names of an op's arguments in their order, and the values of those that may be left out."""
    given = op._schema.arguments
    return tuple(it.name for it in given), {it.name: it.default_value for it in given if it.has_default_value()}


def by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op by the names of its schema, in its order, with those that it leaves out."""
    names, defaults = _parameters(op)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given[name] if name in given else defaults[name] for name in names}


def kernel_of(op: str) -> Callable[[Callable[[Any], T]], Callable[..., T]]:
    """A decorator: the kernel of an aten op, which takes one namespace of the arguments in the op's schema."""

    def decorate(kernel: Callable[[Any], T]) -> Callable[..., T]:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> T:
            return kernel(SimpleNamespace(**by_name(getattr(torch.ops.aten, op).default, args, kwargs)))

        run.op = op  # type: ignore[attr-defined]
        return run

    return decorate


def by_op(*kernels: Any) -> Mapping[str, Callable[..., Any]]:
    """Kernels by the ops that `kernel_of` was told."""
    return {it.op: it for it in kernels}


def options_of_call(call: Any, left: int | None = None, right: int | None = None) -> Options:
    """The Options of a call of an op, `Refused` where its arguments are none of ours."""
    if call.dropout_p != 0.0:
        raise Refused("dropout", f"dropout_p: got {call.dropout_p}; allowed 0.0")
    dtype = call.query.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise Refused(f"dtype {dtype}", f"dtype: got {dtype}; allowed torch.float16, torch.bfloat16")
    if getattr(call, "return_debug_mask", False):
        raise Refused("debug mask", "return_debug_mask: got True; allowed False")
    asked = {"scale": call.scale, "backend": _backend, "variant": None, "deterministic": None}
    options = Options.of(causal=False, window=None, **asked)
    return options if left is None and right is None else options._replace(left=left, right=right)


def ready_forward(operands: Operands, options: Options) -> Ready:
    """`get_forward`, with `Refused` for what it refuses."""
    return or_refuse(get_forward, operands, options)


def ready_backward(operands: Operands, options: Options) -> Ready:
    """`get_backward`, with `Refused` for what it refuses, or what is no result of a forward."""
    or_refuse(check_results, operands.q, operands.v, *operands.results)
    return or_refuse(get_backward, operands, options)


def or_refuse(function: Callable[..., T], *args: Any) -> T:
    """The result of `function`, with `Refused` for `Unsupported` and for arguments that it finds wrong."""
    try:
        return function(*args)
    except Unsupported as error:
        reasons = "; ".join(map(str, error.reasons))
        raise Refused(" ".join(sorted({it.code for it in error.reasons})), reasons) from error
    except (TypeError, ValueError) as error:
        raise Refused(type(error).__name__, str(error)) from error


# ---------------------------------------------------------------- layouts that fakes of PyTorch promise


@functools.lru_cache(maxsize=4096)
def strides_of_empty_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that `torch.empty_like` gives."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def laid_out_like(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The result itself if it is laid out as ``torch.empty_like(like)``, else such a copy: compiled code asserts it.

    A result as wide as v has its dimensions in the order of a q of another width.
    """
    return laid_out(result, strides_of_empty_like(tuple(result.shape), tuple(like.stride())))


def laid_out(result: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The result itself if it has these strides where it is longer than one, else such a copy."""
    walked = zip(result.shape, result.stride(), strides, strict=True)
    if all(has == wanted for size, has, wanted in walked if size > 1) or result.numel() == 0:
        return result
    return result.new_empty_strided(tuple(result.shape), tuple(strides)).copy_(result)
