"""A caller who waits is told, by lines of the standard logger and in a terminal by a bar; quick work is not told."""

import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import multiattn
from multiattn import progress
from multiattn.bars import Bar
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import get, make_plan
from multiattn.problem import Problem
from multiattn.progress import LongWork
from multiattn.run.ahead import Ahead

STEPS = 4


@pytest.fixture
def patience(monkeypatch):
    """Callers here wait a twentieth of a second before they are told; the value is that time."""
    monkeypatch.setattr(progress, "DELAY_S", 0.05)
    monkeypatch.setattr(progress, "REDRAW_S", 0.01)
    monkeypatch.setattr(progress, "_told", set())
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    return 0.05


def until(condition):
    """Wait for it, on a busy machine for seconds."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to pass")


@pytest.fixture
def impatience(patience, monkeypatch):
    """All work is told, and begins when it is."""
    enter = LongWork.__enter__

    def enter_told(work):
        enter(work)
        until(lambda: work._kind in progress._told)
        return work

    def begin():
        monkeypatch.setattr(progress, "DELAY_S", 0.0)
        monkeypatch.setattr(LongWork, "__enter__", enter_told)

    return begin


@pytest.fixture
def terminal(monkeypatch):
    """Puts something for stderr that is a terminal, or not; call it in a test, as pytest has its own until then."""

    def put(is_terminal):
        stream = io.StringIO()
        stream.isatty = lambda: is_terminal
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return put


def work_slowly(patience, *, steps=STEPS, kind="test", fails=False):
    with LongWork("testing", kind=kind, total=steps, note="a note") as work:
        for _ in work.over(range(steps)):
            time.sleep(patience)
        if not steps:
            time.sleep(2 * patience)
        if fails:
            raise RuntimeError("wrong")


def texts(caplog, level=logging.WARNING):
    return [it.getMessage() for it in caplog.records if it.name == "multiattn" and it.levelno == level]


def test_quick_work_is_not_told(caplog):
    with caplog.at_level(logging.DEBUG), LongWork("testing", kind="test") as work:
        assert list(work.over("ab")) == ["a", "b"]
    work._watcher.join()
    assert caplog.records == []


@pytest.mark.parametrize(("fails", "end"), [(False, "done in"), (True, "failed after")])
def test_slow_work_has_a_line_before_and_one_after(fails, end, patience, caplog):
    """An error passes through."""
    with pytest.raises(RuntimeError, match="wrong") if fails else contextlib.nullcontext():
        work_slowly(patience, fails=fails)
    first, last = texts(caplog)
    assert first.startswith("multiattn: testing: ")
    assert f" of {STEPS} steps in " in first
    assert first.endswith("; a note")
    assert last.startswith(f"multiattn: testing: {end} ")


def test_a_single_long_step_is_told_while_it_lasts(patience, caplog):
    with LongWork("compiling", kind="test"):
        until(lambda: texts(caplog))
        assert texts(caplog)[0].startswith("multiattn: compiling: ")
        assert texts(caplog)[0].endswith(" s so far")
    assert len(texts(caplog)) == 2


def test_only_the_first_of_a_kind_is_a_warning(patience, caplog):
    with caplog.at_level(logging.INFO, "multiattn"):
        for kind in ("one", "one", "other"):
            work_slowly(patience, kind=kind)
    assert len(texts(caplog)) == 4
    assert len(texts(caplog, logging.INFO)) == 2


def test_each_kernel_on_a_cpu_is_told_once(patience, caplog):
    """A backward was silent after its forward had been told, for a minute."""
    for kernel in ("forward", "backward", "forward"):
        with progress.interpreting(kernel, STEPS):
            time.sleep(4 * patience)
    assert [kernel in line for kernel, line in zip(("forward", "backward"), texts(caplog)[::2], strict=True)] == [
        True
    ] * 2


@pytest.mark.parametrize(
    ("setting", "is_terminal", "is_silenced", "steps", "lines", "has_bar"),
    [
        ("", True, False, STEPS, 2, True),
        ("", True, False, 0, 2, False),
        ("", False, False, STEPS, 2, False),
        ("", True, True, STEPS, 0, False),
        ("0", True, False, STEPS, 0, False),
        ("1", False, False, STEPS, 2, True),
        ("1", False, True, STEPS, 0, True),
    ],
)
def test_who_sees_lines_and_bars(
    setting, is_terminal, is_silenced, steps, lines, has_bar, patience, terminal, caplog, monkeypatch
):
    stderr = terminal(is_terminal)
    monkeypatch.setenv(progress.VARIABLE, setting)
    with caplog.at_level(logging.ERROR if is_silenced else logging.NOTSET, "multiattn"):
        work_slowly(patience, steps=steps)
    assert len(texts(caplog)) == lines
    assert ("step" in stderr.getvalue()) == (f"/{STEPS} [" in stderr.getvalue()) == has_bar


class _Plain:
    """All that a program has to have where its own stream stands for stderr."""

    def write(self, text):
        return len(text)


def _closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("setting", ["", "1"])
@pytest.mark.parametrize("stderr", [None, _Plain(), _closed()], ids=["none", "plain", "closed"])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stderr_that_nobody_can_write_to_costs_the_bar_alone(setting, stderr, patience, caplog, monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, setting)
    with monkeypatch.context() as own:
        own.setattr(sys, "stderr", stderr)
        work_slowly(patience)
    assert len(texts(caplog)) == 2


def test_a_handler_that_hangs_holds_up_no_work_for_good(patience, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.1)
    free = threading.Event()
    monkeypatch.setattr(progress.log, "log", lambda *_: free.wait(20))
    work_slowly(patience)
    free.set()


def test_a_wrong_setting_is_told_with_the_right_ones(monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, "yes")
    with (
        pytest.raises(ValueError, match="MULTIATTN_PROGRESS: got 'yes'; allowed 0, 1, or unset"),
        LongWork("", kind=""),
    ):
        pass


@pytest.mark.parametrize("backend", ["triton", "cutile", "cuda"])
def test_kernels_on_the_cpu_are_told(backend, caplog, impatience):
    """Their results are the same."""
    if reasons := get(backend).probe(CPU):
        pytest.skip("; ".join(map(str, reasons)))
    q = torch.randn(1, 2, 70, 16, dtype=torch.float16)
    quiet = multiattn.fmha(q, q, q, backend=backend)
    impatience()
    told = multiattn.fmha(q, q, q, backend=backend)
    assert torch.equal(quiet, told)
    assert any("on the CPU: " in it and progress.NOTE in it for it in texts(caplog))


def test_a_large_reference_is_told_on_a_cpu(monkeypatch, caplog, impatience):
    q = torch.randn(1, 2, 70, 16)
    impatience()
    multiattn.fmha(q, q, q)
    assert texts(caplog) == []
    monkeypatch.setattr(sys.modules["multiattn.reference"], "_TOLD_ELEMENTS", q.numel())
    multiattn.fmha(q, q, q)
    assert "computing the reference" in texts(caplog)[0]


def packed(sequences, length):
    q = torch.randn(sequences * length, 1, 16)
    starts = torch.arange(0, len(q) + 1, length, dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": length, "max_seqlen_kv": length}
    return multiattn.fmha_varlen(q.requires_grad_(), q, q, **lengths)


def cached(sequences, length):
    cache = torch.randn(sequences, 1, length, 16)
    lengths = torch.full((sequences,), length, dtype=torch.int32)
    return multiattn.fmha_kvcache(cache[:, :, :1], cache, cache, seqlens_kv=lengths)


@pytest.mark.parametrize("call", [packed, cached])
def test_many_small_references_are_told_as_one(call, monkeypatch, caplog, impatience):
    """A packed batch of 300 sequences took 54 s in silence, as none of them was large."""
    monkeypatch.setattr(sys.modules["multiattn.reference"], "_TOLD_ELEMENTS", 32 * 16 * 16)
    impatience()
    out = call(32, 16)
    assert len(texts(caplog)) == 2
    if out.requires_grad:
        caplog.clear()
        progress._told.clear()
        out.sum().backward()
        assert len(texts(caplog)) == 2


@pytest.mark.parametrize("backend", ["triton", "cutile", "cuda"])
def test_a_compilation_for_a_gpu_is_told(backend, impatience, caplog, monkeypatch, tmp_path):
    """Once: kernels that are known cost no thread."""
    if reasons := get(backend).probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))
    monkeypatch.setenv("MULTIATTN_CACHE_DIR", str(tmp_path / "cache"))
    impatience()
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=24, dtype="bf16")
    plan = make_plan(get(backend), problem, ARCHS["sm80"], probe=False)
    for lines in (2, 0):
        get(backend).op("forward").compile_ahead(plan)
        told = [it for it in texts(caplog) if it.startswith(f"multiattn: compiling {backend} kernels for sm80: ")]
        assert len(told) == lines
        caplog.clear()
        progress._told.clear()


def test_waiting_for_a_thread_that_compiles_is_told(impatience, caplog):
    began = threading.Event()
    task = Ahead(lambda: began.set() or until(lambda: texts(caplog)))
    task.start()
    began.wait()
    task.wait()
    assert "waiting for a thread that compiles" in texts(caplog)[0]
    impatience()
    task.wait()
    assert len(texts(caplog)) == 2


def test_a_forked_child_works_on(patience, caplog):
    """In the midst of work that a thread of the parent watches."""
    with LongWork("testing", kind="parent"):
        time.sleep(2 * patience)
        child = os.fork()
        if not child:
            with LongWork("testing", kind="child"):
                time.sleep(2 * patience)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_threads_watch_their_own_work(patience, caplog):
    threads = [threading.Thread(target=work_slowly, args=(patience,), kwargs={"kind": str(i)}) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts(caplog)) == 8


def test_without_any_setup_of_logging_a_caller_reads_it_on_stderr():
    code = (
        "import time; from multiattn import progress; progress.DELAY_S = 0.05\n"
        "with progress.LongWork('testing', kind='test'): time.sleep(0.2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = done.stderr.splitlines()
    assert first.endswith(" s so far")
    assert last.startswith("multiattn: testing: done in ")


def test_a_bar_tells_an_estimate_when_enough_is_known():
    """The first of 200 items takes 30 s to start, and each later one a second: never is an hour told."""
    bar, now = Bar(total=200, file=io.StringIO(), mininterval=0), [0.0]
    bar.start_t, bar._time = 0.0, lambda: now[0]
    said = []
    for seconds in (30.0, *[1.0] * 20):
        now[0] += seconds
        bar.update()
        said.append(str(bar))
    assert [("<" in it) for it in said] == [False] * 10 + [True] * 11
    assert "11/200 [00:40<03:09" in said[10]
    assert "21/200 [00:50<02:59" in said[20]
