"""Turns on a CPU: every way that a backend has meets every kind of case that it can, the same on every machine."""

from collections import Counter

import pytest
import torch

from multiattn import BACKENDS
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU
from multiattn.plan.backend import DIRECTIONS, Plan, find_variant, plan_variant
from multiattn.score import bind_score, lower
from multiattn.score.program import walk
from parity import turns
from parity.callables import CALLABLES, Sizes
from parity.cases import CASES
from parity.kinds import code_kinds_of
from parity.launch import dealt, has_turn, plan_case, problem_of, waits_for_night
from parity.results import Contender
from parity.score_cases import DAILY
from parity.tensors import Inputs

DEVICE = torch.device("cpu")
PROBLEMS = [(it, problem_of(it, Inputs.of(it, DEVICE))) for it in CASES if it.size == "any"]
each_deal = pytest.mark.parametrize(
    ("name", "direction"), [(name, direction) for name in BACKENDS for direction in DIRECTIONS]
)


@each_deal
def test_every_value_of_every_field_that_fits_something_is_run(name, direction):
    deal = dealt(name, direction)
    assert not deal.missing
    of_choices = Counter(choice.partition("=")[0] for choice in deal.shown)
    assert sum(count > 1 for count in of_choices.values()) >= 7, "choices of tiles, orders and buffers"


@each_deal
def test_every_variant_meets_every_kind_of_case_that_it_can_run(name, direction):
    deal, backend = dealt(name, direction), registry.get(name)
    by_day = [it for it in PROBLEMS if it[0].name in deal.by_day]
    for variant in {plan.variant for plans in deal.by_day.values() for plan in plans}:
        own = find_variant(backend, variant, direction)
        able = [
            case for case, it in by_day if isinstance(plan_variant(backend, own, it, CPU, direction=direction), Plan)
        ]
        kinds = {kind for case in able for kind in code_kinds_of(case)}
        if name != "triton" or own.name in turns.QUICK:
            assert kinds <= deal.shown[variant]
        else:  # slow cases are for others
            assert kinds - deal.shown[variant] <= {"padded head_dim"}


@each_deal
def test_every_case_that_a_backend_can_run_has_a_turn(name, direction):
    deal, best = dealt(name, direction), Contender(backend=name, direction=direction)
    for case in (it for it, _ in PROBLEMS if direction == "forward" or not it.no_backward):
        able = isinstance(plan_case(case, best, Inputs.of(case, DEVICE)), Plan)
        assert (case.name in deal.by_day) + (case.name in deal.at_night) == able
        assert waits_for_night(case, Contender(backend=name, direction=direction, turn=0), DEVICE) == (
            case.name in deal.at_night
        )
        more = Contender(backend=name, direction=direction, turn=len(deal.by_day.get(case.name, [0])))
        assert not has_turn(case, more, DEVICE)


def kinds_of_callable(case):
    """How gradients of its tensors are added up, and what its slope is made of: kernels have other code for each."""
    found = bind_score(device=DEVICE, **case.make(Sizes(batch=2, heads=4, seq_q=20, seq_kv=24, device=DEVICE)))
    if found is None:
        return {"no code"}
    lowered, slope = lower(found.program), "constant"
    if lowered.slope.op != "const":
        slope = "loaded" if any(it.op == "load" for it in walk(lowered.slope)) else "computed"
    return {slope, *((it.is_exclusive, bool(it.load.args)) for it in lowered.gradients_of(found.slots_requiring_grad))}


def test_each_kind_of_callable_has_a_day():
    kinds = {it.name: kinds_of_callable(it) for it in CALLABLES if it.score_mod is not None and it.mask_mod is None}
    assert set().union(*kinds.values()) == set().union(*(kinds[name] for name in DAILY))
    by_day = [case.score_mod for case in CASES if case.name.startswith("score_mod_") and not case.nightly]
    assert sorted(by_day) == sorted(DAILY)


def test_a_deal_is_the_same_each_time():
    again = turns.deal("triton", "forward", PROBLEMS)
    assert again == dealt("triton", "forward")


def test_a_small_way_differs_from_its_config_in_tiles_alone():
    (rule, *_) = find_variant(registry.get("cuda"), "two_pass", "backward").rules
    small = turns.smaller(rule.config, ("tile_n",))
    assert (small.tile_n, small.dq.tile_n) == (rule.config.tile_n // 2, rule.config.dq.tile_n // 2)
    assert (small.tile_m, small.dq.tile_m) == (rule.config.tile_m, rule.config.dq.tile_m)
