"""bench's processes, compile table, tuning, host table and command line."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial

import bench_fakes as fakes
import pytest
import torch

from bench import cli, compile_table, host, tune
from bench.compile_table import Entry, Target, compile_all, targets
from bench.environment import NO_GPU
from bench.matrix import SUITES
from bench.results import dumps, load
from multiattn.arch import ARCHS, GPU_ARCHS
from multiattn.backend import BACKENDS, Plan, get
from multiattn.config import Config
from multiattn.support import Reason

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


def test_the_compile_table_is_the_product():
    wanted = targets()
    assert len(wanted) == len(set(wanted)) == len(BACKENDS) * len(GPU_ARCHS)
    assert len(targets(("cuda",), ("sm90",), head_dims=(64, 128))) == 2


def compile_fake(target):
    if target.arch == "sm80":
        raise RuntimeError("ptxas: out of luck")
    if target.arch == "sm86":
        return Entry(target=target, ok=False, reasons=(Reason(code="arch", got="sm86", allowed="sm90"),))
    return Entry(target=target, ok=True, plan="full: tile", seconds=1.25, registers=168)


def test_a_compile_entry_is_ok_or_says_why_not(tmp_path):
    wanted = targets(("cuda",), ("sm80", "sm86", "sm90"))
    entries = list(compile_all(wanted, jobs=1, timeout_s=60, function=compile_fake))
    text = compile_table.table(entries)
    assert [it.text for it in compile_table.ordered(entries)] == [
        "RuntimeError: ptxas: out of luck",
        "arch: got sm86; allowed sm90",
        "ok, 1.25 s",
    ]
    assert "168" in text
    compile_table.save(entries, tmp_path / "compile.json")
    assert compile_table.load(tmp_path / "compile.json") == compile_table.ordered(entries)
    with pytest.raises(ValueError, match="an entry is ok"):
        Entry(target=Target(backend="cuda", arch="sm90"), ok=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Config):
    pass


def test_tuning_ranks_what_ran_and_keeps_what_failed(monkeypatch, tmp_path):
    eager = get("reference").forward.variants[0]
    configs = [Choice(tile_m=tile_m, tile_n=16) for tile_m in (16, 32, 64)]

    def fits(problem, arch, config):
        small = config.tile_m < 64
        return () if small else (Reason(code="config", got="tile_m=64", allowed="less"),)

    variant = replace(eager, fits=fits)
    forward = replace(get("reference").forward, variants=(variant,), candidates=lambda *_: configs)
    backend = replace(get("reference"), forward=forward)
    monkeypatch.setattr("multiattn.backend.get", lambda name: backend)
    monkeypatch.setattr(tune, "run_isolated", run_here)
    monkeypatch.setattr(tune, "find_peers", lambda names: (fakes.peer(tune.YARDSTICK),))
    said = []
    swept = tune.tune(
        "reference", [fakes.CELL], fakes.machine(), jobs=1, timeout_s=1, budget=fakes.BUDGET, say=said.append
    )
    ((cell, trials),) = swept
    assert cell == fakes.CELL
    by_name = {trial.name: trial for trial in trials}
    assert by_name["reference/eager tile_m=64 tile_n=16"].failure == "config: got tile_m=64; allowed less"
    assert by_name["reference/eager tile_m=16 tile_n=16"].failure == "RuntimeError: broken"
    assert by_name["reference/eager tile_m=32 tile_n=16"].tflops
    assert by_name[tune.YARDSTICK].tflops
    assert said[0] == "reference: 3 candidates in 1 cells"
    text = tune.table(trials)
    assert "RuntimeError: broken" in text
    tune.save(trials, tmp_path / "reference.json")


def run_here(function, items, **_):
    """`run_isolated` in this process, with one candidate that breaks."""
    for item in items:
        if item.plan.config is not None and item.plan.config.tile_m == 16:
            yield tune.Outcome(item=item, seconds=0.1, error="RuntimeError: broken")
        else:
            yield tune.Outcome(item=item, seconds=0.1, result=function(item))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_offers_candidates_that_plan(backend):
    cell = SUITES["floors"][0]
    found = tune.candidate_plans(backend, cell, ARCHS["sm90"])
    plans = [it for it in found if isinstance(it, Plan)]
    assert plans
    assert all(it.failure for it in found if not isinstance(it, Plan))


@needs_no_gpu
def test_the_host_table_says_why_there_is_none(tmp_path):
    costs = host.host_costs(None, synchronize=lambda: None)
    assert [cost.reasons for cost in costs] == [(NO_GPU,)] * (len(BACKENDS) + 1)
    host.save(costs, fakes.SETUP, tmp_path / "host.json")
    assert host.load(tmp_path / "host.json") == (fakes.SETUP, costs)


@needs_no_gpu
def test_the_matrix_without_a_gpu(tmp_path, capsys):
    arguments = ["--suite", "smoke", "--head-dim", "64", "--no-compile", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    rows = load(tmp_path / "smoke.json")
    assert rows
    assert all(NO_GPU in row.reasons for row in rows)
    assert "No timing: gpu: got none on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dim", "77"], "--head-dim: got 77; this suite has 64, 128, 256"),
        (["--backend", "cudnn"], "--backend: got cudnn; allowed none, or some of triton, cutile, cuda"),
        (["--peer", "fa5"], "--peer: got fa5; allowed none, or some of sdpa-flash"),
        (["--suite", "all"], "--suite: got 'all'; allowed standard, seed, floors, smoke"),
        (["--backend", "none", "--peer", "none"], "leaves nobody to time"),
        (["--rounds", "0"], "rounds, sample_ms and warmup_ms must be positive"),
        (["--compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@needs_no_gpu
def test_pytest_bench_skips_with_its_reason():
    command = [sys.executable, "-m", "pytest", "bench", "--benchmark-only", "-p", "no:cacheprovider", "-q"]
    command += ["--bench-suite", "smoke"]
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=cli.ROOT, env=alone, capture_output=True, text=True, check=False, timeout=120)
    assert "gpu: got none on this machine" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


@needs_no_gpu
def test_the_demo_runs_every_part_and_writes_one_page(tmp_path, monkeypatch):
    monkeypatch.setattr(cli.compile_table, "compile_all", lambda wanted, **_: map(compile_fake, wanted[2:4]))
    asked = []

    def parity(arguments):
        asked.extend(arguments)
        return 1

    demo = partial(cli.demo.demo, parity=parity)
    monkeypatch.setattr(cli.demo, "demo", demo)
    assert cli.main(["demo", "--jobs", "1", "--out", str(tmp_path)]) == 1  # as parity says that it failed
    assert asked == ["--jobs", "1", "--out", str(tmp_path / "parity")]
    assert "Compiled for every target" in (tmp_path / "report.html").read_text()
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {
        "compile.json",
        "floors.json",
        "floors.md",
        "floors.html",
    }


def test_floors_of_a_file(tmp_path, capsys):
    path = tmp_path / "floors.json"
    times = {"cutile": 1.0, "triton": 1.0, "cuda": 1.0, "sdpa-cudnn": 1.0, "sdpa-flash": 1.0}
    rows = [fakes.row(name, time_ms, cell=cell) for cell in SUITES["floors"] for name, time_ms in times.items()]
    path.write_text(dumps("floors", rows))
    assert cli.main(["floors", str(path)]) == 0
    assert capsys.readouterr().out.count("pass") == 6
    slow = [fakes.row(row.contender, 9.0, cell=row.cell) if row.contender == "cuda" else row for row in rows]
    path.write_text(dumps("floors", slow))
    assert cli.main(["floors", str(path)]) == 1
    assert cli.main(["compare", str(path), str(path), "--all"]) == 0
    assert "10 compared; of ours 0 slower" in capsys.readouterr().out
    assert cli.main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert "TFLOPS over N" in (tmp_path / "page.html").read_text()


def test_the_newer_of_two_suites_with_the_floors_counts(tmp_path):
    old, new, other = tmp_path / "standard.json", tmp_path / "floors.json", tmp_path / "seed.json"
    for age, path in enumerate((new, other, old)):
        path.write_text("")
        os.utime(path, (100 - age, 100 - age))
    assert cli._floor_files([old, new, other]) == [new]
