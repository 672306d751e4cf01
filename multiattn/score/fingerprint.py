"""Everything that a callable depends on, so that one that was traced before need not be traced again.

Tensors count by what a trace can see of them (dtype, shape, device) and by which of them are one object; everything
else by its value. A callable that holds anything else, or reaches what cannot be followed, has no fingerprint, and is
traced at each call: a stale trace would be a wrong result.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch

_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
_MODULES = frozenset({"builtins", "math", "operator", "_operator", "torch"})
"""Modules, with what is in them, whose attributes are taken to stay what they are."""
_BLIND = frozenset({"__import__", "eval", "exec", "getattr", "globals", "locals", "open", "vars"})
"""Builtins that reach what the code does not name."""
_OUTLIVE = frozenset(
    {"IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"}
)
"""Instructions that bring what is not in the code, or change what outlives a call."""
_EMPTY = ("an empty cell",)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class UnknownError(Exception):
    """A callable depends on something that cannot be compared."""


class Fingerprint:
    """Collects the parts of a key, and the tensors that callables hold, each once, in the order in which they come."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._visited: dict[int, int] = {}
        self._parts: list[Hashable] = []

    @property
    def key(self) -> Hashable:
        """Equal for what gives equal traces. It holds code, but no tensor."""
        return tuple(self._parts)

    def add(self, value: Any) -> None:
        """Raises `UnknownError` for what cannot be compared; a key that lacks a part must not be used."""
        if id(value) in self._visited:
            self._parts.append(("again", self._visited[id(value)]))
        elif type(value) in _TENSORS and not vars(value):
            self._visit(value)
            self.tensors.append(value)
            self._parts.append((value.dtype, value.shape, value.stride(), value.device, value.requires_grad))
        elif type(value) is float:
            self._parts.append((float, value.hex()))  # NaN is itself, -0.0 not 0.0
        elif type(value) in _PLAIN:
            self._parts.append((type(value), value))
        elif type(value) is tuple:
            self._parts.append(len(value))
            self._add_all(value)
        elif type(value) is types.FunctionType:
            self._visit(value)
            self._add_function(value)
        elif type(value) is functools.partial and not vars(value):
            self._visit(value)
            self._parts.append((functools.partial, len(value.args), *value.keywords))
            self._add_all((value.func, *value.args, *value.keywords.values()))
        elif _is_fixed(value):
            self._parts.append(value)
        else:
            raise UnknownError(type(value))

    def _visit(self, value: Any) -> None:
        self._visited[id(value)] = len(self._visited)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _add_function(self, function: types.FunctionType) -> None:
        """Its code, and the values of what the code names: defaults, cells of its closure, globals."""
        if vars(function):
            raise UnknownError("attributes of a function")
        names = _globals_of(function.__code__)
        self._parts.append(function.__code__)
        self.add(function.__defaults__)
        for name, default in sorted((function.__kwdefaults__ or {}).items()):
            self._parts.append(name)
            self.add(default)
        for cell in function.__closure__ or ():
            self.add(_EMPTY if _is_empty(cell) else cell.cell_contents)
        if _is_trusted(function.__module__):
            return
        for name in names:
            if name in function.__globals__:
                self._parts.append(name)
                self.add(function.__globals__[name])
            elif not hasattr(builtins, name) or name in _BLIND:
                raise UnknownError(name)


def _is_empty(cell: types.CellType) -> bool:
    """True while the variable has no value yet, as one that a function sets later."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _is_trusted(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _MODULES


def _is_fixed(value: Any) -> bool:
    """True for a module or a function of PyTorch's or Python's, and for a type of theirs."""
    if isinstance(value, types.ModuleType):
        return _is_trusted(value.__name__)
    if isinstance(value, types.BuiltinFunctionType):  # with a `self` of its own it may be a method of anything
        return value.__self__ is None or _is_fixed(value.__self__)
    return isinstance(value, type) and _is_trusted(value.__module__)


@functools.lru_cache(maxsize=256)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code loads, that of functions within it included.

    Raises `UnknownError` for code that imports, or that changes what outlives it.
    """
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[value] = None
        elif name in _OUTLIVE or (name in ("STORE_DEREF", "DELETE_DEREF") and value in code.co_freevars):
            raise UnknownError(name)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_globals_of(constant))
    return tuple(names)
