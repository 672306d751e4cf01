"""Parity's suite: every way that a backend has meets every kind of case that it can, and a wrong tensor fails it."""

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
from parity_breaks import BY_NAME, CPU

from multiattn import BACKENDS
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import DIRECTIONS, Plan, find_variant, plan_variant
from multiattn.score import bind_score, lower
from multiattn.score.program import walk
from parity import test_parity as suite
from parity import turns
from parity.callables import CALLABLES, Sizes
from parity.cases import CASES
from parity.kinds import code_kinds_of
from parity.launch import dealt, has_turn, plan_case, prepare_case, prepare_gradients, problem_of, waits_for_night
from parity.results import Contender
from parity.score_cases import DAILY
from parity.tensors import Inputs
from parity.tolerance import Mismatch

PROBLEMS = [(it, problem_of(it, Inputs.of(it, CPU))) for it in CASES if it.size == "any"]
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
            case
            for case, it in by_day
            if isinstance(plan_variant(backend, own, it, ARCHS["cpu"], direction=direction), Plan)
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
        able = isinstance(plan_case(case, best, Inputs.of(case, CPU)), Plan)
        assert (case.name in deal.by_day) + (case.name in deal.at_night) == able
        assert waits_for_night(case, Contender(backend=name, direction=direction, turn=0), CPU) == (
            case.name in deal.at_night
        )
        more = Contender(backend=name, direction=direction, turn=len(deal.by_day.get(case.name, [0])))
        assert not has_turn(case, more, CPU)


def kinds_of_callable(case):
    """How gradients of its tensors are added up, and what its slope is made of: kernels have other code for each."""
    found = bind_score(device=CPU, **case.make(Sizes(batch=2, heads=4, seq_q=20, seq_kv=24, device=CPU)))
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


# ---------------------------------------------------------------- the suite's two tests, which fail for any tensor


CASE = replace(BY_NAME["len_1x300_full"], name="suite_of_the_suite", seq_q=9, seq_kv=20, head_dim=16)


@pytest.mark.parametrize("wrong", ["nothing", "out", "lse"])
def test_a_wrong_result_of_a_forward_fails_the_suite(wrong, monkeypatch):
    spoil(monkeypatch, "launch_plan", ("out", "lse"), wrong)
    with expected(wrong):
        suite.test_parity(CASE, Contender(backend="reference"), CPU)


@pytest.mark.parametrize("wrong", ["nothing", "dq", "dk", "dv"])
def test_a_wrong_gradient_fails_the_suite(wrong, monkeypatch):
    spoil(monkeypatch, "launch_gradients", ("dq", "dk", "dv"), wrong)
    with expected(wrong):
        suite.test_gradients(CASE, Contender(backend="reference", direction="backward"), "reference", CPU)


def spoil(monkeypatch, name, tensors, wrong):
    """Let one of the tensors that a launch writes be wrong in its last column."""
    launch = getattr(suite, name)

    def spoilt(*given):
        written = launch(*given)
        if wrong in tensors:
            written.all[tensors.index(wrong)][..., -1] += 1.0
        return written

    monkeypatch.setattr(suite, name, spoilt)


def expected(wrong):
    return contextlib.nullcontext() if wrong == "nothing" else pytest.raises(Mismatch, match=f"^{wrong} ")


def test_what_the_suite_compares_with_is_attention_in_fp64():
    """PyTorch's own in fp64, differentiated by it: a truth in the dtype of the inputs is 10^9 times as far away."""
    inputs, truth = prepare_case(CASE, CPU)
    upstream, grads = prepare_gradients(CASE, CPU)
    leaves = [tensor.double().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    scores = leaves[0] @ leaves[1].mT * CASE.head_dim**-0.5
    results = scores.softmax(dim=-1) @ leaves[2], scores.logsumexp(dim=-1)
    given = [upstream.dout.double()]
    if upstream.dlse is not None:
        given.append(upstream.dlse.double())
    wanted = torch.autograd.grad(results[: len(given)], leaves, given)
    pairs = zip((*truth.all, *grads.all), (*results, *wanted), strict=True)
    for expected, want in pairs:
        assert expected.truth.dtype == torch.float64
        torch.testing.assert_close(expected.truth, want.detach(), rtol=1e-12, atol=1e-12)
