"""The arguments of ``torch.ops.multiattn``: a table for each op, of which its schema and all of its rules are made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

_NEEDED = object()
"""Stands for the default of an argument that has none."""


class Argument(NamedTuple):
    """One argument of an op."""

    name: str
    type: str = "Tensor"
    """As a schema spells it."""
    default: Any = _NEEDED
    is_batched: bool = False
    """It is ``[B, ...]``: what `torch.vmap` maps can become batch entries."""

    def __str__(self) -> str:
        default = self.default
        text = json.dumps(default) if isinstance(default, str) else str(default)
        return f"{self.type} {self.name}{'' if default is _NEEDED else f'={text}'}"


class Signature:
    """The arguments of an op, and its results."""

    def __init__(self, arguments: Sequence[Argument], results: str) -> None:
        """`results` as a schema spells them."""
        self.arguments = tuple(arguments)
        self.names = tuple(it.name for it in arguments)
        self.schema = f"({', '.join(map(str, arguments))}) -> ({results})"
        self._defaults = {it.name: it.default for it in arguments if it.default is not _NEEDED}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """The arguments of a call by name, with the defaults of those that it leaves out."""
        return {**self._defaults, **dict(zip(self.names, args, strict=False)), **kwargs}


def _batched(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, is_batched=True) for name in names)


_LISTS = (Argument("captured", "Tensor[]"), Argument("indices", "Tensor[]"))
"""The tensors that scores load from, and the `multiattn.sequences.Indices` that the options tell of."""
_DLSE = Argument("dlse", "Tensor?", None, is_batched=True)
_OPTIONS = (
    Argument("sinks", "Tensor?", None),
    Argument("left", "SymInt?", None),
    Argument("right", "SymInt?", None),
    Argument("scale", "float?", None),
    Argument("score", "str?", None),
    Argument("scalars", "float[]?", None),
    Argument("slots", "int[]?", None),
    Argument("blocks", "int[]?", None),
    Argument("batching", "SymInt[]?", None),
    Argument("backend", "str", "auto"),
    Argument("variant", "str?", None),
    Argument("deterministic", "bool", False),
)
"""Sinks, and the fields of `multiattn.operands.Options`."""

_INPUTS, _READ = ("q", "k", "v"), ("q", "k", "v", "out", "lse", "dout")
_RESULTS, _GRADIENTS = "Tensor out, Tensor lse", "Tensor dq, Tensor dk, Tensor dv, Tensor dsinks"

_FORWARD = (*_batched(*_INPUTS), *_LISTS, *_OPTIONS, Argument("needs_grad", "bool", False))

FORWARD, FORWARD_MAX = Signature(_FORWARD, _RESULTS), Signature(_FORWARD, f"{_RESULTS}, Tensor max")
BACKWARD = Signature((*_batched(*_READ), _DLSE, *_OPTIONS), _GRADIENTS)
CAPTURED_BACKWARD = Signature((*_batched(*_READ), *_LISTS, _DLSE, *_OPTIONS), f"{_GRADIENTS}, Tensor[] dcaptured")
KVCACHE = Signature(
    (*_batched(*_INPUTS), *_LISTS, *_OPTIONS, Argument("return_max", "bool", False)), f"{_RESULTS}, Tensor max"
)
FORWARDS = (FORWARD, FORWARD_MAX)
