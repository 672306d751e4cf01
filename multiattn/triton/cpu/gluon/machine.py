"""One block of threads: its partitions, each a thread of Python of which one runs at a time, and who waits for what.

A partition runs until it waits. Then another one does, in turn or as a seed says; what TMA has under way lands as late
as it can, or as the seed says. Whatever the order, clocks tell what is ordered by barriers and what is so by chance:
each partition counts its own steps and remembers how far it has seen the others, and the phases of each mbarrier.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multiattn.triton.cpu.gluon.errors import DeadlockError, GluonError, here

Clock = dict[Any, int]
"""By partition and by mbarrier: how many of its steps, or of its phases, were seen."""


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` have seen all that `other` has."""
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


class Partition:
    """Warps that run one function."""

    weight: int | None = None

    def __init__(self, name: str, warps: int, clock: Clock) -> None:
        self.name, self.warps = name, warps
        self.clock = {**clock, self: 1}
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ready: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        """Says for what, and where."""
        self.products: list[Any] = []
        """Products of wgmma that are under way."""
        self.stores: list[Any] = []
        """Stores of TMA that are under way."""

    @property
    def now(self) -> int:
        """The step that it is at."""
        return self.clock[self]

    def release(self, clock: Clock) -> None:
        """All that it did so far is seen by those who see `clock`."""
        join(clock, self.clock)
        self.clock[self] += 1

    def can_run(self) -> bool:
        """True unless it waits for what is not there yet."""
        return self.ready is None or self.ready()

    def check_done(self) -> None:
        """GluonError where something that reads its memory or writes its registers is still under way."""
        if self.products:
            raise GluonError(f"{self.name} ends with {len(self.products)} products under way")
        if self.stores:
            raise GluonError(f"{self.name} ends while TMA may still read shared memory: no tma.store_wait(0)")


class _Abandoned(BaseException):
    """The end of a thread whose block failed elsewhere."""


class Machine:
    """A block of threads while it runs."""

    def __init__(self, program: int, programs: int, warps: int, seed: int | None = None) -> None:
        self.program, self.programs = program, programs
        self.random = None if seed is None else random.Random(f"{seed} {program}")
        self.current = Partition("the kernel", warps, {})
        self.partitions = [self.current]
        self.in_flight: list[Any] = []
        """Loads by TMA that have not landed; each has `land` and `weight`."""
        self.unfenced: list[Any] = []
        """Writes to shared memory that TMA and wgmma cannot see yet."""
        self.memories: list[Any] = []
        """The tensors that the kernel was given."""
        self.numbers = itertools.count()
        self.failure: BaseException | None = None

    # ------------------------------------------------------------ waiting

    def wait(self, ready: Callable[[], bool], waits: Callable[[], str]) -> None:
        """The current partition goes on once `ready()`; `waits` says what for."""
        me = self.current
        if self.random is None and ready():
            return
        place = here()
        me.ready, me.waits_for = ready, lambda: f"{waits()} [at {place}]"
        self._switch(me)
        me.ready = None

    def step(self) -> None:
        """Where others may see something new: with a seed another partition may go on here."""
        if self.random is not None and self.random.random() < 0.5:
            self._switch(self.current)

    def _switch(self, me: Partition) -> None:
        chosen = self._choose(me)
        if chosen is not me:
            self._hand_to(chosen)
            self._await_baton(me)

    def _hand_to(self, partition: Partition) -> None:
        self.current = partition
        partition.baton.release()

    def _await_baton(self, me: Partition) -> None:
        me.baton.acquire()
        if self.failure is not None:
            raise _Abandoned

    def _choose(self, me: Partition) -> Partition:
        """The partition that goes on; what is under way may land before."""
        while True:
            start = self.partitions.index(me) + 1 if me in self.partitions else 0
            in_turn = self.partitions[start:] + self.partitions[:start]
            able = [it for it in in_turn if it.can_run()]
            if self.random is not None:
                events = [*able, *self.in_flight]
                if not events:
                    raise DeadlockError(self._deadlock())
                event = self.random.choices(events, [self._weight(it) for it in events])[0]
            elif able:
                return able[0]
            elif self.in_flight:
                event = self.in_flight[0]
            else:
                raise DeadlockError(self._deadlock())
            if isinstance(event, Partition):
                return event
            self.in_flight.remove(event)
            event.land()

    def _weight(self, event: Any) -> int:
        """How likely it comes next: some partitions, and some loads, are late."""
        assert self.random is not None
        if event.weight is None:
            event.weight = self.random.choice((1, 4, 16))
        return int(event.weight)

    def _deadlock(self) -> str:
        lines = [f"  {it.name} waits for {it.waits_for()}" for it in self.partitions]
        return "every partition waits, and nothing is under way:\n" + "\n".join(lines) + "\n"

    # ------------------------------------------------------------ partitions

    def specialize(self, functions: Sequence[tuple[Any, Sequence[Any]]], warps: Sequence[int]) -> Any:
        """Run functions side by side, the first by the warps that are there. Returns what the first does."""
        parent = self.current
        name, parent.name = parent.name, _name_of(0, *functions[0])
        workers = []
        for number, ((function, args), its_warps) in enumerate(zip(functions[1:], warps, strict=True), 1):
            worker = Partition(_name_of(number, function, args), its_warps, parent.clock)
            thread = threading.Thread(target=self._work, args=(worker, parent, function, args), daemon=True)
            workers.append((worker, thread))
        parent.clock[parent] += 1
        self.partitions = [parent, *(worker for worker, _ in workers)]
        for _, thread in workers:
            thread.start()
        try:
            result = functions[0][0](*functions[0][1])
            parent.check_done()
            self.wait(lambda: len(self.partitions) == 1, lambda: "the other partitions to end")
        except BaseException as error:
            self._abandon(error, workers)
            raise (self.failure or error) from None
        for worker, thread in workers:
            thread.join()
            join(parent.clock, worker.clock)
        parent.name = name
        return result

    def _work(self, me: Partition, parent: Partition, function: Any, args: Sequence[Any]) -> None:
        try:
            self._await_baton(me)
            function(*args)
            me.check_done()
            self.partitions.remove(me)
            chosen = self._choose(me)
        except _Abandoned:
            return
        except BaseException as error:
            self.failure = error
            chosen = parent
        self._hand_to(chosen)

    def _abandon(self, error: BaseException, workers: Sequence[tuple[Partition, threading.Thread]]) -> None:
        """End every thread that still waits for its turn."""
        self.failure = self.failure or error
        for worker, thread in workers:
            if thread.is_alive() and worker.baton.locked():
                worker.baton.release()
        for _, thread in workers:
            thread.join()


def _name_of(number: int, function: Any, args: Sequence[Any]) -> str:
    first = f"({args[0]})" if args and isinstance(args[0], int) else ""
    return f"partition {number} {getattr(function, '__name__', function)}{first}"


# ---------------------------------------------------------------- the one that runs

_running: list[Machine] = []


def running() -> Machine:
    """The block that is being run."""
    return _running[-1]


def partition() -> Partition:
    """Its partition that is being run."""
    return running().current


@contextlib.contextmanager
def runs(machine: Machine) -> Iterator[None]:
    """Makes a machine the one that runs."""
    _running.append(machine)
    try:
        yield
    finally:
        _running.pop()
