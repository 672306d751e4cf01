"""Warnings that a process gives once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

_told: set[str] = set()


def warn_once(message: str, kinds: Iterable[str] = ()) -> None:
    """A UserWarning, the first time that one of these kinds comes; without any, this message."""
    new = set(kinds or (message,)) - _told
    if new:
        _told.update(new)
        warnings.warn(f"multiattn: {message}", UserWarning, stacklevel=3)


warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # so the call that compiles a graph warns
