"""What ncu prints, as it prints it; where it is found; and the child that it watches."""

import json

import bench_fakes as fakes
import bench_ladder_fakes as ladders
import pytest
import torch
from bench_ladder_fakes import CELL

from bench import ladder_child, ladder_ncu
from bench.ladder_ncu import METRIC, ProfilerError, command, find_ncu, parse_csv, profile, request_of
from bench.ladder_rungs import Rung
from multiattn.targets import ncu

RUNGS = tuple(Rung(backend="cuda", variant=name) for name in ("split_q", "split_kv", "split_q+swizzle_q"))

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(place, kernel, value, metric=METRIC):
    return (
        f'"{place}","4711","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(512, 1, 1)","0","9.0",'
        f'"Command line profiler metrics","{metric}","","{value}"'
    )


PRINTED = "\n".join(
    [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "forward_split_q" - 0: 0%....50%....100% - 1 pass',
        "whatever the child says",
        "==PROF== Disconnected from process 4711",
        HEAD,
        line(0, "forward_split_q", "235,339,776"),
        line(1, "forward_split_q_swizzle_q(multiattn::ForwardParams)", "0"),
        line(2, "forward_split_kv", "n/a"),
        line(3, "forward_split_kv", "12", metric="sm__cycles_elapsed.max"),
    ]
)


def test_the_table_of_ncu_is_read():
    assert parse_csv(PRINTED) == {"forward_split_q": 235339776, "forward_split_q_swizzle_q": 0}


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("", "ncu printed no table"),
        (
            "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
            "Performance Counters on the target device 0.",
            "ERR_NVGPUCTRPERM - The user does not have permission",
        ),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.", "No kernels were profiled"),
        (f"{HEAD}\n{line(0, 'forward', '12', metric='other')}", "ncu printed no value of sm__sass_l1tex"),
    ],
)
def test_what_ncu_does_not_count_it_says(printed, message):
    with pytest.raises(ProfilerError, match=message):
        parse_csv(printed)


def test_ncu_is_looked_for_on_the_path_then_where_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(ncu.shutil, "which", lambda name: f"/bin/{name}")
    assert find_ncu() == "/bin/ncu"
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "TOOLKIT", tmp_path / "cuda" / "ncu")
    monkeypatch.setattr(ncu, "PRODUCTS", tmp_path / "products")
    assert find_ncu() is None
    with pytest.raises(ProfilerError, match="there is no ncu"):
        profile(RUNGS, CELL)
    for version in ("2024.3.2", "2025.10.0", "2025.9.1"):
        folder = tmp_path / "products" / version
        folder.mkdir(parents=True)
        (folder / "ncu").write_text("")
    assert find_ncu() == str(tmp_path / "products" / "2025.10.0" / "ncu")


def test_one_run_of_ncu_watches_one_child(monkeypatch, tmp_path):
    """A stand-in for ncu, which prints what the real one did, once it has seen what the child shall read."""
    tool = tmp_path / "ncu"
    (tmp_path / "printed.csv").write_text(PRINTED)
    script = ("#!/bin/sh", f'echo "$@" > {tmp_path}/arguments', "for last; do :; done",
              f'cp "$last" {tmp_path}/request', f"cat {tmp_path}/printed.csv")  # fmt: skip
    tool.write_text("\n".join(script) + "\n")
    tool.chmod(0o755)
    monkeypatch.setattr(ladder_ncu, "find_ncu", lambda: str(tool))
    assert profile(RUNGS, CELL)["forward_split_q"] == 235339776
    told = (tmp_path / "arguments").read_text()
    assert f"--csv --profile-from-start off --metrics {METRIC}" in told
    assert "-m bench.ladder_child" in told
    assert json.loads((tmp_path / "request").read_text()) == json.loads(request_of(RUNGS, CELL))
    assert command("ncu", tmp_path)[0] == "ncu"


def test_a_profiler_that_hangs_is_given_up(monkeypatch, tmp_path):
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(ladder_ncu, "find_ncu", lambda: str(tool))
    with pytest.raises(ProfilerError, match=r"not done within 0.2 s"):
        profile(RUNGS, CELL, timeout_s=0.2)


def test_the_child_launches_each_rung_once_between_start_and_stop(monkeypatch, tmp_path, capsys):
    ladders.install(monkeypatch)
    request = tmp_path / "request.json"
    request.write_text(request_of(RUNGS, CELL))
    monkeypatch.setattr(ladder_child, "gpu_arch", lambda: None)
    assert ladder_child.main([str(request)]) == 1
    assert "no GPU" in capsys.readouterr().err
    happened = []
    monkeypatch.setattr(ladder_child, "gpu_arch", lambda: fakes.machine().arch)
    tensors = CELL.tensors("cpu")
    monkeypatch.setattr(type(CELL), "tensors", lambda cell, device: tensors)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: happened.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: happened.append("stop"))
    assert ladder_child.main([str(request)]) == 0
    assert happened == ["start", "stop"] * 2  # the illegal point has nothing to launch
