"""Work in processes that may hang, die or lose the device: each item has a time limit and costs no other's result."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

LONGEST_POLL_S = 1.0
READY = "ready"  # what a process says first; an outcome is a tuple
START_TIMEOUT_S = 300.0
"""For a process to import what it runs, on a machine that has much else to do."""


def _always() -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[Item, Result]):
    """What came of one item: a result, or an error's text; and the seconds it took."""

    item: Item
    seconds: float
    result: Result | None = None
    error: str = ""


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    """Leads a process group of its own."""
    pipe: Connection
    index: int | None = None
    ready: bool = False
    """Its modules are imported: from then on the time is its item's."""
    since: float = 0.0
    """When that began; before, when the process did."""


def run_isolated(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    jobs: int,
    timeout_s: float,
    keep: Callable[[], bool] = _always,
) -> Iterator[Outcome[Item, Result]]:
    """Yield the outcome of `function` (a module's own) of each item as it ends, from `jobs` spawned processes.

    Args:
        function: picklable; what it raises is the outcome's error. Its result is pickled back.
        items: picklable.
        jobs: processes at a time; each serves many items.
        timeout_s: seconds one item may take, start of its process not included; then that process is killed.
        keep: picklable; asked in the process after an error: whether it may serve another item.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(range(len(items)))[::-1]
    workers: list[_Worker] = []

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, function, keep), daemon=True)
        process.start()
        theirs.close()
        workers.append(_Worker(process, ours))

    def retire(worker: _Worker) -> None:
        workers.remove(worker)
        worker.pipe.close()
        assert worker.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may not have come so far as to have a group
            os.killpg(worker.process.pid, signal.SIGKILL)  # a compiler that it runs goes with it
        worker.process.kill()
        worker.process.join()

    try:
        while waiting or any(worker.index is not None for worker in workers):
            while len(workers) < min(jobs, len(waiting) + len(workers)) and waiting:
                start()
                _assign(workers[-1], waiting, items)
            for worker in workers:
                if worker.index is None and waiting:
                    _assign(worker, waiting, items)
            busy = [worker for worker in workers if worker.index is not None]
            wait([worker.pipe for worker in busy], timeout=_patience(busy, timeout_s))
            for worker in busy:
                outcome, alive = _collect(worker, items, timeout_s)
                if not alive:
                    retire(worker)
                if outcome is not None:
                    yield outcome
    finally:
        while workers:
            retire(workers[-1])


def _assign(worker: _Worker, waiting: list[int], items: Sequence[Any]) -> None:
    worker.index = waiting.pop()
    worker.since = time.monotonic()
    worker.pipe.send(items[worker.index])


def _limit(worker: _Worker, timeout_s: float) -> float:
    return timeout_s if worker.ready else START_TIMEOUT_S


def _patience(busy: Sequence[_Worker], timeout_s: float) -> float:
    left = min(worker.since + _limit(worker, timeout_s) for worker in busy) - time.monotonic()
    return min(max(left, 0.0), LONGEST_POLL_S)


def _collect(worker: _Worker, items: Sequence[Any], timeout_s: float) -> tuple[Outcome[Any, Any] | None, bool]:
    """The outcome of a worker's item if it has ended, and whether the worker may go on."""
    assert worker.index is not None
    item, seconds = items[worker.index], time.monotonic() - worker.since
    if worker.pipe.poll():
        try:
            message = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            died = f"the process died with exit code {worker.process.exitcode}"
            return Outcome(item=item, seconds=seconds, error=died), False
        if message == READY:
            worker.ready, worker.since = True, time.monotonic()
            return None, True
        worker.index = None
        result, error, alive = message
        return Outcome(item=item, seconds=seconds, result=result, error=error), alive
    if seconds > _limit(worker, timeout_s):
        what = "not done" if worker.ready else "its process not ready"
        return Outcome(item=item, seconds=seconds, error=f"{what} within {_limit(worker, timeout_s):g} s"), False
    return None, True


def _serve(pipe: Connection, function: Callable[[Any], Any], keep: Callable[[], bool]) -> None:
    os.setpgid(0, 0)
    pipe.send(READY)
    while True:
        try:
            item = pipe.recv()
        except EOFError:  # the parent closed its end: no more work
            return
        try:
            pipe.send((function(item), "", True))
        except Exception as error:  # broad: whatever it is, it crosses the pipe as this item's outcome
            pipe.send((None, "".join(traceback.format_exception_only(error)).strip(), keep()))
