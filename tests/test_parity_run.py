"""The parity runner and its report: what becomes of a kernel that is wrong, that raises, or that never runs."""

import importlib.util
import itertools
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from parity_breaks import BY_NAME, CPU

import multiattn
from multiattn import Reason, progress
from multiattn.operands import Operands
from multiattn.plan import backend as registry
from multiattn.plan.backend import Op
from parity import run
from parity.__main__ import main
from parity.case import BACKWARD_HEAD_DIM_MAX, PLANTED
from parity.cases import CASES, CROSS_FED, matching, suite
from parity.launch import (
    poisoned_workspaces,
    prepare_case,
    problem_of,
)
from parity.memory import GUARD
from parity.report import Report, make_tables, to_html, to_json, to_markdown
from parity.results import CaseReport, Contender, Pair, Result, Score
from parity.run import contenders_of, run_case, run_cases, spread
from parity.tensors import Gradients, Upstream

REFERENCE = (Contender(backend="reference"),)
CASE = BY_NAME["gqa4_b1"]


def report_of(*cases: CaseReport, contenders=REFERENCE) -> Report:
    return Report(contenders=contenders, cases=cases, environment={"device": "a test"}, command="pytest")


def follow(monkeypatch, direction, change):
    """Let launches of a direction be followed by a change to their tensors."""
    name = {"forward": "launch", "backward": "launch_backward"}[direction]
    launch = getattr(multiattn, name)

    def broken(plan, *tensors, **named):
        launch(plan, *tensors, **named)
        change(Operands(*tensors, **named))

    monkeypatch.setattr(multiattn, name, broken)


def before(tensor):
    """The element in front of a tensor."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() - 1)


INPUTS, SAVED, GIVEN = "q, k, v or sinks was written", "out or lse was written", "dout or dlse was written"
WRONG = {
    "forward": (
        (lambda at: at.out.mul_(1.2), "out is off"),
        (lambda at: at.lse.add_(1e-4), "lse is off"),
        (lambda at: at.out[0, 0, 0].fill_(torch.nan), "out has NaN or inf in the wrong places"),
        (lambda at: at.k[0, 0].zero_(), f"memory of {INPUTS}"),
        (lambda at: before(at.out).zero_(), "around out"),
    ),
    "backward": (
        (lambda at: at.dq.mul_(1.2), "dq is off"),
        (lambda at: at.dk.mul_(1.2), "dk is off"),
        (lambda at: at.dv.mul_(1.2), "dv is off"),
        (lambda at: at.dv[0, 0, 0].fill_(torch.nan), "dv has NaN or inf in the wrong places"),
        (lambda at: at.q[0, 0].zero_(), f"memory of {INPUTS}"),
        (lambda at: at.out.mul_(2), f"memory of {SAVED}"),
        (lambda at: at.lse.zero_(), f"memory of {SAVED}"),
        (lambda at: at.dout.mul_(2), f"memory of {GIVEN}"),
        (lambda at: at.dlse.zero_(), f"memory of {GIVEN}"),
        (lambda at: before(at.dk).zero_(), "memory around a gradient was written"),
        (lambda at: before(at.lse).zero_(), f"memory of {SAVED}"),
    ),
}


@pytest.mark.parametrize(
    ("direction", "change", "message"), [(direction, *row) for direction, its in WRONG.items() for row in its]
)
def test_a_wrong_result_fails_and_the_next_is_not_blamed(monkeypatch, direction, change, message):
    who = (Contender(backend="reference", direction=direction),)
    with monkeypatch.context() as patch:
        follow(patch, direction, change)
        report = report_of(run_case(CASE, who, CPU), contenders=who)
    (result,) = report.cases[0].results
    assert result.status == "failed"
    assert message in result.message
    assert "reference/eager" in result.message
    assert report.problems
    tables = make_tables(report)
    assert to_markdown(report, tables).splitlines()[2].startswith("FAILED: 1 problems")
    assert message in to_html(report, tables)
    (result,) = run_case(CASE, who, CPU).results
    assert result.status == "passed", "what one backend wrote must not reach the next"
    assert [it.tensor for it in result.scores] == (["out", "lse"] if direction == "forward" else ["dq", "dk", "dv"])
    assert 0 < result.ratio < 1


def test_a_backend_that_raises_is_an_error_and_the_run_goes_on(monkeypatch):
    def broken(plan, q, k, v, out, lse, **optional):
        raise RuntimeError("the launch failed")

    monkeypatch.setattr(multiattn, "launch", broken)
    (report,) = run_cases([CASE], REFERENCE, CPU, jobs=1)
    assert report.results[0].status == "error"
    assert "the launch failed" in report.results[0].message


def test_a_backend_that_breaks_while_planning_is_its_own_error(monkeypatch):
    get = registry.get
    broken = replace(get("reference"), probe=lambda arch: 1 / 0)
    monkeypatch.setattr(registry, "get", lambda name: broken if name == "cutile" else get("reference"))
    report = run_case(CASE, tuple(Contender(backend=name) for name in ("triton", "cuda", "cutile")), CPU)
    assert [result.status for result in report.results] == ["passed", "passed", "error"]
    assert "ZeroDivisionError" in report.results[2].message
    (pair,) = report.pairs
    assert (pair.left, pair.right, pair.scores[0].error) == ("triton", "cuda", 0.0)
    assert pair.passed


def test_a_case_that_cannot_be_made_is_an_error_of_every_contender(monkeypatch):
    monkeypatch.setattr("parity.launch.Inputs.of", lambda case, device: 1 / 0)
    (report,) = run_cases([replace(CASE, name="fresh")], REFERENCE, CPU, jobs=1)
    assert [result.status for result in report.results] == ["error"]
    assert "ZeroDivisionError" in report.results[0].message


def test_a_backend_that_ran_nothing_fails_the_run(monkeypatch):
    get, reason = registry.get, Reason(code="module", got="no kernels", allowed="kernels")
    monkeypatch.setattr(registry, "get", lambda name: replace(get(name), probe=lambda arch: (reason,)))
    report = report_of(run_case(CASE, REFERENCE, CPU))
    assert [result.status for result in report.cases[0].results] == ["refused"]
    assert report.problems == (
        "reference forward was asked for and ran nothing: module: got no kernels; allowed kernels",
    )
    assert "module: got no kernels; allowed kernels" in to_markdown(report, make_tables(report))
    assert json.loads(to_json(report))["results"][0]["reasons"] == ["module: got no kernels; allowed kernels"]


def test_a_variant_may_run_nothing_where_another_runs():
    contenders = (Contender(backend="reference", variant="eager"), Contender(backend="reference", variant="other"))
    ran = Result(case="a", contender=contenders[0], status="passed")
    refused = Result(case="a", contender=contenders[1], status="refused", reasons=("arch",))
    report = report_of(CaseReport(case=CASE, results=(ran, refused), pairs=()), contenders=contenders)
    assert not report.problems


def test_backends_that_disagree_fail():
    apart = Score(tensor="out", of="max", error=3.0, budget=2.0, ratio=1.5)
    pair = Pair(case="a", left="triton", right="cuda", scores=(apart, replace(apart, tensor="lse", ratio=0.1)))
    ran = Result(case="a", contender=REFERENCE[0], status="passed")
    (problem,) = report_of(CaseReport(case=CASE, results=(ran,), pairs=(pair,))).problems
    assert "triton and cuda disagree on a" in problem


def test_processes_give_what_one_process_gives():
    cases = matching(CASES, ["gqa*", "empty_keys"])
    alone = {report.case.name: report for report in run_cases(cases, REFERENCE, CPU, jobs=1)}
    together = {report.case.name: report for report in run_cases(cases, REFERENCE, CPU, jobs=2)}
    assert alone.keys() == together.keys() == {case.name for case in cases}
    for name, report in alone.items():
        for one, other in zip(report.results, together[name].results, strict=True):
            assert replace(one, seconds=0.0) == replace(other, seconds=0.0)


class TwoWorkers:
    """Runs what is submitted at once, as one process after the other; those in `lost` have no device."""

    lost: tuple[int, ...] = ()

    def __init__(self, jobs, **_options):
        assert jobs == 2
        self.turns = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *_raised):
        pass

    def submit(self, function, *arguments):
        future, process = Future(), next(self.turns) % 2
        if process in self.lost:
            future.set_exception(run.DeviceLostError(process))
        else:
            future.set_result(function(*arguments))
        return future


@pytest.mark.parametrize(("lost", "status"), [((), "passed"), ((1,), "passed"), ((0, 1), "error")])
def test_a_process_that_lost_its_device_hands_its_cases_back(monkeypatch, lost, status):
    monkeypatch.setattr(TwoWorkers, "lost", lost)
    monkeypatch.setattr(run, "ProcessPoolExecutor", TwoWorkers)
    cases = list(matching(CASES, ["len_1x1_full", "len_1x300_full", "gqa4_b1"]))
    reports = list(run_cases(cases, REFERENCE, CPU, jobs=2))
    assert sorted(report.case.name for report in reports) == sorted(case.name for case in cases)
    assert {result.status for report in reports for result in report.results} == {status}


def test_a_worker_without_a_device_says_so(monkeypatch):
    def synchronize(device):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(run, "synchronize", synchronize)
    monkeypatch.setattr(run, "LOST_PAUSE_S", 0.0)
    with pytest.raises(run.DeviceLostError) as caught:
        run._run_in_worker(CASE, REFERENCE, CPU)
    assert pickle.loads(pickle.dumps(caught.value)).process == os.getpid()


def test_spread_keeps_every_case_and_starts_with_one_of_each_kind():
    cases = list(suite(CPU))
    order = spread(cases)
    assert sorted(order, key=str) == sorted(cases, key=str)

    def kinds(some):
        return {(case.head_dim, case.width_v, case.dtype, case.causal, case.layout) for case in some}

    assert kinds(order[: len(kinds(cases))]) == kinds(cases)


def test_all_variants_and_turns_are_contenders():
    one = Contender(backend="reference", variant="eager")
    assert contenders_of(["reference"], "all") == (one, replace(one, direction="backward"))
    assert contenders_of(["reference"], "all", ["forward"]) == (one,)
    first = Contender(backend="triton", turn=0)
    assert contenders_of(["triton"], "turns", ["forward"]) == (first,)
    found = contenders_of(["triton"], "turns", ["forward"], all_turns=True)
    assert found == tuple(replace(first, turn=turn) for turn in range(len(found)))
    assert [str(it) for it in found[:2]] == ["triton", "triton-turn2"]


# ---------------------------------------------------------------- the report


def test_the_report_says_the_same_in_three_formats():
    who = (*REFERENCE, Contender(backend="reference", direction="backward"))
    run = run_case(CASE, who, CPU)
    report = report_of(run, contenders=who)
    tables = make_tables(report)
    markdown, page, data = to_markdown(report, tables), to_html(report, tables), json.loads(to_json(report))
    for text in (markdown, page):
        for part in ("Passed: 2 runs of 1 cases", CASE.name, CASE.why, "fed by reference", "dk budget"):
            assert part in text
    forward, backward = data["results"]
    assert forward["status"] == "passed"
    assert forward["out"][1] == pytest.approx(run.results[0].scores[0].budget, rel=1e-2)
    assert (forward.get("direction"), backward["direction"], backward["fed_by"]) == (None, "backward", "reference")
    assert [len(backward[tensor]) for tensor in ("dq", "dk", "dv")] == [4, 4, 4]
    assert "http" not in page  # no resource but itself


# ---------------------------------------------------------------- the command


def test_a_package_of_an_extra_is_asked_for_before_the_run(capsys, monkeypatch, tmp_path):
    """Without it nothing of bench could be imported, either."""
    code = "import sys, bench.cli, parity.__main__; print({'jinja2', 'altair', 'vl_convert'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else found(name))
    with pytest.raises(SystemExit):
        main(["--case", "gqa*", "--device", "cpu", "--out", str(tmp_path)])
    assert "needs jinja2: pip install 'multiattn[report]'" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_command_writes_the_report_and_exits_zero(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    arguments = ["--backend", "reference", "--case", "gqa*", "--jobs", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"parity.md", "parity.json", "parity.html"}
    assert not any(str(tmp_path) in path.read_text() for path in tmp_path.iterdir()), "a folder of this machine"
    assert "Passed: 6 runs of 3 cases" in capsys.readouterr().out
    assert progress.VARIABLE not in os.environ, "a demo goes on in the same process"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--case", "no_such_case"], "got 'no_such_case'"),
        (["--jobs", "0"], "allowed whole numbers from 1 on"),
        (["--direction", "sideways"], "got 'sideways'; allowed forward, backward"),
        (["--device", "cuda"], "torch finds no GPU"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code
    assert message in f"{stop.value} {capsys.readouterr().err}"


# ---------------------------------------------------------------- gradients: what a backward is given, who feeds whom


CPU_CASES = [case for case in suite(CPU) if not case.no_backward]
BACKWARD = Contender(backend="reference", direction="backward")


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


def test_a_workspace_that_is_read_before_it_is_written_shows(monkeypatch):
    """Memory that the allocator hands out may by chance be zero: here it is NaN."""
    good = registry.get("reference").backward.prepare

    def prepare(plan):
        def launch(operands):
            good(plan)(operands)
            operands.dq.add_(torch.empty(operands.dq.shape))

        return launch

    own = registry.get("reference")
    changed = replace(own, backward=Op(variants=own.backward.variants, prepare=prepare))
    monkeypatch.setattr(registry, "get", lambda name: changed)
    (result,) = run_case(BY_NAME["mqa5_b2"], (BACKWARD,), CPU).results
    assert "dq has NaN or inf in the wrong places" in result.message


def test_poison_ends_with_its_block():
    with poisoned_workspaces():
        assert bool(torch.empty(3).isnan().all())
    assert torch.get_deterministic_debug_mode() == 0


def test_a_case_without_backward_is_excluded_with_its_reason():
    (forward, backward) = run_case(BY_NAME["nan_k_full"], (Contender(backend="reference"), BACKWARD), CPU).results
    assert forward.status == "passed"
    assert (backward.status, backward.reasons) == ("excluded", (BY_NAME["nan_k_full"].no_backward,))


def test_a_backward_whose_forward_is_wrong_is_not_judged(monkeypatch):
    monkeypatch.setattr(multiattn, "launch", lambda *tensors, **optional: None)
    (result,) = run_case(BY_NAME["gqa8_b1"], (BACKWARD,), CPU).results
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
