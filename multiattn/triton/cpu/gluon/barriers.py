"""mbarriers as PTX defines them."""

from __future__ import annotations

from typing import Any

from multiattn.triton.cpu.gluon.errors import BarrierError, RaceError
from multiattn.triton.cpu.gluon.machine import Clock, join, partition, running
from multiattn.triton.cpu.gluon.memory import View
from multiattn.triton.cpu.gluon.values import plain


class Barrier:
    """An mbarrier: a phase ends when all arrived and all bytes did; then the next one begins."""

    def __init__(self, view: View, count: int) -> None:
        self.name = f"mbarrier {_place(view)} of buffer {view.buffer.number}, made at {view.buffer.where}"
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.seen: Clock = {}
        """All that was seen by those who arrived in phases that ended."""
        self.arriving: Clock = {}
        """All that was seen by those who arrived, in the phase under way as well."""

    def __str__(self) -> str:
        to_come = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes to come"
        return f"{self.name} (phase {self.phase}: {to_come})"

    def arrive(self, number: int) -> None:
        """The current partition's arrival."""
        if number > self.pending:
            raise BarrierError(f"{partition().name} arrives once more than expected at {self}")
        partition().release(self.arriving)
        self.pending -= number
        self._end_phase()

    def expect(self, number: int) -> None:
        """So many bytes more are to come before the phase ends."""
        self.bytes += number
        self.arrive(1)

    def land(self, number: int) -> int:
        """Bytes that TMA wrote. Returns the number of phases after which they are seen."""
        self.bytes -= number
        if self.pending == 0 and self.bytes < 0:
            raise BarrierError(f"TMA wrote more bytes than expected at {self}")
        phase = self.phase + 1
        self._end_phase()
        return phase

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            join(self.seen, self.arriving)
            self.seen[self] = self.phase

    def wait(self, parity: int) -> None:
        """Until the phase of that parity has ended: the last one, not any before it."""
        if parity not in (0, 1):
            raise BarrierError(f"parity: got {parity} at {self}; allowed 0 and 1")
        running().wait(lambda: self.phase & 1 != parity, lambda: f"parity {parity} of {self}")
        join(partition().clock, self.seen)


def _place(view: View) -> int:
    return int(view.data.storage_offset())


def barrier_at(view: Any) -> Barrier:
    """The mbarrier that a descriptor is of."""
    if not isinstance(view, View) or view.data.numel() != 1:
        raise BarrierError(f"got {view}; allowed one mbarrier")
    barrier = view.buffer.barriers.get(_place(view))
    if barrier is None:
        raise BarrierError(f"no mbarrier was made at {_place(view)} of {view.buffer}")
    assert isinstance(barrier, Barrier)
    return barrier


# ---------------------------------------------------------------- Gluon's functions


def init(mbarrier: View, count: Any) -> None:
    """Makes an mbarrier."""
    place = _place(mbarrier)
    if place in mbarrier.buffer.barriers:
        raise BarrierError(f"{barrier_at(mbarrier)} is made again")
    mbarrier.buffer.barriers[place] = Barrier(mbarrier, int(plain(count)))


def invalidate(mbarrier: View) -> None:
    """Ends it."""
    barrier_at(mbarrier)
    del mbarrier.buffer.barriers[_place(mbarrier)]


def expect(mbarrier: View, bytes: Any) -> None:
    """So many bytes more are to come before the phase ends."""
    barrier_at(mbarrier).expect(int(plain(bytes)))
    running().step()


def arrive(mbarrier: View, *, count: Any = 1) -> None:
    """An arrival."""
    barrier_at(mbarrier).arrive(int(plain(count)))
    running().step()


def arrive_each(mbarrier: View, increment_count: Any = True) -> None:
    """An arrival of each thread, once its copies by cp.async are there; nothing here copies so.

    It orders no other writes: those of the partition must have been fenced.
    """
    if plain(increment_count):
        raise BarrierError(f"increment_count: got True at {barrier_at(mbarrier)}; allowed False")
    here = partition()
    for write in running().unfenced:
        if write.agent is here:
            raise RaceError(f"{here.name}: an arrival that is no release, without a fence_async_shared after {write}")
    barrier_at(mbarrier).arrive(32 * here.warps)
    running().step()


def wait(mbarrier: View, phase: Any) -> None:
    """Until the phase of a parity has ended."""
    barrier_at(mbarrier).wait(int(plain(phase)))
