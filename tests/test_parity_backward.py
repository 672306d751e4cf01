"""Parity of gradients: what a backward is given, what becomes of one that is wrong, who feeds whom, determinism."""

from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn.plan import backend as registry
from multiattn.plan.backend import Op
from parity.__main__ import main
from parity.case import BACKWARD_HEAD_DIM_MAX, PLANTED
from parity.cases import CASES, CROSS_FED, suite
from parity.launch import (
    differing_runs,
    plan_case,
    poisoned_workspaces,
    prepare_case,
    prepare_gradients,
    problem_of,
    save_forward,
)
from parity.memory import GUARD
from parity.report import Report
from parity.results import Contender
from parity.run import run_case
from parity.tensors import Gradients, Upstream

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
CPU_CASES = [case for case in suite(CPU) if not case.no_backward]
REFERENCE = Contender(backend="reference", direction="backward")


# ---------------------------------------------------------------- tensors and launches


@pytest.mark.parametrize("name", ["bshd_gqa_causal", "gqa3_b2", "packed_causal", "broadcast_heads"])
def test_gradients_have_the_layout_of_the_contract(name):
    case = BY_NAME[name]
    inputs, _ = prepare_case(case, CPU)
    problem = problem_of(case, inputs)
    grads = Gradients.of(problem, CPU)
    wanted = (problem.strides_dq, problem.strides_dk, problem.strides_dv)
    for grad, like, strides in zip(grads.all, (inputs.q, inputs.k, inputs.v), wanted, strict=True):
        assert (grad.shape, grad.stride()) == (like.shape, (*strides, 1))
        assert grad.data_ptr() % 16 == 0
        assert bool(grad.isnan().all())
    assert not grads.guards_were_written
    grads.memory[2][-GUARD] = 0
    assert grads.guards_were_written


def test_what_a_backward_is_given_is_drawn_and_the_same_each_time():
    case = BY_NAME["gqa4_b1"]
    inputs, _ = prepare_case(case, CPU)
    one, two = (Upstream.of(case, problem_of(case, inputs), CPU) for _ in range(2))
    assert torch.equal(one.dout, two.dout)
    assert torch.equal(one.dlse, two.dlse)
    assert one.dout.abs().min() < one.dout.abs().max()
    assert one.dlse.count_nonzero() == one.dlse.numel()


def test_half_of_the_cases_have_dlse_and_backward_leaves_out_only_planted_values_wide_heads_and_caches():
    share = sum(case.has_dlse for case in CPU_CASES) / len(CPU_CASES)
    assert 0.35 < share < 0.65
    for kind in ("causal", "full"):
        assert {case.has_dlse for case in CPU_CASES if case.name.endswith(kind)} == {False, True}
    planted = {case.name for case in CASES if case.values in PLANTED}
    wide = {case.name for case in CASES if case.head_dim > BACKWARD_HEAD_DIM_MAX}
    caches = {case.name for case in CASES if case.cache is not None}
    assert {case.name for case in CASES if case.no_backward} == planted | wide | caches
    assert set(CROSS_FED) <= {case.name for case in CPU_CASES}
    for case in CASES:
        reason = case.values if case.name in planted else f"head_dim {case.head_dim}" if case.name in wide else ""
        assert ("cache" if case.name in caches else reason) in case.no_backward


def backward_through(monkeypatch, change) -> None:
    """Let `multiattn.launch_backward` be followed by a change to its tensors."""
    launch = multiattn.launch_backward

    def broken(plan, q, k, v, out, lse, dout, dlse, dq, dk, dv, **optional):
        launch(plan, q, k, v, out, lse, dout, dlse, dq, dk, dv, **optional)
        change({"q": q, "out": out, "lse": lse, "dout": dout, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv})

    monkeypatch.setattr(multiattn, "launch_backward", broken)


def before(tensor: torch.Tensor) -> torch.Tensor:
    """The element in front of a tensor."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: at["dq"].mul_(1.2), "dq is off"),
        (lambda at: at["dk"].mul_(1.2), "dk is off"),
        (lambda at: at["dv"].mul_(1.2), "dv is off"),
        (lambda at: at["dv"][0, 0, 0].fill_(torch.nan), "dv has NaN or inf in the wrong places"),
        (lambda at: at["q"][0, 0].zero_(), "memory of q, k, v or sinks was written"),
        (lambda at: at["out"].mul_(2), "memory of out or lse was written"),
        (lambda at: at["lse"].zero_(), "memory of out or lse was written"),
        (lambda at: at["dout"].mul_(2), "memory of dout or dlse was written"),
        (lambda at: at["dlse"].zero_(), "memory of dout or dlse was written"),
        (lambda at: before(at["dk"]).zero_(), "memory around a gradient was written"),
        (lambda at: before(at["lse"]).zero_(), "memory of out or lse was written"),
    ],
    ids=["dq", "dk", "dv", "nan", "input", "out", "lse", "dout", "dlse", "guard", "guard_of_lse"],
)
def test_a_wrong_backward_fails_and_the_next_is_not_blamed(monkeypatch, change, message):
    case = BY_NAME["gqa4_b1"]
    with monkeypatch.context() as patch:
        backward_through(patch, change)
        (result,) = run_case(case, (REFERENCE,), CPU).results
    assert result.status == "failed"
    assert message in result.message
    assert "reference/eager" in result.message
    (result,) = run_case(case, (REFERENCE,), CPU).results
    assert result.status == "passed"


def with_backward(monkeypatch, prepare) -> None:
    """Let every backend be the reference with another backward."""
    own = registry.get("reference")
    changed = replace(own, backward=Op(variants=own.backward.variants, prepare=prepare))
    monkeypatch.setattr(registry, "get", lambda name: changed)


def test_a_workspace_that_is_read_before_it_is_written_shows(monkeypatch):
    """Memory that the allocator hands out may by chance be zero: here it is NaN."""
    good = registry.get("reference").backward.prepare

    def prepare(plan):
        def launch(operands):
            good(plan)(operands)
            operands.dq.add_(torch.empty(operands.dq.shape))

        return launch

    with_backward(monkeypatch, prepare)
    (result,) = run_case(BY_NAME["mqa5_b2"], (REFERENCE,), CPU).results
    assert "dq has NaN or inf in the wrong places" in result.message


def test_poison_ends_with_its_block():
    with poisoned_workspaces():
        assert bool(torch.empty(3).isnan().all())
    assert torch.get_deterministic_debug_mode() == 0


def test_a_case_without_backward_is_excluded_with_its_reason():
    (forward, backward) = run_case(BY_NAME["nan_k_full"], (Contender(backend="reference"), REFERENCE), CPU).results
    assert forward.status == "passed"
    assert (backward.status, backward.reasons) == ("excluded", (BY_NAME["nan_k_full"].no_backward,))


def test_a_backward_whose_forward_is_wrong_is_not_judged(monkeypatch):
    monkeypatch.setattr(multiattn, "launch", lambda *tensors, **optional: None)
    (result,) = run_case(BY_NAME["gqa8_b1"], (REFERENCE,), CPU).results
    assert result.status == "failed"
    assert result.message.startswith("its forward, which feeds it")


def test_every_forward_feeds_every_backward(monkeypatch):
    own = registry.get("reference")
    monkeypatch.setattr(registry, "get", lambda name: own)
    who = tuple(Contender(backend=name, direction="backward") for name in ("triton", "cuda"))
    report = run_case(BY_NAME["gqa4_b1"], who, CPU)
    fed = [(result.contender.backend, result.fed_by) for result in report.results]
    assert fed == [("triton", "triton"), ("triton", "cuda"), ("cuda", "cuda"), ("cuda", "triton")]
    failed = replace(report.results[1], status="failed", message="off")
    whole = Report(contenders=who, cases=(replace(report, results=(failed,)),), environment={}, command="")
    assert "triton backward fed by cuda failed on gqa4_b1: off" in whole.problems
    (pair,) = report.pairs
    assert (pair.direction, [score.tensor for score in pair.scores]) == ("backward", ["dq", "dk", "dv"])
    alone = run_case(BY_NAME["gqa3_b2"], who, CPU)
    assert [(it.contender.backend, it.fed_by) for it in alone.results] == [(name, name) for name in ("triton", "cuda")]


def test_a_backend_without_backward_fails_the_command(tmp_path, monkeypatch, capsys):
    own = registry.get("reference")
    monkeypatch.setattr(registry, "get", lambda name: replace(own, backward=replace(own.backward, variants=())))
    common = ["--backend", "reference", "--case", "d8*", "--jobs", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["--direction", "forward", *common]) == 0
    assert main(common) == 1
    assert "reference backward was asked for and ran nothing" in capsys.readouterr().out


# ---------------------------------------------------------------- determinism


def test_runs_that_differ_are_counted(monkeypatch):
    case = BY_NAME["mqa8_b1"]
    inputs, _ = prepare_case(case, CPU)
    upstream, _ = prepare_gradients(case, CPU)
    plan = plan_case(case, REFERENCE, inputs)
    saved = save_forward(case, "reference", CPU)
    assert differing_runs(plan, inputs, saved, upstream, runs=2) == 0
    noise = iter([0.0, 0.0, 1.0])
    backward_through(monkeypatch, lambda at: at["dv"][0, 0, 0, 0].add_(next(noise)))
    assert differing_runs(plan, inputs, saved, upstream, runs=2) == 1
