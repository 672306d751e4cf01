"""Bars of long commands, whose estimate is told when enough is known for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    _Bar = tqdm[Any]
else:
    _Bar = tqdm

UNKNOWN = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""The form of a bar that knows no rate yet."""
LEAST = 4
"""As many items, and a twentieth of all, are needed to tell a rate."""


class Bar(_Bar):
    """tqdm's, but for the rate: items after the first over the time since then.

    The first one waits for processes to start and for compilers, and says nothing of the others; and one or two others
    say little where some items take a hundred times as long as others.
    """

    _first: tuple[int, float] | None = None
    """How many items were done when any was, and the seconds until then."""

    @property
    def format_dict(self) -> dict[str, Any]:
        """The numbers that are shown."""
        found: dict[str, Any] = dict(super().format_dict)
        done, seconds = found["n"], found["elapsed"]
        if done and self._first is None:
            self._first = done, seconds
        first, since = self._first or (0, 0.0)
        if done - first < max(LEAST, (found["total"] or 0) // 20) or seconds <= since:
            return found | {"bar_format": UNKNOWN if found["total"] else None}
        return found | {"rate": (done - first) / (seconds - since)}

    def update(self, n: float | None = 1) -> bool | None:
        """Count items, and remember when the first was done, though nothing may be drawn then."""
        shown = super().update(n)
        if self._first is None and self.n and not self.disable:
            self.format_dict  # noqa: B018 - it remembers
        return shown
