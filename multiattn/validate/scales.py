"""Checks of the scales of a cache of 8-bit numbers."""

from __future__ import annotations

from numbers import Real

import torch
from torch.compiler import is_compiling

from multiattn.layout import STORED, STORED_NAMES
from multiattn.plain import plain
from multiattn.validate import as_float, not_a_tensor


def is_stored(cache: object) -> bool:
    """True for a cache of 8-bit numbers."""
    return isinstance(cache, torch.Tensor) and cache.dtype in STORED_NAMES


def scales_of(name: str, given: object, cache: torch.Tensor, seqlens_kv: torch.Tensor) -> torch.Tensor:
    """The scales that a caller gives, as a kernel reads them: ``[B, Hkv]``, or of each token like the rows of `cache`.

    What is broadcast has a stride of 0. TypeError or ValueError, naming what came.
    """
    if not is_stored(cache):
        allowed = f"None for caches of the dtype of q; those of {', '.join(map(str, STORED.values()))} have scales"
        raise ValueError(f"{name}: got a scale for a cache of {cache.dtype}; allowed {allowed}")
    number = plain(given)
    if number is None or (isinstance(number, Real | torch.SymFloat | torch.SymInt) and not isinstance(number, bool)):
        number = 1.0 if number is None else as_float(number, name)
        if not is_compiling() and not abs(number) <= torch.finfo(torch.float32).max:  # else it may be a symbol
            raise ValueError(f"{name} must be finite; got {number}; allowed what fp32 holds")
        given = torch.full((), number, dtype=torch.float32, device=cache.device)
    if not isinstance(given, torch.Tensor):
        raise not_a_tensor(name, given, "a number, a torch.Tensor or None")
    if given.dtype != torch.float32:
        raise TypeError(f"{name}.dtype: got {given.dtype}; allowed torch.float32; call .float() on it")
    if given.device != cache.device:
        raise ValueError(f"{name} must be on the device of q, {cache.device}; got {given.device}")
    heads, rows = (seqlens_kv.shape[0], cache.shape[1]), tuple(cache.shape[:3])
    if given.shape == rows:
        return given
    if given.ndim == 0 or given.shape in ((1,), heads[1:], heads):
        return given.expand(heads)
    allowed = f"one number, ({heads[1]},), {heads}, or {rows} for one of each token and head"
    raise ValueError(f"{name}: got shape {tuple(given.shape)}; allowed {allowed}")
