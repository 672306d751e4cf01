"""FLOP formulas for `torch.utils.flop_counter`, registered when anyone first imports that module.

Importing it here would import Triton where there is one, which importing multiattn promises not to do; and a counter
copies the formulas when it is made, so that registering at the first call would be too late for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}


def register_when_counted(op: Any, formula: Callable[..., int]) -> None:
    """Count `op` by `formula`, which is given the op's arguments with shapes in place of tensors."""
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE], {op: formula})
        return
    if not _formulas:
        sys.meta_path.insert(0, _Watch())
    _formulas[op] = formula


def _register(module: ModuleType, formulas: dict[Any, Callable[..., int]]) -> None:
    for op, formula in formulas.items():
        module.register_flop_formula(op)(formula)


class _Watch(MetaPathFinder):
    """Adds the formulas to the loader of the counter's module when it is imported, then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module, _formulas)
