"""Numbers and bools of NumPy's as Python's own: options are parts of keys, and go to drivers that know no others."""

from __future__ import annotations

import sys
from typing import Any

import torch


def plain(value: Any) -> Any:
    """A number or bool of NumPy's, or one in its array without dimensions, as Python's own; another value as it is."""
    if value is None or isinstance(value, (int, float, torch.Tensor, torch.SymInt, torch.SymFloat)):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and value.shape == ():
        return value.item()
    return value


def as_bool(value: Any, name: str, hint: str, allowed: str = "a bool") -> bool:
    """A bool; TypeError for what is none, with what to do."""
    value = plain(value)
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}; got {type(value).__name__}; {hint}")
    return value
