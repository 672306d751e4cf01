"""bench's tuning, host table, demo and command line."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import bench_fakes as fakes
import pytest
import torch
from targets_fakes import entry, refused

from bench import cli, host, tune
from bench import options as shared
from bench.contenders import Ours, RefusedError, our_providers
from bench.matrix import SUITES
from bench.results import NO_GPU, load
from multiattn.inspect import cli as targets_cli
from multiattn.inspect.pool import Outcome
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get
from multiattn.plan.config import Config
from multiattn.plan.support import Reason, Unsupported
from multiattn.tune import check as checking

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Config):
    pass


# ---------------------------------------------------------------- tuning


def test_tuning_ranks_what_ran_and_tells_what_failed(monkeypatch, tmp_path, capsys):
    eager = get("reference").forward.variants[0]
    configs = [Choice(tile_m=tile_m, tile_n=16) for tile_m in (16, 32, 64)]

    def fits(problem, arch, config):
        small = config.tile_m < 64
        return () if small else (Reason(code="config", got="tile_m=64", allowed="less"),)

    variant = replace(eager, fits=fits)
    forward = replace(get("reference").forward, variants=(variant,), candidates=lambda *_: configs)
    backend = replace(get("reference"), forward=forward)
    monkeypatch.setattr("multiattn.plan.backend.get", lambda name: backend)
    monkeypatch.setattr(checking, "run_isolated", run_here)
    monkeypatch.setattr(checking, "RAGGED", ((40, 2),))
    monkeypatch.setattr(tune, "find_peers", lambda names: (fakes.peer(tune.YARDSTICK),))
    monkeypatch.setattr(tune.Machine, "current", lambda: fakes.machine())
    monkeypatch.setattr(shared, "SUITES", {**SUITES, "smoke": (fakes.CELL,)})
    words = ["tune", "--backend", "cuda", "--seq", "48", "--out", str(tmp_path), "--suite", "smoke", "--finals", "1"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "config: got tile_m=64; allowed less" in said
    assert "RuntimeError: broken" in said
    assert "cuda/eager (rule)" in said
    (path,) = tmp_path.iterdir()
    rows = {row.contender: row for row in load(path)}
    assert set(rows) == {"cuda/eager", "cuda/eager tile_m=32 tile_n=16", tune.YARDSTICK}
    assert rows["cuda/eager"].measured.rounds == rows[tune.YARDSTICK].measured.rounds == tune.FINAL_BUDGET.rounds
    assert rows["cuda/eager tile_m=32 tile_n=16"].plan["config"] == {"tile_m": 32, "tile_n": 16}
    with pytest.raises(SystemExit):
        cli.main([*words, "--variant", "wgma"])
    assert "--variant: got wgma; cuda has none of them" in capsys.readouterr().err


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("feature", ["packed_equal", "packed_mixed", "packed_one_long"])
def test_candidates_for_packed_batches_are_checked_at_short_ones_too(feature, direction, monkeypatch):
    monkeypatch.setattr(checking, "RAGGED", ((200, 16), (300, 7)))
    cell = replace(SUITES["packed"][0], heads=2, seq=96, feature=feature, direction=direction)
    (ours,) = tune.candidates("reference", cell, ARCHS["cpu"])
    assert tune.check_candidate(tune.Candidate(ours=ours, cell=cell, arch=ARCHS["cpu"], device="cpu"))


def run_here(function, items, **_):
    """`run_isolated` in this process, with one candidate that breaks."""
    for item in items:
        try:
            broken = item.ours.config is not None and item.ours.config.tile_m == 16
            error = "RuntimeError: broken" if broken else "" if function(item) else "?"
        except Unsupported as refusal:
            error = str(refusal.reasons[0])
        yield Outcome(item=item, error=error)


def test_what_finds_no_memory_beside_others_is_checked_alone(monkeypatch):
    needs = {16: 1, 32: 3, 64: 9}  # shares of the memory, of which each of `jobs` processes has its part of 9

    def run(function, items, *, jobs, **_):
        for item in items:
            fits = needs[item.ours.config.tile_m] * jobs < 9
            yield Outcome(item=item, error="" if fits else "torch.OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(checking, "run_isolated", run)
    ours = [Ours(backend="cuda", config=Choice(tile_m=tile_m, tile_n=16)) for tile_m in needs]
    wanted = [tune.Candidate(ours=it, cell=fakes.CELL, arch=ARCHS["cpu"], device="cpu") for it in ours]
    found = checking.check_all(tune.check_candidate, wanted, jobs=4, timeout_s=1)
    errors = {it.item.ours.config.tile_m: it.error.partition(":")[0] for it in found}
    assert errors == {16: "", 32: "", 64: "torch.OutOfMemoryError"}


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dim", "77"], "widths: got 77; this suite has 64, 128, 256"),
        (["--variant", "wide"], "--variant: got 'wide'; allowed all, or of fwd one of triton/"),
        (["--backend", "none", "--peer", "none"], "leaves nothing to time"),
        (["--suite", "backward", "--regime", "graph"], "--regime graph: got direction bwd; allowed fwd"),
        (["--rounds", "0"], "argument --rounds: got 0; allowed whole numbers from 1 on"),
        (["--sample-ms", "nan"], "argument --sample-ms: got nan; allowed numbers above 0"),
        (["tune", "--direction", "forward"], "--direction: got 'forward'; allowed fwd, bwd, fwdbwd"),
        (["--out", "/proc/none"], "/proc/none"),
        (["compare", "a.json", "b.json"], "a.json: No such file"),
        (["record", "--sample"], "--sample: got it without --check; allowed with it"),
        (["decode", "--backends", "cublas"], "--backends: got 'cublas'; allowed none, triton, cutile, cuda"),
        (["decode", "--cells", "dense", "--cells", "H7 dense"], "--cells: got 'H7 dense'; allowed words as in"),
        (["scaling", "--heads", "12"], "--heads-kv: got 8; allowed divisors of --heads 12"),
        (["scaling", "--head-dim", "96"], "--head-dim: got 96; "),
    ],
)
def test_wrong_arguments_say_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_stored_command_is_the_given_one_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli.Machine, "current", lambda: fakes.machine())
    reasons = (Reason(code="arch", got="cpu", allowed="sm90"),)

    def prepare(*_):
        raise RefusedError(reasons)

    monkeypatch.setattr(Ours, "prepare", prepare)
    given = ["--suite", "smoke", "--head-dim", "64", "--peer", "none", "--backend", "cuda", "--out", str(tmp_path)]
    assert cli.main(given) == 1
    assert "cuda was asked for and nothing of it was measured: arch: got cpu" in capsys.readouterr().out
    assert cli.idle_backends([fakes.row("triton/pointer", 1.0)], ("triton",)) == []
    (command,) = {row.command for row in load(tmp_path / "smoke.json")}
    assert command == f"python -m bench run {' '.join(given)} --fresh --out out/bench/again"
    again = cli._parser().parse_args(command.split()[3:])
    assert (again.out, again.fresh, list(again.head_dim)) == (Path(shared.AGAIN), True, [(64, 64)])


def test_each_direction_is_a_job_with_its_own_variants():
    words = ["run", "--suite", "smoke", "--direction", "fwdbwd,fwd", "--backend", "cuda", "--peer", "none"]
    options = cli._parser().parse_args(words)
    options.given = words
    jobs = cli._jobs(options)
    assert [{cell.direction for cell in job.cells} for job in jobs] == [{"fwdbwd"}, {"fwd"}]
    assert jobs[0].providers == our_providers(("cuda",), direction="bwd")
    assert [provider.name for provider in jobs[1].providers] == ["cuda"]


@needs_no_gpu
@pytest.mark.parametrize("backend", ["cuda", "none"])
def test_without_a_gpu_a_run_compiles_instead(backend, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cli, "run_multiattn", lambda arguments: asked.append(arguments) or 1)
    arguments = ["--suite", "smoke", "--head-dim", "64", "--out", str(tmp_path), "--backend", backend]
    assert cli.main(arguments) == int(backend == "cuda")  # as a compiler failed
    assert [it[:3] for it in asked] == ([["compile", "--backend", "cuda"]] if backend == "cuda" else [])
    assert all(NO_GPU in row.reasons for row in load(tmp_path / "smoke.json"))
    out = capsys.readouterr().out
    assert out.count("gpu: got none on this machine") == 1
    assert "No timing: gpu: got none on this machine" in out


@needs_no_gpu
def test_pytest_collects_benchmarks_alone_and_times_the_host_without_a_gpu():
    command = [sys.executable, "-m", "pytest", "--benchmark-only", "-p", "no:cacheprovider", "--bench-suite", "smoke"]
    command += ["--benchmark-max-time", "0.001", "--benchmark-min-rounds", "1"]
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=cli.ROOT, env=alone, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gpu: got none on this machine") == 1
    assert "12 passed, 48 deselected" in done.stdout
    assert "SKIPPED" not in done.stdout
    assert "tests/" not in done.stdout
    for named in ("cuda forward sm90", "fmha with grad", "forward sm80, other tensors", "Median"):
        assert named in done.stdout, named


@needs_no_gpu
def test_the_demo_runs_every_part_and_writes_one_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets_cli.build, "build", lambda wanted, **_: iter([entry(), refused()]))
    asked = []

    def parity(arguments):
        asked.extend(arguments)
        folder = Path(arguments[-1])
        folder.mkdir()
        (folder / "parity.json").write_text(
            json.dumps({"verdict": "FAILED: 1 <of 2>", "failures": ["x"], "results": []})
        )
        return 1

    monkeypatch.setattr(cli, "run_parity", parity)
    assert cli.main(["demo", "--jobs", "1", "--out", str(tmp_path)]) == 1  # as parity says that it failed
    assert asked == ["--jobs", "1", "--variants", "turns", "--out", str(tmp_path / "parity")]
    page = (tmp_path / "report.html").read_text()
    for part in (
        "No GPU here: speeds below were recorded on H200",
        "Parity FAILED on this machine: 1 &lt;of 2&gt;",
        "Parity passed on H200",
        "Not run on this machine",
        '"just now"',
    ):
        assert part in page, part
    out = capsys.readouterr().out
    assert "Parity FAILED on this machine" in out
    assert f"Written: {tmp_path / 'report.html'}" in out


# ---------------------------------------------------------------- host


def test_a_host_table_comes_back_from_its_file(tmp_path):
    costs = (
        *(host.HostCost(contender="cuda", kind=kind, variant="wgmma", call_us=12.34) for kind in host.KINDS),
        *(host.HostCost(contender="triton", kind=kind, reasons=(NO_GPU,)) for kind in host.KINDS),
    )
    table = host.HostTable(cell=host.CELL, environment=fakes.SETUP, costs=costs)
    table.save(tmp_path / "host.json")
    assert host.load(tmp_path / "host.json") == table
    assert [line.split()[:2] for line in table.table().splitlines()[2:]] == [["cuda", "12.3"], ["triton", "gpu:"]]


def test_the_host_calls_do_what_they_are_called():
    tensors = host.CELL.tensors("cpu")
    plain, with_grad, training, in_graph = (host.call_of(host.SDPA, kind, tensors)() for kind in host.KINDS)
    assert [plain.requires_grad, in_graph.requires_grad] == [False, False]
    assert with_grad.requires_grad
    assert [grad.shape for grad in training] == [tensor.shape for tensor in tensors]
