"""``MULTIATTN_LOG=plan``: one line on stderr per launch, by every way to a launcher; nothing at all when off."""

import re

import pytest
import torch

import multiattn
from multiattn.run import calls
from multiattn.run.log import logged

LINE = (
    r"multiattn launch: backend=reference direction={direction} variant=eager arch=cpu B=1 Hq=4 Hkv=2 Sq=5 Skv=7 D=8 "
    r"dtype=fp64 mask=causal deterministic=yes workspace=0 config\[\] rule\[.+\]"
)


@pytest.fixture
def inputs():
    return tuple(torch.randn(1, heads, seq, 8, dtype=torch.float64) for heads, seq in ((4, 5), (2, 7), (2, 7)))


@pytest.fixture
def log(monkeypatch, capsys):
    """Sets the variable for launchers still to be prepared, and reads the lines that came."""

    def forget():
        calls._forward.clear()
        calls._backward.clear()

    monkeypatch.setenv("MULTIATTN_LOG", "plan")
    forget()
    yield lambda: capsys.readouterr().err.splitlines()
    forget()


def is_line(line, direction):
    return re.fullmatch(LINE.format(direction=direction), line) is not None


def test_one_line_for_each_launch(inputs, log):
    q, k, v = inputs
    for _ in range(2):
        multiattn.fmha(q, k, v, causal=True)
    assert [is_line(line, "forward") for line in log()] == [True, True]
    multiattn.fmha(q.requires_grad_(), k, v, causal=True).sum().backward()
    first, second = log()
    assert is_line(first, "forward")
    assert is_line(second, "backward")


def test_launches_of_a_plan_and_of_a_compiled_graph(inputs, log):
    q, k, v = inputs
    plan = multiattn.explain(q, k, v, causal=True)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    multiattn.launch(plan, q, k, v, out, lse)
    assert [is_line(line, "forward") for line in log()] == [True]
    plan = multiattn.explain(q, k, v, causal=True, direction="backward")
    dq, dk, dv = (torch.empty_like(tensor) for tensor in inputs)
    multiattn.launch_backward(plan, q, k, v, out, lse, out, None, dq, dk, dv)
    assert [is_line(line, "backward") for line in log()] == [True]
    compiled = torch.compile(lambda *of: multiattn.fmha(*of, causal=True), backend="aot_eager", fullgraph=True)
    compiled(q.requires_grad_(), k, v).sum().backward()
    assert [is_line(line, way) for line, way in zip(log(), ("forward", "backward"), strict=True)] == [True, True]


def test_off_is_the_launcher_itself(inputs, monkeypatch):
    plan = multiattn.explain(*inputs)
    launcher = object()
    monkeypatch.delenv("MULTIATTN_LOG", raising=False)
    assert logged(plan, launcher) is launcher
    monkeypatch.setenv("MULTIATTN_LOG", "")
    assert logged(plan, launcher) is launcher


def test_a_wrong_value_is_told_with_the_right_one(inputs, log, monkeypatch):
    monkeypatch.setenv("MULTIATTN_LOG", "plans")
    with pytest.raises(ValueError, match="MULTIATTN_LOG: got 'plans'; allowed plan, or unset"):
        multiattn.fmha(*inputs)


def test_no_launch_no_line(inputs, log):
    q, k, v = inputs
    multiattn.fmha(q[:, :, :0], k, v)
    assert log() == []
