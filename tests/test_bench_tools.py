"""bench's processes, compile table, tuning, host table and command line."""

import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass, replace
from functools import partial

import bench_fakes as fakes
import pytest
import torch
from targets_fakes import entry, refused

from bench import cli, environment, host, tune
from bench.environment import NO_GPU
from bench.matrix import SUITES
from bench.providers import Ours
from bench.results import dumps, load
from bench.test_bench import test_forward as bench_forward
from bench.timing import Sample, Timing
from multiattn.inspect import cli as targets_cli
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, Plan, get, make_plan
from multiattn.plan.config import Config
from multiattn.plan.support import Reason

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


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
    monkeypatch.setattr("multiattn.plan.backend.get", lambda name: backend)
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
    tune.save(tmp_path / "reference.json", trials, fakes.SETUP)
    kept = {it["name"]: it for it in json.loads((tmp_path / "reference.json").read_text())["trials"]}
    assert kept[tune.YARDSTICK]["tflops"] == by_name[tune.YARDSTICK].tflops
    assert kept["reference/eager tile_m=16 tile_n=16"]["failure"] == "RuntimeError: broken"
    again = tune.time_finalists(cell, trials, fakes.machine(), 1)
    assert {it.name for it in again} == set(by_name)
    assert tune.time_finalists(cell, [it for it in trials if it.failure], fakes.machine(), 1)[0].failure


def run_here(function, items, **_):
    """`run_isolated` in this process, with one candidate that breaks."""
    for item in items:
        if item.plan.config is not None and item.plan.config.tile_m == 16:
            yield tune.Outcome(item=item, seconds=0.1, error="RuntimeError: broken")
        else:
            yield tune.Outcome(item=item, seconds=0.1, result=function(item))


def test_what_finds_no_memory_beside_others_is_checked_alone(monkeypatch):
    plan = make_plan(get("reference"), fakes.CELL.problem, ARCHS["cpu"])
    plans = [replace(plan, config=Choice(tile_m=tile_m, tile_n=16)) for tile_m in (16, 32, 64)]
    needs = {16: 1, 32: 3, 64: 9}  # shares of the memory, of which each of `jobs` processes has its part of 9

    def run(function, items, *, jobs, **_):
        for item in items:
            fits = needs[item.plan.config.tile_m] * jobs < 9
            yield tune.Outcome(
                item=item, seconds=0.1, error="" if fits else "torch.OutOfMemoryError: CUDA out of memory"
            )

    monkeypatch.setattr(tune, "run_isolated", run)
    wanted = [(fakes.CELL, plan) for plan in plans]
    found = list(tune.prepare(wanted, fakes.machine(), jobs=4, timeout_s=1, spills=True))
    assert [(it.config.tile_m, it.failure.partition(":")[0]) for it in found] == [
        (16, ""),
        (32, ""),
        (64, "torch.OutOfMemoryError"),
    ]


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
    assert [cost.reasons for cost in costs] == [(NO_GPU,)] * len(host.KINDS) * (len(BACKENDS) + 1)
    host.save(costs, fakes.SETUP, tmp_path / "host.json")
    assert host.load(tmp_path / "host.json") == (fakes.SETUP, costs)
    assert host.measured_cell(tmp_path / "host.json") == host.CELL


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
        (
            ["--backend", "none", "--backend", "cuda"],
            "--backend: got none, cuda; allowed none alone, or some of triton",
        ),
        (["--peer", "fa5"], "--peer: got fa5; allowed none, or some of sdpa-flash"),
        (["--peer", "fa2", "--peer", "none"], "--peer: got fa2, none; allowed none alone, or some of sdpa-flash"),
        (["--suite", "all"], "--suite: got 'all'; allowed standard, between, heldout, seed, backward, floors, smoke"),
        (["--backend", "none", "--peer", "none"], "leaves nobody to time"),
        (["--suite", "backward", "--regime", "graph"], "--regime graph: got direction bwd; allowed fwd"),
        (["--rounds", "0"], "argument --rounds: got 0; allowed whole numbers from 1 on"),
        (["record", "--jobs", "0"], "argument --jobs: got 0; allowed whole numbers from 1 on"),
        (["--sample-ms", "nan"], "argument --sample-ms: got nan; allowed numbers above 0"),
        (["tune", "--direction", "forward"], "--direction: got forward; allowed fwd, bwd, fwdbwd"),
        (["tune", "--backend", "cuda", "--variant", "wgma"], "--variant: got wgma; allowed wgmma, split_q"),
        (["tune", "--timeout", "0"], "argument --timeout: got 0; allowed numbers above 0"),
        (["--out", "/proc/none"], "--out: cannot write to /proc/none"),
        (["--compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_the_default_command_and_compare(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Without a command it is run" in said
    assert "--compare A B" in said


def test_the_stored_command_is_whole_and_overwrites_nothing_recorded():
    given = (
        "run --suite seed --backend cuda --peer fa2 --peer flex --seq 1024 --causal --regime both --rounds 3 --seed 7"
    )
    options = cli._parser().parse_args([*given.split(), "--sample-ms", "2.5", "--jobs", "2"])
    command = cli.command_again(options)
    assert command == (
        "python -m bench run --suite seed --backend cuda --peer fa2 --peer flex --seq 1024 --causal --regime both "
        "--rounds 3 --sample-ms 2.5 --seed 7 --fresh --out out/bench/again"
    )
    assert cli.command_again(cli._parser().parse_args(command.split()[3:])) == command


@needs_no_gpu
@pytest.mark.parametrize("backend", ["cuda", "none"])
def test_without_a_gpu_a_run_compiles_instead(backend, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cli, "run_multiattn", lambda arguments: asked.append(arguments) or 1)
    arguments = ["--suite", "smoke", "--head-dim", "64", "--out", str(tmp_path), "--backend", backend]
    assert cli.main(arguments) == int(backend == "cuda")  # as a compiler failed
    assert [it[:3] for it in asked] == ([["compile", "--backend", "cuda"]] if backend == "cuda" else [])


def test_a_backend_of_which_nothing_was_measured_is_a_failure():
    refused = replace(fakes.row("cuda", 1.0), measured=None, reasons=(NO_GPU,), run="")
    rows = [fakes.row("triton/pointer", 1.0), refused]
    assert cli.idle_backends(rows, ("triton",)) == []
    (line,) = cli.idle_backends(rows, ("cuda", "triton"))
    assert line.startswith("cuda was asked for and nothing of it was measured: gpu: got none")


def test_a_run_on_a_gpu_fails_where_a_backend_measured_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli.Machine, "current", lambda: fakes.machine())
    monkeypatch.setattr(Ours, "why_not", lambda *_: (Reason(code="arch", got="cpu", allowed="sm90"),))
    arguments = ["--suite", "smoke", "--head-dim", "64", "--peer", "none", "--out", str(tmp_path), "--jobs", "1"]
    assert cli.main([*arguments, "--backend", "cuda"]) == 1
    assert "cuda was asked for and nothing of it was measured: arch: got cpu" in capsys.readouterr().out
    (command,) = {row.command for row in load(tmp_path / "smoke.json")}
    assert command.endswith(
        "--backend cuda --peer none --head-dim 64 --regime device --rounds 9 --sample-ms 8 --seed 0 "
        "--fresh --out out/bench/again"
    )


def test_pytest_bench_tells_what_is_host_bound():
    stand_in = types.SimpleNamespace(extra_info={})
    contender = types.SimpleNamespace(plan=None, detail="a fake")
    timing = Timing.of([Sample(time_ms=1.0, host_bound=True)], 1)
    bench_forward(fakes.CELL, "sdpa", contender, lambda _: timing, stand_in)
    assert stand_in.extra_info["host_bound"] is True


def test_a_host_cost_is_exactly_one_of_three():
    for outcome in ({}, {"call_us": 1.0, "error": "x"}):
        with pytest.raises(ValueError, match="a host cost is microseconds, or carries"):
            host.HostCost(contender="cuda", **outcome)
    good, bad = ("cuda", host.FORWARD), ("cuda", host.TRAINING)
    costs = host.time_in_turns({good: lambda: None, bad: lambda: 1 / 0}, lambda: None)
    assert costs[good].call_us > 0
    assert costs[bad].error == "ZeroDivisionError: division by zero"
    assert host.table(list(costs.values())).splitlines()[0].split("  ")[-1].strip() == "forward and backward [us]"


def test_a_call_in_a_graph_costs_what_the_device_takes():
    class Clock:
        """A device that takes 7 us for a call; its graphs are as long as what they were captured of."""

        def device(self, call, launches):
            return Sample(time_ms=0.007 * (call() or 1))

        def captured(self, call, launches):
            call()
            return lambda: launches

    good, bad = ("cuda", host.GRAPH), ("triton", host.GRAPH)
    costs = host.time_in_graphs({good: lambda: None, bad: lambda: 1 / 0}, Clock())
    assert costs[good].call_us == pytest.approx(7.0)
    assert costs[bad].error == "ZeroDivisionError: division by zero"


def test_a_host_table_without_kinds_of_call_is_of_forward(tmp_path):
    path = tmp_path / "host.json"
    host.save([host.HostCost(contender="cuda", call_us=1.0)], fakes.SETUP, path)
    data = json.loads(path.read_text())
    del data["costs"][0]["kind"]
    path.write_text(json.dumps({**data, "schema": 1}))
    (cost,) = host.load(path)[1]
    assert cost.kind == host.FORWARD
    assert "grad" not in host.table([cost])


def test_the_host_calls_do_what_they_are_called():
    tensors = host.CELL.tensors("cpu")

    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    plain, with_grad, training, in_graph = (host.call_of(kind, attention, tensors)() for kind in host.KINDS)
    assert [plain.requires_grad, in_graph.requires_grad] == [False, False]
    assert with_grad.requires_grad
    assert [grad.shape for grad in training] == [tensor.shape for tensor in tensors]


def test_without_a_checkout_what_is_written_goes_to_the_current_directory(tmp_path, monkeypatch):
    assert environment.is_clone()
    assert environment.workplace() == environment.ROOT
    monkeypatch.setattr(environment, "ROOT", tmp_path / "site-packages")
    monkeypatch.delenv("MULTIATTN_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment.is_clone, "__defaults__", (tmp_path / "site-packages",))
    assert environment.results_dir("NVIDIA H200") == tmp_path / "bench" / "results" / "h200"
    assert environment._commit() == "unknown"


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
    monkeypatch.setattr(targets_cli.build, "build", lambda wanted, **_: iter([entry(), refused()]))
    asked = []
    recorded = tmp_path / "standard.json"
    recorded.write_text(dumps("standard", [fakes.row(name, 1.0, cell=SUITES["floors"][0]) for name in ("cuda", "fa2")]))
    monkeypatch.setattr(cli, "recorded_files", lambda: [recorded])

    def parity(arguments):
        asked.extend(arguments)
        return 1

    demo = partial(cli.demo.demo, parity=parity)
    monkeypatch.setattr(cli.demo, "demo", demo)
    assert cli.main(["demo", "--jobs", "1", "--out", str(tmp_path)]) == 1  # as parity says that it failed
    assert asked == ["--jobs", "1", "--out", str(tmp_path / "parity")]
    page = (tmp_path / "report.html").read_text()
    assert "Compiled for every target" in page
    assert "Recorded: TFLOPS over N on NVIDIA H200, 2026-11-21, commit c0ffee" in page
    assert page.count("<svg") == 1
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {
        "compile.json",
        "compile_backward.json",
        "floors.json",
        "floors.md",
        "floors.html",
    }
