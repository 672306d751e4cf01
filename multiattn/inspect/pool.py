"""Work in processes that may hang, die or lose the device: each item has a time limit and costs no other's result."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from multiattn import progress

Item = TypeVar("Item")
Result = TypeVar("Result")

START_TIMEOUT_S = 300.0
"""Time for a process to import what it runs, on a machine that is busy with other work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[Item, Result]):
    """The outcome of one item: a result, or an error's text."""

    item: Item
    result: Result | None = None
    error: str = ""


def run_isolated(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    jobs: int,
    timeout_s: float,
    keep: Callable[[], bool] | None = None,
) -> Generator[Outcome[Item, Result], None, None]:
    """Yield the outcome of `function` (a module's own) for each item as it ends, from `jobs` spawned processes.

    Args:
        function: picklable; an exception becomes the outcome's error. Its result is pickled back.
        items: picklable.
        jobs: processes at a time; each serves many items.
        timeout_s: seconds for one item, without the start of its process; then the process is killed.
        keep: picklable; asked in the process after an error: whether it may serve another item. It may if None.
    """
    workers = [_Worker(function, keep) for _ in range(min(jobs, len(items)))]
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def serve(item: Item) -> Outcome[Item, Result]:
        worker = free.get()  # there is one, as there are as many as threads
        outcome = worker.run(item, timeout_s)
        free.put(worker)
        return outcome

    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        served = [threads.submit(serve, item) for item in items]
        try:
            for done in as_completed(served):
                yield done.result()
        finally:
            running = [it for it in served if not it.cancel()]
            while wait(running, timeout=0.1).not_done:  # one may be about to start a process
                for worker in workers:
                    worker.kill()
            for worker in workers:
                worker.kill()


class _Worker:
    """A process that serves items, started for the first and again after each that it does not survive."""

    def __init__(self, function: Callable[[Any], Any], keep: Callable[[], bool] | None) -> None:
        self.work = function, keep
        self.process: Any = None

    def run(self, item: Any, timeout_s: float) -> Outcome[Any, Any]:
        """The outcome of one item."""
        result, error, alive = None, "", False
        what, limit = "its process not ready", START_TIMEOUT_S
        try:
            if self.process is None:
                self._start()
            what, limit = "not done", timeout_s
            self.pipe.send(item)
            result, error, alive = _receive(self.pipe, limit)
        except TimeoutError:
            error = f"{what} within {limit:g} s"
        except (EOFError, OSError):
            if (process := self.process) is not None:  # else it was killed because nobody waits for the outcome
                process.join()
                error = f"the process died with exit code {process.exitcode}"
        except Exception as failure:  # broad: what cannot be pickled, too, is this item's outcome alone
            error = _text(failure)
        if not alive:
            self.kill()
        return Outcome(item=item, result=result, error=error)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *self.work), daemon=True)
        # Inherited: a Ctrl-C at the terminal is for the parent, which kills this one, not for each to tell of.
        resource_tracker.ensure_running()  # its start, which would come with the process's, unblocks the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        _receive(self.pipe, START_TIMEOUT_S)

    def kill(self) -> None:
        """End the process, and with it a compiler that it runs: it leads a process group of its own."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it may not have come so far as to have a group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _receive(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError
    return pipe.recv()


def _serve(pipe: Connection, function: Callable[[Any], Any], keep: Callable[[], bool] | None) -> None:
    os.setpgid(0, 0)
    os.environ.setdefault(progress.VARIABLE, "0")  # the process that waits tells of its items
    pipe.send("ready")  # all that `function` needs is imported: from here on the time is the item's
    while True:
        try:
            item = pipe.recv()
        except EOFError:  # the parent closed its end: no more work
            return
        try:
            pipe.send((function(item), "", True))
        except Exception as error:  # broad: whatever it is, it crosses the pipe as this item's outcome
            pipe.send((None, _text(error), keep is None or keep()))


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
