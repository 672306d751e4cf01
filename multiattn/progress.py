"""Tells a caller who waits: after two seconds a line of the logger ``multiattn``, in a terminal a bar, and a last line.

    with LongWork("reading a book", kind="reading", total=len(pages), unit="page") as work:
        for page in work.over(pages):
            ...

The first work of its kind in a process is told by warnings, which Python shows by default, and later ones at the level
INFO. ``logging.getLogger("multiattn").setLevel(logging.ERROR)`` silences all of it. ``MULTIATTN_PROGRESS=1`` draws bars
where stderr is no terminal, too, and 0 turns off lines and bars.

A thread of its own watches each work: so a single long step is told, too, and the work itself only counts. That costs
as much as starting a thread, so nothing that a call on a GPU does where its kernels are known is work in this sense.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

VARIABLE = "MULTIATTN_PROGRESS"
ALLOWED = ("0", "1")
DELAY_S = 2.0
"""Work that is done within this time is not told."""
REDRAW_S = 0.2
PATIENCE_S = 2.0
"""Work waits as long for its last line, which a handler of the caller's may hold up."""

log = logging.getLogger("multiattn")

T = TypeVar("T")

_told: set[str] = set()
"""Kinds of work that this process has told."""


class LongWork:
    """Work that may take long, watched while it is current; `total` 0 is work without steps."""

    def __init__(
        self,
        what: str,
        *,
        kind: str,
        total: int = 0,
        unit: str = "step",
        note: str = "",
        count: Callable[[], int] | None = None,
    ) -> None:
        """`what` begins the lines, `note` ends the first one; `count` tells the steps done, if not `over`."""
        self._what = what
        self._kind = kind
        self._total = total
        self._unit = unit
        self._note = note
        self._count = count
        self._done = 0
        self._failed = False
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="multiattn tells progress", daemon=True)
        self._setting = ""
        self._begin = 0.0

    def __enter__(self) -> LongWork:
        self._setting = _setting()
        self._begin = time.monotonic()
        if self._setting != "0":
            with contextlib.suppress(RuntimeError):  # an interpreter that ends starts no thread
                self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self._ended.set()
        if self._watcher.ident is not None and self._seconds() > DELAY_S:
            self._watcher.join(PATIENCE_S)  # what the caller prints next comes after the last line

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each of which is a step of this work."""
        for item in items:
            yield item
            self._done += 1

    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def _steps(self) -> int:
        return self._count() if self._count is not None else self._done

    def _watch(self) -> None:
        """In the thread: tell what has not ended after `DELAY_S`."""
        if self._ended.wait(DELAY_S):
            return
        level = logging.INFO if self._kind in _told else logging.WARNING
        _told.add(self._kind)
        log.log(level, "%s", self._first_line())
        if self._total and self._draws(level):
            with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more, or it is closed
                self._draw()
        self._ended.wait()
        outcome = "failed after" if self._failed else "done in"
        log.log(level, "multiattn: %s: %s %.1f s", self._what, outcome, self._seconds())

    def _first_line(self) -> str:
        done, seconds = self._steps(), self._seconds()
        told = f"{seconds:.0f} s so far"
        if self._total:
            told = f"{done} of {self._total} {self._unit}s in {seconds:.0f} s"
        if done:
            told += f", about {seconds / done * self._total:.0f} s in all"
        return f"multiattn: {self._what}: {told}" + (f"; {self._note}" if self._note else "")

    def _draws(self, level: int) -> bool:
        """A bar is drawn where somebody asked for it, or sees it and has not silenced the logger."""
        if self._setting == "1":
            return sys.stderr is not None
        return _is_seen() and log.isEnabledFor(max(level, logging.WARNING))

    def _draw(self) -> None:
        """A bar of the steps until the work ends."""
        from tqdm import tqdm

        # The delay, however short, keeps it from being drawn before it knows how far the work is.
        words = functools.partial(tqdm, desc=self._what, unit=self._unit, leave=False)
        with words(total=self._total, file=sys.stderr, smoothing=0, delay=1e-9) as bar:
            bar.start_t -= self._seconds()
            while not self._ended.wait(REDRAW_S):
                bar.n = self._steps()
                bar.refresh()


NOTE = "for truth, not for speed"
"""Said of every kernel that runs on a CPU."""


def interpreting(what: str, total: int, *, unit: str = "program") -> LongWork:
    """The work of running `what`, a kernel, on the CPU, in so many steps."""
    return LongWork(f"interpreting {what} on the CPU", kind=f"interpreting {what}", total=total, unit=unit, note=NOTE)


def compiling(language: str, target: str) -> LongWork:
    """The work of compiling kernels of a language for an arch, unless the compiler's own cache has them."""
    note = "the first call does it, later ones do not"
    return LongWork(f"compiling {language} kernels for {target}", kind=f"compiling {language}", note=note)


def _is_seen() -> bool:
    """True where stderr is a terminal; a program may have none, a closed one, or what knows nothing of terminals."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _setting() -> str:
    value = os.environ.get(VARIABLE, "")
    if value and value not in ALLOWED:
        raise ValueError(f"{VARIABLE}: got {value!r}; allowed {', '.join(ALLOWED)}, or unset")
    return value
