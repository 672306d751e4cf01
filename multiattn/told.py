"""Warnings that a process gives once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

_BETWEEN = frozenset(("multiattn", "torch"))
_told: set[str] = set()


def warn_once(message: str, kinds: Iterable[str] = ()) -> None:
    """A UserWarning of the caller's line, the first time that one of these kinds comes; without any, this message."""
    new = set(kinds or (message,)) - _told
    if new:
        _told.update(new)
        warnings.warn(f"multiattn: {message}", UserWarning, stacklevel=_callers_level())


warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # so the call that compiles a graph warns


def _callers_level() -> int:
    """The `stacklevel`, from `warn_once`, of the first frame that is neither ours nor PyTorch's."""
    frame, level = sys._getframe(1), 1  # code of a graph has no name
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level
