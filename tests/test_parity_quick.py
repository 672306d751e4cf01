"""The cases that a CPU runs every time: whatever waits for the night has its kind among them."""

import functools

import pytest
import torch

from multiattn.plan.backend import Plan
from parity.cases import CASES, CROSS_FED
from parity.launch import plan_case
from parity.quick import TURNS, kinds_of, quick_cases, takes_long, waits_for_night
from parity.results import Contender
from parity.tensors import Inputs

CPU = torch.device("cpu")
BY_DAY = [it for it in CASES if it.size == "any" and not it.no_backward]
inputs_of = functools.cache(lambda case: Inputs.of(case, CPU))


def contender(variant):
    return Contender(backend="triton", variant=variant, direction="backward", in_turn=variant is None)


@pytest.mark.parametrize("variant", TURNS)
def test_a_backward_of_triton_sees_every_kind_of_case_that_it_can_run(variant):
    who = contender(variant)
    able = [it for it in BY_DAY if not takes_long(it, who) and isinstance(plan_case(it, who, inputs_of(it)), Plan)]
    quick = [it for it in able if not waits_for_night(it, who)]
    assert set().union(*map(kinds_of, able)) == set().union(*map(kinds_of, quick))
    assert {it.name for it in able} & set(CROSS_FED) <= {it.name for it in quick}
    assert len(quick) < 0.75 * len(able)


def test_each_case_is_some_backwards_turn():
    by_day = {it.name for it in BY_DAY if not takes_long(it, contender(None))}
    assert frozenset().union(*map(quick_cases, TURNS)) >= by_day


def test_other_backwards_and_forwards_take_no_turns():
    others = [Contender(backend=name, direction="backward") for name in ("cutile", "cuda")]
    others += [Contender(backend="triton", variant=it) for it in TURNS[:2]]
    for who in others:
        assert [it for it in BY_DAY if waits_for_night(it, who)] == [it for it in BY_DAY if takes_long(it, who)]
