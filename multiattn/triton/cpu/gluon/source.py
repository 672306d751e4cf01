"""A kernel's source as Python: the same code objects, with this interpreter's language in place of Gluon's."""

from __future__ import annotations

import types
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import KernelInterface

from multiattn.triton.cpu.gluon.language import LANGUAGE, PARTS, modules

_PLACES = "triton.experimental.gluon.language", "triton.language"


class _Module:
    """A module with the names that its functions have here."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


_namespaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
"""By identity of a module's names: these, kept so that no other has it, and the ones here."""


def as_python(function: Any) -> Any:
    """A jitted function as one of Python."""
    plain = function.fn
    return getattr(plain, "__gluon_on_cpu__", None) or _made(plain)


def _made(function: types.FunctionType) -> Any:
    names = _names_of(function.__globals__)
    made = types.FunctionType(
        function.__code__, names, function.__name__, _translated(function.__defaults__), function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__ and {
        name: _translated(it) for name, it in function.__kwdefaults__.items()
    }
    function.__gluon_on_cpu__ = made  # type: ignore[attr-defined]
    return made


def _names_of(names: dict[str, Any]) -> dict[str, Any]:
    """A module's names, each with what stands for it here."""
    if id(names) not in _namespaces:
        copy: dict[str, Any] = {}
        _namespaces[id(names)] = names, copy
        copy.update({name: _translated(it) for name, it in names.items()})
    return _namespaces[id(names)][1]


def _translated(value: Any) -> Any:
    """The value that stands for a global of a kernel's module."""
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, tuple):
        return tuple(map(_translated, value))
    if value is gl or value is tl:
        return LANGUAGE
    if isinstance(value, types.ModuleType):
        return _of_module(value)
    home = getattr(value, "__module__", None) or ""
    if home.startswith(_PLACES) and not isinstance(value, type):
        return _of_language(value, home)
    if isinstance(value, KernelInterface):
        return as_python(value)
    if type(value).__name__ in ("ConstexprFunction", "BoundConstexprFunction") and hasattr(value, "fn"):
        return _made(value.fn)
    return value


def _of_module(module: types.ModuleType) -> Any:
    name = module.__name__
    if name.startswith(_PLACES[0]):
        return modules().get(name.rpartition(".")[2], module)
    if not name.startswith("triton") and any(isinstance(it, KernelInterface) for it in vars(module).values()):
        return _Module(_names_of(vars(module)))
    return module


def _of_language(value: Any, home: str) -> Any:
    """A function of Gluon's, or of Triton's, by its name. One that is not here is Gluon's own, which raises."""
    module = modules().get(home.rpartition(".")[2])
    parts = PARTS if module is None else PARTS | vars(module)
    return parts.get(getattr(value, "__name__", ""), value)
