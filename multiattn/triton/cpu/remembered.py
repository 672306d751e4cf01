"""Work that Triton's interpreter does anew for every value, done once: a sixth of its time with small blocks.

Each function stands for one of Triton's, and asks that for what it has not seen yet. Values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_Function = Callable[..., Any]


def storages(original: _Function) -> _Function:
    """NumPy's dtype of a type; Triton makes a table of all to look one up."""
    known: dict[str, Any] = {}

    def storage(dtype: Any) -> Any:
        element = dtype.scalar
        if element.is_ptr():
            return original(dtype)
        if element.name not in known:
            known[element.name] = original(element)
        return known[element.name]

    return storage


def tensors(original: _Function) -> _Function:
    """``tensor.__init__``: a shape of constants by a type's shape."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make(self: Any, handle: Any, type: Any) -> None:
        extents = type.shape if type.is_block() else ()
        if extents not in known:
            original(self, handle, type)
            if vars(self).keys() == {"handle", "shape", "numel", "type", "dtype"}:  # in all releases so far
                known[extents] = self.shape, self.numel
            return
        self.shape, self.numel = known[extents]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return make


def block_types(original: _Function) -> _Function:
    """``block_type.__init__``: a checked shape, its size and the type's name, by element and shape."""
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        if element_ty.is_ptr() or any(type(extent) is not int for extent in shape):
            original(self, element_ty, shape)
            return
        key = element_ty.name, tuple(shape)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    return make


REPLACEMENTS = tuple(
    (owner, name, replaces(getattr(owner, name)))
    for owner, name, replaces in (
        (interpreter, "_get_np_dtype", storages),
        (tl.core.tensor, "__init__", tensors),
        (tl.core.block_type, "__init__", block_types),
    )
)
"""Owner, name and function, to set while a kernel is interpreted."""
