"""The one timer. Three regimes, never mixed in one figure:

*device*: launches back to back between two CUDA events, queued behind a kernel that spins, so that the device never
waits for the host; the board is then power-limited, as in training. *graph*: as many calls in one CUDA graph that is
replayed. *call*: one call at a time on an idle device, after an L2 flush, the host's share included, as in a
latency-bound service.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Call = Callable[[], Any]
"""One launch: no argument, nothing that synchronises; its result is dropped."""

Context = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context of a contender's calls (`sdpa_kernel`); entered outside the timed region."""

REGIMES = ("device", "graph", "call")
L2_FLUSH_BYTES = 256 << 20  # over twice the largest L2 of arch.GPUS (B200: 126 MB)
MAX_QUEUED = 512  # the driver queues about 1024 launches before a launch blocks, and some calls launch two
CYCLES_PER_MS = 2_000_000  # of the SM clock at its highest (H200: 1.98 GHz); slower clocks spin longer, never shorter
SPIN_ATTEMPTS = 3
SPIN_LIMIT_MS = 200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A call to time, and its context."""

    call: Call
    context: Context = contextlib.nullcontext


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reading: milliseconds of one launch, and whether the device had to wait for the host during it."""

    time_ms: float
    host_bound: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Readings of one contender. `low_ms` and `high_ms` are the quartiles around the median `time_ms`."""

    time_ms: float
    low_ms: float
    high_ms: float
    rounds: int
    launches: int
    """Launches per reading."""
    host_bound: bool
    """Most readings hold the host's share: then this is no device time, and its row says so."""

    @classmethod
    def of(cls, samples: list[Sample], launches: int) -> Timing:
        """The median and the quartiles of at least one reading."""
        times = [sample.time_ms for sample in samples]
        low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        late = sum(sample.host_bound for sample in samples)
        return cls(
            time_ms=median,
            low_ms=low,
            high_ms=high,
            rounds=len(times),
            launches=launches,
            host_bound=2 * late > len(times),
        )


class CudaClock:
    """Reads a device's time: CUDA events on the current stream of the current device."""

    @functools.cached_property
    def _flushed(self) -> torch.Tensor:
        return torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def device(self, call: Call, launches: int) -> Sample:
        """Milliseconds of one of `launches` back-to-back launches.

        Taken again with a longer spin where the host had not queued everything when it ended.
        """
        spin_ms = 0.2 + 0.02 * launches
        for _ in range(SPIN_ATTEMPTS):
            sample, host_ms = self._behind_spin(call, launches, spin_ms)
            if not sample.host_bound:
                break
            spin_ms = min(max(2 * spin_ms, 2 * host_ms), SPIN_LIMIT_MS)
        return sample

    def _behind_spin(self, call: Call, launches: int, spin_ms: float) -> tuple[Sample, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(spin_ms * CYCLES_PER_MS))
        began = time.perf_counter()
        start.record()
        for _ in range(launches):
            call()
        late = start.query()  # the spin is over although not everything is queued: the device may have waited
        host_ms = (time.perf_counter() - began) * 1e3
        end.record()
        end.synchronize()
        return Sample(time_ms=start.elapsed_time(end) / launches, host_bound=late), host_ms

    def single(self, call: Call) -> Sample:
        """Milliseconds from before to after one call on an idle device with a cold L2.

        The first event is stamped by an idle device at once, so the host's share lies behind it.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return Sample(time_ms=start.elapsed_time(end))

    def captured(self, call: Call, launches: int) -> Call:
        """A call that replays `launches` of it as one graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                call()
        graph.replay()  # the first one uploads it
        return graph.replay


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much is spent on one cell: readings per contender and the device time of one reading."""

    rounds: int = 9
    sample_ms: float = 8.0
    warmup_ms: float = 20.0
    seed: int = 0


def measure(
    contestants: Mapping[str, Contestant], clock: CudaClock, *, regime: str = "device", budget: Budget
) -> dict[str, Timing | Exception]:
    """Time every contestant in turns: each round takes one reading of each, in an order of a fixed seed (`Turns`).

    So all of them meet the same clocks and temperatures. What a contestant raises ends its own readings and is
    returned in place of its Timing.
    """
    turns = Turns(budget.seed)
    results: dict[str, Timing | Exception] = {}
    readers: dict[str, tuple[Callable[[], Sample], int]] = {}
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}

    @contextlib.contextmanager
    def attempt(name: str) -> Iterator[None]:
        try:
            with contestants[name].context():
                yield
        except Exception as error:  # broad: a contestant is anybody's code; its error is its result
            results[name] = error.with_traceback(None)  # whose frames hold tensors

    for name, contestant in contestants.items():
        with attempt(name):
            readers[name] = _reader(contestant.call, clock, regime, budget)
    for _ in range(budget.rounds):
        for name in turns.next([name for name in contestants if name not in results]):
            with attempt(name):
                samples[name].append(readers[name][0]())
    for name in [name for name in contestants if name not in results]:
        results[name] = Timing.of(samples[name], readers[name][1])
    return results


def _reader(call: Call, clock: CudaClock, regime: str, budget: Budget) -> tuple[Callable[[], Sample], int]:
    """Warm a call up; what takes one reading of it, and how many launches that has."""
    launches = warm_up(call, clock, budget)
    if regime == "call":
        return functools.partial(clock.single, call), 1
    if regime == "device":
        return functools.partial(clock.device, call, launches), launches
    replay = clock.captured(call, launches)

    def read() -> Sample:
        whole = clock.device(replay, 1)
        return replace(whole, time_ms=whole.time_ms / launches)

    return read, launches


class Turns:
    """Orders of rounds: random, but everybody comes after everybody else about as often, and never after itself.

    Whoever comes after one that leaves the chip cool runs at a higher clock: with kernels of a third of their speed in
    the same turns, FA4 and the kernel for Hopper were 8 and 6 % faster than without (H200, 2026-11-22, D=256 N=16384
    full, graph). In only random orders of three contestants one came after the slowest 11 times, another 7 of 21.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._followed: Counter[tuple[str, str]] = Counter()
        self._last = ""

    def next(self, names: Sequence[str]) -> list[str]:
        """The order of the next round, of the contestants that are left."""
        orders = [self._random.sample(names, len(names)) for _ in range(64)]  # the best balanced is taken
        best = min(orders, key=self._imbalance)
        self._followed.update(itertools.pairwise([self._last, *best]))
        self._last = best[-1] if best else self._last
        return best

    def _imbalance(self, order: Sequence[str]) -> tuple[int, int]:
        pairs = list(itertools.pairwise([self._last, *order]))
        return sum(one == other for one, other in pairs), sum(self._followed[pair] for pair in pairs)


def warm_up(call: Call, clock: CudaClock, budget: Budget) -> int:
    """Run for about `budget.warmup_ms`; how many launches make one reading last `budget.sample_ms`."""
    clock.device(call, 1)  # compiles, fills caches; its time says nothing
    once_ms = clock.device(call, 3).time_ms
    clock.device(call, _count(budget.warmup_ms, once_ms))
    return _count(budget.sample_ms, once_ms)


def _count(total_ms: float, once_ms: float) -> int:
    return max(1, min(MAX_QUEUED, round(total_ms / max(once_ms, 1e-6))))
