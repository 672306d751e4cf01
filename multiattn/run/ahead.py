"""Compiles the kernels of a backward in a thread of their own, while those of its forward are being compiled.

A call that needs a gradient compiles twice: in its forward, and later in its backward. Most of both is compilers that
hold no lock of Python's, so on a host with cores to spare (`CORES`) the second costs little beside the first. What is
Python's of the forward goes first: a backend says when that is done (`begin`).

Nothing is lost by it. The thread only fills the caches that the backward looks into. Whatever goes wrong in it is told
by the backward that needs the kernels, which compiles again. The thread asks nothing of CUDA, whose capture of a graph
it might break. An interpreter that ends waits for it, as compilers cannot be stopped in their midst.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

Task = Callable[[], None]

CORES = 4
"""Fewest cores that a process must have: with fewer the compilers of the forward wait for those of the backward."""


class Ahead:
    """Something done ahead, in a thread, of which only the effects count."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._claim = threading.Lock()
        """Taken for good by the first who comes to it, the thread or the call."""
        self._thread = threading.Thread(target=self._run, name="multiattn compiles ahead")

    def start(self) -> None:
        """Start it. No error: once started it is not started again, and an interpreter that ends starts no thread."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def wait(self) -> None:
        """Wait until it is done, if it is under way; else it is not begun any more, as the caller does it now."""
        if not self._claim.acquire(blocking=False) and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(Exception), _turn.taken():
            if self._claim.acquire(blocking=False):
                self._task()


class _Turn:
    """One at a time, else they would take cores from each other. A forked child begins anew: none of them is in it."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def taken(self) -> threading.Lock:
        return self._lock


_turn = _Turn()
_waiting: list[Ahead] = []
"""They begin as soon as a forward's Python is done. Any forward's will do."""


@contextlib.contextmanager
def following(ahead: Ahead | None) -> Iterator[None]:
    """Start `ahead` when what is done here calls `begin`, or else at its end; not if it fails."""
    if ahead is None or _cores() < CORES:
        yield
        return
    _waiting.append(ahead)
    try:
        yield
    except BaseException:
        with contextlib.suppress(ValueError):  # it has begun
            _waiting.remove(ahead)
        raise
    begin()


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def begin() -> None:
    """Start what waits: from here on the compilation of this thread is hardly Python's."""
    while _waiting:
        with contextlib.suppress(IndexError):  # another thread took it
            _waiting.pop().start()
