"""targets.pool: nothing hangs. This module is what the processes import, so it imports nothing heavy."""

import os
import time

from multiattn.targets.pool import run_isolated


def misbehave(what):
    if what == "raise":
        raise ValueError("as asked")
    if what == "die":
        os._exit(7)
    if what == "hang":
        time.sleep(60)
    return what.upper()


def never():
    return False


def test_a_process_that_raises_dies_or_hangs_costs_nobody_else():
    items = ["raise", "die", "a", "hang", "b"]
    outcomes = {it.item: it for it in run_isolated(misbehave, items, jobs=2, timeout_s=4)}
    assert outcomes["a"].result == "A"
    assert outcomes["b"].result == "B"
    assert outcomes["raise"].error == "ValueError: as asked"
    assert outcomes["die"].error == "the process died with exit code 7"
    assert outcomes["hang"].error == "not done within 4 s"


def test_a_process_that_must_not_go_on_is_replaced():
    outcomes = list(run_isolated(misbehave, ["raise", "a"], jobs=1, timeout_s=30, keep=never))
    assert [it.result for it in outcomes] == [None, "A"]
