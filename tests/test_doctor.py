"""The doctor says what works on a machine, why the rest does not, and one next step; other machines are made up."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn.__main__ import main
from multiattn.cuda import tools
from multiattn.inspect import doctor
from multiattn.inspect.doctor import COMPILE, ON_CPU, Findings, FoundDevice, next_step
from multiattn.plan.support import Reason

H200 = FoundDevice(device="cuda:0", title="NVIDIA H200", arch="sm90", is_measured=True)
A10 = FoundDevice(device="cuda:1", title="NVIDIA A10", arch="sm86", is_measured=False)
T4 = FoundDevice(device="cuda:0", title="Tesla T4", arch="sm75", is_measured=False)
MISSING = (Reason(code="module", got="none", allowed="one", hint="pip install 'multiattn[cutile]'"),)
BROKEN = (Reason(code="compiler", got="no g++", allowed="g++ 10"),)
OLD = (Reason(code="driver", got="CUDA 12.4", allowed="a driver for CUDA 13.0 or newer (r580)"),)


def machine(*devices, lacks=(), **given):
    """A machine on which all backends work, but those of `lacks`: what they lack, and for what."""
    whats = ON_CPU, COMPILE, *(f"run on {it.device}" for it in devices)
    can = {name: dict.fromkeys(whats, ()) for name in multiattn.BACKENDS}
    for backends, lacking, reasons in lacks:
        for backend in backends.split():
            can[backend] |= dict.fromkeys(lacking, reasons)
    return Findings(devices=devices, can=can, **given)


ALL, WORK, ALL_OF_IT = "triton cutile cuda", (ON_CPU, COMPILE), "pip install 'multiattn[all]'"


@pytest.mark.parametrize(
    ("found", "command", "why"),
    [
        (machine(lacks=[(ALL, WORK, MISSING)]), ALL_OF_IT, "no backend has the packages"),
        (machine(lacks=[("triton cutile", WORK, MISSING), ("cuda", [COMPILE], MISSING)]), ALL_OF_IT, "no backend"),
        (machine(H200, lacks=[(ALL, WORK, MISSING)]), ALL_OF_IT, "no backend"),
        (machine(lacks=[("cutile", WORK, MISSING)]), "pip install 'multiattn[cutile]'", "cutile: packages are missing"),
        (machine(H200, A10, lacks=[("cutile cuda", WORK, MISSING)]), "'multiattn[cutile,cuda]'", "cutile and cuda: "),
        (machine(A10, lacks=[("cutile", ["run on cuda:1"], OLD)]), "nvidia-smi", "CUDA 12.4; it takes a driver"),
        (machine(H200, A10), "python -m multiattn tune --shape", "no measurement of NVIDIA A10 is on record"),
        (machine(H200), "python -m multiattn explain --shape", "all is well"),
        (machine(), "backend='triton'", "there is no GPU"),
        (machine(T4), "backend='triton'", "no kernel is for this GPU"),
        (machine(lacks=[("triton", [ON_CPU], BROKEN)]), "backend='cutile'", "there is no GPU"),
        (machine(lacks=[(ALL, [ON_CPU], BROKEN)]), "python -m multiattn compile --arch sm90", "nothing runs here"),
        (machine(lacks=[(ALL, WORK, BROKEN)]), "pip install --force-reinstall 'multiattn[all]'", "the reasons above"),
        (machine(lacks=[(ALL, WORK, MISSING)], is_linux=False), "multiattn.fmha(q, q, q", "has packages for"),
    ],
)
def test_the_next_step(found, command, why):
    step = next_step(found)
    assert command in step.command
    assert why in step.why


@pytest.mark.parametrize(
    ("cuda", "command", "why"),
    [
        (None, "pip install --force-reinstall torch", "is built without CUDA"),
        ("13.0", "nvidia-smi", "is built for CUDA 13.0 and cannot use the driver that this names: update the driver"),
    ],
)
def test_a_torch_that_cannot_use_the_driver(cuda, command, why, monkeypatch):
    """To install torch again would help no older driver."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    step = next_step(machine(has_idle_driver=True))
    assert step.command == command
    assert why in step.why


@pytest.mark.parametrize(
    ("files", "hides", "has"),
    [(("nvidia0", "nvidiactl"), False, True), (("nvidiactl",), False, False), (("nvidia0",), True, False)],
)
def test_a_gpu_that_is_hidden_or_not_given_to_a_container_is_none(files, hides, has, tmp_path, monkeypatch):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(doctor, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hides:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.examine().has_idle_driver == has


def test_the_steps_for_a_machine_without_a_gpu_work_here(capsys):
    for found in (machine(), machine(lacks=[(ALL, WORK, MISSING)], is_linux=False)):
        python, option, code = shlex.split(next_step(found).command)
        assert (python, option) == ("python", "-c")
        exec(code, {})
        assert capsys.readouterr().out == "torch.Size([1, 2, 64, 32])\n"


@pytest.mark.parametrize("found", [machine(H200), machine(lacks=[(ALL, [ON_CPU], BROKEN)])])
def test_commands_of_ours_take_the_options_of_a_step(found):
    from multiattn.__main__ import _parser

    _, _, module, *words = shlex.split(next_step(found).command)
    assert module == "multiattn"
    _parser().parse_args(words)


def test_it_ends_with_the_next_step_and_fails_where_nothing_works(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: machine(H200, lacks=[("cuda", [ON_CPU], BROKEN)]))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "  cuda:0: NVIDIA H200, sm90\n" in printed
    assert "  run on CPU tensors: no\n    compiler: got no g++; allowed g++ 10\n" in printed
    *_, step, why = printed.splitlines()
    assert step.startswith("Next: python -m multiattn explain")
    assert why.startswith("  all is well")
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["next"]["command"] == step.removeprefix("Next: ")
    assert told["devices"] == ["cuda:0: NVIDIA H200, sm90"]
    monkeypatch.setattr(doctor, "examine", lambda: machine(lacks=[(ALL, WORK, MISSING)]))
    assert main(["doctor"]) == 1


def test_a_reason_is_one_line_whatever_a_library_says(monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not here")

    def fail(name):
        raise pathfinder.DynamicLibNotFoundError(f"no {name}: here,\n nor there\n")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", fail)
    (reason,) = tools.probe_nvrtc.__wrapped__()
    assert reason.got == "no NVRTC: no nvrtc: here, nor there"


def test_this_machine(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{backend}: " in printed for backend in multiattn.BACKENDS)
    assert "run on CPU tensors: yes" in printed
    assert "\nNext: " in printed


@pytest.mark.parametrize(
    ("title", "tuned", "is_measured"),
    [("NVIDIA H200", None, True), ("NVIDIA H200 NVL", None, False), ("NVIDIA H200 NVL", object(), True)],
)
def test_a_gpu_is_measured_under_its_whole_name_or_by_its_user(title, tuned, is_measured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: title)
    monkeypatch.setattr(doctor, "detect", lambda device: doctor.ARCHS["sm90"])
    monkeypatch.setattr(doctor, "tuning_for", lambda device: tuned)
    assert doctor._describe(torch.device("cuda", 0)) == replace(H200, title=title, is_measured=is_measured)


def test_a_reader_that_stops_early_is_no_error():
    """As of ``| head``: it ended with a message about a broken pipe."""
    command = [sys.executable, "-m", "multiattn", "explain", "--shape", "2,16,512,128", "--arch", "sm90"]
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(write)
    assert (found.returncode, found.stderr) == (141, "")
