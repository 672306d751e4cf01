"""``MULTIATTN_LOG=plan``: one line on stderr per launch, by every way to a launcher; nothing at all when off."""

import re

import pytest
import torch

import multiattn
from multiattn.run.log import logged

LINE = (
    r"multiattn launch: backend=reference direction=(?P<direction>\w+) variant=eager arch=cpu B=1 Hq=4 Hkv=2 Sq=5 "
    r"Skv=7 D=8 Dv=8 dtype=fp64 mask=causal deterministic=yes workspace=0 config\[\] rule\[.+\]"
)


@pytest.fixture
def inputs():
    return tuple(torch.randn(1, heads, seq, 8, dtype=torch.float64) for heads, seq in ((4, 5), (2, 7), (2, 7)))


@pytest.fixture
def log(fresh_calls, monkeypatch, capsys):
    """Sets the variable for launchers still to be prepared, and reads the directions of the lines that came."""

    def directions():
        return [re.fullmatch(LINE, line)["direction"] for line in capsys.readouterr().err.splitlines()]

    monkeypatch.setenv("MULTIATTN_LOG", "plan")
    return directions


def test_one_line_for_each_launch(inputs, log):
    q, k, v = inputs
    multiattn.fmha(q[:, :, :0], k, v)
    assert log() == [], "nothing was launched"
    for _ in range(2):
        multiattn.fmha(q, k, v, causal=True)
    assert log() == ["forward"] * 2
    multiattn.fmha(q.requires_grad_(), k, v, causal=True).sum().backward()
    assert log() == ["forward", "backward"]


def test_launches_of_a_plan_and_of_a_compiled_graph(inputs, log):
    q, k, v = inputs
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    multiattn.launch(multiattn.explain(q, k, v, causal=True), q, k, v, out, lse)
    plan = multiattn.explain(q, k, v, causal=True, direction="backward")
    multiattn.launch_backward(plan, q, k, v, out, lse, out, None, *map(torch.empty_like, inputs))
    assert log() == ["forward", "backward"]
    compiled = torch.compile(lambda *of: multiattn.fmha(*of, causal=True), backend="aot_eager", fullgraph=True)
    compiled(q.requires_grad_(), k, v).sum().backward()
    assert log() == ["forward", "backward"]


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
