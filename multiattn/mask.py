"""The mask: which keys a query sees, and how many pairs of a query and a key that makes.

A mask is a band of diagonals, aligned at the bottom right: the last query is level with the last key. With
``offset = Skv - Sq``, query i sees the keys from ``i + offset - left`` to ``i + offset + right``, both included. Causal
is ``right = 0``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from multiattn.plain import as_bool, plain

Kind = Literal["full", "causal", "two_sided"]
Window = tuple[int | None, int | None]
"""Keys before and after its own that a query sees; None is all of them."""


@dataclass(frozen=True, slots=True)
class Band:
    """The keys before (`left`) and after (`right`) its own that a query sees; None is all of them."""

    left: int | None = None
    right: int | None = None

    @property
    def hides_keys(self) -> bool:
        """True for any mask at all."""
        return self.left is not None or self.right is not None

    @property
    def is_two_sided(self) -> bool:
        """True where a kernel needs `left` and `right` as numbers: for any mask but the causal one."""
        return self.hides_keys and (self.left, self.right) != (None, 0)

    @property
    def kind(self) -> Kind:
        """The code that a kernel needs: none, one that knows the diagonal, or one that is given both bounds."""
        if self.is_two_sided:
            return "two_sided"
        return "causal" if self.hides_keys else "full"

    def within(self, seq_q: int, seq_kv: int) -> Band:
        """This mask for such sequences, with None for a bound that hides nothing there; causal stays causal."""
        if not self.is_two_sided:
            return self
        left = None if self.left is None or self.left >= seq_kv - 1 else self.left
        right = None if self.right is None or (self.right >= seq_q - 1 and self.right > 0) else self.right
        return Band(left, right)

    def reach(self, seq_q: int, seq_kv: int) -> tuple[int, int]:
        """`left` and `right` as numbers, at most those that hide no key of such sequences."""
        most_left, most_right = max(seq_kv - 1, 0), max(seq_q - 1, 0)
        left = most_left if self.left is None else min(self.left, most_left)
        right = most_right if self.right is None else min(self.right, most_right)
        return left, right

    def count_pairs(self, seq_q: int, seq_kv: int) -> int:
        """The number of (query, key) pairs of two sequences that the mask leaves."""
        if seq_q <= 0 or seq_kv <= 0:
            return 0
        left, right = self.reach(seq_q, seq_kv)
        return _pairs_below(seq_q, seq_kv, right) - _pairs_below(seq_q, seq_kv, -left - 1)

    def of_rows(self, first: int, last: int, seq_q: int, seq_kv: int) -> tuple[Band, slice]:
        """The mask of the queries [first, last) alone, and the keys that any of them sees: attention of these parts."""
        left, right = self.reach(seq_q, seq_kv)
        level = seq_kv - seq_q  # the key that is level with query 0
        end = min(max(last + level + right, 0), seq_kv)
        begin = min(max(first + level - left, 0), end)
        if begin == end:
            return FULL, slice(0, 0)
        beyond = last + level - end  # how far the last query is level with a key past these: -right or more
        part = Band(None if self.left is None else left - beyond, None if self.right is None else right + beyond)
        return part, slice(begin, end)

    @property
    def window(self) -> Window:
        """The bounds as a caller gives them."""
        return self.left, self.right

    def visible(self, seq_q: int, seq_kv: int, device: torch.device) -> torch.Tensor:
        """The keys that each query sees: bool ``[Sq, Skv]``. The one definition of the mask outside the kernels."""
        left, right = self.reach(seq_q, seq_kv)
        level = torch.arange(seq_q, device=device)[:, None] + (seq_kv - seq_q)
        key = torch.arange(seq_kv, device=device)[None, :]
        return (key >= level - left) & (key <= level + right)

    def __str__(self) -> str:
        """``full``, ``causal``, or ``window:1024:0`` with ``-`` for all keys of a side."""
        if not self.is_two_sided:
            return self.kind
        return ":".join(("window", *("-" if bound is None else str(bound) for bound in (self.left, self.right))))


FULL, CAUSAL = Band(), Band(right=0)
MASKS = ("full", "causal")
"""Names of the masks that have no number."""
KINDS: tuple[Kind, ...] = ("full", "causal", "two_sided")


def parse_band(text: str) -> Band:
    """The band whose string this is; ValueError for another text."""
    if text in MASKS:
        return CAUSAL if text == str(CAUSAL) else FULL
    word, *bounds = text.split(":")
    if word != "window" or len(bounds) != 2 or not all(it == "-" or it.isdecimal() for it in bounds):
        raise ValueError(f"mask: got {text!r}; allowed {', '.join(MASKS)}, or window:LEFT:RIGHT with - for all keys")
    left, right = (None if it == "-" else int(it) for it in bounds)
    return Band(left, right)


def band_of(causal: bool, window: Window | None) -> Band:
    """The band that a caller asks for; TypeError or ValueError, naming what came.

    `causal` bounds a window on the right.
    """
    hint = "a mask is bias or block_mask" if isinstance(causal, torch.Tensor) else "give True or False"
    causal = as_bool(causal, "causal", hint)
    if window is None:
        return CAUSAL if causal else FULL
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        n = window if isinstance(window, int) and not isinstance(window, bool) else "n"
        hint = f"the last {n} keys up to the query's own are window=({n} - 1, 0)"
        raise TypeError(f"window must be a pair (left, right) or None; got {window!r}; {hint}")
    left, right = (_bound(name, value) for name, value in zip(("left", "right"), window, strict=True))
    return Band(left, 0 if causal else right)


def _bound(name: str, value: Any) -> int | None:
    """A bound of a window, or None; a traced one stays what it is."""
    value = plain(value)
    if value is None or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]  # stands for an int until the graph runs
    is_int = isinstance(value, int) or hasattr(value, "__index__")  # Dynamo knows only the former of an int that varies
    if isinstance(value, bool) or not is_int:
        raise TypeError(f"window's {name} must be an int or None; got {type(value).__name__}; round it by int()")
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"window's {name}: got {number}; allowed 0 and more, and None for all keys of that side")
    return number


def _pairs_below(seq_q: int, seq_kv: int, right: int) -> int:
    """The number of pairs with ``key <= query + offset + right``, of two sequences with at least one each."""
    seen_by_first = seq_kv - seq_q + right + 1  # of query i, this and i more, but none below 0 or beyond seq_kv
    start = min(max(0, -seen_by_first), seq_q)  # queries before it see no key
    whole = min(max(start, seq_kv - seen_by_first), seq_q)  # from it on they see all
    rows = whole - start
    return rows * (seen_by_first + start) + rows * (rows - 1) // 2 + (seq_q - whole) * seq_kv
