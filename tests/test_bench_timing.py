"""The one timer: turns, medians, and what becomes of a contestant that raises; with a clock that is no clock."""

import contextlib
import itertools
from collections import Counter
from functools import partial
from typing import ClassVar

import pytest
import torch
from bench_fakes import FakeClock

from bench.conftest import CLOCK, feed
from bench.host import host_ms
from multiattn.tune.timing import (
    MAX_QUEUED,
    SPIN_ATTEMPTS,
    Budget,
    Contestant,
    CudaClock,
    Sample,
    Timing,
    Turns,
    measure,
)


def contestant(name, log=None):
    def call():
        if log is not None:
            log.append(name)

    call.__name__ = name
    return Contestant(call=call)


def test_median_quartiles_and_whether_most_readings_were_host_bound():
    timing = Timing.of([Sample(time_ms=time) for time in (5.0, 1.0, 2.0, 4.0, 3.0)], launches=7)
    assert (timing.low_ms, timing.time_ms, timing.high_ms) == (2.0, 3.0, 4.0)
    assert (timing.rounds, timing.launches, timing.host_bound) == (5, 7, False)
    late, early = Sample(time_ms=1.0, host_bound=True), Sample(time_ms=1.0)
    assert Timing.of([late, late, early], 1).host_bound
    assert not Timing.of([late, early], 1).host_bound


def test_contestants_take_turns_in_a_random_order_that_a_seed_fixes():
    def order(seed):
        clock = FakeClock()
        names = ["a", "b", "c", "d"]
        measure({name: contestant(name) for name in names}, clock, budget=Budget(rounds=6, seed=seed))
        timed = [name for _, name, _ in clock.log][3 * len(names) :]  # three readings warm each one up
        rounds = [timed[i : i + 4] for i in range(0, len(timed), 4)]
        assert len(rounds) == 6
        assert all(sorted(turn) == names for turn in rounds)
        return rounds

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert any(a != b for a, b in itertools.pairwise(order(1)))


@pytest.mark.parametrize(("count", "rounds"), [(2, 9), (3, 9), (3, 21), (5, 9), (5, 21), (9, 21)])
def test_everybody_comes_after_everybody_else_as_often_and_never_after_itself(count, rounds):
    """A slow contestant leaves the chip cool for the next one."""
    names = [str(number) for number in range(count)]
    for seed in range(3):
        turns = Turns(seed)
        taken = [name for _ in range(rounds) for name in turns.next(names)]
        followed = Counter(itertools.pairwise(taken))
        assert not any(followed[name, name] for name in names)
        often = [followed[pair] for pair in itertools.permutations(names, 2)]
        assert max(often) - min(often) <= 2, often


def test_a_contestant_that_drops_out_leaves_the_others_their_turns():
    turns = Turns(0)
    taken = turns.next(["a", "b", "c", "d"])
    for _ in range(20):
        taken += turns.next(["a", "b", "c"])
    followed = Counter(itertools.pairwise(taken[4:]))
    often = [followed[pair] for pair in itertools.permutations("abc", 2)]
    assert max(often) - min(often) <= 2, often
    assert sum(often) == 59
    assert turns.next(["a"]) == ["a"] == turns.next(["a"])
    assert turns.next([]) == []


def test_a_reading_lasts_as_long_as_it_should_and_the_queue_never_fills():
    clock = FakeClock({"slow": 50.0, "even": 0.5, "quick": 1e-4})
    budget = Budget(rounds=1, sample_ms=8.0)
    times = measure({name: contestant(name) for name in clock.times}, clock, budget=budget)
    assert {name: timing.launches for name, timing in times.items()} == {"slow": 1, "even": 16, "quick": MAX_QUEUED}


def test_one_that_raises_has_its_error_for_a_result_and_the_others_go_on():
    calls = []

    def fails_late():
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("launch failed")

    results = measure(
        {"bad": Contestant(call=fails_late), "good": contestant("good")}, FakeClock(), budget=Budget(rounds=5)
    )
    assert isinstance(results["bad"], RuntimeError)
    assert isinstance(results["good"], Timing)
    assert results["good"].rounds == 5
    assert len(calls) == 5  # not asked again


def test_the_context_is_entered_around_a_reading_and_not_in_it():
    log = []

    @contextlib.contextmanager
    def context():
        log.append("enter")
        yield
        log.append("exit")

    measure({"a": Contestant(call=lambda: log.append("call"), context=context)}, FakeClock(), budget=Budget(rounds=2))
    assert log == ["enter", "call", "call", "call", "exit", *["enter", "call", "exit"] * 2]


@pytest.mark.parametrize(
    ("regime", "read", "launches"),
    [("device", ("device", "a", 16), 16), ("call", ("single", "a", 1), 1), ("graph", ("device", "16 x a", 1), 16)],
)
def test_the_regimes_are_not_mixed(regime, read, launches):
    clock = FakeClock({"a": 0.25, "16 x a": 4.0})
    timing = measure({"a": contestant("a")}, clock, regime=regime, budget=Budget(rounds=2, sample_ms=4.0))["a"]
    assert {way for way, _, _ in clock.log[:3]} == {"device"}  # warming up
    assert clock.log[3:] == [read] * 2
    assert (timing.launches, timing.time_ms) == (launches, 0.25)


class FakeEvent:
    """An event of a device whose spin ends after so many launches have been queued."""

    log: ClassVar[list[str]] = []
    spin_ends_after = 1000

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.log.append("record")

    def query(self):
        return self.log[::-1].index("record") >= self.spin_ends_after  # launches since the first event

    def synchronize(self):
        self.log.append("wait")

    def elapsed_time(self, other):
        return 12.0


@pytest.mark.parametrize(("spin_ends_after", "attempts"), [(1000, 1), (2, SPIN_ATTEMPTS)])
def test_launches_are_queued_behind_a_spin(monkeypatch, spin_ends_after, attempts):
    spins = []
    monkeypatch.setattr(FakeEvent, "log", [])
    monkeypatch.setattr(FakeEvent, "spin_ends_after", spin_ends_after)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    sample = CudaClock().device(lambda: FakeEvent.log.append("launch"), 4)
    assert sample == Sample(time_ms=3.0, host_bound=attempts > 1)
    assert FakeEvent.log == ["record", *["launch"] * 4, "record", "wait"] * attempts
    assert len(spins) == attempts
    assert all(isinstance(cycles, int) and cycles > 0 for cycles in spins)


@pytest.mark.benchmark(timer=CLOCK)
def test_pytest_benchmark_is_fed_with_event_times(benchmark):
    timing = feed(benchmark, contestant("a"), FakeClock({"a": 0.25}), Budget(rounds=5))
    assert timing.time_ms == 0.25
    assert not timing.host_bound
    if not benchmark.disabled:  # as under pytest-xdist
        assert benchmark.stats.stats.rounds == 5
        assert benchmark.stats.stats.median == pytest.approx(0.25e-3)


def test_host_cost_waits_for_the_device_between_repeats_only():
    log = []
    calls = {name: partial(log.append, name) for name in ("a", "b")}
    costs = host_ms(calls, each=2, rounds=2, synchronize=lambda: log.append("wait"))
    assert log == ["wait", "a", "a", "wait", "b", "b"] * 2 + ["wait"]
    assert all(0 < cost < 10 for cost in costs.values())
    costs = host_ms({"bad": lambda: 1 / 0, "good": lambda: None}, each=2, rounds=3, synchronize=lambda: None)
    assert isinstance(costs["bad"], ZeroDivisionError)
    assert costs["good"] > 0
