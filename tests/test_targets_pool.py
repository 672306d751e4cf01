"""targets.pool: nothing hangs. This module is what the processes import, so it imports nothing heavy."""

import os
import time

from multiattn.inspect import pool
from multiattn.inspect.pool import run_isolated


def misbehave(what):
    if what == "raise":
        raise ValueError("as asked")
    if what == "die":
        os._exit(7)
    if what == "hang":
        time.sleep(60)
    return what.upper()


class SlowToUnpickle:
    """An item's function whose process takes long to be ready, as one that imports torch on a busy machine."""

    def __reduce__(self):
        return start_slowly, ()


def start_slowly():
    time.sleep(3)
    return misbehave


def never():
    return False


def test_a_process_that_raises_dies_or_hangs_costs_nobody_else():
    items = ["raise", "die", "a", "hang", "b"]
    outcomes = {it.item: it for it in run_isolated(misbehave, items, jobs=2, timeout_s=2)}
    assert outcomes["a"].result == "A"
    assert outcomes["b"].result == "B"
    assert outcomes["raise"].error == "ValueError: as asked"
    assert outcomes["die"].error == "the process died with exit code 7"
    assert outcomes["hang"].error == "not done within 2 s"


def test_a_process_that_must_not_go_on_is_replaced():
    outcomes = list(run_isolated(misbehave, ["raise", "a"], jobs=1, timeout_s=30, keep=never))
    assert [it.result for it in outcomes] == [None, "A"]


def test_the_start_of_a_process_is_not_the_items_time():
    (outcome,) = run_isolated(SlowToUnpickle(), ["a"], jobs=1, timeout_s=1)
    assert outcome.result == "A"
    assert outcome.seconds < 1


def test_a_process_that_never_starts_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(pool, "START_TIMEOUT_S", 1.0)
    (outcome,) = run_isolated(SlowToUnpickle(), ["a"], jobs=1, timeout_s=30)
    assert outcome.error == "its process not ready within 1 s"
