"""Compiling a backward's kernels in a thread, while the forward's are compiled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from multiattn import Problem
from multiattn.operands import Operands, Options
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, get, make_plan
from multiattn.run import ahead, calls
from multiattn.run.ahead import Ahead, begin, following
from multiattn.run.calls import Ready


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(ahead, "_cores", lambda: ahead.CORES)


def under_way(then=int):
    """Begin something that goes on when the event beside it is set."""
    go, begun = threading.Event(), threading.Event()

    def task():
        begun.set()
        assert go.wait(60)
        then()

    it = Ahead(task)
    it.start()
    assert begun.wait(60)
    return it, go


def test_it_begins_when_python_is_done_or_else_at_the_end():
    seen = []
    with following(early := Ahead(lambda: seen.append("early"))):
        assert seen == []
        begin()
        early._thread.join()
        assert seen == ["early"]
    with following(late := Ahead(lambda: seen.append("late"))), following(None):
        assert seen == ["early"]
    late._thread.join()
    late.wait()
    late.start()  # once is enough
    begin()
    assert seen == ["early", "late"]


@pytest.mark.parametrize("why", ["a forward that fails", "a switch", "few cores"])
def test_nothing_is_compiled_after(why, monkeypatch):
    if why == "a switch":
        monkeypatch.setenv(ahead.SWITCH, "0")
    elif why == "few cores":
        monkeypatch.setattr(ahead, "_cores", lambda: ahead.CORES - 1)
    never = Ahead(lambda: pytest.fail("started"))
    with contextlib.suppress(ValueError), following(never):
        if why == "a forward that fails":
            raise ValueError
        begin()
    begin()
    assert never._thread.ident is None


def test_what_has_its_turn_may_wait_for_another_that_a_call_does():
    """As a backward ahead of another language waits for Triton's hash, which the call of a Triton forward claimed."""
    for other in (Ahead(int), Ahead(int, takes_turn=False)):
        has_turn, go = under_way(other.wait)
        other.wait()  # claimed by this call
        other.start()
        go.set()
        has_turn._thread.join(60)
        assert not has_turn._thread.is_alive()


def test_errors_are_left_to_the_call_and_one_runs_at_a_time():
    running, most = [], []

    def task():
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        raise RuntimeError("not told")

    them = [Ahead(task) for _ in range(5)]
    for it in them:
        it.start()
    for it in them:
        it._thread.join()
        it.wait()
    assert most == [1] * 5


def test_a_call_waits_for_what_is_under_way_and_for_nothing_that_is_not():
    seen = []
    running, go = under_way(lambda: seen.append("under way"))
    queued, never = Ahead(lambda: seen.append("queued")), Ahead(lambda: seen.append("never"))
    queued.start()
    queued.wait()  # its turn has not come: the call compiles itself
    never.wait()
    never.start()
    threading.Timer(0.05, go.set).start()
    running.wait()
    assert seen == ["under way"]
    for it in (queued, never):
        it._thread.join()
    assert seen == ["under way"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_waits_for_no_thread_of_its_parent():
    (running, go), queued = under_way(), Ahead(int)
    queued.start()
    child = os.fork()
    if not child:
        done = []
        own = Ahead(lambda: done.append(1))
        own.start()
        own._thread.join()
        for it in (running, queued, own):
            it.wait()
        os._exit(0 if done else 1)
    for _ in range(600):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    go.set()
    assert (found, status) == (child, 0)


def test_an_interpreter_that_ends_waits_for_it_and_starts_none():
    program = """
import atexit, time
from multiattn.run.ahead import Ahead
def slow():
    time.sleep(0.3)
    print("done", flush=True)
def late():
    it = Ahead(lambda: None)
    it.start()
    it.wait()
    print("end", flush=True)
atexit.register(late)
Ahead(slow).start()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stdout.split(), ran.stderr) == (["done", "end"], "")


# ---------------------------------------------------------------- of a call


def ready(monkeypatch, seen, **sizes):
    """A forward with its gradient, as on a GPU, whose compilers and launchers go into `seen`."""
    problem = Problem.contiguous(**{"batch": 1, "heads_q": 2, "seq_q": 64, "head_dim": 64, **sizes})
    plans = [make_plan(get("triton"), problem, ARCHS["sm90"], direction=it, probe=False) for it in DIRECTIONS]
    device = torch.device("cuda", 0)

    def prepare(plan, device):
        seen.append(f"prepare {plan.direction}")
        return lambda operands: seen.append(f"launch {plan.direction}")

    def compile_ahead(plan):
        begun.set()
        time.sleep(0.05)
        seen.append(f"compile {plan.direction}")

    monkeypatch.setattr(calls, "prepare", prepare)
    backend = SimpleNamespace(op=lambda direction: SimpleNamespace(compile_ahead=compile_ahead))
    monkeypatch.setattr(calls, "registry", SimpleNamespace(get=lambda name: backend))
    monkeypatch.setattr(calls.compat, "allocator", lambda layouts, device: lambda: [])
    begun, backward = threading.Event(), Ready(plans[1], Options(), device)
    return Ready(plans[0], Options(), device, backward), Ready(plans[0], Options(), device), backward, begun


NOTHING = Operands(*(torch.empty(0) for _ in range(3)))


def test_a_forward_has_its_backward_compiled_which_waits_for_that(monkeypatch):
    seen = []
    with_grad, _, backward, begun = ready(monkeypatch, seen)
    with_grad.launch(NOTHING)
    assert begun.wait(60)
    for call in (backward, with_grad, backward):
        call.launch(NOTHING)
    first = ["prepare forward", "launch forward", "compile backward", "prepare backward", "launch backward"]
    assert seen == [*first, "launch forward", "launch backward"]


@pytest.mark.parametrize(("wants_gradient", "seq_kv"), [(False, 64), (True, 0)])
def test_nothing_is_compiled_for_no_work_or_a_gradient_that_nobody_wants(wants_gradient, seq_kv, monkeypatch):
    seen = []
    with_grad, without, backward, _ = ready(monkeypatch, seen, seq_kv=seq_kv)
    (with_grad if wants_gradient else without).launch(NOTHING)
    backward.launch(NOTHING)
    assert seen == ["prepare forward", "launch forward", "prepare backward", "launch backward"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_compiles_ahead_and_nothing_for_a_cpu(backend):
    for direction in DIRECTIONS:
        problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=64)
        plan = make_plan(get(backend), problem, ARCHS["cpu"], direction=direction, probe=False)
        compile_ahead = get(backend).op(direction).compile_ahead
        assert compile_ahead is not None
        assert not get(backend).probe_compiler()
        compile_ahead(plan)
