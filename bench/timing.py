"""bench's timing: the one timer, which tuning shares (`multiattn.tune.timing`), and the host's share of a call."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from multiattn.tune.timing import (
    L2_FLUSH_BYTES,
    MAX_QUEUED,
    REGIMES,
    SPIN_ATTEMPTS,
    Budget,
    Call,
    Contestant,
    CudaClock,
    Sample,
    Timing,
    Turns,
    measure,
    warm_up,
)

__all__ = [
    "L2_FLUSH_BYTES",
    "MAX_QUEUED",
    "REGIMES",
    "SPIN_ATTEMPTS",
    "Budget",
    "Call",
    "Contestant",
    "CudaClock",
    "Sample",
    "Timing",
    "Turns",
    "host_ms",
    "measure",
    "warm_up",
]

Key = TypeVar("Key", bound=Hashable)


def host_ms(
    calls: Mapping[Key, Call], *, each: int = 200, rounds: int = 7, synchronize: Callable[[], None]
) -> dict[Key, float | Exception]:
    """Host milliseconds of one call of each, its launch included, without waiting for the device.

    They take turns: a round times `each` calls of everybody; the median of the rounds' medians counts. For shapes so
    small that the queue never fills. The device is idle at the start of each turn. What a call raises is its result.
    """
    medians: dict[Key, list[float]] = {name: [] for name in calls}
    failed: dict[Key, float | Exception] = {}
    for _ in range(rounds):
        for name in [name for name in calls if name not in failed]:
            synchronize()
            try:
                medians[name].append(_host_turn(calls[name], each))
            except Exception as error:  # broad: a call is anybody's code; its error is its result
                failed[name] = error
    synchronize()
    return {name: statistics.median(taken) * 1e3 for name, taken in medians.items() if name not in failed} | failed


def _host_turn(call: Call, each: int) -> float:
    stamps = [time.perf_counter()]
    for _ in range(each):
        call()
        stamps.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(stamps))
