"""Compiles the kernels of a backward in a thread of their own, while those of its forward are being compiled.

A call that needs a gradient compiles twice: in its forward, and later in its backward. Most of both is compilers that
hold no lock of Python's, so on a host with cores to spare (`CORES`) the second costs little beside the first. What is
Python's of the forward goes first: a backend says when that is done (`begin`).

The thread only fills the caches that the backward looks into, and asks nothing of CUDA, whose capture of a graph it
might break. Whatever goes wrong in it is told by the backward that needs the kernels, which compiles again. It has its
price: a backward that never runs was compiled for nothing, and a process that ends or forks waits for what is under
way, as compilers cannot be stopped in their midst. `SWITCH` turns it off.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from multiattn.progress import LongWork

Task = Callable[[], None]

SWITCH = "MULTIATTN_COMPILE_AHEAD"
"""An environment variable: with 0 nothing is compiled ahead."""
CORES = 4
"""Fewest cores that a process must have: with fewer the compilers of the forward wait for those of the backward. A
guess; a container's quota of their time is not seen."""


class Ahead:
    """Something done ahead, in a thread, of which only the effects count."""

    def __init__(self, task: Task, *, takes_turn: bool = True) -> None:
        """Without `takes_turn` it is done beside others, which may wait for it."""
        self._task = task
        self._takes_turn = takes_turn
        self._claim = threading.Lock()
        """Taken for good by the first who comes to it, the thread or a call."""
        self._is_in_thread = False
        self._thread = threading.Thread(target=self._run, name="multiattn compiles ahead")

    def start(self) -> None:
        """Start it. No error: once started it is not started again, and an interpreter that ends starts no thread."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def wait(self) -> None:
        """Wait until it is done, if the thread does it; else it is not begun any more, as the caller does it now."""
        if not self._claim.acquire(blocking=False) and self._is_in_thread and self._thread.is_alive():
            with LongWork("waiting for a thread that compiles", kind="waiting"):
                self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(Exception), _turn.taken() if self._takes_turn else contextlib.nullcontext():
            self._is_in_thread = True  # first: who finds it claimed must know by whom
            if self._claim.acquire(blocking=False):
                self._task()
            else:
                self._is_in_thread = False


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
    if ahead is None or _cores() < CORES or os.environ.get(SWITCH) == "0":
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
