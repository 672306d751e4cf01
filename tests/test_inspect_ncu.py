"""The command line for Nsight Compute, the child that it watches, and what it prints, as it prints it."""

import shlex
import sys
from dataclasses import replace

import pytest
import torch

from multiattn import __main__ as cli
from multiattn.inspect import ncu
from multiattn.inspect.ncu import METRICS, ProfilerError, command, launcher, read_csv, report
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU, by_name
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem

SM90 = by_name("sm90")
DURATION, DRAM = METRICS["duration"], METRICS["DRAM"]
STALLS = [
    f"smsp__average_warps_issue_stalled_{what}_per_issue_active.ratio"
    for what in ("barrier", "gmma", "selected", "wait")
]
HEAD = ("ID", "Process ID", "Kernel Name", "Block Size", "Grid Size", "CC", DURATION, DRAM, *STALLS, "sm__new.sum")


def line(*cells):
    return ",".join(f'"{cell}"' for cell in cells)


def launch(place, kernel, *numbers):
    return line(place, "4711", kernel, "(128, 1, 1)", "(512, 1, 1)", "9.0", *numbers)


RAW = "\n".join(
    [
        "==PROF== Connected to process 4711 (python3.12)",
        '==PROF== Profiling "forward" - 0: 0%....100% - 9 passes',
        "whatever the child says",
        line(*HEAD),
        line(*[""] * 6, "nsecond", "%", *["inst"] * 4, ""),
        launch(0, "forward_bf16(multiattn::ForwardParams)", "1,234,567", "12.5", "0.25", "3.5", "1", "1.5", "7"),
        launch(1, "convert_dq", "12.5", "40", "0", "0", "n/a", "n/a", "nan"),
        launch(2, "convert_dq", "13.5", "", "0", "0", "n/a", "n/a", "nan"),
        "",
    ]
)


def test_a_column_for_each_metric_is_read_and_told():
    found = read_csv(RAW)
    assert list(found) == ["forward_bf16", "convert_dq"]
    assert found["forward_bf16"][DURATION] == (1234567, "nsecond")
    latest = {DURATION: (13.5, "nsecond"), DRAM: (40, "%")}
    assert found["convert_dq"] == {**latest, **dict.fromkeys(STALLS[:2], (0, "inst"))}
    first, second = report(found).split("\n\n")
    rows = [row.split() for row in first.splitlines()]
    assert rows[0] == ["forward_bf16"]
    assert ["DRAM", "12.5", "%"] in rows
    assert [row[1] for row in rows if row[0] == "waits:"] == ["gmma", "wait", "barrier"]  # the longest first
    assert "13.5 nsecond" in second
    assert ("sm__new.sum" in first, "sm__new.sum" in report(found, ["sm__new.sum"])) == (False, True)


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("", "got no table with a row of units; allowed ncu --csv --page raw"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have", "ERR_NVGPUCTRPERM - The user does"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.", "No kernels were profiled"),
        ("\n".join([*RAW.splitlines()[:4], *RAW.splitlines()[5:]]), "got no table with a row of units"),
        ("\n".join(RAW.splitlines()[:5]), "ncu printed no value"),
        (f"==ERROR== Failed to find metric\n{line(*HEAD)}", "==ERROR== Failed to find metric"),
    ],
)
def test_what_ncu_did_not_count_it_says(printed, message):
    with pytest.raises(ProfilerError, match=message):
        read_csv(printed)


# ---------------------------------------------------------------- the command and its child


def plan_for(backend, *, direction="forward", variant=None, arch=SM90, **changes):
    problem = Problem.contiguous(**{"batch": 1, "heads_q": 4, "heads_kv": 2, "seq_q": 40, "head_dim": 64, **changes})
    return make_plan(registry.get(backend), problem, arch, direction=direction, variant=variant, probe=False)


@pytest.mark.parametrize(
    "plan",
    [
        plan_for("cuda", causal=True),
        plan_for("cuda", direction="backward"),
        plan_for("triton", dtype="fp16", seq_kv=56, scale=0.3),
        plan_for("cutile", direction="backward", variant="two_pass", scale=-1.0),
    ],
    ids=str,
)
def test_the_command_can_be_pasted_and_its_child_launches_that_plan(plan, monkeypatch, capsys):
    words = shlex.split(shlex.join(command(plan, metrics=["sm__new.sum"])))
    place = words.index(sys.executable)
    before, child = words[:place], words[place + 1 :]
    assert before[0] == "ncu"
    assert {"--csv", "--page", "raw", "--profile-from-start", "off"} <= set(before)
    assert before[before.index("--metrics") + 1].split(",") == [*METRICS.values(), "sm__new.sum"]
    assert child[:2] == ["-m", "multiattn"]
    launched = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ncu, "launch_once", lambda plan, device: launched.append(plan))
    for module in ("multiattn.inspect.ncu", "multiattn.inspect.options"):
        monkeypatch.setattr(f"{module}.detect", lambda device: SM90)
    assert cli.main(child[2:]) == 0
    assert [replace(it, why="") for it in launched] == [replace(plan, why="")]
    if plan.backend == "cutile":  # its kernels for both have one name: ncu would measure the wrong one
        assert cli.main([{"sm90": "sm100"}.get(word, word) for word in child[2:]]) == 2
        assert "--arch: got sm100; allowed here: sm90" in capsys.readouterr().err


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_child_launches_once_between_start_and_stop(monkeypatch, direction):
    plan = plan_for("reference", arch=CPU, direction=direction, seq_q=8, head_dim=16, causal=True)
    happened = []
    call = launcher(plan, torch.device("cpu"))
    monkeypatch.setattr(ncu, "launcher", lambda plan, device: lambda: happened.append(call() or plan.direction))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: happened.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: happened.append("stop"))
    ncu.launch_once(plan, torch.device("cpu"))
    assert happened == [*[direction] * ncu.WARM_UPS, "start", direction, "stop"]


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Run the command where there is neither ncu nor GPU."""
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        status = cli.main(["ncu", *map(str, arguments)])
        printed = capsys.readouterr()
        return status, printed.out or printed.err

    return run


PLAN = ("--backend", "cuda", "--shape", "4,16,4096,128", "--causal")


def test_the_command_prints_reads_and_runs(command_line, monkeypatch, tmp_path):
    status, printed = command_line(*PLAN, "--metric", "sm__new.sum", "--arch", "sm80")
    assert status == 0
    assert "sm__new.sum " in printed
    assert "--launch --backend cuda" in printed
    assert "--arch sm80" in printed
    for content, message in ((b"\x7fELF\xff\xfe", "can't decode"), (b"", "wrong.csv: got no table")):
        (tmp_path / "wrong.csv").write_bytes(content)
        status, printed = command_line("--read", tmp_path / "wrong.csv")
        assert (status, message in printed) == (1, True)
    (tmp_path / "found.csv").write_text(RAW)
    status, printed = command_line("--read", tmp_path / "found.csv")
    assert (status, "waits: gmma" in printed) == (0, True)
    tool = tmp_path / "ncu"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/found.csv\n")
    tool.chmod(0o755)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: str(tool))
    assert command_line(*PLAN, "--run") == (1, "python -m multiattn ncu: there is no GPU here that torch can use\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in ("multiattn.inspect.ncu", "multiattn.inspect.options", "multiattn.__main__"):
        monkeypatch.setattr(f"{module}.detect", lambda device: SM90)
    assert command_line(*PLAN, "--run") == (0, printed)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "TOOLKIT", tmp_path / "none")
    status, printed = command_line(*PLAN, "--run")
    assert (status, "there is no ncu: not on PATH" in printed) == (1, True)
