"""`LazyMask`: a mask of transformers that is told in few numbers, and is the whole mask to whoever touches it.

To everybody else it is the mask that transformers makes for its eager attention: ``[B, 1, Sq, Skv]``, 0 where a query
sees a key and the lowest number of the dtype where it does not. Models reshape masks, index them, join them with
others or add them to scores. Each such operation gets the whole mask, made at that moment. `attend` alone reads what
the mask means, so a mask that nobody touches costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

Kind = Literal["padding", "lengths", "packed", "visible"]
_aten = torch.ops.aten
_SHARED = frozenset((_aten.detach.default, _aten.alias.default))
_KEPT = _SHARED | {_aten.clone.default, _aten._to_copy.default}
"""Operations whose result is a LazyMask again; those of `_SHARED` give another name to its memory."""


class LazyMask(torch.Tensor):
    """A mask ``[B, 1, Sq, Skv]`` that one tensor and three properties tell.

    Attributes:
        told: What `kind` says of it.

            - ``"padding"``: bool ``[B, n]``, true for tokens, of the first n keys. With no row, ``[0, n]``, nothing is
              padding. Keys behind them are unused places of a static cache. Queries are the last Sq of the n places
              where the mask is causal or has a window.
            - ``"lengths"``: int32 ``[B]``, the used keys of each sequence in a static cache; queries are the last. Or
              ``[B, 1 + Skv]``: behind that number 1 for each key that is a token, and 0 for padding.
            - ``"packed"``: int32 ``[longest, N + 1]``, the same in every row: ``cu_seqlens`` of the N sequences that
              the batch packs, row after row.
            - ``"visible"``: bool ``[B, 1, Sq, Skv]``, the mask itself.
        kind: See `told`.
        causal: Keys behind a query are hidden. For ``"visible"``, which tells everything, it is true of a compiled
            function's mask that is causal, but for packing, and false of all others.
        window: How many keys a query sees to its left, its own among them, and as many to its right where the mask is
            not causal. None is no window.
    """

    told: torch.Tensor
    kind: Kind
    causal: bool
    window: int | None
    packing: tuple[torch.Tensor, LazyMask | None] | None
    """Positions that `attend` has read, and the mask of the sequences that they pack; None if they pack none."""
    _made: list[torch.Tensor]
    """The whole mask, once it is made; one list for a mask and all that share its memory, as views of it do."""

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[LazyMask],
        told: torch.Tensor,
        kind: Kind,
        causal: bool,
        window: int | None,
        size: Sequence[int],
        dtype: torch.dtype,
    ) -> LazyMask:
        with torch.inference_mode(False):  # a tensor that counts the writes to it and to its views
            mask: LazyMask = torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype, device=told.device)
        mask.told, mask.kind, mask.causal, mask.window = told, kind, causal, window
        mask.packing, mask._made = None, []
        return mask

    def __init__(self, *args: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        band = f"causal={self.causal}, window={self.window}"
        return f"LazyMask({self.kind}, {band}, size={list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        if self.written is not None:
            raise NotImplementedError(
                "attention_mask: got one that was written to in place, for a compiled function; allowed a new tensor, "
                "such as attention_mask.clone()"
            )
        return ["told"], (self.kind, self.causal, self.window, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], size: Sequence[int], stride: Sequence[int]
    ) -> LazyMask:
        kind, causal, window, dtype = context
        return LazyMask(inner["told"], kind, causal, window, size, dtype)

    @property
    def written(self) -> torch.Tensor | None:
        """The whole mask if somebody has written to it, through a view or in place; else None."""
        return self._made[0] if self._version and self._made else None

    def visible(self) -> torch.Tensor:
        """The mask as bools ``[B, 1, Sq, Skv]``, true where a query sees a key."""
        if self.kind == "visible":
            return self.told
        batch, _, seq_q, seq_kv = self.shape
        device = self.told.device
        rows, keys = torch.arange(seq_q, device=device)[:, None], torch.arange(seq_kv, device=device)
        if self.kind == "packed":
            places = torch.arange(batch * seq_q, dtype=torch.int32, device=device)
            sequences = torch.searchsorted(self.told[0].contiguous(), places, right=True).view(batch, 1, seq_q)
            seen = sequences[..., :, None] == sequences[..., None, :]
            seen = torch.nn.functional.pad(seen, (0, seq_kv - seq_q))
        elif self.kind == "lengths":
            lengths, tokens = lengths_of(self.told)
            rows = rows + (lengths - seq_q)[:, None, None, None]
            seen = (keys <= rows).expand(batch, 1, seq_q, seq_kv)
            seen = seen if tokens is None else seen & tokens
        else:
            count = self.told.shape[1]
            rows = rows + (count - seq_q)
            seen = (keys < count).expand(batch, 1, seq_q, seq_kv)
            if self.told.shape[0]:
                seen = seen & torch.nn.functional.pad(self.told, (0, seq_kv - count))[:, None, None]
        if self.causal:
            seen = seen & (keys <= rows)
        if self.window is not None:
            behind = rows - keys
            seen = seen & ((behind if self.causal else behind.abs()) < self.window)
        return seen

    def whole(self) -> torch.Tensor:
        """The mask as eager attention adds it; made once, but for a compiled function."""
        if self._made:
            return self._made[0]
        with torch.inference_mode(False):
            zero = torch.zeros((), dtype=self.dtype, device=self.told.device)
            whole = torch.where(self.visible(), zero, torch.finfo(self.dtype).min)
        if type(self.told) is torch.Tensor:
            self._made.append(whole)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose() and torch.is_inference_mode_enabled():  # as it is in other modes before it comes here
            return func.decompose(*args, **kwargs)
        first = args[0] if args else None
        if type(first) is LazyMask and first.written is None:
            dtype = kwargs.get("dtype") or first.dtype
            if func in _KEPT and dtype.is_floating_point:
                options = {name: it for name, it in kwargs.items() if name in ("device", "non_blocking")}
                told = func(first.told, **options)
                kept = LazyMask(told, first.kind, first.causal, first.window, first.shape, dtype)
                if func in _SHARED:
                    kept._made = first._made
                return kept
            if func is _aten.slice.Tensor and _is_all(first, *args[1:], **kwargs):
                return first
        if func._schema.is_mutable and type(first) is LazyMask and type(first.told) is not torch.Tensor:
            raise NotImplementedError(
                f"{func}: a compiled function writes to the attention mask that multiattn made; allowed operations "
                "that make a new tensor, such as mask + 0"
            )
        args, kwargs = tree_map_only(LazyMask, LazyMask.whole, (args, kwargs))
        if type(first) is not LazyMask:
            return func(*args, **kwargs)
        with torch.inference_mode(False):  # views that count writes
            result = func(*args, **kwargs)
        return first if func._schema.is_mutable else result


def _is_all(mask: LazyMask, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    """True for a slice of everything."""
    return not start and step == 1 and (end is None or end >= mask.shape[dim])


def lengths_of(told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The lengths ``[B]`` of a mask of them, and its tokens as bools ``[B, 1, 1, Skv]``, None without padding."""
    if told.ndim == 1:
        return told, None
    return told[:, 0].contiguous(), told[:, 1:].to(torch.bool)[:, None, None]


def _lazy_mask(
    told: torch.Tensor, kind: Kind, causal: bool, window: int | None, size: tuple[int, ...], dtype: torch.dtype
) -> LazyMask:
    return LazyMask(told, kind, causal, window, size, dtype)


lazy_mask: Callable[..., LazyMask] = torch.compiler.allow_in_graph(_lazy_mask)
"""A LazyMask, whose arguments it takes, also in a compiled function."""
