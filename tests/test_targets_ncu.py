"""The command line for Nsight Compute, the child that it watches, and what it prints, as it prints it."""

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace

import pytest
import torch

from multiattn.inspect import ncu, ncu_child
from multiattn.inspect.ncu import METRICS, Measured, Predicted, ProfilerError, command, predict, read_csv, report
from multiattn.inspect.ncu_child import launcher, override, plan_of
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU, by_name
from multiattn.plan.backend import Compiled, make_plan
from multiattn.plan.support import Unsupported
from multiattn.problem import Problem

SM90 = by_name("sm90")
DURATION, REGISTERS, STATIC, DYNAMIC = (METRICS[it] for it in ("duration", "registers", "static smem", "dynamic smem"))
FIRST = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")
SECOND = ("Device", "CC")


def line(*cells):
    return ",".join(f'"{cell}"' for cell in cells)


def launch(place, kernel):
    return (place, "4711", "python3.12", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)", "(512, 1, 1)", "0", "9.0")


SAID = ["==PROF== Connected to process 4711 (python3.12)", '==PROF== Profiling "forward" - 0: 0%....100% - 9 passes']
RAW = "\n".join(
    [
        *SAID,
        "whatever the child says",
        "==PROF== Disconnected from process 4711",
        line(*FIRST, *SECOND, DURATION, REGISTERS, STATIC, DYNAMIC, "sm__unknown.sum"),
        line(*[""] * 11, "nsecond", "register/thread", "byte/block", "byte/block", ""),
        line(*launch(0, "forward_bf16(multiattn::ForwardParams)"), "1,234,567", "255", "1,024", "65,536", "n/a"),
        line(*launch(1, "convert_dq"), "12.5", "40", "0", "0", "nan"),
        line(*launch(2, "convert_dq"), "13.5", "40", "0", "0", ""),
        "",
    ]
)
DETAILS = "\n".join(
    [
        *SAID,
        line(*FIRST, *SECOND, "Section Name", "Metric Name", "Metric Unit", "Metric Value"),
        line(*launch(0, "forward_bf16"), "Command line profiler metrics", DURATION, "msecond", "1.234567"),
        line(*launch(0, "forward_bf16"), "Command line profiler metrics", REGISTERS, "register/thread", "255"),
        line(*launch(1, "convert_dq"), "Command line profiler metrics", DURATION, "ns", "(!) n/a"),
    ]
)


def test_a_column_for_each_metric_is_read():
    found = read_csv(RAW)
    assert list(found) == ["forward_bf16", "convert_dq"]
    assert found["forward_bf16"] == {
        DURATION: Measured(value=1234567, unit="nsecond"),
        REGISTERS: Measured(value=255, unit="register/thread"),
        STATIC: Measured(value=1024, unit="byte/block"),
        DYNAMIC: Measured(value=65536, unit="byte/block"),
    }
    assert found["convert_dq"][DURATION].value == 13.5  # the latest


def test_a_line_for_each_metric_is_read():
    assert read_csv(DETAILS) == {
        "forward_bf16": {
            DURATION: Measured(value=1.234567, unit="msecond"),
            REGISTERS: Measured(value=255, unit="register/thread"),
        }
    }


@pytest.mark.parametrize(
    ("value", "unit", "base"),
    [(2, "us", 2e3), (2, "usecond", 2e3), (3, "Kbyte/block", 3e3), (4, "byte/block", 4), (5, "%", 5), (6, "", 6)],
)
def test_units_are_those_of_ncu(value, unit, base):
    assert Measured(value=value, unit=unit).base == base


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("", "ncu printed no table"),
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access",
            "ERR_NVGPUCTRPERM - The user does",
        ),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.", "No kernels were profiled"),
        ("\n".join(RAW.splitlines()[:5]), "a table without a row of units"),
        ("\n".join(RAW.splitlines()[:6]), "ncu printed no value"),
        (f"==ERROR== Failed to find metric\n{DETAILS.splitlines()[2]}", "==ERROR== Failed to find metric"),
        (line(*FIRST, *SECOND, "Metric Name"), "without Metric Unit or Metric Value; it has ID, "),
    ],
)
def test_what_ncu_did_not_count_it_says(printed, message):
    with pytest.raises(ProfilerError, match=message):
        read_csv(printed)


# ---------------------------------------------------------------- the command and its child


def small(**changes):
    return Problem.contiguous(**{"batch": 1, "heads_q": 4, "heads_kv": 2, "seq_q": 40, "head_dim": 64, **changes})


def plan_for(backend, problem=None, **options):
    return make_plan(registry.get(backend), problem or small(causal=True), SM90, probe=False, **options)


PLANS = [
    plan_for("cuda"),
    plan_for("cuda", direction="backward"),
    plan_for("triton", small(dtype="fp16", seq_kv=56, scale=0.5)),
    plan_for("cutile", direction="backward", variant="two_pass"),
    plan_for("cuda", config=replace(plan_for("cuda").config, tile_n=32, stages=3)),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_command_can_be_pasted_and_its_child_launches_that_plan(plan):
    words = shlex.split(shlex.join(command(plan, kernels=("forward.x", "other"))))
    place = words.index(sys.executable)
    before, child = words[:place], words[place:]
    assert before[0] == "ncu"
    assert {"--csv", "--page", "raw", "--profile-from-start", "off"} <= set(before)
    pattern = before[before.index("--kernel-name") + 1].removeprefix("regex:")
    names = ("forward.x", "forward.x_Kt2", "other", "forwardyx", "vectorized_elementwise_kernel")
    assert [bool(re.match(pattern, name)) for name in names] == [True, True, True, False, False]
    assert before[before.index("--metrics") + 1].split(",") == list(METRICS.values())
    assert child[1:3] == ["-m", ncu.CHILD]
    assert replace(plan_of(json.loads(child[3]), SM90, probe=False), why="") == replace(plan, why="")
    assert "--kernel-name" not in command(plan)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_child_refuses_another_gpu_than_the_one_that_was_planned_for(arch):
    """Of cuTile, kernels for both have the same name: ncu would measure the wrong one and not say so."""
    plan = make_plan(registry.get("cutile"), small(), by_name(arch), probe=False)
    request = json.loads(command(plan)[-1])
    other = {"sm90": "sm100", "sm100": "sm90"}[arch]
    assert plan_of(request, by_name(arch), probe=False).arch.name == arch
    with pytest.raises(ValueError, match=f"arch: got {other}, the GPU's; allowed {arch}"):
        plan_of(request, by_name(other), probe=False)


def test_a_config_is_named_only_where_the_rules_do_not_give_it():
    assert ["config" in json.loads(ncu.request_of(plan)) for plan in PLANS] == [False] * 4 + [True]


def test_fields_of_a_config_within_a_config_are_replaced():
    backend = registry.get("cuda")
    nested = next(
        rule.config
        for variant in backend.backward.variants
        for rule in variant.rules
        if getattr(rule.config, "dq", None)
    )
    assert override(nested, {"dq": {"warps": 2}}).dq == replace(nested.dq, warps=2)
    for wrong in ({"no_such": 1}, {"warps": {"x": 1}}, {"no_such": {"x": 1}}):
        with pytest.raises(TypeError):
            override(nested, wrong)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({}, KeyError, "shape"),
        ({"shape": [1, 2, 0, 64], "backend": "cuda"}, ValueError, "one that needs a kernel"),
        ({"shape": [1, 2, 64, 64], "backend": "cuda", "direction": "up"}, ValueError, "allowed forward, backward"),
        ({"shape": [1, 2, 64, 64], "backend": "fast"}, ValueError, "backend: got 'fast'"),
        ({"shape": [1, 2, 64, 64], "backend": "cuda", "variant": "fast"}, ValueError, "variant: got 'fast'"),
        ({"shape": [1, 2, 64, 4096], "backend": "cuda"}, Unsupported, "head_dim"),
        ({"shape": [1, 2, 64, 64], "backend": "reference", "config": {"tile_m": 1}}, ValueError, "allowed none"),
    ],
)
def test_a_request_that_cannot_be_launched_says_why(request_, error, message):
    arch = CPU if request_.get("backend") == "reference" else SM90
    with pytest.raises(error, match=message):
        plan_of(request_, arch, probe=False)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_child_launches_once_between_start_and_stop(monkeypatch, capsys, direction):
    request = {"backend": "reference", "shape": [1, 2, 8, 16], "kv_heads": 1, "direction": direction, "causal": True}
    assert (ncu_child.main([]), ncu_child.main([json.dumps(request)] * 2)) == (2, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ncu_child.main([json.dumps(request)]) == 1
    assert "no GPU" in capsys.readouterr().err
    happened = []

    def counted(plan, device):
        call = launcher(plan, torch.device("cpu"))
        return lambda: happened.append(call() or plan.direction)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ncu_child, "detect", lambda device: CPU)
    monkeypatch.setattr(ncu_child, "launcher", counted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: happened.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: happened.append("stop"))
    assert ncu_child.main([json.dumps(request)]) == 0
    assert happened == [*[direction] * ncu_child.WARM_UPS, "start", direction, "stop"]
    assert ncu_child.main(["{}"]) == 1
    assert "nothing to launch" in capsys.readouterr().err


# ---------------------------------------------------------------- beside what was predicted


def compiled(kernel, **values):
    return Compiled(kernel=kernel, seconds=1.0, cubin=b"", **values)


def test_what_was_measured_stands_beside_what_was_predicted():
    kernels = [compiled("forward_bf16", threads=128, registers=250, smem_bytes=66560), compiled("forward")]
    facts = predict(plan_for("cuda"), kernels)
    assert facts == (
        Predicted(kernel="forward_bf16", registers=250, smem_bytes=66560, occupancy=12.5),
        Predicted(kernel="forward"),
    )
    first, second = report(read_csv(RAW), facts).split("\n\n")
    table = [re.split(r"\s{2,}", row.strip()) for row in first.splitlines()]
    assert table == [
        ["forward_bf16"],
        ["predicted", "measured"],
        ["registers", "250", "255 register/thread"],
        ["smem", "66,560", "66,560 byte/block"],
        ["occupancy", "12.5", "-"],
        ["duration", "-", "1,234,567 nsecond"],
    ]
    assert re.search(r"registers +- +40 register/thread", second)
    assert "13.5 nsecond" in report({"x": read_csv(RAW)["convert_dq"]})


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Run the command where there is neither ncu nor GPU, with a compiler that needs no time."""
    made = compiled("forward_bf16", threads=128, registers=250, smem_bytes=66560)
    cuda = registry.get("cuda")
    quick = replace(cuda, forward=replace(cuda.forward, compile=lambda plan: (made,)), probe_compiler=lambda: ())
    monkeypatch.setattr(ncu.registry, "get", lambda name: quick)
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        parser = argparse.ArgumentParser()
        ncu.add_arguments(parser)
        status = ncu.run(parser.parse_args(arguments))
        printed = capsys.readouterr()
        return status, printed.out or printed.err

    return run


PLAN = ("--backend", "cuda", "--shape", "4,16,4096,128", "--causal")


def test_the_command_prints_reads_and_runs(command_line, monkeypatch, tmp_path):
    status, printed = command_line(*PLAN, "--metric", DURATION, "--arch", "sm80")
    assert status == 0
    assert f"--kernel-name 'regex:^(forward_bf16).*' --metrics {DURATION} " in printed
    assert json.loads(shlex.split(printed)[-1])["arch"] == "sm80"
    (tmp_path / "found.csv").write_text(RAW)
    status, printed = command_line("--read", str(tmp_path / "found.csv"))
    assert status == 0
    assert re.search(r"registers +- +255", printed)
    status, printed = command_line(*PLAN, "--read", str(tmp_path / "found.csv"))
    assert re.search(r"registers +250 +255", printed)
    tool = tmp_path / "ncu"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/found.csv\n")
    tool.chmod(0o755)
    monkeypatch.setattr(ncu, "find_ncu", lambda: str(tool))
    assert command_line(*PLAN, "--run") == (1, "python -m multiattn ncu: there is no GPU here that torch can use\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ncu, "detect", lambda device: SM90)
    assert command_line(*PLAN, "--run") == (0, printed)
    status, printed = command_line(*PLAN, "--run", "--arch", "sm80")
    assert (status, "allowed with --run: sm90" in printed) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((*PLAN, "--run"), 1, "there is no ncu: not on PATH"),
        (("--read", "no_such.csv"), 1, "no_such.csv: cannot be read: No such file"),
        (("--backend", "cuda", "--shape", "0,16,4096,128"), 2, "allowed one that needs a kernel"),
        (("--backend", "cuda", "--shape", "1,16,0,128"), 2, "allowed one that needs a kernel"),
        ((*PLAN, "--kv-len", "0"), 2, "allowed one that needs a kernel"),
        ((), 2, "--read alone"),
        (PLAN[:2], 2, "got one of them; allowed both"),
        ((*PLAN, "--variant", "no_such"), 2, "variant: got 'no_such'"),
        (("--backend", "cuda", "--shape", "1,2,64,4096"), 2, "head_dim"),
        ((*PLAN, "--kv-heads", "3"), 2, "heads"),
    ],
)
def test_what_cannot_be_says_why(command_line, arguments, status, message):
    got, printed = command_line(*arguments)
    assert got == status
    assert printed.startswith("python -m multiattn ncu: ")
    assert message in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "ncu printed no table"), (b"\x7fELF\xff\xfe", "a file that is no text"), (b"\0\0", "no table")],
)
def test_a_file_that_is_not_of_ncu_is_named(command_line, tmp_path, content, message):
    path = tmp_path / "wrong.csv"
    path.write_bytes(content)
    status, printed = command_line("--read", str(path))
    assert status == 1
    assert printed.startswith(f"python -m multiattn ncu: {path}: ")
    assert message in printed


def test_launches_of_one_name_are_kept_apart():
    found = ncu.read_launches(RAW)
    assert [(it.kernel, it.arch, it.metrics[DURATION].value) for it in found] == [
        ("forward_bf16", "sm90", 1234567),
        ("convert_dq", "sm90", 12.5),
        ("convert_dq", "sm90", 13.5),
    ]
    assert (found[0].block, found[0].grid) == ("(128, 1, 1)", "(512, 1, 1)")
    assert [(it.kernel, len(it.metrics)) for it in ncu.read_launches(DETAILS)] == [("forward_bf16", 2)]


def test_the_devices_own_attributes_are_left_out():
    """Nsight Compute's raw page has hundreds of them; a metric that was asked for by name is shown."""
    noise = {
        "device__attribute_sm_count": Measured(value=132, unit=""),
        "lts__t_bytes.sum": Measured(value=7, unit="byte"),
    }
    rows = {"kernel": {METRICS["duration"]: Measured(value=5, unit="ns"), **noise}}
    assert "duration" in report(rows)
    assert "device__attribute" not in report(rows)
    assert "lts__t_bytes.sum" not in report(rows)
    assert "lts__t_bytes.sum" in report(rows, (), ["lts__t_bytes.sum"])
